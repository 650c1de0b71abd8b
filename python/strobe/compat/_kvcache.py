"""Attention to a cache, contiguous or in pages, after new keys and values are written into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import Wrong, is_whole
from .._messages import kind, shown
from .._rotary import check_tables
from .._tensor_checks import incomplete, misplaced, unfit_tensors
from .._writable import not_writable
from ..arrays.torch import TORCH
from ..kv import append
from ._call import Options, attend, bounds, in_threes
from ._lengths import check_cu_seqlens, counts, integer_or_refusal, refuse, within
from ._rotary import furthest, turn
from ._words import called, switch_or_refusal


class Tokens(NamedTuple):
    """q (B, Sq, H, D), and k and v (B, Snew, Hkv, D), which are to be written. With cu_seqlens_q q is packed, (Tq, H, D), and its longest
    sequence has max_seqlen_q tokens, if that is known; with cu_seqlens_k k and v are packed."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None

    def packing(self) -> dict[str, Any]:
        return {} if self.cu_seqlens_q is None else {"cu_seqlens_q": self.cu_seqlens_q, "max_seqlen_q": self.max_seqlen_q}


class Cache(NamedTuple):
    """k and v (Bc, Sc, Hkv, D): sequence b has the keys from leftpad[b] up to before seqlens[b] of row rows[b] (None: of row b). With a
    table k and v are pools of pages, (pages, page, Hkv, D)."""

    k: Tensor
    v: Tensor
    seqlens: int | Tensor | None
    rows: Tensor | None
    leftpad: Tensor | None
    table: Tensor | None


class Rotary(NamedTuple):
    """Rotary embedding: the tables, whether pairs of columns are neighbours, and the position of each sequence's first new token (None:
    after its keys)."""

    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    seqlens: Tensor | None = None


class Keys(NamedTuple):
    """The keys that queries attend to: of each sequence those from begin[b] (None: the first) up to before end[b]."""

    k: Tensor
    v: Tensor
    table: Tensor | None
    begin: Tensor | None
    end: Tensor
    same_end: int | None  # where all sequences end, if that is known without reading numbers


def attend_to_cache(
    names: Mapping[str, str], new: Tokens, cache: Cache, rotary: Rotary, options: Options, return_lse: bool, num_splits: int = 0,
    beside: Sequence[Any] = (),
) -> Any:  # fmt: skip
    """The flash_attn_with_kvcache of both libraries, whose docstrings describe it.

    names: as called() takes them; the table is the one named for page_table. beside: what checks of further arguments found.
    """
    table_name, window = names["page_table"], bounds(options.window_size)
    flags = {"causal": options.causal, "rotary_interleaved": rotary.interleaved, "return_softmax_lse": return_lse}
    found = [switch_or_refusal(name, x) for name, x in flags.items()] + [integer_or_refusal("num_splits", num_splits), window]
    given = _checked(table_name, new, cache, rotary, options, beside, found)
    batch, device = _check_shapes(given, None if cache.table is None else table_name), new.q.device
    filled, added = _lengths(cache, new, batch)
    table = cache.table if cache.rows is None else _table_of_rows(cache, batch, device, written=new.k is not None)
    keys = _keys(cache, filled, added, table, batch, device)
    names = {**names, "mask": "cache_leftpad", "page_table": table_name if cache.rows is None else "cache_batch_idx"}
    if new.k is not None and new.v is not None:
        _try_attention(new, keys, options, names)
        q, k = _rotated(new, new.k, rotary, filled, added, from_each=bool(options.causal) or window is not None)
        written = {"k_cache": cache.k, "v_cache": cache.v, "k": k, "v": new.v, "seqlens": _each(filled, batch, device).int()}
        names_of_append = {**names, "seqlens": "cache_seqlens", "cu_seqlens": "cu_seqlens_k_new"}
        called(names_of_append, append, **written, page_table=table, cu_seqlens=new.cu_seqlens_k, layout="bshd")
        new = Tokens(q, *new[1:])
    if table is not None and keys.table is None:
        row = table[:, 0].clamp(min=0)
        keys = Keys(cache.k[row], cache.v[row], *keys[2:])
    out, lse = _attend_in_place(new, keys, options, names)
    return (out, lse) if return_lse else out


def _checked(
    table_name: str, new: Tokens, cache: Cache, rotary: Rotary, options: Options, beside: Sequence[Any], found: list[Any]
) -> dict[str, Any]:
    """The tensors that are given, by their names, after the checks that need no shapes. beside, found: what other checks found."""
    maybe = {"k": new.k, "v": new.v, "rotary_cos": rotary.cos, "rotary_sin": rotary.sin, "cache_batch_idx": cache.rows}
    maybe.update({"cache_leftpad": cache.leftpad, "alibi_slopes": options.alibi_slopes, table_name: cache.table})
    maybe.update({"cu_seqlens_q": new.cu_seqlens_q, "cu_seqlens_k_new": new.cu_seqlens_k, "rotary_seqlens": rotary.seqlens})
    given: dict[str, Any] = {"q": new.q, "k_cache": cache.k, "v_cache": cache.v}
    given.update({name: x for name, x in maybe.items() if x is not None})  # PyTorch 2.4 does not trace |=
    if isinstance(cache.seqlens, Tensor):
        given["cache_seqlens"] = cache.seqlens
    elif not (cache.seqlens is None or is_whole(cache.seqlens)):
        found = [TypeError(f"cache_seqlens: {kind(cache.seqlens)}; accepted is an integer, or a torch.Tensor, int32 (B,)"), *found]
    wrong = incomplete(maybe, ("k", "v"), ("rotary_cos", "rotary_sin"))
    for name in ("cache_batch_idx", "cache_leftpad"):
        if name in given and table_name in given:
            wrong.append(ValueError(f"{name}: given beside {table_name}; accepted is None, for the table says where a sequence lies"))
    keys, tables = "k and v, new keys", "rotary_cos and rotary_sin"
    for name, of, needed in (
        ("rotary_cos", "k", f"{keys} to be turned"), ("cu_seqlens_k_new", "k", keys), ("rotary_seqlens", "rotary_cos", tables),
    ):  # fmt: skip
        if name in given and of not in given:
            wrong.append(ValueError(f"{of}: None beside {name}; accepted are {needed}, or no {name}"))
    refuse(*unfit_tensors(given), *beside, *found, *wrong)
    if new.k is not None and cache.seqlens is None:
        raise ValueError("cache_seqlens: None beside k and v; accepted is where they go")
    refuse(*misplaced(given, on_host=("cache_seqlens", "cache_batch_idx", "cache_leftpad")))
    return given


_PACKED_BY = {"q": "cu_seqlens_q", "k": "cu_seqlens_k_new", "v": "cu_seqlens_k_new"}


def _check_shapes(given: dict[str, Any], table_name: str | None) -> int:
    """B, if shapes and dtypes fit and the caches may be written in place."""
    q, cu_q, cu_new = given["q"], given.get("cu_seqlens_q"), given.get("cu_seqlens_k_new")
    batch = next(iter(q.shape), 0) if cu_q is None else check_cu_seqlens("cu_seqlens_q", cu_q, "q", q)
    if cu_new is not None and (found := check_cu_seqlens("cu_seqlens_k_new", cu_new, "k", given["k"])) != batch:
        raise ValueError(f"cu_seqlens_k_new: shape ({found + 1},); accepted is ({batch + 1},), as q has batches")
    wrong: Wrong = []
    for name in ("q", "k_cache", "v_cache", "k", "v"):
        rank, accepted = 4, "(batches, tokens, heads, head dimension)"
        if (packed_by := _PACKED_BY.get(name)) in given:
            rank, accepted = 3, f"(tokens, heads, head dimension) with {packed_by}"
        if name in given and given[name].dim() != rank:
            wrong.append(ValueError(f"{name}: shape {tuple(given[name].shape)}; accepted is {accepted}"))
    wrong = wrong or _wrong_shapes(given, batch, table_name)
    if "k" in given:
        wrong += not_writable({name: given[name] for name in ("k_cache", "v_cache")}, {name: given[name] for name in ("q", "k", "v")})
    refuse(*wrong)
    return batch


def _wrong_shapes(given: dict[str, Any], batch: int, table_name: str | None) -> Wrong:
    """The shapes and dtypes that do not fit, among those that must fit before the first write. All have the right number of axes."""
    q, k_cache, v_cache, k, v = given["q"], given["k_cache"], given["v_cache"], given.get("k"), given.get("v")
    (rows, length, heads, _), indexed = k_cache.shape, "cache_batch_idx" in given
    room, where = length, "k_cache"
    wrong: Wrong = []
    if table_name is not None:
        table = given[table_name]
        if table.dim() != 2 or table.shape[0] != batch or table.dtype != torch.int32:
            return [ValueError(f"{table_name}: {table.dtype} of shape {tuple(table.shape)}; accepted is int32 ({batch}, n)")]
        room, where = length * table.shape[1], f"a row of {table_name}"
    elif indexed and batch and not rows:
        return [ValueError(f"k_cache: shape {tuple(k_cache.shape)}; accepted is one row or more, for cache_batch_idx to name")]
    elif indexed and heads and q.shape[-2] % heads:  # the library's message would name pages
        wrong = [ValueError(f"k_cache: {heads} heads for the {q.shape[-2]} of q; accepted are the divisors of {q.shape[-2]}")]
    each = rows if indexed or table_name is not None else batch, length, heads
    shapes: dict[str, tuple[int, ...]] = {"k_cache": (*each, q.shape[-1]), "v_cache": (*each, v_cache.shape[3])}
    if k is not None and v is not None:
        measure = v if k.shape[-2] != heads == v.shape[-2] else k  # k or v, whichever has its axes in place
        tokens = measure.shape[:1] if "cu_seqlens_k_new" in given else (batch, measure.shape[1])
        if "cu_seqlens_k_new" not in given and tokens[1] > room:
            wrong.append(ValueError(f"k: {tokens[1]} tokens; accepted are up to {room}, as {where} has"))
        shapes.update({"k": (*tokens, heads, q.shape[-1]), "v": (*tokens, heads, v_cache.shape[3])})
    for name, shape in shapes.items():
        if given[name].shape != shape:
            wrong.append(ValueError(f"{name}: shape {tuple(given[name].shape)}; accepted is {shape}"))
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x is not None and x.dtype != cache.dtype:
            wrong.append(ValueError(f"{name}: dtype {x.dtype}; accepted is {cache.dtype}, as {name}_cache has"))
    return wrong


def _each(x: int | Tensor, batch: int, device: torch.device) -> Tensor:
    """x as a number for each sequence, int64 (B,)."""
    return torch.as_tensor(x, device=device).long().expand(batch)


def _lengths(cache: Cache, new: Tokens, batch: int) -> tuple[int | Tensor, int | Tensor]:
    """How many keys of each sequence the cache holds, checked or clamped, and how many are new."""
    room = cache.k.shape[1] * (1 if cache.table is None else cache.table.shape[1])
    filled = room if cache.seqlens is None else cache.seqlens
    added = 0 if new.k is None else counts(new.k, new.cu_seqlens_k)
    why = f"a cache has room for {room} keys"
    if isinstance(added, Tensor):
        why += ", those of cu_seqlens_k_new among them"
        if TORCH.is_readable(added) and (most := max(added.tolist(), default=0)) > room:
            raise ValueError(f"cu_seqlens_k_new: {most} tokens of a sequence; accepted are up to {room}, for which a cache has room")
        filled = filled.to(new.q.device) if isinstance(filled, Tensor) else torch.as_tensor(filled, device=new.q.device).expand(batch)
    elif added:
        why += f", of which {added} are new"
    if isinstance(filled, Tensor):
        return within("cache_seqlens", filled, batch, room - added, why), added
    if not 0 <= filled <= room - added:
        raise ValueError(f"cache_seqlens: {filled}; accepted are 0 to {room - added}, {why}")
    return int(filled), added


def _table_of_rows(cache: Cache, batch: int, device: torch.device, written: bool) -> Tensor:
    """cache_batch_idx as a page table, int32 (B, 1): each row of the cache is a page, and a row that does not exist is -1."""
    assert cache.rows is not None
    count = len(cache.k)
    rows = within("cache_batch_idx", cache.rows, batch, count - 1, f"a cache of {count} rows")
    if written and TORCH.is_readable(rows) and len(set(numbers := rows.tolist())) < batch:
        raise ValueError(f"cache_batch_idx: {shown(numbers)} beside k and v; accepted are rows that differ from one another")
    return torch.where(rows == cache.rows, rows, -1).to(device, torch.int32)[:, None]


def _keys(cache: Cache, filled: int | Tensor, added: int | Tensor, table: Tensor | None, batch: int, device: torch.device) -> Keys:
    """The keys that queries attend to once the new keys are written. They have no table if the cache's rows that are named must be copied
    first: because a page needs at least one key, or because autocast copies what it casts."""
    same_end = filled + added if isinstance(filled, int) and not isinstance(added, Tensor) else None
    begin, end = cache.leftpad, _each(filled, batch, device) + added
    if begin is not None:
        begin = within("cache_leftpad", begin, batch, filled + added, "where the sequence ends").to(device)
    if table is not None and cache.rows is not None and not TORCH.is_readable(cache.rows):
        there = table[:, 0] >= 0
        begin, end, same_end = None if begin is None else begin * there, end * there, None
    copied = cache.rows is not None and not cache.k.shape[1]
    if cache.rows is not None and torch.is_autocast_enabled(device.type):
        copied = copied or cache.k.dtype not in (torch.float64, torch.get_autocast_dtype(device.type))
    return Keys(cache.k, cache.v, None if copied else table, begin, end, same_end)


def _try_attention(new: Tokens, keys: Keys, options: Options, names: Mapping[str, str]) -> None:
    """Makes calls with no queries or no keys, so that errors of the call, or of its pages, are raised before the first write."""
    no_q, no_k, no_v = [x.new_empty(len(keys.end), 0, *x.shape[-2:]) for x in new[:3] if x is not None]
    attend(no_q, no_k, no_v, options, names=names)
    if new.cu_seqlens_q is not None:
        none = {**new.packing(), "cu_seqlens_k": torch.zeros_like(new.cu_seqlens_q), "max_seqlen_k": 0}
        attend(new.q, no_k.flatten(0, 1), no_v.flatten(0, 1), options, names=names, **none)
    if keys.table is not None:
        attend(no_q, keys.k, keys.v, options, names=names, page_table=keys.table, seqused_k=keys.end.int())


def _rotated(new: Tokens, k: Tensor, rotary: Rotary, filled: int | Tensor, added: int | Tensor, from_each: bool) -> tuple[Tensor, Tensor]:
    """q and k, rotated: each token of k by its own position, and each token of q likewise if from_each, else by the first new key's."""
    q, cu_q, (cos, sin, interleaved, seqlens) = new.q, new.cu_seqlens_q, rotary
    if cos is None or sin is None:
        return q, k
    batch, first, count = q.shape[0] if cu_q is None else len(cu_q) - 1, filled, counts(q, cu_q)
    if seqlens is not None:
        first = within("rotary_seqlens", seqlens, batch, len(cos), "the length of rotary_cos")
    if not from_each:  # one position serves all queries of a sequence
        count = count.clamp(max=1) if isinstance(count, Tensor) else min(count, 1)
    check_tables(cos, sin, q.shape[-1], max(furthest(first, added, k), furthest(first, count, q)))
    begin = _each(first, batch, q.device)
    return turn(q, cos, sin, begin, cu_q, bool(interleaved), from_each), turn(k, cos, sin, begin, new.cu_seqlens_k, bool(interleaved))


def _attend_in_place(new: Tokens, keys: Keys, options: Options, names: Mapping[str, str]) -> tuple[Tensor, Tensor]:
    """out and softmax_lse, by the least general call that gives them and copies nothing of the cache."""
    q, (k, v, table, begin, end, same_end) = new.q, keys
    if table is None and (new.cu_seqlens_q is not None or begin is not None):
        # Where rows follow one another in memory, flatten(0, 1) is a view.
        if all(x.shape[0] < 2 or not x.shape[1] or x.stride(0) == x.shape[1] * x.stride(1) for x in (k, v)):
            return _attend_packed(new, keys, options, names)
        table = torch.arange(len(end), device=q.device, dtype=torch.int32)[:, None]  # each row is a page
    if table is None and same_end is not None:
        return attend(q, k[:, :same_end], v[:, :same_end], options, names=names)
    more: dict[str, Any] = {**new.packing(), "page_table": table, "seqused_k": end.int()}
    if table is not None and begin is not None:
        key = torch.arange(k.shape[1] * table.shape[1], device=q.device)
        more["mask"] = (key >= begin[:, None])[:, None, None]
    return attend(q, k, v, options, names=names, **more)


def _attend_packed(new: Tokens, keys: Keys, options: Options, names: Mapping[str, str]) -> tuple[Tensor, Tensor]:
    """Sequences that begin and end anywhere in their rows of the cache, read in place."""
    q, cu_q, batch, length = new.q, new.cu_seqlens_q, len(keys.end), keys.k.shape[1]
    longest: Any = new.max_seqlen_q
    cu_k = torch.arange(batch + 1, device=q.device) * length
    if cu_q is None:
        q, longest, cu_q = q.flatten(0, 1), q.shape[1], torch.arange(batch + 1, device=q.device) * q.shape[1]
    packed: dict[str, Any] = {"cu_seqlens_q": cu_q.int(), "cu_seqlens_k": cu_k.int(), "seqused_k": keys.end.int()}
    if keys.begin is not None:
        packed = in_threes(cu_q, cu_k, keys.begin.long(), keys.end, options.alibi_slopes)
    k, v = keys.k.flatten(0, 1), keys.v.flatten(0, 1)
    out, lse = attend(q, k, v, options, names=names, **packed, max_seqlen_q=longest, max_seqlen_k=length)
    if new.cu_seqlens_q is not None:
        return out, lse
    return out.unflatten(0, (batch, longest)), lse.unflatten(1, (batch, longest)).transpose(0, 1)
