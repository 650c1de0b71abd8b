"""Records a function of NumPy arrays: it is called once on objects whose operators, and NumPy's functions of them, make nodes.

An array that the function reads cannot see that its index is such an object. So the function that is called is a copy, in which arrays in
closure cells, defaults, globals, containers and attributes are replaced by objects of the same kind."""

from __future__ import annotations

import functools
import operator
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import _elementwise as e
from ._elementwise import ELEMENTWISE, REDUCTIONS
from ._graph import BOOLEAN, INTEGER, REAL, Graph, NoFormError, UnrecordableError, Value, concatenated, where
from ._watched import Watch, hides_state, is_array, is_trusted, names_of, names_of_class

_DTYPES = {BOOLEAN: np.dtype(np.bool_), INTEGER: np.dtype(np.int64)}
_OF_DTYPES = {"b": BOOLEAN, "i": INTEGER, "u": INTEGER, "f": REAL}


def kind_of_dtype(dtype: Any) -> str:
    dtype = np.dtype(dtype)
    found = REAL if dtype.name == "bfloat16" else _OF_DTYPES.get(dtype.kind)
    if found is None:
        raise UnrecordableError(f"an array of {dtype}; accepted are real numbers, integers and bools")
    return found


def record(
    function: Callable[..., Any], arguments: Sequence[tuple[str, str]], in_float64: bool, seen: Watch | None = None
) -> tuple[Graph, Any, list[Any]]:
    """The graph of function(*arguments), its result (a Value, or what it returns that is none), and the arrays that it captures.

    arguments: the operation and the kind of each; seen: what the function reads, which is incomplete if arrays are left in it."""
    graph = _Graph(NumPyValue, in_float64)
    copies = _Copies(graph)
    copy = copies.of(function)
    seen = Watch() if seen is None else seen
    if not copies.replace_all(seen, copy):
        seen.is_complete = False  # numbers of an array may become constants
    try:
        found = copy(*(graph.argument(operation, kind) for operation, kind in arguments))
    except (TypeError, UnrecordableError) as failed:
        foreign = [x for n in seen.arrays.values() if not isinstance(x := seen.found[n], np.ndarray)]
        if not foreign:
            raise
        words = f"a {type(foreign[0]).__module__}.{type(foreign[0]).__name__} beside arrays of NumPy; accepted is what its numpy() gives"
        raise UnrecordableError(words).with_traceback(failed.__traceback__) from None
    if isinstance(found, np.generic):
        found = found.item()
    if isinstance(found, Value):
        graph.of(found)
    if isinstance(found, np.ndarray):
        found = copies.of(found)
    return graph, found, copies.captured


class _Graph(Graph):
    def of(self, x: Any) -> Value:
        return super().of(x.item() if isinstance(x, np.generic) else x)


class _Copies:
    """Copies of objects with Values in place of arrays."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.captured: list[Any] = []
        self._known: dict[int, Any] = {}
        self._alive: list[Any] = []
        self._made_classes: list[type] = []

    def of(self, x: Any) -> Any:
        if id(x) not in self._known:
            self._alive.append(x)
            self._known[id(x)] = x  # what refers to itself keeps the original
            self._known[id(x)] = self._made(x)
        return self._known[id(x)]

    def replace_all(self, seen: Watch, copy: Any) -> bool:
        """Whether the copy of a function has Values and copies wherever the function has arrays, or what was copied."""
        values = [copy]
        for step, x in zip(seen.steps, seen.found[1:], strict=True):
            parent = values[step.parent]
            try:
                if step.fetch is names_of_class and parent in self._made_classes:
                    of = parent.__mro__[1].__mro__[step.key].__dict__
                    values.append(of if step.key else {**of, **vars(parent)})
                else:
                    values.append(step.fetch(parent, step.key))
            except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                return False
            copied = self._known.get(id(x), x)
            if (is_array(x) and not isinstance(values[-1], Value)) or (copied is not x and copied is not values[-1]):
                return False
        return True

    def _made(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            self.captured.append(x)
            array = self.graph.captured(len(self.captured) - 1, x.shape, kind_of_dtype(x.dtype))
            array.whole = _whole(x.dtype)  # type: ignore[attr-defined]
            return array
        if isinstance(x, types.FunctionType):
            return x if is_trusted(x.__globals__.get("__name__")) else self._function(x)
        if isinstance(x, types.MethodType):
            parts = self.of(x.__func__), self.of(x.__self__)
            return x if all(map(operator.is_, parts, (x.__func__, x.__self__))) else types.MethodType(*parts)
        if type(x) is functools.partial:
            before = (x.func, *x.args, *x.keywords.values(), *vars(x).values())
            function, keywords, more = self.of(x.func), self._entries(x.keywords), self._entries(vars(x))
            arguments = [*map(self.of, x.args)]
            if all(map(operator.is_, (function, *arguments, *keywords.values(), *more.values()), before)):
                return x
            partial = functools.partial(function, *arguments, **keywords)
            partial.__dict__.update(more)
            return partial
        if type(x) in (tuple, list) or (isinstance(x, tuple) and hasattr(type(x), "_fields")):
            found = [self.of(each) for each in x]
            made = type(x) if type(x) in (tuple, list) else type(x)._make
            return x if all(old is new for old, new in zip(x, found, strict=True)) else made(found)
        if type(x) in (dict, OrderedDict):
            items = self._entries(x)
            return x if all(x[name] is items[name] for name in x) else type(x)(items)
        if type(x) is types.SimpleNamespace:
            items = self._entries(vars(x))
            return x if all(map(operator.is_, vars(x).values(), items.values())) else types.SimpleNamespace(**items)
        if isinstance(x, type) or is_trusted(type(x).__module__) or any(map(hides_state, type(x).__mro__)) or not hasattr(x, "__dict__"):
            return x
        return self._instance(x)

    def _entries(self, x: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.of(each) for name, each in x.items()}

    def _function(self, x: types.FunctionType) -> types.FunctionType:
        """A function that reads copies, or x if there are none."""
        own = x.__globals__
        read = self._entries({name: own[name] for name in names_of(x.__code__).of_globals & own.keys()})
        cells = []
        for cell in x.__closure__ or ():
            try:
                new = self.of(cell.cell_contents)
                cells.append(cell if new is cell.cell_contents else types.CellType(new))
            except ValueError:  # it has no value yet
                cells.append(cell)
        more = self.of(x.__defaults__), self.of(x.__kwdefaults__), *self._entries(x.__dict__).values()
        before = *(x.__closure__ or ()), x.__defaults__, x.__kwdefaults__, *x.__dict__.values(), *(own[name] for name in read)
        if all(map(operator.is_, (*cells, *more, *read.values()), before)):
            return x
        found = types.FunctionType(x.__code__, own | read, x.__name__, more[0], tuple(cells))
        found.__kwdefaults__ = more[1]
        found.__dict__.update(zip(x.__dict__, more[2:], strict=True))
        return found

    def _instance(self, x: Any) -> Any:
        """An object of the same class, of which methods see the attributes as copies, but globals as they are."""
        kind = type(x)
        try:
            found = object.__new__(kind)
        except TypeError:
            return x
        namespace = self._entries(vars(x))
        own = {name: method for each in kind.__mro__[::-1] for name, method in vars(each).items()}
        own = {name: new for name, method in own.items() if type(method) is types.FunctionType and (new := self.of(method)) is not method}
        own.pop("__new__", None)
        if not own and all(vars(x)[name] is namespace[name] for name in namespace):
            return x
        found.__dict__.update(namespace)
        # A class of the same name, whose methods are copies.
        found.__class__ = type(kind.__name__, (kind,), {**own, "__slots__": ()})
        self._made_classes.append(found.__class__)
        return found


def _operand(graph: Graph, x: Any) -> Any:
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, np.ndarray) and x.ndim == 0:
        return x.item()
    if isinstance(x, np.ndarray):
        accepted = "accepted are arrays in closures, defaults, globals and attributes"
        raise UnrecordableError(f"an array that the function gets in a way that is not followed; {accepted}")
    return graph.of(x)


_UFUNCS: dict[str, Callable[..., Any]] = {
    **{name: function for name, function in ELEMENTWISE.items() if isinstance(getattr(np, name, None), np.ufunc)},
    "absolute": abs,
    "add": lambda x, y: x + y,
    "arccos": ELEMENTWISE["acos"],
    "arccosh": ELEMENTWISE["acosh"],
    "arcsin": ELEMENTWISE["asin"],
    "arcsinh": ELEMENTWISE["asinh"],
    "arctan": ELEMENTWISE["atan"],
    "arctan2": e.atan2,
    "arctanh": ELEMENTWISE["atanh"],
    "cbrt": lambda x: e.sign(x) * abs(x.to(REAL)) ** (1 / 3),
    "clip": e.clamp,
    "conjugate": lambda x: x,
    "degrees": ELEMENTWISE["rad2deg"],
    "divide": lambda x, y: x / y,
    "equal": lambda x, y: x == y,
    "erf": ELEMENTWISE["erf"],
    "erfc": ELEMENTWISE["erfc"],
    "expit": ELEMENTWISE["sigmoid"],
    "fabs": lambda x: abs(x.to(REAL)),
    "greater": lambda x, y: x > y,
    "greater_equal": lambda x, y: x >= y,
    "invert": lambda x: ~x,
    "left_shift": lambda x, y: x << y,
    "less": lambda x, y: x < y,
    "less_equal": lambda x, y: x <= y,
    "matmul": lambda x, y: _dot(x, y),
    "log_expit": e.log_sigmoid,
    "multiply": lambda x, y: x * y,
    "negative": lambda x: -x,
    "not_equal": lambda x, y: x != y,
    "positive": lambda x: x,
    "power": lambda x, y: x**y,
    "float_power": lambda x, y: x.to(REAL) ** y,
    "radians": ELEMENTWISE["deg2rad"],
    "right_shift": lambda x, y: x >> y,
    "rint": ELEMENTWISE["round"],
    "subtract": lambda x, y: x - y,
    "true_divide": lambda x, y: x / y,
}


def _whole(dtype: Any) -> Any:
    """The dtype, if it is of integers that wrap around before those of 64 bits do; otherwise None."""
    dtype = np.dtype(dtype)
    return dtype if dtype.kind in "iu" and dtype.itemsize < 8 else None


def _promoted(found: Any, operands: Sequence[Any]) -> Any:
    """found with the dtype of the operands, if it is of integers. Numbers of Python take the dtype of the arrays."""
    if isinstance(found, NumPyValue) and found.kind == INTEGER:
        own = [x.whole or _DTYPES[INTEGER] for x in operands if isinstance(x, NumPyValue) and x.kind == INTEGER and x.number is None]
        found.whole = _whole(np.result_type(*own)) if own else None
    return found


class NumPyValue(Value):
    """A Value that NumPy's functions take as an array. whole: its dtype, if it is of integers of fewer than 64 bits."""

    __slots__ = ("whole",)
    __hash__ = Value.__hash__
    __array_priority__ = 1000

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.whole: Any = None

    def _made(self, shape: tuple[int, ...], at: Any, kind: str = "") -> Value:
        found = super()._made(shape, at, kind)
        found.whole = self.whole if found.kind == self.kind else None  # type: ignore[attr-defined]
        return found

    def _each(self, build: Any, *others: Any, takes: str = "", gives: str = "") -> Value:
        """Integers of fewer than 64 bits wrap around."""
        found = super()._each(build, *others, takes=takes, gives=gives)
        dtype = _promoted(found, [self, *others]).whole
        if dtype is None:
            return found
        limits = np.iinfo(dtype)
        for x in others:
            number = x.number if isinstance(x, Value) else x
            if type(number) is int and not limits.min <= number <= limits.max:
                words = f"{number} beside an array of {dtype}; accepted are {limits.min} to {limits.max}, or astype(np.int64) of the array"
                raise UnrecordableError(words)
        found.whole = None  # type: ignore[attr-defined]
        found = e.to_integer_of(found, 8 * dtype.itemsize, dtype.kind == "i")
        found.whole = dtype  # type: ignore[attr-defined]
        return found

    @property
    def dtype(self) -> Any:
        if self.whole:
            return self.whole
        return _DTYPES[self.kind] if self.kind != REAL else np.dtype(np.float64 if self.graph.in_float64 else np.float32)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def T(self) -> Value:  # noqa: N802
        return self.permuted([*range(self.ndim)][::-1])

    def __len__(self) -> int:
        if not self.shape:
            raise UnrecordableError("len() of a scalar, or an index of what is no array; accepted is an index of an array")
        return self.shape[0]

    def __iter__(self) -> Any:
        return iter([self[n] for n in range(len(self))])

    def __getitem__(self, index: Any) -> Any:
        items = [*index] if isinstance(index, tuple) else [index]
        items = [self.graph.number(int(x)) if isinstance(x, np.integer) else x for x in items]
        wide = sum(item is not None and item is not Ellipsis for item in items)
        if any(item is Ellipsis for item in items):
            at = next(n for n, item in enumerate(items) if item is Ellipsis)
            items[at : at + 1] = [slice(None)] * (self.ndim - wide)
        found: Value = self
        values: list[Value | None] = []
        axis = 0
        for item in items:
            if isinstance(item, Value):
                values += [None] * (axis - len(values)) + [item]
                axis += 1
            elif item is None:
                found, axis = found.unsqueezed(axis), axis + 1
            elif isinstance(item, slice):
                start, stop, step = item.indices(found.shape[axis])
                if step < 0:
                    raise UnrecordableError("a slice with a negative step; accepted is np.flip")
                found, axis = found.sliced(axis, start, stop, step), axis + 1
            elif isinstance(item, int) and not isinstance(item, bool):
                found = found.select(axis, item)
            else:
                accepted = "accepted are integers, slices, None and ..."
                raise UnrecordableError(f"an index of type {type(item).__name__}; {accepted}")
        return found.index(values) if values else found

    def __setitem__(self, index: Any, x: Any) -> None:
        raise UnrecordableError("a write into an array; accepted is np.where, which makes a new one")

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and hasattr(np.ndarray, name):
            raise NoFormError(f".{name} of an array")
        raise AttributeError(name)

    def __array__(self, *_: Any, **__: Any) -> Any:
        self._is_no_index()

    def item(self) -> Any:
        self._has_no_number()

    def astype(self, dtype: Any, **_: Any) -> Value:
        of = np.dtype(dtype)
        found = self._made(self.shape, self.at).to(kind_of_dtype(of))
        found.whole = None  # type: ignore[attr-defined]
        if _whole(of):
            found = e.to_integer_of(found, 8 * of.itemsize, of.kind == "i")
            found.whole = _whole(of)  # type: ignore[attr-defined]
        return found

    def copy(self) -> Value:
        return self

    def clip(self, min: Any = None, max: Any = None) -> Value:
        return _promoted(e.clamp(self, min, max), [self, min, max])

    def reshape(self, *shape: Any) -> Value:
        return self.reshaped(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)

    def transpose(self, *axes: Any) -> Value:
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        return self.permuted(order or [*range(self.ndim)][::-1])

    def take(self, index: Any, axis: Any = None) -> Value:
        return _take(self, index, axis)

    def all(self, axis: Any = None, *, keepdims: bool = False) -> Value:
        return REDUCTIONS["all"](self, axis, keepdims)

    def any(self, axis: Any = None, *, keepdims: bool = False) -> Value:
        return REDUCTIONS["any"](self, axis, keepdims)

    def max(self, axis: Any = None, *, keepdims: bool = False) -> Value:
        return REDUCTIONS["amax"](self, axis, keepdims)

    def mean(self, axis: Any = None, *, keepdims: bool = False) -> Value:
        return REDUCTIONS["mean"](self, axis, keepdims)

    def min(self, axis: Any = None, *, keepdims: bool = False) -> Value:
        return REDUCTIONS["amin"](self, axis, keepdims)

    def prod(self, axis: Any = None, *, keepdims: bool = False) -> Value:
        return REDUCTIONS["prod"](self, axis, keepdims)

    def sum(self, axis: Any = None, *, keepdims: bool = False) -> Value:
        return REDUCTIONS["sum"](self, axis, keepdims)

    def dot(self, other: Any) -> Value:
        return _dot(self, other)

    def __matmul__(self, other: Any) -> Value:
        return _dot(self, other)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__":
            raise NoFormError(f"{ufunc.__name__}.{method}")
        if kwargs.keys() - {"dtype", "casting"}:
            raise UnrecordableError(f"{ufunc.__name__} with {', '.join(sorted(kwargs))}; accepted are its operands alone")
        if (function := _UFUNCS.get(ufunc.__name__)) is None:
            raise NoFormError(f"np.{ufunc.__name__}")
        operands = [_operand(self.graph, x) for x in inputs]
        found = _promoted(function(self.graph.of(operands[0]), *operands[1:]), operands)
        return found.astype(kwargs["dtype"]) if kwargs.get("dtype") is not None else found

    def __array_function__(self, func: Any, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if (function := _FUNCTIONS.get(func.__name__)) is None:
            raise NoFormError(f"np.{func.__name__}")
        operands = [_operand(self.graph, x) if isinstance(x, (np.ndarray, np.generic)) else x for x in args]
        if operands and isinstance(operands[0], (bool, int, float)):
            operands[0] = self.graph.of(operands[0])
        found = function(*operands, **kwargs)
        lists = [x for each in args if isinstance(each, (list, tuple)) for x in each]
        return _promoted(found, [*args, *lists]) if func.__name__ in _PROMOTES else found


_PROMOTES = frozenset({"where", "select", "clip", "concatenate", "stack"})


def _most(x: Value) -> float:
    """The largest real number of the call."""
    return float(np.finfo(np.float64 if x.graph.in_float64 else np.float32).max)


def _where(condition: Value, x: Any, y: Any) -> Value:
    return where(condition, *(_operand(condition.graph, each) for each in (x, y)))


def _take(x: Value, index: Any, axis: Any = None) -> Value:
    if axis is None:
        return x.reshaped((-1,)).index([x.graph.of(index)])
    return x.index([None] * (axis % len(x.shape)) + [x.graph.of(index)])


def _select(conditions: Sequence[Value], choices: Sequence[Any], default: Any = 0) -> Value:
    found = default
    for condition, choice in [*zip(conditions, choices, strict=True)][::-1]:
        found = where(condition, choice, found)
    return found


def _dot(x: Value, y: Any) -> Value:
    other = x.graph.of(y)
    if len(x.shape) != 1 or len(other.shape) != 1:
        raise UnrecordableError(f"a matrix product of shapes {x.shape} and {other.shape}; accepted are two vectors")
    return e.dot(x, other)


def _over_axes(name: str) -> Callable[..., Any]:
    return lambda x, axis=None, keepdims=False: REDUCTIONS[name](x, axis, keepdims)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _over_axes(name) for name in REDUCTIONS},
    "max": _over_axes("amax"),
    "min": _over_axes("amin"),
    "dot": _dot,
    "around": e.rounded,
    "broadcast_to": lambda x, shape: x.expanded(shape),
    "clip": lambda x, a_min=None, a_max=None, **_: e.clamp(x, a_min, a_max),
    "copy": lambda x, **_: x,
    "expand_dims": lambda x, axis: x.unsqueezed(axis),
    "flip": lambda x, axis=None: x.flipped([*range(len(x.shape))] if axis is None else [axis]),
    "full_like": lambda x, value, **_: x.graph.of(value).to(x.kind),
    "nan_to_num": lambda x, copy=True, nan=0.0, posinf=None, neginf=None: e.nan_to_num(x, nan, posinf, neginf, _most(x)),
    "ndim": lambda x: x.ndim,
    "ones_like": lambda x, **_: x.graph.of(1).to(x.kind),
    "ravel": lambda x, **_: x.reshaped((-1,)),
    "reshape": lambda x, shape, **_: x.reshape(shape),
    "round": e.rounded,
    "select": _select,
    "shape": lambda x: x.shape,
    "sinc": e.sinc,
    "concatenate": lambda values, axis=0: concatenated(values, axis),
    "stack": lambda values, axis=0: concatenated([x.unsqueezed(axis) for x in values], axis),
    "squeeze": lambda x, axis=None: x.squeezed(None if axis is None else [axis]),
    "take": _take,
    "transpose": lambda x, axes=None: x.transpose(*(axes or ())),
    "where": _where,
    "zeros_like": lambda x, **_: x.graph.of(0).to(x.kind),
}
