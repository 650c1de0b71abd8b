"""Kernels with functions of the score compile for absent GPUs, and nothing spills but what is named."""

from __future__ import annotations

import pytest
from functions import CAPTURED, FUNCTIONS, Graph, S, prewarmed

from strobe._prewarm import Shape


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
        assert kernel.spilled == 0, kernel
        assert not kernel.serialized, kernel


BLOCKS = {"block_rows": (1, 1, 65), "block_rows_t": (1, 1, 65)} | dict.fromkeys(("block_cols", "block_cols_t"), (4096,))
FULL = dict.fromkeys(("block_full", "block_full_t"), (4096,))


def kernels_beside_blocks(name, dim, backward, arch, engine, dtype="bfloat16", lists=BLOCKS | FULL):
    score, mask, captured = FUNCTIONS[name]()
    x = Shape((2, 16, S, dim), dtype)
    arrays = {"q": x, "k": x, "v": x, **captured, **{name: Shape(shape, "int32") for name, shape in lists.items()}}
    return prewarmed(arrays, score, mask, {"causal": 1, "block_q": 128, "block_k": 128}, backward, arch, engine)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["documents", "window", "neighbourhood"])
def test_hopper_beside_blocks(name, dim, backward):
    for kernel in kernels_beside_blocks(name, dim, backward, 90, "cuda-sm90"):
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


@pytest.mark.parametrize(
    ("engine", "arch", "dtype"), [("cuda-mma", 80, "bfloat16"), ("cuda-tf32", 80, "float32"), ("cuda-simt", 90, "float64")]
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_other_families_beside_blocks(engine, arch, dtype, backward):
    """Where lists say which blocks are full, kernels are others, and spill no more than is named."""
    plain, full = (
        {kernel.name: kernel.spilled for kernel in kernels_beside_blocks("documents", 64, backward, arch, engine, dtype, lists)}
        for lists in (BLOCKS, BLOCKS | FULL)
    )
    assert not {name for name in full if "Forward" in name or "Backward" in name} & {*plain}
    more = 48 if engine == "cuda-simt" and not backward else 0  # bytes in float64: whether a tile is full takes a register
    assert max(full.values()) <= max(plain.values()) + more


# Bytes that the pass for the gradient of a captured tensor spills, in tiles that a mask cuts.
CAPTURED_SPILLS = {("curved", 64): 16}


def captured_kernels(name, dim, arch=90, engine=None, dtype="bfloat16", **more):
    score, mask, captured = CAPTURED[name]()
    x = Shape((2, 16, S, dim), dtype)
    arrays = {"q": x, "k": x, "v": x, **captured, **{f"d{key}": shape for key, shape in captured.items()}}
    found = prewarmed(arrays, score, mask, {"causal": 1, **more}, True, arch, engine)
    return [kernel for kernel in found if "Captured" in kernel.name]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", CAPTURED)
def test_gradients_of_captured_tensors(name, dim):
    found = captured_kernels(name, dim)
    assert len(found) == {"table": 2, "pairs": 3}.get(name, 3), found
    for kernel in found:
        assert kernel.spilled <= CAPTURED_SPILLS.get((name, dim), 0), kernel


@pytest.mark.parametrize("name", CAPTURED)
@pytest.mark.parametrize(
    ("engine", "arch", "dtype"),
    [("cuda-mma", 80, "bfloat16"), ("cuda-mma", 75, "float16"), ("cuda-tf32", 80, "float32"), ("cuda-simt", 61, "float32")],
)
def test_gradients_of_captured_tensors_in_other_families(name, engine, arch, dtype):
    found = captured_kernels(name, 64, arch, engine, dtype)
    assert found
    for kernel in found:
        assert kernel.registers > 0, kernel


def test_the_gradient_of_a_captured_tensor_is_no_other_kernel_of_dq():
    """Kernels that are compiled for a backward serve it with that gradient as well."""
    score, mask, captured = CAPTURED["key"]()
    x = Shape((2, 16, S, 64), "bfloat16")
    arrays = {"q": x, "k": x, "v": x, **captured}
    before, after = (
        {kernel.name for kernel in prewarmed({**arrays, **more}, score, mask, {"causal": 1}, True, 90)}
        for more in ({}, {"dcaptured_0": captured["captured_0"]})
    )
    assert before <= after


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("name", "ahead"), [("T5 buckets", 1), ("relative bias", 1), ("window", 0), ("tanh", 0)])
def test_what_pairs_share_is_computed_ahead(name, ahead, backward):
    found = [kernel.name for kernel in kernels(name, 64, backward, engine="cuda-sm90")]
    assert sum("ComputeAhead" in kernel for kernel in found) == ahead, found


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


def test_long_functions_run_where_they_are_not_unrolled():
    """A dot product of rows of 16 elements, of the queries and of the keys: on cuda-sm90 a first call would take minutes."""
    graph = Graph()
    b, h, i, j = graph.batch(), graph.head(), graph.query(), graph.key()
    found = graph.score()
    for n in range(16):
        place = graph.integer(n)
        found = graph.add(found, graph.multiply(graph.load(0, b, h, i, place), graph.load(1, b, h, j, place)))
    x, rows = Shape((2, 16, S, 64), "bfloat16"), Shape((2, 16, S, 16), "float32")
    kernels = prewarmed({"q": x, "k": x, "v": x, "captured_0": rows, "captured_1": rows}, graph, None, {"causal": 1}, False, 90)
    assert any(kernel.name.startswith("strobe::simt::Forward") for kernel in kernels), kernels
