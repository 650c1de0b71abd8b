"""Timing several functions fairly: warmed up, their repeats interleaved in shuffled order, medians."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def medians(functions: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Seconds of each function, the median over ``repeats`` calls after one that is not counted."""
    for function in functions.values():
        function()
    order = list(functions) * repeats
    random.Random(0).shuffle(order)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for name in order:
        start = time.perf_counter()
        functions[name]()
        seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}
