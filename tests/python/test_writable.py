"""Memory for results: it must not be shared, but may be interleaved with the memory of other tensors."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from strobe._writable import share_memory

DTYPES = (torch.int8, torch.float16, torch.float32, torch.float64)


def touched(x: Tensor) -> set[int]:
    places = torch.arange(x.data_ptr(), x.data_ptr() + 1)
    for n, stride in zip(x.shape, x.stride(), strict=True):
        places = (places[:, None] + torch.arange(n) * stride * x.element_size()).flatten()
    return set((places[:, None] + torch.arange(x.element_size())).flatten().tolist())


def test_memory_that_is_shared_is_found_exactly():
    """The answers for tensors of any dtypes, ranks and strides in one buffer are compared with sets of bytes."""
    generator = random.Random(1)
    buffer = torch.zeros(1000, dtype=torch.float64)
    found = 0
    for _ in range(4000):
        views = []
        for _ in range(2):
            memory = buffer.view(generator.choice(DTYPES))
            strides = [generator.choice([0, 1, 2, 3, 4, 6, 12, 24, 25]) for _ in range(generator.randint(0, 4))]
            sizes = [generator.randint(1, 4) for _ in strides]
            views.append(memory.as_strided(sizes, strides, generator.randint(0, 60)))
        shared = bool(touched(views[0]) & touched(views[1]))
        assert share_memory(*views) == share_memory(*views[::-1]) == shared, [(x.dtype, x.shape, x.stride()) for x in views]
        found += shared
    assert 500 < found < 3500


def interleaved(pages: int, page: int, heads: int, d: int, gap: int) -> tuple[Tensor, ...]:
    """int8 data and float32 scales of K and V of a row and head, side by side; gap: bytes after each page."""
    row = 2 * (d + 4)
    whole = torch.zeros(pages, page * heads * row + gap, dtype=torch.int8)[:, : page * heads * row]
    k, k_scale, v, v_scale = whole.view(pages, page, heads, row).split([d, 4, d, 4], -1)
    return (k, v, *(x.view(torch.float32)[..., 0] for x in (k_scale, v_scale)))


def test_large_caches_that_interleave_are_told_apart_at_once():
    for gap in (0, 4, 64):
        views = interleaved(4096, 16, 8, 128, gap)
        for n, x in enumerate(views):
            for m, y in enumerate(views):
                assert share_memory(x, y) == (n == m)
        k, _, k_scale, _ = views
        assert share_memory(k[..., -1:].expand(4096, 16, 8, 8), k)
        assert share_memory(k_scale[7:, 3], k_scale[8:])


def test_what_would_take_long_to_find_out_counts_as_shared():
    """The strides are large primes, whose sums all differ."""
    buffer = torch.zeros(40_000_000, dtype=torch.int8)
    x = buffer.as_strided((99, 97, 89, 83), (100_003, 99_991, 99_989, 2))
    y = buffer.as_strided((99, 97, 89, 83), (100_019, 99_971, 99_961, 4), 1)
    assert share_memory(x, y)
