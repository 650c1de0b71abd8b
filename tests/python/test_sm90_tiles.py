"""The Hopper forward's query tile: at the benchmark's shapes the one that was measured as the fastest, at others the one with the fewest
scores."""

from __future__ import annotations

import re

import pytest

from strobe._prewarm import Shape, kernels


def tile(batch, heads, heads_kv, seqlen, dim, causal=False, window=0, lengths=(), dim_v=0, more=(), **fields):
    """Warpgroups, keys per tile, and whether query heads share a tile. more: arrays beside q, k and v; fields: further options."""
    tokens = sum(lengths)
    shapes = ((heads, dim), (heads_kv, dim), (heads_kv, dim_v or dim))
    arrays = {
        name: Shape((tokens, h, d) if tokens else (batch, h, seqlen, d), "bfloat16") for name, (h, d) in zip("qkv", shapes, strict=True)
    }
    arrays |= dict(more)
    options = ({"window_right": 0} if causal else {}) | ({"window_left": window} if window else {}) | fields
    if tokens:
        arrays |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), Shape((len(lengths) + 1,), "int32"))
        options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(lengths))
    (name,) = (name for name in kernels(arrays, options, False, 90) if "sm90::Forward" in name)
    config = [int(x) for x in re.search(r"Config\{(.*?)\}", name)[1].split(",")]
    return config[3], config[4], bool(config[14])


@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_tiles_that_were_measured(dim, causal, seqlen):
    expected = {
        64: (1, 64) if causal and seqlen <= 1024 else (4, 64) if seqlen < 8192 else (3, 128),
        128: (2, 128) if seqlen < 2048 else (3, 80),
        256: (2, 64) if seqlen <= 512 else (2, 80),
    }[dim]
    assert tile(16384 // seqlen, 2048 // dim, 2048 // dim, seqlen, dim, causal) == (*expected, False)


# The fastest tiles on an H200 at lengths that are no powers of two. Rows of 24, 72 and 88 numbers are not whole sectors of 32 bytes, so
# that tiles of few queries wait for the copy engine.
@pytest.mark.parametrize(
    ("dim", "seqlen", "causal", "expected"),
    [
        (64, 700, True, (1, 64)),
        (48, 300, True, (1, 64)),
        (24, 700, True, (4, 64)),
        (40, 1500, False, (4, 64)),
        (128, 300, False, (3, 80)),
        (128, 1000, True, (2, 128)),
        (128, 1500, False, (3, 80)),
        (96, 1969, True, (3, 80)),
        (72, 1969, False, (3, 80)),
        (88, 500, False, (3, 80)),
    ],
)
def test_the_tiles_that_were_measured_at_other_lengths(dim, seqlen, causal, expected):
    heads = 2048 // dim
    assert tile(16384 // seqlen, heads, heads, seqlen, dim, causal)[:2] == expected


@pytest.mark.parametrize(
    ("dim", "option", "causal", "expected"),
    [
        (64, "bias", True, (3, 64)),
        (128, "bias", False, (2, 128)),
        (64, "alibi_slopes", True, (4, 64)),
        (128, "alibi_slopes", True, (3, 80)),
        # The correction of keys past the diagonal takes registers.
        (64, "alibi_slopes", False, (3, 80)),
        (128, "alibi_slopes", False, (2, 128)),
    ],
)
def test_the_tiles_that_were_measured_with_options(dim, option, causal, expected):
    heads = 2048 // dim
    given = {"bias": Shape((1, 1, 4096, 4096), "bfloat16"), "alibi_slopes": Shape((heads,), "float32")}
    assert tile(4, heads, heads, 4096, dim, causal, more={option: given[option]})[:2] == expected


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("fields", [{}, {"scale": -0.2}, {"window_left": 1000}, {"scale": -0.2, "window_left": 1000}], ids=str)
def test_lengths_do_not_choose_an_invariant_tile(dim, fields):
    """A window wider than a call is left out of its kernel."""
    assert len({tile(2, 4, 4, seqlen, dim, invariant=True, **fields)[:2] for seqlen in (100, 400, 2000, 20000)}) == 1


def walked(queries, seqlen, keys, causal, window):
    """How many keys all query tiles of this size walk over together, counted in whole key tiles."""
    found = 0
    for first in range(0, seqlen, queries):
        end = min(first + queries, seqlen) if causal else seqlen
        begin = max(0, first - window) // 16 * 16 if window else 0
        found += -(-(end - begin) // keys) * keys
    return found


SHAPES = [(2, 128), (3, 64), (4, 96), (5, 128), (6, 232), (7, 120), (8, 64), (33, 128)]


@pytest.mark.parametrize("seqlen", [28, 70, 170, 376, 512, 1000, 3050])
@pytest.mark.parametrize(("group", "dim"), SHAPES)
@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (True, 188)])
def test_heads_share_tiles_where_a_tenth_less_is_computed(group, dim, seqlen, causal, window):
    warpgroups, keys, together = tile(64, 2 * group, 2, seqlen, dim, causal, window if window < seqlen else 0)
    apart = group * warpgroups * 64 * walked(warpgroups * 64, seqlen, keys, causal, window)
    least, pieces = apart, -(-group // 64)
    while pieces < group:
        heads = -(-group // pieces)
        queries = warpgroups * (64 // heads)
        least = min(least, -(-group // heads) * warpgroups * 64 * walked(queries, seqlen, keys, causal, window))
        pieces *= 2
    # The library looks at 32 tiles of a long sequence.
    assert together == (least < 0.9 * apart) or abs(least / apart - 0.9) < 0.02


def test_packed_sequences():
    assert tile(0, 10, 2, 0, 128, lengths=(64,) * 16) == (1, 64, False)  # a tile of one head fills it
    assert tile(0, 32, 8, 0, 128, causal=True, lengths=(128,) * 64) == (2, 128, False)
    assert tile(0, 15, 3, 0, 248, lengths=(134, *range(60, 134))) == (2, 64, True)
    assert tile(0, 2, 2, 0, 128, causal=True, lengths=(4640, *[36] * 63)) == (2, 128, False)  # the mean length does not decide


@pytest.mark.parametrize("backward", [False, True])
def test_packed_tokens_of_no_sequence(backward):
    x, starts = Shape((500, 4, 64), "bfloat16"), Shape((1,), "int32")
    arrays = {"q": x, "k": x, "v": x, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    assert kernels(arrays, {"max_seqlen_q": 100, "max_seqlen_k": 100}, backward, 90)
