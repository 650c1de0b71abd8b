"""Method "heads": ranks exchange heads for tokens, so that each rank computes some heads of all tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .._call import Call
from .._function import FIELDS as FUNCTIONS
from .._graph import from_head
from .._options import BLOCKS
from ._call import Order, Plan, RankCall, Results, backward_into, forward_into, four_axes, order_of, rows_for
from ._exchange import exchange
from ._late import Waits
from ._ranges import Ranges, count, union
from ._sharding import rows_of_sequences


class Places(NamedTuple):
    """The positions of the tokens of some ranks."""

    counts: list[int]  # per rank
    order: Order | None  # the permutation of the tokens as they arrive
    tokens: Ranges  # the tokens of all ranks
    positions: Tensor  # the positions, among all tokens, of each rank's tokens, one rank after another


@lru_cache(maxsize=256)
def places_of(ranges: tuple[Ranges, ...], device: torch.device) -> Places:
    tokens = union(each for of in ranges for each in of)
    return Places([*map(count, ranges)], order_of(ranges, device), tokens, rows_for(ranges, tokens, device))


class Exchange:
    """Exchanges rows of tokens, (tokens, ..., heads, columns), for rows of all tokens with a rank's share of the heads, and back."""

    def __init__(self, call: RankCall, ranges: tuple[Ranges, ...], waits: Waits):
        self.call, self.waits, self.rank = call, waits, waits.group.rank()
        self.counts, self.order, self.tokens, self.positions = places_of(ranges, call.device)

    def to_heads(self, rows: Tensor) -> Tensor:
        world, own = len(self.counts), rows.shape[0]
        sent = rows.unflatten(-2, (world, rows.shape[-2] // world)).movedim(-3, 0).flatten(0, 1).contiguous()
        return self._ordered(exchange(self.waits, "exchanging heads", sent, [own] * world, self.counts))

    def to_all(self, rows: Tensor) -> Tensor:
        """All tokens of a tensor that is not divided by heads."""
        world = len(self.counts)
        sent = rows.expand(world, *rows.shape).flatten(0, 1).contiguous()
        return self._ordered(exchange(self.waits, "gathering rows", sent, [rows.shape[0]] * world, self.counts))

    def to_tokens(self, rows: Tensor) -> Tensor:
        found = self._back(rows).movedim(0, -3)
        return found.flatten(-3, -2)

    def sum(self, rows: Tensor) -> Tensor:
        """The sum of all ranks' rows, for the rank's own tokens."""
        return self._back(rows).sum(0)

    def _back(self, rows: Tensor) -> Tensor:
        """Each rank's rows for the own tokens: (world, own tokens, ...)."""
        world, own = len(self.counts), self.counts[self.rank]
        sent = rows.index_select(0, self.positions)
        return exchange(self.waits, "exchanging heads back", sent, self.counts, [own] * world).unflatten(0, (world, own))

    def _ordered(self, rows: Tensor) -> Tensor:
        return rows if self.order is None else rows.index_select(0, self.order.there)


class Whole:
    """The call of the library on all tokens of the rank's heads, or on those of some ranks that divide the heads."""

    def __init__(self, call: RankCall, waits: Waits, members: range):
        """waits: for the members, which include this rank."""
        self.call = call
        self.q, self.k = (Exchange(call, side[members.start : members.stop], waits) for side in (call.plan.q, call.plan.k))
        place, share, share_kv = waits.group.rank(), call.heads // len(members), call.heads_kv // len(members)
        self.heads = range(place * share, (place + 1) * share)
        self.heads_kv = range(place * share_kv, (place + 1) * share_kv)
        self.own_scores = ScoreRows(call, call.plan.q[call.rank])
        self.all_scores = ScoreRows(call, self.q.tokens)

    def memory(self, like: Tensor, tokens: int, heads: int) -> Tensor:
        rows = self.call.rows(like)
        return self.call.tokens(self.call.new((tokens, *rows.shape[1:-2], heads, rows.shape[-1]), like.dtype))

    def scores_with_rows(self) -> Iterator[tuple[str, Tensor]]:
        for name in ("mask", "bias"):
            x = self.call.of_caller.arrays.get(name)
            if x is not None and has_rows(x):
                yield name, four_axes(x)

    def room_for_scores(self) -> Results:
        """Buffers without values for the results of scores()."""
        rows, found = self.all_scores, {}
        for name, x in self.scores_with_rows():
            heads = len(self.heads) if x.shape[1] > 1 else 1
            shape = (rows.batch, heads, rows.most) if rows.packed else (x.shape[0], heads, sum(self.q.counts))
            found[name] = x.new_empty((*shape, x.shape[3]))
        return found

    def scores(self) -> Results:
        """mask and bias whose rows are not broadcast: the rows of all queries, for the rank's heads."""
        found = {}
        for name, x in self.scores_with_rows():
            rows = self.own_scores.to_rows(x)
            rows = self.q.to_heads(rows) if rows.shape[-2] > 1 else self.q.to_all(rows)
            found[name] = self.all_scores.of_rows(rows, self.all_scores.batch)
        return found

    def bias_gradient(self, own: Tensor) -> Tensor:
        """The gradient of the bias: of the rank's own rows, or the rank's addend if rows are broadcast."""
        given = four_axes(self.call.of_caller.arrays["bias"])
        if not has_rows(given):
            found = own.new_zeros(given.shape)
            self.call.scores_of_heads(found, self.heads).copy_(own)
            return found
        rows = self.all_scores.to_rows(own)
        rows = self.q.to_tokens(rows) if given.shape[1] > 1 else self.q.sum(rows)
        return self.own_scores.of_rows(rows, given.shape[0])

    def local(self, q: Tensor, k: Tensor, v: Tensor, scores: Results) -> Call:
        """The call of the library. scores: mask and bias of all rows, if their rows are not broadcast."""
        call, plan = self.call, self.call.plan
        local = call.local(q, k, v, self.heads, (self.q.tokens, self.k.tokens))
        local.arrays.update(scores)
        if "seqused_k" in call.of_caller.arrays:
            local.arrays["seqused_k"] = call.of_caller.arrays["seqused_k"]
        if not needs_part(call.of_caller):
            del local.options["part"]
            texts = {field: local.options[field] for field in FUNCTIONS.values() if field in local.options}
            local.options.update({field: from_head(text, self.heads.start) for field, text in texts.items()})
            if plan.packed:  # without a part or maximum lengths, mask and bias would cover all tokens
                local.options.update(longest(plan.cu_q, plan.cu_k, local.options))
        return local


def _among_all(call: RankCall) -> Whole:
    whole = Whole(call, call.waits, range(call.plan.world))
    if not needs_part(call.of_caller):  # with a part, mask and bias have as many rows as the longest sequence
        whole.all_scores.most = max(whole.all_scores.most, call.of_caller.options.get("max_seqlen_q") or 0)
    return whole


def needs_part(call: Call) -> bool:
    """Whether the library must know the heads' indices in the whole problem: the same test as in _methods.py."""
    return bool(call.options.get("dropout")) or (BLOCKS[0] in call.arrays and call.arrays[BLOCKS[0]].shape[1] > 1)


def longest(cu_q: tuple[int, ...], cu_k: tuple[int, ...], options: dict[str, object]) -> dict[str, object]:
    """The options max_seqlen_q and max_seqlen_k with the values that a part would give them."""
    most = {
        name: max((end - begin for begin, end in pairwise(cu)), default=0) for name, cu in (("max_seqlen_q", cu_q), ("max_seqlen_k", cu_k))
    }
    return {name: options.get(name) or n for name, n in most.items()}


def most_rows(plan: Plan, rank: int) -> int:
    """The number of rows of a mask or bias for the rank's queries; with packed sequences, the most that it has of one sequence."""
    return max(rows_of_sequences(plan.q[rank], plan.cu_q), default=0)


class ScoreRows:
    """Rows of mask and bias as rows of tokens, (tokens, batch of dense tensors, heads, Sk), and back: of a rank's tokens, or of all."""

    def __init__(self, call: RankCall, ranges: Ranges):
        self.call = call
        self.packed, self.most, self.batch = call.plan.packed, 0, 0
        if self.packed:
            counts = rows_of_sequences(ranges, call.plan.cu_q)
            self.most, self.batch = max(counts, default=0), len(counts)
            self.tokens = sum(n for _, n in ranges)  # including those after the last sequence
            self.sequence = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64)).to(call.device)
            self.row = torch.cat([torch.arange(0), *map(torch.arange, counts)]).to(call.device)

    def to_rows(self, x: Tensor) -> Tensor:
        if not self.packed:
            return x.movedim(2, 0)
        rows = x.new_zeros((self.tokens, x.shape[1], x.shape[3]))
        rows[: len(self.row)] = x[self.sequence if x.shape[0] > 1 else torch.zeros_like(self.sequence), :, self.row]
        return rows

    def of_rows(self, rows: Tensor, batch: int) -> Tensor:
        """The inverse of to_rows(). batch: 1 adds up the rows that sequences share."""
        if not self.packed:
            return rows.movedim(0, 2)
        found = rows.new_zeros((batch, self.most, *rows.shape[1:]))
        sequence = self.sequence if batch > 1 else torch.zeros_like(self.sequence)
        return found.index_put_((sequence, self.row), rows[: len(self.row)], accumulate=batch == 1).movedim(1, 2)


def has_rows(x: Tensor) -> bool:
    """Whether a mask or bias has a row for each query."""
    return x.dim() > 1 and x.shape[-2] != 1


class Forward:
    def __init__(self, call: RankCall):
        self.call, self.whole = call, _among_all(call)
        whole, n = self.whole, sum(self.whole.q.counts)
        q = whole.memory(call.q, n, len(whole.heads))
        k, v = (whole.memory(x, sum(whole.k.counts), len(whole.heads_kv)) for x in (call.k, call.v))
        self._example = whole.local(q, k, v, whole.room_for_scores())
        self.made = self._example.results()

    def example(self) -> Call:
        return self._example

    def prepare(self) -> None:
        """Does nothing: the rows of all heads are copied in one step by the code that sends them."""

    def run(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        call, whole = self.call, self.whole
        del self._example  # so that its memory is used again
        q, k, v = (call.tokens(on.to_heads(call.rows(x))) for on, x in ((whole.q, call.q), (whole.k, call.k), (whole.k, call.v)))
        out, lse = self.made.values()
        forward_into(whole.local(q, k, v, whole.scores()), out, lse)
        mine = call.as_results(call.tokens(whole.q.to_tokens(call.rows(out))))
        of_rows = whole.q.to_tokens(lse.movedim(-1, 0)[..., None])[..., 0].movedim(0, -1).contiguous()
        return mine, of_rows, [q, k, v, out, lse]


class Backward:
    def __init__(self, call: RankCall, given: Results, saved: list[Tensor]):
        self.call, self.given, self.whole = call, given, _among_all(call)
        *self.tensors, self.out, self.lse = saved
        self.local_call = self._local(self.whole.room_for_scores())
        names = [name for name in ("q", "k", "v", "bias", "sinks", *call.captured) if name in call.needs]
        self.found = self.local_call.gradients([f"d{name}" for name in names])

    def _local(self, scores: Results) -> Call:
        call = self.call
        q, k, v = self.tensors
        local = self.whole.local(q, k, v, scores)
        if "bias" in call.needs and has_rows(bias := call.of_caller.arrays["bias"]) and four_axes(bias).shape[1] == 1:
            local.arrays["bias"] = local.arrays["bias"].to(call.sum_dtype)  # gradients of several ranks are added up
        return local

    def example(self) -> Call:
        return self.local_call

    def prepare(self) -> None:
        """Does nothing, as in the forward."""

    def run(self) -> Results:
        call, whole = self.call, self.whole
        self.local_call = self._local(whole.scores())
        known = {"dout": call.tokens(whole.q.to_heads(call.rows(self.given["dout"]))), "out": self.out, "lse": self.lse}
        if "dlse" in self.given:
            known["dlse"] = whole.q.to_heads(self.given["dlse"].movedim(-1, 0)[..., None])[..., 0].movedim(0, -1).contiguous()
        found = backward_into(self.local_call, known, self.found)
        for name, on in (("dq", whole.q), ("dk", whole.k), ("dv", whole.k)):
            if name in found:
                found[name] = call.tokens(on.to_tokens(call.rows(found[name])))
        if "dbias" in found:
            found["dbias"] = self.whole.bias_gradient(found["dbias"])
        if "dsinks" in found:
            own = found["dsinks"]
            found["dsinks"] = torch.zeros_like(call.of_caller.arrays["sinks"])
            found["dsinks"][whole.heads.start : whole.heads.stop] = own
        return found
