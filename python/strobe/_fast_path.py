"""Repeated calls of strobe.attention() on torch tensors: they skip everything that only a first call needs.

The first call is remembered, the second one is prepared, and from the third one on one function in C (_eager) finds it and runs it. A call
that a compiler, a transform, a mode or a subclass of Tensor must see has no key, and takes the full path every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import _autograd, _eager, _repeated, _run
from ._abi import BACKWARD, FORWARD
from ._autograd import differentiable_backward
from ._eager import Ready
from ._operators import with_dense_rows
from ._options import GRADIENTS
from ._repeated import Seen, made_ready
from ._request import Request
from .arrays.memory import PLAIN
from .arrays.torch import TORCH

_NO_RESULT = 255  # in the form of a Ready


def fast_path(q: Tensor, k: Tensor, v: Tensor, return_lse: object, given: Mapping[str, Any]) -> Any:
    """The result of attention(), for a call that is known from an earlier one; None if the full call must be made."""
    if torch.compiler.is_compiling():
        return None
    found = _eager.attention(_repeated.CALLS.lately, q, k, v, return_lse, given)
    return _second_time(q, k, v, return_lse, given) if found is None else found


def _second_time(q: Tensor, k: Tensor, v: Tensor, return_lse: Any, given: Mapping[str, Any]) -> Any:
    key = _eager.attention_key(q, k, v, return_lse, given)
    known = None if key is None else _repeated.CALLS.get(key)
    if key is None or known is None:
        return None
    if isinstance(known, Seen):
        arrays = {"q": q, "k": k, "v": v, **_tensors(given)}
        tracked = torch.is_grad_enabled() and any(x.requires_grad for x in arrays.values())
        p = Request(arrays, known.options)
        made = _run.results(TORCH, p)
        if not (return_lse or tracked):
            del made["lse"]
        call = _RepeatedCall(tuple(arrays), known.options, return_lse)
        _repeated.CALLS.keep(key, made_ready(p, {}, made, FORWARD, function=_apply if tracked else None, more=call))
        del made  # an example, whose memory the call can use
    return _eager.attention(_repeated.CALLS.lately, q, k, v, return_lse, given)


def _tensors(given: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in given.items() if isinstance(x, Tensor)}


class Calls(_autograd.Calls):
    def remember(self, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, given: Mapping[str, Any], p: Request) -> None:
        if torch.compiler.is_compiling() or (key := _eager.attention_key(q, k, v, return_lse, given)) is None:
            return
        if [*p.arrays] != ["q", "k", "v", *_tensors(given)] or p.options.get("engine") == _run.ORACLE:
            return  # some tensors are new objects in each call, or results are cast first
        if any(x is not p.arrays[name] for name, x in _tensors(given).items()):
            return  # or are copied for it from host memory
        if 0 in (p.options.get("max_seqlen_q"), p.options.get("max_seqlen_k")):
            return  # lengths are checked against it here
        if any(x is not p.arrays[name] for name, x in TORCH.autocast(p.arrays).items()):
            return  # so are they
        _repeated.CALLS.keep(key, Seen(p.options))


TORCH_CALLS = Calls(TORCH)
_run.FAST_PATHS.update(dict.fromkeys(PLAIN, fast_path))


class _RepeatedCall:
    """The state that the backward of a repeated call of strobe.attention() needs."""

    def __init__(self, names: tuple[str, ...], options: dict[str, Any], return_lse: bool):
        """names: of the arrays; options: the operator's."""
        self.return_lse = return_lse
        self.prefix = repr((names, options)).encode()  # prefix of its keys
        self._names, self._options = names, options

    def gradients(self, needed: tuple[bool, ...], dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Called if there is no Ready for them, or none may be used. Returns the results of _Attention.backward."""
        wanted = [self._wanted(name, needed) for name in GRADIENTS]
        names = [name for name, is_wanted in zip(GRADIENTS, wanted, strict=True) if is_wanted]
        if not torch.compiler.is_compiling():
            if dout.is_cuda:
                dout = with_dense_rows(dout, "bshd" in self._options)
            key = _eager.gradients_key(self.prefix, needed, dout, dlse, saved)
            if key is not None:
                if _repeated.CALLS.get(key) is None:  # prepared at once: the forward was repeated, and so are its gradients
                    _repeated.CALLS.keep(key, self._made_ready(names, dout, dlse, saved))
                found = _eager.gradients(_repeated.CALLS.lately, self.prefix, needed, dout, dlse, saved)
                if found is not None:
                    return found
        out, lse, q, k, v, *arrays = saved
        given = dict(zip(self._names[3:], arrays, strict=True))
        made = differentiable_backward(dout, dlse, out, lse, q, k, v, **given, **self._options, needed=wanted)
        return tuple(None if place == _NO_RESULT else made[place] for place in self._form(names))

    def _wanted(self, gradient: str, needed: tuple[bool, ...]) -> bool:
        of = GRADIENTS[gradient]
        return of in self._names and needed[1 + self._names.index(of)]

    def _form(self, names: list[str]) -> bytes:
        places = {GRADIENTS[name]: place for place, name in enumerate(names)}
        return bytes(places.get(of, _NO_RESULT) for of in ("", *self._names))

    def _made_ready(self, names: list[str], dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...]) -> Ready:
        p = Request(dict(zip(self._names, saved[2:], strict=True)), self._options)
        known = {"dout": dout} | ({} if dlse is None else {"dlse": dlse}) | {"out": saved[0], "lse": saved[1]}
        return made_ready(p, known, _run.gradients(TORCH, p, names), BACKWARD, form=self._form(names))


class _Attention(torch.autograd.Function):
    """A call of strobe.attention() that is prepared. Autograd's graph shows the same name as for the first call."""

    @staticmethod
    def forward(ctx: Any, ready: Ready, *arrays: Tensor) -> Any:
        found = ready.run(*arrays)
        if found is None:
            raise _eager.RefusedError
        out, lse = found
        ctx.save_for_backward(out, lse, *arrays)
        ctx.call = call = ready.more
        if not call.return_lse:
            return out
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        call, needed, saved = ctx.call, ctx.needs_input_grad, ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(saved[0])
        if not torch.compiler.is_compiling():
            found = _eager.gradients(_repeated.CALLS.lately, call.prefix, needed, dout, dlse, saved)
            if found is not None:
                return found
        return call.gradients(needed, dout, dlse, saved)


# Function.apply itself looks for transforms, of which there are none here, and binds arguments: that takes a microsecond.
_apply = super(torch.autograd.Function, _Attention).apply
