"""The ``strobe`` command."""

from __future__ import annotations

from typing import Annotated

import typer

from strobe.cli import bench, check, figures, info, prewarm, train, tune

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


for module in (info, check, prewarm, tune, figures, train):
    app.command(module.__name__.rpartition(".")[2])(module.command)
app.add_typer(bench.app, name="bench")


def main() -> None:
    app()
