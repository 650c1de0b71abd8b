"""`invariant`: the bits of a row do not depend on what else is in the call."""

from __future__ import annotations

import pytest
import torch

import strobe
from check import takes
from device import DEVICE, EMULATED, ON_GPU, running_on
from engines import available_engines
from invariant_mixes import Variant, alone, differing, draw_problem, mixes

# Per engine and dtype; in all more than 1,000 mixes. The mixes of one seed are one test, whose kernels are compiled one after the other.
SEEDS, PROBLEMS, VARIANTS = (range(16, 17), 3, 2) if EMULATED else (range(16, 21), 5, 4)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
engines = pytest.mark.parametrize("engine", available_engines())


def refusal(engine: str, **options) -> str:
    """Why the engine does not support a plain call, if it does not."""
    q = torch.ones(1, 1, 4, 64, dtype=torch.bfloat16 if takes(engine, torch.bfloat16, 64) else torch.float32, device=DEVICE)
    try:
        with running_on(engine):
            strobe.attention(q, q, q, engine=engine, **options)
    except NotImplementedError as error:
        return str(error)
    return ""


@engines
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_mixes(engine, dtype, seed):
    if not takes(engine, dtype, 64):
        pytest.skip(f"{engine} takes no {dtype}")
    sizes = {"longest": 60, "most_dim": 40} if EMULATED else {}
    with running_on(engine):
        found = list(mixes(seed, dtype, DEVICE, PROBLEMS, VARIANTS, engine=engine, **sizes))
    if not found:
        assert "invariant" in refusal(engine, invariant=True) or dtype in (torch.float32,), "left out without a reason"
        pytest.skip(f"{engine} is not invariant")
    assert len(found) > PROBLEMS * VARIANTS // 2
    wrong = [(number, words, bits) for number, bits, words in found if any(bits.values())]
    assert not wrong, wrong[0]


@pytest.mark.skipif(ON_GPU, reason="of the CPU's tiles")
def test_the_mixes_find_what_is_not_invariant():
    """Without the option, rows have other bits among other rows. The test uses one engine, so that each machine draws the same."""
    found = list(mixes(16, torch.float32, DEVICE, 30, 4, invariant=False, engine="cpu-baseline"))
    assert {name for _, bits, _ in found for name, n in bits.items() if n} >= {"out", "dq", "dk", "dv"}


@engines
def test_chunks_of_a_long_cache(engine):
    """Few queries over more than one chunk of keys, which blocks may divide, and many queries, whose blocks walk over all chunks. Few
    queries of several heads may share a tile. Some numbers in the splits, or in the result, are not finite."""
    if "invariant" in refusal(engine, invariant=True):
        pytest.skip(f"{engine} is not invariant")
    g = torch.Generator().manual_seed(3)
    keys, d, group = 4096 + 77, 16, 3
    dtype = torch.bfloat16 if takes(engine, torch.bfloat16, d) else torch.float32
    q, k, v = (torch.randn(1, h, n, d, generator=g).to(dtype) for h, n in ((group, 150), (1, keys), (1, keys)))
    k[0, 0, 2048:4096, 0] -= 1e3 * q[0, 1].float().sign().mean(0)[0].item()  # in some rows the first chunks have no weight, or all of it
    v[0, 0, 100, 3], v[0, 0, 4150, 5] = torch.inf, torch.nan
    q, k, v = (x.to(DEVICE) for x in (q, k, v))
    sinks = torch.tensor([0.3, -1.0, 20.0], device=DEVICE)
    options = {"return_lse": True, "engine": engine, "causal": True, "invariant": True}
    with running_on(engine):
        many = strobe.attention(q, k, v, sinks=sinks, **options)
        copies = 150 if ON_GPU and not EMULATED else 2  # more thread blocks than SMs: they walk over all chunks
        walked = strobe.attention(*(x.expand(copies, -1, -1, -1) for x in (q, k, v)), sinks=sinks, **options)
        assert [differing(x[-1:], y) for x, y in zip(walked, many, strict=True)] == [0, 0]
        for first, end in ((149, 150), (140, 143), (100, 150)):
            seen = keys - 150 + end
            some = strobe.attention(q[:, :, first:end], k[:, :, :seen], v[:, :, :seen], sinks=sinks, **options)
            assert [differing(x, y[:, :, first:end]) for x, y in zip(some, many, strict=True)] == [0, 0]
        for h in range(group):  # calls with a single head, which is not packed
            alone = strobe.attention(q[:, h : h + 1, -1:], k, v, sinks=sinks[h : h + 1], **options)
            assert [differing(x, y[:, h : h + 1, -1:]) for x, y in zip(alone, many, strict=True)] == [0, 0]
        reached = strobe.attention(q, k, v, **options, window=(900, 0))  # some rows see only the last chunk
        one = strobe.attention(q[:, :, -1:], k, v, **options, window=(900, 0))
        assert [differing(x, y[:, :, -1:]) for x, y in zip(one, reached, strict=True)] == [0, 0]
    expected = strobe.reference(q.cpu(), k.cpu(), v.cpu(), causal=True, sinks=sinks.cpu(), rows=[149, 299])[0]
    for h, i in ((0, 149), (1, 149)):
        error = (many[0][0, h, i].double().cpu() - expected[0, h, i].double().cpu()).nan_to_num(0, 0, 0).abs().max()
        assert error < 0.02 * expected[0, h, i].nan_to_num(0, 0, 0).abs().max()


@engines
@pytest.mark.parametrize("queries", [1, 5, 33])
def test_heads_of_a_group_share_a_tile(engine, queries):
    """Each row has the same bits as without the other heads, and a NaN of one head stays in that head."""
    if "invariant" in refusal(engine, invariant=True):
        pytest.skip(f"{engine} is not invariant")
    g = torch.Generator().manual_seed(4)
    d, group, keys = 16, 19, 90
    dtype = torch.bfloat16 if takes(engine, torch.bfloat16, d) else torch.float32
    q, k, v = (torch.randn(2, h, n, d, generator=g).to(dtype) for h, n in ((2 * group, queries), (2, keys), (2, keys)))
    q[1, group + 3, 0, 2] = torch.nan
    q, k, v = (x.to(DEVICE) for x in (q, k, v))
    options = {"return_lse": True, "engine": engine, "causal": True, "invariant": True}
    cu_q = torch.tensor([0, queries, queries + 1], dtype=torch.int32, device=DEVICE)
    cu_k = torch.tensor([0, keys, 2 * keys - 7], dtype=torch.int32, device=DEVICE)
    with running_on(engine):
        together = strobe.attention(q, k, v, **options)
        for h in (0, 3, group - 1, group, group + 3, 2 * group - 1):
            kv = slice(h // group, h // group + 1)
            apart = strobe.attention(q[:, h : h + 1], k[:, kv], v[:, kv], **options)
            assert [differing(x, y[:, h : h + 1]) for x, y in zip(apart, together, strict=True)] == [0, 0]
        tokens = [torch.cat([x[0], x[1, :, :n]], 1).transpose(0, 1) for x, n in ((q, 1), (k, keys - 7), (v, keys - 7))]
        packed = strobe.attention(*tokens, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=queries, max_seqlen_k=keys, **options)
        assert differing(packed[0][:queries].transpose(0, 1), together[0][0]) == 0
        last = strobe.attention(q[1:, :, :1], k[1:, :, : keys - 7], v[1:, :, : keys - 7], **options)
        assert differing(packed[0][queries:].transpose(0, 1), last[0][0]) == 0
        assert differing(packed[1][:, :queries], together[1][0]) == 0
        assert differing(packed[1][:, queries:], last[1][0]) == 0


@pytest.mark.skipif(ON_GPU, reason="threads are the CPU's")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_default_engine_does_not_depend_on_lengths(dtype):
    names = set()
    for queries, keys, batch in ((1, 5000, 1), (1, 64, 9), (700, 700, 1), (33, 80, 2)):
        q, k = (torch.zeros(batch, 2, n, 64, dtype=dtype) for n in (queries, keys))
        explained = strobe.explain(q, k, k, causal=True, invariant=True)
        choice = explained.partition("choice\n")[2].split()
        assert "invariant: the first one that takes the dtype, head dimensions and options" in explained
        names.add(choice[0])
    assert len(names) == 1


@engines
def test_a_row_that_overflows_is_followed_again_by_itself(engine):
    if ON_GPU:
        pytest.skip("V is too large for a GPU")
    if not takes(engine, torch.float32, 32):
        pytest.skip(f"{engine} takes no float32")
    q, k, v = torch.randn(1, 1, 40, 32), torch.randn(1, 1, 300, 32), torch.randn(1, 1, 300, 32)
    q[:, :, 20], v[:, :, ::2] = 0, 1.7e38  # row 20: P = 1 at each key
    together = strobe.attention(q, k, v, engine=engine, invariant=True)
    apart = torch.cat([strobe.attention(q[:, :, i : i + 1], k, v, engine=engine, invariant=True) for i in range(40)], 2)
    assert together.isfinite().all()
    assert differing(together, apart) == 0


@pytest.mark.skipif(not ON_GPU, reason="a CPU's reference always follows")
@engines
@pytest.mark.parametrize("keys", [300, 4096 + 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_whose_scores_rise_do_not_concern_the_others(engine, dtype, keys):
    """Some rows' later scores are far above their first ones, so much that P, or P V, overflows unless the reference follows; V holds NaN
    that some rows do not see."""
    if not takes(engine, dtype, 32) or "invariant" in refusal(engine, invariant=True):
        pytest.skip(f"{engine} does not take it")
    g = torch.Generator().manual_seed(6)
    rows, d = 200, 32
    q, k, v = (torch.randn(1, 1, n, d, generator=g) for n in (rows, keys, keys))
    k[..., 0] = torch.linspace(0, 1, keys)
    rises = torch.tensor([0.0, 9.0, 12.0, 30.0, 200.0, 600.0, 3e3, -3e3])  # natural scores of the last keys
    q[..., 0] = rises.repeat(rows // 8) * d**0.5
    v *= 1e30 if dtype == torch.bfloat16 else 1e3
    v[0, 0, keys - 20, 4] = torch.nan  # with causal, only the last rows see it
    q, k, v = (x.to(DEVICE, dtype) for x in (q, k, v))
    options = {"causal": True, "engine": engine, "invariant": True, "return_lse": True}
    with running_on(engine):
        together = strobe.attention(q, k, v, **options)
        walked = strobe.attention(*(x.expand(150 if not EMULATED else 4, -1, -1, -1) for x in (q, k, v)), **options)
        assert [differing(x[-1:], y) for x, y in zip(walked, together, strict=True)] == [0, 0]
        for i in (*range(8), *range(rows - 24, rows - 8, 3), rows - 1):
            seen = keys - rows + 1 + i
            apart = strobe.attention(q[:, :, i : i + 1], k[:, :, :seen], v[:, :, :seen], **options)
            assert [differing(x, y[:, :, i : i + 1]) for x, y in zip(apart, together, strict=True)] == [0, 0], i
    expected = strobe.reference(q.cpu(), k.cpu(), v.cpu(), causal=True, rows=list(range(0, rows, 9)))
    for found, right in zip(together, expected, strict=True):
        found, right = found[:, :, ::9].double().cpu(), right[:, :, ::9].double().cpu()
        if engine != "cuda-simt":  # a NaN in V whose P is 0 in float32 does not show there: docs/semantics.md
            assert (found.isnan() == right.isnan()).all()
        assert (found - right).nan_to_num(0).abs().max() < 0.02 * right.nan_to_num(0).abs().max()


@engines
@pytest.mark.parametrize("option", ["bias", "alibi_slopes", "window"])
def test_rows_lie_elsewhere_in_their_tiles(engine, option):
    """The key tile before a row's diagonal has hidden elements or not, depending on the rows beside it. In both cases the terms that are
    added to a score must be rounded alike. With a window, the first visible key of a tile differs, too."""
    dtype = torch.bfloat16 if takes(engine, torch.bfloat16, 64) else torch.float32
    if "invariant" in refusal(engine, invariant=True):
        pytest.skip(f"{engine} is not invariant")
    g = torch.Generator().manual_seed(0)
    s, first, end = 200, 29, 171
    q, k, v = (torch.randn(1, 8, s, 80, generator=g).to(DEVICE, dtype) for _ in range(3))
    bias = (2 * torch.randn(1, 8, s, s, generator=g)).to(DEVICE, dtype)
    slopes = torch.rand(8, generator=g).to(DEVICE)

    def attend(first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        given = {"bias": bias[:, :, first:end, :end], "alibi_slopes": slopes, "window": (70, 0)}[option]
        options = {option: given, "causal": True, "invariant": True, "engine": engine}
        return strobe.attention(q[:, :, first:end], k[:, :, :end], v[:, :, :end], return_lse=True, **options)

    try:
        with running_on(engine):
            whole, rows = attend(0, s), attend(first, end)
    except NotImplementedError as error:
        pytest.skip(str(error).splitlines()[-1])
    for a, b in zip(whole, rows, strict=True):
        assert differing(a[:, :, first:end], b) == 0


def test_a_variant_compares_the_rows_that_it_says():
    """Tests the harness: a problem whose queries change differs only in them."""
    import random

    p = draw_problem(random.Random(5), torch.float32, "cpu", 80, 64)
    base = {"out": torch.randn(1, p.q.shape[1], p.q.shape[2], p.v.shape[3])}
    v: Variant = alone(p)
    assert differing(v.expected(p, base)["out"], base["out"]) == 0
    other = base["out"].clone()
    other[0, 0, 0, 0] += 1
    assert differing(v.expected(p, {"out": other})["out"], base["out"]) == 1
