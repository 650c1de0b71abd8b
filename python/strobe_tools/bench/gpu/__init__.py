"""``strobe bench gpu``: Strobe beside other attentions on a GPU, in one run; ``strobe bench report``: its figures in Markdown."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from random import SystemRandom
from typing import Any

import click
from rich.console import Console

import strobe
from strobe_tools.bench.gpu import contestants, report
from strobe_tools.bench.gpu.kernels import compile_all
from strobe_tools.bench.gpu.measurement import measure
from strobe_tools.bench.gpu.problem import Problem
from strobe_tools.bench.gpu.sets import SETS, SHAPES, Group, random
from strobe_tools.requirements import require
from strobe_tools.table import table
from strobe_tools.values import PATH, known

_FILES = {"forward": "forward", "backward": "backward", "both": "backward"}  # direction → the file of a group's rows


def host(repeats: int = 300) -> dict[str, float]:
    """Microseconds of host time per forward call: many calls of a small shape; waiting for the GPU is not included."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    problem = Problem(1, 8, 128, 64)
    q, k, v = problem.tensors("cuda")
    attends: dict[str, Callable[..., Any]] = {"Strobe": strobe.attention, "PyTorch's SDPA": scaled_dot_product_attention}
    if not contestants.missing("fa4"):
        attends[contestants.PEERS["fa4"]] = contestants.fa4(problem)
    found = {}
    for name, attend in attends.items():
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            attend(q, k, v)
            times.append(time.perf_counter() - begin)
        found[name] = round(sorted(times)[repeats // 2] * 1e6, 1)
    return found


def _commit() -> str:
    try:
        return subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _versions() -> dict[str, str]:
    from importlib import metadata

    import torch

    found = {"Strobe": strobe.__version__, "PyTorch": torch.__version__, "cuDNN": str(torch.backends.cudnn.version())}
    if not contestants.missing("fa4"):
        with suppress(metadata.PackageNotFoundError):
            found["FlashAttention-4"] = metadata.version("flash-attn-4")
    return found


Figures = dict[str, list[dict[str, Any]]]  # rows, by their file


def _file(results: Path, device: str, direction: str) -> Path:
    return results / f"{device.removeprefix('NVIDIA ').lower().replace(' ', '-')}-{direction}.json"


def _kept(results: Path, record: dict[str, Any], figures: Figures, sets: Iterable[str]) -> Figures:
    """The figures of other sets from an earlier call, if that ran on the same GPU and at the same commit."""
    kept: Figures = {}
    for direction in figures:
        file = _file(results, record["device"], direction)
        before: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"commit": None}
        alike = before["commit"] == record["commit"] != "unknown" and before["device"] == record["device"]
        kept[direction] = [row for row in before["rows"] if row["set"] not in sets] if alike else []
        if kept[direction]:
            record["versions"] = before["versions"] | record["versions"]
    return kept


def _write(results: Path, record: dict[str, Any], figures: Figures) -> None:
    """Writes one file per direction, named after the GPU."""
    results.mkdir(parents=True, exist_ok=True)
    order = list(SETS)
    for direction, rows in figures.items():
        lines = (json.dumps(row, ensure_ascii=False) for row in sorted(rows, key=lambda row: order.index(row["set"])))
        text = json.dumps({**record, "direction": direction, "rows": []}, indent=1, ensure_ascii=False)
        text = text.replace('"rows": []', '"rows": [\n  ' + ",\n  ".join(lines) + "\n ]")
        _file(results, record["device"], direction).write_text(text + "\n", encoding="utf-8")


def chosen(sets: Sequence[str], drawn: int | None, seed: int, direction: str | None) -> dict[str, list[Group]]:
    """The groups to be measured, by set."""
    names = list(sets) or ([] if drawn else list(SETS))
    if drawn and "random" not in names:
        names.append("random")
    made = {name: random(drawn or SHAPES, seed) if name == "random" else SETS[name]() for name in names}
    return {name: [g for g in of_set if direction in (None, _FILES[g.direction])] for name, of_set in made.items()}


@click.command(short_help="Speed on a GPU, beside other attentions.")
@click.option("--set", "sets", multiple=True, help=f"Of {', '.join(SETS)}; by default all.")
@click.option("--random", "drawn", type=click.IntRange(1), help="Draw this many shapes; without --set they alone are measured.")
@click.option("--seed", type=click.IntRange(0), help="Of the shapes that are drawn; by default another one in each run, which is printed.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="Begin no other figure afterwards.")
@click.option("--direction", help="forward or backward; by default both.")
@click.option("--results", type=PATH, help="Keep the figures in this folder, beside those of other sets.")
@click.option("--commit", help="Of the sources, for the files; by default what git says here.")
@click.option("--repeats", type=click.IntRange(1), default=15, help="Calls per figure, of which the median counts.")
@click.option("--jobs", type=click.IntRange(0), default=min(16, os.cpu_count() or 1), help="Processes that compile kernels first; 0: none.")
def command(
    sets: tuple[str, ...],
    drawn: int | None,
    seed: int | None,
    seconds: float | None,
    direction: str | None,
    results: Path | None,
    commit: str | None,
    repeats: int,
    jobs: int,
) -> None:
    """Speed on the GPU, beside PyTorch's backends and, where it is installed, FlashAttention-4, in the same run."""
    require("bench gpu", "torch", extra="torch")
    known(sets, SETS, "--set")
    if direction not in (None, "forward", "backward"):
        raise click.BadParameter(f"{direction!r}; accepted are forward and backward", param_hint="--direction")
    import torch

    console = Console()
    if not torch.cuda.is_available():
        console.print("PyTorch sees no CUDA device here: nothing to measure")
        raise SystemExit(2)
    began = time.perf_counter()
    end = None if seconds is None else began + seconds
    seed = SystemRandom().randrange(1, 1 << 31) if seed is None else seed
    groups = chosen(sets, drawn, seed, direction)
    if "random" in groups:
        console.print(f"shapes drawn at random: --seed {seed}")
    if jobs:
        major, minor = torch.cuda.get_device_capability()
        with console.status("compiling kernels"):
            calls, failures = compile_all(
                [group for of_set in groups.values() for group in of_set], 10 * major + minor, jobs, seconds and seconds / 2
            )
        console.print(f"the kernels of {calls} calls: {time.perf_counter() - began:.0f} s")
        for failure in dict.fromkeys(failures):
            console.print(f"[yellow]not compiled[/yellow] {failure}", soft_wrap=True, highlight=False)
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit or _commit(),
        "versions": _versions(),
        "repeats": repeats,
        "host_microseconds": host(),
    }
    times = ", ".join(f"{who} {x:.1f} µs" for who, x in record["host_microseconds"].items())
    console.print(f"{record['device']}; {', '.join(map(' '.join, record['versions'].items()))}; host time of a forward call: {times}")
    rows: Figures = {name: [] for name in ("forward", "backward") if direction in (None, name)}
    kept = _kept(results, record, rows, groups) if results else {}
    wrong = stopped = False
    for name, of_set in groups.items():
        if stopped:
            break
        begin, absent = time.perf_counter(), set()
        for done, group in enumerate(of_set):
            if end is not None and time.perf_counter() >= end:
                console.print(f"[yellow]out of time[/yellow] {name}: {len(of_set) - done} of {len(of_set)} not measured")
                break
            try:
                found = measure(group, repeats)
            except RuntimeError as error:
                if not any(words in str(error) for words in ("CUDA error", "CUDA_ERROR")):
                    raise
                # A kernel, a peer's or Strobe's, has broken this process's use of the GPU.
                at, why = report.where(group.rows[0].where), str(error).partition("\n")[0]
                console.print(f"[red]stopped[/red] {name}, {group.direction}, at {at}: {why}", soft_wrap=True, highlight=False)
                wrong = stopped = True
                break
            rows[_FILES[group.direction]] += found.rows
            absent |= {f"{run} {group.direction}: {why}" for run, why in found.absent.items()}
            wrong |= any(row.strobe in found.absent for row in group.rows)
            torch.cuda.empty_cache()
            if results:
                _write(results, record, {file: kept[file] + of_file for file, of_file in rows.items()})  # a later group may fail
        for file, of_file in rows.items():
            if measured := [row for row in of_file if row["set"] == name]:
                heads, lines = report.columns(measured)
                printed = table(f"{report.TITLES[name]}, {file}", tuple(heads))
                for line in lines:
                    printed.add_row(*line)
                console.print(printed)
        for why in sorted(absent):
            console.print(f"[yellow]not measured[/yellow] {why}", soft_wrap=True, highlight=False)
        console.print(f"{name}: {time.perf_counter() - begin:.1f} s")
    for file, of_file in rows.items():
        console.print(*report.summary(of_file, file), sep="\n", soft_wrap=True)
    if wrong:
        raise SystemExit(1)


@click.command(short_help="Those figures in Markdown.")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def report_command(files: tuple[Path, ...]) -> None:
    """The figures of `strobe bench gpu` as a page of the documentation, in Markdown. FILES: what its --results wrote."""
    try:
        page = report.page([json.loads(file.read_text(encoding="utf-8")) for file in files])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        wrong = f"{', '.join(map(str, files))}: {error!r}; accepted is what `strobe bench gpu --results` wrote"
        raise click.BadParameter(wrong, param_hint="FILES") from None
    click.echo(page)
