"""The engines that a test runs. On a GPU, on an emulated one and in `make test-long` these are all engines. Otherwise they are the CPU's
usual one, the baseline and one that is drawn for each test, so that a run covers every engine, but not everything on each."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Sequence
from typing import Any

import strobe
from device import ON_GPU, here

LONG = bool(os.environ.get("STROBE_TEST_LONG"))  # make test-long: all engines, more options together, other random calls each time
# The seed of all draws, a number or a name. The workers of pytest-xdist and the programs that tests start inherit it. It is printed.
SEED = os.environ.setdefault("STROBE_TEST_SEED", str(random.randrange(10**6)))


def available_engines() -> list[str]:
    """The engines that the oracle judges. The oracle is the engine "reference", which is left out."""
    return [name for name, missing in strobe.engines() if missing is None and name != "reference" and here(name)]


def current_test() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "").partition(" (")[0]


def engines_under_test(*what: object) -> list[str]:
    """The engines for a loop within a test. The draw depends on the seed, the test and the other arguments."""
    return thinned(available_engines(), f"{current_test()} {what}")


def beside_the_default(*what: object) -> list[str]:
    """The engines for a loop that also runs engine=None, which on a CPU is the usual engine."""
    return [name for name in engines_under_test(*what) if LONG or ON_GPU or name != usual_engine()]


def usual_engine() -> str:
    """The engine of a float32 call without options."""
    engines = available_engines()
    return next((name for name in ("cpu-avx512", "cpu-avx2") if name in engines), engines[-1])


def draw(what: str) -> random.Random:
    return random.Random(zlib.crc32(f"{SEED} {what}".encode()))


def is_drawn(config: Any) -> bool:
    """Whether this run leaves out tests and cases (tests/conftest.py)."""
    return config.option.drawn and not (LONG or ON_GPU)


def part(found: list[Any], what: str, share: int) -> list[Any]:
    """One in `share` of `found`, rounded up, drawn and in their order."""
    kept = set(draw(what).sample(range(len(found)), -(-len(found) // share)))
    return [x for i, x in enumerate(found) if i in kept]


def leave_out(config: Any, items: list[Any], left_out: set[Any]) -> None:
    """Deselects tests that pytest has collected."""
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def thinned(engines: Sequence[str], what: str) -> list[str]:
    """The usual engine, the baseline and one of the others, in their order."""
    kept = {usual_engine(), "cpu-baseline"}
    others = [name for name in engines if name not in kept]
    if LONG or ON_GPU or not others:
        return list(engines)
    kept.add(draw(what).choice(others))
    return [name for name in engines if name in kept]
