"""Records a function of torch tensors: it is called once on scalars without memory (device "meta"), under a mode that sees every operation
of ATen and makes nodes of it. torch.fx does the same by proxies, but takes seconds to import and a hundred times as long.

Indexing is taken over in Python, where `table[i]` would read the number of i, and so are methods that turn a tensor into a number."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial, reduce
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from . import _elementwise as e
from ._elementwise import ELEMENTWISE, REDUCTIONS
from ._graph import (
    BOOLEAN,
    BRANCH,
    INTEGER,
    REAL,
    Graph,
    NoFormError,
    UnrecordableError,
    Value,
    arange,
    axis_of,
    broadcast,
    concatenated,
    where,
    wide,
)
from ._watched import Watch

_META = torch.device("meta")
_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_DTYPES = {BOOLEAN: torch.bool, INTEGER: torch.int64, REAL: torch.float32}


def kind_of_dtype(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        raise UnrecordableError(f"a tensor of {dtype}; accepted are real numbers, integers and bools")
    return BOOLEAN if dtype == torch.bool else REAL if dtype.is_floating_point else INTEGER


def unreadable(x: Tensor) -> str | None:
    """What keeps x from being captured, in words; None if nothing does, or what a call finds later."""
    if x.is_nested:
        return "reads a nested tensor; accepted is a dense one, which torch.nested.to_padded_tensor gives"
    if x.dtype.is_floating_point and x.dtype not in _FLOATS:
        accepted = "accepted are float32, float16, bfloat16, float64, bool, int32, int64, and integers of fewer bits"
        return f"reads a tensor of {str(x.dtype).removeprefix('torch.')}; {accepted}: to() converts it before the call"
    return None


def record(
    function: Callable[..., Any], arguments: Sequence[tuple[str, str]], in_float64: bool, seen: Watch | None = None
) -> tuple[Graph, Any, list[Tensor]]:
    """The graph of function(*arguments), its result (a Value, or what it returns that is none), and the tensors that it captures.

    arguments: the operation and the kind of each; seen: what the function reads, which is incomplete if it turns out to read more."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"{_TRANSFORMS}; accepted are torch.autograd.grad and backward(), and calls without functions")
    graph = Graph()
    seen = Watch() if seen is None else seen
    if not all(isinstance(seen.found[n], Tensor) for n in seen.arrays.values()):
        seen.is_complete = False  # NumPy's arrays, whose numbers become constants
    mode = _Operations(graph, seen)
    dtypes = {REAL: torch.float64 if in_float64 else torch.float32, INTEGER: torch.int64}
    # Views of new tensors are refused in inference mode. (torch.no_grad() would be an operation of an exported graph.)
    inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    with inference, _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
        examples = [torch.empty((), dtype=dtypes[kind], device=_META) for _, kind in arguments]
        for example, (operation, kind) in zip(examples, arguments, strict=True):
            mode.keep(example, graph.argument(operation, kind))
        try:
            with _Python(seen), mode:
                found = function(*examples)
        except RuntimeError as failed:
            if "meta tensor" not in str(failed):
                raise
            words = "torch.tensor of tensors, or another function that reads their numbers; accepted is torch.stack"
            raise UnrecordableError(words).with_traceback(failed.__traceback__) from None
        if isinstance(found, Tensor):
            found = mode.value(found)
    # Detached where the modes that trace the call see it.
    return graph, found, [graph.detached[n].detach() if n in graph.detached else x for n, x in enumerate(mode.captured)]


_NUMBERS = {
    torch.Tensor.__bool__: BRANCH.format("torch"),
    torch.Tensor.__contains__: BRANCH.format("torch").replace("if, and", "in, if, and"),
}
_TRANSFORMS = "functions of the score and the mask under torch.func.grad, vjp, jvp, vmap, ..."
_IS_A_NUMBER = (
    "turns a tensor into a number of Python; accepted are operations on the tensor itself, as in table[h] of a tensor, which "
    "torch.tensor(x) makes of a list x, or torch.exp"
)
_NAMES_OF_NUMBERS = ("__int__", "__float__", "__index__", "__complex__", "item", "tolist", "numpy", "__array__", "data_ptr", "__dlpack__")
_NUMBERS |= {getattr(torch.Tensor, name): f"{name}() {_IS_A_NUMBER}" for name in _NAMES_OF_NUMBERS}
_NUMBERS[torch.Tensor.__array__] = (
    "a function, or the index of an array, of NumPy gets a tensor; accepted are functions of torch, and in place of the array a tensor: "
    "torch.as_tensor(array), made before"
)


# What is the same of all tensors of a type, shape, dtype and device.
_OF_KINDS = {getattr(torch.Tensor, name).__get__ for name in ("device", "dtype", "is_cuda", "itemsize", "nbytes", "ndim", "shape")}
_OF_KINDS |= {
    getattr(torch.Tensor, name)
    for name in (
        "__len__",
        "dim",
        "element_size",
        "get_device",
        "is_complex",
        "is_floating_point",
        "ndimension",
        "nelement",
        "numel",
        "size",
    )
}
_OF_KINDS |= {torch.is_complex, torch.is_floating_point, torch.numel, torch.promote_types}


def _are_tensors(found: Any) -> bool:
    return isinstance(found, Tensor) or (isinstance(found, (tuple, list)) and all(isinstance(x, Tensor) for x in found))


class _Python(TorchFunctionMode):
    """What is taken over before ATen sees it."""

    def __init__(self, seen: Watch):
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            return indexed(*args)
        if (words := _NUMBERS.get(func)) is not None:
            raise UnrecordableError(words)
        for x in args:
            if type(x) is int and not -(2**63) <= x < 2**63:
                raise UnrecordableError(wide(x))
        if func is torch.Tensor.__rtruediv__:  # by itself other * (1 / x)
            return torch.scalar_tensor(args[1], dtype=args[0].dtype if args[0].is_floating_point() else None, device=_META) / args[0]
        if func is torch.Tensor.__setitem__:
            raise UnrecordableError("a write into a tensor; accepted is torch.where, which makes a new one")
        found = func(*args, **(kwargs or {}))
        nothing = found is None and getattr(func, "__name__", "") != "__get__"
        if func not in _OF_KINDS and not _are_tensors(found) and not nothing:
            self._seen.is_complete = False  # as of stride() or requires_grad, which other tensors have in another way
        return found


def indexed(x: Tensor, index: Any) -> Tensor:
    """x[index], where scalars are tensors."""
    items = [*index] if isinstance(index, tuple) else [index]
    wide = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis in [item for item in items if not isinstance(item, Tensor)]:
        at = next(n for n, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (x.dim() - wide)
    if wide > x.dim():
        raise UnrecordableError(f"{wide} indices of a tensor of shape {tuple(x.shape)}; accepted are up to {x.dim()}")
    tensors: list[Tensor | None] = []
    axis = 0
    for item in items:
        if isinstance(item, Tensor):
            tensors += [None] * (axis - len(tensors)) + [item]
            axis += 1
        elif item is None:
            x, axis = x.unsqueeze(axis), axis + 1
        elif isinstance(item, slice):
            if item != slice(None):
                start, stop, step = item.indices(x.shape[axis])
                if step < 0:
                    raise UnrecordableError("a slice with a negative step; accepted is torch.flip")
                x = torch.ops.aten.slice.Tensor(x, axis, start, stop, step)
            axis += 1
        elif isinstance(item, int) and not isinstance(item, bool):
            x = x.select(axis, item)
        else:
            accepted = "accepted are integers, tensors of integers, slices, None and ..."
            raise UnrecordableError(f"an index of type {type(item).__name__}; {accepted}")
    return torch.ops.aten.index.Tensor(x, tensors) if tensors else x.view_as(x)


_SIZES = ("numel", "size", "stride", "storage_offset")
_OF_METADATA = frozenset(
    (
        "prim::device",
        "dim",
        "is_contiguous",
        "is_strides_like_format",
        "is_non_overlapping_and_dense",
        *_SIZES,
        *(f"sym_{n}" for n in _SIZES),
    )
)
# Integers of fewer than 64 bits wrap around: those dtypes, and the operations whose results may leave their ranges.
_BITS = {torch.uint8: (8, False), torch.int8: (8, True), torch.int16: (16, True), torch.int32: (32, True)}
_LEAVES_RANGE = re.compile(
    "abs|add|addcmul|bitwise_(left_shift|not|or|xor)|clamp(_max|_min)?|div|fill|floor_divide|fmod|full|full_like|heaviside|lerp|masked_fill|"
    "mul|neg|new_full|pow|remainder|rsub|square|sub|threshold|where|__(lshift|or|xor)__"
)
# Numbers of Python beside tensors of such a dtype: these operations take their lowest bits, and those that store the number refuse one that
# the dtype does not hold.
_WRAPS_NUMBERS = re.compile(
    "bitwise_(and|left_shift|or|right_shift|xor)|div|eq|floor_divide|fmod|ge|gt|le|lt|ne|remainder|__(and|lshift|or|rshift|xor)__"
)
_STORES_NUMBERS = re.compile("clamp(_max|_min)?|fill|full|full_like|masked_fill|new_full|scalar_tensor|threshold|where|add|sub|rsub")
_STORED = ("alpha", "fill_value", "max", "min", "other", "s", "self", "threshold", "value")
_INDICES = frozenset({"index", "indices", "mask", "condition"})  # operands that do not take part in promotion


class _Operations(TorchDispatchMode):
    def __init__(self, graph: Graph, seen: Watch):
        super().__init__()
        self.graph, self._seen = graph, seen
        self.captured: list[Tensor] = []
        self._values: dict[int, Value] = {}
        self._alive: list[Tensor] = []  # so that no id is that of another tensor

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operation imports torch._dynamo, which takes seconds

    def keep(self, x: Tensor, value: Value) -> None:
        self._values[id(x)] = value
        self._alive.append(x)

    def value(self, x: Any) -> Value:
        if not isinstance(x, Tensor):
            return self.graph.of(x)
        found = self._values.get(id(x))
        if found is None:
            if (unread := unreadable(x)) is not None:
                raise UnrecordableError(unread)
            if x.device == _META:
                words = "a tensor on device meta, one that .data made, or one that the function kept when it was recorded before"
                raise UnrecordableError(f"{words}; accepted are tensors with numbers, and detach()")
            found = self.graph.captured(len(self.captured), tuple(x.shape), kind_of_dtype(x.dtype))
            self.captured.append(x)
            self.keep(x, found)
        return found

    def detached(self, x: Tensor) -> Value:
        of = next((n for n, base in self.graph.detached.items() if base is x), None)
        if of is not None:
            return self.value(self.captured[of])
        own = x.detach()
        value = self.value(own)
        self.graph.detached[len(self.captured) - 1] = x
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").removeprefix("prims::")
        if name in _OF_METADATA:  # of a tensor of a compiler, which itself has the answer
            return func(*args, **(kwargs or {}))
        given = {x.name: x.default_value for x in func._schema.arguments if x.has_default_value()}
        given |= dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | (kwargs or {})
        if name in ("lift_fresh", "lift_fresh_copy"):
            return self._fresh(given["self"])
        if name == "detach_":  # of torch.tensor(...)
            return given["self"]
        if (kept := _kept_by_dropout(name, given)) is not None:
            return kept
        if torch.Tag.nondeterministic_seeded in func.tags or "dropout" in name:
            raise UnrecordableError(f"{func} makes random numbers; accepted is the option dropout, or a tensor of numbers drawn before")
        if name.endswith("_") and not name.endswith("__"):
            raise UnrecordableError(f"a write into a tensor ({func._schema.name}); accepted are new values, as in score = score + x")
        if (handler := _HANDLERS.get(name)) is None:
            return self._decomposed(func, name, args, kwargs or {})
        if given.get("out") is not None:
            raise UnrecordableError(f"out of {name}; accepted are functions that make a new tensor")
        found = handler(self, _with_own_numbers(name, given))
        if isinstance(found, list):
            return [self._made(name, value, given) for value in found]
        out = self._made(name, found, given)
        return (out, out) if name == "log_sigmoid_forward" else out

    def _made(self, name: str, value: Value, given: dict[str, Any]) -> Tensor:
        """A tensor that stands for the value. (No operation is run to make it, because those of device meta are slow to import.)"""
        dtype = given.get("dtype")
        if dtype is None:
            operands = [x for key, x in given.items() if isinstance(x, Tensor) and key not in _INDICES] + [*given.get("tensors", ())]
            own = [x for x in operands if kind_of_dtype(x.dtype) == value.kind]
            own = [x for x in own if x.dim()] or own  # a scalar of the same kind does not change an array's dtype
            dtype = reduce(torch.promote_types, (x.dtype for x in own)) if own else _DTYPES[value.kind]
        if dtype in _BITS and _LEAVES_RANGE.fullmatch(name) and value.kind == INTEGER:
            value = e.to_integer_of(value, *_BITS[dtype])
        out = torch.empty(value.shape, dtype=dtype, device=_META)
        self.keep(out, value.to(kind_of_dtype(dtype)))
        return out

    def _fresh(self, x: Tensor) -> Tensor:
        """A tensor that the function makes of numbers: a constant of its recording."""
        out = torch.empty(x.shape, dtype=x.dtype, device=_META)
        if x.numel() == 1:
            number = self.graph.number(x.item())
            self.keep(out, number.expanded(tuple(x.shape)) if x.dim() else number)
        else:
            self.keep(out, self.value(x))
        return out

    def _decomposed(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if name == "_local_scalar_dense":
            raise UnrecordableError(f"an operation that {_IS_A_NUMBER}")
        if func.namespace not in ("aten", "prims"):
            self._seen.is_complete = False  # its code is not followed
        try:
            if func.namespace not in ("aten", "prims") and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _EXPLICIT.name):
                with self:
                    return func._op_dk(_EXPLICIT, *args, **kwargs)  # an operator of torch.library, which is made of others
            if func._can_decompose():
                with self:
                    return func.decompose(*args, **kwargs)
            if (found := _decompositions().get(func)) is not None:
                with self:
                    return found(*args, **kwargs)
        except NoFormError:
            pass  # it would name another operation
        raise NoFormError(func)


def _kept_by_dropout(name: str, given: dict[str, Any]) -> Tensor | None:
    """x of a dropout that drops nothing; else None."""
    if "dropout" not in name or name.startswith("_"):
        return None
    nothing = given.get("train") is False or (given.get("p") == 0 and name == "dropout")
    x = given.get("input")
    return x if nothing and isinstance(x, Tensor) and name != "native_dropout" else None


@lru_cache
def _takes_numbers(name: str) -> tuple[bool, bool]:
    """Whether an operation takes the lowest bits of a number, and whether it stores one."""
    return _WRAPS_NUMBERS.fullmatch(name) is not None, _STORES_NUMBERS.fullmatch(name) is not None


def _with_own_numbers(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with Python's integers as PyTorch reads them beside integers of few bits: an operation that wraps takes a number's
    lowest bits; one that stores refuses a number that the dtype does not hold."""
    wraps, stores = _takes_numbers(name)
    is_true_division = name == "div" and given.get("rounding_mode") is None
    numbers = [key for key, x in given.items() if type(x) is int and key in _STORED]
    if not (wraps or stores) or is_true_division or not numbers:
        return given
    dtype = given.get("dtype") or _promoted(given)
    if dtype not in _BITS:
        return given
    info = torch.iinfo(dtype)
    # PyTorch also takes -255 to -1 for a uint8: they wrap around.
    least = info.min or -info.max
    own = dict(given)
    for key in numbers:
        is_stored = stores and (key == "alpha" or name not in ("add", "sub", "rsub"))
        if wraps or least <= given[key] <= info.max:
            own[key] = _wrapped(given[key], dtype)
        elif is_stored:
            raise UnrecordableError(f"{given[key]} in a tensor of {dtype}; accepted are {info.min} to {info.max}")
    return own


def _promoted(given: dict[str, Any]) -> torch.dtype | None:
    """The dtype to which an operation's tensors are promoted; None without tensors."""
    operands = [x.dtype for key, x in given.items() if isinstance(x, Tensor) and key not in _INDICES]
    return reduce(torch.promote_types, operands) if operands else None


def _wrapped(n: int, dtype: torch.dtype) -> int:
    """The integer of this dtype with the lowest bits of n."""
    bits, is_signed = _BITS[dtype]
    lowest = n % (1 << bits)
    return lowest - (1 << bits) if is_signed and lowest >= 1 << (bits - 1) else lowest


def _decompositions() -> dict[Any, Callable[..., Any]]:
    import_module("torch._refs")  # takes a second, and registers most of them
    from torch._decomp import decomposition_table

    return decomposition_table


def _most(dtype: torch.dtype) -> float:
    """The largest number of a dtype of reals."""
    return torch.finfo(dtype).max if dtype.is_floating_point else math.inf


Handler = Callable[[_Operations, dict[str, Any]], Any]
_HANDLERS: dict[str, Handler] = {}


def _each(function: Callable[..., Any], *names: str, **renamed: str) -> Handler:
    """A handler that passes arguments on: tensors and numbers as values by their places, the rest as it is by name."""

    def handler(r: _Operations, a: dict[str, Any]) -> Any:
        values = [r.value(a[name]) for name in names]
        return function(*values, **{key: a[name] for key, name in renamed.items()})

    return handler


def _takes_two(function: Callable[..., Any]) -> bool:
    return sum(x.default is x.empty for x in signature(function).parameters.values()) == 2


for _name, _function in ELEMENTWISE.items():
    _HANDLERS[_name] = _each(_function, "self", "other") if _takes_two(_function) else _each(_function, "self")
_HANDLERS |= {f"__{name}__": _each(ELEMENTWISE[f"bitwise_{name}"], "self", "other") for name in ("and", "or", "xor")}
_HANDLERS |= {f"special_{name}": _HANDLERS[name] for name in ("xlogy",)}
_HANDLERS["__lshift__"], _HANDLERS["__rshift__"] = _HANDLERS["bitwise_left_shift"], _HANDLERS["bitwise_right_shift"]
_HANDLERS["heaviside"] = _each(e.heaviside, "self", "values")
_HANDLERS["pow"] = _each(lambda x, y: x**y, "self", "exponent")


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def _scaled(r: _Operations, a: dict[str, Any]) -> Value:
    other, alpha = r.value(a["other"]), a["alpha"]
    return other if alpha == 1 else other * alpha


@_handles("add")
def _add(r: _Operations, a: dict[str, Any]) -> Value:
    return r.value(a["self"]) + _scaled(r, a)


@_handles("sub")
def _sub(r: _Operations, a: dict[str, Any]) -> Value:
    return r.value(a["self"]) - _scaled(r, a)


@_handles("rsub")
def _rsub(r: _Operations, a: dict[str, Any]) -> Value:
    other, x = r.value(a["other"]), r.value(a["self"])
    return other - (x if a["alpha"] == 1 else x * a["alpha"])


@_handles("div")
def _div(r: _Operations, a: dict[str, Any]) -> Value:
    x, y, mode = r.value(a["self"]), r.value(a["other"]), a.get("rounding_mode")
    return x / y if mode is None else x // y if mode == "floor" else e.truncated_division(x, y)


@_handles("round")
def _round(r: _Operations, a: dict[str, Any]) -> Value:
    return e.rounded(r.value(a["self"]), a.get("decimals", 0))


@_handles("where")
def _where(r: _Operations, a: dict[str, Any]) -> Value:
    return where(r.value(a["condition"]), r.value(a["self"]), r.value(a["other"]))


@_handles("masked_fill")
def _masked_fill(r: _Operations, a: dict[str, Any]) -> Value:
    return where(r.value(a["mask"]), r.value(a["value"]), r.value(a["self"]))


@_handles("clamp")
def _clamp(r: _Operations, a: dict[str, Any]) -> Value:
    return e.clamp(r.value(a["self"]), *(None if a[name] is None else r.value(a[name]) for name in ("min", "max")))


_HANDLERS["clamp_min"] = lambda r, a: e.clamp(r.value(a["self"]), r.value(a["min"]))
_HANDLERS["clamp_max"] = lambda r, a: e.clamp(r.value(a["self"]), None, r.value(a["max"]))
_HANDLERS["relu"] = _each(e.relu, "self")
_HANDLERS["leaky_relu"] = _each(e.leaky_relu, "self", negative_slope="negative_slope")
_HANDLERS["elu"] = _each(e.elu, "self", alpha="alpha", scale="scale", input_scale="input_scale")
_HANDLERS["selu"] = lambda r, a: e.elu(r.value(a["self"]), 1.6732632423543772, 1.0507009873554805)
_HANDLERS["celu"] = lambda r, a: e.elu(r.value(a["self"]), a["alpha"], 1.0, 1 / a["alpha"])
_HANDLERS["gelu"] = _each(e.gelu, "self", approximate="approximate")
_HANDLERS["silu"] = _each(e.silu, "self")
_HANDLERS["mish"] = _each(e.mish, "self")
_HANDLERS["softplus"] = _each(e.softplus, "self", beta="beta", threshold="threshold")
_HANDLERS["log_sigmoid_forward"] = _each(e.log_sigmoid, "self")
_HANDLERS["hardtanh"] = _each(e.hardtanh, "self", min_val="min_val", max_val="max_val")
_HANDLERS["hardsigmoid"] = _each(e.hardsigmoid, "self")
_HANDLERS["hardswish"] = _each(e.hardswish, "self")
_HANDLERS["hardshrink"] = _each(e.hardshrink, "self", lambd="lambd")
_HANDLERS["softshrink"] = _each(e.softshrink, "self", lambd="lambd")
_HANDLERS["threshold"] = _each(e.threshold, "self", threshold="threshold", value="value")
_HANDLERS["logit"] = _each(e.logit, "self", eps="eps")
_HANDLERS["sinc"] = _each(e.sinc, "self")
_HANDLERS["nan_to_num"] = lambda r, a: e.nan_to_num(r.value(a["self"]), a["nan"], a["posinf"], a["neginf"], _most(a["self"].dtype))


def _reduced(function: Callable[..., Any]) -> Handler:
    def handler(r: _Operations, a: dict[str, Any]) -> Any:
        x, axes = (a["inp"], a["dims"]) if "inp" in a else (a["self"], a.get("dim"))  # prims have names of their own
        return function(r.value(x), axes, a.get("keepdim", False))

    return handler


_HANDLERS |= {name: _reduced(function) for name, function in REDUCTIONS.items()}
_HANDLERS["dot"] = _each(e.dot, "self", "tensor")


def _extremum(name: str, pairwise: str) -> Handler:
    def handler(r: _Operations, a: dict[str, Any]) -> Value:
        if a.get("other") is not None:
            return ELEMENTWISE[pairwise](r.value(a["self"]), r.value(a["other"]))
        if a.get("dim") is not None:
            raise UnrecordableError(f"torch.{name} along an axis, which also gives places; accepted is torch.a{name}")
        return REDUCTIONS[f"a{name}"](r.value(a["self"]))

    return handler


_HANDLERS["max"], _HANDLERS["min"] = _extremum("max", "maximum"), _extremum("min", "minimum")
_HANDLERS["lerp"] = lambda r, a: r.value(a["self"]) + r.value(a["weight"]) * (r.value(a["end"]) - r.value(a["self"]))
_HANDLERS["addcmul"] = lambda r, a: r.value(a["self"]) + r.value(a["tensor1"]) * r.value(a["tensor2"]) * a["value"]
_HANDLERS["addcdiv"] = lambda r, a: r.value(a["self"]) + r.value(a["tensor1"]) / r.value(a["tensor2"]) * a["value"]

# Copies, conversions and new tensors


@_handles("_to_copy", "convert_element_type", "to", "type_as")
def _to_copy(r: _Operations, a: dict[str, Any]) -> Value:
    """Conversions to another float dtype, and to int64, change nothing."""
    x, dtype = r.value(a.get("self", a.get("a"))), a.get("dtype")
    if dtype is None:
        return x
    return e.to_integer_of(x, *_BITS[dtype]) if dtype in _BITS and x.kind != BOOLEAN else x.to(kind_of_dtype(dtype))


for _name in ("clone", "alias", "contiguous", "positive", "_conj", "conj_physical", "resolve_conj", "resolve_neg", "lift"):
    _HANDLERS[_name] = lambda r, a: r.value(a["self"])


@_handles("detach")
def _detached(r: _Operations, a: dict[str, Any]) -> Value:
    """detach() of a captured tensor is another one, without gradient. A graph has no node that stops one of any other value."""
    x = a["self"]
    if x.device != _META and x.is_floating_point():
        return r.detached(x)
    value = r.value(x)
    if value.kind != REAL:
        return value
    if any(each.requires_grad for each in r.captured if each.is_floating_point()):
        raise UnrecordableError("detach() of what is made of a tensor that requires grad; accepted is detach() of that tensor itself")
    r.graph.depends_on_grad |= any(each.is_floating_point() for each in r.captured)
    return value


def _filled(r: _Operations, a: dict[str, Any], number: Any) -> Value:
    """A new tensor of one number: of the size that is given, or the shape of the tensor that it is to be like."""
    value, like = r.value(number), a.get("self")
    dtype = a["dtype"] if a.get("dtype") is not None else None if like is None else like.dtype
    size = a.get("size", () if like is None else r.value(like).shape)
    value = value if dtype is None else value.to(kind_of_dtype(dtype))
    return value.expanded(size) if size else value


_HANDLERS["scalar_tensor"] = lambda r, a: _filled(r, a, a["s"])
for _name in ("full", "full_like", "new_full"):
    _HANDLERS[_name] = lambda r, a: _filled(r, a, a["fill_value"])
_HANDLERS["fill"] = lambda r, a: _filled(r, a, a["value"]) if not isinstance(a["value"], Tensor) else r.value(a["value"])
for _name, _number in (("zeros", 0), ("ones", 1), ("empty", 0)):
    for _full in (_name, f"{_name}_like", f"new_{_name}"):
        _HANDLERS[_full] = partial(_filled, number=_number)


@_handles("arange")
def _arange(r: _Operations, a: dict[str, Any]) -> Value:
    return arange(r.graph, a.get("start", 0), a["end"], a.get("step", 1))


# Indexing and views


@_handles("index", "_unsafe_index")
def _index(r: _Operations, a: dict[str, Any]) -> Value:
    return r.value(a["self"]).index([None if x is None else r.value(x) for x in a["indices"]])


@_handles("index_select")
def _index_select(r: _Operations, a: dict[str, Any]) -> Value:
    x, index = r.value(a["self"]), r.value(a["index"])
    if not index.shape:
        index = index.unsqueezed(0)
    return x.index([None] * axis_of(a["dim"], len(x.shape)) + [index])


@_handles("embedding")
def _embedding(r: _Operations, a: dict[str, Any]) -> Value:
    return r.value(a["weight"]).index([r.value(a["indices"])])


@_handles("take")
def _take(r: _Operations, a: dict[str, Any]) -> Value:
    return r.value(a["self"]).reshaped((-1,)).index([r.value(a["index"])])


_HANDLERS["gather"] = lambda r, a: r.value(a["self"]).gathered(a["dim"], r.value(a["index"]))
_HANDLERS["select"] = lambda r, a: r.value(a["self"]).select(a["dim"], a["index"])
_HANDLERS["unsqueeze"] = lambda r, a: r.value(a["self"]).unsqueezed(a["dim"])
_HANDLERS["permute"] = lambda r, a: r.value(a["self"]).permuted(a["dims"])
_HANDLERS["expand"] = lambda r, a: r.value(a["self"]).expanded(a["size"])
_HANDLERS["flip"] = lambda r, a: r.value(a["self"]).flipped(a["dims"])
_HANDLERS["unbind"] = lambda r, a: [
    r.value(a["self"]).select(a["dim"], n) for n in range(r.value(a["self"]).shape[axis_of(a["dim"], len(r.value(a["self"]).shape))])
]
_HANDLERS["t"] = lambda r, a: r.value(a["self"]).permuted([*range(len(r.value(a["self"]).shape))][::-1])
for _name in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
    _HANDLERS[_name] = lambda r, a: r.value(a["self"]).reshaped(a["size"] if "size" in a else a["shape"])


@_handles("squeeze")
def _squeeze(r: _Operations, a: dict[str, Any]) -> Value:
    axes = a.get("dim")
    return r.value(a["self"]).squeezed(axes if axes is None or isinstance(axes, (list, tuple)) else [axes])


@_handles("transpose")
def _transpose(r: _Operations, a: dict[str, Any]) -> Value:
    x = r.value(a["self"])
    axes = [*range(len(x.shape))]
    first, second = axis_of(a["dim0"], len(axes)), axis_of(a["dim1"], len(axes))
    if axes:
        axes[first], axes[second] = axes[second], axes[first]
    return x.permuted(axes)


@_handles("slice")
def _slice(r: _Operations, a: dict[str, Any]) -> Value:
    return r.value(a["self"]).sliced(a["dim"], a["start"], a["end"], a["step"])


_HANDLERS["cat"] = lambda r, a: concatenated([r.value(x) for x in a["tensors"]], a["dim"])
_HANDLERS["stack"] = lambda r, a: concatenated([r.value(x).unsqueezed(a["dim"]) for x in a["tensors"]], a["dim"])


@_handles("split", "split_with_sizes", "unsafe_split")
def _split(r: _Operations, a: dict[str, Any]) -> list[Value]:
    x, sizes = r.value(a["self"]), a["split_sizes"] if "split_sizes" in a else a["split_size"]
    whole = x.shape[axis_of(a["dim"], len(x.shape))]
    if isinstance(sizes, int):
        sizes = [sizes] * -(-whole // sizes)
    ends = [min(sum(sizes[: n + 1]), whole) for n in range(len(sizes))]
    return [x.sliced(a["dim"], start, end, 1) for start, end in zip([0, *ends], ends, strict=False)]


@_handles("broadcast_tensors")
def _broadcast_tensors(r: _Operations, a: dict[str, Any]) -> list[Value]:
    values = [r.value(x) for x in a["tensors"]]
    shape = broadcast([x.shape for x in values])
    return [x.expanded(shape) for x in values]
