"""The papers' statistics of a row of scores: the maximum m, and the sum l of exp(score - m). Strobe keeps only their LSE = m + log l."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._blockmask import BlockMask
from ._checks import refusal
from ._tensor_checks import unfit_tensors

_CHUNK = 2**22  # scores computed at once


@torch.no_grad()
def statistics(
    lse: Tensor, *, q: Tensor, k: Tensor, scale: float | None = None, causal: bool = False, mask: Tensor | None = None,
    block_mask: BlockMask | None = None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(l, m) by a call's LSE and arguments, each (B, H, N), float32 (float64 with float64). A row that sees no key: m = -inf and l = 0.

    The scores are computed once more, some rows at a time. That takes half the work of a forward, and a few MiB of memory besides K.
    """
    sq, sk = q.shape[-2], k.shape[-2]
    unit = q.shape[-1] ** -0.5 if scale is None else scale
    Q, K = q.detach().to(lse.dtype), k.detach().to(lse.dtype)
    if Q.shape[1] != K.shape[1]:
        K = K.repeat_interleave(Q.shape[1] // K.shape[1], 1)
    mask = None if mask is None else torch.atleast_2d(mask).expand(*mask.shape[:-2], sq, sk)
    kept = None if block_mask is None else block_mask.to(Q.device).to_kept()
    m = torch.full_like(lse, -math.inf)
    j = torch.arange(sk, device=Q.device)
    step = max(1, _CHUNK // max(1, Q.shape[0] * Q.shape[1] * sk))
    for start in range(0, sq if sk else 0, step):
        i = torch.arange(start, min(start + step, sq), device=Q.device)
        S = unit * Q[:, :, i] @ K.mT
        if causal:
            S.masked_fill_(j > i[:, None] + (sk - sq), -math.inf)
        if mask is not None:
            S.masked_fill_(~mask[..., i, :], -math.inf)
        if kept is not None and block_mask is not None:
            S.masked_fill_(~kept[:, :, (i // block_mask.block_q)[:, None], j // block_mask.block_k], -math.inf)
        m[:, :, i] = S.amax(-1)
    return torch.where(lse == -math.inf, 0.0, torch.exp(lse.detach() - m)), m


def lse_of(l: Tensor, m: Tensor) -> Any:
    """The LSE of statistics()' two results; or the exception that says what is wrong with them."""
    if refused := unfit_tensors({"l": l, "m": m}):
        return refusal(refused)
    if l.shape != m.shape:
        return ValueError(f"l, m: shapes {tuple(l.shape)}, {tuple(m.shape)}; accepted is (B, H, N) twice")
    return torch.where(l == 0, -math.inf, m + torch.log(l))
