"""Runs a call on an engine, on the fp64 oracle and by the plain formulas, and checks the engine's results by the accuracy clause."""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import plain
import strobe
from cases import Inputs, dense_problems
from device import DEVICE, EMULATED, on_device, running_on
from engines import beside_the_default, current_test, engines_under_test

Results = dict[str, Tensor]  # by name: "out", "lse", "max_logit", "column_sums", "dq", "dk", "dv", "dbias", "dsinks"
STATISTICS = ("lse", "max_logit", "column_sums")

FLOOR = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 0.0, torch.bfloat16: 0.0}
ORDERS = 3  # how many orders of summation of the plain formulas are tried
# A call is small if q has fewer than SMALL elements, or a bias or sinks with a gradient fewer than FEW. The formulas' error of one small
# call may be small by chance, so DRAWS more calls of the same kind are measured.
SMALL, FEW = 50_000, 1000
DRAWS = 4


def takes(engine: str, dtype: torch.dtype, d: int = 1, **options: Any) -> bool:
    """Whether the engine supports a call with that dtype and heads of d columns; some engines have one dtype only."""
    try:
        with running_on(engine):
            strobe.attention(*(torch.zeros(1, 1, 1, d, dtype=dtype, device=DEVICE) for _ in "qkv"), engine=engine, **options)
    except NotImplementedError:
        return False
    return True


def dtype_of(engine: str) -> torch.dtype:
    return torch.float32 if takes(engine, torch.float32, 64) else torch.bfloat16


def runs(inputs: Inputs, **how: Any) -> Iterator[tuple[str, Results]]:
    """Runs the call on each engine under test. An engine requested by name may refuse the call, the library's own choice must not."""
    yield from _runs(inputs, engines_under_test(inputs.q.shape, inputs.k.shape, how), how)


def _runs(inputs: Inputs, engines: list[str], how: dict[str, Any]) -> Iterator[tuple[str, Results]]:
    for engine in engines:
        try:
            yield engine, run(inputs, engine, **how)
        except NotImplementedError:
            continue


def run_or_skip(inputs: Inputs, engine: str, **how: Any) -> Results:
    try:
        return run(inputs, engine, **how)
    except NotImplementedError as refusal:
        pytest.skip(f"{engine} is not for this call: {str(refusal).rpartition(': ')[2]}")


def keys_of_a_block() -> dict[str, int]:
    """The tile_k that half of the tests ask for. By itself the Hopper backward takes 64 keys where a small call leaves SMs of a GPU idle,
    and 128 otherwise, as on the emulated GPU. These tests ask for the other number, which changes the forward's tile, too."""
    asks = zlib.crc32(current_test().encode()) % 2
    return {"tile_k": 64 if EMULATED else 128} if asks else {}


def _options(there: Inputs, engine: str | None, run: dict[str, Any]) -> dict[str, Any]:
    return there.options | (keys_of_a_block() if engine == "cuda-sm90" else {}) | there.run | run | {"engine": engine}


def multiplies_eight_bits(inputs: Inputs, engine: str | None, **run: Any) -> bool:
    """Whether this engine (None: the library's own choice) multiplies q, k and v in FP8, and so rounds P to E4M3, by explain()'s words."""
    there = on_device(inputs, DEVICE)
    handed = there.handed()
    options = {name: x for name, x in _options(there, engine, run).items() if name not in there.options} | handed.options
    with running_on(engine):
        said = strobe.explain(handed.q, handed.k, handed.v, aux=inputs.aux, **options)
    chosen = re.search(r"^choice\n  (\S+)", said, re.MULTILINE)
    return chosen is not None and re.search(rf"^  {chosen[1]} .*products of float8", said, re.MULTILINE) is not None


def run(inputs: Inputs, engine: str | None = None, **run: Any) -> Results:
    """Forward and every gradient, as a user gets them: through autograd, or with NumPy arrays through attention_backward."""
    there = on_device(inputs, "cpu" if engine == "reference" else DEVICE)
    options = _options(there, engine, run)
    with running_on(engine):
        run_it = _run_forward if not there.has_gradients else _run_numpy if there.numpy else _run_autograd
        results = run_it(there, options)
    return {name: t.cpu() for name, t in results.items()}


def _leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_()


def _run_autograd(inputs: Inputs, options: dict[str, Any]) -> Results:
    q, k, v = (_leaf(t) for t in (inputs.q, inputs.k, inputs.v))
    options = options | {name: _leaf(options[name]) for name in inputs.gradients}
    leaves = {"dq": q, "dk": k, "dv": v} | {"d" + name: options[name] for name in inputs.gradients}
    out, lse, aux = _split(strobe.attention(q, k, v, **options, return_lse=inputs.lse, aux=inputs.aux), inputs)
    outputs, gradients = [out], [inputs.dout]
    if inputs.dlse is not None:
        outputs, gradients = [out, lse], [inputs.dout, inputs.dlse]
    found = torch.autograd.grad(outputs, list(leaves.values()), gradients)
    assert not any(x.requires_grad for x in aux.values())
    results = {"out": out.detach()} | dict(zip(leaves, found, strict=True)) | aux
    if lse is not None:
        results["lse"] = lse.detach()
    return results


def _run_forward(inputs: Inputs, options: dict[str, Any]) -> Results:
    """The forward of paged or quantised keys."""
    handed = inputs.handed()
    options = {name: x for name, x in options.items() if name not in inputs.options} | handed.options
    arrays: list[Any] = [handed.q, handed.k, handed.v]
    if inputs.numpy:
        options = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in options.items()}
        arrays = [_reversed(t) for t in arrays]
    out, lse, aux = _split(strobe.attention(*arrays, **options, return_lse=inputs.lse, aux=inputs.aux), inputs)
    results = {"out": out, **({} if lse is None else {"lse": lse}), **aux}
    if inputs.numpy:
        results = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in results.items()}
    if "column_sums" in results and inputs.page:
        results["column_sums"] = inputs.packed_columns(results["column_sums"])
    return results


def _split(result: Any, inputs: Inputs) -> tuple[Any, Any, dict[str, Any]]:
    """out, lse if it was asked for, and the results named by inputs.aux, from the result of attention()."""
    if not inputs.aux:
        return (*result, {}) if inputs.lse else (result, None, {})
    assert result._fields == ("out", *["lse"] * inputs.lse, *inputs.aux)
    return result.out, getattr(result, "lse", None), {name: getattr(result, name) for name in inputs.aux}


def _reversed(t: Tensor) -> np.ndarray:
    """t with negative strides on every axis, with the same values."""
    flip = (slice(None, None, -1),) * t.dim()
    return np.ascontiguousarray(t.numpy()[flip])[flip]


def _run_numpy(inputs: Inputs, options: dict[str, Any]) -> Results:
    options = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in options.items()}
    q, k, v, dout = (_reversed(t) for t in (inputs.q, inputs.k, inputs.v, inputs.dout))
    out, lse, aux = _split(strobe.attention(q, k, v, **options, return_lse=True, aux=inputs.aux), dataclasses.replace(inputs, lse=True))
    dlse = None if inputs.dlse is None else _reversed(inputs.dlse)
    found = strobe.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    results = {"out": out, "lse": lse, **aux, "dq": found.dq, "dk": found.dk, "dv": found.dv}
    results |= {"d" + name: getattr(found, "d" + name) for name in inputs.gradients}
    return {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in results.items()}


def oracle(inputs: Inputs) -> Results:
    """The reference's results in float64, from the same inputs. A paged call gets the gradients of the call without pages; a call with
    quantised k and v has none."""
    with running_on("reference"):
        forward = inputs.handed()
        out, lse, *aux = strobe.reference(forward.q, forward.k, forward.v, aux=inputs.aux, **forward.options)
        if inputs.page:
            aux = [inputs.packed_columns(x) if name == "column_sums" else x for name, x in zip(inputs.aux, aux, strict=True)]
        if inputs.quant is not None:
            return {"out": out, "lse": lse} | dict(zip(inputs.aux, aux, strict=True))
        found = strobe.reference_backward(inputs.dout, inputs.q, inputs.k, inputs.v, dlse=inputs.dlse, **inputs.options)
    results = {"out": out, "lse": lse, "dq": found.dq, "dk": found.dk, "dv": found.dv} | dict(zip(inputs.aux, aux, strict=True))
    return results | {"d" + name: getattr(found, "d" + name) for name in inputs.gradients}


def run_plain(inputs: Inputs, dtype: torch.dtype, from_output: bool = False, seed: int | None = None, **how: bool) -> Results:
    """The plain formulas in dtype, with sums in the order that seed shuffles. from_output, round_once and eight_bits: see
    plain.attention."""
    q, k, v = (_leaf(t.to(dtype)) for t in (inputs.q, inputs.k, inputs.v))
    options = dict(inputs.options)
    for name in ("bias", "sinks"):
        if name in options:
            options[name] = _leaf(options[name].to(dtype) if dtype == torch.float64 else options[name])
    leaves = {"dq": q, "dk": k, "dv": v} | {"d" + name: options[name] for name in inputs.gradients}
    dlse = None if inputs.dlse is None else inputs.dlse.to(dtype)
    leaf_inputs = dataclasses.replace(inputs, q=q, k=k, v=v, dout=inputs.dout.to(dtype), dlse=dlse, options=options)
    outs, lses, outputs, gradients = [], [], [], []
    statistics = []  # (largest scores, sums of columns, keys) of each dense problem
    for (qs, ks, vs, dout, dl), score, place in dense_problems(leaf_inputs):
        order = None
        if seed is not None:
            g = torch.Generator().manual_seed(seed)
            order = torch.randperm(qs.shape[-1], generator=g), torch.randperm(ks.shape[2], generator=g)
        out, lse = plain.attention(qs, ks, vs, score, from_output, order, **how)
        if inputs.aux:
            with torch.no_grad():
                largest, sums = plain.statistics(qs, ks, score, order)
            statistics.append((largest, sums, slice(0, ks.shape[2]) if place is None else place[1]))
        outs.append(out)
        lses.append(lse)
        outputs.append(out)
        gradients.append(dout)
        if dl is not None:
            outputs.append(lse)
            gradients.append(dl)
    found = torch.autograd.grad(outputs, list(leaves.values()), gradients, allow_unused=True) if outputs else [None] * len(leaves)
    found = [torch.zeros_like(leaf) if x is None else x for x, leaf in zip(found, leaves.values(), strict=True)]
    if inputs.varlen:
        outs, lses = [o[0].transpose(0, 1) for o in outs], [x[0] for x in lses]
        out = torch.cat([q.new_zeros(0, q.shape[1], v.shape[2]), *outs])
        lse = torch.cat([q.new_zeros(q.shape[1], 0), *lses], dim=1)
    else:
        out, lse = torch.cat(outs), torch.cat(lses)
        out = out.transpose(1, 2) if options.get("layout") == "bshd" else out
    results = {"out": out.detach(), "lse": lse.detach()}
    if inputs.quant is None:
        results |= dict(zip(leaves, found, strict=True))
    return results | {name: x for name, x in _auxiliary(leaf_inputs, statistics).items() if name in inputs.aux}


def _auxiliary(inputs: Inputs, statistics: list[tuple[Tensor, Tensor, slice]]) -> Results:
    """max_logit and column_sums from the results of dense problems. A key that is in none of them has the sum 0."""
    axis = 0 if inputs.varlen else 1 if inputs.options.get("layout") == "bshd" else 2
    heads, keys = inputs.q.shape[1 if inputs.varlen or axis == 2 else 2], inputs.k.shape[axis]
    if inputs.varlen:
        columns = inputs.q.detach().new_zeros(heads, keys)
        for _, sums, place in statistics:
            columns[:, place] = sums[0]
    else:
        columns = (
            torch.cat([torch.nn.functional.pad(sums, (0, keys - sums.shape[2])) for _, sums, _ in statistics])[:, :, :keys]
            if statistics
            else None
        )
    largest = torch.cat([inputs.q.detach().new_zeros(0, heads), *(largest for largest, _, _ in statistics)])
    return {"max_logit": largest} | ({} if columns is None else {"column_sums": columns})


def _magnitude(t: Tensor) -> float:
    t = t.double()
    finite = t[t.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def error(t: Tensor, ref: Tensor) -> float:
    """The largest difference; infinite if one is infinite or NaN and the other is not the same."""
    t, ref = t.double(), ref.double()
    same = (t == ref) | (t.isnan() & ref.isnan())
    difference = torch.where(same, 0.0, (t - ref).abs())
    return float(difference.nan_to_num(nan=math.inf).max()) if difference.numel() else 0.0


def ulp(dtype: torch.dtype, magnitude: float) -> float:
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(magnitude)) if magnitude else 0.0


def shuffled(inputs: Inputs, seed: int) -> Inputs:
    """A call of the same kind: the tokens of q, of k, of v and of dout are in another order; everything else stays in place."""
    g = torch.Generator().manual_seed(seed)
    axis = 0 if inputs.varlen else 1 if inputs.options.get("layout") == "bshd" else 2
    tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "dout")}
    order = {name: torch.randperm(t.shape[axis], generator=g) for name, t in tensors.items()}
    return dataclasses.replace(inputs, **{name: t.index_select(axis, order[name]) for name, t in tensors.items()})


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype)


class Yardstick:
    """The allowed difference of each result from the oracle: the accuracy clause of the contract.

    float32: the larger of 1e-6 of max|ref| and twice the plain formulas' error; float64: the same with 1e-12. float16 and bfloat16: twice
    the plain formulas' error in that precision, plus one ulp of the output. LSE, which is float32 there, must also be within the larger of
    1e-4 of max|ref| and twice the formulas' error in float32, from quantised K and V rounded to the call's dtype. The plain formulas' error
    is the largest over orders of summation and calls of the same kind, with D from P and with D from O. flushed: gradients smaller than
    this may be 0."""

    def __init__(self, inputs: Inputs, flushed: float = 0.0):
        self.inputs = inputs
        self.ref = oracle(inputs)
        dtype = inputs.q.dtype
        calls = [(inputs, self.ref, seed) for seed in (None, *range(1, ORDERS))]
        few = {f"d{name}" for name in inputs.gradients if inputs.options[name].numel() < FEW}
        others = [shuffled(inputs, seed) for seed in range(1, DRAWS + 1)] if few or inputs.q.numel() < SMALL else []
        alike = [(other, run_plain(other, torch.float64), None) for other in others]
        if inputs.q.numel() < SMALL:
            calls += alike
        plain_error = self._plain_errors(calls, dtype)
        if few and inputs.q.numel() >= SMALL:
            plain_error |= {name: max(x, plain_error[name]) for name, x in self._plain_errors(alike, dtype).items() if name in few}
        # The oracle and the orders above may round each product of q·k; an engine with multiply-adds does not.
        if dtype == torch.float64 and inputs.q.numel() < SMALL:
            for from_output in (False, True):
                for name, t in run_plain(inputs, dtype, from_output, round_once=True).items():
                    plain_error[name] = max(plain_error[name], error(t, self.ref[name]))
        gross = self._gross()
        # A gradient that vanishes identically (every row sees one key: P = 1, dP = D) is measured by the terms that cancel.
        self.vanishing = vanishing = {name for name, size in gross.items() if _magnitude(self.ref[name]) < 1e-9 * size}
        self.size = {name: gross[name] if name in vanishing else _magnitude(ref) for name, ref in self.ref.items()}
        # The float64 oracle also rounds: terms before they cancel, and scores as large as LSE.
        lse = min(max(_magnitude(self.ref["lse"]), 1.0), 1e5)
        self.oracle_error = {name: 4 * torch.finfo(torch.float64).eps * lse * gross.get(name, size) for name, size in self.size.items()}
        self.allowed = {name: max(FLOOR[dtype] * size, 2 * plain_error[name]) for name, size in self.size.items()}
        if dtype == torch.float64:
            self.allowed = {name: max(self.oracle_error[name], allowed) for name, allowed in self.allowed.items()}
        if dtype in (torch.float16, torch.bfloat16):
            for name, size in self.size.items():
                output = dtype if name in vanishing else self._dtype(name)  # a gradient that vanishes carries the rounding of O
                self.allowed[name] += ulp(output, size)
            if "column_sums" in self.allowed:  # P in float32: docs/semantics.md, "Rows"
                self.allowed["column_sums"] += self.size["column_sums"] * 2.0**-21 * (1 + 2 * self.size["lse"])
            if inputs.quant is not None:  # cuda-sm90 dequantises to q's dtype, and reads numbers that are rounded to it
                calls = [(dataclasses.replace(x, k=_rounded(x.k, dtype), v=_rounded(x.v, dtype)), ref, seed) for x, ref, seed in calls]
            float32 = self._plain_errors(calls, torch.float32)
            for name in self.allowed.keys() & {*STATISTICS}:
                self.allowed[name] = min(self.allowed[name], max(1e-4 * self.size[name], 2 * float32[name]))
        for name in self.allowed.keys() - {"out", *STATISTICS}:
            self.allowed[name] = max(self.allowed[name], flushed)
        self.of_products = 0.0  # what rounding P to E4M3 adds to out, where an engine multiplies q in FP8
        if inputs.quant is not None and inputs.quant.q is not None:
            of_p = [error(run_plain(x, torch.float64, seed=seed, eight_bits=True)["out"], ref["out"]) for x, ref, seed in calls]
            self.of_products = 2 * max(of_p)

    def _plain_errors(self, calls: list[tuple[Inputs, Results, int | None]], dtype: torch.dtype) -> dict[str, float]:
        errors = dict.fromkeys(self.ref, 0.0)
        for inputs, ref, seed in calls:
            for from_output in (False, True):
                for name, t in run_plain(inputs, dtype, from_output, seed).items():
                    errors[name] = max(errors[name], error(t, ref[name]))
        if dtype != torch.float32 and not all(map(math.isfinite, errors.values())):
            return self._plain_errors(calls, torch.float32)  # the formulas overflowed in 16 bits and give no measure
        return errors

    def _gross(self) -> dict[str, float]:
        """The size of the terms dP and D whose difference makes these gradients."""
        o, ref = self.inputs.options, self.ref
        q, k, out, dout = (t.double() for t in (self.inputs.q, self.inputs.k, ref["out"], self.inputs.dout))
        scale = abs(o["scale"] if o.get("scale") is not None else q.shape[-1] ** -0.5)
        d = _magnitude((dout * out).sum(-1))
        gross = {"dq": scale * d * _magnitude(k), "dk": scale * d * _magnitude(q), "dbias": d}
        return {name: size for name, size in gross.items() if name in ref}

    def _dtype(self, name: str) -> torch.dtype:
        """The dtype of a result, by the contract."""
        wide = torch.float64 if self.inputs.q.dtype == torch.float64 else torch.float32
        if name in ("dbias", "dsinks"):
            return self.inputs.options[name[1:]].dtype
        return wide if name in STATISTICS else self.inputs.q.dtype

    def faults(self, results: Results, engine: str | None = "", products: bool | None = None, **how: Any) -> list[str]:
        """engine: the name of the engine whose results run(inputs, engine, **how) gave; None: the library's own choice. products: whether
        it multiplied in FP8, of results that run() did not give."""
        found = []
        allowed = dict(self.allowed)
        if self.of_products and (multiplies_eight_bits(self.inputs, engine, **how) if products is None else products):
            allowed["out"] += self.of_products
        for name, t in results.items():
            ref = self.ref[name]
            if t.dtype != self._dtype(name):
                found.append(f"{name} is {t.dtype}, not {self._dtype(name)}")
            if t.shape != ref.shape:
                found.append(f"{name} has shape {tuple(t.shape)}, not {tuple(ref.shape)}")
                continue
            off = error(t, ref)
            if not off <= allowed[name]:
                found.append(f"{name}: error {off:.3g}, allowed {allowed[name]:.3g}, max|ref| {self.size[name]:.3g}")
        empty = (self.ref["lse"] == -torch.inf)[..., None]
        out = results["out"]
        if self.inputs.varlen:
            empty = empty.transpose(0, 1)
        elif self.inputs.options.get("layout") == "bshd":
            empty = empty.transpose(1, 2)
        if out.shape[:-1] == empty.shape[:-1] and (out[empty.expand(out.shape)] != 0).any():
            found.append("out is not zero in a row that sees no key")
        return found


def assert_matches(inputs: Inputs, flushed: float = 0.0, **how: Any) -> None:
    """Checks every engine that supports the call, and the library's own choice, by the accuracy clause."""
    yardstick = Yardstick(inputs, flushed)
    faults = [f"default: {fault}" for fault in yardstick.faults(run(inputs, **how), None, **how)]
    for engine, results in _runs(inputs, beside_the_default(inputs.q.shape, inputs.k.shape, how), how):
        faults += [f"{engine}: {fault}" for fault in yardstick.faults(results, engine, **how)]
    assert not faults, "\n".join(faults)
