"""The Hopper backward of heads beyond 128 columns with 128 keys per block: the gradients are right, and gradients that are added in order
do not depend on when products end."""

from __future__ import annotations

import pytest

from emulated import output

# argv: the requested tile, and the kind of call.
CALL = """
import hashlib, sys
import torch, strobe
from cases import call
from check import run, run_plain
from device import running_on

tile, *numbers = sys.argv[1:]
heads, heads_kv, queries, keys, d, dv, causal, deterministic, top_left, penalised = map(int, numbers)
options = {"causal": bool(causal), "alignment": "top_left" if top_left else "bottom_right"}
if penalised:
    options["alibi_slopes"] = torch.linspace(0.01, 0.1, heads)
torch.manual_seed(0)
inputs = call(h=heads, hkv=heads_kv, sq=queries, sk=keys, d=d, dv=dv, dtype=torch.bfloat16, dlse=False, **options)
how = {"deterministic": bool(deterministic), "tile_k": 128}
with running_on("cuda-sm90"):
    text = strobe.explain(inputs.q, inputs.k, inputs.v, backward=True, engine="cuda-sm90", **options, **how)
assert f"tile {tile};" in text, text
found, expected = run(inputs, "cuda-sm90", **how), run_plain(inputs, torch.float64)
for name in ("dq", "dk", "dv"):
    x, y = found[name], expected[name]
    assert (x - y).abs().max() < 0.02 * y.abs().max()
    print(hashlib.sha256(x.view(torch.int16).numpy().tobytes()).hexdigest())
"""

# The tile; heads, key heads, queries, keys, D, Dv, causal, deterministic, top left, ALiBi.
CALLS = {
    "192/128": ("48 x 128", (2, 1, 140, 300, 192, 128, True, False, False, False)),
    "176/168, keys that nobody sees": ("32 x 128", (1, 1, 70, 140, 176, 168, True, True, True, False)),
    "160 in turns": ("48 x 128", (1, 1, 60, 100, 160, 160, False, True, False, False)),
    "136/144 with ALiBi": ("48 x 128", (2, 1, 70, 130, 136, 144, False, False, False, True)),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients(name):
    tile, numbers = CALLS[name]
    call = [str(int(x)) for x in numbers]
    late = output(CALL, tile, *call, LATE="1", SEED="1", RACES="1").split()
    assert len(late) == 3
    if numbers[7]:
        assert late == output(CALL, tile, *call, LATE="0").split()


# dK and dV of an invariant call are sums over query tiles, which do not depend on whether dQ is asked for.
INVARIANT = """
import hashlib
import torch, strobe
from device import running_on

torch.manual_seed(0)
q, k, v, dout = (torch.randn(1, 1, 100, 160, dtype=torch.bfloat16) for _ in range(4))
with running_on("cuda-sm90"):
    for needed in (True, False):
        x = [q.clone().requires_grad_(needed), k.clone().requires_grad_(), v.clone().requires_grad_()]
        strobe.attention(*x, invariant=True, engine="cuda-sm90").backward(dout)
        for y in x[1:]:
            print(hashlib.sha256(y.grad.view(torch.int16).numpy().tobytes()).hexdigest())
"""


def test_invariant_gradients_without_dq():
    lines = output(INVARIANT).splitlines()
    assert len(lines) == 4
    assert lines[:2] == lines[2:]
