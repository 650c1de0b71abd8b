"""Words for messages: a value in short, and what to do if a package is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

TORCH_EXTRA, NUMPY_EXTRA, TRANSFORMERS_EXTRA = "torch>=2.4", "numpy>=1.23", "transformers>=4.53"


def kind(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


def is_bool(x: object) -> bool:
    """Whether x is a bool of Python or NumPy."""
    numpy = sys.modules.get("numpy")
    return isinstance(x, bool) or (numpy is not None and isinstance(x, numpy.bool_))


def shown(x: object) -> str:
    """The caller's value for a message, in one short line."""
    try:
        text = " ".join(repr(x).split())
    except Exception:  # for example an integer with more digits than Python prints
        return kind(x)
    return text if len(text) <= 80 else f"{text[:77]}..."


@contextmanager
def needed_by(whom: str, requirement: str) -> Iterator[None]:
    """Surrounds imports: if the package is not installed, raises an error that says how to install it."""
    package = requirement.partition(">")[0]
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(f"{whom} needs {package}: pip install '{requirement}'", name=package) from error
