"""strobe.compat.flash_attn against the formulas in float64, as that library's documentation states them."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import plain
from device import DEVICE
from strobe.compat import flash_attn

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)


@pytest.fixture(autouse=True)
def _device():
    with torch.device(DEVICE):
        yield


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


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"softmax_scale": 0.3},
    {"window_size": (5, 0)},
    {"window_size": (-1, 3)},
    {"window_size": (7, -1), "causal": True},
    {"softcap": 2.0},
    {"alibi_slopes": SLOPES, "causal": True},
    {"alibi_slopes": torch.stack([SLOPES, 2 * SLOPES])},
    {"alibi_slopes": SLOPES, "softcap": 3.0, "window_size": (9, 2), "deterministic": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kv", [(33, 4), (50, 2), (20, 1)])
def test_func(options, kv):
    """Outputs, softmax_lse and gradients; grouped heads; more and fewer keys than queries, aligned at the bottom right."""
    leaves = inputs(2, 33, 4, 24, kv=kv)
    out, lse, probabilities = flash_attn.flash_attn_func(*leaves, **options, return_attn_probs=True)
    expected_out, expected_lse = formulas(*leaves, **options)
    assert probabilities is None
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)
    assert torch.equal(flash_attn.flash_attn_func(*leaves, **options), out)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, dout)
    for got, wanted in zip(found, torch.autograd.grad(expected_out, leaves, dout.double()), strict=True):
        assert_close(got, wanted.double())


def test_packed_forms_are_the_same():
    q, k, v = inputs(2, 40, 4, 32)
    expected = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(9, 0), softcap=5.0, alibi_slopes=SLOPES)
    options = {"causal": True, "window_size": (9, 0), "softcap": 5.0, "alibi_slopes": SLOPES}
    qkv = torch.stack([q, k, v], 2).detach().requires_grad_()
    kv = torch.stack([k, v], 2).detach().requires_grad_()
    of_qkv, of_kv = flash_attn.flash_attn_qkvpacked_func(qkv, **options), flash_attn.flash_attn_kvpacked_func(q, kv, **options)
    assert torch.equal(of_qkv, expected)
    assert torch.equal(of_kv, expected)
    gradients = torch.autograd.grad(expected.sum(), (q, k, v))
    assert torch.equal(torch.autograd.grad(of_qkv.sum(), qkv)[0], torch.stack(gradients, 2))
    assert torch.equal(torch.autograd.grad(of_kv.sum(), kv)[0], torch.stack(gradients[1:], 2))


@pytest.mark.parametrize("options", [o for o in OPTIONS if getattr(o.get("alibi_slopes"), "ndim", 1) == 1], ids=str)
def test_varlen_forms(options):
    """Each sequence is a call of its own: zero lengths, more queries than keys and fewer."""
    lengths_q, lengths_k = [7, 0, 30, 12], [20, 5, 11, 12]
    q, k, v = (torch.randn(sum(lengths), 4, 16, requires_grad=True) for lengths in (lengths_q, lengths_k, lengths_k))
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 30, 20, **options, return_attn_probs=True)
    kv = torch.stack([k, v], 1)
    assert torch.equal(flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 30, 20, **options), out)
    for b in range(4):
        here_q, here_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        expected_out, expected_lse = formulas(q[None, here_q], k[None, here_k], v[None, here_k], **options)
        assert_close(out[here_q], expected_out[0])
        assert_close(lse[:, here_q], expected_lse[0])
    qkv = torch.randn(32, 3, 4, 16)
    cu = torch.tensor([0, 20, 32], dtype=torch.int32)
    first = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 20, **options)[:20]
    assert_close(first, formulas(*qkv[None, :20].unbind(2), **options)[0][0])


def test_max_seqlen_is_a_number_of_any_kind():
    """lengths.max() is what transformers hands over."""
    q, k, v = (torch.randn(32, 4, 16) for _ in range(3))
    lengths = torch.tensor([20, 12], dtype=torch.int32)
    cu = torch.tensor([0, 20, 32], dtype=torch.int32)
    expected = flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 20, 20)
    for longest in (lengths.max(), lengths[:1], np.int64(20)):
        assert torch.equal(flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest), expected)
    for wrong, message in ((lengths, "torch.Tensor"), (torch.tensor(20.0), "float")):
        with pytest.raises(TypeError, match=f"^max_seqlen_q: {message}; accepted is an integer"):
            flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, wrong, 20)


def test_window_size_is_numbers_of_any_kind():
    q, k, v = inputs(1, 20, 4, 16)
    expected = flash_attn.flash_attn_func(q, k, v, window_size=(2, -1))
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=(np.int64(2), np.int32(-1))), expected)


def test_dropout_is_seeded_by_torch():
    leaves = inputs(1, 64, 2, 16)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(flash_attn.flash_attn_func(*leaves, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_rows_that_see_nothing():
    q, k, v = inputs(1, 8, 1, 16, kv=(5, 1))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out[:, :3] == 0).all()
    assert (lse[:, :, :3] == -math.inf).all()


# flash_attn_with_kvcache


def cache(b: int, s: int, h: int = 4, d: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(b, s, h, d), torch.randn(b, s, h, d)


CACHE_OPTIONS = [{}, {"causal": True}, {"causal": True, "window_size": (6, 0)}, {"causal": True, "softcap": 2.0}]
CACHE_OPTIONS += [{"causal": True, "alibi_slopes": SLOPES}, {"alibi_slopes": torch.stack([SLOPES, 2 * SLOPES, 3 * SLOPES])}]


@pytest.mark.parametrize("filled", [21, torch.tensor([21, 0, 30], dtype=torch.int32, device=DEVICE), None], ids=["int", "tensor", "all"])
@pytest.mark.parametrize("options", CACHE_OPTIONS, ids=str)
def test_a_cache_that_is_only_read(options, filled):
    k_cache, v_cache = cache(3, 40)
    q = torch.randn(3, 2, 4, 16)
    out, lse = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=filled, return_softmax_lse=True, **options)
    lengths = filled.tolist() if isinstance(filled, Tensor) else [40 if filled is None else filled] * 3
    for b, n in enumerate(lengths):
        here = slice(b, b + 1)
        of_row = options | ({"alibi_slopes": options["alibi_slopes"][here]} if getattr(options.get("alibi_slopes"), "ndim", 1) == 2 else {})
        expected_out, expected_lse = formulas(q[here], k_cache[here, :n], v_cache[here, :n], **of_row)
        assert_close(out[b], expected_out[0])
        assert_close(lse[b], expected_lse[0])


@pytest.mark.parametrize("filled", [21, torch.tensor([21, 0, 30], dtype=torch.int32, device=DEVICE)], ids=["int", "tensor"])
@pytest.mark.parametrize("new", [1, 5])
def test_new_keys_are_written_in_place(filled, new):
    k_cache, v_cache = cache(3, 40)
    before = k_cache.clone(), v_cache.clone()
    q, k, v = (torch.randn(3, new, 4, 16) for _ in "qkv")
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=filled, causal=True)
    for b, n in enumerate(filled.tolist() if isinstance(filled, Tensor) else [filled] * 3):
        for now, then, fresh in zip((k_cache, v_cache), before, (k, v), strict=True):
            assert torch.equal(now[b, n : n + new], fresh[b])
            assert torch.equal(now[b, :n], then[b, :n])
            assert torch.equal(now[b, n + new :], then[b, n + new :])
        expected, _ = formulas(q[b : b + 1], k_cache[b : b + 1, : n + new], v_cache[b : b + 1, : n + new], causal=True)
        assert_close(out[b], expected[0])


def test_rows_of_the_cache_by_index_and_left_padding():
    k_cache, v_cache = cache(5, 40)
    q, k, v = (torch.randn(2, 1, 4, 16) for _ in "qkv")
    rows, filled, begin = torch.tensor([3, 1]), torch.tensor([12, 30], dtype=torch.int32), torch.tensor([4, 0], dtype=torch.int32)
    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=filled, cache_batch_idx=rows, cache_leftpad=begin, causal=True
    )
    for b, row in enumerate(rows.tolist()):
        n = int(filled[b])
        assert torch.equal(k_cache[row, n], k[b, 0])
        seen = slice(int(begin[b]), n + 1)
        expected, _ = formulas(q[b : b + 1], k_cache[row : row + 1, seen], v_cache[row : row + 1, seen], causal=True)
        assert_close(out[b], expected[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary(interleaved, causal):
    """q and k turn as pairs of columns, by complex numbers here."""
    angles = torch.rand(40, 4) * 6
    k_cache, v_cache = cache(2, 40)
    cached = k_cache.clone()
    q, k, v = (torch.randn(2, 3, 4, 16) for _ in "qkv")
    filled = torch.tensor([7, 20], dtype=torch.int32)

    def turned(x: Tensor, position: int) -> Tensor:  # (H, 16)
        pairs = x[:, :8].unflatten(-1, (4, 2)) if interleaved else x[:, :8].unflatten(-1, (2, 4)).mT
        z = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(4), angles[position])
        back = torch.view_as_real(z)
        return torch.cat([(back if interleaved else back.mT).flatten(-2), x[:, 8:]], -1)

    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, angles.cos(), angles.sin(), filled, causal=causal, rotary_interleaved=interleaved
    )
    for b, n in enumerate(filled.tolist()):
        keys = torch.stack([turned(k[b, i], n + i) for i in range(3)])
        torch.testing.assert_close(k_cache[b, n : n + 3], keys)
        queries = torch.stack([turned(q[b, i], n + i * causal) for i in range(3)])[None]
        keys = torch.cat([cached[b, :n], keys])[None]
        expected, _ = formulas(queries, keys, v_cache[b : b + 1, : n + 3], causal=causal)
        assert_close(out[b], expected[0])


# refusals and names


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"dropout_p": 1.5}, ValueError, r"^dropout_p: 1\.5; accepted"),
        ({"window_size": 5}, TypeError, r"^window_size: 5; accepted is \(left, right\)"),
        ({"window_size": (True, 2)}, TypeError, r"^window_size: \(True, 2\); accepted is \(left, right\)"),
        ({"softmax_scale": "a"}, TypeError, "^softmax_scale: str"),
        ({"alibi_slopes": torch.ones(3, device=DEVICE)}, ValueError, r"^alibi_slopes: shape \(3\)"),
    ],
)
def test_refusals_speak_of_its_arguments(wrong, error, message):
    with pytest.raises(error, match=message):
        flash_attn.flash_attn_func(*inputs(1, 8, 4, 16), **wrong)


def test_refusals_of_the_packed_and_cached_forms():
    with pytest.raises(ValueError, match=r"^qkv: shape \(1, 8, 2, 16\); accepted is \(B, S, 3, H, D\)"):
        flash_attn.flash_attn_qkvpacked_func(torch.zeros(1, 8, 2, 16))
    k_cache, v_cache = cache(2, 8)
    q = torch.zeros(2, 1, 4, 16)
    call = flash_attn.flash_attn_with_kvcache
    with pytest.raises(NotImplementedError, match="^block_table: given"):
        call(q, k_cache, v_cache, block_table=torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="^v: None beside the other"):
        call(q, k_cache, v_cache, k=q, cache_seqlens=0)
    with pytest.raises(ValueError, match="^cache_seqlens: None beside k and v"):
        call(q, k_cache, v_cache, k=q, v=q)
    with pytest.raises(ValueError, match="^cache_seqlens: 8; accepted are 0 to 7"):
        call(q, k_cache, v_cache, k=q, v=q, cache_seqlens=8)
    with pytest.raises(ValueError, match=r"^cache_seqlens: shape \(3,\)"):
        call(q, k_cache, v_cache, cache_seqlens=torch.zeros(3, dtype=torch.int32))


def test_the_signatures_are_that_librarys():
    """Names, order and defaults, as in flash-attn 2.7."""
    common = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
    varlen = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    expected = {
        "flash_attn_func": f"q k v {common}",
        "flash_attn_qkvpacked_func": f"qkv {common}",
        "flash_attn_kvpacked_func": f"q kv {common}",
        "flash_attn_varlen_func": f"q k v {varlen} {common} block_table",
        "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {common}",
        "flash_attn_varlen_kvpacked_func": f"q kv {varlen} {common}",
        "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table "
        "softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse",
    }
    assert sorted(flash_attn.__all__) == sorted(expected)
    for name, names in expected.items():
        parameters = inspect.signature(getattr(flash_attn, name)).parameters
        assert list(parameters) == names.split(), name
        defaults = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None}
        assert all(parameters[n].default == default for n, default in defaults.items() if n in parameters), name
