"""flash_attention_forward(Q, K, V, Bc, Br, use_half), its backward and module, on (B, H, N, D): the tile is the caller's.

Bc and Br request the tile of keys and of queries that the engine works on; strobe.explain(..., tile_q=Br, tile_k=Bc) names the tile that
runs. use_half computes in float16; results and gradients keep the dtype of Q. Beyond the original, the forward is differentiable and takes
any device, head dimension and float dtype, and flash_attention_forward_lm returns the l and m that the backward needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import attention
from .._abi import FORWARD, outside_graphs
from .._checks import refuse
from .._options import MAX_HEAD_DIM_V
from .._parse import parse
from .._statistics import lse_of, statistics
from ._call import backward
from ._words import called, flag_or_refusal, front, integer_or_refusal

_NAMES = {"q": "Q", "k": "K", "v": "V", "tile_q": "Br", "tile_k": "Bc", "out": "O", "dout": "dO", "lse": "l, m"}


@front(_NAMES)
def flash_attention_forward(
    Q: Tensor, K: Tensor, V: Tensor, Bc: int | None = None, Br: int | None = None, use_half: bool = False, *, bc: int | None = None,
    br: int | None = None,
) -> Tensor:  # fmt: skip
    """softmax(Q Kᵀ / sqrt(D)) V; differentiable. Bc: keys of a tile, Br: queries of a tile, 32 if None (bc and br are other spellings of
    them)."""
    return _forward(Q, K, V, _spelled("Bc", Bc, bc), _spelled("Br", Br, br), use_half)[0].to(Q.dtype)


@front(_NAMES)
def flash_attention_forward_lm(
    Q: Tensor, K: Tensor, V: Tensor, Bc: int = 32, Br: int = 32, use_half: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(O, l, m) of the paper's Algorithm 1: for each row of scores, the sum l of exp(score - m) and the maximum m, (B, H, N), float32.
    O is differentiable; l and m are not."""
    O, lse = _forward(Q, K, V, Bc, Br, use_half)
    return O.to(Q.dtype), *statistics(lse, q=_rounded(Q, use_half), k=_rounded(K, use_half))


@front(_NAMES)
def flash_attention_backward(
    Q: Tensor, K: Tensor, V: Tensor, O: Tensor, dO: Tensor, l: Tensor, m: Tensor, Bc: int = 32, Br: int = 32, use_half: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV) from the results of flash_attention_forward_lm."""
    q, k, v, out, dout = (_rounded(x, use_half) for x in (Q, K, V, O, dO))
    dQ, dK, dV = backward(_NAMES, dout=dout, q=q, k=k, v=v, out=out, lse=lse_of(l, m), tile_q=Br, tile_k=Bc)
    return dQ.to(Q.dtype), dK.to(K.dtype), dV.to(V.dtype)


class FlashAttention(torch.nn.Module):
    """flash_attention_forward and flash_attention_backward with bc, br and use_half set once."""

    def __init__(self, bc: int = 32, br: int = 32, use_half: bool = False):
        super().__init__()
        self.bc, self.br, self.use_half = bc, br, use_half

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention_forward(q, k, v, self.bc, self.br, self.use_half)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, l: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return flash_attention_backward(q, k, v, o, do, l, m, self.bc, self.br, self.use_half)


@front(_NAMES)
@outside_graphs
def get_optimal_block_sizes(sequence_length: int, head_dim: int) -> tuple[int, int]:
    """(Bc, Br) that Strobe itself chooses for a forward of one float32 head of that size, on the GPU if there is one."""
    refuse(integer_or_refusal("sequence_length", sequence_length, 1), integer_or_refusal("head_dim", head_dim, 1, MAX_HEAD_DIM_V))
    x = torch.empty(1, 1, sequence_length, head_dim, device="cuda" if torch.cuda.is_available() else "cpu")
    Br, Bc = parse("attention", x, x, x, {}, []).tile(FORWARD)
    return Bc, Br


@front(_NAMES)
def estimate_memory_usage(batch_size: int, num_heads: int, seq_len: int, head_dim: int, use_half: bool = False) -> dict[str, float]:
    """Bytes of a forward: Q, K, V; the LSE, the only statistic of the scores that is kept; O. An engine's workspace is not included."""
    sizes = {"batch_size": batch_size, "num_heads": num_heads, "seq_len": seq_len, "head_dim": head_dim}
    refuse(*(integer_or_refusal(name, x, 1) for name, x in sizes.items()), flag_or_refusal("use_half", use_half))
    rows = batch_size * num_heads * seq_len
    tensor = rows * head_dim * (2 if use_half else 4)
    memory = {"input_memory": 3 * tensor, "internal_memory": 4 * rows, "output_memory": tensor}
    total = sum(memory.values())
    return {**memory, "total_memory": total, "total_memory_mb": total / 2**20}


def _spelled(name: str, x: int | None, other: int | None) -> Any:
    """The value of whichever spelling is given; or the exception that says that both are given."""
    if x is not None and other is not None:
        return ValueError(f"{name.lower()}: {other} beside {name} = {x}; accepted is one of the two spellings")
    return other if x is None and other is not None else 32 if x is None else x


def _rounded(x: Tensor, use_half: bool) -> Any:
    """x in the dtype of the computation; or, for a wrong use_half, the exception that says so."""
    half = flag_or_refusal("use_half", use_half)
    return half if isinstance(half, Exception) else x.half() if half and isinstance(x, Tensor) else x


def _forward(Q: Tensor, K: Tensor, V: Tensor, Bc: Any, Br: Any, use_half: bool) -> tuple[Tensor, Tensor]:
    q, k, v = (_rounded(x, use_half) for x in (Q, K, V))
    return called(_NAMES, attention, q=q, k=k, v=v, tile_q=Br, tile_k=Bc, return_lse=True)
