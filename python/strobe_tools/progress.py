"""The progress of a long command: a bar on a terminal, elsewhere a line from time to time."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType

from rich import progress
from rich.console import Console

_FIRST, _EVERY = 10.0, 30.0  # seconds to the first line, and between two lines
_ENOUGH = 8  # this many finished items are enough to predict the time of the others


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


class Progress:
    """Progress over ``total`` items. what: what is counted, e.g. "kernels compiled"."""

    def __init__(self, what: str, total: int, console: Console) -> None:
        columns = (
            progress.TextColumn("{task.description:40}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
        )
        self._what, self._total, self._console = what, total, console
        self._bar = progress.Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task("", total=total)
        self._began, self._next = perf_counter(), _FIRST

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def update(self, done: int, now: str) -> None:
        """done: how many items are finished in all; now: the latest item."""
        self._bar.update(self._task, completed=done, description=now)
        past = perf_counter() - self._began
        if not self._console.is_terminal and past >= self._next and done < self._total:
            left = f", about {duration(past / done * (self._total - done))} left" if done >= _ENOUGH else ""
            self._console.print(f"{done} of {self._total} {self._what} in {duration(past)}{left}; last: {now}")
            self._next = past + _EVERY
