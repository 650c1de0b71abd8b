"""The peak of memory that an attention takes, forward and backward, beyond its inputs. Each measurement has a process of its own:
``python -m strobe_tools.bench.memory LENGTH DTYPE`` prints bytes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

BATCH, HEADS, HEAD_DIM = 1, 8, 64


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _measure(length: int, dtype: str) -> int:
    import torch

    import strobe

    def inputs(seqlen: int) -> list[torch.Tensor]:
        shape = (BATCH, HEADS, seqlen, HEAD_DIM)
        return [
            torch.ones(shape, dtype=getattr(torch, dtype), requires_grad=differentiable) for differentiable in (True, True, True, False)
        ]

    def run(tensors: list[torch.Tensor]) -> None:
        q, k, v, dout = tensors
        strobe.attention(q, k, v, causal=True).backward(dout)

    run(inputs(64))  # loads and starts everything once
    tensors = inputs(length)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    run(tensors)
    return _status("VmHWM") - before


def peak(length: int, dtype: str) -> int:
    """Bytes beyond the inputs, in a fresh process. Raises RuntimeError if /proc does not report it (it does on Linux)."""
    done = subprocess.run([sys.executable, "-m", __name__, str(length), dtype], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the memory at length {length} could not be measured: {done.stderr.strip()}")
    return int(done.stdout)


if __name__ == "__main__":
    print(_measure(int(sys.argv[1]), sys.argv[2]))
