"""One call: parsed once from the caller's arguments and kept across autograd; its results, and the C structs by which it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from ._abi import FORWARD, IN_A_DIRECTION, MAX_RANK, WITH_GRADIENTS, said
from ._core import ffi, lib
from ._function import CAPTURED, captured_by, struct_of
from ._function import FIELDS as FUNCTIONS
from ._hints import OfCall
from ._options import AUX, COTANGENTS, DERIVATIVES, FIELDS, GRADIENTS, INPUTS, INT64_MAX, INT64_MIN, SCALES, SCORES, TANGENTS, TOKENS
from ._part import decoded, is_partial
from ._refusals import Refusal, failure, refusals_of
from .arrays.base import Array, Framework

_PLACES = {name: i for i, (name, _) in enumerate(ffi.typeof("strobe_addresses").fields[1:])}
_MEMBERS = frozenset(name for name, _ in ffi.typeof("strobe_attention").fields)
# A field of strobe_attention that is an option of attention_backward(), but not of attention().
ACCUMULATE = "accumulate"
ORACLE = "reference"  # the engine that writes float64 for any input dtype


@lru_cache(maxsize=1024)
def attention_struct(options: tuple[tuple[str, Any], ...]) -> tuple[Any, Any]:
    """A strobe_attention and the objects that must live as long as it. Calls share the struct, which is never written to again."""
    fields: dict[str, Any] = {"size": ffi.sizeof("strobe_attention")}
    for name, x in options:
        if name in _MEMBERS:
            fields[name] = x
        if f"has_{name}" in _MEMBERS:
            fields[f"has_{name}"] = True
    alive = []
    makers: dict[str, Callable[[Any], tuple[Any, Any]]] = {"part": _part_struct, **dict.fromkeys(FUNCTIONS.values(), struct_of)}
    for name, made in makers.items():
        if name in fields:
            fields[name], more = made(fields[name])
            alive.append((fields[name], more))
    for name in ("seed", "offset"):
        fields[name] = fields.get(name, 0) % 2**64
    engine = fields.get("engine")
    if engine is not None:
        fields["engine"] = engine = ffi.new("char[]", engine.encode())
    return ffi.new("strobe_attention *", fields), (engine, alive)


def _part_struct(part: tuple[int, ...]) -> tuple[Any, Any]:
    """A strobe_part for an encoded Part, and the objects that must live as long as it."""
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
        self._allocate = allocate
        self._owner: Any = None
        self.error: BaseException | None = None

    def __call__(self, count: int) -> Any:
        try:
            self._owner, address = self._allocate(count)
            return ffi.cast("void *", address)
        except BaseException as error:  # no exception crosses the library: Structs.run raises it
            self.error = error
            return ffi.NULL


# Fills a strobe_execution; returns the source of the workspace, None for the library's own memory.
Place = Callable[[Any], Allocator | None]


@ffi.def_extern()
def strobe_python_allocate(allocator: Any, count: int) -> Any:
    return ffi.from_handle(allocator)(count)


def has_swapped_axes(name: str, array: Any, arrays: Mapping[str, Any]) -> bool:
    """Whether axes 1 and 2 of a call's array change places for the library, with layout "bshd". arrays: those that the call reads."""
    if name in SCALES:
        of = arrays.get(SCALES[name])
        return of is not None and len(of.shape) == MAX_RANK and len(array.shape) >= MAX_RANK - 1
    return name in TOKENS and len(array.shape) == MAX_RANK  # packed tensors have no such axes


class Structs:
    """A call's C structs: the options, the tensors, and where the call runs.

    arrays: the caller's; made: arrays that the package has allocated for the call; options: the fields of FIELDS that are not at their
    default; place: fills the strobe_execution."""

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
        for named in (arrays, made):
            for name, array in named.items():
                swapped = bshd and has_swapped_axes(name, array, arrays)
                if name in SCORES and array.ndim < MAX_RANK:
                    array = array[(None,) * (MAX_RANK - array.ndim)]
                alive.append(view(t, name, array, swapped))
                setattr(tensors, name, t)
                t += 1
        execution = ffi.new("strobe_execution *")
        self._allocator = allocator = place(execution)
        if allocator is not None:  # which does not refer to its handle: a reference cycle would keep tensors until it is collected
            alive.append(handle := ffi.new_handle(allocator))
            execution.allocate, execution.allocator = lib.strobe_python_allocate, handle
        self._attention, self._tensors, self._execution = attention[0], tensors, execution
        self._alive = alive

    @property
    def made(self) -> dict[str, Any]:
        return self._made

    @property
    def attention(self) -> tuple[Any, Any]:
        """The strobe_attention and the objects that must live as long as it."""
        return self._alive[1]

    def forms(self, names: Sequence[str]) -> bytes:
        """Of each of these tensors: dtype, device type, and whether axes 1 and 2 change places."""
        views = [getattr(self._tensors, name) for name in names]
        return bytes(x for name, t in zip(names, views, strict=True) for x in (t.dtype, t.device_type, self._bshd and name in TOKENS))

    def run(self, function: Any, *more: Any) -> None:
        self._check(function(self._attention, self._tensors, self._execution, *more))

    def run_without_execution(self, function: Any, *more: Any) -> None:
        self._check(function(self._attention, self._tensors, *more))

    def _check(self, status: int) -> None:
        if status != lib.STROBE_OK:
            if self._allocator is not None and self._allocator.error is not None:
                raise self._allocator.error
            raise failure(status, OfCall(self._arrays, self._made, self._bshd, self._attention))

    def prepare(self, operation: int) -> Any:
        """The prepared call: a strobe_prepared, which is released with the last reference to it."""
        prepared = ffi.new("strobe_prepared **")
        self.run(lib.strobe_prepare, operation, prepared)
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
        "strobe_attention": [
            member for name, x in FIELDS.items() if x.in_struct for member in (name, f"has_{name}" if x.may_be_absent else name)
        ],
        "strobe_tensors": [*INPUTS, *GRADIENTS, *AUX, *TANGENTS, *COTANGENTS, *DERIVATIVES],
        "strobe_addresses": [*INPUTS, *GRADIENTS, *AUX, *TANGENTS, *COTANGENTS, *DERIVATIVES],
    }
)


class Gradients(NamedTuple):
    """The gradients of the inputs of the same names. None stands for an input that was not given."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsinks: Any = None


class GradientsWithCaptured(NamedTuple):
    """Gradients, and those of the tensors that were named as `captured`, in their order."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dsinks: Any
    dcaptured: tuple[Any, ...]


class Call(NamedTuple):
    """A call of attention() in the library's terms: parsed once, and only read afterwards.

    Autograd and the memory of repeated calls keep a Call without its arrays; PyTorch's dispatcher takes it apart into keywords."""

    framework: Framework
    arrays: dict[str, Array]  # the given arrays among _options.INPUTS
    options: dict[str, Any]  # the options of _options.FIELDS that are not at their default
    aux: tuple[str, ...] = ()  # the names in _options.AUX that are asked for

    def on(self, arrays: dict[str, Array]) -> Call:
        """This call on other arrays."""
        return Call(self.framework, arrays, self.options, self.aux)

    @property
    def is_oracle(self) -> bool:
        return self.options.get("engine") == ORACLE

    def learnable(self) -> list[str]:
        """The captured arrays that have a gradient: floats that the function of the score reads."""
        text, xp = self.options.get("score_function"), self.framework.xp
        if text is None or CAPTURED[0] not in self.arrays:
            return []
        read, others = captured_by(text), (self.framework.bool_dtype, xp.int32, xp.int64)
        return [name for name in CAPTURED if name in read and name in self.arrays and self.arrays[name].dtype not in others]

    def gradient_names(self, captured: Iterable[str]) -> list[str]:
        """The names in GRADIENTS of the arrays that are given; of captured ones, only of these."""
        return [name for name, of in GRADIENTS.items() if (of in captured if of in CAPTURED else of in self.arrays)]

    def results(self, in_float64: bool = False) -> dict[str, Array]:
        """Uninitialised out and lse, and the results named by aux."""
        framework, q, k = self.framework, self.arrays["q"], self.arrays["k"]
        head, row = self._axes()
        shapes = {"lse": self._rows()}
        if is_partial(self.options):
            shapes["lse"] = (2, *shapes["lse"])
        if self.aux:
            cu_seqlens_q = self.arrays.get("cu_seqlens_q")
            batch = q.shape[0] if q.ndim == 4 else 0 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
            sums: tuple[int, ...] = (*self._rows()[:-1], k.shape[row])
            if (table := self.arrays.get("page_table")) is not None:
                page = k.shape[1 if "bshd" in self.options else 2] if k.ndim == 4 else 0
                sums = (batch, q.shape[head], page * (table.shape[1] if table.ndim == 2 else 0))
            shapes.update({"max_logit": (batch, q.shape[head]), "column_sums": sums})
        out = framework.dense_like(q, self._width_v(), framework.xp.float64 if in_float64 else self._of_out())
        return {"out": out, **{name: framework.empty(q, shapes[name], self._statistic(in_float64)) for name in ("lse", *self.aux)}}

    def derivatives(self, in_float64: bool = False) -> dict[str, Array]:
        """Uninitialised out, lse and their derivatives in the direction of tangents."""
        return self.results(in_float64) | dict(zip(DERIVATIVES, self.results(in_float64).values(), strict=False))

    def gradients(self, needed: Iterable[str], in_float64: bool = False) -> dict[str, Array]:
        """Uninitialised arrays for the gradients that are needed; the names are those in GRADIENTS."""
        framework, found = self.framework, {}
        for name in needed:
            x = self.arrays[GRADIENTS[name]]
            dtype = framework.xp.float64 if in_float64 else self._summed(x.dtype) if name in ("dq", "dk", "dv") else x.dtype
            is_of_rows = name in ("dq", "dk", "dv")
            found[name] = framework.dense_like(x, x.shape[-1], dtype) if is_of_rows else framework.empty(x, x.shape, dtype)
        return found

    def structs(self, known: dict[str, Array], made: dict[str, Array]) -> Structs:
        """The call's C structs. known: the caller's arrays beside the call's own; made: the results."""
        options = self.options | {"deterministic": True} if self.framework.is_deterministic() else self.options
        return Structs(self.arrays | known, made, options, self.framework.view, self._place)

    def forward(self) -> tuple[Array, ...]:
        """out, lse and the results named by aux."""
        found = self.results(self.is_oracle)
        self.structs({}, found).run(lib.strobe_forward)
        return self._rounded(found) if self.is_oracle else tuple(found.values())

    def _rounded(self, found: dict[str, Array]) -> tuple[Array, ...]:
        """The oracle's results in the dtypes of every other engine."""
        framework, of_out, statistic = self.framework, self._of_out(), self._statistic()
        if is_partial(self.options):  # lse's second number is the rounding error of its first number, which is rounded below
            whole, lost = found["lse"]
            rounded = framework.cast(framework.cast(whole, statistic), whole.dtype)
            finite = abs(rounded) < float("inf")
            lost[finite] = whole[finite] - rounded[finite]
        return tuple(framework.cast(x, of_out if name in ("out", "tout") else statistic) for name, x in found.items())

    def backward(self, known: dict[str, Array], needed: Iterable[str], into: dict[str, Array] | None = None) -> dict[str, Array]:
        """The gradients. known: out, lse, dout and, if used, dlse; with a partial part delta, not out. into: gradients to add to."""
        oracle, into = self.is_oracle, into or {}
        found = self.gradients([name for name in needed if name not in into], oracle)
        if oracle and not is_partial(self.options):
            known = {name: x for name, x in known.items() if name not in ("out", "lse")}  # the oracle computes its own out and lse
        (self.adding() if into else self).structs(known | into, found).run(lib.strobe_backward)
        if oracle:
            for name, x in found.items():
                of = self.arrays[GRADIENTS[name]].dtype
                found[name] = self.framework.cast(x, self._summed(of) if name in ("dq", "dk", "dv") else of)
        return found | into

    def jvp(self, tangents: dict[str, Array]) -> tuple[Array, ...]:
        """out, lse, and their derivatives in the direction of the tangents, whose names are those of TANGENTS; absent ones are 0."""
        found = self.derivatives(self.is_oracle)
        self.structs(tangents, found).run(lib.strobe_jvp)
        return self._rounded(found) if self.is_oracle else tuple(found.values())

    def backward_jvp(self, known: dict[str, Array], needed: Iterable[str]) -> dict[str, Array]:
        """The derivatives of the gradients of these names. known: what backward() and jvp() take, out, lse, tout, tlse, and tdout and tdlse
        where they are not 0."""
        oracle = self.is_oracle
        found = self.gradients(needed, oracle)
        if oracle:
            known = {name: x for name, x in known.items() if name not in ("out", "lse", *DERIVATIVES)}  # the oracle computes its own
        self.structs(known, found).run(lib.strobe_backward_jvp)
        return {name: self.framework.cast(x, self.arrays[GRADIENTS[name]].dtype) for name, x in found.items()} if oracle else found

    def adding(self) -> Call:
        """This call, with a backward that adds to gradients in the caller's memory."""
        return Call(self.framework, self.arrays, {**self.options, ACCUMULATE: True}, self.aux)

    def reference(self, rows: list[int] | None) -> tuple[Array, ...]:
        found = self.results(True)
        if rows is not None:
            found["out"][...] = found["lse"][...] = float("nan")
        selection, _alive = _selection(rows, None)
        self.structs({}, found).run(lib.strobe_reference_forward, selection)
        return tuple(found.values())

    def reference_backward(
        self, known: dict[str, Array], rows: list[int] | None, cols: list[int] | None, captured: list[str]
    ) -> dict[str, Array]:
        # the other gradients are sums over all rows, not over some
        needed = [name for name in self.gradient_names(captured) if rows is None or name in ("dq", "dk", "dv")]
        found = self.gradients(needed, True)
        for name, chosen in (("dq", rows), ("dk", cols), ("dv", cols)):
            if chosen is not None:
                found[name][...] = float("nan")
        selection, _alive = _selection(rows, cols)
        self.structs(known, found).run(lib.strobe_reference_backward, selection)
        return found

    def example_structs(self, operation: int, captured: Sequence[str] | None = None) -> Structs:
        """The structs as attention() would fill them, with uninitialised results and, where the operation has them, all gradients.
        captured: the captured arrays whose gradients are wanted; None: those that autograd tracks."""
        call = self.on(self.framework.autocast(self.arrays))
        made = call.results(call.is_oracle)
        if operation in WITH_GRADIENTS:
            q = call.arrays["q"]
            made["dout"], made["dlse"] = call.framework.dense_like(q, call._width_v(), q.dtype), call._of_rows()
            if is_partial(call.options):
                made["delta"] = call._of_rows()
                del made["out"]
            if captured is None:
                captured = [name for name in call.learnable() if call.framework.is_tracked(self.arrays[name])]
            made |= call.gradients(call.gradient_names(captured), call.is_oracle)
        if operation in IN_A_DIRECTION:
            made |= call.derivatives(call.is_oracle)
            made |= {name: call.arrays[of] for name, of in TANGENTS.items() if of in ("q", "k", "v", "bias", "sinks") and of in call.arrays}
            if operation in WITH_GRADIENTS:
                made |= {name: made[of] for name, of in COTANGENTS.items()}
        return call.structs({}, made)

    def explain(self, operation: int) -> str:
        return said(partial(self.example_structs(operation).run, lib.strobe_explain, operation))

    def tile(self, operation: int) -> tuple[int, int]:
        """The tile (Br, Bc) that would run."""
        plan = ffi.new("strobe_plan *", {"size": ffi.sizeof("strobe_plan")})
        self.example_structs(operation).run(lib.strobe_make_plan, operation, plan)
        return plan.tile_q, plan.tile_k

    def reasons_against(self, known: dict[str, Array], operation: int) -> list[Refusal]:
        """The library's refusals. The call may lack some arguments; checks that need these are not made.
        known: arrays beside the call's own."""
        framework, options = self.framework, self.options
        arrays, known = ({name: x for name, x in given.items() if framework.is_array(x)} for given in (self.arrays, known))
        if "q" in arrays and operation == FORWARD:
            arrays = framework.autocast(arrays)

        def place(execution: Any) -> None:
            lib.strobe_glue_execution(execution, options.get("threads") or 1)

        try:
            structs = Structs(arrays | known, {}, options, framework.view, place)
            structs.run(lib.strobe_explain, operation, ffi.NULL, 0, ffi.new("size_t *"))
        except ValueError as refusal:
            absent = {"q", "k", "v", "out", "lse", "dout"} - arrays.keys() - known.keys()
            return [each for each in refusals_of(refusal) if each.argument not in absent]
        except (RuntimeError, TypeError):  # the error is not about the arguments, or tensors have no memory
            pass
        return []

    def _axes(self) -> tuple[int, int]:
        """The axes of q's heads and rows."""
        return (1, 0) if self.arrays["q"].ndim == 3 else (2, 1) if "bshd" in self.options else (1, 2)

    def _rows(self) -> tuple[int, ...]:
        """The shape of an array with one number per row."""
        shape = self.arrays["q"].shape
        return (*shape[: len(shape) - 3], *(shape[axis] for axis in self._axes()))

    def _of_rows(self) -> Array:
        """An uninitialised array with one number per row."""
        return self.framework.empty(self.arrays["q"], self._rows(), self._statistic())

    def _width_v(self) -> int:
        """Dv. An element of INT4 holds two columns."""
        v = self.arrays["v"]
        return v.shape[-1] * (2 if v.dtype == self.framework.xp.uint8 else 1)

    def _statistic(self, in_float64: bool = False) -> Any:
        """The dtype of lse and other row statistics."""
        xp = self.framework.xp
        return xp.float64 if in_float64 or self.arrays["q"].dtype == xp.float64 else xp.float32

    def _of_out(self) -> Any:
        """The dtype of out."""
        if "q_scale" not in self.arrays:
            return self._summed(self.arrays["q"].dtype)
        xp, name = self.framework.xp, self.options.get("out_dtype") or "bfloat16"
        return getattr(xp, name, None) or xp.dtype(name)  # NumPy knows bfloat16 by the name that ml_dtypes gives it

    def _summed(self, dtype: Any) -> Any:
        """The dtype of results that are to be added to those of other parts."""
        xp = self.framework.xp
        return xp.float32 if is_partial(self.options) and dtype != xp.float64 else dtype

    def _place(self, execution: Any) -> Allocator | None:
        return _place(self.framework, execution, self.arrays["q"], self.options.get("threads"), self.options.get("reserved_sms", 0))


# For the exact type of q, a function that may answer a call of attention() before it is parsed: one for repeated calls of torch tensors,
# and one for DTensors. It returns None if the full call must be made.
BeforeParsing = Callable[[Array, Array, Array, object, Mapping[str, Any]], Any]
BEFORE_PARSING: dict[type, BeforeParsing] = {}
# For the names of types whose functions are imported with the first such q: the beginning of their module's name, and the import, which
# returns the function.
IMPORTED_LATE: dict[str, tuple[str, Callable[[], BeforeParsing]]] = {}


def imported_late(kind: type) -> Callable[[], BeforeParsing] | None:
    """The import of the function for q of this type; None for types that IMPORTED_LATE does not list."""
    module, found = IMPORTED_LATE.get(kind.__name__, ("", None))
    return found if kind.__module__.startswith(module) else None


def drawn_mask(framework: Framework, shape: tuple[int, ...], options: dict[str, Any], rng: Array | None) -> Array:
    """The dropout mask. options: dropout and, unless there is an rng, seed and offset."""
    keep = framework.empty(None, shape, framework.bool_dtype)
    views = ffi.new("strobe_tensor[2]")
    framework.view(views + 0, "keep", keep, False)
    given, _alive = (ffi.NULL, None) if rng is None else (views + 1, framework.view(views + 1, "rng", rng, False))
    execution = ffi.new("strobe_execution *")
    _place(framework, execution, keep, None)
    status = lib.strobe_dropout_mask(attention_struct(tuple(options.items()))[0], given, views + 0, execution)
    if status != lib.STROBE_OK:
        raise failure(status)
    return keep


def _place(framework: Framework, execution: Any, q: Array, threads: int | None, reserved_sms: int = 0) -> Allocator | None:
    """Fills a strobe_execution for work on q's device; returns the source of its workspace, None for the library's own memory."""
    stream = framework.stream(q)
    if stream is None:
        most = framework.default_threads()  # called in any case: in a new thread it makes PyTorch tell OpenMP the number of threads
        lib.strobe_glue_execution(execution, threads or most)
        execution.reserved_sms = reserved_sms
        return None
    execution.size = ffi.sizeof("strobe_execution")
    execution.stream = ffi.cast("void *", stream)
    execution.reserved_sms = reserved_sms
    return Allocator(partial(framework.scratch, q))


def _selection(rows: list[int] | None, cols: list[int] | None) -> tuple[Any, Any]:
    """A strobe_selection and the objects that must live as long as it."""
    if rows is None and cols is None:
        return ffi.NULL, None
    selection = ffi.new("strobe_selection *", {"size": ffi.sizeof("strobe_selection")})
    alive = []
    for name, chosen in (("rows", rows), ("cols", cols)):
        if chosen is not None:
            numbers = ffi.new("int64_t[]", chosen)
            setattr(selection, name, numbers)
            setattr(selection, "n_" + name, len(numbers))
            alive.append(numbers)
    return selection, alive
