"""PyTorch's ways to use several devices, around strobe.attention() and around PyTorch's own functions on Strobe, on two ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import parallel_calls as calls
from device import ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="gloo on the CPU")
DOORS = ["attention", "register"]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("ways", ["data_parallel", "sharded_data"])
def test_training(workers, ways, door):
    """DistributedDataParallel, and fully_shard (FSDP2): a step is that of one process with all rows."""
    expected = calls.alone(door)
    for found, ran in workers.run(getattr(calls, ways), 2, door):
        assert ran["scaled_dot_product_attention"] == {"strobe": 2 if door == "register" else 0, "pytorch": 0}
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("door", calls.CALLS)
@pytest.mark.parametrize("axis", [0, 1], ids=["batch", "heads"])
def test_dtensors(workers, axis, door):
    """Nothing is sent, forward and backward, and what comes out is sharded as what goes in. More options: test_distributed_ranks.py."""
    q, k, v, dout = calls.given()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = calls.CALLS["attention"](*leaves)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    for found, placements, sent, ran in workers.run(calls.of_dtensors, 2, axis, door):
        assert sent == 0
        assert {each.replace("Shard(dim=", "S(") for each in placements} == {f"(S({axis}),)"}
        assert ran == {"strobe": 1 if door == "register" else 0, "pytorch": 0}
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_sharded_sequences_are_refused(workers):
    for attention, door in workers.run(calls.sharded_sequences, 2):
        assert attention.startswith("q: placement ")
        assert "accepted are Replicate(), Shard(0), Shard(1): batch and heads" in attention
        assert door.startswith("scaled_dot_product_attention on Strobe: query: placement ")


def test_dtensors_need_no_import_of_strobe_distributed():
    """A compiler traces the import."""
    code = """
import torch, strobe
from torch import distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
q = torch.randn(2, 4, 5, 8)
x = distribute_tensor(q, init_device_mesh("cpu", (1,)), [Shard(1)])
assert "strobe.distributed" not in __import__("sys").modules
attend = torch.compile(strobe.attention, fullgraph=True, backend="aot_eager")
assert torch.equal(attend(x, x, x).full_tensor(), strobe.attention(q, q, q))
dist.destroy_process_group()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
