"""Kernels that most calls run compile for GPUs that are not here, and keep their registers. `make prewarm` does it for all that ship."""

from __future__ import annotations

import pytest

from strobe._prewarm import Shape, prewarm
from strobe.cli.prewarm import FEATURES, Job

# Known: the fp32 backward at d128 keeps some numbers of its prologue in memory (bytes).
SPILLS = {"strobe::tf32::Backward": 144}


@pytest.mark.parametrize("arch", [80, 90, 120])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("backward", [False, True])
def test_causal(arch, dtype, backward):
    kernels, refusal = Job(arch, dtype, 128, "causal", backward).run()
    if "no NVRTC" in refusal:
        pytest.skip(refusal)
    assert kernels, refusal
    for kernel in kernels:
        assert kernel.spilled <= SPILLS.get(kernel.name.partition("<")[0], 0), kernel


@pytest.mark.parametrize(("batch", "keys"), [(1, 65536), (64, 4096)])
def test_one_query_runs_on_packed_heads(batch, keys):
    """The least predicted time: reading K and V once, not computing tiles of which one row counts."""
    q, k = Shape((batch, 32, 1, 128), "bfloat16"), Shape((batch, 8, keys, 128), "bfloat16")
    try:
        names = [kernel.name for kernel in prewarm({"q": q, "k": k, "v": k}, {}, False, 90)]
    except NotImplementedError as refusal:
        if "no NVRTC" not in str(refusal):
            raise
        pytest.skip(str(refusal))
    assert names[0].startswith("strobe::mma::Decode")


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("feature", ["plain", "causal", "ALiBi", "softcap", "dropout", "block-sparse"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_hopper_backward(head_dim, feature, deterministic):
    more, options = FEATURES[feature]
    x = Shape((2, 4, 4096, head_dim), "bfloat16")
    try:
        kernels = prewarm({"q": x, "k": x, "v": x, **more}, {**options, "engine": "cuda-sm90", "deterministic": deterministic}, True, 90)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    assert any(kernel.name.startswith("strobe::sm90::Backward") for kernel in kernels)
    for kernel in kernels:
        assert kernel.spilled == 0, kernel
