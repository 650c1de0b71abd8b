"""flash_attn.bert_padding turns padded batches (B, S, ...) into packed tokens (T, ...), and back. All are differentiable."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from strobe._checks import refuse
from strobe.compat._words import integer_or_refusal, stands_for, tensor_or_refusal

__all__ = [
    "index_first_axis", "index_first_axis_residual", "index_put_first_axis", "pad_input", "unpad_input",
    "unpad_input_for_concatenated_sequences",
]  # fmt: skip

stands_for(__name__, "strobe.compat.flash_attn.bert_padding")

_MOST = 2**63 - 1


class Unpadded(NamedTuple):
    """The result of unpad_input."""

    hidden_states: Tensor  # (T, ...)
    indices: Tensor  # int64 (T,): the place of each token among the B · S
    cu_seqlens: Tensor  # int32 (B + 1,)
    max_seqlen_in_batch: int
    seqused: Tensor  # int32 (B,): how many tokens of each sequence attention_mask keeps


class Separated(NamedTuple):
    """The result of unpad_input_for_concatenated_sequences, for N sequences in all."""

    hidden_states: Tensor  # (T, ...)
    indices: Tensor  # int64 (T,): the place of each token among the B · S
    cu_seqlens: Tensor  # int32 (N + 1,)
    max_seqlen_in_batch: int


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> Unpadded:
    """Packs the tokens that attention_mask keeps. It waits for a GPU, because their number is the result's shape.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: bool or integers (B, S). True or 1 is a token, False or 0 is padding; other numbers are refused.
        unused_mask: likewise, for further tokens that are packed but not counted in seqused.

    Returns:
        hidden_states (T, ...), indices (T,) of the tokens among the B · S, cu_seqlens (B + 1,), max_seqlen_in_batch, seqused (B,).
    """
    masks = {"attention_mask": attention_mask, **({} if unused_mask is None else {"unused_mask": unused_mask})}
    _check(hidden_states, **masks)
    for name, mask in masks.items():
        if mask.dtype != torch.bool and not _is_integral(mask):  # a mask that is added to the scores is 0 where tokens are
            raise ValueError(f"{name}: dtype {mask.dtype}; accepted is bool, True = a token, or integers, 1 = a token")
        each = mask.long()
        if not torch.compiler.is_compiling() and (other := each[(each != 0) & (each != 1)]).numel():
            raise ValueError(f"{name}: {_number(other[0], mask.dtype)}; accepted are 0 and 1")
    used = attention_mask.bool()
    kept = used if unused_mask is None else used | unused_mask.bool()
    return Unpadded(*_packed(hidden_states, kept, kept.sum(1, dtype=torch.int32)), used.sum(1, dtype=torch.int32))


def unpad_input_for_concatenated_sequences(hidden_states: Tensor, attention_mask_in_length: Tensor) -> Separated:
    """Packs the tokens of rows in which several sequences follow one another; each becomes a sequence of its own. It waits for a GPU.

    Args:
        hidden_states: (B, S, ...).
        attention_mask_in_length: integers (B, S): the lengths of each row's sequences, in order, and then zeros. [2, 3, 0, 0, 0, 0] means
            two tokens of one sequence, three of the next, and one of padding.

    Returns:
        As unpad_input(), without seqused.
    """
    _check(hidden_states, attention_mask_in_length=attention_mask_in_length)
    if not _is_integral(attention_mask_in_length):
        raise ValueError(f"attention_mask_in_length: dtype {attention_mask_in_length.dtype}; accepted are integers, lengths of sequences")
    room, each = hidden_states.shape[1], attention_mask_in_length.long()
    outside = (each < 0) | (each > room)  # it waits for a GPU in any case; without this check, sums may not fit 64 bits
    if outside.any():
        raise ValueError(f"attention_mask_in_length: {_number(each[outside][0], attention_mask_in_length.dtype)}; accepted are 0 to {room}")
    filled = each.sum(1)
    if (filled > room).any():
        raise ValueError(f"attention_mask_in_length: lengths of a row that add up to {int(filled.max())}; accepted are 0 to {room}")
    kept = torch.arange(room, device=filled.device) < filled[:, None]
    return Separated(*_packed(hidden_states, kept, each[each > 0]))


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Puts the packed tokens (T, ...) back to their places: (batch, seqlen, ...), with zeros elsewhere. No two indices may be equal."""
    refuse(integer_or_refusal("batch", batch, 0, _MOST), integer_or_refusal("seqlen", seqlen, 0, _MOST))
    refuse(integer_or_refusal("batch * seqlen", batch * seqlen, 0, _MOST))
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """input[indices], the rows of (N, ...) that indices name. indices may have any integer dtype."""
    rows = _rows("input", input, indices)
    return input.index_select(0, rows)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns index_first_axis() and the input itself; the gradients of both are added up."""
    return index_first_axis(input, indices), input.view_as(input)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Puts the rows of `values` at `indices`: (first_axis_dim, ...), with zeros elsewhere. No two indices may be equal: in host memory this
    is checked."""
    refuse(integer_or_refusal("first_axis_dim", first_axis_dim, 0, _MOST))
    rows = _rows("values", values, indices, first_axis_dim)
    if values.shape[:1] != rows.shape:
        raise ValueError(f"indices: shape {tuple(rows.shape)}; accepted is {tuple(values.shape[:1])}, one for each of the values")
    if rows.is_cpu and not torch.compiler.is_compiling() and (several := rows.bincount() > 1).any():
        raise ValueError(f"indices: {int(several.nonzero()[0])} more than once; accepted are indices that differ from one another")
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, rows, values)


def _check(hidden_states: Tensor, **masks: Tensor) -> None:
    refuse(*(tensor_or_refusal(name, x) for name, x in {"hidden_states": hidden_states, **masks}.items()))
    if hidden_states.dim() < 2:
        raise ValueError(f"hidden_states: shape {tuple(hidden_states.shape)}; accepted is (B, S, ...)")
    for name, mask in masks.items():
        if mask.is_meta:
            raise ValueError(f"{name}: on device meta; accepted is a torch.Tensor that has values")
        if mask.shape != hidden_states.shape[:2]:
            raise ValueError(f"{name}: shape {tuple(mask.shape)}; accepted is {tuple(hidden_states.shape[:2])}, as hidden_states begins")


def _is_integral(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _packed(hidden_states: Tensor, kept: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """The first four of the results. kept: bool (B, S); lengths: those of the sequences of the kept tokens."""
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, int(lengths.max()) if len(lengths) else 0


def _rows(name: str, x: Tensor, indices: Tensor, count: int | None = None) -> Tensor:
    """`indices`, checked against `count` rows (None: those of x, the argument `name`), as the int64 that torch's functions need."""
    refuse(tensor_or_refusal(name, x))
    if not x.dim():
        raise ValueError(f"{name}: a number; accepted is (N, ...)")
    refuse(tensor_or_refusal("indices", indices, "a torch.Tensor, integers (T,)"))
    if indices.dim() != 1 or not _is_integral(indices):
        raise ValueError(f"indices: shape {tuple(indices.shape)}, dtype {indices.dtype}; accepted are integers (T,)")
    if indices.device != x.device:
        raise ValueError(f"indices: on device {indices.device}; accepted is {x.device}, where {name} lies")
    rows, count = indices.long(), len(x) if count is None else count
    if rows.is_cpu and rows.numel() and not torch.compiler.is_compiling():
        least, most = sorted(_number(n, indices.dtype) for n in rows.aminmax())
        if least < 0 or most >= count:
            accepted = f"accepted are 0 to {count - 1}" if count else "accepted is none, for there are no rows"
            raise ValueError(f"indices: {least} to {most}; {accepted}")
    return rows


def _number(x: Tensor, dtype: torch.dtype) -> int:
    """x, an int64 number, as it was in another dtype."""
    return int(x) % 2**64 if dtype == torch.uint64 else int(x)
