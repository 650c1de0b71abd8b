"""Latent attention on Hopper: V is the first columns of K, found by address and strides, and K is loaded once."""

from __future__ import annotations

import json

import pytest

from emulated import ROOT, output

CALL = """
import json, sys
import torch, strobe
from device import running_on
from paging import in_pages

call = json.loads(sys.argv[1])
how, (batch, heads, queries, keys, d, dv) = call["how"], call["shape"]
dtype, used, page, options = getattr(torch, call.get("dtype", "bfloat16")), call.get("used"), call.get("page", 64), call.get("options", {})
torch.manual_seed(0)
heads_kv = call.get("heads_kv", 1)
q = torch.randn(batch, queries, heads, d).to(dtype)
k = torch.randn(batch, keys, heads_kv, d).to(dtype)
given = {"layout": "bshd", **options}
if "window" in given:
    given["window"] = tuple(given["window"])
if call.get("sinks"):
    given["sinks"] = torch.linspace(-1, 4, heads)
more = {}
if used:
    more["seqused_k"] = torch.tensor(used, dtype=torch.int32)
    for b, n in enumerate(used):  # keys that nobody sees
        k[b, n:] = float("nan")
if how == "packed":  # an empty sequence, a short one, and NaN after the tokens
    del given["layout"]
    q, k = (torch.cat([x.flatten(0, 1), torch.full_like(x[0], float("nan"))]) for x in (q, k))
    at = [torch.tensor([0, 0, n - 2, batch * n], dtype=torch.int32) for n in (queries, keys)]
    more = {"cu_seqlens_q": at[0], "cu_seqlens_k": at[1], "max_seqlen_q": batch * queries, "max_seqlen_k": batch * keys}
for b, j, c, value in call.get("spoilt", []):
    k[b, j, :, c] = float(value)
expected, lse = strobe.reference(q, k, k[..., :dv], **given, **more)
if how == "pages":
    pages = in_pages(k.transpose(1, 2), k.transpose(1, 2), used, page, torch.Generator().manual_seed(0))
    k, more["page_table"] = pages.k.transpose(1, 2).contiguous(), pages.table
with running_on("cuda-sm90"):
    text = str(strobe.explain(q, k, k[..., :dv], engine="cuda-sm90", **given, **more))
    line = next(x for x in text.splitlines() if "cuda-sm90  " in x)
    assert f"latent attention, v is the first {dv} columns of k" in line and call.get("says", "") in line, text
    out, found = strobe.attention(q, k, k[..., :dv], engine="cuda-sm90", return_lse=True, **given, **more)
there = slice(batch * queries if how == "packed" else None)
out, expected = out.double()[there], expected[there]
assert torch.equal(out.isfinite(), expected.isfinite())
assert call.get("spoilt") is None or not out.isfinite().all()
finite = expected.isfinite()
assert (out - expected)[finite].abs().max() < (0.01 if dtype == torch.bfloat16 else 0.002) * expected[finite].abs().max()
if how != "packed":
    assert torch.allclose(found.double(), lse.double(), atol=1e-4, equal_nan=True)
"""

# shape: batch, heads, queries, keys, D, Dv.
CALLS = {
    "one tile of keys": {"how": "whole", "shape": (1, 4, 1, 60, 576, 512)},
    "a query of 128 heads": {"how": "whole", "shape": (1, 128, 1, 450, 576, 512), "says": "64 query heads packed", "sinks": True},
    "speculated tokens": {"how": "whole", "shape": (2, 16, 4, 300, 576, 512), "options": {"causal": True}},
    "96 heads": {"how": "whole", "shape": (1, 96, 2, 257, 576, 512), "options": {"exact_max": True}, "says": "48 query heads packed"},
    "a prefill of a chunk": {"how": "whole", "shape": (1, 16, 70, 200, 576, 512), "options": {"causal": True}, "dtype": "float16"},
    "a softcap in a window": {"how": "whole", "shape": (1, 32, 3, 330, 576, 512), "options": {"softcap": 9.0, "window": (70, 3)}},
    "fewer columns": {"how": "whole", "shape": (1, 9, 3, 130, 520, 264), "options": {"causal": True, "scale": -0.1}},
    "two key heads": {"how": "whole", "shape": (1, 16, 2, 130, 576, 512), "heads_kv": 2},
    "more queries than keys": {"how": "whole", "shape": (1, 8, 4, 2, 576, 512), "options": {"causal": True}, "sinks": True},
    "lengths": {"how": "lengths", "shape": (3, 8, 2, 330, 576, 512), "used": [330, 0, 65], "options": {"causal": True}},
    "pages of 64": {"how": "pages", "shape": (2, 16, 2, 320, 576, 512), "used": [290, 129], "options": {"causal": True}},
    "pages of 16": {"how": "pages", "shape": (2, 8, 1, 320, 576, 512), "used": [319, 1], "page": 16, "sinks": True},
    "pages of 24": {"how": "pages", "shape": (2, 8, 1, 240, 576, 512), "used": [239, 130], "page": 24, "options": {"softcap": 20.0}},
    "packed": {"how": "packed", "shape": (2, 16, 6, 150, 576, 512), "options": {"causal": True}},
    "keys in splits": {"how": "whole", "shape": (1, 16, 1, 2300, 576, 512), "says": "keys split in 4", "sinks": True},
    "keys in shares": {
        "how": "lengths", "shape": (4, 16, 1, 2300, 576, 512), "used": [2300, 100, 1999, 0], "sinks": True,
        "says": "keys shared out evenly",
    },
    "numbers that are not finite": {
        "how": "whole", "shape": (1, 16, 4, 300, 576, 512), "options": {"causal": True},
        "spoilt": [(0, 299, 7, "inf"), (0, 298, 500, "nan"), (0, 297, 300, "-inf")],
    },
    "such numbers in a split": {
        "how": "lengths", "shape": (4, 16, 2, 2300, 576, 512), "used": [2300, 100, 1999, 1], "options": {"causal": True},
        "spoilt": [(0, 2299, 7, "inf"), (2, 1998, 500, "nan")],
    },
    "invariant": {"how": "whole", "shape": (2, 16, 5, 300, 576, 512), "options": {"causal": True, "invariant": True}, "sinks": True},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_they_are_right(name):
    output(CALL, json.dumps(CALLS[name]), LATE="1", RACES="1", SEED="1")


# A missing page in a tile that is otherwise seen as a whole hides its keys; an infinity beside it reaches those who see it.
MISSING = """
import torch, strobe
from device import running_on

torch.manual_seed(0)
q, k = torch.randn(1, 4, 8, 576).to(torch.bfloat16), torch.randn(9, 16, 1, 576).to(torch.bfloat16)
k[4, 3, 0, 7] = float("inf")
table = torch.tensor([[2, -1, 4, 0, 1, 1000, 3, 5]], dtype=torch.int32)
there = table[0][(table[0] >= 0) & (table[0] < 9)].long()
with running_on("cuda-sm90"):
    out = strobe.attention(q, k, k[..., :512], engine="cuda-sm90", layout="bshd", page_table=table,
                           seqused_k=torch.tensor([120], dtype=torch.int32))
assert not out[..., 7].isfinite().any()
k[4, 3, 0, 7] = 0
with running_on("cuda-sm90"):
    out = strobe.attention(q, k, k[..., :512], engine="cuda-sm90", layout="bshd", page_table=table,
                           seqused_k=torch.tensor([120], dtype=torch.int32))
dense = k[there].flatten(0, 1)[None, :88]
expected, _ = strobe.reference(q, dense, dense[..., :512], layout="bshd")
assert (out.double() - expected).abs().max() < 0.01 * expected.abs().max()
"""


def test_missing_pages():
    output(MISSING, LATE="1", RACES="1")


# A sequence's bits do not depend on the others, on how many queries there are, or on whether a block walks over all chunks of keys.
INVARIANT = """
import torch, strobe
from device import running_on

torch.manual_seed(0)
q, k = torch.randn(3, 2, 16, 576).to(torch.bfloat16), torch.randn(3, 4300, 1, 576).to(torch.bfloat16)
used = torch.tensor([4300, 70, 4100], dtype=torch.int32)
sinks = torch.linspace(-1, 4, 16)


def attention(q, k, used):
    how = {"layout": "bshd", "seqused_k": used, "invariant": True, "sinks": sinks, "engine": "cuda-sm90", "causal": True}
    with running_on("cuda-sm90"):
        text = str(strobe.explain(q, k, k[..., :512], **how))
        return *strobe.attention(q, k, k[..., :512], return_lse=True, **how), "keys split in" in text


out, lse, split = attention(q, k, used)
assert not split
for b in range(3):
    alone = attention(q[b : b + 1], k[b : b + 1], used[b : b + 1])
    assert alone[2]
    assert torch.equal(out[b], alone[0][0])
    assert torch.equal(lse[b], alone[1][0])
last = attention(q[1:2, 1:], k[1:2, :70], used[1:2])
assert torch.equal(out[1, 1:], last[0][0])
expected, _ = strobe.reference(q, k, k[..., :512], layout="bshd", seqused_k=used, sinks=sinks, causal=True)
assert (out.double() - expected).abs().max() < 0.01 * expected.abs().max()
"""


def test_invariant():
    output(INVARIANT, SMS="3")


# The same call again with V elsewhere: its plan, which reads V from K, must not run.
ELSEWHERE = """
import torch, strobe
from device import running_on

torch.manual_seed(0)
q, k, other = (torch.randn(1, n, h, 576).to(torch.bfloat16) for n, h in ((2, 8), (90, 1), (90, 1)))
for engine in ("cuda-sm90", None):
    for v in (k[..., :512], other[..., :512], k[..., :512], k[..., 64:]):
        expected, _ = strobe.reference(q, k, v, layout="bshd")
        with running_on("cuda-sm90"):
            try:
                out = strobe.attention(q, k, v, layout="bshd", engine=engine)
            except NotImplementedError as why:
                assert engine and v.data_ptr() != k.data_ptr(), why
                assert "takes head dimensions up to 256, not 576, unless v is the first columns of k" in str(why), why
                continue
        assert not engine or v.data_ptr() == k.data_ptr()
        assert (out.double() - expected).abs().max() < 0.01 * expected.abs().max()
"""


def test_v_elsewhere():
    output(ELSEWHERE)


REFUSALS = """
import torch, strobe
from device import running_on

q, k = torch.zeros(1, 16, 2, 576, dtype=torch.bfloat16), torch.zeros(1, 1, 64, 576, dtype=torch.bfloat16)


def line(q=q, k=k, dv=512, engine="cuda-sm90", **given):
    with running_on("cuda-sm90"):
        text = str(strobe.explain(q, k, k[..., :dv], engine=engine, **given))
    return next(x for x in text.splitlines() if x.strip().startswith("cuda-sm90  "))


assert "asked for by name" in line(engine=None)
for given, why in (
    ({"mask": torch.ones(2, 64, dtype=torch.bool)}, "without a mask"),
    ({"bias": torch.zeros(2, 64)}, "without a bias"),
    ({"alibi_slopes": torch.ones(16)}, "without ALiBi"),
    ({"dropout": 0.5, "seed": 1}, "without dropout"),
    ({"q": q[..., :320], "k": k[..., :320], "dv": 256}, "for 513 to 576 columns of k"),
    ({"q": q[:, :1].expand(1, 16, 2, 576)}, "q is broadcast over heads"),
    ({"backward": True}, "takes head dimensions up to 256, not 576"),
    ({"k": torch.zeros(4, 1, 12, 576, dtype=torch.bfloat16), "page_table": torch.zeros(1, 4, dtype=torch.int32),
      "seqused_k": torch.tensor([40], dtype=torch.int32)}, "pages of multiples of 8 keys, not of 12"),
):
    assert why in line(**given), (why, line(**given))
"""


def test_refusals():
    output(REFUSALS)


@pytest.mark.parametrize("edit", ["latent_p_over_k", "latent_early_p"])
def test_a_race_would_be_reported(edit):
    """Without the barriers that order P and K in the same place, or P and its reader."""
    file = ROOT / "tests" / "emulator" / "controls" / f"{edit}.edit"
    with pytest.raises(AssertionError, match="race: "):
        output(CALL, json.dumps(CALLS["speculated tokens"]), LATE="1", RACES="1", SEED="1", EDIT=str(file))
