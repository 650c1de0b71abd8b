"""page_table: k and v in pages of a pool."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import strobe
from check import dtype_of
from device import DEVICE, EMULATED, ON_GPU, running_on
from engines import available_engines, engines_under_test
from paging import Pages, in_pages

engines = pytest.mark.parametrize("engine", available_engines())
B, H, HKV, D, DV = 3, 4, 2, 40, 24
USED = [96, 0, 61]


@dataclasses.dataclass
class Problem:
    q: Tensor
    k: Tensor
    v: Tensor
    pages: Pages
    used: Tensor

    def contiguous(self, **options: Any) -> Any:
        return strobe.attention(self.q, self.k, self.v, seqused_k=self.used, return_lse=True, **options)

    def paged(self, **options: Any) -> Any:
        options = {"page_table": self.pages.table, "seqused_k": self.used, "return_lse": True} | options
        return strobe.attention(self.q, self.pages.k, self.pages.v, **options)


def problem(
    page: int, sq: int = 5, dtype: torch.dtype = torch.float32, keys: int = 96, d: int = D, used: list[int] = USED, dv: int = DV
) -> Problem:
    g = torch.Generator().manual_seed(page)
    sk = -(-keys // page) * page

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(DEVICE, dtype)

    q, k, v = normal(B, H, sq, d), normal(B, HKV, sk, d), normal(B, HKV, sk, dv)
    pages = in_pages(k, v, used, page, g)
    return Problem(q, k, v, Pages(*(x.to(DEVICE) for x in pages)), torch.tensor(used, dtype=torch.int32, device=DEVICE))


def widths(engine: str) -> dict[str, int]:
    """Head dimensions that the engine supports."""
    return {"d": 64, "dv": 72} if engine == "cuda-tf32" else {}


def close(found: Any, expected: Any, dtype: torch.dtype) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=5e-6 if dtype == torch.float32 else 2e-2)


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"causal": True},
    "window": {"window": (20, 3)},
    "alibi and sinks": {"alibi_slopes": torch.tensor([0.1, 0.02, 0.3, 0.05]), "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0]), "causal": True},
    "softcap": {"softcap": 20.0},
    "invariant": {"invariant": True, "causal": True},
    "dropout": {"dropout": 0.3, "seed": 3},
}


@engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sq", [1, 5, 70])
@pytest.mark.parametrize("name", OPTIONS)
def test_as_contiguous(name, sq, dtype, engine):
    """On CPUs the bits are the same, because only the places of rows differ."""
    p = problem(16, sq, dtype, **widths(engine))
    options = {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in OPTIONS[name].items()}
    with running_on(engine):
        try:
            found = p.paged(**options, engine=engine)
        except NotImplementedError as refusal:
            pytest.skip(str(refusal))
        expected = p.contiguous(**options, engine=engine)
    if ON_GPU:
        close(found, expected, dtype)
    else:
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@engines
@pytest.mark.parametrize("page", [1, 3, 16, 31, 64, 300])
def test_any_page_size(page, engine):
    for sq in (2, 40):
        p = problem(page, sq, dtype_of(engine), **widths(engine))
        with running_on(engine):
            try:
                found = p.paged(causal=True, engine=engine)
            except NotImplementedError as refusal:
                pytest.skip(str(refusal))
            close(found, p.contiguous(causal=True, engine=engine), p.q.dtype)


def test_layouts_and_strides():
    p = problem(16)
    expected = p.paged()
    pools = [x.transpose(1, 2).contiguous() for x in p.pages[:2]]
    found = strobe.attention(p.q.transpose(1, 2), *pools, page_table=p.pages.table, seqused_k=p.used, layout="bshd", return_lse=True)
    close((found[0].transpose(1, 2), found[1]), expected, torch.float32)
    wide = [torch.full((*x.shape[:3], 2 * x.shape[3] + 1), torch.nan, device=DEVICE)[..., 1 : 1 + x.shape[3]].copy_(x) for x in p.pages[:2]]
    found = strobe.attention(p.q, *wide, page_table=p.pages.table, seqused_k=p.used, return_lse=True)
    close(found, expected, torch.float32)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_packed_queries(layout):
    """A call with cu_seqlens_q only, as in chunked prefill beside decoding."""
    p = problem(16, 70)
    lengths = [70, 0, 1]
    cu = torch.tensor([0, 70, 70, 71], dtype=torch.int32, device=DEVICE)
    q = torch.cat([p.q[b, :, :n] for b, n in enumerate(lengths)], 1).transpose(0, 1).contiguous()
    pools = [x.transpose(1, 2).contiguous() if layout == "bshd" else x for x in p.pages[:2]]
    for most in (None, 70):
        out, lse = strobe.attention(
            q, *pools, page_table=p.pages.table, seqused_k=p.used, cu_seqlens_q=cu, max_seqlen_q=most, causal=True, layout=layout,
            return_lse=True,
        )  # fmt: skip
        for b, (start, n) in enumerate(zip(cu.tolist(), lengths, strict=False)):
            one = slice(b, b + 1)
            expected = strobe.attention(p.q[one, :, :n], p.k[one], p.v[one], seqused_k=p.used[one], causal=True, return_lse=True)
            found = out[start : start + n].transpose(0, 1)[None], lse[None, :, start : start + n]
            close(found, expected, torch.float32)


def test_a_prompt_in_chunks_is_the_prompt():
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 80, 16, generator=g).to(DEVICE) for _ in "qkv")
    pages = Pages(*(x.to(DEVICE) for x in in_pages(k, v, [80], 16, g)))
    whole = strobe.attention(q, k, v, causal=True)
    for begin, end in ((0, 33), (33, 34), (34, 80)):
        used = torch.tensor([end], dtype=torch.int32, device=DEVICE)
        chunk = strobe.attention(q[:, :, begin:end], pages.k, pages.v, page_table=pages.table, seqused_k=used, causal=True)
        torch.testing.assert_close(chunk, whole[:, :, begin:end], rtol=0, atol=2e-6)


def test_all_keys_count_without_seqused():
    p = problem(16, used=[96, 96, 96])
    close(p.paged(seqused_k=None), strobe.attention(p.q, p.k, p.v, return_lse=True), torch.float32)


def test_a_call_that_comes_again_reads_the_table_anew():
    p, other = problem(16), problem(16, used=[5, 96, 40])
    for _ in range(4):
        close(p.paged(), p.contiguous(), torch.float32)
        close(other.paged(), other.contiguous(), torch.float32)
    table, used = p.pages.table.clone(), p.used.clone()
    again = {"page_table": table, "seqused_k": used, "return_lse": True}
    for n in (96, 20, 3):
        used[0] = n
        expected = strobe.attention(p.q, p.k, p.v, seqused_k=used, return_lse=True)
        close(strobe.attention(p.q, p.pages.k, p.pages.v, **again), expected, torch.float32)


def test_auxiliary_results():
    p = problem(16, 7)
    found = p.paged(aux=("max_logit", "column_sums"))
    expected = p.contiguous(aux=("max_logit", "column_sums"))
    assert found.column_sums.shape == (B, H, 96)
    close(found, expected, torch.float32)
    q = p.q.transpose(1, 2).flatten(0, 1)
    cu = torch.arange(0, 7 * B + 1, 7, dtype=torch.int32, device=DEVICE)
    packed = strobe.attention(q, *p.pages[:2], page_table=p.pages.table, seqused_k=p.used, cu_seqlens_q=cu, aux=("column_sums",))
    torch.testing.assert_close(packed.column_sums, expected.column_sums, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_counts(dtype):
    for lengths in ([0, 0, 0], []):
        p = problem(16, dtype=dtype, used=[0, 0, 0])
        b = len(lengths)
        out, lse = strobe.attention(p.q[:b], *p.pages[:2], page_table=p.pages.table[:b], seqused_k=p.used[:b], return_lse=True)
        assert not out.any()
        assert (lse == -torch.inf).all()
        empty = [x[:0] for x in p.pages[:2]]  # pools without a page
        assert not strobe.attention(p.q[:b], *empty, page_table=p.pages.table[:b], seqused_k=p.used[:b]).any()
        assert not strobe.attention(p.q[:b], *p.pages[:2], page_table=p.pages.table[:b, :0]).any()
        bias = torch.zeros(1, 1, 5, 8, dtype=dtype, device=DEVICE)[..., :1]
        for engine in engines_under_test():
            with running_on(engine), contextlib.suppress(NotImplementedError):
                assert not strobe.attention(p.q[:b], *p.pages[:2], page_table=p.pages.table[:b, :0], bias=bias, engine=engine).any()
        for more in ({}, {"bias": bias}):
            assert not strobe.attention(p.q[:b], *p.pages[:2], page_table=p.pages.table[:b, :0], **more).any()
        for pool in (p.pages[:2], empty):
            aux = strobe.attention(p.q[:b], *pool, page_table=p.pages.table[:b], seqused_k=p.used[:b], aux=("max_logit", "column_sums"))
            assert (aux.max_logit == -torch.inf).all()
            assert not aux.column_sums.any()


def _workspace(text: str) -> float:
    """The bytes of the chosen engine: all the memory that a call allocates."""
    chosen = text.split("choice\n")[1].split()[0]
    line = next(line for line in text.splitlines() if line.split()[:1] == [chosen] and "workspace" in line)
    size, unit = line.rpartition("workspace ")[2].split()
    return float(size) * {"B": 1, "KiB": 2**10, "MiB": 2**20}[unit]


@pytest.mark.parametrize("sq", [1, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_gathered(dtype, sq):
    """The workspace is small compared with 1 GiB of keys and values in float32, half as much in bfloat16. (A GPU with 132 SMs makes as many
    splits of the keys, whose results take 20 MB.)"""
    keys, page, d = 2**20, 64, 128
    pool = torch.zeros(1, 1, page, d, dtype=dtype, device=DEVICE).expand(keys // page, 1, page, d)
    table = torch.randperm(keys // page).int()[None].to(DEVICE)
    with running_on(None):
        text = strobe.explain(torch.zeros(1, 1, sq, d, dtype=dtype, device=DEVICE), pool, pool, page_table=table)
    assert _workspace(text) < 2 * keys * d * pool.element_size() / 16


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"page_table": torch.zeros(2, 6, dtype=torch.int32)},
        r"page_table: shape \(2, 6\); accepted is \(B, pages of a sequence\) = \(3, any\)",
    ),
    ({"page_table": torch.zeros(3, 6, dtype=torch.int16)}, r"page_table: dtype torch.int16; accepted is int32, int64; page_table.int\(\)"),
    ({"page_table": torch.full((3, 6), 2**32)}, r"page_table: page 4294967296 at \[0, 0\]; accepted are 0 to "),
    ({"page_table": torch.zeros(6, dtype=torch.int32)}, "page_table: rank 1; accepted is rank 2"),
    (
        {"seqused_k": torch.tensor([97, 0, 0], dtype=torch.int32)},
        r"seqused_k: 97 at \[0\]; accepted are 0 to 96, the positions of a row of page_table",
    ),
    ({"cu_seqlens_k": torch.tensor([0, 5, 9, 12], dtype=torch.int32)}, "cu_seqlens_k: given beside page_table"),
    ({"max_seqlen_k": 96}, "max_seqlen_k: 96 without cu_seqlens"),
    ({"part": strobe.Part([(0, 5)], [(0, 96)], 5, 96)}, "page_table: given beside part"),
    ({"mask": torch.ones(3, 1, 5, 95, dtype=torch.bool)}, "mask: shape"),
    ({"block_mask": strobe.BlockMask.causal(5, 95, 16, 16)}, "block_mask: of 5 queries and 95 keys; accepted is one of 5 queries and 96"),
]


@pytest.mark.skipif(ON_GPU, reason="values in device memory are checked with check alone")
@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message[:24] for _, message in REFUSED])
def test_refusals(options, message):
    p = problem(16)
    with pytest.raises(ValueError, match=message):
        p.paged(**options)


@pytest.mark.skipif(ON_GPU, reason="values in device memory are checked with check alone")
def test_pages_outside_the_pool():
    p = problem(16)
    pages = p.pages.k.shape[0]
    for page in (pages, -1, 2**31 - 1):
        p.pages.table[2, 3] = page
        with pytest.raises(ValueError, match=rf"page_table: page {page} at \[2, 3\]; accepted are 0 to {pages - 1}, the pages of k and v"):
            p.paged()
    p.used[2] = 48  # the page is past the last key that counts
    p.paged()


@engines
@pytest.mark.skipif(not ON_GPU, reason="numbers in host memory are checked")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sq", [1, 20])
@pytest.mark.parametrize("page", [1, 7, 16, 64])
def test_keys_of_pages_outside_the_pool_are_hidden(page, sq, dtype, engine):
    """Tables in device memory are not checked. V of the page that is read instead may hold NaN."""
    p = problem(page, sq, dtype, **widths(engine))
    p.pages.v[0, :, 0] = torch.inf
    seen = torch.ones(B, 1, 1, p.k.shape[2], dtype=torch.bool, device=DEVICE)
    for n, (b, place) in enumerate(((0, 0), (0, p.pages.table.shape[1] - 1), (2, 0))):
        p.pages.table[b, place] = (-1, len(p.pages.k), 2**31 - 1)[n]
        seen[b, ..., place * page : (place + 1) * page] = False
    v = p.v.clone()
    for b, n in enumerate(USED):  # page 0 may belong to a sequence
        for place in range(-(-n // page)):
            if p.pages.table[b, place] == 0:
                v[b, :, place * page] = torch.inf
    p.v = v
    with running_on(engine):
        try:
            found = p.paged(causal=True, engine=engine)
        except NotImplementedError as refusal:
            pytest.skip(str(refusal))
        close(found, p.contiguous(causal=True, mask=seen, engine=engine), dtype)
        with pytest.raises(ValueError, match="page_table: page"):
            p.paged(causal=True, engine=engine, check=True)


@engines
@pytest.mark.parametrize("rises", [False, True], ids=["", "scores that rise"])
@pytest.mark.parametrize("sq", [20, 200])
def test_many_tiles(sq, rises, engine):
    """Some tiles in the middle have a page outside the pool, which is not checked. With scores that rise, maxima come late, and a query
    tile may be computed again."""
    used = [1000, 0, 777]
    p = problem(16, sq, dtype_of(engine), keys=1000, used=used, **widths(engine))
    if rises:
        p.k[:, :, 700:] *= 30
    pages = Pages(*(x.to(DEVICE) for x in in_pages(p.k.cpu(), p.v.cpu(), used, 16, torch.Generator().manual_seed(sq))))
    p = dataclasses.replace(p, pages=pages)
    seen = torch.ones(B, 1, 1, p.k.shape[2], dtype=torch.bool, device=DEVICE)
    if ON_GPU:
        for b, place in ((0, 20), (0, 21), (0, 60), (2, 5)):
            pages.table[b, place] = len(pages.k) + place
            seen[b, ..., 16 * place : 16 * place + 16] = False
    with running_on(engine):
        for options in ({}, {"causal": True}, {"window": (400, 0)}):
            try:
                found = p.paged(engine=engine, **options)
            except NotImplementedError as refusal:
                pytest.skip(str(refusal))
            close(found, p.contiguous(mask=seen, engine=engine, **options), p.q.dtype)


def test_shapes_are_told():
    p = problem(16)
    with pytest.raises(ValueError, match=r"k: shape .*; accepted is \(pages, Hkv, page, D\) with page_table"):
        strobe.attention(p.q, p.pages.k[0], p.pages.v, page_table=p.pages.table)
    with pytest.raises(ValueError, match=r"v: shape \(.*\); accepted is \(pages, page, Hkv, Dv\)"):
        strobe.attention(
            p.q.transpose(1, 2), p.pages.k.transpose(1, 2), p.pages.v[:1].transpose(1, 2), page_table=p.pages.table, layout="bshd"
        )
    for layout, single in (("bhsd", r"q\[:, :, None\]"), ("bshd", r"q\[:, None\]")):
        pools = (x if layout == "bhsd" else x.transpose(1, 2) for x in p.pages[:2])
        with pytest.raises(ValueError, match=f"did you mean cu_seqlens_q, of packed queries, or {single}, of one query each"):
            strobe.attention(p.q[:, :, 0], *pools, page_table=p.pages.table, layout=layout)


def test_a_page_table_of_a_wrong_kind_is_all_that_is_named():
    p = problem(16)
    for cu in ({}, {"cu_seqlens_q": torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=DEVICE)}):
        q = p.q[:, :, 0] if cu else p.q
        with pytest.raises(TypeError, match=r"^page_table: list; accepted is a torch.Tensor, as q is$"):
            strobe.attention(q, *p.pages[:2], page_table=[[0, 1]], **cu)


def test_the_backward_refuses_pages():
    """The forward runs, as often as it is repeated: torch.no_grad() may be forgotten where there is no backward."""
    p = problem(16)
    more = {"page_table": p.pages.table, "seqused_k": p.used}
    for name in ("q", "k", "v"):
        tensors = {"q": p.q, "k": p.pages.k, "v": p.pages.v}
        with torch.no_grad():
            expected = strobe.attention(**tensors, **more)
        tensors[name] = tensors[name].detach().requires_grad_()
        for return_lse in (False, True, False, True, False, True):
            out = strobe.attention(**tensors, **more, return_lse=return_lse)
            out, lse = out if return_lse else (out, out)
            assert torch.equal(out.detach(), expected)
            for result in (out, lse):
                with pytest.raises(
                    NotImplementedError, match=f"^page_table: keys in pages have no gradients, and {name} requires grad; acc"
                ):
                    result.sum().backward()
    out, lse = p.paged()
    with pytest.raises(ValueError, match="page_table: given in a backward"):
        strobe.attention_backward(out, p.q, p.pages.k, p.pages.v, out, lse, page_table=p.pages.table, seqused_k=p.used)


def test_explain():
    p = problem(16)
    text = strobe.explain(p.q, *p.pages[:2], page_table=p.pages.table, seqused_k=p.used)
    assert f"Sk 6 pages of 16 keys, of a pool of {p.pages.k.shape[0]}" in text
    assert "seqused_k, page_table" in text
    with pytest.raises(ValueError, match="block_table.*did you mean page_table"):
        strobe.attention(p.q, *p.pages[:2], block_table=p.pages.table)


@pytest.mark.skipif(EMULATED, reason="tensors of the CPU stand for a GPU's outside torch.compile alone")
def test_compiled():
    p = problem(16)

    def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor, used: Tensor) -> Tensor:
        return strobe.attention(q * 2, k, v, page_table=table, seqused_k=used, causal=True) + 1

    arguments = (p.q, *p.pages, p.used)
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="eager")(*arguments), call(*arguments))


def test_the_reference():
    p = problem(16)
    p = Problem(p.q.cpu(), p.k.cpu(), p.v.cpu(), Pages(*(x.cpu() for x in p.pages)), p.used.cpu())
    out, lse = strobe.reference(p.q, *p.pages[:2], page_table=p.pages.table, seqused_k=p.used)
    expected = strobe.reference(p.q, p.k, p.v, seqused_k=p.used)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    rows = [3, 25]
    some, _ = strobe.reference(p.q, *p.pages[:2], page_table=p.pages.table, seqused_k=p.used, rows=rows)
    assert torch.equal(some.flatten(0, 2)[rows], out.flatten(0, 2)[rows])
