"""Method "gather": each rank gets the keys that some of its queries see, a group of key heads at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .._call import Call
from ._call import Plan, RankCall, Results, backward_added, forward_into, order_of, rows_for
from ._exchange import Underway, begin, room
from ._ranges import Ranges, common, count, places

_GROUPS = 4  # groups of key heads at most: while one is computed, the next one is in flight
# The least bytes that a rank receives, and in the backward sends back, for a group of key heads. With fewer, the host's cost of a further
# group (0.3 ms on a GPU's host) would exceed the time saved by the shorter first transfer.
LEAST_BYTES = {"cuda": 2**26, "cpu": 2**21}
_MOST_PIECES = 8  # up to this many runs of rows are copied one by one; more are gathered by index, which reads and writes rows twice


class Route(NamedTuple):
    """The rows of keys that a rank sends to each rank, and those that it gets."""

    sent: tuple[Ranges, ...]  # positions of the rows that are sent to each rank
    got: tuple[Ranges, ...]  # positions of the rows that come from each rank
    seen: Ranges
    to: list[int]  # how many rows are sent to each rank
    of: list[int]  # how many rows are got from each rank


@lru_cache(maxsize=256)
def route(plan: Plan, rank: int) -> Route:
    seen = [plan.seen(r) for r in range(plan.world)]
    sent = tuple(common(of, plan.k[rank]) for of in seen)
    got = tuple(common(seen[rank], k) for k in plan.k)
    return Route(sent, got, seen[rank], [*map(count, sent)], [*map(count, got)])


@lru_cache(maxsize=256)
def received(plan: Plan) -> int:
    """The largest number of keys that a rank gets from others."""
    return max(sum(route(plan, r).of) - route(plan, r).of[r] for r in range(plan.world))


def groups(plan: Plan, batch: int, heads_kv: int, columns: tuple[int, int], bytes_each: int, device: str) -> list[range]:
    """Groups of key heads, in their order; the same on all ranks. bytes_each: the bytes moved for each number
    of K and V, in both directions together."""
    whole = received(plan) * batch * heads_kv * sum(columns) * bytes_each
    n = max(min(heads_kv, _GROUPS, whole // LEAST_BYTES.get(device, LEAST_BYTES["cpu"])), 1)
    return [range(heads_kv * i // n, heads_kv * (i + 1) // n) for i in range(n)]


@lru_cache(maxsize=256)
def pieces_sent(plan: Plan, rank: int) -> Ranges:
    """The rank's rows for rank 0, rank 1 and so on, as ranges of its own tokens, one after the other."""
    return tuple(piece for of in route(plan, rank).sent for piece in places(of, plan.k[rank]))


class Keys:
    """The keys and values of one group of key heads after another; the next group is in flight while one is used."""

    def __init__(self, call: RankCall, of_gradients: int = 0):
        """of_gradients: bytes per number of the gradients that go back."""
        self.call = call
        self.route = route(call.plan, call.rank)
        self.columns = call.k.shape[-1], call.v.shape[-1]
        batch = 1 if call.plan.packed else call.k.shape[0]
        moved = call.k.element_size() + of_gradients
        self.groups = groups(call.plan, batch, call.heads_kv, self.columns, moved, call.device.type)
        self.pieces = pieces_sent(call.plan, call.rank)
        picks = len(self.pieces) > _MOST_PIECES
        self.rows_sent = rows_for(self.route.sent, call.plan.k[call.rank], call.device) if picks else None
        self.order = order_of(self.route.got, call.device)
        k = call.rows(call.k)
        largest = max(len(heads) for heads in self.groups)
        shape = (*k.shape[1:-2], largest, sum(self.columns))
        sent, got = sum(self.route.to), sum(self.route.of)
        turns = min(2, len(self.groups))
        self.memory = [(call.new((sent, *shape), k.dtype), call.new((got, *shape), k.dtype)) for _ in range(turns)]
        self.ordered = None if self.order is None else call.new((got, *shape), k.dtype)

    def _of(self, memory: Tensor, heads: range) -> Tensor:
        """The beginning of the memory as rows of these heads, without gaps."""
        if len(heads) == memory.shape[-2]:
            return memory
        shape = (*memory.shape[:-2], len(heads), memory.shape[-1])
        return memory.reshape(-1)[: torch.Size(shape).numel()].view(shape)

    def example(self) -> tuple[Tensor, Tensor]:
        """k and v of the first group, without values."""
        return self._split(self._of(self.memory[0][1], self.groups[0]))

    def pack(self, number: int) -> None:
        """Copies a group's rows into the send buffer."""
        heads = self.groups[number]
        sent = self._of(self.memory[number % 2][0], heads)
        for x, at, width in ((self.call.k, 0, self.columns[0]), (self.call.v, self.columns[0], self.columns[1])):
            rows, to = self.call.rows(self.call.of_heads(x, heads)), sent.narrow(-1, at, width)
            if self.rows_sent is not None:
                to.copy_(rows.index_select(0, self.rows_sent))
                continue
            for piece, (start, n) in zip(to.split([n for _, n in self.pieces]), self.pieces, strict=True):
                piece.copy_(rows.narrow(0, start, n))

    def send(self, number: int) -> Underway:
        sent, got = (self._of(memory, self.groups[number]) for memory in self.memory[number % 2])
        return begin(self.call.waits, "gathering keys", sent, self.route.to, got, self.route.of)

    def __iter__(self) -> Iterator[tuple[range, Tensor, Tensor]]:
        """Yields the groups; the first one is already packed."""
        under = self.send(0)
        for number, heads in enumerate(self.groups):
            arrived = under.wait()
            if number + 1 < len(self.groups):
                self.pack(number + 1)
                under = self.send(number + 1)
            yield heads, *self.split(arrived, heads)

    def split(self, arrived: Tensor, heads: range) -> tuple[Tensor, Tensor]:
        if self.order is None or self.ordered is None:
            return self._split(arrived)
        return self._split(torch.index_select(arrived, 0, self.order.there, out=self._of(self.ordered, heads)))

    def _split(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        k, v = kv.split(self.columns, -1)
        return self.call.tokens(k), self.call.tokens(v)

    def local(self, k: Tensor, v: Tensor, heads_kv: range, beside_transfer: bool) -> tuple[Call, range]:
        heads = self.call.query_heads(heads_kv)
        q = self.call.of_heads(self.call.q, heads)
        of = self.call.plan.q[self.call.rank], self.route.seen
        return self.call.local(q, k, v, heads, of, beside_transfer=beside_transfer), heads


class Forward:
    def __init__(self, call: RankCall):
        self.call, self.keys = call, Keys(call)
        self.made = call.results()

    def example(self) -> Call:
        return self.keys.local(*self.keys.example(), self.keys.groups[0], len(self.keys.groups) > 1)[0]

    def prepare(self) -> None:
        self.keys.pack(0)

    def run(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        call, keys, (out, lse) = self.call, self.keys, self.made.values()
        for heads_kv, k, v in keys:
            local, heads = keys.local(k, v, heads_kv, beside_transfer=heads_kv != keys.groups[-1])
            forward_into(local, call.of_heads(out, heads), call.statistic_of_heads(lse, heads))
        return out, lse, []


class Backward:
    """Gradients of keys go back in float32 and are added up, in the order of the ranks, on the rank that has their keys."""

    def __init__(self, call: RankCall, given: Results, saved: list[Tensor]):
        self.call, self.given = call, given
        self.to_keys = [name for name in "kv" if name in call.needs]
        self.keys = Keys(call, call.sum_dtype.itemsize if self.to_keys else 0)
        self.dq = call.new(call.q.shape, call.sum_dtype).zero_() if "q" in call.needs else None
        self.home = {name: call.new(call.of_caller.arrays[name].shape, call.sum_dtype).zero_() for name in self.to_keys}
        got = self.keys.memory[0][1]
        # A group's gradients are in flight while those of the next one are added up.
        there, here = (len(got), sum(self.keys.route.to)) if self.to_keys else (0, 0)
        self.sums = [room(got, there, call.sum_dtype) for _ in self.keys.memory]
        self.back = room(got, here, call.sum_dtype)
        self.dbias = call.room_for_bias()
        self.dsinks = torch.zeros_like(call.of_caller.arrays["sinks"]) if "sinks" in call.needs else None
        self.dcaptured = call.room_for_captured()

    def example(self) -> Call:
        return self.keys.local(*self.keys.example(), self.keys.groups[0], len(self.keys.groups) > 1)[0]

    def prepare(self) -> None:
        self.keys.pack(0)

    def run(self) -> Results:
        call, keys = self.call, self.keys
        under: tuple[Underway, range] | None = None
        for number, (heads_kv, k, v) in enumerate(keys):
            local, heads = keys.local(k, v, heads_kv, beside_transfer=len(keys.groups) > 1)
            into: Results = {}
            if self.dq is not None:
                into["dq"] = call.of_heads(self.dq, heads)
            if self.to_keys:
                sums = keys._of(self.sums[number % 2], heads_kv).zero_()
                into |= {f"d{name}": x for name, x in zip("kv", keys._split(sums), strict=True) if name in call.needs}
            self._add(local, heads, into)
            if self.to_keys:
                if under is not None:
                    self._arrive(*under)
                under = self._begin_home(sums, heads_kv), heads_kv
        if under is not None:
            self._arrive(*under)
        found = {"dq": self.dq} | {f"d{name}": x for name, x in self.home.items()} | {"dbias": self.dbias, "dsinks": self.dsinks}
        found |= self.dcaptured
        return {name: x for name, x in found.items() if x is not None}

    def _add(self, local: Call, heads: range, into: Results) -> None:
        call = self.call
        known = {name: call.of_heads(self.given[name], heads) for name in ("dout", "out")}
        known |= {name: call.statistic_of_heads(self.given[name], heads) for name in ("lse", "dlse") if name in self.given}
        if self.dbias is not None and call.sum_dtype != local.arrays["bias"].dtype and local.arrays["bias"].shape[1] == 1:
            local.arrays["bias"] = local.arrays["bias"].to(call.sum_dtype)  # several gradients of it are added up
        wanted = [*into, *(name for name, x in (("dbias", self.dbias), ("dsinks", self.dsinks)) if x is not None), *self.dcaptured]
        found = backward_added(local, known, wanted, into) if wanted else {}
        if self.dbias is not None:
            self.call.scores_of_heads(self.dbias, heads).add_(found["dbias"])
        if self.dsinks is not None:
            self.dsinks[heads.start : heads.stop] = found["dsinks"]
        for name, x in self.dcaptured.items():
            x.add_(found[name])

    def _begin_home(self, sums: Tensor, heads_kv: range) -> Underway:
        """Sends the rows of a group's gradients to the ranks that have their keys."""
        route = self.keys.route
        if self.keys.order is not None:
            sums = sums.index_select(0, self.keys.order.back)
        return begin(self.call.waits, "gradients of keys", sums, route.of, self.keys._of(self.back, heads_kv), route.to)

    def _arrive(self, under: Underway, heads_kv: range) -> None:
        call, route = self.call, self.keys.route
        at_home = [rows_for((of,), call.plan.k[call.rank], call.device) for of in route.sent]
        for name, x in zip("kv", under.wait().split(self.keys.columns, -1), strict=True):
            if name in self.home:
                home = call.rows(call.of_heads(self.home[name], heads_kv))
                for at, rows in zip(at_home, x.split(route.to), strict=True):
                    home.index_add_(0, at, rows)
