"""flash_attn_with_kvcache over a cache that is not paged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strobe._framework import is_whole, kind
from strobe._prepare import Wrong, flag, is_integer, refusal

from ._call import NAMES, Window, attend, bounds, refuse_pages
from ._rotary import check_tables, rotate
from ._words import in_words_of, names_checked, tensor_or_refusal


@names_checked(NAMES)
@torch.no_grad()
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
    """Attention of q (B, Sq, H, D) over the filled part of a cache, after k and v, if given, are written behind it, in place.

    No gradients, as in flash-attn: the output does not require grad, whatever q does.

    Args:
        k_cache, v_cache: (Bc, Sc, Hkv, D); Bc = B unless cache_batch_idx says which row serves which query.
        k, v: (B, Snew, Hkv, D), written at cache_seqlens.
        rotary_cos, rotary_sin: (length, R), up to the last token's position: the first 2R columns of k are rotated by their position,
            those of q as well: with causal or a window by cache_seqlens + i, else all by cache_seqlens.
        cache_seqlens: how much of the cache is filled: an integer, int32 (B,), or None for all of it (then without k and v).
        cache_batch_idx: int (B,). The rows that it names are copied before the attention (the update is in place).
        cache_leftpad: int32 (B,): where in the cache each sequence begins.
        block_table: refused.
        num_splits: an integer, without effect.

    Returns:
        out (B, Sq, H, D), or (out, softmax_lse (B, H, Sq)).
    """
    refuse_pages(block_table)
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    maybe = {"k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_batch_idx": cache_batch_idx}
    maybe |= {"cache_leftpad": cache_leftpad, "alibi_slopes": alibi_slopes}
    tensors |= {name: x for name, x in maybe.items() if x is not None}
    wrong: Wrong = [x for x in map(tensor_or_refusal, tensors, tensors.values()) if isinstance(x, Exception)]
    if not (cache_seqlens is None or isinstance(cache_seqlens, Tensor) or is_whole(cache_seqlens)):
        wrong.append(TypeError(f"cache_seqlens: {kind(cache_seqlens)}; accepted is an integer, or a torch.Tensor, int32 (B,)"))
    for name, x in (("causal", causal), ("rotary_interleaved", rotary_interleaved), ("return_softmax_lse", return_softmax_lse)):
        flag(wrong, name, x)
    is_integer(wrong, "num_splits", num_splits, 0, 2**31 - 1)
    window = bounds(window_size)
    if isinstance(window, Exception):
        wrong.append(window)
    for a, b in (("k", "v"), ("rotary_cos", "rotary_sin")):
        if (maybe[a] is None) != (maybe[b] is None):
            absent, there = (a, b) if maybe[a] is None else (b, a)
            wrong.append(ValueError(f"{absent}: None beside {there}; accepted are both or neither"))
    if rotary_cos is not None and k is None:
        wrong.append(ValueError("k: None beside rotary_cos; accepted are k and v, new keys to be turned, or no rotary_cos"))
    if wrong:
        raise refusal(wrong)
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens: None beside k and v; accepted is where they go")
    _check_shapes(
        {"q": q, "k_cache": k_cache, "v_cache": v_cache}, {} if k is None or v is None else {"k": k, "v": v}, cache_batch_idx is not None
    )
    batch, queries = q.shape[:2]
    rows_of_cache, length = k_cache.shape[:2]
    new = 0 if k is None else k.shape[1]
    filled = length if cache_seqlens is None else cache_seqlens
    most, why = length - new, f"a cache of {length} less {new} new keys"
    if isinstance(filled, Tensor):
        _check_integers("cache_seqlens", filled, batch, most, why)
    elif not 0 <= filled <= most:
        raise ValueError(f"cache_seqlens: {filled}; accepted are 0 to {most}, {why}")
    if cache_batch_idx is not None:
        _check_integers("cache_batch_idx", cache_batch_idx, batch, rows_of_cache - 1, f"a cache of {rows_of_cache} rows")
    if cache_leftpad is not None:
        _check_integers("cache_leftpad", cache_leftpad, batch, filled + new, "where the sequence ends")

    start = torch.as_tensor(filled, device=q.device).long().expand(batch)
    if rotary_cos is not None and rotary_sin is not None and k is not None:
        from_each = causal or window is not None
        check_tables(rotary_cos, rotary_sin, q.shape[-1], _furthest(filled) + max(new, queries if from_each else 1))
        q = rotate(q, rotary_cos, rotary_sin, _positions(start, queries if from_each else 1), rotary_interleaved)
        k = rotate(k, rotary_cos, rotary_sin, _positions(start, new), rotary_interleaved)
    if k is not None and v is not None:
        rows = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx.long()
        places = (rows[:, None], _positions(start, new))
        k_cache[places], v_cache[places] = k, v
    if cache_batch_idx is not None:
        k_cache, v_cache = k_cache[cache_batch_idx.long()], v_cache[cache_batch_idx.long()]

    options: dict[str, Any] = {
        "dropout_p": 0.0,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": False,
        "return_attn_probs": True,
    }
    with in_words_of({"k": "k_cache", "v": "v_cache"}):
        if not isinstance(filled, Tensor) and cache_leftpad is None:
            out, lse, _ = attend(q, k_cache[:, : filled + new], v_cache[:, : filled + new], **options)
        else:
            out, lse = _ragged(q, k_cache, v_cache, start + new, cache_leftpad, options)
    return (out, lse) if return_softmax_lse else out


def _check_shapes(given: dict[str, Tensor], fresh: dict[str, Tensor], indexed: bool) -> None:
    """Of what has to fit before anything is written. fresh: k and v, if they are given; indexed: by cache_batch_idx."""
    for name, x in (given | fresh).items():
        if x.dim() != 4:
            raise ValueError(f"{name}: shape {tuple(x.shape)}; accepted is (batches, tokens, heads, head dimension)")
    q, k_cache, v_cache = given.values()
    batch, (rows, length, heads, _) = q.shape[0], k_cache.shape
    accepted = {
        "k_cache": (rows if indexed else batch, length, heads, q.shape[3]),
        "v_cache": (rows if indexed else batch, length, heads, v_cache.shape[3]),
    }
    if fresh:
        tokens = fresh["k"].shape[1]
        accepted |= {"k": (batch, tokens, heads, q.shape[3]), "v": (batch, tokens, heads, v_cache.shape[3])}
    for name, shape in accepted.items():
        if (found := (given | fresh)[name].shape) != shape:
            raise ValueError(f"{name}: shape {tuple(found)}; accepted is {shape}")
    for name, x in fresh.items():
        if x.dtype != (dtype := given[f"{name}_cache"].dtype):
            raise ValueError(f"{name}: dtype {x.dtype}; accepted is {dtype}, as {name}_cache has")


def _check_integers(name: str, x: Tensor, batch: int, most: int | Tensor, why: str) -> None:
    """One for each of q's batches, from 0 to `most`. Not looked at: what lies in device memory, for that would wait for the GPU; and what
    torch.compile traces, for it would break the graph."""
    if x.shape != (batch,):
        raise ValueError(f"{name}: shape {tuple(x.shape)}; accepted is ({batch},), as q has batches")
    if x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: dtype {x.dtype}; accepted is torch.int32")
    if x.is_cpu and not torch.compiler.is_compiling():
        for b, (value, bound) in enumerate(zip(x.tolist(), torch.as_tensor(most).expand(batch).tolist(), strict=True)):
            if not 0 <= value <= bound:
                raise ValueError(f"{name}: {value} at [{b}]; accepted are 0 to {bound}, {why}")


def _furthest(filled: int | Tensor) -> int:
    """The largest of the lengths; 0 where nobody looks at them, as in _check_integers()."""
    if not isinstance(filled, Tensor):
        return filled
    return max(filled.tolist(), default=0) if filled.is_cpu and not torch.compiler.is_compiling() else 0


def _positions(start: Tensor, count: int) -> Tensor:
    """(B, count)"""
    return start[:, None] + torch.arange(count, device=start.device)


def _ragged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, end: Tensor, leftpad: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Sequences of various lengths in rows of one length, read in place: each row of the cache is three packed sequences, what lies before
    the keys (no queries), the keys (all queries), what lies behind them (no queries)."""
    batch, queries = q.shape[:2]
    length = k_cache.shape[1]
    begin = torch.zeros_like(end) if leftpad is None else leftpad.long()
    rows = torch.arange(batch, device=q.device) * length
    cu_k = torch.stack([rows, rows + begin, rows + end], 1).flatten()
    cu_k = torch.cat([cu_k, cu_k.new_full((1,), batch * length)]).int()
    cu_q = (torch.arange(batch + 1, device=q.device) * queries).repeat_interleave(3)[1:-1].int()  # 0 0 Sq Sq Sq 2Sq ...
    slopes = options["alibi_slopes"]
    if slopes is not None and slopes.dim() == 2:
        options = {**options, "alibi_slopes": slopes.repeat_interleave(3, 0)}
    packed: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": queries, "max_seqlen_k": length}
    out, lse, _ = attend(q.flatten(0, 1), k_cache.flatten(0, 1), v_cache.flatten(0, 1), **options, **packed)
    return out.view(batch, queries, *out.shape[1:]), lse.view(lse.shape[0], batch, queries).transpose(0, 1)
