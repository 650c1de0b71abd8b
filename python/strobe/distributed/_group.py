"""Process groups: which one, who is who in it, and one whose tensors lie in host memory."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .._kinds import kind, shown

_ON_HOST: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


def group_of(group: ProcessGroup | None, mesh: Any = None) -> ProcessGroup:
    """The group that the caller means."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(f"group: {shown(group)}, and torch.distributed has no process group; accepted is one after init_process_group()")
    if mesh is not None:
        if group is not None:
            raise ValueError("mesh: given beside group; accepted is one of the two")
        if not hasattr(mesh, "get_group") or not hasattr(mesh, "ndim"):
            raise TypeError(f"mesh: {kind(mesh)}; accepted is a torch.distributed.device_mesh.DeviceMesh")
        if mesh.ndim != 1:
            raise ValueError(f'mesh: of {mesh.ndim} dimensions; accepted is one of 1, which mesh["name"] gives')
        return mesh.get_group()
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group: {kind(group)}; accepted is a torch.distributed.ProcessGroup that this process is a member of, or None")
    return group


def rank_in(group: ProcessGroup | None, world_size: int) -> int:
    """This process's rank in a group of that size."""
    if world_size == 1 and group is None:
        return 0
    group = group_of(group)
    if group.size() != world_size:
        raise ValueError(f"group: of {group.size()} ranks; accepted is one of {world_size}, the layout's size")
    return group.rank()


def of_name(name: str) -> ProcessGroup:
    """As an operator carries it."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def on_host(group: ProcessGroup) -> ProcessGroup:
    """A group of the same ranks for tensors in host memory: itself, or one that all its ranks make when they first need it."""
    if "cpu" in _devices(group):
        return group
    found = _ON_HOST.get(group)
    if found is None:
        ranks = dist.get_process_group_ranks(group)
        _ON_HOST[group] = found = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return found


def _devices(group: ProcessGroup) -> set[str]:
    return {device.type for device in group._device_types}


def takes(group: ProcessGroup, device: torch.device) -> bool:
    """Whether it has a backend for tensors there."""
    return device.type in _devices(group)
