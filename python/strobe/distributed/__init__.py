"""One attention over the ranks of a torch.distributed process group, with every option of strobe.attention().

>>> sharding = strobe.distributed.Sharding.zigzag(seqlen, world_size)
>>> q, k, v = (sharding.shard(x, 2) for x in (q, k, v))  # each rank's tokens of (B, H, S, D)
>>> out = strobe.distributed.attention(q, k, v, sharding=sharding, causal=True)
"""

from .._messages import TORCH_EXTRA, needed_by

with needed_by(__name__, TORCH_EXTRA):
    import torch.distributed

if not torch.distributed.is_available():
    raise ImportError("strobe.distributed needs torch.distributed, which this build of PyTorch does not have")

from . import _dtensor as _dtensor
from ._attention import attention
from ._context import context_parallel
from ._explain import explain
from ._sharding import Sharding

__all__ = ["Sharding", "attention", "context_parallel", "explain"]


def __getattr__(name: str) -> object:
    hint = "; did you mean Sharding?" if name == "Layout" else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
