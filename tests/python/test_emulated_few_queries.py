"""On Hopper, query heads of a key head share a tile if that saves work. Results are right with every option that such a tile supports."""

from __future__ import annotations

import pytest

from emulated import output

# argv: how the call is given, and its numbers. Shared memory that was not written is NaN there.
CALL = """
import sys
import torch, strobe
from device import running_on
from paging import in_pages

how, *numbers = sys.argv[1:]
batch, heads, heads_kv, queries, keys, d, dv, causal, options = map(int, numbers)
torch.manual_seed(0)
q = torch.randn(batch, queries, heads, d).to(torch.bfloat16)
k, v = (torch.randn(batch, keys, heads_kv, n).to(torch.bfloat16) for n in (d, dv))
given = {"layout": "bshd", "causal": bool(causal), "sinks": torch.linspace(-1, 4, heads)}
if options:
    given |= {"softcap": 9.0, "window": (70, 3), "exact_max": options == 2}
used = {}
if how in ("lengths", "pages"):
    used["seqused_k"] = torch.tensor([keys - 40 * n for n in range(batch)], dtype=torch.int32)
if how == "packed":  # an empty sequence, a short one, and NaN after the tokens
    del given["layout"]
    q, k, v = (torch.cat([x.flatten(0, 1), torch.full_like(x[0], float("nan"))]) for x in (q, k, v))
    at = [torch.tensor([0, 0, n - 2, batch * n], dtype=torch.int32) for n in (queries, keys)]
    used = {"cu_seqlens_q": at[0], "cu_seqlens_k": at[1], "max_seqlen_q": batch * queries, "max_seqlen_k": batch * keys}
expected, lse = strobe.reference(q, k, v, **given, **used)
if how == "pages":
    pages = in_pages(k.transpose(1, 2), v.transpose(1, 2), used["seqused_k"].tolist(), 16, torch.Generator().manual_seed(0))
    k, v, used["page_table"] = pages.k.transpose(1, 2).contiguous(), pages.v.transpose(1, 2).contiguous(), pages.table
with running_on("cuda-sm90"):
    text = str(strobe.explain(q, k, v, engine="cuda-sm90", **given, **used))
    assert "query heads packed" in next(line for line in text.splitlines() if "cuda-sm90  " in line), text
    out, found = strobe.attention(q, k, v, engine="cuda-sm90", return_lse=True, **given, **used)
there = slice(batch * queries if how == "packed" else None)
assert (out.double() - expected)[there].abs().max() < 0.02 * expected[there].abs().max()
if how != "packed":
    assert torch.allclose(found.double(), lse.double(), atol=1e-4)
"""

# How the call is given; batch, heads, key heads, queries, keys, D, Dv, causal, options.
CALLS = {
    "16 queries of 4 heads": ("whole", (1, 8, 2, 16, 300, 64, 64, True, False)),
    "rows to spare": ("whole", (2, 7, 1, 5, 200, 128, 128, False, False)),
    "a part of a group": ("whole", (1, 12, 2, 12, 150, 80, 80, True, True)),
    "lengths": ("lengths", (2, 8, 2, 9, 260, 128, 64, True, True)),
    "pages": ("pages", (2, 8, 2, 9, 272, 64, 64, True, False)),
    "packed": ("packed", (2, 8, 2, 8, 150, 64, 64, True, False)),
    "keys in parts": ("whole", (1, 5, 1, 9, 2300, 64, 64, True, False)),
    "two warpgroups": ("whole", (1, 7, 1, 12, 140, 192, 128, True, 2)),
    "short sequences": ("whole", (2, 14, 2, 70, 70, 120, 120, False, False)),
    "short sequences and a window": ("packed", (2, 6, 2, 150, 170, 128, 64, True, True)),
    "pieces of a group": ("pages", (1, 33, 1, 70, 112, 64, 64, True, False)),
}


@pytest.mark.parametrize("name", CALLS)
def test_they_are_right(name):
    how, numbers = CALLS[name]
    output(CALL, how, *(str(int(x)) for x in numbers), LATE="1", SEED="1")


# Each head has its own tiles if one head fills them, and with a mask, a bias, ALiBi or dropout, for which cuda-mma's tile of few rows is as
# fast.
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
q, k = (x[:, :, :1].repeat(1, 1, 2048, 1) for x in (q, k))
assert packed(q, window=(100, 0))
assert not packed(q)
"""


def test_some_options_keep_heads_apart():
    output(APART)


# A tile is not masked by position and lacks a page: an infinity in its V must still reach the queries that see it.
INFINITY = """
import torch, strobe
from device import running_on

torch.manual_seed(0)
for heads, queries in ((1, 16), (4, 16)):
    q = torch.randn(1, queries, heads, 64).to(torch.bfloat16)
    k, v = (torch.randn(6, 16, 1, 64).to(torch.bfloat16) for _ in "kv")
    v[4, 3, 0, 7] = float("inf")
    table = torch.tensor([[2, -1, 4, 0]], dtype=torch.int32)
    how = {"layout": "bshd", "page_table": table, "seqused_k": torch.tensor([64], dtype=torch.int32)}
    with running_on("cuda-sm90"):
        out = strobe.attention(q, k, v, engine="cuda-sm90", **how)
    assert not out[..., 7].isfinite().any()
    assert out[..., :7].isfinite().all()
    assert out[..., 8:].isfinite().all()

# In a later tile of heads that share it: who sees it is told apart query by query.
q, k, v = (torch.randn(1, h, n, 64).to(torch.bfloat16) for h, n in ((7, 70), (1, 80), (1, 80)))
v[0, 0, 60, 5] = float("inf")
for more in ({}, {"invariant": True}):
    with running_on("cuda-sm90"):
        assert "query heads packed" in str(strobe.explain(q, k, v, engine="cuda-sm90", causal=True, **more))
        out = strobe.attention(q, k, v, engine="cuda-sm90", causal=True, **more)
    expected, _ = strobe.reference(q, k, v, causal=True)
    assert torch.equal(out.isfinite(), expected.isfinite())
    assert not out.isfinite().all()
"""


def test_an_infinity_beside_a_page_that_is_not_there():
    output(INFINITY)


# If the packed queries are one expanded row, tokens that do not exist are not read.
ONE_ROW = """
import torch, strobe
from device import running_on

q = torch.randn(1, 8, 64).to(torch.bfloat16).expand(5, 8, 64)
k = torch.randn(40, 2, 64).to(torch.bfloat16)
at = torch.arange(6, dtype=torch.int32)
how = {"cu_seqlens_q": at, "cu_seqlens_k": 8 * at, "max_seqlen_q": 1, "max_seqlen_k": 8}
with running_on("cuda-sm90"):
    try:
        out = strobe.attention(q, k, k, engine="cuda-sm90", **how)
    except NotImplementedError as why:
        assert "a row is broadcast" in str(why), why
    else:
        raise AssertionError("taken")
"""


def test_a_row_of_all_tokens_is_refused():
    output(ONE_ROW)
