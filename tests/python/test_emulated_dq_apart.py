"""The Hopper backward with a warpgroup that makes dQ alone, which a tuning table asks for: its gradients are right and do not depend on
when its products end, and its threads wait for what others write."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulated import needs_emulator, output
from strobe import _tuning
from strobe_tools.cli.tune import Case, Shape

# Writes what the device's table would have to say of itself. argv: a folder.
HEADER = """
import os, sys
os.environ["STROBE_CACHE_DIR"] = sys.argv[1]
from strobe import _tuning
of = _tuning.header(0)
print(_tuning.written([{"file": of.file}, of.about]))
"""

# argv: the table's folder, how many warpgroups it leads to, and what the call is like.
CALL = """
import hashlib, os, sys
folder, warpgroups, *numbers = sys.argv[1:]
os.environ["STROBE_CACHE_DIR"] = folder
import torch, strobe
from device import running_on

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
    options["deterministic"] = bool(deterministic)
    text = strobe.explain(q, k, v, backward=True, **options)
    assert f"{warpgroups} warpgroups" in text, text
    found = strobe.attention_backward(dout, q, k, v, out, lse, **options)
for x, y in zip((found.dq, found.dk, found.dv), expected, strict=True):
    assert (x - y).abs().max() < 0.02 * y.abs().max()
    print(hashlib.sha256(x.view(torch.int16).numpy().tobytes()).hexdigest())
"""


# heads, key heads, queries, keys, D, Dv, causal, in turns, top left
CALLS = {
    "192/128": (2, 1, 140, 150, 192, 128, True, True, False),
    "256, keys that nobody sees": (1, 1, 70, 140, 256, 256, True, True, True),
    "64": (2, 1, 130, 130, 64, 64, True, True, False),
    "128 in any order": (1, 1, 90, 100, 128, 128, False, False, False),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[int, str]:
    """By the warpgroups that compute: a folder with a table that leads to so many."""
    found = {}
    for warpgroups in (2, 3):
        folder = tmp_path_factory.mktemp("tables")
        if not found:
            file, about = _tuning.parsed(output(HEADER, str(folder)))
        keys = [Case("cuda-sm90", Shape(1, *c[:6]), "bfloat16", c[6], True, c[7]).key() for c in CALLS.values()]
        sections = [key | {"tile_q": 64, "tile_k": 64, "dq_apart": warpgroups == 3} for key in keys]
        table = folder / Path(file["file"]).name
        _tuning.write(_tuning.Header(str(table), about, ""), [], sections)
        found[warpgroups] = str(folder)
    return found


@needs_emulator
@pytest.mark.parametrize("name", CALLS)
def test_gradients(name, folders):
    deterministic = CALLS[name][7]

    def digests(warpgroups: int, **emulator: str) -> list[str]:
        return output(CALL, folders[warpgroups], str(warpgroups), *(str(int(x)) for x in CALLS[name]), **emulator).split()

    late = digests(3, LATE="1", SEED="1", RACES="1")
    assert len(late) == 3
    if deterministic:
        assert late == digests(2, LATE="0")
