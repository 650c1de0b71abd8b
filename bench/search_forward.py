"""Finds the fastest tile of cuda-sm90 for each shape: measures every tile of kForwardTiles (src/cuda/families/sm90_tiles.cpp) in one run.

Prints a table of TFLOP/s (4·B·H·S²·D, half when causal), with the best of each row marked. The power cap makes differences of 3%.

    python bench/search_forward.py [--head-dim 64 128 256] [--seqlen 512 1024 ...] [--repeats 20]
"""

from __future__ import annotations

import argparse
import re
from itertools import product
from typing import Any

import torch
from rich.console import Console

import strobe
from strobe_tools.table import table
from strobe_tools.timing import flops, medians_on_gpu

TOKENS, WIDTH = 16384, 2048  # batch · S, heads · D
QUERIES, KEYS = (64, 128, 192, 256), range(32, 257, 16)
Tile = tuple[int, int]


def tile_of(q: torch.Tensor, **options: Any) -> Tile:
    """The tile that would run."""
    text = strobe.explain(q, q, q, engine="cuda-sm90", **options)
    found = re.search(r"tile (\d+) x (\d+)", text)
    if not found:
        raise SystemExit(text)
    return int(found[1]), int(found[2])


def rates(head_dim: int, seqlen: int, causal: bool, repeats: int) -> tuple[Tile, dict[Tile, float]]:
    """The tile that runs by default, and the rate of each tile."""
    shape = (TOKENS // seqlen, WIDTH // head_dim, seqlen, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    tiles = {tile_of(q, causal=causal, tile_q=a, tile_k=b) for a, b in product(QUERIES, KEYS)}

    def call(tile: Tile) -> Any:
        return lambda: strobe.attention(q, k, v, causal=causal, engine="cuda-sm90", tile_q=tile[0], tile_k=tile[1])

    seconds = medians_on_gpu({tile: call(tile) for tile in sorted(tiles)}, repeats)
    return tile_of(q, causal=causal), {tile: flops(shape, False, causal) / s / 1e12 for tile, s in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seqlen", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    made = table(f"cuda-sm90 on {torch.cuda.get_device_name()}", ("d", "causal", "S", "runs", "tiles: TFLOP/s"))
    for head_dim, causal, seqlen in product(args.head_dim, (False, True), args.seqlen):
        runs, found = rates(head_dim, seqlen, causal, args.repeats)
        best = max(found, key=lambda tile: found[tile])
        cells = (f"{a}x{b}: {found[a, b]:.0f}{'*' if (a, b) == best else ''}" for a, b in found)
        made.add_row(str(head_dim), "yes" if causal else "no", str(seqlen), "x".join(map(str, runs)), "  ".join(cells))
    Console(width=140).print(made)


if __name__ == "__main__":
    main()
