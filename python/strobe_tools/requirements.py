"""Packages that only a command needs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

import click


def require(command: str, *packages: str, extra: str) -> None:
    """Exits, with the remedy in one line, if a package is not installed.

    The remedy installs what the extra of pyproject.toml would: naming the extra itself would compile Strobe again.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        versions = _versions(extra)
        wanted = " ".join(f"'{name}{versions.get(name, '')}'" for name in missing)
        click.echo(f"strobe {command} needs {' and '.join(missing)}: pip install {wanted}", err=True)
        raise SystemExit(2)


def _versions(extra: str) -> dict[str, str]:
    """The versions that an extra requires of its packages: {"torch": ">=2.4"}."""
    try:
        required = importlib.metadata.requires("strobe-attention") or []
    except importlib.metadata.PackageNotFoundError:  # run from sources that are not installed
        required = []
    found = {}
    for requirement in required:
        asked, _, marker = requirement.partition(";")
        if re.search(rf"""extra\s*==\s*["']{extra}["']""", marker):
            name, version = re.fullmatch(r"\s*([\w.-]+)\s*(.*?)\s*", asked).groups()  # type: ignore[union-attr]
            found[name] = version
    return found
