"""Calls the library's functions on the arrays of a framework: allocates results, fills structs, makes the call."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

from ._abi import BACKWARD, FORWARD, said
from ._call import ACCUMULATE, Allocator, Call, attention_struct
from ._core import ffi, lib
from ._graphs import outside_graphs
from ._options import AUX, GRADIENTS
from ._part import is_partial
from ._refusals import Refusal, failure, refusals_of
from ._request import Request
from .arrays.base import Array, Framework
from .arrays.known import known_framework

ORACLE = "reference"  # the engine that writes float64 for any input dtype


class Gradients(NamedTuple):
    """The gradients of the inputs of the same names. None stands for an input that was not given."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsinks: Any = None


def results(framework: Framework, p: Request, in_float64: bool = False) -> dict[str, Array]:
    """Uninitialised out and lse, and the results named by p.aux."""
    q, k, v = (p.arrays[name] for name in "qkv")
    head, row = _axes(p)
    shapes = {"lse": _rows(p)}
    if is_partial(p.options):
        shapes["lse"] = (2, *shapes["lse"])
    if p.aux:
        batch = q.shape[0] if q.ndim == 4 else p.arrays["cu_seqlens_q"].shape[0] - 1 if "cu_seqlens_q" in p.arrays else 0
        sums: tuple[int, ...] = (*_rows(p)[:-1], k.shape[row])
        if (table := p.arrays.get("page_table")) is not None:
            page = k.shape[1 if "bshd" in p.options else 2] if k.ndim == 4 else 0
            sums = (batch, q.shape[head], page * (table.shape[1] if table.ndim == 2 else 0))
        shapes.update({"max_logit": (batch, q.shape[head]), "column_sums": sums})
    out = framework.dense_like(q, width_v(framework, v), framework.xp.float64 if in_float64 else _summed(framework, p, q.dtype))
    return {"out": out, **{name: framework.empty(q, shapes[name], _statistic(framework, q, in_float64)) for name in ("lse", *p.aux)}}


def width_v(framework: Framework, v: Array) -> int:
    """Dv: an element of INT4 holds two columns."""
    return v.shape[-1] * (2 if v.dtype == framework.xp.uint8 else 1)


def of_rows(framework: Framework, p: Request) -> Array:
    """An uninitialised array with one number per row."""
    return framework.empty(p.arrays["q"], _rows(p), _statistic(framework, p.arrays["q"]))


def _axes(p: Request) -> tuple[int, int]:
    """The axes of q's heads and rows."""
    return (1, 0) if p.arrays["q"].ndim == 3 else (2, 1) if "bshd" in p.options else (1, 2)


def _rows(p: Request) -> tuple[int, ...]:
    """The shape of an array with one number per row."""
    shape = p.arrays["q"].shape
    return (*shape[: len(shape) - 3], *(shape[axis] for axis in _axes(p)))


def _statistic(framework: Framework, q: Array, in_float64: bool = False) -> Any:
    """The dtype of lse and other row statistics."""
    return framework.xp.float64 if in_float64 or q.dtype == framework.xp.float64 else framework.xp.float32


def _summed(framework: Framework, p: Request, dtype: Any) -> Any:
    """The dtype of results that are to be added to those of other parts."""
    return framework.xp.float32 if is_partial(p.options) and dtype != framework.xp.float64 else dtype


def gradients(framework: Framework, p: Request, needed: Iterable[str], in_float64: bool = False) -> dict[str, Array]:
    """The gradients in GRADIENTS that are needed, uninitialised."""
    found = {}
    for name in needed:
        x = p.arrays[GRADIENTS[name]]
        dtype = framework.xp.float64 if in_float64 else _summed(framework, p, x.dtype) if name in ("dq", "dk", "dv") else x.dtype
        found[name] = framework.empty(x, x.shape, dtype) if name in ("dbias", "dsinks") else framework.dense_like(x, x.shape[-1], dtype)
    return found


def forward(framework: Framework, p: Request) -> tuple[Array, ...]:
    """out, lse and the results named by p.aux."""
    oracle = _is_oracle(p)
    found = results(framework, p, oracle)
    call(framework, p, {}, found).run(lib.strobe_forward)
    if not oracle:
        return tuple(found.values())
    q = p.arrays["q"]
    of_out, statistic = _summed(framework, p, q.dtype), _statistic(framework, q)
    if is_partial(p.options):  # the second number is the rounding error of the first one below
        whole, lost = found["lse"]
        rounded = framework.cast(framework.cast(whole, statistic), whole.dtype)
        finite = abs(rounded) < float("inf")
        lost[finite] = whole[finite] - rounded[finite]
    return tuple(framework.cast(x, of_out if name == "out" else statistic) for name, x in found.items())


def backward(
    framework: Framework, p: Request, known: dict[str, Array], needed: Iterable[str], into: dict[str, Array] | None = None
) -> dict[str, Array]:
    """known: out, lse, dout and, if there is one, dlse; with a partial part delta, not out. into: gradients that are added to."""
    oracle = _is_oracle(p)
    into = into or {}
    found = gradients(framework, p, [name for name in needed if name not in into], oracle)
    if oracle and not is_partial(p.options):
        known = {name: x for name, x in known.items() if name not in ("out", "lse")}  # the oracle computes its own out and lse
    how = Request(p.arrays, {**p.options, ACCUMULATE: True}, p.aux) if into else p
    call(framework, how, known | into, found).run(lib.strobe_backward)
    if oracle:
        for name, x in found.items():
            of = p.arrays[GRADIENTS[name]].dtype
            found[name] = framework.cast(x, _summed(framework, p, of) if name in ("dq", "dk", "dv") else of)
    return found | into


def reference(framework: Framework, p: Request, rows: list[int] | None) -> tuple[Array, ...]:
    found = results(framework, p, True)
    if rows is not None:
        found["out"][...] = found["lse"][...] = float("nan")
    selection, _alive = _selection(rows, None)
    call(framework, p, {}, found).run(lib.strobe_reference_forward, selection)
    return tuple(found.values())


# attention()'s named tuples, by the results after out.
_NAMED: dict[tuple[str, ...], Callable[..., Any]] = {
    (*lse, *aux): namedtuple("Attention", ("out", *lse, *aux))
    for count in range(1, len(AUX) + 1)
    for aux in permutations(AUX, count)
    for lse in ((), ("lse",))
}
for _tuple in _NAMED.values():  # so that pickle finds them
    _tuple.__qualname__ = "_".join(("Attention", *_tuple._fields))  # type: ignore[attr-defined]
    globals()[_tuple.__qualname__] = _tuple


def returned(found: tuple[Array, ...], return_lse: bool, aux: tuple[str, ...]) -> Any:
    """The return value of attention(), from out, lse and the results named by aux."""
    out, lse, *more = found
    if not aux:
        return (out, lse) if return_lse else out
    names = ("lse", *aux) if return_lse else aux
    return _NAMED[names](out, lse, *more) if return_lse else _NAMED[names](out, *more)


def reference_backward(
    framework: Framework, p: Request, known: dict[str, Array], rows: list[int] | None, cols: list[int] | None
) -> Gradients:
    # dbias and dsinks are sums over all rows, not over some
    needed = [name for name, of in GRADIENTS.items() if of in p.arrays and (rows is None or of in ("q", "k", "v"))]
    found = gradients(framework, p, needed, True)
    for name, chosen in (("dq", rows), ("dk", cols), ("dv", cols)):
        if chosen is not None:
            found[name][...] = float("nan")
    selection, _alive = _selection(rows, cols)
    call(framework, p, known, found).run(lib.strobe_reference_backward, selection)
    return Gradients(**found)


def dropout_mask(framework: Framework, shape: tuple[int, ...], options: dict[str, Any], rng: Array | None) -> Array:
    """options: dropout and, unless there is an rng, seed and offset."""
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


def _whole(framework: Framework, p: Request, of_backward: bool) -> Call:
    """The call as attention() would make it, with results, and with all gradients; its arrays are not computed."""
    p = Request(framework.autocast(p.arrays), p.options, p.aux)
    oracle = _is_oracle(p)
    more = results(framework, p, oracle)
    if of_backward:
        more["dout"], more["dlse"] = (
            framework.dense_like(p.arrays["q"], width_v(framework, p.arrays["v"]), p.arrays["q"].dtype),
            of_rows(framework, p),
        )
        if is_partial(p.options):
            more["delta"] = of_rows(framework, p)
            del more["out"]
        more |= gradients(framework, p, [name for name, of in GRADIENTS.items() if of in p.arrays], oracle)
    return call(framework, p, {}, more)


def explain(framework: Framework, p: Request, of_backward: bool) -> str:
    made = _whole(framework, p, of_backward)
    direction = BACKWARD if of_backward else FORWARD
    return said(partial(made.run, lib.strobe_explain, direction))


def tile(framework: Framework, p: Request, of_backward: bool) -> tuple[int, int]:
    """The tile (Br, Bc) that would run."""
    plan = ffi.new("strobe_plan *", {"size": ffi.sizeof("strobe_plan")})
    _whole(framework, p, of_backward).run(lib.strobe_make_plan, BACKWARD if of_backward else FORWARD, plan)
    return plan.tile_q, plan.tile_k


@outside_graphs
def reasons_against(framework: Framework | None, p: Request, known: dict[str, Array], of_backward: bool) -> list[Refusal]:
    """The library's refusals of a call's arguments, when some are left out. Checks that compare with an argument that is
    left out are not made. framework: None if q has none; known: arrays beside p.arrays."""
    framework = framework or next(filter(None, map(known_framework, (p.arrays | known).values())), None)
    if framework is None:
        return []
    arrays = {name: x for name, x in p.arrays.items() if framework.is_array(x)}
    known = {name: x for name, x in known.items() if framework.is_array(x)}
    if "q" in arrays and not of_backward:
        arrays = framework.autocast(arrays)

    def place(execution: Any) -> None:
        lib.strobe_glue_execution(execution, p.options.get("threads") or 1)

    try:
        made = Call(arrays | known, {}, p.options, framework.view, place)
        made.run(lib.strobe_explain, BACKWARD if of_backward else FORWARD, ffi.NULL, 0, ffi.new("size_t *"))
    except ValueError as refusal:
        absent = {"q", "k", "v", "out", "lse", "dout"} - arrays.keys() - known.keys()
        return [each for each in refusals_of(refusal) if each.argument not in absent]
    except (RuntimeError, TypeError):  # not caused by the arguments, or tensors have no memory
        pass
    return []


def _is_oracle(p: Request) -> bool:
    return p.options.get("engine") == ORACLE


def call(framework: Framework, p: Request, known: dict[str, Array], made: dict[str, Array]) -> Call:
    """known: the caller's arrays beside p.arrays."""

    def place(execution: Any) -> Allocator | None:
        return _place(framework, execution, p.arrays["q"], p.options.get("threads"), p.options.get("reserved_sms", 0))

    options = p.options | {"deterministic": True} if framework.is_deterministic() else p.options
    return Call(p.arrays | known, made, options, framework.view, place)


def _place(framework: Framework, execution: Any, q: Array, threads: int | None, reserved_sms: int = 0) -> Allocator | None:
    """Fills a strobe_execution for work on q's device; returns the source of its workspace, None for the library's own memory."""
    stream = framework.stream(q)
    if stream is None:
        most = framework.default_threads()  # called in any case: PyTorch then tells OpenMP its number of threads, if this thread is new
        lib.strobe_glue_execution(execution, threads or most)
        execution.reserved_sms = reserved_sms
        return None
    execution.size = ffi.sizeof("strobe_execution")
    execution.stream = ffi.cast("void *", stream)
    execution.reserved_sms = reserved_sms
    return Allocator(partial(framework.scratch, q))


def _selection(rows: list[int] | None, cols: list[int] | None) -> tuple[Any, Any]:
    """A strobe_selection and the objects that must live as long."""
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


# By the exact type of q: a function that makes a call of attention() known from an earlier one. None: the full call must be made.
FAST_PATHS: dict[type, Callable[[Array, Array, Array, object, Mapping[str, Any]], Any]] = {}

# The contexts of strobe.distributed.context_parallel() that the process is in; the innermost is last.
CONTEXTS: list[Any] = []


class Calls:
    """How attention() and its backward are called on a framework's arrays: here directly, without a dispatcher."""

    def __init__(self, framework: Framework):
        self.framework = framework

    def remember(self, q: Array, k: Array, v: Array, return_lse: bool, given: Mapping[str, Any], p: Request) -> None:
        """For FAST_PATHS: remembers a call of attention() that was made."""
        return

    def forward(self, p: Request) -> tuple[Array, ...]:
        """out and lse, differentiable in torch, and the results named by p.aux, which are not."""
        return forward(self.framework, p)

    def backward(self, p: Request, dout: Array, dlse: Array | None, out: Array, lse: Array, needed: list[str]) -> dict[str, Array]:
        """The gradients in GRADIENTS that are needed."""
        known = {"dout": dout, "out": out, "lse": lse}
        return backward(self.framework, p, known if dlse is None else {**known, "dlse": dlse}, needed)
