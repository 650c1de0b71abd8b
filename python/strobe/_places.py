"""Where new tokens of sequences stand that hold some already."""

from __future__ import annotations

import torch
from torch import Tensor


def places(seqlens: Tensor, cu_seqlens: Tensor | None, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each of the new tokens: its sequence, its position there, and whether it is one of a sequence's.

    seqlens: integers (B,), how many tokens each sequence holds. cu_seqlens: (B + 1,), of packed tokens, behind which padding may follow;
    None: each sequence gets as many.
    """
    batch = len(seqlens)
    token = torch.arange(tokens, device=seqlens.device)
    if not batch:  # all of it is padding
        return (none := torch.zeros_like(token)), none, none.bool()
    if cu_seqlens is None:
        each = max(tokens // batch, 1)
        return (sequence := token // each), seqlens.long()[sequence] + token % each, torch.ones_like(token, dtype=torch.bool)
    begins = cu_seqlens.long()
    sequence = torch.bucketize(token, begins[1:], right=True).clamp(max=batch - 1)
    nth = token - begins[sequence]
    return sequence, seqlens.long()[sequence] + nth, (nth >= 0) & (token < begins[sequence + 1])
