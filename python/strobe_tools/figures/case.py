"""What the figures share: where they are measured, the cases they consist of, and their CSV files."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]


class Setting(NamedTuple):
    """The device, and how thorough the measurement is."""

    device: str  # "cpu" or "cuda"
    quick: bool
    budget: float  # seconds for the repetitions of a figure's calls, per case

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.on_gpu else "float32"


class Case(NamedTuple):
    """A step of a figure: the calls that are timed together."""

    name: str
    run: Callable[[], list[Row]]


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Writes rows, with columns in the order in which the rows first have them, and floats with six digits."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: f"{x:.6g}" if isinstance(x, float) else x for name, x in row.items()} for row in rows)


def read_csv(path: Path) -> list[Row]:
    """Reads rows: numbers as numbers, missing values as None."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: _value(x) for name, x in row.items()} for row in csv.DictReader(file)]


def _value(x: str) -> Any:
    if x == "":
        return None
    try:
        return float(x) if any(c in x for c in ".en") else int(x)
    except ValueError:
        return x
