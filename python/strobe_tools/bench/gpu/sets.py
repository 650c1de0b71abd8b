"""The sets of figures: their calls, their contestants, their units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from random import Random
from typing import Any, NamedTuple

from strobe_tools.bench.gpu import drawn
from strobe_tools.bench.gpu.problem import BLOCK, FEATURES, PRODUCTS, SHARES, STORED, WINDOW, Problem, tiles, uneven_lengths

TOKENS, WIDTH = 16384, 2048  # B·S and H·D of most shapes
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
DIMS = (64, 128, 256)
HOPPER = ("cudnn", "fa2", "fa4")
DIRECTIONS = ("forward", "backward")


class Run(NamedTuple):
    who: str
    problem: Problem
    feature: str = "plain"
    work: float | None = None  # FLOP or bytes; None: the problem's FLOP


class Row(NamedTuple):
    """A line of the figures: Strobe's run, beside peers, or beside a second run of its own."""

    where: dict[str, Any]
    strobe: str
    peers: tuple[str, ...] = ()
    base: str | None = None  # the run whose rate Strobe's is compared with


class Group(NamedTuple):
    """Runs that are timed together."""

    set: str
    direction: str  # "forward", "backward" or "both"
    runs: dict[str, Run]
    rows: list[Row]
    unit: str = "TFLOP/s"

    def work(self, name: str) -> float:
        run = self.runs[name]
        return run.problem.flops(self.direction == "backward") if run.work is None else run.work


def _beside(set_: str, p: Problem, peers: tuple[str, ...], unit: str = "TFLOP/s", **where: Any) -> Iterator[Group]:
    """One problem, Strobe and its peers, in both directions."""
    for direction in DIRECTIONS:
        runs = {who: Run(who, p) for who in ("strobe", *peers)}
        yield Group(set_, direction, runs, [Row(where, "strobe", peers)], unit)


def core36() -> Iterator[Group]:
    for d, causal, s in product(DIMS, (False, True), LENGTHS):
        yield from _beside("core36", Problem(TOKENS // s, WIDTH // d, s, d, causal), HOPPER, d=d, s=s, causal=causal)


SHAPES = 60  # drawn at random


def random(count: int = SHAPES, seed: int = 0) -> Iterator[Group]:
    """Shapes drawn from this seed: a longer run begins with those of a shorter one."""
    draw = Random(seed)
    for _ in range(count):
        p, where = drawn.shape(draw)
        yield from _beside("random", p, HOPPER, **where, seed=seed)


def gqa() -> Iterator[Group]:
    for causal in (False, True):
        p = Problem(4, 32, 4096, 128, causal, heads_kv=8)
        yield from _beside("gqa", p, HOPPER, heads="32/8", d=128, s=4096, causal=causal)


def dims() -> Iterator[Group]:
    """Head dimensions between the usual ones, each beside the next larger usual one; and DeepSeek's."""
    for d in (80, 96, 112, 160, 192, 224):
        larger = min(x for x in DIMS if x > d)
        p = Problem(4, WIDTH // larger, 4096, d)
        for direction in DIRECTIONS:
            work = p.flops(direction == "backward")
            runs = {who: Run(who, p) for who in ("strobe", *HOPPER)} | {"next": Run("strobe", p._replace(dim=larger), work=work)}
            yield Group("dims", direction, runs, [Row({"d": d, "dv": d, "s": 4096, "next": larger}, "strobe", HOPPER, "next")])
    yield from _beside("dims", Problem(4, 16, 4096, 192, True, dim_v=128), HOPPER, d=192, dv=128, s=4096, causal=True)


def small() -> Iterator[Group]:
    for b, h, s in ((1, 8, 128), (1, 8, 512), (4, 12, 512)):
        yield from _beside("small", Problem(b, h, s, 64, True), HOPPER, "µs", shape=f"({b},{h},{s},64)", causal=True)


def mma() -> Iterator[Group]:
    """The portable tensor-core kernels, beside the FlashAttention that uses the same instructions."""
    for d, causal in product(DIMS, (False, True)):
        p = Problem(2, WIDTH // d, 8192, d, causal)
        for direction in DIRECTIONS:
            runs = {"cuda-mma": Run("cuda-mma", p), "fa2": Run("fa2", p)}
            yield Group("mma", direction, runs, [Row({"d": d, "s": 8192, "causal": causal}, "cuda-mma", ("fa2",))])


def fp32() -> Iterator[Group]:
    for d in (64, 128):
        p = Problem(4, WIDTH // d, 4096, d, dtype="float32")
        for direction in DIRECTIONS:
            runs = {who: Run(who, p) for who in ("strobe", "cuda-simt", "efficient")}
            rows = [Row({"d": d, "s": 4096, "engine": name}, run, ("efficient",)) for name, run in _FP32_ENGINES.items()]
            yield Group("fp32", direction, rows=rows, runs=runs)


_FP32_ENGINES = {"chosen": "strobe", "cuda-simt": "cuda-simt"}


def varlen() -> Iterator[Group]:
    """Packed sequences of uneven lengths beside equal sequences with as many tokens and scores."""
    for longest, causal in product((1024, 16384), (False, True)):
        powers = [64 << i for i in range(longest.bit_length() - 6)]
        lengths = powers * (TOKENS * 2 // sum(powers))
        Random(0).shuffle(lengths)
        tokens = sum(lengths)
        even = round(sum(n * n for n in lengths) / tokens)
        packed = Problem(0, 16, 0, 128, causal, lengths=tuple(lengths))
        uniform = Problem(round(tokens / even), 16, even, 128, causal)
        for direction in DIRECTIONS:
            runs = {"packed": Run("strobe", packed), "uniform": Run("strobe", uniform)}
            where = {"lengths": f"64 to {longest}", "uniform": f"{uniform.batch} x {even}", "d": 128, "causal": causal}
            yield Group("varlen", direction, runs, [Row(where, "packed", base="uniform")])


def window() -> Iterator[Group]:
    """A window of 1k at 16k: the work is that of the tiles that are partly visible."""
    for d, direction in product((64, 128), DIRECTIONS):
        p = Problem(1, WIDTH // d, 16384, d, True)
        of_tile = p._replace(seqlen=BLOCK, causal=False).flops(direction == "backward")
        runs = {
            "window": Run("strobe", p, "window", of_tile * tiles(p.seqlen, WINDOW)),
            "causal": Run("strobe", p, work=of_tile * tiles(p.seqlen)),
        }
        yield Group("window", direction, runs, [Row({"d": d, "s": p.seqlen, "window": WINDOW}, "window", base="causal")])


def sparse() -> Iterator[Group]:
    """Blocks of 128 x 128 at random: the work is that of the blocks that are kept."""
    for d, direction in product((64, 128), DIRECTIONS):
        p = Problem(1, WIDTH // d, 8192, d)
        dense = p.flops(direction == "backward")
        runs = {"dense": Run("strobe", p)} | {name: Run("strobe", p, name, share * dense) for name, share in SHARES.items()}
        rows = [Row({"d": d, "s": p.seqlen, "blocks": name}, name, base="dense") for name in SHARES]
        yield Group("block-sparse", direction, runs, rows)


def options() -> Iterator[Group]:
    names = [
        name for name in FEATURES if name not in ("plain", "window", "deterministic", "invariant", "uneven", *SHARES, *STORED, PRODUCTS)
    ]  # these have sets of their own
    for d, direction in product((64, 128), DIRECTIONS):
        p = Problem(4, WIDTH // d, 4096, d, True)
        runs = {name: Run("strobe", p, name) for name in ("plain", *names)}
        yield Group("options", direction, runs, [Row({"d": d, "s": 4096, "option": name}, name, base="plain") for name in names])


def deterministic() -> Iterator[Group]:
    for d, s, causal in product((64, 128), (1024, 8192), (False, True)):
        p = Problem(TOKENS // s, WIDTH // d, s, d, causal)
        runs = {name: Run("strobe", p, name) for name in ("plain", "deterministic")}
        yield Group("deterministic", "backward", runs, [Row({"d": d, "s": s, "causal": causal}, "deterministic", base="plain")])


def invariant() -> Iterator[Group]:
    """The forward with `invariant`, beside the same call without it, at the shapes of core36 and of decode."""
    for d, causal, s in product(DIMS, (False, True), LENGTHS):
        p = Problem(TOKENS // s, WIDTH // d, s, d, causal)
        runs = {"plain": Run("strobe", p), "invariant": Run("strobe", p, "invariant")}
        yield Group("invariant", "forward", runs, [Row({"d": d, "s": s, "causal": causal}, "invariant", base="plain")])
    for p, read in _decoded():
        runs = {"plain": Run("strobe", p, work=read), "invariant": Run("strobe", p, "invariant", read)}
        where = {"heads": "32/8", "d": 128, "batch": p.batch, "keys": p.seqlen_k}
        yield Group("invariant", "forward", runs, [Row(where, "invariant", base="plain")], "TB/s")


def _decoded() -> Iterator[tuple[Problem, float]]:
    """One query over long keys, and the bytes of K and V."""
    for batch, keys in ((1, 65536), (8, 16384), (64, 4096), (128, 1024)):
        yield Problem(batch, 32, 1, 128, heads_kv=8, seqlen_k=keys), 2.0 * batch * 8 * keys * 128 * 2


def decode() -> Iterator[Group]:
    """One query over long keys: bytes of K and V read."""
    for p, read in _decoded():
        batch, keys = p.batch, p.seqlen_k
        runs = {who: Run(who, p, work=read) for who in ("strobe", "cudnn")} | {"seqused_k": Run("strobe", p, "seqused_k", read)}
        where = {"heads": "32/8", "d": 128, "batch": batch, "keys": keys}
        rows = [Row(where, "strobe", ("cudnn",)), Row({**where, "option": "seqused_k"}, "seqused_k", base="strobe")]
        yield Group("decode", "forward", runs, rows, "TB/s")


def uneven() -> Iterator[Group]:
    """One query over keys of uneven lengths, beside as many sequences of their mean length: bytes of the K and V that count."""
    for batch, longest in ((8, 65536), (64, 65536), (64, 8192)):
        p = Problem(batch, 32, 1, 128, heads_kv=8, seqlen_k=longest)
        keys = sum(uneven_lengths(batch, longest))
        even = p._replace(seqlen_k=keys // batch)
        runs = {
            "uneven": Run("strobe", p, "uneven", 2.0 * keys * 8 * 128 * 2),
            "even": Run("strobe", even, "seqused_k", 2.0 * batch * even.seqlen_k * 8 * 128 * 2),
        }
        yield Group(
            "uneven", "forward", runs, [Row({"heads": "32/8", "d": 128, "batch": batch, "longest": longest}, "uneven", base="even")], "TB/s"
        )


def _quantised(set_: str, *stored: str) -> Iterator[Group]:
    """Prefill over quantised keys, and few queries, beside the same call over bf16 keys."""
    for d, (heads, heads_kv) in ((64, (32, 8)), (128, (32, 8)), (256, (16, 4))):
        calls = {
            "8 x 2k of 2k": Problem(8, heads, 2048, d, True, heads_kv=heads_kv),
            "4 x 1k of 16k": Problem(4, heads, 1024, d, True, heads_kv=heads_kv, seqlen_k=16384, page=64),
            "4k, 31 x 1 of 4k": Problem(0, heads, 0, d, True, heads_kv=heads_kv, seqlen_k=4096, page=64, lengths=(4096, *[1] * 31)),
            **{f"64 x {n} of 4k": Problem(64, heads, n, d, True, heads_kv=heads_kv, seqlen_k=4096, page=64) for n in (2, 8, 32)},
        }
        for name, p in calls.items():
            runs = {feature: Run("strobe", p, feature) for feature in ("plain", *stored)}
            where = {"heads": f"{heads}/{heads_kv}", "d": d, "queries": name}
            yield Group(set_, "forward", runs, [Row({**where, "stored": x}, x, base="plain") for x in stored], "µs")


def quantised() -> Iterator[Group]:
    yield from _quantised("quantised", "INT8", "FP8")


def quantised_int4() -> Iterator[Group]:
    yield from _quantised("quantised-int4", "INT4")


def fp8() -> Iterator[Group]:
    """q, k and v in FP8, with a scale for each sequence and head, beside the same call in bf16."""
    for (d, dim_v), causal, s in product(((64, 0), (128, 0), (192, 128), (256, 0)), (False, True), (2048, 8192, 16384)):
        p = Problem(TOKENS // s, WIDTH // (128 if dim_v else d), s, d, causal, dim_v=dim_v)
        runs = {"bf16": Run("strobe", p), "fp8": Run("strobe", p, PRODUCTS)}
        where = {"d": d, "dv": dim_v or d, "s": s, "causal": causal}
        yield Group("fp8", "forward", runs, [Row(where, "fp8", base="bf16")])


def latent() -> Iterator[Group]:
    """One query of DeepSeek's heads over a latent cache in pages, beside FlashInfer: FLOP, or where few heads read it, bytes of K. And
    uneven lengths, beside as many sequences of their mean length."""
    for batch, keys in ((64, 4096), (16, 16384)):
        for heads in (8, 16, 32, 64, 128):
            p = Problem(batch, heads, 1, 576, heads_kv=1, seqlen_k=keys, dim_v=512, page=64, latent=True)
            work, unit = (None, "TFLOP/s") if heads > 16 else (2.0 * batch * keys * p.dim, "TB/s")
            runs = {who: Run(who, p, work=work) for who in ("cuda-sm90", "flashinfer", "cuda-mma")}
            where = {"heads": f"{heads}/1", "batch": batch, "keys": keys}
            rows = [Row(where, "cuda-sm90", ("flashinfer",)), Row({**where, "beside": "cuda-mma"}, "cuda-sm90", base="cuda-mma")]
            yield Group("latent", "forward", runs, rows, unit)
    for heads in (16, 128):
        p = Problem(64, heads, 1, 576, heads_kv=1, seqlen_k=8192, dim_v=512, page=64, latent=True)
        keys = sum(uneven_lengths(64, 8192))
        even = p._replace(seqlen_k=keys // 64 // 64 * 64)
        runs = {
            "uneven": Run("cuda-sm90", p, "uneven", 2.0 * keys * 576),
            "even": Run("cuda-sm90", even, "seqused_k", 2.0 * 64 * even.seqlen_k * 576),
        }
        yield Group("latent", "forward", runs, [Row({"heads": f"{heads}/1", "batch": 64, "longest": 8192}, "uneven", base="even")], "TB/s")


def step() -> Iterator[Group]:
    """The attention of a training step of gpt3-small, forward and backward."""
    peers = ("cudnn", "fa2", "efficient")
    for dropout in (0.0, 0.1):
        p = Problem(16, 12, 1024, 64, True, dropout=dropout)
        runs = {who: Run(who, p) for who in ("strobe", *peers)}
        yield Group("step", "both", runs, [Row({"shape": "(16,12,1024,64)", "causal": True, "dropout": dropout}, "strobe", peers)], "µs")


SETS: dict[str, Callable[[], Iterator[Group]]] = {
    "core36": core36,
    "gqa": gqa,
    "varlen": varlen,
    "window": window,
    "block-sparse": sparse,
    "options": options,
    "dims": dims,
    "small": small,
    "decode": decode,
    "uneven": uneven,
    "quantised": quantised,
    "quantised-int4": quantised_int4,
    "fp8": fp8,
    "latent": latent,
    "fp32": fp32,
    "mma": mma,
    "deterministic": deterministic,
    "invariant": invariant,
    "step": step,
    "random": random,  # last: a kernel, usually a peer's, that cannot take a drawn shape ends the run
}
