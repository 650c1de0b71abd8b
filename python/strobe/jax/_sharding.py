"""How the primitives are divided among devices where JAX shards automatically: over the batch and the heads.

XLA propagates shardings by a rule that names the axes of each operand and result. A device then computes its own sequences and heads, and
the gradients of what several devices read are summed. All other axes are gathered. Inside shard_map the caller has divided the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec

from .._function import FIELDS as FUNCTIONS
from .._graph import decoded
from .._options import GRADIENTS, SCALES, SCORES
from ..arrays.base import Array
from ._program import TANGENTS, Program

# What an axis stands for: sequences, query heads, key heads, or neither.
BATCH, HEADS, HEADS_KV, OTHER = "b", "h", "k", ""

Bind = Callable[[Primitive, Sequence[Array], Program], list[Array]]


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]


def _axes(tensor: Tensor, program: Program, packed: bool) -> list[str]:
    """What the axes of an operand or a result stand for."""
    name, rank = tensor.name, len(tensor.shape)
    bshd = bool(program.option("bshd"))
    of_pages = "page_table" in program.names
    name = TANGENTS.get(name, name)
    source = GRADIENTS.get(name, name)
    heads = HEADS_KV if SCALES.get(source, source) in ("k", "v") else HEADS
    if source in ("q", "k", "v", "out", "dout", *SCALES):
        if rank < 2:
            found = [heads] * rank if tensor.shape != (1,) else [OTHER]
        elif packed and not (of_pages and heads == HEADS_KV):
            found = [OTHER, heads]
        else:
            batch = OTHER if of_pages and heads == HEADS_KV else BATCH
            found = [batch, OTHER, heads] if bshd else [batch, heads]
    elif source in SCORES or name in ("column_sums", "max_logit"):
        found = [BATCH, HEADS]
        if name == "column_sums" and packed:
            found = [HEADS]
    elif name in ("lse", "dlse"):
        found = [HEADS] if packed else [BATCH, HEADS]
    elif source in ("sinks", "alibi_slopes"):
        found = [HEADS] if rank == 1 else [BATCH, HEADS]
    elif name in ("seqused_k", "page_table"):
        found = [BATCH]
    else:
        found = []
    found += [OTHER] * (rank - len(found))
    return [OTHER if size == 1 else axis for axis, size in zip(found, tensor.shape, strict=True)]


def _divisible(program: Program, operands: Sequence[Tensor]) -> set[str]:
    """BATCH and HEADS, as far as nothing in the call depends on the number of a sequence or a head."""
    options, shapes = dict(program.options), {x.name: x.shape for x in operands}
    found = {BATCH, HEADS}
    if options.get("dropout") or "part" in options:
        return set()
    for field in FUNCTIONS.values():
        read = {node[0] for node in decoded(options[field])} if field in options else set()
        found -= {BATCH} if "BATCH" in read else set()
        found -= {HEADS} if "HEAD" in read else set()
    if "block_rows" in shapes:  # the lists of all sequences and heads follow one another
        batch, heads = shapes["block_rows"][:2]
        found -= ({BATCH} if batch > 1 else set()) | ({HEADS} if heads > 1 else set())
    return found


class Division:
    """The axes of a call's operands and results, and how they lie on a mesh."""

    def __init__(self, program: Program, operands: Sequence[Tensor], results: Sequence[Tensor]):
        packed = len(operands[0].shape) == 3
        self.operands = [_axes(x, program, packed) for x in operands]
        self.results = [_axes(x, program, packed) for x in results]
        self._divisible = _divisible(program, operands)
        at = -2 if packed or program.option("bshd") else 1
        self._heads, self._heads_kv = operands[0].shape[at], operands[1].shape[at]

    def rule(self) -> Any:
        """For Shardy: factors in place of axes. Query heads are (key head, member of its group)."""
        group = self._heads // self._heads_kv
        unique: list[str] = []
        sizes: dict[str, int] = {}

        def factor(axis: str) -> Any:
            if axis == BATCH and BATCH in self._divisible:
                return "b"
            if axis in (HEADS, HEADS_KV) and HEADS in self._divisible:
                if axis == HEADS_KV or group == 1:
                    return "h"
                if self._heads_kv == 1:
                    return "g"
                sizes["g"] = group
                return CompoundFactor("h", "g")
            unique.append(f"x{len(unique)}")
            return unique[-1]

        operands, results = (tuple(ArrayMapping(*map(factor, axes)) for axes in of) for of in (self.operands, self.results))
        if "g" in sizes and not any("h" in mapping for mapping in (*operands, *results)):
            sizes["h"] = self._heads_kv
        return SdyShardingRule(operands, results, need_replication_factors=tuple(unique), **sizes)

    def specs(self, mesh: Any, of_q: PartitionSpec) -> tuple[list[PartitionSpec], list[PartitionSpec], tuple[str, ...]]:
        """The shardings of operands and results that follow from q's, and the mesh's axes among which the work is divided."""
        places: dict[str, tuple[str, ...]] = {BATCH: (), HEADS: (), HEADS_KV: ()}
        for axis, names in zip(self.operands[0], (*of_q, None, None, None, None), strict=False):
            if axis in self._divisible:
                places[axis] = names if isinstance(names, tuple) else () if names is None else (names,)
        places[HEADS], places[HEADS_KV] = self._of_heads(mesh, places[HEADS])

        def spec(axes: Sequence[str]) -> PartitionSpec:
            return PartitionSpec(*(places.get(axis) or None for axis in axes))

        return [*map(spec, self.operands)], [*map(spec, self.results)], (*places[BATCH], *places[HEADS])

    def _of_heads(self, mesh: Any, names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The mesh's axes for query heads and for key heads. Devices may share a key head, but each has whole groups of query heads, or
        query heads of one group."""
        group = self._heads // self._heads_kv
        of_kv: tuple[str, ...] = ()
        while len(of_kv) < len(names) and self._heads_kv % _devices(mesh, names[: len(of_kv) + 1]) == 0:
            of_kv = names[: len(of_kv) + 1]
        if _devices(mesh, of_kv) == self._heads_kv and group % _devices(mesh, names[len(of_kv) :]) == 0:
            return names, of_kv
        return of_kv, of_kv


def _devices(mesh: Any, names: Sequence[str]) -> int:
    return prod(mesh.shape[name] for name in names)


def divided(primitive: Primitive, program: Program, bind: Bind, division: Division) -> Callable[..., Any]:
    """The primitive as a function that XLA divides among devices."""

    def whole(*operands: Array) -> tuple[Array, ...]:
        return tuple(bind(primitive, operands, program))

    def shardings(mesh: Any, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[tuple[str, ...]]]:
        spec = getattr(operands[0].sharding, "spec", PartitionSpec())
        of_operands, of_results, names = division.specs(mesh, spec)
        summed = [tuple(name for name in names if name not in _flat(each)) for each in of_results]
        return [NamedSharding(mesh, x) for x in of_operands], [NamedSharding(mesh, x) for x in of_results], summed

    def partition(mesh: Any, operands: Sequence[Any], _results: Any) -> tuple[Any, ...]:
        of_operands, of_results, summed = shardings(mesh, operands)

        def on_device(*own: Array) -> tuple[Array, ...]:
            found = whole(*own)
            return tuple(jax.lax.psum(x, names) if names else x for x, names in zip(found, summed, strict=True))

        return mesh, on_device, tuple(of_results), tuple(of_operands)

    def infer(mesh: Any, operands: Sequence[Any], _results: Any) -> Any:
        return tuple(shardings(mesh, operands)[1])

    made = custom_partitioning(whole)
    made.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=division.rule())
    return made


def _flat(spec: PartitionSpec) -> set[str]:
    return {name for names in spec if names is not None for name in (names if isinstance(names, tuple) else (names,))}


def is_automatic(context: Any) -> bool:
    """Whether a program for several devices is lowered, which XLA will divide."""
    return type(context).__name__ == "ShardingContext" and context.num_devices > 1


def needs_devices(*primitives: Primitive) -> None:
    """Tells JAX that these primitives have to know the devices when they are lowered, as custom_partitioning does. JAX has no public name
    for this."""
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.update(primitives)
