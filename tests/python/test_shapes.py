"""Shapes and options by hypothesis: every legal call is right."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from cases import build
from check import Yardstick, run
from drawn_cases import cases
from engines import LONG, beside_the_default


@settings(max_examples=3000 if LONG else 50, deadline=None, derandomize=not LONG, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_legal_call(case):
    inputs = build(case)
    yardstick = Yardstick(inputs)
    faults = []
    for engine in (None, *beside_the_default(case)):
        try:
            results = run(inputs, engine)
        except NotImplementedError:
            assert engine is not None
            continue
        faults += [f"{engine or 'default'}: {fault}" for fault in yardstick.faults(results, engine)]
    assert not faults, "\n".join(faults)
