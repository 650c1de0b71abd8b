"""The plain formulas of attention in torch, every step in the precision of its inputs: the yardstick of the accuracy clause.

They are computed as on PyTorch's math path: whole S and P matrices, torch.softmax, gradients by autograd. Nothing is shared with Strobe.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


def offset_of(sq: int, sk: int, alignment: str) -> int:
    return sk - sq if alignment == "bottom_right" else 0


def distance(sq: int, sk: int, alignment: str) -> Tensor:
    """i + offset - j for every query i and key j, int64 (sq, sk)."""
    return torch.arange(sq)[:, None] + offset_of(sq, sk, alignment) - torch.arange(sk)[None, :]


def band(sq: int, sk: int, causal: bool, window: tuple[int | None, int | None], alignment: str) -> Tensor:
    """Which keys causal and the window leave to each query, bool (sq, sk)."""
    return seen_at(distance(sq, sk, alignment), causal, window)


def seen_at(d: Tensor, causal: bool, window: tuple[int | None, int | None]) -> Tensor:
    """Which keys causal and the window leave to each query. d: how far each key is behind each query."""
    seen = torch.ones(d.shape, dtype=torch.bool)
    left, right = window
    if left is not None:
        seen &= d <= left
    if right is not None:
        seen &= -d <= right
    if causal:
        seen &= d >= 0
    return seen


def keep_rate(dropout: float) -> float:
    """The fraction of elements that dropout keeps, in 256ths: those whose random byte is below T, with T in 1..255."""
    if dropout == 0.0:
        return 1.0
    return min(max(round((1.0 - dropout) * 256), 1), 255) / 256


@dataclass
class Score:
    """The operations between q·k and the softmax, all dense: broadcastable to (B, H, Sq, Sk)."""

    scale: float
    softcap: float = 0.0
    hyperbolic: tuple[float, float] | None = None  # beta, shift
    alibi: Tensor | None = None  # -slope * |i + offset - j|
    bias: Tensor | None = None
    visible: Tensor | None = None
    sinks: Tensor | None = None  # (H,)
    keep: Tensor | None = None
    keep_rate: float = 1.0


def hyperbolic(x: Tensor, beta: float, shift: float) -> Tensor:
    """-beta arccosh(max(-x, 1)) - shift; its gradient is 0 for x >= -1."""
    t = -x - 1
    far = t > 0
    t = torch.where(far, t, 1.0)
    return -beta * torch.where(far, torch.log1p(t + torch.sqrt(t * (t + 2))), 0.0) - shift


def _rounded_once(q: Tensor, k: Tensor, s: Tensor) -> Tensor:
    """q k^T of float64, summed in the CPU's long double. Its gradients are those of s, the same product summed in float64."""
    exact = np.matmul(*(t.detach().numpy().astype(np.longdouble) for t in (q, k.transpose(-1, -2))))
    return s + (torch.from_numpy(exact.astype(np.float64)) - s).detach()


def _drop(p: Tensor, keep: Tensor | None, rate: float) -> Tensor:
    return p if keep is None else p * keep / rate


class SoftmaxTimesV(torch.autograd.Function):
    """softmax(s) V with the backward of the contract: D = rowsum(dO * O), where O is as rounded for the caller.

    If there is a sink, s has one column more than v has rows."""

    @staticmethod
    def forward(ctx, s: Tensor, v: Tensor, empty: Tensor, keep: Tensor | None, rate: float) -> tuple[Tensor, Tensor]:
        p = torch.softmax(s, dim=-1).masked_fill(empty, 0.0)
        out = _drop(p[..., : v.shape[-2]], keep, rate) @ v
        lse = torch.logsumexp(s, dim=-1).masked_fill(empty[..., 0], -torch.inf)
        ctx.save_for_backward(p, v, out, keep)
        ctx.rate = rate
        return out, lse

    @staticmethod
    def backward(ctx, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        p, v, out, keep = ctx.saved_tensors
        sk, wide = v.shape[-2], torch.promote_types(p.dtype, torch.float32)
        d = (dout.to(wide) * out.to(wide)).sum(dim=-1, keepdim=True)
        dp = torch.zeros_like(p)
        dp[..., :sk] = _drop(dout @ v.transpose(-1, -2), keep, ctx.rate)
        ds = (p.to(wide) * (dp.to(wide) - d + dlse.to(wide)[..., None])).to(p.dtype)
        return ds, _drop(p[..., :sk], keep, ctx.rate).transpose(-1, -2) @ dout, None, None, None


def in_eight_bits(p: Tensor) -> Tensor:
    """P as FP8 products take it: with 256 for the row's largest, rounded to E4M3."""
    largest = p.amax(-1, keepdim=True)
    return (256 * p / largest.where(largest > 0, 1)).float().to(torch.float8_e4m3fn).to(p.dtype) * largest / 256


def statistics(q: Tensor, k: Tensor, score: Score, order: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """The largest score of each head (B,H), and the sums of P's columns (B,H,Sk), of q's dtype. order: as in attention()."""
    (b, h, sq), sk = q.shape[:3], k.shape[2]
    p, s = attention(q, k, torch.eye(sk, dtype=q.dtype).expand(b, k.shape[1], sk, sk), replace(score, keep=None), False, order, True)
    largest = s.flatten(2).amax(2) if sq * sk else q.new_full((b, h), -torch.inf)
    return largest, p.sum(2)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score,
    from_output: bool = False,
    order: tuple[Tensor, Tensor] | None = None,
    with_scores: bool = False,
    round_once: bool = False,
    eight_bits: bool = False,
) -> tuple[Tensor, Tensor]:
    """q (B,H,Sq,D), k (B,Hkv,Sk,D), v (B,Hkv,Sk,Dv) -> out (B,H,Sq,Dv), lse (B,H,Sq), all of q's dtype.

    order permutes (head dimension of q and k, keys): the same formulas, summed in another order.
    from_output: the backward takes D from the output, not from P and dP.
    with_scores: returns out and the scores, in `order`.
    eight_bits: P is rounded to E4M3; without from_output.
    round_once: q·k of float64 is its exact sum, rounded, if the CPU can compute it.
    """
    dtype = q.dtype
    b, h, sq, _ = q.shape
    hkv, sk = k.shape[1], k.shape[2]
    k = k[:, :, None].expand(b, hkv, h // hkv, sk, k.shape[3]).reshape(b, h, sk, k.shape[3])
    v = v[:, :, None].expand(b, hkv, h // hkv, sk, v.shape[3]).reshape(b, h, sk, v.shape[3])

    def ordered(t: Tensor) -> Tensor:  # orders along the keys
        return t if order is None else t.expand(*t.shape[:-1], sk)[..., order[1]]

    if order is not None:
        q, k, v = q[..., order[0]], k[:, :, order[1]][..., order[0]], v[:, :, order[1]]
    s = q @ k.transpose(-1, -2)
    s = (_rounded_once(q, k, s) if round_once else s) * score.scale
    if score.softcap:
        s = score.softcap * torch.tanh(s / score.softcap)
    if score.hyperbolic:
        s = hyperbolic(s, *score.hyperbolic).masked_fill(s.isnan(), torch.nan)
    if score.alibi is not None:
        s = (s + ordered(score.alibi)).to(dtype)
    if score.bias is not None:
        s = (s + ordered(score.bias)).to(dtype)
    if score.visible is not None:
        s = s.masked_fill(~ordered(score.visible), -torch.inf)
    scores = s
    if score.sinks is not None:
        s = torch.cat([s, score.sinks.to(dtype)[None, :, None, None].expand(b, h, sq, 1)], dim=-1)
    if not s.shape[-1]:
        return s @ v, scores if with_scores else s.sum(dim=-1) - torch.inf
    # A row of only -inf gets finite scores, which keep NaN out of the gradients; its P becomes 0.
    empty = (s == -torch.inf).all(dim=-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)
    keep = None if score.keep is None else ordered(score.keep)
    if from_output:
        return SoftmaxTimesV.apply(s, v, empty, keep, score.keep_rate)
    p = torch.softmax(s, dim=-1).masked_fill(empty, 0.0)[..., :sk]
    lse = torch.logsumexp(s, dim=-1).masked_fill(empty[..., 0], -torch.inf)
    if eight_bits and sk:
        p = in_eight_bits(p)
    return _drop(p, keep, score.keep_rate) @ v, scores if with_scores else lse
