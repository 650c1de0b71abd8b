"""K and V of a call moved into pools of pages: the same keys, found by a page table."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Pages(NamedTuple):
    k: Tensor  # (pages, Hkv, page, D)
    v: Tensor
    table: Tensor  # int32 (B, pages of a sequence)


def in_pages(
    k: Tensor, v: Tensor, lengths: list[int], page: int, generator: torch.Generator, empty: Callable[[Tensor], Tensor] | None = None
) -> Pages:
    """k, v: (B, Hkv, Sk, D), where Sk is a multiple of page; lengths: how many keys of each sequence count. The pages lie in the pools in
    random order, between unused pages that empty() fills (None: with NaN, or bytes of 255). Table entries past the last key that counts
    name no page."""
    each = k.shape[2] // page
    needed = [-(-n // page) for n in lengths]
    pages = sum(needed) + 3
    order = torch.randperm(pages, generator=generator, device=generator.device).to(k.device)
    table = torch.randint(-(2**31), 2**31 - 1, (len(lengths), each), generator=generator, device=generator.device)
    table = table.to(k.device, torch.int32)
    pools = []
    for x in (k, v):
        nothing = torch.nan if x.is_floating_point() else 255  # a byte of 255 is NaN in FP8
        pool = torch.full((pages, x.shape[1], page, x.shape[3]), nothing, dtype=x.dtype, device=x.device)
        pools.append(pool if empty is None else empty(pool))
    first = 0
    for b, n in enumerate(needed):
        own = order[first : first + n]
        table[b, :n] = own.int()
        for x, pool in zip((k, v), pools, strict=True):
            pool[own] = x[b, :, : n * page].unflatten(1, (n, page)).transpose(0, 1) if n else pool[own]
        first += n
    return Pages(*pools, table)
