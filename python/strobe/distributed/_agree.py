"""All ranks go on, or all raise what one of them found wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ._group import on_host
from ._late import Waits, come_back, said_by, told

_DIGEST = 32
Signature = Mapping[str, object]  # what has to be the same on all ranks, by the names of arguments


class Said(NamedTuple):
    """What a rank has to say of its call."""

    signature: Signature
    failure: Exception | None = None
    rng: tuple[int, int] = (0, 0)  # the seed and offset that the first rank has drawn


def agree(group: ProcessGroup, said: Said, seconds: float | None) -> tuple[int, int]:
    """The first rank's seed and offset. Raises on all ranks what the first rank that failed has said, or how signatures differ. A
    collective call: one small message, and a second one if something is wrong."""
    waits = Waits(on_host(group), seconds)
    mine = torch.zeros(1 + _DIGEST + 16, dtype=torch.uint8)
    mine[0] = said.failure is not None
    mine[1 : 1 + _DIGEST] = torch.frombuffer(bytearray(_digest(said.signature)), dtype=torch.uint8)
    mine[1 + _DIGEST :] = torch.tensor(said.rng, dtype=torch.int64).view(torch.uint8)
    all_said = [torch.empty_like(mine) for _ in range(group.size())]
    come_back()
    work = dist.all_gather(all_said, mine, group=waits.group, async_op=True)
    waits.unless_one_left(work, "agreeing on strobe.distributed.attention()", dist.get_process_group_ranks(group))
    if any(x[0] for x in all_said) or not all(torch.equal(x[1 : 1 + _DIGEST], mine[1 : 1 + _DIGEST]) for x in all_said):
        raise _refusal(waits, said)
    seed, offset = all_said[0][1 + _DIGEST :].clone().view(torch.int64).tolist()
    return seed, offset


def drawn_by_first(group: ProcessGroup, drawn: Tensor, seconds: float | None) -> tuple[int, ...]:
    """The numbers in the first rank's tensor, which lies in host memory. A collective call."""
    waits = Waits(on_host(group), seconds)
    of_all = [torch.empty_like(drawn) for _ in range(group.size())]
    waits.for_(dist.all_gather(of_all, drawn, group=waits.group, async_op=True), "drawing a seed")
    return tuple(of_all[0].tolist())


def _digest(signature: Signature) -> bytes:
    return hashlib.sha256(repr(sorted((name, repr(x)) for name, x in signature.items())).encode()).digest()


def _refusal(waits: Waits, said: Said) -> Exception:
    """The same on all ranks."""
    failure = said.failure
    mine = None if failure is None else told(failure), {name: repr(x) for name, x in said.signature.items()}
    found: list[tuple[tuple[str, str] | None, dict[str, str]]] = [mine] * waits.group.size()
    waits.of("agreeing on what is wrong", lambda: dist.all_gather_object(found, mine, group=waits.group))
    for r, (wrong, _) in enumerate(found):
        if wrong is not None:
            return said_by(r, len(found), *wrong)
    first = found[0][1]
    for r, (_, other) in enumerate(found):
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                return ValueError(
                    f"{name}: {_short(other.get(name))} on rank {r}, and {_short(first.get(name))} on rank 0; accepted is the same on all "
                    f"{len(found)} ranks"
                )
    return RuntimeError("signatures differ in nothing that has a name")


def _short(text: str | None) -> str:
    text = str(text)
    return text if len(text) <= 80 else f"{text[:77]}..."
