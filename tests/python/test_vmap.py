"""torch.vmap over strobe.attention() and its backward: what calls one by one give, without PyTorch's warning of a slow loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import strobe
from device import ON_GPU

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.skipif(ON_GPU, reason="the rules know no device")]
SAMPLES, B, H, KV, SQ, SK, D, DV = 3, 2, 4, 2, 9, 11, 16, 8
FORWARD, BACKWARD = torch.ops.strobe.attention_forward.default, torch.ops.strobe.attention_backward.default
CU = torch.tensor([0, 4, 9], dtype=torch.int32)
MASKS = {"block_mask": strobe.BlockMask.causal(SQ, SK, 16, 16)}
USED = torch.tensor([[5, 11], [0, 7], [11, 1]], dtype=torch.int32)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape)


# Options of a call, the shapes of tensors among them, where SAMPLES stands in the place that is mapped over, and whether one call does.
CASES: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], bool]] = {
    "plain": ({"causal": True, "return_lse": True}, {}, True),
    "a bias for each sample": ({"return_lse": True}, {"bias": (SAMPLES, B, H, SQ, SK)}, True),
    "a bias for each sample, for all sequences": ({}, {"bias": (1, H, SAMPLES, SQ, SK)}, True),
    "a bias of two axes for each sample": ({}, {"bias": (SQ, SAMPLES, SK)}, True),
    "a bias for all": ({}, {"bias": (1, H, SQ, SK)}, True),
    "a bias of each sequence for all samples": ({}, {"bias": (B, 1, SQ, SK)}, True),
    "slopes": ({"alibi_slopes": torch.rand(H)}, {}, True),
    "slopes of each sequence": ({"alibi_slopes": torch.rand(B, H)}, {}, True),
    "sinks for all": ({}, {"sinks": (H,)}, True),
    "sinks for each sample": ({}, {"sinks": (H, SAMPLES)}, False),
    "blocks": (MASKS, {}, True),
    "dropout": ({"dropout": 0.3, "seed": 5}, {}, False),
    "aux": ({"aux": ("max_logit", "column_sums")}, {}, True),
}


def mapped(shape: tuple[int, ...]) -> int | None:
    return shape.index(SAMPLES) if SAMPLES in shape else None


class Operators(TorchDispatchMode):
    """Counts Strobe's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Any] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ran += [function] if function.namespace == "strobe" else []
        return function(*args, **(kwargs or {}))


def held(function: Callable[..., Any], tensors: list[Tensor], dims: tuple[int | None, ...]) -> list[Any]:
    """Holds vmap and its gradients to calls one by one. Returns Strobe's operators that vmap and the gradient ran."""
    leaves = [x.requires_grad_(x.is_floating_point()) for x in tensors]
    wanted = [x for x in leaves if x.requires_grad]
    with Operators() as operators:
        found = torch.vmap(function, in_dims=dims)(*leaves)
        found = (found,) if isinstance(found, Tensor) else tuple(found)
        differentiable = [x for x in found if x.requires_grad]
        weights = [torch.randn_like(x) for x in differentiable]
        gradients = torch.autograd.grad(differentiable, wanted, weights)
    each = []
    for n in range(SAMPLES):
        one = function(*(x if dim is None else x.select(dim, n) for x, dim in zip(leaves, dims, strict=True)))
        each.append((one,) if isinstance(one, Tensor) else tuple(one))
    expected = [torch.stack(of) for of in zip(*each, strict=True)]
    torch.testing.assert_close(list(found), expected)
    expected = [x for x in expected if x.requires_grad]
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, wanted, weights), atol=1e-5, rtol=1e-5)
    return operators.ran


@pytest.mark.parametrize("case", CASES)
def test_vmap(case):
    options, more, in_one = CASES[case]
    shapes = {"q": (SAMPLES, B, H, SQ, D), "k": (B, KV, SK, D), "v": (B, KV, SAMPLES, SK, DV)} | more
    names = [*shapes]
    ran = held(
        lambda *tensors: strobe.attention(**dict(zip(names, tensors, strict=True)), **options),
        [randn(*shape) for shape in shapes.values()],
        tuple(map(mapped, shapes.values())),
    )
    assert len(ran) == (2 if in_one else 2 * SAMPLES)


def test_masks_and_lengths_for_each_sample():
    mask = torch.rand(SK, SAMPLES) > 0.3
    mask[0] = True
    tensors = [randn(SAMPLES, B, H, SQ, D), randn(B, KV, SK, D), mask, USED]
    ran = held(lambda q, k, mask, used: strobe.attention(q, k, k, mask=mask, seqused_k=used), tensors, (0, None, 1, 0))
    assert len(ran) == 2


def test_packed_sequences_are_a_loop():
    lengths = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 5, "max_seqlen_k": 5}
    assert len(held(lambda q: strobe.attention(q, q, q, **lengths), [randn(9, H, SAMPLES, D)], (2,))) == 2 * SAMPLES


def test_bshd():
    tensors = [randn(B, SQ, H, SAMPLES, D), randn(B, SK, KV, D)]
    assert len(held(lambda q, k: strobe.attention(q, k, k, layout="bshd"), tensors, (3, None))) == 2


def test_two_levels():
    q, k = randn(5, SAMPLES, B, H, SQ, D), randn(SAMPLES, B, KV, SK, D)

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return strobe.attention(q, k, k, causal=True)

    with Operators() as operators:
        found = torch.vmap(torch.vmap(attend, in_dims=(0, None)), in_dims=(1, 0))(q, k)
    assert operators.ran == [FORWARD]
    torch.testing.assert_close(found, torch.stack([torch.stack([attend(x, k[n]) for x in q[:, n]]) for n in range(SAMPLES)]))


@pytest.mark.parametrize("shape", [(SQ, SK), (1, H, SQ, SK), (B, 1, SQ, SK)])
def test_backward(shape):
    """A gradient for each sample, also of what all samples share."""
    q, k, dout, bias = randn(SAMPLES, B, H, SQ, D), randn(B, KV, SK, D), randn(SAMPLES, B, H, SQ, D), randn(*shape)

    def gradients(q: Tensor, dout: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        out, lse = strobe.attention(q, k, k, bias=bias, return_lse=True)
        return tuple(x for x in strobe.attention_backward(dout, q, k, k, out, lse, bias=bias) if x is not None)

    with Operators() as operators:
        found = torch.vmap(gradients, in_dims=(0, 0, None))(q, dout, bias)
    assert operators.ran == [FORWARD, BACKWARD]
    for n in range(SAMPLES):
        torch.testing.assert_close([x[n] for x in found], list(gradients(q[n], dout[n], bias)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5, "seed": 1}], ids=["one call", "a call for each"])
def test_no_samples(options):
    q = randn(0, B, H, SQ, D).requires_grad_()
    out, lse = torch.vmap(lambda q: strobe.attention(q, q, q, return_lse=True, **options))(q)
    assert out.shape == (0, B, H, SQ, D)
    assert lse.shape == (0, B, H, SQ)
    if not options:  # without a call there is no graph
        assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


def test_gradients_in_a_batch():
    """torch.autograd.grad(is_grads_batched=True), for a call that comes the first time and for one that is known."""
    q, k = randn(B, H, SQ, D).requires_grad_(), randn(B, KV, SK, D).requires_grad_()
    for _ in range(3):
        out = strobe.attention(q, k, k, causal=True)
        weights = randn(SAMPLES, *out.shape)
        with Operators() as operators:
            found = torch.autograd.grad(out, (q, k), weights, retain_graph=True, is_grads_batched=True)
        assert operators.ran == [BACKWARD]
        for n in range(SAMPLES):
            torch.testing.assert_close([x[n] for x in found], [*torch.autograd.grad(out, (q, k), weights[n], retain_graph=True)])


def test_gradients_in_a_batch_from_another_thread():
    """As on a GPU, whose backward runs in a thread that does not know how deep PyTorch's older vmap is."""
    q, k = randn(B, H, SQ, D).requires_grad_(), randn(B, KV, SK, D).requires_grad_()
    out = strobe.attention(q, k, k, causal=True)
    weights = randn(SAMPLES, *out.shape)
    level = torch._C._vmapmode_increment_nesting()
    try:
        mapped = torch._add_batch_dim(weights, 0, level)
        with ThreadPoolExecutor() as threads:
            found = threads.submit(torch.autograd.grad, out, (q, k), mapped, retain_graph=True).result()
        found = tuple(torch._remove_batch_dim(x, level, SAMPLES, 0) for x in found)
    finally:
        torch._C._vmapmode_decrement_nesting()
    torch.testing.assert_close(found, torch.autograd.grad(out, (q, k), weights, is_grads_batched=True))


def test_compiled():
    torch._dynamo.reset()
    attend = torch.vmap(lambda q: strobe.attention(q, q, q, causal=True))
    q = randn(SAMPLES, B, H, SQ, D).requires_grad_()
    found, expected = torch.compile(attend, fullgraph=True, backend="aot_eager")(q), attend(q)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), q) for x in (found, expected)))


def test_what_is_refused_is_told_of_a_sample():
    with pytest.raises(ValueError, match=r"^k: shape \(5, 2, 11, 16\); accepted is"):
        torch.vmap(lambda q, k: strobe.attention(q, k, k), in_dims=(0, None))(randn(SAMPLES, B, H, SQ, D), randn(5, KV, SK, D))
    with pytest.raises(NotImplementedError, match="functions of the score and the mask under torch.func.grad, vjp, jvp, vmap"):
        torch.vmap(lambda q: strobe.attention(q, q, q, score=lambda x, b, h, i, j: x + h))(randn(SAMPLES, B, H, SQ, D))
    with pytest.raises(RuntimeError, match="random"):
        torch.vmap(lambda q: strobe.attention(q, q, q, dropout=0.5))(randn(SAMPLES, B, H, SQ, D))
