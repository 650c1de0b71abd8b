"""Tables of figures that fit a terminal of 80 columns."""

from __future__ import annotations

from rich import box
from rich.table import Table


def table(title: str, columns: tuple[str, ...]) -> Table:
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return made
