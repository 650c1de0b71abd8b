"""Shows what limits a kernel: Nsight Compute's counters for Strobe's calls in the sets of `strobe bench gpu`, one line per kernel.

Prints time, the clock, how busy tensor cores, issue slots, L2 and DRAM were (per cent of their peak), and what warps waited for (in
cycles for each instruction issued, the three longest).

    python bench/counters.py [--set core36] [--direction forward] [--only d=64,causal=True] [--peers]
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from math import isnan, nan
from typing import Any

from rich.console import Console

from strobe_tools.bench.gpu.contestants import call, missing
from strobe_tools.bench.gpu.sets import SETS, Group
from strobe_tools.table import table

SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "SchedulerStats", "WarpStateStats")
BUSY = {
    "tensor": r"pipe_tensor.*pct_of_peak_sustained_active",
    "issue": r"issue(s|_inst\w*)?_active\.(avg|sum)\.pct",
    "L2": r"^lts__throughput.*pct",
    "DRAM": r"dram_?_throughput.*pct",
}
STALL = re.compile(r"average_warps?(?:_latency)?_issue_stalled_(\w+?)(?:_per_issue_active)?\.ratio")
MARKER = "spin_kernel"  # torch.cuda._sleep's kernel, which runs between two calls


def chosen(args: argparse.Namespace) -> Iterator[tuple[Group, str]]:
    """The groups asked for and their runs."""
    wanted = [item.split("=") for item in args.only.split(",") if item]
    for name in args.set:
        for group in SETS[name]():
            if group.direction not in (args.direction, "both"):
                continue
            rows = [row for row in group.rows if all(str(row.where.get(key)) == value for key, value in wanted)]
            named = {run for row in rows for run in (row.strobe, row.base, *(row.peers if args.peers else ()))}
            yield from ((group, run) for run in group.runs if run in named)


def make_calls(args: argparse.Namespace) -> None:
    """Makes the calls, in the process that Nsight Compute watches."""
    import torch

    for group, name in chosen(args):
        run = group.runs[name]
        if missing(run.who):
            continue
        q, k, v = run.problem.tensors("cuda")
        dout = torch.randn(*q.shape[:-1], v.shape[-1], device="cuda", dtype=v.dtype)
        attend = call(run.who, run.problem, run.feature, group.direction, (q, k, v, dout), "cuda")
        attend()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        attend()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return nan


def matching(row: dict[str, str], pattern: str) -> float:
    found = (number(value) for column, value in row.items() if re.search(pattern, column))
    return max((x for x in found if not isnan(x)), default=nan)


def line(row: dict[str, str]) -> list[str]:
    waits = {found[1]: number(value) for column, value in row.items() if (found := STALL.search(column)) and not isnan(number(value))}
    longest = sorted(waits, key=lambda why: -waits[why])[:3]
    return [
        re.sub(r"<.*|\(.*", "", row["Kernel Name"])[-40:],
        f"{matching(row, r'^gpu__time_duration') / 1e3:.1f}",
        f"{matching(row, r'^(smsp|sm|gpc)__cycles_elapsed.avg.per_second') / 1e9:.2f}",
        *(f"{matching(row, pattern):.0f}" for pattern in BUSY.values()),
        ", ".join(f"{why} {waits[why]:.1f}" for why in longest),
    ]


def label(group: Group, run: str) -> str:
    """The label of the run's row. For a run that several rows are compared with it is the common part of their labels."""
    rows = [row.where for row in group.rows if row.strobe == run] or [row.where for row in group.rows]
    return " ".join(f"{key}={value}" for key, value in rows[0].items() if all(row.get(key) == value for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", choices=list(SETS))
    parser.add_argument("--direction", default="forward", choices=("forward", "backward"))
    parser.add_argument("--only", default="", help="of a row's keys, as in bench/results: d=64,causal=True")
    parser.add_argument("--peers", action="store_true", help="the others' kernels, too")
    parser.add_argument("--make-calls", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.set = args.set or ["core36"]
    if args.make_calls:
        return make_calls(args)

    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("ncu (Nsight Compute) is not installed")
    how: list[str] = ["--profile-from-start", "off", "--cache-control", "none", "--clock-control", "none"]
    how += ["--csv", "--page", "raw", "--print-units", "base", *(f"--section={name}" for name in SECTIONS)]
    done = subprocess.run([ncu, *how, sys.executable, __file__, "--make-calls", *sys.argv[1:]], capture_output=True, text=True, check=False)
    rows: list[dict[str, Any]] = list(csv.DictReader(text for text in done.stdout.splitlines() if text.startswith('"')))
    if done.returncode or not rows:
        raise SystemExit(done.stderr.strip() or done.stdout.strip())

    made = table("", ("call", "kernel", "µs", "GHz", *BUSY, "waits for"))
    runs = ((group, name) for group, name in chosen(args) if not missing(group.runs[name].who))
    group, name = next(runs)
    for row in rows[1:]:  # the first has the units
        if MARKER in row["Kernel Name"]:
            group, name = next(runs, (group, name))
            continue
        made.add_row(f"{label(group, name)} {name}", *line(row))
    Console(width=200).print(made)


if __name__ == "__main__":
    main()
