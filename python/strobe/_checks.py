"""Checks of single values against what an argument accepts.

Errors are collected in a list, one exception for each argument, so that a caller sees all of them at once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from math import prod
from typing import Any, ParamSpec, TypeVar

from ._abi import MAX_RANK
from ._messages import is_bool, kind, shown
from ._refusals import Hint, Name, raised_for, refusals_of, refusing
from .arrays.base import Array, Framework
from .arrays.known import known_framework, unfit

P = ParamSpec("P")
R = TypeVar("R")
Wrong = list[Exception]
_MISSPELT = 0.8  # get_close_matches(): less similar names mean something else, like block_table beside block_mask (0.67)


def refusal(wrong: Wrong) -> Exception:
    """One exception for all errors: a TypeError if all of them are about types."""
    if len(wrong) == 1:
        return wrong[0]
    kinds_alone = all(isinstance(each, TypeError) for each in wrong)
    return raised_for(TypeError if kinds_alone else ValueError, [refusal for each in wrong for refusal in refusals_of(each)])


def refuse(*found: Any) -> None:
    """Raises the exceptions among these objects, as one. The other objects are values that were found right."""
    if wrong := [x for x in found if isinstance(x, Exception)]:
        raise refusal(wrong)


def check_names(function: str, given: Iterable[str], wrong: Wrong, known: Collection[str], hints: Mapping[str, str]) -> None:
    """Refuses unknown names. function: its name, for messages; hints: those for names that other functions use."""
    for name in given:
        if name not in known:
            hint = hints.get(name) or "".join(f"did you mean {close}?" for close in get_close_matches(name, known, 1, _MISSPELT))
            wrong.append(refusing(TypeError, None, f"{function}() got an unexpected keyword argument {name!r}" + (hint and f"; {hint}")))


def names_checked(hints: Mapping[str, str], example: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function refuse all unknown keywords at once, with a hint for names of other functions. With `example`, an option as it is
    given by name, the function also refuses arguments beyond its positional ones."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        known = tuple(signature.parameters)
        placed = [name for name, x in signature.parameters.items() if x.kind is not x.KEYWORD_ONLY]
        places = f"{', '.join(placed[:-1])} and {placed[-1]}"

        @wraps(function)
        def checked(*arguments: P.args, **named: P.kwargs) -> R:
            wrong: Wrong = []
            check_names(function.__name__, named, wrong, known, hints)
            if example and (more := len(arguments) - len(placed)) > 0:
                counted = f"{more} more {'was' if more == 1 else 'were'} given"
                wrong.append(
                    TypeError(f"{function.__name__}() takes {places} by their places, and {counted}; options are named, as in {example}")
                )
            refuse(*wrong)
            return function(*arguments, **named)

        # inspect.getfullargspec() does not follow __wrapped__, and callers use it to list the arguments.
        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorate


def is_whole(x: object) -> bool:
    """Whether x is an integer, of Python, NumPy or a compiler, and no bool."""
    return (isinstance(x, int) or (_is_ordered_index(type(x)) and known_framework(x) is None)) and not is_bool(x)


def _is_ordered_index(kind: type) -> bool:
    """Whether values of this type are integers that can be compared with bounds. (A class has its values' methods, but is no value.)"""
    return hasattr(kind, "__index__") and kind.__lt__ is not object.__lt__  # type: ignore[operator]


def is_array(wrong: Wrong, name: str, x: Any, framework: Framework | None, q: Array) -> bool:
    """Whether x is an array of q's kind, on q's device. framework is None if q itself is no array: then any array passes."""
    if (refused := unfit(name, x, framework, "q", None if framework is None else q)) is not None:
        wrong.append(refused)
    elif x.ndim > MAX_RANK and name not in ("q", "k", "v"):  # their ranks are checked elsewhere
        wrong.append(refusing(ValueError, name, f"shape {tuple(x.shape)}; accepted are up to {MAX_RANK} axes", code="shape"))
    else:
        return True
    return False


def of_generator(x: object) -> str:
    """A hint how to get numbers from x if x is a random generator, else empty. For arguments that are numbers or arrays."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(x, torch.Generator):
        return "; a generator draws rng by torch.randint(2**63 - 1, (2,), generator=..., device=...)"
    if numpy is not None and isinstance(x, numpy.random.Generator):
        return "; a generator draws rng by its integers(2**63 - 1, size=2)"
    return ""


def flag(wrong: Wrong, name: str, x: Any) -> bool:
    if is_bool(x):
        return bool(x)
    wrong.append(refusing(TypeError, name, f"{kind(x)} {shown(x)}; accepted is True or False"))
    return False


def number(wrong: Wrong, name: str, x: Any) -> float:
    """x as a float; meaningless if x is refused."""
    numpy = sys.modules.get("numpy")
    scalar = isinstance(x, (int, float)) or (hasattr(x, "__float__") and known_framework(x) is None)
    if not scalar or is_bool(x) or (numpy is not None and isinstance(x, _no_numbers(numpy))):
        wrong.append(refusing(TypeError, name, f"{kind(x)}; accepted is a number", hints=_item(name, x)))
        return 0.0
    try:
        return float(x)
    except (OverflowError, TypeError, ValueError):
        wrong.append(refusing(ValueError, name, f"{shown(x)}; accepted is a number that float64 has"))
        return 0.0


def _no_numbers(numpy: Any) -> tuple[type, ...]:
    """Types among NumPy's scalars that have __float__ but are no numbers."""
    return numpy.complexfloating, numpy.flexible, numpy.datetime64, numpy.timedelta64


def _item(name: str, x: Any) -> tuple[Hint, ...]:
    """The hint for an array where a number is accepted: how to get the number out of an array of one element."""
    is_fit = known_framework(x) is not None and unfit(name, x) is None  # an uninitialized parameter has no shape
    return (Hint("; {0}.item()", (Name(name),)),) if is_fit and prod(x.shape) == 1 else ()


def is_integer(wrong: Wrong, name: str, x: Any, least: int, most: int) -> bool:
    if not is_whole(x):
        wrong.append(refusing(TypeError, name, f"{kind(x)}; accepted is an integer", hints=_item(name, x)))
    elif not least <= x <= most:
        wrong.append(refusing(ValueError, name, f"{shown(x)}; accepted are integers from {least} to {most}"))
    else:
        return True
    return False


def is_choice(wrong: Wrong, name: str, x: Any, choices: Collection[str]) -> bool:
    if not isinstance(x, str) or x not in choices:
        wrong.append(refusing(ValueError, name, f"{shown(x)}; accepted is {' or '.join(map(repr, choices))}"))
        return False
    return True


def plain(x: Any) -> Any:
    """An integer as Python's int; a compiler's integer stays as it is."""
    numpy = sys.modules.get("numpy")
    return int(x) if numpy is not None and isinstance(x, numpy.integer) else x
