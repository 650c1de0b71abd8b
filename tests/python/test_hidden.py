"""Hidden elements affect no result, whatever they hold and whatever lies beside them in a tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import strobe
from cases import Inputs, call
from check import Results, Yardstick, assert_matches, oracle, run, run_or_skip
from device import ON_GPU
from engines import available_engines
from strobe._prewarm import Shape, kernels, prewarm

INF, NAN = torch.inf, torch.nan
engines = pytest.mark.parametrize("engine", available_engines())
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def assert_clean(inputs: Inputs, engine: str) -> None:
    ref = oracle(inputs)
    for name, t in run_or_skip(inputs, engine).items():
        spoiled = ~t.isfinite() & ref[name].isfinite()
        assert not spoiled.any(), f"{name} is not finite at {spoiled.nonzero()[0].tolist()}, which sees nothing of the kind"


@engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("what", "value"), [("k", NAN), ("v", INF), ("v", NAN)])
def test_behind_the_diagonal(what, value, dtype, engine):
    """Key tiles are packed once per head, and the last step of a product reads past the diagonal."""
    inputs = call(h=4, hkv=1, sq=128, sk=141, d=64, dtype=dtype, causal=True)
    getattr(inputs, what)[..., 78:, :] = value
    assert_clean(inputs, engine)


@engines
@dtypes
@pytest.mark.parametrize("at", [0, 15, 16, 31, 63, 64, 127])
@pytest.mark.parametrize("what", ["q", "k", "v", "dout"])
def test_one_number_at_the_edge_of_a_tile(what, at, dtype, engine):
    """The engine looks for such numbers in tiles of 128 rows and in pieces of tiles. Here the first or last row of one has such a
    number."""
    if engine == "cuda-sm90" and what == "dout":
        pytest.skip("docs/semantics.md: a dO that is not finite shows in all columns of dv")
    inputs = call(h=1, hkv=1, sq=128, sk=128, d=64, dtype=dtype, causal=True)
    getattr(inputs, what)[0, 0, at, 63] = NAN if ON_GPU else INF  # docs/semantics.md says what a visible infinity does on a GPU
    assert_clean(inputs, engine)


FUNCTIONS: dict[str, dict[str, Any]] = {"softcap": {"softcap": 30.0}, "hyperbolic": {"score": "hyperbolic"}, "dot": {}}
ADDED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "dropout": {"dropout": 0.2, "seed": 1, "offset": 2},
    "bias": {"bias": torch.linspace(-1, 1, 90).view(1, 1, 1, 90)},
    "mask": {"mask": torch.arange(90).view(1, 1, 1, 90) % 7 > 0},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.2])},
}
PACKED = [(torch.float32, 33, 65, True), (torch.bfloat16, 32, 32, False), (torch.float16, 112, 256, True), (torch.bfloat16, 200, 48, True)]
# Each function and each addition is tested twice, with other dtypes and head dimensions in turn, because their kernels take long to
# compile.
PADDED = [(f, x, *PACKED[(i + j + k) % 4]) for i, f in enumerate(FUNCTIONS) for j, x in enumerate(ADDED) for k in (0, 2)]


@engines
@pytest.mark.parametrize(("function", "added", "dtype", "d", "dv", "causal"), PADDED, ids=str)
def test_padding_behind_packed_tokens(function, added, dtype, d, dv, causal, engine):
    """A tile of a sequence's last queries reaches into the padding, whose numbers must have neither a score nor its derivative."""
    ends_q, ends_k = torch.tensor([0, 70, 70, 85], dtype=torch.int32), torch.tensor([0, 90, 130, 130], dtype=torch.int32)
    options = {"max_seqlen_q": 70, "max_seqlen_k": 90, "causal": causal, **FUNCTIONS[function], **ADDED[added]}
    inputs = call(sq=125, sk=161, d=d, dv=dv, dtype=dtype, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, dlse=False, **options)
    if function == "hyperbolic":
        inputs.q[..., 0], inputs.k[..., 0] = -20, 20
    for behind in (NAN, torch.finfo(dtype).max):
        for t, end in ((inputs.q, 85), (inputs.k, 130), (inputs.v, 130), (inputs.dout, 85)):
            t[end:] = behind
        assert_clean(inputs, engine)


@engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("what", ["k", "v"])
@pytest.mark.parametrize("how", ["mask", "every other one", "bias", "causal", "packed"])
def test_largest_numbers(how, what, dtype, engine):
    """A product with the largest number may overflow, and be rounded to infinity before."""
    hidden = torch.arange(64) % 2 == 1 if how == "every other one" else torch.arange(64) >= 40
    rows = (slice(40, None),) if how == "packed" else (..., hidden, slice(None))
    hidden = hidden.view(1, 1, 1, 64)
    options = {
        "mask": {"mask": ~hidden},
        "every other one": {"mask": ~hidden},
        "bias": {"bias": torch.zeros(1, 1, 1, 64).masked_fill(hidden, -INF)},
        "causal": {"causal": True, "alignment": "top_left"},
        "packed": {"cu_seqlens_q": torch.tensor([0, 40]), "cu_seqlens_k": torch.tensor([0, 40])},
    }[how]
    options = {name: x.int() if name.startswith("cu_") else x for name, x in options.items()}
    inputs = call(sq=40, sk=64, d=64, dtype=dtype, **options)
    getattr(inputs, what)[rows] = torch.finfo(dtype).max
    assert_clean(inputs, engine)


@engines
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_query_whose_scores_are_minus_infinity(dtype, engine):
    """With a sink, the query sees only the sink, and the other queries' terms of dv stay. (Its own term of dk is 0 times an infinity.)"""
    inputs = call(h=1, sq=128, d=64, dtype=dtype, sinks=torch.zeros(1))
    inputs.k[..., 0] = inputs.k[..., 0].abs() + 0.1
    inputs.q[..., 5, 0] = -INF
    results, ref = run_or_skip(inputs, engine), oracle(inputs)
    if engine in ("cpu-amx", "cuda-tf32") and dtype == torch.float32:
        pytest.skip("an infinite input gives NaN there: docs/semantics.md")
    for name in ("out", "lse", "dv"):
        assert (results[name].isfinite() | ~ref[name].isfinite()).all(), name
    assert results["dk"][..., 1:].isfinite().all()


@engines
@dtypes
@pytest.mark.parametrize("what", ["q", "dout"])
@pytest.mark.parametrize("options", [{}, {"bias": torch.zeros(1, 1, 1, 1)}, {"softcap": 20.0}], ids=str)
def test_a_query_that_sees_a_sink_alone(options, what, dtype, engine):
    """The LSE of such a query is the sink, whatever the query is."""
    inputs = call(sq=100, sk=40, d=64, dtype=dtype, causal=True, sinks=torch.tensor([0.5, -2.0]), **options)
    getattr(inputs, what)[..., :60, :] = NAN
    assert_clean(inputs, engine)


@engines
@dtypes
@pytest.mark.parametrize("what", ["k", "v"])
@pytest.mark.parametrize("options", [{"softcap": 20.0}, {"scale": -0.3}, {"dropout": 0.2, "seed": 1, "offset": 2}], ids=str)
def test_padding_with_other_options(options, what, dtype, engine):
    inputs = call(sq=64, sk=64, dtype=dtype, mask=torch.arange(64).view(1, 1, 1, 64) < 60, **options)
    getattr(inputs, what)[..., 60:, :] = NAN
    assert_clean(inputs, engine)


@engines
@pytest.mark.parametrize("what", ["k", "v"])
def test_mask_of_each_query_and_a_bias_gradient(what, engine):
    """40 queries do not fill the lanes, and the mask has no rows for the lanes that are left over."""
    mask = (torch.arange(64).view(1, 1, 1, 64) < 60).expand(1, 1, 40, 64).contiguous()
    inputs = call(sq=40, sk=64, mask=mask, bias=torch.randn(1, 1, 1, 64), gradients=("bias",))
    getattr(inputs, what)[..., 60:, :] = NAN
    assert_clean(inputs, engine)


@engines
@dtypes
@pytest.mark.parametrize("sq", [1, 65, 257])
def test_gradient_that_is_not_finite(sq, dtype, engine):
    """The last query's dO is not finite: the keys that it sees get gradients of NaN, keys beside them do not."""
    inputs = call(sq=sq, sk=400, dtype=dtype, causal=True, alignment="top_left")
    inputs.dout[..., -1, :] = INF
    assert_clean(inputs, engine)


@engines
@pytest.mark.parametrize("what", ["k", "v"])
def test_bias_of_minus_infinity(what, engine):
    bias = torch.zeros(1, 1, 1, 70)
    bias[..., 50:] = -INF
    inputs = call(sq=33, sk=70, bias=bias)
    getattr(inputs, what)[..., 50:, :] = NAN
    assert_clean(inputs, engine)


@engines
@pytest.mark.parametrize(("b", "sq"), [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (1, 2, 1, 1)])
def test_bias_gradient_of_nothing_is_zero(b, sq, shape, engine):
    inputs = call(b=b, sq=sq, sk=64, bias=torch.randn(shape), gradients=("bias",))
    assert (run_or_skip(inputs, engine)["dbias"] == 0).all()


@dtypes
@pytest.mark.parametrize("scale", [1e-38, 1e-50, 1e-40, 1e9, -1e12, 1e31])
def test_scale_at_the_ends_of_fp32(scale, dtype):
    """Engines that do not support such a scale say so; the library supports it. Sums in a GPU's memory may lose numbers
    below fp32's normal ones."""
    flushed = torch.finfo(dtype).tiny if ON_GPU and dtype == torch.float32 else 0.0
    assert_matches(call(sq=20, sk=64, dtype=dtype, scale=scale, dlse=False), flushed)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("engine", "dtype"), [("cuda-tf32", "float32"), ("cuda-mma", "bfloat16"), ("cuda-sm90", "bfloat16")])
def test_tensor_cores_refuse_a_large_scale(engine, dtype, backward):
    """The GPU need not be present."""
    x = Shape((1, 2, 64, 64), dtype)
    with pytest.raises(NotImplementedError, match=f"{engine}: takes a scale of up to 10000 in size, not -20000"):
        prewarm({"q": x, "k": x, "v": x}, {"engine": engine, "scale": -2e4}, backward, 90)


@pytest.mark.parametrize(
    ("d", "dv", "options", "reason"),
    [
        (63, 64, {}, "head dimensions under 64"),
        (64, 63, {}, "head dimensions under 64"),
        (64, 64, {"score": 1, "beta": 1.0, "shift": 0.0}, "a Lorentz product cancels"),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_three_products_in_tf32_are_not_for_sums_that_show_them(d, dv, options, reason, backward):
    """cuda-tf32 refuses such a sum. It accepts a single TF32 product, which the caller has allowed, and three products with 64 columns."""
    tensors = {name: Shape((1, 2, 64, dv if name == "v" else d), "float32") for name in "qkv"}
    options = options | {"engine": "cuda-tf32"}
    with pytest.raises(NotImplementedError, match=reason):
        kernels(tensors, options, backward, 90)
    assert kernels(tensors, options | {"allow_tf32": True}, backward, 90)
    enough = {name: Shape((1, 2, 64, 64), "float32") for name in "qkv"}
    assert kernels(enough, {"engine": "cuda-tf32"}, backward, 90)


# Blocks that a mask hides entirely cost nothing: such keys are not even packed


def assert_unchanged(results: Results, before: Results, yardstick: Yardstick) -> None:
    """Bits are promised only on the CPU: a GPU may compute a call with a mask, or with NaN in it, in another way."""
    faults = yardstick.faults(results)
    assert not faults, "\n".join(faults)
    if not ON_GPU:
        for name, t in results.items():
            assert torch.equal(t, before[name]), name


def blocks_of(kept: torch.Tensor, sq: int, sk: int, block: int) -> torch.Tensor:
    return kept.repeat_interleave(block, -2).repeat_interleave(block, -1)[..., :sq, :sk]


@dtypes
@pytest.mark.parametrize("shared", [(1, 1), (2, 1), (1, 4), (2, 4)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout": 0.2, "seed": 1, "offset": 2}], ids=str)
def test_hidden_blocks(options, shared, dtype):
    """Every tile has holes, of queries and of keys; heads or sequences share the mask, or have masks of their own."""
    sq, sk = 200, 330
    kept = torch.rand(*shared, 7, 11, generator=torch.Generator().manual_seed(4)) < 0.4
    inputs = call(b=2, h=4, hkv=2, sq=sq, sk=sk, d=32, dtype=dtype, mask=blocks_of(kept, sq, sk, 32), **options)
    assert_matches(inputs)


@engines
@dtypes
@pytest.mark.parametrize("by", ["mask", "blocks"])
def test_keys_that_nobody_sees(by, dtype, engine):
    kept = torch.zeros(5, 6, dtype=torch.bool)
    kept[:2, 2], kept[3:, 5] = True, True
    if by == "mask":
        hidden = {"mask": blocks_of(kept, 300, 370, 64)[None, None]}
    else:
        hidden = {"block_mask": strobe.BlockMask.from_kept(kept, 64, 64, 300, 370)}
    inputs = call(h=4, hkv=1, sq=300, sk=370, d=48, dtype=dtype, **hidden)
    clean, yardstick = run_or_skip(inputs, engine), Yardstick(inputs)
    unseen = ~blocks_of(kept, 300, 370, 64).any(0)
    for t in (inputs.k, inputs.v):
        t[..., unseen, :] = NAN
    spoiled = run(inputs, engine)
    assert_unchanged(spoiled, clean, yardstick)
    for results in (clean, spoiled):
        for name in ("dk", "dv"):
            assert (results[name][..., unseen, :] == 0).all()


@engines
@dtypes
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 20.0}], ids=str)
def test_mask_that_hides_nothing(options, dtype, engine):
    """On the CPU a mask that hides nothing takes the path without a mask."""
    inputs = call(b=2, h=4, hkv=2, sq=150, sk=290, d=32, dtype=dtype, **options)
    without, yardstick = run_or_skip(inputs, engine), Yardstick(inputs)
    inputs.options["mask"] = torch.ones(1, 1, 150, 290, dtype=torch.bool)
    assert_unchanged(run(inputs, engine), without, yardstick)
