"""Counts what test_contract.py compared, prints it at the end and records it in build/contract.json."""

from __future__ import annotations

import gc
import json
import os
from collections import Counter, defaultdict
from pathlib import Path

# Tests run concurrently, and the plain formulas are small: a test uses the threads that it asks for, never the default.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from device import ON_GPU
from engines import LONG, SEED, WHOLE, available_engines, draw, leave_out, thinned

MOST = 12
COMPLETE = {"tests/python/test_contract.py::test_case"}  # all pairs of options, each time
RECORD = Path(__file__).parents[2] / "build" / "contract.json"
THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def seeded():
    """Every run draws the same numbers, whichever worker runs a test, on as many threads, whatever the previous test requested."""
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)


@pytest.fixture(scope="session")
def workers():
    """Processes of torch.distributed for all tests that need some."""
    from distributed_workers import Workers

    made = Workers()
    yield made
    made.close()


def pytest_report_header():
    return "every engine" if LONG or ON_GPU else f"drawn by STROBE_TEST_SEED={SEED}: engines, cases, kernels; make test-long takes all"


def pytest_collection_finish():
    gc.freeze()  # PyTorch and all tests are not scanned at each garbage collection


def pytest_configure(config):
    if config.args_source == pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword and not (LONG or ON_GPU):
        os.environ[WHOLE] = "1"


def pytest_collection_modifyitems(config, items):
    """Where all tests are run at once: keeps those of the engines under test, among tests that differ in their engine alone, and draws a
    third of the cases of each test that has more than MOST."""
    if not os.environ.get(WHOLE):
        return
    alike, cases, engines = defaultdict(list), defaultdict(list), available_engines()
    for item in items:
        engine = item.callspec.params.get("engine") if hasattr(item, "callspec") else None
        if isinstance(engine, str) and engine in engines:
            alike[item.nodeid.replace(engine, "")].append(item)
    left_out = set()
    for what, found in alike.items():
        kept = thinned([item.callspec.params["engine"] for item in found], what)
        left_out.update(item for item in found if item.callspec.params["engine"] not in kept)
    for item in items:
        name = item.nodeid.partition("[")[0]
        if item not in left_out and name not in COMPLETE and Path(__file__).parent in item.path.parents:
            cases[name].append(item)
    for name, found in cases.items():
        left_out.update(draw(name).sample(found, len(found) - max(MOST, len(found) // 3)) if len(found) > MOST else ())
    leave_out(config, items, left_out)


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
