"""flash_attn.layers.rotary: only its function apply_rotary_emb."""

from __future__ import annotations

import torch
from torch import Tensor

from strobe._checks import Wrong, is_whole, refuse
from strobe._messages import kind, shown
from strobe._rotary import check_tables, furthest, turn
from strobe._tensor_checks import check_cu_seqlens, counts
from strobe._writable import not_writable
from strobe.arrays.known import unfit
from strobe.arrays.torch import TORCH
from strobe.compat._words import stands_for, switch_or_refusal, tensor_or_refusal

__all__ = ["apply_rotary_emb"]

stands_for(__name__, "strobe.compat.flash_attn.layers.rotary")


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False, seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
) -> Tensor:  # fmt: skip
    """x, whose first 2R columns are rotated by the angles of their token's position; differentiable in x.

    Args:
        x: (B, S, H, D), or packed (T, H, D) with cu_seqlens.
        cos, sin: (length, R), 2R <= D, floating point as x.
        interleaved: columns 2r and 2r + 1 form a pair, else r and R + r.
        inplace: write into x, and return it. Each number of x must then have memory of its own.
        seqlen_offsets: the position of each sequence's first token: an integer, or integers (B,).
        cu_seqlens: int32 or int64 (B + 1,).
        max_seqlen: without effect.
    """
    wrong_offsets: Exception | None = None
    if not (is_whole(seqlen_offsets) or (isinstance(seqlen_offsets, Tensor) and not seqlen_offsets.is_floating_point())):
        wrong_offsets = TypeError(f"seqlen_offsets: {kind(seqlen_offsets)}; accepted is an integer, or a torch.Tensor, integers (B,)")
    elif not isinstance(seqlen_offsets, Tensor) and not -(2**63) <= seqlen_offsets < 2**63:
        wrong_offsets = ValueError(f"seqlen_offsets: {shown(seqlen_offsets)}; accepted are integers of 64 bits")
    tensors = {"x": x, "cos": cos, "sin": sin, **({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens})}
    flags = {name: switch_or_refusal(name, on) for name, on in (("interleaved", interleaved), ("inplace", inplace))}
    refuse(*map(tensor_or_refusal, tensors, tensors.values()), *flags.values(), wrong_offsets)
    wrong: Wrong = [] if x.is_floating_point() else [ValueError(f"x: dtype {x.dtype}; accepted is floating point")]
    wrong += [refused for name, each in tensors.items() if (refused := unfit(name, each, TORCH, "x", x)) is not None]
    refuse(*wrong, *(not_writable({"x": x}) if flags["inplace"] else []))
    rank, accepted = (4, "(B, S, H, D)") if cu_seqlens is None else (3, "(T, H, D) with cu_seqlens")
    if x.dim() != rank:
        raise ValueError(f"x: shape {tuple(x.shape)}; accepted is {accepted}")
    batch = x.shape[0] if cu_seqlens is None else check_cu_seqlens("cu_seqlens", cu_seqlens, "x", x, (torch.int32, torch.int64))
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).long()
    if offsets.dim() and offsets.shape != (batch,):
        raise ValueError(f"seqlen_offsets: shape {tuple(offsets.shape)}; accepted is ({batch},), or an integer")
    first, count = offsets.expand(batch), counts(x, cu_seqlens)
    check_tables(cos, sin, x.shape[-1], furthest(first, count, x), "cos, sin")
    begins = first[torch.as_tensor(count, device=x.device).expand(batch) > 0].tolist() if TORCH.is_readable(first) else []
    if (least := min(begins, default=0)) < 0:
        raise ValueError(f"seqlen_offsets: a token at position {least}; accepted are positions from 0 on")
    turned = turn(x, cos, sin, first, cu_seqlens, flags["interleaved"])
    return x.copy_(turned) if flags["inplace"] else turned
