"""Attention written out in torch operations, float64: every mask a dense tensor, every gradient autograd's."""

import math

import torch


def visible(Sq, Sk, *, causal, window, alignment):
    """Which keys are visible by position, bool (Sq, Sk)."""
    left, right = window
    i = torch.arange(Sq)[:, None] + (Sk - Sq if alignment == "bottom_right" else 0)
    j = torch.arange(Sk)[None, :]
    seen = torch.ones(Sq, Sk, dtype=torch.bool)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    if causal:
        seen &= j <= i
    return seen


def probabilities(
    q, k, *, causal=False, window=(None, None), alignment="bottom_right", scale=None, softcap=0.0,
    score="dot", beta=1.0, shift=0.0, mask=None, bias=None,
    alibi_slopes=None, sinks=None, blocks=None,
):  # fmt: skip
    """q (B, H, Sq, D) and so on -> S, P before dropout, lse. blocks: which scores lie in kept blocks, (B, H, Sq, Sk) or broadcast to it."""
    B, H, Sq, D = q.shape
    Sk = k.shape[2]
    k = k.repeat_interleave(H // max(k.shape[1], 1), dim=1)
    default = 1 if score == "hyperbolic" else 1 / math.sqrt(D)
    s = torch.einsum("bhid,bhjd->bhij", q, k) * (default if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if score == "hyperbolic":
        apart = s < -1
        s = torch.where(apart, -beta * torch.acosh(torch.where(apart, -s, 2)), 0) - shift
    if alibi_slopes is not None:
        offset = Sk - Sq if alignment == "bottom_right" else 0
        distance = (torch.arange(Sq)[:, None] + offset - torch.arange(Sk)[None, :]).abs()
        s = s - alibi_slopes.reshape(-1, H, 1, 1) * distance
    if bias is not None:
        s = s + bias
    seen = visible(Sq, Sk, causal=causal, window=window, alignment=alignment)
    for more in (mask, blocks):
        if more is not None:
            seen = seen & more
    s = s.masked_fill(~seen, -math.inf)

    # The sink is one more column, without a value. If there is no sink, a column of -inf replaces it, so that no row has length 0.
    sink = torch.full((B, H, Sq, 1), -math.inf, dtype=s.dtype) if sinks is None else sinks.reshape(1, H, 1, 1).expand(B, H, Sq, 1)
    s = torch.cat([s, sink], dim=-1)
    m = s.detach().amax(-1, keepdim=True)
    m = m.masked_fill(m == -math.inf, 0)
    e = torch.exp(s - m)
    l = e.sum(-1, keepdim=True)
    nothing = l == 0
    safe = l.masked_fill(nothing, 1)
    P = e / safe
    lse = (m + torch.log(safe)).masked_fill(nothing, -math.inf).squeeze(-1)
    return s[..., :Sk], P[..., :Sk], lse


def attention(q, k, v, *, kept=None, keep_rate=1.0, **options):
    """q (B, H, Sq, D) and so on -> out, lse. kept: the elements that dropout keeps, (B, H, Sq, Sk) or broadcast to it."""
    _, P, lse = probabilities(q, k, **options)
    if kept is not None:
        P = P * kept / keep_rate
    return torch.einsum("bhij,bhjd->bhid", P, v.repeat_interleave(q.shape[1] // max(v.shape[1], 1), dim=1)), lse


def statistics(q, k, v, *, kept=None, keep_rate=1.0, **options):
    """The largest score of each head (B, H), and the sums of P's columns before dropout (B, H, Sk)."""
    s, P, _ = probabilities(q, k, **options)
    nothing = torch.full((*s.shape[:2], 1), -math.inf, dtype=s.dtype)
    return torch.cat([s.flatten(2), nothing], dim=2).amax(2), P.sum(2)


def varlen_statistics(**inputs):
    """statistics() of packed sequences: (sequences, H) and (H, Tk)."""
    largest, sums = zip(*(statistics(**x) for x in sequences(**inputs)), strict=True)
    return torch.cat(largest), torch.cat([x[0] for x in sums], dim=1)


def varlen(**inputs):
    """q (Tq, H, D) and so on -> out (Tq, H, Dv), lse (H, Tq): each sequence by itself."""
    outs, lses = zip(*(attention(**x) for x in sequences(**inputs)), strict=True)
    return torch.cat([x[0].transpose(0, 1) for x in outs]), torch.cat([x[0] for x in lses], dim=1)


def sequences(q, k, v, *, cu_seqlens_q, cu_seqlens_k, mask=None, bias=None, alibi_slopes=None, kept=None, blocks=None, **options):
    """Packed sequences as dense calls of one sequence each. The batch axis of mask and so on counts sequences."""
    cu_q, cu_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(cu_q) - 1):
        Sq, Sk = cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]

        def of_sequence(x, b=b, Sq=Sq, Sk=Sk):
            if x is None:
                return None
            x = x[b : b + 1] if x.shape[0] > 1 else x
            return x[:, :, :Sq, :Sk]

        rows, cols = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        slopes = alibi_slopes[b : b + 1] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes
        yield {
            **{name: x.transpose(0, 1)[None] for name, x in (("q", q[rows]), ("k", k[cols]), ("v", v[cols]))},
            **{name: of_sequence(x) for name, x in (("mask", mask), ("bias", bias), ("kept", kept), ("blocks", blocks))},
            "alibi_slopes": slopes, **options,
        }  # fmt: skip
