"""The functions of FlashMLA (DeepSeek) for decoding with multi-head latent attention, whose module is flash_mla. They can take its name:

>>> import sys
>>> import strobe.compat.flash_mla
>>> sys.modules["flash_mla"] = strobe.compat.flash_mla
>>> from flash_mla import flash_mla_with_kvcache, get_mla_metadata

Beyond the original: every float dtype, any GPU and the CPU, any head dimensions up to 576 and 512, any page size. The result of
get_mla_metadata() has no effect; the engine decides. FP8 caches and sparse attention (indices, topk_length, extra_k_cache) are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._attention import attention
from .._checks import refuse
from .._messages import kind
from ._words import called, front, integer_or_refusal, switch_or_refusal, tensor_or_refusal

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]

_NAMES = {"k": "k_cache", "v": "k_cache", "page_table": "block_table", "seqused_k": "cache_seqlens", "scale": "softmax_scale"}
_SPARSE = ("indices", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")


class FlashMLASchedMeta:
    """What get_mla_metadata() returns. It holds nothing."""


def get_mla_metadata(*arguments: Any, **named: Any) -> tuple[FlashMLASchedMeta, None]:
    """(metadata, None), for flash_mla_with_kvcache; arguments have no effect."""
    return FlashMLASchedMeta(), None


def _attend(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    fp8 = switch_or_refusal("is_fp8_kvcache", given["is_fp8_kvcache"])
    wrong: list[Any] = [fp8, tensor_or_refusal("q", given["q"], "a torch.Tensor, (B, Sq, H, D)")]
    wrong.append(tensor_or_refusal("k_cache", given["k_cache"], "a torch.Tensor, (pages, page size, Hkv, D)"))
    if fp8 is True:
        wrong.append(NotImplementedError("is_fp8_kvcache: True; accepted is False: a cache of 16 bits, or of q's dtype"))
    wrong += [NotImplementedError(f"{name}: {kind(given[name])}; accepted is None") for name in _SPARSE if given[name] is not None]
    refuse(*wrong)
    k, sink = given["k_cache"], given["attn_sink"]
    width = integer_or_refusal("head_dim_v", given["head_dim_v"], 1, k.shape[-1] if k.dim() else 0)
    refuse(width, None if sink is None else tensor_or_refusal("attn_sink", sink, "a torch.Tensor, float32 (H,), or None"))
    if sink is not None and (not sink.is_floating_point() or sink.shape != given["q"].shape[2:3]):
        accepted = f"floating point {tuple(given['q'].shape[2:3])}, a number for each head of q"
        raise ValueError(f"attn_sink: {sink.dtype} of shape {tuple(sink.shape)}; accepted is {accepted}")
    out, lse = called(
        _NAMES, attention, q=given["q"], k=k, v=k[..., :width], page_table=given["block_table"], seqused_k=given["cache_seqlens"],
        scale=given["softmax_scale"], causal=switch_or_refusal("causal", given["causal"]), layout="bshd", return_lse=True,
    )  # fmt: skip
    if sink is not None:  # softmax_lse is that without sinks; without keys lse - sink may be -inf - -inf
        factor = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - sink[:, None]))
        out = (out * factor.mT[..., None]).to(out.dtype)
    return out, lse


@front(_NAMES, _attend)
def flash_mla_with_kvcache(
    q: Tensor, k_cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor | None, head_dim_v: int,
    tile_scheduler_metadata: Any = None, num_splits: Any = None, softmax_scale: float | None = None, causal: bool = False,
    is_fp8_kvcache: bool = False, indices: Tensor | None = None, attn_sink: Tensor | None = None, extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None, topk_length: Tensor | None = None, extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of a few queries of each sequence over a paged latent cache: V is the first head_dim_v columns of K.

    Args:
        q: (B, Sq, H, D).
        k_cache: (pages, page size, Hkv, D), of q's dtype.
        block_table: int32 (B, n), the pages of each sequence.
        cache_seqlens: int32 (B,), how many keys each sequence has, those of q included.
        head_dim_v: Dv, 1 to D.
        softmax_scale: 1/sqrt(D) by default.
        causal: the last query stands at the last key.
        attn_sink: (H,), one more term exp(attn_sink[h]) of the softmax's denominator; softmax_lse does not count it. out is that without
            the term times a factor, so in 16 bits it is rounded twice.
        tile_scheduler_metadata, num_splits: without effect.
        is_fp8_kvcache: False; indices, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length: None.

    Returns:
        out (B, Sq, H, Dv); softmax_lse (B, H, Sq), float32, -inf for a query that sees no key (there: +inf).
    """
