"""What a primitive computes beside its operands, and the attributes by which XLA carries that to python/glue/xla.c."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from .._call import Call, has_swapped_axes
from .._core import ffi, lib
from .._function import FIELDS as FUNCTIONS
from .._graph import decoded
from .._options import AUX, BLOCKS, FULL_BLOCKS, GRADIENTS, SCORES
from ..arrays.base import Array
from ..arrays.jax import JAX, judging

_KINDS = {name: field.type.cname for name, field in ffi.typeof("strobe_attention").fields}
OF_BACKWARD = ("out", "lse", "dout", "dlse")
# Tangents, and what each is the tangent of.
TANGENTS = {f"t{name}": name for name in (*GRADIENTS.values(), *OF_BACKWARD)}


class Program(NamedTuple):
    """A Call without its arrays, which are the first operands of a primitive."""

    names: tuple[str, ...]  # of the call's arrays
    options: tuple[tuple[str, Any], ...]
    aux: tuple[str, ...] = ()
    more: tuple[str, ...] = ()  # the names of the primitive's other operands
    wanted: tuple[str, ...] = ()  # the gradients that the backward computes

    @property
    def operands(self) -> tuple[str, ...]:
        return (*self.names, *self.more)

    def call(self, operands: Sequence[Array]) -> Call:
        """The call on its operands, of which there may be more."""
        return Call(JAX, dict(zip(self.names, operands, strict=False)), dict(self.options), self.aux)

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.options).get(name, default)


def shape_of(x: Array) -> Array:
    """What is known of an array before the program runs; an array of NumPy is known as it is."""
    return x if isinstance(x, np.ndarray) else jax.ShapeDtypeStruct(x.shape, x.dtype)


def abstract(call: Call) -> Call:
    """The call on what is known before the program runs. A block mask is left out where its lists are no longer NumPy's: attention() has
    seen it judged."""
    arrays, options = {name: shape_of(x) for name, x in call.arrays.items()}, call.options
    if any(name in arrays and not isinstance(arrays[name], np.ndarray) for name in BLOCKS):
        arrays = {name: x for name, x in arrays.items() if name not in (*BLOCKS, *FULL_BLOCKS)}
        options = {name: x for name, x in options.items() if name not in ("block_q", "block_k")}
    return Call(call.framework, arrays, options, call.aux)


def judge(call: Call, direction: int, planned: bool = False) -> None:
    """Raises the library's refusal of a call, as one exception with a line for each argument. planned: also if no engine of the CPU takes
    it."""
    with judging():
        structs = abstract(call).example_structs(direction)
        if planned:
            structs.run(lib.strobe_workspace_size, direction, ffi.new("uint64_t *"))
        else:
            structs.run(lib.strobe_explain, direction, ffi.NULL, 0, ffi.new("size_t *"))


def four_axes(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays, those that broadcast to the scores with all axes."""
    return {name: x.reshape((1,) * (4 - x.ndim) + x.shape) if name in SCORES else x for name, x in arrays.items()}


def swapped(program: Program, operands: Mapping[str, Array], results: Mapping[str, Array]) -> tuple[str, ...]:
    """The operands and results whose axes 1 and 2 the handler exchanges."""
    tensors = {**operands, **results} if program.option("bshd") else {}
    return tuple(name for name, x in tensors.items() if has_swapped_axes(name, x, operands))


@lru_cache(maxsize=1024)
def attributes(program: Program, operands: tuple[str, ...], results: tuple[str, ...], swapped: tuple[str, ...]) -> dict[str, Any]:
    """The attributes of a custom call, whose operands and results have these names in strobe_tensors. swapped: see swapped()."""
    found: dict[str, Any] = {
        "operands": " ".join(operands),
        "results": " ".join(results),
        "swapped": " ".join(swapped),
        "threads": np.int64(program.option("threads", 0)),
        "reserved_sms": np.int64(program.option("reserved_sms", 0)),
    }
    for name, x in program.options:
        if name in FUNCTIONS.values():
            found[name] = _nodes(x)
        elif name == "part":
            found[name] = np.array(x, np.int64)
        elif name == "engine":
            found[name] = x
        elif name in _KINDS:
            found[name] = np.float64(x) if _KINDS[name] == "double" else np.int64(x)
            if f"has_{name}" in _KINDS:
                found[f"has_{name}"] = np.int64(1)
    return found


def _nodes(text: str) -> np.ndarray[Any, Any]:
    """A function's graph as integers, 8 for each node."""
    rows = []
    for operation, inputs, more in decoded(text):
        captured = more if operation == "LOAD" else 0
        bits = struct.unpack("q", struct.pack("d", more if operation == "REAL" else 0.0))[0]
        integer = int(more) if more is not None and operation not in ("LOAD", "REAL") else 0
        rows += [getattr(lib, f"STROBE_OP_{operation}"), captured, *[*inputs, 0, 0, 0, 0][:4], bits, integer]
    return np.array(rows, np.int64)


def results_of(program: Program) -> tuple[str, ...]:
    return ("out", "lse", *(name for name in program.aux if name in AUX))
