"""Refusals in the words of the signature that was called."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from strobe._checks import Wrong, check_names, flag, is_whole, refusal
from strobe._messages import is_bool, kind
from strobe._tensor_checks import tensor_refusal
from strobe.arrays.known import unfit
from strobe.arrays.torch import TORCH

P = ParamSpec("P")
R = TypeVar("R")


def in_words_of(names: Mapping[str, str], given: Mapping[str, Any] | None = None) -> AbstractContextManager[None]:
    """Each line of a refusal begins with the name of an argument of strobe.attention(); `names` gives the caller's name for it.

    given: the arguments of attention(), by its names. An argument that the caller's own check refuses is replaced by the exception that
    says why: attention() refuses it, along with all other errors, and the line is the exception's.
    """
    # PyTorch 2.4 traces no generator. An error that is raised under a compiler is raised again without it.
    return nullcontext() if torch.compiler.is_compiling() else _in_words_of(names, given)


@contextmanager
def _in_words_of(names: Mapping[str, str], given: Mapping[str, Any] | None) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as refused:
        own = {name: x for name, x in (given or {}).items() if isinstance(x, Exception)}
        lines: dict[str, None] = {}  # several arguments that are one to the caller give one line
        for line in str(refused).splitlines():
            name, colon, rest = line.partition(":")
            if name in own:
                lines |= dict.fromkeys(str(own[name]).splitlines())
                continue
            rest = _PLACES.sub(lambda found: names.get(found[0], found[0]), _with_hints_for(names, rest))
            lines[names.get(name, name) + colon + rest] = None
        error = ValueError if any(isinstance(x, ValueError) for x in own.values()) else type(refused)
        raise error("\n".join(lines)) from None


# Places where a refusal mentions an argument: "as q and k have", "q[None]", "mask.bool()", "q, k, v are".
_PLACES = re.compile(
    r"(?<=\bas )[qkv]\b|(?<=\bof )[qkv]\b|(?<=\bwhere )[qkv]\b|(?<=\b[qk] and )[qkv]\b|\b[qkv](?= and [qkv]\b)"
    r"|\b[a-z]\w*(?=\[|\.\w+\()|\b[qkv](?=, [kv]\b| are \()|\bmax_seqlen_[qk]\b"
)
_IN_PART = frozenset({"kv", "qkv", "k_cache"})  # attention() gets a part of it: a hint about axes would be about another tensor


def _with_hints_for(names: Mapping[str, str], rest: str) -> str:
    """attention()'s hints name options. The callers' functions have no layout, and other arguments for packed sequences and for a bias."""
    rest = re.sub(r"; did you mean cu_seqlens_q and cu_seqlens_k, of packed sequences, or", "; did you mean", rest)
    rest = re.sub(r"; what is added to the scores is bias$", "", rest)
    if (layout := re.search(r'; did you mean layout="(bhsd|bshd)"\?$', rest)) is not None:
        here = {"bhsd": "(B, S, H, D)", "bshd": "(B, H, S, D)"}[layout[1]]
        hint = f"; q, k, v are {here} here; did you mean q.transpose(1, 2)?"
        rest = rest[: layout.start()] + (hint if _IN_PART.isdisjoint(names.get(x, x) for x in "qkv") else "")
    return rest


def tensor_or_refusal(name: str, x: Any, accepted: str = "a torch.Tensor") -> Any:
    refused = tensor_refusal(name, x, accepted)
    return x if refused is None else refused


def flag_or_refusal(name: str, x: Any) -> Any:
    wrong: Wrong = []
    found = flag(wrong, name, x)
    return wrong[0] if wrong else found


def switch_or_refusal(name: str, x: Any) -> Any:
    """A flag that callers also write as 1 and 0."""
    if is_bool(x) or (is_whole(x) and x in (0, 1)):
        return bool(x)
    return TypeError(f"{name}: {kind(x)} {x!r}; accepted is True or False, or 1 or 0")


def python_numbers(x: Any) -> Any:
    """x with plain numbers in place of tensors: a tensor becomes a list, one-element tensors in a sequence become their number. Reading
    them waits for a GPU. A tensor without values (device meta), or that is not dense, stays as it is."""
    if isinstance(x, (tuple, list)):
        return type(x)([python_numbers(each) if _has_values(each) and each.numel() == 1 else each for each in x])
    if _has_values(x):
        return x.item() if x.numel() == 1 else x.tolist()
    return x


def _has_values(x: Any) -> bool:
    return isinstance(x, Tensor) and unfit("", x) is None and not x.is_meta


def mask_or_bias(attn_mask: Tensor | None) -> dict[str, Any]:
    """The one of the two options of strobe.attention() that attn_mask is."""
    if TORCH.causal_bias(attn_mask):  # up to PyTorch 2.6 it has no dtype
        return {"bias": attn_mask}
    if not isinstance(attn_mask, Tensor) or attn_mask.dtype == torch.bool:
        return {"mask": attn_mask}
    if attn_mask.is_floating_point():
        return {"bias": attn_mask}
    dtype = str(attn_mask.dtype).removeprefix("torch.")
    return {"mask": ValueError(f"attn_mask: dtype {dtype}; accepted is bool (True = attend), or a float dtype, added to the scores")}


def names_checked(names: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The function refuses all unknown keywords at once, each with a suggestion: `names` as above."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = tuple(inspect.signature(function).parameters)
        hints = {own: f"did you mean {theirs}?" for own, theirs in names.items() if theirs in known}

        @wraps(function)
        def checked(*arguments: P.args, **named: P.kwargs) -> R:
            wrong: Wrong = []
            check_names(function.__name__, named, wrong, known, hints)
            if wrong:
                raise refusal(wrong)
            return function(*arguments, **named)

        # inspect.getfullargspec() does not unwrap, and callers use it to list the arguments.
        checked.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return checked

    return decorate
