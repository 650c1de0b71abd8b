"""JAX arrays and tracers. A program is compiled before there are numbers: only shapes and dtypes are judged here."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._abi import CPU, DTYPES, MAX_RANK, NO_DTYPE
from .._core import lib
from .._refusals import refusing
from . import known
from .base import Array, Framework
from .numpy import NUMPY

# The library reads these where they lie in host memory, to check them. Zeros stand for numbers that are not known yet.
_LISTS = frozenset({"cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table", "rng"})
_places = count()


def _unused_address() -> int:
    """A multiple of 2^40: no two arrays of a call overlap. Nothing is read or written there."""
    return (1 + next(_places) % 2**20) << 40


def is_jax_array(x: object) -> bool:
    """Whether x is an array or a tracer of JAX, or stands for one."""
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct))


class Jax(Framework):
    name = "jax.Array"
    bool_dtype = jnp.bool_
    recorder = "_recorder_jax"
    keeps_recordings = False  # JAX traces a program once

    @property
    def xp(self) -> Any:
        return jnp

    def is_array(self, x: object) -> bool:
        return is_jax_array(x) or isinstance(x, np.ndarray)

    def unfit(self, name: str, x: Array, beside: str = "q", q: Array | None = None) -> Exception | None:
        if isinstance(x, np.ndarray):
            return NUMPY.unfit(name, x)
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return refusing(TypeError, name, f"dtype {x.dtype}; accepted is an array of numbers")
        return None

    def device(self, x: Array) -> object:
        return None  # JAX places what a program reads

    def is_readable(self, x: Array) -> bool:
        return isinstance(x, np.ndarray)

    def drawn_rng(self, q: Array) -> Array:
        raise refusing(ValueError, "seed", "missing beside dropout; accepted is an integer, or rng, a key of jax.random: JAX draws nothing")

    def own(self, x: Any) -> Array:
        return np.asarray(x)

    def view(self, tensor: Any, name: str, x: Array, swap_1_2: bool) -> Array:
        if len(x.shape) > MAX_RANK:
            raise refusing(ValueError, name, f"shape {tuple(x.shape)}; accepted are up to {MAX_RANK} axes")
        shape, dtype = tuple(x.shape), DTYPES.get(x.dtype.name, NO_DTYPE)
        if name == "rng" and is_words(x):
            shape = (2,)
        if name in _LISTS and not isinstance(x, np.ndarray):
            x = np.zeros(shape, np.int64 if name == "rng" and is_words(x) else x.dtype)
        if isinstance(x, np.ndarray):
            return NUMPY.view(tensor, name, np.ascontiguousarray(x), swap_1_2)
        strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        lib.strobe_glue_tensor(tensor, _unused_address(), dtype, CPU, 0, len(shape), shape, strides, swap_1_2)
        return x

    def default_threads(self) -> int:
        return NUMPY.default_threads()

    def empty(self, like: Array | None, shape: tuple[int, ...], dtype: Any) -> Array:
        return jax.ShapeDtypeStruct(shape, dtype)

    def dense_like(self, x: Array, width: int, dtype: Any) -> Array:
        return jax.ShapeDtypeStruct((*x.shape[:-1], width), dtype)

    def cast(self, x: Array, dtype: Any) -> Array:
        return x.astype(dtype)

    def cast_in_words(self, x: str, dtype: str) -> str:
        return f"{x}.astype({dtype if dtype == 'bool' else f'jnp.{dtype}'})"

    def expanded_in_words(self, x: str, shape: tuple[int, ...]) -> str:
        return f"jnp.broadcast_to({x}, {shape})"

    def constant(self, x: Array) -> Array:
        return jax.lax.stop_gradient(x)

    def repeat(self, x: Array, counts: Any, axis: int) -> Array:
        return jnp.repeat(x, counts, axis)

    def arange(self, n: int, like: Array) -> Array:
        return jnp.arange(n)

    def on_host(self, x: Array) -> Array:
        return np.ascontiguousarray(x)

    def address(self, x: Array) -> int:
        raise NotImplementedError  # XLA knows it when the program runs

    def int32(self, values: array[int], like: Array | None = None) -> Array:
        return np.array(values, np.int32)


def is_words(x: Array) -> bool:
    """Whether x is (seed, offset) as four words, as strobe.jax makes it of a key: without 64-bit types JAX has no int64."""
    return bool(x.dtype == np.uint32 and tuple(x.shape) == (4,))


JAX = Jax()

_judging: ContextVar[bool] = ContextVar("judging", default=False)


@contextmanager
def judging() -> Iterator[None]:
    """Within it JAX's arrays have a framework. Elsewhere the package would read memory that they do not have yet."""
    token = _judging.set(True)
    try:
        yield
    finally:
        _judging.reset(token)


known.OF_JAX = lambda x: JAX if _judging.get() and is_jax_array(x) else None
