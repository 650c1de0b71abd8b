"""Rotary embedding (Su et al. 2021, arXiv:2104.09864) as flash-attn applies it to the queries and the new keys of a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import Wrong, is_whole
from .._messages import kind, shown
from .._rotary import check_tables, places, rotate, rotate_tokens
from .._writable import not_writable
from ..arrays.known import unfit
from ..arrays.torch import TORCH
from ._lengths import check_cu_seqlens, counts, refuse
from ._words import switch_or_refusal, tensor_or_refusal


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
    tensors = {"x": x, "cos": cos, "sin": sin, **({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens})}
    flags = {name: switch_or_refusal(name, on) for name, on in (("interleaved", interleaved), ("inplace", inplace))}
    refuse(*map(tensor_or_refusal, tensors, tensors.values()), *flags.values(), _wrong_offsets(seqlen_offsets))
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


def _wrong_offsets(given: object) -> Exception | None:
    if not (is_whole(given) or (isinstance(given, Tensor) and not given.is_floating_point())):
        return TypeError(f"seqlen_offsets: {kind(given)}; accepted is an integer, or a torch.Tensor, integers (B,)")
    if not isinstance(given, Tensor) and not -(2**63) <= given < 2**63:  # type: ignore[operator]
        return ValueError(f"seqlen_offsets: {shown(given)}; accepted are integers of 64 bits")
    return None


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
    """The end of the last sequence that has a token, if sequences of `count` tokens begin at `first`, as far as it is known without reading
    numbers in device memory. 0 if there are no tokens: `tokens` holds them."""
    if not (tokens.shape[0] and tokens.shape[1]) or (not isinstance(count, Tensor) and not count):
        return 0
    ends = first + count
    if not isinstance(ends, Tensor):
        return ends
    if TORCH.is_readable(ends):
        some = torch.as_tensor(count).expand(ends.shape) > 0
        return max(ends[some].tolist(), default=0)
    return 1 if isinstance(count, Tensor) else count
