"""The operators strobe::attention_forward, attention_forward_aux, attention_backward, attention_jvp and attention_backward_jvp, as
torch.compile and PyTorch see them. Only this module takes a Call apart into keywords and puts it together again."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from . import _prepared
from ._call import Call
from ._checks import Wrong
from ._function import CAPTURED, SYMBOLS, with_numbers
from ._function import FIELDS as FUNCTIONS
from ._graph import is_symbolic
from ._options import FIELDS, GRADIENTS, INPUTS, TANGENTS
from ._parse import parse_aux
from .arrays.torch import TORCH

# The operators take all values that a call consists of, so that a graph holds nothing else. Values at their default are neither passed
# nor kept in a graph.
_SCHEMA_TYPES: dict[Any, str] = {
    bool: "bool",
    int: "SymInt",
    int | None: "SymInt?",
    float: "float",
    float | None: "float?",
    str | None: "str?",
}
_SCHEMA_TYPES[tuple[int, ...] | None] = "int[]?"
_FEWEST = len([name for name in GRADIENTS.values() if name not in CAPTURED])  # of the values of `needed`: the others are at the end, if any
_OF_FUNCTIONS = {*CAPTURED, *FUNCTIONS.values()}


def arguments_without(names: Container[str]) -> str:
    """The arguments of an operator, but for functions and what they read, and for these."""
    tensors = [f"Tensor? {name}=None" for name in INPUTS if name not in ("q", "k", "v") and name not in _OF_FUNCTIONS]
    fields = [f"{_SCHEMA_TYPES[field.type]} {name}={field.default}" for name, field in FIELDS.items() if name not in _OF_FUNCTIONS]
    return ", ".join(["Tensor q, Tensor k, Tensor v, *", *(x for x in (*tensors, *fields) if x.split()[1].split("=")[0] not in names)])


# One list has all captured tensors, because PyTorch allows an operator 64 arguments.
_CAPTURED = f"Tensor[]? captured=None, SymInt[]? {SYMBOLS}=None"
ARGUMENTS = ", ".join([arguments_without(()), *(f"str? {name}=None" for name in FUNCTIONS.values()), _CAPTURED])
# Results have the memory layout of the inputs, so a compiler may not choose other strides for the inputs.
TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))
FORWARD_NAME, BACKWARD_NAME = "strobe::attention_forward", "strobe::attention_backward"
torch.library.define(FORWARD_NAME, f"({ARGUMENTS}) -> (Tensor out, Tensor lse)", tags=TAGS)
torch.library.define(
    BACKWARD_NAME,
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {ARGUMENTS}, bool[] needed) -> Tensor[]",  # in the order of GRADIENTS
    tags=TAGS,
)
# Stands in a compiled backward for gradients that do not exist: where it runs it raises an error of these words.
REFUSE_NAME = "strobe::refuse_gradients"
torch.library.define(REFUSE_NAME, "(Tensor dout, Tensor[] inputs, str words) -> Tensor[]", tags=TAGS)
# The forward operator that also returns the results named by aux (_options.AUX), after out and lse.
FORWARD_AUX_NAME = "strobe::attention_forward_aux"
torch.library.define(FORWARD_AUX_NAME, f"({ARGUMENTS}, str[] aux) -> Tensor[]", tags=TAGS)
# Derivatives in the direction of tangents, which are in the order of TANGENTS.
JVP_NAME, BACKWARD_JVP_NAME = "strobe::attention_jvp", "strobe::attention_backward_jvp"
_DIRECTION = "Tensor?[] tangents"
torch.library.define(JVP_NAME, f"({ARGUMENTS}, {_DIRECTION}) -> (Tensor out, Tensor lse, Tensor tout, Tensor tlse)", tags=TAGS)
_KNOWN = ("dout", "dlse", "tdout", "tdlse", "out", "lse", "tout", "tlse")
torch.library.define(
    BACKWARD_JVP_NAME,
    f"(Tensor?[] known, {ARGUMENTS}, {_DIRECTION}, bool[] needed) -> Tensor[]",  # known: in the order of _KNOWN
    tags=TAGS,
)


def forward(call: Call) -> tuple[Tensor, ...]:
    """out, lse and the results named by aux, by PyTorch's dispatcher."""
    if call.aux:
        return tuple(torch.ops.strobe.attention_forward_aux.default(**_keywords(call), aux=[*call.aux]))
    found: tuple[Tensor, ...] = torch.ops.strobe.attention_forward.default(**_keywords(call))
    return found


def _keywords(call: Call) -> dict[str, Any]:
    arrays = {name: x for name, x in call.arrays.items() if name not in CAPTURED}
    if len(arrays) < len(call.arrays):
        arrays["captured"] = [call.arrays[name] for name in CAPTURED if name in call.arrays]
    return {**arrays, **call.options}


def backward(call: Call, known: dict[str, Tensor], names: Sequence[str]) -> tuple[Tensor, ...]:
    """The gradients of these names, in the order of GRADIENTS, by PyTorch's dispatcher. known: dout, out, lse and, if used, dlse."""
    needed = [name in names for name in GRADIENTS]
    while len(needed) > _FEWEST and not needed[-1]:
        needed.pop()
    return tuple(torch.ops.strobe.attention_backward.default(**{"dlse": None, **known}, **_keywords(call), needed=needed))


def _direction(tangents: dict[str, Tensor]) -> list[Tensor | None]:
    return [tangents.get(name) for name in TANGENTS]


def jvp(call: Call, tangents: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """out, lse, tout and tlse, by PyTorch's dispatcher."""
    found: tuple[Tensor, ...] = torch.ops.strobe.attention_jvp.default(**_keywords(call), tangents=_direction(tangents))
    return found


def backward_jvp(call: Call, tangents: dict[str, Tensor], known: dict[str, Tensor], names: Sequence[str]) -> tuple[Tensor, ...]:
    """The derivatives of the gradients of these names, by PyTorch's dispatcher. known: those of _KNOWN that there are."""
    given, needed = [known.get(name) for name in _KNOWN], [name in names for name in GRADIENTS]
    operator = torch.ops.strobe.attention_backward_jvp.default
    return tuple(operator(given, **_keywords(call), tangents=_direction(tangents), needed=needed))


def refuse_gradients(dout: Tensor, inputs: Sequence[Tensor], words: str) -> list[Tensor]:
    found: list[Tensor] = torch.ops.strobe.refuse_gradients.default(dout, inputs, words)
    return found


def call_of(tensors: Sequence[Tensor], given: dict[str, Any]) -> Call:
    """The Call for a forward operator's arguments: the tensors q, k and v, and the arguments given by name."""
    wrong: Wrong = []
    aux = parse_aux(wrong, [*given["aux"]]) if "aux" in given else ()
    if wrong:
        raise wrong[0]
    q, k, v = tensors
    arrays, options, symbols = {"q": q, "k": k, "v": v}, {}, None
    for name, x in given.items():
        if name in FIELDS:
            options[name] = tuple(x) if isinstance(x, list) else x
        elif name == "captured":
            arrays.update(zip(CAPTURED, x or (), strict=False))
        elif name == SYMBOLS:
            symbols = x
        elif x is not None and name != "aux":
            arrays[name] = x
    if symbols:
        options = {**options, SYMBOLS: symbols} if any(map(is_symbolic, symbols)) else with_numbers(options, symbols)
    return Call(TORCH, arrays, options, aux)


def gradients_of(tensors: Sequence[Tensor], given: dict[str, Any]) -> tuple[Call, dict[str, Tensor], list[str]]:
    """A backward operator's arguments as the Call, the tensors beside its arrays, and the names in GRADIENTS that are needed."""
    names = _needed(*given.pop("needed"))
    dout, dlse, out, lse, *qkv = tensors
    call, known = call_of(qkv, given), {"dout": dout, "out": out, "lse": lse}
    if dlse is not None:
        known["dlse"] = dlse
    for name in names:
        if GRADIENTS[name] not in call.arrays:
            raise ValueError(f"needed: {name} of a call without {GRADIENTS[name]}; accepted are the gradients of what is given")
    return call, known, names


def tangents_of(given: dict[str, Any]) -> dict[str, Tensor]:
    """The tangents among an operator's arguments, by their names."""
    return {name: x for name, x in zip(TANGENTS, given.pop("tangents"), strict=True) if x is not None}


def derivatives_of(tensors: Sequence[Any], given: dict[str, Any]) -> tuple[Call, dict[str, Tensor], dict[str, Tensor], list[str]]:
    """The arguments of the backward's derivative: the Call, tangents, the tensors beside them, and the names in GRADIENTS."""
    names, tangents = _needed(*given.pop("needed")), tangents_of(given)
    known = {name: x for name, x in zip(_KNOWN, tensors[0], strict=True) if x is not None}
    return call_of(tensors[1:], given), tangents, known, names


@lru_cache
def _needed(*flags: bool) -> list[str]:
    if not _FEWEST <= len(flags) <= len(GRADIENTS):
        raise ValueError(f"needed: {len(flags)} values; accepted are {_FEWEST} to {len(GRADIENTS)}, of {', '.join(GRADIENTS)}")
    return [name for name, is_needed in zip(GRADIENTS, flags, strict=False) if is_needed]


@torch.library.register_fake(FORWARD_NAME)
def _fake_forward(*tensors: Tensor, **given: Any) -> tuple[Tensor, ...]:
    return tuple(call_of(tensors, given).results().values())


@torch.library.register_fake(FORWARD_AUX_NAME)
def _fake_forward_aux(*tensors: Tensor, **given: Any) -> list[Tensor]:
    return [*call_of(tensors, given).results().values()]


@torch.library.register_fake(BACKWARD_NAME)
def _fake_backward(*tensors: Tensor, **given: Any) -> list[Tensor]:
    call, _, names = gradients_of(tensors, given)
    return [*call.gradients(names).values()]


@torch.library.register_fake(JVP_NAME)
def _fake_jvp(*tensors: Tensor, **given: Any) -> tuple[Tensor, ...]:
    tangents_of(given)
    return tuple(call_of(tensors, given).derivatives().values())


@torch.library.register_fake(BACKWARD_JVP_NAME)
def _fake_backward_jvp(*tensors: Tensor, **given: Any) -> list[Tensor]:
    call, _, _, names = derivatives_of(tensors, given)
    return [*call.gradients(names).values()]


@torch.library.register_fake(REFUSE_NAME)
def _fake_refusal(dout: Tensor, inputs: Sequence[Tensor], words: str) -> list[Tensor]:
    return [torch.empty_like(x) for x in inputs]


@torch.library.impl(REFUSE_NAME, "CompositeExplicitAutograd")
def _refusal(dout: Tensor, inputs: Sequence[Tensor], words: str) -> list[Tensor]:
    raise NotImplementedError(words)


def implement(
    key: str,
    forward: Callable[[Call], tuple[Tensor, ...]],
    backward: Callable[..., tuple[Tensor, ...]],
    jvp: Callable[..., tuple[Tensor, ...]],
    backward_jvp: Callable[..., tuple[Tensor, ...]],
) -> None:
    """Registers what the operators do at a dispatch key."""
    impl = torch.library.impl
    impl(FORWARD_NAME, key, lambda *tensors, **given: forward(call_of(tensors, given)))
    impl(FORWARD_AUX_NAME, key, lambda *tensors, **given: [*forward(call_of(tensors, given))])
    impl(BACKWARD_NAME, key, lambda *tensors, **given: [*backward(*gradients_of(tensors, given))])

    def of_jvp(*tensors: Tensor, **given: Any) -> tuple[Tensor, ...]:
        tangents = tangents_of(given)
        return jvp(call_of(tensors, given), tangents)

    impl(JVP_NAME, key, of_jvp)
    impl(BACKWARD_JVP_NAME, key, lambda *tensors, **given: [*backward_jvp(*derivatives_of(tensors, given))])


implement("CompositeExplicitAutograd", _prepared.forward, _prepared.backward, _prepared.jvp, _prepared.backward_jvp)
