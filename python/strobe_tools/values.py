"""Checks of options' values that click does not have. Each exits with one message that names the option and the accepted values."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import click

PATH = click.Path(path_type=Path)


def known(given: Iterable[str] | None, accepted: Iterable[str], option: str) -> None:
    for name in given or ():
        if name not in accepted:
            raise click.BadParameter(f"{name!r}; accepted are {', '.join(accepted)}", param_hint=option)


def writable(path: Path | None, option: str) -> None:
    """Checks the path before the work whose results go there."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        good = os.access(path, os.W_OK) and path.is_file() if path.exists() else os.access(path.parent, os.W_OK)
        reason = "not writable, or no file"
    except OSError as error:
        good, reason = False, error.strerror or str(error)
    if not good:
        raise click.BadParameter(f"{path}: {reason}; accepted is a file to write to", param_hint=option)
