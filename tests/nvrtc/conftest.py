"""Lets the tests here import tests/python (the contract's cases), and draws the tests that `make test` runs."""

import sys
from collections import defaultdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from engines import is_drawn, leave_out, part

# Tests of one or two kernels per case, which take seconds to compile. `make test` draws one in SHARE cases of each group, at least one.
COMPILED = (
    *("test_ships", "test_pairs", "test_invariant", "test_it_compiles_without_spills", "test_compiles_without_spills"),
    *("test_hopper", "test_hopper_beside_blocks", "test_other_families"),
    *("test_gradients_of_captured_tensors", "test_gradients_of_captured_tensors_in_other_families"),
)
SHARE = 8


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if not is_drawn(config):
        return
    groups, left_out = defaultdict(list), set()
    for item in items:
        if Path(__file__).parent in item.path.parents and item.originalname in COMPILED and not _always(item):
            groups[f"{item.path.name}::{item.originalname} {_group(item)}"].append(item)
    for what, found in groups.items():
        left_out.update({*found}.difference(part(found, what, SHARE)))
    leave_out(config, items, left_out)


def _always(item):
    """Whether the test always runs: the most frequent forward does, with each option."""
    job = item.callspec.params.get("job")
    return job is not None and (job.compute_capability, job.dtype, job.head_dim, job.backward) == (90, "bfloat16", 128, False)


def _group(item):
    """The group of a test: a GPU with an option, an engine, or a direction. At least one test of each group is drawn."""
    params = item.callspec.params
    if "job" in params:
        return params["job"].compute_capability, params["job"].feature
    return tuple(str(params[name]) for name in ("arch", "cc", "engine", "dtype", "feature", "backward") if name in params)
