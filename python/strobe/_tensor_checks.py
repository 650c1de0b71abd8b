"""Checks that functions of torch tensors share, before they look at shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ._checks import Wrong
from ._messages import kind, shown
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


def counts(x: Tensor, cu_seqlens: Tensor | None) -> int | Tensor:
    """How many tokens of x each sequence has."""
    return x.shape[1] if cu_seqlens is None else cu_seqlens.diff()


def check_cu_seqlens(
    name: str, cu: Tensor, of: str | None = None, packed: Tensor | None = None, dtypes: tuple[torch.dtype, ...] = (torch.int32,)
) -> int:
    """Checks cu_seqlens (B + 1,) and returns B. packed: the tokens that it divides, the argument `of`."""
    if cu.dim() != 1 or not len(cu) or cu.dtype not in dtypes:
        accepted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise refusing(ValueError, name, f"{cu.dtype} of shape {tuple(cu.shape)}; accepted is {accepted} (B + 1,)")
    if TORCH.is_readable(cu):
        ends = cu.tolist()
        if ends[0] != 0 or ends != sorted(ends):
            raise refusing(ValueError, name, f"{shown(ends)}; accepted are numbers that begin at 0 and never fall")
        if packed is not None and packed.dim() == 3 and ends[-1] > len(packed):  # another rank is refused by the check of shapes
            raise refusing(ValueError, name, f"{ends[-1]} at its end; accepted are up to {len(packed)}, the tokens of {of}")
    return len(cu) - 1


def within(name: str, x: Tensor, batch: int, most: int | Tensor, why: str) -> Tensor:
    """x, which has an integer from 0 to `most` for each of q's batches. Integers that are not read are clamped, so that no memory out of
    bounds is accessed. x is dense."""
    if x.shape != (batch,):
        raise refusing(ValueError, name, f"shape {tuple(x.shape)}; accepted is ({batch},), as q has batches")
    if x.dtype not in (torch.int32, torch.int64):
        raise refusing(ValueError, name, f"dtype {x.dtype}; accepted is torch.int32; {name}.int()")
    if not TORCH.is_readable(x):
        return x.clamp(0, most) if isinstance(most, int) else x.minimum(most).clamp(min=0)
    for b, (value, bound) in enumerate(zip(x.tolist(), torch.as_tensor(most).expand(batch).tolist(), strict=True)):
        if not 0 <= value <= bound:
            raise refusing(ValueError, name, f"{value} at [{b}]; accepted are 0 to {bound}, {why}")
    return x
