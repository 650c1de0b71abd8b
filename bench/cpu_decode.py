"""Decoding on a CPU: one query of each head over many keys, beside PyTorch's attention and a sum that reads as many bytes.

    python bench/cpu_decode.py [--threads 1] [--rounds 25]

Prints the least of the rounds, in which the three take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

import strobe

HEADS = ((8, 8), (8, 1), (32, 8))
KEYS = (1024, 8192, 65536)
MOST_BYTES = 512 << 20  # of K and V


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| dtype | heads | keys | D | µs | GB/s | over SDPA | of a sum's GB/s |\n|---|---|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for heads, heads_kv in HEADS:
            for keys in KEYS:
                for d in (64, 128):
                    size = 2 * heads_kv * keys * d * dtype.itemsize
                    if size <= MOST_BYTES:
                        row(dtype, heads, heads_kv, keys, d, size, args.rounds)


def row(dtype: torch.dtype, heads: int, heads_kv: int, keys: int, d: int, size: int, rounds: int) -> None:
    q = torch.randn(1, heads, 1, d).to(dtype)
    k, v = (torch.randn(1, heads_kv, keys, d).to(dtype) for _ in "kv")
    as_read = torch.ones(size // 4)
    calls: list[Callable[[], object]] = [
        lambda: strobe.attention(q, k, v),
        lambda: scaled_dot_product_attention(q, k, v, enable_gqa=heads != heads_kv),
        as_read.sum,
    ]
    least = [min(times) for times in zip(*[[seconds(call) for call in calls] for _ in range(rounds)], strict=True)]
    print(
        f"| {str(dtype).removeprefix('torch.')} | {heads}/{heads_kv} | {keys} | {d} | {least[0] * 1e6:.0f} | {size / least[0] / 1e9:.1f} "
        f"| {least[1] / least[0]:.2f} | {least[2] / least[0]:.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
