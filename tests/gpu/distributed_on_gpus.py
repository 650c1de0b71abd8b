"""strobe.distributed on GPUs: the covering array of tests/python/distributed_cases.py on NCCL, one process for each GPU, judged as on CPUs.

python tests/gpu/distributed_on_gpus.py [--ranks 2] [--seconds 300] [--speed]

Cases for more ranks than there are GPUs become cases for as many as there are. A case that the GPU's engines refuse (on all ranks alike) is
counted as refused, with its reason; a case that is wrong, or hangs, ends the run with status 1. --speed measures strong scaling instead:
forward and backward of 32/8 heads, d 128, bf16, causal, beside strobe.attention of the whole problem on one GPU in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
import strobe
from check import Yardstick
from distributed_cases import build, every_pair, joined, run_on_rank
from distributed_workers import Workers
from strobe.distributed import Layout

LENGTHS = (32768, 131072)


def on_gpu(group: dist.ProcessGroup, case: dict[str, Any]) -> Any:
    """A rank's results, or why the engines refuse."""
    try:
        return run_on_rank(group, case, "cuda")
    except NotImplementedError as refusal:
        return str(refusal)


def cases_for(ranks: int) -> list[dict[str, Any]]:
    found = []
    for case in every_pair():
        world, method = case["how"]
        how = min(world, ranks), method
        if method != "heads" or case["heads"][1] % how[0] == 0:
            found.append(case | {"how": how})
    return found


def covering(ranks: int, seconds: float) -> int:
    workers, until = Workers(ranks, "nccl"), time.monotonic() + seconds
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for number, case in enumerate(cases_for(ranks)):
        if time.monotonic() > until:
            counts["not reached"] += 1
            continue
        world = case["how"][0]
        workers.send(on_gpu, world, case)
        inputs = build(case)
        yardstick = Yardstick(inputs)
        try:
            answers = workers.receive(world)
        except AssertionError as failure:
            print(f"case {number} {case}: {failure}", flush=True)
            counts["failed"] += 1
            continue
        if any(isinstance(answer, str) for answer in answers):
            counts["refused" if all(isinstance(answer, str) for answer in answers) else "refused on some ranks"] += 1
            reasons[str(answers[0]).partition(": ")[2][:100]] += 1
            continue
        faults = yardstick.faults(joined(case, inputs, answers))
        counts["wrong" if faults else "right"] += 1
        for fault in faults:
            print(f"case {number} {case}: {fault}", flush=True)
    workers.close()
    print(dict(counts))
    for reason, n in reasons.most_common(8):
        print(f"  refused {n} times: {reason}")
    return int(any(counts[name] for name in ("wrong", "failed", "refused on some ranks")))


def timed(call: Any, repeats: int = 9) -> float:
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def scaling(group: dist.ProcessGroup, seqlen: int, method: str) -> tuple[float, float, float, float, float] | str:
    """T1 and TW in ms, forward, and forward and backward; and this rank's peak of memory in GiB."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, h, seqlen, 128, device="cuda", dtype=torch.bfloat16) for h in (32, 8, 8, 32))
    layout = Layout.zigzag(seqlen, group.size())
    own = [layout.shard(x, 2, group.rank()).contiguous() for x in (q, k, v, dout)]

    def both(call: Any, tensors: list[torch.Tensor], gradient: torch.Tensor) -> None:
        leaves = [x.detach().requires_grad_() for x in tensors]
        call(*leaves).backward(gradient)

    def shared(*tensors: torch.Tensor) -> torch.Tensor:
        return strobe.distributed.attention(*tensors, layout=layout, group=group, method=method, causal=True)

    def alone(*tensors: torch.Tensor) -> torch.Tensor:
        return strobe.attention(*tensors, causal=True)

    try:
        one = timed(lambda: alone(q, k, v)), timed(lambda: both(alone, [q, k, v], dout))
        torch.cuda.reset_peak_memory_stats()
        dist.barrier(group)
        many = timed(lambda: shared(*own[:3])), timed(lambda: both(shared, own[:3], own[3]))
    except NotImplementedError as refusal:
        return str(refusal)
    return one[0] * 1e3, many[0] * 1e3, one[1] * 1e3, many[1] * 1e3, torch.cuda.max_memory_allocated() / 2**30


def speed(ranks: int) -> int:
    workers = Workers(ranks, "nccl")
    print(f"{torch.cuda.get_device_name()}, {ranks} ranks; E = T1 / (W TW), TW of the slowest rank")
    for seqlen in LENGTHS:
        for method in ("gather", "heads", "ring"):
            answers = workers.run(scaling, ranks, seqlen, method)
            if isinstance(answers[0], str):
                print(f"{seqlen:7} {method:7} refused: {answers[0][:100]}")
                continue
            t1, tw, b1, bw, peak = (max(x) for x in zip(*answers, strict=True))
            print(
                f"{seqlen:7} {method:7} forward {t1:8.2f} / {tw:8.2f} ms, E {t1 / ranks / tw:.3f}; with backward {b1:8.2f} / {bw:8.2f} ms, "
                f"E {b1 / ranks / bw:.3f}; peak {peak:.1f} GiB",
                flush=True,
            )
    workers.close()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--speed", action="store_true")
    arguments = parser.parse_args()
    sys.exit(speed(arguments.ranks) if arguments.speed else covering(arguments.ranks, arguments.seconds))
