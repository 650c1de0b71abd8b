"""Cases for strobe.distributed.attention(): the contract's options with ranks, shardings and methods; and how a rank runs a case."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cases
import strobe
from cases import Inputs
from check import Results
from strobe.distributed import Sharding, _gather

FACTORS: dict[str, list[Any]] = {
    "how": [*((w, method) for w in (2, 3, 4, 1) for method in ("gather", "heads", "ring")), (2, None), (4, "levels")],
    "sharding": ["zigzag", "contiguous", "balanced", "blocks", "a rank has none", "one rank has all"],
    "dtype": ["float32", "float64", "float16", "bfloat16"],
    "dims": [(64, 64), (16, 24), (7, 5), (33, 65)],
    "lengths": [(64, 64), (1, 1), (3, 3), (31, 31), (257, 257), (17, 129), (129, 64), (2, 40)],
    "batch": [2, 1],
    "heads": [(4, 4), (12, 12), (6, 1), (8, 4), (6, 3), (4, 2)],
    "varlen": [None, "lengths", "zero lengths"],
    "used": [None, "some"],
    "storage": ["bhsd", "bshd", "transposed", "sliced"],
    "dout": ["contiguous", "expanded"],
    "band": ["full", "causal", "window 8,0", "window 16,16", "window None,5", "causal window 33,20"],
    "alignment": ["bottom_right", "top_left"],
    "scale": [None, 0.1],
    "softcap": [0.0, 3.0],
    "score": ["dot", "hyperbolic 1,0"],
    "alibi": [None, "H", "BH"],
    "bias": [None, "BHQK", "1HQK", "B1QK", "B11K", "11QK", "1HQ1", "1111"],
    "bias kind": [None, "gradient", "fixed", "float32", "-inf"],
    "mask": [None, "BHQK", "B11K", "11QK", "1HQ1", "all but nothing"],
    "sinks": [None, "gradient", "fixed"],
    "dropout": [0.0, 0.1, "rng"],
    "blocks": [None, (16, 16, "11"), (32, 64, "BH"), (64, 32, "11")],
    "lse": ["none", "returned", "gradient"],
    "flag": [None, "deterministic", "exact_max", "invariant", "check"],
}
# The other options of the contract have their plain values.
PLAIN = {name: values[0] for name, values in cases.FACTORS.items() if name not in FACTORS}


def valid(case: dict[str, Any]) -> bool:
    """Whether the values in `case` are allowed in one call. The case may lack options. Every rule is about two options."""
    world, method = case.get("how", (1, "heads"))
    beside = {name: case[name] for name in ("used", "flag") if case.get(name) in ("some", "invariant")}
    heads = case.get("heads")
    rules = [
        not (heads and method == "heads" and heads[1] % world),
        not (heads and method == "levels" and heads[1] % node_of(world)),
        # `beside` needs method "heads", and excludes dropout and a block mask of several heads
        not (beside and "how" in case and method != "heads"),
        not (beside and (case.get("dropout") or (case.get("blocks") or " ")[-1].endswith("H"))),
        not (case.get("storage") in ("transposed", "sliced") and case.get("sharding") in ("zigzag", "balanced")),  # these shardings copy
    ]
    return all(rules) and cases._valid(case)


def every_pair() -> list[dict[str, Any]]:
    """Cases that hold every pair of values at least once. Method "heads" refuses a mask or bias if a rank has one query: another method
    takes such a case, and "heads" gets it once with other lengths, and once without mask and bias."""
    found = []
    for case in cases.combinations(2, FACTORS, valid):
        (world, method), inputs = case["how"], build(case)
        scores = case["mask"] or case["bias"]
        if method in ("heads", "levels") and world > 1 and scores and 1 in _most_rows(inputs, shardings(case, inputs)[0]):
            # Several lengths, because those of packed sequences are drawn.
            longer = [case | {"lengths": n, "sharding": "contiguous"} for n in ((64, 64), (129, 64), (257, 257))]
            plain = next(x for x in longer if 1 not in _most_rows(build(x), shardings(x, build(x))[0]))
            found += [plain, case | {"mask": None, "bias": None, "bias kind": None}]
            case = case | {"how": (1, "heads") if case["used"] or case["flag"] == "invariant" else (world, "ring")}
        found.append(case)
    return found


def node_of(world: int) -> int:
    """How many ranks share a node."""
    return 1 if world % 2 else 2


@functools.cache
def mesh_of(world: int, device: str) -> dist.device_mesh.DeviceMesh:
    """The mesh (nodes, ranks of a node) of all processes."""
    return dist.device_mesh.init_device_mesh(device, (world // node_of(world), node_of(world)))


def _most_rows(inputs: Inputs, sharding: Sharding) -> set[int]:
    shards = [Shard(inputs, (sharding, sharding), rank) for rank in range(sharding.world_size)]
    return {max(map(len, shard.rows()), default=0) for shard in shards}


def build(case: dict[str, Any]) -> Inputs:
    return cases.build(PLAIN | {name: x for name, x in case.items() if name not in ("how", "sharding")})


def shardings(case: dict[str, Any], inputs: Inputs) -> tuple[Sharding, Sharding]:
    """The shardings of the queries and of the keys: the same if their numbers are equal."""
    world = case["how"][0]
    axis = 0 if inputs.varlen else 1 if inputs.options.get("layout") == "bshd" else 2
    found = []
    for side, x in (("q", inputs.q), ("k", inputs.k)):
        cu = inputs.options[f"cu_seqlens_{side}"].tolist() if inputs.varlen else None
        found.append(drawn_sharding(case["sharding"], x.shape[axis], world, cu, side))
    return found[0], found[0] if found[0].seqlen == found[1].seqlen else found[1]


def drawn_sharding(kind: str, seqlen: int, world: int, cu: list[int] | None = None, side: str = "q") -> Sharding:
    if kind in ("zigzag", "contiguous"):
        return getattr(Sharding, kind)(seqlen, world)
    if kind == "balanced":
        return Sharding.balanced(seqlen, world, cu_seqlens=cu)
    if kind == "one rank has all":
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(world)]
        ranges[-1 if side == "q" else 0] = [(0, seqlen)]
        return Sharding(seqlen, tuple(map(tuple, ranges)))
    rng = random.Random(f"{kind} {seqlen} {world} {side}")
    ranges = [[] for _ in range(world)]
    owners = range(1, world) if kind == "a rank has none" and world > 1 else range(world)
    at = 0
    while at < seqlen:
        n = min(rng.choice([1, 5, 16, 23]), seqlen - at)
        ranges[rng.choice(owners)].append((at, n))
        at += n
    return Sharding(seqlen, tuple(map(tuple, ranges)))


@dataclasses.dataclass
class Shard:
    """A rank's rows of a call."""

    inputs: Inputs
    shardings: tuple[Sharding, Sharding]
    rank: int

    def tokens(self, x: Tensor, side: int, axis: int | None = None) -> Tensor:
        i = self.inputs
        axis = (0 if i.varlen else 1 if i.options.get("layout") == "bshd" else 2) if axis is None else axis
        return self.shardings[side].shard(x, axis, self.rank)

    def rows(self) -> list[Tensor]:
        """The positions of this rank's queries in each sequence (dense tensors: one list for all)."""
        positions = self.shardings[0].positions(self.rank)
        if not self.inputs.varlen:
            return [positions]
        cu = self.inputs.options["cu_seqlens_q"].tolist()
        return [positions[(positions >= a) & (positions < b)] - a for a, b in itertools.pairwise(cu)]

    def scores(self, x: Tensor) -> Tensor:
        """x (mask or bias) for the rank's queries and all keys."""
        if x.shape[2] == 1:
            return x
        rows = self.rows()
        if not self.inputs.varlen:
            return x[:, :, rows[0]]
        most = max(map(len, rows), default=0)
        own = [x[b if x.shape[0] > 1 else 0] for b in range(len(rows))]
        return torch.stack(
            [torch.cat([t[:, at], t.new_zeros(t.shape[0], most - len(at), t.shape[2])], 1) for t, at in zip(own, rows, strict=True)]
        )

    def add_scores(self, to: Tensor, gradient: Tensor) -> None:
        """Adds the rank's dbias to the whole call's."""
        if to.shape[2] == 1:
            to += gradient
            return
        rows = self.rows()
        if not self.inputs.varlen:
            to[:, :, rows[0]] += gradient
            return
        for b, at in enumerate(rows):
            to[b if to.shape[0] > 1 else 0][:, at] += gradient[b][:, : len(at)]

    def local(self) -> Inputs:
        i = self.inputs
        q, dout = (self.tokens(t, 0) for t in (i.q, i.dout))
        k, v = (self.tokens(t, 1) for t in (i.k, i.v))
        dlse = None if i.dlse is None else self.tokens(i.dlse, 0, i.dlse.dim() - 1)
        options = dict(i.options)
        for name in ("mask", "bias"):
            if name in options:
                options[name] = self.scores(options[name])
        return dataclasses.replace(i, q=q, k=k, v=v, dout=dout, dlse=dlse, options=options)


def run_on_rank(group: dist.ProcessGroup, case: dict[str, Any], device: str = "cpu") -> Results:
    """A rank's results of the case: its rows, and its shares of dbias and dsinks."""
    before = _gather.LEAST_BYTES
    if len(repr(case)) % 2:
        _gather.LEAST_BYTES = dict.fromkeys(before, 1)  # key heads are exchanged in several groups even if they are small
    try:
        return _run_on_rank(group, case, device)
    finally:
        _gather.LEAST_BYTES = before


def _run_on_rank(group: dist.ProcessGroup, case: dict[str, Any], device: str) -> Results:
    inputs = build(case)
    sharding_q, sharding_k = shardings(case, inputs)
    shard = Shard(inputs, (sharding_q, sharding_k), group.rank()).local()

    def leaf(t: Tensor) -> Tensor:
        return t.detach().to(device).requires_grad_()

    q, k, v = (leaf(t) for t in (shard.q, shard.k, shard.v))
    options = {name: x.to(device) if isinstance(x, (Tensor, strobe.BlockMask)) else x for name, x in shard.options.items()} | inputs.run
    options |= {name: leaf(options[name]) for name in inputs.gradients}
    leaves = {"dq": q, "dk": k, "dv": v} | {f"d{name}": options[name] for name in inputs.gradients}
    found = strobe.distributed.attention(
        q,
        k,
        v,
        sharding=sharding_q,
        sharding_k=sharding_k,
        **({"mesh": mesh_of(group.size(), device)} if case["how"][1] == "levels" else {"group": group}),
        method=case["how"][1],
        return_lse=inputs.lse,
        **options,
    )
    out, lse = found if inputs.lse else (found, None)
    outputs, gradients = [out], [shard.dout.to(device)]
    if shard.dlse is not None:
        outputs, gradients = [out, lse], [*gradients, shard.dlse.to(device)]
    made = torch.autograd.grad(outputs, list(leaves.values()), gradients)
    results = {"out": out.detach()} | dict(zip(leaves, made, strict=True)) | ({} if lse is None else {"lse": lse.detach()})
    return {name: t.cpu() for name, t in results.items()}


def joined(case: dict[str, Any], inputs: Inputs, of_ranks: list[Results]) -> Results:
    """The whole call's results. Shares of ranks are added up."""
    both = shardings(case, inputs)
    axis = 0 if inputs.varlen else 1 if inputs.options.get("layout") == "bshd" else 2
    found: Results = {}
    for name in of_ranks[0]:
        each = [results[name] for results in of_ranks]
        if name in ("out", "dq", "dk", "dv"):
            found[name] = both[name in ("dk", "dv")].join(each, axis)
        elif name == "lse":
            found[name] = both[0].join(each, each[0].dim() - 1)
        elif name == "dsinks":
            found[name] = sum(x.double() for x in each).to(each[0].dtype)
        else:
            whole = torch.zeros(inputs.options["bias"].shape, dtype=torch.float64)
            for rank, x in enumerate(each):
                Shard(inputs, both, rank).add_scores(whole, x.double())
            found[name] = whole.to(each[0].dtype)
    return found
