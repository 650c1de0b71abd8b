"""Compiles kernels into the cache, for GPUs that need not be present."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from ._abi import BACKWARD, CUDA, DTYPES, FORWARD, text
from ._call import Structs
from ._core import ffi, lib
from ._function import CAPTURED
from ._options import GRADIENTS
from ._part import is_partial

_TEXT_BYTES = 1 << 16


class Kernel(NamedTuple):
    name: str
    registers: int
    spilled: int  # bytes
    serialized: bool  # ptxas serializes its wgmma
    compiled: bool  # compiled now; otherwise found in the cache


class Shape(NamedTuple):
    """A tensor's shape and dtype. It has no values."""

    shape: tuple[int, ...]
    dtype: str
    within: str = ""  # the array, named before it, whose first columns these are; "": memory of its own

    @property
    def ndim(self) -> int:
        return len(self.shape)


def prewarm(arrays: Mapping[str, Shape], options: Mapping[str, Any], backward: bool, compute_capability: int) -> list[Kernel]:
    """Compiles the kernels that strobe.attention would run on a GPU of this compute capability (90 for 9.0), or finds them in the cache.

    arrays: q, k, v and any of _options.INPUTS, in the library's layout; options: those of _options.FIELDS that are not at their
    default.
    Raises as strobe.attention does; RuntimeError where NVRTC is missing."""
    return [_kernel(line) for line in _said(lib.strobe_prewarm, arrays, options, backward, compute_capability)]


def kernels(arrays: Mapping[str, Shape], options: Mapping[str, Any], backward: bool, compute_capability: int) -> dict[str, bool]:
    """The names of the kernels that prewarm would return, and whether each is in the cache. Compiles nothing; raises as prewarm does."""
    lines = (line.split(" ", 1) for line in _said(lib.strobe_kernels, arrays, options, backward, compute_capability))
    return {name: where == "cached" for where, name in lines}


def _said(function: Any, arrays: Mapping[str, Shape], options: Mapping[str, Any], backward: bool, compute_capability: int) -> list[str]:
    made = dict(_results(arrays, backward, is_partial(dict(options)), options.get("out_dtype") or "bfloat16"))
    structs = Structs(dict(arrays), made, dict(options), _Addresses(), lambda _: None)
    chars = ffi.new("char[]", _TEXT_BYTES)
    structs.run_without_execution(function, BACKWARD if backward else FORWARD, compute_capability, chars, _TEXT_BYTES, ffi.NULL)
    return text(chars).splitlines()


def _kernel(line: str) -> Kernel:
    how, registers, spilled, serialized, name = line.split(" ", 4)
    return Kernel(name, int(registers), int(spilled), serialized == "1", how == "compiled")


def _results(arrays: Mapping[str, Shape], backward: bool, partial: bool, beside_scales: str) -> Iterator[tuple[str, Shape]]:
    q, v = arrays["q"], arrays["v"]
    dtype = beside_scales if "q_scale" in arrays else q.dtype
    out = Shape((*q.shape[:-1], v.shape[-1] * (2 if v.dtype == "uint8" else 1)), dtype)
    rows = (q.shape[1], q.shape[0]) if len(q.shape) == 3 else q.shape[:-1]
    sum_dtype = "float64" if q.dtype == "float64" else "float32"
    if partial and backward:
        yield "delta", Shape(rows, sum_dtype)
    else:
        yield "out", Shape(out.shape, sum_dtype) if partial else out
    yield "lse", Shape((2, *rows) if partial else rows, sum_dtype)
    if backward:
        yield "dout", out
        for name, of in GRADIENTS.items():
            if of in arrays and of not in CAPTURED:  # whether a captured array has a gradient is not known
                yield name, Shape(arrays[of].shape, sum_dtype) if partial and name in ("dq", "dk", "dv") else arrays[of]


class _Addresses:
    """Gives every tensor an address of its own and dense strides, unless it lies within another one, and device 0."""

    def __init__(self) -> None:
        self._next = 1 << 40
        self._given: dict[str, tuple[int, list[int]]] = {}

    def __call__(self, tensor: Any, name: str, x: Shape, swap_1_2: bool) -> None:
        strides = [1, *accumulate(reversed(x.shape[1:]), lambda a, b: a * b)][::-1] if x.shape else []
        self._given[name] = address, strides = self._given[x.within] if x.within else (self._next, strides)
        lib.strobe_glue_tensor(tensor, address, DTYPES[x.dtype], CUDA, 0, len(x.shape), x.shape, strides, swap_1_2)
        self._next += (prod(x.shape) * 8 + 255) // 256 * 256
