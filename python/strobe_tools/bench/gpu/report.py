"""Figures as tables: in a terminal, and in Markdown for the documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import exp, log
from typing import Any

from strobe_tools.bench.gpu.contestants import PEERS

Row = dict[str, Any]  # a line of a figures' file
_MEASURED = ("set", "unit", "strobe", "peers", "beside", "seed")  # the other keys say what was measured
_LOWEST = 10  # how many of the lowest random shapes a summary names

# The title of each set's table: its subject and, where Strobe is compared with a second run of its own, by what: rates, or times (_COSTS).
TITLES = {
    "core36": "16k tokens, heads·d = 2048, bf16",
    "random": "Shapes drawn at random, bf16",
    "gqa": "Grouped queries: 32 query heads, 8 key heads, bf16",
    "varlen": "Packed sequences beside equal ones with as many tokens and scores",
    "window": "A window of 1k at 16k beside causal: rates by tiles of 128 × 128 that are not wholly hidden",
    "block-sparse": "Blocks of 128 × 128 at random: time over the kept share of the dense time",
    "options": "What an option costs, causal",
    "dims": "Head dimensions in between, beside the next larger one",
    "small": "Small calls: time on the GPU",
    "decode": "One query over long keys: bytes of K and V read",
    "uneven": "One query over keys of uneven lengths, beside lengths that are all their mean",
    "quantised": "INT8 and FP8 keys and values, causal, a scale for each key and head, beside bf16: time on the GPU",
    "quantised-int4": "INT4 keys and values, causal, a scale for each key and head, beside bf16: time on the GPU",
    "fp8": "q, k and v in FP8, a scale for each sequence and head, beside bf16",
    "latent": "Latent attention, D 576, V within K, pages of 64: rates, or bytes of K read",
    "fp32": "fp32",
    "mma": "cuda-mma, S 8k, beside the FlashAttention of the same instructions",
    "deterministic": "What `deterministic` costs",
    "invariant": "What `invariant` costs in the forward, at the shapes of the first table and of decode",
    "step": "The attention of a training step of gpt3-small, forward and backward together: time on the GPU",
}
_COSTS = ("block-sparse", "options", "deterministic", "invariant")


def is_time(row: Row) -> bool:
    return bool(row["unit"] == "µs")


def ratio(row: Row) -> float | None:
    """Strobe's speed relative to the best peer's."""
    peers = row.get("peers")
    if not peers:
        return None
    return min(peers.values()) / row["strobe"] if is_time(row) else row["strobe"] / max(peers.values())


def beside(row: Row) -> str:
    """Strobe's speed relative to its own second run."""
    if not row.get("beside"):
        return ""
    (base,) = row["beside"].values()
    return f"{base / row['strobe'] - 1:+.0%}" if row["set"] in _COSTS else f"{row['strobe'] / base:.0%}"


def mean(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return exp(sum(map(log, ratios)) / len(ratios))


def where(row: Row) -> str:
    parts = (_word(key, x) for key, x in row.items() if key not in _MEASURED)
    return " ".join(part for part in parts if part)


def _word(key: str, x: Any) -> str:
    if isinstance(x, bool):
        return key if x else ""
    return str(x) if isinstance(x, str) else f"{key} {x}"


def by_set(rows: Iterable[Row]) -> Iterator[tuple[str, list[Row]]]:
    for name, group in groupby(rows, key=lambda row: str(row["set"])):
        yield name, list(group)


def summary(rows: Sequence[Row], direction: str) -> list[str]:
    """One line per set: the mean of the ratios to the best peer, the lowest and where; or the worst against Strobe's own second run."""
    lines = []
    for name, group in by_set(rows):
        if ratios := [(r, where(row)) for row in group if (r := ratio(row)) is not None]:
            lowest = min(ratios)
            lines.append(
                f"{name} {direction}: {mean([r for r, _ in ratios]):.2f} times the best peer's speed (geometric mean of {len(ratios)}; "
                f"lowest {lowest[0]:.2f}, at {lowest[1]}); at least 1 in {sum(r >= 1 for r, _ in ratios)} of {len(ratios)}"
            )
            if name == "random":
                share, lowest_ones = sum(r >= 1 for r, _ in ratios) / len(ratios), sorted(ratios)[:_LOWEST]
                seeds = ", ".join(str(seed) for seed in dict.fromkeys(row["seed"] for row in group))
                lines.append(
                    f"{name} {direction}, seed {seeds}: at least 1 at {share:.0%} of the shapes; the lowest {len(lowest_ones)}: "
                    + "; ".join(f"{r:.2f} at {at}" for r, at in lowest_ones)
                )
        if bases := [(row["strobe"] / next(iter(row["beside"].values())), row) for row in group if row.get("beside")]:
            worst = min(bases, key=lambda pair: pair[0])[1]
            lines.append(f"{name} {direction}: at worst {beside(worst)} beside {next(iter(worst['beside']))}, at {where(worst)}")
    return lines


def columns(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of a table of one set's rows."""
    peers = [who for who in PEERS if any(who in row.get("peers", {}) for row in rows)]
    bases = list(dict.fromkeys(base for row in rows for base in row.get("beside", {})))
    heads = [rows[0]["set"], f"Strobe, {rows[0]['unit']}", *(PEERS[who] for who in peers)]
    heads += ["over the best"] * bool(peers) + [*bases, "cost" if rows[0]["set"] in _COSTS else "of that"] * bool(bases)
    lines = []
    for row in rows:
        line = [where(row), _number(row["strobe"]), *(_number(row.get("peers", {}).get(who)) for who in peers)]
        if peers:
            line.append("" if (r := ratio(row)) is None else f"{r:.2f}")
        if bases:
            line += [*(_number(row.get("beside", {}).get(base)) for base in bases), beside(row)]
        lines.append(line)
    return heads, lines


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def _by_length(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The core shapes: one column per length, one line per contestant."""
    lengths = sorted({row["s"] for row in rows})
    peers = [who for who in PEERS if any(who in row["peers"] for row in rows)]
    names = {"strobe": "Strobe"} | {who: PEERS[who] for who in peers}
    lines = []
    for (d, causal), group in groupby(rows, key=lambda row: (row["d"], row["causal"])):
        of = {row["s"]: row for row in group}
        name = f"d{d}{' causal' if causal else ''}"
        cells = {who: [_number(of[s]["peers"].get(who)) if s in of else "" for s in lengths] for who in peers}
        cells = {"strobe": [_number(of[s]["strobe"]) if s in of else "" for s in lengths], **cells}
        lines += [[name if who == "strobe" else "", names[who], *cells[who]] for who in cells]
        if peers:
            ratios = [ratio(of[s]) if s in of else None for s in lengths]
            lines.append(["", "**over the best**", *("" if r is None else f"**{r:.2f}**" for r in ratios)])
    return ["", "TFLOP/s at S =", *map(_length, lengths)], lines


def _length(s: int) -> str:
    return f"{s // 1024}k" if s % 1024 == 0 else str(s)


_METHOD = """\
`make bench-report` writes this page from the files that `make bench-gpu` leaves in bench/results. FLOPs are 4·B·H·S²·D forward and 2.5
times that backward, and half as many when causal. CUDA events measure the time on the GPU, under load. All calls run in shuffled order in
one run, and other data fills the L2 cache before each. cuDNN, FlashAttention-2 and memory-efficient are the kernels that PyTorch contains.
Each method gets the memory layout that is best for it."""


def page(records: Sequence[dict[str, Any]]) -> str:
    """Figures' files as a page of the documentation."""
    return "\n\n".join((f"# Figures of an {records[0]['device']}", _METHOD, *map(_section, records)))


def _section(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    parts = [
        f"## {record['direction'].capitalize()}",
        textwrap.fill(
            f"{record['device']}, {record['date']}, commit {record['commit']}; {versions}; {record['repeats']} calls a figure, median.", 140
        ),
        "\n".join(textwrap.fill(f"- {line}", 140, subsequent_indent="  ") for line in summary(record["rows"], record["direction"])),
    ]
    for name, rows in by_set(record["rows"]):
        heads, lines = _by_length(rows) if name == "core36" else columns(rows)
        table = [heads, ["---"] * len(heads), *lines]
        parts.append(f"### {TITLES[name]}")
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in table))
    return "\n\n".join(parts)
