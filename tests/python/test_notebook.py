"""The examples run, and the notebook carries no outputs in git."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(EXAMPLES / "strobe.ipynb", as_version=4)


def test_the_notebook_is_stripped(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_the_notebook_runs(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("STROBE_CACHE", str(tmp_path))
    done = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    text = "\n".join(output.get("text", "") for cell in done.cells for output in cell.get("outputs", []))
    assert "the same twice: True" in text
    figure = {line.rpartition(" ")[0]: float(line.split()[-1]) for line in text.splitlines() if " loss " in line or "entropy" in line}
    assert figure["strobe validation loss"] < min(figure["none validation loss"], figure["bigram entropy"])
    assert sum("image/png" in output.get("data", {}) for cell in done.cells for output in cell.get("outputs", [])) == 2


def test_the_first_example_runs():
    done = subprocess.run([sys.executable, EXAMPLES / "attention.py"], capture_output=True, text=True, check=True)
    assert "torch.Size([2, 8, 1024, 64])" in done.stdout
    assert float(done.stdout.split()[-1]) == 0.0


def test_the_tree_is_learned_and_drawn(tmp_path):
    picture = tmp_path / "tree.png"
    arguments = ["--branches", "2", "--depth", "2", "--steps", "40", "--picture", picture]
    done = subprocess.run([sys.executable, EXAMPLES / "tree.py", *arguments], capture_output=True, text=True, check=True)
    assert float(done.stdout.split("mean average precision ")[1].split()[0]) == 1.0
    pixels = plt.imread(picture)
    assert pixels.shape[0] > 500
    assert len({tuple(pixel) for pixel in pixels[::4, ::4].reshape(-1, pixels.shape[-1]).tolist()}) > 20
