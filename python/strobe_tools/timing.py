"""Times several functions fairly: after a warm-up, repeats are interleaved in shuffled order, and medians count. Also counts their work."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Name = TypeVar("Name")
_HOST_MARGIN = 1.5  # ratio of the GPU's time to the host's above which the host is safely ahead
_CLOCK = 2e9  # Hz, about that of a GPU
SPREAD = 2.0  # ratio of a figure's longest call to its shortest one, above which something else has run meanwhile
BUSY = "the machine was busy: measure again"
_LOAD = 0.05  # seconds of calls before those that count


def flops(shape: tuple[int, int, int, int], backward: bool, causal: bool) -> float:
    """4·B·H·S²·D forward, 2.5 times that backward, half when causal."""
    batch, heads, seqlen, head_dim = shape
    return 4.0 * batch * heads * seqlen**2 * head_dim * (2.5 if backward else 1) * (0.5 if causal else 1)


def medians(functions: Mapping[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] | None = None) -> dict[str, float]:
    """Seconds of each function, the median over ``repeats`` calls after one that is not counted. clock: else time.perf_counter."""
    return {name: statistics.median(times) for name, times in samples(functions, repeats, clock).items()}


def samples(functions: Mapping[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] | None = None) -> dict[str, list[float]]:
    """Like medians(), but all times that count."""
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
    return seconds


def medians_on_gpu(functions: Mapping[Name, Callable[[], Any]], repeats: int) -> dict[Name, float]:
    """Like medians(), but by CUDA events on the current stream: the time on the GPU, without that of the host.

    Calls run under load, as in a training step: they are launched without a stop, after rounds that do not count and that bring clocks and
    power to a steady state. Each call finds other data in the L2 cache, none of which must be written back. If the calls are too short for
    the host to keep ahead, the GPU waits before each.
    """
    return {name: statistics.median(times) for name, times in samples_on_gpu(functions, repeats).items()}


def samples_on_gpu(functions: Mapping[Name, Callable[[], Any]], repeats: int) -> dict[Name, list[float]]:
    """Like medians_on_gpu(), but all times that count."""
    import torch

    properties = torch.cuda.get_device_properties("cuda")
    other = torch.zeros(2 * properties.L2_cache_size // 4, dtype=torch.float32, device="cuda")

    def timed(function: Callable[[], Any], clocks: int) -> tuple[Any, Any]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if clocks:
            torch.cuda._sleep(clocks)
        other.sum()  # read, not written: the cache would write it back while the call runs
        start.record()
        function()
        end.record()
        return start, end

    def round_of_all() -> tuple[float, float]:
        """Seconds of the host, and of the GPU."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        pairs = [timed(function, 0) for function in functions.values()]
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        return host, pairs[0][0].elapsed_time(pairs[-1][1]) / 1e3

    round_of_all()
    host, gpu = map(min, zip(*(round_of_all() for _ in range(3)), strict=True))
    behind = gpu < _HOST_MARGIN * host
    clocks = int(_HOST_MARGIN * host / len(functions) * _CLOCK) if behind else 0
    order = list(functions) * (repeats + math.ceil(_LOAD / max(gpu, host)))
    random.Random(0).shuffle(order)
    events: dict[Name, list[tuple[Any, Any]]] = {name: [] for name in functions}
    for name in order:
        events[name].append(timed(functions[name], clocks))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) / 1e3 for start, end in pairs[-repeats:]] for name, pairs in events.items()}
