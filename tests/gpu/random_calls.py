"""Random calls on the engines of a GPU, with sets of options drawn anew in each run:

python tests/gpu/random_calls.py [--seed N] [--seconds T] [--sets N] [...]

A set is several calls with the same options, as far as these determine the compiled kernels. One process per core, spread over the GPUs,
takes one set after the other: it compiles the set's kernels, makes its calls, and judges them by formulas in float64 on the GPU. A process
that crashes or hangs is replaced, and its last call counts as wrong. The counts are added to those of earlier runs on the same sources in
tests/gpu-record.json."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from queue import Empty, Queue
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]

CALLS_A_SET = 4
SETS_A_SEED = 1 << 20


# A worker: reads numbers of sets, writes a line of JSON for each event


def work(calls: int) -> None:
    import torch

    from random_call import drawn, engines, faults, replay
    from random_draw import CALLS

    def tell(**event: Any) -> None:
        print(json.dumps(event), flush=True)

    on_gpu = torch.cuda.is_available()
    tell(ready=torch.cuda.get_device_name() if on_gpu else "the emulated GPU")
    for line in sys.stdin:
        for number in range(int(line) * CALLS, int(line) * CALLS + calls):
            tell(begins=number)
            try:
                call = drawn(number, gpu=True)
                names = engines(call)
                names = names[number // CALLS % len(names) :][:1]  # one engine per set, since compiling takes longer than all its calls
                found = faults(call, names)
            except torch.OutOfMemoryError:
                tell(left_out=number)
                torch.cuda.empty_cache()
                continue
            except Exception as error:  # an exception of any type makes this call wrong; the next call may be right
                tell(number=number, runs=[], faults=[f"{type(error).__name__}: {error}"], replay=replay(number, None, True), call="")
                if on_gpu and "CUDA" in str(error):  # a CUDA context does not recover from an error
                    return
                continue
            words = str(call) if found else ""
            tell(number=number, runs=[name or "default" for name in names], faults=found, replay=replay(number, None, True), call=words)
            if on_gpu and torch.cuda.memory_reserved() > 2 << 30:
                torch.cuda.empty_cache()
        tell(end=int(line))


# The parent process


@dataclasses.dataclass
class Tally:
    calls: int = 0
    option_sets: int = 0
    wrong: int = 0
    left_out: int = 0  # calls left out for lack of memory
    runs: Counter[str] = dataclasses.field(default_factory=Counter)  # calls per engine
    device: str = ""
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def judged(self, event: dict[str, Any]) -> None:
        with self.lock:
            self.calls += 1
            self.runs.update(event["runs"])
            if event["faults"]:
                self.wrong += 1
                print(event["replay"], f"  {event['call']}", *(f"  {fault}" for fault in event["faults"]), sep="\n", flush=True)

    def died(self, number: int, how: str) -> None:
        from random_call import replay

        self.judged({"runs": [], "faults": [how], "replay": replay(number, None, True), "call": ""})


class Worker:
    """A process, and its messages so far."""

    def __init__(self, index: int, calls: int):
        from spread import devices_from

        environment = dict(os.environ)
        if environment["STROBE_TEST_DEVICE"] == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = devices_from(index)
        command = [sys.executable, "-X", "faulthandler", str(HERE / "random_calls.py"), "--work", str(calls)]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._told: Queue[str | None] = Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._told.put(line)
        self._told.put(None)

    def ask(self, number: int) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # if the process has ended, next_event() reports that
            self._process.stdin.write(f"{number}\n")
            self._process.stdin.flush()

    def next_event(self, seconds: float) -> dict[str, Any] | None:
        """The next message of the process; None if the process has ended. Raises queue.Empty if no message comes in that time."""
        line = self._told.get(timeout=max(0.01, seconds))
        return None if line is None else json.loads(line)

    def end(self) -> int:
        self._process.kill()
        return self._process.wait()

    def status(self) -> int:
        return self._process.wait()


class Sets:
    """Hands out numbers of option sets until there are enough or the time is over."""

    def __init__(self, first: int, most: int, until: float):
        self._next, self._end, self._until, self._lock = first, first + most, until, threading.Lock()

    def draw(self) -> int | None:
        with self._lock:
            if self._next >= self._end or time.monotonic() > self._until:
                return None
            self._next += 1
            return self._next - 1


def attend(index: int, sets: Sets, tally: Tally, calls: int, patience: float, deadline: float) -> None:
    """Keeps one worker busy, and replaces it if it dies."""
    worker: Worker | None = None
    try:
        while (asked := sets.draw()) is not None:
            if worker is None:
                worker = Worker(index, calls)
                if not started(worker, tally, deadline):
                    return
            worker.ask(asked)
            if not follow(worker, asked, tally, patience, deadline):
                worker.end()
                worker = None
    finally:
        if worker:
            worker.end()


def started(worker: Worker, tally: Tally, deadline: float) -> bool:
    with contextlib.suppress(Empty):
        if (event := worker.next_event(deadline - time.monotonic())) and "ready" in event:
            tally.device = event["ready"]
            return True
        print(f"a worker ended with status {worker.status()} before its first call", file=sys.stderr, flush=True)
    return False


def follow(worker: Worker, asked: int, tally: Tally, patience: float, deadline: float) -> bool:
    """Follows one set; returns whether the worker can take another one. Calls in progress at the deadline do not count."""
    number = None
    while True:
        try:
            event = worker.next_event(min(patience, deadline - time.monotonic()))
        except Empty:
            if time.monotonic() < deadline and number is not None:
                tally.died(number, f"no answer for {patience:.0f} s")
            return False
        if event is None:
            if number is not None:
                tally.died(number, f"the process ended with status {worker.status()}")
            return False
        if "begins" in event:
            number = event["begins"]
        elif "left_out" in event:
            number, tally.left_out = None, tally.left_out + 1
        elif "number" in event:
            number = None
            tally.judged(event)
        elif event.get("end") == asked:
            with tally.lock:
                tally.option_sets += 1
            return True


def cores() -> int:
    """The number of cores that this process may use. A container's quota counts, too."""
    found = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        found = min(found, max(1, quota // period))
    return found


def run(first: int, seconds: float, most: int, workers: int, calls: int, patience: float) -> tuple[Tally, float]:
    began = time.monotonic()
    deadline = began + seconds
    tally, sets = Tally(), Sets(first, most, deadline - min(15.0, 0.1 * seconds))  # sets that begin later may not end in time
    threads = [threading.Thread(target=attend, args=(i, sets, tally, calls, patience, deadline)) for i in range(workers)]
    for thread in threads:
        thread.start()
    last = began
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.5)
        if time.monotonic() - last > 30:
            last = time.monotonic()
            with tally.lock:
                print(f"{last - began:.0f} s: {tally.option_sets} option sets, {tally.calls} calls, {tally.wrong} wrong", flush=True)
    return tally, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**24), help="by default drawn, and printed")
    parser.add_argument("--seconds", type=float, default=480, help="after which all has ended")
    parser.add_argument("--sets", type=int, default=SETS_A_SEED, help="of options, at most")
    parser.add_argument("--calls", type=int, default=CALLS_A_SET, help="of a set")
    parser.add_argument("--workers", type=int, default=cores(), help="by default as many as there are cores")
    parser.add_argument("--patience", type=float, default=120, help="seconds that a call, its kernels compiled, may take")
    parser.add_argument("--record", type=Path, help="by default tests/gpu-record.json; nothing is recorded of the emulated GPU")
    parser.add_argument("--functions", action="store_true", help="draw calls with a function of the score or the mask alone")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        work(asked.work)
        return 0
    import record
    import torch

    from random_call import FUNCTIONS_ON_GPU
    from random_draw import CALLS

    if os.environ["STROBE_TEST_DEVICE"] == "cuda" and not torch.cuda.is_available():  # does not initialise CUDA
        parser.exit(2, "PyTorch sees no CUDA device here; CONTRIBUTING.md has the command for the emulated GPU\n")
    digest = record.digest()
    print(f"seed {asked.seed}, {asked.workers} workers", flush=True)
    first = asked.seed * SETS_A_SEED + (FUNCTIONS_ON_GPU // CALLS if asked.functions else 0)
    tally, seconds = run(first, asked.seconds, min(asked.sets, SETS_A_SEED), asked.workers, asked.calls, asked.patience)
    found = {"calls": tally.calls, "option_sets": tally.option_sets, "wrong": tally.wrong}
    found |= {"seeds": [asked.seed], "device": tally.device, "seconds": round(seconds)}
    print(json.dumps(found | {"runs": tally.runs, "left_out": tally.left_out}))
    if os.environ["STROBE_TEST_DEVICE"] == "cuda" or asked.record:
        record.add_random(found, digest, asked.record or record.RECORD)
    return 1 if tally.wrong or not tally.calls else 0


if __name__ == "__main__":
    os.environ.setdefault("STROBE_TEST_DEVICE", "cuda")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
