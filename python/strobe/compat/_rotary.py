"""Rotary embedding (Su et al. 2021, arXiv:2104.09864) as flash-attn applies it to the queries and the new keys of a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from strobe._checks import Wrong, is_whole, refusal
from strobe._kinds import kind

from ._words import switch_or_refusal, tensor_or_refusal


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """x, of which the first 2R columns turn by the angles of their token's position; differentiable in x.

    Args:
        x: (B, S, H, D), or packed (T, H, D) with cu_seqlens.
        cos, sin: (length, R), 2R <= D.
        interleaved: columns 2r and 2r + 1 turn together, else r and R + r.
        inplace: write into x, and return it.
        seqlen_offsets: the position of each sequence's first token: an integer, or integers (B,).
        cu_seqlens: integers (B + 1,).
        max_seqlen: without effect.
    """
    tensors = {"x": x, "cos": cos, "sin": sin} | ({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens})
    flags = {name: switch_or_refusal(name, on) for name, on in (("interleaved", interleaved), ("inplace", inplace))}
    found = (*map(tensor_or_refusal, tensors, tensors.values()), *flags.values())
    wrong: Wrong = [each for each in found if isinstance(each, Exception)]
    if not (is_whole(seqlen_offsets) or (isinstance(seqlen_offsets, Tensor) and not seqlen_offsets.is_floating_point())):
        wrong.append(TypeError(f"seqlen_offsets: {kind(seqlen_offsets)}; accepted is an integer, or a torch.Tensor, integers (B,)"))
    if wrong:
        raise refusal(wrong)
    rank, accepted = (4, "(B, S, H, D)") if cu_seqlens is None else (3, "(T, H, D) with cu_seqlens")
    if x.dim() != rank:
        raise ValueError(f"x: shape {tuple(x.shape)}; accepted is {accepted}")
    batch = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).long()
    if offsets.dim() and offsets.shape != (batch,):
        raise ValueError(f"seqlen_offsets: shape {tuple(offsets.shape)}; accepted is ({batch},), or an integer")
    tokens = torch.arange(x.shape[rank - 3], device=x.device)
    if cu_seqlens is None:
        positions = offsets.expand(batch)[:, None] + tokens
    else:
        sequence = torch.bucketize(tokens, cu_seqlens[1:].long(), right=True).clamp(max=max(batch - 1, 0))
        positions = (tokens - cu_seqlens.long()[sequence] + offsets.expand(batch)[sequence])[None] if batch else tokens[None]
    looked_at = positions.is_cpu and positions.numel() and not torch.compiler.is_compiling()
    check_tables(cos, sin, x.shape[-1], int(positions.max()) + 1 if looked_at else 0, "cos, sin")
    if looked_at and positions.min() < 0:
        raise ValueError(f"seqlen_offsets: a token at position {int(positions.min())}; accepted are positions from 0 on")
    turned = rotate(x if cu_seqlens is None else x[None], cos, sin, positions, flags["interleaved"])
    turned = turned if cu_seqlens is None else turned[0]
    return x.copy_(turned) if flags["inplace"] else turned


def check_tables(cos: Tensor, sin: Tensor, head_dim: int, positions: int, names: str = "rotary_cos, rotary_sin") -> None:
    """Of what rotate() takes for heads of that many columns, at positions that end before `positions`."""
    if cos.shape != sin.shape or cos.dim() != 2 or 2 * cos.shape[-1] > head_dim:
        shapes = f"shapes {tuple(cos.shape)}, {tuple(sin.shape)}"
        raise ValueError(f"{names}: {shapes}; accepted is (length, R) twice, 2R <= {head_dim}, the head dimension")
    if len(cos) < max(positions, 1):
        raise ValueError(f"{names}: length {len(cos)}; accepted is {max(positions, 1)} or more, to the last token's position")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x (B, S, H, D), of which the first 2R columns turn by the angles of their token's position.

    cos, sin: (length, R). positions: int64 (B, S) or (B, 1), beyond the tables taken for their ends. interleaved: columns 2r and 2r + 1
    turn together, else r and R + r.
    """
    turning = 2 * cos.shape[-1]
    positions = positions.clamp(0, len(cos) - 1)  # those in device memory nobody has looked at
    wide = torch.promote_types(x.dtype, torch.float32)
    c, s = (table[positions].unsqueeze(2).to(wide) for table in (cos, sin))  # (B, S, 1, R)
    head = x[..., :turning].to(wide)
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    turned = (a * c - b * s, a * s + b * c)
    head = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([head.to(x.dtype), x[..., turning:]], -1)
