"""Kernels of latent attention compile for an absent GPU, without spills and with products that ptxas does not serialize."""

from __future__ import annotations

import pytest

from engines import LONG
from strobe._prewarm import Shape, prewarm

B, SK = 4, 640


def pages(size):
    return {"page_table": Shape((B, SK // size), "int32"), "seqused_k": Shape((B,), "int32")}


OPTIONS = {
    "nothing": ({}, {}, 1),
    "causal, pages of 64": (pages(64), {"window_right": 0}, 4),
    "pages of 16": (pages(16), {"softcap": 20.0}, 1),
    "window, pages of 8": (pages(8), {"window_left": 100, "window_right": 0, "scale": -1.0}, 2),
    "lengths": ({"seqused_k": Shape((B,), "int32")}, {"window_right": 0, "softcap": 20.0, "exact_max": True}, 4),
    "splits": ({}, {"window_right": 0}, 1),
    "invariant": ({"seqused_k": Shape((B,), "int32")}, {"window_right": 0, "invariant": True}, 300),
}
# Bytes: a block that walks over chunks of keys merges them in registers that O leaves, once for every 4,096 keys.
SPILLS = {"invariant": 1100}
CASES = [(o, ("bfloat16", "float16")[n % 2]) for n, o in enumerate(OPTIONS)]  # make test-long takes all combinations
if LONG:
    CASES = [(o, dtype) for o in OPTIONS for dtype in ("bfloat16", "float16")]


@pytest.mark.parametrize(("option", "dtype"), CASES)
def test_it_compiles_without_spills(option, dtype):
    arrays, fields, queries = OPTIONS[option]
    batch = 1 if option == "splits" else B
    page = SK // arrays["page_table"].shape[1] if "page_table" in arrays else 0
    rows = (200, 1, page) if page else (batch, 1, 10 * SK)
    arrays = {
        "q": Shape((batch, 16, queries, 576), dtype),
        "k": Shape((*rows, 576), dtype),
        "v": Shape((*rows, 512), dtype, within="k"),
        **arrays,
    }
    kernels = prewarm(arrays, fields | {"engine": "cuda-sm90"}, False, 90)
    assert any("sm90::latent::Latent" in kernel.name for kernel in kernels)
    assert option != "splits" or any("Combine" in kernel.name for kernel in kernels)
    for kernel in kernels:
        assert kernel.spilled <= SPILLS.get(option, 0), kernel
        assert not kernel.serialized, kernel
