"""The keys that some query sees, by positions and block masks; and the amount of work."""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .._blockmask import BlockMask
from ._ranges import Ranges, common, union, within


class Band(NamedTuple):
    """Query i sees the keys i + offset - left <= j <= i + offset + right; None: no bound. The offset aligns the ends of a sequence's
    queries and keys, or else their beginnings."""

    left: int | None = None
    right: int | None = None
    bottom_right: bool = True

    @classmethod
    def of(cls, causal: bool, window: int | tuple[int | None, int | None] | None, alignment: str = "bottom_right") -> Band:
        left, right = window if isinstance(window, (tuple, list)) else (window, window)
        if causal:
            right = 0 if right is None else min(right, 0)
        return cls(left, right, alignment == "bottom_right")

    def offset(self, seqlen_q: int, seqlen_k: int) -> int:
        return seqlen_k - seqlen_q if self.bottom_right else 0

    def keys(self, first: int, last: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """The first key that some of the queries first ... last sees, and the number of such keys."""
        offset = self.offset(seqlen_q, seqlen_k)
        low = 0 if self.left is None else max(first + offset - self.left, 0)
        high = seqlen_k if self.right is None else min(last + offset + self.right + 1, seqlen_k)
        return low, max(high - low, 0)


class Blocks:
    """The blocks of a block mask that some sequence and some head keeps: for each row of blocks the ranges of columns. Two Blocks are
    equal if their digests are equal."""

    def __init__(self, block_q: int, block_k: int, rows: tuple[Ranges, ...]):
        self.block_q, self.block_k, self.rows = block_q, block_k, rows
        self.digest = hashlib.sha256(repr((block_q, block_k, rows)).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blocks) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Blocks({self.block_q}, {self.block_k}, {self.digest[:16]})"


# Blocks by a mask's offsets, and by the number of writes to these so far.
_KNOWN: WeakIdKeyDictionary = WeakIdKeyDictionary()


def blocks_of(rows: Tensor, cols: Tensor, columns: int, block_q: int, block_k: int) -> Blocks:
    """The Blocks of a CSR in host memory, (B, H, query blocks + 1), with this many columns."""
    changes = [None if x.is_inference() else x._version for x in (rows, cols)]  # inference tensors do not count writes
    version = (*changes, cols.data_ptr(), block_q, block_k)
    found = _KNOWN.get(rows)
    if found is not None and found[0] == version and None not in changes:
        return found[1]
    n = rows.shape[2] - 1
    counts = (rows[..., 1:] - rows[..., :-1]).reshape(-1).long()
    of = torch.arange(n).repeat(rows.shape[0] * rows.shape[1]).repeat_interleave(counts)
    kept = torch.zeros(n, columns + 2, dtype=torch.int8)
    kept[of, cols.long() + 1] = 1
    edges = kept.diff(dim=1)
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    ends = (edges == -1).nonzero()[:, 1].tolist()
    for (row, start), end in zip((edges == 1).nonzero().tolist(), ends, strict=True):
        ranges[row].append((start, end - start))
    made = Blocks(block_q, block_k, tuple(map(tuple, ranges)))
    _KNOWN[rows] = version, made
    return made


@lru_cache(maxsize=4096)
def seen_keys(q: Ranges, cu_q: Sequence[int], cu_k: Sequence[int], band: Band, blocks: Blocks | None) -> Ranges:
    """The key tokens that some of the query tokens q may see."""

    def of_sequence(rows: Ranges, seqlen_q: int, seqlen_k: int) -> Iterator[tuple[int, int]]:
        for start, length in rows:
            if blocks is None:
                yield band.keys(start, start + length - 1, seqlen_q, seqlen_k)
                continue
            for row in range(start // blocks.block_q, (start + length - 1) // blocks.block_q + 1):
                first, last = max(start, row * blocks.block_q), min(start + length, (row + 1) * blocks.block_q) - 1
                kept = tuple((at * blocks.block_k, n * blocks.block_k) for at, n in blocks.rows[row])
                yield from common(union([band.keys(first, last, seqlen_q, seqlen_k)]), kept)

    found: list[tuple[int, int]] = []
    for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        found += [(k0 + start, length) for start, length in of_sequence(within(q, q0, q1), q1 - q0, k1 - k0)]
    return union(found)


def work_before(seqlen: int, cu: Sequence[int], band: Band, block_mask: BlockMask | None) -> Callable[[int], int]:
    """A function of n: the sum of work_of_tokens() of the first n tokens. Without a block mask it takes no memory for the tokens."""
    if block_mask is not None:
        return [0, *work_of_tokens(seqlen, cu, band, block_mask).cumsum(0).tolist()].__getitem__
    sums = [0, *itertools.accumulate(_pairs(end - begin, end - begin, band) for begin, end in itertools.pairwise(cu))]

    def before(n: int) -> int:
        s = min(bisect_right(cu, n) - 1, len(cu) - 2)  # the sequence of token n, or the last one
        return sums[s] + _pairs(min(n, cu[s + 1]) - cu[s], cu[s + 1] - cu[s], band) if s >= 0 else 0

    return before


def _pairs(n: int, length: int, band: Band) -> int:
    """How many keys the first n queries of a sequence see, added up: query i sees the keys from max(i - left, 0) to min(i + right + 1,
    length), exclusive."""
    hidden_before = 0 if band.left is None else max(n - band.left, 0)
    cut = 0 if band.right is None else min(n, max(length - band.right - 1, 0))  # queries that do not see the last key
    seen = (n - cut) * length + cut * (cut - 1) // 2 + cut * ((band.right or 0) + 1)
    return seen - hidden_before * (hidden_before - 1) // 2


def work_of_tokens(seqlen: int, cu: Sequence[int], band: Band, block_mask: BlockMask | None) -> Tensor:
    """The number of keys that each query sees, where queries and keys are the same tokens: int64 (seqlen,). With a block mask, an estimate:
    at most the sequence's length times the fraction of the query's blocks that the mask keeps."""
    work = torch.zeros(seqlen, dtype=torch.int64)
    share = None
    if block_mask is not None:
        kept = torch.as_tensor(block_mask.to_kept()).cpu().double().mean((0, 1, 3))
        share = kept.repeat_interleave(min(block_mask.block_q, seqlen))  # a block may be larger than the whole
    for begin, end in itertools.pairwise(cu):
        length = end - begin
        i = torch.arange(length)
        low = torch.zeros_like(i) if band.left is None else (i - band.left).clamp(min=0)
        high = torch.full_like(i, length) if band.right is None else (i + band.right + 1).clamp(max=length)
        seen = (high - low).clamp(min=0)
        work[begin:end] = seen if share is None else (length * share[:length]).ceil().long().minimum(seen)
    return work
