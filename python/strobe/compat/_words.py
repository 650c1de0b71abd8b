"""Refusals in the words of the signature that was called."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

from strobe._prepare import Wrong, check_names

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Each line of a refusal begins with the name of an argument of strobe.attention(); `names` says what the caller calls it."""
    try:
        yield
    except (TypeError, ValueError) as refusal:
        renamed = re.sub(r"^(\w+)(?=:)", lambda found: names.get(found[1], found[1]), str(refusal), flags=re.MULTILINE)
        raise type(refusal)(renamed) from None


def names_checked(names: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The function refuses keywords that it does not have all at once, each with what the caller may have meant: `names` as above."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = tuple(inspect.signature(function).parameters)
        hints = {own: f"did you mean {theirs}?" for own, theirs in names.items() if theirs in known}

        @wraps(function)
        def checked(*arguments: P.args, **named: P.kwargs) -> R:
            wrong: Wrong = []
            check_names(function.__name__, named, wrong, known, hints)
            if wrong:
                raise TypeError("\n".join(map(str, wrong)))
            return function(*arguments, **named)

        return checked

    return decorate
