"""The formulas of flash-attn's documentation, by plain.py in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import plain
from device import DEVICE

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)


def formulas(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """out (B, Sq, H, D) and lse (B, H, Sq) of plain.attention() in float64. Tensors and options are flash-attn's."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    sq, sk = q.shape[2], k.shape[2]
    window = tuple(None if side < 0 else side for side in options.get("window_size", (-1, -1)))
    alibi, slopes = None, options.get("alibi_slopes")
    if slopes is not None:
        alibi = -slopes.double().view(-1, q.shape[1], 1, 1) * plain.distance(sq, sk, "bottom_right").abs()
    visible = plain.band(sq, sk, options.get("causal", False), window, "bottom_right")
    if chunk := options.get("attention_chunk"):
        place, key = torch.arange(sq, device=q.device)[:, None] + sk - sq, torch.arange(sk, device=q.device)
        first = place - place % chunk
        visible &= (key >= first) & (key < first + chunk)
    scale = options.get("softmax_scale", q.shape[-1] ** -0.5)
    out, lse = plain.attention(q, k, v, plain.Score(scale, options.get("softcap", 0.0), alibi=alibi, visible=visible))
    return out.transpose(1, 2), lse


def inputs(*shape: int, kv: tuple[int, int] | None = None) -> list[Tensor]:
    """Random q (B, Sq, H, D), and k and v (B, Sk, Hkv, D); kv is (Sk, Hkv)."""
    b, sq, h, d = shape
    sk, hkv = kv or (sq, h)
    return [torch.randn(b, s, heads, d, requires_grad=True) for s, heads in ((sq, h), (sk, hkv), (sk, hkv))]


def assert_close(got: Tensor, expected: Tensor) -> None:
    expected = expected.detach()
    assert got.shape == expected.shape
    size = max([1.0, *expected[expected.isfinite()].abs().flatten().tolist()])
    torch.testing.assert_close(got.detach().double(), expected, rtol=0, atol=3e-6 * size)
