"""Hyperbolic attention and the maps between the models of hyperbolic space, against their formulas written out."""

from __future__ import annotations

import itertools
import re
import tracemalloc

import numpy as np
import pytest
import torch
from torch import Tensor

import strobe
from check import takes
from device import DEVICE
from engines import available_engines
from strobe import hyperbolic as h

MODELS, AGGREGATES = ("lorentz", "poincare"), ("centroid", "midpoint")


def ball(*shape: int, radius: float = 0.9) -> Tensor:
    """Points of the unit ball, uniform in their distance from its centre."""
    x = torch.randn(shape, dtype=torch.float64)
    return radius * torch.rand(*shape[:-1], 1, dtype=torch.float64) * x / x.norm(dim=-1, keepdim=True)


def poincare_distance(x: Tensor, y: Tensor) -> Tensor:
    gap = ((x - y) ** 2).sum(-1)
    return torch.acosh(1 + 2 * gap / ((1 - (x**2).sum(-1)) * (1 - (y**2).sum(-1))))


def formulas(q: Tensor, k: Tensor, v: Tensor, beta: float, c: float, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """q, k and v: (B, H, S, n), points of Poincaré's ball. Distances by the ball's own formula; Einstein's midpoint in Klein's model, as
    Gulcehre et al. write it."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = -beta * poincare_distance(q[:, :, :, None], k[:, :, None]) - c
    if seen is not None:
        s = s.masked_fill(~seen, -torch.inf)
    klein = 2 * v / (1 + (v**2).sum(-1, keepdim=True))
    gamma = 1 / (1 - (klein**2).sum(-1)).sqrt()
    weights = s.softmax(-1) * gamma[:, :, None]
    mean = weights @ klein / weights.sum(-1, keepdim=True)
    return mean / (1 + (1 - (mean**2).sum(-1, keepdim=True)).sqrt()), s.logsumexp(-1)


# The space


def test_maps_lead_back_and_keep_distances():
    x, y = ball(50, 5), ball(50, 5)
    assert h.lorentz_product(h.poincare_to_lorentz(x), h.poincare_to_lorentz(x)).sub(-1).abs().max() < 1e-12
    ways = {
        "lorentz": h.lorentz_to_poincare(h.poincare_to_lorentz(x)),
        "klein": h.klein_to_poincare(h.poincare_to_klein(x)),
        "lorentz and klein": h.klein_to_poincare(h.lorentz_to_klein(h.poincare_to_lorentz(x))),
        "klein and lorentz": h.lorentz_to_poincare(h.klein_to_lorentz(h.poincare_to_klein(x))),
    }
    for way, back in ways.items():
        torch.testing.assert_close(back, x, msg=way, atol=1e-12, rtol=0)
    lifted = h.lift(h.poincare_to_lorentz(x)[:, 1:])
    torch.testing.assert_close(lifted, h.poincare_to_lorentz(x), atol=1e-12, rtol=0)
    torch.testing.assert_close(h.distance(h.poincare_to_lorentz(x), h.poincare_to_lorentz(y)), poincare_distance(x, y))
    origin = torch.zeros(1, 5, dtype=torch.float64)
    torch.testing.assert_close(h.distance(h.exp_map(4 * x), h.lift(origin)), 4 * x.norm(dim=-1))
    assert torch.equal(h.exp_map(origin), h.lift(origin))


@pytest.mark.parametrize(
    "function",
    [h.poincare_to_lorentz, h.klein_to_lorentz, h.poincare_to_klein, h.klein_to_poincare, h.lift, h.exp_map],
    ids=lambda f: f.__name__,
)
def test_gradients_of_maps_of_the_ball(function):
    x = ball(4, 3)
    x[0] = 0
    assert torch.autograd.gradcheck(function, x.requires_grad_())


@pytest.mark.parametrize("function", [h.lorentz_to_poincare, h.lorentz_to_klein, h.centroid], ids=lambda f: f.__name__)
def test_gradients_of_maps_of_the_hyperboloid(function):
    x = (3 * h.poincare_to_lorentz(ball(4, 3))).requires_grad_()
    assert torch.autograd.gradcheck(function, x)


def test_distance_has_gradient_0_at_0_and_hides_no_nan():
    x = h.poincare_to_lorentz(ball(6, 3))
    x[0] = torch.tensor([1.25, 0.75, 0, 0])  # its Lorentz product with itself is exactly -1
    x[1] = torch.nan
    q, k = x.clone().requires_grad_(), x.flip(0).clone().requires_grad_()
    assert h.distance(x[0], x[0]) == 0
    assert torch.autograd.grad(h.distance(x[0].clone().requires_grad_(), q[0]), q)[0].eq(0).all()
    assert h.distance(q, k).isnan().tolist() == [False, True, False, False, True, False]
    assert torch.autograd.gradcheck(h.distance, (q[2:4].detach().requires_grad_(), k[2:4].detach().requires_grad_()))


def test_numpy_has_the_same_maps():
    x = ball(20, 4)
    for name in ("poincare_to_lorentz", "klein_to_lorentz", "poincare_to_klein", "klein_to_poincare", "lift", "exp_map"):
        f = getattr(h, name)
        np.testing.assert_allclose(f(x.numpy()), f(x).numpy(), atol=1e-13)
    y = h.poincare_to_lorentz(x)
    for name in ("lorentz_to_poincare", "lorentz_to_klein", "centroid"):
        f = getattr(h, name)
        np.testing.assert_allclose(f(y.numpy()), f(y).numpy(), atol=1e-13)
    np.testing.assert_allclose(h.distance(y.numpy(), y.numpy()[::-1]), h.distance(y, y.flip(0)).numpy(), atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    x = ball(50, 5, radius=0.6).to(dtype)
    y = h.poincare_to_lorentz(x)
    assert y.dtype == dtype
    assert torch.equal(y, h.poincare_to_lorentz(x.float()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_and_distances_of_half_precision_are_rounded_once(dtype):
    """Far out the squares are large, and only their difference counts: in half precision it would be lost."""
    direction = torch.randn(50, 15, dtype=torch.float64)
    x = h.exp_map(3 * direction / direction.norm(dim=-1, keepdim=True)).to(dtype)
    y = x.flip(0)
    for function in (h.distance, h.lorentz_product):
        found, wide = function(x, y), function(x.float(), y.float())
        assert found.dtype == dtype
        assert torch.equal(found, wide.to(dtype))
        assert function(x, y.double()).dtype == torch.float64


POINTS = {name: getattr(h, name) for name in h.__all__ if name not in ("hyperbolic_attention", "distance", "lorentz_product")}


@pytest.mark.parametrize("function", [*POINTS.values(), h.distance, h.lorentz_product], ids=lambda f: f.__name__)
def test_what_no_point_can_be_is_refused(function):
    arguments = 2 if function in (h.distance, h.lorentz_product) else 1
    for x, dtype in ((torch.ones(3, dtype=torch.int64), "int64"), (np.ones(3, np.int32), "int32"), (torch.ones(3).bool(), "bool")):
        with pytest.raises(ValueError, match=f"^x: dtype {dtype}; accepted is float16, bfloat16, float32, float64$"):
            function(*[x] * arguments)
    for x, found in (([1.0, 0.0], "list"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"^x: {found}; accepted is a torch.Tensor or a numpy.ndarray$"):
            function(*[x] * arguments)
    with pytest.raises(ValueError, match="^x: a number; accepted are points"):
        function(*[torch.tensor(1.0)] * arguments)


@pytest.mark.parametrize("function", [h.distance, h.lorentz_product], ids=lambda f: f.__name__)
def test_two_points_fit_each_other(function):
    x = torch.ones(4, 3)
    for y, error, message in (
        (x.long(), ValueError, "dtype int64; accepted is"),
        (x.numpy(), TypeError, "numpy.ndarray; accepted is a torch.Tensor, as x is"),
        (x[:, :2], ValueError, "2 coordinates; accepted are 3, as x has"),
    ):
        with pytest.raises(error, match=f"^y: {message}"):
            function(x, y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_centroid_stays_on_the_hyperboloid(dtype):
    """Far out -<x, x>_L is a small difference of large squares, which rounding may take below 0."""
    x = h.lift(torch.linspace(0, 200, 300, dtype=torch.float64)[:, None] * torch.tensor([[0.6, -0.8]], dtype=torch.float64)).to(dtype)
    y = h.centroid(x)
    assert y.isfinite().all()
    time = (1 + (y[:, 1:].double() ** 2).sum(-1)).sqrt()
    assert ((y[:, 0].double() / time - 1).abs() <= 4 * torch.finfo(dtype).eps).all()
    near = time < 3
    assert ((y[near].double() - x[near].double()).norm(dim=-1) <= 30 * torch.finfo(dtype).eps * time[near]).all()


# Attention


@pytest.mark.parametrize(("model", "aggregate"), [*itertools.product(MODELS, AGGREGATES)])
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_attention_is_the_formulas(model, aggregate, heads_kv, layout):
    q, k, v = ball(2, 4, 9, 3), ball(2, heads_kv, 13, 3), ball(2, heads_kv, 13, 5)
    dout = torch.randn(2, 4, 9, 5, dtype=torch.float64)
    causal = torch.ones(9, 13, dtype=torch.bool).tril(4)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, lse = formulas(*leaves, 1.7, 0.3, causal)
    wanted = torch.autograd.grad(expected, leaves, dout)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    inputs = [x.transpose(1, 2) if layout == "bshd" else x for x in leaves]
    if model == "lorentz":
        inputs = [h.poincare_to_lorentz(x) for x in inputs]
    result, own_lse = strobe.hyperbolic_attention(
        *inputs, beta=1.7, c=0.3, model=model, aggregate=aggregate, layout=layout, causal=True, return_lse=True
    )
    if model == "lorentz":
        result = h.lorentz_to_poincare(result)
    result = result.transpose(1, 2) if layout == "bshd" else result
    torch.testing.assert_close(result, expected)
    for name, gradient, right in zip("qkv", torch.autograd.grad(result, leaves, dout), wanted, strict=True):
        torch.testing.assert_close(gradient, right, msg=f"d{name}", rtol=1e-6, atol=1e-9)
    if aggregate == "centroid":
        torch.testing.assert_close(own_lse, lse)
    else:  # the bias log gamma is included
        gamma = h.poincare_to_lorentz(v)[..., 0].repeat_interleave(4 // heads_kv, 1)
        s = -1.7 * poincare_distance(q[:, :, :, None], k.repeat_interleave(4 // heads_kv, 1)[:, :, None]) - 0.3 + gamma[:, :, None].log()
        torch.testing.assert_close(own_lse, s.masked_fill(~causal, -torch.inf).logsumexp(-1))


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("most", [None, 11])
def test_packed_sequences(aggregate, most):
    lengths_q, lengths_k = [3, 0, 7, 2], [5, 4, 11, 0]
    cu_q, cu_k = (torch.tensor([0, *np.cumsum(n)], dtype=torch.int32) for n in (lengths_q, lengths_k))
    q, k, v = ball(12, 4, 3), ball(20, 2, 3), ball(20, 2, 3)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = {"model": "poincare", "aggregate": aggregate, "beta": 0.8}
    out = strobe.hyperbolic_attention(*leaves, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_k=most, **options)
    parts = []
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        if not lengths_k[b]:
            parts.append(torch.zeros(lengths_q[b], 4, 3, dtype=torch.float64))  # the origin
            continue
        one = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
        parts.append(formulas(*one, 0.8, 0.0)[0][0].transpose(0, 1))
    expected = torch.cat(parts)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    for gradient, right in zip(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout), strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("model", MODELS)
def test_a_bias_joins_the_midpoints(model):
    q, k, v, bias = ball(1, 2, 5, 3), ball(1, 2, 6, 3), ball(1, 2, 6, 3), torch.randn(1, 2, 5, 6, dtype=torch.float64)
    points = [h.poincare_to_lorentz(x) if model == "lorentz" else x for x in (q, k, v)]
    by = [strobe.hyperbolic_attention(*points, model=model, aggregate=aggregate, bias=bias) for aggregate in AGGREGATES]
    torch.testing.assert_close(*by)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_a_query_without_keys_has_the_origin_and_no_gradient(aggregate):
    q, k, v = (ball(1, 1, 4, 3).requires_grad_() for _ in range(3))
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    mask[..., 2, :] = False
    out = strobe.hyperbolic_attention(q, k, v, model="poincare", aggregate=aggregate, mask=mask)
    assert (out[0, 0, 2] == 0).all()
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert (dq[0, 0, 2] == 0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_dropout_gives_the_midpoint_of_what_is_kept(aggregate):
    q, k, v = ball(2, 2, 30, 3), ball(2, 2, 40, 3), ball(2, 2, 40, 3)
    keep = strobe.dropout_mask((2, 2, 30, 40), 0.7, seed=5)
    out = strobe.hyperbolic_attention(q, k, v, model="poincare", aggregate=aggregate, dropout=0.7, seed=5)
    torch.testing.assert_close(out, formulas(q, k, v, 1.0, 0.0, keep)[0])


def test_numpy():
    q, k, v = ball(2, 4, 9, 3), ball(2, 2, 13, 3), ball(2, 2, 13, 3)
    for model, aggregate in itertools.product(MODELS, AGGREGATES):
        points = [h.poincare_to_lorentz(x) if model == "lorentz" else x for x in (q, k, v)]
        out = strobe.hyperbolic_attention(*points, model=model, aggregate=aggregate)
        np.testing.assert_allclose(
            strobe.hyperbolic_attention(*(x.numpy() for x in points), model=model, aggregate=aggregate), out.numpy(), atol=1e-12
        )


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_compiled(aggregate):
    q, k, v = (ball(1, 2, 8, 3).float().requires_grad_() for _ in range(3))

    def call(q, k, v):
        return strobe.hyperbolic_attention(q, k, v, model="poincare", aggregate=aggregate, beta=1.5, causal=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected, out = call(q, k, v), compiled(q, k, v)
    torch.testing.assert_close(out, expected)
    for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": "klein"}, "model: 'klein'; accepted is 'lorentz' or 'poincare'"),
        ({"aggregate": "mean"}, "aggregate: 'mean'; accepted is 'centroid' or 'midpoint'"),
        ({"c": float("inf")}, "c: inf; accepted is a finite number"),
        ({"c": "1"}, "c: '1'; accepted is a finite number"),
        ({"beta": 0.0}, "beta: 0; accepted with a hyperbolic score is a positive finite number"),
        ({"beta": -1}, "beta: -1; accepted"),
        ({"scale": 0.5}, "scale: 0.5; accepted is none"),
        ({"softcap": 5.0}, "softcap: 5.0; accepted is none"),
        ({"score": "hyperbolic"}, "score: 'hyperbolic'; accepted is none"),
        ({"score": "dot"}, "score: 'dot'; accepted is none"),
    ],
)
def test_bad_arguments_are_named(options, named):
    x = h.lift(torch.zeros(1, 1, 2, 3))
    with pytest.raises(ValueError, match="^" + named.replace("(", r"\(")):
        strobe.hyperbolic_attention(x, x, x, **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"curvature": 1.0}, r"hyperbolic_attention\(\) got an unexpected keyword argument 'curvature'$"),
        ({"casual": True}, r"hyperbolic_attention\(\) got .* 'casual'; did you mean causal\?"),
        ({"modle": "poincare"}, r"hyperbolic_attention\(\) got .* 'modle'; did you mean model\?"),
        ({"softmax_scale": 1.0}, r"hyperbolic_attention\(\) got .* 'softmax_scale'; did you mean beta\?"),
    ],
)
def test_unknown_names_are_refused_in_its_name(options, named):
    x = h.lift(torch.zeros(1, 1, 2, 3))
    with pytest.raises(TypeError, match="^" + named):
        strobe.hyperbolic_attention(x, x, x, **options)


def test_every_unknown_name_is_told():
    x = h.lift(torch.zeros(1, 1, 2, 3))
    with pytest.raises(TypeError, match=r"(?s)'curvature'.*'casual'|'casual'.*'curvature'"):
        strobe.hyperbolic_attention(x, x, x, curvature=1.0, casual=True)


# Vectors that are no points


@pytest.mark.parametrize("as_array", [torch.Tensor.clone, torch.Tensor.numpy], ids=["torch", "numpy"])
@pytest.mark.parametrize(
    ("name", "model", "change", "message"),
    [
        (
            "q",
            "lorentz",
            h.lorentz_to_poincare,
            r"<x, x> = \S+ and x0 = \S+ at \[0, 0, 0\]; accepted with model 'lorentz' .*; points of the ball are model='poincare'$",
        ),
        ("k", "lorentz", lambda x: 1.01 * x, r"<x, x> = -1\.0201 .*x0 > 0$"),
        ("v", "lorentz", lambda x: -x, r"<x, x> = -1 and x0 = -\S+ at \[0, 0, 0\]; accepted"),
        ("q", "poincare", lambda x: 20 * x, r"\|p\|² = \S+ at .*; accepted with model 'poincare' are points of the unit ball"),
        ("v", "poincare", h.poincare_to_lorentz, r"\|p\|² = \S+ at \[0, 0, 0\]; accepted"),
        ("k", "poincare", lambda x: x * torch.nan, r"\|p\|² = nan at \[0, 0, 0\]; accepted"),
    ],
)
def test_what_is_no_point_is_refused_on_request(name, model, change, message, as_array):
    points = {x: h.poincare_to_lorentz(ball(1, 2, 5, 3)) if model == "lorentz" else ball(1, 2, 5, 3) for x in "qkv"}
    points[name] = change(points[name])
    arrays = [as_array(x) for x in points.values()]
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        strobe.hyperbolic_attention(*arrays, model=model, check=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [2, 15, 127])
def test_rounded_points_are_points(dtype, dim):
    """Points near the origin, and points as far out as the dtype can separate two of them, pass the check."""
    for size in (1e-3, 0.5, 2.0, 5.0):
        direction = torch.randn(1, 1, 200, dim, dtype=torch.float64)
        x = h.exp_map(size * direction / direction.norm(dim=-1, keepdim=True)).to(dtype)
        strobe.hyperbolic_attention(x, x, x, check=True)
        p = h.lorentz_to_poincare(x.double()).to(dtype)
        if (p.double().norm(dim=-1) < 1).all():
            strobe.hyperbolic_attention(p, p, p, model="poincare", check=True)
            strobe.hyperbolic_attention(*(h.poincare_to_lorentz(p) for _ in "qkv"), check=True)


def test_the_check_leaves_gradients_alone():
    leaves = [ball(1, 1, 4, 3).requires_grad_() for _ in "qkv"]
    outs = [strobe.hyperbolic_attention(*leaves, model="poincare", check=check) for check in (False, True)]
    assert torch.equal(*(torch.autograd.grad(out.sum(), leaves)[0] for out in outs))


def test_bad_kinds_are_named():
    x = h.lift(torch.zeros(1, 1, 2, 3))
    with pytest.raises(ValueError, match="^q: dtype int64"):
        strobe.hyperbolic_attention(x.long(), x.long(), x.long(), check=True)
    for arguments, named in (((None, x, x), "q"), ((x, x.numpy(), x), "k"), ((x, x, 3), "v")):
        with pytest.raises(TypeError, match=f"^{named}: "):
            strobe.hyperbolic_attention(*arguments, model="poincare")
    with pytest.raises(TypeError, match="^return_lse: int 1; accepted is True or False"):
        strobe.hyperbolic_attention(x, x, x, return_lse=1)
    with pytest.raises(ValueError, match="^k: "):
        strobe.hyperbolic_attention(x, x[..., :2], x, aggregate="midpoint")
    with pytest.raises(ValueError, match="^v: "):
        strobe.hyperbolic_attention(x, x, x[0], aggregate="midpoint")


def test_every_wrong_argument_has_a_line():
    x = h.lift(torch.zeros(1, 4, 6, 3))
    with pytest.raises(ValueError, match=r"^model: 'x'; .*\naggregate: 'y'; .*\nbeta: -1; accepted"):
        strobe.hyperbolic_attention(x, x, x, model="x", aggregate="y", beta=-1)
    with pytest.raises(ValueError, match=r"^c: True; .*\nscale: 3; .*\nhyperbolic_attention\(\) got .*'foo'\nq: dtype int64; "):
        strobe.hyperbolic_attention(x.long(), x, x, c=True, scale=3, foo=1)


def test_a_constant_is_a_number_of_any_kind():
    x = h.lift(torch.randn(1, 1, 6, 3))
    lse = [strobe.hyperbolic_attention(x, x, x, c=c, return_lse=True)[1] for c in (1, np.float32(1), np.int64(1))]
    assert torch.equal(lse[0], lse[1])
    assert torch.equal(lse[0], lse[2])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bias": [1]}, TypeError, "bias: list; accepted"),
        ({"bias": torch.ones(5, 5)}, ValueError, r"bias: shape \(5, 5\); accepted"),
        ({"bias": torch.ones(6, 6, dtype=torch.int64)}, ValueError, "bias: dtype int64; accepted"),
        ({"max_seqlen_k": "a"}, TypeError, "max_seqlen_k: str; accepted"),
        ({"cu_seqlens_k": [0, 4]}, TypeError, "cu_seqlens_k: list; accepted"),
        ({"cu_seqlens_k": torch.tensor([0.0, 4.0])}, ValueError, "cu_seqlens_k: dtype float32; accepted is int32"),
    ],
)
def test_what_midpoints_add_to_is_refused_as_ever(options, error, message):
    """The bias of the Lorentz factors is made before attention() makes its checks."""
    x = h.lift(torch.zeros(1, 4, 6, 3))
    if "cu_seqlens_k" in options or "max_seqlen_k" in options:
        x = x[0].transpose(0, 1)
        cu = torch.tensor([0, 6], dtype=torch.int32)
        options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu} | options
    with pytest.raises(error, match=f"^{message}[^\n]*$"):
        strobe.hyperbolic_attention(x, x, x, aggregate="midpoint", **options)


def test_midpoints_complain_of_no_bias_that_was_not_given():
    x = h.lift(torch.zeros(2, 6, 5, 3))
    for k, v in ((x[:, :4], x[:, :4]), (x, x[:, :, :3]), (x[:1], x[:1]), (x[:, :3], x[:, :2])):
        with pytest.raises(ValueError, match="^[kv]: ") as raised:
            strobe.hyperbolic_attention(x, k, v, aggregate="midpoint")
        assert "bias" not in str(raised.value)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("check", [False, True])
def test_widths(aggregate, check):
    x = h.lift(torch.zeros(1, 1, 4, 3))
    options = {"aggregate": aggregate, "check": check}
    with pytest.raises(ValueError, match="^q: head dimension 0; accepted is 1 to 576\nk: "):
        strobe.hyperbolic_attention(x[..., :0], x[..., :0], x, **options)
    with pytest.raises(ValueError, match="^v: head dimension 0; accepted is 1 to 512$"):
        strobe.hyperbolic_attention(x, x, x[..., :0], **options)
    wide = torch.zeros(1, 1, 4, 576)
    with pytest.raises(ValueError, match="^v: 512 coordinates; accepted with model 'poincare' are 1 to 511$"):
        strobe.hyperbolic_attention(wide[..., :3], wide[..., :3], wide[..., :512], model="poincare", **options)
    with pytest.raises(ValueError, match="^q: 576 coordinates; accepted with model 'poincare' are 1 to 575\nk: "):
        strobe.hyperbolic_attention(wide, wide, wide[..., :3], model="poincare", **options)
    assert strobe.hyperbolic_attention(*[wide[..., :511]] * 3, model="poincare", **options).shape == (1, 1, 4, 511)


def test_meta_tensors_have_shapes_and_no_points():
    x = torch.empty(1, 2, 4, 3, device="meta")
    for aggregate in AGGREGATES:
        assert strobe.hyperbolic_attention(x, x, x, aggregate=aggregate).shape == x.shape
    with pytest.raises(ValueError, match="^q: on device meta; accepted is an array that has values\nk: "):
        strobe.hyperbolic_attention(x, x, x, check=True)


# The score near its cusp, on every engine


def engines(dtype: torch.dtype) -> list[str]:
    return [engine for engine in available_engines() if takes(engine, dtype, score="hyperbolic")]


def scores_by(engine: str, q: Tensor, k: Tensor, beta: float) -> Tensor:
    """The scores (Sq, Sk) of one head, each as the LSE of a call with that key alone."""
    n = k.shape[2]
    alone = k[0, 0, :, None, None].expand(n, 1, 1, k.shape[3])
    queries = q[:, :, None].expand(n, 1, 1, *q.shape[2:]).squeeze(2)
    options = {"score": "hyperbolic", "beta": beta, "engine": engine, "return_lse": True}
    return strobe.attention(queries.to(DEVICE), alone.to(DEVICE), alone.to(DEVICE), **options)[1][:, 0].T.cpu()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("radius", [1e-4, 1e-2, 1.0, 30.0])
def test_scores_are_within_the_stated_error(dtype, radius):
    """docs/hyperbolic.md: x is off by delta = D eps sum |q_i k_i|. So d is off by min(sqrt(2 delta), delta / sinh m), where m is the mean
    of the true and the computed distance, plus 4 eps max(1, d)."""
    base = torch.randn(1, 1, 1, 15, dtype=torch.float64) * radius
    q, k = (h.lift(base + torch.randn(1, 1, 24, 15, dtype=torch.float64) * radius * 1e-2).to(dtype) for _ in range(2))
    k[:, :, :8] = q[:, :, :8]
    flipped = torch.cat([-q[..., :1], q[..., 1:]], -1)
    beta, eps = 1.5, torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    y = -(flipped.double() @ k.double().transpose(-1, -2))[0, 0]
    size = (q.double().abs() @ k.double().abs().transpose(-1, -2))[0, 0]
    t = (y - 1).clamp(min=0)
    d = torch.log1p(t + (t * (t + 2)).sqrt())
    for engine in engines(dtype):
        planes = 2.0**-16 if engine == "cpu-amx" and dtype == torch.float16 else 0.0  # two bf16, without their smallest product
        delta = (16 * eps + planes) * size
        computed = scores_by(engine, flipped, k, beta).double() / -beta
        within = torch.minimum((2 * delta).sqrt(), delta / torch.sinh((d + computed) / 2)) + 4 * eps * d.clamp(min=1)
        off = (computed - d).abs()
        assert (off <= within).all(), f"{engine}: {(off / within).max()} of what is stated"


def test_the_stated_error_is_a_bound():
    """The bound holds for the arccosh alone, at every ratio of the error to cosh d - 1, in both directions and where it is clamped."""
    delta = torch.logspace(-12, 1, 60, dtype=torch.float64)[:, None, None]
    t = delta * torch.logspace(-3, 6, 90, dtype=torch.float64)[:, None]
    share = torch.linspace(-1, 1, 41, dtype=torch.float64)
    d, computed = (2 * torch.asinh((x / 2).sqrt()) for x in (t, (t + share * delta).clamp(min=0)))  # cosh d - 1 = 2 sinh² (d / 2)
    off = (d - computed).abs()
    for mean in ((d + computed) / 2, d / 2):
        within = torch.minimum((2 * delta).sqrt(), delta / torch.sinh(mean))
        assert (off <= within * (1 + 1e-6) + 1e-14).all()
        assert (off / within).max() > 0.95


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_at_the_cusp_the_gradient_is_0(dtype):
    """The gradient is 0 where the Lorentz product of two points is exactly -1, and where a product is above -1 and is clamped."""
    points = torch.tensor([[1.0, 0, 0], [1.25, 0.75, 0], [1.25, 0, -0.75], [2.125, 1.875, 0]], dtype=dtype, device=DEVICE)
    v, dout = (torch.randn(4, 1, 5, 3, device=DEVICE).to(dtype) for _ in range(2))
    for engine, shrink in itertools.product(engines(dtype), (1.0, 0.5, -1.0)):
        k = (shrink * points)[:, None, None].expand(4, 1, 5, 3).clone().requires_grad_()
        q = (points * torch.tensor([-1, 1, 1], dtype=dtype, device=DEVICE))[:, None, None].expand(4, 1, 5, 3).clone().requires_grad_()
        out, lse = strobe.attention(q, k, v, score="hyperbolic", beta=3.0, shift=0.5, engine=engine, return_lse=True)
        torch.testing.assert_close(lse, torch.full_like(lse, float(np.log(5)) - 0.5))
        torch.testing.assert_close(
            out.double(), v.double().mean(2, keepdim=True).expand(out.shape), atol=2 * torch.finfo(dtype).eps, rtol=0
        )
        try:
            dq, dk = torch.autograd.grad(out, (q, k), dout)
        except NotImplementedError:
            continue  # only the forward
        assert (dq == 0).all(), engine
        assert (dk == 0).all(), engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_far_points_and_nan(dtype):
    """Distances whose hyperbolic cosine has a square beyond float32; NaN stays."""
    q = torch.tensor([[-1.0, 0], [torch.nan, 0]], dtype=dtype, device=DEVICE).expand(1, 1, 2, 2)
    k = torch.tensor([1e10, 1e19, 1e30, 1e38], dtype=torch.float32, device=DEVICE)[:, None, None, None].expand(4, 1, 1, 2).to(dtype)
    for engine in engines(dtype):
        lse = strobe.attention(q.expand(4, 1, 2, 2), k, k, score="hyperbolic", engine=engine, return_lse=True)[1]
        expected = -torch.log(2 * k[:, 0, 0, 0].double()).cpu()
        torch.testing.assert_close(lse[:, 0, 0].double().cpu(), expected, rtol=1e-6, atol=0, msg=engine)
        assert lse[:, 0, 1].isnan().all(), engine


@pytest.mark.parametrize("array", [torch.from_numpy, np.asarray], ids=["torch", "numpy"])
def test_the_midpoint_of_packed_sequences_is_as_long_as_the_longest(array):
    """The midpoint's bias would take a gigabyte if it were as long as all sequences together."""
    sequences, length = 4000, 16
    x = strobe.hyperbolic.lift(np.random.default_rng(0).standard_normal((sequences * length, 1, 3), np.float32))
    cu = np.arange(0, sequences * length + 1, length, dtype=np.int32)
    x, cu = array(x), array(cu)
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "aggregate": "midpoint"}
    bounded = strobe.hyperbolic_attention(x, x, x, max_seqlen_q=length, max_seqlen_k=length, **packed)
    tracemalloc.start()
    found = strobe.hyperbolic_attention(x, x, x, **packed)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert bool((found == bounded).all())
    assert peak < 2**26


# Options of attention() that points exclude


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("scales", [("k_scale", "v_scale"), ("v_scale",)])
def test_quantised_points_are_refused(dtype, scales):
    q = h.lift(torch.zeros(1, 2, 4, 7))
    k, scale = strobe.kv.quantise(q, dtype)
    lines = [f"{name}: given; accepted is None, for quantised points lie beside the hyperboloid" for name in scales]
    with pytest.raises(ValueError, match=f"^{re.escape(chr(10).join(lines))}$"):
        strobe.hyperbolic_attention(q, k, k, **dict.fromkeys(scales, scale))


def test_what_is_no_point_never_has_a_result(monkeypatch):
    """Such vectors are refused, whatever attention() may accept in the future."""
    q = h.lift(torch.zeros(1, 2, 4, 7))
    monkeypatch.setattr(h, "attention", lambda *_, **__: q)
    with pytest.raises(ValueError, match="^q, k, v: float32, int8, int8; accepted are points, of float16"):
        strobe.hyperbolic_attention(q, q.to(torch.int8), q.to(torch.int8))


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_a_partial_part_of_points_is_refused(aggregate):
    x = h.lift(torch.zeros(1, 2, 8, 3))
    part = strobe.Part([[0, 8]], [[0, 8]], 8, 8, partial=True)
    with pytest.raises(ValueError, match=r"^part: partial=True; accepted is partial=False, for strobe.merge\(\) does not add up points$"):
        strobe.hyperbolic_attention(x, x, x, aggregate=aggregate, part=part)


def test_midpoints_of_some_of_the_keys_are_refused():
    x = h.poincare_to_lorentz(ball(2, 2, 8, 3))
    whole = strobe.hyperbolic_attention(x, x, x, aggregate="midpoint", causal=True)
    for lengths in (8, [8, 8]):
        part = strobe.Part([[4, 4]], [[0, 8]], lengths, lengths)
        found = strobe.hyperbolic_attention(x[:, :, 4:], x, x, aggregate="midpoint", causal=True, part=part)
        torch.testing.assert_close(found, whole[:, :, 4:])
        some = strobe.Part([[0, 4]], [[0, 4]], lengths, lengths)
        first = x[:, :, :4]
        with pytest.raises(
            ValueError, match="^part: of fewer keys than there are, with aggregate 'midpoint'; accepted is 'centroid'[^\n]*$"
        ):
            strobe.hyperbolic_attention(first, first, first, aggregate="midpoint", causal=True, part=some)
        found = strobe.hyperbolic_attention(first, first, first, causal=True, part=some)
        torch.testing.assert_close(found, strobe.hyperbolic_attention(x, x, x, causal=True)[:, :, :4])


def test_lorentz_coordinates_begin_with_time():
    for function in (h.distance, h.lorentz_product, h.centroid, h.lorentz_to_poincare, h.lorentz_to_klein):
        for x in (torch.ones(3, 0), np.ones((3, 0), np.float32)):
            with pytest.raises(ValueError, match="^x: 0 coordinates; accepted is 1 or more$"):
                function(*[x] * (2 if function in (h.distance, h.lorentz_product) else 1))


def test_midpoints_of_no_keys_beside_padding():
    x, none, some = h.lift(torch.zeros(6, 2, 3)), torch.zeros(3, dtype=torch.int32), torch.tensor([0, 2, 5], dtype=torch.int32)
    out = strobe.hyperbolic_attention(x, x, x, aggregate="midpoint", cu_seqlens_q=some, cu_seqlens_k=none, max_seqlen_q=3, max_seqlen_k=0)
    assert torch.equal(out, x)
