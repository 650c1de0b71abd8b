"""torch.nn.attention.varlen: attention of packed sequences, with the arguments of PyTorch 2.13.

>>> from strobe.compat.varlen import varlen_attn
>>> out = varlen_attn(query, key, value, cu_seq, cu_seq, max_len, max_len, window_size=(-1, 0))  # causal
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .._checks import refuse
from .._messages import kind, shown
from .._writable import not_writable, writes
from ._call import Window, attend, in_pages
from ._words import flag_or_refusal, front, integer_or_refusal, tensor_or_refusal

__all__ = ["AuxRequest", "varlen_attn", "varlen_attn_out"]

_NAMES = {"q": "query", "k": "key", "v": "value", "cu_seqlens_q": "cu_seq_q", "cu_seqlens_k": "cu_seq_k", "max_seqlen_q": "max_q"}
_NAMES |= {"max_seqlen_k": "max_k", "window": "window_size", "page_table": "block_table", "invariant": "num_splits"}


class AuxRequest(NamedTuple):
    """The results that are asked for beside the output. The AuxRequest of torch.nn.attention.varlen is accepted as well."""

    lse: bool = False


def _attend(given: dict[str, Any]) -> Any:
    return_aux, num_splits, paged, used = given["return_aux"], given["num_splits"], given["block_table"] is not None, given["seqused_k"]
    found: list[Any] = [flag_or_refusal("enable_gqa", given["enable_gqa"])]
    if not (return_aux is None or (isinstance(return_aux, tuple) and hasattr(return_aux, "lse"))):
        found.append(TypeError(f"return_aux: {kind(return_aux)} {shown(return_aux)}; accepted is an AuxRequest, or None"))
    found.append(None if num_splits is None else integer_or_refusal("num_splits", num_splits))
    if given["cu_seq_k"] is None and not paged:
        found.append(TypeError("cu_seq_k: None; accepted is a torch.Tensor, int32 (B + 1,), or None beside block_table"))
    if paged and used is None:
        found.append(ValueError("seqused_k: None beside block_table; accepted is int32 (B,), how many keys of each sequence there are"))
    refuse(*found)
    out, lse = attend({**(in_pages(given, "block_table", "cu_seq_k") if paged else given), "invariant": num_splits == 1}, _NAMES)
    return (out, lse) if getattr(return_aux, "lse", False) else out


def _attend_into(given: dict[str, Any]) -> Any:
    out, query, value = given["out"], given["query"], given["value"]
    refuse(tensor_or_refusal("out", out))
    refuse(*not_writable({"out": out}))
    shape = (*query.shape[:-1], value.shape[-1]) if isinstance(query, Tensor) and isinstance(value, Tensor) and value.dim() else None
    if shape is not None and (out.shape != shape or out.dtype != query.dtype or out.device != query.device):
        accepted = f"{query.dtype} of shape {shape} on {query.device}"
        raise ValueError(f"out: {out.dtype} of shape {tuple(out.shape)} on {out.device}; accepted is {accepted}, as query and value have")
    found = _attend(given)
    return (out.copy_(found[0]), found[1]) if isinstance(found, tuple) else out.copy_(found)


@front(_NAMES, _attend)
def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: Window = (-1, -1), enable_gqa: bool = False,
    seqused_k: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> Any:  # fmt: skip
    """Attention of packed sequences; differentiable, except with block_table.

    Args:
        query: (Tq, H, D), sequence b at [cu_seq_q[b], cu_seq_q[b + 1]).
        key, value: (Tk, Hkv, D) and (Tk, Hkv, Dv); with block_table pools of pages, (pages, page, Hkv, D) and (pages, page, Hkv, Dv).
        cu_seq_q, cu_seq_k: int32 (B + 1,). With block_table cu_seq_k may be None, and has no effect.
        max_q, max_k: the most queries and keys of a sequence; max_k has no effect with block_table.
        return_aux: AuxRequest(lse=True) returns (out, lse).
        scale: the factor of q·k; None means 1/sqrt(D).
        window_size: (left, right) keys around the query's own, -1 for no bound; the last query stands at the last key. (-1, 0) is causal.
        enable_gqa: without effect: key and value may always have fewer heads.
        seqused_k: int32 (B,): how many of each sequence's keys, from its first on, count. Needed with block_table.
        block_table: int32 (B, n): the pages of each sequence.
        num_splits: 1 is the invariant=True of strobe.attention(): the bits of a sequence's rows do not depend on the others. Other numbers
            have no effect.

    Returns:
        out (Tq, H, Dv), or (out, lse (H, Tq)).
    """


@writes("out")
@front(_NAMES, _attend_into)
def varlen_attn_out(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: Window = (-1, -1), enable_gqa: bool = False,
    seqused_k: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> Any:  # fmt: skip
    """varlen_attn whose output is copied into out, (Tq, H, Dv) of query's dtype, any strides; without gradients.

    out may share memory with query, key and value, because nothing is written before all of them are read.

    Returns:
        out, or (out, lse (H, Tq)).
    """
