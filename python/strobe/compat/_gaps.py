"""Sequences that fill only part of their place among the packed keys, like those of a cache: lengths are checked or clamped, and cu_seqlens
leave the rest out."""

from __future__ import annotations

import torch
from torch import Tensor

from .._messages import shown
from ..arrays.torch import TORCH


def check_cu_seqlens(
    name: str, cu: Tensor, of: str | None = None, packed: Tensor | None = None, dtypes: tuple[torch.dtype, ...] = (torch.int32,)
) -> int:
    """B, from cu_seqlens (B + 1,); packed: the tokens that they divide, the argument `of`."""
    if cu.dim() != 1 or not len(cu) or cu.dtype not in dtypes:
        accepted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: {cu.dtype} of shape {tuple(cu.shape)}; accepted is {accepted} (B + 1,)")
    if TORCH.is_readable(cu):
        ends = cu.tolist()
        if ends[0] != 0 or ends != sorted(ends):
            raise ValueError(f"{name}: {shown(ends)}; accepted are numbers that begin at 0 and never fall")
        if packed is not None and packed.dim() == 3 and ends[-1] > len(packed):  # another rank is refused by the check of shapes
            raise ValueError(f"{name}: {ends[-1]} at its end; accepted are up to {len(packed)}, the tokens of {of}")
    return len(cu) - 1


def check_integers(name: str, x: Tensor, batch: int, most: int | Tensor, why: str) -> None:
    """One integer for each of q's batches, from 0 to `most`, if they can be read. x is dense."""
    if x.shape != (batch,):
        raise ValueError(f"{name}: shape {tuple(x.shape)}; accepted is ({batch},), as q has batches")
    if x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: dtype {x.dtype}; accepted is torch.int32; {name}.int()")
    if TORCH.is_readable(x):
        for b, (value, bound) in enumerate(zip(x.tolist(), torch.as_tensor(most).expand(batch).tolist(), strict=True)):
            if not 0 <= value <= bound:
                raise ValueError(f"{name}: {value} at [{b}]; accepted are 0 to {bound}, {why}")


def within(name: str, x: Tensor, batch: int, most: int | Tensor, why: str) -> Tensor:
    """x, checked; numbers that are not read are clamped to 0 ... most, so that no memory beyond its place is accessed."""
    check_integers(name, x, batch, most, why)
    if TORCH.is_readable(x):
        return x
    return x.clamp(0, most) if isinstance(most, int) else x.minimum(most).clamp(min=0)


def parts(cu_q: Tensor, cu_k: Tensor, begin: Tensor, end: Tensor, slopes: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """cu_seqlens of both sides and alibi_slopes, where sequence b has only the keys [begin[b], end[b]). Each becomes three packed
    sequences: the keys before (no queries), the keys that count (all queries), the keys after them (no queries)."""
    keys = torch.cat([torch.stack([cu_k[:-1], begin, end], 1).flatten(), cu_k[-1:]]).int()
    queries = cu_q.repeat_interleave(3)[1:-1].int()  # 0 0 Sq Sq Sq 2Sq ...
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes.repeat_interleave(3, 0)
    return queries, keys, slopes
