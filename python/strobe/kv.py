"""KV caches of torch tensors, contiguous and in pages: write keys and values into them, copy pages, read a sequence back.

A cache is two tensors, of K and V. Contiguous, they are (B, Hkv, Sc, D) and (B, Hkv, Sc, Dv), a row for each sequence. In pages, they are
pools, (pages, Hkv, page, D) and (pages, Hkv, page, Dv), and page_table, int32 (B, n), names the pages of each sequence, as
strobe.attention() takes it. With layout "bshd" the axes of heads and tokens change places. Nothing here has a gradient. A cache that is a
leaf which requires one can be written only under torch.no_grad(), as in PyTorch.

Numbers in host memory are checked before anything is written. Those in device memory, and under torch.compile all of them, are not read, so
that a CUDA graph can capture the calls: tokens that would lie outside of a sequence's room, or in a page that is not in the pool, are left
out.
"""

# No postponed annotations here: PyTorch 2.4 reads those of custom operators as they are.

from operator import index
from typing import NamedTuple, ParamSpec, TypeVar

from ._messages import TORCH_EXTRA, needed_by

with needed_by(__name__, TORCH_EXTRA):
    import torch

from torch import Tensor

from ._checks import Wrong, flag, is_choice, is_whole, names_checked, refusal, refuse
from ._messages import shown
from ._refusals import refusing
from ._rotary import check_tables, places, rotate_tokens
from ._tensor_checks import incomplete, misplaced, unfit_tensors, within
from ._writable import not_writable, writes
from .arrays.torch import TORCH

__all__ = ["append", "copy", "gather", "quantise", "quantize"]

# The largest stored number; uint8 stores two INT4.
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.uint8: 7.0}
_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


P = ParamSpec("P")
R = TypeVar("R")
_OF_LENGTHS = dict.fromkeys(("seqused_k", "cache_seqlens", "lengths"), "did you mean seqlens?")
_OF_TABLE = dict.fromkeys(("block_table", "block_tables"), "did you mean page_table?")
_OF_CACHES = {"key_cache": "did you mean k_cache?", "value_cache": "did you mean v_cache?"}
_OF_APPEND = _OF_LENGTHS | _OF_TABLE | _OF_CACHES
_OF_APPEND |= dict.fromkeys(("cu_seqlens_k", "cu_seqlens_q", "cu_seqlens_k_new"), "did you mean cu_seqlens?")
_OF_APPEND |= {"key": "did you mean k?", "value": "did you mean v?", "cos": "did you mean rotary_cos?", "sin": "did you mean rotary_sin?"}
_OF_COPY = _OF_CACHES | {"src": "did you mean source?", "dst": "did you mean target?"}
_OF_GATHER = _OF_LENGTHS | _OF_TABLE | dict.fromkeys(("k_cache", "v_cache", "pool"), "did you mean cache?")
_OF_QUANTISE = dict.fromkeys(("k_scale_group", "group_size"), "did you mean group?")


@names_checked(_OF_QUANTISE, "group=32")
@torch.no_grad()
def quantise(
    x: Tensor, dtype: torch.dtype, *, group: int | None = None, scale_dtype: torch.dtype = torch.float32, layout: str = "bhsd"
) -> tuple[Tensor, Tensor]:
    """K or V as strobe.attention() takes them with k_scale and v_scale: rounded to nearest. docs/semantics.md bounds the rounding error.
    strobe.kv.quantize is the same function.

    Numbers in device memory are not checked. There a NaN or an infinity makes its scale NaN or infinite, and results computed from the row
    are NaN; a scale larger than scale_dtype's largest number becomes that number, and numbers beyond its range are cut off.

    Args:
        x: K or V, (B, Hkv, Sk, D), (B, Sk, Hkv, D) with layout "bshd", or (Tk, Hkv, D); pools of pages are the first two. Of float64,
            float32, float16 or bfloat16, and finite.
        dtype: torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, or torch.uint8, which stands for two INT4 and needs an even D.
        group: for K, strobe.attention()'s k_scale_group, a multiple of 32: a scale for each column and this many rows. None: for each row.
        scale_dtype: torch.float32, or torch.float16, which takes numbers up to 65504 times the largest stored one (127, 448 or 7).
            A float16 scale is 2^-24 or more, unless it is 0.
        layout: "bhsd" or "bshd".

    Returns:
        (data, scale): data of dtype, contiguous, in x's shape, half as wide with uint8; scale in the shape that strobe.attention() takes,
        0 where all of its numbers are 0.

    Raises:
        TypeError, ValueError: an argument is not as described above.
    """
    wrong = unfit_tensors({"x": x})
    is_choice(wrong, "layout", layout, ("bhsd", "bshd"))
    for name, given, accepted in (("dtype", dtype, (*_LARGEST,)), ("scale_dtype", scale_dtype, (torch.float32, torch.float16))):
        if not isinstance(given, torch.dtype) or given not in accepted:
            wrong.append(_no_dtype(name, given, accepted))
    if group is not None and not (is_whole(group) and group > 0 and group % 32 == 0):
        wrong.append(refusing(ValueError, "group", f"{shown(group)}; accepted are the multiples of 32, or None"))
    if not wrong and (x.dim() not in (3, 4) or x.dtype not in _PLAIN):
        taken = f"{', '.join(map(str, _PLAIN))}, of three or four axes"
        wrong.append(refusing(ValueError, "x", f"{x.dtype} of shape {tuple(x.shape)}; accepted are {taken}"))
    elif not wrong and not x.shape[-1]:
        wrong.append(refusing(ValueError, "x", f"shape {tuple(x.shape)}; accepted is D of 1 or more"))
    elif not wrong and dtype == torch.uint8 and x.shape[-1] % 2:
        wrong.append(refusing(ValueError, "x", f"shape {tuple(x.shape)}; accepted for two INT4 a byte is an even D"))
    refuse(*wrong)
    row = 0 if x.dim() == 3 else 1 if layout == "bshd" else 2
    if group is not None:
        group = min(index(group), max(x.shape[row], 1))  # a group larger than all rows is one group
    largest = _largest(x, group, row)
    if TORCH.is_readable(x) and (wrong := _not_quantisable("x", largest, dtype, scale_dtype, "scale_dtype=torch.float32")):
        raise refusal(wrong)
    return _rounded(x, largest, dtype, group, row, scale_dtype)


quantize = quantise


def _no_dtype(name: str, given: object, accepted: tuple[torch.dtype, ...]) -> Exception:
    """The error for a wrong dtype. given may also be a dtype's name, or a dtype of NumPy's."""
    word = getattr(given, "__name__", getattr(given, "name", given))
    close = [dtype for dtype in accepted if isinstance(word, str) and str(dtype).removeprefix("torch.") == word.removeprefix("torch.")]
    what = given if isinstance(given, torch.dtype) else shown(given)
    error = ValueError if isinstance(given, torch.dtype) else TypeError
    return refusing(error, name, f"{what}; accepted is {_listed(accepted)}" + "".join(f"; did you mean {dtype}?" for dtype in close))


def _largest(x: Tensor, group: int | None, row: int) -> Tensor:
    """The magnitude of the largest of the numbers that share a scale, in float32 or float64. row: the axis of rows."""
    x = (x if x.dtype == torch.float64 else x.float()).abs()
    if group is None:
        return x.amax(-1)
    rows = x.shape[row]
    groups = torch.nn.functional.pad(x.movedim(row, -1), (0, -rows % group)).unflatten(-1, (-(-rows // group), group))
    return groups.amax(-1).movedim(-1, row).contiguous()


def _not_quantisable(name: str, largest: Tensor, dtype: torch.dtype, scale_dtype: torch.dtype, way_out: str) -> Wrong:
    """Refuses numbers in host memory that do not fit. way_out: how the caller asks for scales of float32."""
    if not (finite := largest.isfinite()).all():
        return [refusing(ValueError, name, f"{largest[~finite][0].item()} in it; accepted are finite numbers")]
    most = _LARGEST[dtype]
    if not (of_scale := (largest / most).to(scale_dtype).isinf()).any():
        return []
    accepted = f"{most * torch.finfo(scale_dtype).max:g}" + (f", or more with {way_out}" if scale_dtype == torch.float16 else "")
    too_large = f"a number of size {largest[of_scale][0].item():g}, too large for a scale of {scale_dtype}"
    return [refusing(ValueError, name, f"{too_large}; accepted are sizes up to {accepted}")]


def _rounded(
    x: Tensor, largest: Tensor, dtype: torch.dtype, group: int | None, row: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The result of quantise()."""
    most = _LARGEST[dtype]
    scale = _scale(largest, most, scale_dtype)
    x = x if x.dtype == torch.float64 else x.float()
    of_rows = scale[..., None] if group is None else scale.repeat_interleave(group, row).narrow(row, 0, x.shape[row])
    data = (x / torch.where(of_rows == 0, 1.0, of_rows.to(x.dtype))).clamp(-most, most)
    if dtype in _FP8:
        return data.contiguous().to(dtype), scale
    data = data.nan_to_num(0.0).round().to(torch.int8)  # a NaN has a scale that makes it NaN again
    if dtype == torch.uint8:
        data = (data[..., 0::2] & 15 | data[..., 1::2] << 4).view(torch.uint8)
    return data.contiguous(), scale


def _scale(largest: Tensor, most: float, dtype: torch.dtype) -> Tensor:
    """The scale of numbers that are all 0 is 0. Other scales are numbers of dtype that are not 0; a NaN or an infinity is kept."""
    limits = torch.finfo(dtype)
    scale = largest / most
    if dtype == torch.float16:  # a subnormal number has few bits: it is rounded up, so that the row's largest number fits
        scale = torch.where(scale < limits.tiny, (scale.clamp(min=2.0**-24) * 2.0**24).ceil() * 2.0**-24, scale)
    else:
        scale = scale.clamp(min=limits.tiny)
    scale = torch.where(largest.isinf(), largest, scale.clamp(max=limits.max))
    return torch.where(largest == 0, 0.0, scale).to(dtype)


def _as_bytes(cache: Tensor) -> Tensor:
    """FP8 as bytes, which can be copied by index on every device."""
    return cache.view(torch.uint8) if cache.dtype in _FP8 else cache


@names_checked(_OF_APPEND, "page_table=table")
@writes("k_cache", "v_cache", "k_scale", "v_scale")
def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    seqlens: Tensor,
    *,
    page_table: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: str = "bhsd",
) -> Tensor:
    """Writes the keys and values of new tokens after those that a cache holds, in place.

    Args:
        k_cache, v_cache: the cache. These, and its scales, may be cut out of one buffer, as long as no byte belongs to two of them.
        k, v: (B, Hkv, Snew, D) and (B, Hkv, Snew, Dv), or (B, Snew, Hkv, D) and (B, Snew, Hkv, Dv) with layout "bshd"; the cache's dtype.
            With cu_seqlens (Tnew, Hkv, D) and (Tnew, Hkv, Dv); layout is then only the cache's.
        seqlens: int32 (B,): how many tokens of each sequence the cache holds. The new ones have the positions from there on. This,
            page_table and cu_seqlens may be int64 as well in host memory.
        page_table: int32 (B, n), for a paged cache. Sequences may share pages, but not one that is written into: no entry of the table
            that is in use names it a second time. In host memory that is checked.
        cu_seqlens: int32 (B + 1,): the new tokens of sequence b are rows cu_seqlens[b] to cu_seqlens[b + 1] - 1 of k and v. Rows after the
            last sequence are padding.
        rotary_cos, rotary_sin: (length, R), 2R <= D, floating point: the first 2R columns of k are rotated by the angles of their token's
            position. They reach the last position of a new token.
        rotary_interleaved: columns 2r and 2r + 1 form a pair, else r and R + r.
        k_scale, v_scale: for a quantised cache, as strobe.attention() takes them, one for each key and head: they are written, too. k and v
            are then float64, float32, float16 or bfloat16, and quantise() converts them. Numbers in host memory that
            it refuses are refused here, too, unless their row is padding.
        layout: "bhsd" or "bshd".

    Returns:
        int32 (B,): how many tokens the cache holds now, for seqused_k and the next call.

    Raises:
        TypeError, ValueError: an argument is not as described above; nothing is written then.
    """
    return _append(
        k_cache, v_cache, k, v, seqlens, page_table, cu_seqlens, layout, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip


@writes("k_cache", "v_cache")
def append_stored(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    seqlens: Tensor,
    page_table: Tensor | None,
    cu_seqlens: Tensor | None,
    layout: str,
) -> None:
    """append() of FP8 numbers to a cache of them that has no scales for its keys."""
    _append(k_cache, v_cache, k, v, seqlens, page_table, cu_seqlens, layout, stored=True)


def _append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    seqlens: Tensor,
    page_table: Tensor | None,
    cu_seqlens: Tensor | None,
    layout: str,
    *,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    stored: bool = False,
) -> Tensor:
    tensors = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "seqlens": seqlens}
    maybe = {"page_table": page_table, "cu_seqlens": cu_seqlens, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    maybe.update({"k_scale": k_scale, "v_scale": v_scale})
    tensors.update({name: x for name, x in maybe.items() if x is not None})  # PyTorch 2.4 does not trace |=
    wrong = unfit_tensors(tensors)
    is_choice(wrong, "layout", layout, ("bhsd", "bshd"))
    flag(wrong, "rotary_interleaved", rotary_interleaved)
    wrong += incomplete(maybe, ("rotary_cos", "rotary_sin"), ("k_scale", "v_scale"))
    refuse(*wrong)
    bshd = layout == "bshd"
    wrong = misplaced(tensors) or _unlike(tensors, bshd, stored)
    caches = {name: x for name, x in tensors.items() if name in ("k_cache", "v_cache", "k_scale", "v_scale")}
    wrong = wrong or not_writable(caches, {name: x for name, x in tensors.items() if name not in caches})
    refuse(*wrong)
    row = 1 if bshd else 2
    # A row of a contiguous cache is the one page of its sequence.
    table = torch.arange(len(seqlens), device=k.device, dtype=torch.int32)[:, None] if page_table is None else page_table
    new = k.shape[row] if cu_seqlens is None else cu_seqlens.diff()
    counts = _check_room(seqlens, new, table, k_cache.shape[row], k_cache.shape[0], in_pages=page_table is not None)
    if cu_seqlens is None:  # one row per token
        k, v = ((x if bshd else x.transpose(1, 2)).flatten(0, 1) for x in (k, v))
    if rotary_cos is not None and rotary_sin is not None:
        furthest = 1 if len(seqlens) and len(k) else 0  # a lower bound, for lengths that are not read
        if counts is not None:
            furthest = max((n + count for n, count in zip(seqlens.tolist(), counts, strict=True) if count), default=0)
        check_tables(rotary_cos, rotary_sin, k.shape[2], furthest)
        _, positions, _ = places(seqlens, cu_seqlens, len(k))
        k = rotate_tokens(k, rotary_cos, rotary_sin, positions, rotary_interleaved)
    if k_scale is not None and v_scale is not None:
        tokens = None if counts is None else sum(counts)
        (k, scale_k), (v, scale_v) = _quantised_tokens({"k": (k, k_scale.dtype), "v": (v, v_scale.dtype)}, k_cache.dtype, tokens)
        _write(k_scale[..., None], v_scale[..., None], scale_k[..., None], scale_v[..., None], seqlens, table, cu_seqlens, bshd)
    _write(*map(_as_bytes, (k_cache, v_cache, k, v)), seqlens, table, cu_seqlens, bshd)
    return (seqlens + new).int()


def _check_room(seqlens: Tensor, new: int | Tensor, table: Tensor, page: int, pages: int, in_pages: bool) -> list[int] | None:
    """How many new tokens each sequence gets, after a check that they fit the sequence's room; None if numbers are not read."""
    room = table.shape[1] * page
    if isinstance(new, int) and new > room:
        raise refusing(ValueError, "k", f"{new} tokens; accepted are up to {room}, for which a sequence has room")
    if not (TORCH.is_readable(seqlens) and (not isinstance(new, Tensor) or TORCH.is_readable(new))):
        return None
    counts: list[int] = new.tolist() if isinstance(new, Tensor) else [new] * len(seqlens)
    for b, (n, count) in enumerate(zip(seqlens.tolist(), counts, strict=True)):
        if count > room:
            raise refusing(ValueError, "cu_seqlens", f"{count} tokens at [{b}]; accepted are up to {room}, for which a sequence has room")
        if not 0 <= n <= room:
            raise refusing(
                ValueError, "seqlens", f"{n} at [{b}]; accepted are 0 to {room - count}, for a sequence has room for {room} tokens"
            )
        if n + count > room:
            raise ValueError(_no_room(b, n, count, room, page, in_pages))
    if TORCH.is_readable(table):
        _check_pages(table.tolist(), seqlens.tolist(), counts, page, pages)
    return counts


def _no_room(b: int, held: int, new: int, room: int, page: int, in_pages: bool) -> str:
    """The error for sequence b, which holds so many tokens that the new ones do not fit after them."""
    full = "full" if held == room else "too small"
    counts = f"have room for {room} tokens, hold {held} (seqlens) and are to get {new} more"
    if in_pages:
        return f"page_table: {full} at [{b}]: the sequence's pages {counts}; accepted is a row of {-(-(held + new) // page)} pages or more"
    return f"k_cache, v_cache: {full} at [{b}]: they {counts}; accepted is room for {held + new} or more"


def _quantised_tokens(given: dict[str, tuple[Tensor, torch.dtype]], dtype: torch.dtype, tokens: int | None) -> list[tuple[Tensor, Tensor]]:
    """Data and scale of k and of v, (Tnew, Hkv, D), each given with the dtype of its scales. tokens: how many tokens are to be written (the
    rest is padding), or None if numbers are not read."""
    largest = {name: _largest(x, None, 0) for name, (x, _) in given.items()}
    wrong: Wrong = []
    if tokens is not None and TORCH.is_readable(given["k"][0]):
        for name, (_, scale_dtype) in given.items():
            wrong += _not_quantisable(name, largest[name][:tokens], dtype, scale_dtype, f"{name}_scale of dtype torch.float32")
    refuse(*wrong)
    return [_rounded(x, largest[name], dtype, None, 0, scale_dtype) for name, (x, scale_dtype) in given.items()]


@names_checked(_OF_COPY, "k_scale=scales")
@writes("k_cache", "v_cache", "k_scale", "v_scale")
def copy(
    k_cache: Tensor,
    v_cache: Tensor,
    source: Tensor,
    target: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Copies pages of a cache, or rows of a contiguous one, in place: page target[i] gets the contents of page source[i].

    Use it when a sequence diverges from another one with which it shares a page.

    Args:
        k_cache, v_cache: the cache, in either layout.
        source, target: int32 or int64 (N,). The numbers of target differ from one another. A pair with a page that is not in the cache is
            left out, if the numbers lie in device memory.
        k_scale, v_scale: for a quantised cache, which is not copied without them: their pages are copied, too. As strobe.attention() takes
            them; k_scale may be one with k_scale_group.

    Raises:
        TypeError, ValueError: an argument is not as described above; nothing is written then.
    """
    tensors = {"k_cache": k_cache, "v_cache": v_cache, "source": source, "target": target}
    scales = {name: x for name, x in (("k_scale", k_scale), ("v_scale", v_scale)) if x is not None}
    tensors.update(scales)
    wrong = unfit_tensors(tensors) or misplaced(tensors)
    if len(scales) == 1:
        wrong.append(ValueError(f"{'v_scale' if 'k_scale' in scales else 'k_scale'}: None beside the other; accepted are both or neither"))
    refuse(*wrong)
    if k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        shapes = f"shapes {tuple(k_cache.shape)}, {tuple(v_cache.shape)}"
        raise ValueError(f"k_cache, v_cache: {shapes}; accepted are four axes, of which the first three are alike")
    if wrong := _unlike_scales(k_cache, v_cache, k_scale, v_scale):
        raise refusal(wrong)
    if wrong := not_writable({"k_cache": k_cache, "v_cache": v_cache, **scales}, {"source": source, "target": target}):
        raise refusal(wrong)
    pages = k_cache.shape[0]
    for name, x in (("source", source), ("target", target)):
        if x.dim() != 1 or x.shape != source.shape or x.dtype not in (torch.int32, torch.int64):
            raise refusing(
                ValueError, name, f"{x.dtype} of shape {tuple(x.shape)}; accepted are integers ({source.shape[0] if source.dim() else 1},)"
            )
        if TORCH.is_readable(x):
            for n, number in enumerate(x.tolist()):
                if not 0 <= number < pages:
                    raise refusing(ValueError, name, f"{number} at [{n}]; {_accepted_pages(pages)}")
    if TORCH.is_readable(target) and len(set(target.tolist())) < len(target):
        raise refusing(ValueError, "target", "a page stands there twice; accepted are numbers that differ from one another")
    if len(source) and pages:
        _copy(_as_bytes(k_cache), _as_bytes(v_cache), source, target)
        if k_scale is not None and v_scale is not None:
            _copy(k_scale, v_scale, source, target)


@names_checked(_OF_GATHER, 'layout="bshd"')
@torch.no_grad()
def gather(cache: Tensor, page_table: Tensor, seqlens: Tensor | None = None, *, layout: str = "bhsd") -> Tensor:
    """K or V of a paged cache as one tensor, a copy: (B, Hkv, n · page, D), or (B, n · page, Hkv, D) with layout "bshd".

    Args:
        cache: (pages, Hkv, page, D), or (pages, page, Hkv, D) with layout "bshd". For a quantised cache also its scales, one for each key
            and head, without the last axis, which the result then lacks, too.
        page_table: int32 (B, n); in host memory this and seqlens may be int64 as well.
        seqlens: int32 (B,): how many tokens each sequence has; None: all. After them come zeros, and also for pages that are not in the
            pool.
        layout: "bhsd" or "bshd".

    Raises:
        TypeError, ValueError: an argument is not as described above.
    """
    tensors = {"cache": cache, "page_table": page_table} | ({} if seqlens is None else {"seqlens": seqlens})
    wrong = unfit_tensors(tensors)
    is_choice(wrong, "layout", layout, ("bhsd", "bshd"))
    wrong = wrong or misplaced(tensors)
    refuse(*wrong)
    if cache.dim() == 3:
        return gather(cache[..., None], page_table, seqlens, layout=layout)[..., 0]
    if cache.dtype in _FP8:
        return gather(_as_bytes(cache), page_table, seqlens, layout=layout).view(cache.dtype)
    if cache.dim() != 4:
        raise refusing(
            ValueError,
            "cache",
            f"shape {tuple(cache.shape)}; accepted is (pages, Hkv, page, D), or (pages, page, Hkv, D) with layout 'bshd'",
        )
    row = 1 if layout == "bshd" else 2
    batch = _check_lists(page_table, seqlens)
    pages, page = cache.shape[0], cache.shape[row]
    if not page:
        raise refusing(ValueError, "cache", f"shape {tuple(cache.shape)}; accepted are pages of one key or more")
    positions = torch.arange(page_table.shape[1] * page, device=cache.device).expand(batch, -1)
    counts = torch.full((batch,), positions.shape[1], device=cache.device) if seqlens is None else seqlens.long()
    if TORCH.is_readable(page_table) and TORCH.is_readable(counts):
        within("seqlens", counts, batch, positions.shape[1], "the room of a sequence")
        _check_pages(page_table.tolist(), [0] * batch, counts.tolist(), page, pages, writes=False)
    shape = (batch, positions.shape[1], *cache.shape[2:]) if row == 1 else (batch, cache.shape[1], positions.shape[1], cache.shape[3])
    if not pages or not positions.numel():
        return cache.new_zeros(shape)
    number = page_table.long().repeat_interleave(page, 1)
    there = (positions < counts[:, None]) & (number >= 0) & (number < pages)
    slot = positions % page
    number = torch.where(there, number, 0)
    found = cache[number, slot] if row == 1 else cache[number, :, slot]  # (B, S, Hkv, D)
    found = torch.where(there[..., None, None], found, 0)
    return found if row == 1 else found.transpose(1, 2).contiguous()


@torch.library.custom_op("strobe::kv_append", mutates_args=("k_cache", "v_cache"))
def _write(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, seqlens: Tensor, page_table: Tensor, cu_seqlens: Tensor | None, bshd: bool
) -> None:
    """Writes the tokens of sequence b, one row each, to its positions from seqlens[b] on, except those that have no place."""
    pages, page = k_cache.shape[0], k_cache.shape[1 if bshd else 2]
    if not (len(seqlens) and len(k) and pages and page_table.shape[1]):
        return
    sequence, positions, there = places(seqlens, cu_seqlens, len(k))
    column = torch.div(positions, page, rounding_mode="floor")
    there = there & (positions >= 0) & (column < page_table.shape[1])
    number = page_table.long()[sequence, column.clamp(0, page_table.shape[1] - 1)]
    there = there & (number >= 0) & (number < pages)
    # A token without a place repeats the first one that has a place; if none has, it repeats the contents of the cache.
    source = torch.where(there, torch.arange(len(k), device=k.device), there.int().argmax())
    some = there.any()
    number, slot = (torch.where(some, x[source], 0) for x in (number, positions % page))
    for cache, x in ((k_cache, k), (v_cache, v)):
        place = (number, slot) if bshd else (number, slice(None), slot)
        cache[place] = torch.where(some, x[source], cache[place])


@torch.library.custom_op("strobe::kv_copy", mutates_args=("k_cache", "v_cache"))
def _copy(k_cache: Tensor, v_cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Copies pages. A pair with a page outside of the cache repeats the first valid pair; if there is none, a page is copied to itself."""
    pages = k_cache.shape[0]
    there = (source >= 0) & (source < pages) & (target >= 0) & (target < pages)
    first = torch.where(there, torch.arange(len(there), device=there.device), there.int().argmax())
    some = there.any()
    source, target = (torch.where(some, x.long()[first], 0) for x in (source, target))
    for cache in (k_cache, v_cache):
        cache[target] = cache[source]


@_write.register_fake
def _(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, seqlens: Tensor, page_table: Tensor, cu_seqlens: Tensor | None, bshd: bool
) -> None:
    return None


@_copy.register_fake
def _(k_cache: Tensor, v_cache: Tensor, source: Tensor, target: Tensor) -> None:
    return None


def _check_lists(page_table: Tensor | None, seqlens: Tensor | None, batch: int | None = None) -> int:
    """Checks the kinds of page_table and seqlens; returns B."""
    if page_table is not None and (page_table.dim() != 2 or not _is_integral(page_table) or batch not in (None, page_table.shape[0])):
        accepted = "(B, n)" if batch is None else f"({batch}, n)"
        raise refusing(
            ValueError,
            "page_table",
            f"{page_table.dtype} of shape {tuple(page_table.shape)}; accepted is int32 {accepted}" + _as_int32("page_table", page_table),
        )
    batch = page_table.shape[0] if batch is None and page_table is not None else batch
    if seqlens is not None and (seqlens.shape != (batch,) or not _is_integral(seqlens)):
        raise refusing(
            ValueError,
            "seqlens",
            f"{seqlens.dtype} of shape {tuple(seqlens.shape)}; accepted is int32 ({batch},)" + _as_int32("seqlens", seqlens),
        )
    return batch or 0


def _is_integral(x: Tensor) -> bool:
    return x.dtype == torch.int32 or (x.dtype == torch.int64 and x.is_cpu)


def _as_int32(name: str, x: Tensor) -> str:
    return f"; {name}.int()" if x.dtype in (torch.int64, torch.int16, torch.int8, torch.uint8) else ""


class _Sizes(NamedTuple):
    """The sizes that the tensors of a call of append() share."""

    batch: int
    heads: int
    new: int  # tokens per sequence; with cu_seqlens, of all sequences together
    rows: int  # number of pages, or of sequences
    page: int


def _sizes_of_first(given: dict[str, Tensor], bshd: bool) -> _Sizes:
    """The sizes of k_cache and k."""
    k_cache, k, cu_seqlens = given["k_cache"], given["k"], given.get("cu_seqlens")
    head, row = (2, 1) if bshd else (1, 2)
    batch, new = (len(k), k.shape[row]) if cu_seqlens is None else (len(cu_seqlens) - 1, len(k))
    return _Sizes(batch, k_cache.shape[head], new, k_cache.shape[0] if "page_table" in given else batch, k_cache.shape[row])


def _sizes_of_most(given: dict[str, Tensor], bshd: bool) -> _Sizes:
    """The sizes that most tensors agree on, for tensors that do not fit together, so that correct ones are not reported."""
    k_cache, v_cache, k, v, seqlens = (given[name] for name in ("k_cache", "v_cache", "k", "v", "seqlens"))
    paged, packed = "page_table" in given, "cu_seqlens" in given
    head, row = (2, 1) if bshd else (1, 2)
    of_new = 1 if packed else head
    heads = _most([k_cache.shape[head], v_cache.shape[head], k.shape[of_new], v.shape[of_new]])
    turned = k.shape[of_new] != heads == v.shape[of_new]  # if so, k's other axes cannot be compared
    if packed:
        batch, new = len(given["cu_seqlens"]) - 1, len(v if turned else k)
    else:
        of_caches = [] if paged else [len(k_cache), len(v_cache)]
        batch = _most([len(k), len(v), *of_caches, *([len(seqlens)] if seqlens.dim() else [])])
        new = (v if turned else k).shape[row]
    cache = v_cache if k_cache.shape[head] != heads == v_cache.shape[head] else k_cache
    return _Sizes(batch, heads, new, len(cache) if paged else batch, cache.shape[row])


def _most(sizes: list[int]) -> int:
    """The most frequent size; the first of those that are equally frequent."""
    return max(sizes, key=sizes.count)


def _accepted_shapes(given: dict[str, Tensor], sizes: _Sizes, bshd: bool) -> dict[str, tuple[int, ...]]:
    """The shapes accepted for the caches and the new tokens."""
    accepted: dict[str, tuple[int, ...]] = {}
    for name in ("k", "v"):
        width = given[f"{name}_cache"].shape[3]
        new = width * (2 if "k_scale" in given and given["k_cache"].dtype == torch.uint8 else 1)
        for whose, first, tokens, columns in ((f"{name}_cache", sizes.rows, sizes.page, width), (name, sizes.batch, sizes.new, new)):
            accepted[whose] = (first, tokens, sizes.heads, columns) if bshd else (first, sizes.heads, tokens, columns)
        if "cu_seqlens" in given:
            accepted[name] = (sizes.new, sizes.heads, new)
    return accepted


def _fit(given: dict[str, Tensor], accepted: dict[str, tuple[int, ...]]) -> bool:
    return all(given[name].shape == shape for name, shape in accepted.items())


def _ways_out(given: dict[str, Tensor], name: str, sizes: _Sizes, bshd: bool) -> str:
    """What the caller may have meant by a tensor that does not fit."""
    if _fit(given, _accepted_shapes(given, _sizes_of_first(given, not bshd), not bshd)):
        return f'; did you mean layout="{"bhsd" if bshd else "bshd"}"?'
    shape = given[name].shape
    packed = name in ("k", "v") and "cu_seqlens" in given
    head, row = (1, 0) if packed else (2, 1) if bshd else (1, 2)
    if shape[row] == sizes.heads != shape[head]:
        return f"; if tokens lie {'before' if head < row else 'behind'} heads, {name}.transpose({min(head, row)}, {max(head, row)})"
    if name in ("k_cache", "v_cache") and "page_table" not in given and shape[0] != sizes.rows:
        return ", a row for each sequence; a pool of pages is accepted beside page_table"
    return ""


def _unlike(given: dict[str, Tensor], bshd: bool, stored: bool) -> Wrong:
    """Refuses the tensors of a call of append() that do not fit. stored: k and v are numbers of a quantised cache that has no scales."""
    k_cache, k, seqlens = (given[name] for name in ("k_cache", "k", "seqlens"))
    table, cu_seqlens, quantised = given.get("page_table"), given.get("cu_seqlens"), "k_scale" in given
    axes = {"k_cache": 4, "v_cache": 4} | dict.fromkeys(("k", "v"), 4 if cu_seqlens is None else 3)
    wrong: Wrong = [
        refusing(
            ValueError, name, f"shape {tuple(given[name].shape)}; accepted are {'four axes' if n == 4 else 'three axes, with cu_seqlens'}"
        )
        for name, n in axes.items()
        if given[name].dim() != n
    ]
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or not len(cu_seqlens) or not _is_integral(cu_seqlens)):
        wrong.append(
            refusing(
                ValueError,
                "cu_seqlens",
                f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; accepted is int32 (B + 1,)" + _as_int32("cu_seqlens", cu_seqlens),
            )
        )
    if wrong:
        return wrong
    # Without scales the intended dtype of k and v is not known.
    if not (quantised or stored) and (k_cache.dtype in _LARGEST or given["v_cache"].dtype in _LARGEST):
        of = f", float16 or float32 {tuple(k_cache.shape[:3])}: append() quantises k and v itself, and writes their scales"
        return _wrong_dtypes(k_cache, given["v_cache"], quantised, of)
    row = 1 if bshd else 2
    sizes = _sizes_of_first(given, bshd)
    accepted = _accepted_shapes(given, sizes, bshd)
    if not _fit(given, accepted):
        sizes = _sizes_of_most(given, bshd)
        accepted = _accepted_shapes(given, sizes, bshd)
    batch = sizes.batch
    wrong += [
        refusing(ValueError, name, f"shape {tuple(given[name].shape)}; accepted is {shape}" + _ways_out(given, name, sizes, bshd))
        for name, shape in accepted.items()
        if given[name].shape != shape
    ]
    if not k_cache.shape[row]:
        wrong.append(refusing(ValueError, "k_cache", "room for 0 tokens; accepted is 1 or more"))
    for name in ("k_scale", "v_scale") if quantised else ():
        x, shape = given[name], accepted["k_cache"][:3]
        if x.shape != shape or x.dtype not in (torch.float16, torch.float32):
            wrong.append(refusing(ValueError, name, f"{x.dtype} of shape {tuple(x.shape)}; accepted is float16 or float32 {shape}"))
        if not given[name[0]].shape[-1]:
            wrong.append(ValueError(f"{name[0]}: shape {tuple(given[name[0]].shape)}; accepted is a last axis of 1 or more"))
    wrong += [] if stored else _wrong_dtypes(k_cache, given["v_cache"], quantised)
    if quantised and k.dtype not in _PLAIN:
        wrong.append(refusing(ValueError, "k", f"dtype {k.dtype}; accepted are {_listed(_PLAIN)}"))
    for name, of in (("v", "k"),) if quantised else (("k", "k_cache"), ("v", "k_cache")):
        wrong += _other_dtype(name, given[name], of, given[of])
    if wrong:
        return wrong
    if cu_seqlens is not None and TORCH.is_readable(cu_seqlens):
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends != sorted(ends) or ends[-1] > len(k):
            wrong.append(
                refusing(
                    ValueError,
                    "cu_seqlens",
                    f"{shown(ends)}; accepted are numbers from 0 to at most {len(k)}, the rows of k, that never fall",
                )
            )
    try:
        _check_lists(table, seqlens, batch)
    except ValueError as refused:
        wrong.append(refused)
    return wrong


def _wrong_dtypes(k_cache: Tensor, v_cache: Tensor, quantised: bool, scales: str = "") -> Wrong:
    """Refuses dtypes that attention() does not accept, for a cache with scales or without. scales: a message's words for missing scales."""
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dtype in _LARGEST and not quantised:
            return [ValueError(f"k_scale, v_scale: None beside {name} of {x.dtype}; accepted are the scales of a quantised cache{scales}")]
    accepted, beside = ((*_LARGEST,), " beside k_scale") if quantised else (_PLAIN, "")
    wrong: Wrong = []
    if k_cache.dtype not in accepted:
        wrong.append(refusing(ValueError, "k_cache", f"dtype {k_cache.dtype}{beside}; accepted are {_listed(accepted)}"))
    return wrong + _other_dtype("v_cache", v_cache, "k_cache", k_cache)


def _other_dtype(name: str, x: Tensor, of: str, other: Tensor) -> Wrong:
    return [] if x.dtype == other.dtype else [refusing(ValueError, name, f"dtype {x.dtype}; accepted is {other.dtype}, as {of} has")]


def _listed(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))


def _unlike_scales(k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> Wrong:
    """Refuses caches and scales that do not fit, for copy(), which does not know the layout."""
    wrong = _wrong_dtypes(k_cache, v_cache, quantised=k_scale is not None)
    if wrong or k_scale is None or v_scale is None:
        return wrong
    pages, one, other = sizes = tuple(k_cache.shape[:3])
    columns = k_cache.shape[3] * (2 if k_cache.dtype == torch.uint8 else 1)
    by_column = k_scale.dim() == 4 and (k_scale.shape[0], k_scale.shape[3]) == (pages, columns)
    if by_column:  # the axes are heads and groups of rows, or groups and heads
        first, second = k_scale.shape[1:3]
        by_column = (first == one and _is_groups(second, other)) or (second == other and _is_groups(first, one))
    types = (torch.float16, torch.float32)
    if (k_scale.shape != sizes and not by_column) or k_scale.dtype not in types:
        groups = f"with k_scale_group G ({pages}, {one}, ceil({other} / G), {columns}), or ({pages}, ceil({one} / G), {other}, {columns})"
        given = f"{k_scale.dtype} of shape {tuple(k_scale.shape)}"
        wrong.append(refusing(ValueError, "k_scale", f"{given}; accepted is float16 or float32 {sizes}, {groups} in layout bshd"))
    if v_scale.shape != sizes or v_scale.dtype not in types:
        wrong.append(
            refusing(ValueError, "v_scale", f"{v_scale.dtype} of shape {tuple(v_scale.shape)}; accepted is float16 or float32 {sizes}")
        )
    return wrong


def _is_groups(count: int, rows: int) -> bool:
    """Whether some k_scale_group divides the rows into this many groups."""
    if not count or not rows:
        return count == rows
    group = 32 * -(-rows // (32 * count))  # the smallest group that makes at most `count` groups
    return -(-rows // group) == count


def _accepted_pages(pages: int) -> str:
    return f"accepted are 0 to {pages - 1}, the pages of the cache" if pages else "accepted is none, for the cache has no pages"


def _check_pages(table: list[list[int]], begin: list[int], new: list[int], page: int, pages: int, writes: bool = True) -> None:
    """Checks that the pages that hold the new[b] tokens from begin[b] on are in the pool and, with `writes`, are used at no other place of
    a sequence."""
    written: dict[int, tuple[int, int]] = {}  # page → the sequence, and the page's index in it
    ends = [-(-(first + count) // page) for first, count in zip(begin, new, strict=True)]
    for b, (row, first, count, end) in enumerate(zip(table, begin, new, ends, strict=True)):
        for n in range(first // page, end) if count else ():
            if not 0 <= row[n] < pages:
                raise refusing(ValueError, "page_table", f"page {row[n]} at [{b}, {n}]; {_accepted_pages(pages)}")
            if writes and written.setdefault(row[n], (b, n)) != (b, n):
                places = f"[{written[row[n]][0]}, {written[row[n]][1]}] and at [{b}, {n}]"
                raise refusing(
                    ValueError, "page_table", f"page {row[n]} is to be written at {places}; accepted is a page of its own for each"
                )
    for b, (row, end) in enumerate(zip(table, ends, strict=True)):
        for n in range(end):
            if (place := written.get(row[n], (b, n))) != (b, n):
                raise refusing(
                    ValueError,
                    "page_table",
                    f"page {row[n]}, which holds keys at [{b}, {n}], is to be written at [{place[0]}, {place[1]}]; "
                    "accepted is a page of its own there: strobe.kv.copy makes one",
                )
