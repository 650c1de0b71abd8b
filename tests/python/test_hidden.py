"""What is hidden reaches no result, whatever it holds and whatever lies beside it in a tile."""

from __future__ import annotations

import pytest
import torch

import strobe
from cases import Inputs, call
from check import assert_matches, available_engines, oracle, run, run_or_skip

INF, NAN = torch.inf, torch.nan
engines = pytest.mark.parametrize("engine", available_engines())


def assert_clean(inputs: Inputs, engine: str) -> None:
    ref = oracle(inputs)
    for name, t in run_or_skip(inputs, engine).items():
        spoiled = ~t.isfinite() & ref[name].isfinite()
        assert not spoiled.any(), f"{name} is not finite at {spoiled.nonzero()[0].tolist()}, which sees nothing of the kind"


@engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("what", "value"), [("k", NAN), ("v", INF), ("v", NAN)])
def test_behind_the_diagonal(what, value, dtype, engine):
    """A tile of keys packed once a head: what a product reads in its last step lies past the diagonal."""
    inputs = call(h=4, hkv=1, sq=128, sk=141, d=64, dtype=dtype, causal=True)
    getattr(inputs, what)[..., 78:, :] = value
    assert_clean(inputs, engine)


@engines
@pytest.mark.parametrize("what", ["k", "v"])
@pytest.mark.parametrize("options", [{"softcap": 20.0}, {"scale": -0.3}, {"dropout": 0.2, "seed": 1, "offset": 2}], ids=str)
def test_padding_with_other_options(options, what, engine):
    inputs = call(sq=64, sk=64, mask=torch.arange(64).view(1, 1, 1, 64) < 60, **options)
    getattr(inputs, what)[..., 60:, :] = NAN
    assert_clean(inputs, engine)


@engines
@pytest.mark.parametrize("what", ["k", "v"])
def test_mask_of_each_query_and_a_bias_gradient(what, engine):
    """40 queries do not fill their lanes: the mask says nothing of the rest."""
    mask = (torch.arange(64).view(1, 1, 1, 64) < 60).expand(1, 1, 40, 64).contiguous()
    inputs = call(sq=40, sk=64, mask=mask, bias=torch.randn(1, 1, 1, 64), gradients=("bias",))
    getattr(inputs, what)[..., 60:, :] = NAN
    assert_clean(inputs, engine)


@engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sq", [1, 65, 257])
def test_gradient_that_is_not_finite(sq, dtype, engine):
    """The last query's dO spoils the keys that it sees, not those beside them."""
    inputs = call(sq=sq, sk=400, dtype=dtype, causal=True, alignment="top_left")
    inputs.dout[..., -1, :] = INF
    assert_clean(inputs, engine)


@engines
@pytest.mark.parametrize("what", ["k", "v"])
def test_bias_of_minus_infinity(what, engine):
    bias = torch.zeros(1, 1, 1, 70)
    bias[..., 50:] = -INF
    inputs = call(sq=33, sk=70, bias=bias)
    getattr(inputs, what)[..., 50:, :] = NAN
    assert_clean(inputs, engine)


@engines
@pytest.mark.parametrize(("b", "sq"), [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (1, 2, 1, 1)])
def test_bias_gradient_of_nothing_is_zero(b, sq, shape, engine):
    inputs = call(b=b, sq=sq, sk=64, bias=torch.randn(shape), gradients=("bias",))
    assert (run_or_skip(inputs, engine)["dbias"] == 0).all()


@engines
@pytest.mark.parametrize("scale", [1e-38, 1e-50, 1e-40, 1e31])
def test_scale_at_the_ends_of_fp32(scale, engine):
    inputs = call(sq=20, sk=64, scale=scale, dlse=False)
    ref, results = oracle(inputs), run_or_skip(inputs, engine)
    assert torch.allclose(results["lse"].double(), ref["lse"], rtol=1e-5)
    assert torch.allclose(results["out"].double(), ref["out"], atol=1e-5)


# What a mask hides whole blocks of, it costs nothing: such keys are not even packed


def blocks_of(kept: torch.Tensor, sq: int, sk: int, block: int) -> torch.Tensor:
    return kept.repeat_interleave(block, -2).repeat_interleave(block, -1)[..., :sq, :sk]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", [(1, 1), (2, 1), (1, 4), (2, 4)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout": 0.2, "seed": 1, "offset": 2}], ids=str)
def test_hidden_blocks(options, shared, dtype):
    """Holes in every tile, of queries and of keys, the same for the heads or sequences that share the mask or not."""
    sq, sk = 200, 330
    kept = torch.rand(*shared, 7, 11, generator=torch.Generator().manual_seed(4)) < 0.4
    inputs = call(b=2, h=4, hkv=2, sq=sq, sk=sk, d=32, dtype=dtype, mask=blocks_of(kept, sq, sk, 32), **options)
    assert_matches(inputs)


@engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by", ["mask", "blocks"])
def test_keys_that_nobody_sees(by, dtype, engine):
    kept = torch.zeros(5, 6, dtype=torch.bool)
    kept[:2, 2], kept[3:, 5] = True, True
    mask = {"mask": blocks_of(kept, 300, 370, 64)} if by == "mask" else {"block_mask": strobe.BlockMask.from_kept(kept, 64, 64, 300, 370)}
    inputs = call(h=4, hkv=1, sq=300, sk=370, d=48, dtype=dtype, **mask)
    clean = run_or_skip(inputs, engine)
    unseen = ~blocks_of(kept, 300, 370, 64).any(0)
    for t in (inputs.k, inputs.v):
        t[..., unseen, :] = NAN
    for name, t in run(inputs, engine).items():
        assert torch.equal(t, clean[name]), name
    for name in ("dk", "dv"):
        assert (clean[name][..., unseen, :] == 0).all()


@engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 20.0}], ids=str)
def test_mask_that_hides_nothing(options, dtype, engine):
    """It takes the path without one, to the bit."""
    inputs = call(b=2, h=4, hkv=2, sq=150, sk=290, d=32, dtype=dtype, **options)
    without = run_or_skip(inputs, engine)
    inputs.options["mask"] = torch.ones(1, 1, 150, 290, dtype=torch.bool)
    for name, t in run(inputs, engine).items():
        assert torch.equal(t, without[name]), name
