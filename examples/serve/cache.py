"""The keys and values of all requests: a pool of pages for each layer, and which request has which pages."""

from __future__ import annotations

import torch
from torch import Tensor

import strobe


class Pages:
    """Hands out page numbers. They are the same in every layer, so that one page table serves all layers."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size  # size: tokens of a page
        self._free = list(range(count))

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int] | None:
        """Takes this many pages; None if fewer are free."""
        if count > self.free:
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, pages: list[int]) -> None:
        self._free += pages


class Batch:
    """Where the tokens of a step are in the cache: a piece of each sequence, one after the other."""

    def __init__(self, pieces: list[tuple[list[int], int, int]], device: torch.device) -> None:
        """pieces: for each sequence its pages, how many of its tokens are in the cache, and how many are new."""

        def ints(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        counts = [count for _, _, count in pieces]
        self.longest = max(counts)
        self.cu_seqlens = ints([sum(counts[:n]) for n in range(len(counts) + 1)])
        self.held = ints([held for _, held, _ in pieces])
        columns = max(len(pages) for pages, _, _ in pieces)
        self.table = torch.stack([ints(pages + [0] * (columns - len(pages))) for pages, _, _ in pieces])  # unread entries may be anything
        self.positions = torch.cat([torch.arange(held, held + count, device=device) for _, held, count in pieces])
        self.last = self.cu_seqlens[1:].long() - 1  # each sequence's last token


class Cache:
    """K and V of all layers, in pages. With int8 each token and head has a scale."""

    def __init__(self, layers: int, heads: int, head_dim: int, pages: Pages, dtype: torch.dtype, device: torch.device) -> None:
        shape = (layers, pages.count, pages.size, heads)
        self.k, self.v = (torch.zeros(*shape, head_dim, dtype=dtype, device=device) for _ in "kv")
        self.scales = {name: torch.zeros(shape, device=device) for name in ("k_scale", "v_scale") if dtype == torch.int8}

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.k, self.v, *self.scales.values()))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Writes the new keys and values behind the others of their sequences, then attends to all of them: (T, H, D), causal.

        With invariant=True the bits of a row depend only on its query and the keys that it sees, not on the other requests of the batch,
        nor on how the prompt was cut into pieces.
        """
        pools = self.k[layer], self.v[layer]
        scales = {name: x[layer] for name, x in self.scales.items()}
        if not scales:
            q, k, v = (x.to(self.k.dtype) for x in (q, k, v))
        here = {"page_table": batch.table, "layout": "bshd", **scales}
        held = strobe.kv.append(*pools, k, v, batch.held, cu_seqlens=batch.cu_seqlens, **here)
        packed = {"cu_seqlens_q": batch.cu_seqlens, "max_seqlen_q": batch.longest, "seqused_k": held}
        return strobe.attention(q, *pools, causal=True, invariant=True, **packed, **here)
