"""Torch tensors and their memory: which tensors are plain numbers, and how new ones are allocated."""

from __future__ import annotations

import torch
from torch import Tensor

from .._eager import is_whole
from .._refusals import refusing

PLAIN = Tensor, torch.nn.Parameter


def is_lazy(x: Tensor) -> bool:
    """Whether x's memory lacks its numbers: the dispatcher negates them, or makes zeros, only when x is read."""
    return x.is_neg() or x._is_zerotensor()


def in_memory(x: Tensor) -> Tensor:
    """x, or a copy with its numbers written out."""
    return x.clone() if is_lazy(x) else x


def shortened(name: str, x: Tensor) -> Exception | None:
    """The reason against x, a dense tensor, if its storage ends before its last number. Nothing is checked under compilers and tracers, or
    if a transform wraps x."""
    if torch.compiler.is_compiling() or is_whole(x) or torch._C._is_tracing() or not x.numel():
        return None
    try:
        size = x.untyped_storage().nbytes()
    except NotImplementedError:  # it has no storage of its own
        return None
    last = x.storage_offset() + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    if (end := (last + 1) * x.element_size()) <= size:
        return None
    accepted = "accepted is a storage that holds all of them, as it did before untyped_storage().resize_()"
    return refusing(ValueError, name, f"its numbers reach to byte {end} of a storage of {size}; {accepted}")


class OutOfMemoryError(MemoryError, torch.cuda.OutOfMemoryError):
    """An error that is both Python's and PyTorch's, so that handlers of either catch it."""


def allocated(shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor. strides: None for a tensor without gaps."""
    try:
        if strides is None:
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    except RuntimeError as failed:
        text = str(failed)
        if isinstance(failed, torch.cuda.OutOfMemoryError) or "t allocate memory" in text or "overflow" in text:
            raise OutOfMemoryError(text) from None
        raise
