"""``strobe train``: a GPT learns real text through Strobe's attention."""

from __future__ import annotations

import ast
import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from strobe_tools.requirements import require
from strobe_tools.train.config import ATTENTIONS, CONFIGS, PRECISIONS, Config

_CONFIGS, _ATTENTIONS, _PRECISIONS = (", ".join(names) for names in (CONFIGS, ATTENTIONS, PRECISIONS))


def _overrides(config: Config, assignments: list[str]) -> dict[str, Any]:
    """What --set says, each value of the type that the field has."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    changes: dict[str, Any] = {}
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        if name not in fields:
            raise ValueError(f"--set {assignment}: no such field; accepted is NAME=VALUE with NAME one of {', '.join(fields)}")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # the latter two: brackets in brackets
            value = text
        default = fields[name]
        if isinstance(default, float) and type(value) is int:
            value = float(value)
        if type(value) is not type(default) and None not in (value, default):
            raise ValueError(f"--set {assignment}: {text!r} is no {type(default).__name__}, as {name} is ({default!r} by default)")
        changes[name] = value
    return changes


def command(
    config: Annotated[str, typer.Option(help=f"What to train: {_CONFIGS}.")] = "default",
    text: Annotated[Path | None, typer.Option(help="A text file or a folder of them; by default the standard library's sources.")] = None,
    attention: Annotated[str | None, typer.Option(help=f"How the model attends: {_ATTENTIONS}.")] = None,
    out: Annotated[Path | None, typer.Option(help="For checkpoints, loss.png, sample.txt, summary.json; by default runs/CONFIG.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoints in the output folder, bit for bit.")] = False,
    steps: Annotated[int | None, typer.Option(help="How many steps of the optimizer.")] = None,
    epochs: Annotated[float | None, typer.Option(help="How many passes over the text, in place of --steps.")] = None,
    precision: Annotated[str | None, typer.Option(help=f"Of the matrix products: {_PRECISIONS}.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default a GPU if attention runs there.")] = None,
    compile: Annotated[bool | None, typer.Option(help="Whether to use torch.compile.")] = None,
    ablation: Annotated[bool | None, typer.Option(help="Whether to train the same model without attention, too.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the weights, the order of the text and dropout.")] = None,
    fields: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any field, e.g. lr=1e-3; repeatable.")] = None,
) -> None:
    """Train a GPT on real text, draw its loss curves and sample from it.

    The default configuration takes about three minutes on two CPU cores, and fails unless attention was seen to learn.
    """
    require("train", "torch", "numpy", "tokenizers", "matplotlib", extra="train")
    # Before torch comes in: beside other work, threads that wait actively make small steps several times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from strobe_tools.train.experiment import train as run

    folder = out or Path("runs") / config
    try:
        if config not in CONFIGS:
            raise ValueError(f"--config {config}; accepted: {_CONFIGS}")
        chosen = CONFIGS[config]
        changes = _overrides(chosen, fields or [])
        options = {"attention": attention, "precision": precision, "device": device, "compile": compile, "ablation": ablation, "seed": seed}
        changes |= {name: value for name, value in options.items() if value is not None}
        if steps is not None and epochs is not None:
            raise ValueError("--steps and --epochs: both given; accepted is one of the two")
        if steps is not None or epochs is not None:
            changes |= {"steps": steps, "epochs": epochs}
        chosen = chosen.replace(**changes)
        result = run(chosen, text=text, out=folder, resume=resume, console=Console(soft_wrap=True))
    except (ValueError, NotImplementedError, OSError, MemoryError) as error:
        typer.echo(f"strobe train: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo(f"\nInterrupted; the same command with --resume goes on from what {folder} holds.", err=True)
        raise typer.Exit(130) from None
    if chosen.must_learn and result.learned is False:
        raise typer.Exit(1)
