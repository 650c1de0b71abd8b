"""jax.nn.dot_product_attention. It can be imported in its place:

>>> import jax
>>> from strobe.jax.nn import dot_product_attention
>>> jax.nn.dot_product_attention = dot_product_attention
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._checks import is_whole, refuse
from .._messages import shown
from .._refusals import Words, raised_for, refusals_of, refusing
from ..arrays.jax import is_jax_array
from . import attention

__all__ = ["dot_product_attention"]

_NAMES = {"q": "query", "k": "key", "v": "value", "causal": "is_causal", "window": "local_window_size"}
_NAMES |= {"seqused_k": "key_value_seq_lengths", "return_lse": "return_residual"}
_WORDS = Words(_NAMES, frozenset({*_NAMES, "mask", "bias", "scale"}))


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """softmax(scale · query · keyᵀ + bias) · value, with gradients of query, key, value and bias of any shape, and on CPUs with the
    other derivatives that strobe.jax.attention has.

    Args:
        query: (B, T, N, H) or (T, N, H); float32, float16, bfloat16 or float64. H is up to 576.
        key, value: (B, S, K, H) or (S, K, H), in query's dtype; N is a multiple of K. value may have another width, up to 512.
        bias: broadcasts to (B, N, T, S), in any float dtype, and is added to the scores. mask: bool, likewise; True = attend.
        scale: a number; None means 1/sqrt(H). A traced one multiplies query in float32, which is then rounded to query's dtype.
        is_causal: query i sees the keys j <= i, whatever T and S are.
        query_seq_lengths, key_value_seq_lengths: int32 (B,): the output of queries behind a length is 0; keys behind it are not seen.
        local_window_size: (left, right), or one integer for both: query i sees the keys i - left to i + right.
        implementation: "xla", "cudnn" or None; it has no effect.
        return_residual: returns (output, LSE), the LSE as (B, T, N) or (T, N) in key's dtype, without a gradient.

    Returns:
        (B, T, N, H) or (T, N, H), in query's dtype. A query that sees no key has output 0.

    Raises:
        The errors of strobe.jax.attention. docs/jax.md lists what differs from JAX.
    """
    if implementation not in (None, "xla", "cudnn"):
        raise refusing(ValueError, "implementation", f"{shown(implementation)}; accepted is 'xla', 'cudnn' or None")
    q, k, v = map(_with_batch, (query, key, value))
    bias, mask = (x if x is None else _with_batch(x) for x in (bias, mask))
    if bias is not None and is_jax_array(bias) and bias.dtype != q.dtype:
        bias = bias.astype(jnp.promote_types(q.dtype, jnp.float32))
    if is_jax_array(scale):
        q, scale = _scaled(q, scale)
    if query_seq_lengths is not None:
        query_seq_lengths = jnp.asarray(query_seq_lengths)
        refuse(_unfit_lengths(query_seq_lengths, q))
    options: dict[str, Any] = {"bias": bias, "mask": mask, "scale": scale, "causal": is_causal, "window": _window(local_window_size)}
    if key_value_seq_lengths is not None:
        options["seqused_k"] = jnp.asarray(key_value_seq_lengths)
    try:
        found = attention(q, k, v, layout="bshd", alignment="top_left", return_lse=return_residual, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise raised_for(type(error), [_WORDS.said(each) for each in refusals_of(error)]) from None
    out, lse = found if return_residual else (found, None)
    if query_seq_lengths is not None:
        counts = jnp.arange(q.shape[1])[None] < query_seq_lengths[:, None]
        out = jnp.where(counts[:, :, None, None], out, jnp.zeros((), out.dtype))
    shape = jnp.shape(query)
    out = out.reshape(*shape[:-1], out.shape[-1])
    if lse is None:
        return out
    return out, jax.lax.stop_gradient(lse.swapaxes(1, 2).astype(k.dtype)).reshape(shape[:-1])


def _with_batch(x: Any) -> Any:
    x = jnp.asarray(x)
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _scaled(q: Any, scale: Any) -> tuple[Any, Any]:
    """q and the scale, a number. A traced one is none yet: q is multiplied by it."""
    if scale.size != 1:
        raise refusing(ValueError, "scale", f"shape {scale.shape}; accepted is a number")
    scale = scale.reshape(())
    if not isinstance(scale, jax.core.Tracer):
        return q, float(scale)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    return (q.astype(wide) * scale.astype(wide)).astype(q.dtype), 1.0


def _window(size: Any) -> Any:
    return (size, size) if is_whole(size) else size


def _unfit_lengths(lengths: Any, q: Any) -> Exception | None:
    if lengths.dtype == jnp.int32 and lengths.shape == q.shape[:1]:
        return None
    words = f"shape {lengths.shape}, dtype {lengths.dtype}; accepted is int32 ({q.shape[0]},), as query has sequences"
    return refusing(ValueError, "query_seq_lengths", words)
