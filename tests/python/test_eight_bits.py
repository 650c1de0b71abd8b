"""q in FP8: what its scales mean, and what is refused. The contract's pairs are in test_contract.py (a Kind of `quant` with queries)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import strobe
from cases import call
from check import Yardstick, multiplies_eight_bits, run
from device import DEVICE, running_on
from engines import engines_under_test
from quantising import Kind, quantised, quantised_queries

FP8 = torch.float8_e4m3fn
B, H, HKV, SQ, SK, D, DV = 2, 4, 2, 19, 70, 64, 32


def drawn(heads: int, rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(B, heads, rows, columns, generator=torch.Generator().manual_seed(seed)).to(FP8)


def scale(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def given(**other: Any) -> dict[str, Any]:
    """A valid call, with other arguments; None leaves one out."""
    arguments: dict[str, Any] = {"q": drawn(H, SQ, D, 1), "k": drawn(HKV, SK, D, 2), "v": drawn(HKV, SK, DV, 3)}
    arguments |= {"q_scale": scale((H,), 4), "k_scale": scale((HKV,), 5), "v_scale": scale((), 6)} | other
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in arguments.items() if x is not None}


SCALES = {
    "each query": (scale((B, H, SQ), 4), scale((B, HKV, SK), 5), scale((B, HKV, SK), 6)),
    "each query, float16": (scale((B, H, SQ), 4, torch.float16), scale((B, HKV, SK), 5, torch.float16), scale((), 6, torch.float16)),
    "each sequence and head": tuple(scale((B, h, 1), 4 + h).expand(B, h, n) for h, n in ((H, SQ), (HKV, SK), (HKV, SK))),
    "each head": (scale((H,), 4), scale((HKV,), 5), scale((HKV,), 6)),
    "one": (scale((1,), 4), scale((), 5), scale((1,), 6)),
    "negative, zero and huge": (torch.tensor([-1.5, 0.0, 1e-30, 3e4]), scale((HKV,), 5), -scale((HKV,), 6)),
}


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("causal", [False, True])
def test_scales(name, causal):
    """The result is that over q, k and v times their scales. Where q is in 16 bits, the bits are those of a q that was cast before."""
    q_scale, k_scale, v_scale = SCALES[name]
    arguments = given(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, causal=causal)

    def whole(x: Tensor, scales: Tensor) -> Tensor:  # times scales of fewer axes
        return x.double() * (scales.double()[..., None] if scales.dim() == 3 else scales.double().reshape(-1, 1, 1))

    cpu = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in arguments.items()}
    values = [whole(cpu[n], cpu[f"{n}_scale"]) for n in "qkv"]
    expected, lse = strobe.reference(*values, causal=causal)
    found, found_lse = strobe.reference(**cpu)
    assert torch.equal(found, expected)
    assert torch.equal(found_lse, lse)
    for engine in engines_under_test():
        with running_on(engine):
            try:
                out = strobe.attention(**arguments, engine=engine).cpu()
                cast = values[0].float().bfloat16().to(DEVICE)
                of_cast = {n: x for n, x in arguments.items() if n not in ("q", "q_scale")}
                same = strobe.attention(cast, **of_cast, engine=engine).cpu()
            except NotImplementedError:
                continue
            products = "products of float8" in strobe.explain(**arguments, engine=engine)
        assert out.dtype == torch.bfloat16
        if products:  # P of E4M3: docs/semantics.md, with 1 for the sum of P
            allowed = (2**-4 + 2**-5.9 + 2**-8) * values[2].abs().max()
            assert (out.double() - expected).abs().max() <= allowed
        else:
            assert torch.equal(out, same), engine


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
def test_layouts(layout, dtype):
    """Against the formulas of the contract, with scales for each query and key."""
    options: dict[str, Any] = {"causal": True}
    if layout == "packed":
        starts = torch.tensor([0, 7, 7, 40], dtype=torch.int32)
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 33, "max_seqlen_k": 33}
        inputs, row = call(1, 4, 40, 40, 64, 32, 2, dtype, dlse=False, **options), 0
    else:
        inputs, row = call(2, 4, 33, 50, 64, 32, 2, dtype, dlse=False, **options), 2
        if layout == "bshd":
            inputs.q, inputs.k, inputs.v, inputs.dout = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
            inputs.options["layout"], row = "bshd", 1
    inputs.quant, inputs.k, inputs.v = quantised(Kind("float8", "float32", None, True), inputs.k, inputs.v, row, None)
    inputs.quant.q, inputs.quant.q_scale, inputs.q = quantised_queries(inputs.q)
    yardstick, faults = Yardstick(inputs), []
    for engine in (None, *engines_under_test()):
        try:
            faults += [f"{engine}: {fault}" for fault in yardstick.faults(run(inputs, engine), engine)]
        except NotImplementedError:
            assert engine is not None
    assert not faults, "\n".join(faults)


def test_only_products_in_eight_bits_are_allowed_their_error():
    """What rounding P to E4M3 adds is a fault of an engine that multiplies in 16 bits, as all do where a result is asked of columns."""
    inputs = call(1, 4, 33, 50, 64, 32, 2, torch.bfloat16, dlse=False)
    inputs.quant, inputs.k, inputs.v = quantised(Kind("float8", "float32", None, True), inputs.k, inputs.v, 2, None)
    inputs.quant.q, inputs.quant.q_scale, inputs.q = quantised_queries(inputs.q)
    yardstick = Yardstick(replace(inputs, aux=("column_sums",)))
    out, lse = strobe.reference(inputs.handed().q, inputs.handed().k, inputs.handed().v, **inputs.handed().options)
    assert yardstick.of_products > 0
    results = {"out": (out + yardstick.allowed["out"] + yardstick.of_products / 2).bfloat16(), "lse": lse.float()}
    for engine in (None, *engines_under_test()):
        assert not multiplies_eight_bits(yardstick.inputs, engine)
        assert [fault.partition(":")[0] for fault in yardstick.faults(results, engine)] == ["out"]
    assert not yardstick.faults(results, products=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q_scale": None}, "q: dtype float8_e4m3fn; accepted is float32, float16, bfloat16, float64, or float8_e4m3fn with q_scale"),
        ({"k_scale": None, "v_scale": None}, "k_scale: missing beside q_scale; accepted is both, or neither"),
        ({"k_scale": None}, "k_scale: missing beside v_scale; accepted is both, or neither"),
        ({"q": torch.zeros(B, H, SQ, D, dtype=torch.bfloat16)}, "q: dtype bfloat16; accepted is float8_e4m3fn"),
        ({"k": torch.zeros(B, HKV, SK, D, dtype=torch.int8)}, "k: dtype int8; accepted is float8_e4m3fn"),
        ({"v": torch.zeros(B, HKV, SK, DV, dtype=torch.float8_e5m2)}, "v: dtype float8_e5m2; accepted is float8_e4m3fn"),
        ({"q_scale": scale((B, H, 5), 1)}, r"q_scale: shape (2, 4, 5); accepted is (B, H, Sq) = (2, 4, 19)"),
        ({"q_scale": scale((HKV,), 1)}, "q_scale: shape (2); accepted is (H|1) = (4|1)"),
        ({"q_scale": scale((H,), 1, torch.float64)}, "q_scale: dtype float64; accepted is float16, float32; q_scale.float()"),
        ({"out_dtype": torch.float32}, "out_dtype: torch.float32; accepted is bfloat16, float16, or None"),
        ({"bias": torch.zeros(1, 1, SQ, SK, dtype=torch.float64)}, "bias: dtype float64; accepted is bfloat16, float32"),
        ({"part": strobe.Part([(0, SQ)], [(0, SK)], SQ, SK)}, "k_scale: given beside part; accepted is one of the two"),
    ],
)
def test_refusals(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        strobe.attention(**given(**wrong))


def test_out_dtype_without_scales():
    x = torch.zeros(1, 1, 1, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"^out_dtype: float16 without q_scale; accepted is None: out has q's dtype$"):
        strobe.attention(x, x, x, out_dtype="float16")


@pytest.mark.parametrize("dtype", [None, torch.float16, "float16", torch.bfloat16, "bfloat16"])
def test_out_dtype(dtype):
    wanted = torch.float16 if "float16" in str(dtype) and "bf" not in str(dtype) else torch.bfloat16
    for engine in (None, "reference"):
        with running_on(engine):
            arguments = given(out_dtype=dtype, engine=engine)
            if engine == "reference":
                arguments = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in arguments.items()}
            out, lse = strobe.attention(**arguments, return_lse=True)
        assert (out.dtype, lse.dtype) == (wanted, torch.float32)


def test_a_repeated_call():
    """Found in the memory of calls; out_dtype is part of its key."""
    first = strobe.attention(**given())
    for _ in range(3):
        assert torch.equal(strobe.attention(**given()), first)
        assert strobe.attention(**given(out_dtype=torch.float16)).dtype == torch.float16
    other = strobe.attention(**given(q_scale=2 * scale((H,), 4)))
    assert not torch.equal(other, first)


def test_under_autocast():
    with torch.autocast(DEVICE.partition(":")[0], torch.bfloat16):
        assert torch.equal(strobe.attention(**given()), strobe.attention(**given()))


def test_the_backward_is_refused():
    arguments = given()
    arguments["q_scale"].requires_grad_()
    out = strobe.attention(**arguments)
    with pytest.raises(NotImplementedError, match="quantised keys have no gradients, and q_scale requires grad"):
        out.float().sum().backward()
    with pytest.raises(ValueError, match="k_scale: given in a backward"):
        strobe.attention_backward(out.detach(), out=out.detach(), lse=torch.zeros(B, H, SQ, device=DEVICE), **given())


def test_explain():
    text = strobe.explain(**given())
    assert "bfloat16 of q, k and v in float8_e4m3fn" in text
    assert "q_scale" in text
