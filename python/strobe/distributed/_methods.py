"""The ways to bring keys and queries together, and the choice among them."""

from __future__ import annotations

from typing import Any

from . import _gather, _heads, _ring
from ._call import Facts
from ._predict import seconds

METHODS: dict[str, Any] = {"gather": _gather, "heads": _heads, "ring": _ring}
_BESIDE_A_PART = ("seqused_k", "invariant")  # refused beside a strobe.Part


def reason_against(method: str, of: Facts) -> str | None:
    """Why the method does not take the call; None if it does."""
    given = [name for name in _BESIDE_A_PART if name in of.p.arrays or of.p.options.get(name)]
    if method != "heads":
        if given:
            return f"{given[0]}: given with method {method!r}, whose calls hold parts of a problem; accepted is method 'heads'"
        return None
    world = of.plan.world
    if of.heads_kv % world:
        return f"k: {of.heads_kv} key heads with method 'heads'; accepted is a multiple of {world}, the number of ranks"
    if given and _heads.needs_part(of.p):
        why = "dropout" if of.p.options.get("dropout") else "a block_mask of several heads"
        return f"{given[0]}: given beside {why}, with method 'heads'; accepted is one of the two"
    for name in ("mask", "bias"):
        if world > 1 and name in of.p.arrays and any(_heads.most_rows(of.plan, r) == 1 for r in range(world)):
            return f"{name}: given with method 'heads', and a rank has 1 query, whose row cannot be told from a broadcast one"
    return None


def choose(of: Facts) -> str:
    """The method with the least predicted time of those that take the call."""
    taken = [method for method in METHODS if reason_against(method, of) is None]
    if not taken:
        raise ValueError(reason_against("heads", of))  # which takes what the others refuse
    return min(taken, key=lambda method: seconds(method, of))
