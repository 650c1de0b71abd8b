"""The generator of the contract's cases and the draw serve here, too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from engines import LONG, SEED, draw

# Tests whose cases are a kernel or two each, which take seconds to compile. One case in DRAWN is; make test-long: all.
COMPILED = ("test_ships", "test_pairs", "test_invariant", "test_it_compiles_without_spills")
DRAWN = 4


def pytest_report_header():
    return "every kernel" if LONG else f"kernels drawn by STROBE_TEST_SEED={SEED}"


def pytest_collection_modifyitems(config, items):
    def is_left(item):
        cases = Path(__file__).parent in item.path.parents and item.originalname in COMPILED
        return cases and draw(item.nodeid).randrange(DRAWN) > 0

    if LONG:
        return
    left_out = [item for item in items if is_left(item)]
    if len(left_out) < len(items):  # else a few were named
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
