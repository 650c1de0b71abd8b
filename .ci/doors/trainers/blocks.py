"""Models of diffusers and their transformer blocks, as the tests beside this file and the ranks that they start run them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from diffusers import DiTTransformer2DModel, UNet2DConditionModel
from torch import Tensor

import strobe

TOKENS, TEXT = 45, 7


def dit() -> Any:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8, "num_layers": 2, "sample_size": 8}
    torch.manual_seed(0)
    return DiTTransformer2DModel(**sizes, patch_size=2, num_embeds_ada_norm=10, norm_num_groups=8)


def unet() -> Any:
    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 16, "cross_attention_dim": 24, "attention_head_dim": 8}
    downs, ups = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    torch.manual_seed(0)
    return UNet2DConditionModel(**sizes, in_channels=4, out_channels=4, down_block_types=downs, up_block_types=ups)


def stepped(kind: str) -> dict[str, Tensor]:
    """The weights after one step of training."""
    model = dit() if kind == "dit" else unet()
    size = 8 if kind == "dit" else 16
    noisy, at = torch.randn(2, 4, size, size), torch.tensor([3, 500])
    more = {"class_labels": torch.tensor([1, 4])} if kind == "dit" else {"encoder_hidden_states": torch.randn(2, TEXT, 24)}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.eval()(noisy, timestep=at, **more).sample.square().mean().backward()  # eval: no label is dropped
    optimizer.step()
    return model.state_dict()


def block(kind: str) -> tuple[Any, list[Tensor], dict[str, Any]]:
    """A transformer block, what has the tokens of pictures, and its other arguments."""
    model = (dit() if kind == "dit" else unet()).eval()
    found = model.transformer_blocks[0] if kind == "dit" else model.down_blocks[1].attentions[0].transformer_blocks[0]
    g = torch.Generator().manual_seed(1)
    tokens = [torch.randn(2, TOKENS, 32 if kind == "dit" else 64, generator=g) for _ in range(2)]
    if kind == "dit":
        return found, tokens, {"timestep": torch.tensor([3, 500]), "class_labels": torch.tensor([1, 4])}
    return found, tokens, {"encoder_hidden_states": torch.randn(2, TEXT, 24, generator=g)}


def run(found: Any, tokens: list[Tensor], more: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    x, weights = tokens
    out = found(x, **more)
    (out * weights).sum().backward()
    return out.detach(), [torch.zeros_like(p) if p.grad is None else p.grad for p in found.parameters()]


def shared(group: dist.ProcessGroup, kind: str) -> tuple[Tensor, list[Tensor]]:
    found, tokens, more = block(kind)
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    with strobe.distributed.context_parallel(mesh, buffers=tokens, buffer_seq_dims=[1, 1], whole_keys=[TEXT]):
        return run(found, tokens, more)
