"""Compares outputs and gradients of strobe.compat.sdpa with those of PyTorch's own function in float64."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from device import DEVICE
from strobe.compat.sdpa import scaled_dot_product_attention

# query, key, value, attn_mask
SHAPES = {
    "four axes": ((2, 4, 9, 16), (2, 4, 11, 16), (2, 4, 11, 8), (2, 1, 9, 11)),
    "three axes": ((3, 9, 16), (3, 11, 16), (3, 11, 16), (3, 9, 11)),
    "two axes": ((9, 16), (11, 16), (11, 8), (9, 11)),
    "five axes": ((2, 3, 4, 9, 16), (2, 3, 4, 11, 16), (2, 3, 4, 11, 16), (2, 1, 4, 9, 11)),
    "a batch of one key": ((3, 4, 9, 16), (1, 4, 11, 16), (1, 4, 11, 16), (4, 9, 11)),
    "front axes broadcast": ((2, 1, 4, 9, 16), (3, 4, 11, 16), (1, 3, 4, 11, 16), (11,)),
    "mask of the last front axis": ((2, 3, 4, 9, 16), (2, 3, 4, 11, 16), (2, 3, 4, 11, 16), (3, 1, 9, 11)),
    "mask of all front axes": ((2, 3, 4, 9, 16), (2, 3, 4, 11, 16), (2, 3, 4, 11, 16), (2, 3, 1, 9, 11)),
    "mask of one batch": ((2, 3, 4, 9, 16), (2, 3, 4, 11, 16), (2, 3, 4, 11, 16), (1, 4, 9, 11)),
    "one query head": ((2, 1, 9, 16), (2, 4, 11, 16), (2, 4, 11, 16), (2, 4, 9, 11)),
    "one value head": ((2, 4, 9, 16), (2, 4, 11, 16), (2, 1, 11, 8), (4, 9, 11)),
    "one key head beside values": ((3, 2, 4, 9, 16), (1, 11, 16), (4, 11, 8), (11,)),
    "one key head": ((2, 4, 9, 16), (2, 1, 11, 16), (2, 1, 11, 16), (1, 1, 1, 11)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool": {"attn_mask": torch.bool},
    "float": {"attn_mask": torch.float32},
}


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for shape in shapes]


def both(tensors: list[Tensor], **options: Any) -> None:
    """Asserts that outputs and gradients agree with PyTorch's in float64."""
    ours = scaled_dot_product_attention(*tensors, **options)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        tensors, wide = [*tensors, mask], [*wide, mask.detach().double().requires_grad_()]
        options["attn_mask"] = wide[-1]
    theirs = F.scaled_dot_product_attention(*wide[:3], **options)
    assert (ours.shape, ours.dtype) == (theirs.shape, tensors[0].dtype)
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=3e-6)
    dout = torch.randn_like(ours)
    for got, want in zip(torch.autograd.grad(ours, tensors, dout), torch.autograd.grad(theirs, wide, dout.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_as_pytorch(shapes, options):
    *qkv, of_mask = SHAPES[shapes]
    given = dict(OPTIONS[options])
    if given.get("attn_mask") is torch.bool:
        given["attn_mask"] = torch.rand(of_mask, device=DEVICE) < 0.7
    elif given.get("attn_mask"):
        given["attn_mask"] = torch.randn(of_mask, device=DEVICE, requires_grad=True)
    both(leaves(*qkv), **given)


def test_grouped_heads():
    both(leaves((2, 6, 9, 16), (2, 2, 9, 16), (2, 2, 9, 16)), is_causal=True, enable_gqa=True)


def test_no_batch():
    tensors = leaves((0, 3, 4, 9, 16), (0, 3, 4, 11, 16), (0, 3, 4, 11, 8), (3, 1, 9, 11))
    out = scaled_dot_product_attention(*tensors[:3], attn_mask=tensors[3])
    assert out.shape == (0, 3, 4, 9, 8)
    assert [x.shape for x in torch.autograd.grad(out.sum(), tensors)] == [x.shape for x in tensors]


def test_signature():
    documented = F.scaled_dot_product_attention.__doc__ or ""
    for name in inspect.signature(scaled_dot_product_attention).parameters:
        assert name in documented


def test_a_query_that_sees_no_key():
    q, k, v = leaves(*[(1, 2, 5, 8)] * 3)
    mask = torch.ones(5, 5, dtype=torch.bool, device=DEVICE)
    mask[2] = False
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert torch.equal(out[:, :, 2], torch.zeros_like(out[:, :, 2]))
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_dropout_comes_from_torchs_generator():
    q, k, v = leaves(*[(1, 2, 64, 16)] * 3)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_trains_with_it(monkeypatch, batch_first):
    """torch.nn calls the function by its name in torch.nn.functional."""
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=batch_first, device=DEVICE)
    x = torch.randn(3, 7, 32, device=DEVICE)
    options = {"key_padding_mask": torch.rand((3, 7) if batch_first else (7, 3), device=DEVICE) < 0.3, "need_weights": False}

    def gradients() -> list[Tensor]:
        layer.zero_grad()
        layer(x, x, x, **options)[0].square().sum().backward()
        return [p.grad.clone() for p in layer.parameters() if p.grad is not None]

    expected = gradients()
    calls = []

    def counted(*arguments: Any, **given: Any) -> Tensor:
        calls.append(arguments)
        return scaled_dot_product_attention(*arguments, **given)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    for got, want in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"query": torch.randn(8)}, "query: shape (8,)"),
        ({"value": [1.0]}, "value: list"),
        ({"key": torch.randn(2, 3, 5, 8)}, "key: "),
        ({"key": torch.randn(3, 2, 5, 8)}, "query: with key and value of shapes"),
        ({"attn_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)}, "attn_mask: "),
        ({"attn_mask": torch.ones(5, 5, dtype=torch.int32)}, "attn_mask: "),
        ({"dropout_p": 1.0}, "dropout_p: "),
        ({"is_causal": 1}, "is_causal: "),
        ({"scale": "1"}, "scale: "),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_refusals_in_its_words(given, named):
    arguments = {name: torch.randn(2, 2, 5, 8) for name in ("query", "key", "value")} | given
    with pytest.raises((TypeError, ValueError)) as refusal:
        scaled_dot_product_attention(**arguments)
    assert str(refusal.value).startswith(named)


def test_every_wrong_argument_has_a_line():
    x = torch.randn(1, 3, 5, 8)
    for given, error, message in (
        (
            {"query": None, "key": [1.0], "enable_gqa": None},
            TypeError,
            "enable_gqa: NoneType None; accepted is True or False\nquery: NoneType; accepted is a torch.Tensor\n"
            "key: list; accepted is a torch.Tensor",
        ),
        (
            {"value": x[0, 0, 0], "is_causal": 1},
            ValueError,
            "value: shape (8,); accepted is (..., length, head dimension)\nis_causal: int 1",
        ),
        ({"enable_gqa": None}, TypeError, "enable_gqa: NoneType None; accepted is True or False"),
        ({"key": x[:, :2], "value": x[:, :2]}, ValueError, "key: 2 heads for the 3 of query; accepted are the divisors of 3"),
        (
            {"attn_mask": torch.ones(5, 5, dtype=torch.int32), "scale": "1"},
            ValueError,
            "attn_mask: dtype int32; accepted is bool (True = attend), or a float dtype, added to the scores\nscale: str",
        ),
        ({"attn_mask": [1]}, TypeError, "attn_mask: list; accepted is a torch.Tensor, as query is"),
    ):
        with pytest.raises(error) as raised:
            scaled_dot_product_attention(**{"query": x, "key": x, "value": x} | given)
        found, wanted = str(raised.value).splitlines(), message.splitlines()
        assert all(any(line.startswith(start) for line in found) for start in wanted), raised.value


def test_a_mask_that_does_not_broadcast():
    q, k, v = leaves((2, 3, 4, 9, 16), (2, 3, 4, 11, 16), (2, 3, 4, 11, 16))
    with pytest.raises(ValueError, match=r"attn_mask: shape \(2, 1, 9, 11\); accepted is one that broadcasts to \(2, 3, 4, 9, 11\)"):
        scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(2, 1, 9, 11, dtype=torch.bool, device=DEVICE))


def test_names_of_other_functions_are_answered():
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'causal'; did you mean is_causal\?$"):
        scaled_dot_product_attention(q, q, q, causal=True)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'return_lse'$"):
        scaled_dot_product_attention(q, q, q, return_lse=True)
