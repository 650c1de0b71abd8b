"""Gradients of captured tensors on the emulated GPU: each way of summing, with numbers that are huge, tiny or no numbers."""

from __future__ import annotations

import pytest

from emulated import output

# The engine, the dtype and the case; prints the largest error, relative to the largest element of a head's gradient.
PROGRAM = """
import sys

import torch

import strobe
from device import running_on

engine, dtype, case = sys.argv[1], getattr(torch, sys.argv[2]), sys.argv[3]
B, H, L, D = 1, 2, 150, 64 if engine == "cuda-tf32" else 16
SCORES = {
    "rows": (lambda t: lambda x, b, h, i, j: x * t[h, i], (H, L)),
    "columns": (lambda t: lambda x, b, h, i, j: x + t[h, j] * x, (H, L)),
    "diagonals": (lambda t: lambda x, b, h, i, j: x + t[h, i - j] * 2, (H, L)),
    "table": (lambda t: lambda x, b, h, i, j: x + t[h, i % 7, j % 5], (H, 7, 5)),
    "two loads of a table": (lambda t: lambda x, b, h, i, j: x * (1 + t[h, i % 7, j % 5] * t[h, j % 7, (i + 2) % 5]), (H, 7, 5)),
    "five tables": (
        lambda t: lambda x, b, h, i, j: x + sum(t[h, (i + 3 * n) % 7, (j * n) % 5] * (n + 1) for n in range(1, 6)),
        (H, 7, 5),
    ),
    "large table": (lambda t: lambda x, b, h, i, j: x + t[h, i // 2, j % 60], (H, L // 2, 60)),
}
name, what = case.split(": ")
score, shape = SCORES[name]
generator = torch.Generator().manual_seed(1)
q, k, v, dout = (torch.randn(B, H, L, D, generator=generator).to(dtype) for _ in range(4))
table = torch.rand(shape, generator=generator)
scale = {"huge": 2.0**100, "tiny": 2.0**-100}.get(what, 1.0)
dout[:, : 1 if name in ("table", "two loads of a table", "five tables") else H] *= scale  # the others have one unit for all heads
if what == "not finite":
    dout[0, 1, 40, 3] = float("nan")


def gradient(engine, dtype):
    captured = table.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    with running_on(engine):
        out = strobe.attention(*(x.to(dtype) for x in (q, k, v)), score=score(captured), causal=True, engine=engine)
        return torch.autograd.grad(out, captured, dout.to(dtype))[0].double()


found, expected = gradient(engine, dtype), gradient("reference", torch.float64)
assert torch.equal(found.isfinite(), expected.isfinite()), (found, expected)
assert what != "not finite" or not expected.isfinite().all()
if what == "same bits":
    assert torch.equal(found, gradient(engine, dtype))
heads = zip(found.nan_to_num().flatten(1), expected.nan_to_num().flatten(1))
print(max(float((x - y).abs().max() / y.abs().max()) for x, y in heads))
"""
LINES = ("rows", "columns", "diagonals", "table", "two loads of a table", "five tables", "large table")
BOUNDS = {"bfloat16": 2e-2, "float32": 2e-5, "float64": 1e-12}


CASES = [
    *(("cuda-mma", "bfloat16", what) for what in ("same bits", "huge", "tiny", "not finite")),
    *(("cuda-tf32", "float32", what) for what in ("same bits", "not finite")),
    ("cuda-simt", "float64", "not finite"),
]


@pytest.mark.parametrize(("engine", "dtype", "what"), CASES)
@pytest.mark.parametrize("lines", LINES)
def test_each_way_of_summing(lines, engine, dtype, what):
    assert float(output(PROGRAM, engine, dtype, f"{lines}: {what}")) < BOUNDS[dtype]


# Four loads of one tensor, and all pairs of a tile add the same number to one element. Prints the element's error.
ONE_ELEMENT = """
import torch

import strobe
from device import running_on

L, D = 128, 64
generator = torch.Generator().manual_seed(0)
q, k, v, dout = torch.zeros(1, 1, L, D), torch.randn(1, 1, L, D, generator=generator), torch.ones(1, 1, L, D), torch.ones(1, 1, L, D) * 0.9
v[:, :, 64:] = -1


def gradient(engine, dtype):
    t = torch.zeros(2, dtype=dtype, requires_grad=True)
    loads = lambda i, j: sum(t[(i * j + n) // 100000] for n in range(4))
    with running_on(engine):
        score = lambda x, b, h, i, j: x + torch.where(j < 64, loads(i, j), 0.0)
        out = strobe.attention(*(x.to(dtype) for x in (q, k, v)), score=score, engine=engine)
        return float(torch.autograd.grad(out, t, dout.to(dtype))[0][0])


print(abs(gradient("cuda-tf32", torch.float32) / gradient("reference", torch.float64) - 1))
"""


def test_a_cell_does_not_overflow():
    assert float(output(ONE_ELEMENT)) < 1e-6


# More reads than one set of loads holds, of one tensor and of others, summed in each way. Prints the largest error of each gradient.
MANY_READS = """
import sys

import torch

import strobe
from device import running_on

engine, dtype = sys.argv[1], getattr(torch, sys.argv[2])
H, L, D = 2, 80, 16
generator = torch.Generator().manual_seed(4)
q, k, v, dout = (torch.randn(1, H, L, D, generator=generator).to(dtype) for _ in range(4))
shapes = [(H, L, 32), (H, L), (5, 7), (L, 130)]
tables = [torch.randn(shape, generator=generator) for shape in shapes]


def gradients(engine, dtype):
    t, u, small, large = leaves = [x.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_() for x in tables]

    def score(x, b, h, i, j):
        of_pair = large[i, (i + j) % 130] + small[i % 5, j % 7] + u[h, j] * t[h, i, 31]
        return x + torch.dot(t[h, i], torch.arange(32) / 16.0) * torch.tanh(of_pair) + small[j % 5, i % 7] * u[h, i - j]

    with running_on(engine):
        out = strobe.attention(*(x.to(dtype) for x in (q, k, v)), score=score, causal=True, engine=engine)
        return [x.double() for x in torch.autograd.grad(out, leaves, dout.to(dtype))]


pairs = zip(gradients(engine, dtype), gradients("reference", torch.float64))
print(*(float((x - y).abs().max() / y.abs().max()) for x, y in pairs))
"""


@pytest.mark.parametrize(("engine", "dtype"), [("cuda-mma", "bfloat16"), ("cuda-simt", "float32"), ("cuda-simt", "float64")])
def test_more_reads_than_a_set_holds(engine, dtype):
    errors = [float(x) for x in output(MANY_READS, engine, dtype).split()]
    assert len(errors) == 4
    assert max(errors) < BOUNDS[dtype]


# In a part: what explain() says of the engines.
PART = """
import torch

import strobe
from device import running_on

q, k, v = (torch.randn(1, 1, 32, 16).bfloat16() for _ in range(3))
t = torch.zeros(64, requires_grad=True)
part = strobe.Part([(32, 32)], [(0, 32)], 64, 64)
with running_on("cuda-mma"):
    print(strobe.explain(q, k, v, score=lambda x, b, h, i, j: x + t[i], part=part, backward=True))
"""


def test_parts_are_left_to_simt():
    lines = [" ".join(line.split()) for line in output(PART).splitlines()]
    assert "cuda-mma no: computes no gradients of captured tensors in parts" in lines
    assert any(line.startswith("cuda-simt ") and "predicted" in line for line in lines)
    assert lines[lines.index("choice") + 1].startswith("cuda-simt")
