"""Runs on the emulated GPU some of what tests/gpu/record.py runs on a GPU: ways to store keys, parts and invariant results, which the calls
of tests/cpp/agreement_test.cpp do not have. `make test-emulated` runs the contract's pairs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emulated import output
from engines import LONG

PYTEST = "import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
# The file, the selection of its tests, and the least number of tests that are not skipped.
SELECTIONS = {
    "pages": ("test_pages.py", "test_any_page_size and ([3- or [16-)", 4),
    "quantised keys": ("test_quantised.py", "test_options and seqused_k", 6),
    "quantised in groups": ("test_quantised.py", "test_groups_of_rows and not float16", 6),
    "XLA's handlers": ("test_xla.py", "test_", 20),
    "parts": ("test_parts.py", "test_a_window_into and 20 and bfloat16", 1),
    "invariant": ("test_invariant.py", "test_rows_lie_elsewhere and cuda-mma", 2),
    "ends of tiles": ("test_corners.py", "test_one_short_of_a_tile and (95 or 127) and bfloat16", 2),
}


@pytest.mark.parametrize("name", SELECTIONS if LONG else ["pages", "parts", "XLA's handlers"])
def test_as_on_a_gpu(name):
    file, tests, least = SELECTIONS[name]
    said = output(PYTEST, str(Path(__file__).parent / file), "-k", tests)
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None, said
    assert int(passed[1]) >= least, said
