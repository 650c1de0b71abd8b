"""Handles a collective call that fails: raises an error that names the ranks that did not come, or says why one has left."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

T = TypeVar("T")
_GRACE = 2.0  # seconds beyond the time limit in which the other ranks report that they came
_LOOK = 1.0  # seconds of waiting after which a rank checks whether another one has left
_LEFT = "strobe/left"


@dataclass
class _Left:
    """Counts of this process: how often it has left, whether the store says so now, and how many more times other processes had left when
    this process raised an error because of them."""

    times: int = 0
    is_told: bool = False
    ahead: dict[int, int] = field(default_factory=dict)


_left = _Left()


class AnotherLeftError(Exception):
    """A rank does not come, and has said why."""

    def __init__(self, failure: Exception):
        self.failure = failure


def leave(failure: Exception) -> None:
    """Tells the ranks that wait for this rank why it does not come. This rank does not know in which group they wait."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        _left.times += 1
        with contextlib.suppress(Exception):  # the store's process has ended
            store = _store()
            store.set(f"{_LEFT}/{dist.get_rank()}", json.dumps((_left.times, *told(failure))))
            store.set(_LEFT, "")
            _left.is_told = True


def come_back() -> None:
    """Takes the message of leave() back, as the rank takes part again."""
    if _left.is_told:
        _left.is_told = False
        _store().delete_key(f"{_LEFT}/{dist.get_rank()}")


def times_left() -> int:
    """How often this process has left."""
    return _left.times


def all_came(ranks: Sequence[int], times: Sequence[int]) -> None:
    """Notes how often the processes of an agreement have left by now, some of them perhaps in calls without this process."""
    _left.ahead.update((rank, n - _left.times) for rank, n in zip(ranks, times, strict=True))


def _failure_of(ranks: Sequence[int]) -> Exception | None:
    """The error of the first rank that has left, unless this rank left for the same reason: a program with wrong calls may fail on all
    ranks, and then no rank waits for another."""
    try:
        store = _store()
        if not store.check([_LEFT]):
            return None
        for place, rank in enumerate(ranks):
            if store.check([f"{_LEFT}/{rank}"]):
                times, kind, words = json.loads(store.get(f"{_LEFT}/{rank}"))
                if times - _left.times > _left.ahead.get(rank, 0):
                    _left.ahead[rank] = times - _left.times
                    return said_by(place, len(ranks), kind, words)
    except Exception:  # the store's process has ended
        return None
    return None


KINDS: dict[str, type[Exception]] = {of.__name__: of for of in (TypeError, ValueError, NotImplementedError, MemoryError, RuntimeError)}


def told(failure: Exception) -> tuple[str, str]:
    """The error's type and message."""
    kind = next((name for of in type(failure).__mro__ if (name := of.__name__) in KINDS), None)
    return (kind, str(failure)) if kind and str(failure) else ("RuntimeError", f"{type(failure).__name__}: {failure}")


def said_by(rank: int, world: int, kind: str, words: str) -> Exception:
    """The exception by which all ranks report a rank's failure."""
    return KINDS[kind]("\n".join(f"{line} [rank {rank} of {world}]" for line in words.splitlines()))


def _store() -> Any:
    """The store of all processes."""
    return dist.distributed_c10d._get_default_store()


class Waits:
    """How long a rank waits for the other ranks, and its error if they do not come. seconds: None for the group's own limit."""

    def __init__(self, group: ProcessGroup, seconds: float | None):
        self.group, self.seconds = group, seconds

    def for_(self, work: dist.Work, what: str, on_gpu: bool = False) -> None:
        """Waits until the work is done. On a GPU the stream waits for it, not the host, and the group's own limit counts."""
        limit = None if self.seconds is None or on_gpu else datetime.timedelta(seconds=self.seconds)
        self.of(what, work.wait if limit is None else lambda: work.wait(limit))

    def unless_one_left(self, work: dist.Work, what: str, ranks: Sequence[int]) -> None:
        """Waits until the work is done, or one of the ranks, given as process numbers, has left. Not for a GPU's work."""
        until = time.monotonic() + (math.inf if self.seconds is None else self.seconds)

        def wait() -> None:
            while True:
                seconds = min(_LOOK, max(until - time.monotonic(), 1e-3))
                try:
                    work.wait(datetime.timedelta(seconds=seconds))
                    return
                except RuntimeError:
                    if work.is_completed():
                        work.wait()  # the work finished at the time limit, or it failed, and this raises why
                        return
                    if time.monotonic() >= until:
                        raise
                if (failure := _failure_of(ranks)) is not None:
                    raise AnotherLeftError(failure)

        self.of(what, wait)

    def of(self, what: str, call: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            return call()
        except AnotherLeftError as left:
            raise left.failure from None
        except (RuntimeError, ValueError) as failure:
            raise RuntimeError(self._words(what, failure, time.monotonic() - began)) from failure

    def _words(self, what: str, failure: Exception, seconds: float) -> str:
        reason = next(iter(str(failure).splitlines()), type(failure).__name__)
        rank, missing = self.group.rank(), _missing(self.group, self.seconds or 0.0)
        if missing is None:
            who = "another rank failed"
        elif missing:
            who = f"rank {', '.join(map(str, missing))} did not take part"
        else:
            who = "all ranks took part, and one of them failed"
        return f"{what}: {who} within {seconds:.1f} s, says rank {rank} of {self.group.size()} ({reason})"


def _missing(group: ProcessGroup, seconds: float) -> list[int] | None:
    """The ranks that do not report, in the processes' common store, that they are waiting; None if that is unknown."""
    try:
        store = _store()
        prefix = f"strobe/{group.group_name}/failed"
        store.set(f"{prefix}/{group.rank()}", "waited")
        until, others = time.monotonic() + seconds + _GRACE, [r for r in range(group.size()) if r != group.rank()]
        while others and time.monotonic() < until:
            others = [r for r in others if not store.check([f"{prefix}/{r}"])]
            if others:
                time.sleep(0.05)
        return others
    except Exception:  # the store's process has ended
        return None
