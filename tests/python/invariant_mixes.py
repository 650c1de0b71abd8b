"""Random mixes for `invariant`: a problem's rows must have the same bits alone and among other rows."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

import strobe
from device import ON_GPU

Options = dict[str, Any]
Results = dict[str, Tensor]  # out (1, H, Sq, Dv), lse (1, H, Sq), dq, dk, dv
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def differing(a: Tensor, b: Tensor) -> int:
    """How many elements have other bits; all NaN are equal."""
    bits = INTEGERS[a.element_size()]
    return int(((a.contiguous().view(bits) != b.contiguous().view(bits)) & ~(a.isnan() & b.isnan())).sum())


@dataclasses.dataclass
class Problem:
    """One sequence with as many queries as keys. Its options are divided into those of rows, of heads and all others."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    options: Options  # causal, window, and all options that are the same for all rows and heads
    rows_of: Options  # bias and mask (1, H, S, S)
    heads_of: Options  # alibi_slopes and sinks (H)
    in_place: bool  # with dropout: the bytes are the same only for the same batch, heads and positions

    @property
    def sees_all(self) -> bool:
        return not self.options.get("causal")

    def run(self, variant: Variant, backward: bool, given: Results | None, **how: Any) -> Results:
        """Results of rows [variant.first, variant.end) with keys [0, variant.end), in the variant's call. The backward takes out and lse
        from `given`, if there is one."""
        return variant.run(self, backward, given, how)


@dataclasses.dataclass
class Variant:
    """What else a call with the problem contains, and how the call is stored."""

    first: int
    end: int
    heads_kv: list[int]  # key heads of the problem; a negative number stands for some other head
    share: int  # query heads of each key head, from its first one on
    kind: str  # "dense", "packed", "used"
    lengths: list[tuple[int, int]]  # queries and keys of the other sequences of a packed call
    batch: int
    place: int  # the problem's place among the sequences
    storage: str
    threads: int
    seed: int
    spoiled: bool  # all other rows hold NaN and infinities

    def whole(self, p: Problem) -> bool:
        return self.first == 0 and self.end == p.k.shape[2] and self.share == p.q.shape[1] // p.k.shape[1]

    def run(self, p: Problem, backward: bool, given: Results | None, how: Options) -> Results:
        g = torch.Generator().manual_seed(self.seed)
        h, hkv = p.q.shape[1], p.k.shape[1]
        group = h // hkv
        own = [x for x, kv in enumerate(self.heads_kv) if kv >= 0]
        heads = [kv * group + n if kv >= 0 else -1 for kv in self.heads_kv for n in range(self.share)]
        own_q = [x for x, one in enumerate(heads) if one >= 0]
        rows = slice(self.first, self.end)

        def picked(x: Tensor, which: list[int], part: slice) -> Tensor:
            """(1, heads, rows, ...) of the call: heads of the problem, and random ones for negative numbers."""
            pieces = [x[:, one : one + 1, part] if one >= 0 else self.other(g, x[:, :1, part]) for one in which]
            return torch.cat(pieces, 1)

        tensors = {
            "q": picked(p.q, heads, rows),
            "k": picked(p.k, self.heads_kv, slice(0, self.end)),
            "v": picked(p.v, self.heads_kv, slice(0, self.end)),
        }
        if backward:
            assert given is not None
            tensors["dout"] = picked(p.dout, heads, rows)
            tensors["out"] = picked(given["out"], heads, rows)
            lse = torch.cat([given["lse"][:, one : one + 1, rows] if one >= 0 else given["lse"][:, :1, rows] for one in heads], 1)
        options = dict(p.options)
        for name, x in p.heads_of.items():
            options[name] = torch.cat([x[one : one + 1] if one >= 0 else x[:1] for one in heads])
        for name, x in p.rows_of.items():
            part = [x[:, one if one >= 0 else 0, rows, : self.end] for one in heads] if x.shape[1] > 1 else [x[:, 0, rows, : self.end]]
            options[name] = torch.stack(part, 1)

        count = self.end - self.first
        if self.kind == "packed":
            lengths = [*self.lengths]
            lengths.insert(self.place, (count, self.end))
            cu_q = [sum(n for n, _ in lengths[:b]) for b in range(len(lengths) + 1)]
            cu_k = [sum(n for _, n in lengths[:b]) for b in range(len(lengths) + 1)]
            options["cu_seqlens_q"] = torch.tensor(cu_q, dtype=torch.int32, device=p.q.device)
            options["cu_seqlens_k"] = torch.tensor(cu_k, dtype=torch.int32, device=p.q.device)
            options["max_seqlen_q"], options["max_seqlen_k"] = max(n for n, _ in lengths), max(n for _, n in lengths)
            at = {"q": cu_q, "dout": cu_q, "out": cu_q, "k": cu_k, "v": cu_k}

            def placed(name: str, x: Tensor) -> Tensor:
                start = at[name][self.place]
                total = at[name][-1]
                around = self.other(g, x[:, :, :1].expand(-1, -1, total, -1))
                around[:, :, start : start + x.shape[2]] = x
                return self.stored(around[0].transpose(0, 1), g)

            place_q = slice(cu_q[self.place], cu_q[self.place + 1])
            place_k = slice(cu_k[self.place], cu_k[self.place + 1])

            def back(x: Tensor, which: list[int], part: slice) -> Tensor:
                return x[part][:, which].transpose(0, 1)[None]

            of_lse = lambda x: x[:, place_q][own_q][None]  # noqa: E731
        else:
            extra = 37 if self.kind == "used" else 0

            def placed(name: str, x: Tensor) -> Tensor:
                room = x.shape[2] + (extra if name in ("k", "v") else 0)
                around = self.other(g, x[:, :, :1].expand(self.batch, -1, room, -1))
                around[self.place, :, : x.shape[2]] = x[0]
                return self.stored(around, g)

            if extra:
                options["seqused_k"] = torch.full((self.batch,), self.end, dtype=torch.int32, device=p.q.device)
                for name in p.rows_of:
                    options[name] = torch.nn.functional.pad(options[name], (0, extra))
            place_q, place_k = slice(None), slice(0, self.end)

            def back(x: Tensor, which: list[int], part: slice) -> Tensor:
                return x[self.place : self.place + 1, which, part]

            of_lse = lambda x: x[self.place : self.place + 1, own_q]  # noqa: E731

        options |= {"invariant": True} | how
        if not ON_GPU:
            options["threads"] = self.threads
        there = {name: placed(name, x) for name, x in tensors.items()}
        if not backward:
            out, lse = strobe.attention(there["q"], there["k"], there["v"], return_lse=True, **options)
            return {"out": back(out, own_q, place_q), "lse": of_lse(lse)}
        if self.kind == "packed":
            all_lse = torch.zeros(len(heads), there["q"].shape[0], dtype=lse.dtype, device=lse.device)
            all_lse[:, place_q] = lse[0]
        else:
            all_lse = lse.expand(self.batch, -1, -1).contiguous()
        made = strobe.attention_backward(there["dout"], there["q"], there["k"], there["v"], there["out"], all_lse, **options)
        dq, dk, dv = made[:3]
        found = {"dq": back(dq, own_q, place_q)}
        if self.whole(p):
            found |= {"dk": back(dk, own, place_k), "dv": back(dv, own, place_k)}
        return found

    def expected(self, p: Problem, base: Results) -> Results:
        """The problem's results when it is computed alone, cut to the rows and heads of this mix."""
        group = p.q.shape[1] // p.k.shape[1]
        kv = [one for one in self.heads_kv if one >= 0]
        heads = [one * group + n for one in kv for n in range(self.share)]
        rows = slice(self.first, self.end)
        return {name: x[:, kv] if name in ("dk", "dv") else x[:, heads, rows] for name, x in base.items()}

    def other(self, g: torch.Generator, like: Tensor) -> Tensor:
        x = (torch.randn(like.shape, generator=g) * 3).to(like)
        if self.spoiled:
            x[torch.rand(like.shape, generator=g).to(like.device) < 0.02] = torch.nan
            x[torch.rand(like.shape, generator=g).to(like.device) < 0.01] = torch.inf
        return x

    def stored(self, x: Tensor, g: torch.Generator) -> Tensor:
        if self.storage == "heads last" and x.dim() == 4:
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if self.storage == "cut out":
            room = self.other(g, torch.nn.functional.pad(x, (0, 8, 0, 1)))
            room[..., :-1, : x.shape[-1]] = x
            return room[..., :-1, : x.shape[-1]]
        return x.contiguous()


def draw_problem(rng: random.Random, dtype: torch.dtype, device: str, longest: int, most_dim: int) -> Problem:
    g = torch.Generator().manual_seed(rng.getrandbits(32))
    hkv, group = rng.choice([1, 2, 3]), rng.choice([1, 1, 2, 4, 5])
    s = rng.choice([rng.randint(1, 40), rng.randint(1, longest), rng.randint(1, longest)])
    d, dv = (rng.choice([x for x in (8, 16, 24, 40, 64, 80, 128, 192, 256) if x <= most_dim]) for _ in "qv")
    if rng.random() < 0.6:
        dv = d

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    # keys whose scores rise late in a row, or scores so large that LSE is large
    rises = torch.linspace(0.2, 2.5, s)[:, None] if rng.random() < 0.4 else torch.tensor(rng.choice([0.3, 1.0, 1.0, 6.0]))
    q, k, v = normal(1, hkv * group, s, d), normal(1, hkv, s, d) * rises, normal(1, hkv, s, dv)
    if rng.random() < 0.15 and dtype != torch.float16 and device == "cpu":
        v[:, :, :: rng.randint(1, 9)] *= 2e37  # the sum of P V may overflow where the mean does not
    dout = normal(1, hkv * group, s, dv)
    if rng.random() < 0.25:
        x, at = rng.choice([k, v]), rng.randrange(s)
        x[:, rng.randrange(hkv), at, rng.randrange(x.shape[-1])] = rng.choice([torch.nan, torch.inf, -torch.inf])
    if rng.random() < 0.1:
        q[:, 0, rng.randrange(s), 0] = torch.nan
    options: Options = {}
    if rng.random() < 0.75:
        options["causal"] = True
        if rng.random() < 0.35:
            options["window"] = (rng.randint(0, s), 0)
    for name, chance, value in [
        ("softcap", 0.15, rng.choice([5.0, 30.0])),
        ("scale", 0.15, rng.choice([-0.2, 0.4, 0.05])),
        ("exact_max", 0.1, True),
    ]:
        if rng.random() < chance:
            options[name] = value
    in_place = rng.random() < 0.12
    if in_place:
        options |= {"dropout": 0.2, "seed": 5, "offset": 7}
    heads_of: Options = {}
    if rng.random() < 0.15:
        heads_of["alibi_slopes"] = (torch.rand(hkv * group, generator=g) * 0.2).to(device)
    if rng.random() < 0.2:
        heads_of["sinks"] = normal(hkv * group).to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    rows_of: Options = {}
    if rng.random() < 0.12:
        rows_of["bias"] = (normal(1, rng.choice([1, hkv * group]), s, s) * 2).to(device, dtype)
    if rng.random() < 0.15:
        cells = torch.rand(1, rng.choice([1, hkv * group]), (s + 15) // 16, (s + 15) // 16, generator=g) < 0.6
        mask = cells.repeat_interleave(16, 2).repeat_interleave(16, 3)[:, :, :s, :s]
        rows_of["mask"] = (mask & (torch.rand(mask.shape, generator=g) < rng.choice([0.5, 1.1]))).to(device)
    return Problem(*(x.to(device, dtype) for x in (q, k, v, dout)), options, rows_of, heads_of, in_place)


def draw_variant(rng: random.Random, p: Problem, whole: bool, longest: int) -> Variant:
    s, hkv = p.k.shape[2], p.k.shape[1]
    group = p.q.shape[1] // hkv
    end = s if whole or p.sees_all or rng.random() < 0.4 else rng.randint(1, s)
    first = 0 if whole or p.in_place or rng.random() < 0.3 else rng.choice([end - 1, rng.randrange(end), max(0, end - rng.randint(1, 20))])
    own = list(range(hkv)) if p.in_place else rng.sample(range(hkv), rng.randint(1, hkv))
    others = [] if p.in_place else [-1] * rng.choice([0, 0, 1, 2])
    heads = own + others
    if not p.in_place:
        rng.shuffle(heads)
    batch = rng.choice([1, 2, 5])
    place = 0 if p.in_place else rng.randrange(batch)
    return Variant(
        first=first,
        end=end,
        heads_kv=heads,
        share=group if whole or p.in_place else rng.randint(1, group),
        kind=rng.choice(["dense", "packed", "used"] if not p.rows_of else ["dense", "used"]),
        lengths=[(rng.randint(0, longest), rng.randint(0, longest)) for _ in range(batch - 1)],
        batch=batch,
        place=place,
        storage=rng.choice(["contiguous", "heads last", "cut out"]),
        threads=rng.choice([1, 2, 3]),
        seed=rng.getrandbits(32),
        spoiled=rng.random() < 0.3,
    )


def alone(p: Problem) -> Variant:
    hkv, s = p.k.shape[1], p.k.shape[2]
    return Variant(0, s, list(range(hkv)), p.q.shape[1] // hkv, "dense", [], 1, 0, "contiguous", 1, 0, False)


def mixes(
    seed: int,
    dtype: torch.dtype,
    device: str,
    problems: int,
    variants: int,
    longest: int = 300,
    most_dim: int = 256,
    **how: Any,
) -> Iterator[tuple[int, dict[str, int], str]]:
    """Yields each mix's number, how many elements of each result have other bits, and a description. A problem that no engine supports with
    `invariant` is left out, and so are the gradients if its backward is refused."""
    for n in range(problems):
        rng = random.Random(f"{seed}/{n}")
        p = draw_problem(rng, dtype, device, longest, most_dim)
        try:
            base = p.run(alone(p), False, None, **how)
        except NotImplementedError:
            continue
        with suppress(NotImplementedError):
            base |= p.run(alone(p), True, base, **how)
        for m in range(variants):
            variant = draw_variant(rng, p, whole=rng.random() < 0.4, longest=longest)
            found = p.run(variant, False, None, **how)
            if "dq" in base:
                found |= p.run(variant, True, base, **how)
            expected = variant.expected(p, base)
            words = f"{dtype} {tuple(p.q.shape)} {tuple(p.k.shape)} {tuple(p.v.shape)} {p.options} {[*p.rows_of, *p.heads_of]} {variant}"
            yield n * variants + m, {name: differing(x, expected[name]) for name, x in found.items()}, words
