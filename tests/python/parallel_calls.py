"""Functions that ranks run in test_parallel.py: PyTorch's data, sharded-data and tensor parallelism around attention on Strobe."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import strobe

HEADS, D = 4, 8
WIDTH = HEADS * D


class Layer(nn.Module):
    """Projections around attention, as Strobe's function or as PyTorch's."""

    def __init__(self, door: str) -> None:
        super().__init__()
        self.door, self.project, self.out = door, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, D)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        of_torch = self.door == "register"
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True) if of_torch else strobe.attention(q, k, v, causal=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


def model(door: str) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Layer(door), Layer(door))


def tokens() -> Tensor:
    return torch.randn(4, 7, WIDTH, generator=torch.Generator().manual_seed(4))


def trained(made: nn.Module, x: Tensor) -> tuple[list[Tensor], dict[str, dict[str, int]]]:
    """The gradients of a step and the parameters after it, and which calls ran where."""
    step = torch.optim.SGD(made.parameters(), 0.1)
    with strobe.register(strict=True) as run:
        made(x).square().mean().backward()
    gradients = [x.grad for x in made.parameters()]
    step.step()
    whole = [getattr(x, "full_tensor", lambda x=x: x)().detach() for x in (*gradients, *made.parameters())]
    return whole, run.calls


def alone(door: str) -> list[Tensor]:
    return trained(model(door), tokens())[0]


def own_rows(group: dist.ProcessGroup) -> Tensor:
    return tokens().chunk(group.size())[group.rank()]


def data_parallel(group: dist.ProcessGroup, door: str) -> Any:
    return trained(nn.parallel.DistributedDataParallel(model(door), process_group=group), own_rows(group))


def sharded_data(group: dist.ProcessGroup, door: str) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    made = model(door)
    for layer in made:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    return trained(made, own_rows(group))


def given() -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    return [torch.randn(2, h, 9, 16, generator=g) for h in (4, 2, 2, 4)]


CALLS: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k, v: strobe.attention(q, k, v, causal=True),
    "register": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    "compiled": lambda q, k, v: torch.compile(CALLS["attention"], fullgraph=True, backend="aot_eager")(q, k, v),
}


def of_dtensors(group: dist.ProcessGroup, axis: int, door: str) -> Any:
    """Results and gradients of a call on DTensors that shard the batch or the heads; their placements; what was sent."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    torch._dynamo.reset()
    mesh = DeviceMesh.from_group(group, "cpu")
    q, k, v, dout = (distribute_tensor(x, mesh, [Shard(axis)]) for x in given())
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    sent = CommDebugMode()
    with strobe.register(strict=True) as run, sent if door != "compiled" else nullcontext():  # a compiler runs in no such mode
        out = CALLS[door](*leaves)
        found = [out, *torch.autograd.grad(out, leaves, dout)]
    assert all(isinstance(x, DTensor) for x in found)
    count = run.calls["scaled_dot_product_attention"]
    return [x.full_tensor().detach() for x in found], [str(x.placements) for x in found], sent.get_total_counts(), count


def sharded_sequences(group: dist.ProcessGroup) -> list[str]:
    """What is said of DTensors whose sequences are sharded."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    q, k, v = (distribute_tensor(torch.randn(2, 4, 8, 16), mesh, [Shard(2)]) for _ in range(3))
    said = []
    with strobe.register(strict=True):
        for door in ("attention", "register"):
            try:
                CALLS[door](q, k, v)
            except (ValueError, NotImplementedError) as refused:
                said.append(str(refused))
    return said
