"""Compares every rung of the ladder with the float64 reference, both directions, with tiles that really change. The CPU runs plain C++."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import strobe
from cases import Inputs
from check import Yardstick
from device import DEVICE, ON_GPU, moved, running_on

RUNGS = ("ladder-naive", "ladder-flash1", "ladder-flash2") + ("ladder-tensor-cores",) * ON_GPU
on_gpu = pytest.mark.skipif(not ON_GPU, reason="the CPU's form has no such limit")
LENGTHS = [(64, 64), (1, 1), (1, 129), (129, 1), (33, 77), (130, 65), (257, 300)]
HEAD_DIMS = [1, 7, 64, 80, 128, 200, 256]
TILES = [(16, 16), (64, 32), (32, 48), (128, 16)] + [(7, 50), (1, 1), (300, 200)] * (not ON_GPU)
GENERATOR = torch.Generator()


def dtypes(rung: str) -> tuple[torch.dtype, ...]:
    return (torch.float16, torch.bfloat16) if rung == "ladder-tensor-cores" else (torch.float32,)


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    """(B, H, S, D), the heads of one token adjacent as in a model."""
    b, h, s, d = shape
    return torch.randn(b, s, h, d, generator=GENERATOR).to(dtype).transpose(1, 2)


def check(rung: str, q: Tensor, k: Tensor, v: Tensor, tile: tuple[int, int] | None = None, **options: Any) -> None:
    """Forward and backward, checked by the accuracy clause of the contract."""
    inputs = Inputs(q, k, v, drawn(*q.shape, dtype=q.dtype), None, options)
    how = {"engine": rung} | ({} if tile is None else {"tile_q": tile[0], "tile_k": tile[1]})
    leaves = [moved(x, DEVICE).detach().requires_grad_() for x in (q, k, v)]
    out, lse = strobe.attention(*leaves, return_lse=True, **options, **how)
    gradients = torch.autograd.grad(out, leaves, inputs.dout.to(DEVICE))
    results = zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True)
    faults = Yardstick(inputs).faults({name: x.detach().cpu() for name, x in results})
    assert not faults, f"{rung} {q.dtype}: " + "\n".join(faults)


@pytest.fixture(autouse=True)
def placed():
    GENERATOR.manual_seed(0)
    with running_on(None):
        yield


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("rung", RUNGS)
def test_lengths(rung, lengths, causal):
    sq, sk = lengths
    for dtype in dtypes(rung):
        q, k, v = (drawn(2, 2, s, 40, dtype=dtype) for s in (sq, sk, sk))
        check(rung, q, k, v, (32, 48), causal=causal)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("rung", RUNGS)
def test_head_dimensions(rung, head_dim):
    for dtype in dtypes(rung):
        check(rung, *(drawn(1, 2, 77, head_dim, dtype=dtype) for _ in "qkv"), causal=True)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("rung", RUNGS)
def test_tiles(rung, tile):
    q, k, v = (drawn(1, 2, 150, 64, dtype=dtypes(rung)[0]) for _ in "qkv")
    for causal in (False, True):
        check(rung, q, k, v, tile, causal=causal)
    explained = strobe.explain(*(x.to(DEVICE) for x in (q, k, v)), engine=rung, tile_q=tile[0], tile_k=tile[1])
    assert f"; tile {tile[0]} x {tile[1]};" in explained, explained


@pytest.mark.parametrize("rung", RUNGS)
def test_grouped_heads(rung):
    q, k, v = (drawn(2, heads, 90, 64, dtype=dtypes(rung)[0]) for heads in (6, 2, 2))
    check(rung, q, k, v, causal=True)


@pytest.mark.parametrize("rung", RUNGS)
def test_any_strides(rung):
    dtype = dtypes(rung)[0]
    q = torch.randn(2, 2, 64, 50, generator=GENERATOR).to(dtype).transpose(2, 3)  # adjacent columns are far apart
    k = drawn(1, 2, 70, 64, dtype=dtype).expand(2, 2, 70, 64)
    v = drawn(2, 2, 140, 65, dtype=dtype)[:, :, ::2, 1:]
    check(rung, q, k, v, causal=False)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("window", [(20, 0), (5, None), (0, 0), (8, 8)])
def test_windows(rung, window):
    q, k, v = (drawn(1, 2, s, 64, dtype=dtypes(rung)[0]) for s in (100, 150, 150))
    check(rung, q, k, v, (32, 16), window=window)


@pytest.mark.parametrize("rung", RUNGS)
def test_nothing_to_do(rung):
    dtype = dtypes(rung)[0]
    for sq, sk in itertools.product((0, 5), (0, 5)):
        leaves = [torch.ones(1, 2, s, 16, dtype=dtype, device=DEVICE, requires_grad=True) for s in (sq, sk, sk)]
        out, lse = strobe.attention(*leaves, return_lse=True, engine=rung)
        if sk == 0:
            assert (out == 0).all()
            assert (lse == -math.inf).all()
        for gradient in torch.autograd.grad(out.sum(), leaves):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("rung", ["ladder-naive", "ladder-flash1"] + ["ladder-flash2"] * (not ON_GPU))
def test_deterministic(rung):
    leaves = [drawn(2, 4, 200, 64, dtype=torch.float32).to(DEVICE).requires_grad_() for _ in "qkv"]

    def gradients():
        out = strobe.attention(*leaves, causal=True, deterministic=True, engine=rung)
        return torch.autograd.grad(out.sum(), leaves)

    first = gradients()
    for _ in range(5):
        assert all(map(torch.equal, first, gradients()))


@on_gpu
@pytest.mark.parametrize("rung", ["ladder-flash2", "ladder-tensor-cores"])
def test_atomic_additions_are_refused_where_determinism_is_asked_for(rung):
    leaves = [drawn(1, 1, 20, 64, dtype=dtypes(rung)[0]).to(DEVICE).requires_grad_() for _ in "qkv"]
    out = strobe.attention(*leaves, deterministic=True, engine=rung)
    with pytest.raises(NotImplementedError, match="atomic"):
        torch.autograd.grad(out.sum(), leaves)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"softcap": 3.0}, "softcap"), ({"dropout": 0.5, "seed": 1, "offset": 0}, "dropout"), ({"scale": -1.0}, "positive")],
)
@pytest.mark.parametrize("rung", RUNGS)
def test_what_is_refused(rung, options, reason):
    x = torch.ones(1, 1, 20, 64, dtype=dtypes(rung)[0], device=DEVICE)
    with pytest.raises(NotImplementedError, match=reason):
        strobe.attention(x, x, x, engine=rung, **options)


@on_gpu
@pytest.mark.parametrize("rung", RUNGS)
def test_a_tile_that_does_not_fit(rung):
    x = torch.ones(1, 1, 20, 256, dtype=dtypes(rung)[0], device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"a tile of \(512, 512\)"):
        strobe.attention(x, x, x, engine=rung, tile_q=512, tile_k=512)


def test_nobody_climbs_the_ladder_unasked():
    x = torch.ones(1, 1, 20, 64, device=DEVICE)
    explained = strobe.explain(x, x, x)
    assert explained.count("runs only when asked for by name") >= len(RUNGS)
    assert not explained.rpartition("choice\n")[2].strip().startswith("ladder")


@pytest.mark.parametrize("threads", [2, 3, 50])
@pytest.mark.skipif(ON_GPU, reason="threads are the CPU's")
@pytest.mark.parametrize("rung", RUNGS)
def test_threads_do_not_change_a_bit(rung, threads):
    leaves = [drawn(2, heads, 70, 24, dtype=torch.float32).requires_grad_() for heads in (4, 2, 2)]

    def results(threads: int) -> tuple[Tensor, ...]:
        out, lse = strobe.attention(*leaves, causal=True, engine=rung, threads=threads, return_lse=True)
        return out, lse, *torch.autograd.grad(out.square().sum(), leaves)

    assert all(map(torch.equal, results(1), results(threads)))


def test_an_engine_with_two_forms_is_listed_once():
    names = [name for name, _ in strobe.engines()]
    assert len(names) == len(set(names))
    assert dict(strobe.engines())["ladder-flash1"] is None  # the CPU's form runs here


def test_a_refusal_is_of_the_form_that_was_asked():
    x = torch.ones(1, 1, 20, 16, dtype=torch.float64, device=DEVICE)
    with pytest.raises(NotImplementedError) as refusal:
        strobe.attention(x, x, x, engine="ladder-flash1")
    assert str(refusal.value) == "the engine that was asked for cannot take this problem:\nladder-flash1: float32 only"
