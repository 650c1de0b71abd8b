"""From flash-attn's arguments to strobe.attention's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from strobe import attention
from strobe._checks import is_whole
from strobe._messages import shown

from ._words import in_words_of, python_numbers, switch_or_refusal, tensor_or_refusal

Window = tuple[int, int] | Tensor  # two integers, or tensors of one element; a tensor of two elements
NAMES = {"dropout": "dropout_p", "scale": "softmax_scale", "window": "window_size", "return_lse": "return_attn_probs"}
KV = NAMES | {"k": "kv", "v": "kv"}
QKV = NAMES | dict.fromkeys("qkv", "qkv")
PACKED_QKV = QKV | {f"{name}_{side}": name for name in ("cu_seqlens", "max_seqlen") for side in "qk"}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    names: Mapping[str, str] = NAMES,
    **packed: Any,
) -> Any:
    """out, or (out, softmax_lse, None). names: as in_words_of() takes them. packed: cu_seqlens and max_seqlen of both sides; rng."""
    given = translated(names, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, **packed)
    with_lse = switch_or_refusal("return_attn_probs", return_attn_probs)
    given["return_lse"] = with_lse if isinstance(with_lse, Exception) else True
    with in_words_of(names, {"q": q, "k": k, "v": v, **given}):
        out, lse = attention(q, k, v, **given)
    return (out, lse, None) if with_lse else out


def translated(
    names: Mapping[str, str],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    **packed: Any,
) -> dict[str, Any]:
    """The options of strobe.attention(); a wrong one is replaced by the exception that says so, for in_words_of(). max_seqlen may be a
    tensor of one element, whose value waits for the GPU."""
    for name, x in packed.items():
        own = names.get(name, name)
        if name.startswith("cu_seqlens"):
            packed[name] = tensor_or_refusal(own, x, "a torch.Tensor, int32 (B + 1,)")
        elif name.startswith("max_seqlen") and isinstance(x, Tensor) and x.is_meta:
            packed[name] = ValueError(f"{own}: on device meta; accepted is an integer, or a tensor of one that has a value")
        elif name.startswith("max_seqlen") and isinstance(x, Tensor) and x.numel() == 1:
            packed[name] = x.item()
    return {
        "causal": switch_or_refusal("causal", causal),
        "window": bounds(window_size),
        "scale": softmax_scale,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "dropout": dropout_p,
        "deterministic": switch_or_refusal("deterministic", deterministic),
        "layout": "bshd",
        **packed,
    }


def sequences(*of_packed: Any) -> dict[str, Any]:
    """attend()'s `packed`."""
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), of_packed, strict=True))


def bounds(window_size: Window) -> Any:
    """The window of strobe.attention(), where a negative side is unbounded; or the exception that says what is wrong."""
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


def refuse_pages(block_table: Tensor | None) -> None:
    if block_table is not None:
        raise NotImplementedError("block_table: given; accepted is None, for paged caches are not there yet")
