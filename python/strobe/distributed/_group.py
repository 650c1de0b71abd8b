"""Process groups: the caller's group, ranks in it, and a group for tensors in host memory."""

from __future__ import annotations

import datetime
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .._messages import kind, shown

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
            accepted = 'one of 1, which mesh["name"] gives, or with method "levels" of 2, nodes and the ranks of a node'
            raise ValueError(f"mesh: of {mesh.ndim} dimensions; accepted is {accepted}")
        return mesh.get_group()
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group: {kind(group)}; accepted is a torch.distributed.ProcessGroup that this process is a member of, or None")
    return group


class Levels(NamedTuple):
    """The names of two groups of a rank (the ranks of its node, and the ranks at the same place in the other nodes), and the number of
    ranks in a node."""

    inside: str
    across: str
    size: int


def groups_of(group: ProcessGroup | None, mesh: Any) -> tuple[ProcessGroup, Levels | None]:
    """Like group_of(). For a mesh of two dimensions (nodes, and places in a node) the group has all its ranks, node by node."""
    if group is not None or getattr(mesh, "ndim", None) != 2 or not hasattr(mesh, "get_group"):
        return group_of(group, mesh), None
    if not torch.compiler.is_compiling():  # under a compiler, numbers in tensors are not known
        ranks = mesh.mesh.flatten().tolist()
        if ranks != sorted(ranks):
            raise ValueError(f"mesh: of ranks {mesh.mesh.tolist()}; accepted are ascending ones, node by node")
    whole = group_of(None) if mesh.size() == dist.get_world_size() else mesh._flatten().get_group()
    return whole, Levels(mesh.get_group(1).group_name, mesh.get_group(0).group_name, mesh.size(1))


def rank_in(group: ProcessGroup | None, world_size: int) -> int:
    """This process's rank in a group of world_size ranks."""
    if world_size == 1 and group is None:
        return 0
    group = group_of(group)
    if group.size() != world_size:
        raise ValueError(f"group: of {group.size()} ranks; accepted is one of {world_size}, the sharding's size")
    return group.rank()


def of_name(name: str) -> ProcessGroup:
    """The group that an operator names."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def on_host(group: ProcessGroup) -> ProcessGroup:
    """A group of the same ranks for tensors in host memory: the group itself, or a gloo group that all its ranks create on first use."""
    if "cpu" in _devices(group):
        return group
    found = _ON_HOST.get(group)
    if found is None:
        _ON_HOST[group] = found = _of_gloo(group)
    return found


def _of_gloo(group: ProcessGroup) -> ProcessGroup:
    """A new gloo group. dist.new_group() cannot make it: all processes would have to call that, or, with use_local_synchronization, be in
    equally many groups, because that number is part of the name by which the ranks find one another."""
    if not dist.is_gloo_available():
        raise ValueError("group: without a backend for tensors in host memory, and this PyTorch has no gloo; accepted is one that has it")
    name, rank, size = f"{group.group_name}/strobe", group.rank(), group.size()
    store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
    of: Any = dist.ProcessGroup
    gloo = of.BackendType.GLOO
    if hasattr(of, "_set_default_backend"):
        made = of(store, rank, size)
        made._set_default_backend(gloo)
    else:  # PyTorch before 2.6
        made = of(store, rank, size, of.Options(backend="gloo"))
    made._register_backend(torch.device("cpu"), gloo, dist.ProcessGroupGloo(store, rank, size, _limit(group)))
    made._set_group_name(name)
    return made


def _limit(group: ProcessGroup) -> datetime.timedelta:
    """How long the group's ranks wait for one another."""
    backend = group._get_backend(group._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", dist.default_pg_timeout)


def _devices(group: ProcessGroup) -> set[str]:
    return {device.type for device in group._device_types}


def takes(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the group has a backend for tensors on that device."""
    return device.type in _devices(group)
