"""Attention to a cache, contiguous or in pages, after new keys and values are written into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strobe._checks import Wrong, is_integer, is_whole, refusal
from strobe._messages import kind, shown
from strobe._rotary import check_tables, places, rotate, rotate_tokens
from strobe._tensor_checks import incomplete, misplaced, unfit_tensors
from strobe.kv import append

from .._writable import not_writable, writes
from ..arrays.torch import TORCH
from ._call import Window, attend, bounds
from ._gaps import check_cu_seqlens, parts, within
from ._words import in_words_of, python_numbers, switch_or_refusal


class Queries(NamedTuple):
    """(B, Sq, H, D); with cu_seqlens (Tq, H, D), where the longest sequence has `longest` tokens, if that is known."""

    q: Tensor
    cu_seqlens: Tensor | None
    longest: int | None

    def packing(self) -> dict[str, Any]:
        return {"cu_seqlens_q": self.cu_seqlens, "max_seqlen_q": self.longest}


class Cache(NamedTuple):
    """k and v (B, S, Hkv, D); with a page table (pages, page, Hkv, D)."""

    k: Tensor
    v: Tensor
    table: Tensor | None


class Rotary(NamedTuple):
    """The tables, and whether pairs of columns are neighbours."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def check(self, width: int, positions: int) -> None:
        check_tables(self.cos, self.sin, width, positions)

    def turned(self, x: Tensor, cu_seqlens: Tensor | None, first: Tensor, from_each: bool) -> Tensor:
        """x (B, S, H, D), or packed (T, H, D), rotated: each token by its own position, from first[b] on, or all tokens by first[b]."""
        if cu_seqlens is None:
            positions = first[:, None] + torch.arange(x.shape[1] if from_each else 1, device=x.device)
            return rotate(x, self.cos, self.sin, positions, self.interleaved)
        if not len(first):  # all tokens are padding
            return x
        sequence, positions, _ = places(first, cu_seqlens, len(x))
        return rotate_tokens(x, self.cos, self.sin, positions if from_each else first[sequence], self.interleaved)


@writes("k_cache", "v_cache", beside="k")
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
    """The flash_attn_with_kvcache of both libraries: see their docstrings.

    names: as in_words_of() takes them; the table is the one named for page_table. cu_seqlens_q: q is (Tq, H, D), and softmax_lse
    (H, Tq). cu_seqlens_k_new: k and v are (Tnew, Hkv, D). beside: other errors of the call.
    """
    table_name = names["page_table"]
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    maybe = {"k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_batch_idx": cache_batch_idx}
    maybe.update({"cache_leftpad": cache_leftpad, "alibi_slopes": alibi_slopes, table_name: table})  # PyTorch 2.4 does not trace |=
    maybe.update({"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new, "rotary_seqlens": rotary_seqlens})
    if isinstance(cache_seqlens, Tensor):
        maybe["cache_seqlens"] = cache_seqlens
    tensors.update({name: x for name, x in maybe.items() if x is not None})
    window_size = python_numbers(window_size)
    window = bounds(window_size)
    switches = {"causal": causal, "rotary_interleaved": rotary_interleaved, "return_softmax_lse": return_softmax_lse}
    wrong = unfit_tensors(tensors) + (beside or []) + _wrong_numbers(cache_seqlens, switches, num_splits, window)
    wrong += incomplete(maybe, ("k", "v"), ("rotary_cos", "rotary_sin")) + _misfit_arguments(maybe, table_name)
    if wrong:
        raise refusal(wrong)
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens: None beside k and v; accepted is where they go")
    if wrong := misplaced(tensors, on_host=("cache_seqlens", "cache_batch_idx", "cache_leftpad")):
        raise refusal(wrong)
    batch = _check_shapes(tensors, None if table is None else (table_name, table))
    length = k_cache.shape[1] * (1 if table is None else table.shape[1])
    filled, new = _lengths(cache_seqlens, k, cu_seqlens_k_new, batch, length, q.device)
    rows, exists = _rows_of_cache(cache_batch_idx, batch, k_cache.shape[0], written=k is not None)
    place = table if rows is None else _pages_of(rows, exists, q.device)
    copied = rows is not None and (not length or _is_cast(k_cache))  # a page has a key or more; a cache that is cast is copied in any case
    cache = Cache(k_cache, v_cache, None if copied else place)
    if cache_leftpad is not None:
        cache_leftpad = within("cache_leftpad", cache_leftpad, batch, filled + new, "where the sequence ends").to(q.device)
    start = torch.as_tensor(filled, device=q.device).long().expand(batch)
    end = start + new
    if exists is not None:
        end = end * exists.to(q.device)

    options: dict[str, Any] = {
        "dropout_p": 0.0,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": False,
        "return_attn_probs": True,
        "names": names if rows is None else {**names, "page_table": "cache_batch_idx"},
    }
    if k is not None and v is not None:
        _try_attention(Queries(q, cu_seqlens_q, max_seqlen_q), k, v, cache, end, options)
        if rotary_cos is not None and rotary_sin is not None:
            first = filled
            if rotary_seqlens is not None:
                first = within("rotary_seqlens", rotary_seqlens, batch, len(rotary_cos), "the length of rotary_cos")
            tables = Rotary(rotary_cos, rotary_sin, rotary_interleaved)
            from_each = causal or window is not None
            counts = q.shape[1] if cu_seqlens_q is None else cu_seqlens_q.diff()
            if not from_each:  # one position serves all queries of a sequence
                counts = counts.clamp(max=1) if isinstance(counts, Tensor) else min(counts, 1)
            tables.check(q.shape[-1], max(_furthest(first, new, k), _furthest(first, counts, q)))
            begin = torch.as_tensor(first, device=q.device).long().expand(batch)
            q, k = tables.turned(q, cu_seqlens_q, begin, from_each), tables.turned(k, cu_seqlens_k_new, begin, from_each=True)
        with in_words_of({**names, "seqlens": "cache_seqlens", "cu_seqlens": "cu_seqlens_k_new"}):
            append(k_cache, v_cache, k, v, start.int(), page_table=place, cu_seqlens=cu_seqlens_k_new, layout="bshd")
    if copied:
        cache = Cache(k_cache[rows], v_cache[rows], None)
    if cache_leftpad is not None and exists is not None:
        cache_leftpad = cache_leftpad * exists.to(q.device)
    known = filled + new if isinstance(filled, int) and not isinstance(new, Tensor) and exists is None else None
    out, lse = _attend_in_place(Queries(q, cu_seqlens_q, max_seqlen_q), cache, cache_leftpad, end, known, options)
    return (out, lse) if return_softmax_lse else out


def _wrong_numbers(cache_seqlens: object, switches: Mapping[str, object], num_splits: object, window: object) -> Wrong:
    """Errors of arguments that are no tensors. window: the result of bounds()."""
    wrong: Wrong = []
    if not (cache_seqlens is None or isinstance(cache_seqlens, Tensor) or is_whole(cache_seqlens)):
        wrong.append(TypeError(f"cache_seqlens: {kind(cache_seqlens)}; accepted is an integer, or a torch.Tensor, int32 (B,)"))
    wrong += [x for x in [switch_or_refusal(name, x) for name, x in switches.items()] if isinstance(x, Exception)]
    is_integer(wrong, "num_splits", num_splits, 0, 2**31 - 1)
    return [*wrong, window] if isinstance(window, Exception) else wrong


def _misfit_arguments(maybe: dict[str, Tensor | None], table_name: str) -> Wrong:
    """Refuses arguments that exclude each other, and arguments without their counterpart."""
    wrong: Wrong = []
    for name in ("cache_batch_idx", "cache_leftpad"):
        if maybe[table_name] is not None and maybe[name] is not None:
            wrong.append(ValueError(f"{name}: given beside {table_name}; accepted is None, for the table says where a sequence lies"))
    for name, of in (("rotary_cos", "k"), ("cu_seqlens_k_new", "k"), ("rotary_seqlens", "rotary_cos")):
        if maybe[name] is not None and maybe[of] is None:
            needed = "k and v, new keys" + (" to be turned" if name == "rotary_cos" else "") if of == "k" else "rotary_cos and rotary_sin"
            wrong.append(ValueError(f"{of}: None beside {name}; accepted are {needed}, or no {name}"))
    return wrong


def _check_shapes(tensors: dict[str, Tensor], named_table: tuple[str, Tensor] | None) -> int:
    """B, if shapes and dtypes fit and the caches may be written in place. tensors: those that are given, by their names."""
    q, cu_q, cu_new = tensors["q"], tensors.get("cu_seqlens_q"), tensors.get("cu_seqlens_k_new")
    caches: dict[str, Tensor] = {name: tensors[name] for name in ("k_cache", "v_cache")}
    fresh: dict[str, Tensor] = {name: tensors[name] for name in ("k", "v") if name in tensors}
    batch = next(iter(q.shape), 0) if cu_q is None else check_cu_seqlens("cu_seqlens_q", cu_q, "q", q)
    if cu_new is not None and (found := check_cu_seqlens("cu_seqlens_k_new", cu_new, "k", fresh["k"])) != batch:
        raise ValueError(f"cu_seqlens_k_new: shape ({found + 1},); accepted is ({batch + 1},), as q has batches")
    packed = {name for name, cu in (("q", cu_q), ("k", cu_new), ("v", cu_new)) if cu is not None}
    wrong = _shapes_against({"q": q, **caches}, fresh, batch, packed, "cache_batch_idx" in tensors, named_table)
    if fresh:
        wrong += not_writable(caches, {"q": q, **fresh})
    if wrong:
        raise refusal(wrong)
    return batch


def _lengths(
    cache_seqlens: int | Tensor | None, k: Tensor | None, cu_new: Tensor | None, batch: int, length: int, device: torch.device
) -> tuple[int | Tensor, int | Tensor]:
    """How many keys of each sequence lie in a cache with room for `length`, and how many are new."""
    filled = length if cache_seqlens is None else cache_seqlens
    if cu_new is None:
        new: int | Tensor = 0 if k is None else k.shape[1]
    else:
        new = cu_new.diff()
        filled = torch.as_tensor(filled, device=device)  # on the device of the new ones
        filled = filled if isinstance(cache_seqlens, Tensor) else filled.expand(batch)
    return _filled(filled, new, batch, length), new


def _rows_of_cache(cache_batch_idx: Tensor | None, batch: int, count: int, written: bool) -> tuple[Tensor | None, Tensor | None]:
    """The row of the cache for each sequence, and whether that row exists: None if it does for certain."""
    if cache_batch_idx is None:
        return None, None
    rows = within("cache_batch_idx", cache_batch_idx, batch, count - 1, f"a cache of {count} rows").long()
    exists = None if TORCH.is_readable(cache_batch_idx) else rows == cache_batch_idx
    if written and exists is None and len(set(numbers := rows.tolist())) < batch:
        raise ValueError(f"cache_batch_idx: {shown(numbers)} beside k and v; accepted are rows that differ from one another")
    return rows, exists


def _pages_of(rows: Tensor, exists: Tensor | None, device: torch.device) -> Tensor:
    """The page_table of a contiguous cache: each row is a page that has all of its sequence's keys."""
    return (rows if exists is None else torch.where(exists, rows, -1)).to(device, torch.int32)[:, None]


def _is_cast(cache: Tensor) -> bool:
    """Whether autocast casts, and so copies, it for the attention."""
    device = cache.device.type
    return torch.is_autocast_enabled(device) and cache.dtype not in (torch.float64, torch.get_autocast_dtype(device))


def _follow_one_another(cache: Tensor) -> bool:
    """Whether its rows are contiguous in memory, so that flatten(0, 1) is a view."""
    return cache.shape[0] < 2 or not cache.shape[1] or cache.stride(0) == cache.shape[1] * cache.stride(1)


def _try_attention(queries: Queries, k: Tensor, v: Tensor, cache: Cache, end: Tensor, options: dict[str, Any]) -> None:
    """Makes calls with no queries or no keys, so that errors of the call, or of its pages, are raised before the first write."""
    of_none, no_k, no_v = [x.new_empty(len(end), 0, *x.shape[-2:]) for x in (queries.q, k, v)]
    attend(of_none, no_k, no_v, **options)
    if queries.cu_seqlens is not None:
        none: dict[str, Any] = {"cu_seqlens_k": torch.zeros_like(queries.cu_seqlens), "max_seqlen_k": 0}
        attend(queries.q, no_k.flatten(0, 1), no_v.flatten(0, 1), **options, **queries.packing(), **none)
    if cache.table is not None:
        attend(of_none, cache.k, cache.v, **options, page_table=cache.table, seqused_k=end.int())


def _filled(filled: int | Tensor, new: int | Tensor, batch: int, length: int) -> int | Tensor:
    """cache_seqlens, checked or clamped, for caches with room for `length` keys."""
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
    """The shapes that do not fit, among those that must fit before the first write. fresh: k and v, if they are given; packed: the names of
    those with three axes; indexed: by cache_batch_idx; named_table: that of a paged cache, and its name."""
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
    elif indexed and heads and q.shape[-2] % heads:  # the library's message would name pages
        accepted = f"accepted are the divisors of {q.shape[-2]}"
        wrong.append(ValueError(f"k_cache: {heads} heads for the {q.shape[-2]} of q; {accepted}"))
    first = rows if indexed or named_table is not None else batch
    shapes: dict[str, tuple[int, ...]] = {
        "k_cache": (first, length, heads, width),
        "v_cache": (first, length, heads, v_cache.shape[3]),
    }
    if fresh:
        measure = fresh["v"] if fresh["k"].shape[-2] != heads == fresh["v"].shape[-2] else fresh["k"]  # the one whose axes are in place
        tokens = measure.shape[:1] if "k" in packed else (batch, measure.shape[1])
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


def _furthest(first: int | Tensor, count: int | Tensor, tokens: Tensor) -> int:
    """The end of the last sequence that has a token, if sequences of `count` tokens begin at `first`, as far as it is known without reading
    numbers in device memory. 0 if there are no tokens: `tokens` holds them."""
    if not (tokens.shape[0] and tokens.shape[1]) or (not isinstance(count, Tensor) and not count):
        return 0
    if not isinstance(first, Tensor) and not isinstance(count, Tensor):
        return first + count
    ends = first + count
    if isinstance(ends, Tensor) and TORCH.is_readable(ends):
        some = torch.as_tensor(count).expand(ends.shape) > 0
        return max(ends[some].tolist(), default=0)
    return 1 if isinstance(count, Tensor) else count


def _attend_in_place(
    queries: Queries, cache: Cache, begin: Tensor | None, end: Tensor, known: int | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """out and softmax_lse, by the least general call that gives them and copies nothing of the cache. known: the common end of all
    sequences, if there is one."""
    if cache.table is None and (queries.cu_seqlens is not None or begin is not None):
        if _follow_one_another(cache.k) and _follow_one_another(cache.v):
            return _packed(queries, cache, begin, end, options)
        cache = Cache(cache.k, cache.v, torch.arange(len(end), device=queries.q.device, dtype=torch.int32)[:, None])
    if cache.table is None and known is not None:
        out, lse, _ = attend(queries.q, cache.k[:, :known], cache.v[:, :known], **options)
        return out, lse
    if cache.table is not None:
        options = {**options, "page_table": cache.table}
    if queries.cu_seqlens is not None:
        options = {**options, **queries.packing()}
    if begin is not None and cache.table is not None:
        key = torch.arange(cache.k.shape[1] * cache.table.shape[1], device=queries.q.device)
        names = {**options["names"], "mask": "cache_leftpad"}
        options = {**options, "names": names, "mask": (key >= begin[:, None])[:, None, None]}
    out, lse, _ = attend(queries.q, cache.k, cache.v, **options, seqused_k=end.int())
    return out, lse


def _packed(queries: Queries, cache: Cache, begin: Tensor | None, end: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Sequences that begin and end anywhere in their rows of the cache, read in place."""
    q, are_packed = queries.q, queries.cu_seqlens is not None
    batch, count, length = len(end), q.shape[1], cache.k.shape[1]
    cu_k = torch.arange(batch + 1, device=q.device) * length
    of_q = torch.arange(batch + 1, device=q.device) * count if queries.cu_seqlens is None else queries.cu_seqlens
    packed: dict[str, Any] = {"max_seqlen_q": queries.longest if are_packed else count, "max_seqlen_k": length}
    if begin is None:
        packed.update({"cu_seqlens_q": of_q.int(), "cu_seqlens_k": cu_k.int(), "seqused_k": end.int()})
    else:
        of_q, cu_k, slopes = parts(of_q, cu_k, cu_k[:-1] + begin.long(), cu_k[:-1] + end, options["alibi_slopes"])
        packed.update({"cu_seqlens_q": of_q, "cu_seqlens_k": cu_k})
        options = {**options, "alibi_slopes": slopes}
    tokens = q if are_packed else q.flatten(0, 1)
    out, lse, _ = attend(tokens, cache.k.flatten(0, 1), cache.v.flatten(0, 1), **options, **packed)
    if are_packed:
        return out, lse
    return out.view(batch, count, *out.shape[1:]), lse.view(lse.shape[0], batch, count).transpose(0, 1)
