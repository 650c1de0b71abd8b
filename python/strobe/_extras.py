"""Packages that only a part of the library needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

TORCH_EXTRA, NUMPY_EXTRA, TRANSFORMERS_EXTRA = "torch>=2.4", "numpy>=1.23", "transformers>=4.53"


@contextmanager
def needed_by(whom: str, requirement: str) -> Iterator[None]:
    """Surrounds imports: raises the remedy if the package is not installed."""
    package = requirement.partition(">")[0]
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(f"{whom} needs {package}: pip install '{requirement}'", name=package) from error
