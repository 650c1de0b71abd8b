"""Compares the Hopper backward, requested by name, with the oracle: each feature at each width, with several tiles of queries and of
keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import strobe
from cases import Inputs, call
from check import Results, error, keys_of_a_block, oracle, run_plain, ulp
from device import on_device
from engines import available_engines

pytestmark = pytest.mark.skipif("cuda-sm90" not in available_engines(), reason="no Hopper GPU")
BF16, F16 = torch.bfloat16, torch.float16
NAN, INF = torch.nan, torch.inf


def gradients(inputs: Inputs, ref: Results, **how: Any) -> Results:
    """The gradients from the reference's out and lse, so that only the backward is judged."""
    there = on_device(inputs, "cuda")
    out, lse = ref["out"].to("cuda", there.q.dtype), ref["lse"].to("cuda", torch.float32)
    more = {"dlse": there.dlse, "engine": "cuda-sm90"} | keys_of_a_block() | how
    found = strobe.attention_backward(there.dout, there.q, there.k, there.v, out, lse, **there.options, **more)
    results = {"dq": found.dq, "dk": found.dk, "dv": found.dv} | {"d" + name: getattr(found, "d" + name) for name in inputs.gradients}
    return {name: t.cpu() for name, t in results.items()}


def faults(inputs: Inputs, **how: Any) -> list[str]:
    """The gradients whose error exceeds twice the plain formulas' in this precision, plus an ulp."""
    ref = run_plain(inputs, torch.float64)
    plain = [run_plain(inputs, inputs.q.dtype, from_output) for from_output in (False, True)]
    found = []
    for name, t in gradients(inputs, ref, **how).items():
        off, size = error(t, ref[name]), float(ref[name].abs().max())
        allowed = 2 * max(error(p[name], ref[name]) for p in plain) + ulp(t.dtype, size)
        if not off <= allowed:
            found.append(f"{name}: error {off:.3g}, allowed {allowed:.3g}, max|ref| {size:.3g}")
    return found


def spreads_nothing(inputs: Inputs) -> None:
    """Checks that gradients are finite where the oracle's are, and not finite where the oracle has NaN."""
    ref = oracle(inputs)
    found = gradients(inputs, ref)
    for name in ("dq", "dk", "dv"):
        spoiled = ~found[name].isfinite() & ref[name].isfinite()
        assert not spoiled.any(), f"{name} is not finite at {spoiled.nonzero()[0].tolist()}, which sees nothing of the kind"
        missing = found[name].isfinite() & ref[name].isnan()
        assert not missing.any(), f"{name} hides a NaN at {missing.nonzero()[0].tolist()}"


def lengths(*each: int) -> torch.Tensor:
    return torch.tensor((0, *each), dtype=torch.int32).cumsum(0, dtype=torch.int32)


SHAPES = [
    {"h": 4, "hkv": 2, "sq": 211, "sk": 211},
    {"h": 6, "sq": 130, "sk": 333},
    {"h": 3, "hkv": 1, "sq": 333, "sk": 130},
]
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal top left": {"causal": True, "alignment": "top_left"},
    "window": {"window": (70, 9)},
    "narrow window": {"window": (0, 0), "alignment": "top_left"},
    "negative scale": {"scale": -0.3},
    "softcap": {"softcap": 3.0, "causal": True},
    "softcap, small scores": {"softcap": 30.0, "causal": True},  # in most tiles tanh is a polynomial
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.02, 0.004, 0.3, 0.06]), "causal": True},
    "dropout": {"dropout": 0.3, "seed": 5, "offset": 7},
    "dropout, causal": {"dropout": 0.1, "seed": 5, "offset": 7, "causal": True},
    "softcap, dropout": {"softcap": 3.0, "dropout": 0.1, "seed": 5, "offset": 7},
    "softcap, alibi": {"softcap": 3.0, "alibi_slopes": torch.tensor([0.5, 0.1, 0.02, 0.004, 0.3, 0.06])},
}


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(
    "dims",
    [
        *((64, 64), (128, 128), (96, 96), (80, 112), (72, 88), (112, 112), (64, 128)),
        *((40, 24), (256, 256), (192, 128), (136, 200), (48, 192)),
    ],
    ids=str,
)
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature, dims, dtype):
    if dtype == F16 and dims not in ((64, 64), (128, 128)):
        pytest.skip("as bfloat16")
    for shape in SHAPES:
        options = dict(FEATURES[feature])
        if "alibi_slopes" in options:
            options["alibi_slopes"] = options["alibi_slopes"][: shape["h"]].contiguous()
        assert not faults(call(d=dims[0], dv=dims[1], dtype=dtype, **shape, **options)), shape


@pytest.mark.parametrize(("d", "scale"), [(64, 1.0), (128, 1.0), (64, 2.0), (128, 2.0)])
def test_hyperbolic(d, scale):
    inputs = call(h=2, sq=150, d=d, dtype=BF16, score="hyperbolic", beta=1.0, shift=0.0, scale=scale, causal=True)
    for name, sign in (("q", -1), ("k", 1)):  # points of the hyperboloid
        x = 0.3 * getattr(inputs, name).float()
        x[..., 0] = sign * (1 + x[..., 1:].square().sum(-1)).sqrt()
        setattr(inputs, name, x.to(BF16))
    assert not faults(inputs)


@pytest.mark.parametrize("d", [64, 128, 160, 256])
@pytest.mark.parametrize("feature", ["plain", "causal", "window", "softcap", "dropout, causal"])
def test_deterministic(feature, d):
    for shape in SHAPES:
        assert not faults(call(d=d, dtype=BF16, **shape, **FEATURES[feature]), deterministic=True), shape


def plan(inputs: Inputs, **how: Any) -> str:
    there = on_device(inputs, "cuda")
    options = there.options | keys_of_a_block() | how
    return strobe.explain(there.q, there.k, there.v, backward=True, engine="cuda-sm90", **options)


def owns(inputs: Inputs) -> bool:
    return "all keys of a head" in plan(inputs)


MOST_SMS = 132  # the number of SMs of a Hopper GPU
# batch, key heads, queries, keys. There are two or three (batch, key head) pairs per SM of an H200, or fewer.
SHORT = ((66, 4, 64, 64), (99, 4, 64, 64), (50, 4, 128, 128), (66, 4, 150, 180), (64, 2, 80, 150), (32, 4, 150, 180))


@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("feature", ["plain", "causal", "causal top left", "softcap", "dropout, causal", "alibi", "mask"])
def test_a_block_of_a_heads_keys(feature, d):
    """Many short heads: a block takes all keys of one (batch, key head) pair after another, so it alone adds to that pair's dQ, in the
    same order on every run."""
    for b, hkv, sq, sk in SHORT:
        options = {"mask": torch.rand(b, 1, sq, sk) < 0.7} if feature == "mask" else dict(FEATURES[feature])
        if "alibi_slopes" in options:
            options["alibi_slopes"] = options["alibi_slopes"][:4].contiguous()
        if "top left" in feature:
            sk = sq - 20  # every key is seen by some query
        inputs = call(b=b, h=4, hkv=hkv, sq=sq, sk=sk, d=d, dtype=BF16, **options)
        owned = owns(inputs)
        if keys_of_a_block() or b * hkv * -(-sk // 128) > MOST_SMS:  # otherwise SMs idle, and a block may have 64 keys
            assert owned == (d == 64 or feature not in ("softcap", "dropout, causal")), (b, hkv, sq, sk)
        assert not faults(inputs), (b, hkv, sq, sk)
        ref = run_plain(inputs, torch.float64)
        once, again = (gradients(inputs, ref) for _ in range(2))
        if owned:
            assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.parametrize("queries", [512, 513])
def test_dq_is_in_shared_memory_as_long_as_it_fits(queries):
    inputs = call(b=66, h=2, sq=queries, sk=300, d=64, dtype=BF16)
    assert ("dQ in shared memory" in plan(inputs)) == (queries == 512)
    assert not faults(inputs)


PERSISTENT = ["plain", "causal", "causal top left", "window", "softcap", "dropout, causal", "alibi", "mask", "bias", "blocks", "packed"]
PERSISTENT += [f"{feature}, window" for feature in ("softcap", "dropout", "alibi", "mask", "bias")]


@pytest.mark.parametrize("d", [24, 64, 96, 128, 160])
@pytest.mark.parametrize("feature", PERSISTENT)
def test_persistent_blocks(feature, d):
    """There are more key tiles than SMs, and some keys are seen by no query. Blocks are persistent if the call is deterministic, has a
    block mask or a window, or has up to 64 columns; with up to 64 columns there are two stages of keys."""
    sizes = {"b": 24, "sq": 300, "sk": 400}
    feature, window, _ = feature.partition(", window")
    options = dict(FEATURES.get(feature, {}))
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"][:4].contiguous()
    elif feature == "mask":
        options["mask"] = torch.rand(1, 1, 300, 400) < 0.7
    elif feature == "bias":
        options["bias"] = torch.randn(1, 4, 300, 400).to(BF16)
    elif feature == "blocks":
        kept = torch.rand(24, 4, 3, 4) < 0.4
        kept[:, :, :, 1] = False
        options["block_mask"] = strobe.BlockMask.from_kept(kept, 128, 128, 300, 400)
    elif feature == "packed":
        each = [(300, 280), (0, 90), (170, 0), (129, 260)] * 12
        options |= {"cu_seqlens_q": lengths(*(q for q, _ in each)), "cu_seqlens_k": lengths(*(k for _, k in each))}
        options |= {"max_seqlen_q": 300, "max_seqlen_k": 280, "causal": True, "alignment": "top_left"}
        sizes = {"sq": sum(q for q, _ in each), "sk": sum(k for _, k in each)}
    if window:
        options = {name: value for name, value in options.items() if name != "causal"} | FEATURES["window"]
    inputs = call(h=4, hkv=2, d=d, dtype=BF16, **sizes, **options)
    ref = run_plain(inputs, torch.float64)
    for how in ({}, {"deterministic": True}):
        crowded = (feature == "softcap" and d > 64 and how) or (feature in ("bias", "blocks") and d > 128)  # 64 keys a block
        persistent = d <= 64 or bool(how or window) or feature in ("blocks", "window")
        assert crowded or ("persistent blocks" in plan(inputs, **how)) == persistent
        assert ("two stages of keys" in plan(inputs, **how)) == (d <= 64 and not how and feature != "blocks")
        assert not faults(inputs, **how)
        once, again = (gradients(inputs, ref, **how) for _ in range(2))
        assert all(torch.equal(once[name], again[name]) for name in (once if how else ("dk", "dv")))


SHARED = ["plain", "causal", "window", "softcap", "dropout, causal", "deterministic", "mask", "alibi", "seqused", "packed"]


@pytest.mark.parametrize("d", [64, 96, 128, 160, 200])
@pytest.mark.parametrize("feature", SHARED)
def test_query_heads_of_a_key_head_are_shared_out(feature, d):
    """Fewer (batch, key head) pairs than SMs: each block takes some of the query heads, and dK and dV are sums over these blocks."""
    how = {"deterministic": True} if feature == "deterministic" else {}
    for b, h, hkv in ((1, 8, 1), (2, 12, 2)):
        options = {} if feature in ("mask", "seqused", "packed") else dict(FEATURES.get(feature, {"causal": True}))
        sizes = {"b": b, "sq": 700, "sk": 700}
        if feature == "alibi":
            options["alibi_slopes"] = torch.linspace(0.004, 0.5, h)
        elif feature == "mask":
            options["mask"] = torch.rand(b, 1, 700, 700) < 0.7
        elif feature == "seqused":
            options["seqused_k"] = torch.tensor([650, 300][:b], dtype=torch.int32)
        elif feature == "packed":
            options |= {"cu_seqlens_q": lengths(500, 0, 260), "cu_seqlens_k": lengths(450, 30, 300), "max_seqlen_q": 500}
            options["max_seqlen_k"] = 450
            sizes = {"sq": 760, "sk": 780}
        inputs = call(h=h, hkv=hkv, d=d, dtype=BF16, **sizes, **options)
        assert " shares" in plan(inputs, **how)
        assert not faults(inputs, **how), (h, hkv)
        ref = run_plain(inputs, torch.float64)
        once, again = (gradients(inputs, ref, **how) for _ in range(2))
        assert all(torch.equal(once[name], again[name]) for name in (once if how else ("dk", "dv")))


@pytest.mark.parametrize("d", [64, 128, 200])
@pytest.mark.parametrize("part", [False, True])
def test_shares_are_added_to_what_is_there(part, d):
    inputs = call(b=2, h=12, hkv=2, sq=700, sk=700, d=d, dtype=BF16, causal=True)
    assert " shares" in plan(inputs)
    there = on_device(inputs, "cuda")
    out, lse = strobe.attention(there.q, there.k, there.v, causal=True, return_lse=True)
    usual = strobe.attention_backward(there.dout, there.q, there.k, there.v, out, lse, causal=True, engine="cuda-sm90")
    how: dict[str, Any] = {"part": strobe.Part([[(0, 700)]], [[(0, 700)]], [700], [700])} if part else {}
    before = {"d" + name: torch.randn(x.shape, device="cuda") for name, x in (("q", there.q), ("k", there.k), ("v", there.v))}
    sums = {name: x.clone() for name, x in before.items()}
    strobe.attention_backward(
        *(there.dout, there.q, there.k, there.v, out, lse), causal=True, engine="cuda-sm90", accumulate=True, **sums, **how
    )
    for name in before:
        found, expected = sums[name] - before[name], getattr(usual, name).float()
        assert (found - expected).norm() < 4e-3 * expected.norm(), name


@pytest.mark.parametrize(("d", "b"), [(64, 132), (64, 75), (128, 132)])
@pytest.mark.parametrize("what", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("value", [NAN, INF], ids=str)
@pytest.mark.parametrize("batches", [slice(2, 4), slice(70, 72)], ids=["first pair", "second pair"])
def test_a_block_of_several_pairs_spreads_nothing_hidden(batches, value, what, d, b):
    """NaN and infinities in (batch, key head) pairs 4 to 7, or 140 to 143, reach neither other pairs of the same block (an H200 has 132
    SMs), nor queries and keys that do not see them."""
    inputs = call(b=b, h=4, hkv=2, sq=90, sk=180, d=d, dtype=BF16, causal=True)
    assert owns(inputs) == (b == 132)
    assert owns(inputs) or "two stages of keys" in plan(inputs)
    getattr(inputs, what)[batches, :, slice(175, 180) if what in ("k", "v") else slice(0, 5)] = value
    spreads_nothing(inputs)


@pytest.mark.parametrize("d", [96, 128])
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "deterministic": True}, {"window": (4150, 9)}], ids=str)
def test_long(options, d):
    """Sequences so long that the kernel takes tiles of 80 queries for a band."""
    options = dict(options)
    how = {"deterministic": options.pop("deterministic", False)}
    assert not faults(call(h=1, sq=4200, sk=4200, d=d, dtype=BF16, **options), **how)


@pytest.mark.parametrize("d", [64, 128, 160, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 5.0}, {"dropout": 0.2, "seed": 1, "offset": 1}], ids=str)
def test_mask(options, d):
    mask = torch.rand(2, 1, 300, 333) < 0.7
    assert not faults(call(b=2, h=4, hkv=2, sq=300, sk=333, d=d, dtype=BF16, mask=mask, **options))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_mask_and_alibi(d):
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.004])
    mask = torch.rand(1, 4, 300, 333) < 0.7
    assert not faults(call(b=2, h=4, sq=300, sk=333, d=d, dtype=BF16, mask=mask, alibi_slopes=slopes, causal=True))


BIASES: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"causal": True},
    "deterministic": {"deterministic": True},
    "softcap": {"softcap": 5.0},
    "mask": {"mask": torch.rand(1, 1, 300, 336, generator=torch.Generator().manual_seed(2)) < 0.7},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.02, 0.004]), "causal": True},
    "dropout": {"dropout": 0.2, "seed": 1, "offset": 1},
}


# The copy engine loads a bfloat16 bias of 336 keys, but not one of 333.
@pytest.mark.parametrize(
    "shape", [(2, 4, 300, 333), (1, 4, 300, 333), (2, 1, 1, 333), (1, 1, 300, 1), (1, 4, 300, 336), (2, 1, 1, 336)], ids=str
)
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("feature", BIASES)
def test_bias(feature, d, shape):
    if d > 128 and feature in ("mask", "alibi", "dropout"):
        pytest.skip("refused")
    options = dict(BIASES[feature])
    how = {"deterministic": options.pop("deterministic", False)}
    sk = 336 if shape[3] == 336 else 333
    if "mask" in options:
        options["mask"] = options["mask"][..., :sk].contiguous()
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float32 if feature == "alone" else BF16)
    if sk == 336:
        bias = bias.to(BF16)
        bias[:, :, :, 100:103] = bias[:, :, shape[2] // 3 : shape[2] // 3 + 2] = -INF  # no query sees these keys, and these rows see no key
    assert not faults(call(b=2, h=4, hkv=2, sq=300, sk=sk, d=d, dtype=BF16, bias=bias, gradients=("bias",), **options), **how)


@pytest.mark.parametrize("number", [INF, NAN])
@pytest.mark.parametrize("feature", ["alone", "causal", "softcap", "mask", "alibi"])
@pytest.mark.parametrize("d", [64, 128, 192])
def test_a_bias_hides_what_is_no_number(d, feature, number):
    """A tile's rows past the last query have no bias, but must not see the hidden key either."""
    options = dict(BIASES[feature])
    if "mask" in options:
        options["mask"] = options["mask"][..., :100, :128].contiguous()
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"][:2].contiguous()
    if d > 128 and feature in ("mask", "alibi"):
        pytest.skip("refused")
    bias = torch.randn(1, 2, 100, 128, generator=torch.Generator().manual_seed(5)).to(BF16)
    bias[..., 5] = -INF
    inputs = call(h=2, hkv=1, sq=100, sk=128, d=d, dtype=BF16, bias=bias, **options)
    inputs.k[..., 5, :] = inputs.v[..., 5, :] = number
    spreads_nothing(inputs)


def test_a_large_bias_keeps_its_digits():
    """A constant added to all scores changes only LSE, of which fp32 then holds fewer digits. The plain formulas get no constant."""
    bias = torch.randn(1, 1, 200, 200, generator=torch.Generator().manual_seed(4))
    inputs, small = (call(h=2, sq=200, d=128, dtype=F16, bias=bias + more, gradients=("bias",)) for more in (3e4, 0))
    ref, exact = run_plain(inputs, torch.float64), run_plain(small, torch.float64)
    plain = [run_plain(small, F16, from_output) for from_output in (False, True)]
    for name, t in gradients(inputs, ref).items():
        allowed = 2 * max(error(p[name], exact[name]) for p in plain) + ulp(t.dtype, float(ref[name].abs().max()))
        assert error(t, ref[name]) <= allowed, name


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout": 0.2, "seed": 1, "offset": 1}, {"softcap": 5.0}], ids=str)
def test_blocks(options, d, deterministic):
    kept = torch.rand(1, 4, 5, 4, generator=torch.Generator().manual_seed(4)) < 0.4
    mask = strobe.BlockMask.from_kept(kept, 128, 128, 600, 500)
    assert not faults(call(b=2, h=4, hkv=2, sq=600, sk=500, d=d, dtype=BF16, block_mask=mask, **options), deterministic=deterministic)


@pytest.mark.parametrize("d", [128, 256])
def test_blocks_of_64(d):
    kept = torch.rand(1, 4, 10, 8, generator=torch.Generator().manual_seed(4)) < 0.4
    mask = strobe.BlockMask.from_kept(kept, 64, 64, 600, 500)
    assert not faults(call(b=2, h=4, hkv=2, sq=600, sk=500, d=d, dtype=BF16, block_mask=mask, causal=True))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (50, 0)}, {"dropout": 0.2, "seed": 1, "offset": 1, "causal": True}], ids=str
)
def test_packed_sequences(options, d):
    q, k = lengths(100, 0, 257, 1, 400, 17), lengths(130, 33, 257, 300, 0, 64)
    longest = {"max_seqlen_q": 500, "max_seqlen_k": 300}
    inputs = call(h=4, hkv=2, sq=int(q[-1]), sk=int(k[-1]), d=d, dtype=BF16, cu_seqlens_q=q, cu_seqlens_k=k, **longest, **options)
    assert not faults(inputs)


@pytest.mark.parametrize("d", [64, 128])
def test_sinks(d):
    inputs = call(
        b=2, h=4, hkv=2, sq=300, sk=222, d=d, dtype=BF16, causal=True, sinks=torch.tensor([0.0, 1.0, -2.0, 3.0]), gradients=("sinks",)
    )
    assert not faults(inputs)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("storage", ["bshd", "expanded batch", "expanded heads", "padded rows"])
def test_storage(storage, d):
    inputs = call(b=2, h=4, sq=300, sk=300, d=d, dtype=BF16, causal=True)
    for name in ("q", "k", "v", "dout"):
        t = getattr(inputs, name)
        if storage == "bshd":
            t = t.transpose(1, 2).contiguous().transpose(1, 2)
        elif storage == "expanded batch":
            t = t[:1].expand(t.shape)
        elif storage == "expanded heads":
            t = t[:, :1].expand(t.shape)
        else:
            t = torch.nn.functional.pad(t, (0, 24), value=NAN)[..., :d]
        setattr(inputs, name, t)
    assert not faults(inputs)


@pytest.mark.parametrize("d", [64, 128, 160, 256])
@pytest.mark.parametrize("what", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("value", [NAN, INF], ids=str)
@pytest.mark.parametrize("where", ["causal", "window", "packed", "mask"])
def test_what_is_hidden_reaches_nobody(where, value, what, d):
    """NaN and infinities in the last keys reach only queries that see those keys; in the first queries, only keys that these queries
    see."""
    options: dict[str, Any] = {"causal": True, "alignment": "top_left"}
    if where == "window":
        options = {"window": (20, 20)}
    elif where == "packed":
        both = lengths(100, 250)
        options = {"cu_seqlens_q": both, "cu_seqlens_k": both, "max_seqlen_q": 250, "max_seqlen_k": 250}
    elif where == "mask":
        mask = torch.ones(1, 1, 350, 350, dtype=torch.bool)
        mask[..., 340:], mask[..., :7, :] = False, False
        options = {"mask": mask}
    inputs = call(h=2, sq=350, sk=350, d=d, dtype=BF16, **options)
    t = getattr(inputs, what)
    if where == "packed":
        t[100:] = value
    else:
        t[..., slice(345, 350) if what in ("k", "v") else slice(0, 5), :] = value
    spreads_nothing(inputs)
