"""FlashAttention(head_dim=64) and flash_attention(Q, K, V) on (B, H, N, D): a module whose softmax scale is a parameter.

>>> from strobe.compat.learned_scale import FlashAttention
>>> attn = FlashAttention(head_dim=64)
>>> optimizer = torch.optim.Adam(attn.parameters())
>>> attn(Q, K, V).sum().backward()

Beyond the original: head dimensions up to 576 (V: 512), every float dtype (inputs are not cast to float32), the CPU, attn_mask, dropout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import attention, nn
from ._words import called, front, mask_or_bias, tensor_or_refusal

_NAMES = {"q": "Q", "k": "K", "v": "V", "mask": "attn_mask", "bias": "attn_mask"}


class FlashAttention(torch.nn.Module):
    """softmax(scale · Q Kᵀ) V, with scale a parameter that begins at 1/sqrt(head_dim).

    The gradient of scale, sum dQ o Q / scale, costs one pass over Q and dQ.

    Args:
        head_dim: D, from 1 to 576. Every call must have it.
        dropout: 0 <= dropout < 1; it applies in training mode only.

    Raises:
        TypeError, ValueError: an argument has a value that no call could have. A call raises the errors of strobe.attention().
    """

    def __init__(self, head_dim: int = 64, dropout: float = 0.0):
        super().__init__()
        nn.FlashAttention(head_dim, dropout=dropout)  # refuses values that no call could have
        self.head_dim = head_dim
        self.dropout = dropout
        self.scale = torch.nn.Parameter(torch.tensor(head_dim**-0.5))

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Computes attention. attn_mask broadcasts to (B, H, N, N); it is bool, True = attend, or numbers that are added to the scores."""
        q = tensor_or_refusal("Q", Q)
        if isinstance(q, Tensor) and q.dim() and q.shape[-1] != self.head_dim:
            q = ValueError(f"Q: head dimension {q.shape[-1]}; accepted is the module's, {self.head_dim}")
        options = {"dropout": self.dropout if self.training else 0.0, **mask_or_bias(attn_mask)}
        # The factor is relative to the kernel's own 1/sqrt(D), so that a float16 Q is not rounded while the scale has its initial value.
        relative = self.scale * self.head_dim**0.5
        if isinstance(q, Tensor) and q.is_floating_point():
            q = (q.to(torch.promote_types(q.dtype, torch.float32)) * relative).to(q.dtype)  # the gradient of scale is a sum in float32
        return called(_NAMES, attention, q=q, k=K, v=V, **options)


@front(_NAMES)
def flash_attention(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """softmax(Q Kᵀ / sqrt(D)) V on (B, H, N, D); differentiable."""
    return called(_NAMES, attention, q=Q, k=K, v=V)
