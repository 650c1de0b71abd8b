"""Elementwise functions of values (_graph.py), by PyTorch's names: what both recorders know beside the operators.

Where a function has a corner, its formula has PyTorch's derivative there: relu's is 0 at 0, clamp's is 1 at its bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ._graph import INTEGER, REAL, UnrecordableError, Value, promoted, where

_REAL = {
    **{name: name.upper() for name in ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan")},
    **{name: name.upper() for name in ("asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc")},
    "sigmoid": "SIGMOID",
}
_WHOLE = {"floor": "FLOOR", "ceil": "CEIL", "trunc": "TRUNC", "round": "ROUND"}


def _real(operation: str) -> Callable[[Value], Value]:
    return lambda x: x._real(operation)


def _whole(operation: str) -> Callable[[Value], Value]:
    return lambda x: x._whole(operation)


def sign(x: Value) -> Value:
    return x._each(lambda n: x.graph.add("SIGN", n)) if x.kind != "B" else x


def atan2(y: Value, x: Any) -> Value:
    return y._real("ATAN2", x)


def maximum(x: Value, y: Any) -> Value:
    return x._arithmetic("MAXIMUM", y)


def minimum(x: Value, y: Any) -> Value:
    return x._arithmetic("MINIMUM", y)


def fmax(x: Value, y: Any) -> Value:
    """The larger one, and of NaN and a number the number."""
    other = x.graph.of(y)
    return where(isnan(x), other, where(isnan(other), x, maximum(x, other)))


def fmin(x: Value, y: Any) -> Value:
    other = x.graph.of(y)
    return where(isnan(x), other, where(isnan(other), x, minimum(x, other)))


def fmod(x: Value, y: Any) -> Value:
    return x._arithmetic("TRUNC_REMAINDER", y)


def truncated_division(x: Value, y: Any) -> Value:
    if promoted(x.kind, x.graph.of(y).kind) == REAL:
        return (x / y)._real("TRUNC")
    return (x - fmod(x, y)) // y


def isnan(x: Value) -> Value:
    return x != x if x.kind == REAL else where(x == x, False, True)


def isinf(x: Value) -> Value:
    return abs(x) == math.inf


def isfinite(x: Value) -> Value:
    return abs(x) < math.inf


def clamp(x: Value, least: Any = None, most: Any = None) -> Value:
    kind = promoted(*(x.graph.of(n).kind for n in (x, least, most) if n is not None))
    found = x.to(kind)
    if least is not None:
        found = where(found < least, least, found)
    return found if most is None else where(found > most, most, found)


def relu(x: Value) -> Value:
    return where(x <= 0, x.graph.number(0).to(x.kind), x)


def leaky_relu(x: Value, negative_slope: Any = 0.01) -> Value:
    return where(x > 0, x, x * negative_slope)


def elu(x: Value, alpha: Any = 1.0, scale: Any = 1.0, input_scale: Any = 1.0) -> Value:
    return where(x > 0, x * scale, expm1(x * input_scale) * alpha * scale)


def expm1(x: Value) -> Value:
    return x._real("EXPM1")


def gelu(x: Value, approximate: str = "none") -> Value:
    if approximate == "tanh":
        inner = (x + x**3 * 0.044715) * math.sqrt(2 / math.pi)
        return x * 0.5 * (inner._real("TANH") + 1.0)
    return x * 0.5 * ((x * math.sqrt(0.5))._real("ERF") + 1.0)


def silu(x: Value) -> Value:
    return x * x._real("SIGMOID")


def softplus(x: Value, beta: Any = 1.0, threshold: Any = 20.0) -> Value:
    scaled = x * beta
    return where(scaled > threshold, x, scaled._real("EXP")._real("LOG1P") / beta)


def mish(x: Value) -> Value:
    return x * softplus(x)._real("TANH")


def log_sigmoid(x: Value) -> Value:
    return minimum(x, 0.0) - (-abs(x))._real("EXP")._real("LOG1P")


def hardtanh(x: Value, min_val: Any = -1.0, max_val: Any = 1.0) -> Value:
    return where(x <= min_val, min_val, where(x >= max_val, max_val, x))  # unlike clamp's, its derivative is 0 at the bounds


def hardsigmoid(x: Value) -> Value:
    return hardtanh(x + 3.0, 0.0, 6.0) / 6.0


def hardswish(x: Value) -> Value:
    return where(x <= -3.0, 0.0, where(x >= 3.0, x, x * (x + 3.0) / 6.0))


def hardshrink(x: Value, lambd: Any = 0.5) -> Value:
    return where((x >= -lambd) & (x <= lambd), 0.0, x)


def softshrink(x: Value, lambd: Any = 0.5) -> Value:
    return where(x > lambd, x - lambd, where(x < -lambd, x + lambd, x * 0.0))


def threshold(x: Value, threshold: Any, value: Any) -> Value:
    return where(x <= threshold, value, x)


def logit(x: Value, eps: Any = None) -> Value:
    inside = x if eps is None else clamp(x, eps, 1 - eps)
    return (inside / (1.0 - inside))._real("LOG")


def xlogy(x: Value, y: Any) -> Value:
    other = x.graph.of(y)
    return where(isnan(other), math.nan, where(x == 0, 0.0, x * other._real("LOG")))


def hypot(x: Value, y: Any) -> Value:
    other = x.graph.of(y)
    return (x * x + other * other)._real("SQRT")


def logaddexp(x: Value, y: Any) -> Value:
    other = x.graph.of(y)
    larger = maximum(x, other)
    return where(x == other, larger + math.log(2), larger + (-abs(x - other))._real("EXP")._real("LOG1P"))


def logaddexp2(x: Value, y: Any) -> Value:
    return logaddexp(x * math.log(2), x.graph.of(y) * math.log(2)) * (1 / math.log(2))


def copysign(x: Value, y: Any) -> Value:
    y = x.graph.of(y).to(REAL)
    return where((y < 0) | ((y == 0) & (1 / y < 0)), -abs(x.to(REAL)), abs(x.to(REAL)))


def heaviside(x: Value, values: Any) -> Value:
    return where(x == 0, values, where(x > 0, 1, 0))


def nan_to_num(x: Value, nan: Any, posinf: Any, neginf: Any, most: float) -> Value:
    """most: the largest number of x's dtype, in place of an infinity."""
    if x.kind != REAL:
        return x
    found = where(isnan(x), 0.0 if nan is None else nan, x)
    found = where(x == math.inf, most if posinf is None else posinf, found)
    return where(x == -math.inf, -most if neginf is None else neginf, found)


def sinc(x: Value) -> Value:
    by_pi = x * math.pi
    return where(x == 0, 1.0, by_pi._real("SIN") / where(x == 0, 1.0, by_pi))


def logical(operation: str) -> Callable[[Value, Any], Value]:
    return lambda x, y: x.to("B")._bits(operation, x.graph.of(y).to("B"))


def rounded(x: Value, decimals: int = 0) -> Value:
    if decimals:
        raise UnrecordableError(f"round to {decimals} decimals; accepted is 0")
    return x._whole("ROUND")


def to_integer_of(x: Value, bits: int, signed: bool) -> Value:
    """x as an integer of fewer bits, which wraps around. Of a real that 32 bits do not hold it is any number."""
    whole = x.to(INTEGER)
    if bits == 32 and signed:
        return whole._each(lambda n: x.graph.add("TO_INT32", n)) if x.kind == INTEGER else whole
    half = 1 << (bits - 1) if signed else 0
    return ((whole + half) & ((1 << bits) - 1)) - half


ELEMENTWISE: dict[str, Callable[..., Value]] = {
    **{name: _real(operation) for name, operation in _REAL.items()},
    **{name: _whole(operation) for name, operation in _WHOLE.items()},
    "abs": abs,
    "atan2": atan2,
    "bitwise_and": lambda x, y: x & y,
    "bitwise_left_shift": lambda x, y: x << y,
    "bitwise_not": lambda x: ~x,
    "bitwise_or": lambda x, y: x | y,
    "bitwise_right_shift": lambda x, y: x >> y,
    "bitwise_xor": lambda x, y: x ^ y,
    "copysign": copysign,
    "deg2rad": lambda x: x * (math.pi / 180),
    "eq": lambda x, y: x == y,
    "floor_divide": lambda x, y: x // y,
    "fmax": fmax,
    "fmin": fmin,
    "fmod": fmod,
    "frac": lambda x: x - x._whole("TRUNC"),
    "ge": lambda x, y: x >= y,
    "gt": lambda x, y: x > y,
    "heaviside": heaviside,
    "hypot": hypot,
    "isfinite": isfinite,
    "isinf": isinf,
    "isnan": isnan,
    "le": lambda x, y: x <= y,
    "log10": lambda x: x._real("LOG2") * math.log10(2),
    "logaddexp": logaddexp,
    "logaddexp2": logaddexp2,
    "logical_and": logical("AND"),
    "logical_not": lambda x: ~x.to("B"),
    "logical_or": logical("OR"),
    "logical_xor": logical("XOR"),
    "lt": lambda x, y: x < y,
    "maximum": maximum,
    "minimum": minimum,
    "mul": lambda x, y: x * y,
    "ne": lambda x, y: x != y,
    "neg": lambda x: -x,
    "pow": lambda x, y: x**y,
    "rad2deg": lambda x: x * (180 / math.pi),
    "reciprocal": lambda x: 1.0 / x,
    "remainder": lambda x, y: x % y,
    "round": rounded,
    "sgn": sign,
    "sign": sign,
    "square": lambda x: x * x,
    "xlogy": xlogy,
}


# Functions of the elements along an axis, which become as many operations. axes: one, several, or None for all.


def _reduction(name: str, join: Callable[[Value, Value], Value], takes: str = "") -> Callable[..., Value]:
    def reduced(x: Value, axes: Any = None, keeps: bool = False) -> Value:
        kind = takes or ("I" if x.kind == "B" else x.kind)
        return x.to(kind).reduced(name, join, axes, keeps)

    return reduced


def mean_of(x: Value, axes: Any = None, keeps: bool = False) -> Value:
    total = REDUCTIONS["sum"](x.to("R"), axes, keeps)
    return total / (math.prod(x.shape) / math.prod(total.shape))


def dot(x: Value, y: Value) -> Value:
    return REDUCTIONS["sum"](x * y)


REDUCTIONS: dict[str, Callable[..., Value]] = {
    "all": _reduction("all", lambda x, y: x & y, "B"),
    "amax": _reduction("the maximum", maximum),
    "amin": _reduction("the minimum", minimum),
    "any": _reduction("any", lambda x, y: x | y, "B"),
    "mean": mean_of,
    "prod": _reduction("the product", lambda x, y: x * y),
    "sum": _reduction("the sum", lambda x, y: x + y),
}
