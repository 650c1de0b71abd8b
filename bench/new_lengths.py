"""Lengths that were not seen before: what 200 of them in a row take, and again, beside scaled_dot_product_attention.

    python bench/new_lengths.py [--device cuda] [--shape 4,16,128] [--lengths 1024,2616,8] [--backward] [--register] [--sdpa]

Prints for each pass the time until the GPU is done, the median time of a call on the host, and how often PyTorch asked the driver for
memory. Kernels are loaded, and memory for results is taken, by a pass over other lengths. --register calls F.scaled_dot_product_attention
with strobe.register() in force, --sdpa without. With --device cpu times include the computation: --shape 1,1,8 --lengths 1,200,1 shows the
host's part.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import strobe

PASSES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="4,16,128", help="batch, heads, head dimension")
    parser.add_argument("--lengths", default="1024,2616,8", help="first, last, step")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--register", action="store_true")
    parser.add_argument("--sdpa", action="store_true")
    options = parser.parse_args()
    batch, heads, dim = map(int, options.shape.split(","))
    first, last, step = map(int, options.lengths.split(","))
    lengths, others = range(first, last + 1, step), range(first + last + step, first + last + step + 3)
    on_gpu = options.device == "cuda"
    memory = [torch.randn(batch * heads * (others[-1] + 1) * dim, device=options.device).bfloat16() for _ in range(3)]

    def tensors(length: int) -> list[Tensor]:
        made = [x[: batch * heads * length * dim].view(batch, heads, length, dim) for x in memory]
        return [x.detach().requires_grad_(options.backward) for x in made]

    attend: Callable[..., Tensor] = strobe.attention
    causal: dict[str, Any] = {"causal": True}
    if options.register or options.sdpa:
        attend, causal = scaled_dot_product_attention, {"is_causal": True}

    def call(q: Tensor, k: Tensor, v: Tensor) -> None:
        out = attend(q, k, v, **causal)
        if options.backward:
            torch.autograd.grad(out, (q, k, v), out)

    def timed(sets: Iterable[list[Tensor]]) -> tuple[float, float, int]:
        allocations = torch.cuda.memory_stats().get("num_device_alloc", 0) if on_gpu else 0
        took = []
        begin = time.perf_counter()
        for each in sets:
            start = time.perf_counter()
            call(*each)
            took.append(time.perf_counter() - start)
        if on_gpu:
            torch.cuda.synchronize()
            allocations = torch.cuda.memory_stats()["num_device_alloc"] - allocations
        return (time.perf_counter() - begin) * 1e3, statistics.median(took) * 1e6, allocations

    with strobe.register(strict=True) if options.register else contextlib.nullcontext():
        timed(map(tensors, others))  # the same call of other lengths, longer ones, so that memory for results is there
        if not options.sdpa:  # every kernel that these lengths take
            with strobe_forgets():
                timed(map(tensors, lengths))
        timed(map(tensors, others))
        sets = [tensors(length) for length in lengths]
        for n in range(PASSES):
            total, host, allocations = timed(sets)
            print(f"pass {n + 1}: {total:8.2f} ms, host {host:7.1f} us a call, {allocations} allocations by the driver")


@contextlib.contextmanager
def strobe_forgets() -> Any:
    """What is remembered of calls meanwhile is forgotten again."""
    from strobe import _prepared

    before = _prepared.CALLS
    _prepared.CALLS = _prepared.Memory()
    try:
        yield
    finally:
        _prepared.CALLS = before


if __name__ == "__main__":
    main()
