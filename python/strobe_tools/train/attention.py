"""The attentions that the GPT can be built with: causal, on q, k, v of shape (B, S, H, D)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import strobe

Attention = Callable[[Tensor, Tensor, Tensor, float, int], Tensor]  # q, k, v, dropout, block size
_SPARSE_BLOCK = 32


def _draw(dropout: float, device: torch.device) -> Tensor | None:
    """(seed, offset) of a dropout mask, from torch's generator: strobe and math draw the same mask, and a resumed run redraws it."""
    return torch.randint(2**62, (2,), device=device) if dropout else None


def _strobe(q: Tensor, k: Tensor, v: Tensor, dropout: float, block: int) -> Tensor:
    tile = block or None
    return strobe.attention(q, k, v, causal=True, layout="bshd", dropout=dropout, rng=_draw(dropout, q.device), tile_q=tile, tile_k=tile)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, dropout: float, block: int) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout).transpose(1, 2)


@torch.compiler.disable
def _keep(shape: tuple[int, int, int, int], dropout: float, rng: Tensor) -> Tensor:
    return strobe.dropout_mask(shape, dropout, rng=rng.cpu()).to(rng.device)


def _math(q: Tensor, k: Tensor, v: Tensor, dropout: float, block: int) -> Tensor:
    """The formulas as they stand, with the dropout mask that strobe would use."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
    p = s.masked_fill(hidden, -math.inf).softmax(-1)
    rng = _draw(dropout, q.device)
    if rng is not None:
        keep_rate = min(max(round((1 - dropout) * 256), 1), 255) / 256
        p = p * _keep((*q.shape[:3], k.shape[2]), dropout, rng) / keep_rate
    return (p.to(v.dtype) @ v).transpose(1, 2)


@torch.compiler.disable  # made once, outside the graph
@functools.cache
def _block_mask(sequence: int, block: int) -> strobe.BlockMask:
    """Each query block sees the block before it, its own, and the first."""
    return strobe.BlockMask.local_global(sequence, sequence, block, block, local_blocks=1, global_blocks=1)


def _block_sparse(q: Tensor, k: Tensor, v: Tensor, dropout: float, block: int) -> Tensor:
    mask = _block_mask(q.shape[1], block or _SPARSE_BLOCK)
    return strobe.attention(q, k, v, causal=True, block_mask=mask, layout="bshd", dropout=dropout, rng=_draw(dropout, q.device))


ATTENTIONS: dict[str, Attention] = {"strobe": _strobe, "sdpa": _sdpa, "math": _math, "block-sparse": _block_sparse}
