"""The code on the pages of docs/ runs, block after block, and the pages that `make api` writes are up to date."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["from-formula-to-kernel.md", "compat.md", "functions.md", "hyperbolic.md", "ladder.md", "pytorch.md", "reference.md"]


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


def test_the_api_page_is_made_from_the_docstrings():
    made = runpy.run_path(str(DOCS / "make_api.py"))["page"]()
    assert (DOCS / "api.md").read_text() == made + "\n", "run `make api`"


def test_the_options_are_written_from_their_table():
    page = (DOCS / "reference.md").read_text()
    assert runpy.run_path(str(DOCS / "make_options.py"))["page"](page) == page, "run `make api`"
