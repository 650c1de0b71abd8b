"""Kernels compiled before anything is timed, in several processes: Strobe's without a GPU, FlashAttention-4's through its cache on disk."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from random import Random

from strobe._prewarm import Shape, prewarm
from strobe_tools.bench.gpu import contestants
from strobe_tools.bench.gpu.measurement import make
from strobe_tools.bench.gpu.problem import FEATURES
from strobe_tools.bench.gpu.sets import Group, Run


def compile_all(groups: Sequence[Group], compute_capability: int, jobs: int) -> tuple[int, list[str]]:
    """How many calls' kernels were seen to, and what went wrong; that is tried again when the call is timed."""
    of_strobe = {(run, g.direction): None for g in groups for run in g.runs.values() if run.who not in contestants.PEERS}
    of_fa4 = {
        (run.problem._replace(batch=1, seqlen=1024), g.direction): Group(g.set, g.direction, {"fa4": run}, [])
        for g in groups
        for run in g.runs.values()
        if run.who == "fa4" and not contestants.missing("fa4")
    }
    # Neighbours share kernels, and would wait for one another.
    shuffled = Random(0).sample(list(of_strobe), len(of_strobe))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        done = [pool.submit(_of_fa4, group) for group in of_fa4.values()]  # the slowest first
        done += [pool.submit(_of_strobe, run, direction, compute_capability) for run, direction in shuffled]
        wrong = [str(error) for future in done if (error := future.exception())]
    return len(done), wrong


def _of_strobe(run: Run, direction: str, compute_capability: int) -> None:
    from strobe._request import parse

    q, k, v = run.problem.tensors("meta")
    options = run.problem.options("meta") | FEATURES[run.feature](run.problem, "meta")
    if run.who != "strobe":
        options["engine"] = run.who
    _, request = parse("attention", q, k, v, options, [])
    arrays = {name: Shape(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in request.arrays.items()}
    for backward in (False,) if direction == "forward" else (False, True):  # a backward needs its forward's results
        with suppress(NotImplementedError):  # told where it is timed
            prewarm(arrays, request.options, backward, compute_capability)


def _of_fa4(group: Group) -> None:
    make(group, "cuda")
