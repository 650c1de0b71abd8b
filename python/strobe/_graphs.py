"""Calls that a compiled graph cannot hold."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """torch.compile ends its graph before a call of `function`, which makes calls that no graph can hold, and begins another one after
    it."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if sys.modules.get("torch._dynamo") is None:  # torch.compile is not in use
            return function(*args, **kwargs)
        return sys.modules["torch"].compiler.disable(function)(*args, **kwargs)

    return call
