"""The kind of a value, and its text in a message."""

from __future__ import annotations

import sys


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
