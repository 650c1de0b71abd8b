"""Strong scaling of strobe.distributed.attention(): forward, and forward and backward, of 32/8 heads, d 128, bf16, causal, beside
strobe.attention() of the whole problem on one GPU in the same run.

python bench/distributed_speed.py [--ranks 2] [--seconds 75] [--tokens 32768 131072] [--backend gloo] [--peers]

E = T1 / (W TW): T1 of one GPU with the whole problem, TW of the slowest of W ranks, each the median. Other processes compile the kernels
first, as tests/gpu/distributed_on_gpus.py does. --peers: those of distributed_peers.py in the same run, where they install. A line comes as
each measurement ends; what the time does not suffice for is named."""

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
from strobe.distributed import Layout

METHODS = ("gather", "heads", "ring")
# Lengths of the documents of a packed batch, in 1/64 of all tokens.
DOCUMENTS = (21, 1, 2, 8, 1, 3, 12, 2, 6, 4, 1, 3)
WINDOW = 4096
_ENOUGH = 32768  # tokens: longer problems have the same kernels


class How(NamedTuple):
    device: str
    repeats: int


class Problem(NamedTuple):
    name: str
    tokens: int
    heads: tuple[int, int]

    def options(self, device: str) -> dict[str, Any]:
        if self.name == "window":
            return {"window": (WINDOW, 0)}
        return {"causal": True} | ({name: self.cu(device) for name in ("cu_seqlens_q", "cu_seqlens_k")} if self.name == "packed" else {})

    def cu(self, device: str) -> Tensor:
        return torch.tensor([0, *DOCUMENTS]).cumsum(0).mul(self.tokens // sum(DOCUMENTS)).int().to(device)

    def layout(self, world: int) -> Layout:
        if self.name == "packed":
            return Layout.balanced(self.tokens, world, cu_seqlens=self.cu("cpu"))
        return (Layout.contiguous if self.name == "window" else Layout.zigzag)(self.tokens, world)

    def tensors(self, how: How, tokens: int) -> list[Tensor]:
        """q, k, v and dO, of some of the tokens; of no values where nothing is measured."""
        make = torch.randn if how.repeats else torch.empty
        heads, heads_kv = self.heads
        shapes = [(tokens, n, 128) if self.name == "packed" else (1, n, tokens, 128) for n in (heads, heads_kv, heads_kv, heads)]
        return [make(shape, device=how.device, dtype=torch.bfloat16) for shape in shapes]


def both(call: Callable[..., Tensor], tensors: list[Tensor], gradient: Tensor) -> None:
    call(*(x.detach().requires_grad_() for x in tensors)).backward(gradient)


def timed(call: Callable[[], Any], how: How) -> float:
    """The median, in ms."""
    times = []
    for _ in range(how.repeats + 1):
        if how.device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if how.device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:] or times) * 1e3


def alone(group: dist.ProcessGroup, problem: Problem, how: How) -> tuple[float, float]:
    """Forward, and forward and backward, of the whole problem."""
    *tensors, dout = problem.tensors(how, problem.tokens)
    options = problem.options(how.device)

    def call(*tensors: Tensor) -> Tensor:
        return strobe.attention(*tensors, **options)

    return timed(lambda: call(*tensors), how), timed(lambda: both(call, tensors, dout), how)


def shared(group: dist.ProcessGroup, problem: Problem, method: str, how: How) -> tuple[float, float, float] | str:
    """The same of this rank's share, and the peak of this GPU's memory in GiB; or why it is refused."""
    layout = problem.layout(group.size())
    *tensors, dout = problem.tensors(how, layout.count(group.rank()))
    options = problem.options(how.device)

    def own(*tensors: Tensor) -> Tensor:
        return strobe.distributed.attention(*tensors, layout=layout, group=group, method=method, **options)

    try:
        if how.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with PEERS[method](group, how.device, problem.tokens) if method in PEERS else contextlib.nullcontext(own) as call:
            found = timed(lambda: call(*tensors), how), timed(lambda: both(call, tensors, dout), how)
    except NotImplementedError as refusal:
        return str(refusal)
    except Exception as failure:
        if method in PEERS:
            return f"{type(failure).__name__}: {failure}".partition("\n")[0]
        raise
    return *found, torch.cuda.max_memory_allocated() / 2**30 if how.device == "cuda" else 0.0


def compiled(task: tuple[Problem, str | None, int, int]) -> int:
    """How many kernels were."""
    problem, method, ranks, compute_capability = task
    problem = problem._replace(tokens=min(problem.tokens, _ENOUGH))
    how = How("cpu", 0)
    if method is None:
        return distributed_ahead.compile_ranks(1, compute_capability, lambda group: alone(group, problem, how))
    return distributed_ahead.compile_ranks(ranks, compute_capability, lambda group: shared(group, problem, method, how))


def line(problem: Problem, method: str, ranks: int, one: tuple[float, float], answers: list[Any]) -> str:
    name = f"{problem.name:6} {problem.tokens:7} {method:7}"
    if any(isinstance(answer, str) for answer in answers):
        return f"{name} refused: {answers[0]}"
    forward, whole, peak = (max(x) for x in zip(*answers, strict=True))
    efficiency = [t / ranks / each for t, each in zip(one, (forward, whole), strict=True)]
    return (
        f"{name} forward {one[0]:8.2f} / {forward:8.2f} ms, E {efficiency[0]:.3f}; "
        f"with backward {one[1]:8.2f} / {whole:8.2f} ms, E {efficiency[1]:.3f}; peak {peak:.1f} GiB"
    )


def measure(workers: Workers, problems: list[Problem], ranks: int, how: How, peers: bool, until: float) -> None:
    for problem in problems:
        if since() > until:
            tell(f"{problem.name} {problem.tokens}: not reached")
            continue
        one = [max(x) for x in zip(*workers.run(alone, ranks, problem, how), strict=True)]
        for method in (*METHODS, *(PEERS if peers and problem.name == "causal" else ())):
            if since() > until:
                tell(f"{problem.name} {problem.tokens} {method}: not reached")
                continue
            tell(line(problem, method, ranks, (one[0], one[1]), workers.run(shared, ranks, problem, method, how)))


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
    of = [*(("causal", n) for n in asked.tokens[:-1]), *((name, asked.tokens[-1]) for name in ("window", "packed", "causal"))]
    problems = [Problem(name, n, heads) for name, n in of]
    tasks = [(problem, method, ranks, capability) for problem in problems for method in (None, *METHODS)] if capability else []
    with multiprocessing.get_context("spawn").Pool(min(cores(), len(tasks) or 1)) as pool:
        compiling = pool.map_async(compiled, tasks, 1)
        workers = Workers(ranks, asked.backend)
        tell(f"{ranks} ranks of {asked.backend} on {torch.cuda.get_device_name() if on_gpu else 'the CPU'} are ready")
        kernels = sum(compiling.get())
    tell(f"{kernels} kernels were compiled; T1 / TW of the slowest rank, medians of {asked.repeats}; E = T1 / (W TW)")
    measure(workers, problems, ranks, How("cuda" if on_gpu else "cpu", asked.repeats), asked.peers, asked.seconds)
    workers.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
