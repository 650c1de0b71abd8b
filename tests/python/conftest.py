"""Counts what test_contract.py compared, prints it at the end and records it in build/contract.json."""

from __future__ import annotations

import gc
import json
import os
from collections import Counter, defaultdict
from pathlib import Path

# Tests run concurrently and the plain formulas are small, so tests use one OpenMP thread unless they ask for more.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from dear import DEAR, ENDS, SHARE
from device import ON_GPU
from engines import LONG, SEED, available_engines, is_drawn, leave_out, part, thinned

RECORD = Path(__file__).parents[2] / "build" / "contract.json"
THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts with the same seed and number of threads, whichever worker runs it and whatever the previous test set."""
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)


@pytest.fixture(scope="session")
def workers():
    """Processes of torch.distributed for all tests that need some."""
    from distributed_workers import Workers

    made = Workers()
    yield made
    made.close()


def pytest_report_header(config):
    if LONG or ON_GPU:
        return "every engine"
    what = "engines, cases, kernels" if is_drawn(config) else "engines"
    return f"drawn by STROBE_TEST_SEED={SEED}: {what}; make test-long takes all"


def pytest_collection_finish():
    gc.freeze()  # garbage collections do not scan PyTorch and the tests


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Draws cases before -k selects tests, so that the draw does not depend on the selection."""
    if not LONG:
        leave_out(config, items, {item for item in items if item.get_closest_marker("long")})
    if not is_drawn(config):
        return
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    available, left_out = available_engines(), set()
    engines = {item: engine for item in here if (engine := _parameter(item, "engine")) in available}
    alike, cases = defaultdict(list), defaultdict(list)
    for item, engine in engines.items():
        alike[item.nodeid.replace(engine, "")].append(item)  # tests that differ in their engine alone
    for what, found in alike.items():
        kept = thinned([engines[item] for item in found], what)
        left_out.update(item for item in found if engines[item] not in kept)
    for item in here:
        parameters = DEAR.get(item.path.name, {}).get(getattr(item, "originalname", ""))
        if item not in left_out and parameters is not None:
            group = [engines.get(item), *(str(_parameter(item, name)) for name in parameters.split())]
            cases[f"{item.path.name}::{item.originalname} {group}"].append(item)
    for what, found in cases.items():
        left_out.update({*found}.difference(part(found, what, SHARE)))
    ends = {*ENDS}.difference(part([*ENDS], "files", len(ENDS)))
    left_out.update(item for item in here if item.path.name in ends)
    leave_out(config, items, left_out)


def _parameter(item, name):
    return item.callspec.params.get(name) if hasattr(item, "callspec") else None


def pytest_terminal_summary(terminalreporter):
    outcomes, cases, compared, strength = Counter(), Counter(), Counter(), ""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            properties = dict(report.user_properties)
            if report.when == "call" and "compared" in properties:
                strength = properties["strength"]
                outcomes[outcome] += 1
                for engine, results in properties["compared"].items():
                    cases[engine] += 1
                    compared[engine] += results
    if not outcomes:
        return
    terminalreporter.section("contract")
    terminalreporter.line(f"{outcomes.total()} cases, all {strength} of the options; {compared.total()} results held to the oracle")
    for engine, n in sorted(cases.items()):
        terminalreporter.line(f"  {engine}: {n} cases, {compared[engine]} results")
    record = {"combinations": strength, "outcomes": outcomes, "cases": cases, "results": compared}
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
