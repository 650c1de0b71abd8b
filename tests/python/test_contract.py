"""All pairs (make test-long: all triples) of the contract's options, forward and every gradient, on several engines, against the oracle."""

from __future__ import annotations

import pytest
import torch

from cases import FACTORS, build, contract, tuples
from check import Yardstick, error, oracle, run, run_plain
from device import ON_GPU
from engines import LONG, beside_the_default

STRENGTH = 3 if LONG else 2
CASES = contract(STRENGTH)
# The dtypes of an engine that does not support all of them.
SPECIAL = {
    "cpu-avx512bf16": {"bfloat16"},
    "cpu-amx": {"bfloat16"},
    "cuda-mma": {"float16", "bfloat16"},
    "cuda-sm90": set(),
    "cuda-tf32": set(),
}


def test_every_combination_is_among_the_cases():
    for names, possible in tuples(STRENGTH).items():
        held = {tuple(FACTORS[name].index(case[name]) for name in names) for case in CASES}
        assert possible <= held, names


def leaves_quantised(engine: str | None, refusal: str) -> bool:
    """Whether an engine may refuse quantised keys. cpu-amx takes only few queries with scales per row, at least five rows to a key head."""
    if ON_GPU:
        return engine not in (None, "cuda-simt")
    return engine == "cpu-avx512bf16" or (engine == "cpu-amx" and ("but for" in refusal or "fewer than 5 rows" in refusal))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_case(number, record_property):
    case = CASES[number]
    if ON_GPU and case["flag"] == "allow_tf32":  # allow_tf32 allows more error than the contract: tests/gpu/test_runtime.py tests it
        case = case | {"flag": None}
    inputs = build(case)
    yardstick = Yardstick(inputs)
    faults = []
    for name, t in run_plain(inputs, torch.float64).items():  # two independent float64 evaluations, because the oracle may err, too
        off = error(t, yardstick.ref[name])
        if not off <= max(1e-12 * yardstick.size[name], yardstick.oracle_error[name]):
            faults.append(f"the oracle and the formulas in float64 differ by {off:.3g} in {name}")
    compared = {}
    for engine in (None, *beside_the_default()):
        try:
            results = run(inputs, engine)
        except NotImplementedError as refusal:
            if ON_GPU and case["flag"] == "invariant" and "invariant" in str(refusal):
                continue  # with `invariant` a GPU engine may refuse some block sizes, this bias, or every call
            special = SPECIAL.get(engine, {case["dtype"]})
            if case["part"] and case["bias"] and engine == "cuda-mma":  # cuda-mma leaves the backward of most of these to cuda-simt
                special = set()
            if case["page"] and engine not in (None, "cuda-simt", "cuda-mma") and ON_GPU:  # other GPU engines may refuse pages
                special = set()
            if case["quant"] and leaves_quantised(engine, str(refusal)):
                special = set()
            if case["dtype"] in special:
                faults.append(f"{engine or 'default'} refuses: {refusal}")
            continue
        compared[engine or "default"] = len(results)
        faults += [f"{engine or 'default'}: {fault}" for fault in yardstick.faults(results, engine)]
    record_property("strength", {2: "pairs", 3: "triples"}[STRENGTH])
    record_property("compared", compared)
    assert not faults, "\n".join([f"{name} = {value!r}" for name, value in case.items()] + faults)


@pytest.mark.parametrize("number", range(0, len(CASES), 10))
def test_the_oracle_as_an_engine(number):
    """engine="reference": the oracle's numbers, rounded once, in the dtypes of every engine."""
    inputs = build(CASES[number])
    expected = oracle(inputs)
    for name, t in run(inputs, "reference").items():
        ref = expected[name]
        half_ulp = 0.501 * torch.finfo(t.dtype).eps * ref.abs().clamp(min=torch.finfo(t.dtype).smallest_normal)
        assert ((t == ref) | ((t - ref).abs() <= half_ulp)).all(), name
