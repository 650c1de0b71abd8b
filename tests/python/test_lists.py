"""The lists of a call (cu_seqlens, seqused_k, page_table, rng) may have any strides: the bits are those with contiguous lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import strobe
from check import dtype_of
from device import DEVICE, ON_GPU, running_on
from engines import available_engines
from paging import in_pages

engines = pytest.mark.parametrize("engine", available_engines())


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def wider(x: Tensor) -> Tensor:
    """A wider matrix: the first columns are those of x, the others hold numbers that a call must not read."""
    room = torch.full((*x.shape[:-1], x.shape[-1] + 5), 2**31 - 1, dtype=x.dtype, device=x.device)
    room[..., : x.shape[-1]] = x
    return room[..., : x.shape[-1]]


def column(x: Tensor) -> Tensor:
    """One column of a matrix with three."""
    return torch.stack([torch.full_like(x, -7), x, torch.full_like(x, 2**31 - 1)], dim=-1)[..., 1]


def transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT if x.dim() > 1 else column(x)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {"wider": wider, "column": column, "transposed": transposed}
strides = pytest.mark.parametrize("given", STRIDES.values(), ids=STRIDES)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).to(DEVICE, dtype)


def call(lists: dict[str, Tensor], engine: str, *arrays: Tensor, backward: bool = False, **options: Any) -> list[Tensor]:
    """The results of a call. The test is skipped if the engine refuses the call."""
    with running_on(engine):
        try:
            if not backward:
                return list(strobe.attention(*arrays, return_lse=True, engine=engine, **lists, **options))
            q, k, v = (x.clone().requires_grad_() for x in arrays)
            out = strobe.attention(q, k, v, engine=engine, deterministic=True, **lists, **options)
            return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]
        except NotImplementedError as refusal:
            pytest.skip(str(refusal))


def same(lists: dict[str, Tensor], given: Callable[[Tensor], Tensor], engine: str, *arrays: Tensor, **options: Any) -> None:
    expected = call(lists, engine, *arrays, **options)
    strided = {name: given(x) for name, x in lists.items()}
    for _ in range(3):  # remembers the call, prepares it, runs it again
        found = call(strided, engine, *arrays, **options)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@engines
@strides
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("most", [None, 33])
def test_packed(most, backward, given, engine):
    lists = {"cu_seqlens_q": ints(0, 5, 5, 38), "cu_seqlens_k": ints(0, 30, 31, 64), "seqused_k": ints(20, 1, 33)}
    d, dtype = (64 if engine.startswith("cuda") else 16), dtype_of(engine)
    arrays = normal(40, 2, d, dtype=dtype), normal(64, 1, d, dtype=dtype), normal(64, 1, d, dtype=dtype)
    same(lists, given, engine, *arrays, backward=backward, causal=True, max_seqlen_q=most, max_seqlen_k=most)


@engines
@strides
@pytest.mark.parametrize("sq", [1, 5])
def test_counted_keys(sq, given, engine):
    d, dtype = (64 if engine.startswith("cuda") else 16), dtype_of(engine)
    arrays = normal(3, 2, sq, d, dtype=dtype), normal(3, 1, 700, d, dtype=dtype), normal(3, 1, 700, d, dtype=dtype)
    same({"seqused_k": ints(20, 0, 700)}, given, engine, *arrays)


@engines
@strides
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_pages(packed, given, engine):
    d, dtype, g = (64 if engine.startswith("cuda") else 16), dtype_of(engine), torch.Generator().manual_seed(3)
    whole = normal(2, 1, 96, d, dtype=dtype).cpu()
    pages = in_pages(whole, whole, [96, 40], 16, g)
    lists = {"page_table": pages.table.to(DEVICE), "seqused_k": ints(96, 40)}
    q = normal(2, 2, 5, d, dtype=dtype)
    if packed:
        lists["cu_seqlens_q"], q = ints(0, 1, 6), normal(8, 2, d, dtype=dtype)
    same(lists, given, engine, q, pages.k.to(DEVICE), pages.v.to(DEVICE), causal=True)


@engines
def test_one_length_for_all(engine):
    d, dtype = (64 if engine.startswith("cuda") else 16), dtype_of(engine)
    arrays = normal(3, 2, 5, d, dtype=dtype), normal(3, 1, 40, d, dtype=dtype), normal(3, 1, 40, d, dtype=dtype)
    for lists in ({"seqused_k": ints(17, 17, 17)}, {"seqused_k": ints(0, 0, 0)}):
        same(lists, lambda x: x[:1].expand(3), engine, *arrays)


@engines
def test_the_seed(engine):
    d, dtype = (64 if engine.startswith("cuda") else 16), dtype_of(engine)
    arrays = normal(1, 2, 40, d, dtype=dtype), normal(1, 2, 40, d, dtype=dtype), normal(1, 2, 40, d, dtype=dtype)
    rng = torch.tensor([5, 9], dtype=torch.int64, device=DEVICE)
    same({"rng": rng}, column, engine, *arrays, dropout=0.4)
    masks = [strobe.dropout_mask((1, 1, 8, 8), 0.4, rng=x) for x in (rng.cpu(), column(rng.cpu()))]
    assert torch.equal(*masks)


@engines
def test_what_they_hold_is_checked(engine):
    """The contents of lists are checked; on a GPU only with check=True, after the copy."""
    d, dtype = (64 if engine.startswith("cuda") else 16), dtype_of(engine)
    q, k = normal(2, 2, 5, d, dtype=dtype), normal(4, 1, 16, d, dtype=dtype)
    wrong = column(torch.tensor([[0, 1], [2, 9]], dtype=torch.int32, device=DEVICE)), wider(ints(0, 1, 2, 9).view(2, 2))
    for table in wrong:
        with pytest.raises(ValueError, match=r"^page_table: page 9 at \[1, 1\]; accepted are 0 to 3"), running_on(engine):
            call({"page_table": table}, engine, q, k, k, check=True)
    k = normal(2, 1, 20, d, dtype=dtype)
    with pytest.raises(ValueError, match=r"^seqused_k: 21 at \[1\]; accepted are 0 to 20, the length of k$"), running_on(engine):
        call({"seqused_k": column(ints(3, 21))}, engine, q, k, k, check=True)


@pytest.mark.skipif(ON_GPU, reason="NumPy arrays lie in host memory")
def test_numpy():
    """Lists that are reversed, every second entry, one entry for all, or the fields of records."""
    g = np.random.default_rng(0)
    q, k = (g.standard_normal(shape).astype(np.float32) for shape in ((12, 2, 16), (20, 1, 16)))
    cu_q, cu_k = np.array([0, 5, 12], np.int32), np.array([0, 9, 20], np.int32)
    expected = strobe.attention(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
    records = np.zeros(3, [("q", np.int32), ("name", np.int64), ("k", np.int32)])
    records["q"], records["k"] = cu_q, cu_k
    for x, y in (
        (cu_q[::-1].copy()[::-1], cu_k[::-1].copy()[::-1]),
        (np.repeat(cu_q, 2)[::2], np.repeat(cu_k, 3)[::3]),
        (records["q"], records["k"]),
    ):
        assert x.strides[0] != 4
        np.testing.assert_array_equal(strobe.attention(q, k, k, cu_seqlens_q=x, cu_seqlens_k=y, causal=True), expected)
    q, k = (g.standard_normal(shape).astype(np.float32) for shape in ((3, 2, 5, 16), (3, 1, 20, 16)))
    used = np.broadcast_to(np.int32(7), 3)
    expected = strobe.attention(q, k, k, seqused_k=np.full(3, 7, np.int32))
    np.testing.assert_array_equal(strobe.attention(q, k, k, seqused_k=used), expected)
    pools = g.standard_normal((9, 1, 16, 16)).astype(np.float32)
    table = np.array([[3, 8], [0, 5], [7, 1]], np.int32)
    expected = strobe.attention(q, pools, pools, page_table=table, seqused_k=used)
    for given in (np.asfortranarray(table), table[::-1, ::-1].copy()[::-1, ::-1], np.pad(table, 2, constant_values=-1)[2:-2, 2:-2]):
        assert not given.flags.c_contiguous
        np.testing.assert_array_equal(strobe.attention(q, pools, pools, page_table=given, seqused_k=used), expected)


@engines
@pytest.mark.skipif(ON_GPU, reason="in device memory they are int32")
@pytest.mark.parametrize("given", [lambda x: x.long(), lambda x: column(x.long())], ids=["contiguous", "column"])
def test_of_64_bits(given, engine):
    lists = {"cu_seqlens_q": ints(0, 5, 5, 38), "cu_seqlens_k": ints(0, 30, 31, 64), "seqused_k": ints(20, 1, 33)}
    dtype, g = dtype_of(engine), torch.Generator().manual_seed(3)
    arrays = normal(40, 2, 16, dtype=dtype), normal(64, 1, 16, dtype=dtype), normal(64, 1, 16, dtype=dtype)
    for backward in (False, True):
        same(lists, given, engine, *arrays, backward=backward, causal=True)
    whole = normal(2, 1, 96, 16, dtype=dtype)
    pages = in_pages(whole, whole, [96, 40], 16, g)
    same({"page_table": pages.table, "seqused_k": ints(96, 40)}, given, engine, normal(2, 2, 5, 16, dtype=dtype), pages.k, pages.v)


@pytest.mark.skipif(ON_GPU, reason="NumPy arrays lie in host memory")
def test_of_64_bits_in_numpy():
    q = np.random.default_rng(0).standard_normal((12, 2, 16)).astype(np.float32)
    cu = np.array([0, 5, 12])
    assert cu.dtype == np.int64
    for options in ({}, {"max_seqlen_q": 7, "max_seqlen_k": 7}):
        expected = strobe.attention(q, q, q, cu_seqlens_q=cu.astype(np.int32), cu_seqlens_k=cu.astype(np.int32), **options)
        np.testing.assert_array_equal(strobe.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, **options), expected)
    with pytest.raises(ValueError, match=r"^max_seqlen_q: 0, and a sequence has 7 tokens; accepted is 7 or more, or None"):
        strobe.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=0)
    with pytest.raises(ValueError, match=r"^cu_seqlens_k: sequence 1 has 4294967303 tokens; accepted is at most Tk = 12$"):
        strobe.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=np.array([0, 5, 12 + 2**32]))
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: dtype uint64; accepted is int32, int64; cu_seqlens_q.astype\(np.int32\)$"):
        strobe.attention(q, q, q, cu_seqlens_q=cu.astype(np.uint64), cu_seqlens_k=cu)


def test_of_64_bits_on_a_gpu():
    q, k = torch.zeros(2, 2, 5, 64, device=DEVICE, dtype=torch.bfloat16), torch.zeros(2, 2, 40, 64, device=DEVICE, dtype=torch.bfloat16)
    used = torch.tensor([3, 20], device=DEVICE)
    if not ON_GPU:
        pytest.skip("in host memory they are taken")
    with running_on(None), pytest.raises(ValueError, match=r"^seqused_k: dtype int64; accepted is int32; seqused_k.int\(\)$"):
        strobe.attention(q, k, k, seqused_k=used)
    if DEVICE == "cuda":  # in host memory beside GPU tensors, the list is copied
        expected = strobe.attention(q, k, k, seqused_k=used.int())
        assert torch.equal(strobe.attention(q, k, k, seqused_k=used.cpu()), expected)
        with pytest.raises(ValueError, match=r"^seqused_k: 4294967299 at \[0\]; accepted are 0 to 40, the length of k$"):
            strobe.attention(q, k, k, seqused_k=used.cpu() + 2**32)


def test_explain_says_what_is_copied():
    q, k = torch.zeros(2, 2, 5, 64, device=DEVICE, dtype=torch.bfloat16), torch.zeros(2, 2, 40, 64, device=DEVICE, dtype=torch.bfloat16)
    with running_on(None):
        said = strobe.explain(q, k, k, seqused_k=column(ints(3, 20)))
        assert ("lists with gaps, copied first: seqused_k" in said) == ON_GPU
        assert "copied first" not in strobe.explain(q, k, k, seqused_k=ints(3, 20))
