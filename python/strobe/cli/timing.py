"""Timing several functions fairly: warmed up, their repeats interleaved in shuffled order, medians. And the work that they did."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Name = TypeVar("Name")
_HEAD_START = 500_000  # clocks, a quarter of a millisecond


def flops(shape: tuple[int, int, int, int], backward: bool, causal: bool) -> float:
    """4·B·H·S²·D forward, 2.5 times that backward, half when causal."""
    batch, heads, seqlen, head_dim = shape
    return 4.0 * batch * heads * seqlen**2 * head_dim * (2.5 if backward else 1) * (0.5 if causal else 1)


def medians(functions: Mapping[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] | None = None) -> dict[str, float]:
    """Seconds of each function, the median over ``repeats`` calls after one that is not counted. clock: else time.perf_counter."""
    now = clock or time.perf_counter
    for function in functions.values():
        function()
    order = list(functions) * repeats
    random.Random(0).shuffle(order)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for name in order:
        start = now()
        functions[name]()
        seconds[name].append(now() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def medians_on_gpu(functions: Mapping[Name, Callable[[], Any]], repeats: int) -> dict[Name, float]:
    """The same by CUDA events on the current stream: the time on the GPU, whatever the host takes beside it."""
    import torch

    for function in functions.values():
        function()
    order = list(functions) * repeats
    random.Random(0).shuffle(order)
    events: dict[Name, list[tuple[Any, Any]]] = {name: [] for name in functions}
    for name in order:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_HEAD_START)  # the GPU waits, not the clock, while the host launches
        start.record()
        functions[name]()
        end.record()
        torch.cuda.synchronize()
        events[name].append((start, end))
    return {name: statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3 for name, pairs in events.items()}
