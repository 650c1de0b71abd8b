"""Runs the cases of tests/python/distributed_cases.py (every pair of options) on GPUs over NCCL, one process per GPU. The results are
judged as on CPUs.

python tests/gpu/distributed_on_gpus.py [--ranks 2] [--seconds 100] [--backend gloo]

A case for more ranks than there are GPUs runs with one rank per GPU. Further processes, one per core, compile the kernels of the cases
ahead, without a GPU, and judge the results. A case runs as soon as its kernels are compiled, and prints one line with its outcome. A case
that the GPU engines refuse on all ranks alike counts as refused, with the reason. A wrong or hanging case makes the exit status 1; ranks
that hang print their stacks to stderr and are replaced. bench/distributed_speed.py measures the speed."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.pool import AsyncResult, Pool
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import distributed_ahead
import torch
import torch.distributed as dist
from random_calls import cores

from check import Yardstick
from device import running_on
from distributed_cases import build, every_pair, joined, node_of, run_on_rank
from distributed_workers import Workers

BEGAN = time.monotonic()


def since() -> float:
    return time.monotonic() - BEGAN


def tell(words: str) -> None:
    print(f"{since():6.1f} s  {words}", flush=True)


# Functions that the other processes run


def on_rank(group: dist.ProcessGroup, case: dict[str, Any], device: str) -> Any:
    """Returns a rank's results or the reason why the engines refuse the case; and the seconds that it took."""
    began = time.monotonic()
    try:
        with running_on(None):
            found: Any = run_on_rank(group, case, device)
    except NotImplementedError as refusal:
        found = str(refusal)
    return found, time.monotonic() - began


def all_there(group: dist.ProcessGroup, device: str) -> float:
    """The number of ranks, by an all-reduce: it ends only if all ranks take part."""
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones, group=group)
    return ones.item()


def compiled(task: tuple[int, dict[str, Any], int | None]) -> tuple[int, int]:
    """The case's number, and how many kernels were compiled."""
    number, case, compute_capability = task
    return number, 0 if compute_capability is None else distributed_ahead.compile_case(case, compute_capability)


def faults(case: dict[str, Any], answers: list[Any]) -> list[str]:
    inputs = build(case)
    return Yardstick(inputs).faults(joined(case, inputs, answers))


# The parent process


def cases_for(ranks: int) -> list[dict[str, Any]]:
    found = []
    for case in every_pair():
        world, method = case["how"]
        how = ranks if method == "levels" else min(world, ranks), method
        if case["heads"][1] % {"heads": how[0], "levels": node_of(how[0])}.get(method, 1) == 0:
            found.append(case | {"how": how})
    return found


def short(case: dict[str, Any]) -> str:
    """The case in one line: its main options, and the others that are not at their default."""
    world, method = case["how"]
    usual = {"how", "sharding", "dtype", "dims", "lengths", "heads"}
    more = [f"{name} {x}" for name, x in case.items() if name not in usual and x not in (None, 0.0, False)]
    d, lengths, heads = ("x".join(map(str, case[name])) for name in ("dims", "lengths", "heads"))
    return f"W {world} {method} {case['sharding']} {case['dtype']} d{d} S {lengths} H {heads} " + ", ".join(more)


class Run:
    """The ranks, and the outcomes of the cases."""

    def __init__(self, ranks: int, backend: str, patience: float):
        self.ranks, self.backend, self.patience = ranks, backend, patience
        self.device = "cuda" if backend == "nccl" else "cpu"
        self.workers = Workers(ranks, backend, patience)
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.judging: list[tuple[int, dict[str, Any], float, AsyncResult[list[str]]]] = []
        self.seconds = 0.0

    def case(self, number: int, case: dict[str, Any], pool: Pool) -> None:
        if self.workers.closed:
            self.workers = Workers(self.ranks, self.backend, self.patience)
        world = case["how"][0]
        try:
            answers, seconds = zip(*self.workers.run(on_rank, world, case, self.device), strict=True)
        except AssertionError as failure:
            self.result("failed", number, case, 0.0, str(failure))
            self.replace_ranks()
            return
        self.seconds += max(seconds)
        refused = [isinstance(answer, str) for answer in answers]
        if any(refused):
            self.result("refused" if all(refused) else "refused on some ranks", number, case, max(seconds), str(answers[0]))
            words = [line.partition(" [rank ")[0] for line in str(answers[0]).splitlines() if "cuda-" in line]
            self.reasons["; ".join(words or [str(answers[0])])] += 1
        else:
            self.judging.append((number, case, max(seconds), pool.apply_async(faults, (case, list(answers)))))
        self.look(0.0)

    def replace_ranks(self) -> None:
        """Replaces ranks that can no longer be used."""
        try:
            if not self.workers.closed and self.workers.run(all_there, self.ranks, self.device) == [self.ranks] * self.ranks:
                return
        except AssertionError as failure:
            print(f"  the ranks are replaced: {str(failure).splitlines()[0]}", flush=True)
        self.workers.close()

    def look(self, until: float) -> None:
        """Reports the cases that have been judged meanwhile."""
        waiting = []
        for number, case, seconds, judged in self.judging:
            judged.wait(max(0.0, until - since()))
            if not judged.ready():
                waiting.append((number, case, seconds, judged))
                continue
            found = judged.get()
            self.result("wrong" if found else "right", number, case, seconds, "\n".join(found))
        self.judging = waiting

    def result(self, what: str, number: int, case: dict[str, Any], seconds: float, more: str) -> None:
        self.counts[what] += 1
        tell(f"case {number}: {what} in {seconds:.2f} s: {short(case)}")
        if what != "right":
            print("  " + more.replace("\n", "\n  "), flush=True)
        if what not in ("right", "refused"):
            print(f"  {case}", flush=True)


def until_then(found: Any, until: float) -> Iterator[Any]:
    """The items of a pool's iterator that arrive before the time `until`."""
    while True:
        try:
            yield found.next(max(0.01, until - since()))
        except (multiprocessing.TimeoutError, StopIteration):
            return


def covering(
    ranks: int, backend: str, seconds: float, patience: float, numbers: list[int], compute_capability: int | None, jobs: int
) -> int:
    cases = cases_for(ranks)
    tasks = [(number, cases[number], compute_capability) for number in numbers or range(len(cases))]
    Random(0).shuffle(tasks)  # neighbouring cases share kernels, so one would wait for the other's compilation
    # The last 15% of the time are for ending and judging the cases in progress.
    until, judged_until = 0.85 * seconds, 0.97 * seconds
    kernels, done, all_compiled = 0, 0, 0.0
    context = multiprocessing.get_context("spawn")
    tell(f"{len(tasks)} cases on {ranks} ranks of {backend}; {jobs} processes compile and judge")
    with context.Pool(jobs) as pool, context.Pool(max(1, jobs // 4)) as judges:
        ready = pool.imap_unordered(compiled, tasks)  # compilation runs while the ranks start
        run = Run(ranks, backend, patience)
        tell("the ranks are ready")
        for done, (number, of_case) in enumerate(until_then(ready, until), 1):
            kernels += of_case
            if since() > until:
                break
            if done == len(tasks):
                all_compiled = since()
            run.case(number, cases[number], judges)
        tell(f"{done} of {len(tasks)} cases were run")
        run.look(judged_until)
    run.workers.close()
    run.counts["not judged"] = len(run.judging)
    run.counts["not reached"] = len(tasks) - run.counts.total()
    tell(", ".join(f"{n} {what}" for what, n in run.counts.items() if n))
    for reason, n in run.reasons.most_common(8):
        print(f"  refused {n} times: {reason}")
    print(f"{kernels} kernels were compiled ahead; the ranks computed for {run.seconds:.1f} s")
    if all_compiled:
        print(f"all kernels were there {all_compiled:.0f} s after the beginning")
    return int(any(run.counts[name] for name in ("wrong", "failed", "refused on some ranks")) or not run.counts["right"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="gloo: on the CPU, or the emulated GPU")
    parser.add_argument("--ranks", type=int, help="by default as many as there are GPUs")
    parser.add_argument("--seconds", type=float, default=100, help="after which all has ended, from when PyTorch is imported")
    parser.add_argument("--patience", type=float, default=30, help="seconds after which a case hangs")
    parser.add_argument("--cases", type=int, nargs="*", default=[], help="their numbers; by default all")
    parser.add_argument("--compute-capability", type=int, help="for which kernels are compiled ahead; by default the GPU's, as 90 for 9.0")
    parser.add_argument("--jobs", type=int, default=cores(), help="processes that compile and judge")
    asked = parser.parse_args()
    capability = asked.compute_capability
    if asked.backend == "nccl" and capability is None:
        major, minor = torch.cuda.get_device_capability()
        capability = 10 * major + minor
    ranks = asked.ranks or (torch.cuda.device_count() if asked.backend == "nccl" else 2)
    return covering(ranks, asked.backend, asked.seconds, asked.patience, asked.cases, capability, asked.jobs)


if __name__ == "__main__":
    sys.exit(main())
