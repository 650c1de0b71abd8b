"""FP8 products on Hopper, on the emulated GPU: V is transposed, P rounded to E4M3, and each tile's P V added to O in FP32."""

from __future__ import annotations

import json

import pytest

from emulated import output

CALL = """
import json, sys
import torch, strobe
from cases import call
from check import Yardstick
from device import running_on
from quantising import Kind, quantised, quantised_queries

given = json.loads(sys.argv[1])
b, h, hkv, sq, sk, d, dv = given["shape"]
dtype, scales, options = getattr(torch, given.get("dtype", "bfloat16")), given.get("scales", "rows"), dict(given.get("options", {}))
for name, x in options.items():
    if isinstance(x, list) and name != "window":
        of_name = torch.bool if name == "mask" else torch.int32 if name[:3] in ("seq", "cu_") else torch.float32
        options[name] = torch.tensor(x, dtype=of_name)
if isinstance(options.get("window"), list):
    options["window"] = tuple(options["window"])
how = {name: options.pop(name) for name in ("tile_q", "tile_k", "invariant") if name in options}
inputs = call(b, h, sq, sk, d, dv, hkv, dtype, dlse=False, **options)
row = 0 if inputs.varlen else 2


def of_head(x):  # so that each head's numbers have one scale
    return x.double() / x.double().abs().amax(-1, keepdim=True)


k, v = inputs.k, of_head(inputs.v)  # FP8 products take one scale of v for each head
if scales == "heads":
    k, inputs.q = of_head(inputs.k), (2 * of_head(inputs.q)).to(dtype)
inputs.quant, inputs.k, inputs.v = quantised(Kind("float8", "float32", None, True), k, v, row, None)
inputs.quant.q, inputs.quant.q_scale, inputs.q = quantised_queries(inputs.q)
inputs.page, inputs.run = given.get("page"), how


def shared(x):  # the one scale of all rows, as a view with stride 0; rows of pages that are not used have others
    one = x.nan_to_num(0, 0, 0).flatten().mode().values
    assert given.get("page") or (x == one).all()
    return one.expand(x.shape)


yardstick = Yardstick(inputs)
handed = inputs.handed()
more = dict(handed.options)
for name in ("v_scale",) if scales == "rows" else ("q_scale", "k_scale", "v_scale"):
    more[name] = shared(more[name])
with running_on("cuda-sm90"):
    out, lse = strobe.attention(handed.q, handed.k, handed.v, **more, **how, engine="cuda-sm90", return_lse=True)
    said = strobe.explain(handed.q, handed.k, handed.v, **more, **how, engine="cuda-sm90")
assert "products of float8_e4m3fn" in said, said
faults = yardstick.faults({"out": out.cpu(), "lse": lse.cpu()}, products=True)
assert not faults, faults
"""

PACKED = {"cu_seqlens_q": [0, 3, 70, 70, 100], "cu_seqlens_k": [0, 45, 160, 200, 220], "max_seqlen_q": 67, "max_seqlen_k": 115}
# shapes: b, h, hkv, sq, sk, d, dv
CALLS = {
    "d 64": {"shape": (1, 2, 2, 140, 300, 64, 64), "scales": "heads"},
    "d 128, causal": {"shape": (1, 2, 1, 100, 300, 128, 128), "scales": "heads", "options": {"causal": True}},
    "a scale for each query and key": {"shape": (2, 2, 2, 70, 200, 128, 128), "options": {"window": [90, 20]}},
    "float16": {"shape": (1, 2, 2, 70, 200, 128, 128), "dtype": "float16", "scales": "heads"},
    "d 192 and 128": {"shape": (1, 2, 2, 70, 200, 192, 128), "scales": "heads", "options": {"causal": True}},
    "d 80 and 48": {"shape": (1, 2, 2, 70, 200, 80, 48)},
    "packed": {"shape": (1, 2, 1, 100, 220, 64, 64), "options": PACKED | {"causal": True}},
    "pages": {"shape": (2, 2, 1, 60, 192, 64, 128), "page": 32, "options": {"seqused_k": [70, 161]}},
    "heads together": {"shape": (1, 8, 1, 9, 300, 128, 128), "options": {"causal": True}},
    "keys split": {"shape": (1, 1, 1, 60, 1300, 64, 64), "scales": "heads"},
    "ALiBi": {"shape": (1, 2, 2, 70, 200, 64, 64), "options": {"alibi_slopes": [0.1, 0.3], "causal": True}},
    "softcap and sinks": {"shape": (1, 2, 2, 70, 200, 64, 64), "options": {"softcap": 3.0, "sinks": [0.5, -1.0]}},
    "dropout": {"shape": (1, 2, 2, 70, 200, 64, 64), "options": {"dropout": 0.3, "seed": 5}},
    "bias and mask": {
        "shape": (1, 2, 2, 5, 4, 64, 64),
        "options": {"bias": [[[[1.0, 2.0, -3.0, 0.5]]]], "mask": [[[[True, False, True, True]]]]},
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_products(name):
    output(CALL, json.dumps(CALLS[name]), LATE="1", SEED="1")


NEEDLE = """
import sys
import torch, strobe
from device import running_on

d, keys = map(int, sys.argv[1:])
fp8 = torch.float8_e4m3fn
generator = torch.Generator().manual_seed(1)
q = torch.zeros(1, 1, 16, d)
k, v = torch.zeros(1, 1, keys, d), torch.ones(1, 1, keys, d)
v[..., 1::2] = torch.randn(keys, 1, generator=generator).sign()  # cancels, but for what one key adds
needle = keys // 3
q[..., 0], k[0, 0, needle, 0] = 8, 8
scale = float(torch.log(torch.tensor(4.0 * keys))) / 64  # the needle weighs four times as much as all other keys together
v[0, 0, needle, 1::2] = 1
one = torch.ones(())
given = dict(scale=scale, q_scale=one, k_scale=one, v_scale=one)
with running_on("cuda-sm90"):
    out = strobe.attention(q.to(fp8), k.to(fp8), v.to(fp8), **given, engine="cuda-sm90").double()
expected, _ = strobe.reference(q.to(fp8), k.to(fp8), v.to(fp8), **given, rows=[0])
expected = expected[:, :, :1].expand_as(out)
print(float((out - expected).abs().max()), float(expected[..., 1].max()))
assert (out[..., ::2] - 1).abs().max() < 2**-7, out[0, 0, 0]
assert (out - expected).abs().max() < 2**-5, (out - expected).abs().max()
"""


@pytest.mark.parametrize(("d", "keys"), [(64, 8192), (128, 4096)])
def test_a_needle_in_short_sums(d, keys):
    """Sums are truncated as Hopper's are. Without promotion a sum would stop growing at the needle, and rows of ones would become 0.87."""
    output(NEEDLE, str(d), str(keys), FEW_BITS="1")


DESCALES = """
import torch, strobe
from device import running_on
from strobe.compat import _eight_bits, flash_attn_3

_eight_bits.on_gpu = lambda x: True
torch.manual_seed(0)
fp8 = torch.float8_e4m3fn
q, k, v = (torch.randn(2, n, h, 64).to(fp8) for n, h in ((70, 4), (150, 2), (150, 2)))
descales = [torch.rand(2, 2) + 1 for _ in range(3)]
names = ("q_descale", "k_descale", "v_descale")
with running_on("cuda-sm90"):
    out, lse = flash_attn_3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **dict(zip(names, descales)))
whole = [x.double() * s.double().repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None] for x, s in zip((q, k, v), descales)]
expected, expected_lse = strobe.reference(*whole, causal=True, layout="bshd")
assert out.dtype == torch.bfloat16
error = (out.double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
assert 0.005 < error < 0.04, error  # that of P in E4M3
assert (lse.double() - expected_lse).abs().max() < 1e-4
"""


def test_descales_of_flash_attention_3():
    output(DESCALES)
