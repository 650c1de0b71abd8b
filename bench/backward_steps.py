"""Variants of the Hopper backward, beside the form that runs today and its peers, in one run on a GPU.

    STROBE_CACHE_DIR=cache python bench/backward_steps.py --ahead      # compiles all kernels, without a GPU
    STROBE_CACHE_PATH=cache python bench/backward_steps.py --out found.jsonl --seconds 520

Parts, in the order in which they run (--part names some): check holds each variant to formulas in float64; stamps takes a block's time
apart; split tells how long each launch of a call takes; time times variants in turn; chunks times a call cut into calls for some sequences
each; counters asks Nsight Compute. A variant is words joined by "+" (WORDS); "base" is what runs without a wish.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

import strobe
from strobe_tools.bench.gpu import contestants
from strobe_tools.bench.gpu.problem import Problem
from strobe_tools.timing import medians_on_gpu

TRIAL = 1 << 15  # Trial in src/cuda/families/sm90_backward.cpp
# Bits of tile_q, and of tile_k.
WORDS = {
    "owned": (1, 0),  # blocks own dQ, whatever the prediction says
    "here": (2, 0),  # and have its sum in shared memory
    "bulk": (4, 0),  # dK and dV leave by the copy engine
    "dq": (8, 0),  # dQ from registers where it leaves through shared memory, and the other way round
    "values": (16, 0),  # V in registers
    "persistent": (32, 0),
    "tile": (64, 0),  # 64 queries a tile where there are 128 or 80, and the other way round
    "stamps": (128, 0),
    "keys": (256, 0),  # K and V in registers where they are not, and the other way round
    "rows": (512, 0),  # with "here": each warpgroup makes dQ of 64 queries
    **{f"bundle{1 << n}": ((n + 1) << 10, 0) for n in range(7)},
    "shares1": (1 << 13, 0),
    "shares2": (2 << 13, 0),
    "shares4": (3 << 13, 0),
    "last": (0, 1),  # the last tile of a walk has code of its own
    "stages": (0, 2),  # persistent blocks with two places for K and V
}


class Shape(NamedTuple):
    batch: int
    heads: int
    heads_kv: int
    seqlen: int
    dim: int
    causal: bool
    variants: tuple[str, ...]
    chunks: tuple[int, ...] = ()  # sequences of a call

    @property
    def problem(self) -> Problem:
        return Problem(self.batch, self.heads, self.seqlen, self.dim, self.causal, heads_kv=self.heads_kv)

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        return f"{self.batch}x{heads}x{self.seqlen} d{self.dim}{' causal' if self.causal else ''}"


HERE = ("owned", "here", "here+rows", "here+rows+last", "here+rows+bulk", "here+bulk")
NARROW = ("bulk", "persistent", "bulk+persistent", "last", "bulk+last", "keys", "bulk+keys", "stages+persistent", "stages+persistent+bulk")
MIDDLE = ("dq", "keys", "keys+dq", "values+dq", "bulk", "bulk+keys+dq", "last", "bulk+last", "last+keys+dq")
WIDE = ("dq", "bulk", "bulk+dq", "last", "bulk+last", "tile")
FEW = ("bulk", "bulk+persistent", "stages+persistent+bulk", "last")
LONG = ("bundle1", "bundle2", "bundle8", "shares2", "shares4", "shares2+bundle8", "bulk", "dq")
# First those for which Strobe is behind a peer, then neighbours.
SHAPES = (
    Shape(128, 12, 12, 384, 32, False, (*HERE, *NARROW), (16, 32)),
    Shape(64, 16, 16, 1024, 64, True, NARROW, (4, 8, 16)),
    Shape(64, 16, 16, 512, 64, False, ("owned", "here", "here+last", *NARROW), (8, 16)),
    Shape(8, 32, 32, 2048, 80, True, MIDDLE, (1, 2)),
    Shape(4, 32, 32, 3333, 96, True, MIDDLE),
    Shape(12, 12, 12, 1024, 64, True, NARROW, (4,)),
    Shape(32, 16, 16, 577, 64, False, NARROW, (8,)),
    Shape(1, 32, 8, 32768, 128, True, LONG),
    Shape(2, 64, 8, 4096, 128, True, (*WIDE, "shares2", "shares4", "bundle8", "bundle2")),
    # neighbours
    Shape(64, 16, 16, 512, 64, True, ("here", "here+last", *FEW), (8, 16)),
    Shape(256, 12, 12, 197, 64, False, ("owned", "here", "here+last", *FEW)),
    Shape(128, 12, 12, 128, 32, False, ("owned", "here+rows", "here+rows+bulk", *FEW)),
    Shape(64, 12, 12, 512, 32, True, ("owned", "here", "here+rows", *FEW)),
    Shape(64, 12, 12, 256, 64, False, ("owned", "here", *FEW)),
    Shape(32, 16, 16, 2048, 64, True, FEW, (2, 4)),
    Shape(32, 12, 12, 512, 48, False, ("owned", "here+rows", *FEW)),
    Shape(32, 16, 16, 1024, 96, True, ("keys", "keys+dq", "bulk+keys+dq", "last")),
    Shape(4, 32, 32, 4096, 80, False, ("keys", "keys+dq", "tile+keys+dq", "bulk", "values+dq")),
    Shape(16, 20, 20, 2048, 112, True, ("dq", "values+dq", "bulk")),
    Shape(16, 16, 16, 1024, 128, True, (*WIDE,), (2, 4)),
    Shape(32, 16, 16, 512, 128, True, ("bulk", "bulk+dq", "last"), (4, 8)),
    Shape(1, 8, 1, 131072, 128, True, ("shares2", "bundle2")),
)
STAMPED = (0, 1, 2, 3, 4, 6, 9, 19)
# Lengths that no tile divides: (heads, heads_kv, queries, keys, d, causal), and what to hold to the formulas.
ODD = (
    ((3, 3, 300, 300, 32, False), HERE + NARROW),
    ((3, 3, 431, 384, 32, True), ("here", "here+rows", *NARROW)),
    ((4, 2, 200, 333, 64, True), ("here", "owned", "here+last", *NARROW)),
    ((3, 3, 512, 512, 64, False), ("here", "here+last", *NARROW)),
    ((3, 3, 577, 577, 64, False), NARROW),
    ((2, 2, 700, 700, 80, True), MIDDLE),
    ((4, 2, 333, 555, 96, True), MIDDLE),
    ((2, 2, 450, 450, 80, False), ("keys", "keys+dq", "tile+keys+dq", "bulk", "values+dq")),
    ((2, 2, 450, 450, 112, True), ("dq", "values+dq", "bulk")),
    ((4, 2, 700, 700, 128, True), WIDE),
    ((2, 2, 700, 700, 128, True), WIDE),
    ((4, 2, 450, 450, 128, False), ("dq", "bulk", "bulk+dq", "last")),
    ((2, 2, 200, 200, 48, True), ("here+rows", "bulk", "stages+persistent+bulk")),
)

Tensor = torch.Tensor
Result = list[Tensor]


def wishes(variant: str) -> dict[str, Any]:
    if variant == "base":
        return {"engine": "cuda-sm90"}
    bits = [WORDS[word] for word in variant.split("+")]
    return {"engine": "cuda-sm90", "tile_q": TRIAL + sum(b[0] for b in bits), "tile_k": TRIAL + sum(b[1] for b in bits)}


class Inputs:
    def __init__(self, s: Shape, keys: int | None = None, device: str = "cuda") -> None:
        torch.manual_seed(0)
        self.causal = s.causal
        of_q, of_k = (s.batch, s.heads, s.seqlen, s.dim), (s.batch, s.heads_kv, keys or s.seqlen, s.dim)
        self.q, self.k, self.v, self.dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in (of_q, of_k, of_k, of_q))
        self.out, self.lse = strobe.attention(self.q, self.k, self.v, causal=s.causal, return_lse=True)

    def run(self, variant: str, part: slice = slice(None)) -> Result:
        dout, q, k, v, out, lse = (x[part] for x in (self.dout, self.q, self.k, self.v, self.out, self.lse))
        found = strobe.attention_backward(dout, q, k, v, out, lse, causal=self.causal, **wishes(variant))
        return [found.dq, found.dk, found.dv]

    def text(self, variant: str) -> str:
        said = strobe.explain(self.q, self.k, self.v, causal=self.causal, backward=True, **wishes(variant))
        return next((line.split("head dimensions", 1)[1].split("; workspace")[0] for line in said.splitlines() if "wgmma" in line), said)


def rms(x: Result, y: Result) -> float:
    """The largest of three differences: root mean squares, over those of y."""
    found = []
    for a, b in zip(x, y, strict=True):
        off = size = 0.0
        for one, other in zip(a.flatten(0, 1), b.flatten(0, 1), strict=True):  # head by head, for the memory
            off += float((one.float() - other.float()).square().sum())
            size += float(other.float().square().sum())
        found.append(math.sqrt(off / size))
    return math.inf if any(map(math.isnan, found)) else max(found)


def whole_rms(x: Result, y: Result) -> float:
    """The same, in large pieces."""
    found = []
    for a, b in zip(x, y, strict=True):
        pieces = [(a[i : i + 8], b[i : i + 8]) for i in range(0, len(a), 8)]
        off = sum(float((one.float() - other.float()).square().sum()) for one, other in pieces)
        found.append(math.sqrt(off / sum(float(other.float().square().sum()) for _, other in pieces)))
    return math.inf if any(map(math.isnan, found)) else max(found)


def formulas(i: Inputs) -> Result:
    """In float64."""
    group = i.q.shape[1] // i.k.shape[1]
    q, dout = i.q.double(), i.dout.double()
    k, v = (x.double().repeat_interleave(group, 1) for x in (i.k, i.v))
    scale = q.shape[-1] ** -0.5
    s = q @ k.mT * scale
    if i.causal:
        rows = torch.arange(q.shape[2], device=q.device)[:, None] + (k.shape[2] - q.shape[2])
        s = s.masked_fill(torch.arange(k.shape[2], device=q.device)[None] > rows, -math.inf)
    p = s.softmax(-1).nan_to_num(0)
    dv, dp = p.mT @ dout, dout @ v.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    dk = ds.mT @ q
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return [ds @ k, dk, dv]


class Log:
    def __init__(self, file: str | None, seconds: float) -> None:
        self.began, self.end = time.monotonic(), time.monotonic() + seconds
        self.file = Path(file) if file else None

    def __call__(self, part: str, shape: Any, **found: Any) -> None:
        if self.file:
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"part": part, "shape": str(shape), **found}) + "\n")

    def left(self) -> float:
        return self.end - time.monotonic()


def say(*words: Any) -> None:
    print(*words, flush=True)


# --- the parts


def check(log: Log) -> bool:
    """Each variant's error, over that of the form that runs today."""
    wrong = False
    for (heads, heads_kv, queries, keys, d, causal), variants in ODD:
        s = Shape(2 if d > 32 else 5, heads, heads_kv, queries, d, causal, variants)
        i = Inputs(s, keys)
        exact = formulas(i)
        base = rms(i.run("base"), exact)
        found = {}
        for variant in variants:
            try:
                found[variant] = rms(i.run(variant), exact)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                found[variant] = math.inf
                say("FAILED", s, variant, str(error)[:300])
        bad = {v: x for v, x in found.items() if not x <= 1.05 * base + 1e-4}
        wrong |= bool(bad)
        say(f"check {s} keys {keys}: base {base:.2e}, worst {max(found.values()):.2e}", f"WRONG {bad}" if bad else "")
        log("check", f"{s} keys {keys}", base=base, found=found)
    return not wrong


STAMPS = (
    *("counts", "started", "together", "k_asked", "q_asked", "v_asked", "dout_asked", "begun"),
    *("q_there", "k_there", "scored", "first", "walked", "added", "stored_v", "ended"),
)
FORMS = ("here+rows", "here", "bulk", "persistent", "bulk+persistent", "stages+persistent+bulk", "keys+dq", "last")


def stamps(log: Log) -> None:
    """Means over blocks, in clocks from a block's start; gap: from the end of a block to the start of the next one on its SM."""
    for at in STAMPED:
        s = SHAPES[at]
        i = Inputs(s)
        iterations = math.nan
        for variant in ("base", *(v for v in s.variants if v in FORMS)):
            name = "stamps" if variant == "base" else f"{variant}+stamps"
            for _ in range(2):
                dv = i.run(name)[2]
            torch.cuda.synchronize()
            found = stamped(dv, "persistent" in variant or "here" in variant, iterations)
            iterations = found.get("iterations", iterations)
            say(f"stamps {s} {variant}: " + ", ".join(f"{k} {x:.0f}" for k, x in found.items()))
            log("stamps", s, variant=variant, found=found)
        del i
        torch.cuda.empty_cache()


def stamped(dv: Tensor, persistent: bool, iterations: float) -> dict[str, float]:
    """From the rows of dV that a kernel with stamps writes its clocks to: those of the first key of each 64. iterations: of a block, if it
    cannot be counted here."""
    heads = dv.shape[0] * dv.shape[1]
    x = (dv[:, :, ::64].contiguous().view(torch.int32)[..., :16].cpu().to(torch.int64) & 0xFFFFFFFF).reshape(heads, -1, 16)
    first, second = x[:, ::2].reshape(-1, 16), x[:, 1::2].reshape(-1, 16)  # warpgroups
    origin = STAMPS.index("begun" if persistent else "started")

    def since(of: Tensor, a: int, b: int) -> Tensor:
        return (of[:, b] - of[:, a] & 0xFFFFFFFF).double()

    def typical(clocks: Tensor) -> float:  # without those that were not written, or belong to other keys of a persistent block
        written = clocks[clocks < 1 << 26]
        return float(written.mean()) if len(written) > len(clocks) / 2 else math.nan

    found = {"blocks": float(len(first))}
    if not persistent:
        found["iterations"] = iterations = float(((first[:, 0] & 0xFFFF) + 1).double().mean())
    for n in range(origin + 1, len(STAMPS)):
        found[STAMPS[n]] = typical(since(first, origin, n))
    found["ended_second"] = typical(since(second, origin, 15))
    found["iteration"] = typical(since(first, STAMPS.index("first"), STAMPS.index("walked"))) / max(iterations - 1, 1e-9)
    blocks: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of an SM: when they began, and how long they took
    for head in x.tolist():
        for n in range(0, len(head), 2):
            begin = head[n][origin]
            blocks[head[n][0] >> 16].append((begin, max(g[15] - begin & 0xFFFFFFFF for g in head[n : n + 2])))
    gaps, lengths = [], []
    for of_sm in blocks.values():
        origin_of_sm = of_sm[0][0]
        of_sm.sort(key=lambda block: block[0] - origin_of_sm + (1 << 31) & 0xFFFFFFFF)
        for (begin, length), (after, _) in pairwise(of_sm):
            gaps.append((after - begin - length + (1 << 31) & 0xFFFFFFFF) - (1 << 31))
            lengths.append(length)
    if gaps:
        found |= {"gap": statistics.median(gaps), "block": statistics.mean(lengths), "sms": float(len(blocks))}
    return found


def peers(s: Shape, i: Inputs, fa4: bool) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for who in ("cudnn", *(("fa4",) if fa4 and not contestants.missing("fa4") else ())):
        try:
            found[who] = contestants.call(who, s.problem, "plain", "backward", (i.q, i.k, i.v, i.dout), "cuda")
            found[who]()
        except Exception as error:  # a peer may fail in any way
            found.pop(who, None)
            say(f"{who} {s}: {type(error).__name__}: {str(error)[:120]}")
    return found


def split(log: Log, fa4: bool) -> None:
    """Each launch of a call: when it begins and ends, µs after the call's first one has begun; means of five calls."""
    from torch.profiler import ProfilerActivity, profile

    flush = torch.zeros(1 << 25, device="cuda")
    for at in (0, 2, 6, 1, 3, 4, 9):
        s = SHAPES[at]
        i = Inputs(s)
        calls: dict[str, Callable[[], Any]] = {"base": partial(i.run, "base")}
        for variant in s.variants:
            if variant in ("owned", "here", "here+rows", "bulk", "keys+dq", "stages+persistent+bulk"):
                calls[variant] = partial(i.run, variant)
        calls |= peers(s, i, fa4)
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as prof:
                for _ in range(5):
                    flush.sum()
                    call()
                torch.cuda.synchronize()
            events = sorted((e for e in prof.events() if "CUDA" in str(e.device_type)), key=lambda e: e.time_range.start)
            runs: list[list[Any]] = []
            for e in events:
                if "reduce_kernel" in e.name and "sum" in e.name.lower():
                    runs.append([])
                elif runs and "emset" not in e.name:
                    runs[-1].append(e)
            runs = [r for r in runs if r and len(r) == len(runs[-1])]
            if not runs:
                say("split", s, name, "no launches seen", [e.name[:40] for e in events[:6]])
                continue
            lines = []
            for n in range(len(runs[-1])):
                begin, end = (statistics.mean(getattr(r[n].time_range, w) - r[0].time_range.start for r in runs) for w in ("start", "end"))
                lines.append((runs[-1][n].name[:60], round(begin, 1), round(end, 1)))
            say(f"split {s} {name}: " + "; ".join(f"{a} {b:.0f}-{c:.0f}" for a, b, c in lines))
            log("split", s, variant=name, launches=lines)
        del i
        torch.cuda.empty_cache()


def timed(log: Log, repeats: int, fa4: bool, seconds: float) -> None:
    end = time.monotonic() + seconds
    for s in SHAPES:
        if time.monotonic() > min(end, log.end):
            say("time:", s, "and what follows not measured")
            break
        i = Inputs(s)
        base = i.run("base")
        calls: dict[str, Callable[[], Any]] = {"base": partial(i.run, "base")}
        for variant in s.variants:
            try:
                off = whole_rms(i.run(variant), base)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                say("FAILED", s, variant, str(error)[:200])
                continue
            if not off < 0.01:
                say(f"WRONG {s} {variant}: differs by {off:.2g}")
                log("wrong", s, variant=variant, off=off)
            else:
                calls[variant] = partial(i.run, variant)
        del base
        calls |= peers(s, i, fa4)
        begin = time.perf_counter()
        calls["base"]()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        calls["base"]()
        torch.cuda.synchronize()
        one = time.perf_counter() - begin
        found = {name: x * 1e6 for name, x in medians_on_gpu(calls, max(5, min(repeats, int(8 / (one * len(calls)))))).items()}
        best = min((found[w] for w in ("cudnn", "fa4") if w in found), default=math.nan)
        rate = s.problem.flops(True) / found["base"] / 1e6
        words = ", ".join(f"{name} {found['base'] / x:.3f}" for name, x in found.items() if name != "base")
        say(f"time {s}: base {found['base']:.1f} µs, {rate:.0f} TFLOP/s, {best / found['base']:.3f} of the best peer; base over: {words}")
        log("time", s, microseconds=found, kernels={v: i.text(v) for v in calls if v not in contestants.PEERS})
        del i, calls
        torch.cuda.empty_cache()


def chunks(log: Log, repeats: int, seconds: float) -> None:
    """A call beside the same work in several calls, some sequences each, whose dQ's sums stay in the L2 cache; all replayed as graphs."""
    end = time.monotonic() + seconds
    for s in SHAPES:
        if not s.chunks or time.monotonic() > min(end, log.end):
            continue
        i = Inputs(s)
        calls: dict[str, Callable[[], Any]] = {}
        kept = []
        fast = [v for v in ("base", "bulk") if v == "base" or v in s.variants]
        for variant in fast:
            for size in (s.batch, *s.chunks):
                graph = torch.cuda.CUDAGraph()

                def all_of_them(variant: str = variant, size: int = size, i: Inputs = i, s: Shape = s) -> list[Result]:
                    return [i.run(variant, slice(a, a + size)) for a in range(0, s.batch, size)]

                all_of_them()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    kept.append(all_of_them())
                calls[f"{variant} by {size}"] = graph.replay
        found = {name: x * 1e6 for name, x in medians_on_gpu(calls, repeats).items()}
        whole = found[f"base by {s.batch}"]
        words = ", ".join(f"{n} {whole / x:.3f}" for n, x in found.items())
        say(f"chunks {s}: base {whole:.1f} µs; base over: {words}")
        log("chunks", s, microseconds=found)
        del i, calls, kept
        torch.cuda.empty_cache()


METRICS = {
    "us": "gpu__time_duration.sum",
    "dram_read": "dram__bytes_read.sum",
    "dram_write": "dram__bytes_write.sum",
    "l2_read": "lts__t_sectors_op_read.sum",
    "l2_write": "lts__t_sectors_op_write.sum",
    "l2_red": "lts__t_sectors_op_red.sum",
    "l2_hit": "lts__t_sector_hit_rate.pct",
    "l2_busy": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_busy": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_active",
    "issue": "sm__issue_active.avg.pct_of_peak_sustained_active",
}
COUNTED = (
    (7, ("base", "bundle1", "bundle2", "bundle8", "shares2", "shares2+bundle8", "shares4")),
    (1, ("base", "bulk+persistent", "stages+persistent+bulk")),
    (0, ("base", "here+rows")),
    (3, ("base", "keys+dq")),
    (2, ("base", "here")),
)


def made_for_counters() -> None:
    for at, variants in COUNTED:
        i = Inputs(SHAPES[at])
        for variant in variants:
            i.run(variant)
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            i.run(variant)
            torch.cuda._sleep(1)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        del i
        torch.cuda.empty_cache()


def counters(log: Log) -> None:
    ncu = shutil.which("ncu")
    if ncu is None:
        return say("counters: no ncu here")
    how = ["--profile-from-start", "off", "--cache-control", "none", "--clock-control", "none", "--csv", "--page", "raw"]
    how += ["--print-units", "base", "--metrics", ",".join(METRICS.values())]
    command = [ncu, *how, sys.executable, __file__, "--part", "made-for-counters"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(20, log.left()))
        text = done.stdout
    except subprocess.TimeoutExpired as error:
        text = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        say("counters: out of time")
    rows = list(csv.DictReader(line for line in text.splitlines() if line.startswith('"')))[1:]
    if not rows:
        say("counters:", text[-800:])
    names = [(SHAPES[at], variant) for at, variants in COUNTED for variant in variants]
    launch = 0
    for row in rows:
        if not names:
            break
        if "spin" in row["Kernel Name"]:
            names.pop(0)
            launch = 0
            continue
        found = {}
        for name, metric in METRICS.items():
            value = next((v for column, v in row.items() if column and column.startswith(metric)), "").replace(",", "")
            found[name] = float(value) if value else math.nan
        found["us"] /= 1e3
        for name in ("dram_read", "dram_write"):
            found[name] /= 1e6
        for name in ("l2_read", "l2_write", "l2_red"):
            found[name] *= 32e-6
        say(f"counters {names[0][0]} {names[0][1]} launch {launch}: " + ", ".join(f"{k} {x:.4g}" for k, x in found.items()))
        log("counters", names[0][0], variant=names[0][1], launch=launch, found=found)
        launch += 1


# --- kernels, compiled ahead


def every_call() -> Iterator[tuple[Shape, int | None, str, bool]]:
    """Shape, keys, variant and whether it is the backward."""
    for (heads, heads_kv, queries, keys, d, causal), variants in ODD:
        for variant in ("base", *variants):
            yield Shape(2 if d > 32 else 5, heads, heads_kv, queries, d, causal, ()), keys, variant, True
        yield Shape(2 if d > 32 else 5, heads, heads_kv, queries, d, causal, ()), keys, "", False
    for at, s in enumerate(SHAPES):
        stamped_too = ["stamps", *(f"{v}+stamps" for v in s.variants)] if at in STAMPED else []
        for variant in ("base", *s.variants, *stamped_too):
            yield s, None, variant, True
        yield s, None, "", False
        for size in s.chunks:
            for variant in ("base", "bulk"):
                yield s._replace(batch=size), None, variant, True


def compile_one(call: tuple[Shape, int | None, str, bool]) -> tuple[str, list[tuple[str, int, bool, bool]]]:
    from strobe._prewarm import Shape as Array
    from strobe._prewarm import prewarm

    s, keys, variant, backward = call
    of_q, of_k = (s.batch, s.heads, s.seqlen, s.dim), (s.batch, s.heads_kv, keys or s.seqlen, s.dim)
    arrays = {"q": Array(of_q, "bfloat16"), "k": Array(of_k, "bfloat16"), "v": Array(of_k, "bfloat16")}
    options: dict[str, Any] = {"causal": True} if s.causal else {}
    if backward:
        options |= wishes(variant)
    return f"{s} {variant}", [(k.name, k.spilled, k.serialized, k.compiled) for k in prewarm(arrays, options, backward, 90)]


def ahead(jobs: int) -> int:
    wrong = 0
    seen: dict[str, tuple[int, bool]] = {}
    calls = list(dict.fromkeys(every_call()))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for name, kernels in pool.map(compile_one, calls):
            for kernel, spilled, serialized, compiled in kernels:
                if kernel not in seen:
                    seen[kernel] = spilled, serialized
                    if spilled or serialized:
                        wrong += 1
                        say(f"{name}: spills {spilled} bytes{', serialized' if serialized else ''}: {kernel}")
                    elif compiled:
                        say(f"{name}: {kernel[-60:]}")
    say(f"{len(seen)} kernels of {len(calls)} calls, {wrong} that spill or wait")
    return 1 if wrong else 0


PARTS = ("check", "stamps", "split", "time", "chunks", "counters")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default=",".join(PARTS), help="by default all, in this order: %(default)s")
    parser.add_argument("--out", help="a file for what is found, a line of JSON each")
    parser.add_argument("--seconds", type=float, default=520, help="of all parts together")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--no-fa4", action="store_true")
    parser.add_argument("--ahead", action="store_true", help="compile only, into STROBE_CACHE_DIR")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.ahead:
        return ahead(args.jobs)
    parts = args.part.split(",")
    if parts == ["made-for-counters"]:
        made_for_counters()
        return 0
    log = Log(args.out, args.seconds)
    torch.cuda.init()
    say(
        torch.cuda.get_device_name(),
        torch.__version__,
        "FlashAttention-4:",
        not contestants.missing("fa4"),
        "from",
        Path(strobe.__file__).parent,
    )
    right = True
    fa4 = not args.no_fa4
    for part in parts:
        begin = time.monotonic()
        if part == "check":
            right = check(log)
        elif part == "stamps":
            stamps(log)
        elif part == "split":
            split(log, fa4)
        elif part == "time":
            timed(log, args.repeats, fa4, log.left() - 130)
        elif part == "chunks":
            chunks(log, args.repeats, log.left() - 80)
        elif part == "counters":
            counters(log)
        else:
            parser.error(f"--part {part}; accepted are {', '.join(PARTS)}")
        say(f"{part}: {time.monotonic() - begin:.0f} s")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
