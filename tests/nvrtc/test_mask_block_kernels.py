"""The kernels that find the blocks of a mask function compile for absent GPUs, without spills."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nvrtc import compiled

KERNELS = Path(__file__).parents[2] / "kernels"
LISTS = ["MakeCells<KeptListsConfig{0}>", "CountKept<KeptListsConfig{0}>", "ListKept<KeptListsConfig{0}>"]
EXP, TANH, POWER = 1 << 0, 1 << 11, 1 << 19  # bounds::bit_of_function()
BOUNDS = [f"{name}<BoundsConfig{{{functions},4}}>" for name in ("SideBounds", "PairBounds") for functions in (0, EXP | TANH, POWER)]


@pytest.mark.parametrize(("kernel", "arch"), [(kernel, 90) for kernel in LISTS + BOUNDS] + [(BOUNDS[0], 75), (BOUNDS[3], 120)])
def test_it_compiles_without_spills(kernel, arch):
    source = (
        f'#include "passes/mask_blocks.h"\nusing namespace strobe;\nusing Kernel = passes::{kernel};\n'
        'extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksPerSm) kernel(\n'
        "    const __grid_constant__ Kernel::Arguments a) {\n  Kernel::run(a);\n}\n"
    )
    options = [f"--gpu-architecture=sm_{arch}", "-std=c++20", "-default-device", f"--include-path={KERNELS}", "--ptxas-options=-v"]
    status, log, _ = compiled(source.encode(), "kernel.cu", options, "CUBIN")
    assert status == 0, log
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    assert len(spilled) >= 2, log
    assert not any(spilled), log
