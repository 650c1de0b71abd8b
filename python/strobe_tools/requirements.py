"""Packages that a command needs and the library does not."""

from __future__ import annotations

import importlib.util

import click


def require(command: str, *packages: str, extra: str) -> None:
    """Leaves, with the remedy in one line, if a package is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        click.echo(f"strobe {command} needs {' and '.join(missing)}: pip install '.[{extra}]' in Strobe's checkout", err=True)
        raise SystemExit(2)
