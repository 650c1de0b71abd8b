"""Functions of the score and the mask that ranks run in the tests of strobe.distributed, and what they see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import strobe
from distributed_calls import said
from distributed_cases import drawn_sharding, mesh_of
from strobe.distributed import Sharding, _attention, _call, _gather, _operators

B, H, HKV, S, D = 2, 8, 4, 37, 16
CU = torch.tensor([0, 5, 31, 70], dtype=torch.int32)  # packed sequences, and four tokens of padding
TOKENS = 74


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Case:
    """Options with functions, and what the functions learn. Every rank makes the same."""

    def __init__(self, name: str, dtype: torch.dtype):
        self.learned: dict[str, Tensor] = {}
        self.options: dict[str, Any] = {}
        self.is_packed = name == "packed"
        batch = len(CU) - 1 if self.is_packed else B
        getattr(self, name.replace(" ", "_"))(batch, dtype)

    def learn(self, name: str, x: Tensor) -> Tensor:
        self.learned[name] = x.requires_grad_()
        return x

    def relative(self, batch: int, dtype: torch.dtype) -> None:
        """A gate of each query and head, a bias by i - j, and a scalar: all three ways of summing a gradient."""
        gate = self.learn("gate", drawn(1, batch, H, TOKENS, dtype=dtype))
        table = self.learn("table", drawn(2, H, 2 * TOKENS, dtype=dtype))
        free = self.learn("free", drawn(3, 7, 5, dtype=dtype))

        def score(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return 3 * torch.tanh(x * gate[b, h, i] / 3) + table[h, i - j + TOKENS] + free[i % 7, j % 5]

        self.options = {"score": score}

    def causal(self, batch: int, dtype: torch.dtype) -> None:
        self.relative(batch, dtype)
        self.options |= {"causal": True}

    def mask(self, batch: int, dtype: torch.dtype) -> None:
        """A mask by sequence, head and positions, which hides some rows as a whole."""
        threshold = torch.arange(batch * H).reshape(batch, H) % 7

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return ((i - j).abs() % 7 >= threshold[b, h]) & (i % 5 != 3)

        self.relative(batch, dtype)
        self.options |= {"mask": seen}

    def packed(self, batch: int, dtype: torch.dtype) -> None:
        self.mask(batch, dtype)
        self.options |= {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "causal": True}

    def blocks(self, batch: int, dtype: torch.dtype) -> None:
        """A block mask of a function, beside another mask."""
        documents = torch.arange(S) // 11
        made = strobe.BlockMask.from_function(lambda b, h, i, j: documents[i] >= documents[j] + h % 2, 1, H, S, S, block=16)
        self.options = {"block_mask": made, "mask": lambda b, h, i, j: j != i - b}

    def blocks_of_all_heads(self, batch: int, dtype: torch.dtype) -> None:
        self.options = {"block_mask": strobe.BlockMask.from_function(lambda b, h, i, j: i >= j, 1, 1, S, S, block=16)}

    def dropout(self, batch: int, dtype: torch.dtype) -> None:
        self.relative(batch, dtype)
        self.options |= {"dropout": 0.3, "seed": 5}

    def used(self, batch: int, dtype: torch.dtype) -> None:
        self.relative(batch, dtype)
        self.options |= {"seqused_k": torch.tensor([9, 30], dtype=torch.int32)}


def tensors(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dout of the whole problem."""
    heads = (H, HKV, HKV, H)
    shapes = [(TOKENS, h, D) if case.is_packed else (B, h, S, D) for h in heads]
    return [drawn(10 + n, *shape, dtype=dtype) for n, shape in enumerate(shapes)]


def differentiated(call: Callable[..., Any], given: list[Tensor], case: Case, **options: Any) -> dict[str, Tensor]:
    q, k, v, dout = given
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = call(*leaves, return_lse=True, **case.options, **options)
    dlse = torch.where(lse.isinf(), 0.0, torch.ones_like(lse))
    found = torch.autograd.grad([out, lse], [*leaves, *case.learned.values()], [dout, dlse], allow_unused=True)
    return dict(zip(("out", "lse", "dq", "dk", "dv", *case.learned), (out.detach(), lse.detach(), *found), strict=True))


def single(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    case = Case(name, dtype)
    return differentiated(strobe.attention, tensors(case, dtype), case)


def on_rank(
    group: dist.ProcessGroup, name: str, method: str, kind: str, dtype: torch.dtype, times: int = 1, small_groups: bool = True
) -> dict[str, Tensor]:
    """A rank's results; of the last of several calls."""
    case, before = Case(name, dtype), _gather.LEAST_BYTES
    axis = 0 if case.is_packed else 2
    sharding = drawn_sharding(kind, TOKENS if case.is_packed else S, group.size())
    given = [sharding.shard(x, axis, group.rank()) for x in tensors(case, dtype)]
    where = {"mesh": mesh_of(group.size(), "cpu")} if method == "levels" else {"group": group}
    if small_groups:
        _gather.LEAST_BYTES = dict.fromkeys(before, 1)  # several groups of key heads
    try:
        for _ in range(times):
            found = differentiated(strobe.distributed.attention, given, case, sharding=sharding, method=method, **where)
    finally:
        _gather.LEAST_BYTES = before
    return found


def joined(name: str, kind: str, of_ranks: list[dict[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """The whole problem's results. The ranks' gradients of captured tensors are parts, which are added up."""
    case = Case(name, dtype)
    sharding = drawn_sharding(kind, TOKENS if case.is_packed else S, len(of_ranks))
    found = {}
    for of in of_ranks[0]:
        each = [results[of] for results in of_ranks]
        if of in case.learned:
            found[of] = sum(each[1:], each[0])
        else:
            found[of] = sharding.join(each, each[0].dim() - 1 if of == "lse" else 0 if case.is_packed else 2)
    return found


def in_a_context(group: dist.ProcessGroup) -> dict[str, Tensor]:
    case = Case("mask", torch.float64)
    buffers = tensors(case, torch.float64)
    mesh = dist.device_mesh.init_device_mesh("cpu", (group.size(),))
    with strobe.distributed.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        return differentiated(strobe.distributed.attention, buffers, case)


def of_bits(group: dist.ProcessGroup, dtype: torch.dtype) -> dict[str, Tensor]:
    """Results whose bits do not depend on the number of ranks."""
    case = Case("relative", dtype)
    case.options["deterministic"] = "world"
    sharding = Sharding.zigzag(S, group.size())
    given = [sharding.shard(x, 2, group.rank()) for x in tensors(case, dtype)]
    found = differentiated(strobe.distributed.attention, given, case, sharding=sharding, group=group)
    return {name: x for name, x in found.items() if name not in case.learned}


def apart(group: dist.ProcessGroup, method: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results with gradients of captured tensors by calls of their own, as on GPUs; and by the call of the others."""
    with mock.patch.object(_call, "CAPTURED_APART", {"cpu"}):
        apart = on_rank(group, "packed", method, "zigzag", torch.float64)
    return apart, on_rank(group, "packed", method, "zigzag", torch.float64)


def checkpointed(group: dist.ProcessGroup) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results under activation checkpointing and autocast, and without checkpointing."""

    def run(call: Callable[..., Any]) -> dict[str, Tensor]:
        case = Case("mask", torch.float32)
        sharding = Sharding.zigzag(S, group.size())
        given = [sharding.shard(x, 2, group.rank()) for x in tensors(case, torch.float32)]
        with torch.autocast("cpu", torch.bfloat16):
            return differentiated(call, [*given[:3], given[3].bfloat16()], case, sharding=sharding, group=group)

    of = strobe.distributed.attention
    return run(lambda *x, **options: checkpoint(of, *x, use_reentrant=False, **options)), run(of)


def judged(group: dist.ProcessGroup) -> list[int]:
    """How many of the checks of five equal calls were made in full, before and in the operator."""
    sharding, table = Sharding.zigzag(S, group.size()), torch.zeros(H, requires_grad=True)
    q, k, v = (sharding.shard(drawn(n, B, H, S, D, dtype=torch.float32), 2, group.rank()) for n in range(3))
    with (
        mock.patch.object(_attention, "_judge", side_effect=_attention._judge) as before,
        mock.patch.object(_operators, "_judge", side_effect=_operators._judge) as within,
    ):
        for _ in range(5):

            def score(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:  # as a layer makes it in each call
                return x + table[h] * (i - j)

            strobe.distributed.attention(q, k, v, sharding=sharding, group=group, score=score).sum().backward()
    return [before.call_count, within.call_count]


def learns(group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
    """The gradient of a tensor of 16 bits beside q in float32, where nothing else requires grad."""
    sharding = Sharding.contiguous(S, group.size())
    q, k, v = (sharding.shard(drawn(n, B, H, S, D, dtype=torch.float32), 2, group.rank()) for n in range(3))
    table = torch.ones(H, dtype=dtype, requires_grad=True)
    strobe.distributed.attention(q, k, v, sharding=sharding, group=group, score=lambda x, b, h, i, j: x * table[h]).sum().backward()
    assert table.grad is not None
    return table.grad


OF_FIVE_AXES = torch.zeros(H, 1, 1, 1, 1)
# What one rank's call does otherwise.
OTHERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "number": lambda a: a.update(factor=0.5),
    "operation": lambda a: a.update(score=lambda x, b, h, i, j: x - 2.0),
    "longer": lambda a: a.update(score=lambda x, b, h, i, j: (x * 2.0).abs()),
    "no function": lambda a: a.update(score="dot"),
    "shape": lambda a: a.update(table=torch.zeros(H + 1)),
    "dtype": lambda a: a.update(table=torch.zeros(H, dtype=torch.float64)),
    "requires grad": lambda a: a.update(table=torch.zeros(H, requires_grad=True)),
    "branch": lambda a: a.update(score=lambda x, b, h, i, j: x if h == 0 else -x),
    "returns": lambda a: a.update(mask=lambda b, h, i, j: i),
    "axes": lambda a: a.update(score=lambda x, b, h, i, j: x + OF_FIVE_AXES[h, 0, 0, 0, 0]),
}


def differ(group: dist.ProcessGroup, rank: int, change: str) -> tuple[str, str]:
    """The error that this rank gets if one rank's function differs; afterwards a valid call succeeds."""
    given: dict[str, Any] = {"factor": 2.0, "table": torch.zeros(H), "score": None, "mask": None}
    if group.rank() == rank:
        OTHERS[change](given)
    factor, table = given["factor"], given["table"]
    if given["score"] is None:
        given["score"] = lambda x, b, h, i, j: x * factor + (table[h] if change in ("shape", "dtype", "requires grad") else 0)
    sharding = Sharding.zigzag(S, group.size())
    q, k, v = (sharding.shard(drawn(n, B, H, S, D, dtype=torch.float32), 2, group.rank()) for n in range(3))
    options = {name: given[name] for name in ("score", "mask") if given[name] is not None}
    found = said(lambda: strobe.distributed.attention(q, k, v, sharding=sharding, group=group, method="gather", **options))
    strobe.distributed.attention(q, k, v, sharding=sharding, group=group, score=lambda x, b, h, i, j: x * 2)
    return found


def captured_dtensors(group: dist.ProcessGroup) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """How far results differ from those of plain tensors; and refusals."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (group.size(),))
    q, k, v = (drawn(n, B, H, S, D) for n in range(3))
    plain = drawn(4, B, H).requires_grad_()

    def with_table(table: Tensor) -> Any:
        return lambda x, b, h, i, j: x + table[b, h] * (i - j)

    expected = strobe.attention(q, k, v, score=with_table(plain))
    (grad,) = torch.autograd.grad(expected.square().sum(), plain)
    sharding = Sharding.zigzag(S, group.size())
    own = [sharding.shard(x, 2, group.rank()) for x in (q, k, v)]
    table, split = (distribute_tensor(plain.detach(), mesh, [of]).requires_grad_() for of in (Replicate(), Shard(1)))
    out = strobe.distributed.attention(*own, sharding=sharding, group=group, score=with_table(table))
    out.square().sum().backward()
    differences = {
        "tokens": float((sharding.unshard(out.detach(), 2, group=group) - expected).abs().max()),
        "gradient": float((table.grad.full_tensor() - grad).abs().max()),
    }
    by_heads = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, v)]
    table.grad = None
    for _ in range(3):
        out = strobe.attention(*by_heads, score=with_table(table))
    out.square().sum().backward()
    differences["heads"] = float((out.full_tensor() - expected).abs().max())
    differences["gradient of heads"] = float((table.grad.full_tensor() - grad).abs().max())
    wrong = [
        said(lambda: strobe.distributed.attention(*own, sharding=sharding, group=group, score=with_table(split))),
        said(lambda: strobe.attention(*by_heads, score=with_table(split))),
        said(lambda: strobe.attention(*by_heads, score=with_table(plain))),
    ]
    return differences, wrong


def explained(group: dist.ProcessGroup) -> str:
    case = Case("relative", torch.float32)
    sharding = Sharding.zigzag(S, group.size())
    q, k, v, _ = (sharding.shard(x, 2, group.rank()) for x in tensors(case, torch.float32))
    return strobe.distributed.explain(q, k, v, sharding=sharding, group=group, method="heads", backward=True, **case.options)


def compiled(group: dist.ProcessGroup) -> tuple[float, str]:
    """How far the compiled call differs, whose graph ends at the function; and what fullgraph says."""
    torch._dynamo.reset()
    sharding = Sharding.zigzag(S, group.size())
    q, k, v = (sharding.shard(drawn(n, B, H, S, D, dtype=torch.float32), 2, group.rank()) for n in range(3))
    table = drawn(5, H, dtype=torch.float32)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return strobe.distributed.attention(q * 2, k, v, sharding=sharding, group=group, score=lambda x, b, h, i, j: x * table[h]) + 1

    difference = float((torch.compile(call, backend="eager")(q, k, v) - call(q, k, v)).abs().max())
    torch._dynamo.reset()
    return difference, said(lambda: torch.compile(call, backend="eager", fullgraph=True)(q, k, v))[1]
