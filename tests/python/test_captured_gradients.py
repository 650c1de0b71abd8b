"""Gradients of what a function of the score captures: by differences, by the formula in PyTorch, and by the reference."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import strobe
from device import DEVICE, EMULATED, ON_GPU, running_on
from engines import engines_under_test

B, H, HKV, S, D = 2, 4, 2, 21, 8
Function = Callable[..., Any]


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


IDS = torch.tensor([0, 2, 1, 1, 0, 3, 2, 2, 0, 1, 3, 3, 1, 0, 2, 2, 1, 3, 0, 0, 1]).to(DEVICE)


def t5(distance: Tensor) -> Tensor:
    """T5's bucket of a distance: near ones have one each, far ones share."""
    far = torch.log(torch.clamp(distance.abs(), min=1) / 2) / math.log(4) * 2
    return torch.where(distance.abs() < 2, distance.abs() * 1.0, torch.clamp(2 + torch.floor(far), max=4)).long()


# Functions of the score by the class of the LOADs that they make, with the shapes of the tensors that they read.
CLASSES: dict[str, tuple[Callable[..., Function], list[tuple[int, ...]]]] = {
    "constant": (lambda c: lambda s, b, h, i, j: s * c + torch.tanh(c), [()]),
    "head": (lambda t: lambda s, b, h, i, j: s - torch.exp(t[h]) * (i - j).abs(), [(H,)]),
    "batch": (lambda t: lambda s, b, h, i, j: s * torch.sigmoid(t[b, h]), [(B, H)]),
    "query": (lambda t: lambda s, b, h, i, j: torch.tanh(s * t[b, i]) + t[b, i], [(B, S)]),
    "key": (lambda t: lambda s, b, h, i, j: s + t[j] ** 2, [(S,)]),
    "difference": (lambda t: lambda s, b, h, i, j: s + t[h, i - j + S - 1], [(H, 2 * S - 1)]),
    "difference, wrapped": (lambda t: lambda s, b, h, i, j: s * t[j - i], [(2 * S,)]),
    "table": (lambda t: lambda s, b, h, i, j: s * t[i, j], [(S, S)]),
    "buckets": (lambda t: lambda s, b, h, i, j: s + t[t5(i - j), h], [(5, H)]),
    "gather of gathers": (lambda t, u: lambda s, b, h, i, j: s + t[IDS[i], IDS[j]] * u[IDS[IDS[j]]], [(4, 4), (4,)]),
    "several": (
        lambda t, u, w: lambda s, b, h, i, j: w * torch.tanh(s / w) + t[h] * u[i] * s + torch.where(i < j, t[0], u[j - i]),
        [(H,), (S,), ()],
    ),
}


def made(name: str, dtype: torch.dtype = torch.float64) -> tuple[Callable[..., Function], list[Tensor]]:
    of, shapes = CLASSES[name]
    return of, [numbers(20 + n, *shape, dtype=dtype).requires_grad_() for n, shape in enumerate(shapes)]


def qkv(dtype: torch.dtype = torch.float64, queries: int = S, keys: int = S, d: int = D) -> list[Tensor]:
    shapes = ((B, H, queries, d), (B, HKV, keys, d), (B, HKV, keys, d))
    return [numbers(seed, *shape, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]


def formula(q: Tensor, k: Tensor, v: Tensor, score: Function, mask: Function | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """out and lse of dense sequences, with the options that the tests draw, in PyTorch."""
    (b_, h_, sq, d), sk = q.shape, k.shape[2]
    k, v = (x.repeat_interleave(h_ // x.shape[1], 1) for x in (k, v))
    sizes = (b_, h_, sq, sk)
    b, h, i, j = torch.broadcast_tensors(*(torch.arange(n).view([-1 if a == m else 1 for a in range(4)]) for m, n in enumerate(sizes)))
    b, h, i, j = (x.to(DEVICE) for x in (b, h, i, j))
    offset = 0 if options.get("alignment") == "top_left" else sk - sq
    s = score(q @ k.mT * d**-0.5, b, h, i, j)
    if (slopes := options.get("alibi_slopes")) is not None:
        s = s - slopes.double()[:, None, None] * (i + offset - j).abs()
    if (bias := options.get("bias")) is not None:
        s = s + bias
    seen = torch.ones(sizes, dtype=torch.bool, device=DEVICE)
    if options.get("causal"):
        seen &= j <= i + offset
    left, right = options.get("window") or (None, None)
    if left is not None:
        seen &= j >= i + offset - left
    if right is not None:
        seen &= j <= i + offset + right
    if (given := options.get("mask_tensor")) is not None:
        seen &= given
    if mask is not None:
        seen &= mask(b, h, i, j)
    s = torch.where(seen, s, -math.inf)
    sinks = options.get("sinks")
    logits = s if sinks is None else torch.cat([s, sinks[:, None, None].expand(b_, h_, sq, 1)], -1)
    lse = torch.logsumexp(
        torch.where(seen.any(-1, keepdim=True) if sinks is None else torch.ones_like(logits, dtype=torch.bool), logits, 0), -1
    )
    p = torch.where(seen, torch.exp(s - lse[..., None]), 0)
    if (keep := options.get("keep")) is not None:
        p = p * keep.to(p.dtype) / options["rate"]
    return p @ v, lse


def close(got: Any, expected: Any, rtol: float = 1e-9) -> None:
    for n, (x, y) in enumerate(zip(got, expected, strict=True)):
        assert x is not None, n
        assert x.shape == y.shape, n
        most = max(float(y.abs().max()), 1.0) if y.numel() else 1.0  # sums of terms of about 1, which may cancel
        torch.testing.assert_close(x.double(), y.double(), rtol=0, atol=rtol * most, msg=lambda words, n=n: f"{n}: {words}")


@pytest.mark.parametrize("name", CLASSES)
def test_gradients_by_differences(name):
    of, captured = made(name)
    arrays = [numbers(seed, *shape).requires_grad_() for seed, shape in ((1, (B, H, 6, 3)), (2, (B, HKV, 7, 3)), (3, (B, HKV, 7, 2)))]

    def call(q: Tensor, k: Tensor, v: Tensor, *read: Tensor) -> Any:
        return strobe.attention(q, k, v, score=of(*read), causal=True, return_lse=True)

    with running_on(None):
        assert torch.autograd.gradcheck(call, [*arrays, *captured])


def dropout(q: Tensor) -> dict[str, Any]:
    keep = strobe.dropout_mask((B, H, S, S), 0.25, seed=5, like=q.detach().cpu()).to(DEVICE)
    return {"keep": keep, "rate": 0.75}


# Options of attention(), and what the formula has instead.
OPTIONS: dict[str, Callable[[Tensor], tuple[dict[str, Any], dict[str, Any]]]] = {
    "none": lambda q: ({}, {}),
    "causal": lambda q: ({"causal": True}, {"causal": True}),
    "window": lambda q: ({"window": (4, 2)}, {"window": (4, 2)}),
    "mask": lambda q: ({"mask": numbers(30, B, 1, S, S) > -0.5}, {"mask_tensor": numbers(30, B, 1, S, S) > -0.5}),
    "mask function": lambda q: ({"mask": lambda b, h, i, j: (i + j + h) % 3 > 0}, {"mask": lambda b, h, i, j: (i + j + h) % 3 > 0}),
    "bias": lambda q: ({"bias": numbers(31, H, 1, S)}, {"bias": numbers(31, H, 1, S)}),
    "alibi": lambda q: ({"alibi_slopes": numbers(32, H).float()}, {"alibi_slopes": numbers(32, H).float()}),
    "sinks": lambda q: ({"sinks": numbers(33, H)}, {"sinks": numbers(33, H)}),
    "dropout": lambda q: ({"dropout": 0.25, "seed": 5}, dropout(q)),
    "blocks": lambda q: (
        {"block_mask": strobe.BlockMask.from_dense(blocks()[0], 16, 16)},
        {"mask_tensor": blocks()[1]},
    ),
    "tiles": lambda q: ({"tile_q": 16, "tile_k": 32}, {}),
    "invariant": lambda q: ({"invariant": True, "causal": True}, {"causal": True}),
    "bshd": lambda q: ({"layout": "bshd"}, {}),
}


def blocks() -> tuple[Tensor, Tensor]:
    kept = torch.tensor([[True, False], [True, True]], device=DEVICE)
    return kept.repeat_interleave(16, 0).repeat_interleave(16, 1)[:S, :S], kept.repeat_interleave(16, 0).repeat_interleave(16, 1)[:S, :S]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CLASSES)
def test_options_against_the_formula(name, options):
    of, captured = made(name)
    arrays = qkv()
    ours, theirs = OPTIONS[options](arrays[0])
    given = [x.transpose(1, 2) for x in arrays] if options == "bshd" else arrays
    with running_on(None):
        out, lse = strobe.attention(*given, score=of(*captured), return_lse=True, **ours)
        if options == "bshd":
            out = out.transpose(1, 2)
        expected_out, expected_lse = formula(*arrays, of(*captured), **theirs)
        dout, dlse = numbers(40, *out.shape), numbers(41, *lse.shape)
        seen = torch.isfinite(lse)
        got = torch.autograd.grad([out, lse], [*captured, *arrays], [dout, dlse * seen])
    expected = torch.autograd.grad([expected_out, expected_lse], [*captured, *arrays], [dout, dlse * seen])
    close(got, expected)


@pytest.mark.parametrize("name", CLASSES)
def test_lengths_and_alignment(name):
    """Fewer queries than keys, from either corner."""
    of, captured = made(name)
    arrays = qkv(queries=9)
    for alignment in ("bottom_right", "top_left"):
        options = {"causal": True, "alignment": alignment}
        with running_on(None):
            out = strobe.attention(*arrays, score=of(*captured), **options)
            dout = numbers(42, *out.shape)
            got = torch.autograd.grad(out, captured, dout)
        close(got, torch.autograd.grad(formula(*arrays, of(*captured), **options)[0], captured, dout))


LENGTHS_Q, LENGTHS_K = [5, 0, 16, 3], [7, 4, 16, 0]


@pytest.mark.parametrize("name", CLASSES)
def test_packed_sequences_and_padding(name):
    """Sequences without queries, without keys, and padding behind the last one. Positions are those in the sequence."""
    of, captured = made(name)
    if name in ("batch", "query"):
        of = {
            "batch": lambda t: lambda s, b, h, i, j: s * torch.sigmoid(t[b % 2, h]),
            "query": lambda t: lambda s, b, h, i, j: s + t[b % 2, i],
        }[name]
    cu = [torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=DEVICE) for lengths in (LENGTHS_Q, LENGTHS_K)]
    q = numbers(50, sum(LENGTHS_Q) + 2, H, D).requires_grad_()
    k, v = (numbers(seed, sum(LENGTHS_K) + 2, HKV, D).requires_grad_() for seed in (51, 52))
    dout = numbers(53, *q.shape)
    with running_on(None):
        out = strobe.attention(q, k, v, score=of(*captured), cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], causal=True)
        got = torch.autograd.grad(out, captured, dout)
    total = [torch.zeros_like(x) for x in captured]
    for n, (sq, sk) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
        if not sq or not sk:
            continue
        rows, keys = slice(int(cu[0][n]), int(cu[0][n]) + sq), slice(int(cu[1][n]), int(cu[1][n]) + sk)
        each = [x.detach()[at].transpose(0, 1)[None] for x, at in ((q, rows), (k, keys), (v, keys))]
        score = of(*captured)
        made_here, _ = formula(*each, lambda s, b, h, i, j, n=n, score=score: score(s, b + n, h, i, j), causal=True)
        for sum_, x in zip(
            total, torch.autograd.grad(made_here, captured, dout[rows].transpose(0, 1)[None], allow_unused=True), strict=True
        ):
            sum_ += 0 if x is None else x
    close(got, total)


def test_keys_that_do_not_count():
    table = numbers(60, S).requires_grad_()
    arrays = qkv()
    used = torch.tensor([5, 0], dtype=torch.int32, device=DEVICE)
    with running_on(None):
        out = strobe.attention(*arrays, score=lambda s, b, h, i, j: s + table[j], seqused_k=used)
        out.sum().backward()
    assert (table.grad[5:] == 0).all()
    assert (table.grad[:5] != 0).all()


@pytest.mark.parametrize("name", CLASSES)
def test_each_engine_against_the_reference(name):
    for engine in engines_under_test(name):
        for dtype, bound in ((torch.float32, 3e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float64, 1e-11)):
            of, captured = made(name, torch.float64 if dtype == torch.float64 else torch.float32)
            arrays = [x.detach() for x in qkv(dtype, 70, 70, 64)]
            shapes = {S: 70, 2 * S: 140, 2 * S - 1: 139}
            captured = [numbers(70 + n, *(shapes.get(size, size) for size in x.shape), dtype=x.dtype) for n, x in enumerate(captured)]
            options = {"score": of(*captured), "causal": True, "engine": engine}
            try:
                with running_on(engine):
                    out, lse = strobe.attention(*arrays, return_lse=True, **options)
                    dout = numbers(71, *out.shape, dtype=dtype)
                    found = strobe.attention_backward(dout, *arrays, out, lse, captured=captured, **options)
            except NotImplementedError:
                continue
            del options["engine"]
            on_cpu = [x.cpu() for x in (dout, *arrays)]
            if ON_GPU and not EMULATED:
                continue  # the reference reads captured tensors of the CPU
            expected = strobe.reference_backward(*on_cpu, captured=captured, **options)
            assert all(x.dtype == y.dtype for x, y in zip(found.dcaptured, captured, strict=True))
            close(found.dcaptured, expected.dcaptured, bound)


REALS = [
    lambda r, x, y: x + y,
    lambda r, x, y: x * y,
    lambda r, x, y: torch.tanh(x) - y,
    lambda r, x, y: torch.maximum(x, y),
    lambda r, x, y: torch.sin(x) * torch.sigmoid(y),
    lambda r, x, y: x / (2 + y * y),
    lambda r, x, y: torch.exp(-x * x) + y,
]


def random_function(r: random.Random, tables: list[Tensor]) -> Function:
    """A function of up to eight LOADs with drawn indices, which may lie outside of their axes."""
    indices = [
        lambda b, h, i, j: h,
        lambda b, h, i, j: i,
        lambda b, h, i, j: j - 3,
        lambda b, h, i, j: i - j,
        lambda b, h, i, j: 2 * (j - i) + 5,
        lambda b, h, i, j: (i - j).abs() // 2,
        lambda b, h, i, j: i + j,
        lambda b, h, i, j: IDS[i] * h,
        lambda b, h, i, j: torch.where(i > j, b, j),
        lambda b, h, i, j: torch.minimum(i, j) % 4 - 6,
    ]
    plan = [(r.choice(tables), [r.choice(indices) for _ in range(2)], r.choice(REALS), r.random() < 0.3) for _ in range(r.randint(1, 8))]

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for table, at, combine, hides in plan:
            read = table[tuple(index(b, h, i, j) for index in at[: table.dim()])] if table.dim() else table
            s = combine(r, s, read)
            if hides:
                s = torch.where((i + j) % 5 == 0, s, 0.5 * s)
        return s

    return score


@pytest.mark.skipif(ON_GPU, reason="each graph would be compiled")
@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_against_the_reference(seed):
    r = random.Random(seed)
    tables = [numbers(80 + n, *shape) for n, shape in enumerate(((), (5,), (S,), (4, 6), (9, 3)))]
    arrays = [x.detach() for x in qkv()]
    score = random_function(r, tables)
    mask = r.choice([None, lambda b, h, i, j: (i * 7 + j * 3) % 4 > 0])
    options = {"score": score, "causal": r.random() < 0.5} | ({} if mask is None else {"mask": mask})
    for x in tables:
        x.requires_grad_()
    q, k, v = arrays
    out, _lse = strobe.attention(q, k, v, return_lse=True, **options)
    dout = numbers(90, *out.shape)
    grads = torch.autograd.grad(out, tables, dout, allow_unused=True)
    read = [x for x, g in zip(tables, grads, strict=True) if g is not None]
    assert read or all(g is None for g in grads)
    expected = strobe.reference_backward(dout, q, k, v, captured=read, **options)
    close([g for g in grads if g is not None], getattr(expected, "dcaptured", ()), 1e-10)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)


@pytest.mark.parametrize("name", CLASSES)
def test_same_bits_in_each_run_and_for_each_number_of_threads(name):
    of, captured = made(name, torch.float32)
    arrays = [x.detach() for x in qkv(torch.float32)]
    options = {"score": of(*captured), "deterministic": True}
    found = []
    with running_on(None):
        out, lse = (x.detach() for x in strobe.attention(*arrays, return_lse=True, **options))
        dout = numbers(91, *out.shape, dtype=torch.float32)
        for threads in (1, 2, 2, 7):
            how = {} if ON_GPU else {"threads": threads}
            with torch.no_grad():
                found.append(strobe.attention_backward(dout, *arrays, out, lse, captured=captured, **options, **how).dcaptured)
    for others in found[1:]:
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(found[0], others, strict=True))


# --- corners ------------------------------------------------------------------------------------------------------------------------------


def gradient(score: Function, of: list[Tensor], arrays: list[Tensor] | None = None, **options: Any) -> tuple[Tensor, ...]:
    with running_on(None):
        out = strobe.attention(*(arrays or qkv()), score=score, **options)
        return torch.autograd.grad(out.square().sum(), of, retain_graph=True)  # they may share a graph with the formula


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_sum_gives_zeros(queries, keys):
    t = numbers(1, S).requires_grad_()
    (got,) = gradient(lambda s, b, h, i, j: s + t[j] * t[i], [t], qkv(queries=queries, keys=keys))
    assert torch.equal(got, torch.zeros_like(t))


def test_rows_without_keys_and_what_a_mask_hides_add_nothing():
    """Derivatives that are infinite or NaN behind a mask, and rows that see nothing."""
    t = torch.where(torch.arange(S) % 2 == 0, torch.arange(S) * 1.0, 0.0).double().to(DEVICE).requires_grad_()

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + torch.sqrt(t[j]) + torch.log(t[j])  # an infinite derivative where t is 0

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j % 2 == 0) & (j > 0) & (i > 4)

    (got,) = gradient(score, [t], mask=mask)
    assert torch.isfinite(got).all()
    assert (got[1::2] == 0).all()
    assert got[0] == 0
    assert (got[2::2] != 0).any()


def test_minus_infinity_of_the_function_hides():
    t = numbers(2, S).requires_grad_()
    (got,) = gradient(lambda s, b, h, i, j: torch.where(j < 7, s + t[j], -math.inf), [t])
    assert (got[7:] == 0).all()
    assert (got[:7] != 0).all()
    hidden = torch.where(torch.arange(S) < 7, 0.0, -math.inf).double().to(DEVICE).requires_grad_()
    (got,) = gradient(lambda s, b, h, i, j: s + hidden[j], [hidden])
    assert (got[7:] == 0).all()
    assert (got[:7] != 0).all()


def test_what_is_not_finite_comes_out_as_such():
    t = torch.zeros(S, dtype=torch.float64, device=DEVICE).requires_grad_()
    (got,) = gradient(lambda s, b, h, i, j: s + torch.sqrt(t[j]), [t])
    assert not torch.isfinite(got).any()
    huge = torch.full((), 1e300, dtype=torch.float64, device=DEVICE).requires_grad_()
    (got,) = gradient(lambda s, b, h, i, j: s * (huge * 1e-300) + huge * 1e-300, [huge])
    assert torch.isfinite(got).all()


def test_indices_wrap_and_are_limited():
    t = numbers(3, 4).requires_grad_()
    arrays = qkv()
    (got,) = gradient(lambda s, b, h, i, j: s * t[j - 6], [t], arrays)
    (expected,) = torch.autograd.grad(
        formula(*arrays, lambda s, b, h, i, j: s * t[torch.clamp(torch.where(j < 6, j - 2, j - 6), 0, 3)])[0].square().sum(), [t]
    )
    close([got], [expected])


def test_a_tensor_that_the_result_does_not_need():
    t, u = numbers(4, H).requires_grad_(), numbers(5, H).requires_grad_()

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        _ = u[h] * s
        return s + t[h] * j

    with running_on(None):
        out = strobe.attention(*qkv(), score=score)
        got = torch.autograd.grad(out.square().sum(), [t, u], allow_unused=True)
    assert got[0] is not None
    assert got[1] is None


def test_steps_have_the_gradient_zero():
    t = numbers(6, H).requires_grad_()
    (got,) = gradient(lambda s, b, h, i, j: s + torch.floor(t[h]), [t])
    assert torch.equal(got, torch.zeros_like(t))


def test_both_functions_read_it():
    t, u = numbers(7, S).requires_grad_(), numbers(8, S).requires_grad_()
    arrays = qkv()
    score, mask = (lambda s, b, h, i, j: s + t[j]), (lambda b, h, i, j: (t[j] > -0.5) | (u[i] > 0))
    with running_on(None):
        out = strobe.attention(*arrays, score=score, mask=mask)
        got = torch.autograd.grad(out.square().sum(), [t, u], allow_unused=True)
    assert got[1] is None  # a comparison has no gradient
    close(got[:1], torch.autograd.grad(formula(*arrays, score, mask)[0].square().sum(), [t]))


def test_only_a_mask_reads_it():
    u = numbers(8, S).requires_grad_()
    arrays = qkv()
    for _ in range(3):  # made, prepared, and run
        with running_on(None):
            out = strobe.attention(*arrays, mask=lambda b, h, i, j: u[j] > -1)
            got = torch.autograd.grad(out.square().sum(), [*arrays, u], allow_unused=True)
        assert got[3] is None
        assert all(x is not None for x in got[:3])
    detached = [x.detach() for x in arrays]
    with running_on(None):
        assert not strobe.attention(*detached, mask=lambda b, h, i, j: u[j] > -1).requires_grad


# --- autograd -----------------------------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(numbers(9, H, 2 * S))
        self.factor = torch.nn.Parameter(numbers(10))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return strobe.attention(q, k, v, score=lambda s, b, h, i, j: self.factor * s + self.table[h, i - j], causal=True)


def expected_of(layer: Layer, arrays: list[Tensor]) -> tuple[Tensor, ...]:
    out, _ = formula(*arrays, lambda s, b, h, i, j: layer.factor * s + layer.table[h, i - j], causal=True)
    return torch.autograd.grad(out.square().sum(), [*layer.parameters()])


@pytest.mark.parametrize("how", ["plain", "checkpoint", "reentrant"])
def test_parameters_of_a_module(how):
    layer, arrays = Layer(), qkv()
    expected = expected_of(layer, arrays)
    run: Function = layer if how == "plain" else partial(checkpoint, layer, use_reentrant=how == "reentrant")
    for _ in range(4):  # made, prepared, and run twice
        layer.zero_grad()
        with running_on(None):
            run(*arrays).square().sum().backward()
        close([x.grad for x in layer.parameters()], expected)


def test_it_learns():
    """A step along the gradient makes the loss smaller, and numbers that changed in place are read again."""
    layer, arrays = Layer(), [x.detach() for x in qkv()]
    optimiser = torch.optim.SGD(layer.parameters(), 0.002)
    losses = []
    for _ in range(6):
        optimiser.zero_grad()
        with running_on(None):
            loss = layer(*arrays).square().sum()
            loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))


def test_intermediates_views_and_expanded_tensors():
    base = numbers(11, 3, H).requires_grad_()
    row, column, wide, twice = base[1], base.T[:, 0], base[2, 0].expand(S), (base * 2)[0]
    arrays = qkv()

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * row[h] + column[h] * j + wide[i] * wide[j] + twice[h]

    (got,) = gradient(score, [base], arrays)
    (expected,) = torch.autograd.grad(formula(*arrays, score)[0].square().sum(), [base])
    close([got], [expected])


def test_a_tensor_of_the_call_is_captured_as_well():
    arrays = qkv()
    q, sinks = arrays[0], numbers(12, H).requires_grad_()
    score = lambda s, b, h, i, j: s + q[b, h, i, 0] + sinks[h]  # noqa: E731
    with running_on(None):
        out = strobe.attention(*arrays, score=score, sinks=sinks)
        got = torch.autograd.grad(out.square().sum(), [q, sinks])
    close(got, torch.autograd.grad(formula(*arrays, score, sinks=sinks)[0].square().sum(), [q, sinks]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_gradient_has_the_tensors_dtype(dtype):
    t = numbers(13, H, dtype=dtype).requires_grad_()
    for own in (torch.float32, torch.bfloat16):
        (got,) = gradient(lambda s, b, h, i, j: s + t[h] * (i - j), [t], qkv(own))
        assert got.dtype == dtype
        assert got.shape == t.shape


def test_only_captured_tensors_require_grad():
    t = numbers(14, S).requires_grad_()
    arrays = [x.detach() for x in qkv()]
    (got,) = gradient(lambda s, b, h, i, j: s + t[j], [t], arrays)
    close([got], torch.autograd.grad(formula(*arrays, lambda s, b, h, i, j: s + t[j])[0].square().sum(), [t]))


def test_none_requires_grad():
    t = numbers(15, S)
    arrays = qkv()
    with running_on(None):
        strobe.attention(*arrays, score=lambda s, b, h, i, j: s + t[j]).sum().backward()
        tracked = t.clone().requires_grad_()
        with torch.no_grad():
            assert not strobe.attention(*arrays, score=lambda s, b, h, i, j: s + tracked[j]).requires_grad
    assert t.grad is None
    assert arrays[0].grad is not None


def test_detach_in_the_function_stops_the_gradient():
    t = numbers(16, S).requires_grad_()
    arrays = qkv()
    for _ in range(3):
        score = lambda s, b, h, i, j: s + t[j] * t.detach()[i] + t.detach()[j]  # noqa: E731
        (got,) = gradient(score, [t], arrays)
        close([got], torch.autograd.grad(formula(*arrays, score)[0].square().sum(), [t]))
    with pytest.raises(ValueError, match=r"score: .*detach\(\) of what is made of a tensor that requires grad; accepted is detach\(\) of"):
        strobe.attention(*arrays, score=lambda s, b, h, i, j: s + torch.exp(t)[j].detach())


def test_a_change_in_place_before_the_backward_is_an_error():
    t = numbers(17, S).requires_grad_()
    own = t * 1
    with running_on(None):
        out = strobe.attention(*qkv(), score=lambda s, b, h, i, j: s + own[j])
        own.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_there_is_no_third_derivative():
    t = numbers(18, S).requires_grad_()
    arrays = [x.detach() for x in qkv()]
    for _ in range(3):
        with running_on(None):
            out = strobe.attention(*arrays, score=lambda s, b, h, i, j: s + t[j] ** 2)
            (first,) = torch.autograd.grad(out.square().sum(), [t], create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), [t], create_graph=True)
            with pytest.raises(NotImplementedError, match=r"strobe\.attention has no third derivative"):
                second.sum().backward()


def test_the_full_backward_of_a_call_with_bias_and_sinks():
    bias, sinks, t = numbers(31, H, 1, S).requires_grad_(), numbers(33, H).requires_grad_(), numbers(19, S).requires_grad_()
    arrays = qkv()
    score = lambda s, b, h, i, j: torch.tanh(s * t[i])  # noqa: E731
    with running_on(None):
        out = strobe.attention(*arrays, score=score, bias=bias, sinks=sinks)
        got = torch.autograd.grad(out.square().sum(), [*arrays, bias, sinks, t])
    expected = torch.autograd.grad(formula(*arrays, score, bias=bias, sinks=sinks)[0].square().sum(), [*arrays, bias, sinks, t])
    close(got, expected)


@pytest.mark.parametrize("option", ["page_table", "k_scale"])
def test_keys_without_gradients_refuse_tensors_that_require_grad(option):
    t = numbers(19, S).requires_grad_()
    q, k, v = (x.detach().float() for x in qkv())
    if option == "page_table":
        more = {"page_table": torch.zeros((B, 1), dtype=torch.int32, device=DEVICE)}
        k, v = k[:1], v[:1]
    else:
        more = {name: torch.ones((B, HKV, S), device=DEVICE) for name in ("k_scale", "v_scale")}
        k, v = k.to(torch.int8), v.to(torch.int8)
    with running_on(None):
        out = strobe.attention(q, k, v, score=lambda s, b, h, i, j: s + t[j].float(), **more)
    with pytest.raises(NotImplementedError, match=rf"{option}: .* have no gradients, and score requires grad"):
        out.sum().backward()


# --- attention_backward -------------------------------------------------------------------------------------------------------------------


def test_attention_backward_returns_what_is_named():
    t, u, ids = numbers(1, H, dtype=torch.float32), numbers(2, S), torch.arange(S, device=DEVICE)
    arrays = [x.detach() for x in qkv(torch.float32)]
    options = {"score": lambda s, b, h, i, j: s * t[h] + u[ids[j]], "causal": True}
    with running_on(None):
        out, lse = strobe.attention(*arrays, return_lse=True, **options)
        dout = numbers(3, *out.shape, dtype=torch.float32)
        found = strobe.attention_backward(dout, *arrays, out, lse, captured=[u, t], **options)
        plain = strobe.attention_backward(dout, *arrays, out, lse, **options)
    assert isinstance(found, strobe.GradientsWithCaptured)
    assert isinstance(plain, strobe.Gradients)
    assert all(torch.equal(x, y) for x, y in zip(found[:3], plain[:3], strict=True))
    assert found.dbias is None
    du, dt = found.dcaptured
    assert (du.dtype, du.shape, dt.dtype, dt.shape) == (u.dtype, u.shape, t.dtype, t.shape)
    leaves = [x.clone().requires_grad_() for x in (t, u)]
    expected, _ = formula(*(x.double() for x in arrays), lambda s, b, h, i, j: s * leaves[0][h] + leaves[1][ids[j]], causal=True)
    dt_expected, du_expected = torch.autograd.grad(expected, leaves, dout.double())
    close([dt, du], [dt_expected, du_expected], 1e-5)


@pytest.mark.skipif(ON_GPU, reason="NumPy arrays lie in host memory")
def test_numpy():
    t, arrays = np.random.default_rng(0).standard_normal(S), [x.detach().cpu().numpy() for x in qkv()]

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return np.tanh(s * t[i]) + t[j]

    out, lse = strobe.attention(*arrays, score=score, return_lse=True)
    dout = np.ones_like(out)
    found = strobe.attention_backward(dout, *arrays, out, lse, score=score, captured=[t])
    reference = strobe.reference_backward(dout, *arrays, score=score, captured=[t])
    assert isinstance(found.dcaptured[0], np.ndarray)
    leaf = torch.from_numpy(t).requires_grad_()
    expected, _ = formula(*map(torch.from_numpy, arrays), lambda s, b, h, i, j: torch.tanh(s * leaf[i]) + leaf[j])
    (of_leaf,) = torch.autograd.grad(expected.sum(), [leaf])
    for each in (found, reference):
        np.testing.assert_allclose(each.dcaptured[0], of_leaf.numpy(), rtol=1e-9, atol=1e-12)


def test_what_attention_backward_refuses():
    t, ids = numbers(1, H), torch.arange(S, device=DEVICE)
    arrays = [x.detach() for x in qkv()]
    score = lambda s, b, h, i, j: s + t[h] + ids[j]  # noqa: E731
    with running_on(None):
        out, lse = strobe.attention(*arrays, score=score, return_lse=True)
    call = partial(strobe.attention_backward, torch.ones_like(out), *arrays, out, lse)
    words = r"captured: \[0\], of shape .*, is no array that the function of the score reads; accepted are its float arrays"
    for captured, options in (
        ([ids], {"score": score}),
        ([t.clone()], {"score": score}),
        ([t], {}),
        ([t], {"mask": lambda b, h, i, j: t[h] < 9}),
    ):
        with pytest.raises(ValueError, match=words):
            call(captured=captured, **options)
    with pytest.raises(TypeError, match=r"captured: .*; accepted is a list of arrays"):
        call(captured=t, score=score)
    with pytest.raises(ValueError, match=r"captured: given beside rows; accepted is one of the two"):
        strobe.reference_backward(torch.ones_like(out), *arrays, rows=[0], captured=[t], score=score)


@pytest.mark.skipif(ON_GPU, reason="the tensors of a part, on the CPU")
@pytest.mark.parametrize("partial_", [False, True])
def test_parts_add_up(partial_):
    """The gradients of parts of the queries, or of the keys, add up to those of the whole problem."""
    t, u = numbers(1, S), numbers(2, H, 2 * S)
    arrays = [x.detach() for x in qkv()]
    score = lambda s, b, h, i, j: s * t[i] + u[h, i - j] + t[j]  # noqa: E731
    out, lse = strobe.attention(*arrays, score=score, causal=True, return_lse=True)
    dout = numbers(3, *out.shape)
    whole = strobe.attention_backward(dout, *arrays, out, lse, score=score, causal=True, captured=[t, u]).dcaptured
    sums = [torch.zeros_like(t), torch.zeros_like(u)]
    q, k, v = arrays
    for begin, end in ((0, 8), (8, S)):
        rows = slice(begin, end)
        if partial_:
            part = strobe.Part([(0, S)], [(begin, end - begin)], S, S, partial=True)
            lse2 = torch.stack([lse, torch.zeros_like(lse)])
            delta = (dout * out).sum(-1)
            each = strobe.attention_backward(
                dout, q, k[:, :, rows], v[:, :, rows], None, lse2, delta=delta, part=part, score=score, causal=True, captured=[t, u]
            )
        else:
            part = strobe.Part([(begin, end - begin)], [(0, S)], S, S)
            each = strobe.attention_backward(
                dout[:, :, rows],
                q[:, :, rows],
                k,
                v,
                out[:, :, rows],
                lse[:, :, rows],
                part=part,
                score=score,
                causal=True,
                captured=[t, u],
            )
        for sum_, x in zip(sums, each.dcaptured, strict=True):
            sum_ += x
    close(sums, whole)


def test_explain_names_the_lines():
    t = numbers(1, H).requires_grad_()
    with running_on(None):
        words = strobe.explain(*qkv(), score=lambda s, b, h, i, j: s + t[h], backward=True)
    assert any(line.split()[:1] == ["dcaptured_0"] and line.endswith("float64 (4), summed along rows") for line in words.splitlines())


def test_eight_tensors_in_calls_that_repeat():
    """From the third call on, calls are prepared: their results are made elsewhere."""
    q = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    tables = [torch.randn(5, dtype=torch.float64).requires_grad_() for _ in range(8)]

    def score(x, b, h, i, j):
        for n, table in enumerate(tables):
            x = x + table[(i + n * j) % 5] * (n + 1)
        return x

    found = [torch.autograd.grad(strobe.attention(q, q, q, score=score).sin().sum(), tables) for _ in range(5)]
    assert all(torch.equal(x, y) for each in found[1:] for x, y in zip(found[0], each, strict=True))
    assert all(g.abs().max() > 0 for g in found[0])
