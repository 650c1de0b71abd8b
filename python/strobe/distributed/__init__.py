"""Attention over the ranks of a torch.distributed process group. So far: which rank has which tokens."""

from ._layout import Layout

__all__ = ["Layout"]
