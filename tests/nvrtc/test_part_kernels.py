"""Kernels for parts of larger problems compile for absent GPUs; they spill only where the same kernels without a part spill."""

from __future__ import annotations

from itertools import product

import pytest

import strobe
from engines import LONG
from strobe._prewarm import Shape, prewarm

S, WHOLE = 4096, 16384
BLOCKS = {"block_rows": (1, 1, 129), "block_rows_t": (1, 1, 129), "block_cols": (9000,), "block_cols_t": (9000,)}
OPTIONS = {
    "causal": ({}, {"window_right": 0}),
    "dropout": ({"rng": Shape((2,), "int64")}, {"dropout": 0.1}),
    "ALiBi": ({"alibi_slopes": Shape((16,), "float32")}, {"window_right": 0}),
    "mask": ({"mask": Shape((1, 1, S, WHOLE), "bool")}, {}),
    "nothing": ({}, {}),
    "block-sparse": ({name: Shape(shape, "int32") for name, shape in BLOCKS.items()}, {"block_q": 128, "block_k": 128}),
}
STARTS = {"multiples of 16": 0, "anywhere": 8}
# What the worst kernel spills, in bytes; kernels that are not listed do not spill.
SPILLS = {
    (90, "strobe::mma::Backward"): 16,  # head dimension 64, tiles of 256 keys
    (90, "strobe::simt::Forward"): 8,  # with a causal mask
}


HOPPER_REFUSES = ("mask", "block-sparse")
KINDS = list(product(STARTS, [False, True]))  # where ranges begin, whether results are partial
# Each option with one of KINDS (`make test-long`: with all).
CASES = [(option, *kind) for n, option in enumerate(OPTIONS) for kind in (KINDS if LONG else KINDS[n % len(KINDS) :][:1])]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("options", "starts", "partial"), CASES)
@pytest.mark.parametrize(("arch", "engine", "dtype", "dim"), [
    (90, "cuda-mma", "bfloat16", 64),
    (90, "cuda-mma", "bfloat16", 128),
    (90, "cuda-simt", "float32", 64),
    (90, "cuda-sm90", "bfloat16", 64),
    (90, "cuda-sm90", "bfloat16", 128),
    (90, "cuda-sm90", "bfloat16", 256),
])  # fmt: skip
def test_it_compiles_without_spills(arch, engine, dtype, dim, options, starts, partial, backward):
    first = STARTS[starts]
    ranges = [(first, S // 2), (WHOLE - S // 2 - first, S // 2)]
    part = strobe.Part(ranges, ranges, WHOLE, WHOLE, partial=partial)
    x = Shape((1, 16, S, dim), dtype)
    arrays, fields = OPTIONS[options]
    try:
        kernels = prewarm({"q": x, "k": x, "v": x} | arrays, fields | {"part": part.encoded(), "engine": engine}, backward, arch)
    except NotImplementedError as refusal:
        refuses = options in HOPPER_REFUSES or (options, starts) == ("dropout", "anywhere")
        if engine == "cuda-sm90" and refuses and ("in parts whose" in str(refusal) or "takes parts of larger" in str(refusal)):
            return
        raise
    assert kernels[0].name.startswith("strobe::passes::WriteWords")
    for kernel in kernels:
        assert kernel.spilled <= SPILLS.get((arch, kernel.name.partition("<")[0]), 0), kernel
