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
    with pytest.raises(ValueError, match="^v: None beside k; accepted are both or neither"):
        call(q, k_cache, v_cache, k=q, cache_seqlens=0)
    with pytest.raises(ValueError, match="^cache_seqlens: None beside k and v"):
        call(q, k_cache, v_cache, k=q, v=q)
    with pytest.raises(ValueError, match="^cache_seqlens: 8; accepted are 0 to 7"):
        call(q, k_cache, v_cache, k=q, v=q, cache_seqlens=8)
    with pytest.raises(ValueError, match=r"^cache_seqlens: shape \(3,\)"):
        call(q, k_cache, v_cache, cache_seqlens=torch.zeros(3, dtype=torch.int32))


KINDS = [
    ({"cache_seqlens": 10.7}, "cache_seqlens: float; accepted is an integer, or a torch.Tensor, int32 (B,)"),
    ({"cache_seqlens": True}, "cache_seqlens: bool; accepted is an integer, or a torch.Tensor, int32 (B,)"),
    ({"cache_seqlens": [3, 4]}, "cache_seqlens: list; accepted is an integer, or a torch.Tensor, int32 (B,)"),
    ({"q": None}, "q: NoneType; accepted is a torch.Tensor"),
    ({"cache_batch_idx": [0, 1]}, "cache_batch_idx: list; accepted is a torch.Tensor"),
    ({"rotary_cos": [1.0], "rotary_sin": 2}, "rotary_cos: list; accepted is a torch.Tensor\nrotary_sin: int; accepted is a torch.Tensor"),
    (
        {"num_splits": "x", "causal": 2.0},
        "causal: float 2.0; accepted is True or False, or 1 or 0\nnum_splits: str; accepted is an integer",
    ),
    ({"rotary_interleaved": None}, "rotary_interleaved: NoneType None; accepted is True or False, or 1 or 0"),
    ({"return_softmax_lse": 2}, "return_softmax_lse: int 2; accepted is True or False, or 1 or 0"),
]


@pytest.mark.parametrize(("wrong", "message"), KINDS)
def test_wrong_kinds_are_named_before_the_cache_is_written(wrong, message):
    k_cache, v_cache = cache(2, 8)
    before = k_cache.clone()
    q = torch.ones(2, 1, 4, 16)
    with pytest.raises(TypeError) as raised:
        flash_attn.flash_attn_with_kvcache(**{"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": q, "v": q, "cache_seqlens": 3} | wrong)
    assert str(raised.value) == message
    assert torch.equal(k_cache, before)


def test_a_numpy_integer_is_a_length():
    k_cache, v_cache = cache(2, 8)
    q = torch.randn(2, 1, 4, 16)
    outs = [flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=n) for n in (5, np.int64(5))]
    assert torch.equal(*outs)


@pytest.mark.parametrize("filled", [5, [3, 5]])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary_tables_reach_the_last_token(filled, causal):
    """Of k, and of q where each query has a position of its own; in host memory, for nobody waits for a GPU."""
    with torch.device("cpu"):
        q, k, v = torch.ones(2, 3, 4, 16), *(torch.ones(2, 2, 4, 16) for _ in "kv")
        lengths = torch.tensor(filled, dtype=torch.int32) if isinstance(filled, list) else filled
        needed = 8 if causal else 7

        def call(length: int) -> Tensor:
            table = torch.ones(length, 4)
            return flash_attn.flash_attn_with_kvcache(q, *cache(2, 12), k, v, table, table, lengths, causal=causal)

        assert call(needed).isfinite().all()
        with pytest.raises(ValueError, match=f"^rotary_cos, rotary_sin: length {needed - 1}; accepted is {needed} or more"):
            call(needed - 1)


def test_rotary_tables_come_with_each_other_and_with_new_keys():
    k_cache, v_cache = cache(2, 8)
    table = q = torch.ones(2, 1, 4, 16)
    call = flash_attn.flash_attn_with_kvcache
    for given, message in (
        ({"rotary_cos": table, "k": q, "v": q}, "rotary_sin: None beside rotary_cos; accepted are both or neither"),
        ({"rotary_sin": table, "k": q, "v": q}, "rotary_cos: None beside rotary_sin; accepted are both or neither"),
        ({"rotary_cos": table, "rotary_sin": table}, "k: None beside rotary_cos; accepted are k and v, new keys to be turned"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call(q, k_cache, v_cache, cache_seqlens=3, **given)


PACKED = {"cu_seqlens": torch.tensor([0, 8], dtype=torch.int32, device=DEVICE), "max_seqlen": 8}
VARLEN = {f"{name}_{side}": x for name, x in PACKED.items() for side in "qk"}
REFUSED = [
    ("flash_attn_qkvpacked_func", {"qkv": None}, TypeError, "qkv: NoneType; accepted is a torch.Tensor, (B, S, 3, H, D)"),
    (
        "flash_attn_qkvpacked_func",
        {"qkv": torch.zeros(1, 8, 3, 2, 16, dtype=torch.int32)},
        ValueError,
        "qkv: dtype int32; accepted is float32, float16, bfloat16, float64",
    ),
    (
        "flash_attn_kvpacked_func",
        {"q": torch.zeros(1, 8, 2, 16), "kv": [1], "window_size": "a"},
        TypeError,
        "kv: list; accepted is a torch.Tensor, (B, Sk, 2, Hkv, D)\n"
        "window_size: 'a'; accepted is (left, right), two integers of 64 bits, -1 for no bound",
    ),
    (
        "flash_attn_varlen_func",
        {**dict.fromkeys("qkv", torch.zeros(8, 2, 16)), **VARLEN, "cu_seqlens_q": None, "cu_seqlens_k": [0, 8]},
        TypeError,
        "cu_seqlens_q: NoneType; accepted is a torch.Tensor, int32 (B + 1,)\n"
        "cu_seqlens_k: list; accepted is a torch.Tensor, int32 (B + 1,)",
    ),
    (
        "flash_attn_varlen_qkvpacked_func",
        {"qkv": torch.zeros(8, 3, 2, 16), **PACKED, "max_seqlen": 7},
        ValueError,
        "cu_seqlens: sequence 0 has 8 tokens; accepted is at most max_seqlen = 7",
    ),
    (
        "flash_attn_func",
        {**dict.fromkeys("qkv", torch.zeros(1, 8, 2, 16)), "window_size": (2**70, 0)},
        ValueError,
        f"window_size: ({2**70}, 0); accepted is (left, right), two integers of 64 bits, -1 for no bound",
    ),
    (
        "flash_attn_func",
        {
            **dict.fromkeys("qkv", torch.zeros(1, 8, 2, 16)),
            "window_size": (-3, "a"),
            "dropout_p": 1.5,
            "softcap": -1,
            "causal": 2.0,
            "return_attn_probs": None,
        },
        ValueError,
        "return_attn_probs: NoneType None; accepted is True or False, or 1 or 0\ncausal: float 2.0; accepted is True or False, or 1 or 0\n"
        "window_size: (-3, 'a'); accepted is (left, right), two integers of 64 bits, -1 for no bound\n"
        "softcap: -1; accepted is 0 (none) or a positive finite number\n"
        "dropout_p: 1.5; accepted is 0 to below 1, the probability of dropping",
    ),
]


@pytest.mark.parametrize(("name", "given", "error", "message"), REFUSED)
def test_every_wrong_argument_has_a_line_in_its_own_name(name, given, error, message):
    here = {argument: x.to(DEVICE) if isinstance(x, Tensor) else x for argument, x in given.items()}
    if "accepted is at most max_seqlen" in message and DEVICE != "cpu":
        pytest.skip("nobody looks at lengths in device memory")
    with pytest.raises(error) as raised:
        getattr(flash_attn, name)(**here)
    assert str(raised.value) == message


def test_numbers_that_meta_tensors_lack():
    q = torch.empty(8, 2, 16, device="meta")
    cu = torch.empty(2, dtype=torch.int32, device="meta")
    assert flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 8, 8).shape == q.shape
    with pytest.raises(ValueError, match="^max_seqlen_k: on device meta; accepted is an integer"):
        flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 8, torch.empty((), dtype=torch.int64, device="meta"))
    with pytest.raises(ValueError, match="^attention_mask: on device meta"):
        flash_attn.bert_padding.unpad_input(q, q[..., 0].bool())


HOST_LENGTHS = [
    ({"cache_seqlens": [3, 8], "new": 1}, r"^cache_seqlens: 8 at \[1\]; accepted are 0 to 7, a cache of 8 less 1 new keys$"),
    ({"cache_seqlens": [3, -5], "new": 1}, r"^cache_seqlens: -5 at \[1\]; accepted are 0 to 7"),
    ({"cache_seqlens": [9, 3]}, r"^cache_seqlens: 9 at \[0\]; accepted are 0 to 8"),
    (
        {"cache_seqlens": [3, 4], "cache_batch_idx": [0, 2], "new": 1},
        r"^cache_batch_idx: 2 at \[1\]; accepted are 0 to 1, a cache of 2 rows$",
    ),
    ({"cache_batch_idx": [-1, 0]}, r"^cache_batch_idx: -1 at \[0\]; accepted are 0 to 1"),
    ({"cache_seqlens": [3, 4], "cache_leftpad": [3, 5]}, r"^cache_leftpad: 5 at \[1\]; accepted are 0 to 4, where the sequence ends$"),
    ({"cache_seqlens": [3, 4], "cache_leftpad": [-1, 0]}, r"^cache_leftpad: -1 at \[0\]"),
]


@pytest.mark.parametrize(("given", "message"), HOST_LENGTHS)
def test_lengths_in_host_memory_are_checked_before_the_cache_is_written(given, message):
    with torch.device("cpu"):
        k_cache, v_cache = cache(2, 8)
        before = k_cache.clone(), v_cache.clone()
        q = torch.ones(2, 1, 4, 16)
        numbers = {name: torch.tensor(x, dtype=torch.int32) for name, x in given.items() if name != "new"}
    fresh = {"k": q, "v": q} if "new" in given else {}
    with pytest.raises(ValueError, match=message):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **fresh, **numbers)
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])


@pytest.mark.parametrize("lengths", [3, [3, 4]])
def test_a_cache_of_known_lengths_is_one_graph(lengths):
    torch._dynamo.reset()
    k_cache, v_cache = cache(2, 8)
    copies = k_cache.clone(), v_cache.clone()
    q, k, v = (torch.randn(2, 1, 4, 16) for _ in "qkv")
    filled = torch.tensor(lengths, dtype=torch.int32) if isinstance(lengths, list) else lengths
    compiled = torch.compile(flash_attn.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    out = compiled(q, *copies, k, v, cache_seqlens=filled)
    assert torch.equal(out, flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=filled))
    assert torch.equal(copies[0], k_cache)


def test_a_cache_has_no_gradient():
    q = torch.randn(2, 1, 4, 16, requires_grad=True)
    assert not flash_attn.flash_attn_with_kvcache(q, *cache(2, 8)).requires_grad


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q": (2, 1, 16)}, r"^q: shape \(2, 1, 16\); accepted is \(batches, tokens, heads, head dimension\)"),
        ({"q": (2, 1, 4, 8)}, r"^k_cache: shape \(2, 8, 4, 16\); accepted is \(2, 8, 4, 8\)"),
        ({"q": (1, 1, 4, 16)}, r"^k_cache: shape \(2, 8, 4, 16\); accepted is \(1, 8, 4, 16\)"),
        ({"q": (2, 1, 3, 16)}, r"^k_cache: 4 heads for the 3 of q"),
        ({"v_cache": (2, 7, 4, 16)}, r"^v_cache: shape \(2, 7, 4, 16\); accepted is \(2, 8, 4, 16\)"),
        ({"k": (1, 1, 4, 16)}, r"^k: shape \(1, 1, 4, 16\); accepted is \(2, 1, 4, 16\)"),
        ({"v": (2, 2, 4, 16)}, r"^v: shape \(2, 2, 4, 16\); accepted is \(2, 1, 4, 16\)"),
        ({"k": torch.float16}, r"^k: dtype torch\.float16; accepted is torch\.float32, as k_cache has"),
        ({"cache_seqlens": torch.float32}, r"^cache_seqlens: dtype torch\.float32; accepted is torch\.int32"),
    ],
)
def test_what_does_not_fit_the_cache_is_named(wrong, message):
    """A shape in place of the right one, or a dtype."""
    k_cache, v_cache = cache(2, 8)
    q = torch.zeros(2, 1, 4, 16)
    good = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": q, "v": q, "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32)}
    bad = {name: torch.zeros(x) if isinstance(x, tuple) else good[name].to(x) for name, x in wrong.items()}
    with pytest.raises(ValueError, match=message):
        flash_attn.flash_attn_with_kvcache(**good | bad)


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


@pytest.mark.parametrize(
    ("wrong", "hints"),
    [
        ({"casual": True}, ["'casual'; did you mean causal?"]),
        (
            {"dropout": 0.1, "window": (3, 0), "scale": 1.0},
            ["'dropout'; did you mean dropout_p?", "'window'; did you mean window_size?", "'scale'; did you mean softmax_scale?"],
        ),
    ],
)
@pytest.mark.parametrize("name", [*flash_attn.__all__])
def test_every_unknown_name_has_a_line(name, wrong, hints):
    with pytest.raises(TypeError) as raised:
        getattr(flash_attn, name)(**wrong)
    lines = str(raised.value).splitlines()
    if name == "flash_attn_with_kvcache":  # it has no dropout
        hints = [hint.replace("; did you mean dropout_p?", "") for hint in hints]
    assert lines == [f"{name}() got an unexpected keyword argument {hint}" for hint in hints]


# flash_attn.bert_padding


def test_the_module_paths_are_that_librarys():
    from strobe.compat.flash_attn import bert_padding, flash_attn_interface

    assert all(getattr(flash_attn_interface, name) is getattr(flash_attn, name) for name in flash_attn.__all__)
    signatures = {
        "unpad_input": "hidden_states attention_mask unused_mask",
        "pad_input": "hidden_states indices batch seqlen",
        "index_first_axis": "input indices",
        "index_put_first_axis": "values indices first_axis_dim",
    }
    for name, names in signatures.items():
        assert list(inspect.signature(getattr(bert_padding, name)).parameters) == names.split(), name


@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_unpadded_sequences_attend_as_padded_ones(kind):
    from strobe.compat.flash_attn.bert_padding import pad_input, unpad_input

    keep = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    x = torch.randn(3, 5, 3, 2, 16, requires_grad=True)
    packed, indices, cu_seqlens, longest, used = unpad_input(x, keep.to(kind))
    assert packed.shape == (8, 3, 2, 16)
    assert torch.equal(packed, x[keep])
    assert cu_seqlens.dtype == used.dtype == torch.int32
    assert (cu_seqlens.tolist(), used.tolist(), longest) == ([0, 3, 3, 8], [3, 0, 5], 5)
    assert isinstance(longest, int)
    out = pad_input(flash_attn.flash_attn_varlen_qkvpacked_func(packed, cu_seqlens, longest), indices, 3, 5)
    assert (out[~keep] == 0).all()
    expected = torch.zeros(3, 5, 2, 16, dtype=torch.float64)
    for b in range(3):
        expected[b, keep[b]] = formulas(*(y[None] for y in x[b, keep[b]].unbind(1)))[0][0]
    assert_close(out, expected)
    dout = torch.randn_like(out)
    (dx,) = torch.autograd.grad(out, x, dout)
    assert_close(dx, torch.autograd.grad(expected, x, dout.double())[0].double())


def test_tokens_that_are_packed_but_not_used():
    from strobe.compat.flash_attn.bert_padding import unpad_input

    x = torch.arange(6.0).view(2, 3)
    used, unused = torch.tensor([[1, 0, 0], [1, 1, 0]]), torch.tensor([[0, 1, 0], [0, 0, 0]])
    packed, indices, cu_seqlens, longest, seqused = unpad_input(x, used, unused)
    assert [t.tolist() for t in (packed, indices, cu_seqlens, seqused)] == [[0, 1, 3, 4], [0, 1, 3, 4], [0, 2, 4], [1, 2]]
    assert longest == 2


def test_masks_that_do_not_fit_are_refused():
    from strobe.compat.flash_attn.bert_padding import unpad_input

    x = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"^attention_mask: shape \(2, 4\); accepted is \(2, 3\)"):
        unpad_input(x, torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"^unused_mask: shape \(3,\); accepted is \(2, 3\)"):
        unpad_input(x, torch.ones(2, 3), torch.ones(3))
    with pytest.raises(ValueError, match=r"^hidden_states: shape \(2,\); accepted is \(B, S, \.\.\.\)"):
        unpad_input(x[:, 0, 0], torch.ones(2))
