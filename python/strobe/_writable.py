"""Checks of memory for results: it may be written, and holds nothing else that the call reads or writes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from math import gcd
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from ._checks import Wrong, refusal
from ._refusals import refusing
from .arrays.torch import TORCH, is_alone, tracked_leaf

P = ParamSpec("P")
R = TypeVar("R")


def writes(*names: str, beside: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Runs a function that writes into these arguments under torch.no_grad(). A leaf that requires a gradient is refused, as in PyTorch,
    unless the caller has switched gradients off. beside: without this argument nothing is written."""

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
    """Why results cannot be written where the caller asks, found before the first write. read: tensors that must not change."""
    wrong: Wrong = []
    earlier: dict[str, Tensor] = {}
    for name, x in written.items():
        if overlaps_itself(x):
            wrong.append(refusing(ValueError, name, f"strides {tuple(x.stride())}; accepted is memory of its own for each number"))
        elif (refused := TORCH.unwritable(name, x)) is not None:
            wrong.append(refused)
        for other in (other for other, y in earlier.items() if share_memory(x, y)):
            wrong.append(refusing(ValueError, name, f"the memory of {other}; accepted is memory of its own"))
        earlier[name] = x
    for name, x in (read or {}).items():
        for other in [other for other, y in written.items() if share_memory(x, y)][:1]:
            wrong.append(refusing(ValueError, name, f"in the memory of {other}, which is written; accepted is memory of its own"))
    return wrong


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements may have one address: the stride of some axis does not exceed the reach of the axes with shorter strides. Under
    a compiler sizes may be symbols, which have no order."""
    if torch.compiler.is_compiling():
        return any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)) and x.numel() > 0
    reached = 0
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride <= reached:
            return x.numel() > 0
        reached += (size - 1) * stride
    return False


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether a byte belongs to both tensors. Under compilers and modes tensors have no addresses, and the answer is not known.

    Exact, unless the strides are so irregular that the search takes long: then tensors whose memory ranges meet count as shared."""
    if not is_alone() or x.is_meta or x.device != y.device or not (x.numel() and y.numel()):
        return False
    a, b = _bytes_of(x), _bytes_of(y)
    if a.end <= b.begin or b.end <= a.begin:
        return False
    strides = {stride for stride, _ in a.axes + b.axes}
    if any(_apart_within(a, b, period) for period in strides | {gcd(m, n) for m in strides for n in strides}):
        return False
    steps: dict[int, tuple[int, int]] = {}  # by stride: the least and the largest multiple
    for stride, count in a.axes:
        steps[stride] = (1 - count, 0)
    for stride, count in b.axes:
        steps[stride] = (steps.get(stride, (0, 0))[0], count - 1)
    try:
        return _reaches(b.begin - a.begin, sorted(steps.items(), reverse=True), 1 - b.run, a.run - 1, iter(range(_MOST_STEPS)))
    except StopIteration:
        return True


_MOST_STEPS = 4096


class _Bytes(NamedTuple):
    """The bytes of a tensor: runs of `run` bytes, one at begin + i_1 stride_1 + i_2 stride_2 + …, for all i_n < count_n."""

    begin: int
    run: int
    axes: tuple[tuple[int, int], ...]  # (stride, count): ascending strides, all larger than run

    @property
    def end(self) -> int:
        return self.begin + self.run + sum(stride * (count - 1) for stride, count in self.axes)


def _bytes_of(x: Tensor) -> _Bytes:
    size = run = x.element_size()
    axes: dict[int, int] = {}
    for stride, count in sorted((stride * size, n) for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1):
        if stride <= run and not axes:
            run += stride * (count - 1)
        else:
            axes[stride] = axes.get(stride, 1) + count - 1  # two axes of one stride have the reach of one longer axis
    return _Bytes(x.data_ptr(), run, tuple(axes.items()))


def _apart_within(a: _Bytes, b: _Bytes, period: int) -> bool:
    """Whether both tensors repeat with this period, and stay apart within it."""
    reach = [x.run + sum(stride * (count - 1) for stride, count in x.axes if stride % period) for x in (a, b)]
    between = (b.begin - a.begin) % period
    return reach[0] <= between and reach[1] <= period - between


def _reaches(start: int, steps: list[tuple[int, tuple[int, int]]], low: int, high: int, budget: Iterator[int]) -> bool:
    """Whether start and a sum of multiples of the strides lies between low and high. steps: large strides first.
    Raises StopIteration when the budget is spent."""
    if not steps:
        return low <= start <= high
    (stride, (least, most)), *rest = steps
    ends = [sum(stride * times[end] for stride, times in rest) for end in (0, 1)]
    first = max(least, -((start + ends[1] - low) // stride))
    last = min(most, (high - start - ends[0]) // stride)
    for times in range(first, last + 1):
        next(budget)
        if _reaches(start + times * stride, rest, low, high, budget):
            return True
    return False
