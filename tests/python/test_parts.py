"""strobe.Part: calls cut into parts give the uncut call's results; wrong parts are refused. Options in pairs are in test_contract.py."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import strobe
from cases import FACTORS, _valid, build, call
from check import Yardstick, dtype_of, run_or_skip
from cuts import run_in_parts
from device import DEVICE, ON_GPU, moved, running_on
from engines import available_engines

CUTS = 60


def drawn(seed: int) -> dict:
    """A case with any options, most of them plain."""
    rng = random.Random(seed)
    while True:
        case = {name: rng.choice(values) if rng.random() < 0.6 else values[0] for name, values in FACTORS.items()}
        case |= {"used": None, "part": None, "quant": None, "aux": (), "lengths": rng.choice(FACTORS["lengths"])}
        case["flag"] = None if case["flag"] == "invariant" else case["flag"]
        case["storage"] = "bhsd" if case["storage"] == "reversed" else case["storage"]
        case["bias kind"] = None if case["bias"] is None else case["bias kind"] or "gradient"
        if ON_GPU and case["dtype"] == "float32" and case["score"] != "dot":  # this score may exceed its bound, rarely and by little
            continue
        if _valid(case):
            return case


@pytest.mark.parametrize("seed", range(CUTS))
def test_any_cut_is_the_whole(seed):
    """Rows are cut from both ends, in a ring or in blocks of any size, sequences and heads apart. Parts are merged in any order."""
    case = drawn(seed)
    inputs = build(case)
    faults = []
    for engine in (None, random.Random(seed).choice(available_engines())):
        try:
            results = run_in_parts(inputs, seed, engine)
        except NotImplementedError:
            continue
        faults += [f"{engine}: {fault}" for fault in Yardstick(inputs).faults(results)]
    assert not faults, "\n".join([str(case), *faults])


@pytest.mark.parametrize("engine", available_engines())  # each engine packs another number of keys at once
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [(20, 10), (40, None)], ids=str)
def test_a_window_into_ranges_that_begin_anywhere(window, dtype, engine):
    """Then the first key that a tile sees is neither the first of its range nor a multiple of the number of keys that are packed at
    once."""
    part = strobe.Part([(7, 100), (150, 90)], [(5, 130), (170, 100)], 300, 300)
    inputs = call(h=2, sq=190, sk=230, d=32, dtype=dtype, window=window, part=part)
    assert not Yardstick(inputs).faults(run_or_skip(inputs, engine))


LARGE = {"dims": (64, 64), "lengths": (129, 129), "band": "causal", "bias": "1HQ1", "bias kind": "float32"}


@pytest.mark.parametrize("engine", available_engines())
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("by", ["a bias", "q and k"])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_lse(sign, by, dtype, engine):
    """An LSE of 1e4, whose last bit is 1e-3 of P in float32."""
    case = {name: values[0] for name, values in FACTORS.items()} | LARGE | {"dtype": dtype}
    if dtype == "float64":
        case["bias kind"] = "gradient"
    if by == "q and k":
        case |= {"bias": None, "bias kind": None}
    inputs = build(case)
    if by == "a bias":
        inputs.options["bias"] += sign * 1e4
        inputs.gradients.clear()
    else:  # all keys are near one another, so that scores are large and nearly equal
        inputs.k.copy_(inputs.k / 16 + 40)
        inputs.q.copy_(inputs.q / 16 + sign * 31)
    yardstick = Yardstick(inputs)
    assert 0.9e4 < float(yardstick.ref["lse"].abs().max()) < 1.1e4
    try:
        results = run_in_parts(inputs, 5, engine)
    except NotImplementedError:
        pytest.skip(f"{engine} is not for {dtype}")
    assert not yardstick.faults(results)


@pytest.mark.parametrize("engine", available_engines())
def test_a_partial_backward_takes_the_gradient_of_lse(engine):
    """dS = P (dP - (D - dLSE)): giving dLSE is the same as giving a smaller D."""
    dtype = dtype_of(engine)
    q, k, v, dout = (torch.randn(2, 2, 64, 64).to(dtype).to(DEVICE) for _ in range(4))
    part = strobe.Part([(0, 64)], [(0, 64)], 64, 64, partial=True)
    with running_on(engine):
        try:
            out, lse = strobe.attention(q, k, v, part=part, return_lse=True, engine=engine)
        except NotImplementedError:
            pytest.skip(f"{engine} computes no parts")
        delta, dlse = (dout * out).sum(-1), torch.randn(2, 2, 64).to(out.dtype).to(DEVICE)
        given = strobe.attention_backward(dout, q, k, v, None, lse, delta=delta, dlse=dlse, part=part, engine=engine)
        taken = strobe.attention_backward(dout, q, k, v, None, lse, delta=delta - dlse, part=part, engine=engine)
        without = strobe.attention_backward(dout, q, k, v, None, lse, delta=delta, part=part, engine=engine)
    for name in ("dq", "dk", "dv"):
        x, y = getattr(given, name), getattr(taken, name)
        assert (x - y).abs().max() <= 1e-5 * y.abs().max(), name
    assert (given.dq - without.dq).abs().max() > 0.1 * given.dq.abs().max()


def test_a_module_keeps_a_part():
    part = strobe.Part([[0, 96]], [[0, 96]], 96, 96)
    q, k, v = (torch.randn(1, 2, 96, 32) for _ in "qkv")
    assert torch.equal(strobe.nn.FlashAttention(32, part=part)(q, k, v), strobe.attention(q, k, v, part=part))


@pytest.mark.parametrize("seed", range(6))
def test_the_same_bits_in_every_run(seed):
    inputs = build(drawn(seed))
    inputs.run["deterministic"] = True
    first = run_in_parts(inputs, seed)
    inputs.run["threads"] = 3
    for name, x in run_in_parts(inputs, seed).items():
        assert torch.equal(torch.nan_to_num(x), torch.nan_to_num(first[name])), name


@pytest.mark.skipif(ON_GPU, reason="GPU engines choose tiles, and share out keys, by how many rows there are")
@pytest.mark.parametrize("engine", available_engines())
def test_starts_do_not_change_bits(engine):
    """A query's out and lse have the same bits on one engine with the same keys, whatever other rows the call has."""
    x = call(sq=128, sk=128, d=32, h=2, b=1, dtype=torch.bfloat16)
    how = {"causal": True, "return_lse": True, "tile_q": 16, "engine": engine}
    out, lse = strobe.attention(x.q, x.k, x.v, **how)
    for start in (16, 48, 112):
        part = strobe.Part([(start, 16)], [(0, 128)], 128, 128)
        rows = slice(start, start + 16)
        found = strobe.attention(x.q[:, :, rows], x.k, x.v, part=part, **how)
        assert torch.equal(found[0], out[:, :, rows])
        assert torch.equal(found[1], lse[:, :, rows])


def test_numpy_and_every_spelling():
    q, k, v = (np.random.default_rng(0).standard_normal((2, 2, 8, 16), dtype=np.float32) for _ in range(3))
    spellings = [
        strobe.Part([(4, 8)], [[0, 8]], 16, [16]),
        strobe.Part(np.array([[4, 8]]), torch.tensor([[[0, 8]]]), torch.tensor(16), np.array([16, 16])),
        strobe.Part([[(4, 8)], [(4, 8)]], [(0, 3), (3, 5), (0, 0)], 16, 16),
    ]
    found = [strobe.attention(q, k, v, causal=True, part=part) for part in spellings]
    assert np.array_equal(found[0], found[1])
    np.testing.assert_allclose(found[2], found[0], atol=1e-6)
    expected, _ = strobe.reference(q, k, v, causal=True, part=spellings[0])
    np.testing.assert_allclose(found[0], expected, atol=1e-6)
    partial = strobe.Part([(4, 8)], [(0, 8)], 16, 16, partial=True)
    out, lse = strobe.attention(q, k, v, part=partial, return_lse=True)
    assert (out.dtype, lse.shape) == (np.float32, (2, 2, 2, 8))
    delta = (out * out).sum(-1)
    dq, dk, dv = (np.ones_like(x) for x in (q, k, v))
    once = strobe.attention_backward(out, q, k, v, None, lse, delta=delta, part=partial)
    added = strobe.attention_backward(out, q, k, v, None, lse, delta=delta, part=partial, dq=dq, dk=dk, dv=dv, accumulate=True)
    for name, to in (("dq", dq), ("dk", dk), ("dv", dv)):
        assert getattr(added, name) is to
        np.testing.assert_array_equal(to, 1 + getattr(once, name))


def test_a_read_only_array_is_not_added_to():
    x = call(sq=4)
    q, k, v, dout = (t.numpy() for t in (x.q, x.k, x.v, x.dout))
    out, lse = strobe.attention(q, k, v, return_lse=True)
    dq = np.zeros(x.q.shape, np.float32)
    dq.flags.writeable = False
    with pytest.raises(ValueError, match="^dq: a read-only array; accepted is one that may be written"):
        strobe.attention_backward(dout, q, k, v, out, lse, dq=dq, accumulate=True)
    assert not dq.any()


def test_ranges_of_more_sequences_than_have_lengths():
    """If q has too few axes the batch is not known. Ranges were then read with lengths from past the end of their list."""
    x = call(b=2, sq=4)
    part = strobe.Part([[(0, 4)]] * 3, [[(0, 4)]] * 2, [8, 8], [8, 8])
    words = "\npart.q_ranges: ranges of 3 sequences; accepted are those of 2, as seqlens_q has, or of 1"
    with pytest.raises(ValueError, match=words):
        strobe.attention(x.q[0], x.k, x.v, part=part)


def test_a_negated_view_is_not_added_to():
    x = call(sq=4)
    out, lse = strobe.attention(x.q, x.k, x.v, return_lse=True)
    dq = torch.zeros(x.q.shape, dtype=torch.complex64).conj().imag
    assert dq.is_neg()
    with pytest.raises(ValueError, match="^dq: a negated view or zeros without memory; accepted is a tensor of its own numbers"):
        strobe.attention_backward(x.dout, x.q, x.k, x.v, out, lse, dq=dq, accumulate=True)


def test_what_was_added_to_is_not_what_a_graph_saved():
    q, dq = torch.randn(1, 2, 8, 16), torch.zeros(1, 2, 8, 16)
    out, lse = strobe.attention(q, q, q, return_lse=True)
    saved = (dq.requires_grad_() ** 2).sum()
    added = [dq.detach(), torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16)]
    versions = [x._version for x in added]
    strobe.attention_backward(out, q, q, q, out, lse, dq=added[0], dk=added[1], dv=added[2], accumulate=True)
    assert all(x._version > version for x, version in zip(added, versions, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_lists_on_meta_are_named():
    for given in ({"q_ranges": torch.zeros(1, 2, device="meta")}, {"seqlens_k": torch.zeros(1, device="meta")}):
        (name,) = given
        with pytest.raises(ValueError, match=f"^{name}: on device meta; accepted is an array that has values$"):
            strobe.Part(**{"q_ranges": [[0, 3]], "k_ranges": [[0, 3]], "seqlens_q": 3, "seqlens_k": 3} | given)
    with pytest.raises(ValueError, match="^q_ranges: .*; accepted are integers"):
        strobe.Part([torch.zeros(2, device="meta")], [[0, 3]], 3, 3)


def test_an_inference_tensor_is_not_added_to_outside_of_inference_mode():
    x = call(sq=4)
    out, lse = strobe.attention(x.q, x.k, x.v, return_lse=True)
    with torch.inference_mode():
        dq = torch.zeros(x.q.shape)
    with pytest.raises(ValueError, match="^dq: an inference tensor; accepted is one that may be written outside of inference mode"):
        strobe.attention_backward(x.dout, x.q, x.k, x.v, out, lse, dq=dq, accumulate=True)
    assert not dq.any()


@pytest.mark.parametrize("engine", available_engines())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_accumulate_without_a_part(dtype, engine):
    x = call(sq=40, h=4, hkv=2, dtype=dtype)
    q, k, v, dout = (moved(t, DEVICE) for t in (x.q, x.k, x.v, x.dout))
    with running_on(engine):
        dk = torch.full(k.shape, 3.0, device=DEVICE)
        try:
            out, lse = strobe.attention(q, k, v, return_lse=True, engine=engine)
            found = strobe.attention_backward(dout, q, k, v, out, lse, dk=dk, accumulate=True, engine=engine)
        except NotImplementedError as refusal:
            pytest.skip(f"{engine}: {refusal}")
        assert found.dk is dk
        assert found.dq is None
        assert found.dv is None
        once = strobe.attention_backward(dout, q, k, v, out, lse, engine=engine)
    torch.testing.assert_close((dk - 3).to(dtype), once.dk, atol=3e-6, rtol=1e-2)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_reference_adds_to_what_other_engines_add_to(dtype, partial):
    """The reference required float64, although only the engine's name differed."""
    x = call(sq=20, h=4, hkv=2, dtype=dtype)
    options = {"part": strobe.Part([(0, 20)], [(0, x.k.shape[2])], 20, x.k.shape[2], partial=True)} if partial else {}
    out, lse = strobe.attention(x.q, x.k, x.v, return_lse=True, **options)
    known = {"delta": (out * x.dout).sum(-1).to(lse.dtype)} if partial else {}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for engine in ("reference", None):
        sums = {f"d{name}": torch.full(getattr(x, name).shape, 3.0, dtype=wide) for name in "qkv"}
        found = strobe.attention_backward(
            x.dout, x.q, x.k, x.v, None if partial else out, lse, accumulate=True, engine=engine, **sums, **known, **options
        )
        once = strobe.attention_backward(x.dout, x.q, x.k, x.v, None if partial else out, lse, engine="reference", **known, **options)
        for name, of in sums.items():
            assert getattr(found, name) is of
            torch.testing.assert_close(of - 3, getattr(once, name).to(wide), atol=2e-2 if dtype == torch.bfloat16 else 3e-6, rtol=1e-2)
    how = {"accumulate": True, "engine": "reference", "dk": torch.zeros(x.k.shape, dtype=torch.float16)} | known | options
    with pytest.raises(ValueError, match=r"^dk: dtype float16; accepted is float(32, float)?64$"):
        strobe.attention_backward(x.dout, x.q, x.k, x.v, None if partial else out, lse, **how)


@pytest.mark.parametrize("engine", available_engines())
def test_no_sequences(engine):
    """The lists of the block mask are then empty and have no addresses, although the part begins at a later head than the first."""
    dtype = torch.bfloat16 if engine in ("cuda-sm90", "cuda-mma") else torch.float32
    q, k, v, sinks = (
        torch.zeros(shape, dtype=of, device=DEVICE, requires_grad=True) for shape, of in [((0, 2, 64), dtype)] * 3 + [((2,), torch.float32)]
    )
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    part = strobe.Part([[]], [[]], [], [], first_head=1, heads=4)
    kept = strobe.BlockMask.from_kept(torch.ones(0, 4, 1, 1, dtype=torch.bool, device=DEVICE), 128, 128, 8, 8)
    lengths = {"cu_seqlens_q": none, "cu_seqlens_k": none, "max_seqlen_q": 8, "max_seqlen_k": 8}
    with running_on(engine):
        try:
            out = strobe.attention(q, k, v, part=part, block_mask=kept, sinks=sinks, engine=engine, **lengths)
        except NotImplementedError as refusal:
            pytest.skip(str(refusal))
        gradients = torch.autograd.grad(out, (q, k, v, sinks), torch.ones_like(out))
    assert out.shape == q.shape
    assert not gradients[-1].any()


@pytest.mark.parametrize("engine", available_engines())
def test_keys_behind_the_last_query_are_hidden(engine):
    """The part's queries end before the last queries of the whole sequence, which would see the keys that hold NaN here."""
    g = torch.Generator().manual_seed(2)
    dtype = dtype_of(engine)
    q, dout, k, v = (torch.randn(1, 1, n, 64, generator=g).to(dtype) for n in (4, 4, 80, 80))
    k[:, :, 44:] = v[:, :, 44:] = torch.nan  # query 3 of 60 sees keys up to 43
    part = strobe.Part([(0, 4)], [(0, 80)], 60, 100)
    how = {"causal": True, "part": part}
    expected = strobe.reference_backward(dout, q, k, v, **how)
    q, k, v, dout = (moved(t, DEVICE) for t in (q, k, v, dout))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    with running_on(engine):
        try:
            out = strobe.attention(*leaves, engine=engine, **how)
            found = torch.autograd.grad(out, leaves, dout)
        except NotImplementedError as refusal:
            pytest.skip(f"{engine}: {refusal}")
    for x, right in zip(found, expected, strict=False):
        assert (x.double().cpu() - right).abs().max() < 0.03


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_merge_with_sinks(layout):
    """Sinks are given once, with LSE as one number or as two."""
    shape = (2, 2, 8, 16) if layout == "bhsd" else (2, 8, 2, 16)
    q, k, v = (torch.randn(shape) for _ in range(3))
    sinks = torch.tensor([0.5, -1.0])
    expected = strobe.attention(q, k, v, sinks=sinks, layout=layout, return_lse=True)
    axis = 2 if layout == "bhsd" else 1
    for partial in (False, True):
        halves = [
            strobe.attention(
                q, k.narrow(axis, at, 4), v.narrow(axis, at, 4), layout=layout, return_lse=True,
                part=strobe.Part([(0, 8)], [(at, 4)], 8, 8, partial=partial),
            )
            for at in (0, 4)
        ]  # fmt: skip
        out, lse = strobe.merge(*halves[0], *halves[1], sinks=sinks, layout=layout)
        assert lse.shape == halves[0][1].shape
        torch.testing.assert_close(out, expected[0])
        torch.testing.assert_close(lse.sum(0) if partial else lse, expected[1])


def test_autograd():
    """A call with all the keys that its queries see is differentiable; a partial one is refused."""
    x = call(sq=16, sk=48, d=32)
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    part = strobe.Part([(32, 16)], [(0, 48)], 48, 48)
    strobe.attention(q, k, v, causal=True, part=part).backward(x.dout)
    expected = strobe.reference_backward(x.dout, q.detach(), k.detach(), v.detach(), causal=True, part=part)
    for t, of in zip((q, k, v), expected, strict=False):
        torch.testing.assert_close(t.grad.double(), of, atol=1e-5, rtol=1e-5)
    with pytest.raises(NotImplementedError, match="^part: partial=True, and a tensor requires grad"):
        strobe.attention(q, k, v, part=strobe.Part([(0, 16)], [(0, 48)], 48, 48, partial=True))


def test_what_a_part_refuses():
    for wrong, message in (
        ({"q_ranges": 3}, "q_ranges: int; accepted are integers (n, 2) or (B, n, 2)"),
        ({"q_ranges": [(0, 8, 1)]}, "q_ranges: [(0, 8, 1)]; accepted are"),
        ({"k_ranges": [[(0, 8)], [(0, 4), (4, 4)]]}, "k_ranges: [[(0, 8)], [(0, 4), (4, 4)]]; accepted are"),
        ({"k_ranges": [(0.5, 8)]}, "k_ranges: [(0.5, 8)]; accepted are"),
        ({"seqlens_q": "16"}, "seqlens_q: '16'; accepted are integers (B,), or one for all sequences"),
        ({"first_head": 0.5}, "first_head: float; accepted is an integer"),
        ({"heads": 0}, "heads: 0; accepted are integers from 1"),
        ({"partial": 1}, "partial: int 1; accepted is True or False"),
        ({"seqlens_q": -1}, "seqlens_q: -1 at [0]; accepted are 0 to 2147483647"),
        ({"seqlens_k": [8, -3]}, "seqlens_k: -3 at [1]; accepted are 0 to 2147483647"),
        ({"seqlens_k": 2**31}, "seqlens_k: 2147483648 at [0]; accepted are 0 to 2147483647"),
        (
            {"q_ranges": [(-1, 4)]},
            "q_ranges: (-1, 4) at [0, 0]; accepted are a start and a length within the 8 positions that seqlens_q says",
        ),
        ({"k_ranges": [[(0, 8)], [(4, -4)]]}, "k_ranges: (4, -4) at [1, 0]; accepted are a start and a length within the 8 positions"),
        ({"k_ranges": [(0, 4), (3, 2)]}, "k_ranges: (3, 2) at [0, 1] begins before 4, where the range before ends; accepted are ascending"),
        ({"q_ranges": [(4, 4), (0, 4)]}, "q_ranges: (0, 4) at [0, 1] begins before 8, where the range before ends; accepted are ascending"),
        (
            {"q_ranges": [(0, 9)]},
            "q_ranges: (0, 9) at [0, 0]; accepted are a start and a length within the 8 positions that seqlens_q says",
        ),
        (
            {"q_ranges": [(9, 0)]},
            "q_ranges: (9, 0) at [0, 0]; accepted are a start and a length within the 8 positions that seqlens_q says",
        ),
        (
            {"k_ranges": [(0, 8)], "seqlens_k": [9, 7]},
            "k_ranges: (0, 8) at [0, 0]; accepted are a start and a length within the 7 positions",
        ),
        ({"k_ranges": [[(0, 8)], [(0, 8)]], "seqlens_k": [8, 7]}, "k_ranges: (0, 8) at [1, 0]; accepted are a start and a length within"),
        (
            {"seqlens_q": []},
            "q_ranges: (0, 8) at [0, 0], where seqlens_q has no lengths; accepted are no ranges, or the lengths of their sequences",
        ),
        ({"q_ranges": [(0, 2**70)]}, "q_ranges: (0, 1180591620717411303424) at [0, 0]; accepted are"),
    ):
        with pytest.raises((TypeError, ValueError)) as refused:
            strobe.Part(**({"q_ranges": [(0, 8)], "k_ranges": [(0, 8)], "seqlens_q": 8, "seqlens_k": 8} | wrong))
        assert str(refused.value).startswith(message)
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=r"^q_ranges: \(-1, 2\) .*\nk_ranges: \(0, 9\) .*within the 8 positions that seqlens_k says$"):
        strobe.Part([(-1, 2)], [(0, 9)], 8, 8)


def test_ranges_that_look_odd_and_are_right():
    """Empty ranges may stand anywhere within the sequence, ranges may touch, and each sequence may have ranges of its own."""
    strobe.Part([(3, 2), (0, 0), (5, 3), (8, 0)], [], 8, 0)
    strobe.Part([[(0, 8)], [(2, 3)]], [[]], [8, 5], [])
    strobe.Part([[(0, 4)]] * 3, [[(0, 4)]] * 2, [4, 8], [8, 4])


def test_what_a_call_refuses():
    x = call(sq=8, sk=8, d=16)
    given = {"q_ranges": [(0, 8)], "k_ranges": [(0, 8)], "seqlens_q": 16, "seqlens_k": 16}
    for wrong, options, message in (
        ({"k_ranges": [(0, 7)]}, {}, "part.k_ranges: hold 7 rows of sequence 0; accepted is 8, as many as it has here"),
        ({"first_head": 3, "heads": 4}, {}, "part.heads: 4 with first_head 3 and 2 heads of q; accepted are 5 or more"),
        ({}, {"seqused_k": torch.tensor([8], dtype=torch.int32)}, "seqused_k: given beside part"),
        ({}, {"invariant": True}, "invariant: given beside part"),
        ({}, {"aux": ("max_logit",)}, "aux: 'max_logit' given beside part"),
        ({}, {"aux": ("column_sums",)}, "aux: 'column_sums' given beside part"),
        ({"partial": True}, {"sinks": torch.zeros(2)}, "sinks: given with a partial part; accepted are none: they join the whole row once"),
        ({}, {"mask": torch.ones(8, 8, dtype=torch.bool)}, "mask: shape (8, 8); accepted is (B|1, H|1, Sq|1, Sk of the whole problem|1)"),
        ({}, {"block_mask": strobe.BlockMask.from_kept(torch.ones(1, 1, 1, 1, dtype=torch.bool), 16, 16, 8, 8)},
         "block_mask: of 8 queries and 8 keys; accepted is one of 16 queries and 16 keys, as the longest whole sequences of part have"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError)) as refused:
            strobe.attention(x.q, x.k, x.v, part=strobe.Part(**(given | wrong)), **options)
        assert message in str(refused.value)
    with pytest.raises(TypeError, match="^part: tuple; accepted is a strobe.Part"):
        strobe.attention(x.q, x.k, x.v, part=((0, 8),))
    out, lse = strobe.attention(x.q, x.k, x.v, return_lse=True)
    whole, partial = strobe.Part(**given), strobe.Part(**given, partial=True)
    pair, delta = torch.stack([lse, torch.zeros_like(lse)]), torch.zeros_like(lse)
    for arguments, options, message in (
        ((out, lse), {"part": whole, "delta": delta}, "delta: given without a partial part"),
        ((out, pair), {"part": partial, "delta": delta}, "out: given with a partial part"),
        ((None, lse), {"part": partial, "delta": delta}, "lse: shape"),
        ((None, pair), {"part": partial}, "delta: "),
        ((out, lse), {"accumulate": True}, "accumulate: True without dq, dk or dv"),
        ((out, lse), {"dq": torch.zeros_like(x.q)}, "dq: given without accumulate"),
        ((out, lse), {"dq": torch.zeros_like(x.q).double(), "accumulate": True}, "dq: dtype float64; accepted is float32"),
    ):
        with pytest.raises((TypeError, ValueError)) as refused:
            strobe.attention_backward(x.dout, x.q, x.k, x.v, *arguments, **options)
        assert message.removesuffix("shape") in str(refused.value)


def test_the_reference_has_both_numbers_of_a_partial_lse():
    """Two float32 numbers are as exact as float64 here; a row that sees no key has no second one."""
    inputs = call(sq=5, sk=20, d=8, bias=torch.full((1, 1, 5, 20), 1e4), causal=True)
    at = strobe.Part([(0, 5)], [(2, 18)], 5, 20, partial=True)
    of = {"causal": True, "alignment": "top_left", "bias": inputs.options["bias"], "part": at, "return_lse": True}
    k, v = inputs.k[:, :, 2:], inputs.v[:, :, 2:]
    _, lse = strobe.attention(inputs.q, k, v, engine="reference", **of)
    _, exact = strobe.attention(*(x.double() for x in (inputs.q, k, v)), engine="reference", **of | {"bias": of["bias"].double()})
    assert (lse[0, ..., :2].isneginf().all(), lse[1, ..., :2].abs().max()) == (True, 0)
    torch.testing.assert_close(lse.double().sum(0)[..., 2:], exact.sum(0)[..., 2:], rtol=1e-12, atol=0)
    assert lse[1].abs().max() > 1e-5
