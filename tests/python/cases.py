"""The options of the contract as factors, their pairs (or triples) as cases, and the inputs of each case."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import plain
import strobe
from paging import in_pages
from quantising import KINDS, Kind, Quantised, group_of, quantised, quantised_queries

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# Every value of every option that the pairs cover. The first value of each is the plain one.
FACTORS: dict[str, list[Any]] = {
    "dtype": ["float32", "float64", "float16", "bfloat16"],
    "dims": [
        (64, 64),
        (128, 128),
        (32, 32),
        (1, 1),
        (7, 5),
        (80, 80),
        (96, 40),
        (33, 65),
        (16, 24),
        (192, 128),
        (256, 256),
        (40, 321),
        (576, 512),
    ],
    "lengths": [(64, 64), (1, 1), (17, 17), (129, 129), (1, 129), (129, 1), (17, 129), (129, 64), (64, 17), (5, 300)],
    "batch": [2, 1, 3],
    "heads": [(2, 2), (1, 1), (3, 3), (4, 2), (6, 1), (8, 2)],
    "varlen": [None, "lengths", "zero lengths"],
    "used": [None, "some", "few or none"],
    "storage": ["bhsd", "bshd", "transposed", "expanded batch", "expanded heads", "sliced", "reversed"],
    "dout": ["contiguous", "transposed", "expanded"],
    "band": [
        "full",
        "causal",
        "window 8,0",
        "window 16,16",
        "window 0,0",
        "window None,5",
        "window 40,None",
        "int window 7",
        "causal window 33,20",
    ],
    "alignment": ["bottom_right", "top_left"],
    "scale": [None, 0.1, -0.3, 0.0],
    "softcap": [0.0, 3.0, 30.0],
    "score": ["dot", "hyperbolic 1,0", "hyperbolic 2.5,-0.7"],
    "alibi": [None, "H", "BH"],
    "bias": [None, "BHQK", "1HQK", "B1QK", "B11K", "11QK", "1HQ1", "1111", "BH1K"],
    "bias kind": [None, "gradient", "fixed", "float32", "-inf"],
    "mask": [None, "BHQK", "B11K", "11QK", "1HQ1", "1H1K", "all but nothing"],
    "sinks": [None, "gradient", "fixed"],
    "dropout": [0.0, 0.1, 0.5, "rng"],
    "blocks": [None, (16, 16, "11"), (32, 64, "BH"), (64, 16, "1H"), (48, 48, "B1"), (64, 32, "11")],
    "lse": ["none", "returned", "gradient"],
    "aux": [(), ("max_logit",), ("column_sums",), ("column_sums", "max_logit")],
    "tile": [None, (1, 1), (16, 16), (64, 32), (128, 256)],
    "threads": [None, 1, 2, 3],
    "values": ["normal", "mean 1", "large"],
    "flag": [None, "deterministic", "exact_max", "allow_tf32", "invariant", "check", "reserved_sms"],
    "part": [None, "anywhere", "multiples of 16", "each anywhere"],
    "page": [None, 16, 1, 7, 64],
    "quant": [
        None,
        Kind("int8", "float32"),
        Kind("float8", "float16"),
        Kind("int4", "float16"),
        Kind("int4", "float32", 32),
        Kind("int8", "float16", 64),
        Kind("float8", "float32", 96),
        Kind("float8", "float32", None, True),
    ],
}
Factors = dict[str, list[Any]]
Names, Indices = tuple[str, ...], tuple[int, ...]


def _valid(case: dict[str, Any]) -> bool:
    """Whether one call may have the values in `case`, which may lack options. Every rule concerns two options."""
    rules = [
        # negative strides come from NumPy, which has no bfloat16 and whose gradients are never expanded
        not (case.get("storage") == "reversed" and case.get("dtype") == "bfloat16"),
        not (case.get("storage") == "reversed" and case.get("dout") == "expanded"),
        # packed tokens have one layout and no batch axis
        not (case.get("varlen") and case.get("storage") in ("bshd", "expanded batch")),
        # the ranges of a part determine which keys count
        not (case.get("part") and case.get("used")),
        # these options are refused with a part
        not (case.get("part") and (case.get("aux") or case.get("flag") == "invariant" or case.get("page"))),
        not ({"bias", "bias kind"} <= case.keys() and (case["bias"] is None) != (case["bias kind"] is None)),
        # a score is one function of q.k
        not (case.get("score", "dot") != "dot" and case.get("softcap")),
        not (case.get("bias kind") == "float32" and case.get("dtype") == "float64"),
    ]
    if quant := case.get("quant"):
        rules += [
            case.get("dtype") != "float64",
            # out beside q of FP8
            not (quant.queries and case.get("dtype") == "float32"),
            not case.get("part"),
            # two INT4 share a byte
            not (quant.stored == "int4" and any(n % 2 for n in case.get("dims", ()))),
            # NumPy has no float8
            not (quant.stored in ("float8", "e5m2") and case.get("storage") == "reversed"),
        ]
    return all(rules)


def tuples(strength: int, factors: Factors = FACTORS, valid: Callable[[dict[str, Any]], bool] = _valid) -> dict[Names, set[Indices]]:
    """For every `strength` options: the combinations of their values (as indices) that one call may have."""
    found = {}
    for names in itertools.combinations(factors, strength):
        indices = itertools.product(*(range(len(factors[name])) for name in names))
        found[names] = {index for index in indices if valid({n: factors[n][i] for n, i in zip(names, index, strict=True)})}
    return found


def contract(strength: int) -> list[dict[str, Any]]:
    """Cases that hold every combination. Quantised keys have no gradients, so they get cases of their own."""
    plain = combinations(strength, FACTORS | {"quant": [None]})
    return plain + combinations(strength, FACTORS | {"quant": FACTORS["quant"][1:]}, among="quant")


def combinations(
    strength: int, factors: Factors = FACTORS, valid: Callable[[dict[str, Any]], bool] = _valid, among: str | None = None
) -> list[dict[str, Any]]:
    """Cases that hold every allowed combination of the values of any `strength` options. Each case starts from a combination that is
    missing so far; then every other option gets the value that adds the most missing ones. among: only combinations with this option."""
    left = {names: found for names, found in tuples(strength, factors, valid).items() if among is None or among in names}
    order = list(factors)
    shuffle = random.Random(strength)

    def held(row: dict[str, int], name: str) -> int:
        """How many missing combinations with the option `name` the row holds."""
        groups = (sorted((name, *rest), key=order.index) for rest in itertools.combinations(row.keys() - {name}, strength - 1))
        return sum(tuple(row[n] for n in group) in left.get(tuple(group), ()) for group in groups)

    cases = []
    for names in left:
        while left[names]:
            row = dict(zip(names, min(left[names]), strict=True))
            for name in shuffle.sample(order, len(order)):
                if name in row:
                    continue
                values = shuffle.sample(range(len(factors[name])), len(factors[name]))
                rows = [row | {name: value} for value in values]
                row = max((r for r in rows if valid({n: factors[n][i] for n, i in r.items()})), key=lambda r, name=name: held(r, name))
            for group, missing in left.items():
                missing.discard(tuple(row[n] for n in group))
            cases.append({name: factors[name][row[name]] for name in order})
    return cases


@dataclass
class Inputs:
    """One call: the tensors as the caller lays them out, and strobe.attention's options."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    options: dict[str, Any]
    gradients: list[str] = field(default_factory=list)  # "bias" and "sinks", if their gradients are asked for
    lse: bool = True
    numpy: bool = False  # pass NumPy arrays with negative strides, backward through attention_backward
    run: dict[str, Any] = field(default_factory=dict)  # options that say how the call runs, not what it computes: tile, threads, flags
    aux: tuple[str, ...] = ()
    page: int | None = None  # k and v are passed in pages of this many keys, forward only; Sk is a multiple of it
    quant: Quantised | None = None  # the stored k and v (q) to pass; the fields k and v hold their values in float64; forward only

    @property
    def varlen(self) -> bool:
        return "cu_seqlens_q" in self.options

    @property
    def has_gradients(self) -> bool:
        return not self.page and self.quant is None

    def handed(self) -> Inputs:
        """The call as the library gets it: with k and v quantised, and in pages."""
        if self.quant is None:
            return self.paged() if self.page else self
        kind, bshd = self.quant.kind, self.options.get("layout") == "bshd"
        pairs = ((self.quant.k, self.quant.v), (self.quant.k_scale, self.quant.v_scale))
        data, scales = (replace(self, k=k, v=v, quant=None) for k, v in pairs)
        if self.page:
            data, scales = data.paged(), scales.paged()
        row = 0 if self.varlen and not self.page else 1 if bshd else 2
        k, v, more = Quantised(kind, data.k, data.v, scales.k, scales.v).handed(row)
        q = self.q
        if self.quant.q is not None:
            q, word = self.quant.q.view(KINDS["float8"][1]), str(self.q.dtype).removeprefix("torch.")
            more |= {"q_scale": self.quant.q_scale[..., 0], "out_dtype": word}
        return replace(data, q=q, k=k, v=v, options=data.options | more)

    def paged(self) -> Inputs:
        """The call with k and v in pages."""
        o, bshd = self.options, self.options.get("layout") == "bshd"
        k, v = (x.transpose(1, 2) if bshd else x for x in (self.k, self.v))
        used = None if o.get("seqused_k") is None else o["seqused_k"].tolist()
        if self.varlen:
            starts = o["cu_seqlens_k"].tolist()
            lengths = [end - start for start, end in itertools.pairwise(starts)]
            k, v = (self._one_by_one(x, starts, o["max_seqlen_k"]) for x in (k, v))
        else:
            lengths = [k.shape[2]] * k.shape[0]
        generator = torch.Generator().manual_seed(k[..., :1].numel())
        pages = in_pages(k, v, used or lengths, self.page, generator)
        pools = (x.transpose(1, 2).contiguous() if bshd else x for x in (pages.k, pages.v))
        options = {name: x for name, x in o.items() if name not in ("cu_seqlens_k", "max_seqlen_k")} | {"page_table": pages.table}
        if self.varlen or used is not None:
            options["seqused_k"] = torch.tensor(used or lengths, dtype=torch.int32, device=k.device)
        return replace(self, k=next(pools), v=next(pools), options=options)

    def _one_by_one(self, x: Tensor, starts: list[int], most: int) -> Tensor:
        """Packed rows as (B, H, most, width), each sequence padded with zeros."""
        found = x.new_zeros(len(starts) - 1, x.shape[1], most, x.shape[2])
        for b, (start, end) in enumerate(itertools.pairwise(starts)):
            found[b, :, : end - start] = x[start:end].transpose(0, 1)
        return found

    def packed_columns(self, sums: Tensor) -> Tensor:
        """column_sums of the paged call, in the shape of the call without pages."""
        if not self.varlen:
            return sums
        found = sums.new_zeros(sums.shape[1], self.k.shape[0])
        for b, (start, end) in enumerate(itertools.pairwise(self.options["cu_seqlens_k"].tolist())):
            found[:, start:end] = sums[b, :, : end - start]
            assert not sums[b, :, end - start :].any()
        return found


def _storage(kind: str, t: Tensor) -> Tensor:
    """The values of t in other strides. The expanded kinds repeat the first batch or head."""
    if kind == "transposed":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if kind == "expanded batch":
        return t[:1].expand(t.shape)
    if kind == "expanded heads":
        return t[..., :1, :, :].expand(t.shape) if t.dim() == 4 else t[:, :1].expand(t.shape)
    if kind == "sliced":
        wide = torch.full([n * 2 + 1 for n in t.shape], torch.nan if t.is_floating_point() else 255, dtype=t.dtype)
        view = wide[tuple(slice(1, 1 + 2 * n, 2) for n in t.shape)]
        view.copy_(t)
        return view
    return t


def _on_hyperboloid(x: Tensor) -> Tensor:
    """x with its first coordinate replaced, so that every row is a point of the hyperboloid."""
    return torch.cat([(1 + (x[..., 1:] ** 2).sum(-1, keepdim=True)).sqrt(), x[..., 1:]], dim=-1)


def _flipped(x: Tensor) -> Tensor:
    """x with its first coordinate negated, so that the dot product with a point is the Lorentz product of x and the point."""
    return torch.cat([-x[..., :1], x[..., 1:]], dim=-1)


def _lengths(generator: torch.Generator, n: int, most: int, zeros: bool) -> list[int]:
    lengths = [int(x) for x in torch.randint(1, most + 1, (n,), generator=generator)]
    lengths[0] = most
    if zeros:
        lengths[-1] = 0
        lengths.insert(0, 0)
        lengths.insert(2, 0)
    return lengths


@dataclass
class Placed:
    """The positions of a call's rows in the sequences of a larger problem."""

    ranges: list[list[tuple[int, int]]]  # per sequence
    lengths: list[int]  # lengths of the whole sequences

    @classmethod
    def drawn(cls, generator: torch.Generator, lengths: list[int], kind: str) -> Placed:
        ranges: list[list[tuple[int, int]]] = []
        wholes = []
        for length in lengths:
            if ranges and kind != "each anywhere" and len(set(lengths)) == 1:
                ranges.append(ranges[0])
                wholes.append(wholes[0])
                continue
            unit, at, left, found = 16 if kind == "multiples of 16" else 1, 0, length, []
            for last in (False, False, False, True):
                gap, size = (int(x) for x in torch.randint(50, (2,), generator=generator) // unit * unit)
                size = left if last else min(size, left)
                found.append((at + gap, size))
                at, left = at + gap + size, left - size
            ranges.append(found)
            wholes.append(at + int(torch.randint(50, (1,), generator=generator)))
        return cls(ranges, wholes)

    def longest(self) -> int:
        return max([1, *self.lengths])


def positions(ranges: Any) -> Tensor:
    """The positions in one sequence's ranges."""
    return torch.cat([torch.arange(0), *(torch.arange(start, start + length) for start, length in ranges)])


def _cumulated(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def _groups(group: int, page: int | None, rows: int, starts: list[int] | None) -> Tensor:
    """The group of each row of k, or of each token of packed sequences that begin at `starts`."""
    at = torch.arange(rows)
    if starts is None or page is None:
        return group_of(at, group, page)
    found = torch.full((rows,), -1)  # tokens of no sequence
    for b, (start, end) in enumerate(itertools.pairwise(starts)):
        found[start:end] = b * rows + group_of(at[: end - start], group, page)
    return found


def _window(band: str) -> Any:
    words = band.split()
    if words[0] == "int":
        return int(words[2])
    if "window" not in words:
        return None
    return tuple(None if side == "None" else int(side) for side in words[-1].split(","))


def build(case: dict[str, Any]) -> Inputs:
    """The inputs of a case. Equal cases have equal inputs."""
    g = torch.Generator().manual_seed(zlib.crc32(repr(sorted(case.items(), key=str)).encode()))
    dtype = DTYPES[case["dtype"]]
    wide = torch.float64 if dtype == torch.float64 else torch.float32  # the dtype of lse and sinks, and of a float32 bias
    (d, dv), (sq, sk), (h, hkv), b = case["dims"], case["lengths"], case["heads"], case["batch"]
    options: dict[str, Any] = {}
    varlen = case["varlen"]
    if case["page"] and not varlen:
        sk = -(-sk // case["page"]) * case["page"]
    if varlen:
        zeros = varlen == "zero lengths"
        lengths_q, lengths_k = _lengths(g, b + 1, sq, zeros), _lengths(g, b + 1, sk, zeros)
        if zeros:
            lengths_q[1], lengths_k[-2] = 0, 0  # one sequence has no queries, one no keys
        b = len(lengths_q)
        options |= {"cu_seqlens_q": _cumulated(lengths_q), "cu_seqlens_k": _cumulated(lengths_k)}
        sq, sk = max(1, *lengths_q), max(1, *lengths_k)
        if case["page"]:
            sk = -(-sk // case["page"]) * case["page"]
        options |= {"max_seqlen_q": sq, "max_seqlen_k": sk}

    if case["used"]:
        counted = lengths_k if varlen else [sk] * b
        some = [int(torch.randint(n + 1, (1,), generator=g)) for n in counted]
        if case["used"] == "few or none":
            some = [min(n, b % 3) for b, n in enumerate(some)]
        else:
            some[:1] = counted[:1]
        options["seqused_k"] = torch.tensor(some, dtype=torch.int32)

    # The sizes of the whole problem: the queries and keys of its longest sequence, and its heads and sequences.
    whole_q, whole_k, whole_h, whole_b = sq, sk, h, b
    if case["part"] and b:
        places = [Placed.drawn(g, of, case["part"]) for of in ((lengths_q, lengths_k) if varlen else ([sq] * b, [sk] * b))]
        whole_q, whole_k = (of.longest() for of in places)
        first_head, first_batch = 3, 2
        whole_h, whole_b = first_head + h + 2, first_batch + b + 1
        shared = case["part"] != "each anywhere" and not varlen
        lists = [of.ranges[0] if shared else of.ranges for of in places] + [of.lengths[0] if shared else of.lengths for of in places]
        options["part"] = strobe.Part(*lists, first_head=first_head, heads=whole_h, first_batch=first_batch)
        if varlen:
            options |= {"max_seqlen_q": whole_q, "max_seqlen_k": whole_k}

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    def shaped(s: int, heads: int, width: int, total: Tensor | None) -> tuple[int, ...]:
        if total is not None:
            return int(total[-1]), heads, width
        return (b, s, heads, width) if case["storage"] == "bshd" else (b, heads, s, width)

    total_q, total_k = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    if case["storage"] == "bshd":
        options["layout"] = "bshd"
    q, k, v = (normal(*shaped(*a)) for a in ((sq, h, d, total_q), (sk, hkv, d, total_k), (sk, hkv, dv, total_k)))
    if case["values"] == "mean 1":
        v += 1.0
    if case["values"] == "large":
        q, k = 8 * q, 8 * k
    if case["score"] != "dot":
        beta, shift = map(float, case["score"].split()[1].split(","))
        options |= {"score": "hyperbolic", "beta": beta, "shift": shift}
        q, k = _flipped(_on_hyperboloid(q)), _on_hyperboloid(k)
    storage = case["storage"]
    q, k, v = (_storage(storage, t.to(dtype)) for t in (q, k, v))
    quant = None
    if kind := case["quant"]:
        row, starts = 0 if varlen else 1 if storage == "bshd" else 2, total_k.tolist() if varlen else None
        quant, k, v = quantised(kind, k, v, row, None if kind.group is None else _groups(kind.group, case["page"], k.shape[row], starts))
        if not case["page"]:
            quant.k, quant.v = (_storage(storage, t) for t in (quant.k, quant.v))
        if kind.queries:
            quant.q, quant.q_scale, q = quantised_queries(q)
            quant.q = _storage(storage, quant.q)
        if storage == "sliced":
            quant.k_scale, quant.v_scale = (_storage(storage, t) for t in (quant.k_scale, quant.v_scale))

    dout = normal(*shaped(sq, h, dv, total_q)).to(dtype)
    if case["dout"] == "transposed":
        dout = _storage("transposed", dout)
    if case["dout"] == "expanded":
        dout = dout.flatten()[:1].expand(dout.shape) if dout.numel() else dout
    dlse = None
    if case["lse"] == "gradient":
        dlse = normal(h, q.shape[0]) if varlen else normal(b, h, sq)
        dlse = dlse.to(wide)

    options |= {"causal": "causal" in case["band"], "window": _window(case["band"]), "alignment": case["alignment"], "scale": case["scale"]}
    options["softcap"] = case["softcap"]
    if case["alibi"]:
        options["alibi_slopes"] = (normal(h) if case["alibi"] == "H" else normal(b, h)).abs().to(torch.float32) / 4
    gradients = []

    def broadcast(spec: str) -> tuple[int, ...]:
        return tuple(1 if c == "1" else n for c, n in zip(spec, (b, h, sq, whole_k), strict=True))

    if case["bias"]:
        bias = normal(*broadcast(case["bias"]))
        kind = case["bias kind"]
        if kind == "-inf":
            bias[torch.rand(bias.shape, generator=g) < 0.2] = -torch.inf
            if bias.shape[2] > 1:
                bias[:, :, 1] = -torch.inf
        options["bias"] = bias.to(wide if kind == "float32" else dtype)
        if kind in ("gradient", "float32"):
            gradients.append("bias")
    if case["mask"]:
        if case["mask"] == "all but nothing":
            mask = torch.zeros(b, 1, sq, whole_k, dtype=torch.bool)
            mask[..., -1:, :1] = True
        else:
            mask = torch.rand(broadcast(case["mask"]), generator=g) < 0.7
        options["mask"] = _storage("transposed", mask) if case["mask"] == "BHQK" else mask
    if case["sinks"]:
        options["sinks"] = normal(h).to(wide)
        if case["sinks"] == "gradient":
            gradients.append("sinks")
    if case["dropout"]:
        if case["dropout"] == "rng":
            options |= {"dropout": 0.3, "rng": torch.tensor([-7, 2**40 + 5])}
        else:
            options |= {"dropout": case["dropout"], "seed": 1234, "offset": 2**33 + 1}
    if case["blocks"]:
        block_q, block_k, axes = case["blocks"]
        rows, cols = -(-whole_q // block_q), -(-whole_k // block_k)
        kept = torch.rand(whole_b if axes[0] == "B" else 1, whole_h if axes[1] == "H" else 1, rows, cols, generator=g) < 0.6
        options["block_mask"] = strobe.BlockMask.from_kept(kept, block_q, block_k, whole_q, whole_k)

    run: dict[str, Any] = {"threads": case["threads"]}
    if case["tile"]:
        run |= dict(zip(("tile_q", "tile_k"), case["tile"], strict=True))
    if case["flag"]:
        run[case["flag"]] = 3 if case["flag"] == "reserved_sms" else True
    return Inputs(
        q, k, v, dout, dlse, options, gradients, case["lse"] != "none", storage == "reversed", run, case["aux"], case["page"], quant
    )  # fmt: skip


def dense_problems(inputs: Inputs) -> list[tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None], plain.Score, Any]]:
    """The call as dense problems for the formulas, each ((q, k, v, dout, dlse), score, the sequence's place). A varlen call, and one with
    seqused_k or a part, becomes one problem per sequence."""
    o = inputs.options
    q, k, v = inputs.q, inputs.k, inputs.v
    alignment, softcap, dropout = o.get("alignment", "bottom_right"), o.get("softcap", 0.0), o.get("dropout", 0.0)
    h, d = q.shape[1 if inputs.varlen or o.get("layout") != "bshd" else 2], q.shape[-1]
    window = o.get("window")
    window = (None, None) if window is None else (window, window) if isinstance(window, int) else window
    hyperbolic = (o["beta"], o["shift"]) if o.get("score") == "hyperbolic" else None
    scale = o["scale"] if o.get("scale") is not None else 1.0 if hyperbolic else d**-0.5

    def score(b: int | None, sq: int, sk: int) -> plain.Score:
        """b: the sequence of a varlen call, or None for the whole batch."""
        rows = slice(None) if b is None else slice(b, b + 1)
        held: strobe.Part | None = o.get("part")
        if held is not None:
            return score_of_part(held, b or 0, sq, sk)

        def part(t: Tensor) -> Tensor:  # (B|1, H|1, Sq|1, Sk|1) for this sequence
            t = t if t.shape[0] == 1 else t[rows]
            return t[:, :, : min(sq, t.shape[2]) if t.shape[2] > 1 else 1, : min(sk, t.shape[3]) if t.shape[3] > 1 else 1]

        visible = plain.band(sq, sk, o.get("causal", False), window, alignment)[None, None]
        if "mask" in o:
            visible = visible & part(o["mask"])
        if "block_mask" in o:
            visible = visible & part(o["block_mask"].to_dense())
        alibi = None
        if "alibi_slopes" in o:
            slopes = o["alibi_slopes"].double()
            slopes = slopes[None] if slopes.dim() == 1 else slopes[rows]
            alibi = -slopes[:, :, None, None] * plain.distance(sq, sk, alignment).abs()
        keep = None
        if dropout:
            n = 1 if inputs.varlen else q.shape[0]
            shape = (n if b is None else b + 1, h, sq, sk)
            keep = strobe.dropout_mask(shape, dropout, **{key: o[key] for key in ("seed", "offset", "rng") if key in o})[rows]
        bias = part(o["bias"]) if "bias" in o else None
        return plain.Score(scale, softcap, hyperbolic, alibi, bias, visible, o.get("sinks"), keep, plain.keep_rate(dropout))

    def score_of_part(held: strobe.Part, b: int, sq: int, sk: int) -> plain.Score:
        """The score of sequence b, whose rows have any positions in a larger problem."""
        at_q, at_k = (positions(x[b if len(x) > 1 else 0]) for x in (held.q_ranges, held.k_ranges))
        whole_q, whole_k = (x[b if len(x) > 1 else 0] for x in (held.seqlens_q, held.seqlens_k))
        heads = slice(held.first_head, held.first_head + h)
        distance = at_q[:, None] + plain.offset_of(whole_q, whole_k, alignment) - at_k[None, :]

        def own(t: Tensor, columns: Tensor) -> Tensor:
            t = t[b : b + 1] if t.shape[0] > 1 else t
            t = t[:, :, :sq] if t.shape[2] > 1 else t
            return t[..., columns] if t.shape[3] > 1 else t

        visible = plain.seen_at(distance, o.get("causal", False), window)[None, None]
        if "mask" in o:
            visible = visible & own(o["mask"], at_k)
        if "block_mask" in o:
            blocks = o["block_mask"].to_dense()
            blocks = blocks[held.first_batch + b, None] if blocks.shape[0] > 1 else blocks
            blocks = blocks[:, heads] if blocks.shape[1] > 1 else blocks
            visible = visible & blocks[:, :, at_q][..., at_k]
        alibi = None
        if "alibi_slopes" in o:
            slopes = o["alibi_slopes"].double()
            alibi = -(slopes if slopes.dim() == 1 else slopes[b])[None, :, None, None] * distance.abs()
        keep = None
        if dropout:
            shape = (held.first_batch + b + 1, held.first_head + h, whole_q, whole_k)
            keep = strobe.dropout_mask(shape, dropout, **{key: o[key] for key in ("seed", "offset", "rng") if key in o})
            keep = keep[-1:, heads][:, :, at_q][..., at_k]
        bias = own(o["bias"], at_k) if "bias" in o else None
        return plain.Score(scale, softcap, hyperbolic, alibi, bias, visible, o.get("sinks"), keep, plain.keep_rate(dropout))

    used = None if o.get("seqused_k") is None else o["seqused_k"].tolist()
    if not inputs.varlen:
        tensors = (q, k, v, inputs.dout)
        if o.get("layout") == "bshd":
            tensors = tuple(t.transpose(1, 2) for t in tensors)
        sq, sk = tensors[0].shape[2], tensors[1].shape[2]
        if "part" in o and tensors[0].shape[0]:
            used = [sk] * tensors[0].shape[0]
        if not used:  # there is no sequence, or no batch
            return [((*tensors, inputs.dlse), score(None, sq, sk), None)]
        q, k, v, dout = tensors
        dlse = [None if inputs.dlse is None else inputs.dlse[b : b + 1] for b in range(len(used))]
        return [
            ((q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], dout[b : b + 1], dlse[b]), score(b, sq, n), None)
            for b, n in enumerate(used)
        ]
    problems = []
    cu_q, cu_k = o["cu_seqlens_q"].tolist(), o["cu_seqlens_k"].tolist()
    for b in range(len(cu_q) - 1):
        here_q, here_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1] if used is None else cu_k[b] + used[b])
        packed = ((q, here_q), (k, here_k), (v, here_k), (inputs.dout, here_q))
        tensors = tuple(t[here].transpose(0, 1)[None] for t, here in packed)
        dlse = None if inputs.dlse is None else inputs.dlse[None, :, here_q]
        problems.append(((*tensors, dlse), score(b, here_q.stop - here_q.start, here_k.stop - here_k.start), (here_q, here_k)))
    return problems


def call(
    b: int = 1,
    h: int = 2,
    sq: int = 33,
    sk: int | None = None,
    d: int = 16,
    dv: int | None = None,
    hkv: int | None = None,
    dtype: torch.dtype = torch.float32,
    dlse: bool = True,
    gradients: tuple[str, ...] = (),
    **options: Any,
) -> Inputs:
    """A dense (B,H,S,D) call of normal numbers; a varlen one if cu_seqlens_q is among the options (sq, sk: the totals)."""
    g = torch.Generator().manual_seed(0)
    sk, dv, hkv = sq if sk is None else sk, d if dv is None else dv, h if hkv is None else hkv
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(s: int, heads: int, width: int) -> Tensor:
        shape = (s, heads, width) if "cu_seqlens_q" in options else (b, heads, s, width)
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    q, k, v, dout = normal(sq, h, d), normal(sk, hkv, d), normal(sk, hkv, dv), normal(sq, h, dv)
    shape = (h, sq) if "cu_seqlens_q" in options else (b, h, sq)
    return Inputs(q, k, v, dout, torch.randn(shape, generator=g).to(wide) if dlse else None, options, list(gradients))
