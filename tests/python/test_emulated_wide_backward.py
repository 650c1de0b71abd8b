"""The Hopper backward of heads beyond 128 columns with 128 keys a block: its gradients are right, and those that are added up in order do
not depend on when products end."""

from __future__ import annotations

import pytest

from emulated import needs_emulator, output

# argv: the tile that the call is to have, and what the call is like.
CALL = """
import hashlib, sys
import torch, strobe
from device import running_on

tile, *numbers = sys.argv[1:]
heads, heads_kv, queries, keys, d, dv, causal, deterministic, top_left = map(int, numbers)

def normal(h, s, c):
    return torch.randn(1, h, s, c, dtype=torch.bfloat16)

torch.manual_seed(0)
q, k, v, dout = normal(heads, queries, d), normal(heads_kv, keys, d), normal(heads_kv, keys, dv), normal(heads, queries, dv)
wide = [x.double().requires_grad_() for x in (q, k, v)]
of_heads = [x.repeat_interleave(heads // heads_kv, 1) for x in wide[1:]]
scores = wide[0] @ of_heads[0].mT / d**0.5
if causal:
    scores = scores.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(0 if top_left else keys - queries), -torch.inf)
expected = torch.autograd.grad(torch.softmax(scores, 3) @ of_heads[1], wide, dout.double())
with running_on("cuda-sm90"):
    options = {"causal": bool(causal), "engine": "cuda-sm90", "alignment": "top_left" if top_left else "bottom_right"}
    out, lse = strobe.attention(q, k, v, return_lse=True, **options)
    options |= {"deterministic": bool(deterministic), "tile_k": 128}
    text = strobe.explain(q, k, v, backward=True, **options)
    assert f"tile {tile};" in text, text
    found = strobe.attention_backward(dout, q, k, v, out, lse, **options)
for x, y in zip((found.dq, found.dk, found.dv), expected, strict=True):
    assert (x - y).abs().max() < 0.02 * y.abs().max()
    print(hashlib.sha256(x.view(torch.int16).numpy().tobytes()).hexdigest())
"""

# By the tile: heads, key heads, queries, keys, D, Dv, causal, in turns, top left.
CALLS = {
    "48 x 128": (2, 1, 140, 300, 192, 128, True, False, False),
    "32 x 128": (1, 1, 70, 140, 176, 168, True, True, True),  # keys that nobody sees
    "64 x 128": (2, 1, 130, 130, 136, 144, False, False, False),
}


@needs_emulator
@pytest.mark.parametrize("tile", CALLS)
def test_gradients(tile):
    call = [str(int(x)) for x in CALLS[tile]]
    late = output(CALL, tile, *call, LATE="1", SEED="1", RACES="1").split()
    assert len(late) == 3
    if CALLS[tile][7]:
        assert late == output(CALL, tile, *call, LATE="0").split()
