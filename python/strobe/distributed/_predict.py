"""The bytes that a method moves, and the time of a call, by a model of constant rates."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from . import _gather
from ._call import Facts, Plan
from ._ranges import count, union, within
from ._seen import Band


class Rates(NamedTuple):
    """Rates of a rank: multiply-adds per second of calls on parts of a problem and of whole ones, bytes per second, and the latency of a
    collective call."""

    parts: float
    whole: float
    link: float
    start: float
    sms: int = 0  # multiprocessors with which transfers reach the rate of the link


# The GPU's rates were measured on an H200: the bf16 forward of parts and of whole problems by cuda-sm90, and all_gather over NVLink; the
# number of multiprocessors that all_gather takes is a guess. The CPU's rates are those of two cores and gloo on one host.
RATES = {"cuda": Rates(3.1e14, 3.3e14, 3.1e11, 2e-5, 16), "cpu": Rates(1e11, 1e11, 1e9, 3e-4)}
# If one of these is given, method "heads" also makes calls on parts: the library must know the heads' indices in the whole problem.
OF_HEADS = ("dropout", "block_mask of several heads")
_STATISTIC = 4  # bytes of lse or another statistic of a row


@lru_cache(maxsize=256)
def pairs(plan: Plan, rank: int) -> int:
    """The number of keys that the rank's queries see in all, by position."""
    total = 0
    for q0, q1, k0, k1 in zip(plan.cu_q[:-1], plan.cu_q[1:], plan.cu_k[:-1], plan.cu_k[1:], strict=True):
        total += sum(_pairs(start, length, q1 - q0, k1 - k0, plan.band) for start, length in within(plan.q[rank], q0, q1))
    return total


def _pairs(start: int, length: int, seqlen_q: int, seqlen_k: int, band: Band) -> int:
    """How many keys consecutive queries see in all: a sum of two functions that are linear except at their ends."""

    def below(first: int, n: int, most: int) -> int:
        """The sum of min(max(x, 0), most) over x = first ... first + n - 1."""

        def upto(x: int) -> int:  # the sum over 1 ... x
            x = max(x, 0)
            rising = min(x, most)
            return rising * (rising + 1) // 2 + (x - rising) * most

        return upto(first + n - 1) - upto(first - 1)

    offset = band.offset(seqlen_q, seqlen_k)
    high = length * seqlen_k if band.right is None else below(start + offset + band.right + 1, length, seqlen_k)
    low = 0 if band.left is None else below(start + offset - band.left, length, seqlen_k)
    return max(high - low, 0)


class Moved(NamedTuple):
    """Bytes that the busiest rank receives, and the number of collective calls. In a backward, gradients that go back count once more."""

    forward: int
    backward: int
    calls: int
    calls_of_backward: int


def moved(method: str, of: Facts) -> Moved:
    """The bytes that a method moves, without those that a rank sends to itself."""
    plan, world, batch, (d, dv) = of.plan, of.plan.world, of.batch, of.columns
    size, sum_bytes = of.itemsize, max(of.itemsize, 4)
    tokens_q, tokens_k = [count(x) for x in plan.q], [count(x) for x in plan.k]
    key = batch * of.heads_kv * (d + dv)
    if method == "gather":
        routes = [_gather.route(plan, r) for r in range(world)]
        got = [sum(route.of) - route.of[r] for r, route in enumerate(routes)]
        returned = [sum(route.to) - route.to[r] for r, route in enumerate(routes)]
        both = max(a * size + b * sum_bytes for a, b in zip(got, returned, strict=True))
        turns = (len(_gather.groups(plan, batch, of.heads_kv, of.columns, each, of.device)) for each in (size, size + sum_bytes))
        return Moved(max(got) * key * size, both * key, *turns)
    if method == "levels":
        return _moved_by_levels(of)
    if method == "ring":
        most = (sum(tokens_k) - min(tokens_k)) if world > 1 else 0
        home = sum(tokens_k) if world > 1 else 0
        return Moved(most * key * size, most * key * size + home * key * sum_bytes, world - 1, world - 1)
    other_q, other_k = sum(tokens_q) - min(tokens_q), sum(tokens_k) - min(tokens_k)
    of_heads, own = of.heads // world, max(tokens_q)
    there = other_q * batch * of_heads * d + other_k * key // world
    out = own * batch * (of.heads - of_heads)
    back = own * batch * (of.heads - of_heads) * d + max(tokens_k) * key * (world - 1) // world
    return Moved(
        there * size + out * (dv * size + _STATISTIC),
        other_q * batch * of_heads * (dv * size + _STATISTIC) + back * size,
        5,
        5,
    )


def _moved_by_levels(of: Facts) -> Moved:
    """All ranks exchange heads as in a world of one node, and gather a node's share of heads from all others."""
    size, plan = max(of.inside, 1), of.plan
    nodes = [range(at, at + size) for at in range(0, plan.world, size)]
    sides = [tuple(union(each for r in node for each in side[r]) for node in nodes) for side in (plan.q, plan.k)]
    across = moved("gather", of._replace(plan=replace(plan, q=sides[0], k=sides[1]), heads=of.heads // size, heads_kv=of.heads_kv // size))
    inside = [moved("heads", of._replace(plan=_of_members(plan, node))) for node in nodes]
    return Moved(
        max(each.forward for each in inside) + across.forward,
        max(each.backward for each in inside) + across.backward,
        inside[0].calls + across.calls,
        inside[0].calls_of_backward + across.calls_of_backward,
    )


def _of_members(plan: Plan, members: range) -> Plan:
    return replace(plan, q=plan.q[members.start : members.stop], k=plan.k[members.start : members.stop])


class Seconds(NamedTuple):
    """The seconds of the slowest rank: of compute, of transfers, and of both together as the method overlaps them."""

    compute: float
    transfer: float
    both: float


def predicted(method: str, of: Facts, backward: bool = False) -> Seconds:
    plan, world = of.plan, of.plan.world
    rates = RATES.get(of.device, RATES["cpu"])
    shares = [pairs(plan, r) for r in range(world)]
    size = world if method == "heads" else max(of.inside, 1) if method == "levels" else 1
    busiest = max(sum(shares[at : at + size]) for at in range(0, world, size)) / size
    products = busiest * of.batch * of.heads * sum(of.columns) * (2.5 if backward else 1)
    is_whole = method == "heads" and not any(name in of.given for name in OF_HEADS)
    compute = products / (rates.whole if is_whole else rates.parts)
    bytes_, start = moved(method, of), rates.start if world > 1 else 0.0
    moved_bytes, calls = (bytes_.backward, bytes_.calls_of_backward) if backward else (bytes_.forward, bytes_.calls)
    transfer = moved_bytes / rates.link + start * calls * (2 if backward else 1)
    if method in ("heads", "levels"):
        return Seconds(compute, transfer, compute + transfer)
    # The first of several transfers is waited for; the others overlap with the products.
    first = transfer / max(calls, 1)
    if method == "ring":  # in each turn all wait for the rank with the most to compute
        return Seconds(compute, transfer, max(compute, transfer) + min(compute, transfer) / max(world, 1))
    return Seconds(compute, transfer, max(compute, transfer - first) + first)


@lru_cache(maxsize=256)
def sms_for_transfers(method: str, of: Facts, backward: bool = False) -> int:
    """How many multiprocessors a call leaves to the concurrent transfer: the fewest with which the transfer ends before the call, if its
    rate grows with their number. A kernel on all of them would delay the transfer until it ends."""
    rates = RATES.get(of.device, RATES["cpu"])
    if of.plan.world == 1 or not rates.sms:
        return 0
    took = predicted(method, of, backward)
    if not took.transfer or not took.compute:
        return 0
    return min(max(math.ceil(rates.sms * took.transfer / took.compute), 1), rates.sms)


def seconds(method: str, of: Facts) -> float:
    """The time of forward and backward."""
    return predicted(method, of).both + predicted(method, of, backward=True).both
