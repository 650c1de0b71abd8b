"""`strobe check --report FILE`, and the reports that docs/reports.md lists."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

from click.testing import CliRunner

import strobe
from emulated import output
from strobe_tools.cli import app, check, report

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "tests" / "gpu-record.json").read_text())


def run(*arguments):
    return CliRunner().invoke(app, ["check", *map(str, arguments)], env={"COLUMNS": "200", "TERM": "dumb"})


def test_a_cover_has_all_pairs():
    cases = check.cases(list(check.TOLERANCE))

    def pairs(chosen):
        return {pair for case in chosen for pair in combinations(vars(case).items(), 2)}

    chosen = report.cover(cases)
    assert pairs(chosen) == pairs(cases)
    assert len(chosen) <= 48
    assert chosen == report.cover(cases)


def test_the_file_has_the_form_of_the_record(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "cover", lambda cases: cases[:3])
    monkeypatch.setattr(report, "device", lambda: "cpu")
    done = run("--engine", "cpu-baseline", "--report", tmp_path / "new" / "report.json")
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "new" / "report.json").read_text())
    part = found["parts"]["check"]
    assert {*RECORD["parts"]["contract"]} - {"options", "digest"} <= {*part}
    assert (part["passed"], part["failed"], part["status"]) == (3, 0, 0)
    assert part["engines"] == {"cpu-baseline": {"passed": 3, "failed": 0, "not taken": 0}}
    assert found["machine"]["Strobe"] == strobe.__version__
    assert any(line.startswith("driver: ") for line in found["machine"]["CUDA"])
    assert found["speed"] == []


ON_EMULATED_GPU = """
import sys, contextlib, torch, strobe
from device import running_on
from strobe_tools.cli import check, report

def here(call):
    def on_gpu(*arrays, **options):
        with running_on(options["engine"]):
            return call(*arrays, **options)
    return on_gpu

# CPU tensors are the emulated GPU's memory, this process is its only one, and of its speed nothing is said.
strobe.attention, strobe.attention_backward = here(strobe.attention), here(strobe.attention_backward)
moved = check._on
check._on = lambda device, problem: moved("cpu", problem)
check._mapping = lambda device: contextlib.nullcontext(map)
torch.cuda.get_device_name = lambda: "emulated"
report.device, report.speeds = lambda: "cuda", lambda console: []
report.cover = lambda cases: [case for case in cases if case.dtype == "bfloat16" and case.shape == "square" and case.extra == "none"][:2]
check.command(["--report", sys.argv[1], "--engine", "cuda-simt", "--engine", "cuda-mma"], standalone_mode=False)
"""


def test_a_report_of_an_emulated_gpu(tmp_path):
    output(ON_EMULATED_GPU, str(tmp_path / "report.json"), CC="80")
    found = json.loads((tmp_path / "report.json").read_text())
    part = found["parts"]["check"]
    assert (part["device"], part["passed"], part["failed"], part["status"]) == ("emulated", 4, 0, 0)
    assert part["engines"] == {name: {"passed": 2, "failed": 0, "not taken": 0} for name in ("cuda-simt", "cuda-mma")}
    assert any(line.startswith("device 0: emulated sm_80, sm_80") for line in found["machine"]["CUDA"])


def test_a_wrong_result_is_in_the_file(tmp_path, monkeypatch):
    attention = strobe.attention
    monkeypatch.setattr(
        strobe, "attention", lambda *arrays, **options: (attention(*arrays, **options)[0] + 1, attention(*arrays, **options)[1])
    )
    monkeypatch.setattr(report, "cover", lambda cases: cases[:1])
    monkeypatch.setattr(report, "device", lambda: "cpu")
    done = run("--engine", "cpu-baseline", "--report", tmp_path / "report.json")
    assert done.exit_code == 1
    part = json.loads((tmp_path / "report.json").read_text())["parts"]["check"]
    assert (part["passed"], part["failed"], part["status"]) == (0, 1, 1)
    assert part["failures"][0].startswith("cpu-baseline: float64, square, mask none, extra none: error of out ")


def test_a_file_that_cannot_be_written_is_refused_before_the_work():
    done = run("--report", "/proc/none/report.json")
    assert done.exit_code == 2
    assert "--report: /proc/none/report.json: " in done.output


def test_each_report_is_listed():
    page = (ROOT / "docs" / "reports.md").read_text()
    files = sorted((ROOT / "docs" / "reports").glob("*.json"))
    assert sorted(re.findall(r"\]\(reports/(.*?)\)", page)) == [file.name for file in files]
    for file in files:
        found = json.loads(file.read_text())
        part = found["parts"]["check"]
        (row,) = (line for line in page.splitlines() if f"(reports/{file.name})" in line)
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        (arch,) = {match[1] for line in found["machine"]["CUDA"] if (match := re.search(r"^device .*, sm_(\d+)", line))}
        expected = [part["device"], f"{arch[:-1]}.{arch[-1]}", part["date"], part["passed"], part["failed"]]
        assert cells[:7] == [*map(str, expected), found["machine"]["Strobe"], found["machine"]["PyTorch"]]
