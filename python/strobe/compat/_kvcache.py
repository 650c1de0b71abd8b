"""Attention to a cache, contiguous or in pages, after new keys and values are written into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._autograd import is_tracked
from .._checks import Wrong, is_whole, refuse
from .._messages import kind, shown
from .._rotary import check_tables, furthest, turn
from .._tensor_checks import check_cu_seqlens, counts, incomplete, misplaced, unfit_tensors, within
from .._writable import not_writable
from ..arrays.torch import TORCH
from ..kv import append, append_stored
from ._call import NAMES, attend, bounds, in_threes
from ._eight_bits import FP8, RESULT, check_fp8, is_fp8, of_tokens
from ._words import called, integer_or_refusal, switch_or_refusal

_OPTIONS = ("softmax_scale", "causal", "softcap", "alibi_slopes")
_NEEDED = ("q", "k_cache", "v_cache")
_TENSORS: tuple[str, ...] = (*_NEEDED, "k", "v", "qv", "rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "alibi_slopes")
_TENSORS += ("block_table", "page_table", "cu_seqlens_q", "cu_seqlens_k_new", "rotary_seqlens")


class Keys(NamedTuple):
    """The keys that queries see: of each sequence those from begin[b] (None: the first) up to before end[b]; with a table, in pages."""

    k: Tensor
    v: Tensor
    table: Tensor | None
    begin: Tensor | None
    end: Tensor
    same_end: int | None  # where all sequences end, if that is known without reading numbers


def attend_to_cache(given: dict[str, Any], beside: Sequence[Any] = ()) -> Any:
    """The flash_attn_with_kvcache of both libraries, which document its arguments. beside: what checks of further arguments found."""
    if given.get("rotary_cos") is None and given.get("rotary_sin") is None:
        given = {**given, "rotary_seqlens": None}
    table_name = "block_table" if "block_table" in given else "page_table"
    window = bounds(given["window_size"])
    flags = [switch_or_refusal(name, given[name]) for name in ("causal", "rotary_interleaved", "return_softmax_lse")]
    tensors = _checked(given, table_name, [*flags, integer_or_refusal("num_splits", given["num_splits"]), window, *beside])
    batch = _check_shapes(tensors, table_name if table_name in tensors else None)
    fp8, qv = is_fp8(given), given.get("qv")
    if qv is not None and (qv.shape != (wanted := (*given["q"].shape[:-1], given["v_cache"].shape[-1])) or qv.dtype != given["q"].dtype):
        raise ValueError(f"qv: {qv.dtype} of shape {tuple(qv.shape)}; accepted is {given['q'].dtype} {wanted}, as q and v_cache have")
    if fp8:
        check_fp8(given, tuple(name for name in ("k_cache", "v_cache", "k", "v") if name in tensors), batch, given["k_cache"].shape[2])
        given = {**given, **{name: tensors[name].to(RESULT) for name in ("q", "rotary_cos", "rotary_sin") if name in tensors}}
    q, k_cache, v_cache, rows = given["q"], given["k_cache"], given["v_cache"], given["cache_batch_idx"]
    packing = {name: given[name] for name in ("cu_seqlens_q", "max_seqlen_q")} if "cu_seqlens_q" in tensors else {}
    names = {**NAMES, "k": "k_cache", "v": "v_cache", "mask": "cache_leftpad"}
    names["page_table"] = table_name if rows is None else "cache_batch_idx"
    options: dict[str, Any] = {name: given[name] for name in (*_OPTIONS, "attention_chunk") if name in given}

    def attend_to(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        if fp8:  # a number for each key in place of those of k_descale and v_descale, which pages of several sequences cannot have
            more["k_scale"] = more["v_scale"] = torch.ones((), device=q.device).expand(k.shape[:-1])
        elif qv is not None:
            rows = (*q.shape[:-1], v.shape[-1])  # those of qv, or none in a trial
            q, k = joined(qv.reshape(rows) if q.numel() else qv.new_empty(rows), q), joined(v, k)
        return attend({"window": window, **options, **more, "q": q, "k": k, "v": v}, names)

    filled, added = _lengths(given, tensors.get(table_name), batch)
    table, keys = _keys(given, filled, added, tensors.get(table_name), batch)
    if "k" in tensors:
        _try_attention(attend_to, given, packing, keys)
        is_local = window is not None or bool(given.get("attention_chunk"))
        q, k = _rotated(given, filled, added, from_each=bool(given["causal"]) or is_local)
        written = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": given["v"], "seqlens": _each(filled, batch, q.device).int()}
        of_append = {**names, "seqlens": "cache_seqlens", "cu_seqlens": "cu_seqlens_k_new"}
        write = append_stored if fp8 else append
        called(of_append, write, **written, page_table=table, cu_seqlens=tensors.get("cu_seqlens_k_new"), layout="bshd")
    if table is not None and keys.table is None:
        row = table[:, 0].clamp(min=0)
        keys = keys._replace(k=k_cache[row], v=v_cache[row])
    if fp8:
        factors = [of_tokens(given[name], q, tensors.get("cu_seqlens_q")) for name in ("q_descale", "k_descale", "v_descale")]
        for factor in factors[:2]:
            q = q if factor is None else q.float() * factor
        q = q.to(RESULT)
    out, lse = _attend_in_place(attend_to, q, packing, keys, given.get("alibi_slopes"))
    if fp8 and factors[2] is not None:
        out = (out.float() * factors[2]).to(RESULT)
    return (out, lse) if given["return_softmax_lse"] else out


def joined(v: Tensor, k: Tensor) -> Tensor:
    """v and k (or qv and q) side by side: a view if they are neighbouring columns of one tensor, else a copy. V then lies within the joined
    K, where latent attention finds it."""
    if not torch.compiler.is_compiling() and not is_tracked(v, k) and v.stride() == k.stride() and v.stride(-1) == 1:
        here, one_storage = v.storage_offset(), v.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        if one_storage and k.storage_offset() == here + v.shape[-1]:
            return v.as_strided((*v.shape[:-1], v.shape[-1] + k.shape[-1]), v.stride(), here)
    return torch.cat([v, k], -1)


def _checked(given: dict[str, Any], table_name: str, found: list[Any]) -> dict[str, Any]:
    """The given tensors, by their names, after the checks that need no shapes. found: what other checks found."""
    tensors: dict[str, Any] = {name: given[name] for name in _TENSORS if name in _NEEDED or given.get(name) is not None}
    seqlens = given["cache_seqlens"]
    if isinstance(seqlens, Tensor):
        tensors["cache_seqlens"] = seqlens
    elif not (seqlens is None or is_whole(seqlens)):
        found = [TypeError(f"cache_seqlens: {kind(seqlens)}; accepted is an integer, or a torch.Tensor, int32 (B,)"), *found]
    wrong = incomplete(given, ("k", "v"), ("rotary_cos", "rotary_sin"))
    needs = {"rotary_cos": ("k", "k and v, new keys to be turned"), "cu_seqlens_k_new": ("k", "k and v, new keys")}
    for name, (of, needed) in needs.items():
        if name in tensors and of not in tensors:
            wrong.append(ValueError(f"{of}: None beside {name}; accepted are {needed}, or no {name}"))
    refuse(*unfit_tensors(tensors), *found, *wrong)
    if "k" in tensors and seqlens is None:
        raise ValueError("cache_seqlens: None beside k and v; accepted is where they go")
    refuse(*misplaced(tensors, on_host=("cache_seqlens", "cache_batch_idx", "cache_leftpad")))
    return tensors


def _check_shapes(given: dict[str, Any], table_name: str | None) -> int:
    """Returns B, after the checks that must pass before the first write: shapes, dtypes, and that the caches may be written in place."""
    q, cu_q, cu_new = given["q"], given.get("cu_seqlens_q"), given.get("cu_seqlens_k_new")
    batch = next(iter(q.shape), 0) if cu_q is None else check_cu_seqlens("cu_seqlens_q", cu_q, "q", q)
    if cu_new is not None and (found := check_cu_seqlens("cu_seqlens_k_new", cu_new, "k", given["k"])) != batch:
        raise ValueError(f"cu_seqlens_k_new: shape ({found + 1},); accepted is ({batch + 1},), as q has batches")
    packed_by = {"q": "cu_seqlens_q", "k": "cu_seqlens_k_new", "v": "cu_seqlens_k_new"}
    wrong: Wrong = []
    for name in ("q", "k_cache", "v_cache", "k", "v"):
        rank, accepted = 4, "(batches, tokens, heads, head dimension)"
        if packed_by.get(name) in given:
            rank, accepted = 3, f"(tokens, heads, head dimension) with {packed_by[name]}"
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
        fits = table.dim() == 2 and (len(table) > 0 or not batch if indexed else len(table) == batch)
        if not fits or table.dtype != torch.int32:
            accepted = "(rows, n), one row or more, for cache_batch_idx to name" if indexed else f"({batch}, n)"
            return [ValueError(f"{table_name}: {table.dtype} of shape {tuple(table.shape)}; accepted is int32 {accepted}")]
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


def _lengths(given: dict[str, Any], table: Tensor | None, batch: int) -> tuple[int | Tensor, int | Tensor]:
    """How many keys of each sequence the cache holds, checked or clamped, and how many are new."""
    k, cu_seqlens, device = given["k"], given.get("cu_seqlens_k_new"), given["q"].device
    room = given["k_cache"].shape[1] * (1 if table is None else table.shape[1])
    filled: int | Tensor = room if given["cache_seqlens"] is None else given["cache_seqlens"]
    added = 0 if k is None else counts(k, cu_seqlens)
    why = f"a cache has room for {room} keys"
    if isinstance(added, Tensor):
        why += ", those of cu_seqlens_k_new among them"
        if TORCH.is_readable(added) and (most := max(added.tolist(), default=0)) > room:
            raise ValueError(f"cu_seqlens_k_new: {most} tokens of a sequence; accepted are up to {room}, for which a cache has room")
        filled = filled.to(device) if isinstance(filled, Tensor) else torch.as_tensor(filled, device=device).expand(batch)
    elif added:
        why += f", of which {added} are new"
    if isinstance(filled, Tensor):
        return within("cache_seqlens", filled, batch, room - added, why), added
    if not 0 <= filled <= room - added:
        raise ValueError(f"cache_seqlens: {filled}; accepted are 0 to {room - added}, {why}")
    return int(filled), added


def _keys(given: dict[str, Any], filled: int | Tensor, added: int | Tensor, table: Tensor | None, batch: int) -> tuple[Tensor | None, Keys]:
    """The page table, and the keys that queries attend to once new keys are written. cache_batch_idx names rows of the table, or becomes a
    table: each row of the cache is then a page. In place of a row that does not exist pages are -1. The keys have no table if the named
    rows must be copied first, because a page needs at least one key or because autocast copies what it casts."""
    k, v, rows, begin, device = given["k_cache"], given["v_cache"], given["cache_batch_idx"], given["cache_leftpad"], given["q"].device
    same_end = filled + added if isinstance(filled, int) and not isinstance(added, Tensor) else None
    end = _each(filled, batch, device) + added
    if begin is not None:
        begin = within("cache_leftpad", begin, batch, filled + added, "where the sequence ends").to(device)
    if rows is None:
        return table, Keys(k, v, table, begin, end, same_end)
    of_table = table is not None
    last = len(k if table is None else table) - 1
    known = within("cache_batch_idx", rows, batch, last, f"a {'table' if of_table else 'cache'} of {last + 1} rows")
    if given["k"] is not None and TORCH.is_readable(known) and len(set(numbers := known.tolist())) < batch:
        raise ValueError(f"cache_batch_idx: {shown(numbers)} beside k and v; accepted are rows that differ from one another")
    if table is None:
        table = torch.where(known == rows, known, -1).to(device, torch.int32)[:, None]
    else:
        known, rows = known.to(device), rows.to(device)
        table = torch.where((known == rows)[:, None], table[known], -1)
    if not TORCH.is_readable(rows):
        there = (known == rows).to(device)
        begin, end, same_end = None if begin is None else begin * there, end * there, None
    is_cast = torch.is_autocast_enabled(device.type) and k.dtype not in (torch.float64, FP8, torch.get_autocast_dtype(device.type))
    in_place = of_table or (k.shape[1] and not is_cast)
    return table, Keys(k, v, table if in_place else None, begin, end, same_end)


def _try_attention(attend_to: Any, given: dict[str, Any], packing: dict[str, Any], keys: Keys) -> None:
    """Makes calls with no queries or no keys, so that errors of the call, or of its pages, are raised before the first write."""
    no_q, no_k, no_v = [given[name].new_empty(len(keys.end), 0, *given[name].shape[-2:]) for name in ("q", "k", "v")]
    attend_to(no_q, no_k, no_v)
    if packing:
        none = {**packing, "cu_seqlens_k": torch.zeros_like(given["cu_seqlens_q"]), "max_seqlen_k": 0}
        attend_to(given["q"], no_k.flatten(0, 1), no_v.flatten(0, 1), **none)
    if keys.table is not None:
        attend_to(no_q, keys.k, keys.v, page_table=keys.table, seqused_k=keys.end.int())


def _rotated(given: dict[str, Any], filled: int | Tensor, added: int | Tensor, from_each: bool) -> tuple[Tensor, Tensor]:
    """q and k, rotated: each token of k by its own position; each token of q by its own, too, if from_each, else by that of the first new
    key."""
    q, k, cos, sin = [given[name] for name in ("q", "k", "rotary_cos", "rotary_sin")]
    cu_q, seqlens = given.get("cu_seqlens_q"), given.get("rotary_seqlens")
    if cos is None:
        return q, k
    batch, first, count = q.shape[0] if cu_q is None else len(cu_q) - 1, filled, counts(q, cu_q)
    if seqlens is not None:
        first = within("rotary_seqlens", seqlens, batch, len(cos), "the length of rotary_cos")
    if not from_each:  # one position serves all queries of a sequence
        count = count.clamp(max=1) if isinstance(count, Tensor) else min(count, 1)
    check_tables(cos, sin, q.shape[-1], max(furthest(first, added, k), furthest(first, count, q)))
    begin, interleaved = _each(first, batch, q.device), bool(given["rotary_interleaved"])
    return turn(q, cos, sin, begin, cu_q, interleaved, from_each), turn(k, cos, sin, begin, given.get("cu_seqlens_k_new"), interleaved)


def _attend_in_place(attend_to: Any, q: Tensor, packing: dict[str, Any], keys: Keys, slopes: Tensor | None) -> tuple[Tensor, Tensor]:
    """out and softmax_lse, by the simplest call that copies nothing of the cache."""
    k, v, table, begin, end, same_end = keys
    if table is None and (packing or begin is not None):
        # Where rows follow one another in memory, flatten(0, 1) is a view.
        if all(x.shape[0] < 2 or not x.shape[1] or x.stride(0) == x.shape[1] * x.stride(1) for x in (k, v)):
            return _attend_packed(attend_to, q, packing, keys, slopes)
        table = torch.arange(len(end), device=q.device, dtype=torch.int32)[:, None]  # each row is a page
    if table is None and same_end is not None:
        return attend_to(q, k[:, :same_end], v[:, :same_end])
    more: dict[str, Any] = {**packing, "page_table": table, "seqused_k": end.int()}
    if table is not None and begin is not None:
        key = torch.arange(k.shape[1] * table.shape[1], device=q.device)
        more["mask"], more["begin"] = (key >= begin[:, None])[:, None, None], begin
    return attend_to(q, k, v, **more)


def _attend_packed(attend_to: Any, q: Tensor, packing: dict[str, Any], keys: Keys, slopes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sequences that begin and end anywhere in their rows of the cache, read in place."""
    batch, length, each = len(keys.end), keys.k.shape[1], q.shape[1]
    row = torch.arange(batch + 1, device=q.device)
    cu_k, cu_q, longest = row * length, packing.get("cu_seqlens_q", row * each), packing.get("max_seqlen_q", each)
    packed: dict[str, Any] = {"cu_seqlens_q": cu_q.int(), "cu_seqlens_k": cu_k.int(), "seqused_k": keys.end.int()}
    if keys.begin is not None:
        packed = in_threes(cu_q, cu_k, keys.begin.long(), keys.end, slopes)
    k, v = keys.k.flatten(0, 1), keys.v.flatten(0, 1)
    out, lse = attend_to(q if packing else q.flatten(0, 1), k, v, **packed, max_seqlen_q=longest, max_seqlen_k=length)
    if packing:
        return out, lse
    return out.unflatten(0, (batch, each)), lse.unflatten(1, (batch, each)).transpose(0, 1)
