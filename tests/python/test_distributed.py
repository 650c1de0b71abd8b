"""strobe.distributed.attention(): a call over the ranks of a group is the call on one device, whatever the options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cases
from check import Yardstick
from device import ON_GPU
from distributed_cases import FACTORS, build, every_pair, joined, run_on_rank, valid

pytestmark = pytest.mark.skipif(ON_GPU, reason="on GPUs: tests/gpu/distributed_on_gpus.py")
CASES = every_pair()


def test_every_pair_is_among_the_cases():
    for names, possible in cases.tuples(2, FACTORS, valid).items():
        held = {tuple(FACTORS[name].index(case[name]) for name in names) for case in CASES}
        assert possible <= held, names


@pytest.mark.parametrize("number", range(len(CASES)))
def test_case(workers, number):
    case = CASES[number]
    workers.send(run_on_rank, case["how"][0], case)  # the case is judged while the ranks compute
    inputs = build(case)
    yardstick = Yardstick(inputs)
    results = joined(case, inputs, workers.receive(case["how"][0]))
    faults = yardstick.faults(results)
    assert not faults, "\n".join([str(case), *faults])


def test_the_script_for_several_gpus():
    """Runs tests/gpu/distributed_on_gpus.py on the CPU."""
    file = Path(__file__).parents[1] / "gpu" / "distributed_on_gpus.py"
    command = [sys.executable, file, "--backend", "gloo", "--ranks", "2", "--cases", "3", "77", "--jobs", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 of 2 cases were run" in run.stdout
    assert "2 right" in run.stdout
