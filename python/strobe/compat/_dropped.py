"""S_dmask, flash-attn's third result with dropout: the probabilities of the softmax, unnormalised and signed by what was dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._attention import dropout_mask


@torch.compiler.disable
@torch.no_grad()
def signed_probabilities(call: Mapping[str, Any]) -> Tensor:
    """exp(score - the row's largest score), (B, H, Sq, Sk) in q's dtype, negative where it was dropped; 0 where it is hidden. call: the
    arguments of strobe.attention(), which has accepted them, with rng. Packed sequences begin at [b, :, 0, 0]."""
    q, k, cu_q, cu_k, table = call["q"], call["k"], call.get("cu_seqlens_q"), call.get("cu_seqlens_k"), call.get("page_table")
    if cu_q is None:
        queries, keys = q.unbind(), k.unbind()
        shape = (len(q), q.shape[2], q.shape[1], k.shape[1])
    else:
        queries = q[: int(cu_q[-1])].split(cu_q.diff().tolist())
        if table is None and cu_k is not None:
            keys, longest = k[: int(cu_k[-1])].split(cu_k.diff().tolist()), call["max_seqlen_k"]
        else:
            assert table is not None
            pages = [k[row.clamp(0, len(k) - 1).long()].flatten(0, 1) for row in table]
            keys, longest = [x[:n] for x, n in zip(pages, call["seqused_k"].tolist(), strict=True)], table.shape[1] * k.shape[1]
        shape = (len(queries), q.shape[1], call["max_seqlen_q"], longest)
    found = q.new_zeros(shape)
    kept = dropout_mask(shape, call["dropout"], rng=call["rng"].cpu()).to(q.device)
    for b, (x, y) in enumerate(zip(queries, keys, strict=True)):
        len_q, len_k = len(x), len(y)
        scores = _scores(call, b, x, y)
        largest = scores.amax(-1, keepdim=True) if len_k else scores.new_zeros(*scores.shape[:-1], 1)
        weights = torch.exp(scores - largest.masked_fill(largest == -torch.inf, 0)).to(q.dtype)
        found[b, :, :len_q, :len_k] = torch.where(kept[b, :, :len_q, :len_k], weights, -weights)
    return found


def _scores(call: Mapping[str, Any], b: int, q: Tensor, k: Tensor) -> Tensor:
    """The scores of a sequence, (H, Sq, Sk) in float32 or float64; -inf where a key is hidden."""
    exact = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(exact).transpose(0, 1), k.to(exact).transpose(0, 1)
    scale = call.get("scale")
    scores = (q @ k.repeat_interleave(len(q) // len(k), 0).mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap := call.get("softcap"):
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1], device=q.device)
    if (slopes := call.get("alibi_slopes")) is not None:
        scores = scores - (slopes if slopes.dim() == 1 else slopes[b])[:, None, None] * distance.abs()
    left, right = call.get("window") or (None, None)
    if call.get("causal"):
        right = 0
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance > left
    if right is not None:
        hidden |= distance < -right
    return scores.masked_fill(hidden, -torch.inf)
