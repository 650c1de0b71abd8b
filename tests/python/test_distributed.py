"""strobe.distributed.attention(): a call over the ranks of a group is the call on one device, whatever the options."""

from __future__ import annotations

import pytest

from check import Yardstick
from device import ON_GPU
from distributed_cases import build, every_pair, joined, run_on_rank

pytestmark = pytest.mark.skipif(ON_GPU, reason="on GPUs: tests/gpu/distributed_on_gpus.py")
CASES = every_pair()


@pytest.mark.parametrize("number", range(len(CASES)))
def test_case(workers, number):
    case = CASES[number]
    workers.send(run_on_rank, case["how"][0], case)  # while the ranks compute, the case is judged
    inputs = build(case)
    yardstick = Yardstick(inputs)
    results = joined(case, inputs, workers.receive(case["how"][0]))
    faults = yardstick.faults(results)
    assert not faults, "\n".join([str(case), *faults])
