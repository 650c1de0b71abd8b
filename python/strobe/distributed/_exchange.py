"""Sends rows of tensors from every rank to every rank by torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..arrays.memory import allocated
from ._group import group_of
from ._late import Waits


class Underway(NamedTuple):
    """Rows in flight. The sent tensor must live as long as this object."""

    received: Tensor
    sent: Tensor
    work: dist.Work | None
    waits: Waits
    what: str

    def wait(self) -> Tensor:
        if self.work is not None:
            self.waits.for_(self.work, self.what, self.received.is_cuda)
        return self.received


def begin(waits: Waits, what: str, sent: Tensor, to: Sequence[int], received: Tensor, of: Sequence[int]) -> Underway:
    """Sends the rows of `sent`: the first to[0] rows to rank 0, the next to[1] rows to rank 1, and so on. of[r]: how many rows come from
    rank r; rows arrive in the order of the ranks. Both tensors are contiguous, of the same dtype, and rows have one shape on all ranks."""
    row = math.prod(sent.shape[1:]) * sent.element_size()
    if row == 0:
        return Underway(received, sent, None, waits, what)

    def start() -> dist.Work:
        return dist.all_to_all_single(
            received.reshape(-1).view(torch.uint8),
            sent.reshape(-1).view(torch.uint8),
            [n * row for n in of],
            [n * row for n in to],
            group=waits.group,
            async_op=True,
        )

    return Underway(received, sent, waits.of(what, start), waits, what)


def exchange(waits: Waits, what: str, sent: Tensor, to: Sequence[int], of: Sequence[int]) -> Tensor:
    return begin(waits, what, sent, to, room(sent, sum(of)), of).wait()


def room(like: Tensor, rows: int, dtype: torch.dtype | None = None) -> Tensor:
    """`rows` uninitialised rows, in the shape of the rows of `like`."""
    return allocated((rows, *like.shape[1:]), None, dtype or like.dtype, like.device)


def gathered(x: Tensor, dim: int, counts: Sequence[int], group: ProcessGroup | None) -> list[Tensor]:
    """Every rank's tensor, with counts[r] entries along dim."""
    if len(counts) == 1:
        return [x]
    waits = Waits(group_of(group), None)
    rows = x.movedim(dim, 0).contiguous()
    sent = rows.repeat(len(counts), *[1] * (rows.dim() - 1))
    found = exchange(waits, "unshard", sent, [rows.shape[0]] * len(counts), counts)
    return [each.movedim(0, dim) for each in found.split([*counts])]
