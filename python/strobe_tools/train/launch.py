"""The processes of context parallelism: starts them, trains in all of them, ends them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from strobe_tools.train.config import Config
from strobe_tools.train.experiment import train
from strobe_tools.train.ranks import Ranks
from strobe_tools.train.report import Result
from strobe_tools.train.trainer import pick_device


def launch(config: Config, *, text: Path | None, out: Path, resume: bool, console: Console) -> Result:
    """experiment.train() in config.context_parallel processes, of which this is the first. Raises what train() raises."""
    world = config.context_parallel
    device = pick_device(config).type
    if device == "cuda" and torch.cuda.device_count() < world:
        raise ValueError(f"context_parallel is {world}; accepted: up to {torch.cuda.device_count()}, the number of GPUs, or --device cpu")
    config = config.replace(device=device)
    if device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // world))
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        context = torch.multiprocessing.get_context("spawn")
        try:
            for rank in range(1, world):
                arguments = (config, text, out, resume, rank, store, torch.get_num_threads())
                processes.append(context.Process(target=_other, args=arguments, daemon=True))
                processes[-1].start()
            ranks = Ranks(world, 0, device, store)
            found = train(config, text=text, out=out, resume=resume, console=console, ranks=ranks)
            for process in processes:
                process.join()
            return found
        finally:
            for process in processes:
                process.kill()
            if dist.is_initialized():
                dist.destroy_process_group()


def _other(config: Config, text: Path | None, out: Path, resume: bool, rank: int, store: str, threads: int) -> None:
    """The work of another rank, which prints and writes nothing."""
    torch.set_num_threads(threads)
    ranks = Ranks(config.context_parallel, rank, config.device, store)
    try:
        train(config, text=text, out=out, resume=resume, console=Console(quiet=True), ranks=ranks)
    except KeyboardInterrupt:
        os._exit(130)
