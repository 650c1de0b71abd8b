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
from .._tensor_checks import misplaced
from ._transformers_paged import NAMES, model_options, paged_attention_forward
from ._words import called, switch_or_refusal, tensor_or_refusal


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

    Raises:
        The errors of strobe.attention, with the names of these arguments.
    """
    if others.get("output_attentions"):
        raise NotImplementedError("output_attentions: True; accepted is False, for the weights are never made; 'eager' makes them")
    if others.get("cache") is not None:
        raise NotImplementedError(
            "cache: given; accepted is None: strobe.compat.transformers.use_paged(model) sets what takes a paged cache"
        )
    masked, causal = _masks(attention_mask, position_bias), _causal(module, is_causal)
    if not isinstance(causal, Exception):
        causal = causal and attention_mask is None and _queries(query) > 1
    options = {**masked, "causal": causal, **model_options(query, dropout, scaling, softcap, s_aux)}
    names = {
        **NAMES,
        "mask": "attention_mask",
        "bias": "attention_mask" if position_bias is None else "position_bias",
        "causal": "is_causal",
    }
    out = called(names, attention, q=query, k=key, v=value, alignment="top_left", **options)
    return out.transpose(1, 2).contiguous(), None


def _queries(query: Any) -> int:
    """0 for what is no query: attention() refuses it."""
    return query.shape[2] if isinstance(query, Tensor) and query.dim() == 4 else 0


def _causal(module: torch.nn.Module, is_causal: Any) -> Any:
    """True or False; or the exception that says what is wrong with it."""
    own = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return switch_or_refusal("is_causal" if is_causal is not None else "module.is_causal", own)


def _masks(attention_mask: Any, position_bias: Any) -> dict[str, Any]:
    """mask and bias of strobe.attention(). A wrong one is replaced by the exception that says so."""
    mask, bias = (
        None if x is None else tensor_or_refusal(name, x)
        for name, x in (("attention_mask", attention_mask), ("position_bias", position_bias))
    )
    if not isinstance(mask, Tensor) or mask.dtype == torch.bool:
        return {"mask": mask, "bias": bias}
    if not isinstance(bias, Tensor):
        return {"mask": bias, "bias": mask}  # bias is None, or an exception
    if refused := misplaced({"position_bias": bias, "attention_mask": mask}):
        return {"mask": refused[0], "bias": None}
    try:
        return {"mask": None, "bias": mask + bias}
    except RuntimeError:
        shapes = f"shape {tuple(mask.shape)} beside position_bias of {tuple(bias.shape)}"
        return {"mask": ValueError(f"attention_mask: {shapes}; accepted are shapes that broadcast together"), "bias": None}
