"""Compiles kernels, in several processes, before anything is timed: Strobe's without a GPU, FlashAttention-4's through its cache on
disk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import suppress
from itertools import zip_longest
from multiprocessing import get_context
from random import Random
from typing import Any

from strobe._prewarm import Shape, prewarm
from strobe_tools.bench.gpu import contestants
from strobe_tools.bench.gpu.measurement import make
from strobe_tools.bench.gpu.problem import FEATURES, Problem, quantised
from strobe_tools.bench.gpu.sets import Group, Run


def compile_all(groups: Sequence[Group], compute_capability: int, jobs: int, seconds: float | None = None) -> tuple[int, list[str]]:
    """Compiles the kernels of all calls. Returns the number of calls whose kernels were compiled, and the errors; calls with an error are
    tried again when they are timed. seconds: compile in the order of timing, and begin nothing after this time."""
    of_strobe = {(run, g.direction): None for g in groups for run in g.runs.values() if run.who not in contestants.PEERS}
    of_fa4 = {
        (_small(run.problem), g.direction): Group(g.set, g.direction, {"fa4": run._replace(problem=_small(run.problem))}, [])
        for g in groups
        for run in g.runs.values()
        if run.who == "fa4" and not contestants.missing("fa4")
    }
    # Neighbouring calls share kernels, so one would wait for the other's compilation.
    ordered = list(of_strobe) if seconds is not None else Random(0).sample(list(of_strobe), len(of_strobe))
    began = time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        slow = [(_of_fa4, group) for group in of_fa4.values()]
        quick = [(_of_strobe, run, direction, compute_capability) for run, direction in ordered]
        calls: list[tuple[Any, ...]] = [*slow, *quick]
        if seconds is not None:
            calls = [call for pair in zip_longest(slow, quick) for call in pair if call]
        done = [pool.submit(*call) for call in calls]
        wait(done, None if seconds is None else max(0.0, began + seconds - time.monotonic()))
        for future in done:
            future.cancel()
        seen_to = [future for future in done if not future.cancelled()]
        wrong = [str(error) for future in seen_to if (error := future.exception())]
    return len(seen_to), wrong


def _small(p: Problem) -> Problem:
    """A problem with the same kernels of FlashAttention-4 that takes little time."""
    return p._replace(lengths=(512, 512)) if p.lengths else p._replace(batch=1, seqlen=1024)


def _of_strobe(run: Run, direction: str, compute_capability: int) -> None:
    from strobe._parse import parse

    q, k, v = run.problem.tensors("meta")
    q, k, v, scales = quantised(run.feature, q, k, v)
    options = run.problem.options("meta") | FEATURES[run.feature](run.problem, "meta") | scales
    if run.who != "strobe":
        options["engine"] = run.who
    call = parse("attention", q, k, v, options, [])
    arrays = {name: Shape(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in call.arrays.items()}
    if run.problem.latent:
        arrays["v"] = arrays["v"]._replace(within="k")
    for backward in (False,) if direction == "forward" else (False, True):  # a backward needs its forward's results
        with suppress(NotImplementedError):  # reported when it is timed
            prewarm(arrays, call.options, backward, compute_capability)


def _of_fa4(group: Group) -> None:
    make(group, "cuda")
