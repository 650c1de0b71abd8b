"""Packed sequences of very different lengths on Hopper: tiles are numbered across all sequences, and each is computed once."""

from __future__ import annotations

import json

import pytest

from emulated import output

CALL = """
import json, sys
import torch, strobe
from device import running_on

heads, heads_kv, d, dv = map(int, sys.argv[1:5])
options = json.loads(sys.argv[5])
torch.manual_seed(0)
lengths_q, lengths_k = json.loads(sys.argv[6])
q = torch.randn(sum(lengths_q) + 30, heads, d).to(torch.bfloat16)  # with padding after the last sequence
k, v = (torch.randn(sum(lengths_k), heads_kv, n).to(torch.bfloat16) for n in (d, dv))
dout = torch.randn(len(q), heads, dv).to(torch.bfloat16)
starts = [torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k)]
where = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "max_seqlen_q": max(lengths_q) + 3, "max_seqlen_k": max(lengths_k) + 1}


def gradients(engine, dtype, **more):
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
    with running_on(engine):
        out = strobe.attention(*leaves, engine=engine, **options, **where, **more)
        return out, *torch.autograd.grad(out, leaves, dout.to(dtype))


expected = gradients("reference", torch.float64)
for more in ({}, {"deterministic": True}):
    for found, x in zip(gradients("cuda-sm90", torch.bfloat16, **more), expected, strict=True):
        assert (found.double() - x).abs().max() < 0.02 * x.abs().max(), more
"""

# Heads, key heads, D, Dv; options.
CALLS = {
    "causal": (4, 2, 64, 64, '{"causal": true}'),
    "a window": (2, 2, 128, 128, '{"window": [100, 20]}'),
    "wide heads": (3, 1, 192, 128, '{"window": [100, 0]}'),
    "by roles": (2, 1, 256, 256, "{}"),
    "the last bundle of heads is not full": (17, 17, 64, 64, '{"causal": true}'),
}
# One long sequence among short ones, so that blocks search for their tiles, and sequences of nearly equal lengths.
LENGTHS = {
    "uneven": [[0, 1, 300, 7, 0, 64, 3, 0, 9, 1, 2, 30, 0, 5], [5, 1, 290, 7, 9, 0, 4, 0, 9, 1, 2, 20, 3, 5]],
    "alike": [[100, 70, 120], [90, 0, 110]],
}


@pytest.mark.parametrize(("name", "lengths"), [*((name, "uneven") for name in CALLS), ("causal", "alike"), ("by roles", "alike")])
def test_each_tile_is_computed_once(name, lengths):
    output(CALL, *(str(x) for x in CALLS[name]), json.dumps(LENGTHS[lengths]), LATE="1", SEED="1")
