"""Tests strobe.distributed over NCCL on all GPUs of the machine: equal bits for any number of ranks, CUDA graphs, one rank's error,
PyTorch's modes, training. distributed_on_gpus.py tests the pairs of options."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import distributed_functions as functions
import strobe
from cases import Inputs
from check import Yardstick
from distributed_workers import Workers
from strobe.distributed import Sharding

WORLD = torch.cuda.device_count()
pytestmark = [pytest.mark.skipif(WORLD < 2, reason="one GPU alone"), pytest.mark.all_gpus]
S, H, HKV, D = 1003, 8, 8, 64
METHODS = ["gather", *(["heads"] if WORLD and HKV % WORLD == 0 else []), "ring"]


@pytest.fixture(scope="module")
def ranks():
    # NVLink multicast stays off: if a program dies while using it, the host's GPUs can become unusable.
    with mock.patch.dict(os.environ, {"NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0")}):
        started = Workers(WORLD, "nccl")
    yield started
    started.close()


def whole(seed: int = 0) -> list[Tensor]:
    """q, k, v and dout, the same on all ranks."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, h, S, D, generator=g).bfloat16().cuda() for h in (H, HKV, HKV, H)]


def one_device(seed: int = 0, **options: Any) -> list[Tensor]:
    """out, dq, dk and dv on one device."""
    *tensors, dout = whole(seed)
    q, k, v = (x.requires_grad_() for x in tensors)
    out = strobe.attention(q, k, v, causal=True, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def own(group: dist.ProcessGroup, sharding: Sharding, seed: int = 0) -> list[Tensor]:
    return [sharding.shard(x, 2, group.rank()).detach().requires_grad_(n < 3) for n, x in enumerate(whole(seed))]


def shared(group: dist.ProcessGroup, kind: str, way: str, options: dict[str, Any]) -> list[Tensor]:
    """out, dq, dk and dv of the rank's tokens, from a call over all ranks."""
    sharding = getattr(Sharding, kind)(S, group.size())
    q, k, v, dout = own(group, sharding)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return strobe.distributed.attention(q, k, v, sharding=sharding, group=group, causal=True, **options)

    if way == "checkpoint":
        out = checkpoint(call, q, k, v, use_reentrant=False)
    elif way == "compile":
        out = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    elif way == "autocast":
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = call(*(x.float() for x in (q, k, v))).to(q.dtype)
    else:
        out = call(q, k, v)
    return [x.cpu() for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))]


def joined(kind: str, world: int, of_ranks: list[list[Tensor]]) -> list[Tensor]:
    sharding = getattr(Sharding, kind)(S, world)
    return [sharding.join([*parts], 2) for parts in zip(*of_ranks, strict=True)]


@cache
def yardstick(seed: int) -> Yardstick:
    q, k, v, dout = (x.cpu() for x in whole(seed))
    return Yardstick(Inputs(q, k, v, dout, None, {"causal": True}, lse=False))


def assert_within_the_contract(found: list[Tensor], seed: int = 0) -> None:
    faults = yardstick(seed).faults(dict(zip(("out", "dq", "dk", "dv"), found, strict=True)))
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
def test_bits_do_not_depend_on_the_world(ranks, kind):
    expected = one_device(invariant=True, deterministic=True)
    for world in range(1, WORLD + 1):
        if HKV % world == 0:
            found = joined(kind, world, ranks.run(shared, world, kind, "", {"deterministic": "world"}))
            assert all(torch.equal(x, y.cpu()) for x, y in zip(found, expected, strict=True)), world


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["", "checkpoint", "compile", "autocast"])
def test_ways_to_call(ranks, way, method):
    assert_within_the_contract(joined("zigzag", WORLD, ranks.run(shared, WORLD, "zigzag", way, {"method": method})))


class OnGpu(functions.Case):
    def learn(self, name: str, x: Tensor) -> Tensor:
        return super().learn(name, x.cuda())


def with_functions(group: dist.ProcessGroup, method: str, dtype: torch.dtype) -> dict[str, Tensor]:
    case, sharding = OnGpu("causal", torch.float32), Sharding.zigzag(functions.S, group.size())
    given = [sharding.shard(x, 2, group.rank()).cuda() for x in functions.tensors(case, dtype)]
    found = functions.differentiated(strobe.distributed.attention, given, case, sharding=sharding, group=group, method=method)
    return {name: x.cpu() for name, x in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_functions_see_the_whole_problem(ranks, method, dtype):
    """Forward, and the gradients of what the function reads: of each query, of i - j and of a table."""
    found = functions.joined("causal", "zigzag", ranks.run(with_functions, WORLD, method, dtype), torch.float32)
    case = functions.Case("causal", torch.float64)
    expected = functions.differentiated(strobe.attention, [x.double() for x in functions.tensors(case, dtype)], case)
    for name, right in expected.items():
        off, size = float((found[name].double() - right).abs().max()), float(right.abs().max())
        assert off <= {torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype] * size, f"{name}: error {off:.3g} of {size:.3g}"


def replayed(group: dist.ProcessGroup, method: str) -> list[Tensor]:
    """The results of a CUDA graph of forward and backward that is captured with some numbers and replayed with others."""
    sharding = Sharding.zigzag(S, group.size())
    tensors = own(group, sharding)

    def step() -> list[Tensor]:
        q, k, v, dout = tensors
        out = strobe.distributed.attention(q, k, v, sharding=sharding, group=group, causal=True, method=method, agree=False)
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = step()
    with torch.no_grad():
        for x, y in zip(tensors, own(group, sharding, seed=1), strict=True):
            x.copy_(y)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return [x.detach().cpu() for x in found]


@pytest.mark.parametrize("method", METHODS)
def test_a_graph_is_replayed_with_other_numbers(ranks, method):
    assert_within_the_contract(joined("zigzag", WORLD, ranks.run(replayed, WORLD, method)), seed=1)


def fails(group: dist.ProcessGroup, what: str) -> tuple[str, str]:
    """The error that this rank gets when the last one fails. Afterwards a valid call succeeds."""
    sharding = Sharding.zigzag(S, group.size())
    q, k, v, _ = own(group, sharding)
    is_wrong = group.rank() == group.size() - 1
    options: dict[str, Any] = {"causal": "yes"} if what == "argument" and is_wrong else {"causal": True}
    if what == "memory" and is_wrong:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**16) / torch.cuda.mem_get_info()[1])
    try:
        strobe.distributed.attention(q, k, v, sharding=sharding, group=group, method="gather", **options)
        found = "", "nothing was raised"
    except Exception as failure:
        found = type(failure).__name__, str(failure)
    torch.cuda.set_per_process_memory_fraction(1.0)
    strobe.distributed.attention(q, k, v, sharding=sharding, group=group, causal=True)
    torch.cuda.synchronize()
    return found


def test_a_wrong_argument_raises_on_all(ranks):
    for kind, words in ranks.run(fails, WORLD, "argument"):
        assert kind == "TypeError"
        assert words == f"causal: str 'yes'; accepted is True or False [rank {WORLD - 1} of {WORLD}]"


def test_a_rank_without_memory(ranks):
    for kind, words in ranks.run(fails, WORLD, "memory"):
        assert "OutOfMemory" in kind or kind == "MemoryError", (kind, words)
        assert words.endswith(f"[rank {WORLD - 1} of {WORLD}]")


def test_training_gives_the_losses_of_one_gpu(tmp_path):
    """Runs strobe train --context-parallel on all GPUs."""
    for needed in ("click", "matplotlib", "tokenizers"):
        pytest.importorskip(needed)
    losses = []
    for world in (1, WORLD):
        folder = tmp_path / str(world)
        command = [sys.executable, "-m", "strobe", "train", "--config", "smoke", "--device", "cuda", "--no-ablation", "--no-compile"]
        command += ["--set", "dropout=0.0", "--set", "init_std=0.2", "--context-parallel", str(world), "--out", str(folder)]
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=240, env=os.environ | {"STROBE_CACHE": str(tmp_path / "cache")}
        )
        assert run.returncode == 0, run.stdout + run.stderr
        history = torch.load(folder / "attention.pt", weights_only=True)["history"]
        losses.append([*history["train"], *(loss for _, loss in history["validation"])])
    assert len(losses[0]) == len(losses[1]) > 0
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
