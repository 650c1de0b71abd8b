"""flash_attention_1_forward and _backward, flash_attention_2_forward and _backward, on (B, H, N, d): the papers' algorithms themselves.

They run on the teaching kernels (docs/ladder.md), the loops of the papers line by line: on a GPU as CUDA, on the CPU as plain C++. float32,
d from 1 to 256, causal or not; Br and Bc really set the tile. The forms whose signatures these are always mask future keys: here that
is causal=True, and the default is False. For speed, use strobe.attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strobe import attention, attention_backward

from ._statistics import lse_of, statistics
from ._words import in_words_of, names_checked

_NAMES = {"q": "Q", "k": "K", "v": "V", "scale": "softmax_scale", "tile_q": "Br", "tile_k": "Bc", "out": "O", "dout": "dO"}
_LSE = {"ladder-flash1": "l, m", "ladder-flash2": "L"}


@names_checked(_NAMES)
def flash_attention_1_forward(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    Br: int | None = None,
    Bc: int | None = None,
) -> list[Tensor]:
    """FlashAttention, Algorithm 1: [O, l, m], for each row of scores the sum l of exp(score - m) and the maximum m, (B, H, N)."""
    O, lse = _forward("ladder-flash1", Q, K, V, causal, softmax_scale, Br, Bc)
    with torch.no_grad():
        l, m = statistics(Q, K, lse, scale=softmax_scale, causal=causal)
    return [O, l, m]


@names_checked(_NAMES)
def flash_attention_1_backward(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,
    dO: Tensor,
    l: Tensor,
    m: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    Br: int | None = None,
    Bc: int | None = None,
) -> list[Tensor]:
    """FlashAttention, Algorithm 4: [dQ, dK, dV]."""
    return _backward("ladder-flash1", Q, K, V, O, dO, lse_of(l, m), causal, softmax_scale, Br, Bc)


@names_checked(_NAMES)
def flash_attention_2_forward(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    Br: int | None = None,
    Bc: int | None = None,
) -> list[Tensor]:
    """FlashAttention-2, Algorithm 1: [O, L], L the logarithm of each row's sum of exp(score), (B, H, N)."""
    return list(_forward("ladder-flash2", Q, K, V, causal, softmax_scale, Br, Bc))


@names_checked(_NAMES)
def flash_attention_2_backward(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,
    dO: Tensor,
    L: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    Br: int | None = None,
    Bc: int | None = None,
) -> list[Tensor]:
    """FlashAttention-2, Algorithm 2: [dQ, dK, dV]."""
    return _backward("ladder-flash2", Q, K, V, O, dO, L, causal, softmax_scale, Br, Bc)


def _forward(
    engine: str, Q: Tensor, K: Tensor, V: Tensor, causal: bool, scale: float | None, Br: int | None, Bc: int | None
) -> tuple[Tensor, Tensor]:
    with in_words_of(_NAMES):
        return attention(Q, K, V, causal=causal, scale=scale, tile_q=Br, tile_k=Bc, engine=engine, return_lse=True)


def _backward(engine: str, Q: Tensor, K: Tensor, V: Tensor, O: Tensor, dO: Tensor, lse: Tensor, causal: bool, *how: Any) -> list[Tensor]:
    scale, Br, Bc = how
    with torch.no_grad(), in_words_of({**_NAMES, "lse": _LSE[engine]}, {"lse": lse}):
        found = attention_backward(dO, Q, K, V, O, lse, causal=causal, scale=scale, tile_q=Br, tile_k=Bc, engine=engine)
    return [found.dq, found.dk, found.dv]
