"""A plugin for pytest: each worker of pytest-xdist begins to count the GPUs at another one."""

from __future__ import annotations

import os

import torch

if (worker := os.environ.get("PYTEST_XDIST_WORKER", "")).startswith("gw"):
    count = torch.cuda.device_count()  # does not make CUDA begin
    first = int(worker[2:]) % count
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(str((first + n) % count) for n in range(count)))
