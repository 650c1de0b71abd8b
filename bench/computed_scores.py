"""Counts the scores that the Hopper forward computes at random shapes, relative to the tiles of FlashAttention-4: 128 rows, which heads
fill without gaps, and key tiles that begin at multiples of their size.

Runs nothing and needs no GPU. The tiles are those that the library would take on a GPU of compute capability 9.0.

    python bench/computed_scores.py [--seed 7] [--shapes 150] [--worst 10]
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from rich.console import Console

from strobe._prewarm import Shape, kernels
from strobe_tools.bench.gpu import drawn
from strobe_tools.bench.gpu.problem import Problem


class Tile(NamedTuple):
    """A tile of this many queries, which walks over `keys` keys at a time."""

    rows: int
    queries: float
    keys: int
    pieces: int  # tiles among which the query heads of a key head are divided
    align: int = 16  # key tiles begin at multiples of this


def _up(count: float, unit: float) -> int:
    return -int(-count // unit)


def scores(p: Problem, tile: Tile) -> int:
    """The scores that such tiles compute for all sequences."""
    found = 0
    for length in p.lengths or (p.seqlen,):
        for n in range(_up(length, tile.queries)):
            first, end = int(n * tile.queries), min(length, int((n + 1) * tile.queries - 1e-9) + 1)
            begin = max(0, first - p.window) // tile.align * tile.align if p.window else 0
            found += tile.rows * tile.pieces * _up((end if p.causal else length) - begin, tile.keys) * tile.keys
    return found * p.heads_kv * (1 if p.lengths else p.batch)


def taken(p: Problem) -> Iterator[Tile]:
    """The tile that the library uses; if heads share it, the allowed one that computes the least."""
    tokens, dims = sum(p.lengths), (p.dim, p.dim, p.dim_v or p.dim)
    heads = (p.heads, p.heads_kv, p.heads_kv)
    arrays = {
        name: Shape((tokens, h, d) if tokens else (p.batch, h, p.seqlen, d), p.dtype) for name, h, d in zip("qkv", heads, dims, strict=True)
    }
    options = ({"window_right": 0} if p.causal else {}) | ({"window_left": p.window} if p.window else {})
    if tokens:
        arrays |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), Shape((len(p.lengths) + 1,), "int32"))
        options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(p.lengths))
    (name,) = (name for name in kernels(arrays, options, False, 90) if "sm90::Forward" in name)
    config = [int(x) for x in re.search(r"Config\{(.*?)\}", name)[1].split(",")]  # type: ignore[index]
    warpgroups, keys, together, group = config[3], config[4], config[14], p.heads // p.heads_kv
    if not together:
        yield Tile(64 * warpgroups, 64 * warpgroups, keys, group)
        return
    pieces = _up(group, 64)
    while pieces < group:
        heads_of_tile = _up(group, pieces)
        yield Tile(64 * warpgroups, warpgroups * (64 // heads_of_tile), keys, _up(group, heads_of_tile))
        pieces *= 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--shapes", type=int, default=150)
    parser.add_argument("--worst", type=int, default=10)
    args = parser.parse_args()
    draw, found = Random(args.seed), []
    for _ in range(args.shapes):
        p, where = drawn.shape(draw)
        group, larger = p.heads // p.heads_kv, max(p.dim, p.dim_v)
        keys = 128 if larger <= 128 else 112 if larger <= 192 else 80
        without_gaps = min(scores(p, Tile(128, 128, keys, group, keys)), scores(p, Tile(128, 128 / group, keys, 1, keys)))
        tiles = list(taken(p))
        found.append((min(scores(p, tile) for tile in tiles) / without_gaps, tiles[0].queries < tiles[0].rows, where))
    console = Console(width=140, highlight=False)
    ratios = [ratio for ratio, _, _ in found]
    together = sum(shared for _, shared, _ in found)
    console.print(f"{len(found)} shapes, seed {args.seed}: {sum(ratios) / len(ratios):.2f} in the mean; heads share tiles in {together}")
    for ratio, _, where in sorted(found, key=lambda x: -x[0])[: args.worst]:
        console.print(f"{ratio:.2f}  {where}")


if __name__ == "__main__":
    main()
