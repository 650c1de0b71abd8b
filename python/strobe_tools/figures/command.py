"""``strobe figures``: the paper's figures, measured on the machine at hand and drawn."""

from __future__ import annotations

import gc
import json
import math
import time
from datetime import datetime, timezone
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import strobe
from strobe_tools import machine
from strobe_tools.figures.case import Row
from strobe_tools.requirements import require
from strobe_tools.values import PATH

MACHINE = "machine.json"
_LETTERS = (
    "a: standard against flash, b: block size, c: block sparsity, d and e: runtime and memory over the length, f: the ladder, g: peers, "
    "h: fused against op by op (docs/figures.md)"
)


def _measure(out: Path, wanted: list[str], device: str, quick: bool, budget: float, console: Console) -> None:
    import torch

    from strobe_tools.figures.case import Setting, write_csv
    from strobe_tools.figures.clock import DIFFERS
    from strobe_tools.figures.measure import FIGURES
    from strobe_tools.timing import BUSY

    setting = Setting(device, quick, budget)
    torch.set_num_threads(1)  # on the CPU the processor time of one thread is measured
    on = torch.cuda.get_device_name() if setting.on_gpu else f"{machine.cpu_name()}, one thread"
    facts: dict[str, object] = {
        "device": on,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "strobe": strobe.__version__,
    }
    facts |= {"quick": quick, "budget": budget}
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / MACHINE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    except OSError as reason:
        raise click.BadParameter(f"{out}: {reason.strerror}; accepted is a folder to write to", param_hint="--out") from None
    columns = (TextColumn("{task.description:45}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for number, name in enumerate(wanted, 1):
            title, cases = FIGURES[name]
            rows: list[Row] = []
            steps = cases(setting)
            if not console.is_terminal:  # on a terminal the progress bar shows the title
                console.print(f"{title} ({number} of {len(wanted)}): {len(steps)} {'cases' if len(steps) > 1 else 'case'}")
            task = progress.add_task(title, total=len(steps))
            for case in steps:
                progress.update(task, description=f"{title}: {case.name}")
                found = case.run()
                rows += found
                for row in found:
                    if (note := str(row.get("note", ""))).startswith(DIFFERS):
                        progress.console.print(
                            f"[yellow]warning[/yellow] {escape(f'{title}, {_point(row)}: {note}; {BUSY}')}", soft_wrap=True
                        )
                write_csv(out / f"{title}.csv", rows)
                progress.advance(task)
            progress.update(task, description=title)


def _point(row: Row) -> str:
    """The name of a figure's point."""
    return " ".join(
        str(row[column]) for column in ("name", "attention", "engine", "block", "method", "direction", "length") if column in row
    )


@click.command(short_help="Measure and draw the papers' figures.")
@click.option("--out", type=PATH, default=Path("figures"), help="Where the CSV, PNG and SVG files go.")
@click.option("--figure", multiple=True, help=f"{_LETTERS}; again for another; by default all.")
@click.option("--device", help="cpu or cuda; by default the GPU if there is one.")
@click.option("--quick", is_flag=True, help="Smaller shapes: a look in a few minutes, not a measurement.")
@click.option("--measure-only", is_flag=True, help="Write the CSV files, draw nothing; needs no matplotlib.")
@click.option("--draw-only", is_flag=True, help="Draw the CSV files that --out has; measure nothing.")
@click.option("--budget", type=click.FloatRange(0.0), default=2.0, help="Seconds that the calls of a case are repeated for.")
def command(
    out: Path, figure: tuple[str, ...], device: str | None, quick: bool, measure_only: bool, draw_only: bool, budget: float
) -> None:
    """The paper's figures from runs on this machine: standard against flash, tiles, sparsity, lengths, ladder, peers, fusion."""
    from strobe_tools.figures.measure import FIGURES

    letters = {letter: name for name in FIGURES for letter in (name, *name)}  # d and e are one figure
    wanted = []
    for letter in figure or FIGURES:
        if letter not in letters:
            raise click.BadParameter(
                f"{letter!r}; accepted are {', '.join(''.join(FIGURES))}, each after a --figure", param_hint="--figure"
            )
        wanted.append(letters[letter])
    wanted = list(dict.fromkeys(wanted))
    if not math.isfinite(budget):
        raise click.BadParameter(f"{budget}; accepted are seconds from 0", param_hint="--budget")
    if measure_only and draw_only:
        raise click.BadParameter("given beside --measure-only; accepted is one of the two", param_hint="--draw-only")
    require("figures", *([] if draw_only else ["torch"]), *([] if measure_only else ["matplotlib"]), extra="figures")
    console = Console()
    if not draw_only:
        import torch

        gpu = torch.cuda.is_available()
        if device not in (None, "cpu", "cuda") or (device == "cuda" and not gpu):
            reason = "PyTorch sees no CUDA device" if device == "cuda" else "accepted are cpu and cuda"
            raise click.BadParameter(f"{device!r}: {reason}", param_hint="--device")
        began = time.perf_counter()
        gc.freeze()  # existing objects, PyTorch's among them, are not scanned again for each call
        try:
            _measure(out, wanted, device or ("cuda" if gpu else "cpu"), quick, budget, console)
        finally:
            gc.unfreeze()
        console.print(f"measured in {time.perf_counter() - began:.0f} s")
    if not measure_only:
        from strobe_tools.figures.draw import draw

        if not (out / MACHINE).exists():
            raise click.BadParameter(f"{out} has no {MACHINE}: nothing was measured there", param_hint="--out")
        try:
            for picture in draw(out, wanted, json.loads((out / MACHINE).read_text(encoding="utf-8"))):
                console.print(str(picture), soft_wrap=True)
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise click.BadParameter(
                f"{out}: {error!r}; accepted is a folder that `strobe figures` measured into", param_hint="--out"
            ) from None
