"""strobe.compat.flash_attn_3 against the formulas in float64."""

from __future__ import annotations

import inspect
import itertools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from device import DEVICE, ON_GPU
from flash_formulas import assert_close, formulas, inputs
from strobe._rotary import rotate
from strobe.arrays.torch import TORCH
from strobe.compat import flash_attn_3

H, HKV, D, DV = 4, 2, 16, 24


@pytest.fixture(autouse=True)
def _device():
    with torch.device(DEVICE):
        yield


@pytest.fixture
def unread(monkeypatch):
    """Makes numbers unreadable, as if they were in device memory."""
    monkeypatch.setattr(TORCH, "is_readable", lambda _: False)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_the_signatures_are_that_librarys():
    descales = "q_descale k_descale v_descale"
    common = f"softmax_scale causal qv {descales} window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin"
    expected = {
        "flash_attn_func": f"q k v {common} return_attn_probs",
        "flash_attn_qkvpacked_func": f"qkv softmax_scale causal {descales} window_size attention_chunk softcap deterministic num_heads_q "
        "sm_margin return_attn_probs",
        "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k "
        f"{common} return_attn_probs",
        "flash_attn_with_kvcache": "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table "
        f"cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens {descales} softmax_scale causal window_size attention_chunk softcap "
        "rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse",
    }
    of_metadata = "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens qkv_dtype headdim_v cu_seqlens_q "
    of_metadata += "cu_seqlens_k_new cache_leftpad page_size max_seqlen_k_new causal window_size attention_chunk has_softcap num_splits "
    others = {"get_scheduler_metadata": of_metadata + "pack_gqa sm_margin", "flash_attn_combine": "out_partial lse_partial out out_dtype"}
    for name, names in others.items():
        assert list(inspect.signature(getattr(flash_attn_3, name)).parameters) == names.split(), name
    assert sorted(flash_attn_3.__all__) == sorted([*expected, *others])
    defaults = {"softmax_scale": None, "causal": False, "window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0, "sm_margin": 0}
    for name, names in expected.items():
        parameters = inspect.signature(getattr(flash_attn_3, name)).parameters
        assert list(parameters) == names.split(), name
        assert all(parameters[n].default == default for n, default in defaults.items()), name
        splits = {"flash_attn_qkvpacked_func": None, "flash_attn_with_kvcache": 0}.get(name, 1)
        assert splits is None or parameters["num_splits"].default == splits


def test_under_the_name_that_callers_import(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn_3)
    from flash_attn_interface import flash_attn_with_kvcache  # type: ignore[import-not-found]

    assert flash_attn_with_kvcache is flash_attn_3.flash_attn_with_kvcache


CHUNKS: list[dict[str, Any]] = [{"attention_chunk": 4}, {"attention_chunk": 40}, {"attention_chunk": 5, "causal": True, "softcap": 3.0}]
CHUNKS += [{"attention_chunk": 6, "window_size": (2, 3)}, {"attention_chunk": 1}]


@pytest.mark.parametrize("keys", [13, 7], ids="{} keys".format)
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 3.0}, {"window_size": (5, 2), "softmax_scale": 0.3}, *CHUNKS], ids=str)
def test_dense(options, keys):
    q, k, v = inputs(2, 9, H, D, kv=(keys, HKV))
    out, lse = flash_attn_3.flash_attn_func(q, k, v, **options, return_attn_probs=True, num_splits=3, pack_gqa=True, sm_margin=4)
    expected = formulas(q, k, v, **options)
    assert_close(out, expected[0])
    assert_close(lse, expected[1])
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for found, grad in zip(grads, torch.autograd.grad(expected[0], (q, k, v), dout.double()), strict=True):
        assert_close(found, grad.double())
    assert isinstance(flash_attn_3.flash_attn_func(q, k, v), Tensor)


def test_packed_heads():
    qkv = torch.randn(2, 7, 3, H, D)
    expected = formulas(*qkv.unbind(2), causal=True)
    assert_close(flash_attn_3.flash_attn_qkvpacked_func(qkv, causal=True), expected[0])
    grouped = torch.randn(2, 7, H + 2 * HKV, D)
    expected = formulas(*grouped.split([H, HKV, HKV], 2))
    out, lse = flash_attn_3.flash_attn_qkvpacked_func(grouped, num_heads_q=H, return_attn_probs=True)
    assert_close(out, expected[0])
    assert_close(lse, expected[1])
    with pytest.raises(ValueError, match=r"^qkv: shape \(2, 7, 8, 16\); accepted is \(B, S, 7 \+ 2 Hkv, D\), with num_heads_q 7"):
        flash_attn_3.flash_attn_qkvpacked_func(grouped, num_heads_q=7)
    with pytest.raises(TypeError, match=r"^num_heads_q: str; accepted is an integer"):
        flash_attn_3.flash_attn_qkvpacked_func(grouped, num_heads_q="4")


@pytest.mark.parametrize("used_k", [True, False])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (2, 1)}, *CHUNKS[:4:2]], ids=str)
def test_sequences_that_fill_their_place_in_part(options, used_k):
    lengths_q, lengths_k, q_there, k_there = [5, 3, 0, 4], [6, 4, 2, 0], [3, 3, 0, 2], [6, 1, 2, 0]
    cu_q, cu_k = (ints(0, *itertools.accumulate(lengths)) for lengths in (lengths_q, lengths_k))
    q, k, v = (torch.randn(n, h, D, requires_grad=True) for n, h in ((14, H), (12, HKV), (12, HKV)))  # q has 2 padding tokens
    used = {"seqused_q": ints(*q_there)} | ({"seqused_k": ints(*k_there)} if used_k else {})
    out, lse = flash_attn_3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 6, **used, **options, return_attn_probs=True)
    expected, expected_lse = torch.zeros_like(out, dtype=torch.double), torch.full_like(lse, -torch.inf, dtype=torch.double)
    for b, n in enumerate(q_there):
        i, j, m = int(cu_q[b]), int(cu_k[b]), k_there[b] if used_k else lengths_k[b]
        of_b, lse_b = formulas(q[None, i : i + n], k[None, j : j + m], v[None, j : j + m], **options)
        expected = expected.index_copy(0, torch.arange(i, i + n), of_b[0])
        expected_lse = expected_lse.index_copy(1, torch.arange(i, i + n), lse_b[0])
    assert_close(out, expected)
    assert_close(lse, expected_lse)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for found, grad in zip(grads, torch.autograd.grad(expected, (q, k, v), dout.double()), strict=True):
        assert_close(found, grad.double())


def test_lengths_that_nobody_reads_are_brought_into_bounds(unread):
    cu = ints(0, 4, 8)
    q = torch.randn(8, H, D)
    found = flash_attn_3.flash_attn_varlen_func(q, q, q, cu, cu, 4, 4, ints(9, -2), ints(-1, 3))
    assert torch.equal(found, flash_attn_3.flash_attn_varlen_func(q, q, q, cu, cu, 4, 4, ints(4, 0), ints(0, 3)))


LENGTHS, NEW, QUERIES, ROOM, PAGE = [5, 0, 11], [3, 2, 1], [4, 1, 2], 16, 4


def the_cache(kind: str) -> tuple[Tensor, Tensor, dict[str, Any], list[tuple[int, Tensor]]]:
    """Caches, the arguments that locate sequences in them, and for each sequence (its beginning, the rows of the flattened cache)."""
    each = torch.arange(ROOM)
    if kind.startswith("pages"):
        k_cache, v_cache = (torch.randn(22, PAGE, HKV, d) for d in (D, DV))
        table = torch.randperm(22, device="cpu")[: 5 * ROOM // PAGE].to(DEVICE).view(5, -1).int()
        rows, begins, given = [0, 1, 2], [0, 0, 0], {"page_table": table[:3]}
        if "rows" in kind:
            rows = [4, 0, 3]
            given = {"page_table": table, "cache_batch_idx": ints(*rows)}
        if "leftpad" in kind:
            begins = [2, 0, 7]
            given["cache_leftpad"] = ints(*begins)
        places = [row.long()[each // PAGE] * PAGE + each % PAGE for row in table[rows]]
        return k_cache, v_cache, given, list(zip(begins, places, strict=True))
    k_cache, v_cache = (torch.randn(3 if kind != "rows" else 5, ROOM, HKV, d) for d in (D, DV))
    rows, begins, given = [0, 1, 2], [0, 0, 0], {}
    if kind == "rows":
        rows = [4, 0, 3]
        given = {"cache_batch_idx": ints(*rows)}
    if kind == "leftpad":
        begins = [2, 0, 7]
        given = {"cache_leftpad": ints(*begins)}
    return k_cache, v_cache, given, [(begin, row * ROOM + each) for begin, row in zip(begins, rows, strict=True)]


@pytest.mark.parametrize("packed_k", [None, True, False], ids=["no new keys", "packed keys", "padded keys"])
@pytest.mark.parametrize("packed_q", [True, False], ids=["packed queries", "padded queries"])
@pytest.mark.parametrize("kind", ["whole", "pages", "rows", "leftpad", "pages, rows and leftpad"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (4, -1), "softcap": 2.0}, {}, CHUNKS[0]], ids=str)
def test_cache(kind, packed_q, packed_k, options):
    torch.manual_seed(0)
    k_cache, v_cache, given, places = the_cache(kind)
    queries = QUERIES if packed_q else [2, 2, 2]
    new = [0, 0, 0] if packed_k is None else NEW if packed_k else [2, 2, 2]
    cu_q, cu_new = (list(itertools.accumulate(counts, initial=0)) for counts in (queries, new))
    q = torch.randn(cu_q[-1] + 1, H, D)  # one token of padding
    k, v = (torch.randn(cu_new[-1] + 2, HKV, d) for d in (D, DV))
    turns_from = [7, 1, 3]
    angles = torch.rand(40, 5)
    turn = (angles.cos(), angles.sin())
    expected = k_cache.clone(), v_cache.clone()
    outs, lses = [], []
    for b, (begin, rows) in enumerate(places):
        first, end = LENGTHS[b], LENGTHS[b] + new[b]
        of_b = [x[None, cu[b] : cu[b + 1]] for x, cu in ((q, cu_q), (k, cu_new), (v, cu_new))]
        if packed_k is not None:
            steps = torch.arange(queries[b]) if options else torch.zeros(1).long()
            of_b[0] = rotate(of_b[0], *turn, (turns_from[b] + steps)[None], False)
            of_b[1] = rotate(of_b[1], *turn, turns_from[b] + torch.arange(new[b])[None], False)
        for cache, x in zip(expected, of_b[1:], strict=True):
            cache.flatten(0, 1)[rows[first:end]] = x[0]
        keys = [cache.flatten(0, 1)[rows[begin:end]][None] for cache in expected]
        out, lse = formulas(of_b[0], *keys, **options)
        outs.append(out[0])
        lses.append(lse[0])
    given |= {"cache_seqlens": ints(*LENGTHS), "return_softmax_lse": True, **options}
    if packed_k is not None:
        given |= {"k": k, "v": v, "cu_seqlens_k_new": ints(*cu_new)} if packed_k else {
            "k": k[: cu_new[-1]].view(3, 2, HKV, D), "v": v[: cu_new[-1]].view(3, 2, HKV, DV)}  # fmt: skip
        given |= {"rotary_cos": turn[0], "rotary_sin": turn[1], "rotary_interleaved": False, "rotary_seqlens": ints(*turns_from)}
    given |= {"cu_seqlens_q": ints(*cu_q), "max_seqlen_q": max(queries)} if packed_q else {}
    out, lse = flash_attn_3.flash_attn_with_kvcache(q if packed_q else q[:-1].view(3, 2, H, D), k_cache, v_cache, **given)
    if packed_q:
        assert not out[-1].any()
        assert (lse[:, -1] == -torch.inf).all()
        assert_close(out[:-1], torch.cat(outs))
        assert_close(lse[:, :-1], torch.cat(lses, 1))
    else:
        assert_close(out, torch.stack(outs))
        assert_close(lse, torch.stack(lses))
    assert_close(k_cache, expected[0].double())
    assert_close(v_cache, expected[1].double())


@pytest.mark.parametrize("options", CHUNKS, ids=str)
def test_chunks_of_a_cache_whose_rows_lie_apart(options):
    begins, ends = [2, 0, 7], [9, 4, 16]
    k_cache, v_cache = (torch.randn(3, ROOM + 3, HKV, d)[:, :ROOM] for d in (D, DV))
    q = torch.randn(3, 3, H, D)
    given = {"cache_seqlens": ints(*ends), "cache_leftpad": ints(*begins), "return_softmax_lse": True}
    out, lse = flash_attn_3.flash_attn_with_kvcache(q, k_cache, v_cache, **given, **options)
    for b, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        expected = formulas(*(x[b : b + 1] for x in (q, k_cache[:, begin:end], v_cache[:, begin:end])), **options)
        assert_close(out[b : b + 1], expected[0])
        assert_close(lse[b : b + 1], expected[1])


def test_an_integer_length_beside_packed_tokens():
    k_cache, v_cache, given, _ = the_cache("pages")
    q, k = torch.randn(3, H, D), torch.randn(3, HKV, D)
    cu = ints(0, 2, 2, 3)
    results = []
    for length in (4, ints(4, 4, 4)):
        caches = k_cache.clone(), v_cache.clone()
        more = {"cache_seqlens": length, "cu_seqlens_q": cu, "cu_seqlens_k_new": cu, "causal": True}
        out = flash_attn_3.flash_attn_with_kvcache(q, *caches, k, torch.ones(3, HKV, DV), **given, **more)
        results.append((out, *caches))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_numbers_that_nobody_reads_touch_nothing_outside(unread):
    k_cache, v_cache, given, _ = the_cache("pages")
    before = k_cache.clone(), v_cache.clone()
    q, k = torch.randn(3, H, D), torch.randn(3, HKV, D)
    more = {"cache_seqlens": ints(0, 0, 0), "cu_seqlens_q": ints(0, 1, 2, 3), "cu_seqlens_k_new": ints(5, 9, 12, 15)}
    flash_attn_3.flash_attn_with_kvcache(q, k_cache, v_cache, k, torch.ones(3, HKV, DV), **given, **more)
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])


Q, K, V = torch.zeros(3, H, D, device=DEVICE), torch.zeros(3, HKV, D, device=DEVICE), torch.zeros(3, HKV, DV, device=DEVICE)
CU = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=DEVICE)


@pytest.mark.skipif(DEVICE != "cpu", reason="numbers in device memory are not read")
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            {"qv": Q},
            ValueError,
            r"^qv: torch.float32 of shape \(3, 4, 16\); accepted is torch.float32 \(3, 4, 24\), as q and v_cache have$",
        ),
        ({"qv": 3}, TypeError, "^qv: int; accepted is a torch.Tensor"),
        ({"k_descale": Q}, ValueError, r"^k_descale: torch.float32 of shape \(3, 4, 16\); accepted is float32 \(B, Hkv\)$"),
        ({"q": Q.to(torch.float8_e4m3fn)}, ValueError, "^k_cache: dtype torch.float32; accepted is torch.float8_e4m3fn, as q has\\n"),
        ({"attention_chunk": -1}, ValueError, "^attention_chunk: -1; accepted are integers from 0"),
        ({"attention_chunk": 8, "window_size": 3}, TypeError, "^window_size: 3; accepted is"),
        ({"attention_chunk": 0.5}, TypeError, "^attention_chunk: float; accepted is an integer$"),
        ({"num_splits": "2"}, TypeError, "^num_splits: str; accepted is an integer$"),
        ({"sm_margin": -1}, ValueError, "^sm_margin: -1; accepted are integers from 0"),
        ({"pack_gqa": 2}, TypeError, "^pack_gqa: int 2; accepted is True or False, or 1 or 0$"),
        ({"scheduler_metadata": 3}, TypeError, "^scheduler_metadata: int; accepted is a torch.Tensor, or None$"),
        ({"page_table": [[0]]}, TypeError, "^page_table: list; accepted is a torch.Tensor$"),
        ({"page_table": torch.zeros(3, 4)}, ValueError, r"^page_table: torch.float32 of shape \(3, 4\); accepted is int32 \(3, n\)$"),
        ({"page_table": torch.full((3, 4), 77).int()}, ValueError, r"^page_table: page 77 at \[0, 0\]"),
        ({"cu_seqlens_q": CU.long()}, ValueError, r"^cu_seqlens_q: torch.int64 of shape \(4,\); accepted is int32 \(B \+ 1,\)$"),
        ({"cu_seqlens_q": CU + 1}, ValueError, r"^cu_seqlens_q: \[1, 2, 3, 4\]; accepted are numbers that begin at 0 and never fall$"),
        ({"cu_seqlens_q": 2 * CU}, ValueError, "^cu_seqlens_q: 6 at its end; accepted are up to 3, the tokens of q$"),
        ({"cu_seqlens_k_new": 2 * CU}, ValueError, "^cu_seqlens_k_new: 6 at its end; accepted are up to 3, the tokens of k$"),
        ({"cache_seqlens": ints(3)}, ValueError, r"^cache_seqlens: shape \(1,\); accepted is \(3,\), as q has batches$"),
        ({"cache_seqlens": ints(3)[0]}, ValueError, r"^cache_seqlens: shape \(\); accepted is \(3,\), as q has batches$"),
        ({"cache_seqlens": ints(3, 0)}, ValueError, r"^cache_seqlens: shape \(2,\); accepted is \(3,\), as q has batches$"),
        ({"cu_seqlens_k_new": CU[:3]}, ValueError, r"^cu_seqlens_k_new: shape \(3,\); accepted is \(4,\), as q has batches$"),
        ({"cu_seqlens_q": None}, ValueError, r"^q: shape \(3, 4, 16\); accepted is \(batches, tokens, heads, head dimension\)"),
        ({"q": Q[None]}, ValueError, r"^q: shape \(1, 3, 4, 16\); accepted is \(tokens, heads, head dimension\) with cu_seqlens_q"),
        ({"k": K[None]}, ValueError, r"^k: shape \(1, 3, 2, 16\); accepted is \(tokens, heads, head dimension\) with cu_seqlens_k_new"),
        ({"v": V[:2]}, ValueError, r"^v: shape \(2, 2, 24\); accepted is \(3, 2, 24\)$"),
        ({"v": None, "k": None}, ValueError, "^k: None beside cu_seqlens_k_new; accepted are k and v, new keys, or no cu_seqlens_k_new$"),
        ({"max_seqlen_q": 0.5}, TypeError, "^max_seqlen_q: float; accepted is an integer"),
        (
            {"cu_seqlens_q": torch.tensor([0, 3, 3, 3]).int()},
            ValueError,
            r"^cu_seqlens_q: a sequence of 3 .*max_seqlen_q|^cu_seqlens_q|^max",
        ),
        ({"cache_seqlens": CU[:3] + 14}, ValueError, r"^cache_seqlens: 16 at \[2\]; accepted are 0 to 15, a cache has room for 16 keys"),
        ({"cache_seqlens": 16}, ValueError, r"^cache_seqlens: 16 at \[0\]; accepted are 0 to 15"),
        ({"cache_leftpad": CU[:3] + 7}, ValueError, r"^cache_leftpad: 7 at \[0\]; accepted are 0 to 4, where the sequence ends$"),
        ({"cache_batch_idx": CU[1:]}, ValueError, r"^cache_batch_idx: 3 at \[2\]; accepted are 0 to 2, a table of 3 rows$"),
        ({"window_size": 3}, TypeError, "^window_size: 3; accepted is"),
        ({"window": (3, 0)}, TypeError, "unexpected keyword argument 'window'; did you mean window_size?"),
        ({"block_table": CU}, TypeError, "unexpected keyword argument 'block_table'$"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_refused_is_named_and_nothing_is_written(wrong, error, message):
    k_cache, v_cache, given, _ = the_cache("pages")
    before = k_cache.clone(), v_cache.clone()
    good = {"q": Q, "k": K, "v": V, "cache_seqlens": ints(3, 0, 5), "cu_seqlens_q": CU, "cu_seqlens_k_new": CU, "max_seqlen_q": 1}
    with pytest.raises(error, match=message) as raised:
        flash_attn_3.flash_attn_with_kvcache(**{"k_cache": k_cache, "v_cache": v_cache, **given, **good, **wrong})
    assert len(str(raised.value).splitlines()) == (4 if "q" in wrong and wrong["q"].element_size() == 1 else 1)
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seqused_q": CU}, r"^seqused_q: shape \(4,\); accepted is \(3,\), as q has batches$"),
        ({"seqused_q": CU[:3].float()}, r"^seqused_q: dtype torch.float32; accepted is torch.int32; seqused_q\.int\(\)$"),
        ({"seqused_q": CU[:3].to("meta")}, f"^seqused_q: on device meta; accepted is {DEVICE}(:0)?, where q lies$"),
        ({"seqused_q": [1, 1, 1]}, "^seqused_q: list; accepted is a torch.Tensor$"),
        ({"seqused_k": CU}, r"^seqused_k: shape \(4\); accepted is \(B\) = \(3\)$"),
        ({"seqused_k": CU, "attention_chunk": 2}, r"^seqused_k: shape \(4\); accepted is \(B\) = \(3\)$"),
        ({"cu_seqlens_q": CU[None], "attention_chunk": 2}, r"^cu_seqlens_q: rank 2; accepted is rank 1"),
        ({"q": Q[0, 0], "attention_chunk": 2}, r"^q: shape \(16,\); accepted is"),
        ({"seqused_q": CU[:3] // 2, "seqused_k": CU}, r"^seqused_k: shape \(4,\); accepted is \(3,\), as q has batches$"),
        ({"seqused_q": CU[:3] // 2, "cu_seqlens_k": CU[:3]}, r"^cu_seqlens_k: shape \(3,\); accepted is \(4,\), as cu_seqlens_q has$"),
        ({"q_descale": [1.0]}, r"^q_descale: list; accepted is a torch.Tensor, float32 \(B, Hkv\), or None$"),
        ({"qv": Q}, r"^qv: torch.float32 of shape \(3, 4, 16\); accepted is torch.float32 of shape \(3, 4, 24\), as q and v have$"),
        ({"causal": 3}, "^causal: int 3; accepted is True or False, or 1 or 0$"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_refused_of_packed_sequences(wrong, message):
    good = {"q": Q, "k": K, "v": V, "cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 1, "max_seqlen_k": 1}
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message) as raised:
        flash_attn_3.flash_attn_varlen_func(**good | wrong)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.skipif(DEVICE != "cpu", reason="numbers in device memory are not read")
def test_more_queries_used_than_there_are():
    with pytest.raises(ValueError, match=r"^seqused_q: 2 at \[1\]; accepted are 0 to 1, the tokens of the sequence$"):
        flash_attn_3.flash_attn_varlen_func(Q, K, V, CU, CU, 1, 1, ints(1, 2, 1))


def test_compiled():
    k_cache, v_cache, given, _ = the_cache("pages")
    given |= {"cu_seqlens_q": CU, "cu_seqlens_k_new": CU, "max_seqlen_q": 1, "causal": True}
    q, k, v = torch.randn(3, H, D), torch.randn(3, HKV, D), torch.randn(3, HKV, DV)

    def step(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, used: Tensor) -> Tensor:
        return flash_attn_3.flash_attn_with_kvcache(2 * q, k_cache, v_cache, k, v, cache_seqlens=used, **given)

    results = []
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        caches = k_cache.clone(), v_cache.clone()
        results.append((call(q, k, v, *caches, ints(3, 0, 5)), *caches))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_sequences_of_used_queries_are_counted_as_the_caller_does():
    q, k = torch.randn(4, 2, 16), torch.randn(12, 2, 16)
    cu_q, cu_k, used = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 4], [0, 4, 12], [1, 2]))
    with pytest.raises(ValueError, match="cu_seqlens_k: sequence 1 has 8 tokens; accepted is at most max_seqlen_k = 4"):
        flash_attn_3.flash_attn_varlen_func(q, k, k, cu_q, cu_k, 2, 4, seqused_q=used)
    with pytest.raises(ValueError, match="^cu_seqlens_k: 12 at its end; accepted are up to 11, the tokens of k$"):
        flash_attn_3.flash_attn_varlen_func(q, k[1:], k[1:], cu_q, cu_k, 2, 8, seqused_q=used)


# --- FP8 ----------------------------------------------------------------------------------------------------------------------------------

FP8 = torch.float8_e4m3fn


def in_eight_bits(*shapes: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """FP8 tensors (B, S, heads, D), and descales (B, HKV), the largest of which is 2."""
    return [torch.randn(*shape).to(FP8) for shape in shapes], [torch.rand(shapes[0][0], HKV) + 1 for _ in shapes]


def dequantised(x: Tensor, descale: Tensor) -> Tensor:
    return x.double() * descale.double().repeat_interleave(x.shape[2] // HKV, 1)[:, None, :, None]


# On Hopper P of FP8 products is rounded to E4M3.
ERROR_OF_FP8 = 2**-4 if ON_GPU else 2**-6


def assert_close_to(got: Tensor, expected: Tensor, error: float = 2**-6) -> None:
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=error * float(expected[expected.isfinite()].abs().max()))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (5, 2), "softcap": 3.0}, CHUNKS[0]], ids=str)
def test_fp8(options):
    (q, k, v), descales = in_eight_bits((2, 9, H, D), (2, 13, HKV, D), (2, 13, HKV, DV))
    out, lse = formulas(*map(dequantised, (q, k, v), descales), **options)
    given: dict[str, Any] = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True)) | options
    found = flash_attn_3.flash_attn_func(q, k, v, **given, return_attn_probs=True)
    assert found[0].dtype == torch.bfloat16
    assert_close_to(found[0], out, ERROR_OF_FP8)
    assert_close_to(found[1], lse)
    column_major = v.transpose(1, 3).contiguous().transpose(1, 3)
    assert torch.equal(flash_attn_3.flash_attn_func(q, k, column_major, **given), found[0])
    grouped = torch.cat([q, k[:, :9], v[:, :9, :, :D]], 2)
    out, _ = formulas(*map(dequantised, grouped.split([H, HKV, HKV], 2), descales), **options)
    assert_close_to(flash_attn_3.flash_attn_qkvpacked_func(grouped, num_heads_q=H, **given), out, ERROR_OF_FP8)
    (each,) = {dequantised(x, torch.ones(2, HKV)).float().to(torch.bfloat16) for x in (q,)}
    plain = flash_attn_3.flash_attn_func(each, *(x.to(torch.bfloat16) for x in (k, v)), **options)
    assert_close_to(flash_attn_3.flash_attn_func(q, k, v, **options), plain.double(), ERROR_OF_FP8 if ON_GPU else 0.0)  # they are exact
    assert torch.equal(flash_attn_3.flash_attn_func(each, *(x.to(torch.bfloat16) for x in (k, v)), **given), plain)  # without effect


@pytest.mark.parametrize("used", [True, False])
def test_packed_fp8(used):
    (q, k, v), descales = in_eight_bits((2, 5, H, D), (2, 7, HKV, D), (2, 7, HKV, DV))
    cu_q, cu_k = ints(0, 2, 7), ints(0, 7, 13)
    packed_q, packed_k, packed_v = torch.cat([q[0, :2], q[1]]), torch.cat([k[0], k[1, :6]]), torch.cat([v[0], v[1, :6]])
    more = {"seqused_q": ints(2, 3), "seqused_k": ints(7, 4)} if used else {}
    given = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    found = flash_attn_3.flash_attn_varlen_func(packed_q, packed_k, packed_v, cu_q, cu_k, 5, 7, causal=True, **more, **given)
    for b, (first, count, keys) in enumerate([(0, 2, 7), (2, 3, 4) if used else (2, 5, 6)]):
        of_b = [dequantised(x, descale)[b : b + 1] for x, descale in zip((q, k, v), descales, strict=True)]
        out, _ = formulas(of_b[0][:, :count], of_b[1][:, :keys], of_b[2][:, :keys], causal=True)
        assert_close_to(found[first : first + count], out[0], ERROR_OF_FP8)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", ["whole", "pages", "rows", "leftpad", "pages, rows and leftpad"])
@pytest.mark.parametrize("is_new", [True, False], ids=["new keys", "no new keys"])
def test_fp8_cache(kind, packed, is_new):
    torch.manual_seed(0)
    k_cache, v_cache, given, places = the_cache(kind)
    k_cache, v_cache = k_cache.to(FP8), v_cache.to(FP8)
    (q, k, v), descales = in_eight_bits((3, 2, H, D), (3, 2, HKV, D), (3, 2, HKV, DV))
    angles = torch.rand(40, 5)
    turn = [x.to(FP8) for x in (angles.cos(), angles.sin())]
    expected = k_cache.clone(), v_cache.clone()
    outs, lses = [], []
    lengths = [max(length, 2) for length in LENGTHS]  # the cache has keys where there are no new ones
    for b, (begin, rows) in enumerate(places):
        end = lengths[b] + 2 * is_new
        of_q = q[b : b + 1].bfloat16()
        if is_new:
            place = lengths[b] + torch.arange(2)[None]
            turned = [rotate(x[b : b + 1].float(), *(table.float() for table in turn), place, False) for x in (q, k)]
            of_q = turned[0]
            for cache, x in zip(expected, (turned[1].to(FP8), v[b : b + 1]), strict=True):
                cache.flatten(0, 1)[rows[lengths[b] : end]] = x[0]
        keys = [cache.flatten(0, 1)[rows[begin:end]][None] for cache in expected]
        out, lse = formulas(*(dequantised(x, of[b : b + 1]) for x, of in zip((of_q, *keys), descales, strict=True)), causal=True)
        outs.append(out)
        lses.append(lse)
    given |= {"cache_seqlens": ints(*lengths), "causal": True, "return_softmax_lse": True, "rotary_interleaved": False}
    given |= dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    if is_new:
        given |= {"k": k, "v": v, "rotary_cos": turn[0], "rotary_sin": turn[1]}
    if packed:
        given |= {"cu_seqlens_q": ints(0, 2, 4, 6), "max_seqlen_q": 2}
    if packed and is_new:
        given |= {"k": k.flatten(0, 1), "v": v.flatten(0, 1), "cu_seqlens_k_new": ints(0, 2, 4, 6)}
    out, lse = flash_attn_3.flash_attn_with_kvcache(q.flatten(0, 1) if packed else q, k_cache, v_cache, **given)
    assert out.dtype == torch.bfloat16
    assert_close_to(out.view(3, 2, H, DV), torch.cat(outs))
    assert_close_to(lse.view(H, 3, 2).transpose(0, 1) if packed else lse, torch.cat(lses))
    assert torch.equal(k_cache.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(v_cache.view(torch.uint8), expected[1].view(torch.uint8))


def test_the_backward_refuses_fp8():
    (q, k, v), _ = in_eight_bits((1, 3, H, D), (1, 3, HKV, D), (1, 3, HKV, D))
    for name in "qkv":
        given = {n: x.detach().requires_grad_(n == name) for n, x in (("q", q), ("k", k), ("v", v))}
        out = flash_attn_3.flash_attn_func(**given)
        message = f"^{name}: float8_e4m3fn has no gradient; accepted is a forward under torch.no_grad"
        with pytest.raises(NotImplementedError, match=message):
            out.sum().backward()


def test_compiled_fp8():
    (q, k, v), (descale, _, _) = in_eight_bits((2, 4, H, D), (2, 4, HKV, D), (2, 4, HKV, D))
    given: dict[str, Any] = dict.fromkeys(("q_descale", "k_descale", "v_descale"), descale)
    torch.compiler.reset()
    compiled = torch.compile(lambda *x: flash_attn_3.flash_attn_func(*x, **given), fullgraph=True, backend="aot_eager")
    q.requires_grad_()
    out = compiled(q, k, v)
    assert torch.equal(out, flash_attn_3.flash_attn_func(q, k, v, **given))
    with pytest.raises(NotImplementedError, match="^q: float8_e4m3fn has no gradient; accepted is"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": torch.zeros(2, 3, HKV, D)}, "^k: dtype torch.float32; accepted is torch.float8_e4m3fn, as q has$"),
        ({"k_descale": torch.ones(2, H)}, r"^k_descale: shape \(2, 4\); accepted is \(2, 2\): the sequences, the heads of k$"),
        ({"v_descale": torch.ones(2, HKV).half()}, r"^v_descale: torch.float16 of shape \(2, 2\); accepted is float32 \(B, Hkv\)$"),
        ({"v_descale": torch.ones(2, HKV, device="meta")}, f"^v_descale: on device meta; accepted is {DEVICE}(:0)?, where q lies$"),
        ({"qv": torch.zeros(2, 3, H, D).to(FP8)}, "^qv: given beside q of torch.float8_e4m3fn; accepted is None$"),
        ({"q": torch.zeros(3, H, D).to(FP8)}, r"^q: shape \(3, 4, 16\); accepted is \(batches, tokens, heads, head dimension\)$"),
        ({"v": torch.zeros(2, 4, HKV, D).to(FP8)}, r"^v: shape \(2, 4, 2, 16\); accepted is"),
        ({"k": None}, "^k: NoneType; accepted is a torch.Tensor$"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_refused_of_fp8(wrong, message):
    (q, k, v), _ = in_eight_bits((2, 3, H, D), (2, 3, HKV, D), (2, 3, HKV, D))
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        flash_attn_3.flash_attn_func(**{"q": q, "k": k, "v": v} | wrong)
    assert len(str(raised.value).splitlines()) == 1


# --- qv, parts and metadata ---------------------------------------------------------------------------------------------------------------


def joined(q: Tensor, k: Tensor, v: Tensor, qv: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return formulas(torch.cat([q, qv], -1), torch.cat([k, v], -1), v, **options)


def test_qv():
    q, k, v = inputs(2, 5, H, D, kv=(9, HKV))
    v, qv = torch.randn(2, 9, HKV, DV, requires_grad=True), torch.randn(2, 5, H, DV, requires_grad=True)
    out, lse = joined(q, k, v, qv, causal=True)
    found = flash_attn_3.flash_attn_func(q, k, v, qv=qv, causal=True, return_attn_probs=True)
    assert_close(found[0], out)
    assert_close(found[1], lse)
    leaves = q, k, v, qv
    for got, wanted in zip(torch.autograd.grad(found[0].sum(), leaves), torch.autograd.grad(out.sum(), leaves), strict=True):
        assert_close(got, wanted.double())
    cu_q, cu_k = ints(0, 5, 10), ints(0, 9, 18)
    packed = flash_attn_3.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), cu_q, cu_k, 5, 9, qv=qv.flatten(0, 1), causal=True)
    assert_close(packed.view(2, 5, H, DV), out)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", ["whole", "pages", "leftpad"])
@pytest.mark.parametrize("neighbours", [True, False], ids=["one tensor", "two tensors"])
def test_qv_of_a_cache(kind, packed, neighbours):
    k_cache, v_cache, given, places = the_cache(kind)
    if neighbours:
        v_cache, k_cache = torch.cat([v_cache, k_cache], -1).split([DV, D], -1)
    q, qv, k, v = torch.randn(3, 2, H, D), torch.randn(3, 2, H, DV), torch.randn(3, 2, HKV, D), torch.randn(3, 2, HKV, DV)
    expected = k_cache.clone(), v_cache.clone()
    outs = []
    for b, (begin, rows) in enumerate(places):
        end = LENGTHS[b] + 2
        for cache, x in zip(expected, (k, v), strict=True):
            cache.flatten(0, 1)[rows[LENGTHS[b] : end]] = x[b]
        keys = [cache.flatten(0, 1)[rows[begin:end]][None] for cache in expected]
        outs.append(joined(q[b : b + 1], *keys, qv[b : b + 1], causal=True)[0])
    given |= {"k": k, "v": v, "cache_seqlens": ints(*LENGTHS), "causal": True}
    if neighbours:
        qv, q = torch.cat([qv, q], -1).split([DV, D], -1)
    if packed:
        given |= {"cu_seqlens_q": ints(0, 2, 4, 6), "max_seqlen_q": 2}
        q, qv = q.flatten(0, 1), qv.flatten(0, 1)
    out = flash_attn_3.flash_attn_with_kvcache(q, k_cache, v_cache, qv=qv, **given)
    assert_close(out.view(3, 2, H, DV), torch.cat(outs))
    assert_close(k_cache, expected[0].double())


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_parts_are_combined(packed):
    out = torch.randn(6, 2, H, 5, D).transpose(2, 3)[:5]
    lse = torch.randn(5, 2, 2 * H, 5).mT[..., :H]
    lse[2:, :1] = -torch.inf
    out[2:, :1] = torch.nan
    lse[:, 1, 3, 2] = -torch.inf
    if packed:
        out, lse = out[:, 0], lse[:, 0]
    weights = torch.softmax(lse.double(), 0).nan_to_num()
    wanted, wanted_lse = (weights[..., None] * out.double().nan_to_num()).sum(0), torch.logsumexp(lse.double(), 0)
    found, found_lse = flash_attn_3.flash_attn_combine(out, lse)
    assert found.dtype == torch.float32
    assert_close(found, wanted)
    assert_close(found_lse, wanted_lse)
    assert torch.equal(flash_attn_3.flash_attn_combine(out, lse, out_dtype=torch.bfloat16)[0], found.bfloat16())
    into = torch.empty(found.shape, dtype=torch.float16)
    assert flash_attn_3.flash_attn_combine(out, lse, into)[0] is into
    assert torch.equal(into, found.half())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"out_partial": torch.zeros(3, 4)},
            r"^out_partial: torch.float32 of shape \(3, 4\); accepted is floating point \(splits, B, S, H, D\)",
        ),
        ({"out_partial": torch.zeros(0, 2, 5, H, D)}, r"^out_partial: .* with one split or more$"),
        ({"lse_partial": torch.zeros(2, 2, H, 5)}, r"^lse_partial: .*; accepted is float32 or float64 \(2, 2, 5, 4\), as out_partial has$"),
        ({"lse_partial": 3}, "^lse_partial: int; accepted is a torch.Tensor$"),
        ({"out_dtype": torch.int32}, "^out_dtype: torch.int32; accepted is a floating-point torch.dtype, or None$"),
        (
            {"out": torch.zeros(2, 5, H, D + 1)},
            r"^out: torch.float32 of shape \(2, 5, 4, 17\); accepted is any floating-point dtype \(2, 5, 4, 16\)$",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_refused_of_parts(wrong, message):
    good = {"out_partial": torch.zeros(2, 2, 5, H, D), "lse_partial": torch.zeros(2, 2, 5, H)}
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        flash_attn_3.flash_attn_combine(**good | wrong)
    assert len(str(raised.value).splitlines()) == 1


def test_metadata_has_no_effect():
    k_cache, v_cache, given, _ = the_cache("pages")
    given |= {"cache_seqlens": ints(3, 1, 5), "rotary_seqlens": ints(1, 2, 3)}  # there are no tables to turn by
    q = torch.randn(3, 2, H, D)
    metadata = flash_attn_3.get_scheduler_metadata(3, 2, ROOM, H, HKV, D, given["cache_seqlens"], page_size=PAGE, causal=True)
    assert metadata.dtype == torch.int32
    found = flash_attn_3.flash_attn_with_kvcache(q, k_cache, v_cache, **given, scheduler_metadata=metadata)
    assert torch.equal(found, flash_attn_3.flash_attn_with_kvcache(q, k_cache, v_cache, **{**given, "rotary_seqlens": None}))
    with pytest.raises(TypeError, match="^cache_seqlens: int; accepted is a torch.Tensor"):
        flash_attn_3.get_scheduler_metadata(3, 2, ROOM, H, HKV, D, 3)
