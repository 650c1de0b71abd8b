"""``strobe tune`` on a GPU: a table is written, and the next process runs its tiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from strobe import _tuning

EXPLAIN = """
import torch, strobe
x = torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.float16)
print(strobe.explain(x, x, x, engine="cuda-mma"))
"""


def run(cache, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, *arguments], check=True, capture_output=True, text=True, env={**_environment(), "STROBE_CACHE_DIR": str(cache)}
    ).stdout


def _environment() -> dict[str, str]:
    return {name: x for name, x in os.environ.items() if name != "STROBE_TUNING"} | {"COLUMNS": "200"}


def test_a_table_is_written_and_read(tmp_path, monkeypatch):
    options = ("--engine", "cuda-mma", "--dtype", "float16", "--direction", "forward", "--repeats", "3")
    said = run(tmp_path, "-m", "strobe", "tune", "--shape", "2,4,300,64", "--gain", "0", *options)
    assert "of 2 calls have a faster tile" in said
    monkeypatch.setenv("STROBE_CACHE_DIR", str(tmp_path))
    header = _tuning.header(0)
    file = Path(header.file)
    assert _tuning.parsed(file.read_text(encoding="utf-8"))[0] == header.about
    assert header.ignored == ""

    # A tile that is never chosen otherwise shows that the table was read.
    winner = {"engine": "cuda-mma", "direction": "forward", "dtype": "float16", "head_dim": 64, "head_dim_v": 64, "group": 1}
    winner |= {"queries": 300, "keys": 300, "heads": 8, "causal": False, "varlen": False, "deterministic": False}
    winner |= {"tile_q": 16, "tile_k": 32, "seconds": 1e-5, "usual_seconds": 2e-5}
    assert "tile 16 x 32;" not in run(tmp_path, "-c", EXPLAIN)
    file.write_text(_tuning.written([header.about, winner]), encoding="utf-8")
    said = run(tmp_path, "-c", EXPLAIN)
    assert "tile 16 x 32;" in said
    assert "the tile that `strobe tune` measured" in said

    file.write_text(_tuning.written([{**header.about, "kernels": "0123"}, winner]), encoding="utf-8")
    said = run(tmp_path, "-c", EXPLAIN)
    assert "tile 16 x 32;" not in said
    assert "ignored: stale" in said
