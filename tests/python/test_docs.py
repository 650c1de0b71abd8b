"""The code on the pages of docs/ runs, block after block, and the pages that `make api` writes are up to date."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import click
import pytest
import torch
import torch.nn.functional as F

from strobe_tools.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ["from-formula-to-kernel.md", "compat.md", "derivatives.md", "functions.md", "hyperbolic.md", "ladder.md", "pytorch.md"]
PAGES += ["recipes.md", "reference.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_code_runs(page, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(F, "scaled_dot_product_attention", F.scaled_dot_product_attention)  # restored later: a block on a page replaces it
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for number, code in enumerate(blocks):
        if page == "compat.md":
            names = {}  # a reader copies one of these blocks at a time
        exec(compile(code, f"{page}, block {number}", "exec"), names)
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:  # removes the alias that a block makes
        del sys.modules[name]


def test_no_page_has_code_that_does_not_run():
    elsewhere = {"many-gpus.md", "jax.md"}  # test_distributed_ranks.py runs the first on several ranks, tests/jax_arrays the second
    assert {path.name for path in DOCS.rglob("*.md") if "```python\n" in path.read_text()} == {*PAGES, *elsewhere}


def commands():
    for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                yield from ((page.name, shlex.split(part, comments=True)) for part in line.split("&&"))


def test_the_commands_on_the_pages_are_there():
    """Options of `strobe`, targets of make, and programs; nothing is run."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    seen = set()
    for page, words in commands():
        if words[:1] == ["strobe"]:
            command, path = app, words[1:]
            while isinstance(command, click.Group) and path and path[0] in command.commands:
                command, path = command.commands[path[0]], path[1:]
            options = {name for parameter in command.params for name in parameter.opts}
            assert {word for word in path if word.startswith("--")} <= options, f"{page}: {' '.join(words)}"
            seen.add("strobe")
        elif words[:1] == ["make"]:
            assert words[1] in targets, f"{page}: {' '.join(words)}"
            seen.add("make")
        elif words[:1] and (words[0] == "python" or words[0].startswith((".ci/", "tests/"))):
            program = words[1] if words[0] == "python" else words[0]
            assert (ROOT / program).is_file(), f"{page}: {' '.join(words)}"
            seen.add("program")
    assert seen == {"strobe", "make", "program"}


def test_the_api_page_is_made_from_the_docstrings():
    made = runpy.run_path(str(DOCS / "make_api.py"))["page"]()
    assert (DOCS / "api.md").read_text() == made + "\n", "run `make api`"


def test_the_options_are_written_from_their_table():
    page = (DOCS / "reference.md").read_text()
    assert runpy.run_path(str(DOCS / "make_options.py"))["page"](page) == page, "run `make api`"
