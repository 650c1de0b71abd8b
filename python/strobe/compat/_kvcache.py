"""flash_attn_with_kvcache over a cache that is not paged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strobe._checks import Wrong, is_integer, is_whole, refusal
from strobe._kinds import kind

from ._call import NAMES, Window, attend, bounds, refuse_pages
from ._gaps import is_read, parts, within
from ._memory import not_writable
from ._rotary import check_tables, rotate
from ._words import names_checked, python_numbers, switch_or_refusal, tensor_or_refusal

_CACHE = NAMES | {"k": "k_cache", "v": "v_cache"}


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
    """Writes k and v, if given, behind the filled part of a cache, and attends with q (B, Sq, H, D) to what is filled then.

    As in flash-attn there are no gradients: the output does not require a gradient, even if q does.

    Args:
        k_cache, v_cache: (Bc, Sc, Hkv, D). Bc = B, unless cache_batch_idx says which row serves which query.
        k, v: (B, Snew, Hkv, D), written into the cache at cache_seqlens, in place.
        rotary_cos, rotary_sin: (length, R), up to the last token's position: the first 2R columns of k are rotated by their position,
            those of q as well: with causal or a window by cache_seqlens + i, else all by cache_seqlens.
        cache_seqlens: how much of the cache is filled: an integer, int32 (B,), or None for all of it, which leaves no room for k and v.
        cache_batch_idx: int (B,). The rows that it names are copied before the attention (the update is in place).
        cache_leftpad: int32 (B,): where in the cache each sequence begins.
        block_table: refused.
        num_splits: an integer; it has no effect.

    Numbers in host memory are checked. Those in device memory, and all under torch.compile, are not read: a length out of bounds is taken
    for the nearest that fits, and a sequence whose row of the cache does not exist is left out: nothing is written, it sees no key.

    Returns:
        out (B, Sq, H, D), or (out, softmax_lse (B, H, Sq)).
    """
    refuse_pages(block_table)
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    maybe = {"k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_batch_idx": cache_batch_idx}
    maybe |= {"cache_leftpad": cache_leftpad, "alibi_slopes": alibi_slopes}
    if isinstance(cache_seqlens, Tensor):
        maybe["cache_seqlens"] = cache_seqlens
    tensors |= {name: x for name, x in maybe.items() if x is not None}
    wrong: Wrong = [x for x in map(tensor_or_refusal, tensors, tensors.values()) if isinstance(x, Exception)]
    if not (cache_seqlens is None or isinstance(cache_seqlens, Tensor) or is_whole(cache_seqlens)):
        wrong.append(TypeError(f"cache_seqlens: {kind(cache_seqlens)}; accepted is an integer, or a torch.Tensor, int32 (B,)"))
    switches = {"causal": causal, "rotary_interleaved": rotary_interleaved, "return_softmax_lse": return_softmax_lse}
    wrong += [x for x in map(switch_or_refusal, switches, switches.values()) if isinstance(x, Exception)]
    is_integer(wrong, "num_splits", num_splits, 0, 2**31 - 1)
    window_size = python_numbers(window_size)
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
    fresh = {} if k is None or v is None else {"k": k, "v": v}
    wrong = _misplaced(q, {name: x for name, x in (tensors | maybe).items() if isinstance(x, Tensor)})
    wrong += _shapes_against({"q": q, "k_cache": k_cache, "v_cache": v_cache}, fresh, cache_batch_idx is not None)
    if fresh:
        wrong += not_writable({"k_cache": k_cache, "v_cache": v_cache}, {"q": q, **fresh})
    if wrong:
        raise refusal(wrong)
    batch, queries = q.shape[:2]
    rows_of_cache, length = k_cache.shape[:2]
    new = 0 if k is None else k.shape[1]
    filled = length if cache_seqlens is None else cache_seqlens
    most, why = length - new, f"a cache has room for {length} keys" + (f", of which {new} are new" if new else "")
    if isinstance(filled, Tensor):
        filled = within("cache_seqlens", filled, batch, most, why)
    elif not 0 <= filled <= most:
        raise ValueError(f"cache_seqlens: {filled}; accepted are 0 to {most}, {why}")
    rows, exists = None, None  # exists: bool (B,), of a cache_batch_idx that nobody has read
    if cache_batch_idx is not None:
        rows = within("cache_batch_idx", cache_batch_idx, batch, rows_of_cache - 1, f"a cache of {rows_of_cache} rows").long()
        exists = None if is_read(cache_batch_idx) else rows == cache_batch_idx
    if cache_leftpad is not None:
        cache_leftpad = within("cache_leftpad", cache_leftpad, batch, filled + new, "where the sequence ends").to(q.device)

    options: dict[str, Any] = {
        "dropout_p": 0.0,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": False,
        "return_attn_probs": True,
        "names": _CACHE,
    }
    if k is not None and v is not None:
        attend(q[:, :0], k[:, :0], v[:, :0], **options)  # no query: what is wrong with the call is said before anything is written
    start = torch.as_tensor(filled, device=q.device).long().expand(batch)
    if rotary_cos is not None and rotary_sin is not None and k is not None:
        from_each = causal or window is not None
        check_tables(rotary_cos, rotary_sin, q.shape[-1], _furthest(filled) + max(new, queries if from_each else 1))
        q = rotate(q, rotary_cos, rotary_sin, _positions(start, queries if from_each else 1), rotary_interleaved)
        k = rotate(k, rotary_cos, rotary_sin, _positions(start, new), rotary_interleaved)
    if k is not None and v is not None:
        _write((k_cache, v_cache), (k, v), torch.arange(batch, device=q.device) if rows is None else rows, start, exists)
    if rows is not None:
        k_cache, v_cache = k_cache[rows], v_cache[rows]
    end = start + new
    if exists is not None:
        end = end * exists
        cache_leftpad = None if cache_leftpad is None else cache_leftpad * exists

    if not isinstance(filled, Tensor) and cache_leftpad is None and exists is None:
        out, lse, _ = attend(q, k_cache[:, : filled + new], v_cache[:, : filled + new], **options)
    elif cache_leftpad is None:
        out, lse, _ = attend(q, k_cache, v_cache, **options, seqused_k=end.int())
    else:
        out, lse = _behind_padding(q, k_cache, v_cache, cache_leftpad, end, options)
    return (out, lse) if return_softmax_lse else out


def _shapes_against(given: dict[str, Tensor], fresh: dict[str, Tensor], indexed: bool) -> Wrong:
    """What does not fit, of what has to before anything is written. fresh: k and v, if they are given; indexed: by cache_batch_idx."""
    both = given | fresh
    wrong: Wrong = [
        ValueError(f"{name}: shape {tuple(x.shape)}; accepted is (batches, tokens, heads, head dimension)")
        for name, x in both.items()
        if x.dim() != 4
    ]
    if wrong:
        return wrong
    q, k_cache, v_cache = given.values()
    batch, (rows, length, heads, _) = q.shape[0], k_cache.shape
    if indexed and batch and not rows:
        return [ValueError(f"k_cache: shape {tuple(k_cache.shape)}; accepted is one row or more, for cache_batch_idx to name")]
    accepted = {
        "k_cache": (rows if indexed else batch, length, heads, q.shape[3]),
        "v_cache": (rows if indexed else batch, length, heads, v_cache.shape[3]),
    }
    if fresh:
        tokens = fresh["k"].shape[1]
        if tokens > length:
            wrong.append(ValueError(f"k: {tokens} tokens; accepted are up to {length}, as k_cache has"))
        accepted |= {"k": (batch, tokens, heads, q.shape[3]), "v": (batch, tokens, heads, v_cache.shape[3])}
    for name, shape in accepted.items():
        if (found := both[name].shape) != shape:
            wrong.append(ValueError(f"{name}: shape {tuple(found)}; accepted is {shape}"))
    for name, x in fresh.items():
        cache = given[f"{name}_cache"]
        if x.dtype != cache.dtype:
            wrong.append(ValueError(f"{name}: dtype {x.dtype}; accepted is {cache.dtype}, as {name}_cache has"))
    return wrong


def _misplaced(q: Tensor, others: dict[str, Tensor]) -> Wrong:
    """What does not lie where q does. Integers may lie in host memory as well: which rows, and how long."""
    wrong: Wrong = []
    for name, x in others.items():
        in_memory = name.startswith("cache_") and x.is_cpu
        if x.device != q.device and not in_memory:
            wrong.append(ValueError(f"{name}: on device {x.device}; accepted is {q.device}, where q lies"))
    return wrong


def _furthest(filled: int | Tensor) -> int:
    """The largest of the lengths; 0 where nobody looks at them."""
    if not isinstance(filled, Tensor):
        return filled
    return max(filled.tolist(), default=0) if is_read(filled) else 0


def _positions(start: Tensor, count: int) -> Tensor:
    """(B, count)"""
    return start[:, None] + torch.arange(count, device=start.device)


def _write(caches: tuple[Tensor, Tensor], fresh: tuple[Tensor, Tensor], rows: Tensor, start: Tensor, exists: Tensor | None) -> None:
    """The new keys and values, into those rows of the cache, from `start` on; nothing for a sequence whose row does not exist."""
    count = fresh[0].shape[1]
    if exists is not None and len(rows):
        # It writes once more what the first whose row exists writes; where none does, what stands there.
        source = torch.where(exists, torch.arange(len(rows), device=rows.device), exists.int().argmax())
        rows, start = rows[source], start[source]
        fresh = (fresh[0][source], fresh[1][source])
    places = (rows[:, None], _positions(start, count))
    for cache, x in zip(caches, fresh, strict=True):
        cache[places] = x if exists is None else torch.where(exists.any(), x, cache[places])


def _behind_padding(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, begin: Tensor, end: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Sequences that begin and end somewhere in their rows of the cache, read in place."""
    batch, queries = q.shape[:2]
    length = k_cache.shape[1]
    rows = torch.arange(batch + 1, device=q.device)
    cu_k = rows * length
    cu_q, cu_k, slopes = parts(rows * queries, cu_k, cu_k[:-1] + begin.long(), cu_k[:-1] + end, options["alibi_slopes"])
    packed: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": queries, "max_seqlen_k": length}
    options = {**options, "alibi_slopes": slopes}
    out, lse, _ = attend(q.flatten(0, 1), k_cache.flatten(0, 1), v_cache.flatten(0, 1), **options, **packed)
    return out.view(batch, queries, *out.shape[1:]), lse.view(lse.shape[0], batch, queries).transpose(0, 1)
