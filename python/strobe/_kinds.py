"""Of what kind a value is, and how a message shows it."""

from __future__ import annotations

import sys


def kind(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


def is_bool(x: object) -> bool:
    """Python's or NumPy's."""
    numpy = sys.modules.get("numpy")
    return isinstance(x, bool) or (numpy is not None and isinstance(x, numpy.bool_))


def shown(x: object) -> str:
    """What the caller gave, for a message: in one line that is not long."""
    try:
        text = " ".join(repr(x).split())
    except Exception:  # such as an integer of more digits than Python prints
        return kind(x)
    return text if len(text) <= 80 else f"{text[:77]}..."
