"""One call's share of the gradients, if the keys of an attention are divided among several calls or devices and merged by LSE."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._attention import attention, attention_backward
from ._call import Gradients


def backward_of_some_keys(dout: Tensor, out: Tensor, lse: Tensor, **given: Any) -> Gradients:
    """The gradients of these keys, where out and lse may be those of a larger set of keys. (attention_backward() takes lse for that of
    these keys: it may sum P of a row once more and divide by the sum, to remove LSE's rounding.) With out' and lse' of these keys alone
    and w = exp(lse' - lse), the weights of the whole set are P = w P', and

        dV = Pᵀ dO = P'ᵀ (w dO)
        dS = P (dP - D) = P' (dP' - D' + dLSE')    where dO' = w dO, D = rowsum(dO · out) and dLSE' = w rowsum(dO · (out' - out)).
    """
    own, own_lse = attention(return_lse=True, **given)
    weight = torch.where(own_lse == -math.inf, 0.0, torch.exp(own_lse - lse))  # the row sees none of these keys
    # All weights may be so small that dO' underflows in float16, so the largest is scaled to between 1 and 2, and the gradients are scaled
    # back.
    unit = torch.exp2(weight.amax().clamp_min(1e-30).log2().floor()) if weight.numel() else weight.new_ones(())
    weight = weight / unit
    scaled = (dout * by_head(weight)[..., None]).to(dout.dtype)
    dlse = weight * by_head(row_sums(dout, own) - row_sums(dout, out))
    found = attention_backward(dout=scaled, out=own, lse=own_lse, dlse=dlse, **given)
    unit = unit.to(dout.dtype)
    return found._replace(dq=found.dq * unit, dk=found.dk * unit, dv=found.dv * unit)


def row_sums(dout: Tensor, out: Tensor) -> Tensor:
    """rowsum(dout · out), (B, S, H) or (T, H)"""
    sum_dtype = torch.promote_types(out.dtype, torch.float32)
    return (dout.to(sum_dtype) * out.to(sum_dtype)).sum(-1)


def by_head(x: Tensor) -> Tensor:
    """(B, S, H) as (B, H, S), (T, H) as (H, T), and back."""
    return x.transpose(-1, -2).contiguous()
