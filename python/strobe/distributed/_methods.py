"""The ways to bring keys and queries together, and the choice among them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from . import _gather, _heads, _levels, _ring
from ._call import Facts
from ._predict import OF_HEADS, seconds

METHODS: dict[str, Any] = {"gather": _gather, "heads": _heads, "ring": _ring, "levels": _levels}
_BESIDE_A_PART = ("seqused_k", "invariant")  # refused with a strobe.Part


def reason_against(method: str, of: Facts) -> str | None:
    """Why the method does not support the call; None if it does."""
    given = [name for name in _BESIDE_A_PART if name in of.given]
    if method != "heads":
        if given:
            return f"{given[0]}: given with method {method!r}, whose calls hold parts of a problem; accepted is method 'heads'"
        return None if method != "levels" else _against_levels(of)
    world = of.plan.world
    if of.heads_kv % world:
        return f"k: {of.heads_kv} key heads with method 'heads'; accepted is a multiple of {world}, the number of ranks"
    numbered = [name for name in OF_HEADS if name in of.given]
    if given and numbered:
        return f"{given[0]}: given beside {numbered[0]}; accepted is one of the two"
    return _against_rows(method, of)


def _against_levels(of: Facts) -> str | None:
    if not of.inside:
        return "mesh: of one dimension, or none, with method 'levels'; accepted is one of two: nodes, and the ranks of a node"
    if of.heads_kv % of.inside:
        return f"k: {of.heads_kv} key heads with method 'levels'; accepted is a multiple of {of.inside}, the number of ranks in a node"
    return _against_rows("levels", of)


def _against_rows(method: str, of: Facts) -> str | None:
    world = of.plan.world
    for name in ("mask", "bias"):
        if world > 1 and name in of.given and any(_heads.most_rows(of.plan, r) == 1 for r in range(world)):
            return f"{name}: given with method {method!r}, and a rank has 1 query, whose row cannot be told from a broadcast one"
    return None


@lru_cache(maxsize=256)
def choose(of: Facts, method: str | None, of_world: bool) -> tuple[str, str | None]:
    """The requested method, or else the method with the least predicted time among those that support the call; and the reason against the
    method. of_world: whether bits must not depend on the number of ranks."""
    if of_world:
        against = reason_against("heads", of)
        return "heads", against and f"deterministic: 'world', which needs method 'heads', and {against}"
    if method is not None:
        return method, reason_against(method, of)
    if of.inside and reason_against("levels", of) is None:
        return "levels", None
    taken = [name for name in METHODS if reason_against(name, of) is None]
    if not taken:
        return "heads", reason_against("heads", of)  # "heads" supports what the other methods refuse
    return min(taken, key=lambda name: seconds(name, of)), None
