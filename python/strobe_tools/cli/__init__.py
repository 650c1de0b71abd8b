"""The ``strobe`` command."""

from __future__ import annotations

import os
import sys

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
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # else it is Python that meets what fails here, as it ends
    except OSError:
        if (reason := _output_fails()) is None:
            raise
        # What is left of the output is written once more as Python ends, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        click.echo(f"Error: the output cannot be written: {reason}", err=True)
        sys.exit(1)


def _output_fails() -> str | None:
    """Why nothing more can be written to the standard output: an error of another file does not say whose it is."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as failure:
        return failure.strerror
    except (AttributeError, ValueError):  # there is none, or it is no file
        pass
    return None
