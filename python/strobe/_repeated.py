"""Prepared calls of torch tensors: work that is the same for every repetition is done once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _eager, _run
from ._call import field_of
from ._core import ffi, lib
from ._eager import Ready
from ._request import Request
from .arrays.torch import TORCH

_eager.connect(int(ffi.cast("uintptr_t", ffi.addressof(lib, "strobe_glue_run"))))

# The number of calls that are kept. A differentiated call uses three entries, and on several ranks a dozen; lengths of packed sequences may
# never be repeated.
_MOST = 3 * 1024


class Seen(NamedTuple):
    """A call that was made once."""

    options: dict[str, Any]  # of the operator


class Memory:
    """The calls that were made, by their keys: Ready from the second time on, or the results of strobe.distributed's checks. Repeated calls
    are kept, however many others come only once."""

    def __init__(self) -> None:
        self.lately: dict[bytes, Any] = {}
        self._before: dict[bytes, Any] = {}

    def get(self, key: bytes) -> Any:
        found = self.lately.get(key)
        if found is None and (found := self._before.get(key)) is not None:
            self.keep(key, found)
        return found

    def keep(self, key: bytes, call: Any) -> None:
        if len(self.lately) >= _MOST // 2:
            self.lately, self._before = {}, self.lately
        self.lately[key] = call


# The one memory of all entry points: attention(), its gradients, and the two operators, which compiled graphs call. A key includes the
# entry point.
CALLS = Memory()


def made_ready(
    p: Request,
    known: dict[str, Tensor],
    made: dict[str, Tensor],
    direction: int,
    form: bytes | None = None,
    function: Callable[..., Any] | None = None,
    more: object = None,
) -> Ready:
    """Prepares a call in one direction, without its addresses.

    known: arrays that it reads beside p.arrays, and results in the caller's memory; made: its results, as an example; form: for each
    place of the tuple to return the index of a result, or 255 for None; function: is called with the Ready and the arrays instead of
    Ready.run; more: for that function."""
    call = _run.call(TORCH, p, known, made)
    prepared = call.prepare(direction)
    plan = ffi.new("strobe_plan *", {"size": ffi.sizeof("strobe_plan")})
    lib.strobe_prepared_plan(prepared, plan)
    device = p.arrays["q"].device
    on_gpu = device.type == "cuda"
    return Ready(
        owner=prepared,
        address=int(ffi.cast("uintptr_t", prepared)),
        fields=bytes(map(field_of, (*known, *p.arrays, *made))),
        made=tuple((tuple(x.shape), x.stride(), x.dtype) for x in made.values()),
        device=device,
        workspace_bytes=plan.workspace_bytes if on_gpu else 0,  # on the CPU the library has its own
        threads=0 if on_gpu else p.options.get("threads") or torch.get_num_threads(),
        form=form,
        function=function,
        more=more,
    )
