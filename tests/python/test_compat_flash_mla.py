"""strobe.compat.flash_mla, as FlashMLA's users call it."""

from __future__ import annotations

import pytest
import torch

import strobe
from strobe.compat import flash_mla
from strobe.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata

PAGE, PAGES = 8, 7
USED = [20, 1, 0, 13]
D, DV, H = 24, 16, 6


def call(**changed):
    torch.manual_seed(0)
    given = {
        "q": torch.randn(len(USED), 2, H, D),
        "k_cache": torch.randn(PAGES, PAGE, 1, D),
        "block_table": torch.tensor([[4, 0, 2], [5, 9, -1], [-7, 9, 9], [1, 6, 99]], dtype=torch.int32),
        "cache_seqlens": torch.tensor(USED, dtype=torch.int32),
        "head_dim_v": DV,
    }
    return given | changed


def formula(q, k_cache, block_table, cache_seqlens, head_dim_v, causal, sink=None):
    """In float64, sequence by sequence."""
    outs, lses = [], []
    for b, n in enumerate(cache_seqlens.tolist()):
        k = k_cache[block_table[b, : -(-n // PAGE)].long(), :, 0].flatten(0, 1)[:n].double()
        s = q[b].double().transpose(0, 1) @ k.T * D**-0.5
        if causal:
            sq = q.shape[1]
            s = s.masked_fill(torch.arange(n) > torch.arange(sq)[:, None] + n - sq, -torch.inf)
        lse = torch.logsumexp(s, -1) if n else torch.full(s.shape[:-1], -torch.inf, dtype=torch.float64)
        whole = lse if sink is None else torch.logaddexp(lse, sink.double()[:, None])
        p = torch.exp(s - whole[..., None]).nan_to_num(0)
        outs.append((p @ k[:, :head_dim_v]).transpose(0, 1))
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_it_is_attention_over_the_first_columns(causal, sinks):
    given = call()
    sink = torch.linspace(-2, 3, H) if sinks else None
    metadata, splits = get_mla_metadata(given["cache_seqlens"], 2 * H, 1)
    out, lse = flash_mla_with_kvcache(*given.values(), tile_scheduler_metadata=metadata, num_splits=splits, causal=causal, attn_sink=sink)
    expected, expected_lse = formula(*given.values(), causal, sink)
    assert out.dtype == torch.float32
    assert torch.allclose(out.double(), expected, atol=1e-5)
    assert torch.allclose(lse.double(), expected_lse, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sinks_without_weight(causal, dtype):
    """A sink of -inf adds nothing, also where no key is seen: causal, the second sequence's first query sees none."""
    given = call()
    given |= {name: given[name].to(dtype) for name in ("q", "k_cache")}
    none = torch.full((H,), -torch.inf)
    plain, lse = flash_mla_with_kvcache(**given, causal=causal)
    out, lse_beside = flash_mla_with_kvcache(**given, causal=causal, attn_sink=none)
    assert torch.equal(out, plain)
    assert torch.equal(lse_beside, lse)
    assert (lse == -torch.inf).any()
    assert not flash_mla_with_kvcache(**given, causal=causal, attn_sink=-none)[0].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sinks_in_16_bits(dtype):
    """out is rounded twice, which is half an ulp more than strobe.attention's sinks have."""
    given = call()
    given |= {name: given[name].to(dtype) for name in ("q", "k_cache")}
    sink = torch.linspace(-2, 3, H)
    out, _ = flash_mla_with_kvcache(**given, attn_sink=sink)
    k = given["k_cache"]
    once = strobe.attention(
        given["q"], k, k[..., :DV], page_table=given["block_table"], seqused_k=given["cache_seqlens"], sinks=sink, layout="bshd"
    )
    assert out.dtype == dtype
    assert ((out.double() - once.double()).abs() <= torch.finfo(dtype).eps * once.double().abs() + 1e-7).all()


def test_positions_of_arguments():
    """The order in which FlashMLA's own tests pass them."""
    given = call()
    out, _ = flash_mla_with_kvcache(*given.values(), *get_mla_metadata(), 0.3, True)
    expected, _ = strobe.attention(
        given["q"], given["k_cache"], given["k_cache"][..., :DV], page_table=given["block_table"], seqused_k=given["cache_seqlens"],
        scale=0.3, causal=True, layout="bshd", return_lse=True,
    )  # fmt: skip
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"head_dim_v": 25}, ValueError, "^head_dim_v: 25; accepted are integers from 1 to 24$"),
        ({"q": 3}, TypeError, "^q: int; accepted is a torch.Tensor"),
        ({"q": 3, "attn_sink": torch.zeros(H)}, TypeError, "^q: int; accepted is a torch.Tensor"),
        ({"k_cache": 3}, TypeError, "^k_cache: int; accepted is a torch.Tensor"),
        ({"is_fp8_kvcache": True}, NotImplementedError, "^is_fp8_kvcache: True; accepted is False"),
        ({"indices": torch.zeros(1)}, NotImplementedError, "^indices: .*; accepted is None$"),
        ({"attn_sink": torch.zeros(3)}, ValueError, r"^attn_sink: torch.float32 of shape \(3,\); accepted is floating point \(6,\)"),
        ({"block_table": torch.zeros(4, 3)}, ValueError, "^block_table: "),
        ({"cache_seqlens": torch.zeros(3, dtype=torch.int32)}, ValueError, "^cache_seqlens: "),
        ({"causal": "yes"}, TypeError, "^causal: "),
    ],
)
def test_refusals(changed, error, message):
    with pytest.raises(error, match=message):
        flash_mla_with_kvcache(**call(**changed))


def test_names():
    assert set(flash_mla.__all__) <= set(dir(flash_mla))
