"""Draws the README's figure from the files of ``strobe bench gpu``: Strobe and the fused kernels beside it, causal, by sequence length.

Usage: bench/peers.py PICTURE.png RESULTS.json...

Files without rows of the core shapes add nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

from strobe_tools.bench.gpu.contestants import PEERS
from strobe_tools.bench.gpu.sets import TOKENS, WIDTH
from strobe_tools.figures import draw


def points(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The causal core shapes of one file, one row for each method and shape, as strobe_tools.figures.draw.peers takes them."""
    names = {"strobe": "Strobe", **PEERS}
    rows = []
    for row in (row for row in record["rows"] if row["set"] == "core36" and row["causal"]):
        shape = {"head_dim": row["d"], "length": row["s"], "heads": WIDTH // row["d"], "batch": TOKENS // row["s"]}
        measured = {"strobe": row["strobe"], **row["peers"]}
        rows += [
            {**shape, "name": names[who], "dtype": "bfloat16", "direction": record["direction"], "causal": 1, "flops": rate * 1e12}
            for who, rate in measured.items()
        ]
    return rows


def main(picture: Path, results: list[Path]) -> None:
    records = [record for record in map(json.loads, map(Path.read_text, results)) if points(record)]
    if not records:
        raise SystemExit("none of the results holds the core shapes")
    first = records[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    with mpl.rc_context(draw.STYLE):
        figure = draw.peers([row for record in records for row in points(record)])
        draw.save(figure, picture, f"{first['device']}, {first['date']}; {versions}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(file) for file in sys.argv[2:]])
