"""The functions of FlashAttention-3 (Dao-AILab, the folder hopper), whose module is flash_attn_interface. They can take its name:

>>> import sys
>>> import strobe.compat.flash_attn_3
>>> sys.modules["flash_attn_interface"] = strobe.compat.flash_attn_3
>>> from flash_attn_interface import flash_attn_func, flash_attn_with_kvcache

The differences that strobe.compat.flash_attn lists hold here too. There is no dropout and there are no alibi_slopes; functions that return
softmax_lse return (out, softmax_lse). These arguments have no effect: num_splits, pack_gqa, sm_margin and scheduler_metadata; the engine
decides. These are refused: qv, q_descale, k_descale, v_descale.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._checks import refuse
from .._writable import writes
from ._call import NAMES, QKV, Window, attend, parts, some_tokens
from ._kvcache import attend_to_cache
from ._words import front, integer_or_refusal, switch_or_refusal, tensor_or_refusal

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def _attend(given: dict[str, Any]) -> Any:
    refuse(*_of_hopper(given))
    if "qkv" in given:
        return attend(_heads_apart(given), QKV)
    return attend(given if given.get("seqused_q") is None else some_tokens(given))


def _attend_to_cache(given: dict[str, Any]) -> Any:
    return attend_to_cache(given, _of_hopper({**given, "num_splits": 0}))  # attend_to_cache() looks at num_splits


def _of_hopper(given: dict[str, Any]) -> list[Any]:
    """The arguments that strobe.attention() does not have, or the exceptions that say what is wrong with them."""
    found: list[Any] = []
    if given.get("qv") is not None:
        found.append(NotImplementedError("qv: given; accepted is None: pass q and qv, and k and v, as one tensor each, joined by columns"))
    for name in ("q_descale", "k_descale", "v_descale"):
        if given[name] is not None:
            found.append(NotImplementedError(f"{name}: given; accepted is None, for q, k and v of 8 bits are not taken"))
    found += [integer_or_refusal(name, given[name]) for name in ("attention_chunk", "num_splits", "sm_margin") if name in given]
    pack_gqa, metadata, count = map(given.get, ("pack_gqa", "scheduler_metadata", "num_heads_q"))
    found.append(None if pack_gqa is None else switch_or_refusal("pack_gqa", pack_gqa))
    found.append(None if metadata is None else tensor_or_refusal("scheduler_metadata", metadata, "a torch.Tensor, or None"))
    return [*found, None if count is None else integer_or_refusal("num_heads_q", count, 1)]


def _heads_apart(given: dict[str, Any]) -> dict[str, Any]:
    """given, with views of qkv as q, k and v."""
    qkv, count = given["qkv"], given["num_heads_q"]
    if count is None:
        return parts("qkv", given, "(B, S, 3, H, D)")
    refuse(tensor_or_refusal("qkv", qkv, "a torch.Tensor, (B, S, num_heads_q + 2 Hkv, D)"))
    heads = qkv.shape[2] - count if qkv.dim() == 4 else -1
    if heads < 2 or heads % 2:
        raise ValueError(f"qkv: shape {tuple(qkv.shape)}; accepted is (B, S, {count} + 2 Hkv, D), with num_heads_q {count}")
    q, k, v = qkv.split([count, heads // 2, heads // 2], 2)
    return {**given, "q": q, "k": k, "v": v}


@front(NAMES, _attend)
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, qv: None = None, q_descale: None = None,
    k_descale: None = None, v_descale: None = None, window_size: Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of q (B, Sq, H, D) over k and v (B, Sk, Hkv, D); differentiable.

    Args:
        softmax_scale, causal, window_size, softcap, deterministic: as in strobe.compat.flash_attn.flash_attn_func.
        return_attn_probs: True returns (out, softmax_lse).
        attention_chunk: a query sees the keys of its own chunk alone, of as many keys from the first one on; the last query stands at the
            last key. 0: all keys. Causal and windows hide more.
        qv, q_descale, k_descale, v_descale: refused.
        num_splits, pack_gqa, sm_margin: without effect.

    Returns:
        out (B, Sq, H, D); softmax_lse (B, H, Sq).
    """


@front(NAMES, _attend)
def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False, q_descale: None = None, k_descale: None = None,
    v_descale: None = None, window_size: Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False,
    num_heads_q: int | None = None, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """flash_attn_func with qkv (B, S, 3, H, D), or (B, S, num_heads_q + 2 · Hkv, D): the heads of q, then those of k, then those of v."""


@front(NAMES, _attend)
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


@writes("k_cache", "v_cache", beside="k")
@front(NAMES, _attend_to_cache)
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
    """strobe.compat.flash_attn.flash_attn_with_kvcache, whose block_table is called page_table here, and more; there are no alibi_slopes.

    Args:
        v_cache, v: they may have a head dimension Dv of their own.
        cu_seqlens_q: int32 (B + 1,): q is packed, (Tq, H, D), of at most max_seqlen_q queries a sequence.
        cu_seqlens_k_new: int32 (B + 1,): k and v are packed, (Tnew, Hkv, D) and (Tnew, Hkv, Dv).
        rotary_seqlens: int32 (B,): the position from which rotation counts, instead of cache_seqlens.
        scheduler_metadata, num_splits, pack_gqa, sm_margin: without effect.
        attention_chunk: as in flash_attn_func; chunks count from the first key that cache_leftpad leaves.
        qv, q_descale, k_descale, v_descale: refused.

    Numbers that are not read are replaced as there, and tokens without a place in the cache are left out.

    Returns:
        out (B, Sq, H, Dv), or (out, softmax_lse (B, H, Sq)); packed (Tq, H, Dv) and (H, Tq).
    """
