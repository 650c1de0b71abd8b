"""The tuning table: which tile was measured to be the fastest on a GPU. The library reads the table; this module writes it.

A table is a text of lines ``name = value`` in sections separated by empty lines. The first section says what the table is valid for
(format, device, kernels); each further section is an entry: the calls that it is for (``KEY``), their tile, and how fast the tile was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ._abi import told
from ._core import lib
from ._whole_file import replacing

# The names in an entry that say which calls it is for. The others are results.
KEY = ("engine", "direction", "dtype", "head_dim", "head_dim_v", "group", "queries", "keys", "heads", "causal", "varlen", "deterministic")


Section = Mapping[str, Any]  # in a file all values are text


class Header(NamedTuple):
    """The library's report on a device's table."""

    file: str  # empty: there is no cache folder
    about: Section  # the values that a table must repeat to be used
    ignored: str  # the reason why an existing table is not used


def texts(section: Section) -> dict[str, str]:
    """The values as text, as in a file."""
    return {name: str(x).lower() if isinstance(x, bool) else str(x) for name, x in section.items()}


def written(sections: list[Section]) -> str:
    return "\n".join("".join(f"{name} = {x}\n" for name, x in texts(section).items()) for section in sections)


def parsed(text: str) -> list[dict[str, str]]:
    """The sections of a table's text. Raises ValueError at a line that is not ``name = value``."""
    return [dict(line.split(" = ", 1) for line in section.split("\n") if line) for section in text.split("\n\n") if section.strip()]


def header(device: int) -> Header:
    (said,) = parsed(told(lib.strobe_tuning, device, errors="surrogateescape"))  # a file's name as Python represents it
    ignored = said["ignored"].encode(errors="surrogateescape").decode(errors="backslashreplace")  # to be shown
    return Header(said["file"], {name: said[name] for name in ("format", "device", "kernels")}, ignored)


def merged(about: Section, old: str | None, measured: Sequence[Section], winners: Sequence[Section]) -> list[Section]:
    """A table of the winners, and of those entries of the old table (its text, if there is one) that are still valid and for other calls
    than those measured."""

    def calls(entry: Section) -> tuple[str, ...]:
        known = texts(entry)
        return tuple(known[name] for name in KEY)

    new = {calls(entry) for entry in measured}
    kept: list[Section] = []
    try:
        first, *entries = parsed(old or "")
        if first == texts(about):
            kept = [entry for entry in entries if calls(entry) not in new]
    except (ValueError, KeyError):
        pass  # the library does not use such a table either
    return [about, *kept, *winners]


def write(of: Header, measured: Sequence[Section], winners: Sequence[Section]) -> None:
    """Brings the table up to date; readers see either the old or the new table, whole. A table that the library ignores is replaced
    entirely."""
    file = Path(of.file)
    old = file.read_text(encoding="utf-8", errors="replace") if not of.ignored and file.is_file() else None
    with replacing(file) as out:
        out.write(written(merged(of.about, old, measured, winners)).encode())
