"""Few queries, as in decoding: CPUs lay keys across lanes and divide them into spans of 1024, whose results they merge."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

import strobe
from cases import Inputs, call
from check import Yardstick, run, run_or_skip
from device import ON_GPU
from engines import available_engines

pytestmark = pytest.mark.skipif(ON_GPU, reason="of the CPU's engines")
SPAN = 1024
ENGINES = [name for name in available_engines() if name.startswith("cpu-")]
DTYPES = ("float32", "float64", "float16", "bfloat16")
generator = torch.Generator().manual_seed(3)
SEEN = torch.rand(1, 4, 1, 2500, generator=generator) < 0.5
CASES = {
    "one query": {"sq": 1, "sk": 2 * SPAN + 37},
    "keys of a whole span": {"sq": 1, "sk": SPAN},
    "eight queries, causal": {"sq": 8, "sk": SPAN + 3, "causal": True},
    "sixteen queries, causal": {"sq": 16, "sk": 2 * SPAN - 5, "causal": True},
    "six rows of a group": {"h": 6, "hkv": 1, "sq": 1, "sk": SPAN + 70, "d": 128, "dv": 64},
    "causal from the top left": {"sq": 5, "sk": 1500, "causal": True, "alignment": "top_left"},
    "a window of the last span alone": {"sq": 3, "sk": 2500, "window": (60, 2)},
    "a window across spans": {"sq": 3, "sk": 4500, "window": (1500, 0)},
    "packed, a window": {
        "sq": 9,
        "sk": 5000,
        "cu_seqlens_q": torch.tensor([0, 3, 4, 9], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 2500, 2510, 5000], dtype=torch.int32),
        "max_seqlen_q": 5,
        "max_seqlen_k": 2500,
        "window": (1100, 0),
    },
    "keys in use, a window": {
        "b": 3,
        "sq": 2,
        "sk": 4200,
        "seqused_k": torch.tensor([1, 4100, 2049], dtype=torch.int32),
        "window": (100, 0),
    },
    "softcap, sinks, a negative scale": {"sq": 2, "sk": 1100, "softcap": 3.0, "sinks": torch.tensor([1.0, -2, 0, 5]), "scale": -0.4},
    "a mask": {"sq": 2, "sk": 2500, "mask": SEEN},
    "a bias for each query, ALiBi": {
        "sq": 4,
        "sk": 1300,
        "bias": torch.randn(1, 1, 4, 1300, generator=generator),
        "alibi_slopes": torch.tensor([0.5, 0.1, 0.01, 0.9]),
    },
    "packed": {
        "sq": 12,
        "sk": 2600,
        "cu_seqlens_q": torch.tensor([0, 3, 4, 12], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 1200, 1210, 2600], dtype=torch.int32),
        "max_seqlen_q": 8,
        "max_seqlen_k": 1400,
        "causal": True,
    },
    "keys in use": {"b": 3, "sq": 2, "sk": 1200, "seqused_k": torch.tensor([1, 1100, 0], dtype=torch.int32)},
}


def made(name: str, dtype: str) -> Inputs:
    options = dict(CASES[name])
    for tensor in ("sinks", "bias") if dtype == "float64" else ():
        if tensor in options:
            options[tensor] = options[tensor].double()
    return call(**{"h": 4, "hkv": 2, "d": 40, "dv": 24, "dtype": getattr(torch, dtype), **options})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_is_right_and_so_is_the_backward_after_it(name, dtype):
    inputs = made(name, dtype)
    yardstick = Yardstick(inputs)
    for engine in ENGINES:
        try:
            results = run(inputs, engine)
        except NotImplementedError:
            continue
        assert not (faults := yardstick.faults(results)), f"{engine}: {faults}"


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_explained(engine):
    def kernel(queries: int, **options: object) -> str:
        q, k = torch.zeros(1, 2, queries, 64), torch.zeros(1, 2, 99, 64)
        q, k = (x.to(torch.bfloat16) if engine == "cpu-avx512bf16" else x for x in (q, k))
        return strobe.explain(q, k, k, engine=engine, **options)

    assert "keys across lanes" in kernel(16)
    assert "keys across lanes" not in kernel(17)
    for reason, options in (("invariant", {"invariant": True}), ("dropout", {"dropout": 0.5}), ("tiles", {"tile_q": 16})):
        text = kernel(1, **options)
        assert f"keys are not beside {reason}" in text
        assert "keys across lanes" not in text


def test_a_window_bounds_the_workspace():
    def workspace(keys: int, **options: object) -> str:
        q, k = torch.zeros(1, 8, 1, 64), torch.zeros(1, 8, keys, 64)
        text = strobe.explain(q, k, k, engine="cpu-baseline", **options)
        assert "keys across lanes" in text
        return re.search(r"workspace ([^\n;]*)", text.split("cpu-baseline")[1])[1]

    assert workspace(131072, window=(1000, 0)) == workspace(4096, window=(1000, 0))
    assert workspace(131072) != workspace(4096)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["packed", "eight queries, causal", "a mask"])
def test_any_number_of_threads(name, dtype, engine):
    inputs = made(name, dtype)
    one = run_or_skip(inputs, engine, threads=1)
    for threads in (2, 3, 7):
        other = run(inputs, engine, threads=threads)
        assert all(torch.equal(one[x].nan_to_num(7), other[x].nan_to_num(7)) for x in one), threads


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_one_key_has_a_p_of_1(dtype, engine):
    """A score has the same bits in each pass, so that exp(score - LSE) is 1 if LSE is the score."""
    slopes = torch.zeros(16)  # with slopes, scores are in natural units
    inputs = call(h=16, hkv=8, sq=1, sk=208, d=192, dtype=getattr(torch, dtype), alibi_slopes=slopes, window=(0, 0), dlse=False)
    inputs = dataclasses.replace(inputs, q=inputs.q * 4, aux=("column_sums",))
    results = run_or_skip(inputs, engine)
    dv = results["dv"][:, :, -1].double()
    if dtype != "bfloat16":  # with few rows, bfloat16 is summed in another order
        assert (results["column_sums"][..., -1] == 1).all()
    if dtype in ("float32", "float64"):
        torch.testing.assert_close(dv, inputs.dout.double().view(1, 8, 2, -1).sum(2), rtol=0, atol=1e-6 if dtype == "float32" else 1e-14)
    assert (results["dv"][:, :, :-1] == 0).all()


@pytest.mark.parametrize("most", [3e38, 1e37])
def test_a_mean_that_fits_where_the_sum_does_not(most):
    inputs = call(h=4, hkv=1, sq=2, sk=2100, d=16, dlse=False)
    v = most * torch.rand(inputs.v.shape, generator=torch.Generator().manual_seed(1))
    inputs = dataclasses.replace(inputs, v=v, dout=inputs.dout / 64)
    yardstick = Yardstick(inputs)
    for engine in ENGINES:
        results = run_or_skip(inputs, engine) if engine != "cpu-avx512bf16" else None
        assert results is None or not (faults := yardstick.faults(results)), f"{engine}: {faults}"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_hidden_changes_nothing(dtype, bad):
    """Keys past a causal row, hidden by a mask, or not in use have no effect. A row that sees such a key does change."""
    shape, type_ = (1, 2, 1300, 32), getattr(torch, dtype)
    q, k, v = (torch.randn(1, 4, 3, 32).to(type_), torch.randn(shape).to(type_), torch.randn(shape).to(type_))
    mask = torch.ones(1, 1, 1, 1300, dtype=torch.bool)
    mask[..., 700] = False
    damaged = v.clone()
    damaged[:, :, [700, 1299]] = bad
    for engine in ENGINES:
        try:
            clean = strobe.attention(q, k, v, mask=mask, causal=True, engine=engine)
        except NotImplementedError:
            continue
        out = strobe.attention(q, k, damaged, mask=mask, causal=True, engine=engine)
        assert torch.equal(out[:, :, :2], clean[:, :, :2]), engine
        assert not out[:, :, 2].isfinite().any(), engine
        used = torch.tensor([700], dtype=torch.int32)
        assert strobe.attention(q, k, damaged, seqused_k=used, engine=engine).isfinite().all(), engine


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "cpu-amx"])  # on cpu-amx the result is NaN: docs/semantics.md
@pytest.mark.parametrize("sq", [1, 17])
def test_an_infinite_value_whose_weight_is_0_does_not_show(engine, sq):
    """Spans change nothing, although the infinity weighs 1 in the first span, where low scores are the largest."""
    q, k, v = torch.ones(1, 1, sq, 16), torch.zeros(1, 1, 4096, 16), torch.ones(1, 1, 4096, 16)
    k[:, :, :2000] = -3000
    v[:, :, 5] = torch.inf
    if engine == "cpu-avx512bf16":
        q, k, v = (x.bfloat16() for x in (q, k, v))
    try:
        out = strobe.attention(q, k, v, engine=engine)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    torch.testing.assert_close(out, torch.ones_like(out))
