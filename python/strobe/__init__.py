"""Strobe: exact attention, forward and backward, in memory linear in the sequence length.

>>> out = strobe.attention(q, k, v, causal=True)  # torch tensors or NumPy arrays, (B, H, S, D)

strobe.hyperbolic_attention attends between points of hyperbolic space; strobe.hyperbolic holds the maps between its models.
strobe.nn.FlashAttention is the same as a torch.nn.Module, its options set once: see help(strobe.nn).
"""

import sys
from typing import TYPE_CHECKING, Any

from ._abi import engines, version
from ._attention import attention, attention_backward, dropout_mask, explain, reference, reference_backward
from ._blockmask import BlockMask
from ._merge import merge
from ._run import Gradients
from .hyperbolic import hyperbolic_attention

if TYPE_CHECKING:
    from . import nn as nn

if sys.modules.get("torch") is not None:  # else torch does it as it is imported: pyproject.toml, torch.backends
    from . import _torch as _torch  # registers the operators torch.ops.strobe.*

__version__ = version()
__all__ = [
    "BlockMask",
    "Gradients",
    "__version__",
    "attention",
    "attention_backward",
    "dropout_mask",
    "engines",
    "explain",
    "hyperbolic_attention",
    "merge",
    "reference",
    "reference_backward",
]


def __getattr__(name: str) -> Any:
    """strobe.nn imports torch, so only when it is asked for."""
    if name == "nn":
        from importlib import import_module

        return import_module(".nn", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
