"""strobe.jax.attention: Strobe in JAX programs, on CPUs and NVIDIA GPUs.

>>> out = strobe.jax.attention(q, k, v, causal=True)  # (B, H, S, D), inside or outside of jax.jit

It is a primitive of JAX: jit, grad, vmap, checkpoint and shard_map see it. docs/jax.md says what works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._messages import needed_by

with needed_by(__name__, "jax"):
    import jax
import jax.numpy as jnp
import numpy as np

from .._abi import FORWARD
from .._attention import _returned, _with_options
from .._call import ORACLE
from .._checks import Wrong, flag
from .._options import ROWS, AttentionOptions, Tensor
from .._parse import parse, parse_aux
from .._refusals import refusing
from ..arrays.jax import is_jax_array, judging
from . import _batching as _batching
from ._primitives import attend
from ._program import four_axes, judge

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention"]


def attention(q: Any, k: Any, v: Any, *, return_lse: bool = False, aux: Sequence[str] = (), **options: Unpack[AttentionOptions]) -> Any:
    """Exact softmax attention of JAX arrays; the arguments and results are those of strobe.attention, which help() of it describes.

    It works inside jax.jit, and has gradients of q, k, v, bias, sinks and what a function of the score reads. On CPUs it has forward-mode
    and second derivatives, too: jax.jvp, jax.jacfwd, jax.linearize, jax.hessian, and jax.grad or jax.jvp of a jax.grad.
    The whole call is judged when it is traced: a wrong argument raises there, and nothing is compiled.

    What differs from strobe.attention:

    - rng is a key of jax.random, or int64 (2,) where JAX has 64-bit types. With dropout, rng or seed has to be given.
    - cu_seqlens, seqused_k and page_table may be arrays of NumPy; their values are then checked when the call is traced.
    - engine="reference" is refused.

    Raises:
        The errors of strobe.attention; NotImplementedError for a derivative that Strobe does not have.
    """
    wrong: Wrong = []
    flag(wrong, "return_lse", return_lse)
    names = parse_aux(wrong, aux)
    q, k, v = map(_on_jax, (q, k, v))
    given: dict[str, Any] = dict(options)
    for name, x in options.items():
        if name in _LISTS:
            given[name] = _narrow(x)
        elif isinstance(ROWS.get(name), Tensor):
            given[name] = _on_jax(x)
    if "rng" in given and given["rng"] is not None:
        given["rng"] = _words(given["rng"]) if given.get("dropout") else None
    if options.get("engine") == ORACLE:
        wrong.append(refusing(ValueError, "engine", "reference, which computes in float64; accepted are the others, or strobe.reference()"))
    with judging():
        call = parse("attention", q, k, v, given, wrong, aux=names)
    call = call.on(four_axes(call.arrays))
    judge(call, FORWARD)
    return _returned(tuple(attend(call)), return_lse, names)


_LISTS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table")


def _on_jax(x: Any) -> Any:
    """An array of NumPy as one of JAX; anything else as it is."""
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def _narrow(x: Any) -> Any:
    """A list of int64 as int32, which GPUs read; numbers that are too large stay too large."""
    if not (isinstance(x, np.ndarray) or is_jax_array(x)) or x.dtype != np.int64:
        return x
    return (np if isinstance(x, np.ndarray) else jnp).clip(x, -(2**31), 2**31 - 1).astype(np.int32)


def _words(rng: Any) -> Any:
    """(seed, offset) as four words, from a key of jax.random."""
    if is_jax_array(rng) and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        rng = jax.random.key_data(rng)
    if is_jax_array(rng) and rng.dtype == jnp.uint32 and rng.shape in ((2,), (4,)):
        return jnp.concatenate([rng, jnp.zeros(4 - rng.shape[0], jnp.uint32)])
    return rng


_with_options(attention)
