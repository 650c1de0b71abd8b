"""Forward and backward of flash_attn_interface without autograd: by themselves, and as ring attention calls them."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from device import DEVICE
from flash_formulas import SLOPES, assert_close
from strobe import attention
from strobe.compat import flash_attn
from strobe.compat.flash_attn.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

PLAIN: dict[str, Any] = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}


@pytest.fixture(autouse=True)
def _device():
    with torch.device(DEVICE):
        yield


def inputs(dtype: torch.dtype = torch.float32, sk: int = 50) -> list[Tensor]:
    return [torch.randn(2, s, h, 24, dtype=dtype, requires_grad=True) for s, h in ((33, 4), (sk, 2), (sk, 2))]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"softmax_scale": 0.7, "window_size_left": 9, "window_size_right": 3},
    {"softcap": 2.0, "alibi_slopes": SLOPES, "causal": 1},
    {"dropout_p": 0.25, "causal": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_both_passes_are_those_of_the_function(options):
    """The gradients may be written to any memory."""
    q, k, v = leaves = inputs()
    torch.manual_seed(7)
    out, lse, probabilities, rng_state = _flash_attn_forward(q, k, v, **PLAIN | options, return_softmax=False)
    torch.manual_seed(7)
    public = {name: x for name, x in options.items() if not name.startswith("window_size_")}
    window = tuple(options.get(f"window_size_{side}", -1) for side in ("left", "right"))
    expected, expected_lse, _ = flash_attn.flash_attn_func(*leaves, **public, window_size=window, return_attn_probs=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert not out.requires_grad
    assert probabilities.numel() == 0
    assert (rng_state.shape, rng_state.dtype) == ((2,), torch.int64)
    dout = torch.randn_like(out)
    dq = torch.empty_like(q)
    dkv = torch.full((2, 50, 2, 2, 24), math.nan)
    softmax_d = _flash_attn_backward(
        dout, q, k, v, out, lse, dq, dkv[:, :, 0], dkv[:, :, 1], **PLAIN | options, deterministic=False, rng_state=rng_state
    )
    for found, wanted in zip((dq, *dkv.unbind(2)), torch.autograd.grad(expected, leaves, dout), strict=True):
        assert_close(found, wanted.double())
    torch.testing.assert_close(softmax_d, (dout * out).sum(-1).transpose(1, 2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [None, 4.0])
@pytest.mark.parametrize("length", [40, 700])
def test_keys_that_several_calls_share_have_the_gradients_of_one(dtype, scale, length):
    """As in ring attention, calls on parts of the keys are merged by their LSE, and each part's backward gets the merged out and LSE. With
    scale 4 some LSE are large. With 40 keys all lie in one tile, whose backward must not take the merged LSE for that of its own keys."""
    q, k, v = (x.detach() for x in inputs(dtype, length))
    wide = torch.promote_types(dtype, torch.float32)
    spans = (slice(0, length // 3), slice(length // 3, length))
    options = PLAIN | {"softmax_scale": scale}
    parts = [_flash_attn_forward(q, k[:, s], v[:, s], **options, return_softmax=False) for s in spans]
    lse = torch.stack([part[1] for part in parts]).logsumexp(0)
    out = sum((part[1] - lse).exp().transpose(1, 2)[..., None] * part[0].to(wide) for part in parts).to(dtype)

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse, _ = flash_attn.flash_attn_func(*exact, softmax_scale=scale, return_attn_probs=True)
    size = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 0.02}[dtype] * (1 if scale is None else 20)
    torch.testing.assert_close(out.double(), expected.detach(), rtol=0, atol=size)
    torch.testing.assert_close(lse.double(), expected_lse.detach(), rtol=0, atol=size)

    dout = torch.randn_like(q)
    dq = torch.zeros(q.shape, dtype=wide)
    dk, dv = torch.full_like(k, math.nan), torch.full_like(v, math.nan)
    for s in spans:
        of_part = torch.empty_like(q)
        _flash_attn_backward(dout, q, k[:, s], v[:, s], out, lse, of_part, dk[:, s], dv[:, s], **options, deterministic=True)
        dq += of_part
    for found, wanted in zip((dq, dk, dv), torch.autograd.grad(expected, exact, dout.double()), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=size * max(1.0, wanted.abs().max().item()))


def test_a_part_that_no_query_sees():
    """A part that a causal mask hides has gradients of 0, whatever the LSE of the whole is."""
    q, k, v = (x.detach() for x in inputs(sk=40))
    options = PLAIN | {"causal": True}
    out, lse, *_ = _flash_attn_forward(q, k[:, :3], v[:, :3], **options, return_softmax=False)
    assert (lse[:, :, :30] == -math.inf).all()
    whole = torch.zeros_like(lse)
    into = [torch.full_like(x, math.nan) for x in (q, k[:, :3], v[:, :3])]
    _flash_attn_backward(torch.randn_like(out), q, k[:, :3], v[:, :3], out, whole, *into, **options, deterministic=False)
    assert (into[0][:, :30] == 0).all()
    assert all(x.isfinite().all() for x in into)


def packed() -> tuple[list[Tensor], dict[str, Any]]:
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 7, 7, 37], [0, 20, 25, 36]))
    q, k, v = (torch.randn(t, h, 16, requires_grad=True) for t, h in ((37, 4), (36, 2), (36, 2)))
    return [q, k, v], {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 30, "max_seqlen_k": 20}


@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout_p": 0.25}, {"alibi_slopes": SLOPES, "causal": True}], ids=str)
def test_packed_passes_are_those_of_the_function(options):
    leaves, sequences = packed()
    torch.manual_seed(3)
    out, lse, probabilities, rng_state = _flash_attn_varlen_forward(
        *leaves, **sequences, **{"dropout_p": 0.0, "softmax_scale": 0.3, "causal": False} | options
    )
    torch.manual_seed(3)
    expected, expected_lse, _ = flash_attn.flash_attn_varlen_func(
        *leaves, **sequences, softmax_scale=0.3, **options, return_attn_probs=True
    )
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert probabilities.numel() == 0
    dout = torch.randn_like(out)
    into = [torch.full_like(x, math.nan) for x in leaves]
    given = PLAIN | options | {"softmax_scale": 0.3}
    softmax_d = _flash_attn_varlen_backward(
        dout, *leaves, out, lse, *into, **sequences, **given, deterministic=0, rng_state=rng_state, zero_tensors=True
    )
    for found, wanted in zip(into, torch.autograd.grad(expected, leaves, dout), strict=True):
        assert_close(found, wanted.double())
    torch.testing.assert_close(softmax_d, (dout * out).sum(-1).T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("slopes", [None, torch.stack([SLOPES, 2 * SLOPES, 3 * SLOPES])], ids=["plain", "alibi"])
def test_sequences_of_which_some_keys_are_there(slopes):
    """Keys that seqused_k and leftpad_k leave out may hold anything."""
    (q, k, v), sequences = packed()
    k, v = k.detach(), v.detach()
    used, begin = torch.tensor([12, 0, 11], dtype=torch.int32), torch.tensor([2, 0, 5], dtype=torch.int32)
    cu_q, cu_k = sequences["cu_seqlens_q"], sequences["cu_seqlens_k"]
    there = torch.zeros(36, dtype=torch.bool)
    for b in range(3):
        there[cu_k[b] + begin[b] : cu_k[b] + used[b]] = True
    k[~there] = v[~there] = math.nan
    plain = {"dropout_p": 0.0, "softmax_scale": None, "causal": True, "alibi_slopes": slopes}
    out, lse, *_ = _flash_attn_varlen_forward(q, k, v, **sequences, **plain, seqused_k=used, leftpad_k=begin)
    lengths = torch.cat([torch.zeros(1), (used - begin).cumsum(0)]).int()
    expected, expected_lse, *_ = _flash_attn_varlen_forward(q, k[there], v[there], cu_q, lengths, 30, 20, **plain)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    with pytest.raises(ValueError, match=r"^dropout_p: 0\.1 beside leftpad_k; accepted is 0$"):
        _flash_attn_varlen_forward(q, k, v, **sequences, **plain | {"dropout_p": 0.1}, leftpad_k=begin)
    with pytest.raises(ValueError, match="^leftpad_k: given beside block_table; accepted is None"):
        _flash_attn_varlen_forward(q, k, v, **sequences, **plain, leftpad_k=begin, block_table=used[:, None])
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: torch\.int64 of shape \(4,\); accepted is int32 \(B \+ 1,\)$"):
        _flash_attn_varlen_forward(q, k, v, cu_q.long(), cu_k.long(), 30, 20, **plain, leftpad_k=begin)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match=r"^seqused_k: 6 at \[1\]; accepted are 0 to 5, the length of that sequence's keys$"):
            _flash_attn_varlen_forward(q, k, v, **sequences, **plain, seqused_k=used + 6)
        with pytest.raises(ValueError, match="^cu_seqlens_k: sequence 2 has 11 tokens; accepted is at most max_seqlen_k = 10$"):
            _flash_attn_varlen_forward(q, k, v, cu_q, torch.tensor([0, 9, 14, 25], dtype=torch.int32), 30, 10, **plain, leftpad_k=begin)
        with pytest.raises(ValueError, match="^cu_seqlens_q: 37 at its end; accepted are up to 36, the tokens of q$"):
            _flash_attn_varlen_forward(q[:-1], k, v, **sequences, **plain, leftpad_k=begin)
        with pytest.raises(ValueError, match=r"^seqused_k: 6 at \[1\]; accepted are 0 to 5, the sequence's length$"):
            _flash_attn_varlen_forward(q, k, v, **sequences, **plain, seqused_k=used + 6, leftpad_k=begin)


def test_some_keys_of_each_sequence_with_dropout():
    (q, k, v), sequences = packed()
    k, v = k.detach().clone(), v.detach().clone()
    used, cu_k = torch.tensor([12, 0, 11], dtype=torch.int32, device=q.device), sequences["cu_seqlens_k"]
    for b in range(3):
        k[cu_k[b] + used[b] : cu_k[b + 1]] = v[cu_k[b] + used[b] : cu_k[b + 1]] = math.nan
    given = {"dropout_p": 0.2, "softmax_scale": None, "causal": True}
    out, lse, _, rng = _flash_attn_varlen_forward(q, k, v, **sequences, **given, seqused_k=used)
    lists = {name: sequences[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")}
    expected, expected_lse = attention(q, k, v, dropout=0.2, rng=rng, causal=True, seqused_k=used, return_lse=True, **lists)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def in_pages(k: Tensor, v: Tensor, cu_k: Tensor, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed keys in pools whose other rows are NaN, and the table: each sequence's pages, and then -1."""
    each = [-(-n // page) for n in cu_k.diff().tolist()]
    table = torch.full((len(each), max(each)), -1, dtype=torch.int32)
    pools = [torch.full((sum(each) + 2, page, *x.shape[1:]), math.nan) for x in (k, v)]
    free = iter(torch.randperm(sum(each) + 2, device="cpu").tolist())
    for b, (begin, end) in enumerate(itertools.pairwise(cu_k.tolist())):
        for j, first in enumerate(range(begin, end, page)):
            table[b, j] = number = next(free)
            for x, pool in zip((k, v), pools, strict=True):
                pool[number, : min(page, end - first)] = x[first : min(first + page, end)]
    return *pools, table


PAGED: list[dict[str, Any]] = [{}, {"causal": True, "softcap": 2.0}, {"alibi_slopes": SLOPES, "window_size_left": 7}, {"dropout_p": 0.25}]


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("options", PAGED, ids=str)
def test_keys_in_pages(options, page):
    """Results equal those of contiguous keys, also where q requires a gradient. seqused_k, or else cu_seqlens_k, gives the number of
    keys."""
    (q, k, v), sequences = packed()
    k_pool, v_pool, table = in_pages(k.detach(), v.detach(), sequences["cu_seqlens_k"], page)
    given = {"dropout_p": 0.0, "softmax_scale": 0.3, "causal": False} | options
    used = torch.tensor([12, 0, 11], dtype=torch.int32)
    for some in ({}, {"seqused_k": used}):
        torch.manual_seed(5)
        expected, expected_lse, _, expected_rng = _flash_attn_varlen_forward(q, k, v, **sequences, **given, **some)
        anything = {"cu_seqlens_k": torch.zeros_like(sequences["cu_seqlens_k"])} if some else {}
        torch.manual_seed(5)
        out, lse, _, rng = _flash_attn_varlen_forward(q, k_pool, v_pool, **sequences | anything, **given, **some, block_table=table)
        assert not out.requires_grad
        assert torch.equal(rng, expected_rng)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)


def test_what_is_refused_of_pages():
    leaves, sequences = packed()
    q, k, v = (x.detach() for x in leaves)
    pools = in_pages(k, v, sequences["cu_seqlens_k"], 4)
    given = {"dropout_p": 0.0, "softmax_scale": None, "causal": True}
    call = partial(_flash_attn_varlen_forward, q, *pools[:2], **given)
    with pytest.raises(ValueError, match="^block_table: dtype float32; accepted is int32"):
        call(**sequences, block_table=pools[2].float())
    with pytest.raises(TypeError, match="^block_table: list; accepted is a torch.Tensor"):
        call(**sequences, block_table=[[0]])
    with pytest.raises(TypeError, match=r"^cu_seqlens_k: NoneType; accepted is a torch.Tensor, int32 \(B \+ 1,\)$"):
        call(**sequences | {"cu_seqlens_k": None}, block_table=pools[2])
    with pytest.raises(
        ValueError, match="^leftpad_k: given beside block_table; accepted is None, for the table says where a sequence lies$"
    ):
        call(**sequences, leftpad_k=torch.zeros(3, dtype=torch.int32), block_table=pools[2])
    if DEVICE == "cpu":
        room = pools[2].shape[1] * 4
        with pytest.raises(ValueError, match=rf"^seqused_k: {room + 1} at \[0\]; accepted are 0 to {room}"):
            call(**sequences, seqused_k=torch.tensor([room + 1, 0, 0], dtype=torch.int32), block_table=pools[2])
        too_many = sequences | {"cu_seqlens_k": torch.tensor([0, *[room + 1] * 3], dtype=torch.int32)}
        with pytest.raises(ValueError, match=rf"^cu_seqlens_k: {room + 1} at \[0\]; accepted are 0 to {room}"):
            call(**too_many, block_table=pools[2])
    out, lse, *_ = call(**sequences, block_table=pools[2])
    into = [torch.zeros_like(x) for x in (q, *pools[:2])]
    with pytest.raises(ValueError, match=r"^k: shape \(\d+, 4, 2, 16\); accepted is \(tokens, heads, head dimension\)"):
        _flash_attn_varlen_backward(out, q, *pools[:2], out, lse, *into, **sequences, **PLAIN, deterministic=False)
    assert not any(x.any() for x in into)


REFUSED = [
    ({"dq": (2, 33, 4, 16)}, r"^dq: shape \(2, 33, 4, 16\), torch\.float32, on \S+; accepted is \(2, 33, 4, 24\), torch\.float32, on"),
    ({"dk": torch.float16}, r"^dk: shape \(2, 50, 2, 24\), torch\.float16, on \S+; accepted is \(2, 50, 2, 24\), torch\.float32, on"),
    ({"dv": [1]}, r"^dv: list; accepted is a torch\.Tensor, or None$"),
    ({"out": (2, 33, 2, 24)}, r"^out: shape \(2, 33, 2, 24\)"),
    ({"dout": None}, r"^dout: NoneType; accepted is a torch\.Tensor$"),
    ({"softmax_lse": (2, 33, 4)}, r"^softmax_lse: shape \(2, 33, 4\), torch\.float32, on \S+; accepted is \(2, 4, 33\), torch\.float32"),
    ({"q": (33, 4, 24)}, r"^q: shape \(33, 4, 24\); accepted is \(batches, tokens, heads, head dimension\)"),
    ({"dropout_p": 0.5}, "^rng_state: missing beside dropout"),
    ({"causal": 2}, "^causal: int 2; accepted is True or False, or 1 or 0$"),
    ({"window_size_left": 1.5}, r"^window_size: \(1\.5, -1\); accepted is \(left, right\)"),
    ({"softmax_scale": "a"}, "^softmax_scale: str"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED)
def test_what_does_not_fit_is_named_before_anything_is_written(wrong, message):
    q, k, v = (x.detach() for x in inputs())
    out, lse, *_ = _flash_attn_forward(q, k, v, **PLAIN, return_softmax=False)
    into = {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    good = {"dout": out, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse, **into, **PLAIN, "deterministic": False}
    bad = {}
    for name, x in wrong.items():
        bad[name] = torch.zeros(x) if isinstance(x, tuple) else good[name].to(x) if isinstance(x, torch.dtype) else x
    with pytest.raises((TypeError, ValueError), match=message):
        _flash_attn_backward(**good | bad)
    assert all((x == 0).all() for x in into.values())


def test_a_gradient_that_nobody_wants_is_none():
    q, k, v = (x.detach() for x in inputs())
    out, lse, *_ = _flash_attn_forward(q, k, v, **PLAIN, return_softmax=True)
    dv, both = torch.empty_like(v), torch.empty_like(v)
    _flash_attn_backward(out, q, k, v, out, lse, None, None, dv, **PLAIN, deterministic=False)
    _flash_attn_backward(out, q, k, v, out, lse, torch.empty_like(q), torch.empty_like(k), both, **PLAIN, deterministic=False)
    assert torch.equal(dv, both)


def test_autocast_casts_nothing():
    q, k, v = (x.detach() for x in inputs())
    expected, lse, *_ = _flash_attn_forward(q, k, v, **PLAIN, return_softmax=False)
    grads = [[torch.empty_like(x) for x in (q, k, v)] for _ in range(2)]
    _flash_attn_backward(q, q, k, v, expected, lse, *grads[0], **PLAIN, deterministic=True)
    with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
        out, *_ = _flash_attn_forward(q, k, v, **PLAIN, return_softmax=False)
        _flash_attn_backward(q, q, k, v, out, lse, *grads[1], **PLAIN, deterministic=True)
    assert torch.equal(out, expected)
    assert all(map(torch.equal, *grads))


def test_wrong_names_and_flags_of_the_passes_are_refused():
    q, k, v = inputs()
    with pytest.raises(TypeError, match="^return_softmax: int 3; accepted is True or False, or 1 or 0$"):
        _flash_attn_forward(q, k, v, **PLAIN, return_softmax=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'; did you mean causal"):
        _flash_attn_forward(q, k, v, casual=True)
    leaves, sequences = packed()
    with pytest.raises(TypeError, match="^zero_tensors: str 'a'; accepted is True or False, or 1 or 0\nnum_splits: str; accepted"):
        _flash_attn_varlen_forward(*leaves, **sequences, dropout_p=0.0, softmax_scale=None, causal=False, zero_tensors="a", num_splits="b")


def test_a_part_with_little_weight_keeps_its_gradients():
    """The part's keys score 12 below the others, so the weight of their gradients, e^-12, is too small for products in float16."""
    q, k, v = (torch.randn(1, 64, 2, 32, dtype=torch.float16) for _ in range(3))
    q, k = q * 0.1, k * 0.1
    q[..., 0] = 8.0
    k[:, :32, :, 0], k[:, 32:, :, 0] = 0.0, 12 * 32**0.5 / 8
    dout = torch.randn_like(q)
    options = PLAIN | {"softmax_scale": 32**-0.5}
    out, lse, _, _ = _flash_attn_forward(q, k, v, **options, return_softmax=False)
    whole = [t.double().requires_grad_() for t in (q, k, v)]
    s = torch.einsum("bihd,bjhd->bhij", whole[0], whole[1]) * 32**-0.5
    o = torch.einsum("bhij,bjhd->bihd", s.softmax(-1), whole[2])
    expected = torch.autograd.grad(o, whole, dout.double())
    weak = [torch.empty_like(t[:, :32]) for t in (k, v)]
    _flash_attn_backward(dout, q, k[:, :32], v[:, :32], out, lse, torch.empty_like(q), *weak, **options, deterministic=False)
    for found, name, ref in zip(weak, ("dk", "dv"), expected[1:], strict=True):
        ref = ref[:, :32]
        assert (found.double() - ref).abs().max() < 0.05 * ref.abs().max() + 2.0**-24, name


def test_where_gradients_go():
    """dq may share memory with dout; memory that cannot be written is refused before the first write."""
    q, k, v = (t.detach() for t in inputs())
    dout = torch.randn_like(q)
    out, lse, _, _ = _flash_attn_forward(q, k, v, **PLAIN, return_softmax=False)
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    expected = _flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, **PLAIN, deterministic=False)
    there = dout.clone()
    found = _flash_attn_backward(there, q, k, v, out, lse, there, dk, dv, **PLAIN, deterministic=False)
    assert torch.equal(found, expected)
    assert torch.equal(there, dq)
    with pytest.raises(ValueError, match="^dv: the memory of dk; accepted is memory of its own$"):
        _flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dk, **PLAIN, deterministic=False)
    with pytest.raises(ValueError, match="^dk: strides .*; accepted is memory of its own for each number$"):
        _flash_attn_backward(dout, q, k, v, out, lse, dq, dk[:1].expand(2, -1, -1, -1), dv, **PLAIN, deterministic=False)
