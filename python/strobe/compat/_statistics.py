"""The papers' forward and backward, and their m and l: the maximum of each row of scores and the sum of exp(score - m). Strobe keeps only
their LSE = m + log l."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .. import attention, attention_backward
from .._checks import refusal
from .._tensor_checks import unfit_tensors
from ._words import called

if TYPE_CHECKING:
    from torch import Tensor

    from .. import BlockMask

_CHUNK = 2**22  # scores computed at once


def forward(names: Mapping[str, str], Q: Tensor, K: Tensor, V: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(O, LSE), O differentiable. names, and arguments that are exceptions: see called()."""
    return called(names, attention, q=Q, k=K, v=V, return_lse=True, **options)


@torch.no_grad()
def backward(
    names: Mapping[str, str], Q: Tensor, K: Tensor, V: Tensor, O: Tensor, dO: Tensor, lse: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV) from the results of forward()."""
    found = called(names, attention_backward, dout=dO, q=Q, k=K, v=V, out=O, lse=lse, **options)
    return found.dq, found.dk, found.dv


@torch.no_grad()
def statistics(
    Q: Tensor, K: Tensor, lse: Tensor, *, scale: float | None = None, causal: bool = False, mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(l, m), each (B, H, N), float32 (float64 with float64). A row that sees no key has m = -inf and l = 0.

    The scores are computed once more, some rows at a time: half the work of a forward, and beside K a few MiB of memory.
    """
    sq, sk = Q.shape[-2], K.shape[-2]
    unit = Q.shape[-1] ** -0.5 if scale is None else scale
    Q, K = Q.detach().to(lse.dtype), K.detach().to(lse.dtype)
    if Q.shape[1] != K.shape[1]:
        K = K.repeat_interleave(Q.shape[1] // K.shape[1], 1)
    mask = None if mask is None else torch.atleast_2d(mask)
    kept = None if block_mask is None else block_mask.to(Q.device).to_kept()
    m = torch.empty_like(lse)
    j = torch.arange(sk, device=Q.device)
    step = max(1, _CHUNK // max(1, Q.shape[0] * Q.shape[1] * sk))
    for start in range(0, sq if sk else 0, step):
        i = torch.arange(start, min(start + step, sq), device=Q.device)
        S = unit * Q[:, :, i] @ K.mT
        if causal:
            S.masked_fill_(j > i[:, None] + (sk - sq), -math.inf)
        if mask is not None:
            rows = mask if mask.shape[-2] == 1 else mask[..., i, :]
            S.masked_fill_(~rows, -math.inf)
        if kept is not None and block_mask is not None:
            S.masked_fill_(~kept[:, :, (i // block_mask.block_q)[:, None], j // block_mask.block_k], -math.inf)
        m[:, :, i] = S.amax(-1)
    m[lse == -math.inf] = -math.inf
    return torch.where(lse == -math.inf, 0.0, torch.exp(lse.detach() - m)), m


def lse_of(l: Tensor, m: Tensor) -> Any:
    """The LSE of statistics()' two results; or the exception that says what is wrong with them."""
    if refused := unfit_tensors({"l": l, "m": m}):
        return refusal(refused)
    if l.shape != m.shape:
        return ValueError(f"l, m: shapes {tuple(l.shape)}, {tuple(m.shape)}; accepted is (B, H, N) twice")
    return torch.where(l == 0, -math.inf, m + torch.log(l))
