"""The attentions that Strobe is compared with, each a real forward and backward: exact ones, and those that compute less."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import strobe

if TYPE_CHECKING:
    from torch import Tensor

Attend = Callable[..., "Tensor"]
DROPOUT = 0.1
LINFORMER_RANK = 256  # k of Wang et al. 2020
FIXED_BLOCK, FIXED_SUMMARY = 128, 8  # l and c of Child et al. 2019
SPARSE_BLOCK = 128


class Inputs(NamedTuple):
    """q, k, v (B, H, N, D) that require grad, a padding mask (B, 1, 1, N), True = attend, and a method's own parameters."""

    leaves: tuple[Tensor, ...]
    mask: Tensor
    more: dict[str, Any]


def inputs(method: str, shape: tuple[int, int, int, int], dtype: str, device: str) -> Inputs:
    import torch

    batch, _, n, _ = shape
    leaves = [torch.randn(shape, dtype=getattr(torch, dtype), device=device, requires_grad=True) for _ in "qkv"]
    lengths = torch.linspace(0.8 * n, n, batch, device=device)[:, None]
    mask = (torch.arange(n, device=device) < lengths)[:, None, None]
    more: dict[str, Any] = {}
    if method == LINFORMER:
        rank = min(LINFORMER_RANK, n)
        leaves += [(torch.randn(rank, n, device=device) / math.sqrt(n)).to(leaves[0].dtype).requires_grad_() for _ in "EF"]
    if method == BLOCK_SPARSE:
        blocks = strobe.BlockMask.butterfly(n, n, SPARSE_BLOCK, SPARSE_BLOCK)
        more["block_mask"] = blocks.to(device)
    return Inputs(tuple(leaves), mask, more)


def both(attend: Attend, given: Inputs) -> Callable[[], Any]:
    """A function that runs forward and backward."""
    import torch

    dout = torch.randn_like(given.leaves[0])

    def call() -> None:
        out = attend(*given.leaves, mask=given.mask, **given.more)
        torch.autograd.grad(out, given.leaves, dout)

    return call


def unfused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Like Megatron-LM without its fused kernels: baddbmm, scale and mask, softmax, dropout, bmm."""
    import torch

    batch, heads, n, d = q.shape
    flat = [x.reshape(batch * heads, n, d) for x in (q, k, v)]
    scores = torch.baddbmm(q.new_empty(1).expand(batch * heads, n, n), flat[0], flat[1].mT, beta=0.0, alpha=d**-0.5)
    scores = scores.view(batch, heads, n, n).masked_fill(~mask, -10000.0)
    P = torch.nn.functional.dropout(scores.softmax(-1), DROPOUT)
    return torch.bmm(P.view(batch * heads, n, n), flat[2]).view(q.shape)


def linformer(q: Tensor, k: Tensor, v: Tensor, E: Tensor, F: Tensor, mask: Tensor) -> Tensor:
    """Wang et al. 2020: keys and values are projected along the sequence to a fixed length."""
    import torch

    keep = mask.mT.to(k.dtype)
    P = (q @ (E @ (k * keep)).mT * q.shape[-1] ** -0.5).softmax(-1)
    return torch.nn.functional.dropout(P, DROPOUT) @ (F @ (v * keep))


def fixed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Child et al. 2019, "fixed": each query sees its own block of keys, and the last c keys of every block. Each part is two dense
    products."""
    import torch

    batch, _, n, d = q.shape
    block = min(FIXED_BLOCK, n)
    count = n // block

    def summary(x: Tensor) -> Tensor:
        return x.unflatten(2, (count, block))[:, :, :, -FIXED_SUMMARY:].flatten(2, 3)

    blocks = [x.unflatten(2, (count, block)) for x in (q, k, v)]
    own = blocks[0] @ blocks[1].mT  # (B, H, blocks, l, l)
    own = own.masked_fill(~mask.view(batch, 1, count, 1, block), -math.inf)
    own[..., -FIXED_SUMMARY:] = -math.inf  # these keys are among the summaries
    far = (q @ summary(k).mT).masked_fill(~summary(mask.mT).mT, -math.inf).unflatten(2, (count, block))
    P = torch.nn.functional.dropout((torch.cat([own, far], -1) * d**-0.5).softmax(-1), DROPOUT)
    near = P[..., :block] @ blocks[2]
    return near.flatten(2, 3) + P[..., block:].flatten(2, 3) @ summary(v)


def sdpa(backend: str, with_mask: bool = True, dropout: float = DROPOUT) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, mask if with_mask else None, dropout)

    return attend


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Tensor:
    return strobe.attention(q, k, v, mask=mask, dropout=DROPOUT, **options)


MATH, MEGATRON, LINFORMER, FIXED = "PyTorch math", "Megatron-style, unfused", f"Linformer, k {LINFORMER_RANK}", "Sparse Transformer, fixed"
EFFICIENT, CUDNN, FLASH2 = "SDPA memory-efficient", "SDPA cuDNN", "SDPA FlashAttention-2, no mask"
FLASH_CPU, STROBE, BLOCK_SPARSE = "SDPA flash, no dropout", "Strobe", "Strobe, block-sparse butterfly"


def methods(device: str) -> dict[str, Attend]:
    """The methods by name; the name tells which of mask and dropout a method lacks."""
    backends = {EFFICIENT: sdpa("EFFICIENT_ATTENTION"), CUDNN: sdpa("CUDNN_ATTENTION"), FLASH2: sdpa("FLASH_ATTENTION", with_mask=False)}
    if device == "cpu":
        backends = {FLASH_CPU: sdpa("FLASH_ATTENTION", dropout=0.0)}
    return {
        MATH: sdpa("MATH"),
        MEGATRON: unfused,
        **backends,
        LINFORMER: linformer,
        FIXED: fixed,
        STROBE: exact,
        BLOCK_SPARSE: exact,
    }
