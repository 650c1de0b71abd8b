"""`invariant`: the bits of a row do not depend on what else is in the call."""

from __future__ import annotations

import pytest
import torch

import strobe
from check import available_engines, takes
from device import DEVICE, EMULATED, ON_GPU, running_on
from invariant_mixes import Variant, alone, differing, draw_problem, mixes

PROBLEMS, VARIANTS = (3, 2) if EMULATED else (25, 4)  # of each engine and dtype: 1,000 and more in all
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
engines = pytest.mark.parametrize("engine", available_engines())


def refusal(engine: str, **options) -> str:
    """Why the engine does not take a plain call, if it does not."""
    q = torch.ones(1, 1, 4, 64, dtype=torch.bfloat16 if takes(engine, torch.bfloat16, 64) else torch.float32, device=DEVICE)
    try:
        with running_on(engine):
            strobe.attention(q, q, q, engine=engine, **options)
    except NotImplementedError as error:
        return str(error)
    return ""


@engines
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixes(engine, dtype):
    if not takes(engine, dtype, 64):
        pytest.skip(f"{engine} takes no {dtype}")
    sizes = {"longest": 60, "most_dim": 40} if EMULATED else {}
    with running_on(engine):
        found = list(mixes(16, dtype, DEVICE, PROBLEMS, VARIANTS, engine=engine, **sizes))
    if not found:
        assert "invariant" in refusal(engine, invariant=True) or dtype in (torch.float32,), "left out without a reason"
        pytest.skip(f"{engine} is not invariant")
    assert len(found) > PROBLEMS * VARIANTS // 2
    wrong = [(number, words, bits) for number, bits, words in found if any(bits.values())]
    assert not wrong, wrong[0]


@pytest.mark.skipif(ON_GPU, reason="of the CPU's tiles")
def test_the_mixes_find_what_is_not_invariant():
    """Without the option, rows do have other bits in other surroundings."""
    found = list(mixes(16, torch.bfloat16, DEVICE, 15, 4, invariant=False))
    assert {name for _, bits, _ in found for name, n in bits.items() if n} >= {"out", "dq", "dk", "dv"}


@engines
def test_chunks_of_a_long_cache(engine):
    """One query over the keys of more than one chunk, which may be shared out, and many queries, which walk over them."""
    if "invariant" in refusal(engine, invariant=True):
        pytest.skip(f"{engine} is not invariant")
    g = torch.Generator().manual_seed(3)
    keys, d = 2048 + 77, 16
    dtype = torch.bfloat16 if takes(engine, torch.bfloat16, d) else torch.float32
    q, k, v = (torch.randn(1, 1, n, d, generator=g).to(DEVICE, dtype) for n in (150, keys, keys))
    options = {"return_lse": True, "engine": engine, "causal": True, "sinks": torch.tensor([0.3], device=DEVICE), "invariant": True}
    with running_on(engine):
        many = strobe.attention(q, k, v, **options)
        for first, end in ((149, 150), (140, 143), (50, 150)):
            seen = keys - 150 + end
            some = strobe.attention(q[:, :, first:end], k[:, :, :seen], v[:, :, :seen], **options)
            assert [differing(x, y[:, :, first:end]) for x, y in zip(some, many, strict=True)] == [0, 0]
        reached = strobe.attention(q, k, v, **options, window=(900, 0))  # some rows see the second chunk alone
        one = strobe.attention(q[:, :, -1:], k, v, **options, window=(900, 0))
        assert [differing(x, y[:, :, -1:]) for x, y in zip(one, reached, strict=True)] == [0, 0]


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


def test_a_variant_compares_the_rows_that_it_says():
    """The harness: a problem with other queries differs in them alone."""
    import random

    p = draw_problem(random.Random(5), torch.float32, "cpu", 80, 64)
    base = {"out": torch.randn(1, p.q.shape[1], p.q.shape[2], p.v.shape[3])}
    v: Variant = alone(p)
    assert differing(v.expected(p, base)["out"], base["out"]) == 0
    other = base["out"].clone()
    other[0, 0, 0, 0] += 1
    assert differing(v.expected(p, {"out": other})["out"], base["out"]) == 1
