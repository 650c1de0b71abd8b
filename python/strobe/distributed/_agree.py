"""An agreement of all ranks: all continue, or all raise the error that one of them found."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .._refusals import in_callers_words
from ._group import on_host
from ._late import Waits, all_came, come_back, said_by, times_left, told

_A_FUNCTION = "a function: "
# Whether the rank has failed, the digest of its signature, the seed and offset that it has drawn, and how often it has left.
_MESSAGE = struct.Struct("=?32sqqq")


class Signature:
    """The values that must be the same on all ranks, by the names of arguments."""

    def __init__(self, said: Mapping[str, object]):
        self.said = said

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(repr(sorted((name, repr(x)) for name, x in self.said.items())).encode()).digest()


class Recorded:
    """A recorded function in a signature; text: its operations."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return f"{_A_FUNCTION}{self.text}"


class Said(NamedTuple):
    """A rank's report on its call."""

    signature: Signature
    failure: Exception | None = None
    rng: tuple[int, int] = (0, 0)  # the seed and offset that the first rank has drawn


def agree(group: ProcessGroup, said: Said, seconds: float | None) -> tuple[int, int]:
    """The first rank's seed and offset. If a rank failed, or signatures differ, all ranks raise the same error: that of the first rank that
    failed, or the difference. A collective call: one small message, and a second one if something is wrong."""
    waits = Waits(on_host(group), seconds)
    mine = _MESSAGE.pack(said.failure is not None, said.signature.digest, *said.rng, times_left())
    received = torch.empty(group.size(), len(mine), dtype=torch.uint8, device="cpu")
    come_back()
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    work = dist.all_gather([*received], sent, group=waits.group, async_op=True)
    ranks = dist.get_process_group_ranks(group)
    waits.unless_one_left(work, "agreeing on strobe.distributed.attention()", ranks)
    all_said = [_MESSAGE.unpack(bytes(x)) for x in received.tolist()]
    all_came(ranks, [times for *_, times in all_said])
    if any(failed or digest != said.signature.digest for failed, digest, *_ in all_said):
        raise _refusal(waits, said)
    _, _, seed, offset, _ = all_said[0]
    return seed, offset


def drawn_by_first(group: ProcessGroup, drawn: Tensor, seconds: float | None) -> tuple[int, ...]:
    """The numbers in the first rank's tensor, which lies in host memory. A collective call."""
    waits = Waits(on_host(group), seconds)
    of_all = [torch.empty_like(drawn) for _ in range(group.size())]
    waits.for_(dist.all_gather(of_all, drawn, group=waits.group, async_op=True), "drawing a seed")
    return tuple(of_all[0].tolist())


def _refusal(waits: Waits, said: Said) -> Exception:
    """The error, the same on all ranks."""
    failure = said.failure
    mine = None if failure is None else told(in_callers_words(failure)), {name: repr(x) for name, x in said.signature.said.items()}
    found: list[tuple[tuple[str, str] | None, dict[str, str]]] = [mine] * waits.group.size()
    waits.of("agreeing on what is wrong", lambda: dist.all_gather_object(found, mine, group=waits.group))
    for r, (wrong, _) in enumerate(found):
        if wrong is not None:
            return said_by(r, len(found), *wrong)
    first = found[0][1]
    for r, (_, other) in enumerate(found):
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                theirs, ours = _told(other.get(name), first.get(name))
                return ValueError(f"{name}: {theirs} on rank {r}, and {ours} on rank 0; accepted is the same on all {len(found)} ranks")
    return RuntimeError("signatures differ in nothing that has a name")


def _told(a: str | None, b: str | None) -> tuple[str, str]:
    """Two values that differ; two functions by the first operation in which they do."""
    if not (a and b and a.startswith(_A_FUNCTION) and b.startswith(_A_FUNCTION)):
        return tuple("a function" if x and x.startswith(_A_FUNCTION) else _short(x) for x in (a, b))  # type: ignore[return-value]
    both = [x.removeprefix(_A_FUNCTION).split("; ") for x in (a, b)]
    at = next((n for n, (x, y) in enumerate(zip(*both, strict=False)) if x != y), min(map(len, both)))
    first, second = (f"a function whose operation {at} is {x[at]}" if at < len(x) else f"a function of {at} operations" for x in both)
    return first, second


def _short(text: str | None) -> str:
    text = str(text)
    return text if len(text) <= 80 else f"{text[:77]}..."
