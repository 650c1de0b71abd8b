"""Checks that functions of torch tensors share, before they look at shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from ._checks import Wrong
from ._messages import kind
from ._refusals import refusing
from .arrays.torch import TORCH


def tensor_refusal(name: str, x: Any, accepted: str = "a torch.Tensor") -> Exception | None:
    """The error if x is no tensor, or if its class is a subclass whose memory does not hold its values; else None."""
    return TORCH.unfit(name, x) if isinstance(x, Tensor) else refusing(TypeError, name, f"{kind(x)}; accepted is {accepted}")


def unfit_tensors(given: Mapping[str, Any]) -> Wrong:
    found = [tensor_refusal(name, x) for name, x in given.items()]
    return [refused for refused in found if refused is not None]


def misplaced(given: Mapping[str, Tensor], on_host: Collection[str] = ()) -> Wrong:
    """Refuses tensors that are not on the device of the first one. on_host: names of tensors that may lie in host memory as well."""
    first, *_ = given
    there = given[first].device
    return [
        refusing(ValueError, name, f"on device {x.device}; accepted is {there}, where {first} lies")
        for name, x in given.items()
        if x.device != there and not (name in on_host and x.is_cpu)
    ]


def incomplete(given: Mapping[str, object], *pairs: tuple[str, str]) -> Wrong:
    """Refuses pairs of which only one argument is given."""
    wrong: Wrong = []
    for a, b in pairs:
        if (given[a] is None) != (given[b] is None):
            absent, there = (a, b) if given[a] is None else (b, a)
            wrong.append(refusing(ValueError, absent, f"None beside {there}; accepted are both or neither"))
    return wrong
