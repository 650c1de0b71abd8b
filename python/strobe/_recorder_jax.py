"""Records a function of JAX: jax.make_jaxpr traces it on scalars, and each equation of the jaxpr makes nodes.

Arrays and tracers that the function closes over are the constants of the jaxpr: they are captured, and have gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _elementwise as e
from ._elementwise import ELEMENTWISE, REDUCTIONS
from ._graph import BOOLEAN, BRANCH, INTEGER, REAL, Graph, Indices, NoFormError, UnrecordableError, Value, concatenated, where
from ._watched import Watch

_INLINE = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat", "remat2"}
_IDENTITY = {"copy", "copy_p", "reduce_precision", "pvary", "optimization_barrier"}


def _kind(dtype: Any) -> str:
    if jnp.issubdtype(dtype, jnp.bool_):
        return BOOLEAN
    if jnp.issubdtype(dtype, jnp.integer):
        return INTEGER
    if jnp.issubdtype(dtype, jnp.floating):
        return REAL
    raise UnrecordableError(f"an array of {dtype}; accepted are real numbers, integers and bools")


def record(
    function: Callable[..., Any], arguments: Sequence[tuple[str, str]], in_float64: bool, seen: Watch | None = None
) -> tuple[Graph, Any, list[Any]]:
    """As _recorder_numpy.record()."""
    dtypes = {REAL: np.float64 if in_float64 else np.float32, INTEGER: np.int32}
    try:
        closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct((), dtypes[kind]) for _, kind in arguments))
    except jax.errors.TracerBoolConversionError as failed:
        raise UnrecordableError(BRANCH.format("jnp")).with_traceback(failed.__traceback__) from None
    except (jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError, jax.errors.ConcretizationTypeError) as failed:
        words = "an array of JAX is turned into one of NumPy, or into a number of Python; accepted are functions of jax.numpy, and "
        words += "jnp.asarray(table)[h] in place of table[h]"
        raise UnrecordableError(words).with_traceback(failed.__traceback__) from None
    if len(closed.jaxpr.outvars) != 1:
        raise UnrecordableError(f"the function returns {len(closed.jaxpr.outvars)} arrays; accepted is one scalar")
    graph = Graph(Value, in_float64)
    constants = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in closed.consts]
    captured = [graph.captured(n, x.shape, _kind(x.dtype)) for n, x in enumerate(constants)]
    (found,) = _Recorder(graph).run(closed.jaxpr, captured, [graph.argument(name, kind) for name, kind in arguments])
    return graph, found, constants


class _Recorder:
    """Makes the values of a jaxpr's variables, from those of its constants and arguments."""

    def __init__(self, graph: Graph):
        self.graph = graph
        # jnp makes select(n < 0, n, n + size) of an index n. A load does that by itself, and how n is made says how a gradient is summed.
        # By the id of a value, which is kept alive: n < 0 → n; n + size → (n, size); the selection → (n, size).
        self._negative: dict[int, tuple[Value, Value]] = {}
        self._moved: dict[int, tuple[Value, Value, int]] = {}
        self._wrapped: dict[int, tuple[Value, Value, int]] = {}
        self._parts: dict[int, tuple[Value, list[Value]]] = {}  # of a vector that was concatenated from single elements: these

    def run(self, jaxpr: Any, constants: Sequence[Value], arguments: Sequence[Value]) -> list[Value]:
        known: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))

        def read(x: Any) -> Value:
            return self._literal(x.val) if hasattr(x, "val") else known[x]

        for equation in jaxpr.eqns:
            given = [*map(read, equation.invars)]
            found = self._equation(equation, given)
            known.update(zip(equation.outvars, found, strict=True))
        return [*map(read, jaxpr.outvars)]

    def _literal(self, x: Any) -> Value:
        x = np.asarray(x)
        number = x.reshape(-1)[0].astype(np.float64).item() if _kind(x.dtype) == REAL else x.reshape(-1)[0].item()
        return self.graph.number(number).expanded(x.shape) if x.shape else self.graph.number(number)

    def _equation(self, equation: Any, given: list[Value]) -> list[Value]:
        name, p = equation.primitive.name, equation.params
        if name in _INLINE:
            inner = p.get("jaxpr") or p.get("call_jaxpr") or p.get("fun_jaxpr")
            named = {"floor_divide": operator.floordiv, "remainder": operator.mod}.get(p.get("name", ""))
            if named is not None and all(not x.shape for x in given):
                return [self._typed(named(*given), equation.outvars[0])]
            if getattr(inner, "consts", ()):
                raise UnrecordableError(
                    f"{p.get('name', name)}, which holds arrays of its own; accepted are arrays that the function reads"
                )
            return self.run(getattr(inner, "jaxpr", inner), (), given)
        if len(equation.outvars) != 1:
            raise NoFormError(f"jax.lax.{name}")
        return [self._typed(self._one(name, p, given, equation.outvars[0].aval), equation.outvars[0])]

    def _typed(self, found: Value, of: Any) -> Value:
        """found, of the kind of a variable."""
        kind = _kind(of.aval.dtype)
        return found if found.kind == kind else found.to(kind)

    def _one(self, name: str, p: dict[str, Any], given: list[Value], aval: Any) -> Value:
        if name in _IDENTITY:
            return given[0]
        if name in _OPERATIONS:
            found = _OPERATIONS[name](*given)
            self._notice(name, given, found)
            return found
        if name in _REDUCTIONS:
            return REDUCTIONS[_REDUCTIONS[name]](given[0], [*p["axes"]])
        own: Callable[..., Value] | None = getattr(self, f"_{name}", None)
        if own is None:
            raise NoFormError(f"jax.lax.{name}")
        return own(p, aval, *given)

    def _notice(self, name: str, given: list[Value], found: Value) -> None:
        """Remembers the parts of an index that jnp wraps."""
        if name == "lt" and given[1].number == 0:
            self._negative[id(found)] = found, given[0]
        if name == "add" and isinstance(given[1].number, int):
            self._moved[id(found)] = found, given[0], given[1].number

    def _select_n(self, p: Any, aval: Any, which: Value, *cases: Value) -> Value:
        if which.kind == BOOLEAN:
            found = where(which, cases[1], cases[0])
            negative, moved = self._negative.get(id(which)), self._moved.get(id(cases[1]))
            if negative and moved and negative[1] is moved[1] is cases[0]:
                self._wrapped[id(found)] = found, *moved[1:]
            return found
        found = cases[-1]
        for n, case in reversed([*enumerate(cases[:-1])]):
            found = where(which <= n, case, found)
        return found

    def _like(self, found: Value, x: Value, made: Callable[[Value], Value]) -> Value:
        """found, which is made(x), and is a wrapped index if x is."""
        if (wrapped := self._wrapped.get(id(x))) is not None:
            self._wrapped[id(found)] = found, made(wrapped[1]), wrapped[2]
        return found

    def _convert_element_type(self, p: Any, aval: Any, x: Value) -> Value:
        kind, dtype = _kind(aval.dtype), np.dtype(aval.dtype)
        if kind == INTEGER and x.kind != BOOLEAN and (dtype.itemsize < 4 or dtype == np.uint32):
            return e.to_integer_of(x, 8 * dtype.itemsize, dtype.kind == "i")
        return x if x.kind == kind else x.to(kind)

    def _broadcast_in_dim(self, p: Any, aval: Any, x: Value) -> Value:
        places = p["broadcast_dimensions"]

        def made(x: Value) -> Value:
            def at(indices: Indices) -> int:
                return x.at(tuple(self.graph.zero if n == 1 else indices[place] for n, place in zip(x.shape, places, strict=True)))

            return x._made(tuple(p["shape"]), at) if tuple(p["shape"]) != x.shape else x

        return self._like(made(x), x, made)

    def _reshape(self, p: Any, aval: Any, x: Value) -> Value:
        return self._like(x.reshaped(aval.shape), x, lambda x: x.reshaped(aval.shape))

    def _squeeze(self, p: Any, aval: Any, x: Value) -> Value:
        return self._like(x.squeezed(p["dimensions"]), x, lambda x: x.squeezed(p["dimensions"]))

    def _expand_dims(self, p: Any, aval: Any, x: Value) -> Value:
        return self._reshape(p, aval, x)

    def _transpose(self, p: Any, aval: Any, x: Value) -> Value:
        return x.permuted(p["permutation"])

    def _rev(self, p: Any, aval: Any, x: Value) -> Value:
        return x.flipped(p["dimensions"])

    def _slice(self, p: Any, aval: Any, x: Value) -> Value:
        strides = p["strides"] or (1,) * len(x.shape)
        for axis, (start, stop, step) in enumerate(zip(p["start_indices"], p["limit_indices"], strides, strict=True)):
            x = x.sliced(axis, start, stop, step)
        return x

    def _concatenate(self, p: Any, aval: Any, *values: Value) -> Value:
        found = concatenated(values, p["dimension"])
        if p["dimension"] == len(aval.shape) - 1 and all(x.shape[-1] == 1 for x in values):
            self._parts[id(found)] = found, [*values]
        return found

    def _stack(self, p: Any, aval: Any, *values: Value) -> Value:
        axis = p["axis"] if "axis" in p else p["dimension"]
        return self._concatenate({"dimension": axis}, aval, *(x.unsqueezed(axis) for x in values))

    def _iota(self, p: Any, aval: Any) -> Value:
        graph, axis = self.graph, p["dimension"]
        return graph.value(graph, tuple(p["shape"]), INTEGER, lambda indices: indices[axis])

    def _clamp(self, p: Any, aval: Any, least: Value, x: Value, most: Value) -> Value:
        return e.clamp(x, least, most)

    def _integer_pow(self, p: Any, aval: Any, x: Value) -> Value:
        return x ** p["y"] if p["y"] >= 0 else 1.0 / x ** -p["y"]

    def _round(self, p: Any, aval: Any, x: Value) -> Value:
        if int(p["rounding_method"]) != 1:
            raise NoFormError("jax.lax.round away from zero")
        return x._whole("ROUND")

    def _start(self, n: Value, indices: Indices, size: int) -> int:
        """The node of an index into an axis of this size."""
        wrapped = self._wrapped.get(id(n))
        return wrapped[1].at(indices) if wrapped is not None and wrapped[2] == size else n.at(indices)

    def _dynamic_slice(self, p: Any, aval: Any, x: Value, *starts: Value) -> Value:
        sizes = p["slice_sizes"]

        def at(indices: Indices) -> int:
            own = [self._within(n, (), size, taken, place) for n, size, taken, place in zip(starts, x.shape, sizes, indices, strict=True)]
            return x.at(tuple(own))

        return x._made(tuple(sizes), at)

    def _within(self, start: Value, indices: Indices, size: int, taken: int, place: int | None) -> int:
        """The node of start + place, of `taken` elements of an axis of this size; place: None for the first element."""
        add, constant = self.graph.add, self.graph.constant
        if taken == size and size != 1 and place is not None:
            return place
        first = self._start(start, indices, size)
        if taken == 1 or place is None:
            return first
        first = add("MINIMUM", add("MAXIMUM", first, self.graph.zero), constant(size - taken, INTEGER))
        return add("ADD", first, place)

    def _gather(self, p: Any, aval: Any, x: Value, index: Value) -> Value:
        numbers, sizes = p["dimension_numbers"], p["slice_sizes"]
        if numbers.operand_batching_dims or numbers.start_indices_batching_dims:
            raise NoFormError("jax.lax.gather with batching dimensions")
        kept = [axis for axis in range(len(x.shape)) if axis not in numbers.collapsed_slice_dims]
        batch = [axis for axis in range(len(aval.shape)) if axis not in numbers.offset_dims]
        parts = self._parts.get(id(index))

        def of(axis: int) -> Value:
            if axis not in numbers.start_index_map:
                return self.graph.number(0).expanded(index.shape[:-1])
            k = numbers.start_index_map.index(axis)
            whole = parts[1][k] if parts else index
            drop: Callable[[Value], Value] = lambda n: n.squeezed([-1]) if n.shape[-1] == 1 else n.select(-1, k)  # noqa: E731
            return self._like(drop(whole), whole, drop)

        starts = [of(axis) for axis in range(len(x.shape))]

        def at(indices: Indices) -> int:
            of_batch = tuple(indices[axis] for axis in batch)
            places = {axis: indices[numbers.offset_dims[n]] for n, axis in enumerate(kept)}
            own = [self._within(starts[axis], of_batch, x.shape[axis], sizes[axis], places.get(axis)) for axis in range(len(x.shape))]
            return x.at(tuple(own))

        return x._made(tuple(aval.shape), at)


def _divided(x: Value, y: Value) -> Value:
    return x / y if REAL in (x.kind, y.kind) else e.truncated_division(x, y)


_SAME = (
    *("exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    *("asinh", "acosh", "atanh", "erf", "erfc", "floor", "ceil", "abs", "sign", "square", "atan2", "eq", "ne", "lt", "le", "gt", "ge"),
)
_OPERATIONS: dict[str, Callable[..., Value]] = {
    **{name: ELEMENTWISE[name] for name in _SAME},
    "add": operator.add,
    "add_any": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _divided,
    "rem": e.fmod,
    "max": e.maximum,
    "min": e.minimum,
    "pow": operator.pow,
    "neg": operator.neg,
    "not": operator.invert,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shift_left": operator.lshift,
    "shift_right_arithmetic": operator.rshift,
    "logistic": ELEMENTWISE["sigmoid"],
    "is_finite": e.isfinite,
}
_REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_max": "amax",
    "reduce_min": "amin",
    "reduce_prod": "prod",
    "reduce_and": "all",
    "reduce_or": "any",
}
