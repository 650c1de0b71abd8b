"""The functions that strobe.compat.flash_attn exports, differentiable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .._writable import writes
from ._call import KV, NAMES, PACKED_QKV, QKV, Window, attend, in_pages, parts
from ._kvcache import attend_to_cache
from ._words import front

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_PAGES = NAMES | {"page_table": "block_table", "seqused_k": "cu_seqlens_k"}


def _attend(given: dict[str, Any]) -> Any:
    """out, or (out, softmax_lse, None): flash-attn's third result, the probabilities, is never made."""
    names: Mapping[str, str] = NAMES
    if "qkv" in given:
        names, shape = (PACKED_QKV, "(T, 3, H, D)") if "cu_seqlens" in given else (QKV, "(B, S, 3, H, D)")
        given = parts("qkv", given, shape)
    elif "kv" in given:
        names, given = KV, parts("kv", given, "(Tk, 2, Hkv, D)" if "cu_seqlens_k" in given else "(B, Sk, 2, Hkv, D)")
    elif given.get("block_table") is not None:
        names, given = _PAGES, in_pages(given, "block_table")
    found = attend(given, names)
    return (*found, None) if isinstance(found, tuple) else found


@front(NAMES, _attend)
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of q (B, Sq, H, D) over k and v (B, Sk, Hkv, D); differentiable.

    Args:
        dropout_p: the probability of dropping. Pass 0.0 in evaluation.
        softmax_scale: the factor of q·k; None means 1/sqrt(D).
        causal: hide future keys; the last query stands at the last key.
        window_size: (left, right) keys around the query's own; -1 means no bound.
        softcap: c > 0 turns each score into c · tanh(score / c).
        alibi_slopes: float32 (H,) or (B, H); -slope · |i + Sk - Sq - j| is added to the scores.
        deterministic: True makes the backward give the same bits in every run.
        return_attn_probs: True returns (out, softmax_lse, None).

    Returns:
        out (B, Sq, H, D); softmax_lse (B, H, Sq).
    """


@front(NAMES, _attend)
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """flash_attn_func with qkv (B, S, 3, H, D)."""


@front(NAMES, _attend)
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """flash_attn_func with q (B, Sq, H, D) and kv (B, Sk, 2, Hkv, D)."""


@front(NAMES, _attend)
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """flash_attn_func for packed sequences: q (Tq, H, D), k and v (Tk, Hkv, D), sequence b at [cu_seqlens[b], cu_seqlens[b + 1]).

    With block_table, int32 (B, n), k and v are pools of pages, (pages, page, Hkv, D), and a row of the table names those of a sequence.
    cu_seqlens_k then gives the number of keys of each sequence, max_seqlen_k has no effect, and there are no gradients.

    Returns:
        out (Tq, H, D); softmax_lse (H, Tq).
    """


@front(NAMES, _attend)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """flash_attn_varlen_func with qkv (T, 3, H, D)."""


@front(NAMES, _attend)
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """flash_attn_varlen_func with q (Tq, H, D) and kv (Tk, 2, Hkv, D)."""


@writes("k_cache", "v_cache", beside="k")
@front(NAMES, attend_to_cache)
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None, rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None,
    num_splits: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Writes k and v, if given, after the filled part of a cache, and attends with q (B, Sq, H, D) to the part filled then.

    As in flash-attn there are no gradients: the output does not require a gradient, even if q does.

    Args:
        k_cache, v_cache: (Bc, Sc, Hkv, D). Bc = B, unless cache_batch_idx says which row serves which query. With block_table pools of
            pages, (pages, page, Hkv, D).
        k, v: (B, Snew, Hkv, D), written into the cache at cache_seqlens, in place.
        rotary_cos, rotary_sin: floating point (length, R), up to the last token's position: the first 2R columns of k are rotated by it,
            those of q as well: with causal or a window by cache_seqlens + i, else all by cache_seqlens.
        cache_seqlens: how much of the cache is filled: an integer, int32 (B,), or None for all of it, which leaves no room for k and v.
        cache_batch_idx: int (B,): which row of the cache each sequence has. The cache is read in place; autocast copies what it casts, and
            then the named rows are copied first.
        cache_leftpad: int32 (B,): where in the cache each sequence begins.
        block_table: int32 (B, n): the pages of each sequence; Sc is n · page. With it cache_batch_idx and cache_leftpad are refused.
        num_splits: an integer; it has no effect.

    Numbers in host memory are checked. Those in device memory, and all under torch.compile, are not read: a length out of bounds is
    replaced by the nearest one that fits, and a sequence whose row of the cache does not exist is left out: nothing is written, and
    it sees no key.

    Returns:
        out (B, Sq, H, D), or (out, softmax_lse (B, H, Sq)).
    """
