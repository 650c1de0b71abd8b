"""Measures the cost of hyperbolic scores: each engine that runs here with hyperbolic and with plain scores, forward and backward, shuffled.

CPU calls are timed by the processor time of one thread, so that other work does not count; GPU calls (--cuda) are timed by events.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from statistics import median

import torch

import strobe

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--cuda", action="store_true")
parser.add_argument("--repeats", type=int, default=9)
arguments = parser.parse_args()
device = "cuda" if arguments.cuda else "cpu"
torch.set_num_threads(1)
hyperbolic = {"score": "hyperbolic"}


def milliseconds(call: Callable[[], object]) -> float:
    if device == "cpu":
        begin = time.process_time()
        call()
        return 1e3 * (time.process_time() - begin)
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    call()
    end_event.record()
    torch.cuda.synchronize()
    return begin_event.elapsed_time(end_event)


def calls(engine: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[tuple[str, str], Callable[[], object]]:
    """The calls by (direction, scores). Both kinds of scores get points of the hyperboloid."""
    q, k, v, dout = (strobe.hyperbolic.lift(0.5 * torch.randn(*shape[:-1], shape[-1] - 1, device=device)).to(dtype) for _ in range(4))
    q[..., 0] *= -1
    found: dict[tuple[str, str], Callable[[], object]] = {}
    for scores, options in (("plain", {}), ("hyperbolic", hyperbolic)):
        options = options | {"engine": engine}
        out, lse = strobe.attention(q, k, v, return_lse=True, **options)
        found["forward", scores] = lambda o=options: strobe.attention(q, k, v, **o)
        try:
            strobe.attention_backward(dout, q, k, v, out, lse, **options)
        except NotImplementedError:
            continue
        found["backward", scores] = lambda o=options, out=out, lse=lse: strobe.attention_backward(dout, q, k, v, out, lse, **o)
    return found


for engine, missing in strobe.engines():
    if missing or engine.startswith(("ladder", "reference")) or engine.startswith("cuda") != arguments.cuda:
        continue
    for dtype in (torch.float32, torch.bfloat16):
        for d in (64, 128):
            shape = (1, 256 // d, 1024, d) if device == "cpu" else (1, 2048 // d, 8192 if dtype == torch.bfloat16 else 4096, d)
            try:
                timed = calls(engine, shape, dtype)
            except NotImplementedError:
                continue
            taken: dict[tuple[str, str], list[float]] = {name: [] for name in timed}
            for _ in range(arguments.repeats):
                for name in random.sample(list(timed), len(timed)):
                    taken[name].append(milliseconds(timed[name]))
            for direction in ("forward", "backward"):
                if (direction, "plain") in taken:
                    plain, bent = (median(taken[direction, scores]) for scores in ("plain", "hyperbolic"))
                    print(f"{engine:14} {str(dtype)[6:]:8} {shape!s:20} {direction:8}  {plain:7.2f} -> {bent:7.2f} ms  x{bent / plain:.2f}")
