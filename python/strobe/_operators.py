"""The operators strobe::attention_forward, attention_forward_aux and attention_backward, as torch.compile and PyTorch see them: here, and
nowhere else, a Call is taken apart into keywords, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _prepared
from ._call import Call
from ._checks import Wrong
from ._options import FIELDS, GRADIENTS, INPUTS
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
ARGUMENTS = ", ".join(
    ["Tensor q, Tensor k, Tensor v, *"]
    + [f"Tensor? {name}=None" for name in INPUTS if name not in ("q", "k", "v")]
    + [f"{_SCHEMA_TYPES[field.type]} {name}={field.default}" for name, field in FIELDS.items()]
)
# Results have the memory layout of the inputs: a compiler may not choose other strides for these.
TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))
FORWARD_NAME, BACKWARD_NAME = "strobe::attention_forward", "strobe::attention_backward"
torch.library.define(FORWARD_NAME, f"({ARGUMENTS}) -> (Tensor out, Tensor lse)", tags=TAGS)
torch.library.define(
    BACKWARD_NAME,
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {ARGUMENTS}, bool[] needed) -> Tensor[]",  # in the order of GRADIENTS
    tags=TAGS,
)
# The same with the results named by aux (_options.AUX) after out and lse.
FORWARD_AUX_NAME = "strobe::attention_forward_aux"
torch.library.define(FORWARD_AUX_NAME, f"({ARGUMENTS}, str[] aux) -> Tensor[]", tags=TAGS)


def forward(call: Call) -> tuple[Tensor, ...]:
    """out, lse and the results named by aux, by PyTorch's dispatcher."""
    if call.aux:
        return tuple(torch.ops.strobe.attention_forward_aux.default(**call.arrays, **call.options, aux=[*call.aux]))
    found: tuple[Tensor, ...] = torch.ops.strobe.attention_forward.default(**call.arrays, **call.options)
    return found


def backward(call: Call, known: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """The gradients of these names, which are in the order of GRADIENTS, by PyTorch's dispatcher. known: dout, dlse or not, out and lse."""
    needed = [name in names for name in GRADIENTS]
    found = torch.ops.strobe.attention_backward.default(**{"dlse": None, **known}, **call.arrays, **call.options, needed=needed)
    return dict(zip(names, found, strict=True))


def forward_arguments(q: Tensor, k: Tensor, v: Tensor, *, aux: Sequence[str] = (), **given: Any) -> Call:
    """The call of the two operators' arguments."""
    wrong: Wrong = []
    call = Call(TORCH, {"q": q, "k": k, "v": v}, {}, parse_aux(wrong, [*aux]) if aux else ())
    if wrong:
        raise wrong[0]
    for name, x in given.items():
        if name not in FIELDS:
            call.arrays[name] = x
        else:
            call.options[name] = tuple(x) if isinstance(x, list) else x
    return call


def backward_arguments(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *, needed: list[bool], **given: Any
) -> tuple[Call, dict[str, Tensor], list[str]]:
    """The call, the tensors beside its arrays, and the names in GRADIENTS that are needed."""
    call = forward_arguments(q, k, v, **given)
    known = {"dout": dout, "out": out, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
    if len(needed) != len(GRADIENTS):
        raise ValueError(f"needed: {len(needed)} values; accepted are {len(GRADIENTS)}, of {', '.join(GRADIENTS)}")
    names = [name for name, is_needed in zip(GRADIENTS, needed, strict=True) if is_needed]
    for name in names:
        if GRADIENTS[name] not in call.arrays:
            raise ValueError(f"needed: {name} of a call without {GRADIENTS[name]}; accepted are the gradients of what is given")
    return call, known, names


@torch.library.register_fake(FORWARD_NAME)
def _fake_forward(*arguments: Tensor, **given: Any) -> tuple[Tensor, ...]:
    return tuple(forward_arguments(*arguments, **given).results().values())


@torch.library.register_fake(FORWARD_AUX_NAME)
def _fake_forward_aux(*arguments: Tensor, **given: Any) -> list[Tensor]:
    return [*_fake_forward(*arguments, **given)]


@torch.library.register_fake(BACKWARD_NAME)
def _fake_backward(*arguments: Any, **given: Any) -> list[Tensor]:
    call, _, names = backward_arguments(*arguments, **given)
    return [*call.gradients(names).values()]


def _forward(*arguments: Tensor, **given: Any) -> tuple[Tensor, ...]:
    return _prepared.forward(forward_arguments(*arguments, **given))


def _backward(*arguments: Any, **given: Any) -> list[Tensor]:
    return [*_prepared.backward(*backward_arguments(*arguments, **given)).values()]


torch.library.impl(FORWARD_NAME, "CompositeExplicitAutograd", _forward)
torch.library.impl(FORWARD_AUX_NAME, "CompositeExplicitAutograd", lambda *arguments, **given: [*_forward(*arguments, **given)])
torch.library.impl(BACKWARD_NAME, "CompositeExplicitAutograd", _backward)
