"""Processes that live for many tests: ranks on gloo, with one thread each, or on NCCL with a GPU each, and groups of the first n of
them."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

MOST = 4
SECONDS = 120  # time limit of an answer


def _serve(rank: int, most: int, backend: str, folder: str, seconds: float, pipe: Any) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # lets show_stacks() print this process's stacks if it hangs
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    limit = datetime.timedelta(seconds=10 * seconds)  # the parent gives up earlier
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=most, timeout=limit)
    groups = {n: dist.new_group(list(range(n)), timeout=limit) for n in range(1, most + 1)}
    pipe.send("ready")
    while True:
        function, world, arguments = pipe.recv()
        try:
            pipe.send((None, function(groups[world], *arguments)))
        except BaseException as failure:  # whatever its type is, the test gets it
            pipe.send((f"{type(failure).__name__}: {failure}\n{traceback.format_exc()}", None))


class Workers:
    """Calls functions of modules on the ranks: function(group, *arguments). seconds: the time limit of each answer."""

    def __init__(self, most: int = MOST, backend: str = "gloo", seconds: float = SECONDS) -> None:
        self._folder, self._seconds = tempfile.TemporaryDirectory(), seconds
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(most):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, most, backend, self._folder.name, seconds, there), daemon=True)
            process.start()
            there.close()  # so that the end of a process is noticed
            self._pipes.append(here)
            self._processes.append(process)
        for rank in range(most):
            self._answer(rank, SECONDS)

    def send(self, function: Callable[..., Any], world: int, *arguments: Any) -> None:
        for pipe in self._pipes[:world]:
            with contextlib.suppress(BrokenPipeError):  # receive() reports a process that has ended
                pipe.send((function, world, arguments))

    def receive(self, world: int) -> list[Any]:
        """The return values of the group's ranks."""
        answers = [self._answer(rank, self._seconds) for rank in range(world)]
        wrong = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text is not None]
        assert not wrong, "\n".join(wrong)
        return [found for _, found in answers]

    def run(self, function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
        self.send(function, world, *arguments)
        return self.receive(world)

    def _answer(self, rank: int, seconds: float) -> Any:
        try:
            if self._pipes[rank].poll(seconds):
                return self._pipes[rank].recv()
            words = f"does not answer within {seconds:.0f} s"
            self._show_stacks()
        except (EOFError, ConnectionError):
            self._processes[rank].join()
            words = f"ended with status {self._processes[rank].exitcode}"
        self.close()
        raise AssertionError(f"rank {rank} {words}")

    def _show_stacks(self) -> None:
        """Prints the stacks of all ranks to stderr."""
        for process in self._processes:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR1)
                    time.sleep(0.3)  # so that ranks print one after the other

    @property
    def closed(self) -> bool:
        """Whether the workers can no longer be used, because an answer did not come."""
        return not self._processes

    def close(self) -> None:
        for process in self._processes:  # the processes have nothing to save
            process.kill()
            process.join()
        self._processes = []
        self._folder.cleanup()
