"""flash_attention_forward(Q, K, V, Bc, Br, use_half), its backward and module, on (B, H, N, D): the tile is the caller's.

Bc and Br are wishes for the tile of keys and of queries that the engine works on; strobe.explain(..., tile_q=Br, tile_k=Bc) says to what
they were rounded. use_half computes in float16; results and gradients keep the dtype of Q. Beyond the original: the forward is
differentiable, on any device, with any head dimension and float dtype, and flash_attention_forward_lm returns the l and m that the backward
wants.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from strobe import attention, attention_backward, explain

from ._statistics import lse_of, statistics
from ._words import in_words_of, names_checked

_NAMES = {"q": "Q", "k": "K", "v": "V", "tile_q": "Br", "tile_k": "Bc", "out": "O", "dout": "dO", "lse": "l, m"}


@names_checked(_NAMES)
def flash_attention_forward(
    Q: Tensor, K: Tensor, V: Tensor, Bc: int = 32, Br: int = 32, use_half: bool = False, *, bc: int | None = None, br: int | None = None
) -> Tensor:
    """softmax(Q Kᵀ / sqrt(D)) V; differentiable. Bc: keys of a tile, Br: queries of a tile (bc and br are other spellings of them)."""
    return _forward(Q, K, V, Bc if bc is None else bc, Br if br is None else br, use_half)[0].to(Q.dtype)


@names_checked(_NAMES)
def flash_attention_forward_lm(
    Q: Tensor, K: Tensor, V: Tensor, Bc: int = 32, Br: int = 32, use_half: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(O, l, m) of the paper's Algorithm 1: of each row of scores, the sum l of exp(score - m) and the maximum m, (B, H, N), float32."""
    with torch.no_grad():
        O, lse = _forward(Q, K, V, Bc, Br, use_half)
        l, m = statistics(_rounded(Q, use_half), _rounded(K, use_half), lse)
    return O.to(Q.dtype), l, m


@names_checked(_NAMES)
def flash_attention_backward(
    Q: Tensor, K: Tensor, V: Tensor, O: Tensor, dO: Tensor, l: Tensor, m: Tensor, Bc: int = 32, Br: int = 32, use_half: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV) from what flash_attention_forward_lm returned."""
    q, k, v, out, dout = (_rounded(x, use_half) for x in (Q, K, V, O, dO))
    with torch.no_grad(), in_words_of(_NAMES):
        found = attention_backward(dout, q, k, v, out, lse_of(l, m), tile_q=Br, tile_k=Bc)
    return found.dq.to(Q.dtype), found.dk.to(K.dtype), found.dv.to(V.dtype)


class FlashAttention(torch.nn.Module):
    """flash_attention_forward and flash_attention_backward with bc, br and use_half set once."""

    def __init__(self, bc: int = 32, br: int = 32, use_half: bool = False):
        super().__init__()
        self.bc, self.br, self.use_half = bc, br, use_half

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention_forward(q, k, v, self.bc, self.br, self.use_half)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, l: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return flash_attention_backward(q, k, v, o, do, l, m, self.bc, self.br, self.use_half)


@names_checked(_NAMES)
def get_optimal_block_sizes(sequence_length: int, head_dim: int) -> tuple[int, int]:
    """(Bc, Br) that Strobe chooses by itself for a forward of one float32 head of that size, on the GPU if there is one."""
    shape = (1, 1, sequence_length, head_dim)
    x = torch.empty(shape, device="cuda" if torch.cuda.is_available() else "cpu")
    answer = explain(x, x, x)
    chosen = answer.rpartition("choice\n")[2].split()[0]
    tile = re.search(rf"^  {re.escape(chosen)} .*; tile (\d+) x (\d+);", answer, re.MULTILINE)
    if tile is None:
        raise NotImplementedError(answer)
    return int(tile[2]), int(tile[1])


@names_checked(_NAMES)
def estimate_memory_usage(batch_size: int, num_heads: int, seq_len: int, head_dim: int, use_half: bool = False) -> dict[str, float]:
    """Bytes of a forward: Q, K, V; the LSE, which is all that is kept of the scores; O. An engine's workspace is not among them."""
    rows = batch_size * num_heads * seq_len
    tensor = rows * head_dim * (2 if use_half else 4)
    memory = {"input_memory": 3 * tensor, "internal_memory": 4 * rows, "output_memory": tensor}
    total = sum(memory.values())
    return {**memory, "total_memory": total, "total_memory_mb": total / 2**20}


def _rounded(x: Tensor, use_half: bool) -> Tensor:
    return x.half() if use_half else x


def _forward(Q: Tensor, K: Tensor, V: Tensor, Bc: int, Br: int, use_half: bool) -> tuple[Tensor, Tensor]:
    with in_words_of(_NAMES):
        return attention(*(_rounded(x, use_half) for x in (Q, K, V)), tile_q=Br, tile_k=Bc, return_lse=True)
