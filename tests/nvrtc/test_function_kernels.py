"""Kernels with functions of the score compile for absent GPUs. Known spills are listed; nothing else spills."""

from __future__ import annotations

import pytest
from functions import FUNCTIONS, S, prewarmed

from strobe._prewarm import Shape

# What the main kernel spills on an H100, bytes of stores and loads: by function, head dimension and whether it is the backward.
SPILLS = {
    ("T5 buckets", 64, False): 56,
    ("T5 buckets", 128, False): 60,
    ("T5 buckets", 128, True): 48,
}


def kernels(name, dim, backward, arch=90, engine=None, dtype="bfloat16"):
    score, mask, captured = FUNCTIONS[name]()
    x = Shape((2, 16, S, dim), dtype)
    return prewarmed({"q": x, "k": x, "v": x, **captured}, score, mask, {"causal": 1}, backward, arch, engine)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_hopper(name, dim, backward):
    found = kernels(name, dim, backward, engine="cuda-sm90")
    assert any(kernel.name.startswith("strobe::sm90::") for kernel in found)
    for kernel in found:
        assert kernel.spilled <= SPILLS.get((name, dim, backward), 0), kernel
        assert not kernel.serialized, kernel


BLOCKS = {"block_rows": (1, 1, 65), "block_rows_t": (1, 1, 65)} | dict.fromkeys(("block_cols", "block_cols_t"), (4096,))
FULL = dict.fromkeys(("block_full", "block_full_t"), (4096,))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["documents", "window", "neighbourhood"])
def test_hopper_beside_blocks(name, dim, backward):
    score, mask, captured = FUNCTIONS[name]()
    x = Shape((2, 16, S, dim), "bfloat16")
    arrays = {"q": x, "k": x, "v": x, **captured, **{name: Shape(shape, "int32") for name, shape in (BLOCKS | FULL).items()}}
    options = {"causal": 1, "block_q": 128, "block_k": 128}
    for kernel in prewarmed(arrays, score, mask, options, backward, 90, "cuda-sm90"):
        assert kernel.spilled <= (8 if backward else 0), kernel  # a loading thread's
        assert not kernel.serialized, kernel


@pytest.mark.parametrize("name", ["relative bias", "tanh", "documents"])
@pytest.mark.parametrize(
    ("engine", "arch", "dtype"),
    [("cuda-mma", 80, "bfloat16"), ("cuda-mma", 90, "float16"), ("cuda-tf32", 80, "float32"), ("cuda-simt", 90, "float64")],
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_other_families(name, engine, arch, dtype, backward):
    for kernel in kernels(name, 64, backward, arch, engine, dtype):
        assert kernel.registers > 0, kernel


def test_a_number_in_a_function_is_no_other_kernel():
    """Kernel names hold a hash of the functions' code, in which numbers are arguments."""
    names = {
        kernel.name
        for window in (16, 300)
        for kernel in prewarmed(
            {name: Shape((2, 16, S, 64), "bfloat16") for name in "qkv"}, None, _window(window), {"causal": 1}, False, 90, "cuda-sm90"
        )
    }
    assert len(names) == 1


def _window(size):
    from functions import Graph

    g = Graph()
    g.less_equal(g.absolute(g.subtract(g.query(), g.key())), g.integer(size))
    return g
