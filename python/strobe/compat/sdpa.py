"""torch.nn.functional.scaled_dot_product_attention. It can be imported in its place:

>>> import torch.nn.functional as F
>>> from strobe.compat.sdpa import scaled_dot_product_attention
>>> F.scaled_dot_product_attention = scaled_dot_product_attention  # torch.nn.MultiheadAttention then calls it too
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from .. import attention
from .._refusals import refusing
from ..arrays.torch import TORCH
from ._words import flag_or_refusal, in_words_of, mask_or_bias, names_checked, tensor_or_refusal

_NAMES = {"q": "query", "k": "key", "v": "value", "mask": "attn_mask", "bias": "attn_mask", "dropout": "dropout_p"}
_NAMES |= {"causal": "is_causal", "return_lse": "enable_gqa"}
_HINTS = {own: theirs for own, theirs in _NAMES.items() if own != "return_lse"} | dict.fromkeys(("softmax_scale", "sm_scale"), "scale")


@names_checked(_HINTS)
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
    given = {"query": query, "key": key, "value": value}
    if kinds := TORCH.overriding((*given.values(), attn_mask)):
        more = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return TORCH.handed_over(kinds, scaled_dot_product_attention, query, key, value, attn_mask, **more)
    options: dict[str, Any] = {**mask_or_bias(attn_mask), "causal": is_causal, "scale": scale, "dropout": dropout_p}
    if isinstance(gqa := flag_or_refusal("enable_gqa", enable_gqa), Exception):
        options["return_lse"] = gqa
    checked = {name: _with_length(name, x) for name, x in given.items()}
    with in_words_of(_NAMES, dict(zip("qkv", checked.values(), strict=True)) | options):
        if any(isinstance(x, Exception) for x in checked.values()):  # if one of these is wrong, the shapes of the others mean nothing
            return attention(*(x if isinstance(x, Exception) else x.new_empty(0, 1, 0, 1) for x in checked.values()), **options)
        if all(x.dim() == 4 and x.shape[0] == query.shape[0] for x in given.values()) and query.shape[1] >= key.shape[1] == value.shape[1]:
            return attention(query, key, value, alignment="top_left", **options)
        return _broadcast(given, options)


def _with_length(name: str, x: Tensor) -> Any:
    """x, or the exception that says what is wrong with it."""
    x = tensor_or_refusal(name, x)
    if isinstance(x, Tensor) and x.dim() < 2:
        return ValueError(f"{name}: shape {tuple(x.shape)}; accepted is (..., length, head dimension)")
    return x


def _broadcast(given: Mapping[str, Tensor], options: dict[str, Any]) -> Tensor:
    """Views one head as many, and joins all axes before the heads into one, for which tensors that broadcast over several are copied."""
    rank = max(x.dim() for x in given.values())
    query, key, value = (x[(None,) * max(0, 3 - x.dim())] for x in given.values())
    try:
        front = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items())
        raise ValueError(f"query: with key and value of shapes {shapes}; accepted are axes in front that broadcast") from None
    heads_kv = max(key.shape[-3], value.shape[-3])
    heads = max(query.shape[-3], heads_kv)

    def flat(x: Tensor, heads: int = 1) -> Tensor:
        shape = heads if x.shape[-3] == 1 else x.shape[-3], *x.shape[-2:]
        return x.expand(*front, *shape).reshape(prod(front), *shape)

    for name in ("mask", "bias"):
        x = options.get(name)
        if isinstance(x, Tensor) and x.dim() >= 4:
            try:  # attention() broadcasts one for all axes in front without a copy
                options[name] = x.reshape(1, *x.shape[-3:]) if prod(x.shape[:-3]) == 1 else flat(x)
            except RuntimeError:
                whole = (*front, heads, query.shape[-2], key.shape[-2])
                raise refusing(ValueError, name, f"shape {tuple(x.shape)}; accepted is one that broadcasts to {whole}") from None
    out = attention(flat(query, heads), flat(key, heads_kv), flat(value, heads_kv), alignment="top_left", **options)
    return out.reshape(*front, *out.shape[-3:])[(0,) * (3 - min(rank, 3))]
