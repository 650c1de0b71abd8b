"""Checks strobe.distributed.attention() on sequences too long for a test: sampled rows of out and dq, against float64.

python tests/gpu/distributed_rows.py [--ranks 2] [--tokens 1048576] [--method gather] [--backend gloo]

Causal, 32 query and 8 key heads, d 128, bf16, zigzag. Each rank compares some of its rows, over all keys, with float64. The error may
be twice that of the plain formulas in bf16, plus one ulp of the largest number (docs/semantics.md)."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch import Tensor

import strobe
from check import ulp
from distributed_workers import Workers
from strobe.distributed import Sharding

D = 128


def formulas(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out and dq of some rows of one head, whose keys are k (S, D). Operands and products are rounded to dtype."""
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    scores = (q @ k.T) * D**-0.5
    scores = scores.masked_fill(torch.arange(len(k), device=k.device) > positions[:, None], -torch.inf)
    p = scores.softmax(-1)
    out = p @ v
    ds = p * (dout @ v.T - (dout * out).sum(-1, keepdim=True))
    return out, (ds @ k) * D**-0.5


def judged(
    group: dist.ProcessGroup, tokens: int, heads: tuple[int, int], method: str, device: str, samples: int
) -> tuple[dict[str, tuple[float, float]], float]:
    """Returns the largest error and the largest allowed error of out and of dq, and the seconds of forward and backward."""
    sharding, rank = Sharding.zigzag(tokens, group.size()), group.rank()
    generator = torch.Generator(device).manual_seed(rank)
    own = sharding.count(rank)
    q, k, v, dout = (
        torch.randn(1, n, own, D, device=device, dtype=torch.bfloat16, generator=generator) for n in (heads[0], *[heads[1]] * 2, heads[0])
    )
    began = time.perf_counter()
    leaf = q.detach().requires_grad_()
    out = strobe.distributed.attention(
        leaf, k.requires_grad_(), v.requires_grad_(), sharding=sharding, group=group, method=method, causal=True
    )
    out.backward(dout)
    assert leaf.grad is not None
    found = {"out": out.detach(), "dq": leaf.grad}
    leaf.grad[0, 0, 0, 0].item()  # waits for the GPU
    seconds = time.perf_counter() - began
    k, v = (sharding.unshard(x.detach(), 2, group=group)[0] for x in (k, v))
    places = torch.linspace(own // 2, own - 1, samples, device=device).round().long()  # rows of the rank's later block, which see many keys
    positions = sharding.positions(rank).to(device)[places]
    errors: dict[str, list[Tensor]] = {name: [] for name in found}
    plain: dict[str, list[Tensor]] = {name: [] for name in found}
    largest = dict.fromkeys(found, 0.0)
    for h in range(heads[0]):
        of_key = h // (heads[0] // heads[1])
        given = q[0, h, places], k[of_key], v[of_key], dout[0, h, places], positions
        truth, rounded = formulas(*given, torch.float64), formulas(*given, torch.bfloat16)
        for name, true, other in zip(found, truth, rounded, strict=True):
            errors[name].append((found[name][0, h, places].double() - true).abs().max())
            plain[name].append((other.double() - true).abs().max())
            largest[name] = max(largest[name], float(true.abs().max()))
    return {name: (float(max(errors[name])), 2 * float(max(plain[name])) + ulp(torch.bfloat16, largest[name])) for name in found}, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="gloo: on the CPU, where 32/8 heads become 4/2")
    parser.add_argument("--ranks", type=int, help="by default as many as there are GPUs")
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--method", default="gather")
    parser.add_argument("--samples", type=int, default=16, help="rows of each rank and head")
    asked = parser.parse_args()
    on_gpu = asked.backend == "nccl"
    ranks = asked.ranks or (torch.cuda.device_count() if on_gpu else 2)
    workers = Workers(ranks, asked.backend)
    heads = (32, 8) if on_gpu else (4, 2)
    answers = workers.run(judged, ranks, asked.tokens, heads, asked.method, "cuda" if on_gpu else "cpu", asked.samples)
    workers.close()
    print(f"{asked.tokens} tokens on {ranks} ranks by {asked.method}: {max(seconds for _, seconds in answers):.1f} s, kernels compiled")
    wrong = 0
    for rank, (errors, _) in enumerate(answers):
        for name, (error, allowed) in errors.items():
            wrong += error > allowed
            print(f"rank {rank} {name}: error {error:.3g}, allowed {allowed:.3g}{'  WRONG' if error > allowed else ''}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
