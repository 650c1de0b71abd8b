"""Strobe: exact attention, forward and backward, in memory linear in the sequence length.

>>> out = strobe.attention(q, k, v, causal=True)  # torch tensors or NumPy arrays, (B, H, S, D)

strobe.hyperbolic_attention attends between points of hyperbolic space; strobe.hyperbolic has the maps between its models.
strobe.jax.attention computes attention of JAX arrays: docs/jax.md.
strobe.kv writes into KV caches, contiguous or in pages.
strobe.register() runs PyTorch's own attention functions on Strobe, until strobe.unregister().
strobe.nn.FlashAttention is a torch.nn.Module that computes strobe.attention with options that are set once: see help(strobe.nn).
"""

import sys
from typing import TYPE_CHECKING, Any

from ._abi import engines, version
from ._attention import attention, attention_backward, attention_jvp, dropout_mask, explain, reference, reference_backward
from ._blockmask import BlockMask
from ._call import IMPORTED_LATE, Gradients, GradientsWithCaptured
from ._merge import merge
from ._part import Part
from .hyperbolic import hyperbolic_attention

if TYPE_CHECKING:
    from . import compat as compat
    from . import distributed as distributed
    from . import jax as jax
    from . import kv as kv
    from . import nn as nn
    from ._registration import Registration as Registration
    from ._registration import register as register
    from ._registration import registered as registered
    from ._registration import unregister as unregister

# If torch is imported later, that import registers the operators (torch.backends in pyproject.toml); before PyTorch 2.5, the first call
# with a tensor does.
if sys.modules.get("torch") is not None:
    from . import _autograd as _autograd  # registers the operators torch.ops.strobe.*


def _attention_of_dtensors() -> Any:
    from .distributed._dtensor import attention_of_dtensors

    return attention_of_dtensors


IMPORTED_LATE["DTensor"] = _attention_of_dtensors

__version__ = version()
__all__ = [
    "BlockMask",
    "Gradients",
    "GradientsWithCaptured",
    "Part",
    "__version__",
    "attention",
    "attention_backward",
    "attention_jvp",
    "dropout_mask",
    "engines",
    "explain",
    "hyperbolic_attention",
    "merge",
    "reference",
    "reference_backward",
]


# They import torch or JAX, so they are loaded on first use.
_LATE = ("compat", "distributed", "jax", "kv", "nn")
_LATE_NAMES = ("Registration", "register", "registered", "unregister")


def __dir__() -> list[str]:
    return [*__all__, *_LATE, *_LATE_NAMES, "hyperbolic"]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        from importlib import import_module

        return import_module(f".{name}", __name__)
    if name in _LATE_NAMES:
        from . import _registration

        return getattr(_registration, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
