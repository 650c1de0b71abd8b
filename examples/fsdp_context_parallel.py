"""FSDP2 and context parallelism together: two processes share a model's parameters and the tokens of every sequence.

python examples/fsdp_context_parallel.py          starts two processes on the CPU
torchrun --nproc-per-node 2 examples/fsdp_context_parallel.py --device cuda

Each rank has some tokens of the batch and computes its part of the loss. FSDP averages the gradients over the ranks, so each part of the
loss is multiplied by the number of ranks. Needs PyTorch 2.6 or later.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import strobe

BATCH, SEQUENCE, VOCABULARY, WIDTH, HEADS = 8, 97, 32, 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(2)
        # Within context_parallel() this is attention over whole sequences, of which each rank has some tokens.
        x = x + self.out(strobe.distributed.attention(q, k, v, layout="bshd", causal=True).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))


def train(device: str, steps: int = 25) -> list[float]:
    """The losses of a model that learns to count. Each sequence counts in other steps."""
    torch.manual_seed(0)  # the same weights and batches on all ranks
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = Model().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        first, step = torch.randint(VOCABULARY, (BATCH, 1), device=device), torch.randint(1, 4, (BATCH, 1), device=device)
        numbers = (first + step * torch.arange(SEQUENCE + 1, device=device)) % VOCABULARY
        tokens, targets = numbers[:, :-1], numbers[:, 1:]
        positions = torch.arange(SEQUENCE, device=device)
        buffers = [tokens, targets, positions]
        with strobe.distributed.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], no_restore_buffers=buffers):
            logits = model(tokens, positions)
            loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / (BATCH * SEQUENCE)
            (loss * mesh.size()).backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(whole.item())
    return losses


def run(rank: int, ranks: int, store: str | None, device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    found = {} if store is None else {"init_method": f"file://{store}", "rank": rank, "world_size": ranks}
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **found)
    losses = train(device)
    if rank == 0:
        print(f"loss {losses[0]:.4f} after the first step, {losses[-1]:.4f} after {len(losses)}, on {dist.get_world_size()} ranks")
    dist.barrier()  # with gloo, a rank that ends while another one still sends can abort
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    if "LOCAL_RANK" in os.environ:  # set by torchrun
        run(int(os.environ["LOCAL_RANK"]), 0, None, arguments.device)
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(run, (arguments.ranks, f"{folder}/store", arguments.device), arguments.ranks)
