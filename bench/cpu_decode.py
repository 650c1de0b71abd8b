"""Times decoding on a CPU (few queries of each head over many keys), PyTorch's attention, and a sum that reads the same bytes.

    python bench/cpu_decode.py [--threads 1] [--rounds 9] [--beyond-cache] [--queries 1] [--quantised]

All contestants take turns in each round, and the minimum over the rounds is printed. One thread is timed by its own processor time, so that
other work on the machine counts only if it occupies the memory.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

import strobe
import strobe.kv

HEADS = ((1, 1), (8, 8), (8, 1), (32, 8), (32, 32))
KEYS = (1024, 8192, 65536)
MOST_BYTES = 512 << 20  # of K and V
BEYOND_CACHE = 160 << 20  # at least four times 32 MiB
SHORTEST = 4 << 20  # bytes that one measurement reads at least


def seconds(call: Callable[[], object], repeats: int, threads: int) -> float:
    clock = time.thread_time if threads == 1 else time.perf_counter
    begin = clock()
    for _ in range(repeats):
        call()
    return (clock() - begin) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--beyond-cache", action="store_true", help=f"K and V of {BEYOND_CACHE >> 20} MiB and more, by a batch")
    parser.add_argument("--quantised", action="store_true", help="quantised K and V beside bfloat16 instead")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.quantised:
        print("| heads | D | INT8 | FP8 | INT4 | INT8, K by column |\n|---|---|---|---|---|---|")
        for d, heads in itertools.product((128, 64), (8, 32, 64)):
            quantised(heads, 8, d, args)
        return
    print("| dtype | batch | heads | keys | D | µs | GB/s | over SDPA | of a sum's GB/s |\n|---|---|---|---|---|---|---|---|---|")
    all_heads = ((8, 8), (32, 8), (8, 1)) if args.beyond_cache else HEADS
    ratios = []
    for dtype, (heads, heads_kv), keys, d in itertools.product((torch.float32, torch.bfloat16), all_heads, KEYS, (64, 128)):
        size = 2 * heads_kv * keys * d * dtype.itemsize
        batch = -(-BEYOND_CACHE // size) if args.beyond_cache else 1
        if batch * size <= MOST_BYTES:
            ratios.append(row(dtype, batch, heads, heads_kv, keys, d, args))
    for n, beside in enumerate(("SDPA", "a sum")):
        column = [ratio[n] for ratio in ratios]
        print(f"over {beside}: geometric mean {math.exp(sum(map(math.log, column)) / len(column)):.2f}, lowest {min(column):.2f}")


def row(dtype: torch.dtype, batch: int, heads: int, heads_kv: int, keys: int, d: int, args: argparse.Namespace) -> tuple[float, float]:
    q = torch.randn(batch, heads, args.queries, d).to(dtype)
    k, v = (torch.randn(batch, heads_kv, keys, d).to(dtype) for _ in "kv")
    as_read = [x.flatten().view(torch.float32) for x in (k, v)]
    size = sum(x.nbytes for x in (k, v))
    calls: list[Callable[[], object]] = [
        lambda: strobe.attention(q, k, v),
        lambda: scaled_dot_product_attention(q, k, v, enable_gqa=heads != heads_kv),
        lambda: [x.sum() for x in as_read],
    ]
    repeats = max(1, SHORTEST // size)
    rounds = [[seconds(call, repeats, args.threads) for call in calls] for _ in range(args.rounds)]
    least = [min(times) for times in zip(*rounds, strict=True)]
    name, over = str(dtype).removeprefix("torch."), (least[1] / least[0], least[2] / least[0])
    print(
        f"| {name} | {batch} | {heads}/{heads_kv} | {keys} | {d} | {least[0] * 1e6:.0f} | {size / least[0] / 1e9:.1f} "
        f"| {over[0]:.2f} | {over[1]:.2f} |",
        flush=True,
    )
    return over


def quantised(heads: int, heads_kv: int, d: int, args: argparse.Namespace) -> None:
    keys, group = 65536, 64
    q = torch.randn(1, heads, args.queries, d).bfloat16()
    k, v = (torch.randn(1, heads_kv, keys, d).bfloat16() for _ in "kv")
    calls: list[Callable[[], object]] = [lambda: strobe.attention(q, k, v)]
    for dtype, of_columns in ((torch.int8, None), (torch.float8_e4m3fn, None), (torch.uint8, None), (torch.int8, group)):
        stored_k, k_scale = strobe.kv.quantise(k, dtype, group=of_columns)
        stored_v, v_scale = strobe.kv.quantise(v, dtype)
        options = {"k_scale": k_scale, "v_scale": v_scale, "k_scale_group": of_columns}
        calls.append(partial(strobe.attention, q, stored_k, stored_v, **options))
    rounds = [[seconds(call, 1, args.threads) for call in calls] for _ in range(args.rounds)]
    bf16, *others = (min(times) for times in zip(*rounds, strict=True))
    print(f"| {heads}/{heads_kv} | {d} | " + " | ".join(f"{bf16 / other:.2f}" for other in others) + " |", flush=True)


if __name__ == "__main__":
    main()
