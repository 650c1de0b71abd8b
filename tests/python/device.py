"""The device of the tests: STROBE_TEST_DEVICE=cuda moves every call, with its strides, to the GPU and its results back.

STROBE_TEST_DEVICE=emulated runs every call on the emulated GPU of tests/emulator, which shares the CPU's memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import strobe
from cases import Inputs
from strobe import _abi
from strobe.arrays import numpy as numpy_arrays
from strobe.arrays import torch as torch_arrays

_WHERE = os.environ.get("STROBE_TEST_DEVICE", "cpu")
EMULATED = _WHERE == "emulated"
ON_GPU = EMULATED or _WHERE == "cuda"
DEVICE = "cpu" if EMULATED else _WHERE  # the device of tensors


_QUANTISED = ("q", "k", "v", "q_scale", "k_scale", "v_scale")


@contextmanager
def running_on(engine: str | None) -> Iterator[None]:
    """On an emulated GPU, CPU tensors count as GPU memory, except for the oracle."""
    before = torch_arrays.CPU
    numpy_arrays.CPU = torch_arrays.CPU = _abi.CUDA if EMULATED and engine != "reference" else _abi.CPU
    try:
        yield
    finally:
        numpy_arrays.CPU = torch_arrays.CPU = before


def moved(t: Tensor, device: str) -> Tensor:
    """t with its strides, 0 and gaps included, on another device."""
    if t.device.type == device:
        return t
    storage = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())  # type: ignore[call-overload]
    return torch.as_strided(storage.to(device), t.size(), t.stride(), t.storage_offset())


def _moved(x: Any, device: str) -> Any:
    if isinstance(x, Tensor):
        return moved(x, device)
    return x.to(device) if isinstance(x, strobe.BlockMask) else x


def on_device(inputs: Inputs, device: str) -> Inputs:
    """NumPy calls, which run only on the CPU, become calls with torch tensors."""
    if device == "cpu":
        return inputs
    tensors = {name: _moved(getattr(inputs, name), device) for name in ("q", "k", "v", "dout", "dlse")}
    options = {name: _moved(x, device) for name, x in inputs.options.items()}
    quant = inputs.quant and dataclasses.replace(inputs.quant, **{x: _moved(getattr(inputs.quant, x), device) for x in _QUANTISED})
    return dataclasses.replace(inputs, **tensors, options=options, quant=quant, numpy=False)


def here(engine: str) -> bool:
    """Whether the engine runs on the device of the tests."""
    return engine.startswith("cuda-") == ON_GPU and not engine.startswith("ladder-")
