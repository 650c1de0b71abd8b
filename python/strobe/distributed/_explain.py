"""What strobe.distributed.attention() would do, in words."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from .._abi import BACKWARD, FORWARD, outside_graphs
from .._checks import Wrong, flag, refusal
from ..arrays.torch import TORCH
from . import _operators
from ._attention import in_context, prepare
from ._call import Facts, RankCall, check_shapes, facts_of, in_own_words
from ._late import Waits
from ._methods import METHODS, reason_against
from ._predict import moved, pairs, predicted, seconds, sms_for_transfers
from ._ranges import count
from ._sharding import Sharding


@outside_graphs
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backward: bool = False,
    sharding: Sharding | None = None,
    sharding_k: Sharding | None = None,
    group: ProcessGroup | None = None,
    mesh: Any = None,
    method: str | None = None,
    layout: str = "bhsd",
    **options: Any,
) -> str:
    """Says what attention() or its backward would do for this call: the method, the bytes that every method would move and the time it
    would take by a model of constant rates, and the strobe.explain() of this rank's call of the library.

    Nothing is computed or sent: one rank may ask alone, and errors of other ranks are not known. Arguments and errors are those of
    attention(), on this rank.
    """
    wrong: Wrong = []
    backward = flag(wrong, "backward", backward)
    if wrong:
        raise refusal(wrong)
    group, levels, sharding, method = in_context(group, mesh, sharding, method)
    parsed = prepare("explain", group, levels, q, k, v, sharding, sharding_k, method, layout, [True, None, False], dict(options))
    of_caller = parsed.call._replace(arrays=TORCH.autocast(parsed.call.arrays))
    plan = _operators.plan_of(of_caller, *parsed.shardings)
    of = facts_of(of_caller, plan, _operators.size_of(levels))
    rank, needs = group.rank(), frozenset(("q", "k", "v") if backward else ())
    call = RankCall(of_caller, plan, rank, Waits(group, None), needs, sms_for_transfers(parsed.method, of, backward), levels=levels)
    try:
        check_shapes(call)
        this_call = METHODS[parsed.method].Forward(call).example().explain(BACKWARD if backward else FORWARD)
    except ValueError as refused:
        raise in_own_words(call, refused) from None
    shares = [pairs(plan, r) for r in range(plan.world)]
    mean = sum(shares) / plan.world
    by_time = method is None and options.get("deterministic") != _operators.WORLD
    lines = [
        f"{'backward' if backward else 'forward'} by method {parsed.method!r} on {plan.world} ranks; rank {rank} has "
        f"{count(plan.q[rank])} of {parsed.shardings[0].seqlen} queries and {count(plan.k[rank])} of {parsed.shardings[1].seqlen} keys",
        f"sharding: the rank with most work has {max(shares) / mean if mean else 1:.2f} times the mean (by positions)",
        *(_line(name, of, backward, name == parsed.method, by_time) for name in METHODS),
        "this rank's first call of the library:",
        this_call,
    ]
    return "\n".join(lines)


def _line(method: str, of: Facts, backward: bool, runs: bool, chosen: bool) -> str:
    """The line about a method. chosen: whether choose() chose the method, not the caller."""
    name = f"  {method:7}"
    if (against := reason_against(method, of)) is not None:
        return f"{name}refused: {against}"
    took, bytes_ = predicted(method, of, backward), moved(method, of)
    count_ = bytes_.backward if backward else bytes_.forward
    told = (
        f"{name}predicted {_time(took.both)}: {_time(took.compute)} of products beside {_time(took.transfer)} of transfers; the busiest "
        f"rank receives {_size(count_)}; forward + backward {_time(seconds(method, of))}"
    )
    if not runs:
        return told
    return told + ("  <- runs, with the least forward + backward" if chosen else "  <- runs")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _size(n: int) -> str:
    return f"{n / 2**20:.3g} MiB" if n >= 2**20 else f"{n / 2**10:.3g} KiB" if n >= 2**10 else f"{n} bytes"
