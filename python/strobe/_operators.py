"""The operators strobe::attention_forward, attention_forward_aux and attention_backward, as torch.compile and PyTorch see them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _eager, _repeated, _run
from ._abi import BACKWARD, FORWARD
from ._checks import Wrong
from ._core import lib
from ._options import FIELDS, GRADIENTS, INPUTS
from ._repeated import Seen, made_ready
from ._request import Request, parse_aux
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
_ARGUMENTS = ", ".join(
    ["Tensor q, Tensor k, Tensor v, *"]
    + [f"Tensor? {name}=None" for name in INPUTS if name not in ("q", "k", "v")]
    + [f"{_SCHEMA_TYPES[field.type]} {name}={field.default}" for name, field in FIELDS.items()]
)
# Results have the memory layout of the inputs: a compiler may not choose other strides for these.
_TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))
FORWARD_NAME, BACKWARD_NAME = "strobe::attention_forward", "strobe::attention_backward"
torch.library.define(FORWARD_NAME, f"({_ARGUMENTS}) -> (Tensor out, Tensor lse)", tags=_TAGS)
torch.library.define(
    BACKWARD_NAME,
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_ARGUMENTS}, bool[] needed) -> Tensor[]",  # in the order of GRADIENTS
    tags=_TAGS,
)
# The same with the results named by aux (_options.AUX) after out and lse.
FORWARD_AUX_NAME = "strobe::attention_forward_aux"
torch.library.define(FORWARD_AUX_NAME, f"({_ARGUMENTS}, str[] aux) -> Tensor[]", tags=_TAGS)
forward = torch.ops.strobe.attention_forward.default
forward_aux = torch.ops.strobe.attention_forward_aux.default
backward = torch.ops.strobe.attention_backward.default
_FUNCTIONS = {FORWARD: lib.strobe_forward, BACKWARD: lib.strobe_backward}


def _request(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], aux: tuple[str, ...] = ()) -> Request:
    p = Request({"q": q, "k": k, "v": v}, {}, aux)
    for name, x in given.items():
        (p.options if name in FIELDS else p.arrays)[name] = tuple(x) if isinstance(x, list) else x
    return p


def _names(needed: list[bool], p: Request) -> list[str]:
    """The names in GRADIENTS that are needed."""
    if len(needed) != len(GRADIENTS):
        raise ValueError(f"needed: {len(needed)} values; accepted are {len(GRADIENTS)}, of {', '.join(GRADIENTS)}")
    names = [name for name, wanted in zip(GRADIENTS, needed, strict=True) if wanted]
    for name in names:
        if GRADIENTS[name] not in p.arrays:
            raise ValueError(f"needed: {name} of a call without {GRADIENTS[name]}; accepted are the gradients of what is given")
    return names


def _repeated_call(
    direction: int,
    prefix: bytes,
    tensors: tuple[Tensor, ...],
    given: dict[str, Any],
    request: Callable[[], Request],
    known: dict[str, Tensor],
    results: Callable[[Request], dict[str, Tensor]],
) -> tuple[Tensor, ...] | None:
    """Runs the call as a prepared one, from the second time on; None if the full call must be made."""
    if (found := _eager.run(_repeated.CALLS.lately, prefix, tensors, given)) is not None:
        return found
    key = _eager.key(prefix, tensors, given)
    if key is None:
        return None
    p = request()
    if p.options.get("engine") == _run.ORACLE:
        return None
    seen = _repeated.CALLS.get(key)
    if seen is None:
        _repeated.CALLS.keep(key, Seen(p.options))
        return None
    if isinstance(seen, Seen):
        made = results(p)
        _repeated.CALLS.keep(key, made_ready(p, known, made, direction, form=bytes(range(len(made)))))
        del made  # an example, whose memory the call can use
    return _eager.run(_repeated.CALLS.lately, prefix, tensors, given)


def run_into(direction: int, p: Request, known: dict[str, Tensor], made: dict[str, Tensor]) -> None:
    """Runs a call that may be repeated, whose results are in the caller's memory, `made` or among `known`."""
    tensors = *known.values(), *made.values()
    inputs = {name: x for name, x in p.arrays.items() if name not in ("q", "k", "v")}
    prefix = " ".join(("into", str(direction), *known, *made)).encode()
    ready = _repeated_call(
        direction, prefix, (*tensors, *(p.arrays[name] for name in "qkv")), inputs | p.options, lambda: p, known | made, lambda _: {}
    )
    if ready is None:
        _run.call(TORCH, p, known, made).run(_FUNCTIONS[direction])


def _run_forward(aux: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> tuple[Tensor, ...]:
    request = partial(_request, q, k, v, given, aux)
    found = _repeated_call(FORWARD, " ".join(("forward", *aux)).encode(), (q, k, v), given, request, {}, partial(_run.results, TORCH))
    return _run.forward(TORCH, request()) if found is None else found


def run_again(p: Request) -> tuple[Tensor, Tensor]:
    """out and lse of a call that may be repeated."""
    out, lse = run_forward(**p.arrays, **p.options)
    return out, lse


def run_forward(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, ...]:
    return _run_forward((), q, k, v, given)


def run_forward_aux(q: Tensor, k: Tensor, v: Tensor, *, aux: list[str], **given: Any) -> list[Tensor]:
    return list(_run_forward(_aux(aux), q, k, v, given))


def _aux(aux: list[str]) -> tuple[str, ...]:
    wrong: Wrong = []
    names = parse_aux(wrong, [*aux])
    if wrong:
        raise wrong[0]
    return names


@torch.library.register_fake(FORWARD_NAME)
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, ...]:
    return tuple(_run.results(TORCH, _request(q, k, v, given)).values())


@torch.library.register_fake(FORWARD_AUX_NAME)
def _fake_forward_aux(q: Tensor, k: Tensor, v: Tensor, *, aux: list[str], **given: Any) -> list[Tensor]:
    return list(_run.results(TORCH, _request(q, k, v, given, _aux(aux))).values())


def with_dense_rows(dout: Tensor, bshd: bool) -> Tensor:
    """dout, or a copy: GPU kernels that load whole tiles need adjacent columns, and rows with a stride other than 0. A batch or head axis
    that is expanded needs no copy."""
    row = {3: 0, 4: 1 if bshd else 2}.get(dout.dim())
    if row is None or (dout.stride(-1) == 1 and (dout.stride(row) or dout.shape[row] == 1)):
        return dout
    return dout.contiguous()


def run_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *, needed: list[bool], **given: Any
) -> list[Tensor]:
    if dout.is_cuda:
        dout = with_dense_rows(dout, "bshd" in given)
    known = {"dout": dout, "out": out, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
    request = partial(_request, q, k, v, given)
    if any(needed):
        prefix = b"backward" + bytes(needed) + bytes([dlse is not None])
        tensors = (*known.values(), q, k, v)
        found = _repeated_call(BACKWARD, prefix, tensors, given, request, known, lambda p: _run.gradients(TORCH, p, _names(needed, p)))
        if found is not None:
            return list(found)
    p = request()
    return list(_run.backward(TORCH, p, known, _names(needed, p)).values())


@torch.library.register_fake(BACKWARD_NAME)
def _fake_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *, needed: list[bool], **given: Any
) -> list[Tensor]:
    p = _request(q, k, v, given)
    return list(_run.gradients(TORCH, p, _names(needed, p)).values())


torch.library.impl(FORWARD_NAME, "CompositeExplicitAutograd", run_forward)
torch.library.impl(FORWARD_AUX_NAME, "CompositeExplicitAutograd", run_forward_aux)
torch.library.impl(BACKWARD_NAME, "CompositeExplicitAutograd", run_backward)
