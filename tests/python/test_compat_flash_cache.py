"""flash_attn_with_kvcache of strobe.compat.flash_attn against the formulas in float64."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import strobe
from device import DEVICE, ON_GPU, moved
from flash_formulas import SLOPES, assert_close, formulas
from strobe._writable import share_memory
from strobe.arrays.torch import TORCH
from strobe.compat import flash_attn, flash_attn_3


@pytest.fixture(autouse=True)
def _device():
    with torch.device(DEVICE):
        yield


def cache(b: int, s: int, h: int = 4, d: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(b, s, h, d), torch.randn(b, s, h, d)


def there(x: Tensor) -> Tensor:
    """x on the device of the tests, with its strides if it has some."""
    if x.is_meta:
        return x
    return moved(x, DEVICE) if x.layout == torch.strided and not x.is_nested else x.to(DEVICE)


CACHE_OPTIONS = [{}, {"causal": True}, {"causal": True, "window_size": (6, 0)}, {"causal": True, "softcap": 2.0}]
CACHE_OPTIONS += [{"causal": True, "alibi_slopes": SLOPES}, {"alibi_slopes": torch.stack([SLOPES, 2 * SLOPES, 3 * SLOPES])}]


@pytest.mark.parametrize("filled", [21, torch.tensor([21, 0, 30], dtype=torch.int32, device=DEVICE), None], ids=["int", "tensor", "all"])
@pytest.mark.parametrize("options", CACHE_OPTIONS, ids=str)
def test_a_cache_that_is_only_read(options, filled):
    k_cache, v_cache = cache(3, 40)
    q = torch.randn(3, 2, 4, 16)
    out, lse = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=filled, return_softmax_lse=True, **options)
    lengths = filled.tolist() if isinstance(filled, Tensor) else [40 if filled is None else filled] * 3
    for b, n in enumerate(lengths):
        here = slice(b, b + 1)
        of_row = options | ({"alibi_slopes": options["alibi_slopes"][here]} if getattr(options.get("alibi_slopes"), "ndim", 1) == 2 else {})
        expected_out, expected_lse = formulas(q[here], k_cache[here, :n], v_cache[here, :n], **of_row)
        assert_close(out[b], expected_out[0])
        assert_close(lse[b], expected_lse[0])


@pytest.mark.parametrize("filled", [21, torch.tensor([21, 0, 30], dtype=torch.int32, device=DEVICE)], ids=["int", "tensor"])
@pytest.mark.parametrize("new", [1, 5])
def test_new_keys_are_written_in_place(filled, new):
    k_cache, v_cache = cache(3, 40)
    before = k_cache.clone(), v_cache.clone()
    q, k, v = (torch.randn(3, new, 4, 16) for _ in "qkv")
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=filled, causal=True)
    for b, n in enumerate(filled.tolist() if isinstance(filled, Tensor) else [filled] * 3):
        for now, then, fresh in zip((k_cache, v_cache), before, (k, v), strict=True):
            assert torch.equal(now[b, n : n + new], fresh[b])
            assert torch.equal(now[b, :n], then[b, :n])
            assert torch.equal(now[b, n + new :], then[b, n + new :])
        expected, _ = formulas(q[b : b + 1], k_cache[b : b + 1, : n + new], v_cache[b : b + 1, : n + new], causal=True)
        assert_close(out[b], expected[0])


def test_rows_of_the_cache_by_index_and_left_padding():
    k_cache, v_cache = cache(5, 40)
    q, k, v = (torch.randn(2, 1, 4, 16) for _ in "qkv")
    rows, filled, begin = torch.tensor([3, 1]), torch.tensor([12, 30], dtype=torch.int32), torch.tensor([4, 0], dtype=torch.int32)
    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=filled, cache_batch_idx=rows, cache_leftpad=begin, causal=True
    )
    for b, row in enumerate(rows.tolist()):
        n = int(filled[b])
        assert torch.equal(k_cache[row, n], k[b, 0])
        seen = slice(int(begin[b]), n + 1)
        expected, _ = formulas(q[b : b + 1], k_cache[row : row + 1, seen], v_cache[row : row + 1, seen], causal=True)
        assert_close(out[b], expected[0])


@pytest.mark.parametrize("module", [flash_attn, flash_attn_3], ids=["2", "3"])
@pytest.mark.parametrize("begin", [None, [4, 0, 0, 7]], ids=["", "leftpad"])
@pytest.mark.parametrize("filled", [7, [12, 7, 0, 38], None], ids=str)
@pytest.mark.parametrize("options", CACHE_OPTIONS[:4], ids=str)
def test_named_rows_are_those_rows_taken_out(options, filled, begin, module):
    """A call that names rows of the cache equals a call with copies of these rows. On a CPU the bits are equal, too, unless left padding
    hides keys in one call that the other call lacks. Several sequences may name the same row."""
    k_cache, v_cache = cache(6, 40)
    q, rows = torch.randn(4, 2, 8, 16), torch.tensor([5, 0, 0, 2])
    given: dict[str, Any] = {**options, "return_softmax_lse": True}
    given["cache_seqlens"] = torch.tensor(filled, dtype=torch.int32) if isinstance(filled, list) else filled
    if begin is not None:
        given["cache_leftpad"] = torch.tensor(begin, dtype=torch.int32)
    call = module.flash_attn_with_kvcache
    for of_q, packing in ((q, {}), (q.flatten(0, 1), {"cu_seqlens_q": 2 * torch.arange(5, dtype=torch.int32), "max_seqlen_q": 2})):
        if packing and module is flash_attn:
            continue
        found = call(of_q, k_cache, v_cache, **given, **packing, cache_batch_idx=rows)
        expected = call(of_q, k_cache[rows], v_cache[rows], **given, **packing)
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y) if begin is None and not ON_GPU else torch.allclose(x, y, atol=1e-5)


def largest_allocation(call: Any) -> int:
    """The largest of a call's allocations from PyTorch, in bytes."""
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * torch.cuda.is_available()
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        call()
    return max(max(x.self_cpu_memory_usage, x.self_device_memory_usage) for x in profile.events())


LAYOUTS = {
    "contiguous": lambda x: x,
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "cut out": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["plain", "rows", "rows and leftpad", "leftpad", "packed queries", "new keys in rows"])
@pytest.mark.parametrize("filled", [900, [900, 3, 1000, 0]], ids=str)
def test_nothing_of_the_cache_is_copied(filled, kind, layout):
    """Less than a row of the cache is copied, and the result equals that of a contiguous cache."""
    k_cache, v_cache = (LAYOUTS[layout](x) for x in cache(4, 1100))
    lengths = torch.tensor(filled, dtype=torch.int32) if isinstance(filled, list) else filled
    q, rows = torch.randn(4, 1, 4, 16), torch.tensor([3, 0, 2, 1])
    given: dict[str, Any] = {"cache_seqlens": lengths, "causal": True}
    if "rows" in kind:
        given["cache_batch_idx"] = rows
    if "leftpad" in kind:
        given["cache_leftpad"] = torch.tensor([5, 0, 700, 0], dtype=torch.int32)
    if "new" in kind:
        given |= {"k": torch.randn(4, 1, 4, 16), "v": torch.randn(4, 1, 4, 16)}
    if "packed" in kind:
        q, given = q.flatten(0, 1), {**given, "cu_seqlens_q": torch.arange(5, dtype=torch.int32), "max_seqlen_q": 1}
    outs = []

    def call() -> None:
        outs.append(flash_attn_3.flash_attn_with_kvcache(q, k_cache, v_cache, **given))

    call()
    assert largest_allocation(call) < v_cache[0].numel() * v_cache.element_size()
    assert torch.equal(*outs)
    whole = [x.contiguous() for x in (k_cache, v_cache)]
    torch.testing.assert_close(flash_attn_3.flash_attn_with_kvcache(q, *whole, **given), outs[0])
    if "rows" in kind:
        whole = [x[rows] for x in whole]
        given = {name: x for name, x in given.items() if name != "cache_batch_idx"}
        torch.testing.assert_close(flash_attn_3.flash_attn_with_kvcache(q, *whole, **given), outs[0])


def test_what_autocast_casts_is_as_little_as_it_was():
    k_cache, v_cache = cache(64, 100)
    q, rows, filled = torch.randn(2, 1, 4, 16), torch.tensor([63, 5]), torch.tensor([7, 100], dtype=torch.int32)
    outs = []

    def call() -> None:
        with torch.autocast(DEVICE.partition(":")[0], torch.bfloat16):
            outs.append(flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_batch_idx=rows, cache_seqlens=filled))

    assert largest_allocation(call) <= 2 * k_cache[0].numel() * 4
    half = [x.bfloat16() for x in (q, k_cache[rows], v_cache[rows])]
    torch.testing.assert_close(outs[0], flash_attn.flash_attn_with_kvcache(*half, cache_seqlens=filled))


@pytest.mark.parametrize("shape", [(0, 6, 8), (0, 0, 8), (2, 6, 0)], ids=["no sequence", "no row either", "no room"])
def test_named_rows_of_nothing(shape):
    batch, rows, room = shape
    q, index = torch.randn(batch, 2, 4, 16), torch.arange(batch)
    out, lse = flash_attn.flash_attn_with_kvcache(q, *cache(rows, room), cache_batch_idx=index, return_softmax_lse=True)
    assert out.shape == q.shape
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_named_rows_where_something_requires_a_gradient():
    """The function runs under no_grad(), so the cache needs no gradient. Forward mode is no obstacle either, if no tensor has a tangent."""
    q, rows = torch.randn(2, 1, 4, 16), torch.tensor([3, 1])
    k_cache, v_cache = cache(4, 8)
    expected = flash_attn.flash_attn_with_kvcache(q, k_cache[rows], v_cache[rows])
    tracked = [x.clone().requires_grad_() for x in (q, k_cache, v_cache)]
    found = flash_attn.flash_attn_with_kvcache(*tracked, cache_batch_idx=rows)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected)
    with torch.autograd.forward_ad.dual_level():
        torch.testing.assert_close(flash_attn.flash_attn_with_kvcache(*tracked, cache_batch_idx=rows), expected)
        torch.testing.assert_close(strobe.attention(q, k_cache, v_cache, layout="bshd", page_table=rows.int()[:, None]), expected)
    with pytest.raises(ValueError, match="^k_cache: 4 heads for the 3 of q; accepted are the divisors of 3$"):
        flash_attn.flash_attn_with_kvcache(q[:, :, :3], k_cache, v_cache, cache_batch_idx=rows)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("new", [0, 1, 5])
def test_a_cache_in_pages(new, rotary):
    """The results are those of a contiguous cache; without new keys the cache is only read."""
    page, each = 8, 5
    table = torch.randperm(3 * each)[: 3 * each].view(3, each).int()
    pools = [torch.randn(3 * each, page, 4, 16) for _ in range(2)]
    whole = [x[table.long()].flatten(1, 2).contiguous() for x in pools]
    filled = torch.tensor([21, 0, 33], dtype=torch.int32)
    q = torch.randn(3, max(new, 2), 4, 16)
    fresh = [torch.randn(3, new, 4, 16) for _ in range(2)] if new else [None, None]
    angles = torch.rand(40, 4) * 6
    options: dict[str, Any] = {"cache_seqlens": filled, "causal": True, "return_softmax_lse": True}
    if rotary and new:
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    expected = flash_attn.flash_attn_with_kvcache(q, *whole, *fresh, **options)
    found = flash_attn.flash_attn_with_kvcache(q, *pools, *fresh, **options, block_table=table)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    for x, y in zip(pools, whole, strict=True):
        assert torch.equal(x[table.long()].flatten(1, 2), y)


def test_packed_queries_over_pages():
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    pools = [torch.randn(5, 8, 2, 16) for _ in range(2)]
    q, cu_q, cu_k = torch.randn(7, 4, 16), torch.tensor([0, 6, 7], dtype=torch.int32), torch.tensor([0, 13, 29], dtype=torch.int32)
    k, v = (torch.cat([x[table[b].long()].flatten(0, 1)[: 13 if b == 0 else 16] for b in range(2)]) for x in pools)
    expected = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 6, 16, causal=True)
    torch.testing.assert_close(flash_attn.flash_attn_varlen_func(q, *pools, cu_q, cu_k, 6, 16, causal=True, block_table=table), expected)
    for wrong, message in (
        *[(cu_k + 7, r"^cu_seqlens_k: \[7, .*; accepted are numbers that begin at 0 and never fall")] * (not ON_GPU),  # in host memory
        (cu_k[0], r"^cu_seqlens_k: torch.int32 of shape \(\); accepted is int32 \(B \+ 1,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attn.flash_attn_varlen_func(q, *pools, cu_q, wrong, 6, 16, causal=True, block_table=table)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary(interleaved, causal):
    """The expected q and k are rotated here as complex numbers, one for each pair of columns."""
    angles = torch.rand(40, 4) * 6
    k_cache, v_cache = cache(2, 40)
    cached = k_cache.clone()
    q, k, v = (torch.randn(2, 3, 4, 16) for _ in "qkv")
    filled = torch.tensor([7, 20], dtype=torch.int32)

    def turned(x: Tensor, position: int) -> Tensor:  # (H, 16)
        pairs = x[:, :8].unflatten(-1, (4, 2)) if interleaved else x[:, :8].unflatten(-1, (2, 4)).mT
        z = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(4), angles[position])
        back = torch.view_as_real(z)
        return torch.cat([(back if interleaved else back.mT).flatten(-2), x[:, 8:]], -1)

    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, angles.cos(), angles.sin(), filled, causal=causal, rotary_interleaved=interleaved
    )
    for b, n in enumerate(filled.tolist()):
        keys = torch.stack([turned(k[b, i], n + i) for i in range(3)])
        torch.testing.assert_close(k_cache[b, n : n + 3], keys)
        queries = torch.stack([turned(q[b, i], n + i * causal) for i in range(3)])[None]
        keys = torch.cat([cached[b, :n], keys])[None]
        expected, _ = formulas(queries, keys, v_cache[b : b + 1, : n + 3], causal=causal)
        assert_close(out[b], expected[0])


def test_refusals_of_a_cache():
    k_cache, v_cache = cache(2, 8)
    q = torch.zeros(2, 1, 4, 16)
    call = flash_attn.flash_attn_with_kvcache
    table = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^block_table: torch.int64 of shape \(2, 1\); accepted is int32 \(2, n\)"):
        call(q, k_cache, v_cache, block_table=table.long())
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match=r"^block_table: page 2 at \[0, 0\]; accepted are 0 to 1, the pages of k_cache and v_cache"):
            call(q, k_cache, v_cache, cache_seqlens=3, block_table=table + 2)
        with pytest.raises(ValueError, match=r"^block_table: page 0 is to be written at \[0, 0\] and at \[1, 0\]"):
            call(q, k_cache, v_cache, q, q, cache_seqlens=3, block_table=table)
    with pytest.raises(ValueError, match="^v: None beside k; accepted are both or neither"):
        call(q, k_cache, v_cache, k=q, cache_seqlens=0)
    with pytest.raises(ValueError, match="^cache_seqlens: None beside k and v"):
        call(q, k_cache, v_cache, k=q, v=q)
    with pytest.raises(ValueError, match="^cache_seqlens: 8; accepted are 0 to 7"):
        call(q, k_cache, v_cache, k=q, v=q, cache_seqlens=8)
    with pytest.raises(ValueError, match="^cache_seqlens: -1; accepted are 0 to 8, a cache has room for 8 keys$"):
        call(q, k_cache, v_cache, cache_seqlens=-1)
    with pytest.raises(ValueError, match=r"^cache_seqlens: shape \(3,\)"):
        call(q, k_cache, v_cache, cache_seqlens=torch.zeros(3, dtype=torch.int32))


KINDS = [
    ({"cache_seqlens": 10.7}, "cache_seqlens: float; accepted is an integer, or a torch.Tensor, int32 (B,)"),
    ({"cache_seqlens": True}, "cache_seqlens: bool; accepted is an integer, or a torch.Tensor, int32 (B,)"),
    ({"cache_seqlens": [3, 4]}, "cache_seqlens: list; accepted is an integer, or a torch.Tensor, int32 (B,)"),
    ({"q": None}, "q: NoneType; accepted is a torch.Tensor"),
    ({"cache_batch_idx": [0, 1]}, "cache_batch_idx: list; accepted is a torch.Tensor"),
    ({"rotary_cos": [1.0], "rotary_sin": 2}, "rotary_cos: list; accepted is a torch.Tensor\nrotary_sin: int; accepted is a torch.Tensor"),
    (
        {"num_splits": "x", "causal": 2.0},
        "causal: float 2.0; accepted is True or False, or 1 or 0\nnum_splits: str; accepted is an integer",
    ),
    ({"rotary_interleaved": None}, "rotary_interleaved: NoneType None; accepted is True or False, or 1 or 0"),
    ({"return_softmax_lse": 2}, "return_softmax_lse: int 2; accepted is True or False, or 1 or 0"),
]


@pytest.mark.parametrize(("wrong", "message"), KINDS)
def test_wrong_kinds_are_named_before_the_cache_is_written(wrong, message):
    k_cache, v_cache = cache(2, 8)
    before = k_cache.clone()
    q = torch.ones(2, 1, 4, 16)
    with pytest.raises(TypeError) as raised:
        flash_attn.flash_attn_with_kvcache(**{"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": q, "v": q, "cache_seqlens": 3} | wrong)
    assert str(raised.value) == message
    assert torch.equal(k_cache, before)


def test_a_numpy_integer_is_a_length():
    k_cache, v_cache = cache(2, 8)
    q = torch.randn(2, 1, 4, 16)
    outs = [flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=n) for n in (5, np.int64(5))]
    assert torch.equal(*outs)


@pytest.mark.parametrize("filled", [5, [3, 5]])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary_tables_reach_the_last_token(filled, causal):
    """Tables are checked for k, and for q if each query has its own position. Only lengths in host memory are checked, so as not to wait
    for a GPU."""
    with torch.device("cpu"):
        q, k, v = torch.ones(2, 3, 4, 16), *(torch.ones(2, 2, 4, 16) for _ in "kv")
        lengths = torch.tensor(filled, dtype=torch.int32) if isinstance(filled, list) else filled
        needed = 8 if causal else 7

        def call(length: int) -> Tensor:
            table = torch.ones(length, 4)
            return flash_attn.flash_attn_with_kvcache(q, *cache(2, 12), k, v, table, table, lengths, causal=causal)

        assert call(needed).isfinite().all()
        with pytest.raises(ValueError, match=f"^rotary_cos, rotary_sin: length {needed - 1}; accepted is {needed} or more"):
            call(needed - 1)


@pytest.mark.parametrize("causal", [False, True])
def test_rotary_tables_reach_no_sequence_without_a_token(causal):
    """New keys and queries are packed, with lists in host memory."""
    with torch.device("cpu"):
        k_cache, v_cache = cache(3, 40)
        filled, cu_k = torch.tensor([39, 3, 30], dtype=torch.int32), torch.tensor([0, 0, 2, 2], dtype=torch.int32)
        cu_q = torch.tensor([0, 0, 3, 3], dtype=torch.int32)
        q, k = torch.randn(5, 4, 16), torch.randn(4, 4, 16)
        needed = 6 if causal else 5

        def call(length: int, q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
            table = torch.ones(length, 4)
            return flash_attn_3.flash_attn_with_kvcache(
                q, k_cache, v_cache, k, k, rotary_cos=table, rotary_sin=table, cache_seqlens=filled[: len(cu_q) - 1], causal=causal,
                cu_seqlens_q=cu_q, cu_seqlens_k_new=cu_k, cache_batch_idx=torch.arange(len(cu_q) - 1),
            )  # fmt: skip

        assert call(needed, q, k, cu_q, cu_k).isfinite().all()
        with pytest.raises(ValueError, match=f"^rotary_cos, rotary_sin: length {needed - 1}; accepted is {needed} or more"):
            call(needed - 1, q, k, cu_q, cu_k)
        before = k_cache.clone()
        for queries, keys in ((q, k), (q[:0], k[:0])):  # once with padding, once without tokens
            assert not call(0, queries, keys, 0 * cu_q, 0 * cu_k).any()
            assert not call(0, queries, keys, cu_q[:1], cu_k[:1]).any()
        assert torch.equal(k_cache, before)
    none, table = torch.zeros(2, 0, 4, 16), torch.ones(0, 4)
    assert not flash_attn.flash_attn_with_kvcache(none, *cache(2, 8), none, none, table, table, 7, causal=causal).numel()


def test_rotary_tables_come_with_each_other_and_with_new_keys():
    k_cache, v_cache = cache(2, 8)
    table = q = torch.ones(2, 1, 4, 16)
    call = flash_attn.flash_attn_with_kvcache
    for given, message in (
        ({"rotary_cos": table, "k": q, "v": q}, "rotary_sin: None beside rotary_cos; accepted are both or neither"),
        ({"rotary_sin": table, "k": q, "v": q}, "rotary_cos: None beside rotary_sin; accepted are both or neither"),
        ({"rotary_cos": table, "rotary_sin": table}, "k: None beside rotary_cos; accepted are k and v, new keys to be turned"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call(q, k_cache, v_cache, cache_seqlens=3, **given)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.int32], ids=str)
def test_rotary_tables_are_floating_point(dtype):
    """The imaginary part of a complex table would be dropped, and wrong keys would get into the cache."""
    k_cache, v_cache = cache(2, 8)
    kept = k_cache.clone()
    q, table = torch.ones(2, 1, 4, 16), torch.ones(8, 4).to(dtype)
    message = f"^rotary_cos, rotary_sin: dtypes {dtype}, {dtype}; accepted is floating point twice$"
    filled = torch.tensor([3, 4], dtype=torch.int32)
    for call in (flash_attn.flash_attn_with_kvcache, flash_attn_3.flash_attn_with_kvcache):
        with pytest.raises(ValueError, match=message):
            call(q, k_cache, v_cache, q, q, rotary_cos=table, rotary_sin=table, cache_seqlens=filled)
    with pytest.raises(ValueError, match=message):
        strobe.kv.append(k_cache, v_cache, q, q, filled, rotary_cos=table, rotary_sin=table, layout="bshd")
    assert torch.equal(k_cache, kept)


HOST_LENGTHS = [
    (
        {"cache_seqlens": [3, 8], "new": 1},
        r"^cache_seqlens: 8 at \[1\]; accepted are 0 to 7, a cache has room for 8 keys, of which 1 are new$",
    ),
    ({"cache_seqlens": [3, -5], "new": 1}, r"^cache_seqlens: -5 at \[1\]; accepted are 0 to 7"),
    ({"cache_seqlens": [9, 3]}, r"^cache_seqlens: 9 at \[0\]; accepted are 0 to 8"),
    (
        {"cache_seqlens": [3, 4], "cache_batch_idx": [0, 2], "new": 1},
        r"^cache_batch_idx: 2 at \[1\]; accepted are 0 to 1, a cache of 2 rows$",
    ),
    (
        {"cache_seqlens": [3, 4], "cache_batch_idx": [1, 1], "new": 1},
        r"^cache_batch_idx: \[1, 1\] beside k and v; accepted are rows that differ",
    ),
    ({"cache_batch_idx": [-1, 0]}, r"^cache_batch_idx: -1 at \[0\]; accepted are 0 to 1"),
    ({"cache_seqlens": [3, 4], "cache_leftpad": [3, 5]}, r"^cache_leftpad: 5 at \[1\]; accepted are 0 to 4, where the sequence ends$"),
    ({"cache_seqlens": [3, 4], "cache_leftpad": [-1, 0]}, r"^cache_leftpad: -1 at \[0\]"),
]


@pytest.mark.parametrize(("given", "message"), HOST_LENGTHS)
def test_lengths_in_host_memory_are_checked_before_the_cache_is_written(given, message):
    with torch.device("cpu"):
        k_cache, v_cache = cache(2, 8)
        before = k_cache.clone(), v_cache.clone()
        q = torch.ones(2, 1, 4, 16)
        numbers = {name: torch.tensor(x, dtype=torch.int32) for name, x in given.items() if name != "new"}
    fresh = {"k": q, "v": q} if "new" in given else {}
    with pytest.raises(ValueError, match=message):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **fresh, **numbers)
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"softcap": -1.0}, r"^softcap: -1(\.0)?; accepted"),
        ({"softmax_scale": float("nan")}, "^softmax_scale: nan"),
        ({"alibi_slopes": torch.ones(3, device=DEVICE)}, r"^alibi_slopes: shape \(3\)"),
        ({"q": torch.ones(2, 1, 4, 16, dtype=torch.float16, device=DEVICE)}, "float16"),
        ({"q": torch.ones(2, 1, 3, 16, device=DEVICE)}, "^k_cache: 4 heads for the 3 of q"),
    ],
)
def test_what_the_attention_refuses_is_refused_before_the_cache_is_written(wrong, message):
    k_cache, v_cache = cache(2, 8)
    before = k_cache.clone(), v_cache.clone()
    q = torch.ones(2, 1, 4, 16)
    good = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": q, "v": q, "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32)}
    with pytest.raises((TypeError, ValueError), match=message):
        flash_attn.flash_attn_with_kvcache(**good | wrong)
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])


@pytest.fixture
def unread(monkeypatch):
    """Makes numbers unreadable, as if they were in device memory."""
    monkeypatch.setattr(TORCH, "is_readable", lambda _: False)


@pytest.mark.parametrize("lengths", [[3, 9], [-5, 4], [2**31 - 1, -(2**31)]])
@pytest.mark.parametrize("new", [0, 2])
def test_lengths_that_nobody_reads_are_brought_into_the_cache(unread, lengths, new):
    """No memory beyond the cache is accessed, even if it is a view of a larger tensor."""
    around = [torch.randn(4, 12, 4, 16) for _ in "kv"]
    before = [x.clone() for x in around]
    caches = [x[1:3, 2:10] for x in around]
    fitting = torch.tensor(lengths).clamp(0, 8 - new).int()
    q = torch.randn(2, 2, 4, 16)
    fresh = [torch.randn(2, new, 4, 16) for _ in "kv"] if new else [None, None]
    expected_caches = [x.clone() for x in caches]
    given = torch.tensor(lengths, dtype=torch.int32)
    out = flash_attn.flash_attn_with_kvcache(q, *caches, *fresh, cache_seqlens=given, causal=True)
    expected = flash_attn.flash_attn_with_kvcache(q, *expected_caches, *fresh, cache_seqlens=fitting, causal=True)
    assert torch.equal(out, expected)
    for x, then, wanted in zip(around, before, expected_caches, strict=True):
        assert torch.equal(x[1:3, 2:10], wanted)
        x[1:3, 2:10] = then[1:3, 2:10]
        assert torch.equal(x, then)


@pytest.mark.parametrize("rows", [[1, 5, 2], [-1, 0, 3], [7, -3, 4], [2**32, 1, 3]])
@pytest.mark.parametrize("filled", [4, [4, 3, 6]])
@pytest.mark.parametrize("new", [0, 2])
def test_rows_that_are_not_in_the_cache_are_left_out(unread, rows, filled, new):
    """Nothing is written for such rows, not even the existing contents, because another sequence may write to the same place."""
    k_cache, v_cache = cache(4, 8)
    before = [k_cache.clone(), v_cache.clone()]
    q = torch.randn(3, 2, 4, 16)
    fresh = [torch.randn(3, new, 4, 16) for _ in "kv"] if new else [None, None]
    lengths = torch.tensor(filled, dtype=torch.int32) if isinstance(filled, list) else filled
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, *fresh, cache_seqlens=lengths, cache_batch_idx=torch.tensor(rows), causal=True, return_softmax_lse=True
    )
    for b, row in enumerate(rows):
        if not 0 <= row < 4:
            assert (out[b] == 0).all()
            assert (lse[b] == -float("inf")).all()
            continue
        n = filled[b] if isinstance(filled, list) else filled
        for then, x in zip(before, fresh, strict=True):
            if x is not None:
                then[row, n : n + new] = x[b]
        expected, _ = formulas(q[b : b + 1], before[0][row : row + 1, : n + new], before[1][row : row + 1, : n + new], causal=True)
        assert_close(out[b], expected[0])
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])


def test_left_padding_and_rotary_tables_that_nobody_reads(unread):
    """Padding ends where the sequence does, and positions beyond the tables use their last row."""
    k_cache, v_cache = cache(2, 8)
    q, k, v = (torch.randn(2, 1, 4, 16) for _ in "qkv")
    filled, begin = torch.tensor([3, 5], dtype=torch.int32), torch.tensor([-2, 9], dtype=torch.int32)
    out, lse = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=filled, cache_leftpad=begin, return_softmax_lse=True)
    assert_close(out[0], formulas(q[:1], k_cache[:1, :3], v_cache[:1, :3])[0][0])
    assert (out[1] == 0).all()
    assert (lse[1] == -float("inf")).all()
    angles = torch.rand(4, 8)
    padded = torch.cat([angles, angles[-1:].expand(4, 8)])
    copies = k_cache.clone(), v_cache.clone()
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, angles.cos(), angles.sin(), filled)
    assert torch.equal(out, flash_attn.flash_attn_with_kvcache(q, *copies, k, v, padded.cos(), padded.sin(), filled))
    assert torch.equal(k_cache, copies[0])


def test_what_no_length_makes_fit_is_refused_unread(unread):
    k_cache, v_cache = cache(2, 8)
    q, long = torch.zeros(2, 1, 4, 16), torch.zeros(2, 9, 4, 16)
    filled = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="^k: 9 tokens; accepted are up to 8, as k_cache has$"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, long, long, cache_seqlens=filled)
    with pytest.raises(ValueError, match=r"^k_cache: shape \(0, 8, 4, 16\); accepted is one row or more, for cache_batch_idx to name$"):
        flash_attn.flash_attn_with_kvcache(q, k_cache[:0], v_cache[:0], cache_seqlens=filled, cache_batch_idx=filled)
    table = torch.ones(0, 4)
    with pytest.raises(ValueError, match="^rotary_cos, rotary_sin: length 0; accepted is 1 or more"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, q, q, table, table, filled)


def test_a_graph_reads_no_lengths():
    torch._dynamo.reset()
    k_cache, v_cache = cache(2, 8)
    before = k_cache.clone()
    q, k, v = (torch.randn(2, 1, 4, 16) for _ in "qkv")
    compiled = torch.compile(flash_attn.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    filled, rows = torch.tensor([3, 99], dtype=torch.int32), torch.tensor([1, -4])
    out = compiled(q, k_cache, v_cache, k, v, cache_seqlens=filled, cache_batch_idx=rows)
    assert (out[1] == 0).all()
    assert torch.equal(k_cache[1, 3], k[0, 0])
    k_cache[1, 3] = before[1, 3]
    assert torch.equal(k_cache, before)


@pytest.mark.parametrize("lengths", [3, [3, 4]])
def test_a_cache_of_known_lengths_is_one_graph(lengths):
    torch._dynamo.reset()
    k_cache, v_cache = cache(2, 8)
    copies = k_cache.clone(), v_cache.clone()
    q, k, v = (torch.randn(2, 1, 4, 16) for _ in "qkv")
    filled = torch.tensor(lengths, dtype=torch.int32) if isinstance(lengths, list) else lengths
    compiled = torch.compile(flash_attn.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    out = compiled(q, *copies, k, v, cache_seqlens=filled)
    assert torch.equal(out, flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=filled))
    assert torch.equal(copies[0], k_cache)


def test_a_cache_has_no_gradient():
    q = torch.randn(2, 1, 4, 16, requires_grad=True)
    assert not flash_attn.flash_attn_with_kvcache(q, *cache(2, 8)).requires_grad


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q": (2, 1, 16)}, r"^q: shape \(2, 1, 16\); accepted is \(batches, tokens, heads, head dimension\)"),
        ({"q": ()}, r"^q: shape \(\); accepted is \(batches, tokens, heads, head dimension\)"),
        ({"q": (2, 1, 4, 8)}, r"^k_cache: shape \(2, 8, 4, 16\); accepted is \(2, 8, 4, 8\)"),
        ({"q": (1, 1, 4, 16)}, r"^k_cache: shape \(2, 8, 4, 16\); accepted is \(1, 8, 4, 16\)"),
        ({"q": (2, 1, 3, 16)}, r"^k_cache: 4 heads for the 3 of q"),
        ({"v_cache": (2, 7, 4, 16)}, r"^v_cache: shape \(2, 7, 4, 16\); accepted is \(2, 8, 4, 16\)"),
        ({"k": (1, 1, 4, 16)}, r"^k: shape \(1, 1, 4, 16\); accepted is \(2, 1, 4, 16\)"),
        ({"v": (2, 2, 4, 16)}, r"^v: shape \(2, 2, 4, 16\); accepted is \(2, 1, 4, 16\)"),
        ({"k": torch.float16}, r"^k: dtype torch\.float16; accepted is torch\.float32, as k_cache has"),
        ({"cache_seqlens": torch.float32}, r"^cache_seqlens: dtype torch\.float32; accepted is torch\.int32"),
    ],
)
def test_what_does_not_fit_the_cache_is_named(wrong, message):
    """One argument has a wrong shape or dtype."""
    k_cache, v_cache = cache(2, 8)
    q = torch.zeros(2, 1, 4, 16)
    good = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": q, "v": q, "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32)}
    bad = {name: torch.zeros(x) if isinstance(x, tuple) else good[name].to(x) for name, x in wrong.items()}
    with pytest.raises(ValueError, match=message):
        flash_attn.flash_attn_with_kvcache(**good | bad)


NESTED = torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([2])], layout=torch.jagged)
META = torch.zeros(2, dtype=torch.int32, device="meta")
TABLE = torch.ones(9, 4)


def test_new_keys_that_are_laid_out_wrongly_alone_are_named_alone():
    k_cache, v_cache = cache(2, 8)
    new = {"k": torch.randn(2, 3, 4, 16), "v": torch.randn(2, 3, 4, 16)}
    given = {"q": torch.randn(2, 1, 4, 16), "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": torch.zeros(2, dtype=torch.int32)}
    for name, x in new.items():
        with pytest.raises(ValueError, match=rf"^{name}: shape \(2, 4, 3, 16\); accepted is \(2, 3, 4, 16\)$"):
            flash_attn.flash_attn_with_kvcache(**given, **{**new, name: x.transpose(1, 2)})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"softcap": -1.0}, "softcap: -1; accepted"),
        ({"softmax_scale": float("nan")}, "softmax_scale: nan; accepted"),
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes: shape \(3\); accepted"),
        ({"q": torch.zeros(2, 1, 3, 16)}, "k_cache: 4 heads for the 3 of q"),
        ({"window_size": NESTED}, "window_size: .*; accepted is \\(left, right\\)"),
        ({"window_size": torch.tensor([3, 4]).to_sparse()}, "window_size: .*; accepted is \\(left, right\\)"),
        ({"window_size": (torch.tensor([3]).to_sparse(), 4)}, "window_size: .*; accepted is \\(left, right\\)"),
        ({"cache_seqlens": NESTED}, "cache_seqlens: a nested tensor"),
        ({"cache_seqlens": torch.tensor([3, 4]).to_sparse()}, "cache_seqlens: layout torch.sparse_coo; accepted"),
        ({"cache_seqlens": META}, f"cache_seqlens: on device meta; accepted is {DEVICE}(:0)?, where q lies"),
        ({"cache_leftpad": META}, f"cache_leftpad: on device meta; accepted is {DEVICE}(:0)?, where q lies"),
        ({"cache_batch_idx": META}, f"cache_batch_idx: on device meta; accepted is {DEVICE}(:0)?, where q lies"),
        ({"rotary_cos": TABLE.to("meta"), "rotary_sin": TABLE}, f"rotary_cos: on device meta; accepted is {DEVICE}(:0)?, where q lies"),
        ({"v_cache": torch.zeros(1, 8, 4, 16).expand(2, 8, 4, 16)}, r"v_cache: strides \(0, 64, 16, 1\); accepted is memory of its own"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_nothing_is_written_by_a_call_that_is_refused(wrong, message):
    k_cache, v_cache = cache(2, 8)
    copies = k_cache.clone(), v_cache.clone()
    q, k, v = (torch.randn(2, 1, 4, 16) for _ in "qkv")
    good = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32)}
    wrong = {name: there(x) if isinstance(x, Tensor) else x for name, x in wrong.items()}
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        flash_attn.flash_attn_with_kvcache(**good | wrong)
    assert torch.equal(k_cache, copies[0])
    assert torch.equal(v_cache, copies[1])


def test_that_pages_have_no_gradient_is_said_of_the_block_table():
    q, pool = torch.zeros(2, 4, 16, requires_grad=True), torch.zeros(3, 8, 4, 16)
    cu = torch.tensor([0, 1, 2], dtype=torch.int32)
    table = torch.tensor([[0], [2]], dtype=torch.int32)
    for _ in range(3):
        out = flash_attn.flash_attn_varlen_func(q, pool, pool, cu, cu, 1, 1, block_table=table)
        with pytest.raises(
            NotImplementedError, match="^block_table: keys in pages have no gradients, and q requires grad; accepted is a for"
        ):
            out.sum().backward()


def test_what_is_written_lies_in_no_memory_that_is_read():
    """Views of the cache are refused by name, because it is chance whether their numbers change before they are read."""
    k_cache, v_cache = cache(2, 8)
    copies = k_cache.clone(), v_cache.clone()
    fresh = torch.randn(2, 1, 4, 16)
    call = flash_attn.flash_attn_with_kvcache
    for name, view, of in (("k", k_cache[:, 2:3], "k_cache"), ("v", v_cache[:, 2:3], "v_cache"), ("v", k_cache[:, 7:], "k_cache")):
        message = f"^{name}: in the memory of {of}, which is written; accepted is memory of its own$"
        with pytest.raises(ValueError, match=message):
            call(fresh, k_cache, v_cache, **{"k": fresh, "v": fresh} | {name: view}, cache_seqlens=3)
    with pytest.raises(ValueError, match="^v_cache: the memory of k_cache; accepted is memory of its own$"):
        call(fresh, k_cache, k_cache[:, :], fresh, fresh, cache_seqlens=3)
    memory = torch.zeros(2 * k_cache.numel())
    with pytest.raises(ValueError, match="^v_cache: the memory of k_cache; accepted is memory of its own$"):
        call(
            fresh,
            memory[: k_cache.numel()].view_as(k_cache),
            memory[5 : 5 + k_cache.numel()].view_as(k_cache),
            fresh,
            fresh,
            cache_seqlens=3,
        )
    assert torch.equal(k_cache, copies[0])
    assert torch.equal(v_cache, copies[1])


def test_caches_and_new_keys_may_share_a_buffer():
    """Caches and new keys lie one after the other, or are interleaved."""
    k_cache, v_cache = cache(2, 8)
    q, k, v = (torch.randn(2, 2, 4, 16) for _ in "qkv")
    expected = flash_attn.flash_attn_with_kvcache(q, k_cache.clone(), v_cache.clone(), k, v, cache_seqlens=3)
    interleaved = torch.stack([k_cache, v_cache], 2)
    together = [torch.cat(each, 1) for each in ((k_cache, k), (v_cache, v))]
    for caches, new in (
        (interleaved.unbind(2), (k, v)),
        (torch.stack([k_cache, v_cache]), torch.stack([k, v], 3).unbind(3)),
        ([x[:, :8] for x in together], [x[:, 8:] for x in together]),
    ):
        assert torch.equal(flash_attn.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=3), expected)


def test_memory_that_is_shared_is_found_exactly():
    """The answers are compared with sets of addresses."""
    generator = random.Random(0)
    buffer = torch.zeros(400)
    found = 0
    for _ in range(3000):
        strides = sorted((generator.choice([1, 2, 3, 5, 12, 40]) for _ in range(3)), reverse=True)
        views = []
        for _ in range(2):
            sizes = [generator.randint(1, 4) for _ in range(3)]
            views.append(buffer.as_strided(sizes, strides, generator.randint(0, 100)))
        addresses = [
            {x.data_ptr() for x in view.flatten().split(1)}
            if view.is_contiguous()
            else {view[i, j, l].data_ptr() for i in range(view.shape[0]) for j in range(view.shape[1]) for l in range(view.shape[2])}
            for view in views
        ]
        assert share_memory(*views) == bool(addresses[0] & addresses[1])
        found += share_memory(*views)
    assert 300 < found < 2700


Q64, K64, CACHE64, POOL64 = (torch.randn(shape, device="cpu") for shape in ((7, 4, 16), (9, 2, 16), (2, 8, 2, 16), (5, 4, 2, 16)))
LISTS = {"cu_seqlens_q": [0, 3, 7], "cu_seqlens_k": [0, 4, 9], "table": [[0, 1], [2, 3]], "two": [2, 3], "one": [1, 0]}
VARLEN64 = {"cu_seqlens_q": "cu_seqlens_q", "cu_seqlens_k": "cu_seqlens_k"}
AS_INT64: list[tuple[Any, dict[str, str], set[str]]] = [  # a call; its lists; those that have to be int32
    (lambda **x: flash_attn.flash_attn_varlen_func(Q64, K64, K64, **x, max_seqlen_q=4, max_seqlen_k=5), VARLEN64, set()),
    (
        lambda **x: flash_attn.flash_attn_varlen_func(Q64, POOL64, POOL64, **x, max_seqlen_q=4, max_seqlen_k=5),
        VARLEN64 | {"block_table": "table"},
        {"cu_seqlens_k"},
    ),
    (
        lambda **x: flash_attn.flash_attn_interface._flash_attn_varlen_forward(Q64, K64, K64, **x, **PASS64)[0],
        VARLEN64 | {"seqused_k": "two", "leftpad_k": "one"},
        {"cu_seqlens_q", "cu_seqlens_k"},
    ),
    (
        lambda **x: flash_attn_3.flash_attn_varlen_func(Q64, K64, K64, **x, max_seqlen_q=4, max_seqlen_k=5),
        VARLEN64 | {"seqused_k": "two"},
        set(),
    ),
    (
        lambda **x: flash_attn_3.flash_attn_varlen_func(Q64, K64, K64, **x, max_seqlen_q=4, max_seqlen_k=5),
        VARLEN64 | {"seqused_q": "two", "seqused_k": "two"},
        {"cu_seqlens_q", "cu_seqlens_k"},
    ),
    (
        lambda **x: flash_attn_3.flash_attn_with_kvcache(Q64[:6].view(2, 3, 4, 16), CACHE64, CACHE64, **x),
        {"cache_seqlens": "two", "cache_leftpad": "one", "cache_batch_idx": "one"},
        set(),
    ),
    (
        lambda **x: flash_attn_3.flash_attn_with_kvcache(Q64, POOL64, POOL64, **x, max_seqlen_q=4),
        {"cache_seqlens": "two", "cu_seqlens_q": "cu_seqlens_q", "page_table": "table"},
        {"cu_seqlens_q", "page_table"},
    ),
]
PASS64: dict[str, Any] = {"max_seqlen_q": 4, "max_seqlen_k": 5, "dropout_p": 0.0, "softmax_scale": None, "causal": True}


@pytest.mark.parametrize(("call", "lists", "int32"), AS_INT64)
def test_int64_in_host_memory(call, lists, int32):
    """Which lists may be int64 is what docs/compat.md says."""
    with torch.device("cpu"):
        given = {name: torch.tensor(LISTS[of], dtype=torch.int32) for name, of in lists.items()}
        expected = call(**given)
        for name, x in given.items():
            if name in int32:
                with pytest.raises(ValueError, match=f"^{name}: torch.int64 of shape .*; accepted is int32"):
                    call(**given | {name: x.long()})
            else:
                assert torch.equal(call(**given | {name: x.long()}), expected), name
