"""Measures the strong scaling of strobe.distributed.attention(), forward alone and with backward (32/8 heads, d 128, bf16, causal), against
strobe.attention() of the whole problem on one GPU in the same run.

python bench/distributed_speed.py [--ranks 2] [--seconds 75] [--tokens 32768 131072] [--backend gloo] [--peers]

E = T1 / (W TW). T1 is the time of the whole problem on one GPU, the fastest of all GPUs, which compute it at the same time; TW is the time
of the slowest of W ranks. Both are medians. In each round the whole problem and the methods take turns, in another order each time, so that
a warming GPU slows all alike. "world" is causal attention with deterministic="world". "alone" is a call without a call before it, which is
waited for, as T1 is. "in a row" is one of several successive calls, as in a model's layers, relative to T1 of as many: the host prepares a
call while the GPU computes the one before. Other processes compile the kernels first, as in tests/gpu/distributed_on_gpus.py. --peers adds
the packages of distributed_peers.py that are installed. The lines of a problem are printed after all its rounds; problems for which the
time is too short are named."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "python"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import distributed_ahead
import torch
import torch.distributed as dist
from distributed_on_gpus import since, tell
from distributed_peers import PEERS
from random_calls import cores
from torch import Tensor

import strobe
from distributed_workers import Workers
from strobe.distributed import Sharding

METHODS = ("gather", "heads", "ring")
ONE = "one"  # the whole problem on one GPU
# Lengths of the documents of a packed batch, in 1/64 of all tokens.
DOCUMENTS = (21, 1, 2, 8, 1, 3, 12, 2, 6, 4, 1, 3)
WINDOW = 4096
_ENOUGH = 32768  # tokens; longer problems need no other kernels
_IN_A_ROW, _MOST_SECONDS = 8, 0.1  # calls in a row, and the most seconds that they may take


class How(NamedTuple):
    device: str
    repeats: int


class Problem(NamedTuple):
    name: str
    tokens: int
    heads: tuple[int, int]

    def methods(self) -> tuple[str, ...]:
        return ("heads",) if self.name == "world" else METHODS

    def options(self, device: str, whole: bool) -> dict[str, Any]:
        """The options for all tokens on one GPU (`whole`), or for a method's call. "world" compares a method with the same bits for every
        number of ranks with a call that guarantees nothing."""
        if self.name == "window":
            return {"window": (WINDOW, 0)}
        if self.name == "packed":
            return {"causal": True} | {name: self.cu(device) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        return {"causal": True} | ({"deterministic": "world"} if self.name == "world" and not whole else {})

    def cu(self, device: str) -> Tensor:
        return torch.tensor([0, *DOCUMENTS]).cumsum(0).mul(self.tokens // sum(DOCUMENTS)).int().to(device)

    def sharding(self, world: int) -> Sharding:
        if self.name == "packed":
            return Sharding.balanced(self.tokens, world, cu_seqlens=self.cu("cpu"))
        return (Sharding.contiguous if self.name == "window" else Sharding.zigzag)(self.tokens, world)

    def tensors(self, how: How, tokens: int) -> list[Tensor]:
        """q, k, v and dO for some of the tokens; uninitialised if nothing is measured."""
        make = torch.randn if how.repeats else torch.empty
        heads, heads_kv = self.heads
        shapes = [(tokens, n, 128) if self.name == "packed" else (1, n, tokens, 128) for n in (heads, heads_kv, heads_kv, heads)]
        return [make(shape, device=how.device, dtype=torch.bfloat16) for shape in shapes]

    def call(self, group: dist.ProcessGroup, name: str, how: How) -> Callable[..., Tensor]:
        """A function of q, k and v: for all tokens, or by this rank's method."""
        options = self.options(how.device, name == ONE)
        if name == ONE:
            return lambda *tensors: strobe.attention(*tensors, **options)
        sharding = self.sharding(group.size())
        return lambda *tensors: strobe.distributed.attention(*tensors, sharding=sharding, group=group, method=name, **options)


def both(call: Callable[..., Tensor], tensors: list[Tensor], gradient: Tensor) -> None:
    call(*(x.detach().requires_grad_() for x in tensors)).backward(gradient)


class Times(NamedTuple):
    """Milliseconds of a call without a call before it, and of one of several calls in a row."""

    alone: float
    in_a_row: float


class Timer:
    """Times a call, round after round."""

    def __init__(self, group: dist.ProcessGroup, how: How):
        self._group, self._how, self._times = group, how, list[Times]()

    def __call__(self, call: Callable[[], Any], in_a_row: int) -> None:
        """in_a_row: the number of calls in a row; 0 if the call is so long that a row of calls makes no difference."""
        one = self._seconds(call, 1)
        self._times.append(Times(one * 1e3, (self._seconds(call, in_a_row) if in_a_row else one) * 1e3))

    def calls_in_a_row(self) -> int:
        """The number of calls in a row, from the times so far. It is the same on all ranks, since calls are collective."""
        several = torch.tensor([int(_MOST_SECONDS * 1e3 / self._times[-1].alone)], device=self._how.device)
        dist.all_reduce(several, dist.ReduceOp.MIN, group=self._group)
        return min(_IN_A_ROW, int(several)) if several > 1 else 0

    def medians(self) -> Times:
        """The medians without the first two rounds, in which kernels are loaded and the number of calls in a row is determined."""
        return Times(*(statistics.median(x) for x in zip(*self._times[2:], strict=True)))

    def _seconds(self, call: Callable[[], Any], times: int) -> float:
        if self._how.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier(self._group)
        if self._how.device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            call()
        if self._how.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / times


class Passes(NamedTuple):
    """The times of the forward, and of forward and backward."""

    forward: Times
    both: Times


def anywhere(group: dist.ProcessGroup, how: How, failed: bool) -> bool:
    """Whether `failed` is true on some rank: then no rank continues with a call in which others would wait."""
    count = torch.tensor([failed], dtype=torch.int32, device=how.device)
    dist.all_reduce(count, group=group)
    return bool(count.item())


def turns(group: dist.ProcessGroup, problem: Problem, how: How, names: tuple[str, ...]) -> dict[str, tuple[Passes, float] | str]:
    """The times and the peak of this GPU's memory in GiB, or the reason of the refusal: for the whole problem on this GPU, for methods and
    for peers."""
    sharding = problem.sharding(group.size())
    whole, own = problem.tensors(how, problem.tokens), problem.tensors(how, sharding.count(group.rank()))

    found: dict[str, tuple[Passes, float] | str] = {}
    timers = {name: (Timer(group, how), Timer(group, how)) for name in names}
    peaks = dict.fromkeys(names, 0.0)
    in_a_row = [0, 0]  # of the two passes; determined in the second round, because the first loads kernels
    for n in range(how.repeats + 2):
        for name in (names[n % len(names) :] + names[: n % len(names)]) if n > 1 else names:
            if name in found:
                continue
            *tensors, dout = whole if name == ONE else own
            failed = None
            try:
                if how.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                peer = (
                    PEERS[name](group, how.device, problem.tokens)
                    if name in PEERS
                    else contextlib.nullcontext(problem.call(group, name, how))
                )
                with peer as call:
                    timers[name][0](lambda: call(*tensors), in_a_row[0])  # noqa: B023
                    timers[name][1](lambda: both(call, tensors, dout), in_a_row[1])  # noqa: B023
            except NotImplementedError as refusal:
                failed = str(refusal)
            except Exception as failure:
                if name not in PEERS:
                    raise
                failed = f"{type(failure).__name__}: {failure}".partition("\n")[0]
            if anywhere(group, how, failed is not None):
                found[name] = failed or "another rank failed"
            if how.device == "cuda":
                others = sum(x.nbytes for x in (own if name == ONE else whole))
                peaks[name] = (torch.cuda.max_memory_allocated() - others) / 2**30
        if n == 1:
            in_a_row = [timer.calls_in_a_row() for timer in timers[ONE]]
    for name, (forward, whole_pass) in timers.items():
        if name not in found:
            found[name] = Passes(forward.medians(), whole_pass.medians()), peaks[name]
    return found


def compiled(task: tuple[Problem, str, int, int]) -> int:
    """Returns how many kernels were compiled."""
    problem, name, ranks, compute_capability = task
    problem = problem._replace(tokens=min(problem.tokens, _ENOUGH))
    how = How("cpu", 0)

    def call(group: dist.ProcessGroup) -> None:
        *tensors, dout = problem.tensors(how, problem.tokens if name == ONE else problem.sharding(ranks).count(group.rank()))
        both(problem.call(group, name, how), tensors, dout)

    return distributed_ahead.compile_ranks(1 if name == ONE else ranks, compute_capability, call)


def line(name: str, ranks: int, one: Passes, answers: list[Any]) -> str:
    if any(isinstance(answer, str) for answer in answers):
        return f"{name} refused: {next(answer for answer in answers if isinstance(answer, str))}"
    parts = []
    for of in Passes._fields:
        for how in Times._fields:
            first = getattr(getattr(one, of), how)
            slowest = max(getattr(getattr(passes, of), how) for passes, _ in answers)
            parts.append(f"{of} {how.replace('_', ' ')} {first:.2f} / {slowest:.2f} ms, E {first / ranks / slowest:.3f}")
    return f"{name} {'; '.join(parts)}; peak {max(peak for _, peak in answers):.1f} GiB"


def measure(workers: Workers, problems: list[Problem], ranks: int, how: How, peers: bool, until: float) -> None:
    for problem in problems:
        name = f"{problem.name:6} {problem.tokens:7}"
        if since() > until:
            tell(f"{name}: not reached")
            continue
        names = (ONE, *problem.methods(), *(PEERS if peers and problem.name == "causal" else ()))
        answers = workers.run(turns, ranks, problem, how, names)
        one = Passes(*(Times(*map(min, zip(*(getattr(each[ONE][0], of) for each in answers), strict=True))) for of in Passes._fields))
        for method in names[1:]:
            tell(line(f"{name} {method:7}", ranks, one, [each[method] for each in answers]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="gloo: on the CPU, where 32/8 heads become 4/2")
    parser.add_argument("--ranks", type=int, help="by default as many as there are GPUs")
    parser.add_argument("--seconds", type=float, default=75, help="after which no measurement begins")
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[32768, 131072], help="of causal sequences; the last is that of the others"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--compute-capability", type=int, help="for which kernels are compiled ahead; by default the GPU's, as 90 for 9.0")
    asked = parser.parse_args()
    on_gpu, capability = asked.backend == "nccl", asked.compute_capability
    ranks = asked.ranks or (torch.cuda.device_count() if on_gpu else 2)
    if on_gpu and capability is None:
        major, minor = torch.cuda.get_device_capability()
        capability = 10 * major + minor
    heads = (32, 8) if on_gpu else (4, 2)
    shorter, longest = asked.tokens[:-1], asked.tokens[-1]
    of = [*((name, n) for n in shorter for name in ("causal", "world")), *((name, longest) for name in ("window", "packed", "causal"))]
    problems = [Problem(name, n, heads) for name, n in of]
    tasks = [(problem, method, ranks, capability) for problem in problems for method in (ONE, *problem.methods())] if capability else []
    with multiprocessing.get_context("spawn").Pool(min(cores(), len(tasks) or 1)) as pool:
        compiling = pool.map_async(compiled, tasks, 1)
        workers = Workers(ranks, asked.backend)
        tell(f"{ranks} ranks of {asked.backend} on {torch.cuda.get_device_name() if on_gpu else 'the CPU'} are ready")
        kernels = sum(compiling.get())
    tell(f"{kernels} kernels were compiled; T1 / TW of the slowest rank, medians of {asked.repeats} rounds; E = T1 / (W TW)")
    measure(workers, problems, ranks, How("cuda" if on_gpu else "cpu", asked.repeats), asked.peers, asked.seconds)
    workers.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
