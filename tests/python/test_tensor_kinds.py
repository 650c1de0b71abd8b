"""Tensors and arrays that are more, or other, than the numbers in their memory: every function serves them or gives one clear message."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.masked import as_masked_tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing._internal.two_tensor import TwoTensor

import strobe
from strobe._call import imported_late
from strobe.compat import functional
from strobe.compat.sdpa import scaled_dot_product_attention

Q, K = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 9, 8)
LSE, I32, RNG = torch.randn(2, 3, 5), torch.zeros(1, 1, 2, dtype=torch.int32), torch.tensor([1, 2])
CU_Q, CU_K = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([0, 9], dtype=torch.int32)
Q_PACKED, K_PACKED = Q[0].transpose(0, 1), K[0].transpose(0, 1)
BOOL = torch.ones(5, 9, dtype=torch.bool)


class Tagged(Tensor):
    """A tensor that overrides functions without changing them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Deaf(Tensor):
    """A tensor that supports no operator."""

    @staticmethod
    def __new__(cls, x: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


class Plain(Tensor):
    """A subclass that overrides nothing."""


def nested(layout: torch.layout) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.nested.nested_tensor([torch.ones(2, 3, dtype=x.dtype), torch.ones(1, 3, dtype=x.dtype)], layout=layout)


pytestmark = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning", "ignore:.*(MaskedTensor|quantize_per_tensor)")

# Kinds that must not be taken for their numbers: how to make them; the words of their refusal.
TORCH: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a causal bias": (lambda x: causal_upper_left(5, 9), "CausalBias; accepted is"),
    "nested": (nested(torch.strided), "a nested tensor, layout torch.strided; accepted is a dense one; sequences of several"),
    "jagged": (nested(torch.jagged), "a nested tensor, layout torch.jagged; accepted is a dense one"),
    "COO": (lambda x: x.to_sparse(), "layout torch.sparse_coo; accepted is torch.strided, which to_dense() gives"),
    "CSR": (lambda x: torch.ones(2, 3, dtype=x.dtype).to_sparse_csr(), "layout torch.sparse_csr; accepted is torch.strided"),
    "quantised": (lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8), "dtype torch.quint8, quantized; accepted is"),
    "masked": (lambda x: as_masked_tensor(x, x == 0), "a MaskedTensor; accepted is a torch.Tensor, which to_tensor() gives"),
    "uninitialized": (lambda x: torch.nn.UninitializedParameter(), "UninitializedParameter, which has no shape yet; accepted is"),
}
NUMPY: dict[str, tuple[Callable[[Any], Any], str]] = {
    "numpy masked": (lambda x: np.ma.masked_array(x, x != 0), "MaskedArray; accepted is a numpy.ndarray, which filled() gives"),
    "matrix": (lambda x: np.matrix(np.zeros((5, 9))), "numpy.matrix; accepted is a numpy.ndarray, which np.asarray() gives"),
}

# Every place for an array: its name, the accepted values, and the call.
PLACES: dict[str, tuple[str, Tensor, Callable[..., Any]]] = {
    "q": ("q", Q, lambda x, of: strobe.attention(x, of(K), of(K))),
    "k": ("k", K, lambda x, of: strobe.attention(of(Q), x, of(K))),
    "v": ("v", K, lambda x, of: strobe.attention(of(Q), of(K), x)),
    "sinks": ("sinks", torch.zeros(3), lambda x, of: strobe.attention(of(Q), of(K), of(K), sinks=x)),
    "alibi_slopes": ("alibi_slopes", torch.zeros(3), lambda x, of: strobe.attention(of(Q), of(K), of(K), alibi_slopes=x)),
    "rng": ("rng", RNG, lambda x, of: strobe.attention(of(Q), of(K), of(K), dropout=0.5, rng=x)),
    "cu_seqlens_q": (
        "cu_seqlens_q",
        CU_Q,
        lambda x, of: strobe.attention(of(Q_PACKED), of(K_PACKED), of(K_PACKED), cu_seqlens_q=x, cu_seqlens_k=of(CU_K)),
    ),
    "dout": ("dout", Q, lambda x, of: strobe.attention_backward(x, of(Q), of(K), of(K), of(Q), of(LSE))),
    "lse": ("lse", LSE, lambda x, of: strobe.attention_backward(of(Q), of(Q), of(K), of(K), of(Q), x)),
    "reference's q": ("q", Q, lambda x, of: strobe.reference(x, of(K), of(K))),
    "reference_backward's dout": ("dout", Q, lambda x, of: strobe.reference_backward(x, of(Q), of(K), of(K))),
    "rows": ("rows", torch.tensor([1, 2]), lambda x, of: strobe.reference(of(Q), of(K), of(K), rows=x)),
    "explain's q": ("q", Q, lambda x, of: strobe.explain(x, of(K), of(K))),
    "hyperbolic_attention's q": ("q", Q, lambda x, of: strobe.hyperbolic_attention(x, of(K), of(K))),
    "distance's y": ("y", Q, lambda x, of: strobe.hyperbolic.distance(of(Q), x)),
    "lift's x": ("x", Q, lambda x, of: strobe.hyperbolic.lift(x)),
    "merge's out_a": ("out_a", Q, lambda x, of: strobe.merge(x, of(LSE), of(Q), of(LSE))),
    "merge's lse_b": ("lse_b", LSE, lambda x, of: strobe.merge(of(Q), of(LSE), of(Q), x)),
    "dropout_mask's rng": ("rng", RNG, lambda x, of: strobe.dropout_mask((1, 1, 2, 2), 0.5, rng=x)),
    "dropout_mask's like": ("like", Q, lambda x, of: strobe.dropout_mask((1, 1, 2, 2), 0.5, 1, like=x)),
    "from_dense": ("mask", BOOL, lambda x, of: strobe.BlockMask.from_dense(x, 16, 16)),
    "from_kept": ("kept", BOOL, lambda x, of: strobe.BlockMask.from_kept(x, 16, 16)),
    "BlockMask's rows": ("rows", I32, lambda x, of: strobe.BlockMask(x, of(I32[0, 0, :0]), 16, 16, 16, 16)),
    "BlockMask's cols": ("cols", I32[0, 0, :0], lambda x, of: strobe.BlockMask(of(I32), x, 16, 16, 16, 16)),
    "a pattern's like": ("like", Q, lambda x, of: strobe.BlockMask.causal(16, 16, 16, 16, like=x)),
}
OF_SCORES: dict[str, tuple[str, Tensor, Callable[..., Any]]] = {
    "mask": ("mask", BOOL, lambda x, of: strobe.attention(of(Q), of(K), of(K), mask=x)),
    "bias": ("bias", torch.randn(5, 9), lambda x, of: strobe.attention(of(Q), of(K), of(K), bias=x)),
    "reference's mask": ("mask", BOOL, lambda x, of: strobe.reference(of(Q), of(K), of(K), mask=x)),
}
OF_TORCH: dict[str, tuple[str, Tensor, Callable[..., Any]]] = {
    "FlashAttention": ("q", Q, lambda x, of: strobe.nn.FlashAttention(8)(x, K, K)),
    "sdpa's query": ("query", Q, lambda x, of: scaled_dot_product_attention(x, K, K)),
    "sdpa's value": ("value", K, lambda x, of: scaled_dot_product_attention(Q, K, x)),
    "functional's Q": ("Q", Q, lambda x, of: functional.flash_attention(x, K, K)),
    "functional's mask": ("mask", BOOL, lambda x, of: functional.flash_attention_forward(Q, K, K, x)),
    "functional's block_mask": ("block_mask", BOOL[:1, :1], lambda x, of: functional.block_sparse_flash_attention(Q, K, K, x, 16, 16)),
}


def as_numpy(x: Tensor) -> Any:
    return x.numpy()


def refused(name: str, call: Callable[[], Any]) -> str:
    """The call fails with exactly one line that begins with `name` and states the accepted values; other lines may name others. Returns the
    line."""
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    lines = [line for line in str(raised.value).splitlines() if re.match(rf"{name}: .*accepted", line)]
    assert len(lines) == 1, raised.value
    return lines[0]


@pytest.mark.parametrize("kind", TORCH)
@pytest.mark.parametrize("place", PLACES | OF_SCORES | OF_TORCH)
def test_torch(place, kind):
    name, like, call = (PLACES | OF_SCORES | OF_TORCH)[place]
    call(like, lambda x: x)
    make, words = TORCH[kind]
    if kind == "a causal bias" and place in OF_SCORES:
        call(make(like), lambda x: x)
    else:
        assert words in refused(name, lambda: call(make(like), lambda x: x))


@pytest.mark.parametrize("kind", NUMPY)
@pytest.mark.parametrize("place", PLACES | OF_SCORES)
def test_numpy(place, kind):
    name, like, call = (PLACES | OF_SCORES)[place]
    call(like.numpy(), as_numpy)
    make, words = NUMPY[kind]
    assert words in refused(name, lambda: call(make(like.numpy()), as_numpy))


@pytest.mark.parametrize("place", PLACES)
def test_meta_tensors_have_no_numbers(place):
    """Functions that only need shapes accept them: test_torch_op.py."""
    _, like, call = PLACES[place]
    if place in ("dropout_mask's like", "lift's x"):
        call(like.to("meta"), lambda x: x)
    else:
        with pytest.raises((ValueError, NotImplementedError), match=r"(?m)on device (meta|cpu); accepted"):
            call(like.to("meta"), lambda x: x)


SHORT = r"its numbers reach to byte \d+ of a storage of \d+; accepted is a storage that holds all of them"


@pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])
@pytest.mark.parametrize("left", ["nothing", "an element too few", "all"])
@pytest.mark.parametrize("place", PLACES | OF_SCORES | OF_TORCH)
def test_a_storage_that_was_shortened(place, left, view):
    """The storage is shortened as FSDP frees memory. PyTorch's own functions would read past its end."""
    name, like, call = (PLACES | OF_SCORES | OF_TORCH)[place]
    x = torch.cat([like, like])[len(like) :] if view else like.clone()
    size = x.untyped_storage().nbytes()
    x.untyped_storage().resize_({"nothing": 0, "an element too few": max(size - x.element_size(), 0), "all": size}[left])
    if left == "all" or not like.numel():
        call(x, lambda x: x)
    else:
        assert re.search(SHORT, refused(name, lambda: call(x, lambda x: x)))


def test_a_view_of_what_is_left_of_a_storage_is_served():
    whole = torch.cat([Q, Q])
    q, other = whole[:2], whole[2:]
    assert torch.equal(strobe.attention(q, K, K), strobe.attention(Q, K, K))
    whole.untyped_storage().resize_(q.numel() * q.element_size())
    assert torch.equal(strobe.attention(q, K, K), strobe.attention(Q, K, K))
    with pytest.raises(ValueError, match=f"^k: {SHORT}"):
        strobe.attention(Q, other, Q)


def test_a_storage_that_was_shortened_since_the_forward():
    """Tensors that autograd has saved are checked again; and so are an operator's arguments."""
    q, k = Q.clone().requires_grad_(), K.clone()
    out = strobe.attention(q, k, K)
    k.untyped_storage().resize_(8)
    with pytest.raises(ValueError, match=f"^k: {SHORT}"):
        out.sum().backward()
    with pytest.raises(ValueError, match=f"^k: {SHORT}"):
        torch.ops.strobe.attention_forward(Q, k, K)
    torch._dynamo.reset()
    with pytest.raises(ValueError, match=f"k: {SHORT}"):
        torch.compile(strobe.attention, backend="aot_eager")(Q, k, K)


@pytest.mark.parametrize("place", PLACES | OF_SCORES)
def test_a_view_of_an_array_that_was_resized(place):
    name, like, call = (PLACES | OF_SCORES)[place]
    if not like.numel():
        return
    whole = np.concatenate([like.numpy().ravel()] * 2)
    first, second = (x.reshape(like.shape) for x in np.split(whole, 2))
    call(first[::-1][::-1], as_numpy)
    call(second, as_numpy)
    whole.resize(like.numel(), refcheck=False)  # PyTorch refuses this, and so does NumPy with refcheck
    assert "a view of an array that resize() has moved or shortened" in refused(name, lambda: call(second, as_numpy))


def test_what_is_plain_data_is_served(tmp_path):
    """A file in memory, a parameter, a subclass that overrides nothing, and one that passes functions on."""
    expected = strobe.attention(Q, K, K)
    mapped = np.memmap(tmp_path / "q", np.float32, "w+", shape=tuple(Q.shape))
    mapped[...] = Q.numpy()
    assert np.array_equal(strobe.attention(mapped, K.numpy(), K.numpy()), expected.numpy())
    records = Q.numpy().view(np.recarray)
    assert np.array_equal(strobe.attention(records, K.numpy(), K.numpy()), expected.numpy())
    for q in (torch.nn.Parameter(Q), torch.nn.Buffer(Q) if hasattr(torch.nn, "Buffer") else Q, torch._neg_view(-Q)):
        assert torch.equal(strobe.attention(q, K, K), expected)
    for kind in (Plain, Tagged):
        for call in (strobe.attention, scaled_dot_product_attention):
            found = call(Q.as_subclass(kind), K, K)
            assert type(found) is kind
            assert torch.equal(found.as_subclass(Tensor), expected)
    zeros = torch._efficientzerotensor(tuple(Q.shape))
    assert torch.equal(strobe.attention(zeros, K, K), strobe.attention(torch.zeros_like(Q), K, K))


def test_a_kind_that_overrides_functions_is_asked():
    """The __torch_function__ of such a kind gets the function's name, as from PyTorch's own functions."""
    asked: list[Any] = []

    class Answering(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append((func, kwargs))
            return "answer"

    mine = torch.zeros(5, 9).as_subclass(Answering)
    assert strobe.attention(Q, K, K, bias=mine, causal=True) == "answer"
    assert scaled_dot_product_attention(Q, K, K, mine, scale=2.0) == "answer"
    assert [func for func, _ in asked] == [strobe.attention, scaled_dot_product_attention]
    assert asked[0][1]["bias"] is mine
    assert asked[0][1]["causal"] is True


def test_a_mask_that_may_mean_more_than_its_memory_is_refused_by_name():
    """A mask that passes the function on to Strobe may be like CausalBias, whose memory is never written."""
    for name, x in (("mask", BOOL), ("bias", torch.randn(5, 9))):
        with pytest.raises(
            TypeError, match=rf"^{name}: .*Tagged, whose memory may not hold what it means; accepted is a torch.Tensor; as_su"
        ):
            strobe.attention(Q, K, K, **{name: x.as_subclass(Tagged)})
        strobe.attention(Q, K, K, **{name: x.as_subclass(Plain)})
    with pytest.raises(TypeError, match="^attn_mask: .*Tagged"):
        scaled_dot_product_attention(Q, K, K, BOOL.as_subclass(Tagged))


def test_kinds_with_a_dispatch_of_their_own():
    """Kinds that support any operator are served; the others are named; and their memory is never read."""
    two = TwoTensor(Q, Q)
    expected = strobe.attention(Q, K, K)
    assert torch.equal(strobe.attention(two, K, K).a, expected)
    assert torch.equal(strobe.merge(two, LSE, Q, LSE)[0].a, strobe.merge(Q, LSE, Q, LSE)[0])
    out, lse = strobe.attention(Q, K, K, return_lse=True)
    found = strobe.attention_backward(TwoTensor(out, out), Q, K, K, out, lse)
    assert torch.equal(found.dq.a, strobe.attention_backward(out, Q, K, K, out, lse).dq)
    for call in (strobe.reference, strobe.explain):
        with pytest.raises(TypeError, match=r"^q: .*TwoTensor; accepted is a torch.Tensor that holds its values itself"):
            call(two, K, K)
    with pytest.raises(TypeError, match=r"^kept: .*TwoTensor; accepted is a torch.Tensor that holds"):
        strobe.BlockMask.from_kept(TwoTensor(BOOL, BOOL), 16, 16)
    with pytest.raises(ValueError, match=r"^softcap: -1") as wrong:
        strobe.attention(two, K, K, softcap=-1.0)
    assert "null" not in str(wrong.value)
    deaf = Deaf(Q)
    with pytest.raises(TypeError, match=r"^q: .*Deaf, whose __torch_dispatch__ takes no torch.ops.strobe; accepted is a torch.Tensor$"):
        strobe.attention(deaf, K, K)
    with pytest.raises(TypeError, match=r"^dout: .*Deaf, whose __torch_dispatch__ takes no"):
        strobe.attention_backward(deaf, Q, K, K, out, lse)


def test_another_class_of_that_name_is_no_distributed_tensor():
    from torch.distributed.tensor import DTensor as Distributed

    class DTensor(Tensor):
        pass

    assert imported_late(Distributed) is not None
    assert imported_late(DTensor) is None
    mine = Q.as_subclass(DTensor)
    assert torch.equal(strobe.attention(mine, K, K), strobe.attention(Q, K, K))


def test_a_distributed_tensor_is_refused_by_name():
    from torch import distributed as dist
    from torch.distributed import tensor

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = tensor.init_device_mesh("cpu", (1,))
        q = tensor.distribute_tensor(Q, mesh, [tensor.Replicate()])
        for call in (strobe.reference, strobe.explain):  # strobe.attention takes some: test_parallel.py
            with pytest.raises(TypeError, match="^q: a DTensor; accepted is a torch.Tensor, which to_local"):
                call(q, K, K)
        with pytest.raises(TypeError, match="^attn_mask: a DTensor"):
            scaled_dot_product_attention(Q, K, K, tensor.distribute_tensor(BOOL, mesh, [tensor.Replicate()]))
        with pytest.raises(TypeError, match="^lse_b: a DTensor"):
            strobe.merge(Q, LSE, Q, q)
    finally:
        dist.destroy_process_group()


# PyTorch's causal biases


@pytest.mark.parametrize(("sq", "sk"), [(5, 9), (9, 5), (7, 7)])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_a_causal_bias_is_causal_and_an_alignment(make, sq, sk):
    q, k, v = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (sq, sk, sk))
    alignment = "top_left" if make is causal_upper_left else "bottom_right"
    dout = torch.randn(2, 3, sq, 8)
    expected = strobe.attention(q, k, v, causal=True, alignment=alignment)
    gradients = torch.autograd.grad(expected, (q, k, v), dout)
    seen = make(sq, sk)._materialize()
    formula = F.scaled_dot_product_attention(q, k, v, seen.masked_fill(~seen.any(-1, keepdim=True), True))
    torch.testing.assert_close(expected[:, :, seen.any(-1)], formula[:, :, seen.any(-1)], atol=2e-6, rtol=0)
    for call in (
        lambda: strobe.attention(q, k, v, bias=make(sq, sk)),
        lambda: strobe.attention(q, k, v, mask=make(sq, sk)),
        lambda: scaled_dot_product_attention(q, k, v, make(sq, sk)),
        lambda: scaled_dot_product_attention(q[0, 0], k[0, 0], v[0, 0], make(sq, sk)),
        lambda: strobe.attention(*(x.transpose(1, 2) for x in (q, k, v)), bias=make(sq, sk), layout="bshd").transpose(1, 2),
    ):
        found = call()
        assert type(found) is Tensor
        if found.dim() == 2:
            torch.testing.assert_close(found, expected[0, 0])
            continue
        assert torch.equal(found, expected)
        for x, y in zip(torch.autograd.grad(found, (q, k, v), dout), gradients, strict=True):
            assert torch.equal(x, y)
    assert torch.equal(strobe.reference(q, k, v, bias=make(sq, sk))[0], strobe.reference(q, k, v, causal=True, alignment=alignment)[0])
    assert strobe.explain(q, k, v, bias=make(sq, sk)) == strobe.explain(q, k, v, causal=True, alignment=alignment)


@pytest.mark.parametrize(
    ("bias", "options", "words"),
    [
        (causal_upper_left(5, 8), {}, "a causal bias of 5 x 8, top_left; accepted is one of 5 x 9, as q and k have"),
        (causal_lower_right(4, 9), {}, "a causal bias of 4 x 9, bottom_right; accepted is one of 5 x 9"),
        (causal_upper_left(5, 9), {"window": (2, 0)}, "of 5 x 9, top_left, beside causal, window or alibi_slopes, bottom_right"),
        (
            causal_lower_right(5, 9),
            {"causal": True, "alignment": "top_left"},
            "bottom_right, beside causal, window or alibi_slopes, top_left",
        ),
    ],
)
def test_a_causal_bias_of_another_call_is_refused(bias, options, words):
    for name in ("mask", "bias"):
        assert words in refused(name, lambda name=name: strobe.attention(Q, K, K, **{name: bias}, **options))


def test_a_causal_bias_beside_others():
    both = strobe.attention(Q, K, K, causal=True, window=(2, 0), alignment="top_left")
    assert torch.equal(strobe.attention(Q, K, K, bias=causal_upper_left(5, 9), window=(2, 0), alignment="top_left"), both)
    alone = scaled_dot_product_attention(Q, K, K, is_causal=True)
    assert torch.equal(scaled_dot_product_attention(Q, K, K, causal_upper_left(5, 9), is_causal=True), alone)
    packed = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "bias": causal_upper_left(5, 9)}
    assert "with cu_seqlens; accepted is causal=True" in refused("bias", lambda: strobe.attention(Q_PACKED, K_PACKED, K_PACKED, **packed))
    x = strobe.hyperbolic.lift(torch.randn(1, 2, 6, 3))
    for aggregate in ("centroid", "midpoint"):
        found = strobe.hyperbolic_attention(x, x, x, bias=causal_upper_left(6, 6), aggregate=aggregate)
        assert torch.equal(found, strobe.hyperbolic_attention(x, x, x, causal=True, aggregate=aggregate))


# any kind, anywhere

KINDS: dict[str, Callable[[Tensor], Any]] = {
    **{name: make for name, (make, _) in TORCH.items()},
    **{name: (lambda x, make=make: make(x.numpy())) for name, (make, _) in NUMPY.items()},
    "meta": lambda x: x.to("meta"),
    "tagged": lambda x: x.as_subclass(Tagged),
    "two": lambda x: TwoTensor(x, x),
    "complex": lambda x: x.to(torch.complex64),
    "mkldnn": lambda x: x.float().to_mkldnn(),
    "numpy": lambda x: x.numpy(),
    "object": lambda x: x.numpy().astype(object),
    "text": lambda x: x.numpy().astype(str),
    "records": lambda x: np.zeros(x.shape, [("a", np.float32)]),
    "a list": lambda x: x.tolist(),
    "None": lambda x: None,
    "a number": lambda x: 1.5,
    "empty": lambda x: x[..., :0],
    "a scalar": lambda x: x.flatten()[0] if x.numel() else x.sum(),
    "wide": lambda x: x[(None,) * 5],
    "good": lambda x: x,
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_random_kinds_in_random_places():
    """Any kind at any place: a result, or an exception of a documented kind in lines that each begin with a name."""
    random.seed(7)
    places = PLACES | OF_SCORES | OF_TORCH
    told: list[tuple[str, str, str]] = []
    for _ in range(800):
        place, kind = random.choice([*places]), random.choice([*KINDS])
        _, like, call = places[place]
        try:
            call(KINDS[kind](like), lambda x: x)
        except (TypeError, ValueError, NotImplementedError) as refusal:
            told.append((place, kind, str(refusal)))
    assert not [each for each in told if not all(re.match(r"[\w, ]+: .*accepted", line) for line in each[2].splitlines())]
    assert len(told) > 300


class Longer(Tensor):
    """Reports more elements than its memory has."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size((2, 3, 500, 8))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_lies_about_its_memory_is_refused(name):
    arrays = {"q": Q, "k": K, "v": K} | {name: (Q if name == "q" else K).as_subclass(Longer)}
    with pytest.raises(TypeError, match=f"^{name}: .*Longer, which has a shape of its own; accepted is a torch.Tensor"):
        strobe.attention(**arrays)
