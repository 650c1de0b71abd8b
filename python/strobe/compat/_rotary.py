"""Rotary embedding (Su et al. 2021, arXiv:2104.09864) as flash-attn applies it to the queries and the new keys of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def check_tables(cos: Tensor, sin: Tensor, head_dim: int, positions: int) -> None:
    """Of what rotate() takes for heads of that many columns, at positions that end before `positions`."""
    if cos.shape != sin.shape or cos.dim() != 2 or 2 * cos.shape[-1] > head_dim:
        shapes = f"shapes {tuple(cos.shape)}, {tuple(sin.shape)}"
        raise ValueError(f"rotary_cos, rotary_sin: {shapes}; accepted is (length, R) twice, 2R <= {head_dim}, the head dimension")
    if len(cos) < positions:
        raise ValueError(f"rotary_cos, rotary_sin: length {len(cos)}; accepted is {positions} or more, to the last token's position")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x (B, S, H, D), of which the first 2R columns turn by the angles of their token's position.

    cos, sin: (length, R). positions: int64 (B, S) or (B, 1). interleaved: columns 2r and 2r + 1 turn together, else r and R + r.
    """
    turning = 2 * cos.shape[-1]
    c, s = (table[positions].unsqueeze(2).float() for table in (cos, sin))  # (B, S, 1, R)
    head = x[..., :turning].float()
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    turned = (a * c - b * s, a * s + b * c)
    head = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([head.to(x.dtype), x[..., turning:]], -1)
