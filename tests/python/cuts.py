"""A call cut into parts, as context parallelism cuts it: computed part by part, merged forward and added up backward."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import strobe
from cases import Inputs, dense_problems
from check import Results
from device import DEVICE, on_device, running_on

Rows = list[Tensor]  # for each sequence: the positions in a part, ascending


def ranges(positions: Tensor) -> list[tuple[int, int]]:
    """The runs of ascending positions, as (start, length)."""
    found: list[tuple[int, int]] = []
    for at in positions.tolist():
        if found and sum(found[-1]) == at:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((at, 1))
    return found


def all_ranges(rows: Rows) -> list[list[tuple[int, int]]]:
    """The ranges of all sequences, padded with empty ranges to the same number."""
    found = [ranges(positions) for positions in rows]
    most = max(map(len, found), default=0)
    return [of + [(0, 0)] * (most - len(of)) for of in found]


def owners(rng: random.Random, length: int, parts: int) -> Tensor:
    """The part that owns each position: contiguous, from both ends, or blocks of any size in any order."""
    kind = rng.choice(["ring", "zigzag", "blocks", "blocks"])
    size = {"ring": -(-length // parts), "zigzag": -(-length // (2 * parts))}.get(kind) or rng.choice([1, 5, 16, 16, 32, 48])
    block = torch.arange(length) // max(size, 1)
    if kind == "zigzag":
        return torch.minimum(block, 2 * parts - 1 - block).clamp(0, parts - 1)
    if kind == "ring":
        return block.clamp(max=parts - 1)
    return torch.tensor([rng.randrange(parts) for _ in range(length + 1)])[block] if length else block


def _cut(rng: random.Random, lengths: list[int], parts: int, packed: bool) -> list[Rows]:
    """The rows of each part. Dense tensors need as many rows in each sequence, so all sequences have one pattern, rotated or not."""
    if packed:
        of = [owners(rng, n, parts) for n in lengths]
    else:
        pattern = owners(rng, lengths[0], parts)
        turned = rng.random() < 0.4
        of = [pattern.roll(rng.randrange(len(pattern) + 1)) if turned else pattern for _ in lengths]
    return [[(owner == part).nonzero()[:, 0] for owner in of] for part in range(parts)]


@dataclass
class Whole:
    """The whole call. Each list has one tensor (heads, rows, columns) per sequence."""

    inputs: Inputs
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    dout: list[Tensor]
    dlse: list[Tensor] | None
    seen: list[Tensor] | None  # which query sees which key, if hidden keys are to hold NaN

    @classmethod
    def of(cls, inputs: Inputs, spoiled: bool) -> Whole:
        def sequences(t: Tensor, side: str) -> list[Tensor]:
            if inputs.varlen:
                cu = inputs.options["cu_seqlens_" + side].tolist()
                return [t[a:b].transpose(0, 1) for a, b in itertools.pairwise(cu)]
            return list(t.transpose(1, 2) if inputs.options.get("layout") == "bshd" else t)

        dlse = None
        if inputs.dlse is not None:
            cu = inputs.options["cu_seqlens_q"].tolist() if inputs.varlen else []
            dlse = [inputs.dlse[:, a:b] for a, b in itertools.pairwise(cu)] if cu else list(inputs.dlse)
        q, dout = (sequences(t, "q") for t in (inputs.q, inputs.dout))
        k, v = (sequences(t, "k") for t in (inputs.k, inputs.v))
        seen = None
        if spoiled:
            seen = []
            for (x, *_), score, _ in dense_problems(inputs):
                visible = score.visible if score.bias is None else score.visible & (score.bias != -torch.inf)
                seen += visible.expand(x.shape[0], x.shape[1], *visible.shape[2:])
        return cls(inputs, q, k, v, dout, dlse, seen)


@dataclass
class Piece:
    """Some sequences and heads of the whole, some of their queries, and some of their keys."""

    whole: Whole
    batch: range
    heads: range
    heads_kv: range
    q: Rows
    k: Rows

    def tensor(self, of: list[Tensor], heads: range, rows: Rows) -> Tensor:
        """The piece's rows of its sequences, dense or packed as the call takes them."""
        found = [of[b][heads.start : heads.stop, rows[b]] for b in self.batch]
        return torch.cat([x.transpose(0, 1) for x in found]) if self.whole.inputs.varlen else torch.stack(found)

    def of_rows(self, of: list[Tensor]) -> Tensor:
        found = [of[b][self.heads.start : self.heads.stop, self.q[b]] for b in self.batch]
        return torch.cat(found, dim=1) if self.whole.inputs.varlen else torch.stack(found)

    def of_scores(self, x: Tensor) -> Tensor:
        """x (mask or bias) for the piece's queries and all keys."""
        if x.shape[1] > 1:
            x = x[:, self.heads.start : self.heads.stop]
        here = [self.q[b] for b in self.batch]
        same = all(torch.equal(rows, here[0]) for rows in here)
        if x.shape[0] == 1 and (x.shape[2] == 1 or same):
            return x[:, :, here[0]] if x.shape[2] > 1 else x
        own = [x[b if x.shape[0] > 1 else 0] for b in self.batch]
        if x.shape[2] == 1:
            return torch.stack(own)
        most = max(map(len, here))
        padded = [
            torch.cat([t[:, rows], t.new_zeros(t.shape[0], most - len(rows), t.shape[2])], 1) for t, rows in zip(own, here, strict=True)
        ]
        return torch.stack(padded)

    def add_scores(self, to: Tensor, gradient: Tensor) -> None:
        """Adds the piece's dbias to the whole call's."""
        heads = slice(self.heads.start, self.heads.stop) if to.shape[1] > 1 else slice(0, 1)
        for n, b in enumerate(self.batch):
            if gradient.shape[0] == 1 and n > 0:
                break
            own, place = gradient[n], to[b if to.shape[0] > 1 else 0, heads]
            if to.shape[2] > 1:
                place[:, self.q[b]] += own[:, : len(self.q[b])]
            else:
                place += own

    def options(self, partial: bool) -> dict[str, Any]:
        o = self.whole.inputs.options
        found = {name: x for name, x in o.items() if name not in ("layout", "sinks")}
        if "alibi_slopes" in o:
            slopes = o["alibi_slopes"][..., self.heads.start : self.heads.stop]
            found["alibi_slopes"] = slopes[self.batch.start : self.batch.stop] if slopes.dim() == 2 else slopes
        if "sinks" in o and not partial:
            found["sinks"] = o["sinks"][self.heads.start : self.heads.stop]
        for name in ("mask", "bias"):
            if name in o:
                found[name] = self.of_scores(o[name])
        sides = {"q": ([self.q[b] for b in self.batch], self.whole.q), "k": ([self.k[b] for b in self.batch], self.whole.k)}
        part: dict[str, Any] = {}
        for side, (rows, of) in sides.items():
            found_ranges, lengths = all_ranges(rows), [of[b].shape[1] for b in self.batch]
            shared = all(r == found_ranges[0] for r in found_ranges) and len(found_ranges) > 0
            part[f"{side}_ranges"] = found_ranges[0] if shared else found_ranges
            part[f"seqlens_{side}"] = lengths[0] if len(set(lengths)) == 1 else lengths
            if self.whole.inputs.varlen:
                found["cu_seqlens_" + side] = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0).int()
        found["part"] = strobe.Part(
            **part, first_head=self.heads.start, heads=self.whole.q[0].shape[0], first_batch=self.batch.start, partial=partial
        )
        return found

    def unread(self, b: int) -> Tensor:
        """(Hkv, keys): which keys no query of the piece sees."""
        of_heads = self.whole.seen[b][self.heads.start : self.heads.stop][:, self.q[b]][..., self.k[b]]
        return ~of_heads.reshape(len(self.heads_kv), len(self.heads) // len(self.heads_kv), *of_heads.shape[1:]).any(1).any(1)

    def moved(self, partial: bool) -> tuple[Inputs, dict[str, Any]]:
        """The piece as a call, on the device of the tests."""
        w = self.whole
        q, dout = (self.tensor(t, self.heads, self.q) for t in (w.q, w.dout))
        k, v = (self.tensor(t, self.heads_kv, self.k) for t in (w.k, w.v))
        if w.seen is not None:
            rows = [self.unread(b) for b in self.batch]
            where = torch.cat([x.T for x in rows]) if w.inputs.varlen else torch.stack(rows)
            k[where] = v[where] = torch.nan
        made = on_device(Inputs(q, k, v, dout, None if w.dlse is None else self.of_rows(w.dlse), self.options(partial)), DEVICE)
        return made, made.options


def _spans(rng: random.Random, n: int) -> Iterator[range]:
    """Divides range(n) into ranges of random lengths."""
    at = 0
    while at < n:
        end = rng.randint(at + 1, n) if rng.random() < 0.5 else n
        yield range(at, end)
        at = end


def pieces(rng: random.Random, whole: Whole) -> Iterator[list[Piece]]:
    """Lists of pieces; all pieces of a list have the same queries."""
    b, h, hkv = len(whole.q), whole.q[0].shape[0], whole.k[0].shape[0]
    packed = whole.inputs.varlen
    queries = _cut(rng, [t.shape[1] for t in whole.q], rng.randint(1, 4), packed)
    keys = _cut(rng, [t.shape[1] for t in whole.k], rng.randint(1, 4), packed)
    for batch in _spans(rng, b):
        for kv in _spans(rng, hkv):
            heads = range(kv.start * (h // hkv), kv.stop * (h // hkv))
            for q in queries:
                yield [Piece(whole, batch, heads, kv, q, k) for k in keys]


Placed = Callable[[list[Tensor], range, Rows, Tensor], None]


def run_in_parts(inputs: Inputs, seed: int, engine: str | None = None) -> Results:
    """The results of the whole call. With half of the seeds, keys that no query of a part sees hold NaN."""
    rng = random.Random(seed)
    whole = Whole.of(inputs, rng.random() < 0.5)
    o, wide = inputs.options, torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
    how = inputs.run | {"engine": engine}
    sums = {name: [torch.zeros(t.shape, dtype=wide) for t in of] for name, of in (("dq", whole.q), ("dk", whole.k), ("dv", whole.v))}
    outs = [torch.zeros(*q.shape[:2], v.shape[2], dtype=wide) for q, v in zip(whole.q, whole.v, strict=True)]
    lses = [torch.zeros(q.shape[:2], dtype=torch.float64) for q in whole.q]
    dbias = torch.zeros(o["bias"].shape, dtype=torch.float64) if "bias" in inputs.gradients else None
    dsinks = torch.zeros(o["sinks"].shape, dtype=torch.float64) if "sinks" in inputs.gradients else None

    def place(to: list[Tensor], piece: Piece, heads: range, rows: Rows, x: Tensor, add: bool) -> None:
        x, at = x.cpu(), 0
        for n, b in enumerate(piece.batch):
            if inputs.varlen:
                own = x[at : at + len(rows[b])].transpose(0, 1)
                at += len(rows[b])
            else:
                own = x[n]
            of_heads = to[b][heads.start : heads.stop]
            of_heads[:, rows[b]] = of_heads[:, rows[b]] + own if add else own.to(to[b].dtype)

    with running_on(engine):
        for together in pieces(rng, whole):
            results: tuple[Tensor, Tensor] | None = None
            for piece in rng.sample(together, len(together)):
                call, options = piece.moved(True)
                found = strobe.attention(call.q, call.k, call.v, **options, **how, return_lse=True)
                results = found if results is None else strobe.merge(*results, *found)
            out, lse = results
            first = together[0]
            sinks = None
            if "sinks" in o:
                sinks = o["sinks"][first.heads.start : first.heads.stop].to(out.device)
                nothing = torch.full_like(lse, -torch.inf)
                nothing[1] = 0
                out, lse = strobe.merge(out, lse, torch.zeros_like(out), nothing, sinks=sinks)
            delta = (call.dout.double() * out.double()).sum(-1).to(out.dtype)
            delta = (delta.transpose(0, 1) if inputs.varlen else delta).contiguous()
            place(outs, first, first.heads, first.q, out, False)
            rows_first = lse.double().sum(0).transpose(0, 1)[..., None] if inputs.varlen else lse.double().sum(0)[..., None]
            place([x[..., None] for x in lses], first, first.heads, first.q, rows_first, False)
            if dsinks is not None:
                dlse = torch.zeros_like(delta) if call.dlse is None else call.dlse
                share = torch.exp(sinks.double()[:, None] - lse.double().sum(0)) * (dlse.double() - delta.double())
                own = share.sum(1) if inputs.varlen else share.sum((0, 2))
                dsinks[first.heads.start : first.heads.stop] += own.cpu()
            dq = torch.zeros(call.q.shape, dtype=wide, device=call.q.device)
            for piece in together:
                call, options = piece.moved(True)
                dk, dv = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (call.k, call.v))
                if rng.random() < 0.5:
                    found = strobe.attention_backward(
                        call.dout, call.q, call.k, call.v, None, lse, delta=delta, dlse=call.dlse,
                        dq=dq, dk=dk, dv=dv, accumulate=True, **options, **how,
                    )  # fmt: skip
                else:
                    found = strobe.attention_backward(
                        call.dout, call.q, call.k, call.v, None, lse, delta=delta, dlse=call.dlse, **options, **how
                    )
                    dq += found.dq
                    dk, dv = found.dk, found.dv
                place(sums["dk"], piece, piece.heads_kv, piece.k, dk, True)
                place(sums["dv"], piece, piece.heads_kv, piece.k, dv, True)
                if dbias is not None:
                    piece.add_scores(dbias, found.dbias.cpu().double())
            place(sums["dq"], first, first.heads, first.q, dq, False)

    def whole_tensor(of: list[Tensor]) -> Tensor:
        if inputs.varlen:
            return torch.cat([x.transpose(0, 1) for x in of])
        stacked = torch.stack(of)
        return stacked.transpose(1, 2) if o.get("layout") == "bshd" else stacked

    dtype = inputs.q.dtype
    results = {"out": whole_tensor(outs).to(dtype)} | {name: whole_tensor(of).to(dtype) for name, of in sums.items()}
    results["lse"] = (torch.cat(lses, dim=1) if inputs.varlen else torch.stack(lses)).to(wide)
    if dbias is not None:
        results["dbias"] = dbias.to(o["bias"].dtype)
    if dsinks is not None:
        results["dsinks"] = dsinks.to(o["sinks"].dtype)
    return results
