"""Nested tensors of layout torch.jagged, whose sequences lie behind one another. torch.nested has no types: a nested tensor is Any here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._messages import kind


def wrong_nested(name: str, x: Any, rank: int = 0) -> Exception | None:
    shape = "(B, H, ragged, D)" if rank else "(..., ragged, ...)"
    if not isinstance(x, Tensor) or not x.is_nested or x.layout != torch.jagged:
        return TypeError(f"{name}: {kind(x)}; accepted beside nested tensors is one of layout torch.jagged, {shape}")
    nested: Any = x
    if rank and (x.dim() != rank or nested._ragged_idx != 2):
        return ValueError(f"{name}: nested, with {x.dim()} axes, of which the ragged one is {nested._ragged_idx}; accepted is {shape}")
    if nested.lengths() is not None:
        return ValueError(f"{name}: nested, with gaps between its sequences; accepted is one without: x.contiguous()")
    return None


def as_nested(x: Tensor, like: Any) -> Tensor:
    """(tokens, H, ...) as (B, H, ragged, ...)."""
    return torch.nested.nested_tensor_from_jagged(x, offsets=like.offsets()).transpose(1, 2)
