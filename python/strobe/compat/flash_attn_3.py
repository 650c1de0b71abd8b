"""The functions of FlashAttention-3 (Dao-AILab, the folder hopper), whose module is flash_attn_interface. They can take its name:

>>> import sys
>>> import strobe.compat.flash_attn_3
>>> sys.modules["flash_attn_interface"] = strobe.compat.flash_attn_3
>>> from flash_attn_interface import flash_attn_func, flash_attn_with_kvcache

The differences that strobe.compat.flash_attn lists hold here too. There is no dropout and there are no alibi_slopes; functions that return
softmax_lse return (out, softmax_lse). These arguments have no effect: num_splits, pack_gqa, sm_margin and scheduler_metadata; the engine
decides. These are refused: qv, q_descale, k_descale, v_descale, attention_chunk.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._writable import writes
from ._call import NAMES, QKV, Options, Window, attend, parts, sequences, some_tokens
from ._kvcache import Cache, Rotary, Tokens, attend_to_cache
from ._lengths import integer_or_refusal, refuse
from ._words import names_checked, python_numbers, switch_or_refusal, tensor_or_refusal

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

_CACHE = NAMES | {"k": "k_cache", "v": "v_cache", "page_table": "page_table"}


@names_checked(NAMES)
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, qv: None = None, q_descale: None = None,
    k_descale: None = None, v_descale: None = None, window_size: Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of q (B, Sq, H, D) over k and v (B, Sk, Hkv, D); differentiable.

    Args:
        softmax_scale: the factor of q·k; None means 1/sqrt(D).
        causal: hide future keys; the last query stands at the last key.
        window_size: (left, right) keys around the query's own; -1 means no bound.
        softcap: c > 0 turns each score into c · tanh(score / c).
        deterministic: True makes the backward give the same bits in every run.
        return_attn_probs: True returns (out, softmax_lse).
        qv, q_descale, k_descale, v_descale, attention_chunk: refused.
        num_splits, pack_gqa, sm_margin: without effect.

    Returns:
        out (B, Sq, H, D); softmax_lse (B, H, Sq).
    """
    refuse(*_of_hopper(qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin))
    options = Options(0.0, softmax_scale, causal, window_size, softcap, None, deterministic)
    return attend(q, k, v, options, return_attn_probs)


@names_checked(NAMES)
def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False, q_descale: None = None, k_descale: None = None,
    v_descale: None = None, window_size: Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False,
    num_heads_q: int | None = None, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """flash_attn_func with qkv (B, S, 3, H, D), or (B, S, num_heads_q + 2 · Hkv, D): the heads of q, then those of k, then those of v."""
    count = None if num_heads_q is None else integer_or_refusal("num_heads_q", num_heads_q, 1)
    refuse(*_of_hopper(None, q_descale, k_descale, v_descale, attention_chunk, 1, None, sm_margin), count)
    if num_heads_q is None:
        q, k, v = parts("qkv", qkv, 3, 2, "(B, S, 3, H, D)")
    else:
        refuse(tensor_or_refusal("qkv", qkv, "a torch.Tensor, (B, S, num_heads_q + 2 Hkv, D)"))
        heads = qkv.shape[2] - num_heads_q if qkv.dim() == 4 else -1
        if heads < 2 or heads % 2:
            raise ValueError(f"qkv: shape {tuple(qkv.shape)}; accepted is (B, S, {num_heads_q} + 2 Hkv, D), with num_heads_q {num_heads_q}")
        q, k, v = qkv.split([num_heads_q, heads // 2, heads // 2], 2)
    options = Options(0.0, softmax_scale, causal, window_size, softcap, None, deterministic)
    return attend(q, k, v, options, return_attn_probs, QKV)


@names_checked(NAMES)
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    qv: None = None, q_descale: None = None, k_descale: None = None, v_descale: None = None, window_size: Window = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """flash_attn_func for packed sequences: q (Tq, H, D), k and v (Tk, Hkv, D), sequence b at [cu_seqlens[b], cu_seqlens[b + 1]).

    Args:
        seqused_q, seqused_k: int32 (B,): how many of each sequence's tokens, from its first on, count; None: all. Causal and windows count
            from their ends. A query that does not count has out 0 and softmax_lse -inf. In host memory the numbers are checked; in device
            memory one out of bounds is replaced by the nearest one that fits.

    Returns:
        out (Tq, H, D); softmax_lse (H, Tq).
    """
    refuse(*_of_hopper(qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin))
    if seqused_q is None:
        packed = {**sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), "seqused_k": seqused_k}
    else:
        packed = some_tokens(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, used_q=seqused_q, used_k=seqused_k)
    options = Options(0.0, softmax_scale, causal, window_size, softcap, None, deterministic)
    return attend(q, k, v, options, return_attn_probs, **packed)


@names_checked(NAMES)
@writes("k_cache", "v_cache", beside="k")
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None, qv: None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None, q_descale: None = None, k_descale: None = None, v_descale: None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Writes k and v, if given, after the filled part of a cache, and attends with q (B, Sq, H, D) to the part filled then.

    The output does not require a gradient, even if q does.

    Args:
        k_cache, v_cache: (Bc, Sc, Hkv, D) and (Bc, Sc, Hkv, Dv). Bc = B, unless cache_batch_idx says which row serves which query. With
            page_table pools of pages, (pages, page, Hkv, D) and (pages, page, Hkv, Dv), of any size of a page.
        k, v: (B, Snew, Hkv, D) and (B, Snew, Hkv, Dv), written into the cache at cache_seqlens, in place.
        rotary_cos, rotary_sin: floating point (length, R), up to the last token's position: the first 2R columns of k are rotated by it,
            those of q as well: with causal or a window by their own position, else all by that of the first new key.
        cache_seqlens: how much of the cache is filled: an integer, int32 (B,), or None for all of it, which leaves no room for k and v.
        cache_batch_idx: int (B,): which row of the cache each sequence has. The cache is read in place; autocast copies what it casts, and
            then the named rows are copied first.
        cache_leftpad: int32 (B,): where in the cache each sequence begins.
        page_table: int32 (B, n): the pages of each sequence; Sc is n · page. With it cache_batch_idx and cache_leftpad are refused.
        cu_seqlens_q: int32 (B + 1,): q is packed, (Tq, H, D), of at most max_seqlen_q queries a sequence.
        cu_seqlens_k_new: int32 (B + 1,): k and v are packed, (Tnew, Hkv, D) and (Tnew, Hkv, Dv).
        rotary_seqlens: int32 (B,): the position from which rotation counts, instead of cache_seqlens.
        scheduler_metadata, num_splits, pack_gqa, sm_margin: without effect.
        qv, q_descale, k_descale, v_descale, attention_chunk: refused.

    Numbers in host memory are checked. Those in device memory, and all under torch.compile, are not read: a length out of bounds is
    replaced by the nearest one that fits, and tokens without a place in the cache are left out.

    Returns:
        out (B, Sq, H, D), or (out, softmax_lse (B, H, Sq)); packed (Tq, H, D) and (H, Tq).
    """
    beside = _of_hopper(qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin)
    if scheduler_metadata is not None:
        beside.append(tensor_or_refusal("scheduler_metadata", scheduler_metadata, "a torch.Tensor, or None"))
    new = Tokens(q, k, v, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q)
    cache = Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, page_table)
    rotary = Rotary(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens)
    options = Options(0.0, softmax_scale, causal, python_numbers(window_size), softcap)
    return attend_to_cache(_CACHE, new, cache, rotary, options, return_softmax_lse, beside=beside)


def _of_hopper(
    qv: Any, q_descale: Any, k_descale: Any, v_descale: Any, attention_chunk: Any, num_splits: Any, pack_gqa: Any, sm_margin: Any
) -> list[Any]:
    """The arguments that strobe.attention() does not have, or the exceptions that say what is wrong with them."""
    found: list[Any] = []
    if qv is not None:
        found.append(NotImplementedError("qv: given; accepted is None: pass q and qv, and k and v, as one tensor each, joined by columns"))
    for name, x in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        if x is not None:
            found.append(NotImplementedError(f"{name}: given; accepted is None, for q, k and v of 8 bits are not taken"))
    chunk = integer_or_refusal("attention_chunk", attention_chunk)
    if not isinstance(chunk, Exception) and chunk:
        chunk = NotImplementedError(f"attention_chunk: {chunk}; accepted is 0, no chunks")
    found += [chunk, integer_or_refusal("num_splits", num_splits), integer_or_refusal("sm_margin", sm_margin)]
    return [*found, None if pack_gqa is None else switch_or_refusal("pack_gqa", pack_gqa)]
