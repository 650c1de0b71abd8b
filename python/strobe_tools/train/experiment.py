"""The whole of ``strobe train``: text, the run, the same run without attention, the picture, the sampled text and the verdict."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from strobe_tools.train import data
from strobe_tools.train.config import Config
from strobe_tools.train.data import Corpus
from strobe_tools.train.report import Result, draw
from strobe_tools.train.trainer import History, Trainer, pick_device

if TYPE_CHECKING:
    from strobe_tools.train.ranks import Ranks

CUT = "--- how the model goes on:"
_MAIN, _ABLATION = "attention.pt", "no-attention.pt"


def train(config: Config, *, text: Path | None, out: Path, resume: bool, console: Console, ranks: Ranks | None = None) -> Result:
    """Trains as configured and writes loss.png, sample.txt, summary.json and the checkpoints to the folder ``out``.

    All ranks call it, and the first one writes.

    Raises ValueError or FileNotFoundError, naming the argument, for a text or a checkpoint that does not fit.
    """
    pick_device(config)  # checked before the text, which takes time
    out.mkdir(parents=True, exist_ok=True)
    if ranks is not None and not ranks.is_first:
        ranks.barrier()  # until the first one has trained and stored the tokenizer
    if ranks is None or ranks.is_first:
        _say_what_is_there(out, resume, console)
    with console.status("gathering the text, training its tokenizer"):
        corpus = data.load(text, vocab_size=config.vocab_size, most_bytes=config.text_bytes)
    if ranks is not None and ranks.is_first:
        ranks.barrier()
    console.print(
        f"Text: {text or 'the standard library of this Python'}, {_size(corpus.text_bytes)}, vocabulary "
        f"{corpus.tokenizer.get_vocab_size():,}, {len(corpus.train):,} tokens to learn from, {len(corpus.validation):,} held back"
    )
    main = _run(config, corpus, out / _MAIN, resume, console, config.attention, ranks)
    ablation: History | None = None
    if config.ablation and config.attention != "none":
        without = main.config.replace(attention="none")
        ablation = _run(without, corpus, out / _ABLATION, resume, console, "no attention", ranks).history
    bigram = data.bigram_entropy(corpus.train.numpy(), main.validation.numpy(), config.vocab_size)
    result = Result(config.attention, main.history, ablation, bigram, config.must_learn)
    if ranks is not None and not ranks.is_first:
        return result
    draw(out / "loss.png", result)
    prompt, continuation = _sample(main)
    (out / "sample.txt").write_text(f"{prompt}\n{CUT}\n{continuation}\n", encoding="utf-8")
    parameters = sum(p.numel() for p in main.model.parameters())
    summary = {
        "validation_loss": result.run.final,
        "bigram_entropy": bigram,
        "validation_loss_without_attention": ablation.final if ablation else None,
        "attention_learned": result.learned,
        "tokens_per_second": main.tokens_per_second,
        "parameters": parameters,
        "device": str(main.device),
        "config": dataclasses.asdict(main.config),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.rule("held-out text")
    console.print(prompt, markup=False, highlight=False)
    console.rule("how the model goes on")
    console.print(continuation, markup=False, highlight=False)
    console.rule()
    seen = main.steps * main.tokens_per_step
    console.print(
        f"A model of {_count(parameters)} parameters that has read {_count(seen)} tokens is as unsure of the next one as among "
        f"{math.exp(min(result.run.final, 99)):.0f} equally likely ones: expect the look of the text, not its sense."
    )
    console.print(result.verdict, style="bold green" if result.learned else "bold")
    console.print(f"Loss curves: {out / 'loss.png'}; figures: {out / 'summary.json'}; sampled text: {out / 'sample.txt'}")
    return result


def _say_what_is_there(out: Path, resume: bool, console: Console) -> None:
    """Says, before the work, that nothing can be resumed, or that the results of an earlier run will be replaced."""
    checkpoints = [path for path in (out / _MAIN, out / _ABLATION) if path.exists()]
    warning, folder = "[yellow]warning[/yellow]", escape(str(out))
    if resume and not checkpoints:
        console.print(f"{warning} --resume: {folder} has no checkpoint; the run starts at step 0")
    elif not resume and (checkpoints or (out / "summary.json").exists()):
        console.print(
            f"{warning} {folder} has an earlier run: its checkpoints are renamed to *.previous.pt, in place of older ones of that name, "
            "and loss.png, sample.txt and summary.json are replaced at the end. --resume goes on from it, --out names another folder"
        )


def _run(
    config: Config, corpus: Corpus, checkpoint: Path, resume: bool, console: Console, name: str, ranks: Ranks | None = None
) -> Trainer:
    first = ranks is None or ranks.is_first
    if resume and checkpoint.exists():
        trainer = Trainer.load(checkpoint, config, corpus, ranks)
        console.print(f"{name}: continues at step {trainer.step} of {trainer.steps}")
    else:
        if resume:
            console.print(f"{name}: {checkpoint} does not exist; starts at step 0")
        if first and checkpoint.exists():  # a checkpoint may hold hours of training
            checkpoint.replace(checkpoint.with_suffix(".previous.pt"))
        trainer = Trainer(config, corpus, ranks)
    if config.device == "auto" and trainer.device.type == "cpu" and torch.cuda.is_available():
        console.print(f"The GPU is left alone, since {config.attention} attention does not run there yet; --attention sdpa does.")
    parameters = sum(p.numel() for p in trainer.model.parameters())
    console.print(
        f"{name}: {_count(parameters)} parameters, {trainer.steps:,} steps of {trainer.tokens_per_step:,} tokens, "
        f"{trainer.config.precision} on {trainer.device}"
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s "),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=trainer.steps, completed=trainer.step, loss=float("nan"), rate=0.0)

        def on_step(trainer: Trainer) -> None:
            progress.update(task, completed=trainer.step, loss=trainer.history.train[-1], rate=trainer.tokens_per_second)
            if trainer.history.validation and trainer.history.validation[-1][0] == trainer.step:
                progress.console.print(
                    f"{name}: step {trainer.step:>5}  training {trainer.history.train[-1]:.3f}  validation {trainer.history.final:.3f}"
                )

        trainer.run(checkpoint if first else None, on_step)
    return trainer


def _count(n: int) -> str:
    return f"{n / 1e6:.1f} M" if n >= 1_000_000 else f"{n / 1e3:.1f} K"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _sample(trainer: Trainer) -> tuple[str, str]:
    """The beginning of the held-out text, half a sequence of it, and the model's continuation.

    A model as small as these has seen too few beginnings of documents to invent one: if it starts from the end of a
    document, its first tokens lead it astray.
    """
    tokenizer, config = trainer.corpus.tokenizer, trainer.config
    prompt = trainer.validation[0, : max(1, config.sequence // 2)].to(trainer.device)
    generator = torch.Generator(trainer.device).manual_seed(config.seed)
    tokens = trainer.model.generate(prompt, config.sample_tokens, generator=generator)
    # Special tokens are shown, so that the reader sees where a document ends and another one follows.
    shown = (tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in tokens.tensor_split([len(prompt)]))
    before, after = shown
    return before.removeprefix(data.END_OF_DOCUMENT), after
