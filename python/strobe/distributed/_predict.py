"""How many bytes a method moves, and how long a call takes, by a model of constant rates."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from . import _gather
from ._call import Facts, Plan
from ._ranges import count, within
from ._seen import Band


class Rates(NamedTuple):
    """Of a rank: multiply-adds a second of calls on parts of a problem and of whole ones, bytes a second, and what a collective call takes
    before the first byte."""

    parts: float
    whole: float
    link: float
    start: float


# A GPU's are those of an H200: bf16 forward, parts by cuda-mma and whole problems by cuda-sm90, which refuses parts, and all_gather over
# NVLink as it was measured. A CPU's are two cores and gloo on one host.
RATES = {"cuda": Rates(1.8e14, 3.3e14, 3.1e11, 2e-5), "cpu": Rates(1e11, 1e11, 1e9, 3e-4)}
# With which method "heads" too makes calls on parts: the library has to know which heads they are.
OF_HEADS = ("dropout", "block_mask of several heads")
_STATISTIC = 4  # bytes


@lru_cache(maxsize=256)
def pairs(plan: Plan, rank: int) -> int:
    """How many keys the rank's queries see in all, by positions."""
    total = 0
    for q0, q1, k0, k1 in zip(plan.cu_q[:-1], plan.cu_q[1:], plan.cu_k[:-1], plan.cu_k[1:], strict=True):
        total += sum(_pairs(start, length, q1 - q0, k1 - k0, plan.band) for start, length in within(plan.q[rank], q0, q1))
    return total


def _pairs(start: int, length: int, seqlen_q: int, seqlen_k: int, band: Band) -> int:
    """Of consecutive queries: a sum of two functions that are linear but for their ends."""

    def below(first: int, n: int, most: int) -> int:
        """The sum of min(max(x, 0), most) over x = first ... first + n - 1."""

        def upto(x: int) -> int:  # of 1 ... x
            x = max(x, 0)
            rising = min(x, most)
            return rising * (rising + 1) // 2 + (x - rising) * most

        return upto(first + n - 1) - upto(first - 1)

    offset = band.offset(seqlen_q, seqlen_k)
    high = length * seqlen_k if band.right is None else below(start + offset + band.right + 1, length, seqlen_k)
    low = 0 if band.left is None else below(start + offset - band.left, length, seqlen_k)
    return max(high - low, 0)


class Moved(NamedTuple):
    """Bytes that the busiest rank receives, and in how many collective calls."""

    forward: int
    backward: int
    calls: int


def moved(method: str, of: Facts) -> Moved:
    """Without what a rank sends to itself."""
    plan, world, batch, (d, dv) = of.plan, of.plan.world, of.batch, of.columns
    size, wide = of.itemsize, max(of.itemsize, 4)
    tokens_q, tokens_k = [count(x) for x in plan.q], [count(x) for x in plan.k]
    key = batch * of.heads_kv * (d + dv)
    if method == "gather":
        routes = [_gather.route(plan, r) for r in range(world)]
        got = [sum(route.of) - route.of[r] for r, route in enumerate(routes)]
        returned = [sum(route.to) - route.to[r] for r, route in enumerate(routes)]
        both = max(a * size + b * wide for a, b in zip(got, returned, strict=True))
        return Moved(max(got) * key * size, both * key, len(_gather.groups(plan, batch, of.heads_kv, of.columns, size)))
    if method == "ring":
        most = (sum(tokens_k) - min(tokens_k)) if world > 1 else 0
        home = sum(tokens_k) if world > 1 else 0
        return Moved(most * key * size, most * key * size + home * key * wide, world - 1)
    other_q, other_k = sum(tokens_q) - min(tokens_q), sum(tokens_k) - min(tokens_k)
    of_heads, own = of.heads // world, max(tokens_q)
    there = other_q * batch * of_heads * d + other_k * key // world
    out = own * batch * (of.heads - of_heads)
    back = own * batch * (of.heads - of_heads) * d + max(tokens_k) * key * (world - 1) // world
    return Moved(
        there * size + out * (dv * size + _STATISTIC),
        other_q * batch * of_heads * (dv * size + _STATISTIC) + back * size,
        5,
    )


class Seconds(NamedTuple):
    """Of the slowest rank: compute, transfers, and both as the method has them beside each other."""

    compute: float
    transfer: float
    both: float


def predicted(method: str, of: Facts, backward: bool = False) -> Seconds:
    plan, world = of.plan, of.plan.world
    rates = RATES.get(of.device, RATES["cpu"])
    shares = [pairs(plan, r) for r in range(world)]
    busiest = sum(shares) / world if method == "heads" else max(shares)
    products = busiest * of.batch * of.heads * sum(of.columns) * (2.5 if backward else 1)
    is_whole = method == "heads" and not any(name in of.given for name in OF_HEADS)
    compute = products / (rates.whole if is_whole else rates.parts)
    bytes_, start = moved(method, of), rates.start if world > 1 else 0.0
    transfer = (bytes_.backward if backward else bytes_.forward) / rates.link + start * bytes_.calls * (2 if backward else 1)
    if method == "heads":
        return Seconds(compute, transfer, compute + transfer)
    # The first of several transfers is waited for, the others run beside the products.
    first = transfer / max(bytes_.calls, 1)
    if method == "ring":  # in each turn all wait for the rank that has most to compute
        return Seconds(compute, transfer, max(compute, transfer) + min(compute, transfer) / max(world, 1))
    return Seconds(compute, transfer, max(compute, transfer - first) + first)


def seconds(method: str, of: Facts) -> float:
    """Forward and backward."""
    return predicted(method, of).both + predicted(method, of, backward=True).both
