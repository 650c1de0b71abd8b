"""Calls of torch tensors, as autograd differentiates them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from . import _eager, _function, _operators, _prepared
from ._abi import FORWARD
from ._batched import is_mapped_gradient
from ._call import BEFORE_PARSING, Call
from ._eager import PreparedCall
from ._options import GRADIENTS, TANGENTS
from ._part import is_partial
from ._prepared import Kept
from ._refusals import CALLER, OWN, Name, Refusal, refusing
from .arrays import tensor_kinds
from .arrays.memory import PLAIN
from .arrays.torch import TORCH

T = TypeVar("T")


def again(q: Tensor, k: Tensor, v: Tensor, return_lse: object, given: Mapping[str, Any]) -> Any:
    """The result of attention() for a remembered call; None if the full call must be made."""
    if torch.compiler.is_compiling():
        return None
    if given and (callable(given.get("score")) or callable(given.get("mask"))):  # functions have no key, but their recordings have one
        fields = _function.as_fields(given, TORCH, q)
        if fields is None:
            return None
        given = fields
    found = _eager.attention(_prepared.CALLS, q, k, v, return_lse, given)
    if found is not None:
        return found
    return _not_lately(q, k, v, return_lse, given)


def _not_lately(q: Tensor, k: Tensor, v: Tensor, return_lse: Any, given: Mapping[str, Any]) -> Any:
    """What again() returns for a remembered call that is not prepared yet, or was not used recently, and for one of other sizes."""
    key = _eager.attention_key(q, k, v, return_lse, given)
    if key is None:
        return None
    known = _prepared.CALLS.get(key)
    if isinstance(known, Call):
        call = known.on({"q": q, "k": k, "v": v, **_prepared.tensors_in(given)})
        _prepare(key, call, Kept(call, return_lse, is_repeated=True))
    elif known is None:
        kind = _eager.attention_kind(q, k, v, return_lse, given)
        like = None if kind is None else _prepared.CALLS.kinds.get(kind)
        if kind is None or not isinstance(like, Kept):  # of a PreparedCall C knows that it is not like this call
            return None
        try:
            _prepared.CALLS.keep_kind(kind, _prepare(key, like.on((q, k, v)), like))
        except (TypeError, ValueError, NotImplementedError):  # the full call says what is wrong, in the words of its arguments
            return None
    return _eager.attention(_prepared.CALLS, q, k, v, return_lse, given)


def _prepare(key: bytes, call: Call, kept: Kept) -> PreparedCall:
    """Prepares a call of attention(), which is remembered under this key. kept: what autograd keeps of it."""
    is_tracked = torch.is_grad_enabled() and any(x.requires_grad for x in call.arrays.values())
    made = call.results()  # an example; the call may use its memory once it is dropped
    if not (kept.return_lse or is_tracked):
        del made["lse"]
    prepared = _prepared.prepare(call, {}, made, FORWARD, function=_apply if is_tracked else None, more=kept)
    _prepared.CALLS.keep(key, prepared)
    return prepared


def forward(call: Call) -> tuple[Tensor, ...]:
    """out and lse, differentiable, and the results named by aux. The dispatcher is left out unless a compiler, a transform or a tracer must
    see the operator itself."""
    call = call.on(call.framework.autocast(call.arrays))
    if is_seen_by_dispatcher():
        return _operators.forward(call)
    try:
        return _differentiable_forward(call)  # this is what the dispatcher would call first
    except TypeError as refused:
        raise tensor_kinds.not_dispatched(call.arrays, refused) from None


def backward(call: Call, known: dict[str, Tensor], names: list[str]) -> tuple[Tensor, ...]:
    """The gradients of these names, which are in the order of GRADIENTS. known: dout, out, lse and, if lse was used, dlse."""
    if is_seen_by_dispatcher():
        return _operators.backward(call, known, names)
    try:
        return _differentiable_backward(call, known, names)
    except TypeError as refused:
        raise tensor_kinds.not_dispatched(known | call.arrays, refused) from None


def jvp(call: Call, tangents: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """out, lse and their derivatives in the direction of the tangents, differentiable once."""
    if is_seen_by_dispatcher():
        return _operators.jvp(call, tangents)
    return _differentiable_jvp(call, tangents)


def _backward_jvp(call: Call, tangents: dict[str, Tensor], known: dict[str, Tensor], names: list[str]) -> tuple[Tensor, ...]:
    """The derivatives of the gradients of these names, of which there are no further derivatives."""
    if is_seen_by_dispatcher():
        return _operators.backward_jvp(call, tangents, known, names)
    return _differentiable_backward_jvp(call, tangents, known, names)


def is_seen_by_dispatcher() -> bool:
    """Whether a compiler, a transform or a tracer must see the operator itself."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch._C._is_tracing()


def is_plain(arrays: Iterable[Any]) -> bool:
    """Whether only the operators' own implementation needs to see the call: no mode that traces or fakes, no transform, no tensor of one
    that has ended, no subclass of Tensor, no other device."""
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    for x in arrays:
        if type(x) in PLAIN:
            if not (x.is_cuda or x.is_cpu) or is_mapped_gradient(x) or is_functorch_wrapped_tensor(x):
                return False
        elif isinstance(x, Tensor):
            return False
    return True


def below_autograd(
    tensors: Iterable[Any], implementation: Callable[..., T], operator: Callable[..., T], *arguments: Any, **given: Any
) -> T:
    """Calls the operator below autograd. The dispatcher, which costs 10 µs or more, is left out where it would lead straight to the
    operator's own implementation. tensors: the tensors among the arguments."""
    if is_plain(tensors):
        return implementation(*arguments, **given)
    modes = _MODES.get()
    if modes is None:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments, **given)
    with torch.set_grad_enabled(modes[0]), forward_ad._set_fwd_grad_enabled(modes[1]), torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments, **given)


# Under a transform of torch.func: whether the next level is differentiated, in reverse and in forward mode. autograd.Function turns both
# off.
_MODES: ContextVar[tuple[bool, bool] | None] = ContextVar("modes", default=None)


class _Attention(torch.autograd.Function):
    """attention() as autograd sees it: a Call, or a PreparedCall, applied to its arrays."""

    @staticmethod
    def forward(ctx: Any, of: Call | PreparedCall, *arrays: Tensor) -> Any:
        if isinstance(of, PreparedCall):
            found = of.run(*arrays)
            if found is None:
                raise _eager.RefusedError
            out, lse = found
            kept = of.more
        else:
            call = of.on(dict(zip(of.arrays, arrays, strict=True)))
            found = out, lse, *aux = below_autograd(arrays, _prepared.forward, _operators.forward, call)
            kept = Kept(of)
            ctx.mark_non_differentiable(*aux)
            if forward_ad._current_level >= 0:
                ctx.save_for_forward(*arrays)
        ctx.kept = kept
        if kept.without_gradients is None:
            ctx.save_for_backward(out, lse, *arrays)
        else:
            ctx.words = CALLER.get()()
            ctx.save_for_backward(*() if is_plain(arrays) else arrays)  # a graph needs their shapes
        if not kept.return_lse:
            return out
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None, *_: None) -> tuple[Tensor | None, ...]:
        kept, flags, saved = ctx.kept, ctx.needs_input_grad, ctx.saved_tensors
        if kept.without_gradients is not None:
            return _refuse_gradients(ctx, dlse if dout is None else dout, saved)
        if dout is None:
            dout = torch.zeros_like(saved[0])
        if kept.prefix and not torch.compiler.is_compiling():
            found = _eager.gradients(_prepared.CALLS, kept.prefix, flags, dout, dlse, saved)
            if found is None:
                found = _prepared.gradients(kept, flags, dout, dlse, saved)
            if found is not None:
                return found
        call = kept.on(saved[2:])
        known = {"dout": dout, "out": saved[0], "lse": saved[1]} | ({} if dlse is None else {"dlse": dlse})
        names = kept.needed(flags)
        made = dict(zip(names, backward(call, known, names), strict=True))
        return None, *(made.get("d" + name) for name in kept.names)

    @staticmethod
    def jvp(ctx: Any, of: None, *directions: Tensor | None) -> Any:
        kept = ctx.kept
        if kept.without_gradients is not None:
            argument, keys = kept.without_gradients
            raise refusing(NotImplementedError, argument, f"{keys} have no derivatives, and a tensor has a tangent; accepted is none")
        call = kept.on(_primals(ctx.saved_tensors))
        _refuse_partial(call)
        tangents = _named(call, dict(zip(kept.names, directions, strict=True)))
        tout, tlse = jvp(call, tangents)[2:]
        return (tout, tlse, *(None for _ in call.aux)) if kept.return_lse else tout


def _primals(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors without the tangents of forward_ad, for derivatives that are computed by formulas."""
    return tuple(forward_ad.unpack_dual(x).primal for x in tensors)


def _named(call: Call, directions: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The tangents of a call's arrays by their names in TANGENTS. Only arrays with a derivative have one."""
    given = {name: x for name, x in directions.items() if x is not None}
    if "alibi_slopes" in given:
        words = "has a tangent, and attention has no derivative by it; accepted is {0}.detach()"
        raise refusing(NotImplementedError, "alibi_slopes", words, Name("alibi_slopes"))
    learnable = {*(of for of in GRADIENTS.values() if of not in _function.CAPTURED), *call.learnable()}
    return {name: given[of] for name, of in TANGENTS.items() if of in given and of in learnable}


class _Jvp(torch.autograd.Function):
    """The derivatives of attention() in a direction, differentiated once."""

    @staticmethod
    def forward(ctx: Any, call: Call, names: tuple[str, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip((*call.arrays, *names), tensors, strict=True))
        call, tangents = call.on({name: given[name] for name in call.arrays}), {name: given[name] for name in names}
        found = below_autograd(tensors, _prepared.jvp, _operators.jvp, call, tangents)
        ctx.kept, ctx.tangents = Kept(call), names
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *found)
        return found

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, dtout: Tensor | None, dtlse: Tensor | None) -> tuple[Any, ...]:
        kept, saved = ctx.kept, ctx.saved_tensors
        count = len(kept.names)
        call, tangents = kept.on(saved[:count]), dict(zip(ctx.tangents, saved[count:-4], strict=True))
        results = dict(zip(("out", "lse", "tout", "tlse"), saved[-4:], strict=True))
        found: dict[str, Tensor] = {}

        def known(names: Mapping[str, Tensor | None], *of: str) -> dict[str, Tensor]:
            given = {name: x for name, x in names.items() if x is not None}
            first = next(iter(names))
            return {first: torch.zeros_like(results["out"]), **given, **{name: results[name] for name in of}}

        # The gradients by the tangents are those of the forward; those by the arrays are the derivative of the backward in a direction.
        wanted = [f"d{TANGENTS[name]}" for name, flag in zip(ctx.tangents, ctx.needs_input_grad[2 + count :], strict=True) if flag]
        names = kept.needed((False, *ctx.needs_input_grad[2 : 2 + count]))
        if wanted and not (dtout is dtlse is None):
            made = backward(call, known({"dout": dtout, "dlse": dtlse}, "out", "lse"), wanted)
            found |= {f"t{name[1:]}": x for name, x in zip(wanted, made, strict=True)}
        if names and dtout is dtlse is None:
            made = backward(call, known({"dout": dout, "dlse": dlse}, "out", "lse"), names)
            found |= dict(zip(names, made, strict=True))
        elif names:
            given = known({"dout": dtout, "dlse": dtlse, "tdout": dout, "tdlse": dlse}, *results)
            found |= dict(zip(names, _backward_jvp(call, tangents, given, names), strict=True))
        return None, None, *(found.get(f"d{name}") for name in kept.names), *(found.get(name) for name in ctx.tangents)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise _no_derivative("a second derivative in forward mode alone; accepted is forward mode over torch.autograd.grad")


class _Gradients(torch.autograd.Function):
    """The gradients of attention(), differentiated once more."""

    @staticmethod
    def forward(ctx: Any, call: Call, beside: tuple[str, ...], names: list[str], *tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip((*beside, *call.arrays), tensors, strict=True))
        call, known = call.on({name: given[name] for name in call.arrays}), {name: given[name] for name in beside}
        ctx.kept, ctx.beside, ctx.names = Kept(call), beside, names
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*tensors)
        return below_autograd(tensors, _prepared.backward, _operators.backward, call, known, names)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        # Second derivatives are symmetric: the gradients are derivatives in the direction of the cotangents.
        kept, beside, saved = ctx.kept, ctx.beside, ctx.saved_tensors
        call, known = kept.on(saved[len(beside) :]), dict(zip(beside, saved[: len(beside)], strict=True))
        tangents = {f"t{name[1:]}": x for name, x in zip(ctx.names, cotangents, strict=True) if x is not None}
        flags = dict(zip((*beside, *kept.names), ctx.needs_input_grad[3:], strict=True))
        names = kept.needed((False, *ctx.needs_input_grad[3 + len(beside) :]))
        if not tangents:
            return (None,) * (3 + len(flags))
        tout, tlse = jvp(call, tangents)[2:]
        found = {"dout": tout, "dlse": tlse}
        if names:
            made = _backward_jvp(call, tangents, known | {"tout": tout.detach(), "tlse": tlse.detach()}, names)
            found |= {name[1:]: x for name, x in zip(names, made, strict=True)}
        return None, None, None, *(found.get(name) if flag else None for name, flag in flags.items())

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor | None) -> tuple[Tensor, ...]:
        kept, beside, saved = ctx.kept, ctx.beside, _primals(ctx.saved_tensors)
        call, known = kept.on(saved[len(beside) :]), dict(zip(beside, saved[: len(beside)], strict=True))
        given = dict(zip((*beside, *kept.names), directions[3:], strict=True))
        tangents = _named(call, {name: given[name] for name in kept.names})
        more = {f"t{name}": given[name] for name in ("dout", "dlse") if given.get(name) is not None}
        tout, tlse = jvp(call, tangents)[2:]
        return _backward_jvp(call, tangents, known | more | {"tout": tout.detach(), "tlse": tlse.detach()}, ctx.names)


# Function.apply takes a microsecond to look for transforms, of which a PreparedCall has none, and to bind arguments.
_apply = super(torch.autograd.Function, _Attention).apply


class DifferentiatedOnce(torch.autograd.Function):
    """Derivatives that cannot be differentiated again: an attempt raises an error. whose: the function's name, for the error."""

    @staticmethod
    def forward(
        ctx: Any, whose: str, order: str, compute: Callable[[tuple[Any, ...]], Iterable[Tensor]], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.whose, ctx.order = whose, order  # order: of the first derivative that there is not
        return tuple(compute(tensors))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(f"{ctx.whose} has no {ctx.order} derivative: what it was asked for cannot be differentiated again")

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(f"{ctx.whose} has no {ctx.order} derivative, in forward mode neither")


def _no_derivative(what: str) -> Exception:
    return NotImplementedError(f"strobe.attention has no {what}")


def is_tracked(*tensors: Tensor | None) -> bool:
    """Whether autograd tracks one of the tensors in reverse mode, or perhaps in forward mode, for which autograd.Function calls jvp()."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return forward_ad._current_level >= 0


def _refuse_gradients(ctx: Any, dout: Tensor | None, arrays: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Refuses the backward of keys in pages or of quantised ones: at once, or in a compiled graph when it runs."""
    kept, flags = ctx.kept, ctx.needs_input_grad[1:]
    argument, keys = kept.without_gradients
    tracked = [name for name, flag in zip(kept.names, flags, strict=True) if flag]
    all_of_them = ", ".join(f"{{{n}}}" for n in range(len(tracked)))
    names = [Name("score") if name in _function.CAPTURED else Name(name) for name in tracked]  # score: what its function reads
    words = f"{keys} have no gradients, and {all_of_them} requires grad; accepted is a forward under torch.no_grad(), or of detach()"
    refused = ctx.words.said(Refusal(argument, words, (*names,)))
    if not arrays or dout is None:
        raise refusing(NotImplementedError, refused.argument, refused.words)
    tracked_arrays = [x for x, flag in zip(arrays, flags, strict=True) if flag]
    found = iter(_operators.refuse_gradients(dout, tracked_arrays, OWN.line(refused)))
    return None, *(next(found) if flag else None for flag in flags)


def _refuse_partial(call: Call) -> None:
    if is_partial(call.options):
        raise refusing(
            NotImplementedError,
            "part",
            "partial=True, and a tensor requires grad; accepted are tensors that do not, and strobe.attention_backward with the "
            "whole row's lse and delta",
        )


def without_masks_captures(call: Call) -> Call:
    """The call with captured tensors that have no gradient, because only the mask reads them, detached."""
    learnable = call.learnable()
    others = [name for name in _function.CAPTURED if name in call.arrays and name not in learnable and call.arrays[name].requires_grad]
    return call.on({**call.arrays, **{name: call.arrays[name].detach() for name in others}}) if others else call


def refuse_tracked_slopes(arrays: Mapping[str, Tensor]) -> None:
    slopes = arrays.get("alibi_slopes")
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        words = "requires grad, and attention has no gradient of it; accepted is {0}.detach()"
        raise refusing(NotImplementedError, "alibi_slopes", words, Name("alibi_slopes"))


def _differentiable_forward(call: Call) -> tuple[Tensor, ...]:
    call = without_masks_captures(call)
    arrays = call.arrays
    refuse_tracked_slopes(arrays)
    if not is_tracked(*arrays.values()):
        return below_autograd(arrays.values(), _prepared.forward, _operators.forward, call)
    if torch.is_grad_enabled() and any(x.requires_grad for x in arrays.values()):
        _refuse_partial(call)
    found: tuple[Tensor, ...] = _applied(_Attention, call, *arrays.values())
    return found


def _differentiable_backward(call: Call, known: dict[str, Tensor], names: list[str]) -> tuple[Tensor, ...]:
    if not _is_learning(call, *known.values()):
        return below_autograd((*known.values(), *call.arrays.values()), _prepared.backward, _operators.backward, call, known, names)
    refuse_tracked_slopes(call.arrays)
    found: tuple[Tensor, ...] = _applied(_Gradients, call, (*known,), names, *known.values(), *call.arrays.values())
    return found


def _differentiable_jvp(call: Call, tangents: dict[str, Tensor]) -> tuple[Tensor, ...]:
    refuse_tracked_slopes(call.arrays)
    if not _is_learning(call, *tangents.values()):
        return below_autograd((*tangents.values(), *call.arrays.values()), _prepared.jvp, _operators.jvp, call, tangents)
    found: tuple[Tensor, ...] = _applied(_Jvp, call, (*tangents,), *call.arrays.values(), *tangents.values())
    return found


def _differentiable_backward_jvp(call: Call, tangents: dict[str, Tensor], known: dict[str, Tensor], names: list[str]) -> tuple[Tensor, ...]:
    own = tuple(call.arrays)

    def compute(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given = dict(zip((*own, *tangents, *known), tensors, strict=True))
        arrays, direction, beside = ({name: given[name] for name in of} for of in (own, tangents, known))
        return below_autograd(tensors, _prepared.backward_jvp, _operators.backward_jvp, call.on(arrays), direction, beside, names)

    tensors = (*call.arrays.values(), *tangents.values(), *known.values())
    if not _is_learning(call, *tangents.values(), *known.values()):
        return compute(tensors)
    found: tuple[Tensor, ...] = _applied(DifferentiatedOnce, "strobe.attention", "third", compute, *tensors)
    return found


def _is_learning(call: Call, *tensors: Tensor) -> bool:
    """Whether autograd tracks one of the tensors, or of the call's arrays that have a gradient."""
    q, k, v, *_ = call.arrays.values()
    return is_tracked(*tensors, q, k, v, *(call.arrays[name] for name in call.learnable()))


def _applied(function: Any, *arguments: Any) -> Any:
    """function.apply(*arguments). Under a transform of torch.func an operator's kernel already runs at one level of these, whose tensors it
    sees, so that apply need not look for the level."""
    apply = super(torch.autograd.Function, function).apply
    if not torch._C._are_functorch_transforms_active():
        return apply(*arguments)
    token = _MODES.set((torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()))
    try:
        with enable_single_level_autograd_function():
            return apply(*arguments)
    finally:
        _MODES.reset(token)


_operators.implement("Autograd", _differentiable_forward, _differentiable_backward, _differentiable_jvp, _differentiable_backward_jvp)
BEFORE_PARSING.update(dict.fromkeys(PLAIN, again))
