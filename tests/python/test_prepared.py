"""Repeated calls: they take a shorter path, with no difference but the time."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

import strobe
from strobe import _abi, _call, _prepared


def qkv(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*(shape or (2, 4, 40, 16)), generator=generator).to(dtype) for _ in range(3)]


def expected(q, k, v, **options):
    """The result of the full path: NumPy's calls are never prepared."""
    given = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    return torch.from_numpy(strobe.attention(q.numpy(), k.numpy(), v.numpy(), **given))


@pytest.fixture
def short_ways(monkeypatch):
    """How many calls took the short path."""
    counts = {"found": 0}
    before_parsing = _call.BEFORE_PARSING[torch.Tensor]

    def counted(*arguments):
        found = before_parsing(*arguments)
        counts["found"] += found is not None
        return found

    monkeypatch.setitem(_call.BEFORE_PARSING, torch.Tensor, counted)
    return counts


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (7, None), "alignment": "top_left"},
    "scale and tile": {"scale": 0.3, "tile_q": 16, "softcap": 3.0},
    "seeded rng": {"dropout": 0.3, "rng": torch.tensor([3, 4])},
    "seed": {"dropout": 0.3, "seed": 3, "offset": 2**64 - 1},
    "bias": {"bias": torch.randn(4, 40, 40)},
    "mask": {"mask": torch.rand(40) < 0.7},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_second_call_takes_the_short_way_to_the_same_result(name, short_ways):
    options = OPTIONS[name]
    for seed in range(3):
        q, k, v = qkv(seed)
        assert torch.equal(strobe.attention(q, k, v, **options), expected(q, k, v, **options))
    assert short_ways["found"] >= 2


@pytest.mark.parametrize("tracked", [False, True])
def test_a_call_is_made_ready_when_it_comes_again(tracked, monkeypatch):
    """A call is prepared once for each direction: the first one of a kind when it comes again, others of other sizes at once, all but one
    of them in C."""
    made = []
    prepare = _call.Structs.prepare
    monkeypatch.setattr(_call.Structs, "prepare", lambda call, direction: [made.append(direction), prepare(call, direction)][1])
    monkeypatch.setattr(_prepared, "CALLS", _prepared.Memory())

    def step(length):
        q, k, v = (x.requires_grad_(tracked) for x in qkv(1, 1, 2, length, 16))
        out = strobe.attention(q, k, v)
        return [out, *torch.autograd.grad(out.sum(), (q, k, v))] if tracked else [out]

    both = [_abi.FORWARD, _abi.BACKWARD][: 1 + tracked]
    first = [step(3)]
    assert not made
    first += [step(length) for length in range(4, 9)]
    assert made == both
    for _ in range(3):
        for length, expected_results in enumerate(first, 3):
            assert all(torch.equal(x, y) for x, y in zip(step(length), expected_results, strict=True))
    assert made == [*both, _abi.FORWARD]


def frames(call: Callable[[], object], *names: str) -> int:
    """The number of Python frames between `call` and the C function that has one of these names."""
    found: list[int] = []

    def profile(frame, event, function):
        if event == "c_call" and getattr(function, "__name__", "") in (names or ("strobe_forward", "strobe_backward")):
            depth = 0
            while frame is not None and frame.f_code is not call.__code__:
                depth, frame = depth + 1, frame.f_back
            found.append(depth)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    (depth,) = found
    return depth


def test_a_call_passes_few_layers(monkeypatch):
    """docs/architecture.md has these numbers."""
    monkeypatch.setattr(_prepared, "CALLS", _prepared.Memory())
    q, k, v = qkv(9)
    tracked = [x.clone().requires_grad_() for x in (q, k, v)]
    assert frames(lambda: strobe.attention(q.numpy(), k.numpy(), v.numpy())) == 3
    assert frames(lambda: strobe.attention(q, k, v)) == 7
    assert frames(lambda: strobe.attention(*tracked, causal=True)) == 9
    out, lse = strobe.attention(q, k, v, return_lse=True)
    assert frames(lambda: strobe.attention_backward(q, q, k, v, out, lse)) == 7
    for _ in range(2):
        strobe.attention(q, k, v)
        strobe.attention(*tracked, causal=True)
    assert frames(lambda: strobe.attention(q, k, v), "attention") == 2  # one frame is eager.c's
    assert frames(lambda: strobe.attention(*tracked, causal=True), "run") == 3  # PreparedCall.run, which autograd's function calls


def test_each_call_has_results_of_its_own():
    q, k, v = qkv(1)
    first, second = (strobe.attention(q, k, v, return_lse=True) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        assert x.data_ptr() != y.data_ptr()
        assert torch.equal(x, y)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_strides_and_layouts_are_told_apart(layout):
    for seed in range(2):
        q, k, v = qkv(seed)
        turned = [x.transpose(1, 2) if layout == "bshd" else x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        out = strobe.attention(*turned, layout=layout)
        out = out.transpose(1, 2) if layout == "bshd" else out
        assert torch.equal(out, expected(q, k, v))


def test_addresses_off_16_bytes():
    memory = torch.randn(3, 2 * 4 * 40 * 16 + 1)
    for first in (0, 1, 0, 1):
        q, k, v = (x[first : first + 2 * 4 * 40 * 16].view(2, 4, 40, 16) for x in memory)
        assert torch.equal(strobe.attention(q, k, v), expected(q, k, v))


def test_gradients_are_tracked_where_they_are_wanted(short_ways):
    q, k, v = qkv(3)
    tracked = [x.clone().requires_grad_() for x in (q, k, v)]
    results = []
    for _ in range(3):
        with torch.no_grad():
            assert not strobe.attention(*tracked).requires_grad
        assert not strobe.attention(q, k, v).requires_grad
        out = strobe.attention(*tracked)
        assert out.requires_grad
        results.append(torch.autograd.grad(out.sum(), tracked))
    assert short_ways["found"] >= 6
    assert all(torch.equal(x, y) for result in results[1:] for x, y in zip(result, results[0], strict=True))


def test_slopes_that_require_a_gradient_are_refused_every_time():
    q, k, v = (x.requires_grad_() for x in qkv(3))
    slopes = torch.rand(4, requires_grad=True)
    with torch.no_grad():
        for _ in range(2):
            strobe.attention(q, k, v, alibi_slopes=slopes)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="alibi_slopes: requires grad"):
            strobe.attention(q, k, v, alibi_slopes=slopes)


def test_wrong_kinds_are_told_from_right_ones_that_equal_them():
    q, k, v = qkv(4)
    for _ in range(2):
        strobe.attention(q, k, v, causal=True, window=(1, 2))
    with pytest.raises(TypeError, match="causal: int 1"):
        strobe.attention(q, k, v, causal=1, window=(1, 2))
    with pytest.raises(TypeError, match="window"):
        strobe.attention(q, k, v, causal=True, window=(1.0, 2))
    with pytest.raises(TypeError, match="return_lse"):
        strobe.attention(q, k, v, causal=True, window=(1, 2), return_lse=1)


def test_host_memory_is_checked_every_time():
    q, k, v = qkv(5, 20, 2, 16)
    cu = torch.tensor([0, 8, 20], dtype=torch.int32)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 12, "max_seqlen_k": 12}
    for _ in range(2):
        strobe.attention(q, k, v, **options)
    cu[1] = 2
    with pytest.raises(ValueError, match="cu_seqlens_q: .*18"):
        strobe.attention(q, k, v, **options)


def test_dropout_draws_a_new_mask_every_time():
    q, k, v = qkv(6)
    outs = [strobe.attention(q, k, v, dropout=0.5) for _ in range(3)]
    assert not torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[1], outs[2])


def test_autocast_is_heeded_every_time():
    q, k, v = qkv(7)
    for _ in range(2):
        assert strobe.attention(q, k, v).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert strobe.attention(q, k, v).dtype == torch.bfloat16


def test_the_number_of_threads_is_heeded():
    q, k, v = qkv(8)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(strobe.attention(q, k, v), expected(q, k, v))
    finally:
        torch.set_num_threads(before)


def test_what_is_kept_is_bounded():
    """Calls that come only once, as lengths of packed sequences do, are forgotten, and constantly repeated ones are not."""
    memory, seen = _prepared.Memory(), [object() for n in range(5001)]
    memory.keep(b"fixed", seen[-1])
    for n in range(5000):
        memory.keep(b"%d" % n, seen[n])
        assert memory.get(b"%d" % n) is seen[n]
        if n % 100 == 0:
            assert memory.get(b"fixed") is seen[-1]
    assert sum(memory.get(b"%d" % n) is not None for n in range(5000)) <= _prepared._MOST
