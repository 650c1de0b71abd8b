"""Method "levels": the ranks of a node exchange heads for tokens, and each rank gathers the keys of its heads from other nodes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .._call import Call
from . import _gather
from ._call import RankCall, Results, four_axes
from ._group import of_name
from ._heads import Whole
from ._late import Waits
from ._ranges import Ranges, union


class _Node:
    """This rank's share of heads, for all tokens of its node, as a call among the ranks that have the same share in the other nodes."""

    def __init__(self, call: RankCall):
        assert call.levels is not None
        inside, across = (Waits(of_name(name), call.waits.seconds) for name in call.levels[:2])
        self.call, size, self.node = call, call.levels.size, across.group.rank()
        nodes = [range(n * size, (n + 1) * size) for n in range(across.group.size())]
        self.whole = Whole(call, inside, nodes[self.node])
        sides = [tuple(_together(side, node) for node in nodes) for side in (call.plan.q, call.plan.k)]
        self.plan, self.across = replace(call.plan, q=sides[0], k=sides[1]), across

    def memory(self) -> list[Tensor]:
        """Buffers without values for the results of exchanged()."""
        call, whole = self.call, self.whole
        return [
            whole.memory(x, sum(on.counts), len(heads))
            for x, on, heads in ((call.q, whole.q, whole.heads), (call.k, whole.k, whole.heads_kv), (call.v, whole.k, whole.heads_kv))
        ]

    def exchanged(self) -> list[Tensor]:
        """q, k and v of the node's tokens."""
        call, whole = self.call, self.whole
        return [call.tokens(on.to_heads(call.rows(x))) for x, on in ((call.q, whole.q), (call.k, whole.k), (call.v, whole.k))]

    def call_across(self, tensors: list[Tensor], scores: Results) -> RankCall:
        call, heads = self.call, self.whole.heads
        arrays = dict(call.of_caller.arrays) | dict(zip("qkv", tensors, strict=True))
        for name, x in call.of_caller.arrays.items():
            if name in ("mask", "bias"):
                arrays[name] = scores[name] if name in scores else call.scores_of_heads(x, heads)
            elif name in ("alibi_slopes", "sinks") and x.dim():
                arrays[name] = x.narrow(-1, heads.start, len(heads))
        of_caller = call.of_caller.on(arrays)
        return RankCall(
            of_caller, self.plan, self.node, self.across, call.needs, call.reserved_sms, first_head=heads.start, all_heads=call.heads
        )

    def rows_back(self, x: Tensor) -> Tensor:
        """The rank's own tokens, with all heads."""
        return self.call.tokens(self.whole.q.to_tokens(self.call.rows(x)))

    def statistic_there(self, x: Tensor) -> Tensor:
        return self.whole.q.to_heads(x.movedim(-1, 0)[..., None])[..., 0].movedim(0, -1).contiguous()

    def statistic_back(self, x: Tensor) -> Tensor:
        return self.whole.q.to_tokens(x.movedim(-1, 0)[..., None])[..., 0].movedim(0, -1).contiguous()


class Forward:
    def __init__(self, call: RankCall):
        self.call, self.node = call, _Node(call)
        self.across = _gather.Forward(self.node.call_across(self.node.memory(), self.node.whole.room_for_scores()))

    def example(self) -> Call:
        return self.across.example()

    def prepare(self) -> None:
        """Does nothing: the rows for other nodes come from this node first."""

    def run(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        node, arrays = self.node, self.across.call.of_caller.arrays
        arrays.update(zip("qkv", tensors := node.exchanged(), strict=True))
        arrays.update(node.whole.scores())
        self.across.prepare()
        out, lse, _ = self.across.run()
        return self.call.as_results(node.rows_back(out)), node.statistic_back(lse), [*tensors, out, lse]


class Backward:
    def __init__(self, call: RankCall, given: Results, saved: list[Tensor]):
        self.call, self.given, self.node = call, given, _Node(call)
        *tensors, out, lse = saved
        self.known: Results = {"out": out, "lse": lse, "dout": torch.empty_like(out)}
        self.across = _gather.Backward(self.node.call_across(tensors, self.node.whole.room_for_scores()), self.known, [])

    def example(self) -> Call:
        return self.across.example()

    def prepare(self) -> None:
        """Does nothing: the rows for other nodes come from this node first."""

    def run(self) -> Results:
        call, node, whole = self.call, self.node, self.node.whole
        self.across.call.of_caller.arrays.update(whole.scores())
        self.known["dout"] = call.tokens(whole.q.to_heads(call.rows(self.given["dout"])))
        if "dlse" in self.given:
            self.known["dlse"] = node.statistic_there(self.given["dlse"])
        self.across.prepare()
        found = self.across.run()
        for name, on in (("dq", whole.q), ("dk", whole.k), ("dv", whole.k)):
            if name in found:
                found[name] = call.tokens(on.to_tokens(call.rows(found[name])))
        if "dbias" in found:
            found["dbias"] = whole.bias_gradient(four_axes(found["dbias"]))
        if "dsinks" in found:
            own, found["dsinks"] = found["dsinks"], torch.zeros_like(call.of_caller.arrays["sinks"])
            found["dsinks"][whole.heads.start : whole.heads.stop] = own
        return found


def _together(side: tuple[Ranges, ...], node: range) -> Ranges:
    return union(each for r in node for each in side[r])
