"""Processes that stay for many tests: ranks on gloo, of one thread each, or on NCCL with a GPU each, and groups of the first n of them."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

MOST = 4
SECONDS = 120  # for which an answer is waited


def _serve(rank: int, most: int, backend: str, folder: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=most)
    groups = {n: dist.new_group(list(range(n))) for n in range(1, most + 1)}
    pipe.send("ready")
    while True:
        function, world, arguments = pipe.recv()
        try:
            pipe.send((None, function(groups[world], *arguments)))
        except BaseException as failure:  # told to the test, whatever it is
            pipe.send((f"{type(failure).__name__}: {failure}\n{traceback.format_exc()}", None))


class Workers:
    """Calls functions of modules on the ranks: function(group, *arguments)."""

    def __init__(self, most: int = MOST, backend: str = "gloo") -> None:
        self._folder = tempfile.TemporaryDirectory()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(most):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, most, backend, self._folder.name, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        for rank in range(most):
            self._answer(rank)

    def send(self, function: Callable[..., Any], world: int, *arguments: Any) -> None:
        for pipe in self._pipes[:world]:
            pipe.send((function, world, arguments))

    def receive(self, world: int) -> list[Any]:
        """What each rank of the group returned."""
        answers = [self._answer(rank) for rank in range(world)]
        wrong = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text is not None]
        assert not wrong, "\n".join(wrong)
        return [found for _, found in answers]

    def run(self, function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
        self.send(function, world, *arguments)
        return self.receive(world)

    def _answer(self, rank: int) -> Any:
        if not self._pipes[rank].poll(SECONDS):
            self.close()
            raise AssertionError(f"rank {rank} does not answer within {SECONDS} s")
        return self._pipes[rank].recv()

    def close(self) -> None:
        for process in self._processes:  # they have nothing to keep
            process.kill()
            process.join()
        self._folder.cleanup()
