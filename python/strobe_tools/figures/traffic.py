"""Bytes that attention moves: a model, and Nsight Compute's counters where it is installed."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

# Numbers moved between memory and chip by one head of N queries and keys of dimension d, docs/ladder.md. (Br, Bc) is the tile.


def standard(n: int, d: int, backward: bool) -> int:
    """S and P in memory. Forward: S written, read by the softmax, P written, read. Backward: P read for dV, dP written, both read and dS
    written by the softmax's gradient, dS read for dQ and for dK."""
    return 7 * n * n + 8 * n * d if backward else 4 * n * n + 4 * n * d


def fused(n: int, d: int, backward: bool) -> int:
    """Each tensor once, and the LSE: the traffic if a head's K and V, read again by every tile of queries, stay in a cache."""
    return 8 * n * d + n if backward else 4 * n * d + n


def naive(n: int, d: int, br: int, bc: int) -> float:
    return 6 * n * n + n * n * d * (1 / br + 1 / bc) + n * n * d / br + n * d


def flash1(n: int, d: int, br: int, bc: int) -> float:
    return 2 * n * d + n / bc * (3 * n * d + 4 * n) + n * d + 2 * n


def flash2(n: int, d: int, br: int, bc: int) -> float:
    return 2 * n * d + n + n / br * 2 * n * d


# Nsight Compute. It runs a program that calls profile(); the counters of each call are added up.

COUNTERS = {"dram__bytes_read.sum": "read", "dram__bytes_write.sum": "written", "lts__t_bytes.sum": "cache"}
_BETWEEN = "spin_kernel"  # the kernel of torch.cuda._sleep


def profile(calls: Iterable[Callable[[], Any]]) -> None:
    """Makes the calls so that Nsight Compute counts each of them. The process must run under Nsight Compute."""
    import torch

    calls = list(calls)
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in calls:
        call()
        torch.cuda._sleep(1)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def measured(module: str, arguments: list[str], count: int) -> list[dict[str, float]] | str:
    """Bytes of each of the `count` calls that ``python -m module arguments`` profiles, or why they could not be counted."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return "ncu is not installed"
    how = ["--profile-from-start", "off", "--cache-control", "none", "--clock-control", "none", "--csv", "--page", "raw"]
    command = [ncu, *how, "--print-units", "base", "--metrics", ",".join(COUNTERS), sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = parse(done.stdout)
    if done.returncode != 0 or len(found) != count:
        return f"ncu: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]}"
    return found


def parse(output: str) -> list[dict[str, float]]:
    """The sum of the counters of each call, from ncu's CSV."""
    calls: list[dict[str, float]] = []
    sums = dict.fromkeys(COUNTERS.values(), 0.0)
    for row in csv.DictReader(line for line in output.splitlines() if line.startswith('"')):
        if not row["Kernel Name"]:  # the row of units
            continue
        if _BETWEEN in row["Kernel Name"]:
            calls.append(sums)
            sums = dict.fromkeys(COUNTERS.values(), 0.0)
        else:
            for counter, name in COUNTERS.items():
                sums[name] += float(row[counter].replace(",", ""))
    return calls
