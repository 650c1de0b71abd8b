"""max_logit and column_sums: their values, corner cases, and that calls without them do not change."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

import strobe
from cases import call
from check import dtype_of, run_or_skip
from device import DEVICE, running_on
from engines import available_engines

BOTH = ("max_logit", "column_sums")
ENGINES = available_engines()


def tensors(*shape: int, n: int = 3, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).to(DEVICE) for _ in range(n)]


def attention(*args, engine=None, **options):
    with running_on(engine):
        try:
            return strobe.attention(*args, engine=engine, **options)
        except NotImplementedError as refusal:
            pytest.skip(str(refusal))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("aux", [("max_logit",), ["column_sums"], BOTH, BOTH[::-1]])
def test_a_named_tuple_in_the_order_of_the_names(aux, return_lse):
    q, k, v = tensors(2, 4, 17, 8)
    found = attention(q, k, v, aux=aux, return_lse=return_lse)
    assert found._fields == ("out", *["lse"] * return_lse, *aux)
    plain = attention(q, k, v, return_lse=True)
    assert torch.equal(found.out, plain[0])
    assert not return_lse or torch.equal(found.lse, plain[1])
    for name, shape in (("max_logit", (2, 4)), ("column_sums", (2, 4, 17))):
        assert name not in aux or (getattr(found, name).shape, getattr(found, name).dtype) == (shape, torch.float32)


def test_without_a_name_nothing_changes():
    q, k, v = tensors(1, 2, 5, 4)
    for none in ((), []):
        assert isinstance(attention(q, k, v, aux=none), torch.Tensor)
        assert type(attention(q, k, v, aux=none, return_lse=True)) is tuple


@pytest.mark.parametrize(
    ("aux", "error"),
    [
        *((bad, TypeError) for bad in ("max_logit", 3, None, (1,), {"max_logit"})),
        *((bad, ValueError) for bad in (("max_logits",), ("lse",), ("max_logit", "max_logit"))),
    ],
)
def test_a_bad_name_is_named(aux, error):
    q, k, v = tensors(1, 1, 3, 4)
    for function in (strobe.attention, strobe.reference, strobe.explain):
        with pytest.raises(error, match=r"^aux: .*; accepted is a tuple of one or more of 'max_logit', 'column_sums', each once$"):
            function(q.cpu(), k.cpu(), v.cpu(), aux=aux)
    with pytest.raises(ValueError, match="aux: .*\nscale: "):
        strobe.attention(q.cpu(), k.cpu(), v.cpu(), scale=math.inf, aux=("x",))


def test_the_reference_wants_all_rows():
    q, k, v = (x.cpu() for x in tensors(1, 1, 3, 4))
    assert strobe.reference(q, k, v, aux=BOTH)._fields == ("out", "lse", *BOTH)
    with pytest.raises(ValueError, match=r"^aux: 'max_logit' given with rows; accepted is \(\), for all rows of a head belong to it$"):
        strobe.reference(q, k, v, rows=[0], aux=BOTH)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("engine", ENGINES)
def test_the_only_key_of_a_query_gets_all_of_it(engine, seed):
    """P is 1 only if the pass computes the score that LSE was made of, or nearly so."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = ((3 * torch.randn(1, 4, n, 128, generator=g)).to(DEVICE, dtype_of(engine)) for n in (16, 1, 1))
    found = attention(q, k, v, engine=engine, aux=("column_sums",)).column_sums
    assert (found - 16).abs().max() < 16e-6


@pytest.mark.parametrize("engine", ENGINES)
def test_they_have_no_gradient_and_leave_the_others_alone(engine):
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 33, 64, dtype=dtype_of(engine)))
    with running_on(engine):
        out = attention(q, k, v, causal=True, engine=engine)
        expected = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for _ in range(3):  # later calls are repeated ones, which take another path
        found = attention(q, k, v, causal=True, aux=BOTH, engine=engine)
        assert not found.max_logit.requires_grad
        assert not found.column_sums.requires_grad
        with running_on(engine):
            gradients = torch.autograd.grad(found.out, (q, k, v), torch.ones_like(found.out))
        for got, want in zip(gradients, expected, strict=True):
            assert torch.allclose(got, want, rtol=1e-2, atol=1e-5)


def test_compiled():
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 33, 16))
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: strobe.attention(*x, causal=True, aux=BOTH), backend="aot_eager", fullgraph=True)
    with running_on(None):
        found, expected = compiled(q, k, v), strobe.attention(q, k, v, causal=True, aux=BOTH)
        found.out.sum().backward()
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)
    assert q.grad is not None


def test_the_operator_is_one_for_pytorch():
    q, k, v = (x.cpu() for x in tensors(1, 2, 9, 8))
    torch.library.opcheck(torch.ops.strobe.attention_forward_aux.default, (q, k, v), {"causal": True, "aux": [*BOTH]})
    with pytest.raises(ValueError, match="^aux: "):
        torch.ops.strobe.attention_forward_aux(q, k, v, aux=["x"])


def test_numpy():
    q, k, v = (x.cpu() for x in tensors(2, 2, 12, 8))
    expected = strobe.attention(q, k, v, aux=BOTH)
    found = strobe.attention(*(x.numpy() for x in (q, k, v)), aux=BOTH)
    for got, want in zip(found, expected, strict=True):
        assert isinstance(got, np.ndarray)
        assert np.array_equal(got, want.numpy())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_columns_sum_to_the_queries_that_see_something(engine, dtype):
    q, k, v = tensors(2, 4, 200, 64, dtype=dtype)
    found = attention(q, k, v, window=(40, 3), aux=BOTH, engine=engine)
    assert torch.allclose(found.column_sums.sum(2), torch.full((2, 4), 200.0, device=q.device, dtype=found.column_sums.dtype), rtol=1e-4)
    empty = attention(q, k, v, mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=q.device), aux=BOTH, engine=engine)
    assert (empty.max_logit == -math.inf).all()
    assert (empty.column_sums == 0).all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0), (1, 1)])
def test_without_queries_or_keys(engine, queries, keys):
    dtype = dtype_of(engine)
    (q,), (k, v) = tensors(2, 3, queries, 64, n=1, dtype=dtype), tensors(2, 3, keys, 64, n=2, dtype=dtype)
    found = attention(q, k, v, aux=BOTH, engine=engine)
    assert found.column_sums.shape == (2, 3, keys)
    if queries and keys:
        assert torch.allclose(found.column_sums, torch.ones_like(found.column_sums))
        assert torch.allclose(found.max_logit, (q * k).float().sum(-1)[..., 0] / 8, rtol=1e-2)
    else:
        assert (found.max_logit == -math.inf).all()
        assert (found.column_sums == 0).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_nan_that_is_seen_and_nan_that_is_not(engine):
    q, k, v = tensors(1, 2, 70, 64, dtype=dtype_of(engine))
    k[0, 0, 50] = math.nan
    found = attention(q, k, v, causal=True, aux=BOTH, engine=engine)
    assert found.max_logit[0, 0].isnan()
    assert not found.max_logit[0, 1].isnan()
    assert found.column_sums[0, 0].isnan().all()  # the rows from 50 on see the NaN, and also all earlier keys
    assert not found.column_sums[0, 1].isnan().any()
    hidden = attention(q, k, v, causal=True, window=(5, 0), mask=torch.arange(70, device=q.device) != 50, aux=BOTH, engine=engine)
    assert not hidden.max_logit.isnan().any()
    assert not hidden.column_sums.isnan().any()
    assert hidden.column_sums[0, 0, 50] == 0


@pytest.mark.parametrize("engine", [name for name in ENGINES if name.startswith("cpu-")])
@pytest.mark.parametrize("shape", [(1, 1), (2, 7)])
def test_the_same_bits_for_any_number_of_threads(engine, shape):
    b, h = shape
    inputs = call(b=b, h=h, sq=700, sk=333, d=24, dtype=dtype_of(engine), causal=True)
    inputs.aux = BOTH
    one = run_or_skip(inputs, engine, threads=1)
    for threads in (2, 3, 5):
        other = run_or_skip(inputs, engine, threads=threads)
        assert all(torch.equal(one[name], other[name]) for name in BOTH)


@pytest.mark.parametrize("engine", ENGINES)
def test_long_sums(engine):
    """Many queries that all give the same weight to a key."""
    dtype, queries = dtype_of(engine), 40_000 if engine.startswith("cpu-") else 4_000
    q, k = torch.zeros(1, 1, queries, 64, dtype=dtype, device=DEVICE), torch.zeros(1, 1, 3, 64, dtype=dtype, device=DEVICE)
    found = attention(q, k, k, aux=BOTH, engine=engine)
    assert (found.column_sums - queries / 3).abs().max() <= 1e-6 * queries / 3
    assert found.max_logit.item() == 0


def test_explain_says_what_they_cost():
    q, k, v = tensors(2, 4, 256, 64)
    with running_on(None):
        text = strobe.explain(q, k, v, aux=("column_sums",))
    assert "with                 column_sums\n" in text
    assert "column_sums: another pass over the scores after the forward, " in text
    assert "% of the predicted time" in text


@pytest.mark.parametrize("engine", available_engines())
@pytest.mark.parametrize("first", [1, 16, 48, 97])
def test_no_key_is_left_out_wherever_the_first_one_lies(engine, first):
    """The first key that a query tile sees may be anywhere: because of a window, or of a mask that hides earlier keys."""
    q, k, v = (torch.randn(1, 2, 200, 16, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in range(3))
    mask = (torch.arange(200) >= first).to(DEVICE)[None, None, None]
    for options in ({"window": (first, 0)}, {"mask": mask}):
        sums = attention(q, k, v, aux=("column_sums",), engine=engine, **options).column_sums
        assert torch.allclose(sums.sum(2).cpu(), torch.full((1, 2), 200.0), rtol=1e-5)


def test_a_named_tuple_is_pickled():
    q = torch.randn(1, 1, 8, 16)
    found = strobe.attention(q, q, q, aux=("max_logit",))
    assert torch.equal(pickle.loads(pickle.dumps(found)).max_logit, found.max_logit)
