"""Runs compute-sanitizer (memcheck, racecheck) on kernels of every GPU engine: python tests/gpu/sanitize.py [--tool NAME] [--jobs N].

Each engine runs each feature, forward and backward, on tensors of a few tiles. The tensors are made on the CPU and copied, so that the tool
checks only our kernels. Several processes share the calls, because the tools are slow.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

import strobe

TOOLS = ("memcheck", "racecheck")
# racecheck reports a false race wherever one lane arrives at an mbarrier for its whole warp, after __syncwarp: it does not know that this
# orders the other lanes' reads. cuda-sm90 does so everywhere.
NOT_UNDERSTOOD = {"racecheck": ("cuda-sm90",)}
# When some warps arrive at a barrier without waiting (bar.arrive), racecheck forgets the order that earlier barriers of all warps gave
# (racecheck_arrive.cu shows it). The backward of cuda-mma hands P over in this way. racecheck sometimes reported it with 22 or more pairs
# of heads, never with 4 (docs/lab/performance.md), so only the case of many heads is left out.
BACKWARD_NOT_UNDERSTOOD = {"racecheck": (("cuda-mma", "many heads"),)}
SQ, SK = 130, 150
DTYPES = {"cuda-sm90": ("bfloat16",), "cuda-mma": ("bfloat16", "float16"), "cuda-tf32": ("float32",), "cuda-simt": ("float32", "float64")}
LADDER = {"ladder-naive": "float32", "ladder-flash1": "float32", "ladder-flash2": "float32", "ladder-tensor-cores": "float16"}


def blocks() -> strobe.BlockMask:
    kept = torch.rand(1, 1, 2, 2, generator=torch.Generator().manual_seed(0)) < 0.6
    return strobe.BlockMask.from_kept(kept, 128, 128, SQ, SK)


class Feature(NamedTuple):
    options: Callable[[], dict[str, Any]] = dict
    heads_kv: int = 2
    lengths: tuple[int, ...] = ()  # lengths of packed sequences
    batch: int = 2


FEATURES = {
    "plain": Feature(),
    "causal": Feature(lambda: {"causal": True}),
    "window": Feature(lambda: {"window": (40, 8)}),
    "softcap": Feature(lambda: {"softcap": 20.0, "causal": True}),
    "ALiBi": Feature(lambda: {"alibi_slopes": torch.tensor([0.5, 0.25]), "causal": True}),
    "sinks": Feature(lambda: {"sinks": torch.zeros(2)}),
    "dropout": Feature(lambda: {"dropout": 0.2, "seed": 1}),
    "mask": Feature(lambda: {"mask": torch.rand(1, 1, SQ, SK) < 0.7}),
    "bias": Feature(lambda: {"bias": torch.randn(1, 2, SQ, SK), "causal": True}),
    "blocks": Feature(lambda: {"block_mask": blocks()}),
    "one key head": Feature(lambda: {"causal": True}, heads_kv=1),
    # the last sequence is short: with as many tiles as the longest one has, it would reach past the end of the tensors
    "packed": Feature(lambda: {"causal": True}, lengths=(300, 0, 20)),
    "deterministic": Feature(lambda: {"deterministic": True}),
    "exact_max": Feature(lambda: {"exact_max": True}),
    "many heads": Feature(lambda: {"causal": True}, batch=70),  # at least one pair per SM: each block of the Hopper backward owns its dQ
}
DIMS = ((64, 64), (128, 128), (80, 80), (256, 256), (96, 64))


class Case(NamedTuple):
    engine: str
    dtype: str
    feature: str
    dims: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.engine} {self.dtype} d{self.dims[0]}/{self.dims[1]} {self.feature}"

    def run(self, tool: str | None = None) -> str:
        """Makes the call; returns the directions that ran under that tool."""
        torch.manual_seed(0)
        options, heads_kv, lengths, batch = FEATURES[self.feature]
        dtype, (d, dv) = getattr(torch, self.dtype), self.dims
        shapes = [(2, SQ, d), (heads_kv, SK, d), (heads_kv, SK, dv), (2, SQ, dv)]  # q, k, v and dout, without the batch
        packed = [(sum(lengths), heads, width) for heads, _, width in shapes]
        q, k, v, dout = (torch.randn(shape).to(dtype) for shape in (packed if lengths else ((batch, *x) for x in shapes)))
        more = options()
        if lengths:
            more["cu_seqlens_q"] = more["cu_seqlens_k"] = torch.tensor([0, *lengths]).cumsum(0).int()
        if "bias" in more:
            more["bias"] = more["bias"].to(dtype)
        if "sinks" in more and dtype == torch.float64:
            more["sinks"] = more["sinks"].double()
        more = {name: x.to("cuda") if isinstance(x, torch.Tensor | strobe.BlockMask) else x for name, x in more.items()}
        q, k, v, dout = (x.to("cuda") for x in (q, k, v, dout))
        ran = "nothing"
        with contextlib.suppress(NotImplementedError):  # suppressed if the engine does not support the call
            out, lse = strobe.attention(q, k, v, return_lse=True, engine=self.engine, **more)
            ran = "forward"
            if (self.engine, self.feature) in BACKWARD_NOT_UNDERSTOOD.get(tool, ()):
                return ran
            strobe.attention_backward(dout, q, k, v, out, lse, engine=self.engine, **more)
            ran = "forward and backward"
        torch.cuda.synchronize()
        return ran


def cases(tool: str | None = None) -> list[Case]:
    """Every feature on every engine and dtype, with one head dimension each; every head dimension with at least one feature."""
    return list(dict.fromkeys(_cases(tool)))


def _cases(tool: str | None) -> Iterator[Case]:
    here = [engine for engine, missing in strobe.engines() if missing is None and engine not in NOT_UNDERSTOOD.get(tool, ())]
    turn = 0
    for engine, dtypes in DTYPES.items():
        for dtype in dtypes if engine in here else ():
            for feature in FEATURES:
                yield Case(engine, dtype, feature, DIMS[turn % len(DIMS)])
                turn += 1
            turn += 1  # the next dtype's features get other head dimensions
            yield from (Case(engine, dtype, "causal", dims) for dims in DIMS)
    for engine, dtype in LADDER.items():
        if engine in here:
            yield from (Case(engine, dtype, feature, (64, 64)) for feature in ("plain", "causal"))


def check(tool: str, indices: Iterable[int]) -> str:
    """The tool's report on these cases."""
    command = ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=kernel", "--print-limit", "20"]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # PyTorch asks the driver for features that may be absent
    command += calls(tool, indices)
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout + (f"exit status {done.returncode}\n" if done.returncode else "")


def calls(tool: str | None, indices: Iterable[int]) -> list[str]:
    """The command that makes the calls of these cases."""
    return [sys.executable, __file__, *(["--tool", tool] if tool else []), "--cases", ",".join(map(str, indices))]


def shares(tool: str | None, jobs: int) -> list[range]:
    """The tool's cases, divided among the processes."""
    return [range(i, len(cases(tool)), jobs) for i in range(jobs)]


FINDING = re.compile(r"========= (Error|Warning|Invalid|Race|Internal|Program hit)|Traceback|\w*Error: |exit status")


class Report(NamedTuple):
    ran: Counter[str]  # calls of each engine
    found: dict[str, list[str]]  # messages by case

    @classmethod
    def of(cls, outputs: Iterable[str]) -> Report:
        ran: Counter[str] = Counter()
        found: dict[str, list[str]] = {}
        for share, output in enumerate(outputs):
            lines: list[str] = []
            for line in output.splitlines():
                if line.startswith("case: "):
                    case, _, what = line.removeprefix("case: ").rpartition(": ")
                    ran[case.split()[0]] += what != "nothing"
                    ran[case.split()[0] + " backward"] += what == "forward and backward"
                    found[case] = found.get(case, []) + lines
                    lines = []
                elif FINDING.match(line) or (lines and "    and " in line):
                    lines.append(line.removeprefix("========= "))
            found[f"the end of share {share}"] = lines
        return cls(ran, {case: lines for case, lines in found.items() if lines})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", choices=TOOLS, action="append")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--cases", help="make the calls of these cases, by their numbers, and run no tool")
    asked = parser.parse_args()
    if asked.cases is not None:
        tool = asked.tool[0] if asked.tool else None
        every = cases(tool)
        for case in (every[int(i)] for i in asked.cases.split(",") if i):
            print(f"case: {case}: {case.run(tool)}", flush=True)
        return 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        clean = True
        began = time.monotonic()
        compiling = [calls(None, share) for share in shares(None, asked.jobs)]  # compiles the kernels into the cache, without the tool
        list(pool.map(lambda command: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), compiling))
        print(f"without a tool: {time.monotonic() - began:.0f} s", flush=True)
        for tool in asked.tool or TOOLS:
            began = time.monotonic()
            report = Report.of(pool.map(check, [tool] * asked.jobs, shares(tool, asked.jobs)))
            print(f"{tool}, calls: " + ", ".join(f"{engine} {n}" for engine, n in report.ran.items()))
            for case, lines in report.found.items():
                print(f"{case}: {len(lines)} lines", *lines[:6], sep="\n  ")
            clean &= not report.found
            if idle := {case.engine for case in cases(tool)} - {engine for engine, n in report.ran.items() if n}:
                print(f"{tool}: nothing ran on {', '.join(sorted(idle))}")
                clean = False
            print(f"{tool}: {time.monotonic() - began:.0f} s", flush=True)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
