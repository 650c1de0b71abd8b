"""Runtime and peak memory over the sequence length, forward and backward, with dropout and a padding mask. On the CPU each method runs in a
process of its own with limited memory, so that running out of it does no harm:
``python -m strobe_tools.figures.lengths METHOD QUICK BUDGET`` prints a line of JSON for each length."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import rivals
from .case import Case, Row, Setting
from .clock import RefusedError, attempt, release, times

SHAPE = {"cuda": (2, 8, 64), "cpu": (1, 2, 64)}  # batch, heads, head dimension
LONGEST = {("cuda", False): 65536, ("cuda", True): 8192, ("cpu", False): 65536, ("cpu", True): 2048}
CPU_LIMIT = 4 * 2**30  # bytes that a method may take beyond what its process holds to begin with
MOST_SECONDS = 25.0  # per call: the next length is left out if it would take longer, as the time grows with the square of the length


def lengths(setting: Setting) -> list[int]:
    return [n for n in (128 << i for i in range(10)) if n <= LONGEST[setting.device, setting.quick]]


def shape(setting: Setting, n: int) -> tuple[int, int, int, int]:
    batch, heads, d = SHAPE[setting.device]
    return batch, heads, n, d


def cases(setting: Setting) -> list[Case]:
    if setting.on_gpu:
        return [Case(f"N {n}", lambda n=n: _on_gpu(setting, n)) for n in lengths(setting)]  # type: ignore[misc]
    return [Case(method, lambda method=method: _in_a_process(setting, method)) for method in rivals.methods("cpu")]  # type: ignore[misc]


def _row(setting: Setting, method: str, n: int, seconds: float | None, peak: int | None, note: str) -> Row:
    batch, heads, _, d = shape(setting, n)
    where = {"batch": batch, "heads": heads, "head_dim": d, "dtype": setting.dtype}
    return {"method": method, "length": n, "seconds": seconds, "peak_bytes": peak, "note": note, **where}


def _on_gpu(setting: Setting, n: int) -> list[Row]:
    """Measures each method alone on the GPU, so that no other method holds memory."""
    return [_measured(setting, method, n) for method in rivals.methods(setting.device)]


def _measured(setting: Setting, method: str, n: int) -> Row:
    attend = rivals.methods(setting.device)[method]
    try:
        given = attempt(lambda: rivals.inputs(method, shape(setting, n), setting.dtype, setting.device))
        call = rivals.both(attend, given)
        peak = (_gpu_peak if setting.on_gpu else _cpu_peak)(call)
        seconds, notes = times({method: call}, setting, warm=True)
        return _row(setting, method, n, seconds.get(method), peak, notes.get(method, ""))
    except RefusedError as refusal:
        return _row(setting, method, n, None, None, str(refusal))
    finally:
        release(setting)


def _gpu_peak(call: Callable[[], Any]) -> int:
    """The most bytes that PyTorch's allocator has handed out at one time during the call, minus those from before the call."""
    import torch

    attempt(call)  # a library's own workspace does not count as the method's
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = [torch.cuda.memory_allocated()]
    attempt(call)
    torch.cuda.synchronize()
    held.append(torch.cuda.memory_allocated())
    return torch.cuda.max_memory_allocated() - min(held)  # autograd's thread may release a call's gradients late


def _cpu_peak(call: Callable[[], Any]) -> int:
    """Bytes of the process's resident pages that a call takes beyond those before."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    attempt(call)
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _in_a_process(setting: Setting, method: str) -> list[Row]:
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory goes back at once
    command = [sys.executable, "-m", __name__, method, str(int(setting.quick)), str(setting.budget)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode != 0:
        n = lengths(setting)[len(rows)]
        rows.append(_row(setting, method, n, None, None, (done.stderr.strip().splitlines() or ["the process died"])[-1][:120]))
    return rows


def _ascending(setting: Setting, method: str) -> Iterator[Row]:
    """Measures until a length does not fit."""
    import torch

    torch.set_num_threads(1)
    _measured(setting, method, 64)  # loads and starts everything once
    limit = _status("VmSize") + CPU_LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for n in lengths(setting):
        row = _measured(setting, method, n)
        yield row
        if row["seconds"] is None:
            return
        if row["seconds"] * 4 > MOST_SECONDS and n < lengths(setting)[-1]:
            yield _row(setting, method, 2 * n, None, None, "left out: too long")
            return


if __name__ == "__main__":
    for found in _ascending(Setting("cpu", bool(int(sys.argv[2])), float(sys.argv[3])), sys.argv[1]):
        print(json.dumps(found), flush=True)
