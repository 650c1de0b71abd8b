"""Sequences that fill their place among the packed keys in part, as those of a cache do: lengths that are checked or brought into bounds,
and cu_seqlens that leave the rest out."""

from __future__ import annotations

import torch
from torch import Tensor


def is_read(x: Tensor) -> bool:
    """Whether its values are looked at. Those in device memory are not, for that would wait for the GPU; nor what torch.compile traces, for
    it would break the graph."""
    return x.is_cpu and not torch.compiler.is_compiling()


def check_integers(name: str, x: Tensor, batch: int, most: int | Tensor, why: str) -> None:
    """One for each of q's batches, from 0 to `most` if they are read. x is dense."""
    if x.shape != (batch,):
        raise ValueError(f"{name}: shape {tuple(x.shape)}; accepted is ({batch},), as q has batches")
    if x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: dtype {x.dtype}; accepted is torch.int32")
    if is_read(x):
        for b, (value, bound) in enumerate(zip(x.tolist(), torch.as_tensor(most).expand(batch).tolist(), strict=True)):
            if not 0 <= value <= bound:
                raise ValueError(f"{name}: {value} at [{b}]; accepted are 0 to {bound}, {why}")


def within(name: str, x: Tensor, batch: int, most: int | Tensor, why: str) -> Tensor:
    """x, checked; what is not read is brought into 0 ... most, so that nothing beyond its place is touched whatever it holds."""
    check_integers(name, x, batch, most, why)
    if is_read(x):
        return x
    return x.clamp(0, most) if isinstance(most, int) else x.clamp(min=0).minimum(most)


def parts(cu_q: Tensor, cu_k: Tensor, begin: Tensor, end: Tensor, slopes: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """cu_seqlens of both sides and alibi_slopes, where of sequence b only the keys [begin[b], end[b]) are there. Each is three packed
    sequences: what lies before the keys (no queries), the keys (all queries), what lies behind them (no queries)."""
    keys = torch.cat([torch.stack([cu_k[:-1], begin, end], 1).flatten(), cu_k[-1:]]).int()
    queries = cu_q.repeat_interleave(3)[1:-1].int()  # 0 0 Sq Sq Sq 2Sq ...
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes.repeat_interleave(3, 0)
    return queries, keys, slopes
