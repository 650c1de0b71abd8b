"""torch.nn.functional.scaled_dot_product_attention. It can be imported in its place:

>>> import torch.nn.functional as F
>>> from strobe.compat.sdpa import scaled_dot_product_attention
>>> F.scaled_dot_product_attention = scaled_dot_product_attention  # torch.nn.MultiheadAttention then calls it too
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from .._attention import attention
from .._refusals import refusing
from ..arrays.torch import TORCH
from ._words import called, flag_or_refusal, front, mask_or_bias, tensor_or_refusal

_NAMES = {"q": "query", "k": "key", "v": "value", "mask": "attn_mask", "bias": "attn_mask", "dropout": "dropout_p"}
_NAMES |= {"causal": "is_causal", "return_lse": "enable_gqa"}
_HINTS = {own: theirs for own, theirs in _NAMES.items() if own != "return_lse"} | dict.fromkeys(("softmax_scale", "sm_scale"), "scale")


@front(_HINTS)
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """softmax(scale · query · keyᵀ + attn_mask) · value, differentiable in query, key, value and a float attn_mask.

    Args:
        query: (L, E), (N, L, E), (N, Hq, L, E), or more axes in front; float32, float16, bfloat16 or float64. E is up to 576, Ev up to 512.
        key, value: (..., H, S, E) and (..., H, S, Ev), in query's dtype. Axes in front broadcast, and so does a single head.
        attn_mask: it broadcasts to (..., Hq, L, S). A bool mask means True = attend; a float one, in query's dtype or float32, is added to
            the scores. A torch.nn.attention.bias.CausalBias of L and S is accepted too.
        is_causal: query i sees the keys j <= i, whatever L and S are.
        scale: None means 1/sqrt(E).
        enable_gqa: it has no effect, because Hq may always be a multiple of H.

    Returns:
        (..., Hq, L, Ev). A query that sees no key has output 0.

    Raises:
        The errors of strobe.attention. docs/compat.md lists what differs from PyTorch.
    """
    if kinds := TORCH.overriding((query, key, value, attn_mask)):
        more = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return TORCH.handed_over(kinds, scaled_dot_product_attention, query, key, value, attn_mask, **more)
    options: dict[str, Any] = {**mask_or_bias(attn_mask), "causal": is_causal, "scale": scale, "dropout": dropout_p}
    if isinstance(gqa := flag_or_refusal("enable_gqa", enable_gqa), Exception):
        options["return_lse"] = gqa
    q, k, v = _with_length("query", query), _with_length("key", key), _with_length("value", value)
    return called(_NAMES, _attention, q=q, k=k, v=v, **options)


def _with_length(name: str, x: Tensor) -> Any:
    """x, or the exception that says what is wrong with it."""
    x = tensor_or_refusal(name, x)
    if isinstance(x, Tensor) and x.dim() < 2:
        return ValueError(f"{name}: shape {tuple(x.shape)}; accepted is (..., length, head dimension)")
    return x


def _attention(q: Any, k: Any, v: Any, **options: Any) -> Tensor:
    """attention() of tensors with any number of axes, two or more. Any of them may be an exception that says what is wrong with it."""
    given = (q, k, v)
    if any(isinstance(x, Exception) for x in given):  # if one of these is wrong, the shapes of the others mean nothing
        return attention(*(x if isinstance(x, Exception) else x.new_empty(0, 1, 0, 1) for x in given), **options)
    if all(x.dim() == 4 and x.shape[0] == q.shape[0] for x in given) and q.shape[1] >= k.shape[1] == v.shape[1]:
        return attention(q, k, v, alignment="top_left", **options)
    return _broadcast(given, options)


def _broadcast(given: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]) -> Tensor:
    """Views one head as many, and joins all axes before the heads into one. Tensors that broadcast over several of these axes are
    copied."""
    rank = max(x.dim() for x in given)
    q, k, v = (x[(None,) * max(0, 3 - x.dim())] for x in given)
    try:
        front = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    except RuntimeError:
        shapes = "query {}, key {}, value {}".format(*(tuple(x.shape) for x in given))
        raise ValueError(f"query: with key and value of shapes {shapes}; accepted are axes in front that broadcast") from None
    heads_kv = max(k.shape[-3], v.shape[-3])
    heads = max(q.shape[-3], heads_kv)

    def flat(x: Tensor, heads: int = 1) -> Tensor:
        shape = heads if x.shape[-3] == 1 else x.shape[-3], *x.shape[-2:]
        return x.expand(*front, *shape).reshape(prod(front), *shape)

    for name in ("mask", "bias"):
        x = options.get(name)
        if isinstance(x, Tensor) and x.dim() >= 4:
            try:  # attention() broadcasts a tensor that is one for all axes in front, without a copy
                options[name] = x.reshape(1, *x.shape[-3:]) if prod(x.shape[:-3]) == 1 else flat(x)
            except RuntimeError:
                whole = (*front, heads, q.shape[-2], k.shape[-2])
                raise refusing(ValueError, name, f"shape {tuple(x.shape)}; accepted is one that broadcasts to {whole}") from None
    out = attention(flat(q, heads), flat(k, heads_kv), flat(v, heads_kv), alignment="top_left", **options)
    return out.reshape(*front, *out.shape[-3:])[(0,) * (3 - min(rank, 3))]
