"""Shapes and options by hypothesis: whatever is legal is right."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, given, settings

from cases import build
from check import Yardstick, available_engines, run
from drawn_cases import cases

LONG = bool(os.environ.get("STROBE_TRIPLES"))  # more shapes, others each time


@settings(max_examples=3000 if LONG else 80, deadline=None, derandomize=not LONG, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_legal_call(case):
    inputs = build(case)
    yardstick = Yardstick(inputs)
    faults = []
    for engine in (None, *available_engines()):
        try:
            results = run(inputs, engine)
        except NotImplementedError:
            assert engine is not None
            continue
        faults += [f"{engine or 'default'}: {fault}" for fault in yardstick.faults(results)]
    assert not faults, "\n".join(faults)
