"""A plugin of pytest for .ci/doors: a skipped test is a failure, because each door has what its tests need. `pytest -p no_skips`"""

from __future__ import annotations

import pytest


def _failed(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        where = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: nothing is skipped behind a door: {where}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    _failed(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    report = yield
    _failed(report)
    return report
