"""seqused_k: sequences that use only some of the keys that a tensor, or a packed sequence, has room for."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import strobe
from cases import Inputs, call
from check import Yardstick, run, run_or_skip
from device import DEVICE, EMULATED, ON_GPU, on_device, running_on
from engines import available_engines

engines = pytest.mark.parametrize("engine", available_engines())
SK = 150
USED = [SK, 0, 1, 77]
GRADIENTS = ("dk", "dv")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _ramp(*shape: int) -> Tensor:
    return torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float32)).view(shape)


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"causal": True},
    "causal top left": {"causal": True, "alignment": "top_left", "deterministic": True},
    "window": {"window": (40, 3), "alignment": "bottom_right"},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.02, 0.3, 0.05]), "causal": True},
    "dropout": {"dropout": 0.3, "seed": 3, "causal": True},
    "bias": {"bias": _ramp(1, 4, 37, SK)},
    "bias of keys": {"bias": _ramp(4, 1, 1, SK), "causal": True},
    "mask": {"mask": _ramp(4, 1, 37, SK) > -0.4, "causal": True},
    "blocks": {"block_mask": strobe.BlockMask.from_kept(_ramp(4, 1, 3, 10) > -0.6, 16, 16, 37, SK), "deterministic": True},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0]), "softcap": 20.0},
    "deterministic": {"causal": True, "deterministic": True},
}


def spoiled(inputs: Inputs, behind: float = torch.nan) -> Inputs:
    """The call with `behind` in the keys and values that do not count."""
    k, v = inputs.k.clone(), inputs.v.clone()
    used = inputs.options["seqused_k"].tolist()
    for t in (k, v):
        if inputs.varlen:
            cu = inputs.options["cu_seqlens_k"].tolist()
            for b, n in enumerate(used):
                t[cu[b] + n : cu[b + 1]] = behind
            t[cu[-1] :] = behind
        else:
            for b, n in enumerate(used):
                t[b, :, n:] = behind
    return dataclasses.replace(inputs, k=k, v=v)


def assert_counts(inputs: Inputs, engine: str, behind: float = torch.nan) -> None:
    """Checks the contract's bounds, whatever lies after the keys that count, and that gradients there are exactly 0."""
    yardstick = Yardstick(inputs)
    there = spoiled(inputs, behind)
    results = run_or_skip(there, engine)
    assert not yardstick.faults(results)
    for name, x in zip(GRADIENTS, (there.k, there.v), strict=True):
        assert (results[name][x.isnan()] == 0).all(), name


def dense(dtype: torch.dtype, d: int, **options: Any) -> Inputs:
    options = {name: x.to(dtype) if name == "bias" else x for name, x in options.items()}
    gradients = tuple(name for name in ("bias", "sinks") if name in options)
    return call(b=4, h=4, hkv=2, sq=37, sk=SK, d=d, dtype=dtype, gradients=gradients, seqused_k=ints(*USED), **options)


@engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_dense(name, dtype, engine):
    assert_counts(dense(dtype, 64, **OPTIONS[name]), engine)


@engines
@pytest.mark.parametrize(("dtype", "d"), [(torch.float64, 24), (torch.float16, 128), (torch.bfloat16, 256)], ids=str)
def test_other_widths(dtype, d, engine):
    assert_counts(dense(dtype, d, causal=True), engine)


@engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["nothing", "causal", "window", "alibi", "sinks", "dropout", "deterministic"])
def test_packed(name, dtype, engine):
    """Padding lies between the used keys of two sequences, and after the last ones."""
    options = OPTIONS[name] | {"cu_seqlens_q": ints(0, 37, 37, 60, 90), "cu_seqlens_k": ints(0, 90, 130, 131, 200)}
    gradients = ("sinks",) if name == "sinks" else ()
    inputs = call(
        h=4, hkv=2, sq=90, sk=211, d=64, dtype=dtype, gradients=gradients, seqused_k=ints(90, 17, 0, 50), max_seqlen_q=37, max_seqlen_k=90,
        **options,
    )  # fmt: skip
    assert_counts(inputs, engine)


@engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("sq", "options"), [(1, {}), (1, {"mask": _ramp(3, 1, 1, 1100) > -0.5}), (4, {"causal": True})], ids=str)
def test_few_queries(sq, options, dtype, engine):
    """A cache that is partly filled; a GPU splits its keys among thread blocks, of which some get none."""
    inputs = call(b=3, h=4, hkv=1, sq=sq, sk=1100, d=64, dtype=dtype, seqused_k=ints(1100, 300, 5), **options)
    assert_counts(inputs, engine)


@engines
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize(("sq", "options"), [(1, {"sinks": torch.tensor([0.5, -1.0, 2.0, 9.0])}), (3, {"causal": True})], ids=["1", "3"])
def test_decoding_over_uneven_lengths(sq, options, page, dtype, engine):
    """A GPU divides the keys of all sequences into equal shares: the longest has many, others one, and each row's shares are merged."""
    used = [2048, 0, 1, 777, 1300, *(n * n % 61 for n in range(36)), 1999]
    inputs = call(b=len(used), h=4, hkv=2, sq=sq, sk=2048, d=64, dtype=dtype, dlse=False, seqused_k=ints(*used), **options)
    there = spoiled(inputs)
    if page:
        there = dataclasses.replace(there, page=page)
    with torch.no_grad(), running_on(engine):
        handed = on_device(there.handed(), DEVICE)
        try:
            out, lse = strobe.attention(handed.q, handed.k, handed.v, engine=engine, return_lse=True, **handed.options)
        except NotImplementedError as refusal:
            pytest.skip(str(refusal))
    expected, expected_lse = strobe.reference(inputs.q, inputs.k, inputs.v, **inputs.options)
    step = 2.0**-10 if dtype == torch.float16 else 2.0**-7
    for b in range(len(used)):
        torch.testing.assert_close(out[b].cpu().double(), expected[b], rtol=0, atol=float(2 * step * expected[b].abs().max()))
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-4, atol=1e-4)


@engines
@pytest.mark.parametrize(
    "used", [[0] * 5, [-7, 700, 2**31 - 1], [600] * 129, [300 * (n == 140) for n in range(150)]], ids=["0", "any", "=", "1"]
)
def test_decoding_over_other_lengths(used, engine):
    """Lengths that are all 0, or clamped because they are out of bounds, or equal; more sequences than a warp reads at once, or one."""
    b, sk = len(used), 640
    g = torch.Generator().manual_seed(b)
    q, k, v = (torch.randn(b, 1, n, 64, generator=g).bfloat16() for n in (1, sk, sk))
    lengths = ints(*used)
    there = [x.to(DEVICE) for x in (q, k, v, lengths)]
    with torch.no_grad(), running_on(engine):
        try:
            out, lse = strobe.attention(*there[:3], seqused_k=there[3], engine=engine, return_lse=True)
        except (NotImplementedError, ValueError) as refusal:  # in host memory, lengths out of bounds are refused
            pytest.skip(str(refusal))
    seen = torch.arange(sk) < lengths[:, None]
    s = (q.double() @ k.double().transpose(2, 3) / 8).masked_fill(~seen[:, None, None], -torch.inf)
    expected = s.softmax(3).nan_to_num(0) @ v.double()
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=2.0**-6)
    torch.testing.assert_close(lse.cpu().double(), s.logsumexp(3), rtol=1e-4, atol=1e-4)


def test_explain_says_that_keys_are_shared_out():
    if not ON_GPU:
        pytest.skip("of a GPU engine")
    k = torch.zeros(8, 8, 16384, 128, dtype=torch.bfloat16, device=DEVICE)
    used = torch.full((8,), 100, dtype=torch.int32, device=DEVICE)
    with running_on(None):
        for sq, shared_out in ((1, True), (16, True), (17, False)):  # shares are made for up to 64 queries of a key head
            q = torch.zeros(8, 32, sq, 128, dtype=torch.bfloat16, device=DEVICE)
            assert ("keys shared out evenly" in strobe.explain(q, k, k, seqused_k=used)) is shared_out
            assert "shared out" not in strobe.explain(q, k, k, seqused_k=used, window=(1024, 0))


@engines
def test_nothing_counts(engine):
    inputs = call(b=2, sq=40, sk=70, d=64, dtype=torch.bfloat16, sinks=torch.zeros(2), seqused_k=ints(0, 0), gradients=("sinks",))
    assert_counts(inputs, engine)
    inputs = call(b=2, sq=40, sk=70, d=64, dlse=False, dtype=torch.float32, seqused_k=ints(0, 0))
    results = run_or_skip(spoiled(inputs), engine)
    assert (results["lse"] == -torch.inf).all()
    assert all((results[name] == 0).all() for name in ("out", "dq", "dk", "dv"))


@engines
@pytest.mark.parametrize("behind", [torch.inf, torch.finfo(torch.bfloat16).max], ids=str)
def test_infinite_and_large_numbers_behind(behind, engine):
    inputs = dense(torch.bfloat16, 64, causal=True)
    results, expected = (run_or_skip(x, engine) for x in (spoiled(inputs, behind), inputs))
    for name, x in results.items():
        assert torch.allclose(x.float(), expected[name].float(), rtol=2**-6, atol=2**-6), name


def test_all_keys_count_as_if_none_was_said():
    inputs = dense(torch.float32, 64, causal=True)
    plain = dataclasses.replace(inputs, options={name: x for name, x in inputs.options.items() if name != "seqused_k"})
    full = dataclasses.replace(inputs, options=inputs.options | {"seqused_k": ints(*[SK] * 4)})
    for (name, x), y in zip(run(plain, deterministic=True).items(), run(full, deterministic=True).values(), strict=True):
        assert torch.equal(x, y), name


def test_a_call_that_comes_again_reads_the_lengths_anew():
    """From the third time on the call is a prepared one."""
    inputs = on_device(dense(torch.float32, 16), DEVICE)
    used = inputs.options["seqused_k"]
    with running_on(None):
        for counts in (USED, [1, 2, 3, 4], [SK] * 4, [0] * 4, USED):
            used.copy_(ints(*counts))
            q, k, v = (x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
            out = strobe.attention(q, k, v, seqused_k=used)
            out.backward(inputs.dout)
            for b, n in enumerate(counts):
                alone = strobe.attention(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])
                assert torch.allclose(out[b], alone[0], atol=1e-5)
                assert (k.grad[b, :, n:] == 0).all()


@pytest.mark.skipif(EMULATED, reason="of PyTorch's CPU and GPU alone")
def test_a_list_in_host_memory():
    """With GPU tensors the list is copied in each call."""
    inputs = on_device(dense(torch.float32, 16), DEVICE)
    used = inputs.options["seqused_k"].cpu()
    for counts in (USED, [5, 6, 7, 8], [9, 0, 1, SK], USED):
        used.copy_(ints(*counts))
        out = strobe.attention(inputs.q, inputs.k, inputs.v, seqused_k=used)
        assert torch.equal(out, strobe.attention(inputs.q, inputs.k, inputs.v, seqused_k=used.to(DEVICE)))
    message = rf"^seqused_k: {SK + 1} at \[2\]; accepted are 0 to {SK}, the length of k$"
    with pytest.raises(ValueError, match=message):
        strobe.attention(inputs.q, inputs.k, inputs.v, seqused_k=ints(0, 1, SK + 1, 2))


@engines
def test_bad_lengths_in_device_memory_read_nothing_beyond(engine):
    """Bad lengths count as the nearest valid ones."""
    if not engine.startswith("cuda"):
        pytest.skip("in host memory they are refused")
    inputs = dense(torch.bfloat16, 64, causal=True)
    bad = dataclasses.replace(inputs, options=inputs.options | {"seqused_k": ints(SK + 9, -3, 1, 77)})
    expected = run_or_skip(inputs, engine, deterministic=True)
    for name, x in run(bad, engine, deterministic=True).items():
        assert torch.equal(x, expected[name]), name
    with pytest.raises(ValueError, match=rf"^seqused_k: {SK + 9} at \[0\]; accepted are 0 to {SK}, the length of k$"):
        run(bad, engine, check=True)


PACKED = {"cu_seqlens_q": ints(0, 3, 8), "cu_seqlens_k": ints(0, 10, 12)}


@pytest.mark.parametrize(
    ("used", "options", "message"),
    [
        (ints(0, 21), {}, r"^seqused_k: 21 at \[1\]; accepted are 0 to 20, the length of k$"),
        (ints(-1, 20), {}, r"^seqused_k: -1 at \[0\]; accepted are 0 to 20, the length of k$"),
        (ints(10, 3), PACKED, r"^seqused_k: 3 at \[1\]; accepted are 0 to 2, the length of that sequence's keys$"),
        (ints(1, 2, 3), {}, r"^seqused_k: shape \(3\); accepted is \(B\) = \(2\)$"),
        (torch.tensor([1, 2**32]), {}, r"^seqused_k: 4294967296 at \[1\]; accepted are 0 to 20, the length of k$"),
        (torch.tensor([1, 2]).short(), {}, r"^seqused_k: dtype torch.int16; accepted is int32, int64; seqused_k\.int\(\)$"),
        ([1, 2], {}, r"^seqused_k: list; accepted is a torch.Tensor"),
    ],
    ids=str,
)
def test_refusals(used, options, message):
    shape_q, shape_k = ((8, 2, 16), (12, 1, 16)) if options else ((2, 2, 5, 16), (2, 1, 20, 16))
    q, k = torch.randn(shape_q), torch.randn(shape_k)
    with pytest.raises((TypeError, ValueError), match=message):
        strobe.attention(q, k, k, seqused_k=used, **options)


def test_the_rungs_of_the_ladder_refuse():
    q = torch.randn(1, 1, 5, 16)
    with pytest.raises(NotImplementedError, match="no seqused_k: all keys count"):
        strobe.attention(q, q, q, seqused_k=ints(3), engine="ladder-flash2")


def test_numpy_and_words():
    q, k = (np.random.default_rng(0).standard_normal(s).astype(np.float32) for s in ((2, 2, 5, 16), (2, 1, 20, 16)))
    used = np.array([20, 7], np.int32)
    out = strobe.attention(q, k, k, seqused_k=used, causal=True)
    np.testing.assert_allclose(out[1:], strobe.attention(q[1:], k[1:, :, :7], k[1:, :, :7], causal=True), atol=1e-6)
    assert "seqused_k" in strobe.explain(q, k, k, seqused_k=used)


def test_explain_speaks_of_the_last_key_that_counts():
    q, k = torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 8, 16)
    assert "the last query sees the last key\n" in strobe.explain(q, k, k, causal=True)
    used = torch.tensor([5], dtype=torch.int32)
    assert "the last query sees the last key that counts\n" in strobe.explain(q, k, k, causal=True, seqused_k=used)
    assert "that counts" not in strobe.explain(q, k, k, causal=True, seqused_k=used, alignment="top_left")


def test_rows_and_columns_of_the_reference():
    inputs = dense(torch.float32, 16, causal=True)
    given = (inputs.q, inputs.k, inputs.v)
    out, lse = strobe.reference(*given, **inputs.options)
    rows = [0, 40, 37 * 9 + 5]
    some, _ = strobe.reference(*given, rows=rows, **inputs.options)
    assert torch.equal(some.view(-1, 16)[rows], out.view(-1, 16)[rows])
    cols = [3, SK * 2 * 3 + 76, SK * 7 + 2]
    for known in ((None, None), (out, lse)):
        found = strobe.reference_backward(inputs.dout, *given, *known, cols=cols, rows=rows, **inputs.options)
        whole = strobe.reference_backward(inputs.dout, *given, **inputs.options)
        assert torch.allclose(found.dk.view(-1, 16)[cols], whole.dk.view(-1, 16)[cols], atol=1e-12)


def test_compiled():
    inputs = dense(torch.float32, 16)

    def attend_to(q: Tensor, k: Tensor, v: Tensor, used: Tensor) -> Tensor:
        return strobe.attention(q, k, v, causal=True, seqused_k=used)

    attend = torch.compile(attend_to, backend="aot_eager", fullgraph=True)
    q, k, v = (x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    for used in (ints(*USED), ints(1, 2, 3, 4)):
        found = torch.autograd.grad(attend(q, k, v, used).sum(), (q, k, v))
        expected = torch.autograd.grad(strobe.attention(q, k, v, causal=True, seqused_k=used).sum(), (q, k, v))
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.skipif(DEVICE != "cpu", reason="the reference runs on the CPU")
def test_the_reference_writes_keys_that_do_not_count():
    """Such keys get 0 if a selection has them, also if it selects queries only."""
    q, k, v, dout = (torch.randn(1, 1, n, 8) for n in (3, 6, 6, 3))
    used = torch.tensor([2], dtype=torch.int32)
    for selection in ({"rows": [0]}, {"cols": [1, 4]}):
        memory = [torch.full((1, 1, 6, 8), 7.0, dtype=torch.float64) for _ in range(40)]
        del memory  # what is left unwritten holds 7
        found = strobe.reference_backward(dout, q, k, v, seqused_k=used, **selection)
        hidden = [4] if "cols" in selection else [2, 3, 4, 5]
        assert (found.dk[0, 0, hidden] == 0).all()
        assert (found.dv[0, 0, hidden] == 0).all()
