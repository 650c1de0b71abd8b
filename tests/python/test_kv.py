"""strobe.kv: the tokens that are written into caches, contiguous and paged."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import strobe
from device import DEVICE, EMULATED
from strobe import _rotary
from strobe.arrays.torch import TORCH

HKV, D, DV, PAGE, EACH = 2, 8, 6, 4, 5
USED = [7, 0, 13]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def cache(layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Pools of 17 pages, and a table of 3 sequences with pages of their own."""
    g = torch.Generator().manual_seed(0)
    table = torch.randperm(17, generator=g)[: 3 * EACH].view(3, EACH).int()
    pools = [torch.randn(17, HKV, PAGE, d, generator=g) for d in (D, DV)]
    pools = [x.transpose(1, 2).contiguous() if layout == "bshd" else x for x in pools]
    return pools[0].to(DEVICE), pools[1].to(DEVICE), table.to(DEVICE)


def new_tokens(count: int, layout: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    found = [torch.randn(3, HKV, count, d, generator=g).to(DEVICE) for d in (D, DV)]
    return tuple(x.transpose(1, 2) if layout == "bshd" else x for x in found)  # type: ignore[return-value]


def rows(pool: Tensor, table: Tensor, b: int, layout: str) -> Tensor:
    """The rows of sequence b, (n · page, Hkv, D), without strobe.kv."""
    pages = pool[table[b].long()]
    return (pages if layout == "bshd" else pages.transpose(1, 2)).flatten(0, 1)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("count", [0, 1, 6])
@pytest.mark.parametrize("rotary", [False, True])
def test_append_to_pages(count, layout, rotary):
    k_cache, v_cache, table = cache(layout)
    before = k_cache.clone(), v_cache.clone()
    k, v = new_tokens(count, layout)
    angles = torch.rand(PAGE * EACH, 3, device=DEVICE)
    options: dict[str, Any] = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()} if rotary else {}
    used = strobe.kv.append(k_cache, v_cache, k, v, ints(*USED), page_table=table, layout=layout, **options)
    assert used.tolist() == [n + count for n in USED]
    assert used.dtype == torch.int32
    for now, then, new in zip((k_cache, v_cache), before, (k, v), strict=True):
        for b, n in enumerate(USED):
            tokens = new[b] if layout == "bshd" else new[b].transpose(0, 1)
            if rotary and now is k_cache:
                tokens = _rotary.rotate(tokens[None], angles.cos(), angles.sin(), torch.arange(n, n + count, device=DEVICE)[None], False)[0]
            expected = rows(then, table, b, layout)
            expected[n : n + count] = tokens
            assert torch.equal(rows(now, table, b, layout), expected)
        nobodys = [n for n in range(17) if n not in table.flatten().tolist()]
        assert torch.equal(now[nobodys], then[nobodys])


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("paged", [True, False], ids=["pages", "rows"])
def test_append_packed_tokens(layout, paged):
    """Sequences have different numbers of new tokens, the second one none, and padding follows. One call per sequence writes the same."""
    counts, padding = [5, 0, 1], 2
    angles = torch.rand(PAGE * EACH, 3, device=DEVICE)
    options: dict[str, Any] = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "layout": layout}
    k_pool, v_pool, table = cache(layout)
    if not paged:  # a row is a page with room for all of a sequence's tokens
        k_pool, v_pool = (x.repeat(1, *((EACH, 1) if layout == "bshd" else (1, EACH)), 1)[:3] for x in (k_pool, v_pool))
    g = torch.Generator().manual_seed(2)
    k, v = (torch.randn(sum(counts) + padding, HKV, d, generator=g).to(DEVICE) for d in (D, DV))
    expected = k_pool.clone(), v_pool.clone()
    first = 0
    for b, count in enumerate(counts):
        new = [x[None, first : first + count] if layout == "bshd" else x[None, first : first + count].transpose(1, 2) for x in (k, v)]
        whose = expected if paged else [x[b : b + 1] for x in expected]
        strobe.kv.append(*whose, *new, ints(USED[b]), page_table=table[b : b + 1] if paged else None, **options)
        first += count
    given = {**options, "page_table": table if paged else None, "cu_seqlens": ints(0, 5, 5, 6)}
    used = strobe.kv.append(k_pool, v_pool, k, v, ints(*USED), **given)
    assert used.tolist() == [n + count for n, count in zip(USED, counts, strict=True)]
    assert torch.equal(k_pool, expected[0])
    assert torch.equal(v_pool, expected[1])


def test_a_sequence_without_new_tokens_writes_in_no_page():
    """Other sequences may share the page in which it would continue."""
    k_pool, v_pool = torch.zeros(3, 1, 4, 2, device=DEVICE), torch.zeros(3, 1, 4, 2, device=DEVICE)
    table = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32, device=DEVICE)
    k = torch.ones(1, 1, 2, device=DEVICE)
    strobe.kv.append(k_pool, v_pool, k, k, ints(2, 4), page_table=table, cu_seqlens=ints(0, 0, 1))
    assert k_pool.sum() == k_pool[2, 0, 0].sum() == 2


@pytest.mark.parametrize("length", [0, 4])
@pytest.mark.parametrize("paged", [True, False], ids=["pages", "rows"])
@pytest.mark.parametrize("quantised", [False, True])
def test_append_nothing_but_padding(quantised, paged, length):
    """The tokens are padding of no sequence, with rotary tables of any length."""
    stored = torch.int8 if quantised else torch.float32
    pool = torch.zeros(3 if paged else 0, 1, 4, 8, dtype=stored, device=DEVICE)
    table = torch.ones(length, 4, device=DEVICE)
    options: dict[str, Any] = {"rotary_cos": table, "rotary_sin": table, "cu_seqlens": ints(0)}
    options |= {"page_table": torch.zeros(0, 2, dtype=torch.int32, device=DEVICE)} if paged else {}
    options |= {name: torch.ones(pool.shape[:3], device=DEVICE) for name in ("k_scale", "v_scale") if quantised}
    k = torch.randn(3, 1, 8, device=DEVICE)
    used = strobe.kv.append(pool, pool.clone(), k, k, ints(), **options)
    assert used.shape == (0,)
    assert not pool.any()


@pytest.mark.skipif(DEVICE != "cpu", reason="nobody looks at numbers in device memory")
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_rotary_tables_reach_the_new_tokens_alone(layout):
    """The tables need no row for padding, nor for a sequence without new tokens."""
    caches = [torch.randn(2, HKV, 20, D).transpose(1, 2 if layout == "bshd" else 1).contiguous() for _ in "kv"]
    before = [x.clone() for x in caches]
    k, held = torch.randn(5, HKV, D), ints(19, 2)

    def append(length: int, *ends: int) -> Tensor:
        table = torch.rand(length, 3)
        return strobe.kv.append(*caches, k, k, held, cu_seqlens=ints(*ends), rotary_cos=table, rotary_sin=table, layout=layout)

    assert append(0, 0, 0, 0).tolist() == [19, 2]
    assert all(torch.equal(x, y) for x, y in zip(caches, before, strict=True))
    with pytest.raises(ValueError, match="^rotary_cos, rotary_sin: length 4; accepted is 5 or more, to the last token's position$"):
        append(4, 0, 0, 3)
    assert append(5, 0, 0, 3).tolist() == [19, 5]
    assert all(torch.equal(x[0], y[0]) for x, y in zip(caches, before, strict=True))
    with pytest.raises(ValueError, match="^rotary_cos, rotary_sin: length 19; accepted is 20 or more"):
        append(19, 0, 1, 4)
    no_token = torch.zeros(2, 0, HKV, D) if layout == "bshd" else torch.zeros(2, HKV, 0, D)
    table = torch.rand(0, 3)
    strobe.kv.append(*caches, no_token, no_token, held, rotary_cos=table, rotary_sin=table, layout=layout)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_append_to_rows(layout):
    caches = [torch.randn(3, HKV, 20, d, device=DEVICE) for d in (D, DV)]
    caches = [x.transpose(1, 2).contiguous() if layout == "bshd" else x for x in caches]
    expected = [x.clone() for x in caches]
    fresh = new_tokens(5, layout)
    strobe.kv.append(*caches, *fresh, ints(*USED), layout=layout)
    for x, y, new in zip(caches, expected, fresh, strict=True):
        for b, n in enumerate(USED):
            (y[b, n : n + 5] if layout == "bshd" else y[b, :, n : n + 5]).copy_(new[b])
        assert torch.equal(x, y)


def test_append_and_attend_is_attention_to_all():
    """A prompt is appended to pages in pieces, then tokens are appended one by one."""
    q, k, v = (torch.randn(3, HKV, PAGE * EACH, D, device=DEVICE) for _ in "qkv")
    k_cache, _, table = cache("bhsd")
    v_cache = torch.zeros_like(k_cache)
    expected = strobe.attention(q, k, v, causal=True)
    used = ints(0, 0, 0)
    for begin, end in ((0, 9), (9, 18), (18, 19), (19, 20)):
        here = slice(begin, end)
        used = strobe.kv.append(k_cache, v_cache, k[:, :, here], v[:, :, here], used, page_table=table)
        found = strobe.attention(q[:, :, here], k_cache, v_cache, page_table=table, seqused_k=used, causal=True)
        torch.testing.assert_close(found, expected[:, :, here])


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gather(layout):
    k_cache, _, table = cache(layout)
    found = strobe.kv.gather(k_cache, table, ints(*USED), layout=layout)
    found = found if layout == "bshd" else found.transpose(1, 2)
    for b, n in enumerate(USED):
        assert torch.equal(found[b, :n], rows(k_cache, table, b, layout)[:n])
        assert not found[b, n:].any()
    assert torch.equal(strobe.kv.gather(k_cache, table, layout=layout), strobe.kv.gather(k_cache, table, ints(20, 20, 20), layout=layout))
    assert strobe.kv.gather(k_cache[:0], table, ints(0, 0, 0), layout=layout).shape[0] == 3


def test_copy():
    k_cache, v_cache, _ = cache("bhsd")
    before = k_cache.clone(), v_cache.clone()
    strobe.kv.copy(k_cache, v_cache, ints(3, 5, 3), ints(5, 0, 3))
    for now, then in zip((k_cache, v_cache), before, strict=True):
        expected = then.clone()
        expected[[5, 0, 3]] = then[[3, 5, 3]]
        assert torch.equal(now, expected)


TABLE = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
CU = torch.tensor([0, 3, 3], dtype=torch.int32)
PACKED = {"k": torch.ones(3, 2, 8), "v": torch.ones(3, 2, 6)}
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"seqlens": torch.tensor([9, 0], dtype=torch.int32)},
        r"^seqlens: 9 at \[0\]; accepted are 0 to 7, for a sequence has room for 8 tokens",
    ),
    (
        {"seqlens": torch.tensor([0, 8], dtype=torch.int32)},
        r"^page_table: full at \[1\]: the sequence's pages have room for 8 tokens, hold 8 \(seqlens\) and are to get 1 more; "
        "accepted is a row of 3 pages or more$",
    ),
    (
        {"page_table": None, "k": torch.ones(4, 2, 1, 8), "v": torch.ones(4, 2, 1, 6), "seqlens": torch.tensor([3, 4, 0, 0]).int()},
        r"^k_cache, v_cache: full at \[1\]: they have room for 4 tokens, hold 4 \(seqlens\) and are to get 1 more; "
        "accepted is room for 5 or more$",
    ),
    (
        {"page_table": None, "k": torch.ones(4, 2, 3, 8), "v": torch.ones(4, 2, 3, 6), "seqlens": torch.tensor([2, 0, 0, 0]).int()},
        r"^k_cache, v_cache: too small at \[0\]: they have room for 4 tokens, hold 2 \(seqlens\) and are to get 3 more; ",
    ),
    ({"seqlens": torch.tensor([-1, 0], dtype=torch.int32)}, r"^seqlens: -1 at \[0\]"),
    ({"seqlens": torch.tensor([1, 0]).short()}, r"^seqlens: torch.int16 of shape \(2,\); accepted is int32 \(2,\)"),
    ({"page_table": TABLE[:1]}, r"^page_table: torch.int32 of shape \(1, 2\); accepted is int32 \(2, n\)"),
    ({"page_table": TABLE + 1}, r"^page_table: page 4 at \[1, 1\]; accepted are 0 to 3, the pages of the cache"),
    (
        {"page_table": torch.tensor([[0, 1], [2, 1]], dtype=torch.int32)},
        r"^page_table: page 1 is to be written at \[0, 1\] and at \[1, 1\]",
    ),
    (
        {"page_table": torch.tensor([[0, 0], [2, 3]], dtype=torch.int32)},
        r"^page_table: page 0, which holds keys at \[0, 0\], is to be written at \[0, 1\]",
    ),
    ({"k": torch.zeros(2, 2, 1, 9)}, r"^k: shape \(2, 2, 1, 9\); accepted is \(2, 2, 1, 8\)"),
    ({"v": torch.zeros(2, 2, 2, 6)}, r"^v: shape \(2, 2, 2, 6\); accepted is \(2, 2, 1, 6\)"),
    ({"k": torch.zeros(2, 2, 1, 8).double()}, "^k: dtype torch.float64; accepted is torch.float32, as k_cache has"),
    ({"v_cache": torch.zeros(4, 2, 4, 6)[:, :1].expand(4, 2, 4, 6)}, "^v_cache: strides"),
    ({"rotary_cos": torch.ones(9, 4)}, "^rotary_sin: None beside rotary_cos"),
    ({"rotary_cos": torch.ones(2, 4), "rotary_sin": torch.ones(2, 4)}, "^rotary_cos, rotary_sin: length 2; accepted is 7 or more"),
    ({"layout": "sbhd"}, "^layout: "),
    ({"cu_seqlens": CU}, r"^k: shape \(2, 2, 1, 8\); accepted are three axes, with cu_seqlens\nv: "),
    ({"cu_seqlens": CU.short(), **PACKED}, r"^cu_seqlens: torch.int16 of shape \(3,\); accepted is int32 \(B \+ 1,\)"),
    (
        {"cu_seqlens": CU + 1, **PACKED},
        r"^cu_seqlens: \[1, 4, 4\]; accepted are numbers from 0 to at most 3, the rows of k, that never fall",
    ),
    ({"cu_seqlens": CU + torch.tensor([0, 1, 1]).int(), **PACKED}, r"^cu_seqlens: \[0, 4, 4\]; accepted are numbers from 0 to at most 3"),
    (
        {"cu_seqlens": CU, **PACKED},
        r"^page_table: too small at \[0\]: the sequence's pages have room for 8 tokens, hold 6 \(seqlens\) and are to get 3 more; ",
    ),
    (
        {"cu_seqlens": CU * 3, "k": torch.ones(9, 2, 8), "v": torch.ones(9, 2, 6)},
        r"^cu_seqlens: 9 tokens at \[0\]; accepted are up to 8, for which a sequence has room",
    ),
    ({"cu_seqlens": CU, **PACKED, "seqlens": torch.zeros(3).int()}, r"^seqlens: torch.int32 of shape \(3,\); accepted is int32 \(2,\)"),
]


@pytest.mark.skipif(DEVICE != "cpu", reason="numbers in device memory are not read")
@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_what_does_not_fit_writes_nothing(wrong, message):
    given: dict[str, Any] = {
        "k_cache": torch.zeros(4, 2, 4, 8),
        "v_cache": torch.zeros(4, 2, 4, 6),
        "k": torch.ones(2, 2, 1, 8),
        "v": torch.ones(2, 2, 1, 6),
        "seqlens": torch.tensor([6, 6], dtype=torch.int32),
        "page_table": TABLE,
    } | wrong
    with pytest.raises(ValueError, match=message):
        strobe.kv.append(**given)
    assert not given["k_cache"].any()
    assert not given["v_cache"].any()


CALLS = {
    "append": ({"seqused_k": "seqlens", "cu_seqlens_k": "cu_seqlens", "block_table": "page_table", "pagetable": "page_table"}, 5),
    "copy": ({"src": "source", "targets": "target"}, 4),
    "gather": ({"cache_seqlens": "seqlens", "k_cache": "cache"}, 3),
    "quantise": ({"k_scale_group": "group", "scale_dtyp": "scale_dtype"}, 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_names_and_places_are_answered(name):
    function, (hints, places) = getattr(strobe.kv, name), CALLS[name]
    for wrong, right in hints.items():
        with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument '{wrong}'; did you mean {right}\?$"):
            function(*[torch.zeros(1)] * places, **{wrong: None})
    with pytest.raises(
        TypeError, match=rf"^{name}\(\) takes \w+.* and \w+ by their places, and 2 more were given; options are named, as in \w+="
    ):
        function(*[torch.zeros(1)] * (places + 2))
    with pytest.raises(TypeError, match=rf"^{name}\(\) missing "):
        function()


@pytest.mark.skipif(DEVICE != "cpu", reason="int64 is accepted in host memory")
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_lists_in_host_memory_may_be_int64(layout):
    """The result is int32 in any case."""
    found = []
    for dtype in (torch.int32, torch.int64):
        k_cache, v_cache, table = cache(layout)
        lists = {"seqlens": ints(*USED).to(dtype), "page_table": table.to(dtype)}
        used = strobe.kv.append(k_cache, v_cache, *new_tokens(3, layout), layout=layout, **lists)
        lists["seqlens"] = used.to(dtype)
        read = strobe.kv.gather(k_cache, layout=layout, **lists)
        found.append((used, k_cache, v_cache, read))
    for x, y in zip(*found, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
    with pytest.raises(ValueError, match=r"^seqlens: 4294967297 at \[0\]; accepted are 0 to"):
        strobe.kv.append(
            k_cache, v_cache, *new_tokens(3, layout), ints(*USED).long() + 2**32 - ints(*USED) + 1, page_table=table, layout=layout
        )


def test_kinds():
    none = torch.zeros(1, dtype=torch.int32)  # the caches' device is host memory
    sparse, eights = torch.zeros(1, 1, 1, 4).to_sparse(), torch.zeros(1, 1, 1, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="^k_cache: layout torch.sparse_coo; accepted is torch.strided"):
        strobe.kv.append(sparse, *[torch.zeros(1, 1, 1, 4)] * 3, none)
    with pytest.raises(ValueError, match="^k_cache: dtype torch.int32; accepted are torch.float64, "):
        strobe.kv.append(eights, eights.clone(), eights, eights, none)
    with pytest.raises(ValueError, match="^x: torch.float8_e4m3fn of shape .*; accepted are torch.float64, "):
        strobe.kv.quantise(torch.zeros(1, 1, 1, 4).to(torch.float8_e4m3fn), torch.int8)
    with pytest.raises(TypeError, match="^k_cache: .*list; accepted is a torch.Tensor"):
        strobe.kv.append([], *[torch.zeros(1, 1, 1, 1)] * 3, none)
    with pytest.raises(ValueError, match="^target: a page stands there twice"):
        strobe.kv.copy(torch.zeros(3, 1, 1, 1), torch.zeros(3, 1, 1, 1), torch.tensor([0, 1]), torch.tensor([2, 2]))
    with pytest.raises(ValueError, match=r"^source: 3 at \[0\]; accepted are 0 to 2"):
        strobe.kv.copy(torch.zeros(3, 1, 1, 1), torch.zeros(3, 1, 1, 1), torch.tensor([3]), torch.tensor([2]))


def test_numbers_that_nobody_reads_write_nothing_elsewhere(monkeypatch):
    """Numbers are not read, as in device memory: tokens without a place are left out."""
    monkeypatch.setattr(TORCH, "is_readable", lambda x: False)
    for table, used, written in (
        ([[0, 9], [2, 3]], [3, 3], {(0, 3): (0, 0), (2, 3): (1, 0), (3, 0): (1, 1)}),  # a page outside the pool
        ([[0, 1], [-1, -2]], [3, 3], {(0, 3): (0, 0), (1, 0): (0, 1)}),
        ([[0, 1], [2, 3]], [7, -5], {(1, 3): (0, 0)}),  # lengths that are negative, or leave too little room
        ([[7, 7], [8, 8]], [0, 0], {}),
    ):
        k_cache, v_cache = torch.zeros(4, 1, 4, 1, device=DEVICE), torch.zeros(4, 1, 4, 1, device=DEVICE)
        k = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=DEVICE)[:, None, :, None]
        page_table = torch.tensor(table, dtype=torch.int32, device=DEVICE)
        strobe.kv.append(k_cache, v_cache, k, -k, ints(*used), page_table=page_table)
        expected = torch.zeros_like(k_cache)
        for (page, slot), (b, i) in written.items():
            expected[page, 0, slot] = k[b, 0, i]
        assert torch.equal(k_cache, expected)
        assert torch.equal(v_cache, -expected)
        again = torch.zeros_like(k_cache), torch.zeros_like(k_cache)
        packed = k.transpose(1, 2).flatten(0, 1)
        strobe.kv.append(*again, packed, -packed, ints(*used), page_table=page_table, cu_seqlens=ints(0, 2, 4))
        assert torch.equal(again[0], expected)
        for nowhere in (ints(3, -1, 1), ints(9, 9, 9), ints(4, 4, 2)):  # whatever the numbers are, nothing is written outside
            strobe.kv.append(*again, packed, packed, ints(*used), page_table=page_table, cu_seqlens=nowhere)
    pool = torch.arange(3.0, device=DEVICE).view(3, 1, 1, 1)
    strobe.kv.copy(pool, pool.clone(), ints(0, 7, 1), ints(2, 1, -1))
    assert pool.flatten().tolist() == [0, 1, 0]
    strobe.kv.copy(pool, pool.clone(), ints(0), ints(5))
    assert pool.flatten().tolist() == [0, 1, 0]
    found = strobe.kv.gather(torch.ones(2, 1, 2, 1, device=DEVICE), torch.tensor([[1, 5]], dtype=torch.int32, device=DEVICE))
    assert found.flatten().tolist() == [1, 1, 0, 0]


@pytest.mark.skipif(EMULATED, reason="tensors of the CPU stand for a GPU's outside torch.compile alone")
def test_compiled():
    def step(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, used: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        used = strobe.kv.append(k_cache, v_cache, 2 * k, v, used, page_table=table)
        return strobe.attention(q, k_cache, v_cache, page_table=table, seqused_k=used), used

    results = []
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        k_cache, _, table = cache("bhsd")
        v_cache = k_cache + 1
        k = new_tokens(3, "bhsd")[0]
        results.append((*call(k, k, -k, k_cache, v_cache, ints(*USED), table), k_cache, v_cache))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_the_operators_are_declared_as_they_are():
    k_cache, v_cache, table = cache("bhsd")
    caches, tokens = (k_cache, v_cache), [x.flatten(0, 1) for x in new_tokens(2, "bshd")]
    checks = ("test_schema", "test_faketensor")
    append = torch.ops.strobe.kv_append.default
    torch.library.opcheck(append, (*caches, *tokens, ints(*USED), table, None, False), test_utils=checks)
    torch.library.opcheck(append, (*caches, *tokens, ints(*USED), table, ints(0, 2, 2, 5), False), test_utils=checks)
    torch.library.opcheck(torch.ops.strobe.kv_copy.default, (k_cache, v_cache, ints(1), ints(2)), test_utils=checks)


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (lambda c: (c[0], c[0], c[2], c[3]), "^v_cache: the memory of k_cache"),
        (lambda c: (c[0], c[1], c[2], c[0][:2, :, :1]), "^v: in the memory of k_cache, which is written"),
        (lambda c: (c[0].as_strided((4, 2, 4, 8), (32, 32, 8, 1)), *c[1:]), "^k_cache: strides"),
    ],
    ids=["one cache", "v in the cache", "pages that overlap"],
)
def test_what_is_written_has_memory_of_its_own(share, message):
    caches = torch.zeros(4, 2, 4, 8), torch.zeros(4, 2, 4, 8), torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, 8)
    k_cache, v_cache, k, v = share(caches)
    with pytest.raises(ValueError, match=message):
        strobe.kv.append(k_cache, v_cache, k, v, torch.zeros(2, dtype=torch.int32), page_table=TABLE)
    assert not any(x.any() for x in caches[:2])
    if "v: " not in message:
        with pytest.raises(ValueError, match=message):
            strobe.kv.copy(k_cache, v_cache, torch.tensor([0]), torch.tensor([1]))


def test_an_inference_tensor_is_not_written_outside_of_inference_mode():
    with torch.inference_mode():
        cache = torch.zeros(4, 2, 4, 8)
    k = torch.ones(2, 2, 1, 8)
    with pytest.raises(ValueError, match="^k_cache: an inference tensor"):
        strobe.kv.append(cache, torch.zeros(4, 2, 4, 8), k, k, torch.zeros(2, dtype=torch.int32), page_table=TABLE)


def test_a_negated_view_is_not_written():
    """PyTorch would write the other cache before it finds the error."""
    caches = {"k_cache": torch.zeros(4, 2, 4, 8), "v_cache": torch.zeros(4, 2, 4, 8)}
    k, held = torch.ones(2, 2, 1, 8), torch.zeros(2, dtype=torch.int32)
    for name in caches:
        given = caches | {name: torch._neg_view(torch.zeros(4, 2, 4, 8))}
        for write, more in ((strobe.kv.append, (k, k, held)), (strobe.kv.copy, (torch.tensor([0]), torch.tensor([1])))):
            with pytest.raises(ValueError, match=f"^{name}: a negated view or zeros without memory; accepted is a tensor of its own"):
                write(*given.values(), *more, **({"page_table": TABLE} if write is strobe.kv.append else {}))
    assert not any(x.any() for x in caches.values())


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int64, torch.bool], ids=str)
def test_a_dtype_that_attention_does_not_take(dtype):
    plain, other = torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8, dtype=dtype)
    places = torch.tensor([0]), torch.tensor([1])
    for k_cache, v_cache, message in (
        (other, plain, f"^k_cache: dtype {dtype}; accepted are torch.float64, "),
        (plain, other, f"^v_cache: dtype {dtype}; accepted is torch.float32, as k_cache has"),
    ):
        with pytest.raises(ValueError, match=message):
            strobe.kv.copy(k_cache, v_cache, *places)
        with pytest.raises(ValueError, match=message):
            strobe.kv.append(k_cache, v_cache, plain[:, :, :1], plain[:, :, :1], torch.zeros(2, dtype=torch.int32))
    scales = {"k_scale": torch.zeros(2, 1, 4), "v_scale": torch.zeros(2, 1, 4)}
    with pytest.raises(ValueError, match=f"^k_cache: dtype {dtype} beside k_scale; accepted are torch.int8, "):
        strobe.kv.copy(other, other.clone(), *places, **scales)


def test_pages_of_no_key_are_refused():
    with pytest.raises(ValueError, match=r"^cache: shape \(4, 1, 0, 2\); accepted are pages of one key or more"):
        strobe.kv.gather(torch.zeros(4, 1, 0, 2), TABLE)


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
QUANTISED = {torch.int8: 127, torch.float8_e4m3fn: 448, torch.float8_e5m2: 57344, torch.uint8: 7}


def _numbers(data, dtype):
    """The stored numbers, in float64."""
    if dtype != torch.uint8:
        return data.double()
    nibbles = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2).to(torch.int64)
    return ((nibbles ^ 8) - 8).double()


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_quantising_stays_within_the_bound(dtype, scale_dtype, of):
    """The bound of docs/semantics.md, for numbers drawn at random."""
    g = torch.Generator().manual_seed(QUANTISED[dtype])
    u = torch.finfo(scale_dtype).eps / 2
    for number in range(60):
        b, h, s, half = (int(torch.randint(1, most, (1,), generator=g)) for most in (5, 9, 150, 40))
        shape = (b, h, s, 2 * half)
        size = 10.0 ** (4 * torch.rand(shape[:3], generator=g, dtype=torch.float64) - 1)[..., None]
        x = (torch.randn(shape, generator=g, dtype=torch.float64) * size).to(of)
        packed, layout, group = number % 3 == 0, ("bhsd", "bshd")[number % 2], (None, 32, 96)[number // 2 % 3]
        x = x[0].transpose(0, 1) if packed else x.transpose(1, 2) if layout == "bshd" else x
        row = 0 if packed else 1 if layout == "bshd" else 2
        data, scale = strobe.kv.quantise(x, dtype, group=group, scale_dtype=scale_dtype, layout=layout)
        assert (data.dtype, scale.dtype) == (dtype, scale_dtype)
        if group is None:
            assert scale.shape == x.shape[:-1]
            s, largest = scale.double()[..., None], x.double().abs().amax(-1, keepdim=True)
        else:
            rows = x.shape[row]
            assert scale.shape == (*x.shape[:row], -(-rows // group), *x.shape[row + 1 :])
            which = torch.arange(rows) // group
            s = scale.double().index_select(row, which)
            groups = [x.double().abs().narrow(row, n, min(group, rows - n)).amax(row, keepdim=True) for n in range(0, rows, group)]
            largest = torch.cat(groups, dim=row).index_select(row, which)
        x = x.double()
        step = torch.maximum(x.abs() / 16, s / 1024) if dtype == torch.float8_e4m3fn else s / 2
        step = torch.maximum(x.abs() / 8, s * 2**-17) if dtype == torch.float8_e5m2 else step
        off = (_numbers(data, dtype) * s - x).abs()
        assert (off <= step + 2 * u * largest).all(), (off - step - 2 * u * largest).max()
        assert (off > 0.75 * step).any() or x.numel() < 8 * scale.numel() + 500  # the bound is nearly reached


@pytest.mark.parametrize("gap", [0, 12], ids=["no gap", "pages apart"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_scales_between_the_numbers_of_one_buffer(layout, gap):
    """A row's numbers and its scale are adjacent, as in other libraries' pages."""
    d, pages, heads, page = 16, 9, 2, 4
    sizes = (heads, page) if layout == "bhsd" else (page, heads)
    buffer = torch.zeros(pages, page * heads * 2 * (d + 4) + gap, dtype=torch.int8, device=DEVICE)
    rows = buffer[:, : page * heads * 2 * (d + 4)].view(pages, *sizes, 2 * (d + 4))
    k, k_bytes, v, v_bytes = rows.split([d, 4, d, 4], -1)
    inside = [k, v, *(x.view(torch.float32)[..., 0] for x in (k_bytes, v_bytes))]
    apart = [x.clone() for x in inside]
    new = [x if layout == "bhsd" else x.transpose(1, 2).contiguous() for x in torch.randn(2, 3, heads, 6, d).to(DEVICE)]
    table = torch.tensor([[8, 1], [3, 0], [5, 6]], dtype=torch.int32, device=DEVICE)
    for cache in (inside, apart):
        scales = {"k_scale": cache[2], "v_scale": cache[3]}
        held = strobe.kv.append(cache[0], cache[1], *new, ints(0, 2, 1), page_table=table, layout=layout, **scales)
        strobe.kv.copy(cache[0], cache[1], ints(8), ints(2), **scales)
    for x, y in zip(inside, apart, strict=True):
        assert torch.equal(x, y)
    assert inside[2].count_nonzero() > 0
    if EMULATED:
        return
    q = torch.randn(3, 4, 2, d).to(DEVICE)
    q = q if layout == "bhsd" else q.transpose(1, 2)
    found = [
        strobe.attention(q, x[0], x[1], k_scale=x[2], v_scale=x[3], page_table=table, seqused_k=held, layout=layout)
        for x in (inside, apart)
    ]
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
    # Scales that begin within the numbers are refused.
    moved = buffer.view(-1)[4:].as_strided(k_bytes.shape, k_bytes.stride()).view(torch.float32)[..., 0]
    with pytest.raises(ValueError, match="^k_scale: the memory of k_cache; accepted is memory of its own$"):
        strobe.kv.append(inside[0], inside[1], *new, ints(0, 2, 1), page_table=table, layout=layout, k_scale=moved, v_scale=inside[3])


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_quantised_cache(dtype, paged, layout):
    """append writes the result of quantise for the tokens; gather and copy take the scales, too."""
    g = torch.Generator().manual_seed(7)
    each, d, page = 2 if dtype == torch.uint8 else 1, 16, 4
    table = torch.tensor([[3, 0, 5], [1, 6, 2]], dtype=torch.int32) if paged else None

    def turned(x):
        return x.transpose(1, 2).contiguous() if layout == "bshd" else x

    rows, room = (8, page) if paged else (2, 12)
    caches = [turned(torch.zeros(rows, 2, room, d // each, dtype=torch.uint8).view(dtype)) for _ in "kv"]
    scales = {name: turned(torch.zeros(rows, 2, room, dtype=torch.float16)) for name in ("k_scale", "v_scale")}
    held, all_k = torch.tensor([0, 3], dtype=torch.int32), []
    for new in (5, 1):
        k, v = (torch.randn(2, 2, new, d, generator=g) for _ in "kv")
        held = strobe.kv.append(*caches, *map(turned, (k, v)), held, page_table=table, layout=layout, **scales)
        all_k.append(k)
    assert held.tolist() == [6, 9]
    data, scale = strobe.kv.quantise(torch.cat(all_k, 2), dtype, scale_dtype=torch.float16)
    if paged:
        found = strobe.kv.gather(caches[0], table, held, layout=layout)
        found_scale = strobe.kv.gather(scales["k_scale"], table, held, layout=layout)
    else:
        found, found_scale = caches[0], scales["k_scale"]
    found, found_scale = (x.transpose(1, 2) if layout == "bshd" else x for x in (found.view(torch.uint8), found_scale))
    for b, first in enumerate((0, 3)):
        assert torch.equal(found[b, :, first : first + 6], data.view(torch.uint8)[b])
        assert torch.equal(found_scale[b, :, first : first + 6], scale[b])
    if paged:
        one = torch.tensor([3]), torch.tensor([7])
        strobe.kv.copy(*caches, *one, **scales)
        for x in (*caches, *scales.values()):
            x = x.view(torch.uint8) if x.dtype == dtype else x
            assert torch.equal(x[7], x[3])
            assert x[7].any()


def test_a_quantised_caches_errors():
    k_cache, v_cache = (torch.zeros(2, 2, 8, 16, dtype=torch.int8) for _ in "kv")
    k, v, held = torch.ones(2, 2, 1, 16), torch.ones(2, 2, 1, 16), torch.zeros(2, dtype=torch.int32)
    scale = torch.zeros(2, 2, 8)
    for message, given in (
        ("v_scale: None beside k_scale", {"k_scale": scale}),
        (r"k_scale: torch.float32 of shape \(2, 2, 7\); accepted is float16 or float32 \(2, 2, 8\)",
         {"k_scale": scale[..., :7], "v_scale": scale.clone()}),
        ("v_scale: torch.float64", {"k_scale": scale, "v_scale": scale.double()}),
        ("k_scale, v_scale: None beside k_cache of torch.int8", {}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            strobe.kv.append(k_cache, v_cache, k, v, held, **given)
    assert not k_cache.any()
    assert not scale.any()
    with pytest.raises(ValueError, match="dtype: torch.int32; accepted is torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8"):
        strobe.kv.quantise(k, torch.int32)
    with pytest.raises(ValueError, match="group: 48; accepted are the multiples of 32, or None"):
        strobe.kv.quantise(k, torch.int8, group=48)
    with pytest.raises(ValueError, match="^group: int; accepted are the multiples of 32, or None"):
        strobe.kv.quantise(k, torch.int8, group=10**5000 + 1)
    with pytest.raises(ValueError, match="accepted for two INT4 a byte is an even D"):
        strobe.kv.quantise(k[..., :15], torch.uint8)
    for group in (None, 32):
        with pytest.raises(ValueError, match=r"^x: shape \(2, 2, 1, 0\); accepted is D of 1 or more$"):
            strobe.kv.quantise(k[..., :0], torch.int8, group=group)
    narrow, scales = torch.zeros(2, 2, 8, 0, dtype=torch.int8), {"k_scale": scale, "v_scale": scale.clone()}
    with pytest.raises(ValueError, match=r"^v: shape \(2, 2, 1, 0\); accepted is a last axis of 1 or more$"):
        strobe.kv.append(k_cache, narrow, k, v[..., :0], held, **scales)


@pytest.mark.parametrize("word", ["int8", "torch.int8", np.int8, np.dtype("int8")], ids=str)
def test_a_dtype_by_another_name_is_told(word):
    x = torch.ones(1, 2, 3, 16)
    with pytest.raises(TypeError, match=r"^dtype: .*int8.*; accepted is torch.int8, .*; did you mean torch.int8\?$"):
        strobe.kv.quantise(x, word)
    with pytest.raises(TypeError, match="^dtype: 'int9'; accepted is torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8$"):
        strobe.kv.quantise(x, "int9")
    with pytest.raises(TypeError, match=r"^scale_dtype: 'float16'; accepted is .*; did you mean torch.float16\?$"):
        strobe.kv.quantise(x, torch.int8, scale_dtype="float16")
    with pytest.raises(TypeError, match="^dtype: tensor"):
        strobe.kv.quantise(x, torch.ones(2))


def test_the_other_spelling():
    x = torch.randn(1, 2, 3, 16)
    assert all(map(torch.equal, strobe.kv.quantize(x, torch.int8), strobe.kv.quantise(x, torch.int8)))


def test_a_cache_without_pages_has_none_to_name():
    pool, table, held = torch.zeros(0, 2, 4, 8), torch.tensor([[0], [1]], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    new, message = torch.ones(2, 2, 1, 8), r" at \[0.*\]; accepted is none, for the cache has no pages$"
    with pytest.raises(ValueError, match="^page_table: page 0" + message):
        strobe.kv.append(pool, pool.clone(), new, new, held, page_table=table)
    with pytest.raises(ValueError, match="^page_table: page 0" + message):
        strobe.kv.gather(pool, table)
    pages = torch.zeros(1, dtype=torch.int64)
    strobe.kv.copy(pool, pool.clone(), pages[:0], pages[:0])
    with pytest.raises(ValueError, match="^source: 0" + message):
        strobe.kv.copy(pool, pool.clone(), pages, pages)
    with pytest.raises(ValueError, match=r"^page_table: page 0 at \[0, 0\]; accepted is none, for k and v have no pages"):
        strobe.attention(torch.ones(2, 2, 1, 8), pool, pool, page_table=table)


APPENDED = ("k_cache", "v_cache", "k", "v")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("new", ["dense", "packed"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("wrong", APPENDED)
def test_what_is_laid_out_wrongly_alone_is_named_alone(wrong, paged, new, layout):
    """If one tensor has the wrong layout, the others, with which it is compared, are not named."""
    caches = {name: torch.zeros(6 if paged else 2, 3, 16, width) for name, width in (("k_cache", 8), ("v_cache", 4))}
    tokens = {name: torch.ones(2, 3, 5, width) for name, width in (("k", 8), ("v", 4))}
    given = caches | tokens if layout == "bhsd" else {name: x.transpose(1, 2) for name, x in (caches | tokens).items()}
    given["seqlens"] = torch.zeros(2, dtype=torch.int32)
    if new == "packed":
        given |= {name: x.transpose(1, 2).flatten(0, 1) for name, x in tokens.items()}
        given["cu_seqlens"] = torch.tensor([0, 5, 10], dtype=torch.int32)
    if paged:
        given["page_table"] = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    strobe.kv.append(**given, layout=layout)
    axes = (0, 1) if new == "packed" and wrong in ("k", "v") else (1, 2)
    shape = tuple(given[wrong].shape)
    given[wrong] = given[wrong].transpose(*axes)
    hint = f"; if tokens lie {'behind' if axes == (0, 1) or layout == 'bshd' else 'before'} heads, {wrong}.transpose({axes[0]}, {axes[1]})"
    message = f"{wrong}: shape {tuple(given[wrong].shape)}; accepted is {shape}{hint}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        strobe.kv.append(**given, layout=layout)


@pytest.mark.parametrize("wrong", [*APPENDED, "seqlens"])
def test_what_has_another_batch_alone_is_named_alone(wrong):
    given = {"k_cache": torch.zeros(2, 3, 16, 8), "v_cache": torch.zeros(2, 3, 16, 4)}
    given |= {"k": torch.ones(2, 3, 5, 8), "v": torch.ones(2, 3, 5, 4), "seqlens": torch.zeros(2, dtype=torch.int32)}
    given[wrong] = torch.cat([given[wrong], given[wrong]])
    with pytest.raises(ValueError, match=f"^{wrong}: ") as raised:
        strobe.kv.append(**given)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_appends_other_layout_is_guessed(layout):
    other = {"bhsd": "bshd", "bshd": "bhsd"}[layout]
    cache, new, held = torch.zeros(2, 3, 16, 8), torch.ones(2, 3, 5, 8), torch.zeros(2, dtype=torch.int32)
    if layout == "bshd":
        cache, new = cache.transpose(1, 2), new.transpose(1, 2)
    given = cache.clone().transpose(1, 2), cache.clone().transpose(1, 2), new.transpose(1, 2), new.transpose(1, 2), held
    strobe.kv.append(*given, layout=other)
    with pytest.raises(ValueError, match="^k: ") as raised:
        strobe.kv.append(*given, layout=layout)
    assert all(line.endswith(f'; did you mean layout="{other}"?') for line in str(raised.value).splitlines())


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16], ids=str)
def test_zeros_have_the_scale_zero(dtype, group, scale_dtype):
    """Rows of zeros have the scale 0 and stay zeros; the scales of the small numbers beside them are larger than 0."""
    x = torch.randn(1, 2, 96, 16, generator=torch.Generator().manual_seed(1)) * 1e-3
    x[:, :, 32:64] = 0
    data, scale = strobe.kv.quantise(x, dtype, group=group, scale_dtype=scale_dtype)
    of_rows = scale[..., None] if group is None else scale.repeat_interleave(group, 2)
    assert (of_rows[:, :, 32:64] == 0).all()
    assert ((of_rows > 0) & (of_rows < 1e-2)).sum() == of_rows.numel() * 2 // 3
    assert not _numbers(data, dtype)[:, :, 32:64].any()
    assert strobe.kv.quantise(x[:0], dtype, group=group)[1].shape == (0, *scale.shape[1:])
    v_data, v_scale = strobe.kv.quantise(x, dtype, scale_dtype=scale_dtype)
    q = torch.ones(1, 2, 3, 16)
    options = {"k_scale": scale, "v_scale": v_scale} | ({} if group is None else {"k_scale_group": group})
    for used in (None, torch.tensor([64], dtype=torch.int32)):
        out = strobe.attention(q, data, v_data, seqused_k=used, **options)
        expected, _ = strobe.reference(q, data, v_data, seqused_k=used, **options)
        assert torch.allclose(out.double(), expected, rtol=0, atol=1e-8)
    assert not strobe.attention(q, data[:, :, 32:64], v_data[:, :, 32:64], k_scale=v_scale[:, :, 32:64], v_scale=v_scale[:, :, 32:64]).any()


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize("group", [None, 32])
def test_the_scales_of_small_numbers_hold_them(dtype, group):
    """Rounded to float16, such a scale would vanish, or become too small for the largest number."""
    most = QUANTISED[dtype]
    for size in (1e-42, 2.0**-26 * most, 1.4 * 2.0**-24 * most, 2.6 * 2.0**-24 * most, 1e-5 * most):
        x = torch.tensor([[size, -size / 3], [size / 3, -size]]).repeat(1, 1, 16, 4)
        data, scale = strobe.kv.quantise(x, dtype, group=group, scale_dtype=torch.float16)
        assert (scale >= 2.0**-24).all()
        assert (scale.double() * most >= x.abs().max().double() * (1 - 2**-11)).all()
        s = scale.double().max().item()
        assert scale.double().min() == s
        step = max(size / 16, s / 1024) if dtype == torch.float8_e4m3fn else s / 2
        step = max(size / 8, s * 2**-17) if dtype == torch.float8_e5m2 else step
        assert (_numbers(data, dtype) * s - x).abs().max() <= step + size * 2**-10
    data, scale = strobe.kv.quantise(torch.full((1, 1, 32, 8), 1e-42), dtype, group=group)  # scales of float32 do not vanish either
    assert (scale == torch.finfo(torch.float32).tiny).all()
    assert (_numbers(data, dtype) * scale.double().max() <= 1.1e-42).all()  # 0, or in E5M2 a small number


@pytest.mark.parametrize("group", [None, 32])
def test_what_cannot_be_quantised_is_refused(group):
    x = torch.ones(1, 2, 64, 8)
    for bad, scale_dtype, message in (
        (float("nan"), torch.float32, "x: nan in it; accepted are finite numbers"),
        (float("inf"), torch.float16, "x: inf in it; accepted are finite numbers"),
        (-float("inf"), torch.float32, "x: inf in it; accepted are finite numbers"),
        (-1e7, torch.float16, "x: a number of size 1e+07, too large for a scale of torch.float16; accepted are sizes up to 8.31901e+06, or "
                              "more with scale_dtype=torch.float32"),
    ):  # fmt: skip
        x[0, 1, 40, 3] = bad
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            strobe.kv.quantise(x, torch.int8, group=group, scale_dtype=scale_dtype)
    _, scale = strobe.kv.quantise(x, torch.int8, group=group)
    assert scale.max() == torch.tensor(1e7 / 127)
    with pytest.raises(
        ValueError, match=r"^x: a number of size 1e\+300, too large for a scale of torch.float32; accepted are sizes up to 4\S+$"
    ):
        strobe.kv.quantise(torch.full((1, 2, 64, 8), 1e300, dtype=torch.float64), torch.int8, group=group)
    _, scale = strobe.kv.quantise(torch.full((1, 2, 64, 8), 65504 * 127.0), torch.int8, group=group, scale_dtype=torch.float16)
    assert (scale == 65504).all()


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_what_a_device_makes_of_what_cannot_be_quantised(dtype, monkeypatch):
    """The results if numbers are not read, so that nothing is refused."""
    monkeypatch.setattr(type(strobe.kv.TORCH), "is_readable", lambda *_: False)
    x = torch.ones(5, 1, 16)
    x[1, 0, 4], x[2, 0, 5], x[3, 0, 6] = float("nan"), -float("inf"), 1e10
    for scale_dtype in (torch.float16, torch.float32):
        data, scale = strobe.kv.quantise(x, dtype, scale_dtype=scale_dtype)
        assert scale[1].isnan().all()
        assert scale[2].isposinf().all()
        assert scale[3] == 65504 or scale_dtype == torch.float32
        options = {"k_scale": scale[None].transpose(1, 2), "v_scale": scale[None].transpose(1, 2)}
        stored = data[None].transpose(1, 2)
        for row in range(5):
            one = {name: s[..., row : row + 1] for name, s in options.items()}
            out = strobe.attention(torch.ones(1, 1, 1, 16), stored[:, :, row : row + 1], stored[:, :, row : row + 1], **one)
            assert out.isnan().any() == (row in (1, 2))


@pytest.mark.parametrize("packed", [False, True])
def test_append_refuses_what_cannot_be_quantised(packed):
    shape = (3, 2, 16) if packed else (1, 2, 3, 16)
    held = torch.tensor([0], dtype=torch.int32)
    options = {"cu_seqlens": torch.tensor([0, 2], dtype=torch.int32)} if packed else {}
    for scale_dtype, bad, accepted in (
        (torch.float32, float("nan"), "nan in it; accepted are finite numbers"),
        (torch.float16, float("inf"), "inf in it; accepted are finite numbers"),
        (torch.float16, 1e7, "a number of size 1e+07, too large for a scale of torch.float16; accepted are sizes up to 8.31901e+06, or "
                             "more with {}_scale of dtype torch.float32"),
    ):  # fmt: skip
        for names in ("k", "v", "kv"):
            caches = [torch.zeros(1, 2, 8, 16, dtype=torch.int8) for _ in "kv"]
            scales = {name: torch.zeros(1, 2, 8, dtype=scale_dtype) for name in ("k_scale", "v_scale")}
            new = {name: torch.ones(shape) for name in "kv"}
            for name in names:
                (new[name] if packed else new[name][0].transpose(0, 1))[1, 0, 3] = bad
            message = "\n".join(f"{name}: {accepted.format(name)}" for name in names)
            with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                strobe.kv.append(*caches, *new.values(), held, **options, **scales)
            assert not any(x.any() for x in (*caches, *scales.values()))
    if packed:  # padding may hold anything
        new["k"][:2], new["v"][:2], new["k"][2] = 1, 1, float("nan")
        assert strobe.kv.append(*caches, *new.values(), held, **options, **scales).tolist() == [2]
        assert (caches[0][:, :, :2] == 127).all()
        assert not caches[0][:, :, 2:].any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_copy_takes_scales_by_columns(dtype, layout):
    page, each = 80, 2 if dtype == torch.uint8 else 1
    shape = (4, 2, page, 16) if layout == "bhsd" else (4, page, 2, 16)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    for group, groups in ((32, 3), (64, 2), (96, 1)):
        k_cache, k_scale = strobe.kv.quantise(x, dtype, group=group, layout=layout)
        v_cache, v_scale = strobe.kv.quantise(x, dtype, layout=layout)
        assert groups in k_scale.shape
        strobe.kv.copy(k_cache, v_cache, torch.tensor([3]), torch.tensor([1]), k_scale=k_scale, v_scale=v_scale)
        for copied in (k_cache, v_cache, k_scale, v_scale):
            assert torch.equal(copied[1], copied[3])
            assert not torch.equal(copied[1], copied[2])
    wrong = k_scale.new_ones((4, 2, 4, 16) if layout == "bhsd" else (4, 4, 2, 16))
    with pytest.raises(ValueError, match=r"^k_scale: torch.float32 of shape .*; accepted is float16 or float32 .* \/ G\)"):
        strobe.kv.copy(k_cache, v_cache, torch.tensor([3]), torch.tensor([1]), k_scale=wrong, v_scale=v_scale)
    assert each * k_cache.shape[-1] == 16


def test_copys_scales_are_checked():
    caches = [torch.arange(4, dtype=torch.int8)[:, None, None, None].expand(4, 2, 8, width).clone() for width in (16, 12)]
    scale = torch.arange(4.0)[:, None, None].expand(4, 2, 8)
    both = {"k_scale": scale.clone(), "v_scale": scale.clone()}
    floats = [x.float() for x in caches]
    of_k = (
        "accepted is float16 or float32 (4, 2, 8), with k_scale_group G (4, 2, ceil(8 / G), 16), or (4, ceil(2 / G), 8, 16) in layout bshd"
    )
    for message, given, scales in (
        ("k_scale, v_scale: None beside k_cache of torch.int8; accepted are the scales of a quantised cache", caches, {}),
        ("k_scale, v_scale: None beside v_cache of torch.int8; accepted are the scales of a quantised cache", [floats[0], caches[1]], {}),
        ("v_scale: None beside the other; accepted are both or neither", caches, {"k_scale": scale.clone()}),
        (f"k_cache: dtype torch.float32 beside k_scale; accepted are {', '.join(map(str, QUANTISED))}", floats, both),
        ("v_cache: dtype torch.float32; accepted is torch.int8, as k_cache has", [caches[0], floats[1]], both),
        ("k_scale: torch.float32 of shape (4, 2, 7); " + of_k, caches, both | {"k_scale": scale[..., :7].clone()}),
        ("k_scale: torch.float64 of shape (4, 2, 8); " + of_k, caches, both | {"k_scale": scale.double()}),
        ("k_scale: torch.float32 of shape (3, 2, 8); " + of_k, caches, both | {"k_scale": scale[:3].clone()}),
        ("k_scale: torch.float32 of shape (4, 2, 1, 12); " + of_k, caches, both | {"k_scale": torch.ones(4, 2, 1, 12)}),
        ("k_scale: torch.float32 of shape (4, 2, 2, 16); " + of_k, caches, both | {"k_scale": torch.ones(4, 2, 2, 16)}),
        ("v_scale: torch.int8 of shape (4, 2, 8); accepted is float16 or float32 (4, 2, 8)", caches,
         both | {"v_scale": scale.to(torch.int8)}),
        ("v_scale: torch.float32 of shape (4, 2, 1, 12); accepted is float16 or float32 (4, 2, 8)", caches,
         both | {"v_scale": torch.ones(4, 2, 1, 12)}),
    ):  # fmt: skip
        before = [x.clone() for x in (*given, *scales.values())]
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            strobe.kv.copy(*given, torch.tensor([3]), torch.tensor([1]), **scales)
        assert all(map(torch.equal, (*given, *scales.values()), before))


def test_a_group_of_more_rows_than_there_are_takes_no_memory_for_them():
    x = torch.randn(2, 1, 5, 16)
    many, few = (strobe.kv.quantise(x, torch.int8, group=group) for group in (2**40, 32))
    assert all(torch.equal(a, b) for a, b in zip(many, few, strict=True))


def test_compiled_for_any_size_of_the_cache():
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def step(k_cache, v_cache, k, used, table):
        strobe.kv.copy(k_cache, v_cache, table[:1, 0], table[-1:, -1])
        return strobe.kv.append(k_cache, v_cache, k, k, used, page_table=table)

    for batch, pages in ((2, 8), (3, 12), (5, 20)):
        k_cache, v_cache, k = torch.zeros(pages, 2, 4, 16), torch.zeros(pages, 2, 4, 16), torch.randn(batch, 2, 1, 16)
        table = torch.arange(batch * 3, dtype=torch.int32).view(batch, 3)
        used = step(k_cache, v_cache, k, torch.zeros(batch, dtype=torch.int32), table)
        assert used.tolist() == [1] * batch
        assert torch.equal(k_cache[table[:, 0].long(), :, 0], k[:, :, 0])


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
@pytest.mark.parametrize("of_new", [torch.float32, None])
def test_a_quantised_cache_is_not_appended_to_without_its_scales(of_new, stored, layout):
    """Otherwise the old scales would stand beside new numbers. The message only names the scales, whatever k and v are."""
    axes = (3, 2, 16) if layout == "bhsd" else (3, 16, 2)
    cache = torch.zeros(*axes, 4 if stored == torch.uint8 else 8, dtype=torch.uint8).view(stored)
    x = torch.ones(3, 2, 1, 8).to(of_new or stored)
    x = x if layout == "bhsd" else x.transpose(1, 2)
    message = (
        f"k_scale, v_scale: None beside k_cache of {stored}; accepted are the scales of a quantised cache, float16 or float32 {axes}: "
        "append() quantises k and v itself, and writes their scales"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        strobe.kv.append(cache, cache.clone(), x, x, torch.zeros(3, dtype=torch.int32), layout=layout)
    assert not cache.view(torch.uint8).any()
