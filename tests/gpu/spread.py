"""Spreads processes over the GPUs: each process has another GPU as its first one. Also a pytest plugin, for the workers of pytest-xdist."""

from __future__ import annotations

import os

import torch


def devices_from(index: int) -> str:
    """The value of CUDA_VISIBLE_DEVICES for the process with this index."""
    given = [x for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x]
    devices = given or [str(n) for n in range(torch.cuda.device_count())]  # does not initialise CUDA
    return ",".join(devices[(index + n) % len(devices)] for n in range(len(devices)))


if (worker := os.environ.get("PYTEST_XDIST_WORKER", "")).startswith("gw"):
    os.environ["CUDA_VISIBLE_DEVICES"] = devices_from(int(worker[2:]))
