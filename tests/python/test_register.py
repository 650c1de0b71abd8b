"""strobe.register(): which of PyTorch's functions run on Strobe, by count, with results beside PyTorch's math in float64; which calls
PyTorch keeps; and that PyTorch is afterwards as it was."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out
from torch.nn.functional import scaled_dot_product_attention as imported_before
from torch.utils.checkpoint import checkpoint

import strobe
from device import DEVICE
from strobe import _function, _registration
from strobe._registration import SDPA, VARLEN, VARLEN_OUT
from strobe.compat.varlen import varlen_attn as compat_varlen

OPERATORS = ("aten::scaled_dot_product_attention", "torch_attn::_varlen_attn", "torch_attn::_varlen_attn_out")


def dispatch_tables() -> list[str]:
    return [dump(name) for name in OPERATORS for dump in (torch._C._dispatch_dump, torch._C._dispatch_dump_table)]


def state() -> list[Any]:
    """All that a registration may change."""
    from torch.nested._internal import ops
    from torch.nn.attention.bias import CausalBias
    from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

    attributes = [ops.jagged_scaled_dot_product_attention, CausalBias._dispatch, _CheckpointFrame.__init__]
    attributes += [CheckpointFunction.forward, CheckpointFunction.backward]
    switches = [torch.backends.mha.get_fastpath_enabled(), torch.compiler.config.cache_key_tag, torch._C._get_sdp_priority_order()]
    return [*dispatch_tables(), *attributes, *switches, torch.nn.attention.current_flash_attention_impl()]


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    found = state()
    yield
    strobe.unregister()
    assert state() == found


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    return [torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=grad) for shape in shapes]


def qkv(*front: int, sq: int = 9, sk: int = 9, d: int = 16, **options: Any) -> list[Tensor]:
    return tensors((*front, sq, d), (*front, sk, d), (*front, sk, d), **options)


def runs(made: strobe._registration.Registration, name: str = SDPA) -> tuple[int, int]:
    return made.calls[name]["strobe"], made.calls[name]["pytorch"]


# Results

SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {  # query, key, value, a mask
    "four axes": ((2, 4, 9, 16), (2, 4, 11, 16), (2, 4, 11, 16), (2, 1, 9, 11)),
    "grouped heads, Dv": ((2, 6, 9, 16), (2, 2, 11, 16), (2, 2, 11, 8), (11,)),
    "three axes": ((3, 9, 16), (3, 11, 16), (3, 11, 8), (3, 9, 11)),
    "two axes": ((9, 16), (11, 16), (11, 16), (9, 11)),
    "a batch of one key": ((3, 4, 9, 16), (1, 4, 11, 16), (1, 4, 11, 16), (4, 1, 11)),
}
MASKS = ("none", "bool", "float", "tracked")
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def strided(x: Tensor, layout: str) -> Tensor:
    """x in other memory: each row beside rows of other tensors, or its last two axes exchanged."""
    if layout == "sparse":
        return torch.zeros(*x.shape[:-1], 5 * x.shape[-1], dtype=x.dtype, device=x.device)[..., : x.shape[-1]].copy_(x)
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if layout == "exchanged" else x


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_results_are_those_of_pytorchs_math(shapes, dtype):
    query, key, value, mask_shape = SHAPES[shapes]
    gqa = len(query) > 2 and query[-3] > key[-3]
    for n, (kind, causal, scale, layout) in enumerate(product(MASKS, (False, True), (None, 0.3), ("plain", "sparse", "exchanged"))):
        if kind != "none" and causal:
            continue  # PyTorch's math refuses it
        given = [strided(x, layout).requires_grad_(bool(n >> place & 1)) for place, x in enumerate(tensors(query, key, value, dtype=dtype))]
        mask = None if kind == "none" else torch.randn(mask_shape, device=DEVICE, dtype=dtype)
        if kind == "bool":
            mask = mask > 0
        if kind in ("bool", "float") and mask.dim() > 1:
            mask[..., -1, :] = False if kind == "bool" else -torch.inf  # the last query sees no key
        options = {"is_causal": causal, "scale": scale, "enable_gqa": gqa}
        wide = [x.detach().double().requires_grad_(x.requires_grad) for x in given]
        wide_mask = mask if kind in ("none", "bool") else mask.double()
        if kind == "tracked":
            given, wide = [*given, mask.requires_grad_()], [*wide, wide_mask.detach().requires_grad_()]
            wide_mask = wide[-1]
        with strobe.register(strict=True) as made:
            ours = F.scaled_dot_product_attention(*given[:3], mask, **options)
        with sdpa_kernel(SDPBackend.MATH):
            theirs = F.scaled_dot_product_attention(*wide[:3], wide_mask, **options)
        assert runs(made) == (1, 0)
        assert (ours.shape, ours.dtype, ours.requires_grad) == (theirs.shape, dtype, theirs.requires_grad)
        torch.testing.assert_close(ours.double(), theirs, rtol=LIMITS[dtype], atol=LIMITS[dtype])
        if not ours.requires_grad:
            continue
        dout = torch.randn_like(ours)
        ours.backward(dout)  # outside of the registration
        theirs.backward(dout.double())
        for got, want in zip(given, wide, strict=True):
            assert (got.grad is None) == (want.grad is None)
            if got.grad is not None:
                torch.testing.assert_close(got.grad.double(), want.grad, rtol=LIMITS[dtype], atol=4 * LIMITS[dtype])


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 2, 0, 8)])
def test_empty_tensors(shape):
    given = tensors(shape, shape, shape, grad=True)
    expected = F.scaled_dot_product_attention(*given)
    with strobe.register(strict=True) as made:
        out = F.scaled_dot_product_attention(*given)
        out.sum().backward()
    assert (out.shape, runs(made)) == (expected.shape, (1, 0))


def test_queries_without_keys_are_zeros():
    query, key, value = tensors((1, 2, 3, 8), (1, 2, 0, 8), (1, 2, 0, 8))
    expected = F.scaled_dot_product_attention(query, key, value)
    with strobe.register() as made:
        out = F.scaled_dot_product_attention(query, key, value)
    assert runs(made) == (1, 0)
    assert torch.equal(out, expected)


def test_autocast_casts_as_pytorchs():
    given = qkv(2, 2, grad=True)
    with strobe.register(strict=True) as made, torch.autocast(DEVICE, torch.bfloat16):
        out = F.scaled_dot_product_attention(*given)
        packed = varlen_attn(*(x[0].transpose(0, 1) for x in given), *2 * [torch.tensor([0, 9], dtype=torch.int32, device=DEVICE)], 9, 9)
    out.sum().backward()
    assert (out.dtype, given[0].grad.dtype) == (torch.bfloat16, torch.float32)
    assert packed.dtype == torch.bfloat16
    assert (runs(made), runs(made, VARLEN)) == ((1, 0), (1, 0))


def test_inference_mode():
    with torch.inference_mode(), strobe.register(strict=True) as made:
        given = qkv(2, 2)
        out = F.scaled_dot_product_attention(*given)
    assert runs(made) == (1, 0)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*given))


# Functions that call it


def test_varlen():
    cu_seq = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)
    query, key, value = tensors((12, 8, 16), (12, 2, 16), (12, 2, 16), grad=True)
    options = {"window_size": (-1, 0), "enable_gqa": True}
    with strobe.register(strict=True) as made:
        out, lse = varlen_attn(query, key, value, cu_seq, cu_seq, 7, 7, return_aux=AuxRequest(lse=True), **options)
        with torch.no_grad():
            into = torch.empty_like(out)
            assert varlen_attn_out(into, query, key, value, cu_seq, cu_seq, 7, 7, **options) is into
            window = varlen_attn(query, key, value, cu_seq, cu_seq, 7, 7, window_size=(2, 1), enable_gqa=True)
    out.sum().backward()
    assert (runs(made, VARLEN), runs(made, VARLEN_OUT)) == ((2, 0), (1, 0))
    assert torch.equal(into, out)
    assert lse.shape == (8, 12)
    for begin, end in ((0, 5), (5, 12)):
        one = [x[begin:end].transpose(0, 1)[None] for x in (query, key, value)]
        expected = F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(out[begin:end], expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
        i, j = (torch.arange(end - begin, device=DEVICE).view(shape) for shape in ((-1, 1), (1, -1)))
        expected = F.scaled_dot_product_attention(*one, (j >= i - 2) & (j <= i + 1), enable_gqa=True)
        torch.testing.assert_close(window[begin:end], expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


class Named:
    """Stands for an operator of another version of PyTorch."""

    def __init__(self, *names: str, returns: int = 3) -> None:
        self.default = self
        self._schema = SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in names], returns=[None] * returns)


OF_ALL = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal", "scale", "window_size")
IN_2_12 = ("k_cache", "v_cache", "cache_seqlens", "cache_batch_idx", "page_table", "seqused_k")


@pytest.mark.parametrize("version", ["2.11", "2.12"])
def test_varlen_of_other_versions(monkeypatch, version):
    """The operators of PyTorch 2.11 lack arguments, those of 2.12 have others, in another order."""
    names = OF_ALL if version == "2.11" else (*OF_ALL, *IN_2_12)
    cu_seq = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)
    used = torch.tensor([4, 7], dtype=torch.int32, device=DEVICE)
    query, key, value = tensors((12, 2, 16), (12, 2, 16), (12, 2, 16))
    common = (query, key, value, cu_seq, cu_seq, 7, 7, False, 0.3, [2, 1])
    monkeypatch.setattr(
        torch.ops, "torch_attn", SimpleNamespace(_varlen_attn=Named(*names), _varlen_attn_out=Named("out", *names, returns=2))
    )
    out, lse, _ = _registration._varlen(*common)
    alone = compat_varlen(query, key, value, cu_seq, cu_seq, 7, 7, scale=0.3, window_size=(2, 1))
    assert torch.equal(out, alone)
    found = _registration._varlen_out(torch.empty_like(out), *common)
    assert torch.equal(found[0], lse)
    assert len(found) == 2
    if version == "2.12":
        assert torch.equal(
            _registration._varlen(*common, None, None, None, None, None, used)[0],
            compat_varlen(query, key, value, cu_seq, cu_seq, 7, 7, scale=0.3, window_size=(2, 1), seqused_k=used),
        )
        with pytest.raises(ValueError, match="^k_cache: given; accepted is None"):
            _registration._varlen(*common, key)


def packed_pages() -> tuple[tuple[Any, ...], dict[str, Any]]:
    query, pool = torch.randn(2, 4, 16, device=DEVICE), torch.randn(3, 16, 4, 16, device=DEVICE)
    cu_seq, used, table = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 1, 2], [20, 7], [[0, 2], [1, 0]]))
    return (query, pool, pool, cu_seq, None, 1, 32), {"seqused_k": used, "block_table": table, "num_splits": 1}


def test_varlen_in_pages():
    given, options = packed_pages()
    with strobe.register(strict=True) as made:
        out = varlen_attn(*given, **options)
    assert runs(made, VARLEN) == (1, 0)
    query, pool, *_ = given
    keys = torch.cat([pool[0], pool[2]])[:20].transpose(0, 1)[None]
    expected = F.scaled_dot_product_attention(query[:1].transpose(0, 1)[None], keys, keys)
    torch.testing.assert_close(out[:1], expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32])
def test_multihead_attention(mask, training):
    """In inference it has a native path of its own on a CPU, which must not take the call."""
    layer = nn.MultiheadAttention(16, 4, batch_first=True, device=DEVICE).train(training)
    x = torch.randn(3, 5, 16, device=DEVICE)
    options: dict[str, Any] = {"need_weights": False}
    if mask is not None:
        options["key_padding_mask"] = torch.tensor([[False] * n + [True] * (5 - n) for n in (5, 3, 4)], device=DEVICE)
        options["attn_mask"] = torch.ones(5, 5, dtype=torch.bool, device=DEVICE).triu(1)
        if mask != torch.bool:
            options = {name: m.to(mask).masked_fill(m, -torch.inf) if isinstance(m, Tensor) else m for name, m in options.items()}
    with nullcontext() if training else torch.no_grad():
        expected = layer(x, x, x, **options)[0]
        with strobe.register(strict=True) as made:
            out = layer(x, x, x, **options)[0]
    assert runs(made) == (1, 0)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_transformer_encoder(training):
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1 if training else 0.0, batch_first=True, device=DEVICE)
    encoder = nn.TransformerEncoder(layer, 2).train(training)
    x = torch.randn(2, 5, 16, device=DEVICE)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2], device=DEVICE)
    with nullcontext() if training else torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        with strobe.register(strict=True) as made:
            out = encoder(x, src_key_padding_mask=padding)
    assert runs(made) == (2, 0)
    if not training:  # dropout masks are Strobe's own; PyTorch's native path leaves out the padding
        torch.testing.assert_close(out[~padding], expected[~padding], atol=1e-5, rtol=1e-5)
        with strobe.register() as made, torch.no_grad():
            layer(x)
        assert runs(made) == (1, 0)


def test_functions_that_were_imported_before_and_scripts():
    given = qkv(2, 2)
    scripted = torch.jit.script(Attends())
    with strobe.register(strict=True) as made:
        imported_before(*given)
        torch._C._nn.scaled_dot_product_attention(*given)
        torch.ops.aten.scaled_dot_product_attention(*given)
        scripted(*given)
    assert runs(made) == (4, 0)


@pytest.mark.parametrize("lengths", [(3, 5), (4, 4)])
def test_nested_tensors(lengths):
    def nested(generator: int) -> Any:
        torch.manual_seed(generator)
        parts = [torch.randn(n, 2, 8, device=DEVICE) for n in lengths]
        return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)

    found = []
    for registered in (False, True):
        leaves = [nested(0)]
        leaves += [
            torch.nested.nested_tensor_from_jagged(x.values(), leaves[0].offsets()).detach().requires_grad_() for x in map(nested, (1, 2))
        ]
        with strobe.register(strict=True) if registered else nullcontext() as made:
            out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), is_causal=False)
        out.values().sum().backward()
        found.append([out.values(), *(x.grad.values() for x in leaves)])
        assert (out.shape[0], out.shape[1], out.shape[3]) == (2, 2, 8)
    assert runs(made) == (1, 0)
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_causal_nested_tensors_are_causal_by_sequence():
    parts = tensors(*((n, 2, 8) for n in (3, 5)))
    x: Any = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    with strobe.register(strict=True) as made:
        out: Any = F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.5)
    assert runs(made) == (1, 0)
    for got, part in zip(out.transpose(1, 2).unbind(), parts, strict=True):
        one = part.transpose(0, 1)
        torch.testing.assert_close(got, F.scaled_dot_product_attention(one, one, one, is_causal=True, scale=0.5).transpose(0, 1))


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
def test_causal_biases(bias):
    query, key, value = qkv(2, 2, sq=5, sk=9)
    expected = F.scaled_dot_product_attention(query, key, value, bias(5, 9))
    with strobe.register(strict=True) as made:
        out = F.scaled_dot_product_attention(query, key, value, bias(5, 9))
    assert runs(made) == (1, 0)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


# What PyTorch keeps


def forward_mode() -> Tensor:
    query, key, value = qkv(2, 2)
    with torch.autograd.forward_ad.dual_level(), sdpa_kernel([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]):
        return F.scaled_dot_product_attention(torch.autograd.forward_ad.make_dual(query, query), key, value)


def strided_nested() -> Tensor:
    x = torch.nested.nested_tensor([torch.randn(n, 2, 8, device=DEVICE) for n in (3, 5)]).transpose(1, 2).contiguous()
    return F.scaled_dot_product_attention(x, x, x).values()


class Own(Tensor):
    """A subclass that Strobe cannot read, and PyTorch can."""

    @property
    def shape(self) -> Any:
        return Tensor.size(self)


KEPT: dict[str, tuple[Callable[[], Tensor], str]] = {
    "head dimension": (lambda: F.scaled_dot_product_attention(*qkv(2, 2, d=600)), "query: head dimension 600"),
    "three axes": (lambda: F.scaled_dot_product_attention(*qkv(2, d=600)), "query: head dimension 600"),
    "no heads": (lambda: F.scaled_dot_product_attention(*qkv(2, 0)), "query: 0 heads"),
    "all dropped": (lambda: F.scaled_dot_product_attention(*qkv(2, 2), dropout_p=1.0), "dropout_p: "),
    "vmap": (lambda: torch.vmap(F.scaled_dot_product_attention)(*qkv(2, 2)), "torch.vmap"),
    "func.grad": (
        lambda: torch.func.grad(lambda q: F.scaled_dot_product_attention(q, q, q).sum())(qkv(2, 2)[0]),
        "torch.vmap and torch.func",
    ),
    "forward mode": (forward_mode, "forward-mode"),
    "strided nested tensors": (strided_nested, "nested"),
    "a subclass": (lambda: F.scaled_dot_product_attention(*(x.as_subclass(Own) for x in qkv(2, 2))).as_subclass(Tensor), "Own"),
}


@pytest.mark.parametrize("case", KEPT)
def test_pytorch_runs_what_strobe_does_not_take_and_says_so_once(case):
    call, reason = KEPT[case]
    torch.manual_seed(0)
    expected = call()
    with strobe.register() as made:
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match="runs on PyTorch's implementation, because Strobe does not take the call") as said:
            found = [call()]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found.append(call())
    assert reason in str(said[0].message)
    assert len([x for x in said if "Strobe" in str(x.message)]) == 1
    assert runs(made) == (0, 2)
    assert [*made.reasons.values()] == [2]
    torch.testing.assert_close(found[0], expected, equal_nan=True)
    with strobe.register(strict=True), pytest.raises(NotImplementedError, match="scaled_dot_product_attention on Strobe: .*strict=False"):
        call()


def test_reasons_that_differ_in_numbers_are_one():
    with strobe.register() as made, warnings.catch_warnings(record=True) as said:
        for d in (600, 601, 602):
            F.scaled_dot_product_attention(*qkv(1, 1, d=d))
    assert (runs(made), len(said), [*made.reasons.values()]) == ((0, 3), 1, [3])


REFUSED: dict[str, Callable[[], Any]] = {
    "grouped heads unasked": lambda: F.scaled_dot_product_attention(*tensors((1, 8, 3, 16), (1, 2, 3, 16), (1, 2, 3, 16))),
    "heads that do not divide": lambda: F.scaled_dot_product_attention(
        *tensors((1, 8, 3, 16), (1, 3, 3, 16), (1, 3, 3, 16)), enable_gqa=True
    ),
    "one head of queries": lambda: F.scaled_dot_product_attention(*tensors((1, 1, 3, 16), (1, 3, 3, 16), (1, 3, 3, 16)), enable_gqa=True),
    "one head of queries and of keys": lambda: F.scaled_dot_product_attention(
        *tensors((1, 3, 16), (1, 3, 16), (2, 3, 16)), enable_gqa=True
    ),
    "dtypes": lambda: F.scaled_dot_product_attention(*qkv(1, 1)[:2], *qkv(1, 1, dtype=torch.float64)[:1]),
    "mask's dtype": lambda: F.scaled_dot_product_attention(*qkv(1, 1), torch.ones(9, 9, dtype=torch.int32, device=DEVICE)),
    "mask's shape": lambda: F.scaled_dot_product_attention(*qkv(1, 1), torch.ones(9, 8, dtype=torch.bool, device=DEVICE)),
    "head dimensions": lambda: F.scaled_dot_product_attention(*tensors((1, 1, 3, 16), (1, 1, 3, 8), (1, 1, 3, 8))),
    "a mask beside causal": lambda: F.scaled_dot_product_attention(*qkv(1, 1), causal_lower_right(9, 9), is_causal=True),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("error")
def test_what_pytorch_refuses_stays_refused_in_its_words(case):
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        REFUSED[case]()
    with strobe.register() as made, pytest.raises(type(theirs.value)) as ours:
        REFUSED[case]()
    assert str(ours.value) == str(theirs.value)
    assert (runs(made), made.reasons) == ((0, 0), {})


def test_a_chosen_backend_is_kept_and_is_no_error():
    given = qkv(2, 2)
    packed, options = packed_pages()
    with strobe.register(strict=True) as made:
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(*given)
            varlen_attn(*packed, **options)  # PyTorch's has no backends
        assert runs(made, VARLEN) == (1, 0)
        assert runs(made) == (0, 1)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            F.scaled_dot_product_attention(*given)
    assert runs(made) == (1, 1)
    assert "math" in next(iter(made.reasons))


def test_meta_tensors_have_pytorchs_shapes():
    with strobe.register(strict=True):
        out = F.scaled_dot_product_attention(*(x.to("meta") for x in tensors((2, 4, 9, 16), (2, 4, 7, 16), (2, 4, 7, 8))))
    assert (out.shape, out.device.type) == ((2, 4, 9, 8), "meta")


# Gradients


def loss(given: list[Tensor], **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(*given, **options).square().sum()


def names_in_graph(x: Tensor) -> set[str]:
    found, left = set(), [x.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            found.add(type(node).__name__)
            left += [each for each, _ in node.next_functions]
    return found


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("registered", [True, False])
def test_a_backward_runs_where_its_forward_ran(registered, dropout_p):
    given = qkv(2, 2, grad=True)

    def gradients(changed: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        if registered:
            strobe.register(strict=True)
        found = loss(given, dropout_p=dropout_p)
        assert ("_AttentionBackward" in names_in_graph(found)) == registered
        if changed:
            strobe.unregister() if registered else strobe.register(strict=True)
        found = torch.autograd.grad(found, given)
        strobe.unregister()
        return found

    for got, want in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("registered", [True, False])
def test_a_checkpoint_repeats_its_forward_where_it_ran(registered, dropout_p, reentrant):
    given = qkv(2, 2, grad=True)

    def layers(*given: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(*given, dropout_p=dropout_p).sin()
        return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout_p).square().sum()

    def gradients(changed: bool, run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        for x in given:
            x.grad = None
        made = strobe.register(strict=True) if registered else None
        found = run(*given)
        assert made is None or runs(made) == (2, 0)
        if changed:
            strobe.unregister() if registered else strobe.register(strict=True)
        found.backward()
        made = strobe.registered() if changed else None
        assert made is None or runs(made)[0] == 0
        strobe.unregister()
        return tuple(x.grad for x in given)

    def checkpointed(*given: Tensor) -> Tensor:
        return checkpoint(layers, *given, use_reentrant=reentrant)

    expected = gradients(False, layers)
    for changed in (False, True):
        for got, want in zip(gradients(changed, checkpointed), expected, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_dropout_is_seeded_by_pytorchs_generator():
    given = qkv(2, 2)
    with strobe.register(strict=True):
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(F.scaled_dot_product_attention(*given, dropout_p=0.5))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


# Compilers


class Attends(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def graphs(function: Callable[..., Tensor], *given: Tensor, **options: Any) -> tuple[Tensor, list[str]]:
    """The result of a compiled call, and the operators of its graphs."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    found: list[str] = []

    def keep(graph: Any, _: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    return torch.compile(function, backend=backend, fullgraph=True, **options)(*given), found


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_compiled_graphs_hold_strobes_operators(mode, dynamic):
    given = qkv(2, 2, grad=mode is torch.enable_grad)
    with mode():
        expected = Attends()(*given)
        with strobe.register(strict=True):
            out, operators = graphs(Attends(), *given, dynamic=dynamic)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    if out.requires_grad:
        out.sum().backward()
        assert "strobe.attention_backward.default" in operators
    assert "strobe.attention_forward.default" in operators
    assert not [x for x in operators if "scaled_dot_product" in x]


def test_compiled_varlen_holds_strobes_operators():
    cu_seq = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)
    with strobe.register(strict=True):
        _, operators = graphs(
            lambda x: varlen_attn(x, x, x, cu_seq, cu_seq, 7, 7), torch.randn(12, 2, 16, device=DEVICE, requires_grad=True)
        )
    assert "strobe.attention_forward.default" in operators


def test_what_was_compiled_before_does_not_decide_what_is_compiled():
    given = qkv(2, 2)
    for registered in (False, True, False, True):
        torch._dynamo.reset()
        with strobe.register(strict=True) if registered else nullcontext():
            compiled = torch.compile(Attends(), fullgraph=True, backend="aot_eager")
            compiled(*given)
        with torch.autograd.profiler.profile() as profile:
            compiled(*given)
        assert any(each.name == "strobe::attention_forward" for each in profile.function_events) == registered


def test_inductors_cache_tells_what_was_registered():
    """What was compiled in a registration is not found outside of one, nor the other way round."""
    from torch._inductor.utils import fresh_inductor_cache

    given = qkv(2, 2)
    expected = Attends()(*given)
    with fresh_inductor_cache():
        for registered in (False, True, False):
            torch._dynamo.reset()
            with strobe.register(strict=True) if registered else nullcontext():
                compiled = torch.compile(Attends(), fullgraph=True)
                compiled(*given)
            with torch.autograd.profiler.profile() as profile:
                out = compiled(*given)
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
            assert any(each.name == "strobe::attention_forward" for each in profile.function_events) == registered


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_keep_pytorchs_operator(strict):
    given = tuple(qkv(2, 2))
    with strobe.register(strict=True):
        program = torch.export.export(Attends(), given, strict=strict)
        operators = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert operators == ["aten.scaled_dot_product_attention.default"]
    with strobe.register(strict=True) as made:
        program.module()(*given)
    assert runs(made) == (1, 0)


def test_dispatch_modes_see_strobes_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with strobe.register(strict=True), Seeing():
        F.scaled_dot_product_attention(*qkv(2, 2))
    assert "strobe.attention_forward.default" in seen


# The registration itself


def test_nothing_is_registered_by_the_import():
    assert strobe.registered() is None
    assert "AutogradCPU: registered" not in torch._C._dispatch_dump(OPERATORS[0])
    assert {"register", "registered", "unregister"} <= {*dir(strobe)}


def test_registrations_are_nested():
    given = qkv(1, 1)
    outer = strobe.register()
    with strobe.register(strict=True) as inner:
        assert strobe.registered() is inner
        F.scaled_dot_product_attention(*given)
        with outer, outer:
            assert strobe.registered() is inner
        assert strobe.registered() is inner
    assert strobe.registered() is None  # outer was entered, and ended
    F.scaled_dot_product_attention(*given)
    assert (runs(outer), runs(inner)) == ((1, 0), (1, 0))
    with outer:  # again
        F.scaled_dot_product_attention(*given)
    assert runs(outer) == (2, 0)
    assert strobe.registered() is None
    assert "ended" in repr(outer)


def test_registrations_may_overlap():
    """As those of two threads do."""
    first, second = strobe.register().__enter__(), strobe.register().__enter__()
    first.__exit__()
    assert strobe.registered() is second
    F.scaled_dot_product_attention(*qkv(1, 1))
    second.__exit__()
    assert strobe.registered() is None
    assert (runs(first), runs(second)) == ((0, 0), (1, 0))


def test_unregister_ends_all_of_them():
    with strobe.register() as made:
        strobe.register()
        strobe.register()
        assert "in force" in repr(made)
        strobe.unregister()
        assert strobe.registered() is None
        F.scaled_dot_product_attention(*qkv(1, 1))
        strobe.unregister()
    assert runs(made) == (0, 0)


def test_an_error_leaves_pytorch_as_it_was(monkeypatch):
    found = state()
    with pytest.raises(ZeroDivisionError), strobe.register():
        raise ZeroDivisionError
    assert state() == found
    for step in ("_replacements", "_switch"):
        with monkeypatch.context() as patched:
            patched.setattr(_registration, step, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                strobe.register()
        assert strobe.registered() is None
        assert state() == found
    with pytest.raises(TypeError, match="strict: .*accepted is"):
        strobe.register(strict="yes")
    assert state() == found


def test_switches_and_priorities_are_given_back_as_found():
    class Handle:
        removed = False

        def remove(self) -> None:
            self.removed = True

    from torch.nn.attention import _registry

    handle = Handle()
    order = torch._C._get_sdp_priority_order()
    torch.nn.attention.register_flash_attention_impl("another", register_fn=lambda: handle)
    torch.nn.attention.activate_flash_attention_impl("another")
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_sdp_priority_order([*reversed(order)])
    try:
        found = state()
        with strobe.register() as made:
            F.scaled_dot_product_attention(*qkv(1, 1))
            assert torch.nn.attention.current_flash_attention_impl() == "another"
        assert runs(made) == (1, 0)
        assert state() == found
        assert not handle.removed
    finally:
        torch._C._set_sdp_priority_order(order)
        torch.backends.mha.set_fastpath_enabled(True)
        torch.nn.attention.restore_flash_attention_impl()
        del _registry._FLASH_ATTENTION_IMPLS["another"]


def test_what_is_added_to_the_tag_of_caches_meanwhile_stays():
    config: Any = torch.compiler.config
    with config.patch(cache_key_tag="before,"):
        with strobe.register():
            assert config.cache_key_tag != "before,"
            config.cache_key_tag += ",meanwhile"
        assert config.cache_key_tag == "before,,meanwhile"


def test_an_override_that_was_there_before_comes_back():
    seen = []

    def another(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(1)
        return torch.zeros_like(args[0])

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(SDPA, another, f"Autograd{DEVICE.upper()}")
        with strobe.register() as made:
            assert F.scaled_dot_product_attention(*qkv(1, 1)).any()
            with pytest.warns(UserWarning, match="head dimension 600"):  # what Strobe refuses goes to what was there
                assert not F.scaled_dot_product_attention(*qkv(1, 1, d=600)).any()
        assert not F.scaled_dot_product_attention(*qkv(1, 1)).any()
        assert (len(seen), runs(made)) == (2, (1, 1))
    finally:
        library._destroy()


def test_a_pytorch_that_cannot_keep_kernels_alive(monkeypatch):
    """Before PyTorch 2.9 the kernel stays where it is, and passes calls on."""
    given, big = qkv(1, 1), qkv(1, 1, d=600)
    with monkeypatch.context() as older:
        older.setattr(_registration, "_GET_KERNEL", None)
        with strobe.register() as made:
            F.scaled_dot_product_attention(*given)
            with pytest.warns(UserWarning, match="head dimension 600"):
                F.scaled_dot_product_attention(*big)
        F.scaled_dot_product_attention(*given)
        with strobe.register(strict=True) as again:
            F.scaled_dot_product_attention(*given)
    assert (runs(made), runs(again)) == ((1, 1), (1, 0))


def test_threads_call_while_another_one_registers():
    given = qkv(2, 2)
    expected = F.scaled_dot_product_attention(*given)
    stop, failed, rounds = threading.Event(), [], []

    def calling() -> None:
        while not stop.is_set():
            if not torch.allclose(F.scaled_dot_product_attention(*given), expected, atol=1e-5):
                failed.append("result")
            rounds.append(1)

    def registering() -> None:
        while not stop.is_set():
            with strobe.register(strict=True):
                F.scaled_dot_product_attention(*given)

    workers = [threading.Thread(target=target) for target in (calling, calling, registering, registering)]
    for worker in workers:
        worker.start()
    stop.wait(1.0)
    stop.set()
    for worker in workers:
        worker.join()
    assert not failed
    assert len(rounds) > 10
    assert strobe.registered() is None


@pytest.mark.skipif(not hasattr(os, "fork") or DEVICE != "cpu", reason="a forked process has no CUDA")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("lock", [_registration._LOCK, _function._lock], ids=["registration", "recordings"])
def test_a_process_is_forked_while_a_thread_holds_a_lock(lock):
    """As a DataLoader's worker is. No thread of the child would release the lock."""
    is_held = threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            time.sleep(0.3)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(10)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        with lock:
            os._exit(0)
    holder.join()
    assert os.waitpid(child, 0)[1] == 0
    with lock:
        pass
