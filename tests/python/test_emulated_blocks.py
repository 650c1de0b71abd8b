"""BlockMask.from_function on the emulated GPU: its lists are those that the CPU finds."""

from __future__ import annotations

import pytest

from emulated import output

# Prints what differs between both, or nothing.
PROGRAM = """
import math
import random
import sys

import torch

import strobe
from device import running_on
from random_function import draw_mask, fill
from test_block_functions import B, FUNCTIONS, H, SIZES


def made(function, b, h, sizes, on_gpu, **more):
    with running_on("cuda-simt" if on_gpu else "reference"):
        return strobe.BlockMask.from_function(function, b, h, *sizes[:2], block_q=sizes[2], block_k=sizes[3], device="cpu", **more)


def compare(name, function, b, h, sizes):
    gpu, cpu = (made(function, b, h, sizes, on_gpu) for on_gpu in (True, False))
    assert gpu.made_for == cpu.made_for and gpu.shape == cpu.shape
    lists = (x.arrays + x.full_arrays for x in (gpu, cpu))
    for what, x, y in zip(("rows", "cols", "rows_t", "cols_t", "full", "full_t"), *lists):
        if x.dtype != y.dtype or not torch.equal(x, y):
            print(name, sizes, what, x.tolist()[:20], y.tolist()[:20])
    return gpu


def documented():
    for name, (function, _, _) in FUNCTIONS.items():
        for sizes in SIZES:
            compare(name, function, B, H, sizes)
    for b, h in ((0, 2), (2, 0)):
        compare("nothing", lambda b, h, i, j: (i + b + h) >= j, b, h, (64, 64, 16, 16))


def drawn():
    for seed in range(int(sys.argv[2]), int(sys.argv[3])):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        function = draw_mask(rng)
        nq, nk = rng.randint(1, 400), rng.randint(1, 400)
        normal = lambda *shape: torch.randn(*shape, generator=generator)
        fill(function, {"b": 2, "h": 2, "i": nq, "j": nk}, rng, normal, torch.float32)
        sizes = (nq, nk, rng.choice([1, 5, 16, 48, 500]), rng.choice([1, 7, 16, 33, 500]))
        compare(f"seed {seed}", function.callable(), 2, 2, sizes)


def captured():
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(3000, generator=g)
    normal[100], normal[2000], normal[2500] = math.nan, math.inf, -math.inf
    many = torch.randint(-5, 3000, (3000,), generator=g)
    huge = torch.tensor([2**63 - 1, -(2**63), 2**62, -1, 0] * 600)
    pairs = torch.rand(1300, 1100, generator=g) < 0.001
    of_heads = torch.randn(2, 90, 80, generator=g)
    deep = torch.randint(0, 50, (2, 3, 40, 70), generator=g)
    one = torch.zeros(1, dtype=torch.int64)
    half, brain, double = (torch.arange(3000).to(x) / 3000 for x in (torch.float16, torch.bfloat16, torch.float64))
    many_ids = (torch.arange(3000) // 37)[None].expand(2, 3000)
    each_other = torch.arange(6000)[::2] // 100
    table = (torch.arange(800 * 900).reshape(900, 800).t() * 7919) % 1009
    cases = {
        "reals": (lambda b, h, i, j: normal[i] < normal[j] - 2.5, (3000, 3000, 64, 64)),
        "nan": (lambda b, h, i, j: ~(normal[i] + normal[j] >= -6), (3000, 2999, 64, 128)),
        "infinity": (lambda b, h, i, j: (normal[i] > 3.2) | (j == i), (3000, 3000, 32, 64)),
        "any index": (lambda b, h, i, j: many[many[i]] < many[many[j] - 3000] - 2000, (3000, 3000, 16, 128)),
        "huge": (lambda b, h, i, j: (huge[i] + huge[j] > 0) & (huge[j] // (i - j) < 9), (3000, 100, 64, 16)),
        "by distance": (lambda b, h, i, j: (many[i - j] < 40) & ((i - j) * 3 > j - 9), (3000, 3000, 64, 64)),
        "a table of pairs": (lambda b, h, i, j: pairs[i, j], (1300, 1100, 16, 16)),
        "beyond it": (lambda b, h, i, j: pairs[i, j] | (j > i + 900), (1400, 1200, 128, 16)),
        "transposed": (lambda b, h, i, j: table[i, j] < 3, (800, 900, 16, 16)),
        "of a head": (lambda b, h, i, j: of_heads[h, i // 10, j // 9] > 1, (900, 720, 32, 16)),
        "four axes": (lambda b, h, i, j: deep[b, h, i // 8, j // 9] < 1, (320, 630, 16, 16)),
        "one element": (lambda b, h, i, j: (one[i] == j - i) | (one[0] > 0), (200, 200, 16, 16)),
        "floats": (lambda b, h, i, j: (half[i] > brain[j]) & (double[j] * 2 > half[i]), (3000, 3000, 128, 128)),
        "broadcast": (lambda b, h, i, j: many_ids[b, i] == many_ids[b, j], (3000, 3000, 64, 64)),
        "strided": (lambda b, h, i, j: (each_other[i] == each_other[j]) & (j <= i), (3000, 3000, 16, 48)),
        "bits": (lambda b, h, i, j: ((i ^ j) & 63 == 0) | ((i << 2) % 7 > (j >> 1)), (900, 900, 16, 16)),
        "int32": (lambda b, h, i, j: (many.int()[i] * 1000003) > (j.to(torch.int32) << 28), (600, 600, 16, 16)),
        "a constant": (lambda b, h, i, j: torch.ones((), dtype=torch.bool), (100, 100, 16, 16)),
    }
    for name, (function, sizes) in cases.items():
        compare(name, function, 2, 3, sizes)
    three_vary = lambda b, h, i, j: deep[b, i % 3, i // 8, j // 9] < 1  # there are bounds along two axes: any element, along the third
    gpu, cpu = (made(three_vary, 2, 3, (320, 630, 16, 16), on_gpu).to_kept() for on_gpu in (True, False))
    assert gpu.shape == cpu.shape and not (cpu & ~gpu).any()


def functions():
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(400, generator=g).sort().values for _ in range(2))
    cases = {
        "exp": lambda i, j: torch.exp(x[i]) < torch.expm1(y[j]) + torch.exp2(x[i] / 4),
        "log": lambda i, j: torch.log(x[i]) > torch.log2(y[j] + 1) - torch.log1p(x[i]),
        "arcs": lambda i, j: torch.asin(x[i]) + torch.acos(y[j]) < torch.atan(x[i] * 3) + torch.atan2(x[i], y[j]),
        "hyperbolic": lambda i, j: torch.sinh(x[i]) - torch.cosh(y[j]) > torch.tanh(x[i]) - 2,
        "inverse": lambda i, j: torch.asinh(x[i]) + torch.acosh(y[j] + 2) < torch.atanh(x[i] / 4) + 2,
        "erf": lambda i, j: torch.erf(x[i]) + torch.sigmoid(y[j]) > torch.erfc(x[i]) + 0.7,
        "power": lambda i, j: (x[i].abs() + 0.1) ** y[j] < torch.sqrt(x[i].abs()) + torch.rsqrt(y[j].abs() + 1),
        "steps": lambda i, j: torch.floor(x[i] * 3) + torch.round(y[j]) == torch.ceil(y[j]) - torch.trunc(x[i]),
        "divided": lambda i, j: (x[i] / (y[j].abs() + 1)) % 0.5 > torch.sin(x[i]) * 0.1 + (x[i] // 0.3) * 0.01,
    }
    for name, function in cases.items():
        compare(name, lambda b, h, i, j, function=function: function(i, j), 1, 1, (400, 400, 16, 32))


def many_blocks():
    ids = torch.arange(20000) // 777
    for name, function in {
        "documents": lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i),
        "causal": lambda b, h, i, j: j <= i,
        "of heads": lambda b, h, i, j: (i - j).abs() < 300 * h,
    }.items():
        compare(name, function, 1, 3, (20000, 19990, 64, 32))


def room():
    from strobe import _blockmask

    _blockmask._ROOM = 5  # the lists do not fit at first
    compare("causal", lambda b, h, i, j: j <= i, 1, 1, (300, 300, 16, 16))


def booleans():
    from strobe import _blockmask

    sizes, lists = [], _blockmask._GpuCall.lists
    _blockmask._GpuCall.lists = lambda self, *to: (sizes.append(int(self._to.workspace_bytes)), lists(self, *to))[1]
    seen = torch.rand(1030, 1100, generator=torch.Generator().manual_seed(3)) < 0.0001
    seen[500:600, 300:500] = True
    compare("booleans", lambda b, h, i, j: seen[i, j], 1, 1, (1030, 1100, 32, 64))
    if sizes[0] > seen.numel() / 5:
        print(sizes, "bytes for", seen.numel())


def long():
    a = [torch.arange(64) % n for n in range(1, 9)]

    def function(b, h, i, j):  # more slots than 48 KiB have room for, and several launches that write the program
        parts = [a[n % 8][(i * (n + 1)) % 64] + a[(n + 3) % 8][(j * n) % 64] for n in range(40)]
        found = parts[0] > 0
        for n, x in enumerate(parts):
            found = found & (x < 20) | (x * parts[-1 - n] == n)
        return found

    compare("long", function, 1, 1, (200, 200, 16, 16))


globals()[sys.argv[1]]()
"""


@pytest.mark.parametrize("group", ["documented", "captured", "functions", "many_blocks", "room", "booleans", "long"])
def test_lists_are_those_of_the_cpu(group):
    assert output(PROGRAM, group) == ""


@pytest.mark.parametrize("first", [0, 40])
def test_random_functions(first):
    assert output(PROGRAM, "drawn", str(first), str(first + 40)) == ""
