"""Derivatives in the direction of tangents, and second derivatives: all pairs of the contract's options, against formulas in float64 that
PyTorch differentiates by itself."""

from __future__ import annotations

import dataclasses
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


def compare(inputs: Inputs, found: Results, measure: Any, what: str) -> list[str]:
    """What is wrong with results, against formulas in float64 and the error of the formulas in the call's dtype."""
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
        if not error(x, exact[name]) <= allowed:
            wrong.append(f"{what}: {name} is off by {error(x, exact[name]):.3g}, allowed is {allowed:.3g} of {size:.3g}")
    return wrong


def engines_of(case: dict[str, Any]) -> list[str | None]:
    return [None, "reference", *beside_the_default()]


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


def refused(case: dict[str, Any], engine: str | None, refusal: NotImplementedError) -> bool:
    return engine in ("cpu-avx512bf16", "cpu-amx") and case["dtype"] != "bfloat16"


@pytest.mark.parametrize("number", range(len(CASES)))
def test_jvp(number):
    case, wrong = CASES[number], []
    inputs = build(case)
    tangents = directions(inputs)
    for engine in engines_of(case):
        try:
            found = run_jvp(inputs, tangents, engine)
        except NotImplementedError as refusal:
            assert refused(case, engine, refusal), refusal
            continue
        wrong += compare(inputs, found, lambda dtype: plain_jvp(inputs, tangents, dtype), str(engine))
    assert not wrong, (case, wrong)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_second_derivatives(number):
    case, wrong = CASES[number], []
    inputs = build(case)
    tangents = directions(inputs)
    for engine in engines_of(case):
        try:
            found = run_second(inputs, tangents, engine)
        except NotImplementedError as refusal:
            assert refused(case, engine, refusal), refusal
            continue
        wrong += compare(inputs, found, lambda dtype: plain_second(inputs, tangents, dtype), str(engine))
    assert not wrong, (case, wrong)


def test_numpy_arrays():
    inputs = inputs_of(2, 4, 17, 33, 16, 24, hkv=2)
    tangents = directions(inputs)
    own = [x.numpy() for x in (inputs.q, inputs.k, inputs.v, tangents["tq"], tangents["tk"], tangents["tv"])]
    out, lse, tout, tlse = strobe.attention_jvp(*own, causal=True, return_lse=True)
    assert all(isinstance(x, np.ndarray) for x in (out, lse, tout, tlse))
    expected = strobe.attention_jvp(*map(torch.from_numpy, own), causal=True, return_lse=True)
    for x, y in zip((out, lse, tout, tlse), expected, strict=True):
        assert (torch.from_numpy(x) == y).all()
