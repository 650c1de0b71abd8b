"""The draws of `make test`: conftest.py, dear.py and engines.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dear import DEAR
from device import ON_GPU
from engines import LONG, available_engines, part, usual_engine

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytestmark = pytest.mark.skipif(LONG or ON_GPU, reason="nothing is drawn")


@pytest.mark.parametrize("file", DEAR)
def test_what_is_drawn_from_is_there(file):
    text = (HERE / file).read_text()
    for name, parameters in DEAR[file].items():
        found = re.search(rf"^def {name}\((.*)\)", text, re.MULTILINE)
        assert found, name
        assert {*parameters.split()} <= {*found[1].split(", ")}, name


def test_a_part_is_of_the_size_that_is_wanted():
    for count in range(1, 30):
        found = part([*range(count)], f"{count}", 4)
        assert found == sorted({*found})
        assert len(found) == -(-count // 4)
    assert len({str(part([*range(12)], f"{n}", 4)) for n in range(50)}) > 30


def _collected(*arguments: str) -> list[str]:
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"STROBE_TEST_SEED": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_each_engine_is_drawn_and_a_choice_takes_of_the_same_cases():
    """Only --drawn, not the environment, says that cases are drawn: pytest as called here collects all cases, even within `make test`."""
    file = str(HERE / "test_parts.py")
    whole, drawn = _collected(file), _collected(file, "--drawn")
    large = [line for line in drawn if "test_large_lse" in line]
    assert set(drawn) < set(whole)
    assert len(large) < len([line for line in whole if "test_large_lse" in line]) / 2
    for engine in {usual_engine(), "cpu-baseline"} & {*available_engines()}:
        assert any(engine in line for line in large), engine
        assert {f"test_starts_do_not_change_bits[{engine}]" in line for line in drawn} == {True, False}
    assert _collected(file, "--drawn", "-k", "test_large_lse") == large
