"""The functions that strobe.compat.flash_attn exports, differentiable."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._call import KV, NAMES, PACKED_QKV, QKV, Window, attend, parts, sequences
from ._gaps import check_cu_seqlens
from ._kvcache import attend_to_cache
from ._words import names_checked, tensor_or_refusal

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_CACHE = NAMES | {"k": "k_cache", "v": "v_cache", "page_table": "block_table"}


@names_checked(NAMES)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
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
    return attend(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


@names_checked(NAMES)
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func of qkv (B, S, 3, H, D)."""
    q, k, v = parts("qkv", qkv, 3, 2, "(B, S, 3, H, D)")
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return attend(q, k, v, *options, names=QKV)


@names_checked(NAMES)
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func of q (B, Sq, H, D) and kv (B, Sk, 2, Hkv, D)."""
    k, v = parts("kv", kv, 2, 2, "(B, Sk, 2, Hkv, D)")
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return attend(q, k, v, *options, names=KV)


@names_checked(NAMES)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """flash_attn_func of packed sequences: q (Tq, H, D), k and v (Tk, Hkv, D), sequence b at [cu_seqlens[b], cu_seqlens[b + 1]).

    With block_table, int32 (B, n), k and v are pools of pages, (pages, page, Hkv, D), and a row of the table names those of a sequence.
    cu_seqlens_k then says how many keys each has, max_seqlen_k nothing, and there are no gradients.

    Returns:
        out (Tq, H, D); softmax_lse (H, Tq).
    """
    if block_table is not None:
        cu_k = tensor_or_refusal("cu_seqlens_k", cu_seqlens_k, "a torch.Tensor, int32 (B + 1,)")
        if isinstance(cu_k, Exception):
            raise cu_k
        check_cu_seqlens("cu_seqlens_k", cu_k)
        paged: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "page_table": block_table}
        return attend(
            q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
            names=NAMES | {"page_table": "block_table", "seqused_k": "cu_seqlens_k"}, **paged, seqused_k=cu_k.diff().to(cu_k.dtype),
        )  # fmt: skip
    packed = sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attend(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, **packed)


@names_checked(NAMES)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func of qkv (T, 3, H, D)."""
    q, k, v = parts("qkv", qkv, 3, 1, "(T, 3, H, D)")
    packed = sequences(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return attend(q, k, v, *options, names=PACKED_QKV, **packed)


@names_checked(NAMES)
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func of q (Tq, H, D) and kv (Tk, 2, Hkv, D)."""
    k, v = parts("kv", kv, 2, 1, "(Tk, 2, Hkv, D)")
    packed = sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return attend(q, k, v, *options, names=KV, **packed)


@names_checked(NAMES)
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Writes k and v, if given, behind the filled part of a cache, and attends with q (B, Sq, H, D) to what is filled then.

    As in flash-attn there are no gradients: the output does not require a gradient, even if q does.

    Args:
        k_cache, v_cache: (Bc, Sc, Hkv, D). Bc = B, unless cache_batch_idx says which row serves which query. With block_table pools of
            pages, (pages, page, Hkv, D).
        k, v: (B, Snew, Hkv, D), written into the cache at cache_seqlens, in place.
        rotary_cos, rotary_sin: floating point (length, R), up to the last token's position: the first 2R columns of k are rotated by it,
            those of q as well: with causal or a window by cache_seqlens + i, else all by cache_seqlens.
        cache_seqlens: how much of the cache is filled: an integer, int32 (B,), or None for all of it, which leaves no room for k and v.
        cache_batch_idx: int (B,): which row of the cache each sequence has. It is read where it lies; under autocast, which copies what it
            casts, the rows that are named are copied first.
        cache_leftpad: int32 (B,): where in the cache each sequence begins.
        block_table: int32 (B, n): the pages of each sequence; Sc is n · page. Beside it cache_batch_idx and cache_leftpad are refused.
        num_splits: an integer; it has no effect.

    Numbers in host memory are checked. Those in device memory, and all under torch.compile, are not read: a length out of bounds is taken
    for the nearest that fits, and a sequence whose row of the cache does not exist is left out: nothing is written, it sees no key.

    Returns:
        out (B, Sq, H, D), or (out, softmax_lse (B, H, Sq)).
    """
    return attend_to_cache(
        _CACHE, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes, num_splits, return_softmax_lse,
    )  # fmt: skip
