"""flash_attn.flash_attn_interface: the functions that strobe.compat.flash_attn exports, and forward and backward without autograd."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from strobe._checks import Wrong, refuse
from strobe._messages import kind, shown
from strobe._some_keys import backward_of_some_keys, by_head, row_sums
from strobe._tensor_checks import unfit_tensors
from strobe._writable import not_writable, writes
from strobe.arrays.torch import TORCH
from strobe.compat._call import KV, NAMES, PACKED_QKV, QKV, Window, attend, in_pages, parts, some_tokens, translated
from strobe.compat._dropped import signed_probabilities
from strobe.compat._kvcache import attend_to_cache
from strobe.compat._words import called, front, integer_or_refusal, stands_for, switch_or_refusal

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]  # fmt: skip

stands_for(__name__, "strobe.compat.flash_attn.flash_attn_interface")

_PAGES = NAMES | {"page_table": "block_table", "seqused_k": "cu_seqlens_k"}
_PASSES = NAMES | {"rng": "rng_state", "lse": "softmax_lse", "page_table": "block_table"}


USE_TRITON_ROCM = False


def _get_block_size_n(device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """How many keys share a maximum in S_dmask: here all that a query sees."""
    return 2**31 - 1


def _attend(given: dict[str, Any]) -> Any:
    """out, or (out, softmax_lse, S_dmask), where S_dmask is None without dropout: the probabilities are made on demand alone."""
    names: Mapping[str, str] = NAMES
    if "qkv" in given:
        names, shape = (PACKED_QKV, "(T, 3, H, D)") if "cu_seqlens" in given else (QKV, "(B, S, 3, H, D)")
        given = parts("qkv", given, shape)
    elif "kv" in given:
        names, given = KV, parts("kv", given, "(Tk, 2, Hkv, D)" if "cu_seqlens_k" in given else "(B, Sk, 2, Hkv, D)")
    elif given.get("block_table") is not None:
        names, given = _PAGES, in_pages(given, "block_table")
    wants_probabilities, dropout = switch_or_refusal("return_attn_probs", given["return_attn_probs"]), given["dropout_p"]
    if wants_probabilities is True and isinstance(dropout, (int, float)) and dropout > 0 and isinstance(given["q"], Tensor):
        given = {**given, "rng": TORCH.drawn_rng(given["q"])}
    found = attend(given, names)
    if not isinstance(found, tuple):
        return found
    return (*found, signed_probabilities(translated(given, names)) if "rng" in given else None)


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
        return_attn_probs: True returns (out, softmax_lse, None), and with dropout S_dmask in the place of None. It is made by PyTorch's
            operations in memory of its size, for tests, and waits for a GPU.

    Returns:
        out (B, Sq, H, D); softmax_lse (B, H, Sq); S_dmask (B, H, Sq, Sk), in q's dtype: exp(score - the row's largest), negative (-0.0 as
        well) where it was dropped.
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
        out (Tq, H, D); softmax_lse (H, Tq); S_dmask (B, H, max_seqlen_q, max_seqlen_k), 0 outside of the sequences.
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
        block_table: int32 (B, n): the pages of each sequence; Sc is n · page. With cache_batch_idx it has a row for each row of the
            cache that cache_batch_idx can name; cache_leftpad counts keys of the sequence.
        num_splits: an integer; it has no effect.

    Numbers in host memory are checked. Those in device memory, and all under torch.compile, are not read: a length out of bounds is
    replaced by the nearest one that fits, and a sequence whose row of the cache does not exist is left out: nothing is written, and
    it sees no key.

    Returns:
        out (B, Sq, H, D), or (out, softmax_lse (B, H, Sq)).
    """


# Forward and backward without autograd, for callers that split the keys of one softmax among several calls, or devices: ring attention,
# context parallelism. They merge the parts by their softmax_lse, and pass the merged out and softmax_lse to each part's backward.
@torch.no_grad()
def _forward(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = {**given, "window_size": (given["window_size_left"], given["window_size_right"])}
    q, leftpad, table, dropout = given["q"], given.get("leftpad_k"), given.get("block_table"), given["dropout_p"]
    wrong: list[Any] = [switch_or_refusal(name, given[name]) for name in ("zero_tensors", "return_softmax") if name in given]
    wrong.append(integer_or_refusal("num_splits", given.get("num_splits", 0)))
    if leftpad is not None and dropout:
        wrong.append(ValueError(f"dropout_p: {shown(dropout)} beside leftpad_k; accepted is 0"))
    if leftpad is not None and table is not None:
        wrong.append(ValueError("leftpad_k: given beside block_table; accepted is None, for the table says where a sequence lies"))
    refuse(*wrong)
    names = _PASSES if table is None or given["seqused_k"] is not None else {**_PASSES, "seqused_k": "cu_seqlens_k"}
    if table is not None:
        given = in_pages(given, "block_table")
    elif leftpad is not None:
        given = some_tokens(given)
    rng = TORCH.drawn_rng(q) if dropout and isinstance(q, Tensor) else None
    with _without_autocast(q):
        out, lse = attend({**given, "rng": rng}, names)
    return out, lse, q.new_empty(0), q.new_zeros(2, dtype=torch.int64) if rng is None else rng


def _backward(given: dict[str, Any]) -> Tensor:
    refuse(switch_or_refusal("zero_tensors", given.get("zero_tensors", False)))
    known = {name: given[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse")}
    written = {name: given[name] for name in ("dq", "dk", "dv") if given[name] is not None}
    refuse(*(unfit_tensors(known) or _misfits(known, written, "cu_seqlens_q" in given)))
    dout, q, out, lse = given["dout"], given["q"], given["out"], given["softmax_lse"]
    arguments = translated({**given, "window_size": (given["window_size_left"], given["window_size_right"])}, _PASSES)
    with _without_autocast(q):
        found = called(_PASSES, backward_of_some_keys, dout=dout, out=out, lse=lse, **arguments)
    softmax_d = by_head(row_sums(dout, out))  # before the first write: dq may share memory with dout or out
    for name, x in written.items():
        x.copy_(getattr(found, name))
    return softmax_d


@front(_PASSES, _forward)
def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention of q (B, Sq, H, D) over k and v (B, Sk, Hkv, D), as flash_attn_func; not differentiable.

    Args:
        window_size_left, window_size_right: -1: no bound.
        return_softmax: without effect.

    Returns:
        out (B, Sq, H, D); softmax_lse (B, H, Sq), -inf for a query that sees no key; an empty tensor, because the probabilities are never
        made; rng_state, int64 (2,): identifies the dropout mask for the backward. Zeros without dropout.
    """


@front(_PASSES, _forward)
def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float | None, causal: bool, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, return_softmax: bool = False, block_table: Tensor | None = None, leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None, zero_tensors: bool = False, num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """_flash_attn_forward for packed sequences: q (Tq, H, D), k and v (Tk, Hkv, D).

    Args:
        block_table: int32 (B, n): k and v are pools of pages, (pages, page, Hkv, D), and a row of the table names those of a sequence. Its
            keys are as many as seqused_k says, or else cu_seqlens_k; max_seqlen_k has no effect. There is no backward.
        seqused_k, leftpad_k: int32 (B,): of each sequence's keys only those from leftpad_k up to before seqused_k count; None: all.
            leftpad_k is refused with dropout and with block_table.
        zero_tensors, num_splits: without effect.

    Returns:
        out (Tq, H, D); softmax_lse (H, Tq); the other two as in _flash_attn_forward.
    """


@writes("dq", "dk", "dv")
@front(_PASSES, _backward)
def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None, dk: Tensor | None,
    dv: Tensor | None, dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The gradients of _flash_attn_forward, written into dq, dk and dv.

    Args:
        out, softmax_lse: of these keys, or of a larger set that includes them; then the gradients are those of the larger set.
        dq, dk, dv: of q's, k's and v's shape and dtype, any strides; one that is None is not written.
        rng_state: that of the forward; needed if dropout_p > 0.

    Returns:
        softmax_d, (B, H, Sq), float32 (float64 with float64): the sums of dout · out over the head dimension.
    """


@writes("dq", "dk", "dv")
@front(_PASSES, _backward)
def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None, dk: Tensor | None,
    dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float | None, causal: bool, window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
    deterministic: bool, rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    """_flash_attn_backward for packed sequences; keys in pages have none. zero_tensors: without effect.

    Returns:
        softmax_d, (H, Tq).
    """


def _misfits(known: dict[str, Tensor], into: dict[str, Any], is_packed: bool) -> Wrong:
    """The errors of arguments that do not fit q, k and v, found before the first write."""
    q, v = known["q"], known["v"]
    rank, accepted = (3, "(tokens, heads, head dimension)") if is_packed else (4, "(batches, tokens, heads, head dimension)")
    if of_rank := [name for name in "qkv" if known[name].dim() != rank]:
        return [ValueError(f"{name}: shape {tuple(known[name].shape)}; accepted is {accepted}") for name in of_rank]
    row = (*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.promote_types(q.dtype, torch.float32), q.device
    result = (*q.shape[:-1], v.shape[-1]), q.dtype, q.device
    likes = {name: known[name[1:]] for name in into}
    fitting = {"dout": result, "out": result, "softmax_lse": row, **{name: (x.shape, x.dtype, x.device) for name, x in likes.items()}}
    wrong: Wrong = []
    for name, (shape, dtype, device) in fitting.items():
        x = into[name] if name in into else known[name]
        if not isinstance(x, Tensor):
            wrong.append(TypeError(f"{name}: {kind(x)}; accepted is a torch.Tensor, or None"))
        elif (x.shape, x.dtype, x.device) != (shape, dtype, device):
            found = f"shape {tuple(x.shape)}, {x.dtype}, on {x.device}"
            wrong.append(ValueError(f"{name}: {found}; accepted is {tuple(shape)}, {dtype}, on {device}"))
    tensors = {name: x for name, x in into.items() if isinstance(x, Tensor)}
    return wrong + unfit_tensors(tensors) or not_writable(tensors)


def _without_autocast(q: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast casts nothing: the backward must see what the forward saw."""
    if isinstance(q, Tensor) and not q.is_meta and torch.is_autocast_enabled(q.device.type):
        return torch.autocast(q.device.type, enabled=False)
    return nullcontext()
