"""``strobe bench``: Strobe beside PyTorch's scaled_dot_product_attention, in one run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

import strobe
from strobe_tools import machine
from strobe_tools.bench import gpu, ladder, memory, peak
from strobe_tools.requirements import require
from strobe_tools.table import table
from strobe_tools.timing import BUSY, SPREAD, flops, samples
from strobe_tools.values import PATH, writable

if TYPE_CHECKING:
    from torch import Tensor

    _Call = tuple[tuple[Tensor, ...], dict[str, Any]]

SHAPES = ((1, 8, 2048, 64), (1, 4, 2048, 128))
DTYPES = ("float32", "bfloat16")
LENGTHS = (4096, 16384)
MASK_SHAPE = (8, 2048, 64)  # heads, length, head dimension
_BRIEF = 2.0  # if the calls of a figure take fewer seconds than this and differ much, twice as many are added


def _normal(*shape: int, dtype: str) -> Tensor:
    import torch

    return torch.randn(*shape).to(getattr(torch, dtype)).requires_grad_()


def _backward(attend: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Callable[[], Any]:
    import torch

    out = attend()
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _forward(attend: Callable[[], Tensor]) -> Callable[[], Any]:
    import torch

    return torch.no_grad()(attend)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _medians(functions: dict[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, float], float]:
    """Seconds of each function, and the largest ratio of a function's longest call to its shortest one. If that is large and the calls are
    brief, the medians are those of more calls."""
    found = samples(functions, repeats)
    if _spread(found) > SPREAD and sum(map(sum, found.values())) < _BRIEF:
        more = samples(functions, 2 * repeats)
        found = {name: seconds + more[name] for name, seconds in found.items()}
    return {name: statistics.median(seconds) for name, seconds in found.items()}, _spread(found)


def _spread(found: dict[str, list[float]]) -> float:
    return max(max(seconds) / min(seconds) for seconds in found.values())


def speed(repeats: int, peaks: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each shape, dtype, mask and direction."""
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        for dtype in DTYPES:
            q, k, v = leaves = tuple(_normal(*shape, dtype=dtype) for _ in range(3))
            for causal in (False, True):
                attends = {
                    "strobe": lambda q=q, k=k, v=v, causal=causal: strobe.attention(q, k, v, causal=causal),
                    "torch": lambda q=q, k=k, v=v, causal=causal: _sdpa(q, k, v, causal),
                }
                for backward in (False, True):
                    runs = {name: _backward(f, leaves) if backward else _forward(f) for name, f in attends.items()}
                    seconds, spread = _medians(runs, repeats)
                    work, most = flops(shape, backward, causal), peak.of_dtype(peaks, dtype)
                    rows.append(
                        {
                            "shape": shape,
                            "dtype": dtype,
                            "causal": causal,
                            "direction": "backward" if backward else "forward",
                            "strobe_flops": work / seconds["strobe"],
                            "torch_flops": work / seconds["torch"],
                            "ratio": seconds["torch"] / seconds["strobe"],
                            "share_of_peak": work / seconds["strobe"] / most if most else None,
                            "spread": spread,
                        }
                    )
    return rows


def masks(repeats: int) -> list[dict[str, Any]]:
    """The cost of masks, forward and backward together: the masked call relative to the call without the masked part."""
    import torch

    (heads, seqlen, head_dim), block = MASK_SHAPE, 64
    lengths = torch.tensor([seqlen, seqlen * 3 // 4, seqlen // 2, seqlen // 4])
    batch = len(lengths)
    rows = []
    for dtype in DTYPES:
        q, k, v = (_normal(batch, heads, seqlen, head_dim, dtype=dtype) for _ in range(3))
        packed = q.detach().transpose(1, 2).flatten(0, 1).requires_grad_()
        kept = torch.arange(seqlen) < lengths[:, None]
        short_k, short_v = (x.detach().transpose(1, 2)[kept].requires_grad_() for x in (k, v))
        half_k, half_v = (x.detach()[:, :, : seqlen // 2].contiguous().requires_grad_() for x in (k, v))
        left = torch.zeros(seqlen // block, seqlen // block, dtype=torch.bool)
        left[:, : seqlen // block // 2] = True
        block_mask = strobe.BlockMask.from_kept(left, block, block)
        cumulated = {
            "cu_seqlens_q": (torch.arange(batch + 1) * seqlen).int(),
            "cu_seqlens_k": torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
            "max_seqlen_q": seqlen,
            "max_seqlen_k": seqlen,
        }
        pairs: dict[str, tuple[_Call, _Call]] = {
            "padding, over varlen": (((q, k, v), {"mask": kept[:, None, None]}), ((packed, short_k, short_v), cumulated)),
            "half the blocks, over half the keys": (((q, k, v), {"block_mask": block_mask}), ((q, half_k, half_v), {})),
            "half by a mask, over half the keys": (((q, k, v), {"mask": block_mask.to_dense()}), ((q, half_k, half_v), {})),
        }
        for name, calls in pairs.items():

            def both(call: _Call) -> Callable[[], Any]:
                leaves, options = call
                return lambda: torch.autograd.grad(strobe.attention(*leaves, **options).sum(), leaves)

            seconds, spread = _medians({"masked": both(calls[0]), "without": both(calls[1])}, repeats)
            rows.append({"mask": name, "dtype": dtype, **seconds, "cost": seconds["masked"] / seconds["without"] - 1, "spread": spread})
    return rows


def memory_use() -> list[dict[str, Any]]:
    """The peak of memory beyond the inputs at two lengths, and the bytes per further token."""
    rows = []
    for dtype in DTYPES:
        peaks = {length: memory.peak(length, dtype) for length in LENGTHS}
        slope = (peaks[LENGTHS[1]] - peaks[LENGTHS[0]]) / (LENGTHS[1] - LENGTHS[0])
        rows.append({"dtype": dtype, "bytes": peaks, "bytes_per_token": slope})
    return rows


def _warn(rows: list[dict[str, Any]], console: Console) -> None:
    """Warns of figures whose calls differ much, because something else ran meanwhile."""
    apart = [row["spread"] for row in rows if row["spread"] > SPREAD]
    if apart:
        console.print(
            f"[yellow]warning[/yellow] in {len(apart)} of {len(rows)} figures the longest call took more than {SPREAD:g} times as long as "
            f"the shortest one (at most {max(apart):.1f} times); {BUSY}",
            soft_wrap=True,
        )


def _speed_table(rows: list[dict[str, Any]]) -> Table:
    columns = ("B,H,S,D", "dtype", "direction", "Strobe", "PyTorch", "ratio", "of peak")
    made = table("GFLOP/s, and the ratio to PyTorch's FLASH_ATTENTION", columns)
    for row in rows:
        share = "" if row["share_of_peak"] is None else f"{row['share_of_peak']:.0%}"
        figures = (f"{row['strobe_flops'] / 1e9:,.0f}", f"{row['torch_flops'] / 1e9:,.0f}", f"{row['ratio']:.2f}×", share)
        made.add_row(",".join(map(str, row["shape"])), row["dtype"], row["direction"] + " causal" * row["causal"], *figures)
    return made


def _mask_table(rows: list[dict[str, Any]]) -> Table:
    made = table("What masks cost, forward + backward", ("mask", "dtype", "with, ms", "without, ms", "cost"))
    for row in rows:
        made.add_row(row["mask"], row["dtype"], f"{row['masked'] * 1e3:.1f}", f"{row['without'] * 1e3:.1f}", f"{row['cost']:+.0%}")
    return made


def _memory_table(rows: list[dict[str, Any]]) -> Table:
    shape = f"({memory.BATCH}, {memory.HEADS}, S, {memory.HEAD_DIM})"
    lengths = tuple(f"S={length}, MiB" for length in LENGTHS)
    made = table(f"Peak memory beyond the inputs, forward + backward, {shape}", ("dtype", *lengths, "bytes/token", "the scores, MiB"))
    for row in rows:
        scores = memory.BATCH * memory.HEADS * LENGTHS[1] ** 2 * (4 if row["dtype"] == "float32" else 2)
        megabytes = (f"{n / 2**20:,.1f}" for n in row["bytes"].values())
        made.add_row(row["dtype"], *megabytes, f"{row['bytes_per_token']:,.0f}", f"{scores / 2**20:,.0f}")
    return made


@click.group(invoke_without_command=True, short_help="Speed beside PyTorch's, in the same run.")
@click.pass_context
@click.option("--json", "json_path", type=PATH, help="Keep the figures in this file, too.")
@click.option("--memory", "with_memory", is_flag=True, help="The peak of memory at two lengths, too.")
@click.option("--masks", "with_masks", is_flag=True, help="What a padding mask and masked-out blocks cost, too.")
@click.option("--repeats", type=click.IntRange(1), default=15, help="Calls per figure, of which the median counts.")
def command(context: click.Context, json_path: Path | None, with_memory: bool, with_masks: bool, repeats: int) -> None:
    """Speed of forward and backward on the CPU, beside PyTorch's scaled_dot_product_attention in the same run."""
    if context.invoked_subcommand:
        return
    writable(json_path, "--json")
    require("bench", "torch", "numpy", extra="bench")
    import torch

    console = Console()
    threads = torch.get_num_threads()
    peaks = peak.measure(threads)
    console.print(f"{machine.cpu_name()}; {threads} threads, PyTorch {torch.__version__}, Strobe {strobe.__version__}")
    console.print(f"Peak: {peak.describe(peaks)}" if peaks else "Peak: not measured, since no C compiler was found")
    report: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "threads": threads,
        "torch": torch.__version__,
        "strobe": strobe.__version__,
        "peak_flops": peaks,
    }
    with console.status("measuring speed"):
        report["speed"] = speed(repeats, peaks)
    console.print(_speed_table(report["speed"]))
    _warn(report["speed"], console)
    if with_masks:
        with console.status("measuring masks"):
            report["masks"] = masks(repeats)
        console.print(_mask_table(report["masks"]))
        _warn(report["masks"], console)
    if with_memory:
        with console.status("measuring memory"):
            report["memory"] = memory_use()
        console.print(_memory_table(report["memory"]))
    if json_path:
        json_path.write_text(json.dumps(report, indent=2) + "\n")


command.add_command(ladder.command, "ladder")
command.add_command(gpu.command, "gpu")
command.add_command(gpu.report_command, "report")
