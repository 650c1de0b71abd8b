"""The keys and values of all requests: a pool of pages for each layer, and which requests have which pages."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator

import torch
from torch import Tensor

import strobe


class Pages:
    """Hands out page numbers. They are the same in every layer, so that one page table serves all layers.

    A full page is named by its tokens and all before them. A request that begins with the same tokens gets the page, even one that nobody
    uses any more: unused pages keep their keys until another request needs the room, the one that was used least recently first.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size  # size: tokens of a page
        self._users = [0] * count
        self._unused = OrderedDict.fromkeys(range(count))
        self._named: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        return len(self._unused)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def take(self, tokens: list[int], room: int) -> tuple[list[int], int] | None:
        """Takes pages for `room` tokens that begin with `tokens`, and says how many tokens' keys lie in them already: all but the last, at
        most, whose logits are wanted. None if too few pages are free."""
        shared: list[int] = []
        for name in self._names(tokens, max(len(tokens) - 1, 0) // self.size):
            if (page := self._named.get(name)) is None:
                break
            shared.append(page)
        count = self.needed(room) - len(shared)
        if count > self.free - sum(page in self._unused for page in shared):
            return None
        for page in shared:
            self._unused.pop(page, None)
        pages = shared + [self._unused.popitem(last=False)[0] for _ in range(count)]
        for page in pages[len(shared) :]:
            self._named.pop(self._name_of.pop(page, b""), None)
        for page in pages:
            self._users[page] += 1
        return pages, len(shared) * self.size

    def name(self, pages: list[int], tokens: list[int], before: int) -> None:
        """Names the pages that are full of these tokens and were not yet when there were `before` of them."""
        full = len(tokens) // self.size
        if full == before // self.size:
            return
        for number, name in enumerate(self._names(tokens, full)):
            if number >= before // self.size and name not in self._named:
                self._named[name], self._name_of[pages[number]] = pages[number], name

    def give_back(self, pages: list[int]) -> None:
        for page in reversed(pages):  # the beginning of a prompt is kept longest
            self._users[page] -= 1
            if not self._users[page]:
                self._unused[page] = None
                self._unused.move_to_end(page, last=page in self._name_of)

    def _names(self, tokens: list[int], pages: int) -> Iterator[bytes]:
        digest = hashlib.sha256()
        for n in range(pages):
            digest.update(array("q", tokens[n * self.size : (n + 1) * self.size]).tobytes())
            yield digest.digest()


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
