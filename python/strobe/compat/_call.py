"""From flash-attn's arguments to strobe.attention's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from strobe import attention
from strobe._framework import is_whole

from ._words import in_words_of

Window = tuple[int, int]
_NAMES = {"dropout": "dropout_p", "scale": "softmax_scale", "window": "window_size"}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    **packed: Any,
) -> Any:
    """out, or (out, softmax_lse, None). packed: cu_seqlens and max_seqlen of both sides. The latter may be tensors of one element, whose
    value waits for the GPU."""
    for name in ("max_seqlen_q", "max_seqlen_k"):
        longest = packed.get(name)
        if isinstance(longest, Tensor) and longest.numel() == 1:
            packed[name] = longest.item()
    with in_words_of(_NAMES):
        out, lse = attention(
            q,
            k,
            v,
            causal=causal,
            window=bounds(window_size),
            scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            dropout=dropout_p,
            deterministic=deterministic,
            layout="bshd",
            return_lse=True,
            **packed,
        )
    return (out, lse, None) if return_attn_probs else out


def bounds(window_size: Window) -> tuple[int | None, int | None] | None:
    """A side below 0 is unbounded."""
    if not (isinstance(window_size, (tuple, list)) and len(window_size) == 2 and all(map(is_whole, window_size))):
        raise TypeError(f"window_size: {window_size!r}; accepted is (left, right), two integers, -1 for no bound")
    left, right = (None if side < 0 else side for side in window_size)
    return None if left is right is None else (left, right)


def parts(name: str, packed: Tensor, count: int, axis: int, shape: str) -> tuple[Tensor, ...]:
    """The views of q, k and v, or of k and v, in one tensor."""
    if packed.dim() != axis + 3 or packed.shape[axis] != count:
        raise ValueError(f"{name}: shape {tuple(packed.shape)}; accepted is {shape}")
    return packed.unbind(axis)


def refuse_pages(block_table: Tensor | None) -> None:
    if block_table is not None:
        raise NotImplementedError("block_table: given; accepted is None, for paged caches are not there yet")
