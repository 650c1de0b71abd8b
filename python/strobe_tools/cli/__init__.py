"""The ``strobe`` command."""

from __future__ import annotations

import click

import strobe
from strobe_tools.bench import cpu as bench
from strobe_tools.cli import check, info, prewarm, tune
from strobe_tools.figures import command as figures
from strobe_tools.train import command as train


@click.group(context_settings={"show_default": True})
@click.version_option(strobe.__version__, message="%(version)s", help="Print the version and leave.")
def app() -> None:
    """Strobe: exact attention, forward and backward, in memory linear in the sequence length."""


for name, module in {
    "info": info,
    "check": check,
    "prewarm": prewarm,
    "tune": tune,
    "figures": figures,
    "train": train,
    "bench": bench,
}.items():
    app.add_command(module.command, name)


def main() -> None:
    app()
