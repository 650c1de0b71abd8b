"""Functions that ranks run in the tests of strobe.distributed: calls that fail, seeds, bits, modes of PyTorch. The contract's cases are in
distributed_cases.py."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

import strobe
from distributed_cases import mesh_of
from strobe import _prepared
from strobe._call import Call
from strobe.arrays import torch as torch_arrays
from strobe.arrays.memory import OutOfMemoryError
from strobe.distributed import Sharding, _agree, _call, _exchange, _gather, _group, _late, _operators, _predict, _ring

S, H, HKV, D = 37, 4, 4, 16


def whole(dtype: torch.dtype = torch.float32, seqlen: int = S, hkv: int = HKV, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout, the same on all ranks."""
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, h, seqlen, D, generator=g).to(dtype) for h in (H, hkv, hkv, H))  # type: ignore[return-value]


def shards(sharding: Sharding, rank: int, **how: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, dout = (sharding.shard(x, 2, rank).detach().requires_grad_(n < 3) for n, x in enumerate(whole(**how)))
    return q, k, v, dout


def said(call: Callable[[], Any]) -> tuple[str, str]:
    """The type and the message of the exception that the call raises."""
    try:
        call()
    except Exception as failure:
        return type(failure).__name__, str(failure)
    return "", "nothing was raised"


# One rank's call is wrong. Each entry changes the arguments of the call.
WRONG: dict[str, Callable[[dict[str, Any]], None]] = {
    "rows": lambda a: a.update(q=a["q"][:, :, 1:]),
    "rows of k": lambda a: a.update(k=a["k"][:, :, 1:]),
    "whole q": lambda a: a.update(q=whole()[0]),
    "rows before heads": lambda a: a.update({name: a[name].transpose(1, 2) for name in "qkv"}),
    "heads before rows": lambda a: a.update(layout="bshd"),
    "a NumPy array": lambda a: a.update(v=np.zeros((2, 4, 9, 16), np.float32)),
    "another dtype": lambda a: a.update(k=a["k"].double()),
    "another head dimension": lambda a: a.update(k=a["k"][..., 1:]),
    "v of other heads": lambda a: a.update(v=a["v"][:, 1:]),
    "v of another batch": lambda a: a.update(v=a["v"][:1].repeat(3, 1, 1, 1)),
    "k and v of another batch": lambda a: a.update({name: a[name][:1].repeat(3, 1, 1, 1) for name in "kv"}),
    "a value": lambda a: a.update(softcap=-1.0),
    "a kind": lambda a: a.update(causal="yes"),
    "a name": lambda a: a.update(is_causal=True),
    "a mask": lambda a: a.update(mask=torch.ones(3, 3, dtype=torch.bool)),
    "a bias": lambda a: a.update(bias=torch.zeros(1, 1, 1, S + 1)),
    "slopes of other heads": lambda a: a.update(alibi_slopes=torch.zeros(2 * H)),
    "slopes that require grad": lambda a: a.update(alibi_slopes=torch.zeros(H, requires_grad=True)),
    "sinks of other heads": lambda a: a.update(sinks=torch.zeros(H - 1)),
    "a mask of other heads": lambda a: a.update(mask=torch.ones(1, 2 * H, 1, S, dtype=torch.bool)),
    "a bias of other rows": lambda a: a.update(
        bias=torch.zeros(1, 1, a["q"].shape[2] + 1, S), method="heads" if a["sharding"].world_size == 2 else "gather"
    ),
    "meta": lambda a: a.update({name: a[name].to("meta") for name in "qkv"}),
    "a part": lambda a: a.update(part=strobe.Part([(0, 1)], [(0, 1)], 1, 1)),
    "an engine": lambda a: a.update(engine="no such engine"),
    "a sharding": lambda a: a.update(sharding="bshd"),
    "the old axes": lambda a: a.update(axes="bshd"),
    "the old layout": lambda a: a.update(layout=a["sharding"]),
    "a sharding of other ranks": lambda a: a.update(sharding=Sharding.zigzag(S, 7)),
    "layout": lambda a: a.update(layout="hbsd"),
    "a method": lambda a: a.update(method="shuttle"),
    "cu_seqlens": lambda a: a.update(cu_seqlens_q=torch.tensor([0, 5], dtype=torch.int32)),
    "aux": lambda a: a.update(aux=("max_logit",)),
    "deterministic": lambda a: a.update(deterministic="always"),
    "time_limit": lambda a: a.update(time_limit=-1.0),
}
# One rank's call differs from the first one's.
OTHERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "window": lambda a: a.update(window=(3, None)),
    "scale": lambda a: a.update(scale=0.5),
    "causal": lambda a: a.update(causal=True),
    "softcap": lambda a: a.update(softcap=2.0),
    "alignment": lambda a: a.update(alignment="top_left"),
    "layout": lambda a: a.update({name: a[name].transpose(1, 2) for name in "qkv"}, layout="bshd"),
    "deterministic": lambda a: a.update(deterministic=True),
    "dropout": lambda a: a.update(dropout=0.1, seed=2),
    "offset": lambda a: a.update(offset=3),
    "block_mask": lambda a: a.update(block_mask=strobe.BlockMask.causal(S, S, 16, 16)),
    "method": lambda a: a.update(method="ring"),
    "sharding": lambda a: a.update(sharding=Sharding.contiguous(S, a["sharding"].world_size), **a["others"]),
    "tensors that require grad": lambda a: a.update(q=a["q"].detach()),
    "sinks": lambda a: a.update(sinks=torch.zeros(H)),
    "seed": lambda a: a.update(seed=2),
    "q": lambda a: a.update({name: a[name].double() for name in "qkv"}),
}


def fails_on(group: dist.ProcessGroup, rank: int, change: str, of: str) -> tuple[str, str]:
    """The error that this rank gets if one rank's call is changed in this way. Afterwards a valid call succeeds."""
    sharding = Sharding.zigzag(S, group.size())
    q, k, v, _ = shards(sharding, group.rank())
    contiguous = Sharding.contiguous(S, group.size())
    others = dict(zip("qkv", shards(contiguous, group.rank()), strict=False))
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "sharding": sharding, "group": group, "method": "gather", "others": others}
    if change in ("seed", "offset"):
        arguments |= {"dropout": 0.1, "seed": 0}
    if group.rank() == rank:
        (WRONG if of == "wrong" else OTHERS)[change](arguments)
    del arguments["others"]
    found = said(lambda: strobe.distributed.attention(**arguments))
    strobe.distributed.attention(q, k, v, sharding=sharding, group=group)
    return found


# A call, and others that differ from it in one thing. Each rank has as many tokens as heads, so that shapes do not distinguish the axes.
AGAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.5},
    "causal": {"causal": False},
    "window": {"window": 5},
    "flag": {"deterministic": True},
    "mask": {"mask": torch.arange(16) % 3 > 0},
    "another mask": {"mask": torch.arange(16) % 5 > 0},
    "packed": {"cu_seqlens_q": torch.tensor([0, 6, 16], dtype=torch.int32)},
    "packed otherwise": {"cu_seqlens_q": torch.tensor([0, 11, 16], dtype=torch.int32)},
    "sharding": {"sharding": Sharding.contiguous(16, 4)},
    "dtype": {"dtype": torch.float64},
    "strides": {"bshd": True},
    "axes": {"axes": "bshd"},
    "gradients": {"needs": "k"},
    "no gradients": {"needs": ""},
    "group": {"group": None},
}


def comes_again(group: dist.ProcessGroup, method: str) -> tuple[dict[str, float], int]:
    """Makes all calls in AGAIN three times. Returns how far each third result differs from one device's, and how many calls are remembered
    after the third time that were not after the second."""
    own, found, kept = dist.new_group(list(range(group.size()))), {}, 0
    for _ in range(3):
        before = len(_prepared.CALLS.lately)
        found = {
            name: _differs(**({"group": group, "method": method} | given | ({"group": own} if "group" in given else {})))
            for name, given in AGAIN.items()
        }
        kept = len(_prepared.CALLS.lately) - before
    return found, kept


def _differs(
    *,
    sharding: Sharding | None = None,
    dtype: torch.dtype = torch.float32,
    bshd: bool = False,
    axes: str = "bhsd",
    needs: str = "qkv",
    group: dist.ProcessGroup,
    method: str,
    **options: Any,
) -> float:
    sharding = sharding or Sharding.zigzag(16, group.size())
    options, packed = {"causal": True} | options, "cu_seqlens_q" in options
    if packed:
        options["cu_seqlens_k"] = options["cu_seqlens_q"]
    axis = 0 if packed else 1 if axes == "bshd" else 2
    *whole_ones, dout = whole(dtype, 16)
    if packed:
        *whole_ones, dout = (x[0].transpose(0, 1) for x in (*whole_ones, dout))
    elif axes == "bshd":
        *whole_ones, dout = (x.transpose(1, 2) for x in (*whole_ones, dout))
    given = [sharding.shard(x, axis, group.rank()).contiguous() for x in whole_ones]
    if bshd:
        given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    results = []
    for tensors, function, how in (
        (given, strobe.distributed.attention, {"layout": axes, "sharding": sharding, "group": group, "method": method}),
        (whole_ones, strobe.attention, {"layout": axes}),
    ):
        leaves = [x.detach().requires_grad_(name in needs) for name, x in zip("qkv", tensors, strict=True)]
        out, lse = function(*leaves, return_lse=True, **how, **options)
        if needs:
            out.backward(sharding.shard(dout, axis, group.rank()) if tensors is given else dout)
        results.append([out.detach(), *(x.grad for x in leaves if x.grad is not None)])
        results[-1].append(lse.detach().transpose(-1, axis))
    return max(float((a - sharding.shard(b, axis, group.rank())).abs().max()) for a, b in zip(*results, strict=True))


def refused_again(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    """The refusals of calls that differ in one thing from a call that was made."""
    sharding = Sharding.zigzag(S, group.size())
    q, k, v, _ = shards(sharding, group.rank())
    given: dict[str, Any] = {"sharding": sharding, "group": group, "method": "gather", "agree": True, "causal": True}
    for _ in range(3):
        strobe.distributed.attention(q, k, v, **given)
    wrong: list[dict[str, Any]] = [
        {"agree": 1},
        {"causal": 1},
        {"sharding_q": sharding.encoded},
        {"time_limit": True},
        {"sharding_k": "bshd"},
    ]
    found = [said(lambda change=change: strobe.distributed.attention(q, k, v, **given | change)) for change in wrong]

    def packed(*numbers: int) -> None:
        cu = torch.tensor(numbers, dtype=torch.int32)
        strobe.distributed.attention(*(x[0].transpose(0, 1) for x in (q, k, v)), **given, cu_seqlens_q=cu, cu_seqlens_k=cu)

    for _ in range(3):
        packed(0, 9, S)
    return [*found, said(lambda: packed(0, 9, S + 1))]


def forgets_its_group(group: dist.ProcessGroup) -> bool:
    """Whether a destroyed group is freed, although its calls are remembered."""
    own = dist.new_group(list(range(group.size())))
    sharding = Sharding.zigzag(S, group.size())
    q, k, v, dout = shards(sharding, group.rank())
    for _ in range(3):
        strobe.distributed.attention(q, k, v, sharding=sharding, group=own).backward(dout)
    group.barrier().wait()
    dist.destroy_process_group(own)
    alive = weakref.ref(own)
    del own
    gc.collect()
    return alive() is None


@contextlib.contextmanager
def no_memory(after: int) -> Iterator[None]:
    """Each allocation after the first `after` ones fails."""
    modules, real, left = (_call, _exchange, torch_arrays), _call.allocated, after

    def allocated(*arguments: Any) -> Tensor:
        nonlocal left
        left -= 1
        if left < 0:
            raise OutOfMemoryError("can't allocate memory: 1 TB")
        return real(*arguments)

    for module in modules:
        module.allocated = allocated
    try:
        yield
    finally:
        for module in modules:
            module.allocated = real


def padded_with_sinks(group: dist.ProcessGroup, method: str) -> tuple[Tensor, Tensor]:
    """lse of packed tokens, the last of which belong to no sequence; and this rank's share of dsinks for a loss that uses lse."""
    sharding = Sharding.contiguous(12, group.size())
    q, k, v = (sharding.shard(torch.randn(12, 2, 8, generator=torch.Generator().manual_seed(n)), 0, group.rank()) for n in range(3))
    sinks, cu = torch.zeros(2, requires_grad=True), torch.tensor([0, 3, 8], dtype=torch.int32)
    given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "sinks": sinks, "return_lse": True}
    _, lse = strobe.distributed.attention(q, k, v, sharding=sharding, group=group, method=method, **given)
    lse.masked_fill(lse.isinf(), 0).sum().backward()
    assert sinks.grad is not None
    return lse.detach(), sinks.grad


def cannot_prepare(group: dist.ProcessGroup, rank: int, wrong: int) -> tuple[str, str]:
    """The error that this rank gets if one rank cannot copy the rows to send, and another one's call is wrong."""
    sharding = Sharding.zigzag(S, group.size())
    q, k, v, _ = shards(sharding, group.rank())
    causal = "yes" if group.rank() == wrong else True
    poor = mock.patch.object(_gather.Keys, "pack", side_effect=OutOfMemoryError("can't allocate memory: 1 TB"))
    with poor if group.rank() == rank else contextlib.nullcontext():
        found = said(lambda: strobe.distributed.attention(q, k, v, sharding=sharding, group=group, method="gather", causal=causal))
    strobe.distributed.attention(q, k, v, sharding=sharding, group=group)
    return found


def runs_out_of_memory(group: dist.ProcessGroup, rank: int, method: str, in_backward: bool) -> tuple[str, str]:
    sharding = Sharding.zigzag(S, group.size())
    q, k, v, dout = shards(sharding, group.rank())

    def call() -> None:
        poor = no_memory(0) if group.rank() == rank else contextlib.nullcontext()
        with contextlib.nullcontext() if in_backward else poor:
            out = strobe.distributed.attention(q, k, v, sharding=sharding, group=group, method=method)
        with poor if in_backward else contextlib.nullcontext():
            out.backward(dout)

    return said(call)


def agrees_without_a_cpu_backend(group: dist.ProcessGroup) -> tuple[list[tuple[int, ...]], tuple[str, str], str]:
    """The group seems to have NCCL only. Its ranks are in different numbers of groups: the first rank is in all groups of the workers."""
    own = dist.new_group(list(range(group.size())))
    devices = _group._devices
    try:
        _group._devices = lambda of: {"cuda"} if of is own else devices(of)
        drawn = _agree.drawn_by_first(own, torch.tensor([group.rank(), 7]), 5.0)
        rng = _agree.agree(own, _agree.Said(_agree.Signature({"q": 1}), None, (10 + group.rank(), 3)), 5.0)
        differing = said(lambda: _agree.agree(own, _agree.Said(_agree.Signature({"q": group.rank()})), 5.0))
        return [drawn, rng], differing, _group.on_host(own).group_name
    finally:
        _group._devices = devices


def does_not_come(group: dist.ProcessGroup, absent: int, agree: bool, how: str) -> tuple[str, str, float]:
    """The error that each rank gets if one rank does not take part. The group is new, because it cannot be used afterwards."""
    own = dist.new_group(list(range(group.size())))
    sharding = Sharding.zigzag(S, group.size())
    q, k, v, dout = shards(sharding, group.rank())
    given: dict[str, Any] = {"sharding": sharding, "group": own, "method": "gather", "agree": agree, "time_limit": 0.5}
    _late._GRACE = 0.5
    began = time.monotonic()
    if how == "backward":
        out = strobe.distributed.attention(q, k, v, **given)
        found = ("", "absent") if group.rank() == absent else said(lambda: out.backward(dout))
    elif group.rank() == absent:
        found = ("", "absent") if how == "absent" else said(lambda: strobe.distributed.attention(q, k, v, softcap=-1.0, **given))
    else:
        found = said(lambda: strobe.distributed.attention(q, k, v, **given))
    seconds = time.monotonic() - began
    dist.barrier()
    return *found, seconds


def leaves(group: dist.ProcessGroup, absent: int, how: str) -> tuple[str, str, float]:
    """One rank passes an object that is no group, mesh or sharding. The group is new, because it cannot be used afterwards."""
    own = dist.new_group(list(range(group.size())))
    sharding = Sharding.zigzag(S, group.size())
    q, k, v, _ = shards(sharding, group.rank())
    is_wrong = group.rank() == absent
    if group.rank() < 2:  # these have left more often than the others, in calls without them
        for _ in range(3):
            said(lambda: strobe.distributed.attention(q, k, v, sharding=sharding, group="all"))
    strobe.distributed.attention(q, k, v, sharding=sharding, group=own)
    began = time.monotonic()

    def call() -> None:
        if how == "context":
            with strobe.distributed.context_parallel(
                dist.device_mesh.DeviceMesh.from_group(own, "cpu"), sharding=None if is_wrong else sharding, method="gather"
            ):
                strobe.distributed.attention(q, k, v)
        else:
            given = {"group": own} if not is_wrong else {"group": "all"} if how == "group" else {"mesh": 4}
            strobe.distributed.attention(q, k, v, sharding=sharding, **given)

    return *said(call), time.monotonic() - began


def drawn(group: dist.ProcessGroup, method: str, agree: bool) -> dict[str, Tensor]:
    """Dropout without a seed on ranks with different generators: this rank's results, and the seed and offset that the first rank drew."""
    torch.manual_seed(100 + group.rank())
    expected = torch.randint(2**63 - 1, (2,), dtype=torch.int64)
    torch.manual_seed(100 + group.rank())
    sharding = Sharding.zigzag(S, group.size())
    q, k, v, dout = shards(sharding, group.rank())
    out = strobe.distributed.attention(q, k, v, sharding=sharding, group=group, method=method, agree=agree, dropout=0.3, causal=True)
    out.backward(dout)
    return {"rng": expected, "out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def bits(group: dist.ProcessGroup, kind: str, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Tensor]:
    sharding = getattr(Sharding, kind)(S, group.size())
    q, k, v, dout = shards(sharding, group.rank(), dtype=dtype)
    out, lse = strobe.distributed.attention(q, k, v, sharding=sharding, group=group, deterministic="world", return_lse=True, **options)
    torch.autograd.backward([out, lse], [dout, torch.ones_like(lse)])
    return {"out": out.detach(), "lse": lse.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def as_users_call_it(group: dist.ProcessGroup, way: str, method: str) -> dict[str, Tensor]:
    """Forward and backward of one causal call, made in the given way (checkpoint, autocast, bshd, compile, mesh, or plainly); `group` has
    all ranks."""
    sharding = Sharding.zigzag(S, group.size())
    q, k, v, dout = shards(sharding, group.rank())
    how: dict[str, Any] = {"sharding": sharding, "method": method, "causal": True}
    if method == "levels":
        how["mesh"] = mesh_of(group.size(), "cpu")
    elif way == "mesh":
        how["mesh"] = dist.device_mesh.init_device_mesh("cpu", (group.size(),))

    def call(*tensors: Tensor) -> Tensor:
        return strobe.distributed.attention(*tensors, **how)

    if way == "checkpoint":
        out = checkpoint(call, q, k, v, use_reentrant=False)
    elif way == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call(q, k, v).float()
    elif way == "bshd":
        how["layout"] = "bshd"
        out = call(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    elif way == "compile":
        torch._dynamo.reset()
        out = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    else:
        out = call(q, k, v)
    out.backward(dout)
    return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def lse_on_the_first_rank(group: dist.ProcessGroup, method: str) -> dict[str, Tensor]:
    """A loss in which only one rank's share uses lse."""
    sharding = Sharding.zigzag(S, group.size())
    q, k, v, dout = shards(sharding, group.rank())
    where = {"mesh": mesh_of(group.size(), "cpu")} if method == "levels" else {"group": group}
    out, lse = strobe.distributed.attention(q, k, v, sharding=sharding, **where, method=method, causal=True, return_lse=True)
    loss = (out * dout).sum()
    (loss + lse.sum() if group.rank() == 0 else loss).backward()
    return {"dq": q.grad, "dk": k.grad, "dv": v.grad}


def twice_differentiated(group: dist.ProcessGroup) -> tuple[str, str]:
    sharding = Sharding.zigzag(S, group.size())
    q, k, v, dout = shards(sharding, group.rank())
    out = strobe.distributed.attention(q, k, v, sharding=sharding, group=group)
    (dq,) = torch.autograd.grad(out, q, dout.requires_grad_(), create_graph=True)
    return said(lambda: torch.autograd.grad(dq.sum(), dout))


def unsharded(group: dist.ProcessGroup) -> Tensor:
    sharding = Sharding(11, (((0, 2), (9, 2)), ((2, 7),), ())[: group.size()]) if group.size() == 3 else Sharding.zigzag(11, group.size())
    x = torch.arange(33.0).reshape(3, 11)
    return sharding.unshard(sharding.shard(x, 1, group=group), -1, group=group)


def in_a_context(group: dist.ProcessGroup, door: str) -> dict[str, Any]:
    """Attention within context_parallel(), as in PyTorch: the context shards the buffers, and attention sees whole sequences."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (group.size(),))
    q, k, v, dout = whole()
    kept = torch.arange(S)
    before = torch.nn.functional.scaled_dot_product_attention
    with strobe.distributed.context_parallel(
        mesh, buffers=[q, k, v, dout, kept], buffer_seq_dims=[2, 2, -2, 2, 0], no_restore_buffers={kept}
    ) as sharding:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        if door == "sdpa":
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        else:
            out = strobe.distributed.attention(*leaves, causal=True)
        out.backward(dout)
        whole_out = sharding.unshard(out.detach(), 2)
    assert torch.nn.functional.scaled_dot_product_attention is before
    assert all(torch.equal(a, b) for a, b in zip((q, k, v, dout), whole(), strict=True))
    assert torch.equal(kept, sharding.positions())
    return {"out": out.detach(), "whole": whole_out} | {f"d{name}": x.grad for name, x in zip("qkv", leaves, strict=True)}


def reserved(group: dist.ProcessGroup, method: str, given: dict[str, int]) -> tuple[list[int], list[int]]:
    """reserved_sms of this rank's calls of the library, forward and backward, if 5 SMs are reserved beside transfers."""
    found: list[int] = []

    def structs(call: Call, *more: Any) -> Any:
        found.append(call.options.get("reserved_sms", 0))
        return real(call, *more)

    real = Call.structs
    sharding = Sharding.zigzag(S, group.size())
    q, k, v, dout = shards(sharding, group.rank())
    with (
        mock.patch.object(Call, "structs", structs),
        mock.patch.object(_prepared, "CALLS", _prepared.Memory()),  # an empty memory of calls
        mock.patch.object(_operators, "sms_for_transfers", return_value=5),
        mock.patch.object(_gather, "LEAST_BYTES", {"cpu": 1}),  # key heads are gathered in groups
    ):
        out = strobe.distributed.attention(q, k, v, sharding=sharding, group=group, method=method, **given)
        of_forward, found = found, []
        out.backward(dout)
    return of_forward[1:], found[1:]  # without the first call, which is only checked


def multihead_in_a_context(group: dist.ProcessGroup) -> tuple[float, list[tuple[str, str]]]:
    """The difference between nn.MultiheadAttention of shards and of whole sequences, with and without gradients; and the error if weights
    are asked for."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (group.size(),))
    torch.manual_seed(0)
    module, x = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, S, 32)
    expected, own, found = module(x, x, x, need_weights=False)[0].detach(), x.clone(), []
    refused: list[tuple[str, str]] = []
    with strobe.distributed.context_parallel(mesh, buffers=[own], buffer_seq_dims=[1]) as sharding:
        for mode in (torch.no_grad(), torch.enable_grad()):
            with mode:
                found.append(sharding.unshard(module(own, own, own, need_weights=False)[0].detach(), 1))
                refused.append(said(lambda: module(own, own, own)))
    assert module(x, x, x)[1] is not None
    assert torch.backends.mha.get_fastpath_enabled()
    return max(float((x - expected).abs().max()) for x in found), refused


def local_attention_in_a_context(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    """The errors of calls within a context (calls that see only the rank's tokens, and one of strobe.distributed.attention()), and of a
    call after it."""
    from strobe.compat import sdpa

    mesh = dist.device_mesh.init_device_mesh("cpu", (group.size(),))
    q, k, v, _ = whole()
    module = strobe.nn.FlashAttention(D, causal=True)
    strobe.attention(q, k, v)  # the call is remembered from here on
    strobe.attention(q, k, v)
    with strobe.distributed.context_parallel(mesh, sharding=Sharding.zigzag(S, group.size())) as sharding:
        own = [sharding.shard(x, 2, group.rank()) for x in (q, k, v)]
        found = [
            said(lambda: strobe.attention(q, k, v)),
            said(lambda: strobe.attention(*(x.numpy() for x in own))),
            said(lambda: module(*own)),
            said(lambda: sdpa.scaled_dot_product_attention(*own)),
            said(lambda: torch.compile(strobe.attention, backend="eager")(*own)),
            said(lambda: strobe.distributed.attention(*own)),
        ]
    return [*found, said(lambda: strobe.attention(q, k, v))]


def changed_in_place(group: dist.ProcessGroup, method: str) -> float:
    """Adds 1 in place to out of packed sequences, with and without autograd. Returns the largest difference from the right sum."""
    sharding, cu = Sharding.contiguous(32, group.size()), torch.tensor([0, 20, 32], dtype=torch.int32)
    q, k, v = (torch.randn(32 // group.size(), 4, 16) for _ in "qkv")
    differences = []
    for tracked in (False, True):
        q = q.detach().requires_grad_(tracked)
        out = strobe.distributed.attention(q, k, v, sharding=sharding, group=group, method=method, cu_seqlens_q=cu, cu_seqlens_k=cu)
        expected = out.detach() + 1
        out += 1
        differences.append(float((out.detach() - expected).abs().max()))
    return max(differences)


def contexts_refused(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (group.size(),))
    x, y = torch.zeros(2, 8), torch.zeros(2, 9)
    found = []
    for given in (
        {},
        {"buffers": [x]},
        {"buffers": [x], "buffer_seq_dims": [2]},
        {"buffers": [x, y], "buffer_seq_dims": [1, 1]},
        {"buffers": [x.clone().requires_grad_()], "buffer_seq_dims": [1]},
        {"buffers": [x], "buffer_seq_dims": [1], "no_restore_buffers": {y}},
        {"sharding": Sharding.zigzag(8, 7)},
        {"buffers": [x], "buffer_seq_dims": [1], "sharding": Sharding.zigzag(9, group.size())},
        {"buffers": x, "buffer_seq_dims": [1]},
        {"buffers": [x], "buffer_seq_dims": 1},
        {"buffers": [x], "buffer_seq_dims": [1], "no_restore_buffers": x},
        {"buffers": [x.to_sparse()], "buffer_seq_dims": [1]},
    ):

        def enter(given: dict[str, Any] = given) -> None:
            with strobe.distributed.context_parallel(mesh, **given):
                pass

        found.append(said(enter))
    return found


def masks_refused_in_a_context(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    """The errors of F.scaled_dot_product_attention for an attn_mask of a wrong kind."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (group.size(),))
    x = torch.zeros(1, 2, 8, 16)
    with strobe.distributed.context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return [said(lambda mask=mask: sdpa(x, x, x, attn_mask=mask)) for mask in (3, torch.ones(1, 8, dtype=torch.int64))]


def in_two_levels(group: dist.ProcessGroup) -> tuple[list[str], list[tuple[str, str]]]:
    """explain()'s text for a mesh of two dimensions; and the errors of calls that cannot use two levels."""
    sharding, mesh = Sharding.zigzag(S, group.size()), mesh_of(group.size(), "cpu")
    q, k, v, _ = shards(sharding, group.rank())
    one = shards(sharding, group.rank(), hkv=1)
    attention, explain = strobe.distributed.attention, strobe.distributed.explain
    wrong = dist.device_mesh.DeviceMesh("cpu", [[1, 0], [2, 3]])
    three = dist.device_mesh.init_device_mesh("cpu", (1, 2, 2))
    return [explain(q, k, v, sharding=sharding, mesh=mesh), explain(*one[:3], sharding=sharding, mesh=mesh)], [
        said(lambda: attention(q, k, v, sharding=sharding, group=group, method="levels")),
        said(lambda: attention(*one[:3], sharding=sharding, mesh=mesh, method="levels")),
        said(lambda: attention(q, k, v, sharding=sharding, mesh=mesh, method="levels", invariant=True)),
        said(lambda: attention(q, k, v, sharding=Sharding.zigzag(S, 2), mesh=mesh)),
        said(lambda: attention(q, k, v, sharding=sharding, mesh=wrong)),
        said(lambda: attention(q, k, v, sharding=sharding, mesh=three)),
    ]


def refused_in_own_words(group: dist.ProcessGroup, function: str) -> list[tuple[str, str]]:
    """What attention() or explain() says of arguments that concern whole sequences, of which each rank has a part."""
    sharding, own = Sharding.contiguous(32, group.size()), getattr(strobe.distributed, function)
    q = sharding.shard(torch.randn(2, H, 32, D), 2, group.rank())
    lists = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 10, 32], dtype=torch.int32))
    packed = q[0].transpose(0, 1)
    of_three = strobe.BlockMask.from_kept(torch.ones(3, 3, 2, 2, dtype=torch.bool), 16, 16)
    causal = strobe.BlockMask.causal(48, 32, 16, 16)
    kinds: list[tuple[Tensor, dict[str, Any]]] = [
        (q, {"nonsense": 1}),
        (q, {"block_mask": causal}),
        (q, {"block_mask": of_three}),
        (packed, lists | {"block_mask": causal}),
        (packed, lists | {"max_seqlen_q": 5}),
        (packed, lists | {"max_seqlen_k": 5, "block_mask": strobe.BlockMask.causal(22, 22, 16, 16)}),
        (q, {"sinks": torch.zeros(3)}),
        (q, {"alibi_slopes": torch.zeros(3)}),
        (q, {"mask": torch.ones(32, 33, dtype=torch.bool)}),
        (q, {"mask": causal_lower_right(16, 16)}),
    ]
    return [said(lambda x=x, given=given: own(x, x, x, sharding=sharding, group=group, **given)) for x, given in kinds]


def by_a_causal_bias(group: dist.ProcessGroup) -> bool:
    """Whether PyTorch's causal bias of whole sequences gives the same result as causal=True."""
    sharding = Sharding.zigzag(S, group.size())
    q, k, v, _ = shards(sharding, group.rank())
    found, expected = (
        strobe.distributed.attention(q, k, v, sharding=sharding, group=group, method="gather", **given)
        for given in ({"mask": causal_lower_right(S, S)}, {"causal": True})
    )
    return torch.equal(found, expected)


def explained(group: dist.ProcessGroup, method: str | None, hkv: int, backward: bool, options: dict[str, Any]) -> str:
    sharding = Sharding.zigzag(S, group.size())
    q, k, v, _ = shards(sharding, group.rank(), hkv=hkv)
    return strobe.distributed.explain(q, k, v, sharding=sharding, group=group, method=method, backward=backward, **options)


def bytes_received(group: dist.ProcessGroup, method: str, kind: str, options: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The bytes that this rank receives from others, forward and backward: those moved, and those in explain()'s model."""
    sharding = getattr(Sharding, kind)(S, group.size())
    q, k, v, dout = shards(sharding, group.rank(), hkv=2)
    real, found = _exchange.begin, [0]

    def begin(waits: Any, what: str, sent: Tensor, to: Any, received: Tensor, of: Any) -> Any:
        rows = sum(of) - of[group.rank()]
        found[0] += rows * (received[0].numel() if len(received) else 0) * received.element_size()
        return real(waits, what, sent, to, received, of)

    modules = (_exchange, _gather, _ring)
    for module in modules:
        module.begin = begin
    try:
        out = strobe.distributed.attention(q, k, v, sharding=sharding, group=group, method=method, **options)
        forward, found[0] = found[0], 0
        out.backward(dout)
    finally:
        for module in modules:
            module.begin = real
    p = Call(torch_arrays.TORCH, {"q": q, "k": k, "v": v}, {"window_right": 0} if options.get("causal") else {})
    told = _predict.moved(method, _call.facts_of(p, _operators.plan_of(p, sharding, sharding)))
    return [forward, found[0]], [told.forward, told.backward]


def trained_and_resumed(group: dist.ProcessGroup, folder: str, cache: str) -> tuple[list[float], list[float]]:
    """The losses of a run of four steps, and of one that is resumed from a checkpoint after two. `group` has all ranks."""
    from strobe_tools.train import CONFIGS, data
    from strobe_tools.train.ranks import Ranks
    from strobe_tools.train.trainer import Trainer

    os.environ["STROBE_CACHE"] = cache
    config = CONFIGS["smoke"].replace(device="cpu", dropout=0.3, steps=4, context_parallel=group.size())
    corpus = data.load(None, vocab_size=config.vocab_size, most_bytes=config.text_bytes)
    ranks = Ranks(group.size(), group.rank(), "cpu", None)
    whole = Trainer(config, corpus, ranks)
    whole.run()
    first, path = Trainer(config, corpus, ranks), Path(folder) / "half.pt"
    losses = [first.train_step(), first.train_step()]
    if ranks.is_first:
        first.save(path)
    ranks.barrier()
    second = Trainer.load(path, config, corpus, ranks)
    return whole.history.train, [*losses, second.train_step(), second.train_step()]


def runs_the_page(group: dist.ProcessGroup, page: str) -> float:
    """Runs the Python of docs/many-gpus.md; returns the largest difference that it prints. `group` has all ranks and is not destroyed."""
    printed: list[float] = []
    names: dict[str, Any] = {"print": lambda x: printed.append(float(x))}
    there = {"init_process_group": lambda backend: None, "destroy_process_group": lambda: None}
    with mock.patch.multiple(dist, **there):
        for code in re.findall(r"```python\n(.*?)```", Path(page).read_text(), re.DOTALL):
            exec(compile(code, page, "exec"), names)
    assert len(printed) == 3
    return max(printed)


OF_BATCH_AND_HEAD = torch.rand(2, H, generator=torch.Generator().manual_seed(4)) * 0.1
DTENSOR_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"causal": True},
    "all": {
        "mask": torch.rand(2, 1, S, S, generator=torch.Generator().manual_seed(1)) < 0.7,
        "alibi_slopes": torch.rand(2, H, generator=torch.Generator().manual_seed(2)),
        "dropout": 0.2,
        "seed": 5,
        "window": (20, 3),
    },
    "blocks": {
        "block_mask": strobe.BlockMask.from_kept(torch.rand(2, H, 3, 3, generator=torch.Generator().manual_seed(3)) < 0.7, 16, 16, S, S)
    },
    "functions": {
        "score": lambda x, b, h, i, j: x + OF_BATCH_AND_HEAD[b, h] * (i - j),
        "mask": lambda b, h, i, j: (i >= j) | (j < 5),
        "engine": "reference",
    },
    "none": {},
    "learned": {},  # bias and sinks that have gradients
}


def laid_out(layout: str) -> list[Tensor]:
    """whole() in a layout, or packed."""
    if layout == "packed":
        return [x.transpose(1, 2).flatten(0, 1).contiguous() for x in whole()]
    return [x.transpose(1, 2).contiguous() if layout == "bshd" else x for x in whole()]


def options_laid_out(layout: str) -> dict[str, Any]:
    if layout != "packed":
        return {"layout": layout}
    cu = torch.tensor([0, 30, 2 * S], dtype=torch.int32)
    return {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "dropout": 0.2, "seed": 9, "causal": True}


def learned() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(4)
    return {"bias": torch.randn(1, H, S, S, generator=g), "sinks": torch.randn(H, generator=g)}


def of_dtensors(group: dist.ProcessGroup, placed: str, of: str, layout: str) -> dict[str, Tensor]:
    """The gathered results and gradients of a call on DTensors, which shard heads or the batch, as `placed` says. `group` has all four
    ranks."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    head = 2 if layout == "bshd" else 1
    placements = [{"H": Shard(head), "B": Shard(0), "-": Replicate()}[letter] for letter in placed]
    tensors = laid_out(layout)
    q, k, v, dout = (distribute_tensor(x, mesh, placements) for x in tensors)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    more = {name: distribute_tensor(x, mesh, [Replicate()] * 2).requires_grad_() for name, x in learned().items() if of == "learned"}
    out, lse = strobe.attention(q, k, v, return_lse=True, **options_laid_out(layout), **DTENSOR_OPTIONS[of], **more)
    assert tuple(out.placements) == tuple(placements)
    torch.autograd.backward([out, lse], [dout, distribute_tensor(torch.ones(lse.shape), mesh, lse.placements)])
    found = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad} | {f"d{name}": x.grad for name, x in more.items()}
    return {name: x.full_tensor().detach() for name, x in found.items()}


def dtensors_refused(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (4,))
    q, k, v, _ = whole()
    by_heads, by_rows, replicated = ([distribute_tensor(x, mesh, [of]) for x in (q, k, v)] for of in (Shard(1), Shard(2), Replicate()))
    few = distribute_tensor(k[:, :2], mesh, [Shard(1)])
    return [
        said(lambda: strobe.attention(*by_rows)),
        said(lambda: strobe.attention(by_heads[0], k, v)),
        said(lambda: strobe.attention(by_heads[0], replicated[1], replicated[2])),
        said(lambda: strobe.attention(by_heads[0], few, few)),
        said(lambda: strobe.attention(*by_heads, dropout=0.1)),
        said(lambda: strobe.attention(*by_heads, sinks=torch.zeros(H, requires_grad=True))),
        said(lambda: strobe.distributed.attention(*by_heads, sharding=Sharding.zigzag(S, 4))),
    ]


def compiled_beside_eager(group: dist.ProcessGroup) -> float:
    """The largest difference between compiled and eager, for results and gradients of a packed call with dropout and a drawn seed."""
    torch._dynamo.reset()
    sharding = Sharding.zigzag(2 * S, group.size())
    q, k, v, dout = (sharding.shard(x, 0, group.rank()).detach().requires_grad_() for x in laid_out("packed"))
    sinks = torch.zeros(H, requires_grad=True)
    cu = torch.tensor([0, 30, 2 * S], dtype=torch.int32)

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, sinks = tensors
        options = {"causal": True, "sinks": sinks, "dropout": 0.3, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
        return strobe.distributed.attention(q, k, v, sharding=sharding, group=group, return_lse=True, **options)

    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(3)
        out, lse = function(q, k, v, sinks)
        found.append((out, lse, *torch.autograd.grad([out, lse], [q, k, v, sinks], [dout.detach(), torch.ones_like(lse)])))
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))
