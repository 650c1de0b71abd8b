"""Kernels that find K and V by a page table compile for absent GPUs, with no spills but one."""

from __future__ import annotations

import pytest

from engines import LONG
from strobe._prewarm import Shape, prewarm

B, PAGES, PAGE = 4, 40, 16
SK = PAGES * PAGE
OPTIONS = {
    "nothing": ({}, {}),
    "causal": ({}, {"window_right": 0}),
    "ALiBi": ({"alibi_slopes": Shape((16,), "float32")}, {"window_right": 0}),
    "softcap": ({}, {"softcap": 20.0, "window_right": 0}),
    "mask": ({"mask": Shape((1, 1, 1, SK), "bool")}, {}),
}
LENGTHS = (1, 100)
CASES = [(o, LENGTHS[n % 2]) for n, o in enumerate(OPTIONS)]  # make test-long takes all combinations
if LONG:
    CASES = [(o, sq) for o in OPTIONS for sq in LENGTHS]


SPILLS = {(80, "cuda-tf32", (128, 128), "softcap"): 8, (80, "cuda-tf32", (128, 128), "mask"): 12}  # bytes; all others: none


@pytest.mark.parametrize(("options", "sq"), CASES)
@pytest.mark.parametrize(("arch", "engine", "dtype", "dims"), [
    (90, "cuda-simt", "float32", (64, 64)),
    (90, "cuda-simt", "float32", (128, 128)),
    (90, "cuda-simt", "bfloat16", (40, 321)),
    (90, "cuda-simt", "float64", (64, 64)),
    (90, "cuda-mma", "bfloat16", (64, 64)),
    (90, "cuda-mma", "bfloat16", (128, 128)),
    (80, "cuda-mma", "float16", (96, 40)),
    (90, "cuda-tf32", "float32", (64, 64)),
    (80, "cuda-tf32", "float32", (128, 128)),
    (90, "cuda-sm90", "bfloat16", (64, 64)),
    (90, "cuda-sm90", "float16", (128, 128)),
    (90, "cuda-sm90", "bfloat16", (192, 128)),
    (90, "cuda-sm90", "bfloat16", (256, 256)),
])  # fmt: skip
def test_it_compiles_without_spills(arch, engine, dtype, dims, options, sq):
    arrays, fields = OPTIONS[options]
    d, dv = dims
    arrays = {
        "q": Shape((B, 16, sq, d), dtype),
        "k": Shape((200, 4, PAGE, d), dtype),
        "v": Shape((200, 4, PAGE, dv), dtype),
        "page_table": Shape((B, PAGES), "int32"),
        "seqused_k": Shape((B,), "int32"),
        **arrays,
    }
    kernels = prewarm(arrays, fields | {"engine": engine}, False, arch)
    for kernel in kernels:
        assert kernel.spilled <= SPILLS.get((arch, engine, dims, options), 0), kernel


@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_of_a_full_gpu_do_not_spill(dim):
    """If queries fill the GPU, calls without pages use tiles that leave no registers for pages and ALiBi. Calls with pages must use
    others."""
    test_it_compiles_without_spills(90, "cuda-sm90", "bfloat16", (dim, dim), "ALiBi", 4096)
