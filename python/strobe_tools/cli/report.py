"""The report of ``strobe check --report FILE``: a machine, a cover of the options and some speeds, in the form of tests/gpu-record.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

import strobe
from strobe._abi import told
from strobe._core import lib
from strobe_tools import machine

Case = TypeVar("Case")
_REPEATS = 20


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def cover(cases: Sequence[Case]) -> list[Case]:
    """Some of the cases, dataclasses, in which each two values of two fields come together. The choice is the same each time."""
    pairs = {case: {*combinations(vars(case).items(), 2)} for case in cases}
    left = set().union(*pairs.values())
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(pairs[case] & left))  # of several, the first
        chosen.append(best)
        left -= pairs[best]
    return chosen


def speeds(console: Console) -> list[dict[str, Any]]:
    """Rows of bench/results: Strobe beside PyTorch's backends, 16k tokens in bfloat16."""
    import torch

    from strobe_tools.bench.gpu.measurement import measure
    from strobe_tools.bench.gpu.sets import core36

    wanted = {"d": (64, 128), "s": (1024, 4096)}
    rows: list[dict[str, Any]] = []
    for group in core36():
        if all(group.rows[0].where[name] in values for name, values in wanted.items()):
            console.print(f"measuring {group.direction}, {group.rows[0].where}", markup=False, highlight=False)
            rows += [row | {"direction": group.direction} for row in measure(group, _REPEATS).rows]
            torch.cuda.empty_cache()
    return rows


def write(
    file: Path, device: str, tally: Mapping[str, Mapping[str, int]], failures: Sequence[str], seconds: float, console: Console
) -> None:
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else machine.cpu_name()
    counts = {what: sum(x[what] for x in tally.values()) for what in ("passed", "failed", "not taken")}
    part = {
        "device": name,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "passed": counts["passed"],
        "failed": counts["failed"],
        "status": int(counts["failed"] > 0 or counts["passed"] == 0),
        "skipped": counts["not taken"],
        "seconds": round(seconds),
        "torch": torch.__version__,
        "engines": tally,
        "failures": failures,
    }
    about = {
        "Strobe": strobe.__version__,
        **machine.describe(),
        "PyTorch": torch.__version__,
        "CUDA": told(lib.strobe_cuda_info).splitlines(),
    }
    found: dict[str, Any] = {"machine": about, "parts": {"check": part}, "speed": []}
    file.write_text(json.dumps(found, indent=2) + "\n")  # first without speeds, which an untried GPU may fail to give
    if device == "cuda":
        found["speed"] = speeds(console)
        file.write_text(json.dumps(found, indent=2) + "\n")
    console.print(f"{file}: written; how to send it: docs/reports.md", markup=False, highlight=False)
