"""Calls of torch tensors made ready: what does not differ from call to call is found out once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from . import _eager
from ._abi import Call, field_of
from ._core import ffi, lib
from ._eager import Ready

T = TypeVar("T")

_eager.connect(int(ffi.cast("uintptr_t", ffi.addressof(lib, "strobe_glue_run"))))

PLAIN = frozenset({Tensor, torch.nn.Parameter})
_MOST = 1024  # kept; lengths of packed sequences may never come again


class Memory(Generic[T]):
    """What was found out about calls, by their keys. Those that come again are kept, however many others come but once."""

    def __init__(self) -> None:
        self.lately: dict[bytes, T | None] = {}
        self._before: dict[bytes, T | None] = {}

    def get(self, key: bytes) -> T | None:
        found = self.lately.get(key)
        if found is None and (found := self._before.get(key)) is not None:
            self.keep(key, found)
        return found

    def is_new(self, key: bytes) -> bool:
        """Whether the signature comes for the first time; from now on it has come."""
        if key in self.lately or key in self._before:
            return False
        self.keep(key, None)
        return True

    def keep(self, key: bytes, x: T | None) -> None:
        if len(self.lately) >= _MOST // 2:
            self.lately, self._before = {}, self.lately
        self.lately[key] = x


def is_lazy(x: Tensor) -> bool:
    """Whether its memory does not hold its numbers, or it has none: a negation or zeros that the dispatcher makes when it is read."""
    return x.is_neg() or x._is_zerotensor()


def in_memory(x: Tensor) -> Tensor:
    """x, or its numbers written out."""
    return x.clone() if is_lazy(x) else x


class OutOfMemoryError(MemoryError, torch.cuda.OutOfMemoryError):
    """For who expects Python's error, and for who expects PyTorch's."""


def allocated(shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised; strides: None for those of a tensor without gaps."""
    try:
        if strides is None:
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    except RuntimeError as failed:
        text = str(failed)
        if isinstance(failed, torch.cuda.OutOfMemoryError) or "t allocate memory" in text or "overflow" in text:
            raise OutOfMemoryError(text) from None
        raise


def made_ready(
    arrays: Iterable[str],
    made: Mapping[str, Tensor],
    call: Call,
    direction: int,
    threads: int,
    form: bytes | None = None,
    function: Callable[..., Any] | None = None,
    more: object = None,
) -> Ready:
    """A call in one direction, but for its addresses.

    arrays: their names, in the order of Ready.run's arguments; made: what the call returns, as an example; form: of the tuple to return,
    for each place the number of a result, or 255 for None; function: what is called with the Ready and the arrays in place of run."""
    prepared = call.prepare(direction)
    plan = ffi.new("strobe_plan *", {"size": ffi.sizeof("strobe_plan")})
    lib.strobe_prepared_plan(prepared, plan)
    device = next(iter(made.values())).device
    on_gpu = device.type == "cuda"
    return Ready(
        owner=prepared,
        address=int(ffi.cast("uintptr_t", prepared)),
        fields=bytes(map(field_of, (*arrays, *made))),
        made=tuple((tuple(x.shape), x.stride(), x.dtype) for x in made.values()),
        device=device,
        workspace_bytes=plan.workspace_bytes if on_gpu else 0,  # on the CPU the library has its own
        threads=0 if on_gpu else threads,
        form=form,
        function=function,
        more=more,
    )
