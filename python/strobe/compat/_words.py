"""Refusals in the words of the signature that was called."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from .._checks import Wrong, flag, is_integer, is_whole, names_checked
from .._messages import is_bool, kind, shown
from .._refusals import CALLER, Refusal, Words, raised_for, refusals_of
from .._tensor_checks import tensor_refusal
from ..arrays.torch import TORCH

P = ParamSpec("P")
R = TypeVar("R")

# Tensors of the caller of which attention() gets a part, so that a hint about axes would be about another tensor.
_WHOLES = frozenset({"kv", "qkv", "k_cache", "v_cache"})
_NOT_THEIRS = frozenset({"layout", "alignment", "engine"})  # options that the other library's functions do not have


def called(names: Mapping[str, str], function: Callable[..., R], /, **given: Any) -> R:
    """Calls `function`, one of the package's, and rewords its refusals with the caller's names of the arguments, which `names` has.

    An argument that the caller's own check refuses is passed as the exception that says why. The function then refuses it in the
    exception's words, along with all other errors.
    """

    def words() -> Words:
        known = {*"qkv", *names, *given} - _NOT_THEIRS
        return Words(names, known, {name for name in "qkv" if names.get(name) in _WHOLES})

    token = None if torch.compiler.is_compiling() else CALLER.set(words)  # a compiler does not trace it
    try:
        return function(**given)
    except (TypeError, ValueError, NotImplementedError) as error:
        own = {name: x for name, x in given.items() if isinstance(x, Exception)}
        found: list[Refusal] = []
        for each in refusals_of(error):
            of_caller = own.get(each.argument or "")
            found += [words().said(each)] if of_caller is None else refusals_of(of_caller)
        raise raised_for(ValueError if any(isinstance(x, ValueError) for x in own.values()) else type(error), found) from None
    finally:
        if token is not None:
            CALLER.reset(token)


def tensor_or_refusal(name: str, x: Any, accepted: str = "a torch.Tensor") -> Any:
    return tensor_refusal(name, x, accepted) or x


def integer_or_refusal(name: str, x: Any, least: int = 0, most: int = 2**31 - 1) -> Any:
    wrong: Wrong = []
    return x if is_integer(wrong, name, x, least, most) else wrong[0]


def flag_or_refusal(name: str, x: Any) -> Any:
    wrong: Wrong = []
    found = flag(wrong, name, x)
    return wrong[0] if wrong else found


def switch_or_refusal(name: str, x: Any) -> Any:
    """x as a bool, since callers also write flags as 1 and 0; or the exception that refuses it."""
    if is_bool(x) or (is_whole(x) and x in (0, 1)):
        return bool(x)
    return TypeError(f"{name}: {kind(x)} {shown(x)}; accepted is True or False, or 1 or 0")


def mask_or_bias(attn_mask: Tensor | None) -> dict[str, Any]:
    """attn_mask as strobe.attention()'s option mask or bias."""
    if TORCH.causal_bias(attn_mask):  # up to PyTorch 2.6 a causal bias has no dtype
        return {"bias": attn_mask}
    if not isinstance(attn_mask, Tensor) or attn_mask.dtype == torch.bool:
        return {"mask": attn_mask}
    if attn_mask.is_floating_point():
        return {"bias": attn_mask}
    dtype = str(attn_mask.dtype).removeprefix("torch.")
    return {"mask": ValueError(f"attn_mask: dtype {dtype}; accepted is bool (True = attend), or a float dtype, added to the scores")}


def front(names: Mapping[str, str], run: Callable[[dict[str, Any]], Any] | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function refuse all unknown keywords at once, each with a suggestion. names: as in called().

    run: answers a call, whose arguments it gets by their names. The function itself is then only a signature and its documentation.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        defaults = {name: x.default for name, x in inspect.signature(function).parameters.items()}
        hints = {own: f"did you mean {theirs}?" for own, theirs in names.items() if theirs in defaults}

        @wraps(function)
        def answered(*arguments: P.args, **named: P.kwargs) -> Any:
            found = function(*arguments, **named)  # here Python refuses a call that lacks an argument, or has one too many
            return found if run is None else run({**defaults, **dict(zip(defaults, arguments, strict=False)), **named})

        return names_checked(hints)(answered)

    return decorate


def stands_for(name: str, own: str) -> None:
    """Called by the module `own`, which may have just been created a second time as `name`. An import of `name` then gives the first
    module."""
    if name != own:
        sys.modules[name] = import_module(own)
