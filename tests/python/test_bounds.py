"""The bounds of docs/semantics.md beyond the accuracy clause: errors of rows of gradients in 16 bits, and numbers near the largest."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import Inputs, call
from check import Yardstick, oracle, run_or_skip, takes
from engines import available_engines

engines = pytest.mark.parametrize("engine", available_engines())
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def bounds_of_rows(inputs: Inputs) -> dict[str, Tensor]:
    """How far each number of dq, dk and dsinks may be off in 16 bits: docs/semantics.md, "Rows". Each query head has its own key head."""
    q, k, v, dout = (t.double() for t in (inputs.q, inputs.k, inputs.v, inputs.dout))
    options, unit = inputs.options, torch.finfo(inputs.q.dtype).eps / 2
    scale = options["scale"]
    s = q @ k.transpose(-1, -2) * scale
    lse = s.logsumexp(-1, keepdim=True)
    if "sinks" in options:
        sinks = options["sinks"].double()[None, :, None, None]
        lse = torch.logaddexp(lse, sinks)
    p = (s - lse).exp()
    dp = dout @ v.transpose(-1, -2)
    delta = (dout * (p @ v)).sum(-1, keepdim=True)
    dlse = 0 if inputs.dlse is None else inputs.dlse.double()[..., None]
    of_d = (dout.abs() * (p @ v.abs())).sum(-1, keepdim=True)  # the size of the terms of D and dP
    fp32 = 2.0**-21 * (1 + s.abs() + lse.abs())  # the errors of P = exp(S - LSE), and of sums in fp32
    lost = torch.finfo(inputs.q.dtype).tiny * unit  # the errors of P and dS below the dtype's normal numbers
    ds = dp - delta + dlse
    off = p * 2 * unit * of_d + (2 * unit * p + lost) * ds.abs() + lost + fp32 * p * (of_d + dp.abs() + abs(dlse))
    found = {"dq": abs(scale) * off @ k.abs(), "dk": abs(scale) * off.transpose(-1, -2) @ q.abs()}
    ref = oracle(inputs)
    found = {name: bound + unit * ref[name].abs() + 1e-7 for name, bound in found.items()}
    if "sinks" in options:
        found["dsinks"] = ((sinks - lse).exp() * (2 * unit * of_d + 2.0**-20 * (1 + lse.abs()) * (of_d + abs(dlse)))).sum((0, 2, 3))
    return found


SHAPES: dict[str, dict[str, Any]] = {
    "scores of any size": {"h": 4, "sq": 160, "d": 64, "scale": -4.0},
    "three queries": {"b": 4, "h": 60, "sq": 3, "d": 64, "scale": 0.125},
    "sinks": {"b": 4, "h": 4, "sq": 96, "d": 64, "scale": 0.125, "gradients": ("sinks",), "sinks": torch.tensor([0.0, 3.0, -2.0, 6.0])},
}


@lru_cache(maxsize=1)  # tests of one call on all engines follow one another
def measured(shape: str, dtype: torch.dtype) -> tuple[Yardstick, dict[str, Tensor]]:
    """A call's yardstick, and its bounds_of_rows."""
    inputs = call(dtype=dtype, dlse=shape == "sinks", **SHAPES[shape])
    return Yardstick(inputs), bounds_of_rows(inputs)


@engines
@halves
@pytest.mark.parametrize("shape", SHAPES)
def test_each_row_of_a_gradient(shape, dtype, engine):
    """Where a row's P is nearly 1, the terms of its dS cancel, and the error of D, which is made from a rounded O, is larger than dS."""
    yardstick, bounds = measured(shape, dtype)
    results = run_or_skip(yardstick.inputs, engine)
    assert not (faults := yardstick.faults(results)), faults  # the accuracy clause, for whole tensors
    for name, bound in bounds.items():
        over = (results[name].double() - yardstick.ref[name]).abs() / bound
        assert over.max() <= 1, f"{name}: {over.max():.2f} of the bound at {(over == over.max()).nonzero()[0].tolist()}"


@engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("at", [40, 400])
def test_large_values_and_a_late_maximum(at, dtype, engine):
    """P relative to an early maximum may be as large as 1e29: the product with V must not overflow if O does not."""
    inputs = call(h=1, sq=64, sk=512, d=64, dtype=dtype, dlse=False)
    inputs.q.fill_(1)
    inputs.k.mul_(0.01)
    inputs.k[..., at, :] = 66 / 8  # a score of 66 after scores of about 0
    inputs.v.mul_(0.1).add_(1).mul_(1e13)
    inputs.dout.mul_(1e-13)
    results, ref = run_or_skip(inputs, engine), oracle(inputs)
    error = (results["out"].double() - ref["out"]).abs().max() / ref["out"].abs().max()
    assert error < torch.finfo(dtype).eps * 4, error


@engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sk", [7, 300, 4096])
def test_sums_of_large_values(sk, dtype, engine):
    """Results are finite as far as docs/semantics.md promises it for GPU engines."""
    inputs = call(h=1, sq=17, sk=sk, d=16, dtype=dtype, dlse=False)
    inputs.v.fill_(1.3e36 / sk)
    results, ref = run_or_skip(inputs, engine), oracle(inputs)
    assert ((results["out"].double() / ref["out"] - 1).abs() < 1e-5 + torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("engine", [e for e in available_engines() if takes(e, torch.float32, 64)])
def test_scores_of_a_hundred(engine):
    """P's relative error is its score's absolute error, so the 256 products of a score must not be summed in one run. The test takes the
    mean error, because the largest is one row's luck."""
    inputs = call(h=2, sq=303, sk=192, d=256, scale=-0.25)
    inputs.q.mul_(3)
    inputs.k.mul_(3)
    results, ref = run_or_skip(inputs, engine), oracle(inputs)
    s = sum(q @ k.transpose(2, 3) for q, k in zip(inputs.q.split(32, 3), inputs.k.split(32, 3), strict=True))
    p = (s * -0.25).softmax(3)
    dout, v = inputs.dout, inputs.v
    ds = p * (dout @ v.transpose(2, 3) - (dout * (p @ v)).sum(3, keepdim=True) + inputs.dlse[..., None])
    formulas = {"out": p @ v, "dq": ds @ inputs.k * -0.25, "dk": ds.transpose(2, 3) @ inputs.q * -0.25, "dv": p.transpose(2, 3) @ dout}
    for name, t in formulas.items():
        error, plain = ((x.double() - ref[name]).square().mean().sqrt() for x in (results[name], t))
        assert error < 2 * plain, f"{name}: {error / plain:.2f} times the formulas' error"


@engines
@pytest.mark.parametrize(("width", "far"), [(24, 100), (64, 80), (160, 60)])
def test_hyperbolic_slopes_below_the_steps_of_float16(width, far, engine):
    """With many keys and distant points, P times the derivative of the distance is about 2^-24, float16's smallest number. It must not be
    rounded before it is multiplied by dP - D, which is larger than 1."""
    inputs = call(h=1, sq=5, sk=1024, d=width, dv=24, dtype=torch.float16, dlse=False, score="hyperbolic", beta=0.5, shift=0.0)
    for t, sign in ((inputs.q, -1), (inputs.k, 1)):
        x = t.float() * far / width**0.5
        x[..., 0] = sign * (1 + x[..., 1:].square().sum(-1)).sqrt()
        t.copy_(x)
    results, ref = run_or_skip(inputs, engine), oracle(inputs)
    q, k, v, dout = (t.double() for t in (inputs.q, inputs.k, inputs.v, inputs.dout))
    x = -(q @ k.transpose(2, 3))
    slope, p = 0.5 / (x.square() - 1).sqrt(), (-0.5 * x.acosh()).softmax(3)
    dp = dout @ v.transpose(2, 3)
    dx = slope * p * (dp - (p * dp).sum(3, keepdim=True))
    unit, step = 2.0**-11, 2.0**-25
    of_d = (dout.abs() * (p @ v.abs())).sum(3, keepdim=True)  # D is made of a rounded O
    off = step * (1 + slope * (dp.abs() + of_d)) + 2 * unit * slope * p * of_d + 4 * unit * dx.abs()
    for name, bound in {"dq": off @ k.abs(), "dk": off.transpose(2, 3) @ q.abs()}.items():
        over = ((results[name].double() - ref[name]).abs() / (bound + unit * ref[name].abs() + step)).max()
        assert over <= 1, f"{name}: {over:.2f} of the bound"


@pytest.mark.parametrize("engine", [e for e in available_engines() if takes(e, torch.float32, 64)])
@pytest.mark.parametrize("hidden", [0.0, math.inf])
def test_small_terms_of_a_sum_whose_first_are_large(hidden, engine):
    """The last queries see only a few keys. These keys get most of their dK and dV from those queries, and then small terms from hundreds
    of other queries. Added one by one, each small term would be rounded to the last bit of the large sum. The test compares the mean
    error. hidden: what q and dout hold in queries that see no key; each engine keeps these queries out in its own way."""
    sq, sk, left, right = 915, 887, 23, 385
    inputs = call(h=1, sq=sq, sk=sk, d=64, window=(left, right), alignment="top_left", dlse=False)
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    for t in (q, dout):
        t[:, :, sk + left :] = 0
    distance = torch.arange(sk) - torch.arange(sq)[:, None]
    s = (q @ k.transpose(2, 3) / 8).masked_fill((distance < -left) | (distance > right), -math.inf)
    p = s.softmax(3).nan_to_num(0.0)
    ds = p * (dout @ v.transpose(2, 3) - (dout * (p @ v)).sum(3, keepdim=True))
    formulas = {"dk": ds.transpose(2, 3) @ q / 8, "dv": p.transpose(2, 3) @ dout}
    ref = oracle(inputs)
    for t in (q, dout):
        t[:, :, sk + left :] = hidden
    results = run_or_skip(inputs, engine)
    for name, t in formulas.items():
        error, plain = ((x.double() - ref[name]).square().mean().sqrt() for x in (results[name], t))
        assert error < 1.2 * plain, f"{name}: {error / plain:.2f} times the formulas' error"


@pytest.mark.parametrize("engine", [e for e in available_engines() if takes(e, torch.float32, 64)])
def test_dq_of_thousands_of_tiles_of_keys(engine):
    """Thousands of tiles add to dQ of a few queries, and a plain float32 sum would be rounded each time. The test takes the mean error."""
    inputs = call(h=1, sq=2, sk=40_000, d=64, tile_q=256, tile_k=16, dlse=False)
    inputs.q.mul_(0.1)
    inputs.k.mul_(0.1)
    dq, ref = run_or_skip(inputs, engine)["dq"].double(), oracle(inputs)["dq"]
    error = float((dq - ref).square().mean().sqrt() / ref.abs().max())
    assert error < 2e-7, f"{error:.2e}"
