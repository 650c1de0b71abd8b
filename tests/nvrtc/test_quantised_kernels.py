"""Kernels that read quantised K and V compile for absent GPUs, without spills."""

from __future__ import annotations

import pytest

from engines import LONG
from strobe._prewarm import Shape, prewarm

B, HKV, SK, PAGE = 4, 4, 640, 16
OPTIONS = {
    "nothing": ({}, {}),
    "pages": ({"page_table": Shape((B, SK // PAGE), "int32"), "seqused_k": Shape((B,), "int32")}, {}),
    "softcap": ({}, {"softcap": 20.0, "window_right": 0}),
    "ALiBi and dropout": ({"alibi_slopes": Shape((16,), "float32")}, {"window_right": 0, "dropout": 0.1, "seed": 1}),
    "mask and bias": ({"mask": Shape((1, 1, 1, SK), "bool"), "bias": Shape((1, 1, 1, SK), "float32")}, {}),
}
STORED = ("int8", "float8_e4m3fn", "uint8", "float8_e5m2")
SPILLS = {"cuda-sm90": 112}  # bytes: by the warp that loads, once for each tile
SPILLS_OF_PRODUCTS = 12  # bytes, likewise
CASES = [(o, STORED[n % 4]) for n, o in enumerate(OPTIONS)]  # make test-long takes all combinations
if LONG:
    CASES = [(o, stored) for o in OPTIONS for stored in STORED]


@pytest.mark.parametrize(("options", "stored"), CASES)
@pytest.mark.parametrize(("arch", "engine", "dtype", "dims", "sq"), [
    (90, "cuda-mma", "bfloat16", (128, 128), 1),
    (90, "cuda-mma", "float16", (128, 128), 1),
    (90, "cuda-mma", "bfloat16", (64, 64), 4),
    (80, "cuda-mma", "bfloat16", (128, 128), 1),
    (90, "cuda-sm90", "bfloat16", (64, 64), 500),
    (90, "cuda-sm90", "bfloat16", (128, 128), 500),
    (90, "cuda-sm90", "float16", (256, 256), 500),
    (90, "cuda-sm90", "bfloat16", (64, 64), 40),  # keys are dequantised by the warps that load them
    (90, "cuda-sm90", "bfloat16", (128, 128), 40),
    (90, "cuda-sm90", "float16", (256, 256), 40),
    (90, "cuda-simt", "float32", (128, 128), 1),
    (90, "cuda-simt", "bfloat16", (64, 64), 100),
])  # fmt: skip
def test_it_compiles_without_spills(arch, engine, dtype, dims, sq, options, stored):
    arrays, fields = OPTIONS[options]
    group = 64 if (engine == "cuda-simt" and sq > 1) or (engine == "cuda-sm90" and stored == "uint8") else 0
    rows = (200, HKV, PAGE) if "page_table" in arrays else (B, HKV, SK)
    each = 2 if stored == "uint8" else 1
    d, dv = dims
    arrays = {
        "q": Shape((B, 16, sq, d), dtype),
        "k": Shape((*rows, d // each), stored),
        "v": Shape((*rows, dv // each), stored),
        "k_scale": Shape((*rows[:2], -(-rows[2] // group), d) if group else rows, "float16"),
        "v_scale": Shape(rows, "float32"),
        **arrays,
    }
    kernels = prewarm(arrays, fields | {"engine": engine, "k_scale_group": group}, False, arch)
    for kernel in kernels:
        assert kernel.spilled <= SPILLS.get(engine, 0), kernel
        assert not kernel.serialized, kernel


@pytest.mark.parametrize(("dims", "scales", "options"), [
    ((128, 128), "heads", "nothing"),
    ((128, 128), "rows", "pages"),
    ((64, 64), "rows", "softcap"),
    ((64, 64), "heads", "ALiBi and dropout"),
    ((192, 128), "heads", "mask and bias"),
])  # fmt: skip
def test_fp8_products_compile_without_spills(dims, scales, options):
    arrays, fields = OPTIONS[options]
    rows, (d, dv) = (200, HKV, PAGE) if "page_table" in arrays else (B, HKV, SK), dims
    of_rows = scales == "rows"
    arrays = {
        "q": Shape((B, 16, 500, d), "float8_e4m3fn"),
        "k": Shape((*rows, d), "float8_e4m3fn"),
        "v": Shape((*rows, dv), "float8_e4m3fn"),
        "q_scale": Shape((B, 16, 500) if of_rows else (16,), "float32"),
        "k_scale": Shape(rows if of_rows else (HKV,), "float16"),
        "v_scale": Shape((HKV,), "float32"),
        **arrays,
    }
    kernels = prewarm(arrays, fields | {"engine": "cuda-sm90"}, False, 90)
    assert not [kernel for kernel in kernels if "DequantiseQueries" in kernel.name]
    for kernel in kernels:
        assert kernel.spilled <= SPILLS_OF_PRODUCTS, kernel
        assert not kernel.serialized, kernel
