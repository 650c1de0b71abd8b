"""Makes the generator of the contract's cases and the draw available here."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from engines import WHOLE, draw, leave_out

# Tests with one or two kernels per case, which take seconds to compile. One case in DRAWN runs; make test-long: all.
COMPILED = ("test_ships", "test_pairs", "test_invariant", "test_it_compiles_without_spills")
DRAWN = 4


def pytest_collection_modifyitems(config, items):
    if not os.environ.get(WHOLE):
        return
    cases = [item for item in items if Path(__file__).parent in item.path.parents and item.originalname in COMPILED]
    leave_out(config, items, {item for item in cases if draw(item.nodeid).randrange(DRAWN) > 0})
