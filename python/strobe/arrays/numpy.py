"""NumPy arrays, without torch. bfloat16 is the dtype of that name from ml_dtypes."""

from __future__ import annotations

import os
from array import array
from typing import Any

import numpy as np

from .._abi import CPU, DTYPES, MAX_RANK, NO_DTYPE
from .._core import lib
from .._messages import kind
from .._refusals import refusing
from .base import Framework

_NDArray = np.ndarray[Any, Any]


class NumPy(Framework):
    name = "numpy.ndarray"
    bool_dtype = np.bool_

    @property
    def xp(self) -> Any:
        return np

    def is_array(self, x: object) -> bool:
        return isinstance(x, np.ndarray)

    def unwritable(self, name: str, x: _NDArray) -> Exception | None:
        return None if x.flags.writeable else refusing(ValueError, name, "a read-only array; accepted is one that may be written")

    def unfit(self, name: str, x: _NDArray, beside: str = "q", q: _NDArray | None = None) -> Exception | None:
        of = type(x)
        if of is np.ndarray:
            return _shortened(name, x) if type(x.base) is np.ndarray else None
        if isinstance(x, np.ma.MaskedArray):  # its mask would be ignored
            return refusing(TypeError, name, f"{kind(x)}; accepted is a numpy.ndarray, which filled() gives")
        overrides = of.__array_ufunc__ is not np.ndarray.__array_ufunc__ or of.__array_function__ is not np.ndarray.__array_function__
        if overrides or isinstance(x, np.matrix):  # such a type may mean more than its numbers; a matrix always has two axes
            return refusing(TypeError, name, f"{kind(x)}; accepted is a numpy.ndarray, which np.asarray() gives")
        return None

    def drawn_rng(self, q: _NDArray) -> _NDArray:
        return np.random.randint(0, 2**63 - 1, 2, np.int64)  # the generator that np.random.seed() seeds

    def own(self, x: Any) -> _NDArray:
        return np.asarray(x)

    def view(self, tensor: Any, name: str, x: _NDArray, swap_1_2: bool) -> _NDArray:
        if not x.dtype.isnative:
            raise refusing(ValueError, name, f"dtype {x.dtype}; accepted is native byte order")
        if x.ndim > MAX_RANK:
            raise refusing(ValueError, name, f"shape {x.shape}; accepted are up to {MAX_RANK} axes")
        if any(stride % x.itemsize for n, stride in zip(x.shape, x.strides, strict=True) if n > 1):
            raise refusing(ValueError, name, f"strides of {x.strides} bytes; accepted are multiples of the item size, {x.itemsize}")
        strides = [stride // x.itemsize for stride in x.strides]
        lib.strobe_glue_tensor(tensor, self.address(x), DTYPES.get(x.dtype.name, NO_DTYPE), CPU, 0, x.ndim, x.shape, strides, swap_1_2)
        return x

    def default_threads(self) -> int:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0

    def empty(self, like: _NDArray | None, shape: tuple[int, ...], dtype: Any) -> _NDArray:
        return _allocated(shape, dtype)

    def dense_like(self, x: _NDArray, width: int, dtype: Any) -> _NDArray:
        shape = (*x.shape[:-1], width)
        if x.ndim == 4 and abs(x.strides[1]) < abs(x.strides[2]):
            return _allocated((shape[0], shape[2], shape[1], width), dtype).transpose(0, 2, 1, 3)
        return _allocated(shape, dtype)

    def cast(self, x: _NDArray, dtype: Any) -> _NDArray:
        return x.astype(dtype)

    def cast_in_words(self, x: str, dtype: str) -> str:
        return f"{x}.astype({dtype if dtype == 'bool' else f'np.{dtype}'})"

    def expanded_in_words(self, x: str, shape: tuple[int, ...]) -> str:
        return f"np.broadcast_to({x}, {shape})"

    def constant(self, x: _NDArray) -> _NDArray:
        return x

    def repeat(self, x: _NDArray, counts: Any, axis: int) -> _NDArray:
        return np.repeat(x, counts, axis)

    def arange(self, n: int, like: _NDArray) -> _NDArray:
        return np.arange(n)

    def on_host(self, x: _NDArray) -> _NDArray:
        return np.ascontiguousarray(x)

    def address(self, x: _NDArray) -> int:
        return x.__array_interface__["data"][0]

    def int32(self, values: array[int], like: _NDArray | None = None) -> _NDArray:
        return np.array(values, np.int32)


def _shortened(name: str, x: _NDArray) -> Exception | None:
    """The reason against x, a view, if it exceeds the memory of its base, which may have been resized."""
    base = x.base
    if base is None or not base.flags.owndata or not x.size:
        return None
    first = x.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    reach = [(n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)]
    first, end = first + sum(r for r in reach if r < 0), first + sum(r for r in reach if r > 0) + x.itemsize
    if first >= 0 and end <= base.nbytes:
        return None
    return refusing(
        ValueError, name, "a view of an array that resize() has moved or shortened; accepted is a view of the array as it is now"
    )


def _allocated(shape: tuple[int, ...], dtype: Any) -> _NDArray:
    try:
        return np.empty(shape, dtype)
    except ValueError as failed:  # more bytes than NumPy counts
        raise MemoryError(f"an array of shape {shape}: {failed}") from None


NUMPY = NumPy()
