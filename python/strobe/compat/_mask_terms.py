"""What a mask function computes, as terms: the function runs once on stand-ins for b, h, i and j, which note each operation.

This works for any function of transformers, of its models and of users, without knowing it, and under torch.compile as well: Dynamo traces
the stand-ins' methods like all other code. A condition is then taken apart into what holds for all of its pairs at once."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

# A stretch of values, from the least to the largest; _FAR is beyond all positions.
Range = tuple[int, int]
FAR = 1 << 62
EVERYTHING: list[Range] = [(-FAR, FAR)]

LEAVES = ("b", "h", "i", "j")
_OTHER_SIDE = {"i": "j", "j": "i"}
_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
# The names under which PyTorch and Python know the operations that terms are computed with.
_ALIASES = {
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne", "subtract": "sub", "multiply": "mul",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_not": "invert",
    "absolute": "abs", "negative": "neg", "floor_divide": "floordiv", "remainder": "mod",
}  # fmt: skip
_LOGICAL = {"logical_and": "and", "logical_or": "or", "logical_not": "invert"}  # the same where all operands are conditions
_OPERATORS: dict[str, Callable[..., Any]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg, "abs": operator.abs,
    "floordiv": operator.floordiv, "mod": operator.mod, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "invert": operator.invert, "getitem": operator.getitem,
}  # fmt: skip
_PLAIN = (Tensor, torch.nn.Parameter)
_SAME = ("contiguous", "clone", "cpu", "cuda")  # methods that leave all values as they are
_OF_INTEGERS = ("add", "sub", "mul", "neg", "abs", "floordiv", "mod", "and", "or", "xor", "invert")  # of integers, they are integers
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class NotATermError(TypeError):
    """The function asks for a number of a position."""


class Term:
    """An operation on positions: a leaf, whose name is one of b, h, i and j, or function(*args, **kwargs)."""

    def __init__(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device):
        self.name, self.function, self.args, self.kwargs, self.device = name, function, args, kwargs, device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return noted(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        return partial(_noted_method, getattr(Tensor, name), self)

    def __lt__(self, other: Any) -> Any:
        return self._with("lt", self, other)

    def __le__(self, other: Any) -> Any:
        return self._with("le", self, other)

    def __gt__(self, other: Any) -> Any:
        return self._with("gt", self, other)

    def __ge__(self, other: Any) -> Any:
        return self._with("ge", self, other)

    def __eq__(self, other: Any) -> Any:
        return self._with("eq", self, other)

    def __ne__(self, other: Any) -> Any:
        return self._with("ne", self, other)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Any) -> Any:
        return self._with("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return self._with("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return self._with("sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._with("sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return self._with("mul", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._with("mul", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return self._with("floordiv", self, other)

    def __mod__(self, other: Any) -> Any:
        return self._with("mod", self, other)

    def __and__(self, other: Any) -> Any:
        return self._with("and", self, other)

    def __rand__(self, other: Any) -> Any:
        return self._with("and", other, self)

    def __or__(self, other: Any) -> Any:
        return self._with("or", self, other)

    def __ror__(self, other: Any) -> Any:
        return self._with("or", other, self)

    def __xor__(self, other: Any) -> Any:
        return self._with("xor", self, other)

    def __neg__(self) -> Any:
        return self._with("neg", self)

    def __abs__(self) -> Any:
        return self._with("abs", self)

    def __invert__(self) -> Any:
        return self._with("invert", self)

    def __getitem__(self, index: Any) -> Any:
        return self._with("getitem", self, index)

    def __bool__(self) -> bool:
        raise NotATermError("a condition of positions has no value of its own")

    def __index__(self) -> int:
        raise NotATermError("a position has no value of its own")

    __int__ = __index__

    def _with(self, name: str, *args: Any) -> Any:
        return noted(_OPERATORS[name], args, {})


class _StandIn(Tensor):
    """A position. It is a tensor, so that it can be an index and a PyTorch function's argument."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if names_of(func)[0] == "get":  # device, dtype, shape
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return noted(func, args, kwargs or {})


class _B(_StandIn):
    pass


class _H(_StandIn):
    pass


class _I(_StandIn):
    pass


class _J(_StandIn):
    pass


_LEAF_OF = {_B: "b", _H: "h", _I: "i", _J: "j"}


class _Indexing(TorchFunctionMode):
    """table[b, i] is noted: it asks its table alone whether it is overridden."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and _has_term(args[1]):
            return noted(func, args, {})
        return func(*args, **(kwargs or {}))


@torch.compiler.assume_constant_result  # Dynamo asks no function for its name
def names_of(function: Any) -> tuple[str, str]:
    """A function's name, and that of the operation."""
    bare = function.__name__.strip("_")
    return bare, _ALIASES.get(bare, bare)


def _has_term(x: Any) -> bool:
    if isinstance(x, tuple):
        return any(_has_term(each) for each in x)
    return isinstance(x, (Term, _StandIn))


def _noted_method(function: Any, *args: Any, **kwargs: Any) -> Any:
    return noted(function, args, kwargs)


def _operand(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_operand(each) for each in x)
    if isinstance(x, _StandIn):
        return Term(_LEAF_OF[type(x)], None, (), {}, x.device)
    return x


def _device_of(args: Sequence[Any]) -> torch.device | None:
    for x in args:
        found = _device_of(x) if isinstance(x, tuple) else x.device if isinstance(x, (Term, Tensor)) else None
        if found is not None:
            return found
    return None


def noted(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """function(*args, **kwargs) as a term, or as what is known of it already."""
    bare, name = names_of(function)
    device = _device_of(args)
    assert device is not None
    operands = tuple(_operand(x) for x in args)
    if name in ("new_ones", "new_zeros") and kwargs.get("dtype") is torch.bool and len(args) > 1 and tuple(args[1]) == ():
        return Term("constant", None, (name == "new_ones",), {}, device)
    if name in _SAME or _keeps(name, operands, (*args[1:], *kwargs.values())):
        return operands[0]
    if name in _LOGICAL and all(is_condition(x) for x in operands):
        name = _LOGICAL[name]
    if kwargs and (name in _OPERATORS or name == "rsub"):
        name = bare + "()"  # with alpha, rounding_mode or out
    if name in ("rsub", "radd", "rand", "ror", "rmul"):
        name, operands = name[1:], operands[::-1]
    if name in ("and", "or") and len(operands) == 2:
        for x, other in (operands, operands[::-1]):
            known = constant(x)
            if known is not None and is_condition(other):
                decides = known == (name == "or")
                return Term("constant", None, (known,), {}, device) if decides else other
    return Term(name, _OPERATORS.get(name, function), operands, kwargs, device)


def _keeps(name: str, operands: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether a conversion leaves each value as it is: integers beside integers, and conditions beside conditions."""
    x = operands[0]
    if name == "bool":
        return is_condition(x)
    if name in ("int", "long"):
        return _is_whole(x)
    if name != "to" or any(isinstance(each, (Term, Tensor)) for each in others):  # to(other) takes the other's dtype
        return False
    dtypes = [each for each in others if isinstance(each, torch.dtype)]
    return all((each is torch.int64 and _is_whole(x)) or (each is torch.bool and is_condition(x)) for each in dtypes)


def _is_whole(x: Any) -> bool:
    """Whether a term is known to be an integer, not a condition."""
    if isinstance(x, Tensor):
        return x.dtype in _INTEGERS
    if not isinstance(x, Term):
        return _is_integer(x)
    if x.name == "getitem":
        return _is_whole(x.args[0])
    return x.name in LEAVES or (x.name in _OF_INTEGERS and all(_is_whole(each) for each in x.args))


def constant(x: Any) -> bool | None:
    """A condition that is known; None if it is not."""
    if isinstance(x, bool):
        return x
    if isinstance(x, Term):
        return x.args[0] if x.name == "constant" else None
    if isinstance(x, Tensor) and x.dtype == torch.bool and x.dim() == 0 and not is_traced(x):
        return bool(x)
    return None


def is_traced(*tensors: Any) -> bool:
    """Whether the numbers of tensors cannot be read now: a compiler traces, an export, vmap, or a CUDA graph is captured."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or torch._C._functorch.maybe_current_level() is not None:
        return True
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    return any(isinstance(x, Tensor) and (type(x) not in _PLAIN or x.is_meta) for x in tensors)


def is_condition(x: Any) -> bool:
    if isinstance(x, Term):
        if x.name == "getitem":
            return is_condition(x.args[0])
        return x.name in _FLIPPED or x.name == "constant" or (x.name in ("and", "or", "invert", "xor") and all(map(is_condition, x.args)))
    return isinstance(x, bool) or (isinstance(x, Tensor) and x.dtype == torch.bool)


def term_of(function: Callable[..., Any], device: torch.device) -> Term | None:
    """What function(b, h, i, j) computes; None if it wants to know a position, or does what cannot be noted."""
    try:
        with _Indexing():
            found = function(*_stand_ins(device))
    except (NotATermError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, NotImplementedError):
        return None
    found = _operand(found)
    if (known := constant(found)) is not None:
        return Term("constant", None, (known,), {}, device)
    return found if isinstance(found, Term) else None


def _stand_ins(device: torch.device) -> tuple[Tensor, ...]:
    return _made_stand_ins(device) if torch.compiler.is_compiling() else _kept_stand_ins(device)


def _made_stand_ins(device: torch.device) -> tuple[Tensor, ...]:
    at = torch.empty((), dtype=torch.int64, device=device)
    return at.as_subclass(_B), at.as_subclass(_H), at.as_subclass(_I), at.as_subclass(_J)


@lru_cache(maxsize=64)
def _kept_stand_ins(device: torch.device) -> tuple[Tensor, ...]:
    with _disable_current_modes():  # no fake tensors
        return _made_stand_ins(device)


def value(term: Any, places: dict[str, Any]) -> Any:
    """The term's value where b, h, i and j are the given ones."""
    if isinstance(term, tuple):
        return tuple(value(x, places) for x in term)
    if not isinstance(term, Term):
        return term
    if term.name in LEAVES:
        return places[term.name]
    if term.name == "constant":
        return term.args[0]
    args = tuple(value(x, places) for x in term.args)
    return term.function(*args, **term.kwargs) if term.kwargs else term.function(*args)


_SIGNS = {
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%",
    "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
_PREFIXES = {"neg": "-", "invert": "~", "abs": "abs"}


def function_of(terms: Sequence[Term], q_offset: Any, kv_offset: Any) -> Callable[..., Any]:
    """The mask function g(b, h, i, j) that is True where all of the terms are; i and j count from the offsets.

    It is written anew, with what it reads as defaults: the recorder then knows it again, whichever functions the terms came from."""
    if torch.compiler.is_compiling():
        return _evaluating(terms, q_offset, kv_offset)
    read: list[Any] = []
    places = {name: name if _is_zero(shift) else f"({name} + {_named(shift, read)})" for name, shift in (("i", q_offset), ("j", kv_offset))}
    text = " & ".join(_text(term, places, read) for term in terms)
    names = "".join(f", x{n}" for n in range(len(read)))
    return FunctionType(_compiled(f"lambda b, h, i, j{names}: {text}"), {"__builtins__": builtins}, "mask_function", tuple(read))


@lru_cache(maxsize=256)
def _compiled(text: str) -> CodeType:
    (code,) = (x for x in compile(text, "<mask function>", "eval").co_consts if isinstance(x, CodeType))
    return code


def _is_zero(x: Any) -> bool:
    return isinstance(x, int) and x == 0


def _named(x: Any, read: list[Any]) -> str:
    n = next((n for n, known in enumerate(read) if known is x), len(read))
    if n == len(read):
        read.append(x)
    return f"x{n}"


def _text(x: Any, places: dict[str, str], read: list[Any]) -> str:
    if isinstance(x, tuple):
        return f"({''.join(_text(each, places, read) + ', ' for each in x)})"
    if not isinstance(x, Term):
        return _named(x, read)
    if x.name in LEAVES:
        return places.get(x.name, x.name)
    if x.name == "constant":
        return str(x.args[0])
    args = [_text(each, places, read) for each in x.args]
    if x.name in _SIGNS and not x.kwargs:
        return f"({args[0]} {_SIGNS[x.name]} {args[1]})"
    if x.name in _PREFIXES and not x.kwargs:
        return f"({_PREFIXES[x.name]}({args[0]}))"
    if x.name == "getitem":
        return f"{args[0]}[{args[1]}]"
    args += [f"{name}={_text(each, places, read)}" for name, each in x.kwargs.items()]
    return f"{_named(x.function, read)}({', '.join(args)})"


def _evaluating(terms: Sequence[Term], q_offset: Any, kv_offset: Any) -> Callable[..., Any]:
    plain = _is_zero(q_offset) and _is_zero(kv_offset)

    def mask_function(b: Any, h: Any, i: Any, j: Any) -> Any:
        places = {"b": b, "h": h, "i": i if plain else i + q_offset, "j": j if plain else j + kv_offset}
        found = value(terms[0], places)
        for term in terms[1:]:
            found = found & value(term, places)
        return found

    return mask_function


def reads(x: Any) -> str:
    """The names of the leaves that a term reads, in order."""
    found = _leaves(x)
    return "".join(name for name in LEAVES if name in found)


def _leaves(x: Any) -> set[str]:
    if isinstance(x, tuple):
        return set().union(*(_leaves(each) for each in x))
    if not isinstance(x, Term):
        return set()
    if x.name in LEAVES:
        return {x.name}
    return set().union(*(_leaves(each) for each in (*x.args, *x.kwargs.values())))


def alike(a: Any, b: Any, mirrored: bool = False) -> bool:
    """Whether two terms are the same computation; mirrored: with i and j exchanged."""
    if isinstance(a, Term) and isinstance(b, Term):
        if a.name in LEAVES:
            return b.name == (_OTHER_SIDE.get(a.name, a.name) if mirrored else a.name)
        return a.name == b.name and not a.kwargs and not b.kwargs and alike(a.args, b.args, mirrored)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(alike(x, y, mirrored) for x, y in zip(a, b, strict=True))
    if isinstance(a, (Term, Tensor, tuple)) or isinstance(b, (Term, Tensor, tuple)):
        return a is b
    return type(a) is type(b) and bool(a == b)


def conditions(x: Term) -> list[Term]:
    """The conditions that all have to hold."""
    if x.name == "and":
        return [each for side in x.args if isinstance(side, Term) for each in conditions(side)] + [
            _as_term(side, x.device) for side in x.args if not isinstance(side, Term)
        ]
    return [x]


def _as_term(x: Any, device: torch.device) -> Term:
    return Term("given", _given, (x,), {}, device)


def _given(x: Any) -> Any:
    return x


# Conditions of the difference of two places


class Span:
    """The values of a difference for which a condition holds: of i - j, or, with a `base`, of base(i) - base(j)."""

    def __init__(self, base: Term | None, is_any: bool, ranges: list[Range]):
        self.base, self.is_any, self.ranges = base, is_any, ranges  # is_any: of any difference, since the condition is a constant


def span(x: Any) -> Span | None:
    """The span of a condition that depends on one difference alone; None if it depends on more."""
    if (known := constant(x)) is not None:
        return Span(None, True, EVERYTHING if known else [])
    if not isinstance(x, Term):
        return None
    if x.name in _FLIPPED and len(x.args) == 2:
        return _compared(x.name, x.args[0], x.args[1])
    if x.name == "invert":
        inner = span(x.args[0])
        return None if inner is None else Span(inner.base, inner.is_any, _complement(inner.ranges))
    if x.name in ("and", "or"):
        a, b = span(x.args[0]), span(x.args[1])
        if a is None or b is None:
            return None
        if not a.is_any and not b.is_any and not _same_base(a.base, b.base):
            return None
        whose = b if a.is_any else a
        return Span(whose.base, a.is_any and b.is_any, _both(a.ranges, b.ranges) if x.name == "and" else _either(a.ranges, b.ranges))
    return None


def _same_base(a: Term | None, b: Term | None) -> bool:
    return a is b or (a is not None and b is not None and alike(a, b))


def _compared(name: str, a: Any, b: Any) -> Span | None:
    for one, other, op in ((a, b, name), (b, a, _FLIPPED[name])):
        if isinstance(one, Term) and one.name == "abs" and _is_integer(other):
            inner = _difference(one.args[0], 0)
            if inner is None:
                return None
            base, sign, shift = inner
            sizes = _both(_values(op, other), [(0, FAR)])
            ranges = _either(sizes, [(-hi, -lo) for lo, hi in sizes])
            return Span(base, False, _moved(ranges, sign, shift))
        if isinstance(other, float) and other in (float("inf"), float("-inf")):
            return Span(None, True, EVERYTHING if _OPERATORS[op](0.0, other) else [])
    alone = _one_sided(name, a, b)
    if alone is not None:
        return alone
    found = _difference(a, b)
    if found is None:
        return None
    base, sign, shift = found
    return Span(base, False, _moved(_values(name, 0), sign, shift))


def _is_integer(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _one_sided(name: str, a: Any, b: Any) -> Span | None:
    """i >= 0 holds for all positions."""
    found = _linear(a, b)
    if found is None or len(found[0]) != 1:
        return None
    ((atom, factor),), shift = found
    if atom.name not in ("i", "j") or not ((factor > 0 and shift >= 0 and name == "ge") or (factor > 0 and shift >= 1 and name == "gt")):
        return None
    return Span(None, True, EVERYTHING)


def _difference(a: Any, b: Any) -> tuple[Term | None, int, int] | None:
    """a - b as sign · (base(i) - base(j)) + shift; base None: i - j."""
    found = _linear(a, b)
    if found is None or len(found[0]) != 2:
        return None
    ((one, factor), (other, other_factor)), shift = found
    if factor * other_factor != -1 or not alike(one, other, mirrored=True):
        return None
    if "j" in reads(one):
        one, other, factor = other, one, other_factor
    if "i" not in reads(one) or "j" in reads(one):
        return None
    return (None if one.name == "i" else one), factor, shift


def _linear(a: Any, b: Any) -> tuple[list[tuple[Term, int]], int] | None:
    """a - b as a sum of terms with factors, and a number."""
    sums: list[tuple[Term, int]] = []
    shift = 0
    for x, factor in ((a, 1), (b, -1)):
        found = _summed(sums, x, factor)
        if found is None:
            return None
        shift += found
    return [(term, factor) for term, factor in sums if factor], shift


def _summed(sums: list[tuple[Term, int]], x: Any, factor: int) -> int | None:
    """Adds factor · x to the sums, and returns the number in it; None if x is no sum of terms and integers."""
    if _is_integer(x):
        return int(factor * x)
    if not isinstance(x, Term) or is_condition(x):
        return None
    if x.name in ("add", "sub"):
        a, b = _summed(sums, x.args[0], factor), _summed(sums, x.args[1], factor if x.name == "add" else -factor)
        return None if a is None or b is None else a + b
    if x.name == "neg":
        return _summed(sums, x.args[0], -factor)
    for n, (term, before) in enumerate(sums):
        if alike(term, x):
            sums[n] = term, before + factor
            return 0
    sums.append((x, factor))
    return 0


def _values(name: str, bound: int) -> list[Range]:
    """The integers x with x < bound, x <= bound and so on."""
    if name == "lt":
        return [(-FAR, bound - 1)]
    if name == "le":
        return [(-FAR, bound)]
    if name == "gt":
        return [(bound + 1, FAR)]
    if name == "ge":
        return [(bound, FAR)]
    return [(bound, bound)] if name == "eq" else [(-FAR, bound - 1), (bound + 1, FAR)]


def _moved(ranges: list[Range], sign: int, shift: int) -> list[Range]:
    """The values d for which sign · d + shift lies in the ranges."""
    moved = [(_clipped(sign * (lo - shift)), _clipped(sign * (hi - shift))) for lo, hi in ranges]
    return moved if sign > 0 else [(hi, lo) for lo, hi in reversed(moved)]


def _clipped(x: int) -> int:
    return FAR if x > FAR // 2 else -FAR if x < -(FAR // 2) else x


def _both(a: list[Range], b: list[Range]) -> list[Range]:
    met = [(max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b]
    return sorted([each for each in met if each[0] <= each[1]])


def _either(a: list[Range], b: list[Range]) -> list[Range]:
    joined: list[Range] = []
    for lo, hi in sorted([*a, *b]):
        if joined and lo <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], hi)
        else:
            joined.append((lo, hi))
    return joined


def _complement(a: list[Range]) -> list[Range]:
    left: list[Range] = EVERYTHING
    for lo, hi in a:
        sides = [(-FAR, lo - 1)] if lo > -FAR else []
        left = _both(left, [*sides, (hi + 1, FAR)] if hi < FAR else sides)
    return left


def same_of_both(x: Term) -> tuple[Term, Term] | None:
    """The two sides of a condition f(b, i) == f(b, j), i's first."""
    if x.name != "eq" or len(x.args) != 2 or not all(isinstance(side, Term) for side in x.args):
        return None
    a, b = x.args
    if not alike(a, b, mirrored=True):
        return None
    if "j" in reads(a):
        a, b = b, a
    if reads(a) not in ("i", "bi") or reads(b) not in ("j", "bj"):
        return None
    return a, b
