"""strobe.compat.flash_attn against the formulas in float64, as that library's documentation states them."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from device import DEVICE
from flash_formulas import SLOPES, assert_close, formulas, inputs
from strobe.compat import flash_attn


@pytest.fixture(autouse=True)
def _device():
    with torch.device(DEVICE):
        yield


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
    """Checks outputs, softmax_lse and gradients, with grouped heads, and with more and fewer keys than queries, aligned at the bottom
    right."""
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
    """transformers passes the tensor lengths.max()."""
    q, k, v = (torch.randn(32, 4, 16) for _ in range(3))
    lengths = torch.tensor([20, 12], dtype=torch.int32)
    cu = torch.tensor([0, 20, 32], dtype=torch.int32)
    expected = flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 20, 20)
    for longest in (lengths.max(), lengths[:1], np.int64(20)):
        assert torch.equal(flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest), expected)
    for wrong, message in ((lengths, "torch.Tensor"), (torch.tensor(20.0), "float")):
        with pytest.raises(TypeError, match=f"^max_seqlen_q: {message}; accepted is an integer"):
            flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, wrong, 20)


WINDOWS = [
    (np.int64(2), np.int32(-1)),
    [2, -1],
    torch.tensor([2, -1]),
    torch.tensor([2, -1], dtype=torch.int32, device=DEVICE),
    tuple(torch.tensor([2, -1])),
    (torch.tensor([2]), -1),
]


@pytest.mark.parametrize("window_size", WINDOWS, ids=repr)
def test_window_size_is_numbers_of_any_kind(window_size):
    """flash-attn's own tests pass torch.randint(0, S, (2,))."""
    q, k, v = inputs(1, 20, 4, 16)
    expected = flash_attn.flash_attn_func(q, k, v, window_size=(2, -1))
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=window_size), expected)
    cached = flash_attn.flash_attn_with_kvcache(q, k.detach(), v.detach(), window_size=window_size, cache_seqlens=20)
    assert torch.equal(cached, expected)


WRONG_WINDOWS = [
    torch.tensor([2.0, 1.0]),
    torch.tensor([1, 2, 3]),
    torch.tensor(3),
    torch.tensor([[1, 2]]),
    (torch.tensor([1, 2]), 3),
    (torch.tensor(True), 3),
    (torch.tensor(1.5), 3),
    torch.empty(2, dtype=torch.int64, device="meta"),
]


@pytest.mark.parametrize("window_size", WRONG_WINDOWS, ids=repr)
def test_windows_of_other_shapes_and_kinds_are_refused(window_size):
    with pytest.raises(TypeError, match=r"(?s)^window_size: .*; accepted is \(left, right\), two integers"):
        flash_attn.flash_attn_func(*inputs(1, 8, 4, 16), window_size=window_size)


def test_flags_are_also_one_and_zero():
    q, k, v = inputs(2, 20, 4, 16)
    expected, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, deterministic=True, return_attn_probs=True)
    for one, zero in ((1, 0), (np.int64(1), np.int32(0)), (np.True_, np.False_)):
        out, found, nothing = flash_attn.flash_attn_func(q, k, v, causal=one, deterministic=one, return_attn_probs=one)
        assert torch.equal(out, expected)
        assert torch.equal(found, lse)
        assert nothing is None
        assert torch.equal(flash_attn.flash_attn_func(q, k, v, causal=one, deterministic=zero, return_attn_probs=zero), expected)
        kv = torch.stack([k, v], 2)
        assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, kv, causal=one, return_attn_probs=zero), expected)
        cached, found = flash_attn.flash_attn_with_kvcache(
            q, k.detach(), v.detach(), causal=one, rotary_interleaved=zero, cache_seqlens=20, return_softmax_lse=one
        )
        assert torch.equal(cached, expected)
        assert torch.equal(found, lse)
    for wrong in (2, -1, 1.0, None, "1"):
        with pytest.raises(TypeError, match="^causal: .*; accepted is True or False, or 1 or 0$"):
            flash_attn.flash_attn_func(q, k, v, causal=wrong)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("it has no text")


@pytest.mark.parametrize(
    ("wrong", "shown"), [(10**5000, "int int"), (Unprintable(), r"\S*Unprintable \S*Unprintable")], ids=["int", "repr"]
)
def test_a_switch_that_cannot_be_printed(wrong, shown):
    q, k, v = inputs(1, 5, 2, 8)
    with pytest.raises(TypeError, match=f"^causal: {shown}; accepted is True or False, or 1 or 0$"):
        flash_attn.flash_attn_func(q, k, v, causal=wrong)


@pytest.mark.parametrize("wrong", [{"window_size": (1, "a")}, {"softmax_scale": "x"}, {"causal": 3}], ids=lambda x: next(iter(x)))
def test_a_compiled_call_refuses_as_an_eager_one(wrong):
    torch.compiler.reset()
    q, k, v = (x.detach() for x in inputs(1, 5, 2, 8))
    found = []
    for function in (flash_attn.flash_attn_func, torch.compile(flash_attn.flash_attn_func, backend="eager")):
        with pytest.raises(TypeError, match=f"^{next(iter(wrong))}: ") as raised:
            function(q, k, v, **wrong)
        found.append(str(raised.value))
    assert found[0] == found[1]


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


def test_refusals_of_the_packed_forms():
    with pytest.raises(ValueError, match=r"^qkv: shape \(1, 8, 2, 16\); accepted is \(B, S, 3, H, D\)"):
        flash_attn.flash_attn_qkvpacked_func(torch.zeros(1, 8, 2, 16))


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


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}, {"window_size": (2, 1)}, {"alibi_slopes": SLOPES}], ids=str)
def test_what_was_dropped_is_said(options):
    """out follows from the third result: its sizes are the softmax before it is normalised, its signs what was dropped."""
    p = 44 / 256  # dropout in steps of 1/256
    q, k, v = inputs(2, 5, 4, 16, kv=(9, 2))
    out, _, dropped = flash_attn.flash_attn_func(q, k, v, p, **options, return_attn_probs=True)
    assert dropped.shape == (2, 4, 5, 9)
    assert dropped.dtype == q.dtype

    def of_dropped(dropped: Tensor, v: Tensor) -> Tensor:
        weights = (dropped.abs() / dropped.abs().sum(-1, keepdim=True)).nan_to_num() * ~torch.signbit(dropped)
        return torch.einsum("bhij,bjhd->bihd", weights / (1 - p), v.repeat_interleave(2, 2))

    torch.testing.assert_close(out, of_dropped(dropped, v), atol=3e-6, rtol=0)
    assert 0 < torch.signbit(dropped).float().mean() < 0.4
    kv = torch.stack([k, v], 2)
    out, _, dropped = flash_attn.flash_attn_kvpacked_func(q, kv, p, **options, return_attn_probs=True)
    torch.testing.assert_close(out, of_dropped(dropped, v), atol=3e-6, rtol=0)

    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 8], [0, 9, 13]))
    packed = torch.cat([q[0], q[1, :4]]), torch.cat([k[0], k[1, :6]]), torch.cat([v[0], v[1, :6]])  # padding follows
    pools = [torch.cat([x, x[:, :3]], 1).unflatten(1, (3, 4)).flatten(0, 1) for x in (k, v)]  # 3 pages of 4 keys for each sequence
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    for keys, more in ((packed[1:], {}), (pools, {"block_table": table})):
        out, _, dropped = flash_attn.flash_attn_varlen_func(
            packed[0], *keys, cu_q, cu_k, 5, 9, p, **options, **more, return_attn_probs=True
        )
        for b, (i, j) in enumerate([(5, 9), (3, 4)]):
            expected = of_dropped(dropped[b : b + 1, :, :i, :j], v[b : b + 1, :j])[0]
            torch.testing.assert_close(out[cu_q[b] : cu_q[b + 1]], expected, atol=3e-6, rtol=0)
        assert not dropped[1, :, 3:].any()
        assert not dropped[1, :, :, 4:].any()
