"""Compiles the kernels of a strobe.distributed.attention() call into the cache beforehand. It needs no GPU and sends nothing.

The call is made for one rank after the other, on CPU tensors that the library takes for GPU tensors, in a group whose transfers do nothing.
Where the library would run kernels, it only compiles them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from distributed_cases import mesh_of, run_on_rank
from strobe import _abi
from strobe._call import Structs
from strobe._core import ffi, lib
from strobe.arrays import torch as torch_arrays
from strobe.distributed import _gather, _operators

_TEXT_BYTES = 1 << 16


def compile_case(case: dict[str, Any], compute_capability: int) -> int:
    """Returns how many kernels the cache lacked. A refused call is no error here: the ranks report the refusal."""
    return compile_ranks(case["how"][0], compute_capability, lambda group: run_on_rank(group, case))


def compile_ranks(world: int, compute_capability: int, call: Callable[[dist.ProcessGroup], Any]) -> int:
    compiled: list[str] = []
    for rank in range(world):
        with _group(rank, world) as group, _in_place_of_runs(compute_capability, compiled):
            try:
                call(group)
            except NotImplementedError:
                continue
    return len(compiled)


@contextmanager
def _group(rank: int, world: int) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield dist.group.WORLD  # type: ignore[misc]
    finally:
        mesh_of.cache_clear()
        dist.destroy_process_group()


@contextmanager
def _in_place_of_runs(compute_capability: int, compiled: list[str]) -> Iterator[None]:
    directions = {lib.strobe_forward: _abi.FORWARD, lib.strobe_backward: _abi.BACKWARD}

    def run(self: Structs, function: Any, *more: Any) -> None:
        direction = more[0] if function in (lib.strobe_make_plan, lib.strobe_prepare) else directions.get(function)
        if direction is None:
            return
        chars = ffi.new("char[]", _TEXT_BYTES)
        self.run_without_execution(lib.strobe_prewarm, direction, compute_capability, chars, _TEXT_BYTES, ffi.NULL)
        compiled.extend(line for line in _abi.text(chars).splitlines() if line.startswith("compiled"))

    def agreed(group: Any, said: Any, seconds: Any) -> tuple[int, int]:
        if said.failure is not None:
            raise said.failure
        return said.rng

    with (
        mock.patch.dict(_gather.LEAST_BYTES, cpu=_gather.LEAST_BYTES["cuda"]),
        mock.patch.object(Structs, "run", run),
        mock.patch.object(_operators, "agree", agreed),
        mock.patch.object(torch_arrays, "CPU", _abi.CUDA),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield
