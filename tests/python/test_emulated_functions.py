"""Functions that GPU kernels have forms of their own for, on the emulated GPU: penalties by the distance, blocks that a mask's function
sees as a whole, in which it is not evaluated, and what is computed ahead because many pairs share it."""

from __future__ import annotations

import pytest

from emulated import output

# bfloat16 against the reference; prints the largest error of out, dq, dk and dv, relative to the largest number of each.
PROGRAM = """
import sys

import torch

import strobe
from device import running_on

slopes = torch.tensor([0.05, -0.02])
eight = [torch.tensor([0.1 * n, -0.2 * n]) for n in range(8)]
documents = (torch.arange(256) // 100).int()
prefix = lambda b, h, i, j: (j <= i) | (j < 160)
beyond = lambda x, b, h, i, j: x + 1 / (200.0 - (i - j))  # infinite at the distance that rows past the last of 200 queries have
CASES = {  # score, mask, options, keys
    "full blocks": (None, prefix, {}, 256),
    "full blocks, causal": (None, lambda b, h, i, j: documents[i] <= documents[j] + 1, {"causal": True}, 256),
    "full blocks, with a derivative": (lambda x, b, h, i, j: x * 0.5 + documents[i] * 0.1, prefix, {}, 256),
    "blocks of 48 keys, causal": (None, lambda b, h, i, j: (i - j <= 100) | (j < 96), {"causal": True}, 256),  # tiles join blocks
    "hidden by a large number": (lambda x, b, h, i, j: torch.where(documents[i] == documents[j], x, -1e9), None, {"causal": True}, 256),
    "a step upwards": (lambda x, b, h, i, j: x + torch.where(j < 128, 0.0, 200.0), None, {}, 256),  # P overflows
    "ALiBi": (lambda x, b, h, i, j: x - slopes[h] * (i - j).abs(), None, {"causal": True}, 284),
    "a distance with its sign": (lambda x, b, h, i, j: x + torch.nn.functional.softplus(slopes[h]) * 0.1 * (j - i), None, {}, 284),
    "eight tensors before ALiBi's option": (
        lambda x, b, h, i, j: torch.tanh(x) + sum(t[h] for t in eight),
        None,
        {"alibi_slopes": slopes, "causal": True},
        284,
    ),
    "softcap, ALiBi": (lambda x, b, h, i, j: 3 * torch.tanh(x / 3) - slopes[h] * (i - j).abs(), None, {"causal": True}, 256),
    "infinite past the last query": (beyond, None, {}, 256),
}
score, mask, options, keys = CASES[sys.argv[1]]
queries = 200 if score is beyond else 256
given = {"score": score} if score else {}
generator = torch.Generator().manual_seed(0)
q, k, v, dout = (torch.randn(1, 2, n, 64, generator=generator).bfloat16() for n in (queries, keys, keys, queries))
results = []
for engine, dtype in (("reference", torch.float64), ("cuda-sm90", torch.bfloat16)):
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    masks, size = {}, {"block_k": 48} if "48" in sys.argv[1] else {}
    if mask and engine == "reference":
        masks = {"mask": mask}
    elif mask:
        masks = {"block_mask": strobe.BlockMask.from_function(mask, 1, 2, 256, keys, **size)}
        assert masks["block_mask"].full.any() and not masks["block_mask"].full.all()
    with running_on(engine):
        out = strobe.attention(*leaves, **given, **masks, **options, engine=engine)
        results.append([out, *(() if size else torch.autograd.grad(out, leaves, dout.to(dtype)))])  # the backward takes no such blocks
print(float(torch.stack([(x.double() - y).abs().max() / y.abs().max() for y, x in zip(*results)]).max()))  # NaN if one is
"""


@pytest.mark.parametrize(
    "name",
    [
        *("full blocks", "full blocks, causal", "full blocks, with a derivative", "blocks of 48 keys, causal"),
        *("hidden by a large number", "a step upwards"),
        *("ALiBi", "a distance with its sign", "softcap, ALiBi", "eight tensors before ALiBi's option"),
        "infinite past the last query",
    ],
)
def test_they_are_right(name):
    assert float(output(PROGRAM, name)) < 0.01  # the largest of those seen is 0.006


AHEAD = """
import math
import sys

import torch

import strobe
from device import running_on

generator = torch.Generator().manual_seed(0)
random = lambda *shape: torch.randn(shape, generator=generator)
HEADS, MOST = 4, 1024
buckets, table, of_sequence = random(32, HEADS), random(HEADS, 2 * MOST), random(3, 2 * MOST)


def t5(x, b, h, i, j):
    distance = torch.clamp(i - j, min=0)
    far = 16 + (torch.log(distance.float() / 16) / math.log(8) * 16).to(torch.int32)
    return x + buckets[torch.where(distance < 16, distance, torch.minimum(far, torch.full_like(far, 31))), h]


def positions(x, b, h, i, j):
    return x * torch.exp2(-(i - j).abs() * 0.01) * (1 + 0.1 * torch.exp2(torch.exp2(-0.01 * i))) + torch.tanh(torch.tanh(0.1 * j))


relative = lambda x, b, h, i, j: x + table[h, i - j + MOST] * torch.exp2(of_sequence[b, i - j + MOST])
near = lambda x, b, h, i, j: torch.where((i - j).abs() <= 200, x + torch.exp2(torch.exp2(table[h, i - j + MOST] / 4)), x - 1)
dilated = lambda b, h, i, j: ((i - j) % 5 == 0) | ((i - j) % 7 == 1) | ((i - j) % 11 == 2)
either = lambda b, h, i, j: ((i - j) % 5 == 0) | (table[h, i - j + MOST] > 0.5)
packed = {"cu_seqlens_q": torch.tensor([0, 500, 500, 1100]).int(), "cu_seqlens_k": torch.tensor([0, 700, 760, 1200]).int()}
CASES = {  # score, mask, options, keys, heads of k and v, engine
    "T5, heads in groups": (t5, None, {"causal": True}, 900, 1, "cuda-sm90"),
    "tables, packed sequences": (relative, None, packed, 1200, 4, "cuda-sm90"),
    "a table within a window": (near, None, {"window": (300, 30)}, 700, 4, "cuda-sm90"),
    "positions, dropout": (positions, None, {"dropout": 0.2, "seed": 3}, 900, 4, "cuda-mma"),
    "a mask": (None, dilated, {"causal": True}, 900, 4, "cuda-sm90"),
    "a mask, infinite keys": (None, dilated, {}, 900, 4, "cuda-sm90"),
    "a mask of heads, beside blocks": (None, either, {"blocks": True}, 900, 4, "cuda-sm90"),
    "T5 in cuda-mma": (t5, None, {}, 900, 2, "cuda-mma"),
    "tables in cuda-tf32": (relative, dilated, {}, 700, 4, "cuda-tf32"),
    "positions in cuda-simt": (positions, None, {}, 700, 4, "cuda-simt"),
}
score, mask, options, keys, heads, engine = CASES[sys.argv[1]]
options = dict(options)
blocks = options.pop("blocks", False)
dtype = {"cuda-simt": torch.float64, "cuda-tf32": torch.float32}.get(engine, torch.bfloat16)
dim = 16 if dtype == torch.float64 else 64
shape = lambda heads, rows: (rows, heads, dim) if "cu_seqlens_q" in options else (1, heads, rows, dim)
queries = 1100 if "cu_seqlens_q" in options else 600
q, k, v, dout = (random(*shape(*x)).to(dtype) for x in ((HEADS, queries), (heads, keys), (heads, keys), (HEADS, queries)))
if "infinite" in sys.argv[1]:
    k[:, :, 17], v[:, :, 30] = float("inf"), float("nan")
given = {"score": score} if score else {}
results = []
for name, of in (("reference", torch.float64), (engine, dtype)):
    leaves = [x.to(of).requires_grad_() for x in (q, k, v)]
    masks = {"mask": mask} if mask else {}
    if blocks and name != "reference":
        masks = {"block_mask": strobe.BlockMask.from_function(mask, 1, HEADS, queries, keys)}
    with running_on(name):
        if name != "reference":
            assert "computed ahead" in str(strobe.explain(*leaves, **given, **masks, **options, engine=name, backward=True))
        out = strobe.attention(*leaves, **given, **masks, **options, engine=name)
        results.append([out.detach()])
        if "infinite" not in sys.argv[1]:
            results[-1] += torch.autograd.grad(out, leaves, dout.to(of))
errors = [0.0]
for expected, x in zip(*results):
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(x), finite)
    errors.append(float((x.double() - expected)[finite].abs().max() / expected[finite].abs().max()))
print(max(errors))
"""


@pytest.mark.parametrize(
    ("name", "most"),  # about three times the errors seen
    [
        ("T5, heads in groups", 0.02),
        ("tables, packed sequences", 0.02),
        ("a table within a window", 0.02),
        ("positions, dropout", 0.02),
        ("a mask", 0.02),
        ("a mask, infinite keys", 0.02),
        ("a mask of heads, beside blocks", 0.02),
        pytest.param("T5 in cuda-mma", 0.02, marks=pytest.mark.long),
        pytest.param("tables in cuda-tf32", 1e-5, marks=pytest.mark.long),  # half a minute
        ("positions in cuda-simt", 1e-12),
    ],
)
def test_what_pairs_share_is_computed_ahead(name, most):
    assert float(output(AHEAD, name)) < most


FEW_QUERIES = """
import torch

import strobe
from device import running_on

gate = torch.zeros(4096, 32)
q, k = (torch.zeros(1, 1, 1, 64).bfloat16().expand(4096, 32, length, 64) for length in (1, 128))
for score in (lambda x, b, h, i, j: x + torch.tanh(gate[b, h] * i), lambda x, b, h, i, j: x + torch.tanh(gate[b, h] * j)):
    with running_on("cuda-simt"):
        print("computed ahead" in str(strobe.explain(q, k, k, score=score)))
"""


def test_nothing_is_computed_ahead_that_few_pairs_share():
    """A query for each sequence: the values, with room past their ends, would take a GiB."""
    assert output(FEW_QUERIES).split() == ["False", "False"]
