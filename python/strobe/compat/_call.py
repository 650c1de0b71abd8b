"""From flash-attn's arguments to strobe.attention's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import attention
from .._checks import is_whole
from .._messages import shown
from .._tensor_checks import misplaced, unfit_tensors
from ..arrays.torch import TORCH
from ._lengths import check_cu_seqlens, refuse, within
from ._words import called, python_numbers, switch_or_refusal, tensor_or_refusal

Window = tuple[int, int] | Tensor  # two integers, or tensors of one element; a tensor of two elements
NAMES = {"dropout": "dropout_p", "scale": "softmax_scale", "window": "window_size", "return_lse": "return_attn_probs"}
KV = NAMES | {"k": "kv", "v": "kv"}
QKV = NAMES | dict.fromkeys("qkv", "qkv")
PACKED_QKV = QKV | {f"{name}_{side}": name for name in ("cu_seqlens", "max_seqlen") for side in "qk"}
_CU_SEQLENS = "a torch.Tensor, int32 (B + 1,)"


class Options(NamedTuple):
    """The options that the functions share, in flash-attn's order."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_attn_probs: bool = True, names: Mapping[str, str] = NAMES, **more: Any
) -> Any:
    """out, or (out, softmax_lse). names: as called() takes them. more: other arguments of strobe.attention()."""
    given = translated(names, options, **more)
    with_lse = switch_or_refusal("return_attn_probs", return_attn_probs)
    given["return_lse"] = with_lse if isinstance(with_lse, Exception) else True
    out, lse = called(names, attention, q=q, k=k, v=v, **given)
    return (out, lse) if with_lse else out


def translated(names: Mapping[str, str], options: Options, **more: Any) -> dict[str, Any]:
    """The arguments of strobe.attention() beside q, k and v. A wrong argument is replaced by the exception that says so (called())."""
    return {
        "causal": switch_or_refusal("causal", options.causal),
        "window": bounds(options.window_size),
        "scale": options.softmax_scale,
        "softcap": options.softcap,
        "alibi_slopes": options.alibi_slopes,
        "dropout": options.dropout_p,
        "deterministic": switch_or_refusal("deterministic", options.deterministic),
        "layout": "bshd",
        **{name: _converted(name, names.get(name, name), x) for name, x in more.items()},
    }


def _converted(name: str, own: str, x: Any) -> Any:
    """x, the argument of strobe.attention() that the caller knows as `own`. max_seqlen may be a tensor of one element, whose value waits
    for the GPU."""
    if name.startswith("cu_seqlens"):
        return tensor_or_refusal(own, x, _CU_SEQLENS)
    if name.startswith("max_seqlen") and isinstance(x, Tensor):
        if x.is_meta:
            return ValueError(f"{own}: on device meta; accepted is an integer, or a tensor of one that has a value")
        return x.item() if x.numel() == 1 else x
    return x


def bounds(window_size: Window) -> Any:
    """The window of strobe.attention() for a window_size, whose negative sides are unbounded; or the exception that says what is wrong."""
    accepted = "accepted is (left, right), two integers of 64 bits, -1 for no bound"
    window_size = python_numbers(window_size)
    if not (isinstance(window_size, (tuple, list)) and len(window_size) == 2 and all(map(is_whole, window_size))):
        return TypeError(f"window_size: {shown(window_size)}; {accepted}")
    if max(window_size) >= 2**63:
        return ValueError(f"window_size: {shown(window_size)}; {accepted}")
    left, right = (None if side < 0 else side for side in window_size)
    return None if left is right is None else (left, right)


def parts(name: str, packed: Tensor, count: int, axis: int, shape: str) -> tuple[Any, ...]:
    """The views of q, k and v, or of k and v, in one tensor; each is replaced by the exception that says what is wrong with it."""
    x = tensor_or_refusal(name, packed, f"a torch.Tensor, {shape}")
    if isinstance(x, Tensor):
        if x.dim() == axis + 3 and x.shape[axis] == count:
            return x.unbind(axis)
        x = ValueError(f"{name}: shape {tuple(x.shape)}; accepted is {shape}")
    return (x,) * count


def sequences(*packing: Any) -> dict[str, Any]:
    """Packed sequences, as attend() takes them: cu_seqlens of q and k, max_seqlen of q and k."""
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), packing, strict=True))


def pages(table: Tensor, cu_q: Tensor, max_q: int, used: Tensor | None, cu_k: Any, name: str = "cu_seqlens_k") -> dict[str, Any]:
    """Packed queries whose keys lie in pages, as attend() takes them. `used` gives the number of keys of each sequence, or else cu_k, the
    cu_seqlens of k, which the caller knows as `name`."""
    if cu_k is not None or used is None:
        refuse(tensor_or_refusal(name, cu_k, _CU_SEQLENS))
        check_cu_seqlens(name, cu_k)
        used = cu_k.diff() if used is None else used
    return {"cu_seqlens_q": cu_q, "max_seqlen_q": max_q, "page_table": table, "seqused_k": used}


def some_tokens(
    q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: object, max_k: object, *, slopes: Tensor | None = None,
    used_q: Tensor | None = None, leftpad: Tensor | None = None, used_k: Tensor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Packed sequences, as attend() takes them. Only the queries before seqused_q[b] count, and the keys from leftpad_k[b] up to before
    seqused_k[b]."""
    maybe = {"seqused_q": used_q, "leftpad_k": leftpad, "seqused_k": used_k}
    given = {"q": q, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **{name: x for name, x in maybe.items() if x is not None}}
    refuse(*(unfit_tensors(given) or misplaced(given, on_host=("seqused_k",))))
    batch = check_cu_seqlens("cu_seqlens_q", cu_q, "q", q)
    if check_cu_seqlens("cu_seqlens_k", cu_k, "k", k if isinstance(k, Tensor) else None) != batch:
        raise ValueError(f"cu_seqlens_k: shape {tuple(cu_k.shape)}; accepted is ({batch + 1},), as cu_seqlens_q has")
    for side, cu, most in (("q", cu_q, max_q), ("k", cu_k, max_k)):  # by the caller's count of sequences
        for b, n in enumerate(cu.diff().tolist() if TORCH.is_readable(cu) and isinstance(most, int) else []):
            if n > most:
                raise ValueError(f"cu_seqlens_{side}: sequence {b} has {n} tokens; accepted is at most max_seqlen_{side} = {most}")
    last = None if used_q is None else within("seqused_q", used_q, batch, cu_q.diff(), "the tokens of the sequence")
    end = cu_k.diff()
    if used_k is not None:
        end = within("seqused_k", used_k, batch, end, "the sequence's length").to(end.device)
    begin = torch.zeros_like(end) if leftpad is None else within("leftpad_k", leftpad, batch, end, "where the sequence ends")
    return {"max_seqlen_q": max_q, "max_seqlen_k": max_k, **in_threes(cu_q, cu_k, begin, end, slopes, last)}


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
