"""Packages that a part of the library needs and the rest does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

TORCH_EXTRA, NUMPY_EXTRA, TRANSFORMERS_EXTRA = "torch>=2.4", "numpy>=1.23", "transformers>=4.53"


@contextmanager
def needed_by(whom: str, requirement: str) -> Iterator[None]:
    """Of imports: what is said if the package is not there."""
    package = requirement.partition(">")[0]
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(f"{whom} needs {package}: pip install '{requirement}'", name=package) from error
