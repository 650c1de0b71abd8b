"""What becomes of a collective call that fails: an error that names the ranks that did not come."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

T = TypeVar("T")
_GRACE = 2.0  # seconds for those that came to say so, beyond the time limit


class Waits:
    """How long a rank waits for the others, and what it says if they do not come. seconds: None for the group's own limit."""

    def __init__(self, group: ProcessGroup, seconds: float | None):
        self.group, self.seconds = group, seconds

    def for_(self, work: dist.Work, what: str, on_gpu: bool = False) -> None:
        """Until the work is done. On a GPU the stream waits for it, not the host, and the group's own limit counts."""
        limit = None if self.seconds is None or on_gpu else datetime.timedelta(seconds=self.seconds)
        self.of(what, work.wait if limit is None else lambda: work.wait(limit))

    def of(self, what: str, call: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            return call()
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
    """The ranks that do not say in the processes' common store that they wait as well; None if nobody can tell."""
    try:
        store = dist.distributed_c10d._get_default_store()
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
