"""Compares decoding over quantised keys with bf16: correctness and speed. Needs one GPU, and less than a minute after compilation:

python tests/gpu/quantised.py"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import strobe

SHAPES = ((64, 4096), (128, 1024), (8, 16384), (1, 65536))  # batch, keys; 32/8 heads of 128 columns
STORED = {"INT8": torch.int8, "FP8": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2, "INT4": torch.uint8}


def median_ms(call: Callable[[], Any], flush: torch.Tensor, rounds: int = 20) -> float:
    """The median time of a call in milliseconds. Before each call the L2 cache is flushed by reading."""
    for _ in range(3):
        call()
    spans = []
    for _ in range(rounds):
        flush.sum()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in spans)[rounds // 2]


def main() -> None:
    torch.manual_seed(0)
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    for dtype in (torch.bfloat16, torch.float16):
        for batch, keys in SHAPES:
            q = torch.randn(batch, 32, 1, 128, device="cuda", dtype=dtype)
            k, v = (torch.randn(batch, 8, keys, 128, device="cuda", dtype=dtype) for _ in range(2))
            plain = median_ms(lambda q=q, k=k, v=v: strobe.attention(q, k, v), flush)
            print(f"{dtype} {batch} x {keys}: {1e3 * plain:.1f} us")
            for name, stored in STORED.items():
                (data_k, k_scale), (data_v, v_scale) = (strobe.kv.quantise(x, stored, scale_dtype=torch.float16) for x in (k, v))
                given = {"k_scale": k_scale, "v_scale": v_scale}

                def call(q: Any = q, k: Any = data_k, v: Any = data_v, given: Any = given) -> Any:
                    return strobe.attention(q, k, v, engine="cuda-mma", **given)

                exact, _ = strobe.reference(
                    q[:1].cpu(), data_k[:1].cpu(), data_v[:1].cpu(), rows=[0, 31], **{x: scale[:1].cpu() for x, scale in given.items()}
                )
                off = max(float((call()[0, h].cpu().double() - exact[0, h]).abs().max()) for h in (0, 31))
                took = median_ms(call, flush)
                largest = float(exact[0, 0].abs().max())
                print(f"  {name}: {1e3 * took:.1f} us, {plain / took:.2f} times as fast; off by {off:.1e} of {largest:.1e}")


main()
