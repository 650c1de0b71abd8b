"""An attention implementation for Hugging Face transformers, which models choose by name.

>>> from strobe.compat import transformers
>>> transformers.register()
>>> model = AutoModelForCausalLM.from_pretrained("...", attn_implementation="strobe")

It needs transformers 4.53 or later, and continuous batching 5.0 or later:

>>> transformers.use_paged(model)
>>> model.generate_batch(prompts, generation_config=...)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import attention
from .._messages import TRANSFORMERS_EXTRA, kind, needed_by
from ._transformers_paged import model_options, paged_attention_forward


def register(name: str = "strobe") -> None:
    """Makes `attn_implementation=name` known to transformers, and for continuous batching "paged|name" and "name-flash" (see use_paged)."""
    with needed_by(__name__, TRANSFORMERS_EXTRA):
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)
    for paged in _paged_names(name):
        AttentionInterface.register(paged, paged_attention_forward)
        AttentionMaskInterface.register(paged, _no_mask)


def use_paged(model: Any, name: str = "strobe") -> None:
    """Sets a model's attention for continuous batching (generate_batch, init_continuous_batching), whatever it was.

    transformers 5.0 to 5.21 know it as "paged|strobe", which from_pretrained and set_attn_implementation take as well, and put the prefix
    before "strobe" themselves. Later ones have no prefix, and take no other name than "sdpa", "paged|eager" and those that contain "flash",
    whose code they load by themselves: "strobe-flash" is set past that.
    """
    with needed_by(__name__, TRANSFORMERS_EXTRA):
        from transformers import AttentionInterface, PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: {kind(model)}; accepted is a transformers.PreTrainedModel")
    prefixed, flash = _paged_names(name)
    register(name)
    if "paged|sdpa" in AttentionInterface().valid_keys():
        model.set_attn_implementation(prefixed)
    else:
        model.config._attn_implementation = flash


def _paged_names(name: str) -> tuple[str, str]:
    return f"paged|{name}", f"{name}-flash"


def _no_mask(*_: Any, **__: Any) -> None:
    """Makes no mask: the sequences' lengths determine which keys a token sees."""


def attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    position_bias: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The function that transformers calls: (out (B, Sq, H, Dv), no weights).

    Args:
        module: its `is_causal` is used if the argument is None.
        query: (B, H, Sq, D).
        key, value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv). H is a multiple of Hkv; heads are not repeated.
        attention_mask: bool, True = attend, or added to the scores; broadcasts to (B, H, Sq, Sk). A sliding window is in it.
            None: all keys, or if causal those up to the query's position.
        softcap, s_aux, position_bias: softcap, sinks (H,) and bias of strobe.attention.
        others: refused if they are cache (paged) or output_attentions; without effect otherwise.
    """
    if others.get("output_attentions"):
        raise NotImplementedError("output_attentions: True; accepted is False, for the weights are never made; 'eager' makes them")
    if others.get("cache") is not None:
        raise NotImplementedError(
            "cache: given; accepted is None: strobe.compat.transformers.use_paged(model) sets what takes a paged cache"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask, bias = attention_mask, position_bias
    if mask is not None and mask.dtype != torch.bool:
        bias, mask = mask if bias is None else mask + bias, None
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    options = model_options(query, dropout, scaling, softcap, s_aux)
    out = attention(query, key, value, causal=causal, alignment="top_left", mask=mask, bias=bias, **options)
    return out.transpose(1, 2).contiguous(), None
