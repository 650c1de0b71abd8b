"""q, k and v of FlashAttention-3 in FP8 (E4M3), with a descale for each sequence and head of keys: x stands for x * descale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _operators
from .._autograd import is_tracked
from .._checks import Wrong, refuse
from .._messages import kind
from .._refusals import refusing
from .._tensor_checks import misplaced, unfit_tensors

FP8 = torch.float8_e4m3fn
RESULT = torch.bfloat16  # the dtype of out, as in FlashAttention-3
DESCALES = ("q_descale", "k_descale", "v_descale")
_REFUSED = "{}: float8_e4m3fn has no gradient; accepted is a forward under torch.no_grad(), or of {}.detach()"


class _Dequantised(torch.autograd.Function):
    """x * descale, computed in float32 and rounded once; the backward is refused."""

    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, descale: Tensor | None) -> Tensor:
        ctx.name = name
        ctx.save_for_backward(x)
        return x.to(RESULT) if descale is None else (x.float() * descale).to(RESULT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return None, _operators.refuse_gradients(gradients[0], [x], _REFUSED.format(ctx.name, ctx.name))[0], None


def is_fp8(given: Mapping[str, Any]) -> bool:
    q = given.get("q")
    return isinstance(q, Tensor) and q.dtype == FP8


def descale_refusals(given: Mapping[str, Any]) -> list[Any]:
    """What is wrong with the descales whatever the other arguments are."""
    found: list[Any] = []
    for name in DESCALES:
        x = given[name]
        if x is None:
            continue
        if not isinstance(x, Tensor):
            found.append(TypeError(f"{name}: {kind(x)}; accepted is a torch.Tensor, float32 (B, Hkv), or None"))
        elif x.dtype != torch.float32 or x.dim() != 2:
            found.append(ValueError(f"{name}: {x.dtype} of shape {tuple(x.shape)}; accepted is float32 (B, Hkv)"))
    return found


def check_fp8(given: Mapping[str, Any], names: tuple[str, ...], batch: int, heads: int) -> None:
    """Checks a call whose q is FP8. names: the other tensors that must be; heads: those of the keys."""
    descales = {name: given[name] for name in DESCALES if given[name] is not None}
    refuse(*(unfit_tensors(descales) or misplaced({"q": given["q"], **descales})))
    wrong: Wrong = []
    for name in names:
        if given[name].dtype != FP8:
            wrong.append(refusing(ValueError, name, f"dtype {given[name].dtype}; accepted is {FP8}, as q has"))
    for name, x in descales.items():
        if x.shape != (batch, heads):
            wrong.append(refusing(ValueError, name, f"shape {tuple(x.shape)}; accepted is {(batch, heads)}: the sequences, the heads of k"))
    if given.get("qv") is not None:
        wrong.append(refusing(ValueError, "qv", f"given beside q of {FP8}; accepted is None"))
    refuse(*wrong)


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def in_words_of_attention(given: dict[str, Any]) -> dict[str, Any]:
    """given, with q, k and v of FP8 as strobe.attention() takes them. On a GPU that is as they are, with descales as scales. They become
    bfloat16, each number times its descale and rounded once, on a CPU, where nothing is gained by FP8, under a compiler, and where a
    gradient is to be refused in this function's words."""
    names: tuple[str, ...] = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    tensors: dict[str, Any] = {name: given[name] for name in names if name in given}
    refuse(*(unfit_tensors(tensors) or misplaced(tensors, on_host=("cu_seqlens_q", "cu_seqlens_k"))))
    packed = "cu_seqlens_q" in given
    rank, shape = (3, "(tokens, heads, head dimension)") if packed else (4, "(batches, tokens, heads, head dimension)")
    refuse(*(ValueError(f"{x}: shape {tuple(given[x].shape)}; accepted is {shape}") for x in "qkv" if given[x].dim() != rank))
    batch = max(given["cu_seqlens_q"].numel() - 1, 0) if packed else len(given["q"])
    check_fp8(given, ("k", "v"), batch, given["k"].shape[-2])
    q, found = given["q"], {}
    stays = on_gpu(q) and not torch.compiler.is_compiling() and not is_tracked(*(given[name] for name in "qkv"))
    for name in "qkv":
        x, cu = given[name], given.get("cu_seqlens_q" if name == "q" else "cu_seqlens_k")
        descale = of_tokens(given[f"{name}_descale"], x, cu)
        if not stays:
            found[name] = _Dequantised.apply(name, x, descale)
        elif descale is None:
            found[f"{name}_scale"] = torch.ones((), device=x.device)
        else:
            found[f"{name}_scale"] = descale[..., 0].expand(x.shape[:-1])
    return {**given, **found}


def of_tokens(descale: Tensor | None, x: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    """A descale (B, Hkv) as a factor for x (B, S, H, D), or packed (T, H, D)."""
    if descale is None or not descale.numel():
        return None
    heads, count = x.shape[-2], descale.shape[1]
    if heads % count:  # attention() refuses the number of heads
        return None
    descale = descale.repeat_interleave(heads // count, 1)
    if cu_seqlens is None:
        return descale[:, None, :, None]
    token = torch.arange(len(x), device=x.device)
    ends = cu_seqlens[1:].to(x.device)
    return descale[torch.bucketize(token, ends, right=True).clamp(max=len(descale) - 1), :, None]
