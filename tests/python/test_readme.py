"""The README is true: its code runs, its tables are what the package says. Its C++ is built by tests/consumer."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import strobe
from strobe._options import DEFAULTS
from strobe_tools.cli import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def table(header: str) -> list[list[str]]:
    """The rows, split into cells, of the table that begins with this header."""
    lines = README.split(f"| {header} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_python_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    torch.set_num_threads(1)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "the least predicted time" in printed
    difference = re.search(r"tensor\((\S+?),", printed)
    assert float(difference[1]) < 1e-5


def test_every_option_and_its_default_is_listed():
    listed = {name: ast.literal_eval(cells[1].strip("`")) for cells in table("option") for name in re.findall(r"`(\w+)`", cells[0])}
    assert listed == {**DEFAULTS, "return_lse": False}


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
        elif backward and engine.startswith("ladder-"):  # explain speaks of a backward through LSE, too
            assert answer == "no: no gradient through LSE"
        else:
            assert f" predicted; {entry}" in answer


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        *(
            f"docs/{name}.md"
            for name in ("architecture", "compat", "figures", "hyperbolic", "from-formula-to-kernel", "ladder", "semantics")
        ),
    ],
)
def test_links_lead_somewhere(page):
    path = ROOT / page
    for link in re.findall(r"\]\(([^)#]+)", path.read_text()):
        assert "://" in link or (path.parent / link).exists(), link


def test_dir_shows_what_is_public():
    import strobe.compat.flash_attn as flash_attn
    from strobe import compat, hyperbolic

    assert {"nn", "compat", "hyperbolic", "attention"} <= set(dir(strobe))
    for module in (strobe, hyperbolic, compat, flash_attn):
        shown = dir(module)
        assert set(module.__all__) <= set(shown)
        for name in shown:
            x = getattr(module, name)
            of = x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", "strobe")
            assert of.startswith("strobe"), f"{module.__name__}.{name}"


def test_submodules_are_there_without_an_import():
    code = "import strobe; strobe.nn.FlashAttention; strobe.compat.sdpa; strobe.compat.flash_attn.flash_attn_func"
    subprocess.run([sys.executable, "-c", code], check=True)
