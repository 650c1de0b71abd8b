"""Reported bugs of other attention libraries, each as the call that showed it. None of them may occur here."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import cases
import strobe
from check import Yardstick, assert_matches, run, runs, takes
from device import DEVICE, on_device, running_on
from engines import available_engines

DTYPES = (torch.float32, torch.bfloat16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
engines = pytest.mark.parametrize("engine", [e for e in available_engines() if takes(e, torch.float32, 64)])
BITS = {"deterministic": True}  # for calls that are compared by torch.equal: otherwise a GPU adds dq up in any order

call = partial(cases.call, d=64)  # every engine supports it


def cumulated(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


# Causal alignment


@engines
def test_causal_aligns_the_last_query_with_the_last_key(engine):
    """Dao-AILab/flash-attention#282, #402, #517, NVIDIA/cutlass#2336, pytorch/pytorch#110144: causal hid the cached prefix."""
    for sq, sk, expected in ((2, 5, [4, 5]), (5, 2, [0, 0, 0, 1, 2])):
        inputs = call(h=1, sq=sq, sk=sk, causal=True)
        inputs.q.zero_()  # every visible key weighs the same, and LSE counts them
        counts = run(inputs, engine)["lse"].exp()[0, 0]
        torch.testing.assert_close(counts, torch.tensor(expected, dtype=counts.dtype))


@dtypes
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize(("sq", "sk"), [(3, 128), (128, 3), (65, 64), (63, 200), (200, 63)])
def test_causal_with_other_lengths(sq, sk, alignment, dtype):
    """Dao-AILab/flash-attention#1778, #436: more queries than keys, and diagonals that cross tile boundaries."""
    assert_matches(call(sq=sq, sk=sk, dtype=dtype, causal=True, alignment=alignment))


# Windows


@engines
def test_window_ends_are_inclusive(engine):
    """huggingface/transformers#39408, #29623: a window (w, 0) holds w + 1 keys."""
    inputs = call(h=1, sq=100, window=(7, 0))
    inputs.q.zero_()
    counts = run(inputs, engine)["lse"].exp()[0, 0]
    expected = torch.arange(1, 101).clamp(max=8).to(counts.dtype)
    torch.testing.assert_close(counts, expected)


@engines
@pytest.mark.parametrize("s", [64, 100, 257])
def test_window_as_wide_as_the_sequence_is_causal(s, engine):
    """Dao-AILab/flash-attention#1133: causal, (None, 0), (S, 0) and (S - 1, 0) are the same."""
    causal = run(call(sq=s, causal=True), engine, **BITS)
    for window in ((None, 0), (s, 0), (s - 1, 0), (2**62, 0)):
        for name, t in run(call(sq=s, window=window), engine, **BITS).items():
            assert torch.equal(t, causal[name]), f"{name} with window {window}"


@dtypes
@pytest.mark.parametrize("window", [(2047, 0), (0, 2047), (31, 32), (32, 31), (15, None), (None, 16)])
def test_window_backward(window, dtype):
    """ROCm/aiter#3742: the backward of a window repeated the forward's tile bounds wrongly."""
    assert_matches(call(h=4, hkv=2, sq=150, sk=190, dtype=dtype, window=window))


# ALiBi


@dtypes
@pytest.mark.parametrize(("sq", "sk"), [(1, 90), (90, 1), (33, 90), (90, 33)])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi_measures_from_the_aligned_diagonal(sq, sk, causal, dtype):
    """vllm-project/vllm#945, Dao-AILab/flash-attention#907, #1585, meta-pytorch/attention-gym#86: distances were off by one, off by the
    length of the cached prefix, or of the wrong sign."""
    for alignment in ("bottom_right", "top_left"):
        assert_matches(call(sq=sq, sk=sk, dtype=dtype, causal=causal, alignment=alignment, alibi_slopes=torch.tensor([0.5, 0.03])))


def test_alibi_of_packed_sequences():
    """Dao-AILab/flash-attention#1585: positions count within each sequence, slopes may differ by sequence."""
    options = {"cu_seqlens_q": cumulated(3, 40, 0, 20), "cu_seqlens_k": cumulated(30, 17, 5, 20)}
    assert_matches(call(sq=63, sk=72, alibi_slopes=torch.rand(4, 2), **options))


# The gradient through LSE


@engines
def test_lse_alone_has_gradients(engine):
    """Dao-AILab/flash-attention#1817, #889, #141: a loss of LSE alone gave zero gradients, silently."""
    inputs = call(sq=20, sk=30)
    q, k, v = (t.to(DEVICE, copy=True).requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    with running_on(engine):
        _, lse = strobe.attention(q, k, v, return_lse=True, engine=engine)
        lse.mean().backward()
    s = (inputs.q.double() @ inputs.k.double().transpose(-1, -2)) * 64**-0.5
    p = s.softmax(-1) / lse.numel()
    torch.testing.assert_close(q.grad.cpu(), (64**-0.5 * p @ inputs.k.double()).float())
    torch.testing.assert_close(k.grad.cpu(), (64**-0.5 * p.transpose(-1, -2) @ inputs.q.double()).float())
    assert v.grad is None or (v.grad == 0).all()


@engines
def test_output_alone_after_lse_was_asked_for(engine):
    """An LSE that is returned and not used has no gradient, and changes none."""
    inputs = call()
    with_lse = run(dataclasses.replace(inputs, dlse=None), engine, **BITS)
    without = run(dataclasses.replace(inputs, dlse=None, lse=False), engine, **BITS)
    zero = run(dataclasses.replace(inputs, dlse=torch.zeros_like(inputs.dlse)), engine, **BITS)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(with_lse[name], without[name])
        assert torch.equal(with_lse[name], zero[name])


# Strides


@dtypes
def test_expanded_gradient(dtype):
    """facebookresearch/xformers#282: attention(...).sum().backward() passes a gradient of stride 0."""
    inputs = call(dtype=dtype)
    inputs.dout = torch.ones((), dtype=dtype).expand(inputs.dout.shape)
    inputs.dlse = torch.ones(()).expand(inputs.dlse.shape)
    assert_matches(inputs)


@dtypes
def test_transposed_gradient(dtype):
    """Dao-AILab/flash-attention#355, #1149: an output gradient was read as if it were contiguous."""
    inputs = call(b=2, dtype=dtype)
    inputs.dout = inputs.dout.transpose(1, 2).contiguous().transpose(1, 2)
    assert_matches(inputs)
    inputs.dout = inputs.dout.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert_matches(inputs)


@dtypes
def test_values_alone_transposed(dtype):
    """ROCm/pytorch#3230, torch-spyre/torch-spyre#4331: the strides of q were used for v."""
    inputs = call(b=2, sq=62, d=64, dtype=dtype)
    inputs.v = inputs.v.transpose(1, 2).contiguous().transpose(1, 2)
    assert_matches(inputs)
    inputs.v = inputs.v.transpose(2, 3).contiguous().transpose(2, 3)
    assert_matches(inputs)


@engines
def test_sliced_keys_get_their_gradient(engine):
    """pytorch/pytorch#146377: the gradient of a sliced K came back as garbage, and reached the part that was cut off."""
    inputs = on_device(call(sq=40, sk=200), DEVICE)
    whole = {name: torch.randn(1, 2, 328, 64, device=DEVICE).requires_grad_() for name in "kv"}
    with running_on(engine):
        out = strobe.attention(inputs.q, whole["k"][:, :, :-128], whole["v"][:, :, :-128], engine=engine)
        out.backward(inputs.dout)
    inputs.k, inputs.v = (whole[name].detach()[:, :, :-128].contiguous() for name in "kv")
    expected = run(dataclasses.replace(inputs, dlse=None), engine)
    for name in "kv":
        assert torch.equal(whole[name].grad[:, :, :-128].cpu(), expected["d" + name])
        assert (whole[name].grad[:, :, -128:] == 0).all()


def test_one_projection_for_q_k_and_v():
    """fla-org/flash-linear-attention#871: q, k and v as slices of one buffer; their gradients land in one buffer again."""
    x = torch.randn(2, 50, 3, 2, 16, dtype=torch.float64, requires_grad=True)
    q, k, v = x.unbind(2)
    out = strobe.attention(q, k, v, layout="bshd", causal=True)
    dout = torch.randn(out.shape, dtype=torch.float64)
    out.backward(dout)
    ref = strobe.reference_backward(dout, q.detach(), k.detach(), v.detach(), layout="bshd", causal=True)
    expected = torch.stack([ref.dq, ref.dk, ref.dv], dim=2)
    assert (x.grad - expected).abs().max() <= 1e-12 * expected.abs().max()


# Bias and mask


@dtypes
def test_bias_of_odd_width(dtype):
    """facebookresearch/xformers#808: 77 keys, and a bias that is a slice of 80 columns."""
    bias = torch.randn(3, 2, 77, 80, dtype=dtype)[:, :, :, :77]
    assert_matches(call(b=3, sq=77, dtype=dtype, gradients=("bias",), bias=bias))


@dtypes
def test_bias_whose_last_axis_is_not_contiguous(dtype):
    """pytorch/pytorch#109607."""
    bias = torch.randn(1, 2, 70, 50, dtype=dtype).transpose(2, 3)
    assert_matches(call(sq=50, sk=70, dtype=dtype, gradients=("bias",), bias=bias))


@dtypes
@pytest.mark.parametrize("shape", [(1, 1, 60, 70), (3, 1, 60, 70), (1, 2, 60, 70), (3, 1, 1, 70), (1, 2, 60, 1), (1, 1, 1, 1)])
def test_gradient_of_a_broadcast_bias(shape, dtype):
    """facebookresearch/xformers#783, #587, HKUSTDial/flash-sparse-attention#193: the gradient is the sum over the
    broadcast axes."""
    assert_matches(call(b=3, sq=60, sk=70, dtype=dtype, gradients=("bias",), bias=torch.randn(shape, dtype=dtype)))


def test_expanded_bias_gets_a_dense_gradient():
    """A bias broadcast by expand() and not by axes of size 1: no two elements of the gradient may share memory."""
    base = torch.randn(1, 1, 20, 30, dtype=torch.float64)
    assert_matches(call(b=2, sq=20, sk=30, dtype=torch.float64, gradients=("bias",), bias=base.expand(2, 2, 20, 30)))


@engines
def test_padding_mask_is_not_ignored(engine):
    """pytorch/pytorch#122753, #108503: the result of a padding mask is that of the shorter keys."""
    inputs = call(b=2, sq=40, sk=90)
    q, k, v = (t.to(DEVICE) for t in (inputs.q, inputs.k, inputs.v))
    keep = torch.tensor([90, 33], device=DEVICE)
    mask = (torch.arange(90, device=DEVICE) < keep[:, None])[:, None, None, :]
    with running_on(engine):
        out = strobe.attention(q, k, v, mask=mask, engine=engine)
        for b, n in enumerate(keep.tolist()):
            alone = strobe.attention(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], engine=engine)
            torch.testing.assert_close(out[b : b + 1], alone)


# Dropout


def attend(q, k, v):
    return strobe.attention(q, k, v, dropout=0.4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_mask(reentrant):
    """allenai/OLMo-core#828, pytorch/pytorch#190717, #198333: the recomputation drew another dropout mask."""
    inputs = call(sq=70)
    gradients = []
    for checkpointed in (False, True):
        q, k, v = (t.clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
        torch.manual_seed(5)
        out = checkpoint(attend, q, k, v, use_reentrant=reentrant) if checkpointed else attend(q, k, v)
        out.backward(inputs.dout)
        gradients.append((out.detach(), q.grad, k.grad, v.grad))
    for direct, again in zip(*gradients, strict=True):
        assert torch.equal(direct, again)


def test_dropout_bits_are_independent():
    """pytorch/pytorch#198333: groups of four neighbours shared one draw. No pair of elements near each other may agree too often."""
    n = 512
    keep = strobe.dropout_mask((1, 1, n, n), 0.5, 42, 0)[0, 0].double() * 2 - 1
    sigma = 1 / n
    assert abs(keep.mean()) < 5 * sigma
    for di in range(18):
        for dj in range(-17, 18):
            if (di, dj) > (0, 0):
                a = keep[: n - di, max(0, -dj) : n - max(0, dj)]
                b = keep[di:, max(0, dj) : n + min(0, dj)]
                assert abs((a * b).mean()) < 6 / math.sqrt(a.numel()), f"elements ({di}, {dj}) apart agree"


def test_dropout_masks_of_heads_batches_seeds_and_offsets_differ():
    masks = [strobe.dropout_mask((2, 2, 64, 64), 0.5, seed, offset).flatten(0, 1) for seed in (0, 1) for offset in (0, 1)]
    flat = torch.cat(masks).flatten(1).double() * 2 - 1
    correlation = flat @ flat.T / flat.shape[1]
    assert (correlation - torch.eye(len(flat))).abs().max() < 6 / math.sqrt(flat.shape[1])


@engines
def test_dropout_keeps_the_expected_output(engine):
    """Kept values are scaled by the actual keep rate, so the mean over masks is the output without dropout."""
    inputs = on_device(call(h=1, sq=16, sk=64), DEVICE)
    n = 2000
    q, k, v = (t.expand(n, *t.shape[1:]) for t in (inputs.q, inputs.k, inputs.v))
    with running_on(engine):
        plain = strobe.attention(inputs.q, inputs.k, inputs.v, engine=engine)
        outs = strobe.attention(q, k, v, dropout=0.3, seed=1, offset=2, engine=engine)
    error = (outs.mean(0) - plain[0]).abs() / (outs.std(0) / math.sqrt(n))
    assert error.max() < 5


# Packed sequences


@dtypes
@pytest.mark.parametrize("d", [64, 256])
def test_sequences_without_queries(d, dtype):
    """Dao-AILab/flash-attention#2562, #2421, #1713: dK and dV of keys that no query sees, at every head dimension."""
    options = {"cu_seqlens_q": cumulated(0, 40, 33, 0), "cu_seqlens_k": cumulated(30, 20, 17, 50)}
    inputs = call(sq=73, sk=117, h=4, hkv=1, d=d, dtype=dtype, causal=True, **options)
    assert_matches(inputs)
    for _, results in runs(inputs):
        for name in ("dk", "dv"):
            assert (results[name][:30] == 0).all()
            assert (results[name][67:] == 0).all()


@dtypes
def test_sequences_without_keys(dtype):
    """Dao-AILab/flash-attention#2568: rows of a sequence that has no key are zero, with LSE -inf, and so are their gradients."""
    options = {"cu_seqlens_q": cumulated(20, 30, 10), "cu_seqlens_k": cumulated(0, 25, 0)}
    inputs = call(sq=60, sk=25, dtype=dtype, **options)
    assert_matches(inputs)
    for _, results in runs(inputs):
        for part in (slice(0, 20), slice(50, 60)):
            assert (results["out"][part] == 0).all()
            assert (results["dq"][part] == 0).all()
            assert (results["lse"][:, part] == -torch.inf).all()


@pytest.fixture
def poisoned_memory():
    """torch.empty returns NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dtypes
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout": 0.3, "seed": 1}, {"max_seqlen_q": 40, "max_seqlen_k": 30}], ids=str)
def test_padding_behind_packed_sequences(options, dtype, poisoned_memory):
    """pytorch/pytorch#176793, Dao-AILab/flash-attention#1228: rows of no sequence came back with whatever was in memory."""
    held = {"q": 45, "dout": 45, "k": 44, "v": 44}
    padded = {name: torch.randn(n + 19, 4 if name in ("q", "dout") else 2, 24, dtype=dtype) for name, n in held.items()}
    for name, n in held.items():
        padded[name][n:] = math.nan
    cu = {"cu_seqlens_q": cumulated(5, 0, 40), "cu_seqlens_k": cumulated(14, 0, 30)}

    def results(tensors, engine):
        q, k, v, dout = (tensors[name].to(DEVICE) for name in ("q", "k", "v", "dout"))
        how = {name: x.to(DEVICE) for name, x in cu.items()} | options | {"engine": engine}
        out, lse = strobe.attention(q, k, v, return_lse=True, **how)
        gradients = strobe.attention_backward(dout, q, k, v, out, lse, deterministic=True, **how)
        return {"out": out, "lse": lse.transpose(0, 1), "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}

    for engine in [name for name in available_engines() if takes(name, dtype)] + ["reference"] * (DEVICE == "cpu"):
        found = results(padded, engine)
        expected = results({name: x[: held[name]] for name, x in padded.items()}, engine)
        for name, x in found.items():
            n = len(expected[name])
            torch.testing.assert_close(x[:n], expected[name], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
            assert torch.equal(x[n:], torch.full_like(x[n:], -math.inf if name == "lse" else 0)), f"padding of {name} of {engine}"


def test_decode_with_zero_lengths():
    """Dao-AILab/flash-attention#1537: max_seqlen_q = 1 with empty sequences among the others."""
    options = {"cu_seqlens_q": cumulated(0, 1, 0, 1), "cu_seqlens_k": cumulated(0, 3, 0, 5), "max_seqlen_q": 1, "max_seqlen_k": 5}
    assert_matches(call(sq=2, sk=8, h=9, hkv=3, d=64, scale=1.0, causal=True, **options))


@dtypes
def test_packed_is_each_alone(dtype):
    """tile-ai/tilelang#2461, Dao-AILab/flash-attention#752: numbers past a sequence's end leaked into its last tile."""
    lengths = (137, 1, 349)
    packed = call(sq=487, dtype=dtype, causal=True, cu_seqlens_q=cumulated(*lengths), cu_seqlens_k=cumulated(*lengths), dlse=False)
    for engine, results in runs(packed):
        begin = 0
        for n in lengths:
            here = slice(begin, begin + n)
            alone = call(sq=n, dtype=dtype, causal=True, dlse=False)
            for name in ("q", "k", "v", "dout"):
                setattr(alone, name, getattr(packed, name)[here].transpose(0, 1)[None])
            expected = run(alone, engine)
            for name in ("out", "dq", "dk", "dv"):
                torch.testing.assert_close(results[name][here].transpose(0, 1)[None], expected[name])
            begin += n


# Heads


@dtypes
@pytest.mark.parametrize("hkv", [1, 2, 4])
def test_gradients_of_grouped_heads(hkv, dtype):
    """marin-community/levanter#449, ROCm/flash-attention#100: dK and dV sum over the query heads of their group."""
    assert_matches(call(b=2, h=8, hkv=hkv, sq=50, sk=70, dtype=dtype, causal=True))


@engines
def test_large_batch_times_heads(engine):
    """pytorch/pytorch#142228, facebookresearch/xformers#845, flashinfer-ai/flashinfer#3125: batch times heads is more than 65535."""
    inputs = on_device(call(b=65537, h=1, sq=1, sk=2), DEVICE)
    with running_on(engine):
        out = strobe.attention(inputs.q, inputs.k, inputs.v, engine=engine)
        last = strobe.attention(inputs.q[-1:], inputs.k[-1:], inputs.v[-1:], engine=engine)
    assert torch.equal(out[-1:], last)


@dtypes
def test_scale_of_a_padded_head_dimension(dtype):
    """tile-ai/tilelang-ascend#1670: D = 129 was padded to 144, and the default scale with it."""
    assert_matches(call(d=129, dtype=dtype))


# Sinks


@dtypes
def test_sink_above_every_logit(dtype):
    """Dao-AILab/flash-attention#2752: a sink of 100 overflowed, and LSE was infinite."""
    inputs = call(dtype=dtype, gradients=("sinks",), sinks=torch.tensor([100.0, -100.0]), causal=True)
    assert_matches(inputs)


@engines
def test_sink_of_each_head(engine):
    """modular/modular#6591: with more than one query, rows took another head's sink. Here logits are 0 and V is 1."""
    inputs = on_device(call(h=3, sq=7, sk=40), DEVICE)
    sinks = torch.tensor([2.0, -1.0, 4.0], device=DEVICE)
    with running_on(engine):
        out = strobe.attention(torch.zeros_like(inputs.q), inputs.k, torch.ones_like(inputs.v), sinks=sinks, engine=engine)
    expected = (40 / (40 + sinks.exp()))[None, :, None, None].expand(out.shape)
    torch.testing.assert_close(out, expected)


@dtypes
def test_gradient_of_sinks(dtype):
    """Dao-AILab/flash-attention#1973, #2102: learnable sinks got no gradient."""
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(1))
    assert_matches(
        call(b=2, h=4, hkv=2, sq=50, sk=70, dtype=dtype, gradients=("sinks",), sinks=sinks, causal=True, dropout=0.2, seed=1, offset=1)
    )


# Softcap


@dtypes
@pytest.mark.parametrize("softcap", [0.5, 15.0, 1e6])
def test_softcap_forward_and_backward(softcap, dtype):
    """Dao-AILab/flash-attention#2402, #1181, openxla/tokamax#1121: s tanh(s) was computed for c tanh(s/c), and the derivative was missing
    or wrong, also where tanh has saturated."""
    inputs = call(sq=60, sk=70, dtype=dtype, softcap=softcap, causal=True, gradients=("bias",), bias=torch.randn(1, 1, 60, 70).to(dtype))
    inputs.q = inputs.q * 12
    assert_matches(inputs)


# Block sparsity


@dtypes
@pytest.mark.parametrize("s", [1025, 129, 101])
def test_last_block_is_partial(s, dtype):
    """pytorch/pytorch#153799, #143534: with lengths that no block size divides and a changed score, the backward gave NaN."""
    n = -(-s // 64)
    kept = torch.tril(torch.ones(n, n, dtype=torch.bool))[None, None]
    blocks = strobe.BlockMask.from_kept(kept, 64, 64, s, s)
    assert_matches(call(h=1, sq=s, dtype=dtype, causal=True, block_mask=blocks, alibi_slopes=torch.tensor([0.01])))


@dtypes
def test_simple_block_mask(dtype):
    """pytorch/pytorch#141126: a diagonal of blocks is a batch of independent sequences."""
    blocks = strobe.BlockMask.from_kept(torch.eye(5, dtype=torch.bool)[None, None], 32, 32)
    sparse = call(sq=160, dtype=dtype, block_mask=blocks)
    assert_matches(sparse)
    cu = torch.arange(0, 161, 32, dtype=torch.int32)
    packed = call(sq=160, dtype=dtype, cu_seqlens_q=cu, cu_seqlens_k=cu)
    for name in ("q", "k", "v", "dout"):
        setattr(packed, name, getattr(sparse, name)[0].transpose(0, 1))
    packed.dlse = sparse.dlse[0]
    yardstick = Yardstick(sparse)
    for engine, results in runs(packed):
        faults = yardstick.faults({name: (t if name == "lse" else t.transpose(0, 1))[None] for name, t in results.items()})
        assert not faults, "\n".join([engine, *faults])


# Autograd


@engines
@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "sinks", "qv", "kb"])
def test_some_gradients_only(wanted, engine):
    """A gradient does not depend on which others are asked for."""
    inputs = on_device(call(sq=50, sk=70, gradients=("bias", "sinks"), bias=torch.randn(1, 2, 50, 70), sinks=torch.randn(2)), DEVICE)
    every = run(inputs, engine, **BITS)
    names = {"bias": ["bias"], "sinks": ["sinks"]}.get(wanted, [{"b": "bias"}.get(c, c) for c in wanted])
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **inputs.options}
    leaves = {name: tensors[name].clone().requires_grad_() for name in names}
    call_with = {**tensors, **leaves, **BITS}
    q, k, v = (call_with.pop(name) for name in "qkv")
    with running_on(engine):
        out, lse = strobe.attention(q, k, v, return_lse=True, engine=engine, **call_with)
        found = torch.autograd.grad([out, lse], list(leaves.values()), [inputs.dout, inputs.dlse])
    for name, t in zip(names, found, strict=True):
        assert torch.equal(t.cpu(), every["d" + name]), name


def test_what_is_negated_lazily_is_read_negated():
    """z.conj().imag is negated lazily: its memory holds the numbers before their sign is changed."""
    z = torch.randn(1, 2, 40, 16, dtype=torch.complex64)
    q, (k, v) = z.conj().imag, torch.randn(2, 1, 2, 40, 16)
    assert q.is_neg()
    for _ in range(2):  # the second call is a remembered call
        assert torch.equal(strobe.attention(q, k, v), strobe.attention(q.resolve_neg(), k, v))

    leaves = [x.clone().requires_grad_() for x in (q.resolve_neg(), k, v)]

    def gradients(dout):
        return torch.autograd.grad(strobe.attention(*leaves), leaves, dout)

    dout = torch.randn(1, 2, 40, 16, dtype=torch.complex64).conj().imag
    for a, b in zip(gradients(dout), gradients(dout.resolve_neg()), strict=True):
        assert torch.equal(a, b)


def _reference_backward(q, k, v, dout):
    out, lse = strobe.reference(q, k, v)
    return strobe.reference_backward(dout, q, k, v, out, lse)[:3]


def _attention_backward(q, k, v, dout):
    out, lse = strobe.attention(q, k, v, return_lse=True)
    return strobe.attention_backward(dout, q, k, v, out, lse)[:3]


@pytest.mark.parametrize("lazily", [torch._neg_view, lambda x: torch._efficientzerotensor(x.shape)], ids=["negated", "zeros"])
@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v, dout: strobe.reference(q, k, v),
        _reference_backward,
        _attention_backward,
        lambda q, k, v, dout: (strobe.attention(q, k, v, bias=dout[..., :1]),),
        lambda q, k, v, dout: (strobe.explain(q, k, v),),
    ],
    ids=["reference", "reference_backward", "attention_backward", "attention", "explain"],
)
def test_what_is_lazy_is_read_as_what_it_stands_for(function, lazily):
    q, k, v, dout = map(lazily, torch.randn(4, 1, 2, 40, 16))
    found, expected = function(q, k, v, dout), function(*(x.clone() for x in (q, k, v, dout)))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_what_is_lazy_among_integers():
    rng = torch.tensor([3, 4])
    assert torch.equal(strobe.dropout_mask((1, 1, 64, 64), 0.5, rng=torch._neg_view(-rng)), strobe.dropout_mask((1, 1, 64, 64), 0.5, 3, 4))
    rows, cols = (torch._neg_view(-torch.tensor(x, dtype=torch.int32)) for x in ([[[0, 1, 3]]], [0, 0, 1]))
    assert strobe.BlockMask(rows, cols, 32, 32, 16, 16).to_kept().tolist() == [[[[True, False], [True, True]]]]


@pytest.mark.filterwarnings("ignore")
def test_a_trace_holds_the_operator():
    def attend(q, k, v):
        return strobe.attention(q, k, v) * 1

    example, other = torch.randn(2, 3, 1, 2, 20, 8)
    traced = torch.jit.trace(attend, tuple(example), check_trace=False)
    torch.testing.assert_close(traced(*other), attend(*other))
