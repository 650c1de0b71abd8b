"""The tuning table: which tile was measured to be the fastest on a GPU. The library reads it; this writes it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from ._abi import error, text
from ._core import ffi, lib

# Of an entry: the calls that it is for. What else is in it is a result.
KEY = ("engine", "direction", "dtype", "head_dim", "head_dim_v", "group", "queries", "keys", "heads", "causal", "varlen", "deterministic")


class Header(NamedTuple):
    """What the library says of a device's table."""

    file: str  # empty: there is no cache folder
    about: dict[str, Any]  # what a table has to say of itself to be used
    ignored: str  # why the one that is there is not used


def header(device: int) -> Header:
    needed = ffi.new("size_t *")
    for size in (0, None):
        chars = ffi.NULL if size == 0 else ffi.new("char[]", needed[0])
        status = lib.strobe_tuning(device, chars, 0 if size == 0 else needed[0], needed)
        if status != lib.STROBE_OK:
            raise error(status, str)
    told = json.loads(text(chars))
    return Header(told["file"], {name: told[name] for name in ("format", "device", "kernels")}, told["ignored"])


Entry = dict[str, Any]


def merged(about: Entry, old: str | None, measured: list[Entry], winners: list[Entry]) -> Entry:
    """A table of the winners, and of those entries of the old one (its text, if there is one) that are still good and for other calls than
    were measured."""
    kept: list[Entry] = []
    try:
        table = json.loads(old or "{}")
        if all(table.get(name) == x for name, x in about.items()):
            kept = [entry for entry in table["entries"] if all(name in entry for name in KEY)]
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # the library does not use it either
    new = {tuple(entry[name] for name in KEY) for entry in measured}
    return {**about, "entries": [entry for entry in kept if tuple(entry[name] for name in KEY) not in new] + winners}


def write(file: Path, about: Entry, measured: list[Entry], winners: list[Entry]) -> None:
    """Brings the table up to date; whoever reads it meanwhile sees the old one or the new one, whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    table = merged(about, file.read_text(encoding="utf-8") if file.exists() else None, measured, winners)
    lines = ",\n".join(json.dumps(entry) for entry in table.pop("entries"))
    head = json.dumps(table)[:-1]
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        out.write(f'{head}, "entries": [\n{lines}\n]}}\n')
    Path(name).replace(file)
