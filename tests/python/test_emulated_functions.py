"""Functions that the Hopper kernels have forms of their own for, on the emulated GPU: penalties by the distance, and blocks that a mask's
function sees as a whole, in which it is not evaluated."""

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
documents = (torch.arange(256) // 100).int()
prefix = lambda b, h, i, j: (j <= i) | (j < 160)
CASES = {  # score, mask, options, keys
    "full blocks": (None, prefix, {}, 256),
    "full blocks, causal": (None, lambda b, h, i, j: documents[i] <= documents[j] + 1, {"causal": True}, 256),
    "full blocks, with a derivative": (lambda x, b, h, i, j: x * 0.5 + documents[i] * 0.1, prefix, {}, 256),
    "ALiBi": (lambda x, b, h, i, j: x - slopes[h] * (i - j).abs(), None, {"causal": True}, 284),
    "a distance with its sign": (lambda x, b, h, i, j: x + torch.nn.functional.softplus(slopes[h]) * 0.1 * (j - i), None, {}, 284),
    "softcap, ALiBi": (lambda x, b, h, i, j: 3 * torch.tanh(x / 3) - slopes[h] * (i - j).abs(), None, {"causal": True}, 256),
}
score, mask, options, keys = CASES[sys.argv[1]]
given = {"score": score} if score else {}
generator = torch.Generator().manual_seed(0)
q, k, v, dout = (torch.randn(1, 2, n, 64, generator=generator).bfloat16() for n in (256, keys, keys, 256))
results = []
for engine, dtype in (("reference", torch.float64), ("cuda-sm90", torch.bfloat16)):
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    masks = {}
    if mask and engine == "reference":
        masks = {"mask": mask}
    elif mask:
        masks = {"block_mask": strobe.BlockMask.from_function(mask, 1, 2, 256, keys)}
        assert masks["block_mask"].full.any() and not masks["block_mask"].full.all()
    with running_on(engine):
        out = strobe.attention(*leaves, **given, **masks, **options, engine=engine)
        results.append([out, *torch.autograd.grad(out, leaves, dout.to(dtype))])
print(max(float((x.double() - y).abs().max() / y.abs().max()) for y, x in zip(*results)))
"""


@pytest.mark.parametrize(
    "name",
    ["full blocks", "full blocks, causal", "full blocks, with a derivative", "ALiBi", "a distance with its sign", "softcap, ALiBi"],
)
def test_they_are_right(name):
    assert float(output(PROGRAM, name)) < 0.01  # the largest of those seen is 0.006
