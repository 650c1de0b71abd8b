"""The functions that strobe.compat.flash_attn exports, differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._call import KV, NAMES, PACKED_QKV, QKV, Window, attend, parts, refuse_pages, sequences
from ._kvcache import flash_attn_with_kvcache
from ._words import names_checked

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


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

    Returns:
        out (Tq, H, D); softmax_lse (H, Tq).
    """
    refuse_pages(block_table)
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
