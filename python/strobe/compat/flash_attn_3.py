"""The functions of FlashAttention-3 (Dao-AILab, the folder hopper), whose module is flash_attn_interface. They can take its name:

>>> import sys
>>> import strobe.compat.flash_attn_3
>>> sys.modules["flash_attn_interface"] = strobe.compat.flash_attn_3
>>> from flash_attn_interface import flash_attn_func, flash_attn_with_kvcache

The differences that strobe.compat.flash_attn lists hold here too. There is no dropout and there are no alibi_slopes; functions that return
softmax_lse return (out, softmax_lse). These arguments have no effect: num_splits, pack_gqa, sm_margin and scheduler_metadata; the engine
decides. Beside q, k and v of float8_e4m3fn out is bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import Wrong, refuse
from .._messages import kind, shown
from .._tensor_checks import misplaced, unfit_tensors
from .._writable import not_writable, writes
from ._call import NAMES, QKV, Window, attend, parts, some_tokens
from ._eight_bits import descale_refusals, in_words_of_attention, is_fp8
from ._kvcache import attend_to_cache, joined
from ._words import front, integer_or_refusal, switch_or_refusal, tensor_or_refusal

__all__ = [
    "flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]  # fmt: skip


def _attend(given: dict[str, Any]) -> Any:
    refuse(*_of_hopper(given))
    names = NAMES
    if "qkv" in given:
        names, given = QKV, _heads_apart(given)
    if is_fp8(given):
        given = in_words_of_attention(given)
    elif given.get("qv") is not None:
        given = _joined(given)
    return attend(given if given.get("seqused_q") is None else some_tokens(given), names)


def _joined(given: dict[str, Any]) -> dict[str, Any]:
    """given, with qv and q, and v and k, joined by columns."""
    tensors = {name: given[name] for name in ("q", "k", "v", "qv")}
    refuse(*(unfit_tensors(tensors) or misplaced(tensors)))
    q, k, v, qv = tensors.values()
    wanted = (*q.shape[:-1], v.shape[-1] if v.dim() else 0)
    if qv.shape != wanted or qv.dtype != q.dtype:
        raise ValueError(f"qv: {qv.dtype} of shape {tuple(qv.shape)}; accepted is {q.dtype} of shape {wanted}, as q and v have")
    if k.dim() != v.dim() or k.dtype != v.dtype or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"v: {v.dtype} of shape {tuple(v.shape)}; accepted is {k.dtype} of shape {(*k.shape[:-1], 'Dv')}, as k has")
    return {**given, "q": joined(qv, q), "k": joined(v, k)}


def _attend_to_cache(given: dict[str, Any]) -> Any:
    return attend_to_cache(given, _of_hopper({**given, "num_splits": 0}))  # attend_to_cache() looks at num_splits


def _of_hopper(given: dict[str, Any]) -> list[Any]:
    """The arguments that strobe.attention() does not have, or the exceptions that say what is wrong with them."""
    found = descale_refusals(given)
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
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None, window_size: Window = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of q (B, Sq, H, D) over k and v (B, Sk, Hkv, D); differentiable.

    Args:
        softmax_scale, causal, window_size, softcap, deterministic: as in strobe.compat.flash_attn.flash_attn_func.
        return_attn_probs: True returns (out, softmax_lse).
        attention_chunk: a query sees the keys of its own chunk alone, of as many keys from the first one on; the last query stands at the
            last key. 0: all keys. Causal and windows hide more.
        qv: (B, Sq, H, Dv): qv · v is added to q · k before the scale, whose default is 1/sqrt(D + Dv). k and v are copied, and so are q and
            qv, unless they are neighbouring columns of one tensor, v and qv the first ones. D + Dv is up to 576. It is differentiable.
        q_descale, k_descale, v_descale: float32 (B, Hkv), for q, k and v of float8_e4m3fn: each number x of sequence b and key head h, and
            of the query heads that read it, stands for x times descale[b, h]; None: for x. On a GPU they are strobe.attention's scales; on
            a CPU the tensors are dequantised to bfloat16 in memory. out is bfloat16, and the backward is refused. With other dtypes
            descales have no effect.
        num_splits, pack_gqa, sm_margin: without effect.

    Returns:
        out (B, Sq, H, Dv); softmax_lse (B, H, Sq).
    """


@front(NAMES, _attend)
def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    deterministic: bool = False, num_heads_q: int | None = None, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """flash_attn_func with qkv (B, S, 3, H, D), or (B, S, num_heads_q + 2 · Hkv, D): the heads of q, then those of k, then those of v."""


@front(NAMES, _attend)
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
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
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None, qv: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """strobe.compat.flash_attn.flash_attn_with_kvcache, whose block_table is called page_table here, and more; there are no alibi_slopes.

    Args:
        v_cache, v: they may have a head dimension Dv of their own.
        cu_seqlens_q: int32 (B + 1,): q is packed, (Tq, H, D), of at most max_seqlen_q queries a sequence.
        cu_seqlens_k_new: int32 (B + 1,): k and v are packed, (Tnew, Hkv, D) and (Tnew, Hkv, Dv).
        rotary_seqlens: int32 (B,): the position from which rotation counts, instead of cache_seqlens. Without tables it has no effect.
        scheduler_metadata, num_splits, pack_gqa, sm_margin: without effect.
        attention_chunk: as in flash_attn_func; chunks count from the first key that cache_leftpad leaves.
        qv: as in flash_attn_func, packed if q is.
        q_descale, k_descale, v_descale: as in flash_attn_func. A cache of float8_e4m3fn, in pages too, is read in place, and k and v are
            written into it as they are, float8_e4m3fn, after rotation.
        page_table: int32 (B, n). With cache_batch_idx it has a row for each row of the cache, of which cache_batch_idx names those of the
            sequences; cache_leftpad counts keys of the sequence.

    Numbers that are not read are replaced as there, and tokens without a place in the cache are left out.

    Returns:
        out (B, Sq, H, Dv), or (out, softmax_lse (B, H, Sq)); packed (Tq, H, Dv) and (H, Tq).
    """


def _combine(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    out_partial, lse_partial, out, dtype = (given[name] for name in ("out_partial", "lse_partial", "out", "out_dtype"))
    tensors = {name: given[name] for name in ("out_partial", "lse_partial", "out") if name != "out" or out is not None}
    refuse(*(unfit_tensors(tensors) or misplaced(tensors)))
    wrong: Wrong = []
    if out_partial.dim() not in (4, 5) or not len(out_partial) or not out_partial.is_floating_point():
        accepted = "floating point (splits, B, S, H, D), or packed (splits, T, H, D), with one split or more"
        raise ValueError(f"out_partial: {out_partial.dtype} of shape {tuple(out_partial.shape)}; accepted is {accepted}")
    if lse_partial.shape != out_partial.shape[:-1] or lse_partial.dtype not in (torch.float32, torch.float64):
        accepted = f"float32 or float64 {tuple(out_partial.shape[:-1])}, as out_partial has"
        wrong.append(ValueError(f"lse_partial: {lse_partial.dtype} of shape {tuple(lse_partial.shape)}; accepted is {accepted}"))
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        wrong.append(TypeError(f"out_dtype: {shown(dtype)}; accepted is a floating-point torch.dtype, or None"))
        dtype = None
    dtype = out_partial.dtype if dtype is None else dtype
    if out is not None:
        wrong += not_writable({"out": out}, {"out_partial": out_partial, "lse_partial": lse_partial})
        if out.shape != out_partial.shape[1:] or (given["out_dtype"] is not None and out.dtype != dtype):
            of = "any floating-point dtype" if given["out_dtype"] is None else str(dtype)
            wrong.append(ValueError(f"out: {out.dtype} of shape {tuple(out.shape)}; accepted is {of} {tuple(out_partial.shape[1:])}"))
    refuse(*wrong)
    # One split at a time, because a product of all of them would be as large as out_partial.
    lse = torch.logsumexp(lse_partial, 0)
    found = torch.zeros(out_partial.shape[1:], dtype=torch.promote_types(out_partial.dtype, lse.dtype), device=lse.device)
    for part, own in zip(out_partial, lse_partial, strict=True):
        without_keys = own == -torch.inf
        weight = torch.exp(own - lse).masked_fill(without_keys, 0)[..., None]
        found += part.to(found.dtype).masked_fill(without_keys[..., None], 0).mul_(weight)
    return (found.to(dtype) if out is None else out.copy_(found)), lse


@writes("out")
@front(NAMES, _combine)
def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Combines attentions over disjoint parts of the keys; without gradients. (strobe.merge has gradients, for two parts.)

    Args:
        out_partial: (splits, B, S, H, D), or packed (splits, T, H, D); floating point, any strides.
        lse_partial: float32 or float64 (splits, B, S, H), or (splits, T, H). Where it is -inf, a part has no key, and its out is not read.
        out: the tensor to write the result into, (B, S, H, D) or (T, H, D); None: a new one.
        out_dtype: the dtype of a new one; None: that of out_partial.

    Returns:
        out; lse (B, S, H) or (T, H), -inf where no part has a key.
    """


def _no_metadata(given: dict[str, Any]) -> Tensor:
    counts = ("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim", "max_seqlen_k_new")
    found: list[Any] = [integer_or_refusal(name, given[name]) for name in (*counts, "attention_chunk", "num_splits", "sm_margin")]
    for name in ("headdim_v", "page_size"):
        found.append(None if given[name] is None else integer_or_refusal(name, given[name], 1))
    found += [switch_or_refusal(name, given[name]) for name in ("causal", "has_softcap")]
    found.append(None if given["pack_gqa"] is None else switch_or_refusal("pack_gqa", given["pack_gqa"]))
    found.append(tensor_or_refusal("cache_seqlens", given["cache_seqlens"], "a torch.Tensor, int32 (B,)"))
    if not isinstance(given["qkv_dtype"], torch.dtype):
        found.append(TypeError(f"qkv_dtype: {kind(given['qkv_dtype'])}; accepted is a torch.dtype"))
    refuse(*found)
    return torch.zeros(1, dtype=torch.int32, device=given["cache_seqlens"].device)


@front(NAMES, _no_metadata)
def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int, cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16, headdim_v: int | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, cache_leftpad: Tensor | None = None, page_size: int | None = None, max_seqlen_k_new: int = 0,
    causal: bool = False, window_size: Window = (-1, -1), attention_chunk: int = 0, has_softcap: bool = False, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    """An int32 tensor for the argument scheduler_metadata, which has no effect: the engine plans its work itself."""
