"""Calls on torch tensors, in a form that autograd can differentiate and compilers can see."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _operators, _run
from ._options import FIELDS, GRADIENTS
from ._refusals import Name, refusing
from ._request import Request
from .arrays import tensor_kinds
from .arrays.memory import PLAIN
from .arrays.torch import TORCH


class Calls(_run.Calls):
    """Goes through autograd and PyTorch's dispatcher, unless nothing needs to see the call."""

    def forward(self, p: Request) -> tuple[Tensor, ...]:
        arrays = TORCH.autocast(p.arrays)
        more: dict[str, Any] = {**arrays, **p.options}
        if p.aux:
            more["aux"] = [*p.aux]
        if is_seen_by_dispatcher():
            return tuple(_operators.forward_aux(**more)) if p.aux else _operators.forward(**more)
        try:
            return _differentiable_forward(**more)  # the function that the dispatcher's first step would call
        except TypeError as refused:
            raise tensor_kinds.not_dispatched(arrays, refused) from None

    def backward(self, p: Request, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needed: list[str]) -> dict[str, Tensor]:
        try:
            found = _operators.backward(dout, dlse, out, lse, **p.arrays, **p.options, needed=[name in needed for name in GRADIENTS])
        except TypeError as refused:
            known = {"dout": dout, "out": out, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
            raise tensor_kinds.not_dispatched(known | p.arrays, refused) from None
        return dict(zip(needed, found, strict=True))


def is_seen_by_dispatcher() -> bool:
    """Whether a compiler, a transform or a tracer must see the operator itself."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch._C._is_tracing()


def is_plain(arrays: Iterable[Any]) -> bool:
    """Whether only the operators' own implementation needs to see the call: no mode that traces or fakes, no subclass of Tensor, no other
    device."""
    if torch._C._len_torch_dispatch_stack():
        return False
    return all(type(x) in PLAIN and (x.is_cuda or x.is_cpu) for x in arrays if isinstance(x, Tensor))


def _below_autograd_forward(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """The operator, without the dispatcher (some 10 µs) where it would lead straight to _operators.run_forward."""
    plain = is_plain((q, k, v, *given.values()))
    if "aux" in given:
        if plain:
            return tuple(_operators.run_forward_aux(q, k, v, **given))
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(_operators.forward_aux(q, k, v, **given))
    if plain:
        return _operators.run_forward(q, k, v, **given)
    with torch._C._AutoDispatchBelowAutograd():
        return _operators.forward(q, k, v, **given)


def _below_autograd_backward(arguments: tuple[Tensor | None, ...], given: dict[str, Any]) -> list[Tensor]:
    if is_plain((*arguments, *given.values())):
        return _operators.run_backward(*arguments, **given)  # type: ignore[arg-type]
    with torch._C._AutoDispatchBelowAutograd():
        return _operators.backward(*arguments, **given)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, given: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        out, lse, *aux = _below_autograd_forward(q, k, v, given)
        ctx.mark_non_differentiable(*aux)
        ctx.options = {name: x for name, x in given.items() if name in FIELDS}
        arrays = {name: x for name, x in given.items() if name not in FIELDS and name != "aux"}
        ctx.names = tuple(arrays)
        ctx.save_for_backward(out, lse, q, k, v, *arrays.values())
        ctx.set_materialize_grads(False)
        return out, lse, *aux

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        out, lse, q, k, v, *arrays = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        needed = ctx.needs_input_grad[:5]  # in the order of GRADIENTS
        given = dict(zip(ctx.names, arrays, strict=True))
        found = iter(differentiable_backward(dout, dlse, out, lse, q, k, v, **given, **ctx.options, needed=needed))
        return *(next(found) if wanted else None for wanted in needed), None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise _no_forward_mode()


class _Gradients(torch.autograd.Function):
    """Differentiable once: a second differentiation raises an error that says so."""

    @staticmethod
    def forward(ctx: Any, given: dict[str, Any], *arguments: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(_below_autograd_backward(arguments, given))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError("strobe.attention has no second derivative: a gradient of it cannot be differentiated again")

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise _no_forward_mode()


def _no_forward_mode() -> Exception:
    return NotImplementedError("strobe.attention has no forward-mode derivative; accepted are torch.autograd.grad and backward()")


def is_tracked(*tensors: Tensor | None) -> bool:
    """In reverse mode; or perhaps in forward mode, for which autograd.Function calls jvp()."""
    return (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)) or forward_ad._current_level >= 0


def _is_differentiated(*tensors: Tensor | None) -> bool:
    tracked = is_tracked(*tensors)
    if tracked and torch._C._are_functorch_transforms_active():
        raise NotImplementedError("strobe.attention under torch.func.grad, vjp, jvp, ...: accepted are torch.autograd.grad and backward()")
    return tracked


def _refuse_without_gradient(tracked: list[str], given: dict[str, Any]) -> None:
    """Refuses a call that has no gradient. tracked: the tensors that require one."""
    if given.get("part") and given["part"][0]:
        raise refusing(
            NotImplementedError,
            "part",
            "partial=True, and a tensor requires grad; accepted are tensors that do not, and strobe.attention_backward with the "
            "whole row's lse and delta",
        )
    all_of_them = ", ".join(f"{{{n}}}" for n in range(len(tracked)))
    words, names = f"have no gradients, and {all_of_them} requires grad; accepted is torch.no_grad(), or detach()", map(Name, tracked)
    if given.get("page_table") is not None:
        raise refusing(NotImplementedError, "page_table", f"keys in pages {words}", *names)
    if given.get("k_scale") is not None or given.get("v_scale") is not None:
        raise refusing(NotImplementedError, "k_scale", f"quantised keys {words}", *names)


def _differentiable_forward(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, ...]:
    bias, sinks, slopes = given.get("bias"), given.get("sinks"), given.get("alibi_slopes")
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        words = "requires grad, and strobe.attention has no gradient of it; accepted is {0}.detach()"
        raise refusing(NotImplementedError, "alibi_slopes", words, Name("alibi_slopes"))
    scales = given.get("k_scale"), given.get("v_scale")
    if _is_differentiated(q, k, v, bias, sinks, *scales):
        named = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks, "k_scale": scales[0], "v_scale": scales[1]}
        if tracked := [name for name, x in named.items() if x is not None and x.requires_grad and torch.is_grad_enabled()]:
            _refuse_without_gradient(tracked, given)
        if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in scales):
            raise _no_forward_mode()  # as jvp() says for the others
        return _Attention.apply(q, k, v, bias, sinks, given)
    return _below_autograd_forward(q, k, v, given)


def differentiable_backward(*arguments: Tensor | None, **given: Any) -> list[Tensor]:
    if _is_differentiated(*arguments):
        return list(_Gradients.apply(given, *arguments))
    return _below_autograd_backward(arguments, given)


torch.library.impl(_operators.FORWARD_NAME, "Autograd", _differentiable_forward)
torch.library.impl(_operators.FORWARD_AUX_NAME, "Autograd", lambda q, k, v, **given: [*_differentiable_forward(q, k, v, **given)])
torch.library.impl(_operators.BACKWARD_NAME, "Autograd", differentiable_backward)
