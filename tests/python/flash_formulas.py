"""The results of flash-attn's functions, by its documentation: the formulas in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import plain
from device import DEVICE

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)


def formulas(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """out (B, Sq, H, D) and lse (B, H, Sq) in float64 of the same layout and options."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    sq, sk = q.shape[2], k.shape[2]
    window = tuple(None if side < 0 else side for side in options.get("window_size", (-1, -1)))
    visible = plain.band(sq, sk, options.get("causal", False), window, "bottom_right")
    S = q @ k.mT * options.get("softmax_scale", q.shape[-1] ** -0.5)
    if options.get("softcap"):
        S = options["softcap"] * torch.tanh(S / options["softcap"])
    slopes = options.get("alibi_slopes")
    if slopes is not None:
        slopes = slopes.double() if slopes.dim() == 2 else slopes.double()[None]
        S = S - slopes[:, :, None, None] * plain.distance(sq, sk, "bottom_right").abs()
    S = S.masked_fill(~visible, -math.inf)
    lse = S.logsumexp(-1)
    P = torch.where(lse[..., None] == -math.inf, 0.0, torch.exp(S - lse[..., None]))
    return (P @ v).transpose(1, 2), lse


def inputs(*shape: int, kv: tuple[int, int] | None = None) -> list[Tensor]:
    """q (B, Sq, H, D), and k and v of kv = (Sk, Hkv)"""
    b, sq, h, d = shape
    sk, hkv = kv or (sq, h)
    return [torch.randn(b, s, heads, d, requires_grad=True) for s, heads in ((sq, h), (sk, hkv), (sk, hkv))]


def assert_close(got: Tensor, expected: Tensor) -> None:
    expected = expected.detach()
    assert got.shape == expected.shape
    size = max([1.0, *expected[expected.isfinite()].abs().flatten().tolist()])
    torch.testing.assert_close(got.detach().double(), expected, rtol=0, atol=3e-6 * size)
