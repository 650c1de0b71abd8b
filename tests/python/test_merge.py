"""strobe.merge(): attentions over parts of the keys, when merged, give the attention over all keys."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import strobe


def parts(q, k, v, at: int, axis: int, **options):
    """out and lse over the keys before and after `at`, as the arguments of merge."""
    before, after = (slice(None),) * axis + (slice(0, at),), (slice(None),) * axis + (slice(at, None),)
    return *strobe.attention(q, k[before], v[before], return_lse=True, **options), *strobe.attention(
        q, k[after], v[after], return_lse=True, **options
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_two_parts_are_the_whole(layout, dtype):
    torch.manual_seed(0)
    shape = (2, 3, 20, 16) if layout == "bhsd" else (2, 20, 3, 16)
    q, k, v = (torch.randn(shape).to(dtype) for _ in range(3))
    options = {"layout": layout, "engine": "reference"}  # so that every rounding is merge's own, or that of its inputs
    halves = parts(q, k, v, 7, 2 if layout == "bhsd" else 1, **options)
    out, lse = strobe.merge(*halves, layout=layout)
    expected, expected_lse = strobe.attention(q, k, v, return_lse=True, **options)
    assert (out.dtype, lse.dtype) == (dtype, expected_lse.dtype)
    largest = max(x.abs().max() for x in (halves[0], halves[2]))
    rounding = 2 * torch.finfo(dtype).eps * float(largest)  # the rounding of the parts, of the whole and of the merged result
    torch.testing.assert_close(out, expected, atol=rounding, rtol=0)
    torch.testing.assert_close(lse, expected_lse)


def test_packed():
    q, k, v = (torch.randn(12, 3, 8) for _ in range(3))
    cu = torch.tensor([0, 12], dtype=torch.int32)

    def attention(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        n = torch.tensor([0, len(k[keys])], dtype=torch.int32)
        return strobe.attention(q, k[keys], v[keys], cu_seqlens_q=cu, cu_seqlens_k=n, return_lse=True)

    found = strobe.merge(*attention(slice(0, 5)), *attention(slice(5, 12)))
    for x, y in zip(found, attention(slice(0, 12)), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients_are_those_of_the_whole(layout):
    torch.manual_seed(0)
    shape = (1, 2, 6, 8) if layout == "bhsd" else (1, 6, 2, 8)
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3))
    found = strobe.merge(*parts(q, k, v, 2, 2 if layout == "bhsd" else 1, layout=layout), layout=layout)
    expected = strobe.attention(q, k, v, layout=layout, return_lse=True)
    incoming = [torch.randn_like(x) for x in expected]
    for x, y in zip(torch.autograd.grad(found, (q, k, v), incoming), torch.autograd.grad(expected, (q, k, v), incoming), strict=True):
        torch.testing.assert_close(x, y)


def test_gradcheck():
    torch.manual_seed(0)
    outs = [torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    lses = [10 * torch.randn(1, 2, 3, dtype=torch.float64).requires_grad_() for _ in range(2)]
    assert torch.autograd.gradcheck(strobe.merge, (outs[0], lses[0], outs[1], lses[1]))


def test_parts_without_keys():
    """An lse of -inf on one side leaves the other side; on both sides it gives output 0, lse -inf and no gradient."""
    torch.manual_seed(0)
    out_a, out_b = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(2))
    inf = -torch.inf
    lse_a = torch.tensor([[[0.5, inf, 1.0, inf]]], requires_grad=True)
    lse_b = torch.tensor([[[inf, 2.0, 1.0, inf]]], requires_grad=True)
    out, lse = strobe.merge(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out[..., 0, :], out_a[..., 0, :])
    assert torch.equal(out[..., 1, :], out_b[..., 1, :])
    torch.testing.assert_close(out[..., 2, :], (out_a + out_b)[..., 2, :] / 2)
    assert (out[..., 3, :] == 0).all()
    torch.testing.assert_close(lse, torch.tensor([[[0.5, 2.0, 1.0 + np.log(2), inf]]]).float())
    gradients = torch.autograd.grad((out.sum() + lse[..., :3].sum()), (out_a, lse_a, out_b, lse_b))
    assert all(x.isfinite().all() for x in gradients)
    assert all((x[..., 3] == 0).all() for x in (gradients[1], gradients[3]))


GARBAGE = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("pair", [False, True], ids=["one number", "pairs"])
@pytest.mark.parametrize("empty", ["a", "b"])
@pytest.mark.parametrize("shape", ["bhsd", "bshd", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_what_lies_in_the_out_of_a_part_without_keys_reaches_nothing(dtype, shape, empty, pair):
    """The out of such a part need not have been written: neither the result, with sinks or without, nor a gradient depends on it."""
    torch.manual_seed(0)
    layout = "bshd" if shape == "bshd" else "bhsd"
    outs = {name: torch.randn({"bhsd": (1, 2, 3, 4), "bshd": (1, 3, 2, 4), "packed": (3, 2, 4)}[shape]).to(dtype) for name in "ab"}
    lses = {name: torch.randn((2, 3) if shape == "packed" else (1, 2, 3)) for name in "ab"}
    lses[empty][..., 1] = lses["a"][..., 2] = lses["b"][..., 2] = -torch.inf  # the last row is in neither part

    def merged(garbage: float, **options: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        given = []
        for name in "ab":
            out, lse = outs[name].clone(), lses[name]
            row = lse == -torch.inf
            out[row if shape == "bhsd" else row.transpose(-1, -2)] = garbage
            given += [out, torch.stack([lse, torch.zeros_like(lse)]) if pair else lse]
        given = [x.clone().requires_grad_() for x in given]
        found = strobe.merge(*given, layout=layout, **options)
        weights = [torch.linspace(1, 2, x.numel()).view(x.shape).to(x.dtype) for x in found]
        loss = (found[0] * weights[0]).sum().float() + torch.where(found[1].isfinite(), found[1] * weights[1], 0).sum()
        return [x.detach() for x in found], list(torch.autograd.grad(loss, given))

    for options in ({}, {"sinks": torch.zeros(2)}):
        expected = merged(0.0, **options)
        assert all(x.isfinite().all() for x in expected[1])
        for garbage in GARBAGE:
            found = merged(garbage, **options)
            for x, y in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
                assert torch.equal(x, y)


@pytest.mark.parametrize("empty", [0, 2])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_numpy_reads_no_out_of_a_part_without_keys(dtype, layout, empty):
    rng = np.random.default_rng(0)
    shape = {"bhsd": (1, 2, 3, 4), "bshd": (1, 3, 2, 4), "packed": (3, 2, 4)}[layout]
    of = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    given = [rng.standard_normal(shape).astype(of), np.zeros((2, 3) if layout == "packed" else (1, 2, 3), np.float32)] * 2
    given = [x.copy() for x in given]
    given[empty + 1][..., 1] = -np.inf
    row = (..., 1, slice(None)) if layout == "bhsd" else (..., 1, slice(None), slice(None))
    results = []
    for garbage in (0.0, *GARBAGE):
        given[empty][row] = garbage
        with np.errstate(all="raise"):
            results.append(strobe.merge(*given, layout="bshd" if layout == "bshd" else "bhsd"))
        assert results[-1][0].dtype == given[0].dtype
        for x, y in zip(results[-1], results[0], strict=True):
            np.testing.assert_array_equal(x.astype(np.float64), y.astype(np.float64))
    np.testing.assert_array_equal(results[0][0][row].astype(np.float64), given[2 - empty][row].astype(np.float64))


def test_an_infinite_lse_makes_its_row_nan_until_it_is_replaced():
    """flash-attn writes +inf where a query sees no key."""
    out_a, out_b = torch.randn(2, 1, 1, 2, 4)
    lse_a, lse_b = torch.tensor([[[torch.inf, 1.0]]]), torch.tensor([[[2.0, torch.inf]]])
    out, lse = strobe.merge(out_a, lse_a, out_b, lse_b)
    assert out.isnan().all()
    assert lse.isnan().all()
    lse_a, lse_b = (x.masked_fill(x == torch.inf, -torch.inf) for x in (lse_a, lse_b))
    out, lse = strobe.merge(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out, torch.stack([out_b[0, 0, 0], out_a[0, 0, 1]])[None, None])
    assert torch.equal(lse, torch.tensor([[[2.0, 1.0]]]))


def test_a_nan_in_the_out_of_a_part_with_keys_is_seen():
    """A NaN that a query sees propagates, however small its weight is."""
    nan = torch.full((1, 1, 1, 4), torch.nan)
    out, _ = strobe.merge(nan, torch.full((1, 1, 1), -1e4), torch.ones(1, 1, 1, 4), torch.zeros(1, 1, 1))
    assert out.isnan().all()


def test_far_apart():
    """Logits of 1e4 neither overflow nor get a wrong weight."""
    out_a, out_b = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
    lse_a, lse_b = torch.tensor([[[1e4, -1e4, 1e4]]]), torch.tensor([[[-1e4, 1e4, 1e4]]])
    out, lse = strobe.merge(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out[..., 0, :], out_a[..., 0, :])
    assert torch.equal(out[..., 1, :], out_b[..., 1, :])
    torch.testing.assert_close(out[..., 2, :], (out_a + out_b)[..., 2, :] / 2)
    assert torch.equal(lse, torch.tensor([[[1e4, 1e4, 1e4 + np.float32(np.log(2))]]]))


def test_numpy():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 10, 3, 8)).astype(np.float32) for _ in range(3))
    out, lse = strobe.merge(*parts(q, k, v, 4, 1, layout="bshd"), layout="bshd")
    expected = strobe.attention(q, k, v, layout="bshd", return_lse=True)
    assert isinstance(out, np.ndarray)
    assert (out.dtype, lse.dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(out, expected[0], atol=1e-6)
    np.testing.assert_allclose(lse, expected[1], atol=1e-6)
    with np.errstate(all="raise"):
        out, lse = strobe.merge(out, np.full_like(lse, -np.inf), out, np.full_like(lse, -np.inf), layout="bshd")
    assert (out == 0).all()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_partial_result_and_an_ordinary_one(layout):
    """The first argument determines the form of the result. If it is the partial one, a partial part's backward accepts the result."""
    torch.manual_seed(0)
    axis = 2 if layout == "bhsd" else 1
    q, k, v = (torch.randn((1, 2, 40, 16) if layout == "bhsd" else (1, 40, 2, 16)).bfloat16() for _ in range(3))
    (k_a, k_b), (v_a, v_b) = (x.split([16, 24], axis) for x in (k, v))
    part = strobe.Part([(0, 40)], [(0, 16)], 40, 40, partial=True)
    options = {"layout": layout, "engine": "reference"}
    partial = strobe.attention(q, k_a, v_a, part=part, return_lse=True, **options)
    ordinary = strobe.attention(q, k_b, v_b, return_lse=True, **options)
    expected, expected_lse = strobe.attention(*(x.float() for x in (q, k, v)), return_lse=True, **options)
    of_partial, of_ordinary = (strobe.merge(*a, *b, layout=layout) for a, b in ((partial, ordinary), (ordinary, partial)))
    assert [(x.dtype, x.shape) for x in of_partial] == [(torch.float32, q.shape), (torch.float32, (2, 1, 2, 40))]
    assert [(x.dtype, x.shape) for x in of_ordinary] == [(torch.bfloat16, q.shape), (torch.float32, (1, 2, 40))]
    for (out, _), lse in ((of_partial, of_partial[1].sum(0)), (of_ordinary, of_ordinary[1])):
        torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0)  # the ordinary result is rounded to bfloat16
        torch.testing.assert_close(lse, expected_lse)
    delta = torch.ones(1, 2, 40)
    strobe.attention_backward(q, q, k_a, v_a, None, of_partial[1], delta=delta, part=part, **options)
    with pytest.raises(ValueError, match="^lse: rank 3; accepted is rank 4"):
        strobe.attention_backward(q, q, k_a, v_a, None, of_ordinary[1], delta=delta, part=part, **options)


def test_compile():
    torch._dynamo.reset()
    arguments = [torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6)]
    for x, y in zip(torch.compile(strobe.merge, fullgraph=True, backend="aot_eager")(*arguments), strobe.merge(*arguments), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("out_a", {"out_a": [1.0]}),
        ("out_a", {"out_a": torch.zeros(2, 3)}),
        ("out_b", {"out_b": np.zeros((1, 2, 6, 8), np.float32)}),
        ("out_b", {"out_b": torch.zeros(1, 2, 6, 7)}),
        ("lse_a", {"lse_a": torch.zeros(1, 6, 2)}),
        ("lse_b", {"lse_b": torch.zeros(1, 2, 6, 1)}),
        ("lse_b", {"lse_b": None}),
        ("layout", {"layout": "bsdh"}),
    ],
)
def test_bad_arguments(name, wrong):
    good = {
        "out_a": torch.zeros(1, 2, 6, 8),
        "lse_a": torch.zeros(1, 2, 6),
        "out_b": torch.zeros(1, 2, 6, 8),
        "lse_b": torch.zeros(1, 2, 6),
    }
    strobe.merge(**good)
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: .*accepted"):
        strobe.merge(**good | wrong)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sinks_of_16_bits_are_their_values(dtype):
    torch.manual_seed(4)
    out, lse, sinks = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3), torch.randn(2).to(dtype).requires_grad_()
    found, expected = (strobe.merge(out, lse, out, lse, sinks=x) for x in (sinks, sinks.float()))
    assert all(map(torch.equal, found, expected))
    (grad,) = torch.autograd.grad(found[0].sum(), sinks)
    assert grad.dtype == dtype
    assert grad.any()
    as_numpy = strobe.merge(*(x.numpy() for x in (out, lse, out, lse)), sinks=sinks.detach().float().numpy().astype(ml_dtypes.bfloat16))
    if dtype == torch.bfloat16:
        np.testing.assert_allclose(as_numpy[0], expected[0].detach().numpy(), rtol=1e-6, atol=1e-6)
