"""One call of the library: its structs, and its refusals in words that fit the Python function."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from ._abi import MAX_RANK, NO_DTYPE, engines, error
from ._core import ffi, lib
from ._options import AUX, FIELDS, GRADIENTS, INPUTS, INT64_MAX, INT64_MIN
from ._part import decoded
from .arrays.known import known_framework

_PLACES = {name: i for i, (name, _) in enumerate(ffi.typeof("strobe_addresses").fields[1:])}
_MEMBERS = frozenset(name for name, _ in ffi.typeof("strobe_attention").fields)
# Tensors that broadcast to (B, H, Sq, Sk): if they have fewer axes, the first ones are missing, as in NumPy.
_SCORES = frozenset({"mask", "bias", "dbias"})
# A field of strobe_attention that is no option of attention(): only its backward has it.
ACCUMULATE = "accumulate"
# Tensors whose axes are (B,S,H,D) with layout "bshd".
_TOKENS = frozenset({"q", "k", "v", "out", "dout", "dq", "dk", "dv"})
_SCALES = frozenset({"k_scale", "v_scale"})  # the same without the last axis, if k has four
_LAYOUT_HINT = "; did you mean layout="
_OF_SIZES = re.compile(
    r"(mask|bias|alibi_slopes|sinks|lse|dlse|delta): (shape |a causal bias )|seqused_k: -?\d+ at |block_mask: (of |block_\w+: shape )"
)


@lru_cache(maxsize=1024)
def attention_struct(options: tuple[tuple[str, Any], ...]) -> tuple[Any, Any]:
    """A strobe_attention and the objects that must live as long. It is never written to again, so calls share it."""
    fields: dict[str, Any] = {"size": ffi.sizeof("strobe_attention")}
    for name, x in options:
        if name in _MEMBERS:
            fields[name] = x
        if f"has_{name}" in _MEMBERS:
            fields[f"has_{name}"] = True
    alive = None
    if "part" in fields:
        fields["part"], alive = _part_struct(fields["part"])
    for name in ("seed", "offset"):
        fields[name] = fields.get(name, 0) % 2**64
    engine = fields.get("engine")
    if engine is not None:
        fields["engine"] = engine = ffi.new("char[]", engine.encode())
    return ffi.new("strobe_attention *", fields), (engine, alive)


def _part_struct(part: tuple[int, ...]) -> tuple[Any, Any]:
    """A strobe_part for an encoded Part, and the objects that must live as long."""
    lists = decoded(part)
    alive = []

    def tensor(numbers: list[int], shape: tuple[int, ...]) -> Any:
        data = ffi.new("int64_t[]", [min(max(n, INT64_MIN), INT64_MAX) for n in numbers])
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        made = ffi.new("strobe_tensor *", {"data": data, "dtype": lib.STROBE_INT64, "rank": len(shape), "shape": shape, "strides": strides})
        alive.append((data, made))
        return made

    fields: dict[str, Any] = {f"{side}_ranges": tensor(numbers, (*shape, 2)) for side, (shape, numbers) in lists.ranges.items()}
    fields |= {f"seqlens_{side}": tensor(numbers, (len(numbers),)) for side, numbers in lists.seqlens.items()}
    fields |= {name: getattr(lists, name) for name in ("partial", "first_head", "heads", "first_batch")}
    made = ffi.new("strobe_part *", {"size": ffi.sizeof("strobe_part"), **fields})
    return made, (made, alive)


def field_of(tensor: str) -> int:
    """The tensor's index among those of strobe_addresses, as strobe_glue_run counts them."""
    return _PLACES[tensor]


# Fills a strobe_tensor: (struct, name for messages, array, whether its axes 1 and 2 change places). Returns the objects that must live as
# long.
View = Callable[[Any, str, Any, bool], object]


class Allocator:
    """The source of a call's workspace: `allocate(bytes)` returns the memory's owner, which is kept during the call, and its address.

    The owner may be released before the work is done if its memory is reused in the stream's order."""

    def __init__(self, allocate: Callable[[int], tuple[Any, int]]):
        # The handle keeps it alive. It does not refer to the handle, so that no reference cycle keeps tensors until the garbage collector
        # runs.
        self._request = _Request(allocate)
        self.handle = ffi.new_handle(self._request)

    def raise_if_failed(self) -> None:
        if self._request.error is not None:
            raise self._request.error


class _Request:
    def __init__(self, allocate: Callable[[int], tuple[Any, int]]):
        self._allocate = allocate
        self._owner: Any = None
        self.error: BaseException | None = None

    def __call__(self, count: int) -> Any:
        try:
            self._owner, address = self._allocate(count)
            return ffi.cast("void *", address)
        except BaseException as error:  # no exception crosses the library: Call.run raises it
            self.error = error
            return ffi.NULL


# Fills a strobe_execution; returns the source of the workspace, None for the library's own memory.
Place = Callable[[Any], "Allocator | None"]


@ffi.def_extern()
def strobe_python_allocate(allocator: Any, count: int) -> Any:
    return ffi.from_handle(allocator)(count)


class Call:
    """One call's structs: what is computed, on what, with what.

    arrays: the caller's; made: those that the package has allocated for the call; options: those of FIELDS not at their default;
    place: says where it runs."""

    __slots__ = ("_alive", "_allocator", "_arrays", "_attention", "_bshd", "_execution", "_made", "_tensors")

    def __init__(self, arrays: dict[str, Any], made: dict[str, Any], options: dict[str, Any], view: View, place: Place):
        attention = attention_struct(tuple(options.items()))
        self._bshd = bshd = "bshd" in options
        self._arrays, self._made = arrays, made
        views = ffi.new("strobe_tensor[]", len(_PLACES))
        tensors = ffi.new("strobe_tensors *")
        tensors.size = ffi.sizeof("strobe_tensors")
        t = views + 0
        alive = [views, attention]
        k = arrays.get("k")
        for named in (arrays, made):
            for name, array in named.items():
                swapped = bshd and name in _TOKENS and len(array.shape) == MAX_RANK  # packed ones have no such axes
                if bshd and name in _SCALES:
                    swapped = k is not None and len(k.shape) == MAX_RANK and len(array.shape) >= MAX_RANK - 1
                if name in _SCORES and array.ndim < MAX_RANK:
                    array = array[(None,) * (MAX_RANK - array.ndim)]
                alive.append(view(t, name, array, swapped))
                setattr(tensors, name, t)
                t += 1
        execution = ffi.new("strobe_execution *")
        self._allocator = allocator = place(execution)
        if allocator is not None:
            execution.allocate = lib.strobe_python_allocate
            execution.allocator = allocator.handle
        self._attention, self._tensors, self._execution = attention[0], tensors, execution
        self._alive = alive

    @property
    def made(self) -> dict[str, Any]:
        return self._made

    def run(self, function: Any, *more: Any) -> None:
        self.run_without_execution(function, self._execution, *more)

    def run_without_execution(self, function: Any, *more: Any) -> None:
        status = function(self._attention, self._tensors, *more)
        if status != lib.STROBE_OK:
            if self._allocator is not None:
                self._allocator.raise_if_failed()
            raise error(status, self._in_callers_words)

    def prepare(self, direction: int) -> Any:
        """The prepared call: a strobe_prepared, released with the last reference to it."""
        prepared = ffi.new("strobe_prepared **")
        self.run(lib.strobe_prepare, direction, prepared)
        return ffi.gc(prepared[0], lib.strobe_release)

    def _in_callers_words(self, reason: str) -> str:
        """One of the library's reasons, which begins with the name of the wrong argument; empty if that is none of the caller's."""
        name = reason.partition(":")[0]
        if name in self._made:
            return ""
        if name.startswith("block_"):
            reason = "block_mask: " + reason
            return "" if is_of_sizes(reason) and _are_in_the_other_layout(self._arrays, self._bshd) else reason
        if self._bshd and name in _TOKENS:
            reason = re.sub(r"\(([^(),]+), ([^(),]+), ([^(),]+), ([^(),]+)\)", r"(\1, \3, \2, \4)", reason)
        if self._bshd and name in _SCALES:
            reason = re.sub(r"\(([^(),]+), ([^(),]+), ([^(),]+)((?:, [^(),]+)?)\)", r"(\1, \3, \2\4)", reason)
        array = self._arrays.get(name)
        if array is not None:
            reason = reason.replace(f"dtype {NO_DTYPE} (none)", f"dtype {array.dtype}")
            if name in _SCORES and array.ndim < MAX_RANK and ": shape" in reason:
                reason = re.sub(r"shape \([^()]*\)", f"shape {tuple(array.shape)}", reason, count=1)
                reason += self._missing_axes(name, tuple(array.shape))
            if ": dtype" in reason:
                reason += _ways_out(name, reason, array, not _SCALES.isdisjoint(self._arrays))
            guessed = _are_in_the_other_layout(self._arrays, self._bshd)
            if guessed and is_of_sizes(reason):
                return ""
            heads = name == "k" and " heads for the " in reason
            rows = name == "seqused_k" and reason.endswith("the positions of a row of page_table")
            if heads and self._bshd:
                reason = reason.replace("on the second axis of (pages", "on the third axis of (pages")
            if (heads and guessed) or (rows and self._has_longer_pages(reason)):
                reason += f'{_LAYOUT_HINT}"{"bhsd" if self._bshd else "bshd"}"?'
            if name.startswith("cu_seqlens"):
                given = getattr(self._attention, f"max_seqlen_{name[-1]}")
                reason = reason.replace("at most max_seqlen = ", f"at most {f'max_seqlen_{name[-1]}' if given else f'T{name[-1]}'} = ")
            if name.startswith("cu_seqlens") and self._heads_come_first(name, reason):
                reason += f"; packed {name[-1]} is (tokens, heads, D), and this one looks like (heads, tokens, D)"
            if name in _SCORES and ": shape" in reason:
                reason += self._unsaid_lengths()
            if name in _SCALES and re.search(": (rank|shape) ", reason):
                reason += self._other_scales(name)
        if name in ("k_scale_group", "max_seqlen_q", "max_seqlen_k"):
            reason = reason.replace("accepted is 0", "accepted is None")
        if name == "engine":
            reason = reason.replace("or none", "or None") + _close_engine(reason)
        return reason.removeprefix("execution.")

    def _heads_come_first(self, name: str, reason: str) -> bool:
        """For a sequence that is too long for packed tokens: whether it fits if the axis taken for heads is that of tokens."""
        x = self._arrays.get(name[-1])
        length = re.search(r"has (\d+) tokens; accepted is at most", reason)
        return x is not None and x.ndim == MAX_RANK - 1 and length is not None and x.shape[0] < int(length[1]) <= x.shape[1]

    def _has_longer_pages(self, reason: str) -> bool:
        """For a length that exceeds a row of the page table: whether it would fit if the pools' axes 1 and 2 changed places."""
        q, k, table = (self._arrays.get(name) for name in ("q", "k", "page_table"))
        if q is None or k is None or table is None:
            return False
        page, heads = k.shape[1:3] if not self._bshd else k.shape[2:0:-1]
        q_heads = q.shape[1] if q.ndim < MAX_RANK or not self._bshd else q.shape[2]
        used = re.search(r"seqused_k: (\d+) at", reason)
        return used is not None and int(used[1]) <= table.shape[1] * page and heads > 0 and q_heads % heads == 0

    def _unsaid_lengths(self) -> str:
        """For a mask or bias over packed sequences: the missing options that would give its sizes."""
        if "cu_seqlens_q" not in self._arrays:
            return ""
        if "page_table" in self._arrays:  # it gives the number of keys
            return "" if self._attention.max_seqlen_q else "; max_seqlen_q gives the length of its axis -2"
        if self._attention.max_seqlen_q and self._attention.max_seqlen_k:
            return ""
        return "; max_seqlen_q and max_seqlen_k give the lengths of its last two axes"

    def _other_scales(self, name: str) -> str:
        """For scales in a wrong shape: how the caller writes them in the right one."""
        scale, k = self._arrays[name], self._arrays.get("k")
        if k is None or (name == "k_scale" and self._attention.k_scale_group):
            return ""
        shape, rows = tuple(scale.shape), tuple(k.shape[:-1])
        if len(shape) == k.ndim and shape[-1] == 1:
            return f"; did you mean {name}[..., 0]?"
        if len(shape) == k.ndim and name == "k_scale":
            return "; did you mean a scale for each column, with k_scale_group?"
        by_head = len(shape) == 1 and shape[0] > 1 and not self._bshd and k.ndim == MAX_RANK
        full, index = ((*shape, 1), "[:, None]") if by_head else (shape, "")
        framework = known_framework(scale)
        if framework is None or len(full) > len(rows) or any(n not in (1, m) for n, m in zip(full[::-1], rows[::-1], strict=False)):
            return ""
        return f"; one for many keys is a view of it, {framework.expanded_in_words(name + index, rows)}"

    def _missing_axes(self, name: str, shape: tuple[int, ...]) -> str:
        """For a mask or bias that does not broadcast: how to make it broadcast, if its axes are those of a batch and of keys."""
        q, k, cu_seqlens_q = map(self._arrays.get, ("q", "k", "cu_seqlens_q"))
        if q is None or k is None or q.ndim != k.ndim or "page_table" in self._arrays:
            return ""  # another line says what is wrong with them
        if q.ndim == MAX_RANK:
            tokens = 1 if self._bshd else 2
            batch, queries, keys = q.shape[0], q.shape[tokens], k.shape[tokens]
        elif cu_seqlens_q is None or not cu_seqlens_q.ndim:
            return ""
        else:
            batch = cu_seqlens_q.shape[0] - 1
            queries, keys = self._attention.max_seqlen_q or q.shape[0], self._attention.max_seqlen_k or k.shape[0]
        if shape == (batch, keys):
            return f"; of (B, Sk), {name}[:, None, None, :]"
        if shape in ((batch, 1, keys), (batch, queries, keys)):
            return f"; of (B, {'1' if shape[1] == 1 else 'Sq'}, Sk), {name}[:, None]"
        return ""


def _check_structs(structs: Mapping[str, Iterable[str]]) -> None:
    """Checks that each struct has the fields that the table of options needs."""
    for struct, wanted in structs.items():
        there = {name for name, _ in ffi.typeof(struct).fields}
        if lacking := [name for name in wanted if name not in there]:
            raise ImportError(
                f"the rows of python/strobe/_options.py give {', '.join(lacking)}, which struct {struct} in include/strobe/strobe.h does "
                "not have: add that at its end, then build the package again (make setup)"
            )


_check_structs(
    {
        "strobe_attention": [
            member for name, x in FIELDS.items() if x.in_struct for member in (name, f"has_{name}" if x.may_be_absent else name)
        ],
        "strobe_tensors": [*INPUTS, *GRADIENTS, *AUX],
        "strobe_addresses": [*INPUTS, *GRADIENTS, *AUX],
    }
)


# Tensors that are cast without a loss, or are no results of a computation: the dtype in which messages ask for them, for any q but float64.
_CASTS = {"rng": "int64", "bias": "float32", "sinks": "float32", "alibi_slopes": "float32", "k_scale": "float32", "v_scale": "float32"}
_CASTS |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table"), "int32")


def _ways_out(name: str, reason: str, array: Any, has_scales: bool) -> str:
    """For a wrong dtype: what the caller may have meant."""
    framework = known_framework(array)
    given, _, accepted = reason.partition("; accepted is ")
    number = re.search(r"dtype (torch\.)?(u?int|b?float)\d+$", given)
    if name == "mask":
        cast = "" if framework is None else f"; of zeros and ones, {framework.cast_in_words(name, 'bool')}"
        return "; what is added to the scores is bias" if "float" in given else cast
    if name == "bias" and "dtype bool" in given:
        return "; what hides is mask"
    if framework is not None and name in _CASTS and number is not None:
        dtype = "float64" if accepted == "float64" else _CASTS[name]
        whole = dtype.startswith("int")
        return f"; {framework.cast_in_words(name, dtype)}" if not whole or number[2].endswith("int") else ""
    if has_scales and name in ("k", "v") and "float" in given and "float8" not in given and "," in accepted:
        return ", or none of k_scale and v_scale"
    if has_scales and name == "v" and "," not in reason:  # if k has it, only one dtype is accepted
        return ", as k"
    if not has_scales and name in ("k", "v") and re.search(r"dtype (int8|uint8|float8_e4m3fn);", reason):
        return ", or with k_scale and v_scale int8, float8_e4m3fn, uint8"
    return ""


def _are_in_the_other_layout(arrays: dict[str, Any], bshd: bool) -> bool:
    """Whether the heads of q, k and v do not fit, but would fit if axes 1 and 2 changed places."""
    shapes = [tuple(arrays[name].shape) for name in ("q", "k", "v") if name in arrays]
    paged = "page_table" in arrays
    if len(shapes) < 3 or any(len(shape) != MAX_RANK for shape in shapes[1:]) or len(shapes[0]) not in ((3, 4) if paged else (4,)):
        return False
    of_q, of_k, of_v = shapes
    fit = [
        heads_kv > 0 and of_q[axis if len(of_q) == MAX_RANK else 1] % heads_kv == 0
        for axis, heads_kv in ((2 if bshd else 1, of_k[2 if bshd else 1]), (1 if bshd else 2, of_k[1 if bshd else 2]))
    ]
    return fit == [False, True] and of_k[:3] == of_v[:3] and of_q[-1] == of_k[3] and (paged or of_q[0] == of_k[0])


def is_of_sizes(reason: str) -> bool:
    """Whether the reason depends on H, Sq or Sk. If these are of another layout, it may refuse a correct argument."""
    return _OF_SIZES.match(reason) is not None


def guesses_layout(reason: str) -> bool:
    return _LAYOUT_HINT in reason


def _close_engine(reason: str) -> str:
    unknown = re.match(r'engine: "(.*)" is unknown', reason)
    close = get_close_matches(unknown[1], [name for name, _ in engines()], 1) if unknown else []
    return "".join(f"; did you mean {name}?" for name in close)
