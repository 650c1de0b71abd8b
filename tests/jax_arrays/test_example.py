"""examples/jax_gpt.py, a Flax model, has the losses of PyTorch's GPT from the same weights on the same batches."""

import re
import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "jax_gpt.py"


def test_losses_are_pytorchs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--steps", "12", "--beside-pytorch"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"  loss ([\d.]+)", said)]
    assert losses[-1] < losses[0] - 0.2
    assert float(re.findall(r"largest difference of the losses: (\S+)", said)[0]) < 1e-3
