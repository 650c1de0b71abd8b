"""Functions of the score and the mask under torch.compile and torch.export: one graph, the numbers of the call without a compiler."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

import strobe
from device import DEVICE, ON_GPU
from strobe import _compiled
from strobe._operators import FORWARD_NAME

B, H, D = 2, 3, 16

pytestmark = pytest.mark.skipif(_compiled.OPERATOR is None, reason="this PyTorch's compiler does not keep functions in its graph")


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)
    return drawn.to(DEVICE, dtype)


def drawn(S: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [randn(B, H, S, D, seed=seed, dtype=dtype).requires_grad_() for seed in range(3)]


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(model, **{"fullgraph": True, "dynamic": True, "backend": "aot_eager"} | options)


def same(found: Callable[..., Any], model: Callable[..., Any], inputs: Sequence[Any], more: Sequence[Tensor] = ()) -> None:
    """Both give the same numbers, and the same gradients of the inputs and of more that require one. (A number that is no constant in the
    graph may be computed with otherwise than one that is.)"""
    tracked = [x for x in (*inputs, *more) if isinstance(x, Tensor) and x.requires_grad]
    results = []
    for each in (found, model):
        out = each(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), tracked)] if tracked else [out])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


class Model(torch.nn.Module):
    """Functions that are methods and closures, and read parameters, a buffer, an attribute, an input, a length and what was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Linear(D, D)
        self.slopes = torch.nn.Parameter(torch.linspace(0.1, 0.5, H))
        self.register_buffer("documents", torch.arange(64) // 5)
        self.cap = 20.0

    def mask(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) | (self.documents[i] == self.documents[j])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        computed, S = given.cumsum(0), q.shape[2]

        def score(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            rate = self.slopes.detach()[h] + F.softplus(self.slopes[h])
            return self.cap * torch.tanh(x / self.cap) - rate * (i - j).abs() / S + computed[i] + given[-j]

        return strobe.attention(self.q(q), k, v, score=score, mask=self.mask)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_for_all_lengths_and_numbers(backend):
    model = Model().to(DEVICE)
    counter = CompileCounterWithBackend(backend)
    found = compiled(model, backend=counter)
    for n, S in enumerate((12, 33, 7)):
        model.cap = 20.0 / (n + 1)
        same(found, model, [*drawn(S), randn(S).requires_grad_()], [*model.parameters()])
        if not n:
            first = counter.frame_count  # PyTorch may try twice
    assert counter.frame_count == first


def test_numbers_of_closures():
    """Floats, integers, and what is computed of lengths: other values are in the next call, and compile nothing."""

    def model(q: Tensor, k: Tensor, v: Tensor, cap: float, period: int) -> Tensor:
        S, twice = q.shape[2], cap * 2.0
        scale = 1 / math.sqrt(S)

        def score(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return x * twice + cap * (i - j) * scale + torch.where(i % period == 1, 1.0, 0.5) * (i // (S // 2)) + S

        return strobe.attention(q, k, v, score=score)

    counter = CompileCounterWithBackend("aot_eager")
    found = compiled(model, backend=counter)
    for n, (S, cap, period) in enumerate([(12, 2.5, 3), (21, 0.5, 4), (9, -1.0, 5)]):
        same(found, model, [*drawn(S), cap, period])
        if not n:
            first = counter.frame_count
    assert counter.frame_count == first


def test_numbers_do_not_wait_for_a_gpu():
    """A graph of a GPU's tensors, which need not be there, has no copy from the host and reads nothing back."""
    graphs: list[torch.fx.GraphModule] = []

    def compile_nothing(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def model(q: Tensor, k: Tensor, v: Tensor, cap: float) -> Tensor:
        twice, S = cap * 2.0, q.shape[2]
        return strobe.attention(q, k, v, score=lambda x, b, h, i, j: x * twice + cap * 3.0 - cap * (i - j) / S**0.5)

    with FakeTensorMode(shape_env=ShapeEnv()):
        q, k, v = (torch.empty(B, H, 12, D, device="cuda") for _ in range(3))
        compiled(model, backend=aot_autograd(fw_compiler=compile_nothing))(q, k, v, 2.5)
    names = {node.target.name() for graph in graphs for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert FORWARD_NAME in names
    assert not {name for name in names if "copy" in name or "local_scalar" in name}
    captured = [node.kwargs["captured"] for node in graphs[-1].graph.nodes if "captured" in node.kwargs]
    assert [x.meta["val"].device.type for x in captured[0]] == ["cuda"]


def test_a_constant_that_changes_is_compiled_again():
    """Without dynamic=True numbers are constants until they change."""
    factor = 2.0

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return strobe.attention(q, k, v, score=lambda x, b, h, i, j: x * factor)

    found = compiled(model, dynamic=None)
    for factor in (2.0, 3.0, 4.0):  # noqa: B007
        same(found, model, drawn(12))


INDICES: dict[str, Callable[..., Tensor]] = {
    "scalars": lambda t, h, i, j: t[h, i, j],
    "one after the other": lambda t, h, i, j: t[h][i][j],
    "negative": lambda t, h, i, j: t[h, i - j - 1, -1],
    "a slice between": lambda t, h, i, j: t[h, :, 2][i],
    "a new axis": lambda t, h, i, j: t[:, None, i][h, 0, j],
    "an ellipsis": lambda t, h, i, j: t[..., j][h, i],
    "part of an axis": lambda t, h, i, j: t[h, 2:5, j][i % 3],
    "an index of an index": lambda t, h, i, j: t[h, (t[h, i, 0] > 0).long() + i // 2, j],
    "of two axes": lambda t, h, i, j: t[:, i, j][h],
    "gather": lambda t, h, i, j: t[0, 0].gather(0, i[None])[0] + t[1, 2].index_select(0, j)[0],
}


def test_indices():
    """table[i] with a scalar tensor reads the element of each i, never that of the example that a compiler traces with."""
    table = randn(H, 12, 12)

    def model(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        outs = [strobe.attention(q, k, v, score=lambda x, b, h, i, j, index=index: x + index(table, h, i, j)) for index in INDICES.values()]
        return torch.stack(outs)

    same(compiled(model), model, [*drawn(12), table.requires_grad_()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_scalars_have_the_dtypes_of_the_recorder(dtype):
    """x is float32, or float64 if q is, and positions are int64, whatever the compiler's own scalars are."""
    if ON_GPU and dtype == torch.float64:
        pytest.skip("one dtype is enough")

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def score(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(i < j, torch.finfo(x.dtype).min, x) + torch.iinfo(i.dtype).max / 2.0**63

        return strobe.attention(q, k, v, score=score)

    same(compiled(model), model, drawn(12, dtype))


def test_results_that_are_numbers():
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return strobe.attention(q, k, v, score=lambda x, b, h, i, j: 1.5, mask=lambda b, h, i, j: True)

    same(compiled(model), model, [x.detach() for x in drawn(12)])


def test_beside_other_options():
    model_of = Model().to(DEVICE)
    blocks = strobe.BlockMask.from_function(model_of.mask, B, H, 40, 40, block=16)
    bias = randn(B, H, 40, 40).requires_grad_()

    def score(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return x - model_of.slopes[h] * (i - j).abs()

    def model(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        options: dict[str, Any] = {"score": score, "bias": bias, "causal": True}
        first = strobe.attention(q, k, v, block_mask=blocks, dropout=0.2, seed=q.shape[0], **options)
        second, lse = strobe.attention(q, k, v, mask=model_of.mask, return_lse=True, **options)
        most = strobe.attention(q, k, v, aux=("max_logit",), **options).max_logit
        return first + second + lse[..., None] + most[..., None, None]

    same(compiled(model), model, [*drawn(40), bias], [model_of.slopes])


def test_autocast():
    slopes = torch.linspace(0.1, 0.5, H).to(DEVICE)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return strobe.attention(q, k, v, score=lambda x, b, h, i, j: x * slopes[h])

    same(compiled(model), model, drawn(12))


def test_the_module_takes_functions():
    model = strobe.nn.FlashAttention(D, score=lambda x, b, h, i, j: x * 0.5, mask=lambda b, h, i, j: i >= j)
    same(compiled(model), model, drawn(12))


def test_checkpoint():
    model = Model().to(DEVICE)

    def layer(*inputs: Tensor) -> Tensor:
        return checkpoint(model, *inputs, use_reentrant=False)

    same(compiled(layer), layer, [*drawn(12), randn(12).requires_grad_()], [*model.parameters()])


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU")
def test_cuda_graphs():
    model = Model().to(DEVICE)
    found = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for n in range(4):  # warm-up, capture, and replays that read other numbers
        given = randn(12, seed=n).requires_grad_()
        torch.compiler.cudagraph_mark_step_begin()
        same(found, model, [*drawn(12), given], [*model.parameters()])
        with torch.no_grad():
            model.slopes += 0.1


def test_functions_that_share_tensors_pass_them_once():
    table = torch.randint(0, 3, (12,)).to(DEVICE, torch.uint8)  # converted for the library

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return strobe.attention(
            q, k, v, score=lambda x, b, h, i, j: x + table[i], mask=lambda b, h, i, j: (table[i] <= table[j]) | (i == j)
        )

    same(compiled(model), model, drawn(12))


# torch.export


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict):
    model = Model().eval()
    S = torch.export.Dim("S", min=4, max=64)
    inputs = *(x.detach().cpu() for x in drawn(12)), randn(12).cpu()
    program = torch.export.export(model, inputs, dynamic_shapes=({2: S}, {2: S}, {2: S}, {0: S}), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert FORWARD_NAME in {node.target._schema.name for node in loaded.graph.nodes if hasattr(node.target, "_schema")}
    for length in (12, 33, 7):
        inputs = *(x.detach().cpu() * 2 for x in drawn(length)), randn(length).cpu()
        assert torch.equal(loaded.module()(*inputs), model(*inputs))


# What is refused


REFUSED: dict[str, dict[str, Any]] = {
    "a branch": {"score": lambda x, b, h, i, j: x if h == 0 else -x},
    "a reduction": {"score": lambda x, b, h, i, j: x + (x + torch.arange(300, device=x.device)).sum()},
    "a write": {"score": lambda x, b, h, i, j: x.add_(1)},
    "another signature": {"score": lambda x, b, h: x},
    "beside an option": {"score": lambda x, b, h, i, j: x, "softcap": 2.0},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_has_the_same_words(case):
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return strobe.attention(q, k, v, **REFUSED[case])

    inputs = drawn(12)
    with pytest.raises((TypeError, ValueError)) as expected:
        model(*inputs)
    with pytest.raises(type(expected.value)) as found:
        compiled(model, fullgraph=False)(*inputs)
    assert str(found.value) == str(expected.value)


def test_one_graph_or_an_error_that_says_why():
    table = torch.ones(2, 1, 1, 1, 1, device=DEVICE)

    def score(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return x + table[i, 0, 0, 0, 0]

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return strobe.attention(q, k, v, score=score)

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"score: score reads a tensor of shape \(2, 1, 1, 1, 1\); accepted"):
        compiled(model, dynamic=None)(*drawn(12))


def test_a_line_is_named():
    def score(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        scaled = x * 2
        return scaled.sort().values

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return strobe.attention(q, k, v, score=score)

    line = score.__code__.co_firstlineno + 2
    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"score: score \(line {line} of test_function_compile.py\): aten.sort"):
        compiled(model)(*drawn(12))


def test_functions_that_the_compiler_cannot_trace_run_outside_of_its_graph():
    calls = []

    def score(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        calls.append(torch.get_rng_state().numel())
        return x * 2

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return strobe.attention(q * 2, k, v, score=score) * 3

    same(compiled(model, fullgraph=False), model, drawn(12))
    assert calls


def test_attention_backward_runs_outside_of_the_graph():
    slopes = torch.linspace(0.1, 0.5, H).to(DEVICE)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options: dict[str, Any] = {"score": lambda x, b, h, i, j: x * slopes[h]}
        out, lse = strobe.attention(q, k, v, return_lse=True, **options)
        return torch.stack(strobe.attention_backward(out, q, k, v, out, lse, **options)[:3])

    inputs = [x.detach() for x in drawn(12)]
    same(compiled(model, fullgraph=False), model, inputs)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="strobe.attention_backward: functions of the score and the mask are recorded outside of the graph"):
        compiled(model)(*inputs)


def test_a_pytorch_without_a_place_for_it_ends_its_graph(monkeypatch):
    monkeypatch.setattr(_compiled, "OPERATOR", None)

    def model(q: Tensor, k: Tensor, v: Tensor, cap: float) -> Tensor:
        return strobe.attention(q * 2, k, v, score=lambda s, b, h, i, j: cap * torch.tanh(s / cap)) * 2

    found = compiled(model, fullgraph=False)
    for cap in (2.0, 3.0):
        same(found, model, [*drawn(12), cap])
    torch._dynamo.reset()
    with pytest.raises(Exception, match="functions of the score and the mask are recorded outside of the graph; PyTorch 2.11"):
        compiled(model)(*drawn(12), 2.0)


def test_an_error_has_no_words_of_another_threads_call():
    q, k, v = (x.detach() for x in drawn(8))

    def refused_elsewhere() -> None:
        score = functools.partial(_compiled._score, lambda x, b, h, i, j: x.item(), torch.float32)
        mask = functools.partial(_compiled._mask, None)
        with pytest.raises(ValueError, match="turns a tensor into a number"):
            _compiled.OPERATOR(q, k, v, score, (mask,), ((), (), ("score",)), {})

    def broken(*_: Any) -> Any:
        with mock.patch.object(_compiled, "recorded", of_module), ThreadPoolExecutor() as other:
            other.submit(refused_elsewhere).result()
        raise RuntimeError("broken")

    of_module = _compiled.recorded
    with mock.patch.object(_compiled, "recorded", broken), pytest.raises(torch._dynamo.exc.Unsupported, match="broken") as failed:
        compiled(lambda q, k, v: strobe.attention(q, k, v, score=lambda x, b, h, i, j: x * 2))(q, k, v)
    assert "turns a tensor" not in str(failed.value)
