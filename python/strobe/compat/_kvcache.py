"""Attention to a cache, contiguous or in pages, after new keys and values are written into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from strobe._checks import Wrong, is_integer, is_whole, refusal
from strobe._kinds import kind, shown
from strobe._places import places
from strobe._rotary import check_tables, rotate
from strobe.kv import append

from .._writable import not_writable
from ..arrays.torch import TORCH
from ._call import Window, attend, bounds
from ._gaps import check_cu_seqlens, parts, within
from ._words import in_words_of, python_numbers, switch_or_refusal, tensor_or_refusal


@torch.no_grad()
def attend_to_cache(
    names: Mapping[str, str],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    table: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    rotary_interleaved: bool,
    alibi_slopes: Tensor | None,
    num_splits: int,
    return_softmax_lse: bool,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    beside: Wrong | None = None,
) -> Any:
    """The two libraries' flash_attn_with_kvcache: what their docstrings say.

    names: as in_words_of() takes them; the table is what stands there for page_table. cu_seqlens_q: q is (Tq, H, D), and softmax_lse
    (H, Tq). cu_seqlens_k_new: k and v are (Tnew, Hkv, D). beside: what else is wrong with the call.
    """
    table_name = names["page_table"]
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    maybe = {"k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_batch_idx": cache_batch_idx}
    maybe.update({"cache_leftpad": cache_leftpad, "alibi_slopes": alibi_slopes, table_name: table})  # PyTorch 2.4 does not trace |=
    maybe.update({"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new, "rotary_seqlens": rotary_seqlens})
    if isinstance(cache_seqlens, Tensor):
        maybe["cache_seqlens"] = cache_seqlens
    tensors.update({name: x for name, x in maybe.items() if x is not None})
    wrong: Wrong = [x for x in [tensor_or_refusal(name, x) for name, x in tensors.items()] if isinstance(x, Exception)]
    wrong += beside or []
    if not (cache_seqlens is None or isinstance(cache_seqlens, Tensor) or is_whole(cache_seqlens)):
        wrong.append(TypeError(f"cache_seqlens: {kind(cache_seqlens)}; accepted is an integer, or a torch.Tensor, int32 (B,)"))
    switches = {"causal": causal, "rotary_interleaved": rotary_interleaved, "return_softmax_lse": return_softmax_lse}
    wrong += [x for x in [switch_or_refusal(name, x) for name, x in switches.items()] if isinstance(x, Exception)]
    is_integer(wrong, "num_splits", num_splits, 0, 2**31 - 1)
    window_size = python_numbers(window_size)
    window = bounds(window_size)
    if isinstance(window, Exception):
        wrong.append(window)
    for a, b in (("k", "v"), ("rotary_cos", "rotary_sin")):
        if (maybe[a] is None) != (maybe[b] is None):
            absent, there = (a, b) if maybe[a] is None else (b, a)
            wrong.append(ValueError(f"{absent}: None beside {there}; accepted are both or neither"))
    for name in ("cache_batch_idx", "cache_leftpad"):
        if table is not None and maybe[name] is not None:
            wrong.append(ValueError(f"{name}: given beside {table_name}; accepted is None, for the table says where a sequence lies"))
    for name, of in (("rotary_cos", "k"), ("cu_seqlens_k_new", "k"), ("rotary_seqlens", "rotary_cos")):
        if maybe[name] is not None and maybe[of] is None:
            needed = "k and v, new keys" + (" to be turned" if name == "rotary_cos" else "") if of == "k" else "rotary_cos and rotary_sin"
            wrong.append(ValueError(f"{of}: None beside {name}; accepted are {needed}, or no {name}"))
    if wrong:
        raise refusal(wrong)
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens: None beside k and v; accepted is where they go")
    fresh = {} if k is None or v is None else {"k": k, "v": v}
    wrong = _misplaced(q, {name: x for name, x in {**tensors, **maybe}.items() if isinstance(x, Tensor)})
    if wrong:
        raise refusal(wrong)
    batch = q.shape[0] if cu_seqlens_q is None else check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, "q", q)
    if cu_seqlens_k_new is not None and (found := check_cu_seqlens("cu_seqlens_k_new", cu_seqlens_k_new, "k", fresh["k"])) != batch:
        raise ValueError(f"cu_seqlens_k_new: shape ({found + 1},); accepted is ({batch + 1},), as q has batches")
    packed = {name for name, cu in (("q", cu_seqlens_q), ("k", cu_seqlens_k_new), ("v", cu_seqlens_k_new)) if cu is not None}
    named_table = None if table is None else (table_name, table)
    wrong = _shapes_against(
        {"q": q, "k_cache": k_cache, "v_cache": v_cache}, fresh, batch, packed, cache_batch_idx is not None, named_table
    )
    if fresh:
        wrong += not_writable({"k_cache": k_cache, "v_cache": v_cache}, {"q": q, **fresh})
    if wrong:
        raise refusal(wrong)
    rows_of_cache, length = k_cache.shape[:2]
    if table is not None:
        length *= table.shape[1]
    filled = length if cache_seqlens is None else cache_seqlens
    new: int | Tensor = 0 if k is None else k.shape[1]  # of each sequence
    if cu_seqlens_k_new is not None:
        new = cu_seqlens_k_new.diff()
        filled = torch.as_tensor(filled, device=q.device)  # beside the new ones, wherever these are
        filled = filled if isinstance(cache_seqlens, Tensor) else filled.expand(batch)
    filled = _filled(filled, new, batch, length)
    rows, exists = None, None  # exists: bool (B,), of a cache_batch_idx that nobody has read
    if cache_batch_idx is not None:
        rows = within("cache_batch_idx", cache_batch_idx, batch, rows_of_cache - 1, f"a cache of {rows_of_cache} rows").long()
        exists = None if TORCH.is_readable(cache_batch_idx) else rows == cache_batch_idx
        if fresh and exists is None and len(set(numbers := rows.tolist())) < batch:
            raise ValueError(f"cache_batch_idx: {shown(numbers)} beside k and v; accepted are rows that differ from one another")
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
        "names": names,
    }
    if fresh:  # no query, or no key: what is wrong with the call is said before anything is written
        of_none, *no_keys = [x.new_empty(batch, 0, *x.shape[-2:]) for x in (q, *fresh.values())]
        attend(of_none, no_keys[0], no_keys[1], **options)
        if cu_seqlens_q is not None:
            packed_q: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
            none: dict[str, Any] = {"cu_seqlens_k": torch.zeros_like(cu_seqlens_q), "max_seqlen_k": 0}
            attend(q, no_keys[0].flatten(0, 1), no_keys[1].flatten(0, 1), **options, **packed_q, **none)
    if table is not None:
        options["page_table"] = table
    start = torch.as_tensor(filled, device=q.device).long().expand(batch)
    end = start + new
    if fresh and table is not None:  # likewise of the pages
        attend(q.new_empty(batch, 0, *q.shape[-2:]), k_cache, v_cache, **options, seqused_k=end.int())
    if rotary_cos is not None and rotary_sin is not None and k is not None:
        from_each = causal or window is not None
        first: int | Tensor = filled
        if rotary_seqlens is not None:
            first = within("rotary_seqlens", rotary_seqlens, batch, len(rotary_cos), "the length of rotary_cos")
        queries = (q.shape[1] if cu_seqlens_q is None else cu_seqlens_q.diff()) if from_each else 1
        check_tables(rotary_cos, rotary_sin, q.shape[-1], max(_furthest(first, new), _furthest(first, queries)))
        turn = torch.as_tensor(first, device=q.device).long().expand(batch), rotary_cos, rotary_sin, rotary_interleaved
        q, k = _turned(q, cu_seqlens_q, from_each, *turn), _turned(k, cu_seqlens_k_new, True, *turn)
    if k is not None and v is not None:
        place = table
        if rows is not None:  # each is a page that has all of its sequence's keys
            place = (rows if exists is None else torch.where(exists, rows, -1)).to(q.device, torch.int32)[:, None]
        with in_words_of({**names, "seqlens": "cache_seqlens", "cu_seqlens": "cu_seqlens_k_new"}):
            append(k_cache, v_cache, k, v, start.int(), page_table=place, cu_seqlens=cu_seqlens_k_new, layout="bshd")
    if rows is not None:
        k_cache, v_cache = k_cache[rows], v_cache[rows]
    if exists is not None:
        end = end * exists
        cache_leftpad = None if cache_leftpad is None else cache_leftpad * exists

    if table is not None and cu_seqlens_q is not None:
        options = {**options, "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
    if table is None and (cu_seqlens_q is not None or cache_leftpad is not None):
        out, lse = _packed(q, cu_seqlens_q, max_seqlen_q, k_cache, v_cache, cache_leftpad, end, options)
    elif isinstance(filled, int) and exists is None and table is None:
        out, lse, _ = attend(q, k_cache[:, : filled + new], v_cache[:, : filled + new], **options)
    else:
        out, lse, _ = attend(q, k_cache, v_cache, **options, seqused_k=end.int())
    return (out, lse) if return_softmax_lse else out


def _filled(filled: int | Tensor, new: int | Tensor, batch: int, length: int) -> int | Tensor:
    """cache_seqlens, checked or brought into bounds, of caches with room for `length` keys."""
    why = f"a cache has room for {length} keys" + (f", of which {new} are new" if isinstance(new, int) and new else "")
    if isinstance(new, Tensor):
        why += ", those of cu_seqlens_k_new among them"
        if TORCH.is_readable(new) and (most := max(new.tolist(), default=0)) > length:
            raise ValueError(f"cu_seqlens_k_new: {most} tokens of a sequence; accepted are up to {length}, for which a cache has room")
    if isinstance(filled, Tensor):
        return within("cache_seqlens", filled, batch, length - new, why)
    most = length - int(new)
    if not 0 <= filled <= most:
        raise ValueError(f"cache_seqlens: {filled}; accepted are 0 to {most}, {why}")
    return int(filled)


def _shapes_against(
    given: dict[str, Tensor], fresh: dict[str, Tensor], batch: int, packed: set[str], indexed: bool, named_table: tuple[str, Tensor] | None
) -> Wrong:
    """What does not fit, of what has to before anything is written. fresh: k and v, if they are given; packed: which have three axes;
    indexed: by cache_batch_idx; named_table: of a cache in pages, and what it is called."""
    both = {**given, **fresh}
    wrong: Wrong = []
    for name, x in both.items():
        if x.dim() != (3 if name in packed else 4):
            accepted = f"(tokens, heads, head dimension) with cu_seqlens_{'q' if name == 'q' else 'k_new'}"
            accepted = accepted if name in packed else "(batches, tokens, heads, head dimension)"
            wrong.append(ValueError(f"{name}: shape {tuple(x.shape)}; accepted is {accepted}"))
    if wrong:
        return wrong
    q, k_cache, v_cache = given.values()
    (rows, length, heads, _), width = k_cache.shape, q.shape[-1]
    room, where = length, "k_cache"
    if named_table is not None:
        name, table = named_table
        if table.dim() != 2 or table.shape[0] != batch or table.dtype != torch.int32:
            return [ValueError(f"{name}: {table.dtype} of shape {tuple(table.shape)}; accepted is int32 ({batch}, n)")]
        room, where = length * table.shape[1], f"a row of {name}"
    elif indexed and batch and not rows:
        return [ValueError(f"k_cache: shape {tuple(k_cache.shape)}; accepted is one row or more, for cache_batch_idx to name")]
    first = rows if indexed or named_table is not None else batch
    shapes: dict[str, tuple[int, ...]] = {
        "k_cache": (first, length, heads, width),
        "v_cache": (first, length, heads, v_cache.shape[3]),
    }
    if fresh:
        tokens = fresh["k"].shape[:1] if "k" in packed else (batch, fresh["k"].shape[1])
        if "k" not in packed and tokens[1] > room:
            wrong.append(ValueError(f"k: {tokens[1]} tokens; accepted are up to {room}, as {where} has"))
        shapes.update({"k": (*tokens, heads, width), "v": (*tokens, heads, v_cache.shape[3])})
    for name, shape in shapes.items():
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


def _furthest(first: int | Tensor, count: int | Tensor) -> int:
    """Where the last of sequences ends whose `count` tokens begin at `first`; as far as it is known without looking at numbers that nobody
    reads."""
    if not isinstance(first, Tensor) and not isinstance(count, Tensor):
        return first + count
    ends = first + count
    if isinstance(ends, Tensor) and TORCH.is_readable(ends):
        return max(ends.tolist(), default=0)
    return 0 if isinstance(count, Tensor) else count


def _turned(x: Tensor, cu_seqlens: Tensor | None, from_each: bool, first: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (B, S, H, D), or packed (T, H, D), rotated: each token by its own position, from first[b] on, or all by first[b]."""
    if cu_seqlens is None:
        positions = first[:, None] + torch.arange(x.shape[1] if from_each else 1, device=x.device)
        return rotate(x, cos, sin, positions, interleaved)
    if not len(first):
        return x
    sequence, positions, _ = places(first, cu_seqlens, len(x))
    return rotate(x[None], cos, sin, (positions if from_each else first[sequence])[None], interleaved)[0]


def _packed(
    q: Tensor,
    cu_q: Tensor | None,
    longest: int | None,
    k_cache: Tensor,
    v_cache: Tensor,
    begin: Tensor | None,
    end: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Sequences that begin and end somewhere in their rows of the cache, read in place; q packed, or (B, Sq, H, D)."""
    batch, queries, length = len(end), q.shape[1], k_cache.shape[1]
    cu_k = torch.arange(batch + 1, device=q.device) * length
    of_q = torch.arange(batch + 1, device=q.device) * queries if cu_q is None else cu_q
    packed: dict[str, Any] = {"max_seqlen_q": queries if cu_q is None else longest, "max_seqlen_k": length}
    if begin is None:
        packed.update({"cu_seqlens_q": of_q.int(), "cu_seqlens_k": cu_k.int(), "seqused_k": end.int()})
    else:
        of_q, cu_k, slopes = parts(of_q, cu_k, cu_k[:-1] + begin.long(), cu_k[:-1] + end, options["alibi_slopes"])
        packed.update({"cu_seqlens_q": of_q, "cu_seqlens_k": cu_k})
        options = {**options, "alibi_slopes": slopes}
    out, lse, _ = attend(q if cu_q is not None else q.flatten(0, 1), k_cache.flatten(0, 1), v_cache.flatten(0, 1), **options, **packed)
    if cu_q is not None:
        return out, lse
    return out.view(batch, queries, *out.shape[1:]), lse.view(lse.shape[0], batch, queries).transpose(0, 1)
