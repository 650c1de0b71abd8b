"""The table of docs/architectures.md is what architectures.py finds."""

from __future__ import annotations

from pathlib import Path

import architectures
import pytest

from strobe.compat import transformers as strobe_in_transformers

PAGE = Path(__file__).parents[3] / "docs" / "architectures.md"


@pytest.fixture(autouse=True)
def _counted(monkeypatch):
    strobe_in_transformers.register()
    monkeypatch.setattr(strobe_in_transformers, "attention", architectures.counted)


@pytest.mark.parametrize("name", [*architectures.MODELS, *architectures.OTHERS])
def test_a_row_of_the_table(name):
    assert architectures.row(name) in PAGE.read_text().splitlines()


def test_the_table_has_no_other_row():
    rows = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert rows == ["model", *architectures.MODELS, *architectures.OTHERS]
