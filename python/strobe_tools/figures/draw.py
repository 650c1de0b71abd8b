"""The pictures, from the CSV files. Colours are Okabe and Ito's, which every kind of colour vision distinguishes; markers and hatches say
the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from PIL import Image

from .case import Row, read_csv
from .measure import FIGURES

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PINK, GREY, BROWN, PURPLE = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
    "#999999",
    "#7F4F24",
    "#4B2E83",
)
# A method has the colour and marker of the first of these words that its name contains. So a method looks the same in every picture and
# on every machine.
LOOKS = {
    "Strobe": (VERMILLION, "o"),
    "math": (BLUE, "s"),
    "Megatron": (GREEN, "D"),
    "memory-efficient": (ORANGE, "^"),
    "cuDNN": (SKY, "v"),
    "FlashAttention-1": (BROWN, "h"),
    "FlashAttention-2": (PINK, "P"),
    "FlashAttention-4": (PURPLE, "d"),
    "SDPA": (PINK, "P"),  # as FlashAttention-2, whose loops SDPA's flash backend runs on a CPU
    "Linformer": (BLACK, "X"),
    "Sparse Transformer": (GREY, "*"),
}
PNG_DPI = 100
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.handlelength": 3.6,  # room for dashes
    "svg.fonttype": "none",  # text, not outlines
    "svg.hashsalt": "strobe",
    "path.simplify": True,
}


def draw(out: Path, wanted: Iterable[str], machine: dict[str, Any]) -> Iterator[Path]:
    """Draws those figures of `wanted` whose CSV lies in `out`; yields the PNG files."""
    where = f"{machine['device']}; PyTorch {machine['torch']}, Strobe {machine['strobe']}, {machine['date']}"
    if machine.get("quick"):
        where = f"quick: smaller shapes, no measurement; {where}"
    with mpl.rc_context(STYLE):
        for name in wanted:
            title = FIGURES[name][0]
            source = out / f"{title}.csv"
            if not source.exists():
                continue
            yield save(PICTURES[name](read_csv(source)), out / f"{title}.png", where)


def save(figure: Figure, path: Path, where: str) -> Path:
    """Writes the PNG, and an SVG beside it; `where` names the machine in a corner of the picture."""
    figure.supxlabel(where, x=0.995, ha="right", fontsize=6, color="#555555")
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    _save_png(figure, path)
    return path


def _save_png(figure: Figure, path: Path) -> None:
    """Writes the PNG with a palette, which takes less than half the bytes."""
    figure.set_dpi(PNG_DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba())
    image.convert("RGB").quantize(255, dither=Image.Dither.NONE).save(path, optimize=True)


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _shape(row: Row) -> str:
    return f"B {row['batch']}, H {row['heads']}, N {row['length']}, d {row['head_dim']}"


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _bars(axes: Axes, names: Sequence[str], values: Sequence[float | None], colours: Sequence[str], unit: str, **how: Any) -> None:
    """Bars with their values on top; a text replaces the bar of a missing value."""
    for i, (value, colour) in enumerate(zip(values, colours, strict=True)):
        if value is None:
            axes.text(i, 0, " not measured", rotation=90, ha="center", va="bottom", fontsize=7, color="#555555")
            continue
        axes.bar(i, value, color=colour, edgecolor=BLACK, linewidth=0.6, **how)
        axes.text(i, value, _number(value), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel(unit)
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.12)


def _log2(axes: Axes, values: Iterable[float], label: str) -> None:
    ticks = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{x // 1024}k" if x >= 1024 else f"{x:g}" for x in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def look(name: str) -> dict[str, Any]:
    """The style of a method's line: Strobe's is the thickest, below the others, so that it hides none; its other runs are dashed and
    hollow."""
    colour, marker = next(found for word, found in LOOKS.items() if word in name)
    how: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.2, "zorder": 2.2}
    if name == "Strobe":
        how |= {"linewidth": 3, "zorder": 2}
    elif name.startswith("Strobe"):
        how |= {"linewidth": 1.6, "zorder": 2.1, "linestyle": "--", "markersize": 6, "markerfacecolor": "white"}
    return how


def _lines(axes: Axes, rows: Sequence[Row], by: str, x: str, y: Callable[[Row], float | None]) -> None:
    """A line for each value of `by`, in the order of the rows."""
    for name in dict.fromkeys(row[by] for row in rows):
        points = [(row[x], y(row)) for row in rows if row[by] == name and y(row) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, **look(name))


def _legend(figure: Figure, handles: Sequence[Any], ncols: int) -> None:
    """A legend below the pictures, column by column; the last row is left to the machine's name."""
    rows, blank = -(-len(handles) // ncols), Line2D([], [], linestyle="none", label=" ")
    columns = [[*handles[i : i + rows], *[blank] * (rows + 1 - len(handles[i : i + rows]))] for i in range(0, len(handles), rows)]
    shown = [handle for column in columns for handle in column]
    figure.legend(shown, [handle.get_label() for handle in shown], loc="outside lower left", ncols=len(columns), fontsize=7.5)


def standard_against_flash(rows: list[Row]) -> Figure:
    figure = _figure(7.2, 2.9)
    names, colours = ["standard", "Strobe"], (GREY, VERMILLION)
    work, traffic, time = figure.subplots(1, 3)
    _bars(work, names, [row["gflop"] for row in rows], colours, "GFLOP")
    work.set_title("arithmetic")
    measured = [row["measured_bytes"] for row in rows]
    model = [row["model_bytes"] / 1e9 for row in rows]
    if any(x is not None for x in measured):
        for i, (counted, of_model) in enumerate(zip(measured, model, strict=True)):
            label = i == 0
            for x, value, hatch, of in ((i - 0.2, counted / 1e9, "", "ncu"), (i + 0.2, of_model, "///", "IO model")):
                traffic.bar(x, value, 0.4, color=colours[i], edgecolor=BLACK, linewidth=0.6, hatch=hatch, label=of if label else None)
                traffic.text(x, value, _number(value), ha="center", va="bottom", fontsize=8)
        traffic.set_xticks(range(len(names)), names)
        traffic.set_ylabel("GB")
        traffic.grid(axis="x", visible=False)
        traffic.legend(fontsize=7)
        traffic.set_title("through device memory")
    else:
        _bars(traffic, names, model, colours, "GB", hatch="///")
        traffic.set_title("through memory, IO model")
    _bars(time, names, [None if row["seconds"] is None else row["seconds"] * 1e3 for row in rows], colours, "ms")
    time.set_title("runtime")
    figure.suptitle(f"Standard attention and Strobe, forward + backward, {rows[0]['dtype']}, {_shape(rows[0])}", fontsize=10)
    return figure


def block_size(rows: list[Row]) -> Figure:
    figure = _figure(7.2, 3.7)
    traffic, time = figure.subplots(1, 2)
    names = {"ladder-flash1": "FlashAttention-1", "ladder-flash2": "FlashAttention-2"}
    blocks = [row["block"] for row in rows]
    handles: list[Any] = []
    for engine, name in names.items():
        of_engine = [row for row in rows if row["engine"] == engine]
        for axes, column, unit, style, what in (
            (traffic, "cache_bytes", 1e-9, "-", "L2, ncu"),
            (traffic, "model_bytes", 1e-9, "--", "IO model"),
            (time, "seconds", 1e3, "-", "runtime"),
        ):
            points = [(row["block"], row[column] * unit) for row in of_engine if row[column] is not None]
            if points:
                handles += axes.plot(*zip(*points, strict=True), label=f"{name}, {what}", linestyle=style, **look(name))
    traffic.set(ylabel="GB", title="between memory and chip", yscale="log")
    traffic.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    traffic.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    traffic.yaxis.set_minor_locator(NullLocator())
    time.set(ylabel="ms", title="runtime", ylim=(0, None))
    for axes in (traffic, time):
        _log2(axes, blocks, "block size, Br = Bc")
    _legend(figure, handles, 2)
    figure.suptitle(f"Block size, forward, float32, {_shape(rows[0])}", fontsize=10)
    return figure


def block_sparsity(rows: list[Row]) -> Figure:
    figure = _figure(5.2, 3.4)
    axes = figure.subplots()
    sparse = [row for row in rows if row["name"] != "dense" and row["seconds"] is not None]
    (dense,) = (row["seconds"] * 1e3 for row in rows if row["name"] == "dense")
    axes.axhline(dense, color=GREY, linestyle="--", label="dense, without a block mask")
    axes.plot([0, 1], [0, dense], color=BLACK, linestyle=":", linewidth=1, label="in proportion to the blocks")
    points = [(row["kept"], row["seconds"] * 1e3) for row in sparse]
    axes.plot(*zip(*points, strict=True), color=VERMILLION, marker="o", markersize=4, label="block-sparse")
    axes.set(xlabel="fraction of nonzero blocks", ylabel="ms, forward + backward", xlim=(0, 1.04), ylim=(0, None))
    axes.legend(fontsize=8)
    block = rows[0]["block"]
    axes.set_title(f"Block sparsity, random blocks of {block} × {block},\n{rows[0]['dtype']}, {_shape(rows[0])}")
    return figure


def sequence_length(rows: list[Row]) -> Figure:
    figure = _figure(8.6, 4.6)
    time, memory = figure.subplots(1, 2)
    _lines(time, rows, "method", "length", lambda row: row["seconds"] and row["seconds"] * 1e3)
    _lines(memory, rows, "method", "length", lambda row: row["peak_bytes"] and row["peak_bytes"] / 2**20)
    failed: dict[str, int] = {}  # where a method ends before the others
    for row in rows:
        if row["note"] == "out of memory":
            failed.setdefault(row["method"], row["length"])
    for axes in (time, memory):
        for i, (name, length) in enumerate(failed.items()):  # above the curves, because there is no value at this length
            at, colour = (length, 0.97 - 0.05 * i), look(name)["color"]
            axes.plot(*at, "x", color=colour, markersize=6, markeredgewidth=1.6, transform=axes.get_xaxis_transform())
            where = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
            axes.annotate("out of memory", at, (-6, 0), ha="right", va="center", fontsize=6.5, color=colour, **where)
    for axes, unit, title in ((time, "ms", "runtime, forward + backward"), (memory, "MiB beyond the inputs", "peak memory")):
        axes.set(yscale="log", ylabel=unit, title=title)
        axes.set_ylim(top=axes.get_ylim()[1] * 5)  # room for words
        _log2(axes, [row["length"] for row in rows], "sequence length")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1 else f"{y:g}"))
    _legend(figure, time.get_legend_handles_labels()[0], 3)
    row = rows[0]
    what = f"B {row['batch']}, H {row['heads']}, d {row['head_dim']}, {row['dtype']}, dropout 0.1, padding mask"
    figure.suptitle(f"Sequence length: {what}", fontsize=10)
    return figure


def ladder(rows: list[Row]) -> Figure:
    figure = _figure(8.2, 3.6)
    for axes, direction in zip(figure.subplots(1, 2), ("forward", "backward"), strict=True):
        here = [row for row in rows if row["direction"] == direction]
        scale, unit = _rate(here)
        colours = [VERMILLION if row["name"].startswith("Strobe") else GREY if row["name"].startswith("PyTorch") else BLUE for row in here]
        hatches = ["//" if row["dtype"] == "float16" else "" for row in here]
        for i, (row, colour, hatch) in enumerate(zip(here, colours, hatches, strict=True)):
            if row["flops"] is None:
                axes.text(0, i, f" {row['note']}", va="center", fontsize=6)
                continue
            axes.barh(i, row["flops"] / scale, color=colour, edgecolor=BLACK, linewidth=0.6, hatch=hatch)
            axes.text(row["flops"] / scale, i, f" {_number(row['flops'] / scale)}", va="center", fontsize=8)
        axes.set_yticks(range(len(here)), [row["name"] for row in here])
        axes.invert_yaxis()
        axes.set(xlabel=unit, title=direction)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.15)
    figure.suptitle(
        f"The ladder, {_shape(rows[0])}; hatched: float16" if _has_half(rows) else f"The ladder, float32, {_shape(rows[0])}", fontsize=10
    )
    return figure


def _has_half(rows: list[Row]) -> bool:
    return any(row["dtype"] == "float16" for row in rows)


def _rate(rows: Iterable[Row]) -> tuple[float, str]:
    """The divisor of FLOP/s, and the unit's name."""
    fastest = max((row["flops"] or 0.0 for row in rows), default=0.0)
    return (1e12, "TFLOP/s") if fastest > 2e12 else (1e9, "GFLOP/s")


def peers(rows: list[Row]) -> Figure:
    dims = sorted({row["head_dim"] for row in rows})
    scale, unit = _rate(rows)
    kinds = list(dict.fromkeys((row["direction"], row["causal"]) for row in rows))
    figure = _figure(8.6, 0.8 + 1.85 * len(kinds))
    grid = figure.subplots(len(kinds), len(dims), sharex=True, sharey="row", squeeze=False)
    for r, (direction, causal) in enumerate(kinds):
        for c, d in enumerate(dims):
            axes = grid[r, c]
            here = [row for row in rows if (row["direction"], row["causal"], row["head_dim"]) == (direction, causal, d)]
            _lines(axes, here, "name", "length", lambda row: row["flops"] and row["flops"] / scale)
            axes.set_title(f"{direction}{', causal' * causal}, d {d}")
            _log2(axes, [row["length"] for row in rows], "sequence length" if r == len(kinds) - 1 else "")
        fastest = max((row["flops"] or 0.0 for row in rows if (row["direction"], row["causal"]) == (direction, causal)), default=0.0)
        grid[r, 0].set(ylabel=unit, ylim=(0, 1.08 * fastest / scale or None))
    _legend(figure, grid[0, 0].get_legend_handles_labels()[0], 4)
    first = rows[0]
    tokens, width = first["batch"] * first["length"], first["heads"] * first["head_dim"]
    figure.suptitle(f"Speed beside peers, {first['dtype']}, {tokens} tokens, H·d = {width}", fontsize=10)
    return figure


def fused(rows: list[Row]) -> Figure:
    figure = _figure(8.6, 3.9)
    diagram, bars = figure.subplots(1, 2, width_ratios=(1.55, 1))
    _tiling(diagram)
    seconds = {row["name"]: row["seconds"] for row in rows}
    ops = [name for name in seconds if name != "fused"]
    bottom = 0.0
    for name, colour in zip(ops, (SKY, PINK, GREEN, YELLOW, ORANGE), strict=True):
        ms = (seconds[name] or 0.0) * 1e3
        bars.bar(0, ms, bottom=bottom, color=colour, edgecolor=BLACK, linewidth=0.6)
        bars.text(0, bottom + ms / 2, name, ha="center", va="center", fontsize=8)
        bottom += ms
    bars.text(0, bottom, _number(bottom), ha="center", va="bottom", fontsize=8)
    together = (seconds["fused"] or 0.0) * 1e3
    bars.bar(1, together, color=VERMILLION, edgecolor=BLACK, linewidth=0.6)
    bars.text(1, together, _number(together), ha="center", va="bottom", fontsize=8)
    bars.set_xticks((0, 1), ("PyTorch, op by op", "Strobe, one kernel"))
    bars.set(ylabel="ms, forward", title=f"{rows[0]['dtype']}, {_shape(rows[0])},\ncausal, dropout 0.1")
    bars.grid(axis="x", visible=False)
    bars.margins(y=0.1)
    return figure


def _tiling(axes: Axes) -> None:
    """FlashAttention-2's loops: a tile of Q stays, tiles of K and V stream by, S and P live on the chip alone."""
    axes.set(xlim=(-0.6, 10.2), ylim=(-0.9, 7.6), aspect="equal")
    axes.axis("off")

    def block(x: float, y: float, w: float, h: float, colour: str, **how: Any) -> None:
        axes.add_patch(Rectangle((x, y), w, h, facecolor=colour, edgecolor=BLACK, linewidth=0.7, **how))

    def matrix(x: float, y: float, w: float, h: float, label: str) -> None:
        block(x, y, w, h, "#F2F2F2")
        axes.text(x + w / 2, y + h + 0.12, label, ha="center", va="bottom", fontsize=9)

    matrix(0, 0, 1.1, 4, "Q   N × d")
    matrix(2, 5, 4, 1.1, "Kᵀ   d × N")
    matrix(6.9, 0, 1.1, 4, "V   N × d")
    matrix(9, 0, 1.1, 4, "O   N × d")
    axes.add_patch(Rectangle((2, 0), 4, 4, facecolor="none", edgecolor=GREY, linewidth=0.8, linestyle="--"))
    axes.text(4, -0.15, "S, P   N × N: never in memory", ha="center", va="top", fontsize=8, color="#555555")
    block(0, 2, 1.1, 1, BLUE)  # Q_i
    block(3, 5, 1, 1.1, GREEN)  # K_j
    block(6.9, 2, 1.1, 1, GREEN)  # V_j
    block(3, 2, 1, 1, ORANGE)  # S_ij
    block(9, 2, 1.1, 1, VERMILLION)  # O_i
    for x, y, label, colour in (
        (0.55, 2.5, "$Q_i$", "white"),
        (3.5, 5.55, "$K_j$", "white"),
        (7.45, 2.5, "$V_j$", "white"),
        (3.5, 2.5, "$S_{ij}$", BLACK),
        (9.55, 2.5, "$O_i$", "white"),
    ):
        axes.text(x, y, label, ha="center", va="center", fontsize=9, color=colour)

    def arrow(start: tuple[float, float], end: tuple[float, float], style: str = "->") -> None:
        axes.add_patch(FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=10, linewidth=1, color=BLACK))

    arrow((1.15, 2.5), (2.95, 2.5))
    arrow((3.5, 4.95), (3.5, 3.05))
    arrow((4.05, 2.5), (6.85, 2.5))
    arrow((8.05, 2.5), (8.95, 2.5))
    arrow((2.3, 6.75), (5.7, 6.75))
    axes.text(4, 6.85, "inner loop: tiles of K and V stream by", ha="center", va="bottom", fontsize=8)
    arrow((-0.3, 3.8), (-0.3, 0.2))
    axes.text(-0.42, 2, "tiles of Q side by side", rotation=90, ha="right", va="center", fontsize=8)
    axes.text(5, 2.58, "softmax:\nm, l", ha="center", va="bottom", fontsize=8)  # within the frame of S
    axes.set_title("On the chip: $Q_i$, $K_j$, $V_j$, $S_{ij}$, and $O_i$ with its running m and l", fontsize=9)


PICTURES: dict[str, Callable[[list[Row]], Figure]] = {
    "a": standard_against_flash,
    "b": block_size,
    "c": block_sparsity,
    "de": sequence_length,
    "f": ladder,
    "g": peers,
    "h": fused,
}
