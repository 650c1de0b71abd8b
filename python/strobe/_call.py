"""One call of the library: its structs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from ._abi import MAX_RANK
from ._core import ffi, lib
from ._hints import SCALES, SCORES, TOKENS, OfCall
from ._options import AUX, FIELDS, GRADIENTS, INPUTS, INT64_MAX, INT64_MIN
from ._part import decoded
from ._refusals import failure

_MOST_TENSORS = len(INPUTS) + len(("out", "lse", "dout", "dlse", "delta")) + len(GRADIENTS) + len(AUX)
_PLACES = {name: i for i, (name, _) in enumerate(ffi.typeof("strobe_addresses").fields[1:])}
# A field of strobe_attention that is no option of attention(): only its backward has it.
ACCUMULATE = "accumulate"


@lru_cache(maxsize=1024)
def attention_struct(options: tuple[tuple[str, Any], ...]) -> tuple[Any, Any]:
    """A strobe_attention and the objects that must live as long. It is never written to again, so calls share it."""
    fields: dict[str, Any] = {"size": ffi.sizeof("strobe_attention")}
    for name, x in options:
        if name == ACCUMULATE or FIELDS[name].in_struct:
            fields[name] = x
        if name != ACCUMULATE and FIELDS[name].has:
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
        views = ffi.new("strobe_tensor[]", _MOST_TENSORS)
        tensors = ffi.new("strobe_tensors *")
        tensors.size = ffi.sizeof("strobe_tensors")
        t = views + 0
        alive = [views, attention]
        k = arrays.get("k")
        for named in (arrays, made):
            for name, array in named.items():
                swapped = bshd and name in TOKENS and len(array.shape) == MAX_RANK  # packed ones have no such axes
                if bshd and name in SCALES:
                    swapped = k is not None and len(k.shape) == MAX_RANK and len(array.shape) >= MAX_RANK - 1
                if name in SCORES and array.ndim < MAX_RANK:
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
            raise failure(status, OfCall(self._arrays, self._made, self._bshd, self._attention))

    def prepare(self, direction: int) -> Any:
        """The prepared call: a strobe_prepared, released with the last reference to it."""
        prepared = ffi.new("strobe_prepared **")
        self.run(lib.strobe_prepare, direction, prepared)
        return ffi.gc(prepared[0], lib.strobe_release)


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
        "strobe_attention": [field for name, x in FIELDS.items() if x.in_struct for field in (name, f"has_{name}" if x.has else name)],
        "strobe_tensors": [*INPUTS, *GRADIENTS, *AUX],
        "strobe_addresses": [*INPUTS, *GRADIENTS, *AUX],
    }
)
