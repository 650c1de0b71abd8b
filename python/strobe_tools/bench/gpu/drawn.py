"""Shapes drawn at random, so that kernels are not tuned for the shapes of a table."""

from __future__ import annotations

from math import exp, log
from random import Random
from typing import Any

from strobe_tools.bench.gpu.problem import Problem

DIMS = range(16, 257, 8)
GROUPS = range(1, 9)  # query heads per key head
LENGTHS = (64, 32768)  # the range of lengths, of which odd ones are drawn, too; log-uniform
TOKENS = (4096, 65536)  # per call
WIDTHS = (1024, 4096)  # all query heads together, approximately
PACKED, WINDOWS, OTHER_DIM_V = 1 / 4, 1 / 4, 1 / 4  # fractions of all shapes


def shape(draw: Random) -> tuple[Problem, dict[str, Any]]:
    """A problem, and its description in the figures."""
    dim = draw.choice(DIMS)
    dim_v = draw.choice(DIMS) if draw.random() < OTHER_DIM_V else dim
    group = draw.choice(GROUPS)
    heads_kv = max(1, round(_log_uniform(draw, *WIDTHS) / (dim * group)))
    longest = _log_integer(draw, *LENGTHS)
    batch = _log_integer(draw, -(-TOKENS[0] // longest), TOKENS[1] // longest)
    lengths = _lengths(draw, batch, longest) if draw.random() < PACKED else ()
    causal = draw.random() < 1 / 2
    window = _log_integer(draw, min(64, longest // 2), longest) if draw.random() < WINDOWS else 0
    problem = Problem(
        batch=0 if lengths else batch,
        heads=group * heads_kv,
        seqlen=0 if lengths else longest,
        dim=dim,
        causal=causal or window > 0,
        heads_kv=heads_kv,
        dim_v=dim_v,
        lengths=lengths,
        window=window,
    )
    where: dict[str, Any] = {"d": dim} | ({"dv": dim_v} if dim_v != dim else {}) | {"heads": f"{problem.heads}/{heads_kv}"}
    where |= {"packed": len(lengths), "tokens": sum(lengths), "s": max(lengths)} if lengths else {"batch": batch, "s": longest}
    return problem, where | {"causal": problem.causal} | ({"window": window} if window else {})


def _lengths(draw: Random, batch: int, longest: int) -> tuple[int, ...]:
    """Lengths of packed sequences, which have as many tokens in all as `batch` sequences of the longest length."""
    left, lengths = batch * longest, []
    while left > 0:
        lengths.append(min(left, _log_integer(draw, LENGTHS[0], longest)))
        left -= lengths[-1]
    return tuple(lengths)


def _log_uniform(draw: Random, least: float, most: float) -> float:
    return exp(draw.uniform(log(least), log(most)))


def _log_integer(draw: Random, least: int, most: int) -> int:
    """An integer from `least` to `most`, both included, drawn on a logarithmic scale."""
    return min(most, max(least, int(_log_uniform(draw, least, most + 1))))
