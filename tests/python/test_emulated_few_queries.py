"""Few queries of many heads on a key head share a tile on Hopper, and are right with every option that such a tile takes."""

from __future__ import annotations

import pytest

from emulated import needs_emulator, output

# argv: how the call is given, and its numbers. What nobody wrote to shared memory is NaN there.
CALL = """
import sys
import torch, strobe
from device import running_on

how, *numbers = sys.argv[1:]
batch, heads, heads_kv, queries, keys, d, dv, causal, options = map(int, numbers)
torch.manual_seed(0)
q = torch.randn(batch, queries, heads, d).to(torch.bfloat16)
k, v = (torch.randn(batch, keys, heads_kv, n).to(torch.bfloat16) for n in (d, dv))
given = {"layout": "bshd", "causal": bool(causal)}
if options:
    given |= {"sinks": torch.linspace(-1, 4, heads), "softcap": 9.0, "window": (70, 3)}
used = {"seqused_k": torch.tensor([keys - 40 * n for n in range(batch)], dtype=torch.int32)} if how != "whole" else {}
expected, lse = strobe.reference(q, k, v, **given, **used)
if how == "pages":
    rows, pages = 16, -(-keys // 16)
    table = torch.randperm(batch * pages).int().view(batch, pages)

    def in_pages(x):
        filled = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pages * rows - keys)).reshape(batch * pages, rows, heads_kv, -1)
        pool = torch.empty_like(filled)
        pool[table.flatten().long()] = filled
        return pool

    k, v, used["page_table"] = in_pages(k), in_pages(v), table
with running_on("cuda-sm90"):
    text = str(strobe.explain(q, k, v, engine="cuda-sm90", **given, **used))
    assert "query heads packed" in next(line for line in text.splitlines() if "cuda-sm90  " in line), text
    out, found = strobe.attention(q, k, v, engine="cuda-sm90", return_lse=True, **given, **used)
assert (out.double() - expected).abs().max() < 0.02 * expected.abs().max()
assert torch.allclose(found.double(), lse.double(), atol=1e-4)
"""

# How it is given; batch, heads, key heads, queries, keys, D, Dv, causal, options.
CALLS = {
    "16 queries of 4 heads": ("whole", (1, 8, 2, 16, 300, 64, 64, True, False)),
    "rows to spare": ("whole", (2, 7, 1, 5, 200, 128, 128, False, False)),
    "a part of a group": ("whole", (1, 12, 2, 12, 150, 80, 80, True, True)),
    "lengths": ("lengths", (2, 8, 2, 9, 260, 128, 64, True, True)),
    "pages": ("pages", (2, 8, 2, 9, 260, 64, 64, True, False)),
}


@needs_emulator
@pytest.mark.parametrize("name", CALLS)
def test_they_are_right(name):
    how, numbers = CALLS[name]
    output(CALL, how, *(str(int(x)) for x in numbers), LATE="1", SEED="1")


# With a mask, a bias, ALiBi or dropout, and where a tile of few rows serves as well, they have tiles of their own.
APART = """
import torch, strobe
from device import running_on

q, k = torch.zeros(1, 8, 9, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)


def packed(q, **given):
    with running_on("cuda-sm90"):
        text = str(strobe.explain(q, k, k, engine="cuda-sm90", **given))
    return "query heads packed" in next(line for line in text.splitlines() if "cuda-sm90  " in line)


assert packed(q)
assert not packed(q[:, :, :4])
assert not packed(q, mask=torch.ones(9, 64, dtype=torch.bool))
assert not packed(q, bias=torch.zeros(9, 64))
assert not packed(q, alibi_slopes=torch.ones(8))
assert not packed(q, dropout=0.5, seed=1)
"""


@needs_emulator
def test_some_options_keep_heads_apart():
    output(APART)
