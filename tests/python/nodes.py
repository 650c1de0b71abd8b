"""Evaluates the text of a function's graph (strobe._graph) in plain Python, as include/strobe/operations.inc defines the operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strobe._graph import decoded

ARGUMENTS = ("SCORE", "BATCH", "HEAD", "QUERY", "KEY")


def wrapped(n: int) -> int:
    return (n + 2**63) % 2**64 - 2**63


def divided(x: float, y: float) -> float:
    if y:
        return x / y
    return math.nan if x == 0 or x != x else math.copysign(math.inf, x) * math.copysign(1, y)


def total(function: Callable[..., float]) -> Callable[..., float]:
    """The function, with IEEE's result where Python would raise an error."""

    def call(*x: float) -> float:
        try:
            return function(*x)
        except OverflowError:
            return math.inf
        except ValueError:
            return math.nan

    return call


def logarithm(function: Callable[[float], float]) -> Callable[[float], float]:
    return lambda x: -math.inf if x == 0 else total(function)(x)


def floored(x: Any, y: Any) -> Any:
    if isinstance(x, int):
        return wrapped(x // y) if y else 0
    return float(math.floor(x / y)) if y and math.isfinite(x / y) else divided(x, y)


def remainder(x: Any, y: Any) -> Any:
    if isinstance(x, int):
        return x % y if y else 0
    return total(lambda: math.nan if not y else x % y)()


def trunc_remainder(x: Any, y: Any) -> Any:
    if isinstance(x, int):
        return int(math.copysign(abs(x) % abs(y), x)) if y else 0
    return total(math.fmod)(x, y)


def extreme(choose: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: math.nan if x != x or y != y else choose(x, y)


def shifted_right(x: int, by: int) -> int:
    return x >> by if 0 <= by < 64 else -(x < 0)


def of_both_kinds(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *x: wrapped(function(*x)) if isinstance(x[0], int) else total(function)(*x)


_INTEGERS = {"ADD": lambda x, y: x + y, "SUBTRACT": lambda x, y: x - y, "MULTIPLY": lambda x, y: x * y, "NEGATE": lambda x: -x}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: of_both_kinds(function) for name, function in _INTEGERS.items()},
    "DIVIDE": divided,
    "FLOOR_DIVIDE": floored,
    "REMAINDER": remainder,
    "TRUNC_REMAINDER": trunc_remainder,
    "MINIMUM": extreme(min),
    "MAXIMUM": extreme(max),
    "ABSOLUTE": abs,
    "SIGN": lambda x: type(x)((x > 0) - (x < 0)),
    "POWER": lambda x, y: math.inf if x == 0 and y < 0 else total(math.pow)(x, y),
    "AND": lambda x, y: x & y,
    "OR": lambda x, y: x | y,
    "XOR": lambda x, y: x ^ y,
    "NOT": lambda x: not x if isinstance(x, bool) else ~x,
    "SHIFT_LEFT": lambda x, by: wrapped(x << by) if 0 <= by < 64 else 0,
    "SHIFT_RIGHT": shifted_right,
    "EQUAL": lambda x, y: x == y,
    "NOT_EQUAL": lambda x, y: x != y,
    "LESS": lambda x, y: x < y,
    "LESS_EQUAL": lambda x, y: x <= y,
    "GREATER": lambda x, y: x > y,
    "GREATER_EQUAL": lambda x, y: x >= y,
    "WHERE": lambda c, x, y: x if c else y,
    "TO_REAL": float,
    "TO_INTEGER": lambda x: int(x) if math.isfinite(x) else 0,
    "TO_BOOLEAN": bool,
    "EXP2": lambda x: total(math.pow)(2.0, x),
    **{name: logarithm(getattr(math, name.lower())) for name in ("LOG", "LOG2")},
    "LOG1P": lambda x: logarithm(math.log)(1 + x) if x == -1 else total(math.log1p)(x),
    "RSQRT": lambda x: divided(1.0, total(math.sqrt)(x)),
    "SIGMOID": lambda x: 1 / (1 + total(math.exp)(-x)),
    "FLOOR": lambda x: float(math.floor(x)) if math.isfinite(x) else x,
    "CEIL": lambda x: float(math.ceil(x)) if math.isfinite(x) else x,
    "TRUNC": lambda x: float(math.trunc(x)) if math.isfinite(x) else x,
    "ROUND": lambda x: float(round(x)) if math.isfinite(x) else x,
    "ARCCOSH_FROM_1": lambda x: math.acosh(max(x, 1.0)),
}
_OF_MATH = "EXP EXPM1 SQRT SIN COS TAN ASIN ACOS ATAN ATAN2 SINH COSH TANH ASINH ACOSH ATANH ERF ERFC"
FUNCTIONS |= {name: total(getattr(math, name.lower())) for name in _OF_MATH.split()}


def loaded(x: Any, indices: Sequence[int]) -> Any:
    """An element of a nested list; without indices, x itself."""
    for n in indices:
        x = x[min(max(n + len(x) if n < 0 else n, 0), len(x) - 1)]
    return x


def evaluate(text: str, arguments: Mapping[str, Any], captured: Sequence[Any] = ()) -> Any:
    """The result. arguments: values by the names in ARGUMENTS; captured: nested lists."""
    found: list[Any] = []
    for operation, inputs, more in decoded(text):
        x = [found[n] for n in inputs]
        if operation in arguments:
            found.append(arguments[operation])
        elif operation == "LOAD":
            found.append(loaded(captured[more], x))
        elif operation in ("REAL", "INTEGER", "BOOLEAN"):
            found.append(bool(more) if operation == "BOOLEAN" else more)
        else:
            found.append(FUNCTIONS[operation](*x))
    return found[-1]
