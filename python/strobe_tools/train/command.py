"""``strobe train``: a GPT learns real text through Strobe's attention."""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from strobe_tools.requirements import require
from strobe_tools.train.config import ATTENTIONS, CONFIGS, PRECISIONS, Config
from strobe_tools.values import PATH

_CONFIGS, _ATTENTIONS, _PRECISIONS = (", ".join(names) for names in (CONFIGS, ATTENTIONS, PRECISIONS))


def _overrides(config: Config, assignments: Iterable[str]) -> dict[str, Any]:
    """The assignments of --set, each value of the type of its field."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    changes: dict[str, Any] = {}
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        if name not in fields:
            raise ValueError(f"--set {assignment}: no such field; accepted is NAME=VALUE with NAME one of {', '.join(fields)}")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # the latter two: deeply nested brackets
            value = text
        default = fields[name]
        if isinstance(default, float) and type(value) is int:
            value = float(value)
        if type(value) is not type(default) and None not in (value, default):
            raise ValueError(f"--set {assignment}: {text!r} is no {type(default).__name__}, as {name} is ({default!r} by default)")
        changes[name] = value
    return changes


@click.command(short_help="Train a GPT on real text.")
@click.option("--config", default="default", help=f"What to train: {_CONFIGS}.")
@click.option("--text", type=PATH, help="A text file or a folder of them; by default the standard library's sources.")
@click.option("--attention", help=f"How the model attends: {_ATTENTIONS}.")
@click.option("--out", type=PATH, help="For checkpoints, loss.png, sample.txt, summary.json; by default runs/CONFIG.")
@click.option("--resume", is_flag=True, help="Go on from the checkpoints in the output folder, bit for bit; without any, start at step 0.")
@click.option("--steps", type=int, help="How many steps of the optimizer.")
@click.option("--epochs", type=float, help="How many passes over the text, in place of --steps.")
@click.option("--precision", help=f"Of the matrix products: {_PRECISIONS}.")
@click.option("--device", help="cpu, cuda, cuda:1, ...; by default a GPU if attention runs there.")
@click.option("--compile/--no-compile", default=None, help="Whether to use torch.compile.")
@click.option("--ablation/--no-ablation", default=None, help="Whether to train the same model without attention, too.")
@click.option("--context-parallel", type=int, metavar="W", help="Processes that share every sequence, with --no-compile; 1 by default.")
@click.option("--seed", type=int, help="Of the weights, the order of the text and dropout.")
@click.option("--set", "fields", multiple=True, metavar="NAME=VALUE", help="Any field, e.g. lr=1e-3; repeatable.")
def command(
    config: str,
    text: Path | None,
    attention: str | None,
    out: Path | None,
    resume: bool,
    steps: int | None,
    epochs: float | None,
    precision: str | None,
    device: str | None,
    compile: bool | None,
    ablation: bool | None,
    context_parallel: int | None,
    seed: int | None,
    fields: tuple[str, ...],
) -> None:
    """Train a GPT on real text, draw its loss curves and sample from it.

    The default configuration takes about three minutes on two CPU cores, and fails unless attention was seen to learn.
    """
    require("train", "torch", "numpy", "tokenizers", "matplotlib", extra="train")
    # Before torch is imported: beside other work, threads that wait actively make small steps several times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from strobe_tools.train.experiment import train

    folder = out or Path("runs") / config
    try:
        if config not in CONFIGS:
            raise ValueError(f"--config {config}; accepted: {_CONFIGS}")
        chosen = CONFIGS[config]
        changes = _overrides(chosen, fields)
        options = {"attention": attention, "precision": precision, "device": device, "compile": compile, "ablation": ablation, "seed": seed}
        options["context_parallel"] = context_parallel
        changes |= {name: value for name, value in options.items() if value is not None}
        if steps is not None and epochs is not None:
            raise ValueError("--steps and --epochs: both given; accepted is one of the two")
        if steps is not None or epochs is not None:
            changes |= {"steps": steps, "epochs": epochs}
        chosen = chosen.replace(**changes)
        how: dict[str, Any] = {"text": text, "out": folder, "resume": resume, "console": Console(soft_wrap=True)}
        if chosen.context_parallel > 1:
            from strobe_tools.train.launch import launch

            result = launch(chosen, **how)
        else:
            result = train(chosen, **how)
    except (ValueError, NotImplementedError, OSError, MemoryError) as error:
        click.echo(f"strobe train: {error}", err=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        click.echo(f"\nInterrupted; the same command with --resume goes on from what {folder} holds.", err=True)
        raise SystemExit(130) from None
    if chosen.must_learn and result.learned is False:
        raise SystemExit(1)
