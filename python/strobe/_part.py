"""Describes which rows, heads and sequences of a larger problem the tensors of a call hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ._checks import Wrong, flag, is_integer, is_whole, plain, refusal
from ._messages import kind, shown
from ._refusals import refusing
from .arrays.known import known_framework

_MOST = 2**63 - 1
_MOST_POSITIONS = 2**31 - 1  # per sequence


@dataclass(frozen=True)
class Part:
    """Says which part of a larger problem the tensors of attention() hold, as in context-parallel training, where each GPU has some rows.

    The rows of q are the ranges of its sequence's positions, one after the other, and so are the rows of k and v. causal, window,
    alibi_slopes, dropout and block_mask see the positions, heads and sequences of the whole problem. mask and bias are indexed by the
    call's own queries and by all keys of the whole problem. A block_mask is the whole problem's; mask, bias, alibi_slopes and sinks have
    the call's own heads and sequences.

    Args:
        q_ranges, k_ranges: (start, length) of each range, integers (n, 2) or (B, n, 2), or an array of them; ascending and disjoint, any
            n. Ranges of length 0 are allowed.
        seqlens_q, seqlens_k: the lengths of the whole sequences, an integer or (B,).
        first_head: the index of the call's first query head in the whole problem. k and v have the key heads that the call's query heads
            read.
        heads: the number of query heads in the whole problem. None: first_head + H.
        first_batch: the index of the call's first sequence in the whole problem.
        partial: the queries see keys that this call does not have. out is then float32, and lse (2, B, H, Sq), or (2, H, Tq): two numbers
            a row, whose sum is the lse. strobe.merge() combines such results. There are no sinks: give them to the last merge. The backward
            is attention_backward() with the whole row's lse and delta.

    Raises:
        TypeError, ValueError: an argument has a wrong kind or shape, a number is negative, or ranges of a sequence do not ascend, overlap
            or pass its end. Whether they fit the tensors is checked by the call.
    """

    q_ranges: Any
    k_ranges: Any
    seqlens_q: Any
    seqlens_k: Any
    first_head: int = 0
    heads: int | None = None
    first_batch: int = 0
    partial: bool = False

    def __post_init__(self) -> None:
        wrong: Wrong = []
        for name in ("q_ranges", "k_ranges", "seqlens_q", "seqlens_k"):
            x = getattr(self, name)
            framework = known_framework(x)
            if framework is not None and (refused := framework.unfit(name, x) or framework.without_values(name, x)) is not None:
                wrong.append(refused)
        if wrong:
            raise refusal(wrong)
        read: dict[str, Any] = {name: _ranges(wrong, name, getattr(self, name)) for name in ("q_ranges", "k_ranges")}
        read |= {name: _lengths(wrong, name, getattr(self, name)) for name in ("seqlens_q", "seqlens_k")}
        for name in ("first_head", "heads", "first_batch"):
            x = getattr(self, name)
            if x is not None or name != "heads":
                is_integer(wrong, name, x, 1 if name == "heads" else 0, _MOST)
                read[name] = plain(x)
        flag(wrong, "partial", self.partial)
        if not wrong:
            for side in "qk":
                _check_positions(wrong, side, read[f"{side}_ranges"], read[f"seqlens_{side}"])
        if wrong:
            raise refusal(wrong)
        for name, x in read.items():
            object.__setattr__(self, name, x)

    def encoded(self) -> tuple[int, ...]:
        """The integers for the operators; equal for Parts that mean the same."""
        numbers = [int(self.partial), self.first_head, self.heads or 0, self.first_batch]
        for ranges in (self.q_ranges, self.k_ranges):
            numbers += [len(ranges), len(ranges[0]) if ranges else 0, *(x for of in ranges for pair in of for x in pair)]
        for lengths in (self.seqlens_q, self.seqlens_k):
            numbers += [len(lengths), *lengths]
        return tuple(numbers)


def is_partial(options: dict[str, Any]) -> bool:
    """Whether a Call's options have a partial part."""
    return bool(options["part"][0]) if "part" in options else False


class Lists(NamedTuple):
    """The contents of an encoded Part."""

    partial: int
    first_head: int
    heads: int
    first_batch: int
    ranges: dict[str, tuple[tuple[int, int], list[int]]]  # by "q" and "k": (B, n), and starts and lengths
    seqlens: dict[str, list[int]]

    def longest(self) -> list[int]:
        """The lengths of the longest whole sequences of queries and of keys; 0 without sequences."""
        return [max(lengths, default=0) for lengths in self.seqlens.values()]


def decoded(part: Sequence[int]) -> Lists:
    at = 4
    ranges, seqlens = {}, {}
    for side in "qk":
        b, n = part[at : at + 2]
        ranges[side] = ((b, n), list(part[at + 2 : at + 2 + 2 * b * n]))
        at += 2 + 2 * b * n
    for side in "qk":
        seqlens[side] = list(part[at + 1 : at + 1 + part[at]])
        at += 1 + part[at]
    return Lists(part[0], part[1], part[2], part[3], ranges, seqlens)


def _check_positions(wrong: Wrong, side: str, ranges: tuple[tuple[tuple[int, int], ...], ...], seqlens: tuple[int, ...]) -> None:
    """Refuses, in the library's words, the first range, or else the first length, that no sequence can have. side: "q" or "k"."""
    for b, n in enumerate(seqlens):
        if not 0 <= n <= _MOST_POSITIONS:
            wrong.append(refusing(ValueError, f"seqlens_{side}", f"{shown(n)} at [{b}]; accepted are 0 to {_MOST_POSITIONS}"))
            return
    shortest = min(seqlens, default=0)
    for b, of in enumerate(ranges):
        most = seqlens[b] if len(ranges) == len(seqlens) else shortest  # ranges that all sequences share must fit the shortest
        end = 0  # end of the previous range
        for n, (start, length) in enumerate(of):
            at = f"({shown(start)}, {shown(length)}) at [{b}, {n}]"
            refused = ""
            if start < 0 or length < 0 or start + length > most:
                refused = f"; accepted are a start and a length within the {most} positions that seqlens_{side} says"
                if not seqlens:
                    refused = f", where seqlens_{side} has no lengths; accepted are no ranges, or the lengths of their sequences"
            elif length and start < end:
                refused = f" begins before {end}, where the range before ends; accepted are ascending and disjoint ranges"
            if refused:
                wrong.append(ValueError(f"{side}_ranges: {at}{refused}"))
                return
            end = start + length if length else end


def _listed(x: Any) -> Any:
    """An array's numbers as lists, or None if it has none, as on the meta device."""
    if not hasattr(x, "tolist") or isinstance(x, type):
        return x
    return None if getattr(x, "is_meta", False) else x.tolist()


def _is_several(x: Any) -> bool:
    return isinstance(x, Iterable) and not isinstance(x, (str, bytes))


def _ranges(wrong: Wrong, name: str, given: Any) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The given ranges as nested tuples, (B or 1, n, 2)."""
    accepted = "accepted are integers (n, 2) or (B, n, 2): the start and the length of each range"
    rows = _listed(given)
    if not _is_several(rows):
        wrong.append(refusing(TypeError, name, f"{kind(given)}; {accepted}"))
        return ()
    rows = [_listed(row) for row in rows]
    one = not rows or all(_is_several(row) and not any(_is_several(x) for x in row) and list(row) for row in rows)
    found: list[tuple[tuple[int, int], ...]] = []
    for of in [rows] if one else rows:
        pairs = [[plain(_listed(x)) for x in pair] if _is_several(pair) else [] for pair in map(_listed, of)] if _is_several(of) else [[]]
        if not all(len(pair) == 2 and all(map(is_whole, pair)) for pair in pairs) or (found and len(found[0]) != len(pairs)):
            wrong.append(refusing(ValueError, name, f"{shown(given)}; {accepted}"))
            return ()
        found.append(tuple((pair[0], pair[1]) for pair in pairs))
    return tuple(found)


def _lengths(wrong: Wrong, name: str, given: Any) -> tuple[int, ...]:
    x = _listed(given)
    numbers = [plain(_listed(n)) for n in x] if _is_several(x) else [plain(x)]
    if all(map(is_whole, numbers)):
        return tuple(numbers)
    wrong.append(refusing(TypeError, name, f"{shown(given)}; accepted are integers (B,), or one for all sequences"))
    return ()
