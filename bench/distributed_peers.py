"""Other packages that divide a causal sequence between GPUs, for bench/distributed_speed.py. Each rank has the tokens of the zigzag
sharding, the same number as the others."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

# Takes q, k and v (B, H, S, D) of the rank's tokens.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@contextlib.contextmanager
def ring_flash_attention(group: dist.ProcessGroup, device: str, tokens: int) -> Iterator[Attention]:
    """The package ring-flash-attn: its zigzag over flash-attn, or over strobe.compat.flash_attn where flash-attn is not installed."""
    if importlib.util.find_spec("flash_attn") is None:
        import strobe.compat.flash_attn

        sys.modules["flash_attn"] = strobe.compat.flash_attn
    if "ring_flash_attn" not in sys.modules:
        if (found := importlib.util.find_spec("ring_flash_attn")) is None:
            raise ImportError("ring-flash-attn is not installed")
        package = types.ModuleType(found.name)  # without its adapter to transformers, which some versions break
        package.__path__ = [*(found.submodule_search_locations or ())]
        sys.modules[found.name] = package
    from ring_flash_attn.zigzag_ring_flash_attn import zigzag_ring_flash_attn_func

    def call(*tensors: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in tensors)
        return zigzag_ring_flash_attn_func(q, k, v, causal=True, group=group).transpose(1, 2)

    yield call


@contextlib.contextmanager
def pytorch(group: dist.ProcessGroup, device: str, tokens: int) -> Iterator[Attention]:
    """torch.distributed.tensor.experimental.context_parallel, with its flash kernel. It only supports as many key heads as query heads, so
    keys are repeated first."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh, whole = DeviceMesh.from_group(group, device), torch.zeros(tokens, device=device)
    with context_parallel(mesh, buffers=[whole], buffer_seq_dims=[0]), sdpa_kernel(SDPBackend.FLASH_ATTENTION):

        def call(q: Tensor, *kv: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in kv)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        yield call


PEERS = {"ring-fa": ring_flash_attention, "pytorch": pytorch}
