"""flash_attention_1_forward and _backward, flash_attention_2_forward and _backward, on (B, H, N, d): the papers' algorithms themselves.

They run on the teaching kernels (docs/ladder.md), the loops of the papers line by line: on a GPU as CUDA, on the CPU as plain C++. float32,
d from 1 to 256, causal or not; Br and Bc really set the tile. The forms whose signatures these are always mask future keys: here that
is causal=True, and the default is False. For speed, use strobe.attention.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import attention
from .._statistics import lse_of, statistics
from ..arrays.known import unfit
from ._call import backward
from ._words import called, front

_NAMES = {"q": "Q", "k": "K", "v": "V", "scale": "softmax_scale", "tile_q": "Br", "tile_k": "Bc", "out": "O", "dout": "dO"}


@front(_NAMES)
def flash_attention_1_forward(
    Q: Tensor, K: Tensor, V: Tensor, causal: bool = False, softmax_scale: float | None = None, Br: int | None = None, Bc: int | None = None
) -> list[Tensor]:
    """FlashAttention, Algorithm 1: [O, l, m], for each row of scores the sum l of exp(score - m) and the maximum m, (B, H, N)."""
    arguments = _arguments("ladder-flash1", Q, K, V, causal, softmax_scale, Br, Bc)
    O, lse = called(_NAMES, attention, return_lse=True, **arguments)
    return [O, *statistics(lse, **arguments)]


@front(_NAMES)
def flash_attention_1_backward(
    Q: Tensor, K: Tensor, V: Tensor, O: Tensor, dO: Tensor, l: Tensor, m: Tensor, causal: bool = False,
    softmax_scale: float | None = None, Br: int | None = None, Bc: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """FlashAttention, Algorithm 4: [dQ, dK, dV]."""
    arguments = _arguments("ladder-flash1", Q, K, V, causal, softmax_scale, Br, Bc)
    return list(backward({**_NAMES, "lse": "l, m"}, dout=dO, out=O, lse=lse_of(l, m), **arguments))


@front(_NAMES)
def flash_attention_2_forward(
    Q: Tensor, K: Tensor, V: Tensor, causal: bool = False, softmax_scale: float | None = None, Br: int | None = None, Bc: int | None = None
) -> list[Tensor]:
    """FlashAttention-2, Algorithm 1: [O, L], L the logarithm of each row's sum of exp(score), (B, H, N)."""
    return list(called(_NAMES, attention, return_lse=True, **_arguments("ladder-flash2", Q, K, V, causal, softmax_scale, Br, Bc)))


@front(_NAMES)
def flash_attention_2_backward(
    Q: Tensor, K: Tensor, V: Tensor, O: Tensor, dO: Tensor, L: Tensor, causal: bool = False, softmax_scale: float | None = None,
    Br: int | None = None, Bc: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """FlashAttention-2, Algorithm 2: [dQ, dK, dV]."""
    arguments = _arguments("ladder-flash2", Q, K, V, causal, softmax_scale, Br, Bc)
    return list(backward({**_NAMES, "lse": "L"}, dout=dO, out=O, lse=L, **arguments))


def _arguments(engine: str, Q: Any, K: Any, V: Any, causal: bool, scale: float | None, Br: int | None, Bc: int | None) -> dict[str, Any]:
    """The arguments of strobe.attention(). V is replaced by an exception if its head dimension is not Q's, as the papers' algorithms need.
    The kernels' own message would have other names."""
    if all(isinstance(x, Tensor) and unfit("", x) is None and x.dim() == 4 for x in (Q, V)) and V.shape[-1] != Q.shape[-1]:
        V = ValueError(f"V: head dimension {V.shape[-1]}; accepted is that of Q, {Q.shape[-1]}")
    return {"q": Q, "k": K, "v": V, "causal": causal, "scale": scale, "tile_q": Br, "tile_k": Bc, "engine": engine}
