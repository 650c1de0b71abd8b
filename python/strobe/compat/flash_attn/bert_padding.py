"""flash_attn.bert_padding: from padded batches (B, S, ...) to packed tokens (T, ...) and back. All are differentiable."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


class Unpadded(NamedTuple):
    """What unpad_input returns."""

    hidden_states: Tensor  # (T, ...)
    indices: Tensor  # int64 (T,): where each token stood among the B · S
    cu_seqlens: Tensor  # int32 (B + 1,)
    max_seqlen_in_batch: int
    seqused: Tensor  # int32 (B,): how many tokens of each sequence attention_mask keeps


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> Unpadded:
    """The tokens that attention_mask keeps, packed; waits for a GPU, for their number is the result's shape.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: bool or integers (B, S); true or 1: a token, false or 0: padding.
        unused_mask: likewise, of none that attention_mask has: tokens that are packed, and not counted in seqused.
    """
    if hidden_states.dim() < 2:
        raise ValueError(f"hidden_states: shape {tuple(hidden_states.shape)}; accepted is (B, S, ...)")
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.is_meta:
            raise ValueError(f"{name}: on device meta; accepted is a torch.Tensor that has values")
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            raise ValueError(f"{name}: shape {tuple(mask.shape)}; accepted is {tuple(hidden_states.shape[:2])}, as hidden_states begins")
    used = attention_mask.bool()
    kept = used if unused_mask is None else used | unused_mask.bool()
    lengths = kept.sum(1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    longest = int(lengths.max()) if len(lengths) else 0
    return Unpadded(index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used.sum(1, dtype=torch.int32))


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen, ...): the packed tokens (T, ...) where they stood, zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """input[indices]: rows of (N, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...): the rows of `values` at `indices`, which differ from one another; zeros elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)
