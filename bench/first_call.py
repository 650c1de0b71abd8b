"""Milliseconds of a process's first forward and backward on a GPU, after PyTorch has started CUDA.

python bench/first_call.py [--feature plain|causal|varlen] [--head-dim D] [--sizes B,H,S]

With an empty STROBE_CACHE_DIR kernels are compiled, or come from the package strobe-attention-kernels; STROBE_NVRTC=/nowhere proves that
nothing was compiled. A second forward is timed, too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import strobe


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return result, (time.perf_counter() - begin) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--feature", choices=("plain", "causal", "varlen"), default="causal")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--sizes", default="2,16,4096", help="sequences, heads, tokens of a sequence")
    options = parser.parse_args()
    batch, heads, tokens = map(int, options.sizes.split(","))
    packed = options.feature == "varlen"
    shape = (batch * tokens, heads, options.head_dim) if packed else (batch, heads, tokens, options.head_dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    how: dict[str, Any] = {"causal": options.feature != "plain"}
    if packed:
        starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * tokens
        how |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": tokens, "max_seqlen_k": tokens}
    (q + q).sum().item()
    (out, lse), forward = timed(lambda: strobe.attention(q, k, v, return_lse=True, **how))
    _, backward = timed(lambda: strobe.attention_backward(dout, q, k, v, out, lse, **how))
    _, again = timed(lambda: strobe.attention(q, k, v, return_lse=True, **how))
    called = f"{options.feature}, d {options.head_dim}, {options.sizes}"
    print(f"{called}: first forward {forward:.1f} ms, first backward {backward:.1f} ms, second forward {again:.2f} ms")
    for line in strobe.explain(q, k, v, **how).splitlines():
        if "kernel cache" in line or "compiled here" in line:
            print(line.strip())


if __name__ == "__main__":
    main()
