"""Calls of torch tensors made ready: what does not differ from call to call is found out once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ._abi import Call, field_of
from ._core import ffi, lib
from .arrays.memory import PLAIN, allocated, is_lazy

Key = tuple[Any, ...]
T = TypeVar("T")

_SCALARS = frozenset({bool, int, float, str, type(None)})
_MOST = 1024  # kept; lengths of packed sequences may never come again


class Memory(Generic[T]):
    """What was found out about calls of a signature. Those that come again are kept, however many others come but once."""

    def __init__(self) -> None:
        self._lately: dict[Key, T | None] = {}
        self._before: dict[Key, T | None] = {}

    def get(self, key: Key) -> T | None:
        found = self._lately.get(key)
        if found is None and (found := self._before.get(key)) is not None:
            self.keep(key, found)
        return found

    def is_new(self, key: Key) -> bool:
        """Whether the signature comes for the first time; from now on it has come."""
        if key in self._lately or key in self._before:
            return False
        self.keep(key, None)
        return True

    def keep(self, key: Key, x: T | None) -> None:
        if len(self._lately) >= _MOST // 2:
            self._lately, self._before = {}, self._lately
        self._lately[key] = x


def signature(tensors: Iterable[Tensor], options: Mapping[str, Any], *more: object) -> tuple[Key, list[int]] | None:
    """All that decides what runs, `more` among it; and the addresses, which do not, of `tensors` and then of the tensors among the options.
    None if there is something else among them than plain tensors and scalars."""
    key: list[Any] = [torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), *more]
    addresses: list[int] = []
    try:
        for x in tensors:
            if type(x) not in PLAIN or x.layout is not torch.strided or is_lazy(x):
                return None
            address = x.data_ptr()
            addresses.append(address)
            key += (x.shape, x.stride(), x.dtype, x.device, x.requires_grad, address % 16 == 0)
        for name, x in options.items():
            kind = type(x)
            if kind in _SCALARS:
                key += (name, kind, x)
            elif kind in PLAIN and x.layout is torch.strided and not is_lazy(x):
                address = x.data_ptr()
                addresses.append(address)
                key += (name, x.shape, x.stride(), x.dtype, x.device, x.requires_grad, address % 16 == 0)
            elif kind is tuple and all(type(part) in _SCALARS for part in x):
                key += (name, *map(type, x), x)
            else:
                return None
    except RuntimeError:  # a nested tensor, which has no shape
        return None
    return tuple(key), addresses


class Ready:
    """A call in one direction, but for its addresses."""

    __slots__ = ("_device", "_fields", "_made", "_on_gpu", "_prepared", "_threads", "_workspace_bytes")

    def __init__(self, arrays: Iterable[str], made: Mapping[str, Tensor], call: Call, direction: int, threads: int):
        """made: what the call returns, as an example."""
        self._prepared = call.prepare(direction)
        self._fields = bytes(map(field_of, (*arrays, *made)))
        self._made = [(x.shape, x.stride(), x.dtype) for x in made.values()]
        self._device = next(iter(made.values())).device
        self._on_gpu = self._device.type == "cuda"
        self._threads = 0 if self._on_gpu else threads
        plan = ffi.new("strobe_plan *", {"size": ffi.sizeof("strobe_plan")})
        lib.strobe_prepared_plan(self._prepared, plan)
        self._workspace_bytes: int = plan.workspace_bytes if self._on_gpu else 0  # on the CPU the library has its own

    def run(self, addresses: list[int], made: list[Tensor] | None = None) -> list[Tensor] | None:
        """addresses: those of the arrays, to which it adds; made: where to write, if that is there already. None: the library refuses; the
        call in full says why."""
        device = self._device
        if made is None:
            made = [allocated(shape, strides, dtype, device) for shape, strides, dtype in self._made]
        addresses += [x.data_ptr() for x in made]
        stream = workspace = size = 0
        if self._on_gpu:
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            if size := self._workspace_bytes:
                scratch = allocated((size,), (1,), torch.uint8, device)
                workspace = scratch.data_ptr()
        status = lib.strobe_glue_run(self._prepared, len(addresses), self._fields, addresses, self._threads, stream, workspace, size)
        return made if status == lib.STROBE_OK else None
