"""``strobe bench ladder``: the teaching kernels, rung by rung, on a GPU. docs/ladder.md explains them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

import strobe
from strobe._core import lib
from strobe_tools.requirements import require
from strobe_tools.table import table
from strobe_tools.timing import flops, medians_on_gpu
from strobe_tools.values import PATH, writable

if TYPE_CHECKING:
    from torch import Tensor

RUNGS = {"ladder-naive": "float32", "ladder-flash1": "float32", "ladder-flash2": "float32", "ladder-tensor-cores": "float16"}
TILES = ((16, 16), (32, 32), (64, 32), (64, 64), (128, 32), (128, 64), (128, 128))
SDPA, STROBE = "PyTorch SDPA", "Strobe's choice"

_Run = tuple[str, tuple[int, int] | None, str]  # engine, tile, dtype


def _call(attend: Callable[..., Tensor], leaves: tuple[Tensor, ...], backward: bool) -> Callable[[], Any]:
    import torch

    if not backward:
        return torch.no_grad()(lambda: attend(*leaves))
    out = attend(*leaves)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def measure(
    shape: tuple[int, int, int, int], causal: bool, backward: bool, tiles: tuple[tuple[int, int], ...], repeats: int
) -> tuple[dict[_Run, float], dict[_Run, str]]:
    """Seconds of every rung with every tile, of SDPA and of Strobe's own choice, and the reasons of those that refuse."""
    import torch

    runs: dict[_Run, Callable[[], Any]] = {}
    refusals: dict[_Run, str] = {}
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for dtype in dict.fromkeys(RUNGS.values()):
        leaves = tuple(torch.randn(*shape, device="cuda", dtype=getattr(torch, dtype), requires_grad=True) for _ in "qkv")

        def add(run: _Run, attend: Callable[..., Tensor], leaves: tuple[Tensor, ...] = leaves) -> None:
            try:
                call = _call(attend, leaves, backward)
                call()
                runs[run] = call
            except (NotImplementedError, torch.OutOfMemoryError, MemoryError) as refusal:
                refusals[run] = str(refusal).splitlines()[-1]

        add((SDPA, None, dtype), lambda q, k, v: sdpa(q, k, v, is_causal=causal))
        add((STROBE, None, dtype), lambda q, k, v: strobe.attention(q, k, v, causal=causal))
        for rung in (name for name, of in RUNGS.items() if of == dtype):
            for tile in tiles:
                options = {"engine": rung, "tile_q": tile[0], "tile_k": tile[1], "causal": causal}
                add((rung, tile, dtype), lambda q, k, v, options=options: strobe.attention(q, k, v, **options))
    return medians_on_gpu(runs, repeats), refusals


def rows(seconds: dict[_Run, float], work: float) -> list[dict[str, Any]]:
    """One row per run; a rung's best tile is compared with the best of the previous rung."""
    best: dict[str, _Run] = {}
    for run in seconds:
        if run[1] and (run[0] not in best or seconds[run] < seconds[best[run[0]]]):
            best[run[0]] = run
    found, before = [], None
    for engine in (*RUNGS, SDPA, STROBE):
        for run in (run for run in seconds if run[0] == engine):
            row: dict[str, Any] = {"engine": engine, "tile": run[1], "dtype": run[2], "flops": work / seconds[run]}
            for name in (SDPA, STROBE):
                peer = (name, None, run[2])
                row[name] = seconds[peer] / seconds[run] if run[1] and peer in seconds else None
            row["before"] = seconds[before] / seconds[run] if before and run == best.get(engine) else None
            row["best"] = run == best.get(engine)
            found.append(row)
        before = best.get(engine, before)
    return found


def _table(title: str, found: list[dict[str, Any]]) -> Table:
    made = table(title, ("rung", "dtype", "Br, Bc", "TFLOP/s", "× before", "× SDPA", "× Strobe"))
    for row in found:
        tile = ", ".join(map(str, row["tile"])) if row["tile"] else ""
        ratios = ["" if x is None else f"{x:.3g}" for x in (row["before"], row[SDPA], row[STROBE])]
        style = "bold" if row["best"] else None
        made.add_row(row["engine"], row["dtype"], tile, f"{row['flops'] / 1e12:.2f}", *ratios, style=style)
    return made


@click.command(short_help="The teaching kernels, on a GPU.")
@click.option("--batch", type=click.IntRange(1), default=1)
@click.option("--heads", type=click.IntRange(1), default=16)
@click.option("--seqlen", type=click.IntRange(1), default=4096, help="Queries and keys. The naive rung takes their square in memory.")
@click.option("--head-dim", type=click.IntRange(1, 256), default=64)
@click.option("--causal", is_flag=True, help="With a causal mask.")
@click.option("--tile", multiple=True, help="BrxBc, e.g. 64x32; may be repeated.")
@click.option("--repeats", type=click.IntRange(1), default=7, help="Calls per figure, of which the median counts.")
@click.option("--json", "json_path", type=PATH, help="Keep the figures in this file, too.")
def command(
    batch: int, heads: int, seqlen: int, head_dim: int, causal: bool, tile: tuple[str, ...], repeats: int, json_path: Path | None
) -> None:
    """The teaching kernels on a GPU, rung by rung: naive, FlashAttention-1, FlashAttention-2, tensor cores."""
    writable(json_path, "--json")
    require("bench ladder", "torch", extra="torch")
    import torch

    try:
        tiles = tuple((int(q), int(k)) for q, k in (t.split("x") for t in tile)) if tile else TILES
        if not all(1 <= size <= lib.STROBE_MAX_TILE for tile_sizes in tiles for size in tile_sizes):
            raise ValueError
    except ValueError:
        raise click.BadParameter(
            f"accepted is BrxBc, two numbers from 1 to {lib.STROBE_MAX_TILE}, e.g. 64x32", param_hint="--tile"
        ) from None
    reason = dict(strobe.engines())["ladder-naive"] or (None if torch.cuda.is_available() else "this PyTorch sees no CUDA device")
    if reason:
        click.echo(f"strobe bench ladder needs a CUDA GPU: {reason}", err=True)
        raise SystemExit(2)
    console = Console()
    gpu, shape = torch.cuda.get_device_name(), (batch, heads, seqlen, head_dim)
    console.print(f"{gpu}; PyTorch {torch.__version__}, Strobe {strobe.__version__}; B,H,S,D = {', '.join(map(str, shape))}")
    report: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpu": gpu,
        "torch": torch.__version__,
        "strobe": strobe.__version__,
        "shape": shape,
        "causal": causal,
        "repeats": repeats,
    }
    for backward in (False, True):
        direction = ("backward" if backward else "forward") + " causal" * causal
        with console.status(f"measuring {direction}"):
            seconds, refusals = measure(shape, causal, backward, tiles, repeats)
        report[direction] = rows(seconds, flops(shape, backward, causal))
        console.print(_table(f"{direction}, TFLOP/s; bold: a rung's best tile", report[direction]))
        for (engine, of, dtype), why in refusals.items():
            what = f"{engine} {'' if of is None else of} {dtype}"
            console.print(f"[yellow]not measured[/yellow] {what}: {why}", soft_wrap=True, highlight=False)
    if json_path:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
