"""Quantised keys where engines read them in special ways: few queries over many keys, with each of the stored kinds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import strobe
from cases import FACTORS, Inputs, call
from check import Yardstick, run
from device import DEVICE, EMULATED, ON_GPU, moved, running_on
from engines import engines_under_test
from quantising import Kind, group_of, quantised

HALF = [torch.bfloat16, torch.float16]
KINDS = [Kind("int8", "float32"), Kind("int8", "float16"), Kind("float8", "float32"), Kind("int4", "float16"), Kind("e5m2", "float16")]
GROUPED = [Kind("int4", "float32", 32), Kind("int8", "float16", 64)]
# b, h, hkv, sq, sk, d, dv
SHAPES = [
    (1, 4, 1, 1, 300, 128, 128),
    (2, 8, 2, 3, 131, 64, 128),
    (1, 2, 2, 16, 200, 128, 64),
    (3, 3, 1, 1, 33, 64, 64),
    (1, 16, 1, 1, 70, 128, 128),
    (1, 16, 1, 5, 150, 72, 40),
    (1, 8, 1, 16, 100, 64, 64),
    (1, 4, 1, 37, 1100, 64, 64),
]


def quantised_call(kind: Kind, shape: tuple[int, ...], dtype: torch.dtype, page: int | None = None, **options: Any) -> Inputs:
    b, h, hkv, sq, sk, d, dv = shape
    if page:
        sk = -(-sk // page) * page
    inputs = call(b, h, sq, sk, d, dv, hkv, dtype, dlse=False, **options)
    quant, k, v = quantised(kind, inputs.k, inputs.v, 2, None)
    return replace(inputs, k=k, v=v, quant=quant, page=page)


def check(inputs: Inputs, *wanted: str) -> None:
    """Checks the call on every engine that supports it; the `wanted` engines must, if they are available."""
    yardstick, took, faults = Yardstick(inputs), set(), []
    for engine in engines_under_test():
        try:
            found = run(inputs, engine)
        except NotImplementedError as refusal:
            if engine in wanted:
                faults.append(f"{engine} refuses: {refusal}")
            continue
        took.add(engine)
        faults += [f"{engine}: {fault}" for fault in yardstick.faults(found, engine)]
    assert not faults, "\n".join(faults)
    if not took:
        pytest.skip("no engine here reads quantised keys")


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_queries(shape, dtype, kind):
    inputs = quantised_call(kind, shape, dtype, causal=shape[3] > 1)
    check(
        inputs,
        *["cuda-mma"] * (shape[5] % 32 == 0 and shape[6] % 32 == 0),  # rows are multiples of 16 bytes, also as INT4
        *["cpu-amx"] * (dtype == torch.bfloat16 and shape[3] <= 16 and shape[1] // shape[2] * shape[3] > 4),
    )


@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 3.0},
        {"window": (40, 0)},
        {"dropout": 0.3, "seed": 5},
        {"mask": torch.rand(2, 1, 2, 96, generator=torch.Generator().manual_seed(3)) < 0.5},
        {"bias": torch.randn(1, 8, 2, 96, generator=torch.Generator().manual_seed(4))},
        {"sinks": torch.linspace(-1, 1, 8)},
        {"alibi_slopes": torch.linspace(0.01, 0.3, 8)},
        {"seqused_k": torch.tensor([61, 0], dtype=torch.int32)},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("page", [None, 16])
def test_options(options, kind, page):
    dtype = HALF[kind.stored == "int8"]
    engines = ["cuda-mma", *["cpu-amx"] * (dtype == torch.bfloat16 and "dropout" not in options)]
    check(quantised_call(kind, (2, 8, 2, 2, 96, 64, 64), dtype, page, **options), *engines)


@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
@pytest.mark.parametrize("page", [None, 16, 24])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (300, 5)}, {"dropout": 0.2, "seed": 3, "mask": True}], ids=str)
def test_many_queries(options, page, kind):
    """A group has more rows than a tile, a tile's rows lie in two pages, and keys are split."""
    dtype = HALF[kind.stored == "int8"]
    if options.get("mask"):
        options = {**options, "mask": torch.rand(1, 1, 37, 816, generator=torch.Generator().manual_seed(3)) < 0.9}
    check(quantised_call(kind, (2, 8, 2, 37, 816, 64, 128), dtype, page, **options), "cuda-mma")


@pytest.mark.parametrize("kind", GROUPED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("sq", [2, 20])
@pytest.mark.parametrize("how", ["dense", "packed", "pages of 80"])
def test_groups_of_rows(how, sq, dtype, kind):
    """Groups of packed keys are counted over all tokens, so that a sequence begins within one; each page begins with a new group."""
    starts = torch.tensor([0, 45, 150, 300], dtype=torch.int32)
    if how == "packed":
        options = {"cu_seqlens_q": torch.arange(4, dtype=torch.int32) * sq, "cu_seqlens_k": starts, "max_seqlen_q": sq, "max_seqlen_k": 150}
        inputs, row, page = call(1, 4, 3 * sq, 300, 64, 32, 2, dtype, dlse=False, **options), 0, None
    else:
        page = 80 if how != "dense" else None
        inputs, row = call(2, 4, sq, 320, 64, 32, 2, dtype, dlse=False), 2
    keys = inputs.k.shape[row]
    far = 2.0 ** torch.linspace(-1, 1, keys).view(-1, *[1] * (inputs.k.dim() - row - 1))  # so that a wrong group's scale shows
    quant, k, v = quantised(kind, far * inputs.k, inputs.v, row, group_of(torch.arange(keys), kind.group, page))
    check(replace(inputs, k=k, v=v, quant=quant, page=page))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_scales_far_apart(kind, dtype):
    """P times a scale is rounded to float16, whose range hardly holds such scales."""
    inputs = call(1, 4, 2, 96, 64, 64, 1, dtype, dlse=False)
    far = 10.0 ** torch.linspace(-5, 2, 96).view(1, 1, -1, 1)
    k, v = (inputs.k.double(), far.double() * inputs.v.double())
    quant, k, v = quantised(kind._replace(scale="float32"), k, v, 2, None)
    for only in (slice(0, 96), slice(0, 20)):  # the keys that the query sees
        mask = torch.zeros(1, 1, 1, 96, dtype=torch.bool)
        mask[..., only] = True
        check(replace(inputs, k=k, v=v, quant=quant, options={"mask": mask}), "cuda-mma")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("scale", [1e6, 1e30])
def test_a_large_scale_of_small_numbers(kind, dtype, scale):
    """The scale of a row of zeros may be anything; beside the other keys, the row has no weight."""
    inputs = quantised_call(kind._replace(scale="float32"), (1, 4, 1, 2, 96, 64, 64), dtype)
    for x, scales in ((inputs.quant.k, inputs.quant.k_scale), (inputs.quant.v, inputs.quant.v_scale)):
        x[:, :, 70], scales[:, :, 70] = 0, scale
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, :, 70] = v[:, :, 70] = 0
    check(replace(inputs, k=k, v=v), "cuda-mma")


@pytest.mark.skipif(ON_GPU, reason="there a P times a scale below 2^-126 may count as 0: docs/semantics.md")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_small_scales(kind):
    """A small scale times a small P leaves the range of product operands; O does not, because the key with a P near 1 has a V of 0."""
    inputs = call(1, 8, 1, 512, 64, 64, 1, torch.bfloat16, dlse=False)
    q, k, v = torch.zeros_like(inputs.q), torch.zeros_like(inputs.k), inputs.v.double() * 1e-35
    q[..., 0], k[..., 0], k[:, :, 0, 0], v[:, :, 0] = 2, -20, 0, 0
    quant, k, v = quantised(kind._replace(scale="float32"), k, v, 2, None)
    check(replace(inputs, q=q, k=k, v=v, quant=quant), "cpu-amx")


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_nobody_sees_may_be_anything(kind):
    inputs = quantised_call(kind, (1, 4, 1, 2, 96, 64, 64), torch.bfloat16)
    mask = torch.ones(1, 1, 1, 96, dtype=torch.bool)
    mask[..., 10:30] = mask[..., 77] = False
    inputs = replace(inputs, options={"mask": mask, "seqused_k": torch.tensor([90], dtype=torch.int32)})
    hidden = ~mask[0, 0, 0]
    hidden[90:] = True
    for x in (inputs.quant.k, inputs.quant.v):
        x[:, :, hidden] = 0x7F
    for n, x in enumerate((inputs.quant.k_scale, inputs.quant.v_scale)):
        x[:, :, hidden] = (torch.nan, torch.inf)[n]
    check(inputs, "cuda-mma")


def results_of_engines(inputs: Inputs) -> dict[str, torch.Tensor]:
    """out of each engine that takes the call, the reference among them."""
    handed, found = inputs.handed(), {}
    q, k, v = (moved(x, DEVICE) for x in (handed.q, handed.k, handed.v))
    options = {name: moved(x, DEVICE) if isinstance(x, torch.Tensor) else x for name, x in handed.options.items()}
    for engine in (*engines_under_test(), "reference"):
        if engine == "reference" and ON_GPU:
            continue
        with running_on(engine):
            try:
                found[engine] = strobe.attention(q, k, v, engine=engine, **options).cpu()
            except NotImplementedError:
                continue
    assert found.keys() & {"cuda-mma", "cpu-avx512", "cpu-avx2", "cpu-baseline", "cpu-neon"}, found.keys()
    return found


@pytest.mark.parametrize("stored", ["float8", "e5m2"])
@pytest.mark.parametrize("in_v", [False, True])
def test_nan_that_is_seen_is_seen(in_v, stored):
    """A NaN among FP8 numbers, and a NaN scale, reach the output."""
    for spoil in ("number", "scale"):
        inputs = quantised_call(Kind(stored, "float32"), (1, 4, 1, 3, 64, 64, 64), torch.bfloat16, causal=True)
        if spoil == "number":
            (inputs.quant.v if in_v else inputs.quant.k)[0, 0, 62, 5] = 0x7F
        else:
            (inputs.quant.v_scale if in_v else inputs.quant.k_scale)[0, 0, 62] = torch.nan
        for engine, out in results_of_engines(inputs).items():
            assert out[0, :, 0].isfinite().all(), engine  # this row sees 62 keys
            seen = out[0, :, 1:, 5] if in_v and spoil == "number" else out[0, :, 1:]
            assert seen.isnan().all(), (engine, spoil)
            if in_v and spoil == "number":
                assert out[..., 6:].isfinite().all(), engine


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_an_infinity_of_e5m2_is_one(dtype):
    for byte, expected in ((0x7C, torch.inf), (0xFC, -torch.inf)):
        inputs = quantised_call(Kind("e5m2", "float32"), (1, 4, 1, 3, 64, 64, 64), dtype, causal=True)
        inputs.quant.v[0, 0, 62, 5] = byte
        for engine, out in results_of_engines(inputs).items():
            assert (out[0, :, 1:, 5] == expected).all(), engine
            assert out[0, :, 0].isfinite().all(), engine
            assert out[..., 6:].isfinite().all(), engine
        inputs.quant.k[0, 0, 62, 5] = byte  # scores of plus or minus infinity
        for engine, out in results_of_engines(inputs).items():
            assert out[0, :, 0].isfinite().all(), engine


@pytest.mark.parametrize("form", ["dense", "packed", "pages"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_scales_for_each_head_or_for_all(layout, form):
    """They give the bits of scales that are written out for each key."""
    q, k, v = (torch.randn(2, heads, 48, d) for heads, d in ((4, 32), (2, 32), (2, 64)))
    q, k, v = q[:, :, :3].bfloat16(), k.to(torch.float8_e5m2), v.to(torch.float8_e5m2)
    more: dict[str, Any] = {"layout": layout}
    if form == "pages":
        k, v = (x.unflatten(2, (3, 16)).transpose(1, 2).flatten(0, 1) for x in (k, v))  # (pages, Hkv, page, D)
        more["page_table"] = torch.arange(6, dtype=torch.int32).view(2, 3)
    if form == "packed":
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        more = {"cu_seqlens_q": torch.tensor([0, 3, 6]), "cu_seqlens_k": torch.tensor([0, 48, 96])}
        more = {name: x.int() for name, x in more.items()}
    elif layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    axes = (1, 0) if form == "packed" else (2, 1) if layout == "bshd" else (1, 2)
    by_head = [torch.tensor([0.5, 3.0]), torch.tensor([1.0, 0.25]).half()]
    for scales in (by_head, [x[0] for x in by_head], [x[:1] for x in by_head], [by_head[0], by_head[1][0]]):
        shape = [1] * (k.dim() - 1)
        written = []
        for x in scales:
            if x.dim():
                shape[axes[0] if form != "packed" else 1] = len(x)
            written.append(x.view(shape if x.dim() else [1] * len(shape)).expand(k.shape[:-1]).contiguous())
        for engine in (*engines_under_test(), "reference"):
            if engine == "reference" and ON_GPU:
                continue
            place = [moved(x, DEVICE) for x in (q, k, v)]
            given = {name: moved(x, DEVICE) if isinstance(x, torch.Tensor) else x for name, x in more.items()}
            with running_on(engine):
                try:
                    out, expected = (
                        strobe.attention(*place, k_scale=moved(a, DEVICE), v_scale=moved(b, DEVICE), engine=engine, **given)
                        for a, b in (scales, written)
                    )
                except NotImplementedError:
                    continue
            assert torch.equal(out, expected), engine


def test_scales_inside_the_pages():
    """A page that holds the scale of each key and head behind its numbers, as vLLM's caches do, is read in place."""
    pages, page, hkv, d = 6, 16, 2, 64
    for behind in (4, 16):  # with 16 bytes rows are as cuda-mma reads them
        pools = [torch.zeros(pages, page, hkv, d + behind, dtype=torch.int8) for _ in "kv"]
        stored = [strobe.kv.quantise(torch.randn(pages, page, hkv, d), torch.int8) for _ in "kv"]
        read = []
        for pool, (data, scale) in zip(pools, stored, strict=True):
            pool[..., :d] = data
            pool[..., d : d + 4].view(torch.float32)[..., 0] = scale
            pool = moved(pool, DEVICE)
            read.append((pool[..., :d], pool[..., d : d + 4].view(torch.float32)[..., 0]))
        q = moved(torch.randn(2, 1, 4, d).bfloat16(), DEVICE)
        more = {"page_table": moved(torch.tensor([[3, 1, 5], [0, 2, 4]], dtype=torch.int32), DEVICE), "layout": "bshd"}
        (k, k_scale), (v, v_scale) = read
        with running_on(None):
            out = strobe.attention(q, k, v, k_scale=k_scale, v_scale=v_scale, **more)
            (k, k_scale), (v, v_scale) = ([moved(x, DEVICE) for x in both] for both in stored)
            expected = strobe.attention(q, k, v, k_scale=k_scale, v_scale=v_scale, **more)
        torch.testing.assert_close(out, expected, rtol=0, atol=2**-7)


def test_the_cases_hold_each_kind():
    assert {kind.stored for kind in FACTORS["quant"][1:]} == {"int8", "float8", "int4"}
    assert {kind.group is None for kind in FACTORS["quant"][1:]} == {True, False}


def scaled_call(requires_grad: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """q, k and v, float8 keys and values, and their scales; `requires_grad` of them does."""
    q, k, v = (torch.randn(2, heads, 5, 32) for heads in (4, 2, 2))
    tensors = {"q": q, "k": k.to(torch.float8_e4m3fn), "v": v.to(torch.float8_e4m3fn)}
    tensors |= {name: torch.rand(2, 2, 5) for name in ("k_scale", "v_scale")}
    tensors = {name: moved(x, DEVICE) for name, x in tensors.items()}
    if requires_grad:
        tensors[requires_grad].requires_grad_()
    return {name: tensors[name] for name in "qkv"}, {name: tensors[name] for name in ("k_scale", "v_scale")}


@pytest.mark.parametrize("name", ["q", "k", "k_scale", "v_scale"])
def test_the_backward_refuses_quantised_keys(name):
    """The forward runs, as often as it is repeated: torch.no_grad() may be forgotten where there is no backward."""
    qkv, scales = scaled_call(name)
    message = f"^k_scale: quantised keys have no gradients, and {name} requires grad; accepted is a forward under torch.no_grad"
    with running_on(None):
        with torch.no_grad():
            expected = strobe.attention(**qkv, **scales)
        for _ in range(3):
            out = strobe.attention(**qkv, **scales)
            assert torch.equal(out.detach(), expected)
            with pytest.raises(NotImplementedError, match=message):
                out.sum().backward()


@pytest.mark.skipif(EMULATED, reason="tensors of the CPU stand for a GPU's outside torch.compile alone")
@pytest.mark.parametrize("name", ["q", "k", "v_scale", "pages"])
def test_the_compiled_backward_refuses_quantised_keys(name):
    qkv, scales = scaled_call("q" if name == "pages" else name)
    argument, keys = "k_scale", "quantised keys"
    if name == "pages":
        qkv["k"], qkv["v"] = torch.randn(2, 3, 2, 8, 32, device=DEVICE).unbind()
        scales = {"page_table": torch.tensor([[0], [2]], dtype=torch.int32, device=DEVICE)}
        argument, keys, name = "page_table", "keys in pages", "q"
    torch.compiler.reset()
    compiled = torch.compile(lambda: strobe.attention(**qkv, **scales) * 2, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        out = compiled()
        assert torch.equal(out.detach(), strobe.attention(**qkv, **scales).detach() * 2)
        with pytest.raises(NotImplementedError, match=f"^{argument}: {keys} have no gradients, and {name} requires grad; accepted is"):
            out.sum().backward()
