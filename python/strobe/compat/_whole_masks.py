"""Mask functions of transformers for whole sequences, of which a rank has some tokens inside strobe.distributed.context_parallel()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._attention import CONTEXTS
from ._mask_terms import Term, reads, term_of, value

INSIDE = "inside context_parallel()"
_OTHERWISE = (
    f"attention_mask: a mask function {INSIDE} that reads a tensor otherwise than as t[..., i]; accepted is one element by its indices"
)


def whole_mask(
    lengths: tuple[Any, Any], offsets: tuple[Any, Any], function: Callable[..., Any], padding: Tensor | None, device: torch.device
) -> tuple[int, int, Callable[..., Any], Tensor | None]:
    """How many tokens this rank and the sequences have, and a mask's function and padding for positions in whole sequences.

    Args:
        lengths, offsets: of queries and keys, as transformers asks for them.
        function: g(b, h, i, j) of this rank's tokens. Tables that it reads by tokens have this rank's.
        padding: bool (B, tokens), of this rank's tokens or of all.
    """
    sharding, group, *_ = CONTEXTS[-1]
    own, all_tokens = sharding.count(group=group), sharding.seqlen
    if lengths[0] != own or lengths[1] not in (own, all_tokens) or offsets != (0, 0):
        got = f"for {lengths[0]} queries and {lengths[1]} keys from {offsets[1]} on"
        raise NotImplementedError(f"attention_mask: {got} {INSIDE}; accepted are this rank's {own} tokens, without earlier ones in a cache")
    if padding is not None and padding.shape[-1] == own != all_tokens:
        padding = sharding.unshard(padding, -1, group=group)
    term = term_of(function, device)
    if term is None:
        raise NotImplementedError(
            f"attention_mask: a mask function {INSIDE} that asks for a position's number; accepted are operations on it"
        )
    whole = _whole_tables(term, own, all_tokens, lambda table: sharding.unshard(table, -1, group=group), [])
    return own, all_tokens, lambda b, h, i, j: value(whole, {"b": b, "h": h, "i": i, "j": j}), padding


def _whole_tables(x: Any, own: int, whole: int, unshard: Callable[[Tensor], Tensor], known: list[tuple[Tensor, Tensor]]) -> Any:
    """The term with tables of all `whole` tokens in place of those of this rank's `own`: t[..., i], t[..., j] and t[..., f(i)]."""
    if isinstance(x, tuple):
        return tuple(_whole_tables(each, own, whole, unshard, known) for each in x)
    if isinstance(x, Tensor) and x.dim():
        raise NotImplementedError(_OTHERWISE)
    if not isinstance(x, Term):
        return x
    args = x.args
    if x.name == "getitem" and isinstance(args[0], Tensor):
        table, index = args
        places = index if isinstance(index, tuple) else (index,)
        if len(places) != table.dim():
            raise NotImplementedError(_OTHERWISE)
        last = places[-1]
        if isinstance(last, Term) and {*reads(last)} & {*"ij"}:
            if table.shape[-1] not in (own, whole) and last.name in ("i", "j"):
                accepted = f"accepted are the {own} of this rank, or all {whole}"
                raise ValueError(f"attention_mask: a mask function {INSIDE} that reads {table.shape[-1]} tokens' numbers; {accepted}")
            if table.shape[-1] == own != whole:
                found = next((other for each, other in known if each is table), None)
                if found is None:
                    known.append((table, found := unshard(table.detach())))
                table = found
        return Term(x.name, x.function, (table, _whole_tables(index, own, whole, unshard, known)), x.kwargs, x.device)
    return Term(x.name, x.function, _whole_tables(args, own, whole, unshard, known), x.kwargs, x.device)
