"""Quantised keys on Hopper: warps dequantise them into the tiles that wgmma reads, so results have the bits of 16-bit attention over the
dequantised cache."""

from __future__ import annotations

import json

import pytest

from emulated import output

CALL = """
import json, sys
import torch, strobe
from device import running_on
from quantising import KINDS, SCALES, Kind, group_of, quantised

call = json.loads(sys.argv[1])
dtype = getattr(torch, call.get("dtype", "bfloat16"))
h, hkv, sq, sk, d, dv = call["shape"]
kind, page, options = Kind(*call["kind"]), call.get("page"), dict(call.get("options", {}))
starts = call.get("starts")
torch.manual_seed(0)
if starts:  # packed: (sequence starts of the queries, of the keys)
    b, row = len(starts[0]) - 1, 0
    q, k, v = torch.randn(sq, h, d), torch.randn(sk, hkv, d), torch.randn(sk, hkv, dv)
    options |= {"cu_seqlens_q": torch.tensor(starts[0], dtype=torch.int32), "cu_seqlens_k": torch.tensor(starts[1], dtype=torch.int32)}
    options |= {"max_seqlen_q": sq, "max_seqlen_k": sk}
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
    order = torch.randperm(b * n)
    options["page_table"] = order.view(b, n).int()

    def in_pages(x):
        x = x.view(b, hkv, n, x.shape[2] // n, *x.shape[3:]).transpose(1, 2).flatten(0, 1)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        y.view(torch.uint8)[order] = x.contiguous().view(torch.uint8)
        return y

    data_k, data_v, k, v = (in_pages(x) for x in (data_k, data_v, k, v))
    scales |= {name: in_pages(x.contiguous()) for name, x in scales.items() if isinstance(x, torch.Tensor)}
for name, x in options.items():
    if isinstance(x, list) and name != "window":
        options[name] = torch.tensor(x, dtype=torch.bool if name == "mask" else torch.int32 if name == "seqused_k" else torch.float32)
if isinstance(options.get("window"), list):
    options["window"] = tuple(options["window"])
spoilt = call.get("spoilt")
if spoilt:  # numbers that are not finite, in keys that some queries do not see
    scales["v_scale"][:, :, spoilt] = float(spoilt % 2 and "nan" or "inf")
    v[:, :, spoilt] = v[:, :, spoilt].float().sign().to(dtype) * scales["v_scale"][:, :, spoilt, None].to(dtype)
    v[:, :, spoilt][data_v.view(torch.uint8)[:, :, spoilt] == 0] = float("nan")
with running_on("cuda-sm90"):
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


@pytest.mark.parametrize("name", CALLS)
def test_the_bits_are_those_over_a_dequantised_cache(name):
    output(CALL, json.dumps(CALLS[name]), LATE="1", SEED="1")
