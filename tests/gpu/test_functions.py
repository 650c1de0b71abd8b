"""Functions of the score on a GPU: every engine, forward and backward, against PyTorch's formulas in float64.

The functions are those whose kernels tests/nvrtc compiles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import available_engines

sys.path.insert(0, str(Path(__file__).parents[1] / "nvrtc"))
from functions import FUNCTIONS, struct

import strobe
from strobe._abi import CUDA, DTYPES
from strobe._core import ffi, lib

ENGINES = [name for name in available_engines() if name.startswith("cuda-")]
pytestmark = pytest.mark.skipif(not ENGINES, reason="no GPU")

B, H, HKV, LENGTH = 2, 16, 4, 333
Tensor = torch.Tensor


def buckets(distance: Tensor) -> Tensor:
    near = distance.clamp(min=0)
    far = 16 + (torch.log(near.clamp(min=1).double() / 16) / 2.0794415 * 16).trunc().long()
    return torch.where(near < 16, near, far.clamp(max=31))


def table(t: Tensor, rows: Tensor) -> Tensor:
    """t (rows, H) at rows (LENGTH, LENGTH), as (H, LENGTH, LENGTH)."""
    return t[rows].permute(2, 0, 1)


def capped(x: Tensor) -> Tensor:
    return 20 * torch.tanh(x / 20)


# x: (B, H, LENGTH, LENGTH); c: the captured tensor; i, j: positions. What is hidden becomes -inf.
FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "ALiBi": lambda x, c, i, j: x + c[:, None, None] * (j - i),
    "relative bias": lambda x, c, i, j: x + c[:, i - j + FUNCTIONS["relative bias"]()[2]["captured_0"].shape[1] // 2 - 1],
    "T5 buckets": lambda x, c, i, j: x + table(c, buckets(i - j)),
    "softcap": lambda x, c, i, j: capped(x),
    "softcap and ALiBi": lambda x, c, i, j: capped(x) + c[:, None, None] * (j - i),
    "documents": lambda x, c, i, j: x.masked_fill(c[i] != c[j], -torch.inf),
    "documents of int64": lambda x, c, i, j: x.masked_fill((c[:, i] != c[:, None, j])[:, None], -torch.inf),
    "prefix": lambda x, c, i, j: x.masked_fill(~((j <= i) | (j < c[:, None, None]))[:, None], -torch.inf),
    "window": lambda x, c, i, j: x.masked_fill((i - j).abs() > 256, -torch.inf),
    "dilated": lambda x, c, i, j: x.masked_fill((i - j) % 4 != 0, -torch.inf),
    "neighbourhood": lambda x, c, i, j: x.masked_fill(((i // 64 - j // 64).abs() > 6) | ((i % 64 - j % 64).abs() > 6), -torch.inf),
    "tanh": lambda x, c, i, j: torch.tanh(x) * 2,
    "causal by -inf": lambda x, c, i, j: x.masked_fill(i < j, -torch.inf),
}


def test_each_function_has_a_formula():
    assert FORMULAS.keys() == FUNCTIONS.keys()


def captured(shape: Any, dtype: str) -> Tensor:
    if dtype.startswith("int"):
        return torch.randint(0, 3, shape, dtype=getattr(torch, dtype), device="cuda")
    return torch.randn(shape, dtype=getattr(torch, dtype), device="cuda") / 4


def run(function: Any, tensors: dict[str, Tensor], name: str, engine: str) -> str | None:
    """The reason why the engine does not support it; None: it ran."""
    score, mask, _ = FUNCTIONS[name]()
    alive: list[Any] = [engine_name := ffi.new("char[]", engine.encode())]
    attention = ffi.new("strobe_attention *", {"causal": 1, "engine": engine_name})
    attention.size = ffi.sizeof("strobe_attention")
    for field, graph in (("score_function", score), ("mask_function", mask)):
        if graph:
            setattr(attention, field, struct(graph, alive))
    given = ffi.new("strobe_tensors *")
    given.size = ffi.sizeof("strobe_tensors")
    for key, x in tensors.items():
        alive.append(tensor := ffi.new("strobe_tensor *"))
        dtype = DTYPES[str(x.dtype).removeprefix("torch.")]
        lib.strobe_glue_tensor(tensor, x.data_ptr(), dtype, CUDA, x.get_device(), x.dim(), list(x.shape), list(x.stride()), False)
        setattr(given, key, tensor)
    status = function(attention, given, ffi.NULL)
    text = ffi.string(lib.strobe_last_error()).decode() if status != lib.STROBE_OK else None
    assert status in (lib.STROBE_OK, lib.STROBE_UNSUPPORTED), text
    torch.cuda.synchronize()
    return text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("engine", ENGINES)
def test_it_agrees(engine, name, dim, dtype):
    torch.manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, dout = (torch.randn(B, H, LENGTH, dim, dtype=dtype, device="cuda") for _ in range(2))
    k, v = (torch.randn(B, HKV, LENGTH, dim, dtype=dtype, device="cuda") for _ in range(2))
    more = {key: captured(x.shape, x.dtype) for key, x in FUNCTIONS[name]()[2].items()}
    out, lse = torch.empty_like(q), torch.empty(B, H, LENGTH, dtype=wide, device="cuda")
    if reason := run(lib.strobe_forward, {"q": q, "k": k, "v": v, "out": out, "lse": lse, **more}, name, engine):
        pytest.skip(reason)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    x = leaves[0] @ leaves[1].repeat_interleave(H // HKV, 1).mT / dim**0.5
    i, j = torch.arange(LENGTH, device="cuda")[:, None], torch.arange(LENGTH, device="cuda")
    c = more.get("captured_0", torch.zeros(1, device="cuda"))
    scores = FORMULAS[name](x, c.double() if c.is_floating_point() else c.long(), i, j).masked_fill(i < j, -torch.inf)
    expected = scores.softmax(-1) @ leaves[2].repeat_interleave(H // HKV, 1)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5, torch.float64: 1e-11}[dtype]

    def close(found: Tensor, right: Tensor, what: str) -> None:
        off, size = float((found.double() - right).abs().max()), float(right.abs().max())
        assert off <= tolerance * size, f"{what}: error {off:.3g} of {size:.3g}"

    close(out, expected.detach(), "out")
    close(lse, scores.detach().logsumexp(-1), "lse")
    expected.backward(dout.double())
    gradients = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, **gradients, **more}
    if reason := run(lib.strobe_backward, given, name, engine):
        pytest.skip(reason)
    for (what, found), leaf in zip(gradients.items(), leaves, strict=True):
        close(found, leaf.grad, what)


# Functions by what the gradient of the tensor that they read is summed along, with the tensor's shape.
CAPTURED: dict[str, tuple[Callable[[Tensor], Callable[..., Any]], tuple[int, ...]]] = {
    "constant": (lambda t: lambda x, b, h, i, j: x * t, ()),
    "head": (lambda t: lambda x, b, h, i, j: x + t[h] * (i - j) / 50, (H,)),
    "curved": (lambda t: lambda x, b, h, i, j: t[h] * torch.tanh(x / t[h]), (H,)),
    "query": (lambda t: lambda x, b, h, i, j: x * t[b, i], (B, LENGTH)),
    "key": (lambda t: lambda x, b, h, i, j: x + t[h, j], (H, LENGTH)),
    "i - j": (lambda t: lambda x, b, h, i, j: x + t[h, i - j + LENGTH - 1], (H, 2 * LENGTH - 1)),
    "table": (lambda t: lambda x, b, h, i, j: x + t[i % 7, j % 5], (7, 5)),
    "large table": (lambda t: lambda x, b, h, i, j: x + t[i % 80, j % 90], (80, 90)),
    "pairs": (lambda t: lambda x, b, h, i, j: x + t[i, j], (LENGTH, LENGTH)),
    "several": (lambda t: lambda x, b, h, i, j: x * t[i] + t[j] + t[i - j] + t[i // 2 + j // 2], (LENGTH,)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", CAPTURED)
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_captured_tensors(engine, name, dim, dtype):
    """Near float64, and with the same bits in every run."""
    torch.manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    of, shape = CAPTURED[name]
    q, dout = (torch.randn(B, H, LENGTH, dim, dtype=dtype, device="cuda") for _ in range(2))
    k, v = (torch.randn(B, HKV, LENGTH, dim, dtype=dtype, device="cuda") for _ in range(2))
    t = torch.rand(shape, dtype=wide, device="cuda") / 2 + 0.75
    found = []
    for _ in range(2):
        read = t.clone().requires_grad_()
        try:
            strobe.attention(q, k, v, score=of(read), causal=True, engine=engine).backward(dout)
        except NotImplementedError as refused:
            pytest.skip(str(refused))
        assert read.grad is not None
        found.append(read.grad)
    assert torch.equal(*found)
    exact = t.double().requires_grad_()
    b, h, i, j = torch.meshgrid(*(torch.arange(n, device="cuda") for n in (B, H, LENGTH, LENGTH)), indexing="ij")
    x = q.double() @ k.double().repeat_interleave(H // HKV, 1).mT / dim**0.5
    scores = of(exact)(x, b, h, i, j).masked_fill(i < j, -torch.inf)
    (scores.softmax(-1) @ v.double().repeat_interleave(H // HKV, 1)).backward(dout.double())
    assert exact.grad is not None
    # Sums of many terms of both signs may cancel: the error is measured by the terms' root of summed squares, too.
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5, torch.float64: 1e-11}[dtype]
    off, size = float((found[0].double() - exact.grad).abs().max()), float(exact.grad.abs().max())
    terms = float(dout.double().square().sum()) ** 0.5 * (dim**0.5 if name in ("constant", "head", "curved", "query") else 1)
    assert off <= tolerance * (size + terms / max(1, exact.numel()) ** 0.5), f"error {off:.3g} of {size:.3g}"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_graph_of_cuda_makes_gradients_of_captured_tensors(engine):
    """A captured graph waits for nothing on the host, and clears its sums in every run."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 4, 200, 64, dtype=torch.float16, device="cuda") for _ in range(4))
    t, u = (torch.rand(200, device="cuda").requires_grad_() for _ in range(2))

    def gradients() -> tuple[Tensor, ...]:
        out = strobe.attention(q, k, v, score=lambda x, b, h, i, j: x * t[i] + u[(i * j) % 200], causal=True, engine=engine)
        return torch.autograd.grad(out, (t, u), dout)

    try:
        expected = gradients()
    except NotImplementedError as refused:
        pytest.skip(str(refused))
    gradients()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
