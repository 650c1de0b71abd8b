"""README and docs/reference.md are true: their tables agree with the package, their figures are those of bench/results, and the links
of all pages lead somewhere. tests/python/test_docs.py runs the Python of the pages, tests/consumer builds the C++."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import strobe
from strobe._options import DEFAULTS
from strobe_tools.bench.gpu import report
from strobe_tools.cli import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
BESIDE = [ROOT / name for name in ("bench/many_gpus.md", "src/cpu/README.md", "tests/emulator/README.md")]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *BESIDE])
PYTORCH = "PyTorch's SDPA"
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def table(header: str, page: str = REFERENCE) -> list[list[str]]:
    """The rows, split into cells, of the table that begins with this header."""
    lines = page.split(f"| {header} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]


def test_the_python_runs(capsys):
    code = "\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    torch.set_num_threads(1)
    exec(compile(code, "README.md", "exec"), {})
    assert "the least predicted time" in capsys.readouterr().out


def test_every_option_and_its_default_is_listed():
    listed = {name: ast.literal_eval(cells[1].strip("`")) for cells in table("option") for name in re.findall(r"`(\w+)`", cells[0])}
    assert listed == {**DEFAULTS, "return_lse": False, "aux": ()}


def test_every_command_is_listed():
    assert {cells[0] for cells in table("command")} == {f"`strobe {name}`" for name in app.commands}


def test_every_engine_is_listed():
    listed = [cells[0].strip("`") for cells in table("engine")]
    here = [name for name, _ in strobe.engines()]
    assert [name for name in listed if name in here] == here


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("engine", [name for name, missing in strobe.engines() if missing is None])
def test_what_runs_where(engine, backward):
    """Each entry is the engine's own answer."""
    (cells,) = (cells for cells in table("engine") if cells[0] == f"`{engine}`")
    for dtype, entry in zip(DTYPES, cells[2:], strict=True):
        q = torch.zeros(1, 1, 16, 16, dtype=dtype)
        (answer,) = re.findall(
            rf"^  {engine} +(.*)$", strobe.explain(q, q, q, engine=engine, backward=backward).split("\nchoice")[0], re.MULTILINE
        )
        if entry == "—":
            assert answer == f"no: adds nothing for {str(dtype).removeprefix('torch.')}"
        elif entry == "no":
            assert answer.startswith("no: ")
        elif backward and engine.startswith("ladder-"):  # explain includes a backward through LSE, too
            assert answer == "no: no gradient through LSE"
        else:
            assert f" predicted; {entry}" in answer


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def said() -> str:
    """README without its line breaks."""
    return " ".join(README.split())


def test_the_first_screen_has_the_measured_ratios():
    mean, lowest, ahead = {}, {}, {}
    for direction in ("forward", "backward"):
        ratios = [report.ratio(row) for row in results(f"h200-{direction}")["rows"] if row["set"] == "core36"]
        assert len(ratios) == 36
        mean[direction], lowest[direction] = f"{report.mean(ratios):.2f}", f"{min(ratios):.2f}"
        ahead[direction] = sum(ratio >= 1 for ratio in ratios)
    peers = "cuDNN, FlashAttention-4 and FlashAttention-2"
    assert f"On an H200: {mean['forward']} times the best of {peers} forward, {mean['backward']} times backward" in said()
    forward, backward = (f"at {ahead[way]} {way} (lowest {lowest[way]}" for way in ("forward", "backward"))
    assert f"Of the 36 shapes Strobe is ahead of {peers} {forward}) and {backward}" in said()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_comparison_has_the_measured_ratios_of_cpus(direction):
    ratios = [row["ratio"] for row in results("cpu-amx-2cores")["speed"] if row["direction"] == direction]
    assert f"{direction} {'runs ' * (direction == 'forward')}at {min(ratios):.2f} to {max(ratios):.2f} times" in said()


def test_the_limits_have_the_measured_cost_of_options():
    rows = {row["option"]: row for row in results("h200-forward")["rows"] if row["set"] == "options" and row["d"] == 128}
    cost = {name: report.beside(row).strip("+") for name, row in rows.items()}
    assert f"{cost['mask']} longer with a boolean mask, {cost['ALiBi']} with ALiBi and {cost['bias']} with a bias" in said()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_comparison_has_the_measured_speeds(direction):
    rows = {cells[0]: cells[1:4] for cells in table("| Strobe | flash-attn 2.8", README)}
    here = {"set": "core36", "d": 128, "s": 4096, "causal": True}
    record = results(f"h200-{direction}")
    (row,) = (row for row in record["rows"] if here.items() <= row.items())
    strobe_is, fa2, fa4, cudnn = (f"{x:.0f}" for x in (row["strobe"], *(row["peers"][who] for who in ("fa2", "fa4", "cudnn"))))
    assert rows[f"H200 {direction}, TFLOP/s¹"] == [strobe_is, f"{fa2} (FlashAttention-4: {fa4})", cudnn]
    host = record["host_microseconds"]
    if direction == "forward":
        microseconds = [f"{host['Strobe']}", f"(FlashAttention-4: {host['FlashAttention-4']})", f"{host[PYTORCH]}"]
        assert rows["host time of a forward call, µs"] == microseconds
    here = {"shape": [1, 8, 2048, 64], "dtype": "bfloat16", "causal": True, "direction": direction}
    (row,) = (row for row in results("cpu-amx-2cores")["speed"] if here.items() <= row.items())
    assert rows[f"CPU {direction}, GFLOP/s²"] == [f"{row['strobe_flops'] / 1e9:.0f}", "—", f"{row['torch_flops'] / 1e9:.0f}"]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    words = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", word).replace(" ", "-") for word in words}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    path = ROOT / page
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 100
    first_screen = README.split("Strobe is on no package index", 1)[0]
    bullets = [" ".join(bullet.split()) for bullet in re.findall(r"^- (.*?)(?=\n- |\n\n)", first_screen, re.MULTILINE | re.DOTALL)]
    assert len(bullets) == 3
    for bullet in bullets:
        words = re.sub(r"\]\([^)]*\)", "", bullet).split()
        assert len(words) <= 25, bullet


def test_dir_shows_what_is_public():
    import strobe.compat.flash_attn as flash_attn
    from strobe import compat, hyperbolic

    assert {"nn", "compat", "hyperbolic", "attention"} <= set(dir(strobe))
    for module in (strobe, hyperbolic, compat, flash_attn):
        shown = dir(module)
        assert set(module.__all__) <= set(shown)
        for name in set(shown) - {"jax"}:  # that needs JAX: .ci/doors/jax
            x = getattr(module, name)
            of = x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", "strobe")
            assert of.startswith("strobe"), f"{module.__name__}.{name}"


def test_submodules_are_there_without_an_import():
    code = "import strobe; strobe.nn.FlashAttention; strobe.compat.sdpa; strobe.compat.flash_attn.flash_attn_func"
    subprocess.run([sys.executable, "-c", code], check=True)
