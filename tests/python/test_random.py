"""Calls drawn at random from all that the contract allows, compared with formulas of their own: random_draw.py draws them,
random_formulas.py has the formulas, random_judge.py applies the accuracy clause. random_call.py repeats one of them."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from device import DEVICE
from engines import LONG
from random_call import FUNCTIONS, drawn, engines, faults, replay, run
from random_dense import Dense, dropout_keeps
from random_draw import CALLS
from random_formulas import scores_of
from random_function import ARGUMENTS, BY_CONSTANT, CONDITIONS, INTEGERS, OTHERS, STEPS, UNARY, Function, Placed, Step, Table
from random_judge import Judge

sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))
import philox

CALLS_A_TEST = 25
TESTS = 20 * (50 if LONG else 1)


@pytest.mark.parametrize("first", range(0, TESTS * CALLS_A_TEST, CALLS_A_TEST))
@pytest.mark.parametrize("begin", [0, FUNCTIONS], ids=["any", "functions"])
def test_random_calls(begin, first):
    found = []
    for number in range(
        begin + first * CALLS, begin + (first + CALLS_A_TEST) * CALLS, CALLS
    ):  # a step of CALLS: consecutive numbers share their options
        call = drawn(number)
        wrong = faults(call, engines(call))
        if wrong:
            found += [f"{replay(number, None, False)}", f"  {call}", *(f"  {fault}" for fault in wrong)]
    assert not found, "\n".join(found)


def test_a_number_is_one_call():
    for number in range(0, 40 * CALLS, CALLS):
        first, second = drawn(number), drawn(number)
        assert str(first) == str(second)
        for name in ("q", "k", "v", "dout"):
            one, other = getattr(first, name), getattr(second, name)
            assert one.stride() == other.stride()
            assert torch.equal(one.nan_to_num(nan=7), other.nan_to_num(nan=7))


def test_what_is_drawn_holds_every_option():
    words = [drawn(number).words for number in range(0, 400 * CALLS, CALLS)]
    for name in ("dtype", "packed", "band", "alignment", "score", "alibi", "mask", "sinks", "layout", "spoil", "length", "aligned"):
        assert len({x[name] for x in words}) >= 2, name
    assert {x["dtype"] for x in words} == {"float64", "float32", "float16", "bfloat16"}
    assert {x["score"] for x in words} == {"dot", "softcap", "hyperbolic"}
    assert any(x["d"] != x["dv"] for x in words)
    assert any(x["d"] > 256 for x in words)
    assert any(x["dv"] > 256 for x in words)
    assert any(x["h"] != x["hkv"] for x in words)
    assert any(x["scale"] == 0 for x in words)
    assert any(x["scale"] and x["scale"] < 0 for x in words)
    assert all(any(x[name] for x in words) for name in ("blocks", "tile", "dropout"))
    assert {flag for x in words for flag in x["flags"]} == {"deterministic", "exact_max", "check", "invariant"}
    assert {bool(x["packed"]) for x in words if x["page"]} == {True, False}
    assert max(max(x["sq"], x["sk"]) for x in words) > 4096


def test_functions_that_are_drawn_do_all_that_functions_do():
    calls = [drawn(FUNCTIONS + number) for number in range(0, 200 * CALLS, CALLS)]
    functions = [placed for call in calls for placed in (call.score, call.mask) if placed]
    steps = {step.name for function in functions for step in function.steps}
    assert steps == {"x", *ARGUMENTS, *UNARY, *INTEGERS, *BY_CONSTANT, *CONDITIONS, *OTHERS, "load"}
    assert {len(table.axes) for function in functions for table in function.tables} == {0, 1, 2}
    assert STEPS - 2 <= max(sum(len(step.inputs) > 0 for step in function.steps) for function in functions) <= STEPS
    for name in ("packed", "part", "page", "quant", "blocks", "dropout", "sinks", "bias", "alibi"):
        assert any(call.words[name] for call in calls if call.score), name


def _same_in_some_order(x: torch.Tensor, y: torch.Tensor, atol: float) -> bool:
    return torch.allclose(x.sort().values, y.sort().values, rtol=0, atol=atol)


def test_calls_of_the_same_kind_have_the_same_tokens_elsewhere():
    moved = apart = 0
    for number in range(0, 60 * CALLS, CALLS):
        x = drawn(number).dense
        y = x.shuffled(1)
        for before, after, lengths in ((x.q, y.q, x.lengths and x.lengths[0]), (x.k, y.k, x.lengths and x.lengths[1])):
            rows, mixed = ([t[b, :, : lengths[b] if lengths else t.shape[2]] for b in range(t.shape[0])] for t in (before, after))
            for b, n in enumerate(lengths or []):
                assert torch.equal(before[b, :, n:], after[b, :, n:])  # padding stays unchanged
            if before.shape[0]:
                ulps = 4 * torch.finfo(x.q.dtype).eps * float(before.double().abs().sum(3).max()) if before.numel() else 0.0
                same = partial(_same_in_some_order, atol=ulps)
                sums = [torch.cat([r.double().sum(2).flatten() for r in t]) for t in (rows, mixed)]
                assert same(*sums)
                moved += any(not same(*(r[0].double().sum(1) for r in pair)) for pair in zip(rows, mixed, strict=True))
                apart += not torch.isin(torch.cat([r.flatten() for r in mixed]), torch.cat([r.flatten() for r in rows])).all()
    assert moved > 30  # tokens that moved to another head or sequence
    assert apart > 60  # numbers that moved by an ulp or two


def test_small_calls_are_measured_by_more_of_their_kind():
    calls = [drawn(number) for number in range(0, 100 * CALLS, CALLS)]
    tokens = {int(Judge(call).ref["lse"].numel()): call for call in calls if call.words["dtype"] == "float32"}
    few, many = (pick([n for n in tokens if n]) for pick in (min, max))
    assert sum(1 for _ in Judge(tokens[few])._more) > 3 * sum(1 for _ in Judge(tokens[many])._more)


def test_a_scalar_of_one_row_may_be_off_by_the_rounding_of_its_d():
    """f = x tanh(t) where one row is seen, whose dO is V of the key that it mostly sees, so that D is large, beside a key of nearly the
    same x. The forward of an engine rounds P, relative to a maximum that lags behind, and O; all else is exact here. (In number
    1153094427321831553 of tests/gpu/random_calls.py this made 1.23 times the error that the formulas' error in other calls allows.)"""
    exceeded = 0
    for seed, first, second in ((1, 4, 3.7), (2, 4, 3.6), (3, 2, 1.6)):
        g = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 1, n, 128, generator=g).bfloat16() for n in (1, 32, 32))
        k[0, 0, :2] = torch.tensor([[first], [second]]) * q[0, 0, 0]
        steps = [*(Step(name) for name in ARGUMENTS), Step("x"), Step("load"), Step("bounded_product", (4, 5))]
        function = Function(steps, [Table("real", (), values=torch.tensor(0.97))])
        places = tuple(torch.arange(n).view([-1 if axis == own else 1 for axis in range(4)]) for own, n in enumerate((1, 1, 1, 32)))
        dense = Dense(
            q, k, v, dout=v[:, :, :1], dlse=torch.zeros(1, 1, 1), seen=torch.ones(1, 1, 1, 32, dtype=torch.bool),
            distance=torch.zeros(1, 1, 1, 32), scale=0.1, softcap=0.0, hyperbolic=None, slopes=None, bias=None, sinks=None, keep=None,
            keep_rate=1.0, lengths=None, function=Placed(function, places),
        )  # fmt: skip
        call = dataclasses.replace(drawn(0), dense=dense, packing=None, score=function, words={"dtype": "bfloat16"}, options={})
        judge = Judge(call)

        _, s, _, slopes = scores_of(dense, torch.float64)
        p, values, dout = s.softmax(3), v.double(), dense.dout.double()
        found = []
        for lag in range(32):
            rounded = (p * 2 ** (lag / 32)).bfloat16().double() / 2 ** (lag / 32)
            d = (dout * (rounded @ values).bfloat16()).sum(3, keepdim=True)
            found.append((p * (dout @ values.mT - d) * slopes[5]).sum())
        off = max(abs(x - judge.ref["dtable 0"]) for x in found)

        for _ in judge._more:
            pass
        exceeded += bool(off > judge.allowed("dtable 0"))  # before the error of D is counted
        assert not judge.faults({"dtable 0": (judge.ref["dtable 0"] + off).float()})
        assert judge.faults({"dtable 0": (judge.ref["dtable 0"] + 4 * off).float()})
    assert exceeded


@pytest.mark.parametrize("shape", [(2, 3, 37, 50), (1, 1, 1, 1), (1, 2, 16, 33)])
def test_dropout_by_groups_is_the_contracts(shape):
    options = {"dropout": 0.3, "seed": -5, "offset": 2**35 + 3}
    keep, rate = dropout_keeps(options, *shape, DEVICE)
    assert torch.equal(keep.cpu(), torch.from_numpy(philox.keep(shape, 0.3, 2**64 - 5, 2**35 + 3)))
    assert rate == 179 / 256


def test_the_judge_refuses_what_is_a_little_wrong():
    """A few calls in float32: results with a relative error of 5e-6, and results of q·k without its last column, are refused."""
    calls = [call for call in (drawn(number) for number in range(0, 120 * CALLS, CALLS)) if call.words["dtype"] == "float32"]
    calls = [call for call in calls if call.packing is None and call.words["score"] == "dot" and call.dense.q.shape[2] >= 20][:2]
    assert len(calls) == 2
    refused = []
    for call in calls:
        results, q = run(call, None), call.q.clone()
        q[..., -1] = 0
        assert not Judge(call).faults(results)
        refused += [bool(Judge(call).faults({name: t * (1 + 5e-6) for name, t in results.items()}))]
        refused += [bool(Judge(call).faults(run(dataclasses.replace(call, q=q), None)))]
    assert all(refused), refused
