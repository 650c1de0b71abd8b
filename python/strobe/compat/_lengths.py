"""Lengths of sequences, which are checked, or clamped if they are not read; and errors of several arguments, raised as one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import Wrong, is_integer, refusal
from .._messages import shown
from ..arrays.torch import TORCH

MOST = 2**31 - 1


def refuse(*found: Any) -> None:
    """Raises the exceptions among these objects, as one. The other objects are values that were found right."""
    if wrong := [x for x in found if isinstance(x, Exception)]:
        raise refusal(wrong)


def integer_or_refusal(name: str, x: Any, least: int = 0, most: int = MOST) -> Any:
    wrong: Wrong = []
    return x if is_integer(wrong, name, x, least, most) else wrong[0]


def counts(x: Tensor, cu_seqlens: Tensor | None) -> int | Tensor:
    """How many tokens of x each sequence has."""
    return x.shape[1] if cu_seqlens is None else cu_seqlens.diff()


def check_cu_seqlens(
    name: str, cu: Tensor, of: str | None = None, packed: Tensor | None = None, dtypes: tuple[torch.dtype, ...] = (torch.int32,)
) -> int:
    """B, from cu_seqlens (B + 1,); packed: the tokens that they divide, the argument `of`."""
    if cu.dim() != 1 or not len(cu) or cu.dtype not in dtypes:
        accepted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: {cu.dtype} of shape {tuple(cu.shape)}; accepted is {accepted} (B + 1,)")
    if TORCH.is_readable(cu):
        ends = cu.tolist()
        if ends[0] != 0 or ends != sorted(ends):
            raise ValueError(f"{name}: {shown(ends)}; accepted are numbers that begin at 0 and never fall")
        if packed is not None and packed.dim() == 3 and ends[-1] > len(packed):  # another rank is refused by the check of shapes
            raise ValueError(f"{name}: {ends[-1]} at its end; accepted are up to {len(packed)}, the tokens of {of}")
    return len(cu) - 1


def within(name: str, x: Tensor, batch: int, most: int | Tensor, why: str) -> Tensor:
    """x, which has an integer from 0 to `most` for each of q's batches. Integers that are not read are clamped, so that no memory out of
    bounds is accessed. x is dense."""
    if x.shape != (batch,):
        raise ValueError(f"{name}: shape {tuple(x.shape)}; accepted is ({batch},), as q has batches")
    if x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: dtype {x.dtype}; accepted is torch.int32; {name}.int()")
    if not TORCH.is_readable(x):
        return x.clamp(0, most) if isinstance(most, int) else x.minimum(most).clamp(min=0)
    for b, (value, bound) in enumerate(zip(x.tolist(), torch.as_tensor(most).expand(batch).tolist(), strict=True)):
        if not 0 <= value <= bound:
            raise ValueError(f"{name}: {value} at [{b}]; accepted are 0 to {bound}, {why}")
    return x
