"""Draws a call at random from all that docs/semantics.md allows: one number is one call.

Calls with the same number // CALLS have the same options, as far as these determine a GPU's kernels; lengths, heads,
strides and values are the call's own."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import strobe
from device import ON_GPU
from paging import in_pages
from quantising import KINDS, SCALES, Kind, Quantised, group_of, quantised, quantised_queries
from random_dense import Dense, Packing, places, visible
from random_function import Function, Placed, draw_function, draw_mask, fill

CALLS = 16  # consecutive numbers with the same options
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
Options = dict[str, Any]


@dataclass
class Call:
    """One call: strobe.attention's arguments, and the same call as a problem for formulas."""

    number: int
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    options: dict[str, Any]
    leaves: list[str]  # the tensors among q, k, v, bias, sinks and the score's tables ("table 0") whose gradients are asked for
    returns_lse: bool
    dense: Dense
    packing: Packing | None
    spoiled: bool  # memory that must not be read holds NaN
    words: dict[str, Any] = field(default_factory=dict)  # what was drawn
    aux: tuple[str, ...] = ()
    handed: Handed | None = None  # k, v and options in pages, or quantised; only the forward is called
    score: Function | None = None  # options["score"]
    mask: Function | None = None  # options["mask"]

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.words.items())

    def table(self, name: str) -> Tensor:
        """What \"table 0\" and so on hold."""
        return self.score.tables[int(name.split()[1])].values


@dataclass
class Handed:
    """The values that replace k, v, the options and, if it is not None, q."""

    k: Tensor
    v: Tensor
    options: dict[str, Any]
    q: Tensor | None = None


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _one(rng: random.Random, choices: dict[Any, float]) -> Any:
    return rng.choices(list(choices), list(choices.values()))[0]


def _width(rng: random.Random) -> int:
    if rng.random() < 0.6:
        return rng.choice([8, 16, 24, 32, 40, 48, 64, 64, 64, 72, 80, 96, 112, 128, 128, 160, 192, 200, 256])
    return max(1, min(256, round(_log_uniform(rng, 0.6, 256.4))))


def _wide(rng: random.Random, most: int) -> int:
    return rng.choice([320, 384, 512, most]) if rng.random() < 0.6 else rng.randint(257, most)


def draw_options(number: int, dtypes: dict[str, float] | None = None, functions: float = 0.2) -> Options:
    """The options that calls with the same number // CALLS share. dtypes: the weight of each dtype; functions: how often a call has a score
    of its own; 1.0: each has a function of the score or the mask."""
    rng = random.Random(f"options {number // CALLS}")
    o: Options = {"dtype": _one(rng, dtypes or {"float32": 0.35, "bfloat16": 0.3, "float16": 0.2, "float64": 0.15})}
    o["d"] = _width(rng)
    o["dv"] = o["d"] if rng.random() < 0.6 else _width(rng)
    o["packed"] = rng.random() < 0.35
    o["band"] = _one(rng, {"full": 0.35, "causal": 0.3, "window": 0.2, "causal window": 0.15})
    o["alignment"] = _one(rng, {"bottom_right": 0.7, "top_left": 0.3})
    o["score"] = _one(rng, {"dot": 0.65, "softcap": 0.22, "hyperbolic": 0.13})
    if o["score"] == "softcap":
        o["softcap"] = _one(rng, {1.0: 1, 5.0: 1, 30.0: 1, round(_log_uniform(rng, 0.5, 60), 3): 2})
    if o["score"] == "hyperbolic":
        o |= {"beta": rng.choice([1.0, 0.5, 2.5]), "shift": rng.choice([0.0, -0.7, 1.5])}
    sign = _one(rng, {1: 0.75, -1: 0.25})
    own = sign * round(_log_uniform(rng, 0.02, 1.5), 4)
    o["scale"] = _one(rng, {None: 0.6, 0.0: 0.03, own: 0.3, 4.0 * sign / math.sqrt(o["d"]): 0.07})
    if o["score"] == "hyperbolic":
        # Near x = -1 the derivative depends on the last bit of x, and can be 0 or huge. Many x are there if d is small, because such points
        # often coincide, or if the scale is below 1.
        o["d"], o["scale"] = max(o["d"], 8), _one(rng, {None: 0.7, 1.5: 0.2, -0.5: 0.1})
    o["alibi"] = _one(rng, {None: 0.75, "H": 0.15, "BH": 0.1})
    o["bias"] = _one(rng, {None: 0.68, "own": 0.2, "float32": 0.12})
    if o["bias"] and o["dtype"] == "float64":
        o["bias"] = "own"
    o["mask"] = rng.random() < 0.28
    o["sinks"] = rng.random() < 0.2
    o["dropout"] = _one(rng, {0.0: 0.75, 0.1: 0.1, 0.5: 0.06, 0.002: 0.03, 0.97: 0.03, round(rng.random(), 3): 0.03})
    o["blocks"] = (
        None if rng.random() < 0.8 else _one(rng, {(128, 128): 3, (128, 64): 2, (64, 64): 2, (16, 16): 2, (48, 80): 1, (256, 32): 1})
    )
    o["flags"] = sorted(name for name, p in {"deterministic": 0.25, "exact_max": 0.2, "check": 0.05}.items() if rng.random() < p)
    o["tile"] = None if rng.random() < 0.88 else (rng.choice([1, 16, 64, 100, 128, 256]), rng.choice([1, 16, 48, 64, 128, 300]))
    o["leaves"] = [name for name in ("q", "k", "v", "bias", "sinks") if rng.random() < 0.6] if rng.random() < 0.2 else None
    o["aligned"] = rng.random() < 0.75  # rows at 16-byte addresses, if their width allows it
    o["length"] = _one(rng, {"any": 0.5, "short": 0.1, "long keys": 0.1, "long": 0.3})
    if rng.random() < 0.05:
        which = rng.choice(["both", "both", "both", "d", "dv"])
        o["d"] = o["d"] if which == "dv" else _wide(rng, 576)
        o["dv"] = o["dv"] if which == "d" else _wide(rng, 512)
    o["used"] = rng.random() < 0.2
    o["aux"] = rng.choice([("max_logit",), ("column_sums",), ("max_logit", "column_sums")]) if rng.random() < 0.2 else ()
    if rng.random() < 0.1:
        o["flags"] = sorted([*o["flags"], "invariant"])
    o["part"] = _one(rng, {None: 0.82, "aligned": 0.08, "any": 0.1})  # the positions of rows in a larger problem
    if o["part"]:  # a part excludes the following options
        o |= {"used": False, "aux": (), "flags": [name for name in o["flags"] if name != "invariant"]}
    o["page"] = None  # keys per page
    if not o["part"] and rng.random() < 0.12:
        o["page"] = rng.choice([16, 16, 32, 64, 64, 128, 256, 1, rng.randint(1, 300)])
        o["flags"] = [name for name in o["flags"] if name != "deterministic"]
    o["quant"] = None  # the stored kind of k and v
    if not o["part"] and o["dtype"] != "float64" and rng.random() < 0.15:
        even = o["d"] % 2 == 0 and o["dv"] % 2 == 0
        stored = rng.choice(["int8", "float8", "e5m2", "int4"] if even else ["int8", "float8", "e5m2"])
        o["quant"] = Kind(stored, rng.choice([*SCALES]), rng.choice([None, None, 32, 64, 128, 32 * rng.randint(1, 9)]))
        if stored == "float8" and o["dtype"] in ("float16", "bfloat16"):
            o["quant"] = o["quant"]._replace(queries=rng.random() < 0.5)
        o["flags"] = [name for name in o["flags"] if name != "deterministic"]
    of_score, of_mask = rng.random(), rng.random()
    o["functions"] = [
        name for name, drawn in (("score", o["score"] == "dot" and of_score < functions), ("mask", of_mask < functions / 2)) if drawn
    ]
    if functions == 1.0 and not o["functions"]:
        o["functions"] = ["mask"]
    o["tables"] = rng.choice(["wide", "wide", "own"])  # the dtype of captured reals
    return o


@dataclass
class Placing:
    """For each sequence, the ranges of its rows' positions, and the length of the whole sequence. The sequences of a dense call all have
    the same ranges, or each has its own."""

    ranges_q: list[list[tuple[int, int]]]
    ranges_k: list[list[tuple[int, int]]]
    seqlens_q: list[int]
    seqlens_k: list[int]
    first_head: int
    heads: int
    first_batch: int

    def option(self) -> strobe.Part:
        def once(lists: list[Any]) -> list[Any]:
            return lists[:1] if lists and all(x == lists[0] for x in lists) else lists

        lists = (once(x) for x in (self.ranges_q, self.ranges_k, self.seqlens_q, self.seqlens_k))
        return strobe.Part(*lists, self.first_head, self.heads, self.first_batch)


def _placed(rng: random.Random, length: int, unit: int) -> tuple[list[tuple[int, int]], int]:
    """Cuts the rows of one sequence into ranges with gaps between them. Returns the ranges and the length of a whole sequence that holds
    them."""
    ranges, at = [], 0
    for n in range(4):
        at += rng.choice([0, rng.randint(0, 80)]) // unit * unit
        size = length if n == 3 else min(length, rng.randint(0, max(length, 1)) // unit * unit)
        ranges.append((at, size))
        at, length = at + size, length - size
    return ranges, at + rng.choice([0, rng.randint(0, 80)])


def _part(rng: random.Random, o: Options, s: Shape) -> Placing | None:
    if not o["part"]:
        return None
    sides = []
    for length, lengths in ((s.sq, s.lengths_q), (s.sk, s.lengths_k)):
        unit = 16 if o["part"] == "aligned" else 1
        if lengths is None and (s.b == 0 or rng.random() < 0.5):
            sides.append([_placed(rng, length, unit)] * s.b)
        else:
            sides.append([_placed(rng, n, unit) for n in (lengths if lengths is not None else [length] * s.b)])
    first_head = rng.choice([0, 0, 1, 7])
    lists = [[x[n] for x in side] for n in (0, 1) for side in sides]
    return Placing(*lists, first_head, first_head + s.h + rng.choice([0, 3]), rng.choice([0, 0, 2]))


@dataclass
class Shape:
    b: int
    h: int
    hkv: int
    sq: int  # packed: of the longest sequence
    sk: int
    lengths_q: list[int] | None = None
    lengths_k: list[int] | None = None
    total_q: int = 0  # tokens, with padding after the last sequence
    total_k: int = 0
    used: list[int] | None = None  # per sequence
    part: Placing | None = None


def _length(rng: random.Random, most: int) -> int:
    if rng.random() < 0.02:
        return 0
    n = round(_log_uniform(rng, 0.6, most))
    return min(most, max(1, n if rng.random() < 0.8 else (n + 15) // 16 * 16 + rng.choice([-1, 0, 0, 1])))


def _lengths(rng: random.Random, o: Options, most: int, most_keys: int) -> tuple[int, int]:
    if o["length"] == "short":
        return _length(rng, 16), _length(rng, most)
    if o["length"] == "long keys":
        return _length(rng, 8), rng.randint(most_keys // 8, most_keys)
    if o["length"] == "long":
        sq = rng.randint(most // 8, most)
        return sq, sq if rng.random() < 0.5 else rng.randint(most // 8, most)
    sq = _length(rng, most)
    return sq, sq if rng.random() < 0.35 else _length(rng, most)


def draw_shape(number: int, o: Options, scores: Callable[[random.Random], float], most: int = 4096, most_keys: int = 16384) -> Shape:
    """scores: draws how many scores the call may have; most: the largest length; most_keys: that of the keys, if these are "long keys"."""
    rng = random.Random(f"shape {number}")
    budget = scores(rng) if o["length"] != "long keys" else max(scores(rng), 2 * most_keys)
    sq, sk = _lengths(rng, o, most, most_keys)
    while sq * sk > budget:  # shortens the longer of the two, but not "long keys"
        if o["length"] == "long keys" and sq > 1 and sk < budget:
            sq = max(1, int(budget / sk))
        elif sq >= sk:
            sq = max(1, int(sq * rng.uniform(0.5, 0.95)))
        else:
            sk = max(1, int(sk * rng.uniform(0.5, 0.95)))
    room = budget / (max(1, sq) * max(1, sk))
    hkv = min(int(_log_uniform(rng, 1, 8.99)), max(1, int(room)))
    group = min(rng.choice([1, 1, 1, 2, 3, 4, 7, 8]), max(1, int(room / hkv)))
    b = min(int(_log_uniform(rng, 1, 6.99)), max(1, int(room / hkv / group)))
    if rng.random() < 0.01:
        b = 0
    s = Shape(b, hkv * group, hkv, sq, _whole_pages(o, sk))
    if not o["packed"]:
        s.used, s.part = _used(rng, o, [s.sk] * b), _part(rng, o, s)
        return s

    def lengths(longest: int) -> list[int]:
        found = [min(longest, _length(rng, max(1, longest))) for _ in range(b)]
        if found:
            found[rng.randrange(b)] = longest
        return [0 if rng.random() < 0.08 else n for n in found]

    s.lengths_q = lengths(sq)
    s.lengths_k = list(s.lengths_q) if sq == sk and rng.random() < 0.6 else lengths(sk)
    s.sq, s.sk = max(1, sq), _whole_pages(o, max(1, sk))  # max_seqlen 0 would mean that it is absent
    padding = rng.random() < 0.6
    s.used = _used(rng, o, s.lengths_k)
    s.total_q = sum(s.lengths_q) + (rng.choice([1, 7, 40, 130]) if padding else 0)
    s.part = _part(rng, o, s) if o["part"] else None
    s.total_k = sum(s.lengths_k) + (s.total_q - sum(s.lengths_q) if rng.random() < 0.5 else rng.choice([0, 1, 60, 150]) if padding else 0)
    return s


def _whole_pages(o: Options, keys: int) -> int:
    return -(-keys // o["page"]) * o["page"] if o["page"] else keys


def _used(rng: random.Random, o: Options, lengths: list[int]) -> list[int] | None:
    """How many keys of each sequence count."""
    if not o["used"]:
        return None
    return [_one(rng, {n: 0.25, rng.randint(0, n): 0.65, min(n, rng.randint(0, 2)): 0.1}) for n in lengths]


SPOILS = {"nan": [math.nan], "inf": [math.inf], "-inf": [-math.inf], "huge": [1.0, -1.0], "all": [math.nan, math.inf, -math.inf, 1.0, -1.0]}


class _Values:
    """Draws the numbers in the tensors of one call."""

    def __init__(self, number: int, device: str):
        self.number = number
        self.rng = random.Random(f"values {number}")
        self.generator = torch.Generator(device).manual_seed(number)
        self.device = device
        self.spoil = _one(self.rng, {None: 0.35, "nan": 0.25, "inf": 0.1, "-inf": 0.05, "huge": 0.15, "all": 0.1})

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def chance(self, p: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device) < p

    def spoil_like(self, x: Tensor) -> Tensor:
        """A tensor of x's size with NaN, infinities or huge numbers; random bytes for bool."""
        if x.dtype == torch.bool:
            return self.chance(0.5, *x.shape)
        if x.dtype == torch.uint8:  # bytes of quantised keys
            return torch.randint(256, x.shape, generator=self.generator, device=self.device, dtype=torch.uint8)
        kinds = torch.tensor([n * torch.finfo(x.dtype).max if abs(n) == 1.0 else n for n in SPOILS[self.spoil]], dtype=torch.float64)
        index = torch.randint(len(kinds), (1009,), generator=self.generator, device=self.device)
        return kinds.to(self.device)[index].to(x.dtype).repeat(x.numel() // 1009 + 1)[: x.numel()].view(x.shape)

    def spoiled(self, x: Tensor, where: Tensor) -> Tensor:
        """x, after numbers that must not be read were written to its memory at `where`."""
        if self.spoil is None or not where.numel():
            return x
        return x.copy_(torch.where(where, self.spoil_like(x), x))

    def empty(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        """Memory for a tensor. What is left of it between the rows must not be read."""
        t = torch.zeros(shape, dtype=dtype, device=self.device)
        return t if self.spoil is None else self.spoil_like(t)

    def stored(self, t: Tensor, aligned: bool, expands: bool = True) -> Tensor:
        """t in other strides. "expanded" broadcasts the first head or batch."""
        kinds = {"dense": 4, "heads last": 4, "wider": 3, "expanded": 0 if not expands else 0.6 if t.dim() == 4 else 0.3}
        if not aligned:
            kinds |= {"sliced": 2, "offset": 2, "transposed": 1.5}
        kind = _one(self.rng, kinds)
        dense, t = t, t.contiguous()
        if kind == "heads last":
            return t.transpose(-3, -2).contiguous().transpose(-3, -2)
        if kind == "wider":
            unit = 64 // t.element_size() if aligned else 1
            width = (t.shape[-1] + unit - 1) // unit * unit + unit * self.rng.randint(0 if aligned else 1, 2)
            wide = self.empty([*t.shape[:-1], width], t.dtype)
            first = unit * self.rng.randint(0, (width - t.shape[-1]) // unit)
            view = wide[..., first : first + t.shape[-1]]
            view.copy_(t)
            return view
        if kind == "sliced":
            steps = [self.rng.choice([1, 1, 2, 3]) for _ in t.shape]
            wide = self.empty([n * step + 1 for n, step in zip(t.shape, steps, strict=True)], t.dtype)
            view = wide[tuple(slice(1, 1 + step * n, step) for n, step in zip(t.shape, steps, strict=True))]
            view.copy_(t)
            return view
        if kind == "offset":
            memory = self.empty([t.numel() + 7], t.dtype)
            view = memory[self.rng.randint(1, 7) :][: t.numel()].view(t.shape)
            view.copy_(t)
            return view
        if kind == "transposed":
            return t.transpose(-1, -2).contiguous().transpose(-1, -2)
        if kind == "expanded" and t.numel():
            axis = self.rng.choice([0, 1]) if t.dim() == 4 else 1
            return t.narrow(axis, 0, 1).expand(t.shape)
        return dense


def _lorentz(x: Tensor, flip: bool) -> Tensor:
    """x with its first coordinate replaced, so that every row is a point of the hyperboloid. flip: negates it, so that a dot product with a
    point is a Lorentz product."""
    first = (1 + (x[..., 1:] ** 2).sum(-1, keepdim=True)).sqrt()
    return torch.cat([-first if flip else first, x[..., 1:]], dim=-1)


def _pattern(values: _Values, shape: tuple[int, ...]) -> Tensor:
    """A bool mask."""
    rng = values.rng
    kind = _one(rng, {"elements": 4, "keys": 2, "blocks": 2, "rows": 1, "nothing": 0.3, "all": 0.3})
    if kind == "elements":
        return values.chance(rng.choice([0.03, 0.5, 0.8, 0.98]), *shape)
    if kind == "keys":
        limit = (values.normal(*shape[:2], 1, 1).abs() * shape[3]).round()
        return (torch.arange(shape[3], device=values.device) < limit).expand(shape).contiguous()
    if kind == "blocks":
        rows, cols = -(-shape[2] // 32), -(-shape[3] // 32)
        coarse = values.chance(0.5, *shape[:2], rows, cols)
        return coarse.repeat_interleave(32, 2).repeat_interleave(32, 3)[:, :, : shape[2], : shape[3]].contiguous()
    if kind == "rows":
        return values.chance(0.6, *shape[:3], 1).expand(shape).contiguous()
    return torch.full(shape, kind == "all", device=values.device)


def build(number: int, o: Options, s: Shape, device: str) -> Call:
    values = _Values(number, device)
    rng = values.rng
    dtype = DTYPES[o["dtype"]]
    wide = torch.float64 if dtype == torch.float64 else torch.float32  # the dtype of lse and sinks
    options: dict[str, Any] = {"causal": "causal" in o["band"], "alignment": o["alignment"]}
    bshd = not o["packed"] and rng.random() < 0.3
    if bshd:
        options["layout"] = "bshd"
    packing = Packing(s.lengths_q, s.lengths_k, s.sq, s.sk, s.total_q, s.total_k) if s.lengths_q is not None else None
    if packing:
        for side, lengths in (("q", s.lengths_q), ("k", s.lengths_k)):
            options["cu_seqlens_" + side] = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        options |= {"max_seqlen_q": s.sq, "max_seqlen_k": s.sk}
    if s.used is not None:
        options["seqused_k"] = torch.tensor(s.used, dtype=torch.int32, device=device)

    # Tensors that are indexed by the whole problem's positions
    whole_b, whole_h, whole_q, whole_k = s.b, s.h, s.sq, s.sk
    if s.part is not None:
        options["part"] = s.part.option()
        whole_b, whole_h = s.part.first_batch + s.b, s.part.heads
        whole_q, whole_k = (max([0, *x]) for x in (s.part.seqlens_q, s.part.seqlens_k))
        if packing:
            whole_q, whole_k = max(1, whole_q), max(1, whole_k)
            options |= {"max_seqlen_q": whole_q, "max_seqlen_k": whole_k}
    rows = s.sq
    if s.part is not None and packing:
        rows = max(s.lengths_q, default=0)

    # Tensors, as the caller stores them
    points = o["score"] == "hyperbolic"
    large = rng.choice([1.0, 1.0, 3.0] if points else [0.1, 1.0, 1.0, 1.0, 1.0, 3.0])

    def tokens(heads: int, length: int, total: int, width: int, make: Callable[[Tensor], Tensor]) -> Tensor:
        x = values.normal(total, heads, width) if packing else values.normal(s.b, heads, length, width)
        return values.stored(make(x).to(dtype), o["aligned"])

    mean = rng.choice([0.0, 0.0, 1.0])
    q = tokens(s.h, s.sq, s.total_q, o["d"], lambda x: _lorentz(large * x, True) if points else large * x)
    k = tokens(s.hkv, s.sk, s.total_k, o["d"], lambda x: _lorentz(large * x, False) if points else large * x)
    v = tokens(s.hkv, s.sk, s.total_k, o["dv"], lambda x: x + mean)
    dout = tokens(s.h, s.sq, s.total_q, o["dv"], lambda x: x)
    quant = None
    if o["quant"]:
        quant, k, v = _quantised(o, packing, k, v)
        if o["quant"].queries:
            quant.q, quant.q_scale, q = quantised_queries(q)
    lse = rng.choice(["none", "returned", "gradient", "gradient"])
    dlse = values.normal(*((s.h, s.total_q) if packing else (s.b, s.h, s.sq))).to(wide) if lse == "gradient" else None

    # The operations between q.k and the softmax
    if "window" in o["band"]:
        longest = max(s.sq, s.sk, 1)
        sides = [None if rng.random() < 0.3 else int(_log_uniform(rng, 1, 2 * longest)) - 1 for _ in range(2)]
        options["window"] = sides[0] if sides[0] == sides[1] and sides[0] is not None else tuple(sides)
    options["scale"] = o["scale"]
    if o["score"] == "softcap":
        options["softcap"] = o["softcap"]
    if points:
        options |= {"score": "hyperbolic", "beta": o["beta"], "shift": o["shift"]}

    def broadcast() -> tuple[int, ...]:
        sizes = (s.b, s.h, rows, whole_k)
        return sizes if rng.random() < 0.3 else tuple(1 if rng.random() < 0.5 else n for n in sizes)

    if o["alibi"]:
        options["alibi_slopes"] = values.normal(*((s.h,) if o["alibi"] == "H" else (s.b, s.h))).abs() * rng.choice([0.01, 0.3])
    if o["bias"]:
        bias = rng.choice([1.0, 1.0, 8.0]) * values.normal(*broadcast())
        if rng.random() < 0.3:
            bias[values.chance(rng.choice([0.1, 0.9]), *bias.shape)] = -math.inf
        options["bias"] = values.stored(bias.to(wide if o["bias"] == "float32" else dtype), o["aligned"])
    if o["mask"] and "mask" not in o["functions"]:
        mask = _pattern(values, broadcast())
        options["mask"] = mask if rng.random() < 0.7 else mask.transpose(-1, -2).contiguous().transpose(-1, -2)
    if o["sinks"]:
        options["sinks"] = 2 * values.normal(s.h).to(wide)
    if o["dropout"]:
        options["dropout"] = o["dropout"]
        seed, offset = rng.randint(-(2**63), 2**63 - 1), rng.randint(0, 2**40)
        if rng.random() < 0.4:
            options["rng"] = torch.tensor([seed, offset], device=device)
        else:
            options |= {"seed": seed, "offset": offset}
    if o["blocks"]:
        block_q, block_k = o["blocks"]
        axes = [n if rng.random() < 0.5 else 1 for n in (whole_b, whole_h)]
        kept = values.chance(rng.choice([0.2, 0.6, 1.0]), *axes, -(-whole_q // block_q), -(-whole_k // block_k))
        options["block_mask"] = strobe.BlockMask.from_kept(kept, block_q, block_k, whole_q, whole_k)
    run: dict[str, Any] = dict.fromkeys(o["flags"], True)
    if o["tile"]:
        run |= {"tile_q": o["tile"][0], "tile_k": o["tile"][1]}
    if rng.random() < 0.2:
        run["threads"] = rng.choice([1, 2, 3])
    if rng.random() < 0.1:
        run["reserved_sms"] = rng.choice([1, 3])

    seen = visible(options, s.b, s.h, s.sq, s.sk, packing, device)
    functions = _functions(values, o, options, (whole_b, whole_h, whole_q, whole_k), (s.b, s.h, s.sq, s.sk), device)
    for name, placed in functions.items():
        seen = seen & (placed.sees() if name == "mask" else placed.shows(s.b, s.h, s.sq, s.sk))
        options[name] = placed.function.callable()
    score = functions.get("score")
    lacking = _lacking(values, o, s, device)
    if lacking is not None:
        seen = seen & ~lacking.repeat_interleave(o["page"], 1)[:, None, None]
    dense = Dense.of(q, k, v, dout, dlse, options, seen, packing, score)
    if values.spoil:
        _spoil_tables(values, s, seen, [x.function for x in functions.values()] if s.part is None else [])
        _spoil(values, s, packing, seen, q, k, v, dout, dlse, options)
        if quant is not None:
            _spoil_quantised(values, s, packing, seen, quant)
    handed = None
    if quant is not None:
        handed = _handed(values, o, s, packing, quant, options, lacking, bshd)
    elif o["page"]:
        handed = _paged(values, o, s, packing, k, v, options, lacking)
        if bshd:
            handed.k, handed.v = handed.k.transpose(1, 2), handed.v.transpose(1, 2)
    if bshd:
        q, k, v, dout = (t.transpose(1, 2) for t in (q, k, v, dout))
    given = [name for name in ("q", "k", "v", "bias", "sinks") if name in ("q", "k", "v") or name in options]
    if s.part is not None and "bias" in given:
        given.remove("bias")  # this gradient has the whole problem's columns; test_contract.py tests it
    given += [f"table {n}" for n in score.function.read()] if score else []
    leaves = [name for name in o["leaves"] if name in given] if o["leaves"] else given
    words = {**o, **{name: x for name, x in vars(s).items() if x is not None}, "layout": "bshd" if bshd else "bhsd", "spoil": values.spoil}
    words |= {name: options[name] for name in ("window",) if name in options}
    words |= {name: tuple(options[name].shape) for name in ("bias", "mask") if name in options and name not in functions}
    words |= {f"{name} function": str(placed.function) for name, placed in functions.items()}
    spoiled = values.spoil is not None
    if handed is not None:
        handed.options = _with_gaps(number, handed.options | run)
        leaves = []
    else:
        leaves = leaves or ["q"]
    options = _with_gaps(number, options | run)
    given_functions = [functions[name].function if name in functions else None for name in ("score", "mask")]
    return Call(
        number, q, k, v, dout, dlse, options, leaves, lse != "none", dense, packing, spoiled, words, o["aux"], handed, *given_functions
    )


def _functions(
    values: _Values, o: Options, options: dict[str, Any], whole: tuple[int, ...], own: tuple[int, ...], device: str
) -> dict[str, Placed]:
    """The functions of the score and the mask, which calls of a number // CALLS share but for what their tables hold."""
    found = {}
    sizes = dict(zip(("b", "h", "i", "j"), whole, strict=True))
    for name in o["functions"]:
        function = (draw_function if name == "score" else draw_mask)(random.Random(f"{name} {values.number // CALLS}"))
        dtype = DTYPES[o["dtype"]]
        if o["tables"] == "wide":
            dtype = torch.float64 if dtype == torch.float64 else torch.float32
        fill(function, sizes, random.Random(f"tables {values.number // CALLS}"), values.normal, dtype)
        found[name] = Placed(function, places(options, *own, device))
    return found


def _with_gaps(number: int, options: dict[str, Any]) -> dict[str, Any]:
    """The options with some lists in other strides. The numbers in the gaps would be invalid in the list."""
    rng = random.Random(f"lists {number}")  # a generator of its own, so that the other draws stay the same
    given = dict(options)
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table", "rng"):
        x = options.get(name)
        if x is None or rng.random() < 0.7:
            continue
        kind = rng.choice(["column", "wider", "transposed"])
        if kind == "transposed" and x.dim() > 1:
            given[name] = x.mT.contiguous().mT
            continue
        between = torch.full_like(x, 2**31 - 1)
        given[name] = torch.stack([between, x], -1)[..., 1] if kind == "column" else torch.cat([x, between], -1)[..., : x.shape[-1]]
    return given


def _lacking(values: _Values, o: Options, s: Shape, device: str) -> Tensor | None:
    """(B, pages of a sequence): which pages get a number outside of the pool, so that their keys are hidden. None where such numbers are
    refused: in host memory, and with `check`."""
    if not o["page"] or not ON_GPU or "check" in o["flags"] or values.rng.random() < 0.6:
        return None
    return values.chance(values.rng.choice([0.02, 0.3, 1.0]), s.b, s.sk // o["page"])


def _paged(
    values: _Values, o: Options, s: Shape, packing: Packing | None, k: Tensor, v: Tensor, options: dict[str, Any], lacking: Tensor | None,
    seed: int | None = None,
) -> Handed:  # fmt: skip
    """The paged call, in whose pools pages that must not be read lie between the others. seed: for the places of the pages."""
    counted = s.used if s.used is not None else s.lengths_k if s.lengths_k is not None else [s.sk] * s.b
    if packing:
        k, v = (packing.dense(x, True, values.empty([s.b, s.hkv, s.sk, x.shape[2]], x.dtype)) for x in (k, v))
    generator = values.generator if seed is None else torch.Generator(values.device).manual_seed(seed)
    pages = in_pages(k, v, counted, o["page"], generator, lambda pool: values.empty([*pool.shape], pool.dtype))
    if lacking is not None:
        outside = torch.tensor([-1, -(2**31), len(pages.k), 2**31 - 1], dtype=torch.int32, device=k.device)
        pages.table[lacking] = outside[torch.arange(int(lacking.sum()), device=k.device) % 4]
    given = {name: x for name, x in options.items() if name not in ("cu_seqlens_k", "max_seqlen_k")} | {"page_table": pages.table}
    if packing:
        given["seqused_k"] = torch.tensor(counted, dtype=torch.int32, device=k.device)
    return Handed(*(values.stored(x, o["aligned"], expands=False) for x in (pages.k, pages.v)), given)


def _quantised(o: Options, packing: Packing | None, k: Tensor, v: Tensor) -> tuple[Quantised, Tensor, Tensor]:
    """The stored k and v, and their values."""
    kind, row = o["quant"], 0 if packing else 2
    groups = None
    if kind.group is not None:
        at = torch.arange(k.shape[row], device=k.device)
        groups = group_of(at, kind.group, o["page"])
        if packing and o["page"]:
            groups = torch.full_like(at, -1)  # tokens of no sequence
            for b, (first, n) in enumerate(packing.spans(True)):
                groups[first : first + n] = b * len(at) + group_of(at[:n], kind.group, o["page"])
    return quantised(kind, k, v, row, groups)


def _handed(
    values: _Values, o: Options, s: Shape, packing: Packing | None, quant: Quantised, options: dict[str, Any], lacking: Tensor | None,
    bshd: bool,
) -> Handed:  # fmt: skip
    """The call with k and v quantised."""
    pairs = ((quant.k, quant.v), (quant.k_scale, quant.v_scale))
    if o["page"]:
        seed = values.rng.getrandbits(30)
        data, scales = (_paged(values, o, s, packing, k, v, options, lacking, seed) for k, v in pairs)
        options = data.options
    else:
        data, scales = (Handed(*(values.stored(x, o["aligned"], expands=False) for x in pair), options) for pair in pairs)
    if bshd:
        for x in (data, scales):
            x.k, x.v = x.k.transpose(1, 2), x.v.transpose(1, 2)
    row = 0 if packing and not o["page"] else 1 if bshd else 2
    k, v, more = Quantised(quant.kind, data.k, data.v, scales.k, scales.v).handed(row)
    if quant.q is None:
        return Handed(k, v, options | more)
    q, q_scale = values.stored(quant.q, o["aligned"], expands=False).view(KINDS["float8"][1]), quant.q_scale[..., 0]
    if bshd:
        q, q_scale = q.transpose(1, 2), q_scale.transpose(1, 2)
    return Handed(k, v, options | more | {"q_scale": q_scale, "out_dtype": o["dtype"]}, q)


def _spoil_quantised(values: _Values, s: Shape, packing: Packing | None, seen: Tensor, quant: Quantised) -> None:
    """Fills keys that no query sees with any bytes and scales, except scales that other keys share."""
    unread = _unread(s, seen).to(quant.k.device)
    where = (packing.pack(unread, True, True).T if packing else unread)[..., None]
    values.spoiled(quant.v_scale, where)
    if quant.kind.group is None:
        values.spoiled(quant.k_scale, where)
    for x in (quant.k, quant.v):
        values.spoiled(x, where)


def _unread(s: Shape, seen: Tensor) -> Tensor:
    """(B, Hkv, Sk): which keys no query sees."""
    full = seen.expand(s.b, s.h, s.sq, s.sk)
    return ~full.view(s.b, s.hkv, s.h // s.hkv, s.sq, s.sk).any(3).any(2) if s.sq else torch.ones(s.b, s.hkv, s.sk, dtype=torch.bool)


def _spoil_tables(values: _Values, s: Shape, seen: Tensor, functions: list[Function]) -> None:
    """Where a table has one element per key, those of keys that no query sees."""
    unread = _unread(s, seen).flatten(0, 1).all(0)
    for table in (table for function in functions for table in function.tables):
        if table.by_key and table.kind == "real" and table.values.numel() == len(unread):
            values.spoiled(table.values, unread.to(table.values.device))


def _spoil(
    values: _Values, s: Shape, packing: Packing | None, seen: Tensor,
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, options: dict[str, Any],
) -> None:  # fmt: skip
    """Fills memory that must not be read with NaN: keys that no query sees, tokens of no sequence, queries without keys, regions of the
    bias."""
    full = seen.expand(s.b, s.h, s.sq, s.sk)
    unread = _unread(s, seen)
    empty = ~full.any(3) if s.sk else torch.ones(s.b, s.h, s.sq, dtype=torch.bool)
    unread, empty = unread.to(q.device), empty.to(q.device)
    nobody = torch.zeros_like(empty)
    queries = empty if values.rng.random() < 0.3 else nobody
    # With a sink, a row that sees no key has O = 0, and D = dO O must not become NaN, so its dO is finite.
    for t, where in ((k, unread), (v, unread), (q, queries), (dout, nobody if "sinks" in options else queries)):
        if t.numel() and all(stride or n == 1 for n, stride in zip(t.shape, t.stride(), strict=True)):
            values.spoiled(t, (packing.pack(where, where is unread, True).T if packing else where)[..., None])
    if dlse is not None:
        rows = nobody if "sinks" in options else empty
        values.spoiled(dlse, packing.pack(rows, False, True) if packing else rows)
    bias = options.get("bias")
    if (
        bias is not None
        and "part" not in options
        and bias.numel()
        and values.rng.random() < 0.5
        and all(bias.stride(i) or bias.shape[i] == 1 for i in range(4))
    ):
        axes = [i for i in range(4) if bias.shape[i] == 1]
        values.spoiled(bias, ~(full.any(dim=axes, keepdim=True) if axes else full) & (bias != -math.inf))  # -inf hides by itself
