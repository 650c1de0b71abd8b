"""The pass that makes max_logit and column_sums compiles for GPUs that are not here, without spills, in FP64 too."""

from __future__ import annotations

import pytest

from strobe._prewarm import Shape, prewarm

S = 2048
OPTIONS = {
    "plain": ({}, {}),
    "causal": ({}, {"causal": True}),
    "softcap": ({}, {"softcap": 5.0, "causal": True}),
    "hyperbolic": ({"mask": Shape((1, 1, S, S), "bool")}, {"score": 1, "beta": 1.0}),
    "bias": ({"bias": Shape((1, 16, S, S), "float32"), "alibi_slopes": Shape((16,), "float32")}, {}),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("arch", "dtype", "dims"),
    [
        *((90, "bfloat16", dims) for dims in ((64, 64), (256, 256))),
        (90, "float16", (576, 512)),
        (90, "float32", (128, 128)),
        *((80, dtype, (128, 128)) for dtype in ("bfloat16", "float32")),
        (120, "bfloat16", (128, 128)),
    ],
)
def test_it_compiles_without_spills(arch, dtype, dims, options):
    q, v = (Shape((2, 16, S, d), dtype) for d in dims)
    arrays = {"q": q, "k": q, "v": v, "max_logit": Shape((2, 16), "float32"), "column_sums": Shape((2, 16, S), "float32")}
    more, fields = OPTIONS[options]
    if "bias" in more:
        more = more | {"bias": Shape((1, 16, S, S), dtype)}
    kernels = prewarm(arrays | more, fields, False, arch)
    found = {kernel.name.split("<")[0]: kernel for kernel in kernels}
    assert {"strobe::passes::Auxiliary", "strobe::passes::LargestScore"} <= found.keys()
    for name in ("strobe::passes::Auxiliary", "strobe::passes::LargestScore"):
        assert found[name].spilled == 0, found[name]
