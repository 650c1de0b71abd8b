"""The torch operators: PyTorch's requirements of an operator, and that strobe.attention keeps its promises under each of PyTorch's
systems."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import strobe
from strobe import _call, _prepared
from strobe.compat import flash_attn, functional, ladder

FORWARD = torch.ops.strobe.attention_forward.default
BACKWARD = torch.ops.strobe.attention_backward.default


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def qkv(dtype: torch.dtype = torch.float32, grad: bool = True, bshd: bool = False) -> list[Tensor]:
    """q, k and v with grouped heads, different lengths, and values of another width: B 2, H 4, Hkv 2, Sq 9, Sk 11, D 16, Dv 8."""
    shapes = [(2, 4, 9, 16), (2, 2, 11, 16), (2, 2, 11, 8)]
    if bshd:
        shapes = [(b, s, h, d) for b, h, s, d in shapes]
    return [randn(*shape, dtype=dtype, grad=grad) for shape in shapes]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def everything(dtype: torch.dtype = torch.float32, grad: bool = True) -> dict[str, Any]:
    """Options that together reach every argument of the dense operators."""
    torch.manual_seed(1)
    return {
        "causal": True,
        "window": (5, None),
        "scale": 0.3,
        "softcap": 4.0,
        "mask": torch.rand(2, 1, 1, 11) > 0.2,
        "bias": randn(1, 4, 9, 11, dtype=dtype, grad=grad),
        "alibi_slopes": torch.rand(4),
        "sinks": randn(4, dtype=torch.float64 if dtype == torch.float64 else torch.float32, grad=grad),
        "dropout": 0.3,
        "rng": torch.tensor([3, 4]),
        "block_mask": strobe.BlockMask.causal(9, 11, 16, 16),
    }


def packed(grad: bool = True) -> tuple[list[Tensor], dict[str, Any]]:
    tensors = [randn(20, 4, 16, grad=grad), randn(24, 2, 16, grad=grad), randn(24, 2, 8, grad=grad)]
    lengths = {"cu_seqlens_q": ints(0, 7, 7, 20), "cu_seqlens_k": ints(0, 9, 10, 24), "max_seqlen_q": 13, "max_seqlen_k": 14}
    return tensors, lengths


def leaves(tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    return [x for x in (*tensors, *options.values()) if isinstance(x, Tensor) and x.requires_grad]


def run(function: Any, tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """out, lse and every gradient, the one through lse included."""
    out, lse = function(*tensors, **options, return_lse=True)
    torch.manual_seed(2)
    return [out, lse, *torch.autograd.grad([out, lse], leaves(tensors, options), [torch.randn_like(out), torch.randn_like(lse)])]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


# opcheck: the schema, the registrations, the fake kernels with static and dynamic shapes, autograd through AOTAutograd

OPERATOR_CASES = {
    "plain": lambda: (qkv(), {}),
    "one gradient": lambda: ([*qkv(grad=False)[:2], qkv()[2]], {}),
    "no gradient": lambda: (qkv(grad=False), {}),
    "bshd": lambda: (qkv(bshd=True), {"bshd": True}),
    "expanded": lambda: ([qkv()[0], *(x[:, :1].detach().expand(x.shape).requires_grad_() for x in qkv()[1:])], {}),
    "transposed": lambda: ([x.detach().transpose(1, 2).requires_grad_() for x in qkv(bshd=True)], {}),
    "float64": lambda: (qkv(torch.float64), {}),
    "bfloat16": lambda: (qkv(torch.bfloat16), {"tile_q": 32, "threads": 2}),
    "packed": packed,
    "reference": lambda: (qkv(), {"engine": "reference"}),
    "everything": lambda: (
        qkv(),
        {
            **{name: x for name, x in everything().items() if name not in ("window", "block_mask")},
            "window_left": 5,
            **dict(zip(("block_rows", "block_cols", "block_rows_t", "block_cols_t"), everything()["block_mask"].arrays, strict=True)),
            "block_q": 16,
            "block_k": 16,
        },
    ),
}


@pytest.mark.parametrize("case", OPERATOR_CASES)
def test_opcheck(case):
    torch.manual_seed(0)
    tensors, options = OPERATOR_CASES[case]()
    torch.library.opcheck(FORWARD, tuple(tensors), options)

    tensors = [x.detach() for x in tensors]
    options = {name: x.detach() if isinstance(x, Tensor) else x for name, x in options.items()}
    out, lse = FORWARD(*tensors, **options)
    needed = [True, True, case != "one gradient", "bias" in options, "sinks" in options]
    for dlse in (None, torch.randn_like(lse)):
        torch.library.opcheck(BACKWARD, (torch.randn_like(out), dlse, out, lse, *tensors), {**options, "needed": needed})


# autograd


@pytest.mark.parametrize("case", ["plain", "everything", "packed", "bshd"])
def test_gradcheck(case):
    torch.manual_seed(0)
    options: dict[str, Any] = {}
    if case == "packed":
        tensors, options = packed(grad=False)
        tensors = [x.double().requires_grad_() for x in tensors]
    else:
        tensors = qkv(torch.float64, bshd=case == "bshd")
        options = everything(torch.float64) if case == "everything" else {"layout": case} if case == "bshd" else {}
    names = [name for name, x in options.items() if isinstance(x, Tensor) and x.requires_grad]

    def function(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        return strobe.attention(q, k, v, **options | dict(zip(names, more, strict=True)), return_lse=True)

    assert torch.autograd.gradcheck(function, (*tensors, *(options[name] for name in names)))


def test_third_derivative_is_refused():
    q, k, v = qkv()
    (first,) = torch.autograd.grad(strobe.attention(q, k, v).square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="third derivative"):
        second.sum().backward()


class Calls(TorchDispatchMode):
    """Records every operator that runs below autograd, and its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((function, kwargs or {}))
        return function(*args, **(kwargs or {}))

    @property
    def functions(self) -> list[Any]:
        return [function for function, _ in self.calls]


@pytest.mark.parametrize("wanted", [["k"], ["q", "v"], ["bias"], ["q", "k", "v", "bias", "sinks"]])
def test_only_the_gradients_that_are_needed(wanted):
    options = everything(grad=False)
    arguments = dict(zip("qkv", qkv(grad=False), strict=True)) | options
    for name in wanted:
        arguments[name].requires_grad_()
    out = strobe.attention(**arguments)
    with Calls() as calls:
        found = torch.autograd.grad(out.sum(), [arguments[name] for name in wanted])
    (needed,) = (given["needed"] for function, given in calls.calls if function is BACKWARD)
    assert list(needed) == [name in wanted for name in ("q", "k", "v", "bias", "sinks")]
    assert [x.shape for x in found] == [arguments[name].shape for name in wanted]


@pytest.mark.parametrize("kind", ["expanded", "transposed", "reversed storage", "sliced"])
def test_any_strides_of_the_incoming_gradient(kind):
    q, k, v = qkv()
    out = strobe.attention(q, k, v)
    dout = {
        "expanded": torch.tensor(0.7).expand(out.shape),
        "transposed": torch.randn(out.shape[::-1]).permute(3, 2, 1, 0),
        "reversed storage": torch.randn(2, 9, 4, 8).transpose(1, 2),
        "sliced": torch.randn(2, 4, 9, 16)[..., ::2],
    }[kind]
    assert not dout.is_contiguous()
    found = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    assert_same_bits(list(found), list(torch.autograd.grad(out, (q, k, v), dout.contiguous())))


class OnGPU(Tensor):
    """Claims to be on a GPU; its memory is the CPU's."""

    is_cuda = True


INCOMING = {
    "a sum's": (lambda x: x.sum(), True),
    "of one column for all": (lambda x: x.sum(-1).square().sum(), True),
    "of one row for all": (lambda x: (x.sum(1 if x.shape[1] == 9 else 2) ** 2).sum(), True),
    "turned": (lambda x: (x.mT.contiguous() ** 2).sum(), True),
    "of one batch for all": (lambda x: (x.sum(0) ** 2).sum(), False),
    "as it lies": (lambda x: (x**2).sum(), False),
}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("case", INCOMING)
def test_on_a_gpu_an_incoming_gradient_has_rows(case, layout, monkeypatch):
    """The fastest kernels cannot load gradients that repeat one number or one row. Only gradients that they cannot load are copied."""
    loss, is_copied = INCOMING[case]
    q, k, v = qkv(bshd=layout == "bshd")
    out, lse = strobe.attention(q, k, v, layout=layout, return_lse=True)
    leaf = out.detach().requires_grad_()
    (dout,) = torch.autograd.grad(loss(leaf), leaf)
    read = []

    def structs(call, known, made, full=_call.Call.structs):
        read.append(known["dout"])
        return full(call, known, made)

    monkeypatch.setattr(_call.Call, "structs", structs)
    monkeypatch.setattr(_prepared, "CALLS", _prepared.Memory())
    found = strobe.attention_backward(dout.as_subclass(OnGPU), q, k, v, out, lse, layout=layout)
    assert (read[0].data_ptr() != dout.data_ptr()) == is_copied
    rows = 1 if layout == "bshd" else 2
    assert read[0].stride(-1) == 1
    assert read[0].stride(rows) != 0
    assert_same_bits(list(found[:3]), list(strobe.attention_backward(dout, q, k, v, out, lse, layout=layout)[:3]))
    with pytest.raises(ValueError, match="^dout: rank 2; accepted is rank 4"):
        strobe.attention_backward(dout[0, 0].as_subclass(OnGPU), q, k, v, out, lse, layout=layout)


def test_gradient_through_lse_alone():
    q, k, v = qkv()
    _, lse = strobe.attention(q, k, v, return_lse=True)
    dq, dv = torch.autograd.grad(lse.sum(), (q, v))
    scores = q.detach().double() @ k.detach().double().repeat_interleave(2, 1).transpose(-1, -2) / 4
    expected = scores.softmax(-1) @ k.detach().double().repeat_interleave(2, 1) / 4
    torch.testing.assert_close(dq.double(), expected, atol=1e-6, rtol=1e-6)
    assert (dv == 0).all()


# layouts


def test_no_layout_is_copied():
    """Only the operator runs, whatever the strides are."""
    for bshd in (False, True):
        tensors = qkv(grad=False, bshd=bshd)
        for layout, views in (("bshd" if bshd else "bhsd", tensors), ("bhsd" if bshd else "bshd", [x.transpose(1, 2) for x in tensors])):
            with Calls() as calls:
                strobe.attention(*views, layout=layout)
            assert calls.functions == [FORWARD]


def test_layouts_are_the_same_memory():
    tensors = qkv(bshd=True)
    turned = [x.detach().transpose(1, 2).requires_grad_() for x in tensors]
    found, expected = run(strobe.attention, tensors, {"layout": "bshd"}), run(strobe.attention, turned, {})
    assert found[0].stride() == expected[0].transpose(1, 2).stride()
    assert found[0].is_contiguous()
    assert_same_bits([found[1]], [expected[1]])
    assert_same_bits([found[0]], [expected[0].transpose(1, 2)])
    for x, y in zip(found[2:], expected[2:], strict=True):
        assert x.stride() == y.transpose(1, 2).stride()


def test_output_lies_in_memory_as_q_does():
    q, k, v = qkv()
    assert strobe.attention(q, k, v).is_contiguous()
    assert strobe.attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v).transpose(1, 2).is_contiguous()
    projected = torch.randn(2, 9, 3, 4, 16)  # q, k and v as slices of one projection
    q, k, v = (x.transpose(1, 2) for x in projected.unbind(2))
    assert strobe.attention(q, k, v).transpose(1, 2).is_contiguous()


def test_few_axes_of_mask_and_bias_are_the_last():
    q, k, v = qkv(grad=False)
    bias = torch.randn(9, 11, requires_grad=True)
    mask = torch.rand(11) > 0.3
    found = strobe.attention(q, k, v, bias=bias, mask=mask)
    assert torch.equal(found, strobe.attention(q, k, v, bias=bias[None, None], mask=mask[None, None, None]))
    found.sum().backward()
    assert bias.grad.shape == (9, 11)


# torch.compile


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("case", ["plain", "everything", "bshd", "packed", "expanded"])
def test_compile(case, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    tensors, options = qkv(bshd=case == "bshd"), {}
    if case == "packed":
        tensors, options = packed()
    elif case == "everything":
        options = everything()
    elif case == "bshd":
        options = {"layout": "bshd", "causal": True}
    elif case == "expanded":
        tensors[1:] = [x[:, :1].detach().expand(x.shape).requires_grad_() for x in tensors[1:]]
    expected = run(strobe.attention, tensors, options)
    compiled = torch.compile(strobe.attention, fullgraph=True, backend=backend)
    assert_same_bits(run(compiled, tensors, options), expected)


def test_compile_with_dynamic_shapes_once():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return strobe.attention(q * 2, k, v, causal=True, window=(q.shape[2] // 2, None), mask=mask)

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for b, s in ((3, 17), (5, 40), (7, 33)):  # sizes that are no numbers of heads, which the compiler would unify with them
        tensors = [randn(b, 4, s, 16), randn(b, 2, s, 16), randn(b, 2, s, 16)]
        mask = torch.rand(b, 1, 1, s) > 0.2
        found, expected = (torch.autograd.grad(f(*tensors, mask).square().sum(), tensors) for f in (compiled, block))
        assert_same_bits(list(found), list(expected))
    assert counter.frame_count == 1


def test_compiled_dropout_follows_the_generator():
    torch._dynamo.reset()
    q, k, v = qkv(grad=False)
    compiled = torch.compile(lambda *x: strobe.attention(*x, dropout=0.5), fullgraph=True, backend="inductor")
    torch.manual_seed(5)
    first, second = compiled(q, k, v), compiled(q, k, v)
    torch.manual_seed(5)
    assert torch.equal(compiled(q, k, v), first)
    assert not torch.equal(first, second)


def test_seed_and_offset_are_values():
    """seed and offset are not put into tensors: on a GPU a call would wait for a copy, and break a graph that is being captured."""
    q, k, v = qkv()
    for seed, offset in ((3, 4), (-3, 2**63), (2**64 - 3, None)):
        with Calls() as calls:
            found = strobe.attention(q, k, v, dropout=0.5, seed=seed, offset=offset)
            found.sum().backward()
        assert [function for function in calls.functions if function.namespace == "strobe"] == [FORWARD, BACKWARD]
        assert not [x for function, given in calls.calls if function in (FORWARD, BACKWARD) for x in given if x == "rng"]
        assert torch.ops.aten.lift_fresh.default not in calls.functions
        rng = torch.tensor([(x + 2**63) % 2**64 - 2**63 for x in (seed, offset or 0)])
        assert torch.equal(found, strobe.attention(q, k, v, dropout=0.5, rng=rng))
        assert torch.equal(strobe.dropout_mask((1, 1, 64, 64), 0.5, seed, offset), strobe.dropout_mask((1, 1, 64, 64), 0.5, rng=rng))


def test_compiled_with_many_seeds_twice():
    torch._dynamo.reset()
    q, k, v = qkv(grad=False)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda seed: strobe.attention(q, k, v, dropout=0.5, seed=seed), fullgraph=True, backend=counter)
    for seed in (1, 2, 3, 2**62):
        assert torch.equal(compiled(seed), strobe.attention(q, k, v, dropout=0.5, seed=seed))
    assert counter.frame_count == 2  # one more graph, once the number is known to change


def test_compiled_module_with_a_block_mask():
    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    module = strobe.nn.FlashAttention(16, block_mask=strobe.BlockMask.local_global(64, 64, 16, 16))
    assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(q, k, v), module(q, k, v))


LSE, OUT = torch.randn(2, 4, 9), torch.randn(2, 4, 9, 8)
CSR = [torch.tensor(x, dtype=torch.int32) for x in ([[[0, 1]]], [0])]
KEPT = torch.rand(2, 4, 1, 1) < 0.7
IN_GRAPHS = {
    "attention": lambda q, k, v: strobe.attention(q, k, v, dropout=0.3, seed=3),
    "attention_backward": lambda q, k, v: strobe.attention_backward(OUT, q, k, v, *strobe.attention(q, k, v, return_lse=True)),
    "attention_jvp": lambda q, k, v: strobe.attention_jvp(q, k, v, q, k, v, causal=True, return_lse=True),
    "dropout_mask": lambda q, k, v: strobe.dropout_mask((1, 1, 9, 11), 0.5, 3),
    "engines": lambda q, k, v: strobe.engines(),
    "explain": lambda q, k, v: strobe.explain(q, k, v),
    "explain, what is refused": lambda q, k, v: strobe.explain(q, k, v, causal=1),
    "hyperbolic_attention": lambda q, k, v: strobe.hyperbolic_attention(*map(strobe.hyperbolic.lift, (q, k, v))),
    "merge": lambda q, k, v: strobe.merge(OUT, LSE, *strobe.attention(q, k, v, return_lse=True)),
    "reference": lambda q, k, v: strobe.reference(q, k, v),
    "reference_backward": lambda q, k, v: strobe.reference_backward(OUT, q, k, v),
    "Part": lambda q, k, v: strobe.attention(q, k, v, causal=True, part=strobe.Part([(7, 9)], [(0, 11)], 16, [20])),
    "BlockMask": lambda q, k, v: strobe.attention(q, k, v, block_mask=strobe.BlockMask(*CSR, 9, 11, 16, 16)),
    "BlockMask.butterfly": lambda q, k, v: strobe.BlockMask.butterfly(99, 40, 16, 16).to_kept(),
    "BlockMask.causal": lambda q, k, v: strobe.attention(q, k, v, block_mask=strobe.BlockMask.causal(q.shape[2], k.shape[2], 16, 16)),
    "BlockMask.from_dense": lambda q, k, v: strobe.attention(q, k, v, block_mask=strobe.BlockMask.from_dense(q[..., :11] > 1, 16, 16)),
    "BlockMask.from_function": lambda q, k, v: strobe.BlockMask.from_function(lambda b, h, i, j: j <= i, 1, 1, 99, 40, block=16).to_kept(),
    "BlockMask.from_kept": lambda q, k, v: strobe.attention(q, k, v, block_mask=strobe.BlockMask.from_kept(KEPT, 16, 16, 9, 11)),
    "BlockMask.local_global": lambda q, k, v: strobe.BlockMask.local_global(99, 40, 16, 16).to_dense(),
    "BlockMask.strided": lambda q, k, v: strobe.BlockMask.strided(99, 40, 16, 16, stride=2).to_kept(),
    "compat": lambda q, k, v: functional.block_sparse_flash_attention(q, k, v, KEPT, 16, 16, rng_state=torch.tensor([3, 4])),
    "compat, ladder": lambda q, k, v: ladder.flash_attention_1_forward(q, q, q, causal=True),
    "compat, flash_attn": lambda q, k, v: flash_attn.flash_attn_func(q, q, q),
}


def test_every_public_function_is_tried_in_a_graph():
    tried = {name.partition(",")[0] for name in IN_GRAPHS}
    assert {name for name in strobe.__all__ if callable(getattr(strobe, name))} - {"Gradients", "GradientsWithCaptured"} <= tried
    makers = {name for name, x in vars(strobe.BlockMask).items() if isinstance(x, classmethod) and not name.startswith("_")}
    assert {f"BlockMask.{name}" for name in makers} <= tried


@pytest.mark.parametrize("case", IN_GRAPHS)
def test_every_function_may_stand_in_what_is_compiled(case):
    """If a graph cannot hold a function, the graph ends before the call."""
    torch._dynamo.reset()
    inputs = qkv(grad=False)

    def result(function: Any) -> Any:
        try:
            return function(*inputs)
        except TypeError as refusal:
            return str(refusal)

    found, expected = result(torch.compile(IN_GRAPHS[case], backend="aot_eager")), result(IN_GRAPHS[case])
    if isinstance(expected, Tensor):
        found, expected = (found,), (expected,)
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert torch.allclose(x, y, atol=1e-5) if isinstance(y, Tensor) else x == y


def test_export():
    """A program has the operator, also once it is decomposed, as compilers ahead of time do, and takes other lengths."""
    q, k, v = qkv(grad=False)
    module = strobe.nn.FlashAttention(16, causal=True)
    lengths = ({2: torch.export.Dim("sq", min=2)}, {2: torch.export.Dim("sk", min=2)}, {2: torch.export.Dim("sk", min=2)})
    program = torch.export.export(module, (q, k, v), dynamic_shapes=lengths)
    for each in (program, program.run_decompositions()):
        assert FORWARD in [node.target for node in each.graph.nodes]
        for sq, sk in ((9, 11), (5, 30)):
            given = randn(2, 4, sq, 16), randn(2, 2, sk, 16), randn(2, 2, sk, 8)
            assert torch.equal(each.module()(*given), module(*given))


@pytest.mark.long
def test_ahead_of_time_inductor(tmp_path):
    """A package of AOTInductor calls the operator through Python: it runs in any process that has imported strobe."""

    class Attends(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return 2 * strobe.attention(q + 1, k, v, causal=True, window=(5, None))

    given = tuple(randn(2, 4, 9, 16, grad=False) for _ in range(3))
    length = {2: torch.export.Dim("s", min=2, max=4096)}
    program = torch.export.export(Attends(), given, dynamic_shapes={"q": length, "k": length, "v": length})
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attends.pt2"))
    runs = torch._inductor.aoti_load_package(path)
    for s in (9, 30):
        others = [randn(2, 4, s, 16, grad=False) for _ in range(3)]
        assert torch.equal(runs(*others), Attends()(*others))
    torch.save((given, Attends()(*given)), tmp_path / "given")
    code = f"""
import torch, strobe
given, expected = torch.load({str(tmp_path / "given")!r})
assert torch.equal(torch._inductor.aoti_load_package({path!r})(*given), expected)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


# autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    q, k, v = qkv()
    bias = randn(1, 4, 9, 11)
    with torch.autocast("cpu", dtype):
        out = strobe.attention(q, k, v, bias=bias)
        assert out.dtype == torch.nn.functional.scaled_dot_product_attention(q, q, q).dtype == dtype
    expected = strobe.attention(q.to(dtype), k.to(dtype), v.to(dtype), bias=bias)
    assert torch.equal(out, expected)
    found = torch.autograd.grad(out.float().sum(), (q, k, v, bias))
    assert [x.dtype for x in found] == [torch.float32] * 4
    assert_same_bits(list(found), list(torch.autograd.grad(expected.float().sum(), (q, k, v, bias))))


@pytest.mark.parametrize("backward", [False, True])
def test_explain_knows_of_autocast(backward):
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        told = strobe.explain(q, k, v, backward=backward)
    assert told == strobe.explain(q.bfloat16(), k.bfloat16(), v.bfloat16(), backward=backward)
    assert told != strobe.explain(q, k, v, backward=backward)


def test_explicit_backward_under_autocast():
    q, k, v = qkv(grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = strobe.attention(q, k, v, return_lse=True)
        with pytest.raises(ValueError, match="out: dtype bfloat16; accepted is float32"):
            strobe.attention_backward(torch.ones_like(out), q, k, v, out, lse)
        found = strobe.attention_backward(torch.ones_like(out), q.bfloat16(), k.bfloat16(), v.bfloat16(), out, lse)
    assert found.dq.dtype == torch.bfloat16


def test_autocast_leaves_float64_alone():
    with torch.autocast("cpu", torch.bfloat16):
        assert strobe.attention(*qkv(torch.float64)).dtype == torch.float64


def test_compiled_autocast():
    torch._dynamo.reset()
    q, k, v = qkv(grad=False)
    compiled = torch.compile(lambda *x: strobe.attention(*x), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(q, k, v), strobe.attention(q, k, v))


# dropout and the generator


def test_the_same_seed_draws_the_same_mask():
    q, k, v = qkv(grad=False)
    torch.manual_seed(7)
    first, second = strobe.attention(q, k, v, dropout=0.5), strobe.attention(q, k, v, dropout=0.5)
    torch.manual_seed(7)
    assert torch.equal(strobe.attention(q, k, v, dropout=0.5), first)
    assert not torch.equal(first, second)


def test_a_given_mask_leaves_the_generator_alone():
    q, k, v = qkv(grad=False)
    state = torch.get_rng_state()
    by_seed = strobe.attention(q, k, v, dropout=0.5, seed=2**64 - 1, offset=12)
    by_tensor = strobe.attention(q, k, v, dropout=0.5, rng=torch.tensor([-1, 12]))
    strobe.attention(q, k, v)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(by_seed, by_tensor)


def test_dropout_mask_is_the_one_that_is_applied():
    q, k, v = (torch.randn(2, 3, 20, 20, dtype=torch.float64) for _ in range(3))
    keep = strobe.dropout_mask((2, 3, 20, 20), 0.25, 9, 10)
    probabilities = (q @ k.transpose(-1, -2) * 20**-0.5).softmax(-1)
    torch.testing.assert_close(strobe.attention(q, k, v, dropout=0.25, seed=9, offset=10), (probabilities * keep / 0.75) @ v)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpoint_redraws_the_mask(reentrant, compiled):
    torch._dynamo.reset()
    tensors = qkv()

    def layer(*x: Tensor) -> Tensor:
        return strobe.attention(*x, dropout=0.4, causal=True)

    if compiled:
        layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.manual_seed(11)
    expected = torch.autograd.grad(layer(*tensors).square().sum(), tensors)
    torch.manual_seed(11)
    out = checkpoint(layer, *tensors, use_reentrant=reentrant)
    for x in tensors:
        x.grad = None
    out.square().sum().backward()  # reentrant checkpoints do not support autograd.grad
    assert_same_bits([x.grad for x in tensors], list(expected))


# devices, modes, modules


@pytest.mark.parametrize("door", ["attention", "register"])
@pytest.mark.parametrize("compiled", [False, True])
def test_selective_checkpoint_repeats_no_attention(compiled, door):
    """A checkpoint that keeps what Strobe's operator returns repeats what is around it alone."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    torch._dynamo.reset()
    context = partial(create_selective_checkpoint_contexts, [FORWARD])

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention if door == "register" else partial(strobe.attention, alignment="top_left")
        return attend(q.sin(), k, v).cos()

    def run(*tensors: Tensor) -> Tensor:
        return checkpoint(block, *tensors, use_reentrant=False, context_fn=context)

    nodes: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        nodes.extend(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph)

    tensors = [randn(2, 4, 9, 16) for _ in range(3)]
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    with strobe.register(strict=True):
        expected = torch.autograd.grad(block(*tensors).sum(), tensors)
        if compiled:
            found = torch.autograd.grad(torch.compile(run, fullgraph=True, backend=backend)(*tensors).sum(), tensors)
        for _ in range(0 if compiled else 3):  # the second and third time the call is known
            with Calls() as calls:
                found = torch.autograd.grad(run(*tensors).sum(), tensors)
            nodes = calls.functions
            assert (nodes.count(FORWARD), nodes.count(BACKWARD)) == (1, 1)
    assert (nodes.count(FORWARD), nodes.count(BACKWARD)) == (1, 1)
    assert nodes.count(torch.ops.aten.sin.default) > 1
    assert_same_bits(list(found), list(expected))


def test_meta_and_fake_tensors():
    q, k, v = (x.to("meta") for x in qkv(torch.bfloat16, grad=False, bshd=True))
    out, lse = strobe.attention(q, k, v, layout="bshd", return_lse=True)
    assert (out.device.type, out.shape, out.dtype) == ("meta", (2, 9, 4, 8), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 4, 9), torch.float32)
    with pytest.raises(NotImplementedError, match="^q: on device meta; accepted are cpu and cuda"):
        strobe.reference(q, k, v, layout="bshd")


def test_the_default_device_changes_nothing():
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))

    def call() -> Tensor:
        blocks = strobe.BlockMask.local_global(64, 64, 16, 16)
        assert strobe.dropout_mask((1, 1, 4, 4), 0.5, 3).device.type == "cpu"
        return strobe.attention(q, k, v, block_mask=blocks, dropout=0.2, seed=3)

    with torch.device("meta"):
        found = call()
    assert torch.equal(found, call())


def test_inference_mode():
    q, k, v = qkv()
    with torch.inference_mode():
        assert torch.equal(strobe.attention(q, k, v), strobe.attention(q.detach(), k.detach(), v.detach()))


def test_attention_backward_is_what_autograd_calls():
    options = everything()
    tensors = qkv()
    out, lse, *expected = run(strobe.attention, tensors, options)
    torch.manual_seed(2)
    found = strobe.attention_backward(torch.randn_like(out), *tensors, out, lse, dlse=torch.randn_like(lse), **options)
    assert_same_bits([x.detach() for x in found], expected)


def test_attention_backward_asks_for_the_mask_of_the_forward():
    q, k, v = qkv(grad=False)
    out, lse = strobe.attention(q, k, v, dropout=0.5, return_lse=True)
    with pytest.raises(ValueError, match="^rng: missing beside dropout"):
        strobe.attention_backward(out, q, k, v, out, lse, dropout=0.5)


def test_module():
    q, k, v = qkv(grad=False)
    module = strobe.nn.FlashAttention(16, dropout=0.5, causal=True)
    assert not list(module.parameters())
    assert not module.state_dict()
    torch.manual_seed(0)
    dropped = module(q, k, v)
    assert torch.equal(module.eval()(q, k, v), strobe.attention(q, k, v, causal=True))
    torch.manual_seed(0)
    assert torch.equal(module(q, k, v, dropout=0.5), dropped)
    assert torch.equal(module(q, k, v, causal=False), strobe.attention(q, k, v))
    assert repr(module) == "FlashAttention(16, dropout=0.5, causal=True)"
    with pytest.raises(ValueError, match="^q: head dimension 16; accepted is the module's, 32"):
        strobe.nn.FlashAttention(32)(q, k, v)
    for array, kind in ((torch.zeros(1, 1, 9, 11), "torch.Tensor"), (np.zeros((1, 1, 9, 11), np.float32), "numpy.ndarray")):
        with pytest.raises(TypeError, match=f"^bias: {kind}; accepted here are options that are no arrays"):
            strobe.nn.FlashAttention(16, bias=array)


def test_module_moves_its_block_mask(monkeypatch):
    module, moves = strobe.nn.FlashAttention(16, block_mask=strobe.BlockMask.causal(64, 64, 16, 16)), []
    monkeypatch.setattr(strobe.BlockMask, "to", lambda mask, device: [mask, moves.append(device)][0])
    module._apply(lambda x: SimpleNamespace(device=torch.device("cuda", 1)))  # does the same as to("cuda:1") with each tensor
    assert moves == [torch.device("cuda", 1)]


@pytest.mark.parametrize(
    "change",
    [lambda m: m.half(), lambda m: m.to_empty(device="cpu"), lambda m: m.to("meta").to_empty(device="cpu")],
    ids=["half", "empty", "meta"],
)
def test_module_keeps_the_numbers_of_its_block_mask(change):
    """No state dict holds these numbers."""
    expected = strobe.BlockMask.local_global(96, 96, 16, 16)
    module = change(torch.nn.Sequential(strobe.nn.FlashAttention(16, block_mask=expected)))
    for x, y in zip(module[0].options["block_mask"].arrays, expected.arrays, strict=True):
        assert torch.equal(x, y)


def test_module_on_meta_with_a_block_mask():
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    module = strobe.nn.FlashAttention(16, block_mask=strobe.BlockMask.causal(64, 64, 16, 16))
    expected = module(q, k, v)
    assert module.to("meta")(*(x.to("meta") for x in (q, k, v))).shape == expected.shape
    assert torch.equal(module.to("cpu")(q, k, v), expected)


# threads and fork


def test_threads_follow_torch():
    q, k, v = (torch.randn(1, 4, 256, 32) for _ in range(3))
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert f", {threads} thread" in strobe.explain(q, k, v)
    finally:
        torch.set_num_threads(before)
    assert ", 5 threads" in strobe.explain(q, k, v, threads=5)


def python(code: str, *arguments: str, timeout: float = 120) -> str:
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_work_runs_on_the_threads_that_torch_has():
    """No thread is started beside those of PyTorch's runtime."""
    started = python("""
        import os, torch, strobe
        torch.set_num_threads(2)
        q = torch.randn(1, 8, 512, 64)
        (q @ q.transpose(-1, -2)).softmax(-1)
        before = set(os.listdir("/proc/self/task"))
        for _ in range(20):
            strobe.attention(q, q, q)
        print(len(set(os.listdir("/proc/self/task")) - before), len(before) > 1)
    """)
    assert started == "0 True"


@pytest.mark.parametrize("imported", ["in the parent", "in the child"])
def test_fork_after_torch_has_used_its_threads(imported):
    """The child of a fork lacks the threads that the OpenMP runtime remembers: it must not wait for them."""
    code = """
        import os, sys, torch
        in_parent = sys.argv[1] == "in the parent"
        if in_parent:
            import strobe
        torch.set_num_threads(2)
        q = torch.randn(1, 8, 512, 64) / 4
        expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        if in_parent:
            expected = strobe.attention(q, q, q)
        child = os.fork()
        if child == 0:
            import strobe
            out = strobe.attention(q, q, q).numpy()  # no torch function: its own work would wait for ever here
            error = abs(out - expected.numpy()).max()
            os._exit(0 if error <= (0 if in_parent else 1e-5) else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert python(code, imported) == "0"


def test_torch_multiprocessing_fork():
    assert (
        python("""
        import torch, strobe
        import torch.multiprocessing as mp
        q = torch.randn(1, 4, 256, 32)
        expected = strobe.attention(q, q, q, causal=True)
        def child(queue):
            torch.set_num_threads(1)
            queue.put(strobe.attention(q, q, q, causal=True, threads=2).numpy().tobytes())
        context = mp.get_context("fork")
        queue = context.SimpleQueue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        print(queue.get() == expected.numpy().tobytes())
        process.join()
    """)
        == "True"
    )


def test_the_interpreter_is_free_during_a_call():
    """Another Python thread makes progress while the library works."""
    q = torch.randn(1, 8, 2048, 64)
    ticks, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            ticks[0] += 1
            time.sleep(0)  # releases the interpreter's lock, and must get it back

    counter = threading.Thread(target=count)
    counter.start()
    start = ticks[0]
    strobe.attention(q, q, q, threads=1)
    progress = ticks[0] - start
    done.set()
    counter.join()
    assert progress > 100


def test_torch_may_be_imported_after_strobe():
    """The order does not matter, even if the first call is compiled."""
    code = """
        import strobe, torch
        q = torch.randn(1, 2, 32, 16)
        print(torch.equal(torch.compile(strobe.attention, fullgraph=True, backend="aot_eager")(q, q, q), strobe.attention(q, q, q)))
    """
    assert python(code) == "True"


@pytest.mark.parametrize("order", ["torch, strobe", "strobe, torch", "strobe.nn", "strobe._autograd"])
def test_operators_are_there_once_both_are_imported(order):
    code = f"import {order}; import torch; print(torch.ops.strobe.attention_forward.default.name())"
    assert python(code) == "strobe::attention_forward"


def test_an_exported_model_loads_with_strobe_imported_first(tmp_path):
    q, k, v = qkv(grad=False)
    file = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(strobe.nn.FlashAttention(16, causal=True), (q, k, v)), file)
    code = """
        import sys
        import strobe
        import torch
        attend = torch.export.load(sys.argv[1]).module()
        print(list(attend(torch.ones(2, 4, 9, 16), torch.ones(2, 2, 11, 16), torch.ones(2, 2, 11, 8)).shape))
    """
    assert python(code, str(file)) == "[2, 4, 9, 8]"


def test_torch_alone_does_not_import_strobe():
    assert python("import sys, torch; print('strobe' in sys.modules, '_strobe_autoload' in sys.modules)") == "False True"


def test_torch_works_without_numpy():
    assert (
        python("""
        import sys, warnings
        sys.modules["numpy"] = None
        warnings.simplefilter("ignore")
        import torch, strobe
        q = torch.randn(1, 2, 32, 16, requires_grad=True)
        blocks = strobe.BlockMask.local_global(32, 32, 16, 16)
        strobe.attention(q, q, q, block_mask=blocks, dropout=0.1).sum().backward()
        print(q.grad.shape, strobe.dropout_mask((1, 1, 4, 4), 0.5, 1).dtype)
    """)
        == "torch.Size([1, 2, 32, 16]) torch.bool"
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_pytorch_wants_determinism(compiled, monkeypatch):
    """PyTorch's setting reaches the library in the backward, also for a remembered call."""
    asked = []

    class Structs(_call.Structs):
        def __init__(self, arrays, made, options, view, place):
            asked.append(("dq" in made, bool(options.get("deterministic"))))
            super().__init__(arrays, made, options, view, place)

    monkeypatch.setattr(_call, "Structs", Structs)
    q, k, v = (torch.randn(1, 2, 37, 24, requires_grad=True) for _ in range(3))
    attend = torch.compile(strobe.attention, backend="aot_eager") if compiled else strobe.attention
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            for _ in range(2):
                attend(q, k, v, scale=0.2151).sum().backward()  # a number of its own: C prepares what is known but for its sizes
        finally:
            torch.use_deterministic_algorithms(False)
    assert {(True, False), (True, True)} <= set(asked)
