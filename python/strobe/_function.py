"""Functions of the score and masks as options: recorded once, found again while what they read is unchanged, and handed on as text and
captured arrays, which are fields of the call like any other."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from inspect import iscoroutine
from pathlib import Path
from threading import Lock, local
from typing import Any

from ._abi import is_traced_by_dynamo
from ._checks import Wrong
from ._core import ffi, lib
from ._graph import BOOLEAN, INTEGER, REAL, Graph, UnrecordableError, Value, decoded, is_symbolic, numbered
from ._messages import kind
from ._refusals import refusals_of, refusing
from ._watched import Watch, forget_recorded, key_of, watch
from .arrays.base import Array, Framework
from .arrays.known import RECORDING, refuse_in_functions

MOST_CAPTURED: int = lib.STROBE_MOST_CAPTURED
MOST_NODES: int = lib.STROBE_MOST_NODES
MOST_AXES = 4
CAPTURED = tuple(f"captured_{n}" for n in range(MOST_CAPTURED))  # the tensors that functions read, in strobe_tensors

_POSITIONS = (("BATCH", INTEGER), ("HEAD", INTEGER), ("QUERY", INTEGER), ("KEY", INTEGER))
# The arguments of the function that an option takes, and how messages write it.
_ARGUMENTS = {"score": (("SCORE", REAL), *_POSITIONS), "mask": _POSITIONS}
SIGNATURES = {"score": "f(score, b, h, i, j)", "mask": "g(b, h, i, j)"}
FIELDS = {"score": "score_function", "mask": "mask_function"}
SYMBOLS = "symbols"  # the integers that a compiler does not know yet, which the texts call $0, $1, ...
_FLOATS = ("float32", "float16", "bfloat16", "float64")
_AS_THEY_ARE = (*_FLOATS, "bool", "int32", "int64")
_AS_INT32 = ("uint8", "int8", "int16", "uint16")
_MOST_CODES, _MOST_RECORDINGS = 256, 16


class _Place(local):
    """of(option, array): what a call of this thread makes of an array that the option's function captures, as the tensor on this rank of a
    DTensor. It may raise UnplacedError."""

    of: Callable[[str, Array], Array] | None = None


PLACE = _Place()


def functions_in(given: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """The options that are functions."""
    return {name: given[name] for name in _ARGUMENTS if callable(given.get(name))}


class Unwatched:
    """A function that is recorded in each call."""


class Recording:
    """A function's graph and the arrays that it captures."""

    def __init__(self, value: Value, result: int, used: list[int], dtypes: list[str]):
        self._detached = [n for n, place in enumerate(used) if place in value.graph.detached]
        self._graph, self._result = value.graph, result
        self._used = used  # those of the graph's captured arrays that the result reads
        self._texts: dict[tuple[int, ...], str] = {}
        self.alone = tuple(range(len(dtypes)))  # the places of its arrays if there is no other function
        self.converts = [dtype in _AS_INT32 for dtype in dtypes]

    def captured(self, found: tuple[Any, ...]) -> tuple[Any, ...]:
        """The captured arrays, from those that were found where the function reads them."""
        if not self._detached:
            return found
        return tuple(x.detach() if n in self._detached else x for n, x in enumerate(found))

    def text(self, places: tuple[int, ...], symbols: list[Any]) -> str:
        """The graph as text; places: of the captured arrays, among those of the call; symbols: those of the call, to which it adds."""
        found = self._texts.get(places)
        if found is None:
            count = len(symbols)
            found = self._graph.text(self._result, dict(zip(self._used, places, strict=True)), symbols)
            if len(symbols) == count:
                self._texts[places] = found
        return found


# A function of the recorded one: what it captures, or None if what it read is not as it was. And its recording.
Known = tuple[Callable[[Any], "tuple[Any, ...] | None"], Recording]


class _Entry:
    """The recordings of a code, the last used one first. known is replaced, not changed, so that other threads may go through it."""

    __slots__ = ("code", "known", "used")

    def __init__(self, code: Any):
        self.code = code  # which keeps its id
        self.known: tuple[Known, ...] = ()
        self.used = next(_clock)


_clock = itertools.count()
_recordings: dict[tuple[Any, ...], _Entry] = {}  # by the id of the code, the option and q's dtype
_lock = Lock()  # of whoever changes _recordings
if hasattr(os, "register_at_fork"):  # a child has no other threads, which could release it
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def _key(code: Any, name: str, q: Array) -> tuple[Any, ...]:
    torch = sys.modules.get("torch")
    return id(code), name, q.dtype, torch.get_default_dtype() if torch else None


def _known(name: str, function: Callable[..., Any], q: Array) -> tuple[Recording, tuple[Any, ...]] | None:
    """A recording that still holds, and what it captures now."""
    code = key_of(function)
    key = _key(code, name, q)
    entry = _recordings.get(key)
    if entry is not None:
        for n, known in enumerate(entry.known):
            if (found := known[0](function)) is not None:
                if n:
                    _keep(key, code, known)
                entry.used = next(_clock)
                return known[1], known[1].captured(found)
    return None


def _placed(name: str, whose: str, arrays: Sequence[Any]) -> Sequence[Any]:
    place = PLACE.of
    if place is None:
        return arrays
    try:
        return tuple(place(name, x) for x in arrays)
    except UnplacedError as refused:
        raise _RefusedError(f"{whose} reads {refused}") from None


def _keep(key: tuple[Any, ...], code: Any, known: Known) -> None:
    """Makes a recording, which may be a new one, the last used one."""
    with _lock:
        entry = _recordings.get(key)
        if entry is None:
            entry = _recordings[key] = _Entry(code)
        entry.known = (known, *(each for each in entry.known if each is not known))[:_MOST_RECORDINGS]
        entry.used = next(_clock)
        while len(_recordings) > _MOST_CODES:
            del _recordings[min(_recordings, key=lambda each: _recordings[each].used)]


def _merged(framework: Framework, found: Mapping[str, tuple[Recording, Sequence[Any]]]) -> dict[str, Any]:
    """The fields of the functions, and the arrays that they capture, none of them twice."""
    fields: dict[str, Any] = {}
    arrays: list[Any] = []
    converts: list[bool] = []
    symbols: list[Any] = []
    for name, (recording, own) in found.items():
        places = recording.alone
        if arrays and own:
            known = {id(x): n for n, x in enumerate(arrays)}
            for x, is_converted in zip(own, recording.converts, strict=True):
                if known.setdefault(id(x), len(arrays)) == len(arrays):
                    arrays.append(x)
                    converts.append(is_converted)
            places = tuple([known[id(x)] for x in own])
        elif own:
            arrays, converts = [*own], recording.converts[:]
        fields[FIELDS[name]] = recording.text(places, symbols)
    if symbols:
        fields[SYMBOLS] = symbols
    for name, x, is_converted in zip(CAPTURED, arrays, converts, strict=False):
        fields[name] = framework.cast(x, framework.xp.int32) if is_converted else x
    if len(arrays) > MOST_CAPTURED:
        whose = "the functions read" if len(found) > 1 else "the function reads"
        raise _RefusedError(f"{whose} {len(arrays)} tensors; accepted are up to {MOST_CAPTURED}: stack those of one shape")
    return fields


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def as_fields(given: Mapping[str, Any], framework: Framework, q: Array) -> dict[str, Any] | None:
    """The options with fields and captured arrays in place of functions, all of which have recordings that still hold; else None.

    Nothing is checked: the key of a repeated call has whatever was checked when it was made."""
    options = dict(given)
    found: dict[str, tuple[Recording, Sequence[Any]]] = {}
    for name in _ARGUMENTS:
        function = given.get(name)
        if callable(function):
            if (known := _known(name, function, q)) is None:
                return None
            found[name] = known
            del options[name]
    try:
        if PLACE.of is not None:
            found = {name: (recording, _placed(name, "", arrays)) for name, (recording, arrays) in found.items()}
        options.update(_merged(framework, found))
    except _RefusedError:
        return None
    return options


def recorded(wrong: Wrong, functions: Mapping[str, Callable[..., Any]], framework: Framework, q: Array) -> dict[str, Any]:
    """The fields and captured arrays of the functions, which are recorded unless they are known; errors are added to `wrong`.

    While Dynamo traces, the fields are the functions themselves, which _compiled.py hands on."""
    if is_traced_by_dynamo():
        return {FIELDS[name]: function for name, function in functions.items()}
    found = {}
    for name, function in functions.items():
        try:
            recording, arrays = _known(name, function, q) or _record(name, function, framework, q)
            arrays = _placed(name, _named(function), arrays)
            _check_captured(_named(function), arrays, framework, q)
            found[name] = recording, arrays
        except UnrecordableError as refused:
            wrong.append(refusing(ValueError, name, f"{_named(function)}{_place(refused)}: {refused}"))
        except _RefusedError as refused:
            wrong.append(refusing(refused.error, name, str(refused)))
    try:
        return _merged(framework, found)
    except _RefusedError as refused:
        wrong.append(refusing(ValueError, next(iter(found)), str(refused)))
        return {}


def with_numbers(fields: Mapping[str, Any], symbols: Sequence[int]) -> dict[str, Any]:
    """The fields, with integers in place of the symbols of their texts."""
    texts = {name: numbered(fields[name], symbols) for name in FIELDS.values() if name in fields}
    return {**fields, **texts}


def fields_of(given: Mapping[str, Any], fields: Mapping[str, Any], arrays: Mapping[str, Array]) -> dict[str, Any]:
    """The options in the form of as_fields(), from what recorded() found."""
    options = {name: x for name, x in given.items() if name not in _ARGUMENTS or not callable(x)}
    options |= {name: fields[name] for name in FIELDS.values() if name in fields}
    return options | {name: arrays[name] for name in CAPTURED if name in arrays}


def in_options(given: Mapping[str, Any]) -> bool:
    """Whether an option is a function, or a block mask that was made of one."""
    return len(functions_in(given)) > 0 or getattr(given.get("block_mask"), "function", None) is not None


def both(first: Callable[..., Any] | None, second: Callable[..., Any]) -> Callable[..., Any]:
    """A mask function that is true where both are."""
    if first is None or first is second:
        return second
    return lambda b, h, i, j: first(b, h, i, j) & second(b, h, i, j)


def array_read_by(function: Callable[..., Any]) -> Array | None:
    """An array that the function reads; None if none is found."""
    seen = watch(function, to_the_end=True)
    return next((seen.found[n] for n in seen.arrays.values()), None)


def recorded_mask(function: Callable[..., Any], framework: Framework) -> dict[str, Any]:
    """The fields of a mask function alone, whose captured arrays may lie on any device."""
    given = framework.empty(None, (0,), framework.xp.float32)
    try:
        recording, arrays = _known("mask", function, given) or _record("mask", function, framework, given)
        for x in arrays:
            _check_captured(_named(function), [x], framework, x)
            if framework.is_tracked(x):
                raise _RefusedError(f"{_named(function)} {_TRACKED}", NotImplementedError)
        return _merged(framework, {"mask": (recording, arrays)})
    except UnrecordableError as refused:
        raise refusing(ValueError, "function", f"{_named(function)}{_place(refused)}: {refused}") from None
    except _RefusedError as refused:
        raise refusing(refused.error, "function", str(refused)) from None


_TRACKED = "reads a tensor that requires grad, and blocks have no gradient; accepted is its detach(), or torch.no_grad()"


class UnplacedError(Exception):
    """Why PLACE.of does not take an array, in words that go behind "reads "."""


class _RefusedError(Exception):
    def __init__(self, words: str, error: type[Exception] = ValueError):
        super().__init__(words)
        self.error = error


def _record(name: str, function: Callable[..., Any], framework: Framework, q: Array) -> tuple[Recording, Sequence[Any]]:
    refuse_in_functions()
    _check_signature(name, function)
    # Before the function runs, which may change what it reads.
    seen = watch(function) if framework.keeps_recordings and not isinstance(function, Unwatched) else Watch(is_complete=False)
    graph, found, arrays = _called(name, function, framework, q, seen)
    value = _result(name, _named(function), graph, found)
    result = value.at((), BOOLEAN if name == "mask" else REAL)
    used = graph.captured_by(result)
    count = len(decoded(graph.text(result)))
    if count > MOST_NODES:
        raise _RefusedError(f"{_named(function)} has {count} operations; accepted are up to {MOST_NODES}")
    captured = [arrays[n] for n in used]
    recording = Recording(value, result, used, [_name_of(x.dtype) for x in captured])
    read = [graph.detached.get(n, arrays[n]) for n in used]
    if seen.is_complete and not graph.depends_on_grad and all(id(x) in seen.arrays for x in read):
        values, code = seen.compiled([seen.arrays[id(x)] for x in read]), key_of(function)
        if values(function) is not None:  # nothing that it reads changed while it ran, by the function or by other threads
            _keep(_key(code, name, q), code, (values, recording))
    return recording, captured


def _called(name: str, function: Callable[..., Any], framework: Framework, q: Array, seen: Watch) -> tuple[Graph, Any, list[Any]]:
    """What record() gives, which calls the function once."""
    record = import_module(f".{framework.recorder}", __package__).record
    RECORDING.option = name
    try:
        graph, found, arrays = record(function, _ARGUMENTS[name], q.dtype == framework.xp.float64, seen)
    except RecursionError:
        raise _RefusedError(f"{_named(function)} makes too many calls within one another; accepted is a function that ends") from None
    except TypeError as failed:
        if _place(failed):
            raise
        words = f"{_named(function)} refuses its {len(_ARGUMENTS[name])} arguments; accepted is {SIGNATURES[name]}"
        raise _RefusedError(words, TypeError) from failed  # a function in C, whose own message is behind this one
    finally:
        RECORDING.option = ""
        forget_recorded(seen)
    if iscoroutine(found):
        found.close()  # or Python warns that nothing awaits it
    return graph, found, arrays


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    count = len(_ARGUMENTS[name])
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        raise _RefusedError(f"{_named(function)} does not take {count} arguments; accepted is {SIGNATURES[name]}", TypeError) from None
    except ValueError:  # a function in C may have no signature
        pass


def _result(name: str, whose: str, graph: Any, found: Any) -> Value:
    if not isinstance(found, Value):
        if not isinstance(found, (bool, int, float)) and not is_symbolic(found):
            accepted = "a scalar, or a number" if name == "score" else "a bool scalar, or a bool"
            raise _RefusedError(f"{whose} returns {kind(found)}; accepted is {accepted}", TypeError)
        found = graph.number(found)
    if found.shape:
        raise _RefusedError(f"{whose} returns shape {found.shape}; accepted is a scalar: the function sees one score at a time")
    if name == "mask" and found.kind != BOOLEAN:
        what = "an integer" if found.kind == INTEGER else "a real number"
        raise _RefusedError(f"{whose} returns {what}; accepted is a bool, as a comparison gives", TypeError)
    return found


def _check_captured(whose: str, arrays: Sequence[Any], framework: Framework, q: Array) -> None:
    for x in arrays:
        what = f"{whose} reads a tensor of shape {tuple(x.shape)}"
        if (unfit := framework.unfit("", x)) is not None:
            raise _RefusedError("".join(f"{what}: {each.words}" for each in refusals_of(unfit)[:1]), type(unfit))
        if framework.device(x) != framework.device(q):
            raise _RefusedError(f"{what} on {x.device}; accepted is q's device, {q.device}, or a number: item() gives that of a scalar")
        if len(x.shape) > MOST_AXES:
            raise _RefusedError(f"{what}; accepted are up to {MOST_AXES} axes: reshape() makes one of two, whose index is i * size + j")
        if 0 in x.shape:
            raise _RefusedError(f"{what}; accepted are tensors with elements")
        if (dtype := _name_of(x.dtype)) not in _AS_THEY_ARE + _AS_INT32:
            raise _RefusedError(f"{whose} reads a tensor of {dtype}; accepted are {', '.join(_AS_THEY_ARE)}, and integers of fewer bits")


def _named(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or kind(function)


_OWN = f"{Path(__file__).parent}{os.sep}"


def _place(failed: UnrecordableError | TypeError) -> str:
    """(line 12 of file): where the caller's code was, in words."""
    known = failed.place if isinstance(failed, UnrecordableError) else ""
    found, at = known, failed.__traceback__
    while at is not None and not known:
        file = at.tb_frame.f_code.co_filename
        if not file.startswith(_OWN) and not any(f"{os.sep}{name}{os.sep}" in file for name in ("torch", "numpy", "jax")):
            found = f" (line {at.tb_lineno} of {Path(file).name})"
        at = at.tb_next
    return found


@lru_cache(maxsize=1024)
def captured_by(text: str) -> frozenset[str]:
    """The names in CAPTURED of what the function of a text reads."""
    return frozenset(CAPTURED[more] for operation, _, more in decoded(text) if operation == "LOAD")


@lru_cache(maxsize=1024)
def struct_of(text: str) -> tuple[Any, Any]:
    """A strobe_function for a text, and the object that must live as long."""
    nodes = []
    for operation, inputs, more in decoded(text):
        node: dict[str, Any] = {"operation": getattr(lib, f"STROBE_OP_{operation}"), "inputs": [*inputs, 0, 0, 0, 0][:4]}
        if more is not None:
            node["captured" if operation == "LOAD" else "real" if operation == "REAL" else "integer"] = more
        nodes.append(node)
    array = ffi.new("strobe_node[]", nodes)
    return ffi.new("strobe_function *", {"size": ffi.sizeof("strobe_function"), "nodes": array, "n_nodes": len(nodes)}), array
