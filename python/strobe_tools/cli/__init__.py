"""The ``strobe`` command."""

from __future__ import annotations

import inspect
import os
import sys

import click

import strobe
from strobe_tools.bench import cpu as bench
from strobe_tools.cli import check, info, prewarm, tune
from strobe_tools.figures import command as figures
from strobe_tools.train import command as train


class _Commands(click.Group):
    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name not in self.commands and name in strobe.__all__ and inspect.isfunction(function := getattr(strobe, name)):
            needed = (
                x.name for x in inspect.signature(function).parameters.values() if x.default is x.empty and x.kind is not x.VAR_KEYWORD
            )
            ctx.fail(f"{name} is a Python function: strobe.{name}({', '.join(needed)})")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"show_default": True})
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
                sys.stdout.flush()  # otherwise Python would meet the error when it ends
    except OSError:
        if (reason := _output_fails()) is None:
            raise
        # As it ends, Python writes the rest of the output once more, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        click.echo(f"Error: the output cannot be written: {reason}", err=True)
        sys.exit(1)


def _output_fails() -> str | None:
    """Why the standard output can no longer be written; None if it can. (An error of writing does not say to which file it belongs.)"""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as failure:
        return failure.strerror
    except (AttributeError, ValueError):  # the standard output does not exist, or is no file
        pass
    return None
