"""Compares the Hopper forward, requested by name, with the oracle: every tile, hidden elements, rising scores, split keys."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch

import strobe
from cases import Inputs, call
from check import Yardstick, oracle
from device import on_device
from engines import available_engines

pytestmark = pytest.mark.skipif("cuda-sm90" not in available_engines(), reason="no Hopper GPU")
BF16, F16 = torch.bfloat16, torch.float16
NAN, INF = torch.nan, torch.inf
DIMS = [(64, 64), (128, 128), (192, 128), (256, 256), (80, 112), (40, 24)]


def forward(inputs: Inputs, **how: Any) -> dict[str, torch.Tensor]:
    there = on_device(inputs, "cuda")
    out, lse = strobe.attention(there.q, there.k, there.v, engine="cuda-sm90", return_lse=True, **there.options, **how)
    return {"out": out.cpu(), "lse": lse.cpu()}


def faults(inputs: Inputs, **how: Any) -> list[str]:
    return Yardstick(inputs).faults(forward(inputs, **how))


def explained(inputs: Inputs, **how: Any) -> str:
    there = on_device(inputs, "cuda")
    return strobe.explain(there.q, there.k, there.v, engine="cuda-sm90", **there.options, **how)


def lengths(*each: int) -> torch.Tensor:
    return torch.tensor((0, *each), dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_tile(dims, causal):
    inputs = call(h=4, hkv=2, sq=333, sk=419, d=dims[0], dv=dims[1], dtype=BF16, causal=causal)
    yardstick, seen = Yardstick(inputs), set()
    for tile_q, tile_k in product((64, 128, 192, 256), range(32, 257, 16)):
        runs = re.search(r"tile (\d+) x (\d+)", explained(inputs, tile_q=tile_q, tile_k=tile_k))
        assert runs
        if runs[0] in seen:
            continue
        seen.add(runs[0])
        assert not yardstick.faults(forward(inputs, tile_q=tile_q, tile_k=tile_k)), runs[0]


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (90, 5)}, {"causal": True, "dropout": 0.2, "seed": 1, "offset": 2}], ids=str
)
def test_value_that_some_do_not_see(options, value, d, dtype):
    inputs = call(h=2, sq=300, sk=300, d=d, dtype=dtype, **options)
    inputs.v[..., 170, 5] = inputs.v[..., 299, d - 1] = value
    seen = strobe.reference(inputs.q, inputs.k, inputs.v, **options)[0].isfinite()
    assert torch.equal(forward(inputs)["out"].isfinite(), seen)


def test_the_next_sequence_is_not_seen():
    inputs = call(
        h=2,
        sq=300,
        sk=300,
        d=64,
        dtype=BF16,
        cu_seqlens_q=lengths(100, 200),
        cu_seqlens_k=lengths(100, 200),
        max_seqlen_q=200,
        max_seqlen_k=200,
    )
    for t in (inputs.q, inputs.k, inputs.v):
        t[100:] = NAN
    assert forward(inputs)["out"][:100].isfinite().all()


def ramp(dtype: torch.dtype, top: float, **options: Any) -> Inputs:
    """Every 64 keys score higher than the 64 keys before."""
    inputs = call(h=2, sq=200, sk=1024, d=128, dtype=dtype, **options)
    grown = inputs.k.abs() * torch.logspace(-2, top, 16).repeat_interleave(64)[:, None]
    return Inputs(inputs.q.abs(), grown.to(dtype), inputs.v, inputs.dout, inputs.dlse, inputs.options, inputs.gradients)


@pytest.mark.parametrize("top", [0.5, 1.2, 2.5])  # how fast the scores rise: a reference that lags behind cannot follow the last values
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": torch.rand(1, 1, 200, 1024) < 0.7}], ids=["full", "causal", "mask"])
def test_rising_scores(options, dtype, top):
    assert not faults(ramp(dtype, top, **options))


def test_rows_that_a_mask_hides_for_long():
    mask = torch.rand(1, 2, 300, 512) < 0.7
    mask[..., :200] = False
    mask[:, :, 40:60] = False
    assert not faults(call(h=2, sq=300, sk=512, d=128, dtype=BF16, mask=mask))


@pytest.mark.parametrize("keys", [512, 500])  # rows begin at multiples of 16 bytes, or do not
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("what", ["mask", "bias", "both"])
def test_mask_and_bias(what, d, keys):
    options: dict[str, Any] = {}
    if what != "bias":
        options["mask"] = torch.rand(1, 2, 200, keys) < 0.7
    if what != "mask":
        options["bias"] = torch.randn(1, 1, 200, keys).to(BF16)
    assert not faults(call(h=2, sq=200, sk=keys, d=d, dtype=BF16, **options))


@pytest.mark.parametrize("keys", [512, 500])
def test_any_byte_but_0_lets_see(keys):
    mask = torch.rand(1, 2, 200, keys) < 0.7
    inputs = call(h=2, sq=200, sk=keys, d=64, dtype=BF16, mask=mask)
    ref = forward(inputs)
    inputs.options["mask"] = (mask.to(torch.uint8) * torch.tensor([2, 128, 255, 1]).to(torch.uint8).repeat(keys // 4)).view(torch.bool)
    found = forward(inputs)
    assert torch.equal(found["out"], ref["out"])
    assert torch.equal(found["lse"], ref["lse"])


@pytest.mark.parametrize("what", ["mask", "bias"])
@pytest.mark.parametrize("axes", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 2, 200), (2, 2, 1)], ids=str)
def test_broadcast_mask_and_bias(what, axes):
    given = torch.rand(*axes, 208) < 0.7 if what == "mask" else torch.randn(*axes, 208).to(BF16)
    assert not faults(call(b=2, h=2, sq=200, sk=208, d=64, dtype=BF16, **{what: given}))


@pytest.mark.parametrize("d", [64, 128])
def test_logits_as_low_as_numbers_go(d):
    """A row whose bias is finfo.min has equal logits, a row of -inf is empty, and an infinity in a hidden place has no effect."""
    bias = torch.randn(1, 1, 200, 208).to(BF16)
    bias[:, :, 7:9] = bias[:, :, 20:30, 100:] = torch.finfo(BF16).min
    bias[:, :, 40:42] = -INF
    bias[:, :, 100, 150:] = INF
    assert not faults(call(h=2, sq=200, sk=208, d=d, dtype=BF16, bias=bias, causal=True, alignment="top_left"))


@pytest.mark.parametrize("size", [0.3, 3.0, 20.0])  # compared with the cap, all logits are small, or some, or few
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": torch.rand(1, 1, 200, 300) < 0.7}], ids=["full", "causal", "mask"])
def test_softcap(options, dtype, size):
    inputs = call(h=2, sq=200, sk=300, d=64, dtype=dtype, softcap=20.0, **options)
    inputs.q = (inputs.q * size).to(dtype)
    assert not faults(inputs)


@pytest.mark.parametrize("lengths", [(100, 700), (700, 100), (400, 400)], ids=str)
@pytest.mark.parametrize("options", [{"alignment": "top_left"}, {"window": (90, 40)}, {"exact_max": True}], ids=str)
def test_alibi_on_both_sides(options, lengths):
    slopes = torch.tensor([0.3, -0.02])  # slopes towards the diagonal, and away from it
    assert not faults(call(h=2, sq=lengths[0], sk=lengths[1], d=64, dtype=BF16, alibi_slopes=slopes, **options))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"alibi_slopes": torch.tensor([0.01, 0.3])}, {"dropout": 0.2, "seed": 1, "offset": 2}], ids=list)
def test_what_a_warpgroup_sees_of_a_window(options, d):
    """The first queries of a tile see fewer keys on the right than the last ones, and more on the left."""
    assert not faults(call(h=2, sq=330, sk=420, d=d, dtype=BF16, window=(116, 59), **options))


@pytest.mark.parametrize("slope", [0.01, 3.0])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi_over_many_tiles(causal, slope):
    slopes = torch.tensor([slope, slope / 4])
    assert not faults(call(h=2, sq=700, sk=900, d=64, dtype=BF16, causal=causal, alibi_slopes=slopes))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "sinks": torch.tensor([1.0, 3.0])}, {"dropout": 0.2, "seed": 1, "offset": 2}], ids=str
)
def test_keys_are_split_where_queries_are_few(options):
    inputs = call(h=2, hkv=1, sq=100, sk=8192, d=128, dtype=BF16, **options)
    assert "keys split in" in explained(inputs)
    assert not faults(inputs)
    inputs.v[..., -3, 7] = NAN
    ref, found = oracle(inputs)["out"], forward(inputs)["out"]
    assert torch.equal(found.isfinite(), ref.isfinite())


@pytest.mark.parametrize("inputs", [call(h=40, sq=700, sk=700, d=128, dtype=BF16, causal=True), ramp(BF16, 2.5)], ids=["plain", "redone"])
def test_the_same_bits_every_time(inputs):
    there = on_device(inputs, "cuda")
    runs = [strobe.attention(there.q, there.k, there.v, engine="cuda-sm90", **there.options) for _ in range(200)]
    assert all(torch.equal(run, runs[0]) for run in runs)


STORED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
FIRST = "k and v dequantised first"


def quantised_keys(shape: tuple[int, ...], stored: torch.dtype) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]]:
    """K and V as stored, the options with their scales, and K and V in bfloat16: the stored numbers times the scales, rounded once."""
    given, rounded = [], []
    for _ in "kv":
        data, scale = strobe.kv.quantise(torch.randn(shape, device="cuda"), stored)
        low, high = ((data.view(torch.int8) << shift) >> 4 for shift in (4, 0)) if stored == torch.uint8 else (data, None)
        numbers = low if high is None else torch.stack((low, high), -1).flatten(-2)
        given.append((data, scale))
        rounded.append((numbers.float() * scale.unsqueeze(-1)).bfloat16())
    return [x for x, _ in given], {"k_scale": given[0][1], "v_scale": given[1][1]}, rounded


def same_bits(q: torch.Tensor, stored: torch.dtype, shape: tuple[int, ...], first: str, **options: Any) -> None:
    """Checks that the call dequantises first, with the bits of the call over dequantised keys, and keeps no memory."""
    data, scales, rounded = quantised_keys(shape, stored)
    options |= {"engine": "cuda-sm90", "return_lse": True}
    assert first in strobe.explain(q, *data, **scales, **{name: x for name, x in options.items() if name != "return_lse"})
    before = torch.cuda.memory_allocated()
    found = strobe.attention(q, *data, **scales, **options)
    kept = torch.cuda.memory_allocated() - before
    assert kept <= sum(x.numel() * x.element_size() for x in found) + 4096
    for x, y in zip(found, strobe.attention(q, *rounded, **options), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("d", [64, 96, 128, 256])
def test_quantised_keys_of_many_queries(d, stored):
    torch.manual_seed(0)
    q = torch.randn(2, 16, 1024, d, device="cuda", dtype=BF16)
    same_bits(q, stored, (2, 4, 4096, d), FIRST, causal=True)
    same_bits(q, stored, (2, 4, 4096, d), FIRST, window=(1500, 0), seqused_k=torch.tensor([4001, 1700], dtype=torch.int32, device="cuda"))


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_invariant_queries_over_quantised_keys(d, stored):
    """A query has the same bits among many, whose keys are dequantised first, as among few, in whose loads they are dequantised."""
    torch.manual_seed(0)
    q = torch.randn(2, 16, 1024, d, device="cuda", dtype=BF16)
    data, scales, _ = quantised_keys((2, 4, 4096, d), stored)
    options = {"engine": "cuda-sm90", "causal": True, "invariant": True, **scales}
    assert FIRST in strobe.explain(q, *data, **options)
    assert FIRST not in strobe.explain(q[:, :, -8:], *data, **options)
    assert torch.equal(strobe.attention(q, *data, **options)[:, :, -8:], strobe.attention(q[:, :, -8:], *data, **options))


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("pages", [128, 1000])
def test_quantised_pages_of_many_queries(pages, stored):
    """1,000 pages are more than the table has: each sequence then has pages of its own in the workspace."""
    torch.manual_seed(0)
    q = torch.randn(2, 32, 1024, 128, device="cuda", dtype=BF16)
    table = torch.randperm(pages, device="cuda", dtype=torch.int32)[:128].view(2, 64).contiguous()
    table[0, 3] = pages  # missing
    used = torch.tensor([4096, 3001], dtype=torch.int32, device="cuda")
    same_bits(q, stored, (pages, 8, 64, 128), FIRST, causal=True, page_table=table, seqused_k=used)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("invariant", [False, True])
def test_quantised_pages_of_one_query_beside_many(invariant, stored):
    """At d 128 both calls have the same tiles with `invariant`, too."""
    torch.manual_seed(0)
    each = (1, 2048, 1, 7, 64, 63, 0, 1500)
    q = torch.randn(sum(each), 32, 128, device="cuda", dtype=BF16)
    table = torch.randperm(8 * 64, device="cuda", dtype=torch.int32).view(8, 64)
    more: dict[str, Any] = {"invariant": True} if invariant else {"tile_q": 192, "tile_k": 80}
    first = "k and v of sequences with at least 64 queries dequantised first"
    starts = lengths(*each).cuda()
    same_bits(q, stored, (512, 8, 64, 128), first, causal=True, page_table=table, cu_seqlens_q=starts, max_seqlen_q=2048, **more)


def test_quantised_keys_of_many_queries_in_a_graph():
    torch.manual_seed(0)
    q = torch.randn(2, 32, 1024, 128, device="cuda", dtype=BF16)
    data, scales, _ = quantised_keys((2, 8, 4096, 128), torch.int8)
    used = torch.tensor([4096, 4096], dtype=torch.int32, device="cuda")
    options = {"engine": "cuda-sm90", "causal": True, "seqused_k": used, **scales}
    strobe.attention(q, *data, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = strobe.attention(q, *data, **options)
    for each in ([4096, 1025], [1024, 4000]):
        used.copy_(torch.tensor(each, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, strobe.attention(q, *data, **options))
