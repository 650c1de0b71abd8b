"""The positions of new tokens, and the rotary embedding (Su et al. 2021, arXiv:2104.09864) of torch tensors at these positions."""

from __future__ import annotations

import torch
from torch import Tensor

from ._refusals import refusing
from .arrays.torch import TORCH


def check_tables(cos: Tensor, sin: Tensor, head_dim: int, positions: int, names: str = "rotary_cos, rotary_sin") -> None:
    """Checks rotate()'s tables for heads of head_dim columns and positions below `positions`, which is 0 if no token is rotated."""
    if cos.shape != sin.shape or cos.dim() != 2 or 2 * cos.shape[-1] > head_dim:
        shapes = f"shapes {tuple(cos.shape)}, {tuple(sin.shape)}"
        raise refusing(ValueError, names, f"{shapes}; accepted is (length, R) twice, 2R <= {head_dim}, the head dimension")
    if not (cos.is_floating_point() and sin.is_floating_point()):
        raise refusing(ValueError, names, f"dtypes {cos.dtype}, {sin.dtype}; accepted is floating point twice")
    if len(cos) < positions:
        raise refusing(ValueError, names, f"length {len(cos)}; accepted is {positions} or more, to the last token's position")


def rotate_tokens(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """rotate() of packed tokens: x (T, H, D), positions (T,)."""
    return rotate(x[None], cos, sin, positions[None], interleaved)[0]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x (B, S, H, D), whose first 2R columns are rotated by the angles of their token's position.

    cos, sin: (length, R); with length 0 they rotate nothing. positions: int64 (B, S) or (B, 1); those beyond the tables are clamped.
    interleaved: columns 2r and 2r + 1 form a pair, else r and R + r.
    """
    if not len(cos):
        return x.clone()
    turning = 2 * cos.shape[-1]
    positions = positions.clamp(0, len(cos) - 1)  # positions in device memory have not been checked
    sum_dtype = torch.promote_types(x.dtype, torch.float32) if x.element_size() > 1 else torch.float32
    c, s = (table[positions].unsqueeze(2).to(sum_dtype) for table in (cos, sin))  # (B, S, 1, R)
    head = x[..., :turning].to(sum_dtype)
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    turned = (a * c - b * s, a * s + b * c)
    head = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([head.to(x.dtype), x[..., turning:]], -1)


def places(seqlens: Tensor, cu_seqlens: Tensor | None, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each new token: its sequence, its position there, and whether it belongs to a sequence.

    seqlens: integers (B,), how many tokens each sequence holds. cu_seqlens: (B + 1,), for packed tokens, which padding may follow;
    None: each sequence gets the same number.
    """
    batch = len(seqlens)
    token = torch.arange(tokens, device=seqlens.device)
    if not batch:  # all tokens are padding
        return (none := torch.zeros_like(token)), none, none.bool()
    if cu_seqlens is None:
        each = max(tokens // batch, 1)
        return (sequence := token // each), seqlens.long()[sequence] + token % each, torch.ones_like(token, dtype=torch.bool)
    begins = cu_seqlens.long()
    sequence = torch.bucketize(token, begins[1:], right=True).clamp(max=batch - 1)
    nth = token - begins[sequence]
    return sequence, seqlens.long()[sequence] + nth, (nth >= 0) & (token < begins[sequence + 1])


def turn(
    x: Tensor, cos: Tensor, sin: Tensor, first: Tensor, cu_seqlens: Tensor | None, interleaved: bool, from_each: bool = True
) -> Tensor:
    """x (B, S, H, D), or packed (T, H, D), rotated: each token by its own position, from first[b] on, or all tokens by first[b]."""
    if cu_seqlens is None:
        positions = first[:, None] + torch.arange(x.shape[1] if from_each else 1, device=x.device)
        return rotate(x, cos, sin, positions, interleaved)
    sequence, positions, _ = places(first, cu_seqlens, len(x))
    if not from_each and len(first):  # without a sequence all tokens are padding
        positions = first[sequence]
    return rotate_tokens(x, cos, sin, positions, interleaved)


def furthest(first: int | Tensor, count: int | Tensor, tokens: Tensor) -> int:
    """The largest end of the sequences of `count` tokens that begin at `first`, as far as it is known without reading device memory.
    Sequences without tokens do not count; 0 if `tokens` is empty."""
    if not (tokens.shape[0] and tokens.shape[1]) or (not isinstance(count, Tensor) and not count):
        return 0
    ends = first + count
    if not isinstance(ends, Tensor):
        return ends
    if TORCH.is_readable(ends):
        some = torch.as_tensor(count).expand(ends.shape) > 0
        return max(ends[some].tolist(), default=0)
    return 1 if isinstance(count, Tensor) else count
