"""The corners of the contract: empty calls, rows without keys, extreme sizes, extreme numbers."""

from __future__ import annotations

import dataclasses
import mmap

import pytest
import torch

import strobe
from cases import call
from check import Yardstick, assert_matches, dtype_of, oracle, run, run_or_skip, runs, takes
from device import ON_GPU
from engines import available_engines

HALF = (torch.float16, torch.bfloat16)
DTYPES = (torch.float64, torch.float32, *HALF)
INF = torch.inf
# V as the sum of two TF32 numbers has 22 bits, not 24, so O is not V to the bit where P is 1. There only assert_matches checks these
# engines.
NOT_TO_THE_BIT = {"cuda-tf32"}

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
engines = pytest.mark.parametrize("engine", available_engines())


# Empty calls


@dtypes
@pytest.mark.parametrize(("b", "sq", "sk"), [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize("sinks", [False, True])
def test_empty(b, sq, sk, sinks, dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    options = {"sinks": torch.tensor([0.5, -2.0], dtype=wide)} if sinks else {}
    inputs = call(b=b, sq=sq, sk=sk, dtype=dtype, gradients=("sinks",) if sinks else (), causal=True, **options)
    assert_matches(inputs)
    results = run(inputs)
    assert results["out"].shape == (b, 2, sq, 16)
    assert (results["out"] == 0).all()
    if sk == 0:
        assert torch.equal(
            results["lse"], (options["sinks"] if sinks else torch.full((2,), -INF, dtype=wide))[None, :, None].expand(b, 2, sq)
        )


def test_empty_with_everything():
    """Every option at once without any key: shapes must still agree, and every gradient is zero."""
    inputs = call(
        b=2,
        sq=3,
        sk=0,
        gradients=("bias", "sinks"),
        window=(4, 4),
        softcap=5.0,
        alibi_slopes=torch.rand(2, 2),
        bias=torch.randn(2, 2, 3, 0),
        mask=torch.ones(1, 1, 3, 0, dtype=torch.bool),
        sinks=torch.randn(2),
        dropout=0.5,
        seed=1,
        offset=2,
    )
    assert_matches(inputs)


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], []])
def test_varlen_without_tokens(lengths):
    cu = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    assert_matches(call(sq=0, sk=0, cu_seqlens_q=cu, cu_seqlens_k=cu))


@dtypes
def test_one_token(dtype):
    """P = 1 exactly: the output is V, and the gradients of q and k vanish."""
    inputs = call(sq=1, dtype=dtype, dlse=False)
    for engine, results in runs(inputs):
        assert torch.equal(results["out"], inputs.v) or engine in NOT_TO_THE_BIT
    assert_matches(inputs)


@engines
@pytest.mark.parametrize("sk", [1, 40])
@pytest.mark.parametrize("dlse", [False, True])
def test_one_key_of_a_row(engine, sk, dlse):
    """P = 1, and dP = D except for the last bits of D, a sum of many terms: only dLSE remains of dS."""
    if dtype_of(engine) != torch.float32:
        pytest.skip(f"{engine} is not for float32")
    inputs = call(b=300, h=1, sq=1, sk=sk, d=256, dlse=dlse, mask=(torch.arange(sk) == sk // 2)[None, None, None])
    found = run_or_skip(inputs, engine)
    k, v = inputs.k[:, :, sk // 2 : sk // 2 + 1].double(), inputs.v[:, :, sk // 2 : sk // 2 + 1].double()
    left = inputs.dlse[..., None].double() if dlse else torch.zeros(300, 1, 1, 1, dtype=torch.float64)
    d = (inputs.dout.double() * v).sum(dim=-1, keepdim=True)
    allowed = 1e-6 * (d.abs() + left.abs()) / 16
    assert ((found["dq"] - left * k / 16).abs().amax(-1, keepdim=True) <= allowed * k.abs().amax(-1, keepdim=True)).all()
    assert (
        (found["dk"].double().sum(2, keepdim=True) - left * inputs.q.double() / 16).abs() <= allowed * inputs.q.abs().amax(-1, True)
    ).all()


# Rows without keys


@dtypes
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("why", ["mask", "bias", "causal", "window", "blocks", "everything"])
def test_rows_that_see_nothing(why, sinks, dtype):
    sq, sk = 70, 40
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    options = {}
    if why in ("mask", "everything"):
        options["mask"] = torch.ones(1, 1, sq, sk, dtype=torch.bool)
        options["mask"][:, :, 3:50] = False
    if why in ("bias", "everything"):
        options["bias"] = torch.zeros(1, 2, sq, sk, dtype=dtype)
        options["bias"][:, 1, 20:60] = -INF
    if why in ("causal", "everything"):
        options["causal"] = True  # bottom right: the first 30 queries see no key
    if why == "window":
        options |= {"window": (5, 5), "alignment": "top_left"}  # the last 25 queries see no key
    if why in ("blocks", "everything"):
        kept = torch.ones(1, 1, 5, 3, dtype=torch.bool)
        kept[0, 0, 1] = False
        options["block_mask"] = strobe.BlockMask.from_kept(kept, 16, 16, sq, sk)
    gradients = ("bias",) * ("bias" in options)
    if sinks:
        options["sinks"] = torch.tensor([0.25, -1.0], dtype=wide)
        gradients += ("sinks",)
    inputs = call(sq=sq, sk=sk, dtype=dtype, gradients=gradients, **options)
    lse = oracle(inputs)["lse"]
    blank = lse == (options["sinks"].double()[None, :, None] if sinks else -INF)
    assert blank.any()
    assert_matches(inputs)
    for _, results in runs(inputs):
        assert (results["out"][blank] == 0).all()
        assert (results["dq"][blank] == 0).all()
        assert torch.equal(results["lse"][blank].double(), lse[blank])


# Sizes


@dtypes
@pytest.mark.parametrize("d", [1, 2, 3, 5, 8, 15, 17, 31, 48, 63, 65, 72, 100, 127, 129, 160, 191, 200, 255, 256])
def test_head_dims(d, dtype):
    assert_matches(call(sq=19, sk=35, d=d, dv=257 - d, dtype=dtype, causal=True))


@dtypes
@pytest.mark.parametrize("n", [79, 95, 127])
def test_one_short_of_a_tile(n, dtype):
    """The last tile of keys lacks one key, whether tiles have 16, 32, 48, 64, 80, 96 or 128."""
    assert_matches(call(h=1, hkv=1, sq=n, sk=n, d=64, dtype=dtype))


@pytest.mark.parametrize(("b", "h"), [(70000, 1), (1, 70000), (300, 300)])
def test_many_heads(b, h):
    assert_matches(call(b=b, h=h, sq=2, sk=3, d=4))


@pytest.mark.parametrize(("sq", "sk"), [(2, 300_000), (300_000, 2)])
def test_long_and_thin(sq, sk):
    """Two queries over 300,000 keys, and the reverse: positions far beyond 16 bits."""
    options = {"dropout": 0.25, "seed": 3, "offset": 4, "alibi_slopes": torch.tensor([1e-4])}
    assert_matches(call(h=1, sq=sq, sk=sk, d=4, **options))


@engines
def test_more_scores_than_32_bits_count(engine):
    """70000 x 70000 scores in a band. In float64, sampled rows and columns of the oracle need no other yardstick."""
    n = 70_000
    inputs = call(h=1, sq=n, d=4, dtype=torch.float64, dlse=False, causal=True, window=(64, None), dropout=0.25, seed=3, offset=4)
    chosen = torch.tensor([0, 1, 65535, 65536, n - 1])
    out, lse = strobe.reference(inputs.q, inputs.k, inputs.v, rows=chosen, **inputs.options)
    ref = strobe.reference_backward(inputs.dout, inputs.q, inputs.k, inputs.v, rows=chosen, cols=chosen, **inputs.options)
    results = run_or_skip(inputs, engine)
    for name, expected in {"out": out, "lse": lse[..., None], "dq": ref.dq, "dk": ref.dk, "dv": ref.dv}.items():
        found = results[name][..., None] if name == "lse" else results[name]
        difference = (found - expected)[0, 0, chosen].abs().max()
        assert difference <= 1e-12 * expected[0, 0, chosen].abs().max(), name


def virtual(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this many elements of address space; only the pages that are touched become memory."""
    size = elements * torch.empty(0, dtype=dtype).element_size()
    no_reserve = 0x4000  # mmap.MAP_NORESERVE, which Python has since 3.11
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve), dtype=dtype)


def spread(t: torch.Tensor, axis: int) -> torch.Tensor:
    """A copy of t whose ends along the axis are more than 2^31 elements apart."""
    strides, size = [0] * 4, 1
    for a in reversed(range(4)):
        if a != axis:
            strides[a] = size
            size *= t.shape[a]
    strides[axis] = 2**31 // (t.shape[axis] - 1) + size
    return virtual((t.shape[axis] - 1) * strides[axis] + size, t.dtype).as_strided(t.shape, strides).copy_(t)


@pytest.mark.gigabytes
@pytest.mark.parametrize("axis", range(4), ids=["batch", "head", "token", "element"])
def test_offsets_beyond_31_bits(axis):
    """fla-org/flash-linear-attention#1080, thu-ml/SageAttention#386, Dao-AILab/flash-attention#1500: offsets overflowed."""
    mask, bias = torch.rand(2, 2, 19, 21) < 0.8, torch.randn(2, 2, 19, 21)
    inputs = call(b=2, h=2, sq=19, sk=21, d=8, gradients=("bias",), mask=mask, bias=bias)
    yardstick = Yardstick(inputs)
    for name in ("q", "k", "v", "dout"):
        setattr(inputs, name, spread(getattr(inputs, name), axis))
    inputs.options |= {"mask": spread(mask, axis), "bias": spread(bias, axis)}
    for engine, results in runs(inputs):
        assert not yardstick.faults(results), engine


# Numbers


@dtypes
@pytest.mark.parametrize("logit", [8e4, -8e4, 1e5])
def test_huge_logits(logit, dtype):
    """Hidden scores are no finite number, so a row of logits of -8e4 is a row like any other (flashinfer-ai/flashinfer#4267)."""
    inputs = call(sq=40, sk=50, dtype=dtype, scale=1.0, gradients=("bias",), bias=torch.full((1, 1, 40, 50), logit), causal=True)
    if dtype == torch.float64:
        inputs.options["bias"] = inputs.options["bias"].double()
    assert_matches(inputs)


@dtypes
def test_differences_of_1e5(dtype):
    """Each query prefers one key by 1e5: P is one-hot, and the running maximum makes its largest jumps."""
    n = 80
    inputs = call(h=1, sq=n, d=4, dtype=dtype, scale=1.0, dlse=False)
    ramp = torch.linspace(-1, 1, n, dtype=torch.float64)
    inputs.q = torch.zeros_like(inputs.q)
    inputs.k = torch.zeros_like(inputs.k)
    inputs.q[..., 0] = torch.where(torch.arange(n) % 2 == 0, 220.0, -220.0).to(dtype)
    inputs.k[..., 0] = (220 * ramp).to(dtype)
    for engine, results in runs(inputs):
        if engine in NOT_TO_THE_BIT:
            continue
        assert torch.equal(results["out"][0, 0, 0::2], inputs.v[0, 0, -1:].expand(n // 2, 4))
        assert torch.equal(results["out"][0, 0, 1::2], inputs.v[0, 0, :1].expand(n // 2, 4))
    assert_matches(inputs)


def test_rows_of_one_large_score():
    """P = 1, however the score and LSE were rounded: all computations of P must round in the same places."""
    inputs = call(sq=300, d=2, scale=2.83, window=(0, 0), sinks=torch.zeros(2))
    inputs.q.mul_(20)
    assert_matches(inputs)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("size", [20.0, -160.0, 160.0, 1e4, -2e4, 1e6])
def test_keys_that_share_rows_of_large_scores(size, sinks):
    """Scores are exact, a few units below a large number. P, recomputed from LSE, must be exact, too, however coarse LSE's last bit is."""
    bias = size - torch.randint(0, 7, (1, 2, 33, 33), generator=torch.Generator().manual_seed(1)).float()
    options = {"sinks": torch.full((2,), size)} if sinks else {}
    if ON_GPU and size > 2**14:
        pytest.skip("docs/performance.md: P of such scores on a GPU")
    inputs = dataclasses.replace(call(bias=bias, gradients=("bias",), **options), aux=("column_sums",))
    inputs.q.zero_()  # q.k would have digits that bias + q.k lacks
    assert_matches(inputs)


@dtypes
def test_masked_key_among_very_low_logits(dtype):
    """The visible logits lie below any sentinel that a masked key might get (ohdearquant/lattice#361)."""
    inputs = call(h=1, sq=2, d=1, dtype=dtype, scale=1.0, mask=torch.tensor([[[[True, False]]]]), dlse=False)
    inputs.q = torch.tensor([-200.0, 0.0]).reshape(1, 1, 2, 1).to(dtype)
    inputs.k = torch.tensor([200.0, 0.0]).reshape(1, 1, 2, 1).to(dtype)
    inputs.v = torch.tensor([1.0, 100.0]).reshape(1, 1, 2, 1).to(dtype)
    for _, results in runs(inputs):
        assert (results["out"] == 1).all()


@dtypes
def test_lowest_finite_bias(dtype):
    """A row whose bias is finfo.min throughout, as in padding masks, has legal logits, so it averages V (pytorch/pytorch#103749,
    #109517)."""
    bias = torch.zeros(1, 1, 40, 50, dtype=dtype)
    bias[:, :, 7:9] = torch.finfo(dtype).min
    bias[:, :, 20:30, 25:] = torch.finfo(dtype).min
    inputs = call(sq=40, sk=50, dtype=dtype, bias=bias, dlse=False)
    assert_matches(inputs)
    for _, results in runs(inputs):
        assert results["out"].isfinite().all()


def test_half_inputs_whose_products_overflow_half():
    """q·k reaches 1e6, beyond float16: it is summed and scaled in float32."""
    inputs = call(sq=20, sk=30, d=64, dtype=torch.float16, dlse=False)
    inputs.q, inputs.k = inputs.q * 60, inputs.k * 60
    inputs.q[0, 0], inputs.k[0, 0] = 120.0, 120.0
    mean = inputs.v[0, 0].double().mean(0)  # every logit of the first head is the same
    for engine, results in runs(inputs):
        assert all(t.isfinite().all() for t in results.values()), engine
        assert (results["out"][0, 0].double() - mean).abs().max() < 2e-3, engine


@dtypes
@pytest.mark.parametrize("probability", [1 / 512, 0.004, 0.25, 0.996, 0.999999])
def test_dropout_is_quantised(probability, dtype):
    """Eight bits: at least one value of 256 is dropped and at least one kept, and kept values are scaled by that rate."""
    inputs = call(sq=40, sk=50, dtype=dtype, dropout=probability, seed=11, offset=12)
    assert_matches(inputs)


# NaN and infinity


@engines
@pytest.mark.parametrize(("what", "value"), [("q", torch.nan), ("k", torch.nan), ("v", torch.nan), ("v", INF)])
@pytest.mark.parametrize("hidden_by", ["causal", "window", "mask", "blocks"])
def test_nan_reaches_only_the_rows_that_see_it(hidden_by, what, value, engine):
    """pytorch/pytorch#101967: what is masked out has no influence, whatever it holds (padding is often uninitialised)."""
    hide = torch.zeros(1, 1, 50, 70, dtype=torch.bool)
    hide[..., 10:30, 30:] = True
    kept = torch.ones(1, 1, 4, 5, dtype=torch.bool)
    kept[..., 1, 2:] = False
    options = {
        "causal": {"causal": True},
        "window": {"window": (4, 9)},
        "mask": {"mask": ~hide},
        "blocks": {"block_mask": strobe.BlockMask.from_kept(kept, 16, 16, 50, 70)},
    }[hidden_by]
    inputs = call(b=2, h=2, sq=50, sk=70, d=16, dtype=dtype_of(engine), dlse=False, **options)
    getattr(inputs, what)[1, 1, 37, 5] = value
    ref = oracle(inputs)
    results = run_or_skip(inputs, engine)
    affected = ~ref["out"].isfinite().all(-1)
    assert affected.any()
    assert not affected.all()
    for name, t in results.items():
        spoiled = ~t.isfinite() & ref[name].isfinite()
        assert not spoiled.any(), f"{name} is not finite at {spoiled.nonzero()[0].tolist()}, which does not depend on {what}"
        missing = t.isfinite() & ref[name].isnan()
        assert not missing.any(), f"{name} hides the NaN at {missing.nonzero()[0].tolist()}"


@engines
@pytest.mark.parametrize("sq", [1, 3, 50])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"invariant": True}, {"bias": torch.zeros(1, 1, 1, 70)}], ids=["plain", "causal", "invariant", "bias"]
)
def test_a_score_of_minus_infinity_hides(options, sq, engine):
    """An infinite K hides, although neither a mask nor a bias does."""
    if not engine.startswith("cpu-"):
        pytest.skip("docs/semantics.md and docs/hopper.md: what of the others an infinite K breaks")
    dtype = torch.bfloat16 if engine == "cpu-amx" else dtype_of(engine)  # on cpu-amx float32's infinities become NaN: docs/semantics.md
    inputs = call(b=2, h=2, sq=sq, sk=70, d=16, dtype=dtype, dlse=False, gradients=("bias",) * ("bias" in options), **options)
    inputs.q[..., 5] = 1 + inputs.q[..., 5].abs()
    inputs.k[1, 1, 17, 5], inputs.v[1, 1, 17, 3:] = -INF, torch.nan
    inputs.k[0, 1, 4, 5], inputs.v[0, 1, 4] = -INF, INF
    results, ref = run_or_skip(inputs, engine), oracle(inputs)
    for name, t in results.items():
        assert ref[name].isfinite().all()
        assert (t.double() - ref[name]).abs().max() < 0.05 * ref[name].abs().max(), name


@engines
def test_a_bias_of_minus_infinity_hides_what_is_no_number(engine):
    """The hidden keys of K hold NaN. In the reference, too, a bias of -inf hides a score of NaN."""
    bias = torch.zeros(1, 1, 1, 70)
    bias[..., 37] = -INF
    inputs = call(sq=20, sk=70, d=16, dtype=dtype_of(engine), dlse=False, bias=bias.to(dtype_of(engine)))
    inputs.k[0, 1, 37, 5] = torch.nan
    results, ref = run_or_skip(inputs, engine), oracle(inputs)
    for name, t in results.items():
        assert ref[name].isfinite().all()
        assert t.isfinite().all()


@pytest.mark.parametrize("sq", [4, 20])
def test_a_softcap_of_large_scores(sq):
    """The softcap turns large scores into small ones, so that the terms that float16 products leave out show in LSE."""
    inputs = call(b=2, h=8, sq=sq, sk=1, d=64, dv=16, hkv=2, dtype=torch.float16, softcap=3.0, dlse=False)
    assert_matches(dataclasses.replace(inputs, q=inputs.q * 100, k=inputs.k * 100))


@pytest.mark.parametrize("sq", [1, 20])
def test_a_huge_sink(sq):
    """A sink within float32's range, but not within that of the unit of q.k."""
    inputs = call(sq=sq, sk=70, sinks=torch.tensor([1e38, -1e38]), scale=0.1, gradients=("sinks",))
    assert_matches(inputs)


@engines
def test_nan_stays_in_its_sequence(engine):
    """Packed neighbours share tiles but nothing else."""
    cu = torch.tensor([0, 13, 13, 40, 60], dtype=torch.int32)
    inputs = call(sq=60, sk=60, d=64, dtype=dtype_of(engine), dlse=False, cu_seqlens_q=cu, cu_seqlens_k=cu)
    clean = run(inputs, engine)
    for t in (inputs.q, inputs.k, inputs.v, inputs.dout):
        t[13:40] = torch.nan
    poisoned_results = run(inputs, engine)
    for name in clean:
        if name == "lse":
            a, b = clean[name].transpose(0, 1), poisoned_results[name].transpose(0, 1)
        else:
            a, b = clean[name], poisoned_results[name]
        outside = torch.cat([a[:13] - b[:13], a[40:] - b[40:]])
        assert (outside == 0).all(), name
        assert b[13:40].isnan().all(), name


@engines
def test_all_nan_is_not_zero(engine):
    """pytorch/pytorch#141128: a 'no visible key' test on the row's maximum turned a NaN query into zeros."""
    inputs = call(d=64, dtype=dtype_of(engine), dlse=False)
    inputs.q = torch.full_like(inputs.q, torch.nan)
    results = run(inputs, engine)
    assert results["out"].isnan().all()
    assert results["lse"].isnan().all()


@engines
def test_sinks_far_below_the_scores(engine):
    """Each row adds about 2^-126, or less, which exp() may flush to 0, and the gradient is the sum of two thousand rows."""
    sinks = torch.tensor([-82.5, -83.5])
    inputs = call(sq=2000, sk=64, gradients=("sinks",), dlse=False, sinks=sinks)
    if not takes(engine, torch.float32, 16):
        pytest.skip("takes no float32 of 16 columns")
    found = run(inputs, engine)["dsinks"].double()
    q, k, v, dout = (x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    s = torch.cat([q @ k.transpose(2, 3) / 4, sinks.double()[:, None, None].expand(1, 2, 2000, 1)], dim=3)
    p = s.softmax(3)
    expected = -(p[..., -1] * (dout * (p[..., :-1] @ v)).sum(3)).sum((0, 2))
    assert expected.abs().max() < 1e-35
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2.0**-126)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("sq", "sk"), [(70, 50), (1, 3000)])
def test_sinks_far_above_the_scores(sq, sk, invariant):
    """Each result of a row has the error of exp(m - sink), whose exponent FP32 rounds by 2e-6. Scores are 0, so the formulas are exact."""
    inputs = call(h=1, hkv=1, sq=sq, sk=sk, d=64, sinks=torch.tensor([44.94]))
    inputs.q.zero_()
    assert_matches(dataclasses.replace(inputs, aux=("column_sums",)), invariant=invariant)


@engines
def test_sinks_whose_terms_cancel(engine):
    """Each row that sees no key adds its dLSE: thousands of terms, whose sum is as small as one of them."""
    if not takes(engine, torch.float32, 16):
        pytest.skip("takes no float32 of 16 columns")
    inputs = call(h=8, sq=3085, sk=1, causal=True, gradients=("sinks",), sinks=torch.linspace(-1, 1, 8))
    assert inputs.dlse is not None
    inputs.dout[:, :, -1] = inputs.dlse[:, :, -1] = 0  # only the last row sees the key
    inputs.dlse[:, :, -2] -= inputs.dlse.double().sum(2).float()
    expected = inputs.dlse.double().sum((0, 2))
    assert expected.abs().max() < 1e-4
    error = (run_or_skip(inputs, engine)["dsinks"].double() - expected).abs().max()
    assert error < 1e-6
