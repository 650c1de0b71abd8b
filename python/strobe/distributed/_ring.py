"""Method "ring": keys go round; each rank has the keys of one rank at a time, and merges its results over them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .. import _prepared
from .._call import Call
from .._merge import merge
from ._call import Plan, RankCall, Results, backward_added
from ._exchange import Underway, begin
from ._ranges import common, count
from ._sharding import rows_of_sequences


class Round:
    """Tensors that go from rank to rank, one per rank: rows of one shape, as many as their first owner has keys."""

    def __init__(self, call: RankCall, row: tuple[int, ...], dtype: torch.dtype, what: str):
        self.call, self.what = call, what
        self.counts = [count(of) for of in call.plan.k]
        self.room = [call.new((max(self.counts), *row), dtype) for _ in range(2)]

    def owner(self, turn: int) -> int:
        return (self.call.rank - turn) % len(self.counts)

    def memory(self, turn: int) -> Tensor:
        """The memory that holds the rows in this turn."""
        return self.room[turn % 2][: self.counts[self.owner(turn)]]

    def begin(self, turn: int) -> Underway:
        """Sends the rows of this turn to the next rank."""
        world = len(self.counts)
        to, of = [0] * world, [0] * world
        to[(self.call.rank + 1) % world] = self.counts[self.owner(turn)]
        of[(self.call.rank - 1) % world] = self.counts[self.owner(turn + 1)]
        return begin(self.call.waits, self.what, self.memory(turn), to, self.memory(turn + 1), of)


@lru_cache(maxsize=1024)
def sees(plan: Plan, rank: int, owner: int) -> bool:
    """Whether some query of the rank sees a key of `owner`."""
    return bool(common(plan.seen(rank), plan.k[owner]))


class Ring:
    """The turns of a call. In each turn this rank has the keys of one rank, and calls the library if some of them are visible."""

    def __init__(self, call: RankCall):
        self.call = call
        k = call.rows(call.k)
        self.columns = call.k.shape[-1], call.v.shape[-1]
        self.row = (*k.shape[1:-1], sum(self.columns))
        self.keys = Round(call, self.row, call.k.dtype, "keys going round")
        self.all_heads = range(call.heads)

    @property
    def turns(self) -> range:
        return range(self.call.plan.world)

    def fill(self) -> None:
        call = self.call
        torch.cat([call.rows(call.k), call.rows(call.v)], -1, out=self.keys.memory(0))

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        k, v = rows.split(self.columns, -1)
        return self.call.tokens(k), self.call.tokens(v)

    def is_seen(self, turn: int) -> bool:
        return sees(self.call.plan, self.call.rank, self.keys.owner(turn))

    def local(self, turn: int, beside_transfer: bool) -> Call:
        """The call on all keys of the rank whose turn it is."""
        plan = self.call.plan
        of = plan.q[self.call.rank], plan.k[self.keys.owner(turn)]
        kv = self.split(self.keys.memory(turn))
        return self.call.local(self.call.q, *kv, self.all_heads, of, partial=True, beside_transfer=beside_transfer)


class Forward:
    def __init__(self, call: RankCall):
        self.call, self.ring = call, Ring(call)
        self.made = self.example().results()  # for the first turn, and for the merged results

    def example(self) -> Call:
        return self.ring.local(0, len(self.ring.turns) > 1)

    def prepare(self) -> None:
        self.ring.fill()

    def run(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        call, ring = self.call, self.ring
        merged: tuple[Tensor, ...] | None = None
        how = {"layout": "bshd" if "bshd" in call.of_caller.options else "bhsd"}
        for turn in ring.turns:
            under = ring.keys.begin(turn) if turn + 1 < len(ring.turns) else None
            if ring.is_seen(turn):
                found = _prepared.forward(ring.local(turn, under is not None))
                merged = found if merged is None else merge(merged[0], merged[1], found[0], found[1], **how)
            if under is not None:
                under.wait()
        out, lse = merged if merged is not None else self._nothing()
        if "sinks" in call.of_caller.arrays:
            out, lse = merge(out, lse, *self._nothing(), sinks=call.of_caller.arrays["sinks"], **how)
            if call.plan.packed:  # rows after the last sequence belong to none, and see no sink
                used = sum(rows_of_sequences(call.plan.q[call.rank], call.plan.cu_q))
                lse[0, :, used:], lse[1, :, used:] = -torch.inf, 0
        return call.as_results(out), lse.double().sum(0).to(call.sum_dtype), [lse]

    def _nothing(self) -> tuple[Tensor, Tensor]:
        """The results of a call without keys."""
        out, lse = torch.zeros_like(self.made["out"]), torch.full_like(self.made["lse"], -torch.inf)
        lse[1] = 0
        return out, lse


class Backward:
    """The backward: gradients of keys go round with the keys, and one step further, back to the keys' owner."""

    def __init__(self, call: RankCall, given: Results, saved: list[Tensor]):
        self.call, self.given, self.ring = call, given, Ring(call)
        (self.lse,) = saved
        self.to_keys = any(name in call.needs for name in "kv")
        self.sums = Round(call, self.ring.row, call.sum_dtype, "gradients of keys going round") if self.to_keys else None
        self.own = call.new((max(self.ring.keys.counts), *self.ring.row), call.sum_dtype) if self.to_keys else None
        self.dq = call.new(call.q.shape, call.sum_dtype).zero_() if "q" in call.needs else None
        self.dbias = call.room_for_bias()
        self.dcaptured = call.room_for_captured()

    def example(self) -> Call:
        return self.ring.local(0, len(self.ring.turns) > 1)

    def prepare(self) -> None:
        self.ring.fill()

    def run(self) -> Results:
        call, ring = self.call, self.ring
        known = {"dout": self.given["dout"], "lse": self.lse, "delta": self._delta()}
        if "dlse" in self.given:
            known["dlse"] = self.given["dlse"]
        home: Underway | None = None
        for turn in ring.turns:
            under = ring.keys.begin(turn) if turn + 1 < len(ring.turns) else None
            added = self._add(turn, known) if ring.is_seen(turn) else None
            if self.sums is not None:
                home = self._pass_on(self.sums, turn, home, added)
            if under is not None:
                under.wait()
        if home is not None:
            home.wait()
        found: Results = {} if self.dq is None else {"dq": self.dq}
        if self.sums is not None:
            own = ring.split(self.sums.memory(len(ring.turns)))
            found |= {f"d{name}": x for name, x in zip("kv", own, strict=True) if name in call.needs}
        if self.dbias is not None:
            found["dbias"] = self.dbias
        if "sinks" in call.needs:
            found["dsinks"] = self._sinks(known)
        return found | self.dcaptured

    def _add(self, turn: int, known: Results) -> Tensor | None:
        """Computes the gradients from this turn's keys; returns the gradients of these keys."""
        local, into, own = self.ring.local(turn, len(self.ring.turns) > 1), {}, None
        if self.dq is not None:
            into["dq"] = self.dq
        if self.own is not None:
            own = self.own[: self.ring.keys.counts[self.ring.keys.owner(turn)]].zero_()
            into |= {f"d{name}": x for name, x in zip("kv", self.ring.split(own), strict=True) if name in self.call.needs}
        if self.dbias is not None:
            local.arrays["bias"] = local.arrays["bias"].to(self.call.sum_dtype)
        wanted = [*into, *(["dbias"] if self.dbias is not None else []), *self.dcaptured]
        if wanted:
            found = backward_added(local, known, wanted, into)
            if self.dbias is not None:
                self.dbias.add_(found["dbias"])
            for name, x in self.dcaptured.items():
                x.add_(found[name])
        return own

    def _pass_on(self, sums: Round, turn: int, arriving: Underway | None, added: Tensor | None) -> Underway:
        """Sends the gradients of this turn's keys to the next rank, with this rank's addends, which were computed while the sums were in
        flight."""
        here = sums.memory(turn)
        if arriving is None:
            here.zero_()
        else:
            arriving.wait()
        if added is not None:
            here.add_(added)
        return sums.begin(turn)

    def _delta(self) -> Tensor:
        """(dout · out) of each row, in the layout of lse."""
        products = (self.given["dout"].double() * self.given["out"].double()).sum(-1).to(self.call.sum_dtype)
        rows_first = self.call.plan.packed or "bshd" in self.call.of_caller.options
        return (products.transpose(-1, -2) if rows_first else products).contiguous()

    def _sinks(self, known: Results) -> Tensor:
        """The gradient of the sinks from this rank's rows."""
        sinks = self.call.of_caller.arrays["sinks"]
        below = -known["delta"].double()
        if "dlse" in known:
            below = known["dlse"].double() + below
        lse = self.lse.double().sum(0)
        share = torch.where(lse == -torch.inf, 0.0, torch.exp(sinks.double()[:, None] - lse)) * below
        return share.sum(-1).reshape(-1, len(sinks)).sum(0).to(sinks.dtype)
