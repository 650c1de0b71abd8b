"""Quantised keys on Hopper: warps dequantise them into the tiles that wgmma reads, so results have the bits of 16-bit attention over the
dequantised cache."""

from __future__ import annotations

import json

import pytest

from emulated import output

CALL = """
import itertools, json, sys
import torch, strobe
from device import running_on
from quantising import KINDS, SCALES, Kind, group_of, quantised

call = json.loads(sys.argv[1])
dtype = getattr(torch, call.get("dtype", "bfloat16"))
h, hkv, sq, sk, d, dv = call["shape"]
kind, page, options = Kind(*call["kind"]), call.get("page"), dict(call.get("options", {}))
starts = call.get("starts")
torch.manual_seed(0)
if starts:  # packed: (sequence starts of the queries, of the keys unless they lie in pages)
    b, row = len(starts[0]) - 1, 2 if page else 0
    q = torch.randn(sq, h, d)
    k, v = (torch.randn(*((b, hkv, sk) if page else (sk, hkv)), x) for x in (d, dv))
    longest_q, longest_k = (max(y - x for x, y in itertools.pairwise(x or [0, sk])) for x in starts)
    options |= {"cu_seqlens_q": torch.tensor(starts[0], dtype=torch.int32), "max_seqlen_q": longest_q}
    if not page:
        options |= {"cu_seqlens_k": torch.tensor(starts[1], dtype=torch.int32), "max_seqlen_k": longest_k}
else:
    b, row = call.get("batch", 2), 2
    q, k, v = torch.randn(b, h, sq, d), torch.randn(b, hkv, sk, d), torch.randn(b, hkv, sk, dv)
q = q.to(dtype)
groups = None if kind.group is None else group_of(torch.arange(sk), kind.group, page)
stored, k, v = quantised(kind, k.double(), v.double(), row, groups)
data_k, data_v, scales = stored.handed(row)
k, v = k.float().to(dtype), v.float().to(dtype)  # stored numbers times scales are exact in float64
if page:
    n = sk // page
    pages = b * n + call.get("spare", 0)
    order = torch.randperm(pages)[: b * n]
    options["page_table"] = order.view(b, n).int()
    for at in call.get("missing", []):
        options["page_table"][tuple(at)] = -1

    def in_pages(x):
        x = x.view(b, hkv, n, x.shape[2] // n, *x.shape[3:]).transpose(1, 2).flatten(0, 1)
        y = torch.empty((pages, *x.shape[1:]), dtype=x.dtype)
        y.view(torch.uint8).fill_(0x7F)  # pages that nobody reads
        y.view(torch.uint8)[order] = x.contiguous().view(torch.uint8)
        return y

    data_k, data_v, k, v = (in_pages(x) for x in (data_k, data_v, k, v))
    scales |= {name: in_pages(x.contiguous()) for name, x in scales.items() if isinstance(x, torch.Tensor)}
for name, x in options.items():
    if isinstance(x, list) and name != "window":
        options[name] = torch.tensor(x, dtype=torch.bool if name == "mask" else torch.int32 if name == "seqused_k" else torch.float32)
if isinstance(options.get("window"), list):
    options["window"] = tuple(options["window"])
if call.get("bias"):
    options["bias"] = torch.randn(1, h, sq, sk)
if call.get("mask"):
    options["mask"] = torch.rand(1, 1, sq, sk) < 0.7
spoilt = call.get("spoilt")
if spoilt:  # numbers that are not finite, in keys that some queries do not see
    scales["v_scale"][:, :, spoilt] = float(spoilt % 2 and "nan" or "inf")
    v[:, :, spoilt] = v[:, :, spoilt].float().sign().to(dtype) * scales["v_scale"][:, :, spoilt, None].to(dtype)
    v[:, :, spoilt][data_v.view(torch.uint8)[:, :, spoilt] == 0] = float("nan")
with running_on("cuda-sm90"):
    if "first" in call:
        assert call["first"] in strobe.explain(q, data_k, data_v, engine="cuda-sm90", **scales, **options)
    found = strobe.attention(q, data_k, data_v, engine="cuda-sm90", return_lse=True, **scales, **options)
    expected = strobe.attention(q, k, v, engine="cuda-sm90", return_lse=True, **options)
for x, y in zip(found, expected, strict=True):
    x, y = (z.nan_to_num(nan=7, posinf=8, neginf=9) for z in (x, y))
    difference = (x.float() - y.float()).abs().max()
    assert torch.equal(x, y), f"off by {difference} of {y.abs().max()}"
"""

# Calls, with tiles that both have. At d 64 they are only alike where the reference follows the maximum.
WIDE, SQUARE, WIDEST = {"tile_q": 192, "tile_k": 80}, {"tile_q": 128, "tile_k": 128}, {"tile_q": 128, "tile_k": 64}
NARROW = SQUARE | {"exact_max": True}
PACKED = [[0, 3, 100, 100, 190], [0, 45, 160, 200, 300]]
CALLS = {
    "int8": {"kind": ("int8", "float32"), "shape": (2, 1, 100, 200, 128, 128), "options": WIDE},
    "fp8, causal": {"kind": ("float8", "float32"), "shape": (2, 1, 100, 200, 128, 128), "options": WIDE | {"causal": True}},
    "e5m2, float16": {"kind": ("e5m2", "float32"), "dtype": "float16", "shape": (2, 2, 70, 200, 128, 128), "options": WIDE},
    "int4, float16": {"kind": ("int4", "float16"), "dtype": "float16", "shape": (2, 2, 70, 200, 128, 128), "options": WIDE},
    "d 64": {"kind": ("int8", "float16"), "shape": (2, 2, 140, 300, 64, 64), "options": NARROW},
    "int4 of d 64": {"kind": ("int4", "float32"), "shape": (2, 2, 140, 300, 64, 64), "options": NARROW | {"causal": True}},
    "d 96 and 112": {"kind": ("float8", "float32"), "shape": (2, 2, 100, 200, 96, 112), "options": WIDE},
    "d 256": {"kind": ("int8", "float32"), "shape": (2, 1, 70, 200, 256, 256), "options": WIDEST | {"causal": True}},
    "scales of columns": {"kind": ("int8", "float16", 64), "shape": (2, 1, 100, 200, 128, 128), "options": SQUARE},
    "pages": {"kind": ("float8", "float32"), "shape": (4, 2, 100, 320, 128, 128), "page": 32, "options": WIDE | {"causal": True}},
    "pages, scales of columns": {"kind": ("int4", "float32", 32), "shape": (2, 2, 60, 256, 128, 64), "page": 64, "options": SQUARE},
    "large pages, one of which is missing": {
        "kind": ("float8", "float16"),
        "shape": (4, 2, 20, 320, 128, 64),
        "page": 64,
        "missing": [[0, 2], [1, 0]],
        "options": {"tile_q": 64, "tile_k": 64, "seqused_k": [300, 70], "causal": True},
    },
    "pages, half a tile each": {
        "kind": ("int8", "float32"),
        "shape": (2, 2, 60, 320, 128, 128),
        "page": 32,
        "missing": [[1, 4]],
        "options": SQUARE | {"seqused_k": [300, 199]},
    },
    "large pages and a window": {
        "kind": ("int4", "float32"),
        "shape": (2, 1, 60, 320, 128, 128),
        "page": 64,
        "options": {"tile_q": 64, "tile_k": 64, "window": [101, 3]},
    },
    "pages, uneven": {
        "kind": ("int8", "float16"),
        "shape": (4, 2, 20, 320, 128, 128),
        "page": 16,
        "options": WIDE | {"seqused_k": [70, 0], "causal": True},
    },
    "packed": {"kind": ("int8", "float32"), "shape": (2, 1, 190, 300, 128, 128), "starts": PACKED, "options": WIDE | {"causal": True}},
    "packed, scales of columns": {
        "kind": ("int4", "float16", 32),
        "shape": (2, 1, 190, 300, 128, 128),
        "starts": PACKED,
        "options": SQUARE,
    },
    "heads together": {"kind": ("int4", "float32"), "shape": (8, 1, 9, 300, 128, 128), "options": WIDE | {"causal": True}},
    "keys split": {"kind": ("int8", "float32"), "batch": 1, "shape": (1, 1, 60, 1100, 128, 128), "options": WIDE},
    "invariant": {"kind": ("int8", "float32"), "shape": (4, 2, 30, 200, 128, 128), "options": WIDE | {"invariant": True, "causal": True}},
    "ALiBi": {"kind": ("int8", "float32"), "shape": (2, 2, 70, 200, 128, 128), "options": {"alibi_slopes": [0.1, 0.3], "tile_k": 128}},
    "nan": {"kind": ("int8", "float32"), "shape": (2, 2, 100, 200, 128, 128), "options": WIDE | {"causal": True}, "spoilt": 151},
}
# Calls in which many queries share keys. On a GPU of one multiprocessor that is worth a pass, even if they are so short.
MIXED = "k and v of sequences with at least 64 queries dequantised first"
FIRST = {
    "int8": {"kind": ("int8", "float32"), "shape": (4, 1, 70, 200, 128, 128), "options": {"causal": True}},
    "fp8 and a window": {"kind": ("float8", "float16"), "shape": (4, 1, 200, 420, 128, 64), "options": {"window": [120, 0]}},
    "e5m2, float16": {"kind": ("e5m2", "float32"), "dtype": "float16", "shape": (4, 1, 70, 200, 96, 128)},
    "int4, float16, scales of columns": {"kind": ("int4", "float16", 32), "dtype": "float16", "shape": (8, 2, 70, 200, 128, 64)},
    "d 256": {"kind": ("int8", "float32"), "shape": (4, 1, 70, 150, 256, 256), "options": {"causal": True}},
    "lengths": {"kind": ("int4", "float32"), "shape": (4, 1, 70, 300, 128, 128), "options": {"seqused_k": [131, 0]}},
    "pages": {"kind": ("float8", "float32"), "shape": (4, 2, 150, 320, 64, 64), "page": 32, "options": {"causal": True}},
    "pages, scales of columns": {
        "kind": ("int8", "float32", 32),
        "shape": (4, 1, 80, 256, 64, 128),
        "page": 64,
        "options": {"seqused_k": [200, 31]},
    },
    "pages of a large pool": {
        "kind": ("int8", "float16"),
        "shape": (4, 2, 140, 320, 64, 64),
        "page": 16,
        "spare": 5,
        "options": {"causal": True, "seqused_k": [201, 320]},
    },
    "a missing page": {"kind": ("int8", "float16"), "shape": (4, 1, 70, 320, 64, 64), "page": 16, "missing": [[0, 3], [1, 19]]},
    "a missing page of a large pool": {
        "kind": ("int8", "float16"),
        "shape": (4, 1, 70, 320, 64, 64),
        "page": 16,
        "spare": 5,
        "missing": [[0, 3], [1, 19]],
    },
    "large pages and invariant": {
        "kind": ("int8", "float32"),
        "shape": (4, 1, 70, 320, 128, 128),
        "page": 64,
        "missing": [[0, 2]],
        "options": {"invariant": True, "causal": True, "seqused_k": [300, 150]},
    },
    "packed, alike": {"kind": ("int8", "float32"), "shape": (4, 1, 160, 400, 128, 128), "starts": [[0, 80, 160], [0, 145, 400]]},
    "packed, scales of columns": {
        "kind": ("int4", "float16", 32),
        "shape": (4, 1, 180, 500, 128, 128),
        "starts": [[0, 3, 90, 90, 180], [0, 145, 260, 290, 500]],
        "options": SQUARE,
        "first": MIXED,
    },
    "packed, one query beside many": {
        "kind": ("int8", "float32"),
        "shape": (8, 2, 183, 500, 128, 128),
        "starts": [[0, 1, 180, 182, 183], [0, 45, 300, 370, 500]],
        "options": WIDE | {"causal": True},
        "first": MIXED,
    },
    "packed and invariant": {
        "kind": ("int8", "float32"),
        "shape": (8, 2, 183, 500, 128, 128),
        "starts": [[0, 1, 180, 182, 183], [0, 45, 300, 370, 500]],
        "options": {"causal": True, "invariant": True},
        "first": MIXED,
    },
    "packed queries over pages": {
        "kind": ("float8", "float32"),
        "shape": (8, 2, 183, 320, 128, 128),
        "starts": [[0, 1, 180, 182, 183], None],
        "page": 32,
        "options": WIDE | {"causal": True, "seqused_k": [100, 310, 3, 320]},
        "first": MIXED,
    },
    "invariant": {"kind": ("int8", "float32"), "shape": (4, 1, 70, 200, 128, 128), "options": {"invariant": True, "causal": True}},
    "bias": {"kind": ("int8", "float32"), "shape": (4, 1, 70, 200, 64, 64), "bias": True},
    "mask and dropout": {
        "kind": ("int8", "float32"),
        "shape": (4, 1, 70, 200, 64, 64),
        "mask": True,
        "options": {"dropout": 0.2, "seed": 3},
    },
}


@pytest.mark.parametrize("name", FIRST)
def test_dequantised_first(name):
    output(CALL, json.dumps({"first": "k and v dequantised first"} | FIRST[name]), LATE="1", SEED="1", SMS="1")


INVARIANT = """
import torch, strobe
from device import running_on

torch.manual_seed(0)
q, k, v = torch.randn(1, 4, 70, 64).bfloat16(), torch.randn(1, 1, 200, 64), torch.randn(1, 1, 200, 64)
(k, k_scale), (v, v_scale) = (strobe.kv.quantise(x, torch.int8) for x in (k, v))
options = {"engine": "cuda-sm90", "causal": True, "invariant": True, "k_scale": k_scale, "v_scale": v_scale}
with running_on("cuda-sm90"):
    assert "dequantised first" in strobe.explain(q, k, v, **options)
    few = q[:, :, -9:]
    assert "dequantised first" not in strobe.explain(few, k, v, **options)
    assert torch.equal(strobe.attention(q, k, v, **options)[:, :, -9:], strobe.attention(few, k, v, **options))
"""


def test_an_invariant_query_has_its_bits_both_ways():
    output(INVARIANT, LATE="1", SEED="1", SMS="1")


LARGE = """
import torch, strobe
from device import running_on

torch.manual_seed(0)
keys, room = 150, 1100000
q = torch.randn(1, 16, 80, 64).bfloat16()
data = [torch.randint(-127, 128, (1, 4, keys, 64), dtype=torch.int8) for _ in "kv"]
scales = [torch.rand(1, 4, keys) / 100 for _ in "kv"]
k, v = ((x.double() * y.unsqueeze(-1)).float().bfloat16() for x, y in zip(data, scales, strict=True))

def with_room(x):  # its memory is never touched
    return x.new_empty(1, 4, room, *x.shape[3:]).index_copy_(2, torch.arange(keys), x)

(data_k, data_v), (k_scale, v_scale) = ([with_room(x) for x in both] for both in (data, scales))
options = {"engine": "cuda-sm90", "seqused_k": torch.tensor([keys], dtype=torch.int32), "tile_q": 192, "tile_k": 80, "causal": True}
with running_on("cuda-sm90"):
    stored = {"k_scale": k_scale, "v_scale": v_scale, **options}
    assert "2 key heads at a time" in strobe.explain(q, data_k, data_v, **stored)
    assert torch.equal(strobe.attention(q, data_k, data_v, **stored), strobe.attention(q, k, v, **options))
"""


def test_key_heads_one_after_another():
    """Where dequantised keys take more than a GiB, the workspace holds those of some key heads at a time."""
    output(LARGE, LATE="1", SEED="1", SMS="1")


@pytest.mark.parametrize("name", CALLS)
def test_the_bits_are_those_over_a_dequantised_cache(name):
    output(CALL, json.dumps(CALLS[name]), LATE="1", SEED="1")
