"""Derivatives in the direction of tangents, and second derivatives: all pairs of the contract's options, against formulas in float64 that
PyTorch differentiates by itself."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import plain
import strobe
from cases import Inputs, build, contract, dense_problems
from cases import call as inputs_of
from check import FLOOR, Results, error, ulp
from engines import beside_the_default
from strobe import _attention

CASES = [case for case in contract(2) if not (case["page"] or case["quant"])]


def directions(inputs: Inputs, seed: int = 1) -> Results:
    """A tangent for each differentiable input, in its shape and dtype."""
    g = torch.Generator().manual_seed(seed)
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": inputs.dout, "dlse": inputs.dlse}
    given |= {name: inputs.options.get(name) for name in ("bias", "sinks")}
    drawn = {f"t{name}": torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype) for name, x in given.items() if x is not None}
    if inputs.options.get("score") == "hyperbolic":  # distances of points that nearly coincide have huge derivatives
        drawn = {name: x / 16 for name, x in drawn.items()}
    return drawn


def joined(inputs: Inputs, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """out and lse of the whole call, from those of its dense problems."""
    if inputs.varlen:
        q, v = inputs.q, inputs.v
        out = torch.cat([q.new_zeros(0, q.shape[1], v.shape[2]), *(o[0].transpose(0, 1) for o, _ in parts)])
        return out, torch.cat([q.new_zeros(q.shape[1], 0), *(x[0] for _, x in parts)], dim=1)
    out, lse = (torch.cat(x) for x in zip(*parts, strict=True))
    return out.transpose(1, 2) if inputs.options.get("layout") == "bshd" else out, lse


def formulas(inputs: Inputs, given: Results) -> tuple[Tensor, Tensor]:
    """out and lse by the plain formulas, of these q, k, v, bias and sinks."""
    options = inputs.options | {name: given[name] for name in ("bias", "sinks") if name in given}
    here = dataclasses.replace(inputs, q=given["q"], k=given["k"], v=given["v"], options=options, dlse=None)
    return joined(inputs, [plain.attention(*tensors[:3], score) for (*tensors, _), score, _ in dense_problems(here)])


def leaves_of(inputs: Inputs, dtype: torch.dtype) -> Results:
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v} | {n: inputs.options[n] for n in ("bias", "sinks") if n in inputs.options}
    return {name: x.detach().to(dtype).contiguous().clone() for name, x in given.items()}


def plain_jvp(inputs: Inputs, tangents: Results, dtype: torch.dtype) -> Results:
    leaves = leaves_of(inputs, dtype)
    with forward_ad.dual_level():
        dual = {name: forward_ad.make_dual(x, tangents[f"t{name}"].to(x.dtype)) for name, x in leaves.items()}
        out, lse = formulas(inputs, dual)
        (out, tout), (lse, tlse) = (forward_ad.unpack_dual(x) for x in (out, lse))
        tout, tlse = (torch.zeros_like(x) if t is None else t for x, t in ((out, tout), (lse, tlse)))
    return {"out": out, "lse": lse, "tout": tout, "tlse": tlse.masked_fill(lse == -torch.inf, 0.0)}


def plain_second(inputs: Inputs, tangents: Results, dtype: torch.dtype) -> Results:
    """The gradients of <tangents, gradients> by everything that the gradients depend on."""
    leaves = {name: x.requires_grad_() for name, x in leaves_of(inputs, dtype).items()}
    dout = inputs.dout.detach().to(dtype).requires_grad_()
    dlse = torch.zeros(()) if inputs.dlse is None else inputs.dlse.detach().to(dtype).requires_grad_()
    out, lse = formulas(inputs, leaves)
    loss = (out * dout).sum()
    if inputs.dlse is not None:
        loss = loss + torch.where(lse == -torch.inf, 0.0, lse * dlse).sum()
    first = torch.autograd.grad(loss, [*leaves.values()], create_graph=True, allow_unused=True, materialize_grads=True)
    inner = sum((g * tangents[f"t{name}"].to(g.dtype)).sum() for name, g in zip(leaves, first, strict=True))
    wanted = leaves | {"dout": dout} | ({} if inputs.dlse is None else {"dlse": dlse})
    found = torch.autograd.grad(inner, [*wanted.values()], allow_unused=True, materialize_grads=True)
    return dict(zip(wanted, found, strict=True))


def terms_of(inputs: Inputs, tangents: Results) -> dict[str, float]:
    """How large the terms are that cancel in second derivatives which vanish, as where each row sees one key: the formulas of
    docs/semantics.md (Derivatives), with the absolute values of the products in D, dP and their tangents. The tangent of the score and that
    of LSE are not rounded to 16 bits, so theirs count by as much less."""
    if not inputs.q.numel():
        return {}
    dtype = inputs.q.dtype
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / torch.finfo(dtype).eps
    options = {name: tangents[f"t{name}"] if name == "bias" else x for name, x in inputs.options.items()}
    direction = dataclasses.replace(inputs, q=tangents["tq"], k=tangents["tk"], v=tangents["tv"], dlse=None, options=options)
    found: dict[str, list[Tensor]] = {name: [] for name in ("dq", "dk", "dv", "dbias")}
    for (here, score, _), (along, tscore, _) in zip(dense_problems(inputs), dense_problems(direction), strict=True):
        q, k, v, dout, dlse = (None if x is None else x.double() for x in here)
        tq, tk, tv = (x.double() for x in along[:3])
        group = q.shape[1] // k.shape[1]
        k, v, tk, tv = (x.repeat_interleave(group, 1) for x in (k, v, tk, tv))
        if not q.numel() or not k.numel():
            continue
        x = (q @ k.mT * score.scale).requires_grad_()
        s = score.softcap * torch.tanh(x / score.softcap) if score.softcap else x
        s = plain.hyperbolic(s, *score.hyperbolic) if score.hyperbolic else s
        (first,) = torch.autograd.grad(s.sum(), x, create_graph=True)
        second = torch.autograd.grad(first.sum(), x)[0] if first.requires_grad else torch.zeros_like(first)
        first, tx = first.detach(), (tq @ k.mT + q @ tk.mT) * score.scale
        ts = first * tx + (0 if tscore.bias is None else tscore.bias.double())
        # With the unit matrix as V, the formulas return P.
        eye = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1)
        p, _ = plain.attention(q, k, eye, dataclasses.replace(score, keep=None, bias=None if score.bias is None else score.bias.double()))
        kept = 1.0 if score.keep is None else score.keep / score.keep_rate
        change = (p * (ts - (p * ts).sum(-1, keepdim=True))).abs()
        of_score = p * (ts.abs() + (p * ts.abs()).sum(-1, keepdim=True)) * wide
        dp, tdp = kept * (dout.abs() @ v.abs().mT), kept * (dout.abs() @ tv.abs().mT)
        both = dp + (p * dp).sum(-1, keepdim=True)  # |dP| + |D|
        tboth = tdp + (p * tdp + change * dp).sum(-1, keepdim=True)
        tds = change * both + p * tboth + of_score * (both if dlse is None else both + dlse.abs()[..., None])
        dx = p * both * first.abs()
        tdx = tds * first.abs() + p * both * (second * tx).abs()
        found["dq"].append(abs(score.scale) * (tdx @ k.abs() + dx @ tk.abs()))
        found["dk"].append((abs(score.scale) * (tdx.mT @ q.abs() + dx.mT @ tq.abs())).unflatten(1, (-1, group)).sum(2))
        found["dv"].append(((kept * of_score).mT @ dout.abs()).unflatten(1, (-1, group)).sum(2))
        if score.bias is not None:
            axes = [axis for axis, n in enumerate(score.bias.shape) if n == 1]
            found["dbias"].append(tds.sum(axes) if axes else tds)
    shared = "bias" in inputs.options and inputs.options["bias"].shape[0] == 1  # by all sequences
    return {name: float((sum if shared and name == "dbias" else max)(x.max() for x in each)) for name, each in found.items() if each}


def compare(inputs: Inputs, found: Results, measure: Any, what: str, terms: dict[str, float] | None = None) -> list[str]:
    """What is wrong with results, against formulas in float64 and the error of the formulas in the call's dtype. terms: terms_of()."""
    exact, dtype = measure(torch.float64), inputs.q.dtype
    rounded = [measure(dtype)] + ([measure(torch.float32)] if dtype in (torch.float16, torch.bfloat16) else [])
    wrong = []
    for name, x in found.items():
        size = float(exact[name].abs().nan_to_num(posinf=0.0).max()) if x.numel() else 0.0
        allowed = max(FLOOR[dtype] * size, 2 * max(e for each in rounded if (e := error(each[name], exact[name])) < float("inf")))
        if dtype in (torch.float16, torch.bfloat16):
            allowed += ulp(dtype, size)
        if dtype == torch.float64:
            allowed = max(allowed, 1e-11 * max(size, 1.0))
        cancelling = (terms or {}).get(f"d{name}", 0.0)
        if size < 1e-9 * cancelling:  # it vanishes: of the terms that cancel a rounding error is left
            allowed += torch.finfo(dtype).eps * cancelling
        if not error(x, exact[name]) <= allowed:
            wrong.append(f"{what}: {name} is off by {error(x, exact[name]):.3g}, allowed is {allowed:.3g} of {size:.3g}")
    return wrong


def engines_of(case: dict[str, Any]) -> list[str | None]:
    return [None, "reference", *(engine for engine in beside_the_default() if takes(case, engine))]


def run_jvp(inputs: Inputs, tangents: Results, engine: str | None) -> Results:
    own = {name: x for name, x in tangents.items() if name not in ("tdout", "tdlse")}
    options = inputs.options | inputs.run | {"engine": engine}
    found = strobe.attention_jvp(inputs.q, inputs.k, inputs.v, **own, return_lse=True, **options)
    return dict(zip(("out", "lse", "tout", "tlse"), found, strict=True))


def run_second(inputs: Inputs, tangents: Results, engine: str | None) -> Results:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves_of(inputs, inputs.q.dtype).items()}
    for name in ("bias", "sinks"):
        if name in leaves:
            leaves[name] = inputs.options[name].detach().clone().requires_grad_()
    options = inputs.options | inputs.run | {name: leaves[name] for name in ("bias", "sinks") if name in leaves} | {"engine": engine}
    dout = inputs.dout.detach().clone().requires_grad_()
    outputs, gradients = strobe.attention(leaves["q"], leaves["k"], leaves["v"], **options, return_lse=True), [dout]
    if inputs.dlse is None:
        outputs = outputs[:1]
    else:
        gradients.append(inputs.dlse.detach().clone().requires_grad_())
    first = torch.autograd.grad(outputs, [*leaves.values()], gradients, create_graph=True)
    wanted = leaves | dict(zip(("dout", "dlse"), gradients, strict=False))
    second = torch.autograd.grad(first, [*wanted.values()], [tangents[f"t{name}"] for name in leaves])
    return dict(zip(wanted, second, strict=True))


def takes(case: dict[str, Any], engine: str) -> bool:
    """Whether an engine takes every call of the case's dtype."""
    return engine.startswith("cpu-") and (engine not in ("cpu-avx512bf16", "cpu-amx") or case["dtype"] == "bfloat16")


@pytest.mark.parametrize("number", range(len(CASES)))
def test_jvp(number):
    case, wrong = CASES[number], []
    inputs = build(case)
    tangents = directions(inputs)
    measure = functools.lru_cache(lambda dtype: plain_jvp(inputs, tangents, dtype))
    for engine in engines_of(case):
        found = run_jvp(inputs, tangents, engine)
        wrong += compare(inputs, found, measure, str(engine))
    assert not wrong, (case, wrong)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_second_derivatives(number):
    case, wrong = CASES[number], []
    inputs = build(case)
    tangents = directions(inputs)
    measure = functools.lru_cache(lambda dtype: plain_second(inputs, tangents, dtype))
    terms = terms_of(inputs, tangents)
    for engine in engines_of(case):
        found = run_second(inputs, tangents, engine)
        wrong += compare(inputs, found, measure, str(engine), terms)
    assert not wrong, (case, wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_mistake_in_derivatives_that_vanish_is_found(dtype):
    """Each row sees one key, so that P = 1, dP = D and tdP = tD; the mistaken results lack D, its tangent, or both."""
    inputs = inputs_of(2, 4, 65, 65, 64, 64, dtype=dtype, dlse=False, window=(0, 0), bias=torch.zeros(2, 4, 65, 65, dtype=dtype))
    tangents = directions(inputs)
    q, k, v, dout, tq, tk, tv = (x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.dout, *(tangents[f"t{n}"] for n in "qkv")))
    dp, tdp = (dout * v).sum(-1, keepdim=True) / 8, (dout * tv).sum(-1, keepdim=True) / 8

    def judged(results: Results) -> list[str]:
        measure = functools.lru_cache(lambda dtype: plain_second(inputs, tangents, dtype))
        return [x.split()[1] for x in compare(inputs, results, measure, "formulas", terms_of(inputs, tangents))]

    assert judged({"q": torch.zeros_like(q), "k": torch.zeros_like(k), "bias": torch.zeros(2, 4, 65, 65)}) == []
    without_d = {"q": dp * tk, "k": dp * tq}
    without_its_tangent = {"q": tdp * k, "k": tdp * q, "bias": torch.diag_embed(8 * tdp[..., 0])}
    assert judged(without_d) == ["q", "k"]
    assert judged(without_its_tangent) == ["q", "k", "bias"]
    assert judged({name: x + without_its_tangent[name] for name, x in without_d.items()}) == ["q", "k"]


def qkv(b: int = 2, h: int = 2, s: int = 9, d: int = 4, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(b, h, s, d, generator=g, dtype=torch.float64) for _ in range(3)]


def plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by PyTorch's own operations."""
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf), -1) @ v


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return strobe.attention(q, k, v, causal=True)


def close(x: Any, y: Any) -> None:
    torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_gradcheck():
    options = [
        {"causal": True},
        {"softcap": 2.0, "sinks": torch.randn(2, dtype=torch.float64, requires_grad=True)},
        {"bias": torch.randn(1, 2, 5, 5, dtype=torch.float64, requires_grad=True), "window": (3, 1)},
        {"dropout": 0.25, "seed": 7},
    ]
    for given in options:
        tensors = [name for name in ("bias", "sinks") if name in given]
        leaves = [x.requires_grad_() for x in qkv(1, 2, 5, 2)] + [given[name] for name in tensors]

        def both(q: Tensor, k: Tensor, v: Tensor, *more: Tensor, given: Any = given, tensors: Any = tensors) -> Any:
            return strobe.attention(q, k, v, return_lse=True, **given | dict(zip(tensors, more, strict=True)))

        assert torch.autograd.gradcheck(both, leaves, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(both, leaves, check_fwd_over_rev=True)


def test_transforms_of_torch_func():
    primals, tangents = tuple(qkv()), tuple(qkv(seed=1))
    close(torch.func.jvp(attend, primals, tangents), torch.func.jvp(plainly, primals, tangents))

    def loss(f: Any) -> Any:
        return lambda q, k, v: f(q, k, v).square().sum()

    close(torch.func.grad(loss(attend), (0, 1, 2))(*primals), torch.func.grad(loss(plainly), (0, 1, 2))(*primals))
    products = [torch.func.jvp(torch.func.grad(loss(f), (0, 1, 2)), primals, tangents) for f in (attend, plainly)]
    close(*products)  # forward over reverse
    over = [torch.func.grad(lambda *x, f=f: torch.func.jvp(loss(f), x, tangents)[1], (0, 1, 2))(*primals) for f in (attend, plainly)]
    close(*over)  # reverse over forward
    small = tuple(x[:1, :1, :3, :2] for x in primals)
    close(torch.func.hessian(loss(attend), (0, 1, 2))(*small), torch.func.hessian(loss(plainly), (0, 1, 2))(*small))
    batched = [
        torch.func.vmap(torch.func.grad(lambda q, k, v, f=f: loss(f)(q[None], k[None], v[None])))(*primals) for f in (attend, plainly)
    ]
    close(*batched)  # per-sample gradients
    pulled = [torch.func.vjp(lambda *x, f=f: torch.func.vjp(f, *x)[1](tangents[0]), *primals)[1](tangents) for f in (attend, plainly)]
    close(*pulled)


def test_forward_mode_of_autograd():
    primals, tangents = qkv(), qkv(seed=1)
    with forward_ad.dual_level():
        out, lse = strobe.attention(
            *(forward_ad.make_dual(x, t) for x, t in zip(primals, tangents, strict=True)), causal=True, return_lse=True
        )
        tout, tlse = forward_ad.unpack_dual(out).tangent, forward_ad.unpack_dual(lse).tangent
    expected = strobe.attention_jvp(*primals, *tangents, causal=True, return_lse=True)
    assert (tout == expected[2]).all()
    assert (tlse == expected[3]).all()


def test_an_absent_tangent_is_zero():
    q, k, v = qkv()
    tk = torch.randn_like(k)
    zero = torch.zeros_like(q)
    assert (strobe.attention_jvp(q, k, v, tk=tk)[1] == strobe.attention_jvp(q, k, v, zero, tk, zero)[1]).all()


def test_functions_of_the_score():
    primals, tangents = qkv(), qkv(seed=1)
    table, ttable = torch.randn(2, 9, dtype=torch.float64), torch.randn(2, 9, dtype=torch.float64)
    gate, tgate = torch.tensor(0.7, dtype=torch.float64), torch.tensor(-1.3, dtype=torch.float64)

    def plain_of(q: Tensor, k: Tensor, v: Tensor, table: Tensor, gate: Tensor) -> Tensor:
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        s = torch.tanh(s * gate) * 3 + table[:, None, :] * s.square()
        return torch.softmax(s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf), -1) @ v

    def strobe_of(q: Tensor, k: Tensor, v: Tensor, table: Tensor, gate: Tensor, **how: Any) -> Tensor:
        return strobe.attention(q, k, v, causal=True, score=lambda x, b, h, i, j: torch.tanh(x * gate) * 3 + table[h, j] * x * x, **how)

    expected = torch.func.jvp(plain_of, (*primals, table, gate), (*tangents, ttable, tgate))
    for engine in engines_of({"dtype": "float64"}):
        found = strobe.attention_jvp(
            *primals,
            *tangents,
            causal=True,
            score=lambda x, b, h, i, j: torch.tanh(x * gate) * 3 + table[h, j] * x * x,
            captured=[table, gate],
            tcaptured=[ttable, tgate],
            engine=engine,
        )
        close(found, expected)
        results = []
        for f in (lambda *x, engine=engine: strobe_of(*x, engine=engine), plain_of):
            leaves = [x.clone().requires_grad_() for x in (*primals, table, gate)]
            first = torch.autograd.grad(f(*leaves).square().sum(), leaves, create_graph=True)
            inner = sum((g * t).sum() for g, t in zip(first, (*tangents, ttable, tgate), strict=True))
            results.append(torch.autograd.grad(inner, leaves))
        close(*results)


def test_alibi():
    """Slopes beside nothing else, one for each head or sequence and head, and beside what a function of the score reads."""
    primals, tangents = qkv(), qkv(seed=1)
    table, ttable = (torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in (2, 3))
    behind = (torch.arange(9)[:, None] - torch.arange(9)).clamp(min=0)

    def plain_of(slopes: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        s = s + torch.tanh(s) * table[:, None, :] - slopes[..., None, None].double() * behind
        return torch.softmax(s.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf), -1) @ v

    def second(f: Any, leaves: Any) -> Any:
        leaves = [x.clone().requires_grad_() for x in leaves]
        first = torch.autograd.grad(f(*leaves).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum((g * t).sum() for g, t in zip(first, (*tangents, ttable), strict=False)), leaves)

    for slopes in (torch.tensor([0.5, 0.25]), torch.tensor([[0.5, 0.25], [1.0, 0.125]])):
        for engine in engines_of({"dtype": "float64"}):
            given = {"causal": True, "alibi_slopes": slopes, "engine": engine}

            def with_table(q: Tensor, k: Tensor, v: Tensor, table: Tensor, given: Any = given) -> Tensor:
                return strobe.attention(q, k, v, score=lambda x, b, h, i, j: x + torch.tanh(x) * table[h, j], **given)

            of_plain = functools.partial(plain_of, slopes)
            found = strobe.attention_jvp(
                *primals,
                *tangents,
                score=lambda x, b, h, i, j: x + torch.tanh(x) * table[h, j],
                captured=[table],
                tcaptured=[ttable],
                **given,
            )
            close(found, torch.func.jvp(of_plain, (*primals, table), (*tangents, ttable)))
            close(second(with_table, (*primals, table)), second(of_plain, (*primals, table)))
            alone = functools.partial(of_plain, table=torch.zeros_like(table))
            close(strobe.attention_jvp(*primals, *tangents, **given), torch.func.jvp(alone, tuple(primals), tuple(tangents)))
            close(second(functools.partial(strobe.attention, **given), primals), second(alone, primals))


def test_a_tangent_of_the_bias_that_all_samples_share():
    primals = qkv(2, 2, 5, 4)
    samples = torch.stack([primals[0], primals[0].flip(-1), -primals[0]])
    for shape in ((2, 2, 5, 5), (1, 2, 5, 5), (1, 1, 1, 5), (5, 5)):
        bias, tbias = (torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (5, 6))

        def product(q: Tensor, bias: Tensor = bias, tbias: Tensor = tbias) -> Tensor:
            gradient = torch.func.grad(lambda b: strobe.attention(q, *primals[1:], bias=b).square().sum())
            return torch.func.jvp(gradient, (bias,), (tbias,))[1]

        close(torch.func.vmap(product)(samples), torch.stack([product(q) for q in samples]))


def test_slopes_that_require_grad_are_refused():
    q, k, v = qkv()
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    match = r"^alibi_slopes: requires grad, and attention has no gradient of it"
    for engine in (None, "reference"):
        with pytest.raises(NotImplementedError, match=match):
            strobe.attention_jvp(q, k, v, q, alibi_slopes=slopes, engine=engine)
        out, lse = strobe.attention(q, k, v, alibi_slopes=slopes.detach(), return_lse=True)
        leaf = q.clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=match):
            strobe.attention_backward(out, leaf, k, v, out, lse, alibi_slopes=slopes, engine=engine)
        strobe.attention_backward(out, q, k, v, out, lse, alibi_slopes=slopes, engine=engine)  # autograd has no part in this
        with torch.no_grad():
            strobe.attention_jvp(q, k, v, q, alibi_slopes=slopes, engine=engine)


def test_shards_are_refused(monkeypatch):
    """Within context_parallel(), of which the calls see only that there is one."""
    q, k, v = qkv()
    out, lse = strobe.attention(q, k, v, return_lse=True)
    monkeypatch.setattr(_attention, "CONTEXTS", [object()])
    for name, arguments in (("attention", (q, k, v)), ("attention_jvp", (q, k, v, q)), ("attention_backward", (out, q, k, v, out, lse))):
        with pytest.raises(RuntimeError, match=rf"^{name}\(\) inside context_parallel\(\): the tensors are shards; accepted is"):
            getattr(strobe, name)(*arguments)


def test_a_compiled_step():
    q, k, v = qkv()

    def step(q: Tensor, k: Tensor, v: Tensor, tq: Tensor) -> tuple[Tensor, Tensor]:
        out, tout = strobe.attention_jvp(q, k, v, tq, causal=True)
        return out.sum() + tout.square().sum(), tout

    leaves = [x.clone().requires_grad_() for x in (q, k, v, v)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves)
    plain_step = step(*leaves)
    close(compiled, plain_step)
    close(torch.autograd.grad(compiled[0], leaves), torch.autograd.grad(plain_step[0], leaves))


def test_what_is_refused():
    q, k, v = qkv()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    first = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(x.sum() for x in first), leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match="strobe.attention has no third derivative"):
        torch.autograd.grad(sum(x.sum() for x in second), leaves)
    with pytest.raises(ValueError, match=r"^tbias: given without bias"):
        strobe.attention_jvp(q, k, v, tbias=q)
    with pytest.raises(ValueError, match=r"^tq: .*shape"):
        strobe.attention_jvp(q, k, v, q[..., :2])
    with pytest.raises(ValueError, match=r"^tcaptured: "):
        strobe.attention_jvp(q, k, v, q, tcaptured=[q])
    with pytest.raises(TypeError, match=r"^tk: "):
        strobe.attention_jvp(q, k, v, q, 3)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="page_table: given for a jvp"):
        strobe.attention_jvp(q.detach(), k.detach(), v.detach(), q.detach(), page_table=table.expand(2, 1))


def test_explain_says_who_runs_it():
    q, k, v = qkv()
    for operation in ("jvp", "backward_jvp"):
        text = strobe.explain(q, k, v, operation=operation)
        assert text.startswith(f"attention, {operation}\n")
        assert " predicted" in text.partition("engines")[2]
    with pytest.raises(ValueError, match=r"^operation: 'sideways'; accepted is"):
        strobe.explain(q, k, v, operation="sideways")
    with pytest.raises(ValueError, match=r"^operation: 'jvp' beside backward=True"):
        strobe.explain(q, k, v, operation="jvp", backward=True)


def test_memory_is_linear_in_the_length():
    def workspace(operation: str, s: int) -> float:
        q = torch.empty(1, 1, s, 16)
        words = re.search(r"workspace ([\d.]+) (B|KiB|MiB)", strobe.explain(q, q, q, operation=operation, threads=1))
        assert words
        return float(words[1]) * {"B": 1, "KiB": 2**10, "MiB": 2**20}[words[2]]

    for operation in ("jvp", "backward_jvp"):
        assert workspace(operation, 1 << 18) < 5 * workspace(operation, 1 << 16)


def test_numpy_arrays():
    inputs = inputs_of(2, 4, 17, 33, 16, 24, hkv=2)
    tangents = directions(inputs)
    own = [x.numpy() for x in (inputs.q, inputs.k, inputs.v, tangents["tq"], tangents["tk"], tangents["tv"])]
    out, lse, tout, tlse = strobe.attention_jvp(*own, causal=True, return_lse=True)
    assert all(isinstance(x, np.ndarray) for x in (out, lse, tout, tlse))
    expected = strobe.attention_jvp(*map(torch.from_numpy, own), causal=True, return_lse=True)
    for x, y in zip((out, lse, tout, tlse), expected, strict=True):
        assert (torch.from_numpy(x) == y).all()
