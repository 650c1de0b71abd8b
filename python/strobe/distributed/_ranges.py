"""Sets of positions as ranges: (start, length), ascending and disjoint, none of them empty."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The union of any ranges, in any order: ranges that touch become one."""
    found: list[tuple[int, int]] = []
    for start, length in sorted(ranges):
        if length <= 0:
            continue
        if found and start <= sum(found[-1]):
            first, before = found[-1]
            found[-1] = first, max(before, start + length - first)
        else:
            found.append((start, length))
    return tuple(found)


def count(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(length for _, length in ranges)


def within(ranges: Ranges, begin: int, end: int) -> Ranges:
    """The positions of the ranges in [begin, end), as ranges counted from `begin` on."""
    found = []
    for start, length in ranges[max(bisect_right(ranges, (begin,)) - 1, 0) :]:
        if start >= end:
            break
        low, high = max(start, begin), min(start + length, end)
        if low < high:
            found.append((low - begin, high - low))
    return tuple(found)


def common(a: Ranges, b: Ranges) -> Ranges:
    return tuple((start + at, length) for start, n in a for at, length in within(b, start, start + n))


def places(of: Ranges, among: Ranges) -> Ranges:
    """The places of the positions `of` when those of `among`, which includes them, are put one after the other."""
    found, before, at = [], 0, 0
    for start, length in among:
        while at < len(of) and of[at][0] < start + length:
            found.append((before + of[at][0] - start, of[at][1]))
            at += 1
        before += length
    return tuple(found)


def indices(ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The positions, int64."""
    return torch.cat([torch.arange(0), *(torch.arange(start, start + length) for start, length in ranges)])
