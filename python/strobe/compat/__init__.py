"""Other libraries' signatures over strobe.attention, a module each; docs/compat.md lists what differs.

- flash_attn: the functions of the flash-attn package, importable in its place
- flash_attn_3: the functions of FlashAttention-3, importable in the place of flash_attn_interface
- flash_mla: the functions of FlashMLA for decoding with latent attention, importable in the place of flash_mla
- sdpa: torch.nn.functional.scaled_dot_product_attention, importable in its place
- varlen: the functions of torch.nn.attention.varlen, importable in its place
- flex_attention: the functions of torch.nn.attention.flex_attention, importable in its place
- transformers: an attention implementation of Hugging Face transformers, attn_implementation="strobe", and one for continuous batching
- learned_scale: FlashAttention(head_dim=64), whose softmax scale is a parameter; flash_attention(Q, K, V)
- block_sizes: flash_attention_forward(Q, K, V, Bc, Br, use_half) and its backward
- ladder: flash_attention_1_forward, flash_attention_2_forward and their backwards, the papers' algorithms themselves
- functional: the paper's forms, with mask, dropout and its RNG state in and out, block-sparse
"""

from importlib import import_module
from typing import Any

from .._messages import TORCH_EXTRA, needed_by

with needed_by(__name__, TORCH_EXTRA):  # all modules need it
    import torch as torch

__all__ = [
    "block_sizes",
    "flash_attn",
    "flash_attn_3",
    "flash_mla",
    "flex_attention",
    "functional",
    "ladder",
    "learned_scale",
    "sdpa",
    "transformers",
    "varlen",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
