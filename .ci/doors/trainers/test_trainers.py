"""A training step on two processes, each with some tokens of every sequence, gives the weights of the step on one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RANKS = Path(__file__).with_name("ranks.py")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """What the steps left on one process and on two."""
    found = []
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]):
        folder = tmp_path_factory.mktemp("ran")
        command = [sys.executable, *launcher, str(RANKS), str(folder)]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        found.append(folder)
    return found


@pytest.mark.parametrize("what", ["with_trainer", "with_strobe", "flattened", "with_lora", "with_trl", "with_accelerate"])
def test_a_step_on_two_processes_is_that_of_one(folders, what):
    (loss, weights), (shared_loss, shared) = (torch.load(folder / what) for folder in folders)
    assert shared_loss == pytest.approx(loss, rel=1e-5)
    assert shared.keys() == weights.keys()
    for name, x in weights.items():
        torch.testing.assert_close(shared[name], x, rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
