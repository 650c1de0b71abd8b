"""The ``strobe`` command."""

from __future__ import annotations

from typing import Annotated

import typer

from strobe_tools.bench import cpu as bench
from strobe_tools.cli import check, info, prewarm, tune
from strobe_tools.figures import command as figures
from strobe_tools.train import command as train

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Strobe: exact attention, forward and backward, in memory linear in the sequence length.",
)


def _version(wanted: bool) -> None:
    if wanted:
        import strobe

        typer.echo(strobe.__version__)
        raise typer.Exit


@app.callback()
def _strobe(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")] = False,
) -> None:
    pass


for name, module in {"info": info, "check": check, "prewarm": prewarm, "tune": tune, "figures": figures, "train": train}.items():
    app.command(name)(module.command)
app.add_typer(bench.app, name="bench")


def main() -> None:
    app()
