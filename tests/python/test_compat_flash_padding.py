"""bert_padding and layers.rotary of strobe.compat.flash_attn."""

from __future__ import annotations

import inspect

import pytest
import torch

from device import DEVICE
from flash_formulas import assert_close, formulas
from strobe.compat import flash_attn
from strobe.compat.flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from strobe.compat.flash_attn.layers.rotary import apply_rotary_emb


@pytest.fixture(autouse=True)
def _device():
    with torch.device(DEVICE):
        yield


def test_the_module_paths_are_that_librarys():
    from strobe.compat.flash_attn import bert_padding, flash_attn_interface

    assert all(getattr(flash_attn_interface, name) is getattr(flash_attn, name) for name in flash_attn.__all__)
    signatures = {
        "unpad_input": "hidden_states attention_mask unused_mask",
        "pad_input": "hidden_states indices batch seqlen",
        "index_first_axis": "input indices",
        "index_put_first_axis": "values indices first_axis_dim",
        "index_first_axis_residual": "input indices",
        "unpad_input_for_concatenated_sequences": "hidden_states attention_mask_in_length",
    }
    assert sorted(bert_padding.__all__) == sorted(signatures)
    for name, names in signatures.items():
        assert list(inspect.signature(getattr(bert_padding, name)).parameters) == names.split(), name


@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_unpadded_sequences_attend_as_padded_ones(kind):
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
    x = torch.arange(6.0).view(2, 3)
    used, unused = torch.tensor([[1, 0, 0], [1, 1, 0]]), torch.tensor([[0, 1, 0], [0, 0, 0]])
    packed, indices, cu_seqlens, longest, seqused = unpad_input(x, used, unused)
    assert [t.tolist() for t in (packed, indices, cu_seqlens, seqused)] == [[0, 1, 3, 4], [0, 1, 3, 4], [0, 2, 4], [1, 2]]
    assert longest == 2


def test_masks_that_do_not_fit_are_refused():
    x = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"^attention_mask: shape \(2, 4\); accepted is \(2, 3\)"):
        unpad_input(x, torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"^unused_mask: shape \(3,\); accepted is \(2, 3\)"):
        unpad_input(x, torch.ones(2, 3), torch.ones(3))
    with pytest.raises(ValueError, match=r"^hidden_states: shape \(2,\); accepted is \(B, S, \.\.\.\)"):
        unpad_input(x[:, 0, 0], torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.uint8], ids=str)
def test_indices_are_of_any_integer_dtype(dtype):
    """transformers passes cu_seqlens[:-1] when it decodes token by token."""
    x = torch.randn(6, 2, 3, requires_grad=True)
    indices = torch.tensor([4, 0, 3], dtype=dtype)
    rows = index_first_axis(x, indices)
    assert torch.equal(rows, x[[4, 0, 3]])
    expected = torch.zeros(6, 2, 3)
    expected[[4, 0, 3]] = rows.detach()
    assert torch.equal(index_put_first_axis(rows, indices, 6), expected)
    padded = pad_input(rows, indices, 2, 3)
    assert torch.equal(padded, expected.view(2, 3, 2, 3))
    (dx,) = torch.autograd.grad(padded.sum(), x)
    assert torch.equal(dx[[4, 0, 3]], torch.ones(3, 2, 3))
    assert dx.sum() == 18


def test_the_residual_keeps_its_gradient():
    x = torch.randn(5, 3, requires_grad=True)
    rows, rest = index_first_axis_residual(x, torch.tensor([1, 1, 4], dtype=torch.int32))
    assert torch.equal(rows, x[[1, 1, 4]])
    assert torch.equal(rest, x)
    of_rows, of_rest = torch.randn(3, 3), torch.randn(5, 3)
    (dx,) = torch.autograd.grad((rows, rest), x, (of_rows, of_rest))
    expected = of_rest.clone()
    expected[1] += of_rows[0] + of_rows[1]
    expected[4] += of_rows[2]
    torch.testing.assert_close(dx, expected)


def test_sequences_that_share_a_row():
    x = torch.randn(3, 6, 2, 16, requires_grad=True)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    packed, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16]
    assert cu_seqlens.dtype == torch.int32
    assert longest == 6
    assert isinstance(longest, int)
    assert indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)]
    assert torch.equal(packed, x.flatten(0, 1)[indices])
    out = flash_attn.flash_attn_varlen_func(packed, packed, packed, cu_seqlens, cu_seqlens, longest, longest, causal=True)
    second = x[None, 0, 2:5]
    assert_close(pad_input(out, indices, 3, 6)[0, 2:5], formulas(second, second, second, causal=True)[0][0])
    nothing = unpad_input_for_concatenated_sequences(x, torch.zeros_like(lengths))
    assert (nothing.cu_seqlens.tolist(), nothing.max_seqlen_in_batch, len(nothing.indices)) == ([0], 0, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: index_first_axis(x, [0]), r"^indices: list; accepted is a torch\.Tensor, integers \(T,\)"),
        (lambda x: index_first_axis(x, torch.tensor([0.0])), r"^indices: shape \(1,\), dtype torch\.float32; accepted are integers"),
        (lambda x: index_first_axis(x, torch.tensor([True, False])), r"^indices: shape \(2,\), dtype torch\.bool"),
        (lambda x: pad_input(x, torch.tensor([[0, 1]]), 2, 2), r"^indices: shape \(1, 2\)"),
        (lambda x: pad_input(x, torch.tensor([0, 1, 2]), 2, 2), r"^indices: shape \(3,\); accepted is \(2,\), one for each of the values"),
        (lambda x: unpad_input_for_concatenated_sequences(x, torch.ones(2, 3)), "^attention_mask_in_length: dtype torch.float32; accepted"),
        (
            lambda x: unpad_input_for_concatenated_sequences(x, torch.tensor([[2, 2, 0], [1, 0, 0]])),
            "^attention_mask_in_length: .* 0 to 3$",
        ),
        (
            lambda x: unpad_input_for_concatenated_sequences(x, torch.tensor([[2, -1, 0], [1, 0, 0]])),
            "^attention_mask_in_length: .* 0 to 3$",
        ),
        (lambda x: unpad_input_for_concatenated_sequences(x, torch.tensor([2, 1])), r"^attention_mask_in_length: shape \(2,\); accepted"),
        (
            lambda x: unpad_input_for_concatenated_sequences(x, torch.tensor([[2**62, 2**62, 1], [1, 0, 0]])),
            "^attention_mask_in_length: 4611686018427387904; accepted are 0 to 3$",
        ),
        (
            lambda x: unpad_input_for_concatenated_sequences(x, torch.tensor([[2**64 - 1, 0, 0], [1, 0, 0]], dtype=torch.uint64)),
            "^attention_mask_in_length: 18446744073709551615; accepted are 0 to 3$",
        ),
        (
            lambda x: unpad_input_for_concatenated_sequences(x, torch.ones(2, 3, dtype=torch.complex64)),
            "^attention_mask_in_length: dtype torch.complex64; accepted",
        ),
        (
            lambda x: index_first_axis(x, torch.tensor([2**63], dtype=torch.uint64)),
            "^indices: 9223372036854775808 to .* are 0 to 1$",
        ),
        (
            lambda x: index_first_axis(x, torch.tensor([0], device="meta")),
            f"^indices: on device meta; accepted is {DEVICE}(:0)?, where input lies",
        ),
        (lambda x: unpad_input(x, torch.ones(2, 3)), "^attention_mask: dtype torch.float32; accepted is bool, True = a tok"),
        (lambda x: unpad_input(x, torch.ones(2, 3, dtype=torch.complex64)), "^attention_mask: dtype torch.complex64; accepted is bool"),
        (lambda x: unpad_input(x, torch.tensor([[1, 2, 0], [0, 0, -1]])), "^attention_mask: 2; accepted are 0 and 1$"),
        (lambda x: unpad_input(x, torch.ones(2, 3).int(), -torch.ones(2, 3).long()), "^unused_mask: -1; accepted are 0 and 1$"),
        (lambda x: index_first_axis(None, torch.tensor([0])), "^input: NoneType; accepted is a torch.Tensor"),
        (lambda x: index_first_axis(x.sum(), torch.tensor([0])), "^input: a number; accepted is"),
        (lambda x: index_put_first_axis([1.0], torch.tensor([0]), 2), "^values: list; accepted is a torch.Tensor"),
        (lambda x: index_put_first_axis(x, torch.tensor([0, 1]), -1), "^first_axis_dim: -1; accepted are integers from 0"),
        (lambda x: index_put_first_axis(x, torch.tensor([0, 1]), "2"), "^first_axis_dim: str; accepted is an integer"),
        (lambda x: pad_input(x, torch.tensor([0, 1]), -2, 3), "^batch: -2; accepted are integers from 0"),
        (lambda x: pad_input(x, torch.tensor([0, 1]), -2, 3.0), r"(?s)^batch: -2; accepted .*\nseqlen: float; accepted is an integer"),
        (lambda x: pad_input(x[:0], torch.tensor([0]).int()[:0], 2**40, 2**40), r"^batch \* seqlen: 1208925819614629174706176; accepted"),
    ],
)
def test_indices_and_lengths_that_do_not_fit_are_refused(call, message):
    if DEVICE == "cuda" and message.startswith("^indices: 9"):
        pytest.skip("nobody looks at indices in device memory")
    with pytest.raises((TypeError, ValueError), match=message):
        call(torch.zeros(2, 3, 4))


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]
)
def test_integers_of_every_kind_are_indices_and_lengths(dtype):
    x = torch.randn(2, 3, 4)
    indices = torch.tensor([5, 0, 3]).to(dtype)
    packed = index_first_axis(x.flatten(0, 1), indices)
    assert torch.equal(packed, x.flatten(0, 1)[[5, 0, 3]])
    assert torch.equal(pad_input(packed, indices, 2, 3).flatten(0, 1)[[5, 0, 3]], packed)
    lengths = torch.tensor([[1, 2, 0], [2, 0, 0]])
    expected = unpad_input_for_concatenated_sequences(x, lengths)
    for found, wanted in zip(unpad_input_for_concatenated_sequences(x, lengths.to(dtype)), expected, strict=True):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(wanted))


def test_two_tokens_have_no_one_place():
    x = torch.zeros(3, 4, device="cpu")
    for indices in ([4, 1, 4], [1, 1, 1]):
        rows = torch.tensor(indices, device="cpu")
        with pytest.raises(ValueError, match=f"^indices: {indices[2]} more than once; accepted are indices that differ from one another$"):
            pad_input(x, rows, 2, 3)
        assert index_first_axis(torch.zeros(6, 4, device="cpu"), rows).shape == (3, 4)


def test_indices_in_host_memory_are_checked():
    with torch.device("cpu"), pytest.raises(ValueError, match="^indices: -1 to 9; accepted are 0 to 5$"):
        index_first_axis(torch.zeros(6, 2), torch.tensor([3, 9, -1]))


# flash_attn.layers.rotary


def turned(x: torch.Tensor, angles: torch.Tensor, positions: list[int], interleaved: bool) -> torch.Tensor:
    """x (S, H, D) rotated by complex numbers, in float64."""
    r = angles.shape[1]
    head = x[..., : 2 * r].double()
    pairs = head.unflatten(-1, (r, 2)) if interleaved else head.unflatten(-1, (2, r)).mT
    z = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[positions][:, None]
    back = torch.view_as_real(z)
    return torch.cat([(back if interleaved else back.mT).flatten(-2), x[..., 2 * r :].double()], -1)


@pytest.mark.parametrize("interleaved", [False, True, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_rotary_embedding(interleaved, dtype):
    angles = (torch.rand(20, 4) * 6).double()
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    x = torch.randn(2, 5, 3, 12, dtype=dtype, requires_grad=True)
    size = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 0.03}[dtype]
    for offsets in (0, 7, torch.tensor([3, 15])):
        out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
        for b in range(2):
            first = int(offsets[b]) if isinstance(offsets, torch.Tensor) else offsets
            expected = turned(x[b].detach(), angles, [*range(first, first + 5)], bool(interleaved))
            torch.testing.assert_close(out[b].detach().double(), expected, rtol=0, atol=size * 4)
    cu_seqlens = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    packed = apply_rotary_emb(x[0], cos, sin, interleaved, seqlen_offsets=torch.tensor([4, 0, 1]), cu_seqlens=cu_seqlens, max_seqlen=3)
    expected = turned(x[0].detach(), angles, [4, 5, 1, 2, 3], bool(interleaved))
    torch.testing.assert_close(packed.detach().double(), expected, rtol=0, atol=size * 4)
    dout = torch.randn_like(packed)
    (dx,) = torch.autograd.grad(packed, x, dout)  # the gradient is the inverse rotation
    expected = turned(dout, -angles, [4, 5, 1, 2, 3], bool(interleaved))
    torch.testing.assert_close(dx[0].double(), expected, rtol=0, atol=size * 4)
    y = x.detach().clone()
    assert apply_rotary_emb(y, cos, sin, interleaved, inplace=True) is y
    assert torch.equal(y, apply_rotary_emb(x, cos, sin, interleaved).detach())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": (5, 3, 12)}, r"^x: shape \(5, 3, 12\); accepted is \(B, S, H, D\)"),
        ({"cu_seqlens": lambda: torch.zeros(3, dtype=torch.int32)}, r"^x: shape \(2, 5, 3, 12\); accepted is \(T, H, D\) with cu_seqlens"),
        ({"cos": (4, 8)}, r"^cos, sin: shapes \(4, 8\), \(8, 4\); accepted is \(length, R\) twice"),
        ({"cos": None}, r"^cos: NoneType; accepted is a torch\.Tensor"),
        ({"interleaved": 2, "seqlen_offsets": 1.5}, "^interleaved: int 2; accepted .*\nseqlen_offsets: float; accepted is an integer"),
        ({"seqlen_offsets": lambda: torch.zeros(2)}, "^seqlen_offsets: torch.Tensor; accepted is an integer, or"),
        ({"seqlen_offsets": 2**70}, r"^seqlen_offsets: 1180591620717411303424; accepted are integers of 64 bits$"),
        ({"x": lambda: torch.zeros(2, 5, 3, 12, dtype=torch.int32)}, r"^x: dtype torch\.int32; accepted is floating point$"),
        (
            {"x": lambda: torch.zeros(2, 5, 1, 12).expand(2, 5, 3, 12), "inplace": True},
            r"^x: strides .*; accepted is memory of its own for each number$",
        ),
        (
            {"cos": lambda: torch.ones(8, 4, dtype=torch.complex64)},
            r"^cos, sin: dtypes torch\.complex64, torch\.float32; accepted is floating point twice$",
        ),
        ({"sin": lambda: torch.ones(8, 4, dtype=torch.bool)}, r"^cos, sin: dtypes torch\.float32, torch\.bool; accepted"),
        ({"sin": lambda: torch.ones(8, 4, device="meta")}, r"^sin: on device meta; accepted is"),
        (
            {"seqlen_offsets": lambda: torch.zeros(3, dtype=torch.int32)},
            r"^seqlen_offsets: shape \(3,\); accepted is \(2,\), or an integer",
        ),
    ],
)
def test_rotary_arguments_that_do_not_fit_are_named(wrong, message):
    good = {"x": torch.zeros(2, 5, 3, 12), "cos": torch.ones(8, 4), "sin": torch.ones(8, 4)}
    with pytest.raises((TypeError, ValueError), match=message):
        apply_rotary_emb(
            **good | {name: torch.zeros(x) if isinstance(x, tuple) else x() if callable(x) else x for name, x in wrong.items()}
        )


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([0, 9], "9 at its end; accepted are up to 8, the tokens of x"),
        ([0, 5, 2], r"\[0, 5, 2\]; accepted are numbers that begin at 0 and never fall"),
        ([], r"torch\.int64 of shape \(0,\); accepted is int32 or int64 \(B \+ 1,\)"),
    ],
)
def test_rotary_sequences_in_host_memory_are_checked(ends, message):
    with torch.device("cpu"), pytest.raises(ValueError, match=f"^cu_seqlens: {message}$"):
        apply_rotary_emb(torch.zeros(8, 3, 12), torch.ones(9, 4), torch.ones(9, 4), cu_seqlens=torch.tensor(ends, dtype=torch.int64))


@pytest.mark.parametrize("length", [5, 9])
def test_rotary_tables_reach_the_tokens_and_not_the_padding(length):
    """The tables need not reach padding, nor a sequence without a token."""
    with torch.device("cpu"):
        x, ends, offsets = torch.randn(8, 3, 12), torch.tensor([0, 0, 2], dtype=torch.int32), torch.tensor([40, 3])
        angles = torch.rand(9, 4)[:length]
        out = apply_rotary_emb(x, angles.cos(), angles.sin(), seqlen_offsets=offsets, cu_seqlens=ends)
        expected = apply_rotary_emb(x[None, :2], angles.cos(), angles.sin(), seqlen_offsets=3)[0]
        assert torch.equal(out[:2], expected)
        with pytest.raises(ValueError, match="^cos, sin: length 4; accepted is 5 or more"):
            apply_rotary_emb(x, angles.cos()[:4], angles.sin()[:4], seqlen_offsets=offsets, cu_seqlens=ends)
        with pytest.raises(ValueError, match="^seqlen_offsets: a token at position -1"):
            apply_rotary_emb(x, angles.cos(), angles.sin(), seqlen_offsets=torch.tensor([-9, -1]), cu_seqlens=ends)


@pytest.mark.parametrize("length", [0, 1, 9])
def test_rotary_embedding_of_no_token(length):
    tables = [torch.rand(length, 4)] * 2
    none, x = torch.zeros(2, 0, 3, 12), torch.randn(8, 3, 12)
    assert apply_rotary_emb(none, *tables, seqlen_offsets=7).shape == none.shape
    if length == 0 and DEVICE != "cpu":
        return  # cu_seqlens in GPU memory is not read, so there may be tokens
    for ends in ([0], [0, 0, 0]):
        out = apply_rotary_emb(x, *tables, seqlen_offsets=5, cu_seqlens=torch.tensor(ends, device="cpu").to(x.device))
        assert out.shape == x.shape
        assert out.data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    ("offset", "message"), [(0, "^cos, sin: length 4; accepted is 5 or more"), (-2, "^seqlen_offsets: a token at position -2")]
)
def test_rotary_positions_in_host_memory_are_checked(offset, message):
    with torch.device("cpu"), pytest.raises(ValueError, match=message):
        apply_rotary_emb(torch.zeros(2, 5, 3, 12), torch.ones(4, 4), torch.ones(4, 4), seqlen_offsets=offset)
