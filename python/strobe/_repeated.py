"""Calls of torch tensors made ready: what does not differ from call to call is found out once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ._call import Call, field_of
from ._core import ffi, lib
from .arrays.memory import PLAIN, allocated, is_lazy

Key = tuple[Any, ...]

_SCALARS = frozenset({bool, int, float, str, type(None)})
_MOST = 3 * 1024  # kept, for a call that is differentiated passes three doors; lengths of packed sequences may never come again


class Seen:
    """A call that was made once."""

    __slots__ = ("options", "ready", "tracked")

    def __init__(self, options: dict[str, Any], tracked: bool = False):
        self.options = options  # of the operator
        self.tracked = tracked  # autograd has to see it
        self.ready: Ready | None = None  # from the second time on


class Memory:
    """The calls that were made, by their signatures. Those that come again are kept, however many others come but once."""

    def __init__(self) -> None:
        self._lately: dict[Key, Seen] = {}
        self._before: dict[Key, Seen] = {}

    def get(self, key: Key) -> Seen | None:
        found = self._lately.get(key)
        if found is None and (found := self._before.get(key)) is not None:
            self.keep(key, found)
        return found

    def keep(self, key: Key, seen: Seen) -> None:
        if len(self._lately) >= _MOST // 2:
            self._lately, self._before = {}, self._lately
        self._lately[key] = seen


# The one memory of all doors: attention(), which spares a call its parsing, and the two operators, through which compiled graphs and the
# backward come. A signature begins with the door's name.
CALLS = Memory()


def signature(door: str, tensors: Iterable[Tensor], options: Mapping[str, Any], *more: object) -> tuple[Key, list[int]] | None:
    """All that decides what runs, `more` among it; and the addresses, which do not, of `tensors` and then of the tensors among the options.
    None if there is something else among them than plain tensors and scalars."""
    key: list[Any] = [door, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), *more]
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
