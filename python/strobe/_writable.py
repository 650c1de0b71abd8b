"""Where results are written: memory that may be written, and in which nothing else lies that the call reads or writes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ._checks import Wrong, refusal
from .arrays.torch import TORCH, is_alone, tracked_leaf

P = ParamSpec("P")
R = TypeVar("R")


def writes(*names: str, beside: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """torch.no_grad() for a function that writes into these arguments: a leaf that requires a gradient is refused, as PyTorch does, unless
    the caller has switched gradients off. beside: nothing is written without this argument."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = [*inspect.signature(function).parameters]
        of_function = torch.no_grad()(function)

        @wraps(function)
        def checked(*arguments: P.args, **named: P.kwargs) -> R:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                given: dict[str, Any] = {**dict(zip(parameters, arguments, strict=False)), **named}
                written = [(name, x) for name in names if isinstance(x := given.get(name), Tensor)]
                if beside is not None and given.get(beside) is None:
                    written = []
                if wrong := [refused for name, x in written if (refused := tracked_leaf(name, x)) is not None]:
                    raise refusal(wrong)
            return of_function(*arguments, **named)

        return checked

    return decorate


def not_writable(written: Mapping[str, Tensor], read: Mapping[str, Tensor] | None = None) -> Wrong:
    """Why results cannot be written where the caller wants them: known before anything is. read: what must not change meanwhile."""
    wrong: Wrong = []
    earlier: dict[str, Tensor] = {}
    for name, x in written.items():
        if overlaps_itself(x):
            wrong.append(ValueError(f"{name}: strides {tuple(x.stride())}; accepted is memory of its own for each number"))
        elif (refused := TORCH.unwritable(name, x)) is not None:
            wrong.append(refused)
        for other in (other for other, y in earlier.items() if share_memory(x, y)):
            wrong.append(ValueError(f"{name}: the memory of {other}; accepted is memory of its own"))
        earlier[name] = x
    for name, x in (read or {}).items():
        for other in [other for other, y in written.items() if share_memory(x, y)][:1]:
            wrong.append(ValueError(f"{name}: in the memory of {other}, which is written; accepted is memory of its own"))
    return wrong


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements may lie at one address: some axis takes steps that do not pass what the shorter ones reach. Where compilers look
    on, sizes may be symbols, which have no order."""
    if torch.compiler.is_compiling():
        return any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)) and x.numel() > 0
    reached = 0
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride <= reached:
            return x.numel() > 0
        reached += (size - 1) * stride
    return False


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether an element of each lies at one address. Where compilers and modes look on, tensors have none, and nobody knows."""
    if not is_alone() or x.is_meta or x.device != y.device or not (x.numel() and y.numel()):
        return False
    size = x.element_size()
    ends = [[(n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)] for t in (x, y)]
    between = x.data_ptr() - y.data_ptr()
    if between > sum(ends[1]) * y.element_size() or -between > sum(ends[0]) * size:
        return False
    if size != y.element_size() or between % size or x.dim() != y.dim():
        return True
    axes = []
    for n, m, of_x, of_y in zip(x.shape, y.shape, x.stride(), y.stride(), strict=True):
        stride = of_x if n > 1 else of_y
        if n > 1 and m > 1 and of_x != of_y:
            return True  # in one range of memory: it would take long to find out whether they are interleaved
        axes.append((stride, 1 - n, m - 1))
    return _reaches(between // size, sorted(axes, reverse=True))


def _reaches(distance: int, axes: list[tuple[int, int, int]]) -> bool:
    """Whether distance is a sum of strides, of each from the least to the most times. axes: (stride, least, most), large strides first."""
    if not axes:
        return distance == 0
    (stride, least, most), *rest = axes
    if stride == 0:
        return _reaches(distance, rest)
    low, high = (sum(each[0] * each[end] for each in rest) for end in (1, 2))
    steps = range(max(least, -((high - distance) // stride)), min(most, (distance - low) // stride) + 1)
    return any(_reaches(distance - step * stride, rest) for step in steps)
