"""Times calls that may not fit in memory. On the CPU the time is one thread's processor time: other programs do not count."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from strobe_tools.timing import SPREAD, samples, samples_on_gpu

if TYPE_CHECKING:
    from .case import Setting

Call = Callable[[], Any]
LEAST_REPEATS, MOST_REPEATS = 3, 15
PATIENCE = 20  # if a call takes longer than this many budgets, the first call counts as well
DIFFERS = "its calls took "  # begins the note of a point whose calls differ
STARTING = 10.0  # seconds that a first call on a GPU may take to load libraries and compile kernels


class RefusedError(Exception):
    """The reason, in few words, why a call cannot be made: out of memory, or the library's error."""


def attempt(call: Call) -> Any:
    """call(), or RefusedError."""
    try:
        return call()
    except (RuntimeError, NotImplementedError, MemoryError) as reason:  # torch.OutOfMemoryError is a RuntimeError
        raise RefusedError(in_words(reason)) from None


def in_words(reason: BaseException) -> str:
    words = str(reason).strip().splitlines() or [type(reason).__name__]
    lower = str(reason).lower()
    if isinstance(reason, MemoryError) or "out of memory" in lower or "can't allocate memory" in lower or "bad_alloc" in lower:
        return "out of memory"
    return words[-1][:120]


def once(call: Call, setting: Setting) -> float:
    """Seconds of one call."""
    if not setting.on_gpu:
        began = time.process_time()
        attempt(call)
        return time.process_time() - began
    import torch

    began = time.perf_counter()
    attempt(call)
    attempt(torch.cuda.synchronize)
    return time.perf_counter() - began


def times(calls: Mapping[str, Call], setting: Setting, warm: bool = False) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of each call, and notes: the reasons of calls that are refused, and how far the calls of one point differ, if much. Seconds
    are medians of as many calls as the budget allows, at least three, after a first call that does not count. warm: the first call has been
    made."""
    patience = max(PATIENCE * setting.budget, STARTING if setting.on_gpu else 0.0)
    single: dict[str, float] = {}
    notes: dict[str, str] = {}
    for name, call in calls.items():
        try:
            single[name] = once(call, setting)
            if not warm and single[name] < patience:  # the first call starts things and allocates
                single[name] = once(call, setting)
        except RefusedError as refusal:
            notes[name] = str(refusal)
        release(setting)
    brief = {name: calls[name] for name, seconds in single.items() if seconds < setting.budget}
    repeats = min(MOST_REPEATS, int(setting.budget / max(1e-9, sum(single[name] for name in brief))))
    repeats = max(repeats, LEAST_REPEATS)
    found = {name: [seconds] for name, seconds in single.items() if name not in brief}
    for _ in range(LEAST_REPEATS - 1):
        for name in list(found):
            try:
                found[name].append(once(calls[name], setting))
            except RefusedError as refusal:
                notes[name] = str(refusal)
                del found[name]
            release(setting)
    if brief:
        found |= samples_on_gpu(brief, repeats) if setting.on_gpu else samples(brief, repeats, time.process_time)
    apart = {name: (min(seconds), max(seconds)) for name, seconds in found.items() if max(seconds) > SPREAD * min(seconds)}
    notes |= {name: f"{DIFFERS}{least:.3g} to {most:.3g} s" for name, (least, most) in apart.items()}
    return {name: statistics.median(seconds) for name, seconds in found.items()}, notes


def release(setting: Setting) -> None:
    gc.collect()
    if setting.on_gpu:
        import torch

        torch.cuda.empty_cache()
