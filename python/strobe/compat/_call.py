"""From flash-attn's arguments to strobe.attention's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._attention import attention, attention_backward
from .._checks import is_whole, refuse
from .._messages import shown
from .._tensor_checks import check_cu_seqlens, misplaced, unfit_tensors, within
from ..arrays.known import unfit
from ..arrays.torch import TORCH
from ._words import called, switch_or_refusal, tensor_or_refusal

Window = tuple[int, int] | Tensor  # two integers or tensors of one element, or a tensor of two elements
NAMES = {"dropout": "dropout_p", "scale": "softmax_scale", "window": "window_size", "return_lse": "return_attn_probs"}
KV = NAMES | {"k": "kv", "v": "kv"}
QKV = NAMES | dict.fromkeys("qkv", "qkv")
PACKED_QKV = QKV | {f"{name}_{side}": name for name in ("cu_seqlens", "max_seqlen") for side in "qk"}
_CU_SEQLENS = "a torch.Tensor, int32 (B + 1,)"

# The arguments of strobe.attention() that other libraries' functions have, too, in the order in which they are refused.
_ARGUMENTS: tuple[str, ...] = ("q", "k", "v", "causal", "window", "scale", "softcap", "alibi_slopes", "dropout", "deterministic")
_ARGUMENTS += ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "page_table", "seqused_k", "mask", "rng", "invariant")
_ARGUMENTS += ("q_scale", "k_scale", "v_scale")


def attend(given: Mapping[str, Any], names: Mapping[str, str] = NAMES) -> Any:
    """out and softmax_lse; out alone if return_attn_probs is given and False. The other arguments are those of translated(), and
    attention_chunk, a whole number, beside which `begin` is the first key of each sequence that counts, (B,)."""
    arguments = translated(given, names)
    if given.get("attention_chunk"):
        arguments |= _in_chunks(given["attention_chunk"], arguments, given.get("begin"))
    with_lse = switch_or_refusal("return_attn_probs", given.get("return_attn_probs", True))
    arguments["return_lse"] = with_lse if isinstance(with_lse, Exception) else True
    out, lse = called(names, attention, **arguments)
    return (out, lse) if with_lse else out


@torch.no_grad()
def backward(names: Mapping[str, str], **given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV); the arguments are those of attention_backward(), or exceptions: see called()."""
    return called(names, attention_backward, **given)[:3]


def translated(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of strobe.attention(). A wrong one is replaced by the exception that says so (called()).

    given: the caller's arguments. names: what the caller calls the arguments of strobe.attention() that have another name there. Arguments
    that strobe.attention() lacks are left out. q, k and v, and what was prepared for strobe.attention(), already have its names.
    """
    found: dict[str, Any] = {"layout": "bshd"}
    for name in _ARGUMENTS:
        own = names.get(name, name)
        if name in given or own in given:
            found[name] = given[name] if name in given and name != own else _converted(name, own, given[own])
    return found


def _converted(name: str, own: str, x: Any) -> Any:
    """x, which the caller knows as `own`, for strobe.attention(). A max_seqlen that is a tensor of one element waits for the GPU."""
    if name in ("causal", "deterministic"):
        return switch_or_refusal(name, x)
    if name == "window":
        return bounds(x)
    if name.startswith("cu_seqlens"):
        return tensor_or_refusal(own, x, _CU_SEQLENS)
    if name.startswith("max_seqlen") and isinstance(x, Tensor):
        if x.is_meta:
            return ValueError(f"{own}: on device meta; accepted is an integer, or a tensor of one that has a value")
        return x.item() if x.numel() == 1 else x
    return x


def _in_chunks(chunk: int, arguments: Mapping[str, Any], begin: Tensor | None) -> dict[str, Any]:
    """The options by which a query sees the keys of its own chunk alone. The last query stands at the last key, and chunks count from the
    first key. There are none if strobe.attention() will refuse the arguments."""
    q, k = arguments["q"], arguments["k"]
    cu_q, cu_k, used, window = (arguments.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "window"))
    lists = [x for x in (cu_q, cu_k, used) if x is not None]
    readable = all(isinstance(x, Tensor) and unfit("", x) is None for x in (q, k, *lists)) and not isinstance(window, Exception)
    if not readable or q.dim() < 3 or k.dim() < 3 or any(x.dim() != 1 or x.dtype.is_floating_point for x in lists):
        return {}
    queries = q.shape[1] if cu_q is None else cu_q.diff()
    keys = used.to(q.device) if used is not None else k.shape[1] if cu_k is None else cu_k.diff()
    if isinstance(keys, Tensor) and isinstance(queries, Tensor) and keys.shape != queries.shape:
        return {}
    offset, side = keys - queries, chunk - 1
    if isinstance(offset, Tensor):
        offset = offset.to(q.device)
    left, right = window or (None, None)
    found: dict[str, Any] = {"window": (side if left is None else min(left, side), side if right is None else min(right, side))}
    if begin is not None:
        place = offset - begin
        found["mask"] = lambda b, h, i, j: (j >= begin[b]) & ((i + place[b]) // chunk == (j - begin[b]) // chunk)
    elif isinstance(offset, Tensor):
        found["mask"] = lambda b, h, i, j: (i + offset[b]) // chunk == j // chunk
    else:
        found["mask"] = lambda b, h, i, j: (i + offset) // chunk == j // chunk
    return found


def bounds(window_size: Any) -> Any:
    """The window of strobe.attention() for a window_size, whose negative sides are unbounded; or the exception that says what is wrong."""
    accepted = "accepted is (left, right), two integers of 64 bits, -1 for no bound"
    window_size = _numbers(window_size)
    if isinstance(window_size, (tuple, list)):
        window_size = type(window_size)([*map(_numbers, window_size)])
    if not (isinstance(window_size, (tuple, list)) and len(window_size) == 2 and all(map(is_whole, window_size))):
        return TypeError(f"window_size: {shown(window_size)}; {accepted}")
    if max(window_size) >= 2**63:
        return ValueError(f"window_size: {shown(window_size)}; {accepted}")
    left, right = (None if side < 0 else side for side in window_size)
    return None if left is right is None else (left, right)


def _numbers(x: Any) -> Any:
    """The number of a dense tensor that has values, or its numbers as a list; anything else as it is. It waits for a GPU."""
    if not isinstance(x, Tensor) or unfit("", x) is not None or x.is_meta:
        return x
    return x.item() if x.numel() == 1 else x.tolist()


def parts(name: str, given: Mapping[str, Any], shape: str) -> dict[str, Any]:
    """given, with views of the tensor `name` as q, k and v, or as k and v. If the tensor is wrong, each of them is the exception that says
    so. shape: ends in (…, 3, H, D), or (…, 2, Hkv, D)."""
    x = tensor_or_refusal(name, given[name], f"a torch.Tensor, {shape}")
    if isinstance(x, Tensor) and (x.dim() != shape.count(",") + 1 or x.shape[-3] != len(name)):
        x = ValueError(f"{name}: shape {tuple(x.shape)}; accepted is {shape}")
    return {**given, **dict(zip(name, x.unbind(-3) if isinstance(x, Tensor) else (x,) * len(name), strict=True))}


def in_pages(given: Mapping[str, Any], table: str, cu_seqlens_k: str = "cu_seqlens_k") -> dict[str, Any]:
    """given, with keys in pages. table: the name of the page table. The number of keys of each sequence comes from seqused_k, or else from
    the argument that cu_seqlens_k names, which has no other effect."""
    cu, used = given[cu_seqlens_k], given.get("seqused_k")
    if cu is not None or used is None:
        refuse(tensor_or_refusal(cu_seqlens_k, cu, _CU_SEQLENS))
        check_cu_seqlens(cu_seqlens_k, cu)
        used = cu.diff() if used is None else used
    rest = {name: x for name, x in given.items() if name not in (cu_seqlens_k, "max_seqlen_k", "max_k")}
    return {**rest, "page_table": given[table], "seqused_k": used}


def some_tokens(given: Mapping[str, Any]) -> dict[str, Any]:
    """given, with packed sequences of which only the queries before seqused_q[b] count, and the keys from leftpad_k[b] up to before
    seqused_k[b]."""
    maybe = ("seqused_q", "leftpad_k", "seqused_k")
    tensors = {name: given[name] for name in ("q", "cu_seqlens_q", "cu_seqlens_k")}
    tensors.update({name: given[name] for name in (*maybe, "alibi_slopes") if given.get(name) is not None})
    refuse(*(unfit_tensors(tensors) or misplaced(tensors, on_host=("seqused_k",))))
    cu_q, cu_k, k = given["cu_seqlens_q"], given["cu_seqlens_k"], given["k"]
    batch = check_cu_seqlens("cu_seqlens_q", cu_q, "q", given["q"])
    if check_cu_seqlens("cu_seqlens_k", cu_k, "k", k if isinstance(k, Tensor) else None) != batch:
        raise ValueError(f"cu_seqlens_k: shape {tuple(cu_k.shape)}; accepted is ({batch + 1},), as cu_seqlens_q has")
    for side, cu in (("q", cu_q), ("k", cu_k)):  # checked here, where b is the caller's sequence
        most = given[f"max_seqlen_{side}"]
        for b, n in enumerate(cu.diff().tolist() if TORCH.is_readable(cu) and isinstance(most, int) else []):
            if n > most:
                raise ValueError(f"cu_seqlens_{side}: sequence {b} has {n} tokens; accepted is at most max_seqlen_{side} = {most}")
    used_q, leftpad, used_k = map(tensors.get, maybe)
    last = None if used_q is None else within("seqused_q", used_q, batch, cu_q.diff(), "the tokens of the sequence")
    end = cu_k.diff()
    end = end if used_k is None else within("seqused_k", used_k, batch, end, "the sequence's length").to(end.device)
    begin = torch.zeros_like(end) if leftpad is None else within("leftpad_k", leftpad, batch, end, "where the sequence ends")
    return {**given, "seqused_k": None, **in_threes(cu_q, cu_k, begin, end, given.get("alibi_slopes"), last)}


def in_threes(
    cu_q: Tensor, cu_k: Tensor, begin: Tensor, end: Tensor, slopes: Tensor | None, used_q: Tensor | None = None
) -> dict[str, Any]:
    """Each packed sequence as three sequences. The first has the keys before begin[b] and no query; the second the keys before end[b] and
    the first used_q[b] queries (None: all); the third the other keys, none of which counts, and the other queries."""
    q, k = cu_q[:-1], cu_k[:-1]
    queries = torch.stack([q, q, cu_q[1:] if used_q is None else q + used_q], 1).flatten()
    keys = torch.stack([k, k + begin, k + end], 1).flatten()
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes.repeat_interleave(3, 0)
    split = {"cu_seqlens_q": torch.cat([queries, cu_q[-1:]]).int(), "cu_seqlens_k": torch.cat([keys, cu_k[-1:]]).int()}
    if used_q is not None:
        split["seqused_k"] = torch.stack([torch.zeros_like(end), end - begin, torch.zeros_like(end)], 1).flatten().int()
    return {**split, "alibi_slopes": slopes}
