"""Quantises K and V of a call by the tests' own formulas: stored numbers, scales, and the values that they stand for, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# By name: the largest stored number, and the dtype that stores it. int4: two per byte.
KINDS = {
    "int8": (127.0, torch.int8),
    "float8": (448.0, torch.float8_e4m3fn),
    "e5m2": (57344.0, torch.float8_e5m2),
    "int4": (7.0, torch.uint8),
}
SCALES = {"float16": torch.float16, "float32": torch.float32}


class Kind(NamedTuple):
    stored: str  # one of KINDS
    scale: str  # one of SCALES
    group: int | None = None  # rows of k that share a scale for each column; None: a scale for each row
    queries: bool = False  # q is quantised, too


@dataclass
class Quantised:
    """The stored k and v that a call gets; the scales have a row for each row of k and v, with one column or all."""

    kind: Kind
    k: Tensor  # bytes
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    q: Tensor | None = None  # bytes
    q_scale: Tensor | None = None

    def handed(self, row: int) -> tuple[Tensor, Tensor, dict[str, object]]:
        """k, v and options; row: the axis of rows."""
        dtype = KINDS[self.kind.stored][1]
        options: dict[str, object] = {"k_scale": self.k_scale[..., 0], "v_scale": self.v_scale[..., 0]}
        if self.kind.group is not None:
            first = (slice(None),) * row + (slice(None, None, self.kind.group),)
            options |= {"k_scale": self.k_scale[first], "k_scale_group": self.kind.group}
        return self.k.view(dtype), self.v.view(dtype), options


def quantised(kind: Kind, k: Tensor, v: Tensor, row: int, groups: Tensor | None) -> tuple[Quantised, Tensor, Tensor]:
    """Returns k and v, of any strides, as stored contiguous tensors, and their values in float64. groups: for each row of k along the axis
    `row`, the number of the group of rows that share its scales."""
    k_data, k_scale = _stored(kind, k, _largest_of_groups(k, row, groups) if groups is not None else k.abs().amax(-1, keepdim=True))
    v_data, v_scale = _stored(kind, v, v.abs().amax(-1, keepdim=True))
    both = Quantised(kind, _bytes(kind, k_data), _bytes(kind, v_data), k_scale.contiguous(), v_scale.contiguous())
    return both, k_data.double() * k_scale.double(), v_data.double() * v_scale.double()


def quantised_queries(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q in FP8: bytes, scales that are powers of two, one for each row, and the values in q's dtype, which holds them exactly."""
    most, dtype = KINDS["float8"]
    scale = 2.0 ** torch.ceil(torch.log2((q.abs().amax(-1, keepdim=True).float() / most).clamp(min=2.0**-14)))
    stored = (q.float() / scale).to(dtype)
    return stored.contiguous().view(torch.uint8), scale, (stored.float() * scale).to(q.dtype)


def group_of(positions: Tensor, group: int, page: int | None) -> Tensor:
    """The group of rows of each position: in pages, each page has groups of its own."""
    if page is None:
        return positions // group
    return positions // page * -(-page // group) + positions % page // group


def _largest_of_groups(x: Tensor, row: int, groups: Tensor) -> Tensor:
    """The largest |x| in the group of each row, column by column."""
    _, which = groups.unique(return_inverse=True)
    moved = x.abs().movedim(row, 0)
    largest = moved.new_zeros(int(which.max()) + 1 if len(which) else 0, *moved.shape[1:])
    index = which.view(-1, *[1] * (moved.dim() - 1)).expand(moved.shape)
    return largest.scatter_reduce(0, index, moved, "amax")[which].movedim(0, row)


def _stored(kind: Kind, x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    most, dtype = KINDS[kind.stored]
    scale = (largest.double() / most).to(SCALES[kind.scale])
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    wanted = (x.double() / scale.double()).clamp(-most, most)
    return wanted.float().to(dtype) if kind.stored in ("float8", "e5m2") else wanted.round(), scale


def _bytes(kind: Kind, data: Tensor) -> Tensor:
    if kind.stored in ("float8", "e5m2"):
        return data.contiguous().view(torch.uint8)
    whole = data.to(torch.int64) % 256
    if kind.stored == "int4":
        whole = whole[..., 0::2] % 16 + whole[..., 1::2] % 16 * 16
    return whole.to(torch.uint8).contiguous()
