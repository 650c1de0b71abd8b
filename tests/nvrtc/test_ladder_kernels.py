"""The teaching kernels compile, through the library, for GPUs that are not here, and no thread spills."""

from __future__ import annotations

import pytest

from engines import LONG
from strobe._prewarm import Shape, prewarm

RUNGS = {"ladder-naive": "float32", "ladder-flash1": "float32", "ladder-flash2": "float32", "ladder-tensor-cores": "float16"}

TILES = {64: [(None, None), (128, 16), (32, 64)], 128: [(None, None), (48, 32)], 256: [(None, None), (16, 16)], 7: [(None, None)]}


USUAL = {64: [(None, None)], 256: [(None, None)]}


def kernels(rung, cc, head_dim, tile, backward, dtype=None):
    x = Shape((1, 2, 100, head_dim), dtype or RUNGS[rung])
    arrays, options = {"q": x, "k": x, "v": x}, {"engine": rung, "window_right": 0}
    options |= {name: wish for name, wish in zip(("tile_q", "tile_k"), tile, strict=True) if wish}
    return prewarm(arrays, options, backward, cc)


@pytest.mark.parametrize("cc", [80, 90])
@pytest.mark.parametrize("rung", RUNGS)
def test_compiles_without_spills(rung, cc):
    compiled, table = 0, TILES if LONG else USUAL
    for head_dim, tiles in table.items():
        for tile in tiles:
            for backward in (False, True):
                for kernel in kernels(rung, cc, head_dim, tile, backward):
                    assert kernel.spilled == 0, kernel.name
                    compiled += 1
    assert compiled >= 2 * sum(map(len, table.values()))


def test_bfloat16_compiles():
    for backward in (False, True):
        for kernel in kernels("ladder-tensor-cores", 90, 128, (64, 32), backward, "bfloat16"):
            assert kernel.spilled == 0, kernel.name


@pytest.mark.parametrize(
    ("rung", "cc", "head_dim", "tile", "dtype", "reason"),
    [
        ("ladder-flash2", 80, 64, (256, 256), None, "shared memory"),
        ("ladder-flash2", 90, 256, (192, 16), None, "takes"),
        ("ladder-tensor-cores", 90, 64, (1024, 16), None, "takes"),
        ("ladder-tensor-cores", 75, 64, (None, None), None, "compute capability 8.0"),
        ("ladder-tensor-cores", 90, 64, (None, None), "float32", "float16"),
        ("ladder-naive", 90, 64, (None, None), "float64", "float32"),
    ],
)
def test_refusals(rung, cc, head_dim, tile, dtype, reason):
    with pytest.raises(NotImplementedError, match=reason):
        kernels(rung, cc, head_dim, tile, False, dtype)
