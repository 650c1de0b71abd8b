"""Makes the calls of a group, compares their results, and times them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import inf, isnan
from typing import TYPE_CHECKING, Any, NamedTuple

from strobe_tools.bench.gpu import contestants
from strobe_tools.bench.gpu.contestants import Call
from strobe_tools.bench.gpu.problem import Problem
from strobe_tools.bench.gpu.sets import Group, Row
from strobe_tools.timing import medians_on_gpu

if TYPE_CHECKING:
    from torch import Tensor

_SECONDS = {"µs": 1e6}  # units of time per second; other units are rates
_RATES = {"TFLOP/s": 1e12, "TB/s": 1e12}
_DIFFERENCE = 0.03  # the relative difference from which on a result is wrong; in 16 bits, correct results differ by about 0.005

Timer = Callable[[Mapping[str, Call], int], dict[str, float]]


class Found(NamedTuple):
    rows: list[dict[str, Any]]
    absent: dict[str, str]  # the runs that failed or gave a different result, and why


def make(group: Group, device: str) -> tuple[dict[str, Call], dict[str, str]]:
    """Every run of the group as a call that has been made once, and the reasons of the runs that failed. Runs of the same problem get the
    same numbers."""
    import torch

    made: dict[str, Call] = {}
    absent: dict[str, str] = {}
    inputs: dict[Problem, tuple[Tensor, ...]] = {}
    results: dict[str, list[Tensor]] = {}
    for name, (who, problem, feature, _) in group.runs.items():
        if contestants.missing(who):
            continue
        if problem not in inputs:
            torch.manual_seed(0)
            q, k, v = problem.tensors(device)
            inputs[problem] = q, k, v, torch.randn(*q.shape[:-1], v.shape[-1], device=device, dtype=q.dtype)
        try:
            made[name] = contestants.call(who, problem, feature, group.direction, inputs[problem], device)
            results[name] = contestants.results(who, made[name])
        except Exception as error:
            if who not in contestants.PEERS and not isinstance(error, NotImplementedError | RuntimeError | ValueError):
                raise  # peers may fail in any way
            made.pop(name, None)
            absent[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    for name, judge in _judges(group, list(made)):
        difference = max(map(_difference, results[name], results[judge]))
        if difference > _DIFFERENCE:
            del made[name]
            absent[name] = f"differs from {judge} by {difference:.2g} of the result's root mean square"
    return made, absent


def _judges(group: Group, made: list[str]) -> Iterator[tuple[str, str]]:
    """Pairs of runs that should give the same numbers: each run of Strobe, and the first peer's run of the same problem."""
    runs = group.runs
    peers = {runs[name].problem: name for name in reversed(made) if runs[name].who in contestants.PEERS}
    for name in made:
        who, problem, feature, _ = runs[name]
        if who not in contestants.PEERS and feature == "plain" and problem.dropout == 0 and problem in peers:
            yield name, peers[problem]


def _difference(x: Tensor, y: Tensor) -> float:
    """The root mean square of x - y, divided by that of y. NaN counts as infinite."""
    difference = float((x.float() - y.float()).square().mean().sqrt() / y.float().square().mean().sqrt())
    return inf if isnan(difference) else difference


def measure(group: Group, repeats: int, device: str = "cuda", timer: Timer = medians_on_gpu) -> Found:
    calls, absent = make(group, device)
    figures: dict[str, float] = {}
    if calls:
        for name, seconds in timer(calls, repeats).items():
            scale = _SECONDS.get(group.unit)
            figures[name] = seconds * scale if scale else group.work(name) / seconds / _RATES[group.unit]
    return Found([_figures(group, row, figures) for row in group.rows if row.strobe in figures], absent)


def _figures(group: Group, row: Row, figures: dict[str, float]) -> dict[str, Any]:
    peers = {peer: _rounded(figures[peer]) for peer in row.peers if peer in figures}
    found = {"set": group.set, **row.where, "unit": group.unit, "strobe": _rounded(figures[row.strobe])}
    if row.peers:
        found["peers"] = peers
    if row.base in figures:
        found["beside"] = {row.base: _rounded(figures[row.base])}
    return found


def _rounded(x: float) -> float:
    return float(f"{x:.4g}")
