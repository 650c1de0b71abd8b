"""The tuning table: which tile was measured to be the fastest on a GPU. The library reads it; this writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ._abi import error, text
from ._core import ffi, lib
from ._whole_file import replacing

# Of an entry: the calls that it is for. What else is in it is a result.
KEY = ("engine", "direction", "dtype", "head_dim", "head_dim_v", "group", "queries", "keys", "heads", "causal", "varlen", "deterministic")


class Header(NamedTuple):
    """What the library says of a device's table."""

    file: str  # empty: there is no cache folder
    about: dict[str, Any]  # what a table has to say of itself to be used
    ignored: str  # why the one that is there is not used


def said(function: Any, *arguments: Any) -> str:
    """What a function of the library writes as strobe_explain does."""
    needed = ffi.new("size_t *")
    for size in (0, None):
        chars = ffi.NULL if size == 0 else ffi.new("char[]", needed[0])
        status = function(*arguments, chars, 0 if size == 0 else needed[0], needed)
        if status != lib.STROBE_OK:
            raise error(status, str)
    return text(chars)


def header(device: int) -> Header:
    told = json.loads(said(lib.strobe_tuning, device))
    return Header(told["file"], {name: told[name] for name in ("format", "device", "kernels")}, told["ignored"])


Entry = dict[str, Any]


def merged(about: Entry, old: str | None, measured: list[Entry], winners: list[Entry]) -> Entry:
    """A table of the winners, and of those entries of the old one (its text, if there is one) that are still good and for other calls than
    were measured."""
    new = {tuple(entry[name] for name in KEY) for entry in measured}
    kept: list[Entry] = []
    try:
        table = json.loads(old or "{}")
        if all(table.get(name) == x for name, x in about.items()):
            kept = [entry for entry in table["entries"] if tuple(entry[name] for name in KEY) not in new]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # the library does not use it either
    return {**about, "entries": kept + winners}


def write(file: Path, about: Entry, measured: list[Entry], winners: list[Entry]) -> None:
    """Brings the table up to date; whoever reads it meanwhile sees the old one or the new one, whole."""
    table = merged(about, file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None, measured, winners)
    lines = ",\n".join(json.dumps(entry) for entry in table.pop("entries"))
    head = json.dumps(table)[:-1]
    with replacing(file) as out:
        out.write(f'{head}, "entries": [\n{lines}\n]}}\n'.encode())
