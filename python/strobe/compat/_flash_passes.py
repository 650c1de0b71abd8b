"""Forward and backward without autograd, as flash-attn has them for callers that split the keys of one softmax among several calls, or
devices: ring attention, context parallelism. They merge the parts by their softmax_lse, and pass the merged out and softmax_lse to each
part's backward."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from strobe import Gradients, attention, attention_backward
from strobe._checks import Wrong, is_integer, refusal
from strobe._messages import kind
from strobe.arrays.torch import TORCH

from .._tensor_checks import unfit_tensors
from .._writable import not_writable, writes
from ._call import NAMES, attend, refuse_pages, sequences, translated
from ._gaps import parts, within
from ._words import in_words_of, names_checked, switch_or_refusal

_NAMES = NAMES | {"rng": "rng_state", "lse": "softmax_lse"}


@names_checked(_NAMES)
@torch.no_grad()
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of q (B, Sq, H, D) over k and v (B, Sk, Hkv, D), as flash_attn_func; not differentiable.

    Args:
        window_size_left, window_size_right: -1: no bound.
        return_softmax: without effect.

    Returns:
        out (B, Sq, H, D); softmax_lse (B, H, Sq), -inf for a query that sees no key; an empty tensor, because the probabilities are never
        made; rng_state, int64 (2,): identifies the dropout mask for the backward. Zeros without dropout.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    return _forward(q, k, v, options, return_softmax)


@names_checked(_NAMES)
@torch.no_grad()
def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """_flash_attn_forward for packed sequences: q (Tq, H, D), k and v (Tk, Hkv, D).

    Args:
        block_table: refused.
        seqused_k, leftpad_k: int32 (B,): of each sequence's keys only those from leftpad_k up to before seqused_k count; None: all.
            leftpad_k is refused with dropout.
        zero_tensors, num_splits: without effect.

    Returns:
        out (Tq, H, D); softmax_lse (H, Tq); the other two as in _flash_attn_forward.
    """
    refuse_pages(block_table)
    wrong: Wrong = [x for x in (switch_or_refusal("zero_tensors", zero_tensors),) if isinstance(x, Exception)]
    is_integer(wrong, "num_splits", num_splits, 0, 2**31 - 1)
    if wrong:
        raise refusal(wrong)
    if leftpad_k is not None:
        if dropout_p:
            raise ValueError(f"dropout_p: {dropout_p!r} beside leftpad_k; accepted is 0")
        cu_seqlens_q, cu_seqlens_k, alibi_slopes = _without_gaps(cu_seqlens_q, cu_seqlens_k, leftpad_k, seqused_k, alibi_slopes)
        seqused_k = None
    options = _options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    packed = sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _forward(q, k, v, options, return_softmax, **packed, seqused_k=seqused_k)


@names_checked(_NAMES)
@writes("dq", "dk", "dv")
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """The gradients of _flash_attn_forward, written into dq, dk and dv.

    Args:
        out, softmax_lse: of these keys, or of a larger set that includes them; then the gradients are those of the larger set.
        dq, dk, dv: of q's, k's and v's shape and dtype, any strides; one that is None is not written.
        rng_state: that of the forward; needed if dropout_p > 0.

    Returns:
        softmax_d, (B, H, Sq), float32 (float64 with float64): the sums of dout · out over the head dimension.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic)
    return _backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, options, rng_state)


@names_checked(_NAMES)
@writes("dq", "dk", "dv")
def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """_flash_attn_backward for packed sequences. zero_tensors: without effect.

    Returns:
        softmax_d, (H, Tq).
    """
    if isinstance(wrong := switch_or_refusal("zero_tensors", zero_tensors), Exception):
        raise wrong
    options = _options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic)
    packed = sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, options, rng_state, **packed)


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool = False,
) -> dict[str, Any]:
    """The arguments of translated()."""
    return {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": (left, right),
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
    }


def _without_gaps(
    cu_q: Tensor, cu_k: Tensor, leftpad: Tensor, used: Tensor | None, slopes: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """cu_seqlens of both sides and alibi_slopes for the keys that count."""
    given = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "leftpad_k": leftpad, "seqused_k": used, "alibi_slopes": slopes}
    given = {name: x for name, x in given.items() if x is not None or name.startswith("cu_seqlens")}
    wrong = unfit_tensors(given)
    if not wrong:
        lists = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        wrong = [ValueError(f"{name}: dtype {kind(x.dtype)}; accepted is int32") for name, x in lists.items() if x.dtype != torch.int32]
    if wrong:
        raise refusal(wrong)
    if cu_q.dim() != 1 or not len(cu_q) or cu_k.shape != cu_q.shape:
        raise ValueError(f"cu_seqlens_q, cu_seqlens_k: shapes {tuple(cu_q.shape)}, {tuple(cu_k.shape)}; accepted is (B + 1,) twice")
    batch = len(cu_q) - 1
    lengths = cu_k.diff()
    end = lengths if used is None else within("seqused_k", used, batch, lengths, "the sequence's length")
    begin = within("leftpad_k", leftpad, batch, end, "where the sequence ends")
    return parts(cu_q, cu_k, cu_k[:-1] + begin, cu_k[:-1] + end, slopes)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], return_softmax: bool, **packed: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if isinstance(wrong := switch_or_refusal("return_softmax", return_softmax), Exception):
        raise wrong
    rng = TORCH.drawn_rng(q) if options["dropout_p"] and isinstance(q, Tensor) else None
    with _without_autocast(q):
        out, lse, _ = attend(q, k, v, **options, return_attn_probs=True, names=_NAMES, **packed, rng=rng)
    return out, lse, q.new_empty(0), q.new_zeros(2, dtype=torch.int64) if rng is None else rng


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    options: dict[str, Any],
    rng_state: Tensor | None,
    **packed: Any,
) -> Tensor:
    known = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": softmax_lse}
    wrong = unfit_tensors(known)
    if not wrong:
        wrong = _misfits(known, {"dq": (dq, q), "dk": (dk, k), "dv": (dv, v)}, "cu_seqlens_q" in packed)
    if wrong:
        raise refusal(wrong)
    given = translated(_NAMES, **options, **packed, rng=rng_state)
    with in_words_of(_NAMES, given), _without_autocast(q):
        found = _backward_of_a_part(dout, q, k, v, out, softmax_lse, **given)
    softmax_d = _by_head(_row_sums(dout, out))  # before the first write: dq may share memory with dout or out
    for x, gradient in zip((dq, dk, dv), found, strict=False):
        if x is not None:
            x.copy_(gradient)
    return softmax_d


def _misfits(known: dict[str, Tensor], into: dict[str, tuple[Tensor | None, Tensor]], is_packed: bool) -> Wrong:
    """The arguments that do not fit q, k and v, or must fit before the first write."""
    dout, q, k, v, out, lse = known.values()
    rank = 3 if is_packed else 4
    wrong: Wrong = []
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != rank:
            accepted = "(tokens, heads, head dimension)" if is_packed else "(batches, tokens, heads, head dimension)"
            wrong.append(ValueError(f"{name}: shape {tuple(x.shape)}; accepted is {accepted}"))
    if wrong:
        return wrong
    result = (*q.shape[:-1], v.shape[-1])
    sum_dtype = torch.promote_types(q.dtype, torch.float32)
    needed: dict[str, tuple[Any, ...]] = {
        "dout": (dout, result, q),
        "out": (out, result, q),
        "softmax_lse": (lse, (*q.shape[:-3], q.shape[-2], q.shape[-3]), q.new_empty(0, dtype=sum_dtype)),
    }
    needed |= {name: (x, like.shape, like) for name, (x, like) in into.items() if x is not None}
    for name, (x, shape, like) in needed.items():
        if not isinstance(x, Tensor):
            wrong.append(TypeError(f"{name}: {kind(x)}; accepted is a torch.Tensor, or None"))
        elif x.shape != shape or x.dtype != like.dtype or x.device != like.device:
            found = f"shape {tuple(x.shape)}, {x.dtype}, on {x.device}"
            wrong.append(ValueError(f"{name}: {found}; accepted is {tuple(shape)}, {like.dtype}, on {like.device}"))
    written = {name: x for name, (x, _) in into.items() if isinstance(x, Tensor)}
    wrong += unfit_tensors(written)
    return wrong or not_writable(written)


def _without_autocast(q: Tensor) -> AbstractContextManager[Any]:
    """Autocast casts nothing here: the backward must see what the forward saw."""
    if isinstance(q, Tensor) and not q.is_meta and torch.is_autocast_enabled(q.device.type):
        return torch.autocast(q.device.type, enabled=False)
    return nullcontext()


def _backward_of_a_part(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **given: Any) -> Gradients:
    """The gradients of these keys, where out and lse may be those of more. (attention_backward() takes the LSE for that of these keys: it
    may sum P of a row once more and divide by the sum, to remove the LSE's rounding.) With out' and lse' of these keys alone and
    w = exp(lse' - lse), the weights of the whole are P = w P', and

        dV = Pᵀ dO = P'ᵀ (w dO)
        dS = P (dP - D) = P' (dP' - D' + dLSE')    where dO' = w dO, D = rowsum(dO · out) and dLSE' = w rowsum(dO · (out' - out)).
    """
    own, own_lse = attention(q, k, v, return_lse=True, **given)
    weight = torch.where(own_lse == -math.inf, 0.0, torch.exp(own_lse - lse))  # the row sees none of these keys
    # All weights may be so small that dO' leaves float16: the largest is scaled to a number from 1 to 2, and the gradients are scaled back.
    unit = torch.exp2(weight.amax().clamp_min(1e-30).log2().floor()) if weight.numel() else weight.new_ones(())
    weight = weight / unit
    scaled = (dout * _by_head(weight)[..., None]).to(dout.dtype)
    dlse = weight * _by_head(_row_sums(dout, own) - _row_sums(dout, out))
    found = attention_backward(scaled, q, k, v, own, own_lse, dlse=dlse, **given)
    return found._replace(dq=found.dq * unit.to(q.dtype), dk=found.dk * unit.to(q.dtype), dv=found.dv * unit.to(q.dtype))


def _row_sums(dout: Tensor, out: Tensor) -> Tensor:
    """rowsum(dout · out), (B, S, H) or (T, H)"""
    sum_dtype = torch.promote_types(out.dtype, torch.float32)
    return (dout.to(sum_dtype) * out.to(sum_dtype)).sum(-1)


def _by_head(x: Tensor) -> Tensor:
    """(B, S, H) as (B, H, S), (T, H) as (H, T), and back."""
    return x.transpose(-1, -2).contiguous()
