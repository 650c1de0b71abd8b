"""Context parallelism: several processes that train one model, each with some tokens of every sequence."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import strobe
from strobe.distributed import Sharding
from strobe_tools.train.attention import Attention
from strobe_tools.train.model import GPT, SelfAttention

T = TypeVar("T")


class Ranks:
    """This process among those that train. All processes see the same batches, take the same steps, and have the same weights."""

    def __init__(self, world: int, rank: int, device: str, store: str | None) -> None:
        """store: a file through which the ranks find one another; None: they already are the default process group."""
        self.world, self.rank = world, rank
        if device == "cuda":
            torch.cuda.set_device(rank)
        if store is not None:
            backend = "nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
        self._mesh = dist.device_mesh.init_device_mesh(device, (world,))
        self._sharded = False

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def seed(self, seed: int, step: int) -> None:
        """Seeds dropout: each rank drops other elements in each step, and the same elements whenever the step is repeated."""
        torch.manual_seed((seed * 1_000_003 + step) * self.world + self.rank)

    def over_ranks(self, model: GPT) -> None:
        """Lets the model's attention see whole sequences while loss() is computed."""
        for module in model.modules():
            if isinstance(module, SelfAttention):
                module.attend = self._attention(module.attend)

    def _attention(self, own: Attention) -> Attention:
        def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, block: int) -> Tensor:
            if not self._sharded:
                return own(q, k, v, dropout, block)
            tile = block or None
            return strobe.distributed.attention(q, k, v, causal=True, layout="bshd", dropout=dropout, tile_q=tile, tile_k=tile)

        return attend

    def loss(self, model: GPT, tokens: Tensor) -> Tensor:
        """This rank's share of the mean cross entropy of tokens[:, 1:]: the shares of all ranks add up to it."""
        before, targets = tokens[:, :-1], tokens[:, 1:]
        sharding = _sharding(before.shape[1], self.world)
        before, targets = (sharding.shard(x, 1, self.rank) for x in (before, targets))
        self._sharded = True
        try:
            with strobe.distributed.context_parallel(self._mesh, sharding=sharding):
                logits = model(before, sharding.positions(self.rank).to(tokens.device))
        finally:
            self._sharded = False
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        return losses / (tokens.shape[0] * sharding.seqlen)

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Adds up the gradients over the ranks, because each rank's are those of its share of the loss."""
        for x in parameters:
            if x.grad is None:
                x.grad = torch.zeros_like(x)
            dist.all_reduce(x.grad)

    def total(self, part: Tensor) -> Tensor:
        dist.all_reduce(part)
        return part

    def any(self, mine: bool, device: torch.device) -> bool:
        return bool(self.total(torch.tensor(float(mine), device=device)))

    def of_first(self, x: T) -> T:
        """The first rank's value."""
        held = [x]
        dist.broadcast_object_list(held)
        return held[0]

    def barrier(self) -> None:
        dist.barrier()


@lru_cache(maxsize=8)
def _sharding(sequence: int, world: int) -> Sharding:
    return Sharding.zigzag(sequence, world)
