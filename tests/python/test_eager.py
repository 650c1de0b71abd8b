"""python/glue/eager.c: which calls of torch tensors count as the same call, which take the fast path, and that the path leaves nothing
behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import strobe
from strobe import _abi, _autograd, _eager, _prepared
from strobe._call import Call, Structs


@pytest.fixture(autouse=True, params=["by the exchange API", "by attributes"])
def reader(request):
    """How tensors are read: PyTorch before 2.10 has no exchange API."""
    wanted = request.param == "by attributes"
    if _eager.by_attributes(wanted) != wanted:
        pytest.skip("this PyTorch has no DLPack exchange API")
    yield
    _eager.by_attributes(False)


@pytest.fixture
def short_ways(monkeypatch):
    """Counts the forwards and backwards that C found."""
    counts = {"attention": 0, "gradients": 0}

    def counted(name):
        function = getattr(_eager, name)

        def call(*arguments):
            found = function(*arguments)
            counts[name] += found is not None
            return found

        return call

    for name in counts:
        monkeypatch.setattr(_eager, name, counted(name))
    return counts


def qkv(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(*(shape or (1, 2, 20, 16)), dtype=dtype).requires_grad_(grad) for _ in range(3)]


def key(q: Tensor, k: Tensor, v: Tensor, return_lse: object = False, **options: Any) -> bytes | None:
    return _eager.attention_key(q, k, v, return_lse, options)


def step(q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None, **options: Any) -> list[Tensor]:
    out = strobe.attention(q, k, v, **options)
    wanted = [x for x in (q, k, v) if x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, torch.ones_like(out) if dout is None else dout)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(found, expected, strict=True))


# Equal calls, and different ones


def test_a_key_says_all_that_decides_what_runs():
    q, k, v = qkv()
    longer, half = qkv(1, 2, 21, 16), qkv(dtype=torch.float16)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    off = torch.randn(q.numel() + 1)[1:].view(q.shape)
    bias, flat = torch.randn(20, 20), torch.randn(1, 20)
    keys = [
        key(q, k, v),
        key(q, k, v, True),
        key(*longer),
        key(*half),
        key(*turned),
        key(off, k, v),
        *(key(q, k, v, causal=x) for x in (True, False, 1, 1.0, "1", None)),
        *(key(q, k, v, window=x) for x in ((1, 2), (1, None), (1.0, 2), (True, 2), (1,), ())),
        *(key(q, k, v, seed=x) for x in (2**63 - 1, 2**63, 2**64 - 1, -1)),
        key(q, k, v, a="b"),
        key(q, k, v, ab=""),
        *(key(q, k, v, bias=x) for x in (bias, flat, bias.mT, bias.double())),
        key(q, k, v, mask=bias),
        key(q, k, v, bias=bias, causal=True),
        *(key(*(x.clone().requires_grad_(n == i) for n, x in enumerate((q, k, v)))) for i in range(3)),
    ]
    with torch.no_grad():
        keys.append(key(q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        keys.append(key(q, k, v))
    with torch.autocast("cpu", torch.float16):
        keys.append(key(q, k, v))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    keys.append(key(q, k, v))
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    keys.append(key(q, k, v))
    torch.use_deterministic_algorithms(False)
    assert None not in keys
    assert len({*keys}) == len(keys)


def test_a_key_says_nothing_of_addresses_and_values():
    assert key(*qkv(), bias=torch.randn(20, 20), seed=2**63) == key(*qkv(), bias=torch.randn(20, 20), seed=2**63)
    parameters = [torch.nn.Parameter(x) for x in qkv()]
    assert key(*parameters) == key(*qkv(grad=True))
    with torch.no_grad():
        assert key(*parameters) == key(*qkv())


class Subclass(Tensor):
    pass


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str] = []

    def __torch_dispatch__(self, function, kinds, arguments=(), keywords=None):
        self.functions.append(str(function))
        return function(*arguments, **(keywords or {}))


ODD = {
    "subclass": lambda x: x.as_subclass(Subclass),
    "sparse": Tensor.to_sparse,
    "meta": lambda x: x.to("meta"),
    "nested": lambda x: torch.nested.nested_tensor([x]),
    "negation": lambda x: torch.complex(x, x).conj().imag,
    "zeros that nobody wrote": lambda x: torch._efficientzerotensor(x.shape),
    "mkldnn": Tensor.to_mkldnn,
    "no tensor": lambda x: x.numpy(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("odd", ODD)
def test_what_is_more_than_its_memory_has_no_key(odd):
    q, k, v = qkv()
    other = ODD[odd](q)
    assert key(other, k, v) is None
    assert key(q, k, other) is None
    assert key(q, k, v, bias=other) is None


def test_other_objects_have_no_key():
    q, k, v = qkv()
    for x in ([1, 2], (1, [2]), {}, object(), 2**64, -(2**63) - 1, "\ud800", (1,) * 600):
        assert key(q, k, v, window=x) is None
    assert key(q, k, v, 1) is None
    assert key(q, k, v, **{f"n{n}": q for n in range(40)}) is None
    assert _eager.attention({}, q, k, v, False, []) is None
    assert _eager.key(b"", [q], {}, {}) is None
    assert _eager.key(b"", (q,), [], {}) is None


def test_long_texts_have_a_key():
    """As texts of functions are: by a digest, on which each byte has a part."""
    q, k, v = qkv()
    text = "".join(map(chr, range(40, 100))) * 100 + "end"
    found = key(q, k, v, window=text)
    assert found == key(q, k, v, window="".join([*text]))
    assert len(found) < 400
    for n in (0, 7, 8, 9, 3000, len(text) - 4, len(text) - 1):
        assert key(q, k, v, window=f"{text[:n]}!{text[n + 1 :]}") != found
    assert key(q, k, v, window=text + "\0") != found


@pytest.mark.skipif(sys.platform != "linux" or torch.__version__ < "2.10", reason="elsewhere a tensor's methods are asked")
def test_the_shim_is_found():
    """Without the shim a repeated call of three tensors takes at least a tenth longer."""
    assert _eager.HAS_SHIM


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_a_call_that_comes_again_sees_that_a_storage_was_shortened(grad, view, short_ways):
    """The check does not depend on earlier calls, and the call uses the fast path again when the storage is long enough."""
    memory = torch.randn(3, 1, 2, 20, 16)
    for _ in range(2):
        for n in range(3):
            q, k, v = qkv(grad=grad)
            whole = memory.clone()
            k = whole[n] if view else whole[n].clone()
            expected = strobe.attention(q, k, v)
            before = short_ways["attention"]
            assert torch.equal(strobe.attention(q, k, v), expected)
            assert short_ways["attention"] > before
            needed = (n + 1) * 2560 if view else 2560
            for size in (needed + 1000, needed, needed - 1, needed // 2, 4, 0):
                k.untyped_storage().resize_(size)
                assert (key(q, k, v) is not None) == (size >= needed)
                if size >= needed:
                    assert torch.equal(strobe.attention(q, k, v), expected)
                    continue
                with pytest.raises(ValueError, match=f"^k: its numbers reach to byte {needed} of a storage of {size}; accepted"):
                    strobe.attention(q, k, v)
                with pytest.raises(ValueError, match=f"^bias: its numbers reach to byte {needed} of a storage of {size}; accepted"):
                    strobe.attention(q, q, v, bias=k)


def test_a_backward_that_comes_again_sees_that_a_storage_was_shortened():
    for n in range(4):
        q, k, v = qkv(grad=True)
        fresh = v.detach().clone()
        out = strobe.attention(q, k, fresh)
        if n == 3:
            fresh.untyped_storage().resize_(100)
            with pytest.raises(ValueError, match="^v: its numbers reach to byte 2560 of a storage of 100; accepted"):
                out.sum().backward()
        else:
            out.sum().backward()


def test_who_wants_to_see_a_call_sees_it():
    q, k, v = qkv(grad=True)
    out = None
    for _ in range(3):
        out = strobe.attention(q, k, v)
    with Watching() as watching:
        assert key(q, k, v) is None
        strobe.attention(q, k, v)
        torch.autograd.grad(out.sum(), (q, k, v))
    assert any("strobe.attention_forward" in name for name in watching.functions)
    assert any("strobe.attention_backward" in name for name in watching.functions)
    with torch.autograd.forward_ad.dual_level():
        assert key(q, k, v) is None
    seen: list[bytes | None] = []
    torch.func.vmap(lambda x: (seen.append(key(q, k, v)), x)[1])(torch.zeros(2))
    assert seen == [None]
    assert key(q, k, v) is not None


def test_a_repeated_call_has_second_derivatives():
    q, k, v = qkv(grad=True)
    found = []
    for _ in range(4):
        out = strobe.attention(q, k, v)
        (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), q)[0])
    assert all((x == found[0]).all() for x in found)


def test_the_graph_shows_one_name():
    q, k, v = qkv(grad=True)
    assert {strobe.attention(q, k, v).grad_fn.name() for _ in range(4)} == {"_AttentionBackward"}


# Repeated calls give the results of the first


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"return_lse": True}, {"bias": torch.randn(20, 20)}, {"mask": torch.rand(20, 20) < 0.7}, {"layout": "bshd"}],
    ids=lambda x: next(iter(x), "plain"),
)
def test_the_third_call_has_the_bits_of_the_first(options, short_ways, monkeypatch):
    monkeypatch.setattr(_prepared, "CALLS", _prepared.Memory())
    q, k, v = qkv(grad=True)
    biases = [x.requires_grad_() for name, x in options.items() if name == "bias"]

    def call() -> list[Tensor]:
        found = strobe.attention(q, k, v, **options)
        out, lse = found if options.get("return_lse") else (found, None)
        loss = out.square().sum() + (lse.sum() if lse is not None else 0)
        return [out.detach(), *torch.autograd.grad(loss, (q, k, v, *biases))]

    first = call()
    assert short_ways == {"attention": 0, "gradients": 0}
    for n in range(1, 4):
        assert same(call(), first)
        assert short_ways == {"attention": n, "gradients": n}


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"layout": "bshd", "causal": True}, {"dropout": 0.3, "seed": 5}], ids=str)
def test_other_sizes_are_not_parsed_again(options, short_ways, monkeypatch):
    """A call like an earlier one, whose sizes are others, takes the short way at once."""
    monkeypatch.setattr(_prepared, "CALLS", _prepared.Memory())
    for n, (b, h, kv, sq, sk, d) in enumerate([(2, 4, 4, 9, 9, 8), (1, 6, 2, 20, 33, 16), (3, 2, 1, 1, 70, 64), (1, 1, 1, 0, 5, 8)]):
        shapes = [(b, h, sq, d), (b, kv, sk, d), (b, kv, sk, d)]
        shapes = [(b, s, h, d) for b, h, s, d in shapes] if options.get("layout") else shapes
        q, k, v = (torch.randn(*shape).requires_grad_() for shape in shapes)
        found = step(q, k, v, **options)
        assert short_ways == {"attention": n, "gradients": n}
        with monkeypatch.context() as fresh:
            fresh.setattr(_prepared, "CALLS", _prepared.Memory())
            assert same(found, step(q, k, v, **options))


@pytest.mark.parametrize("options", [{}, {"causal": True, "alignment": "top_left"}, {"layout": "bshd"}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("heads_last", [False, True])
def test_other_sizes_are_prepared_in_c(options, heads_last, monkeypatch):
    """From the third sizes on C prepares them, with the plan, the results and the strides of a call that is made in full."""
    memory = _prepared.Memory()
    monkeypatch.setattr(_prepared, "CALLS", memory)
    made = []
    prepare = Structs.prepare
    monkeypatch.setattr(Structs, "prepare", lambda structs, direction: [made.append(direction), prepare(structs, direction)][1])
    sizes = [(1, 1, 1, 4, 4, 8, 8), (2, 4, 2, 5, 6, 8, 16), (2, 4, 4, 9, 9, 8, 8), (1, 6, 2, 20, 33, 16, 24), (3, 2, 1, 1, 70, 64, 8)]
    for n, (b, h, kv, sq, sk, d, dv) in enumerate([*sizes, (1, 1, 1, 1, 1, 1, 1), (2, 3, 3, 0, 5, 8, 8), (1, 40, 5, 300, 7, 2, 3)]):
        shapes = [(b, h, sq, d), (b, kv, sk, d), (b, kv, sk, dv)]
        shapes = [(b, s, h, d) for b, h, s, d in shapes] if options.get("layout") else shapes
        q, k, v = (torch.randn(*shape) for shape in shapes)
        if heads_last:
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        q, k, v = (x[..., n % 2 :].requires_grad_() if x.shape[-1] > 1 else x.requires_grad_() for x in (q, k, v))  # off 16 bytes
        found = step(q, k, v, **options)
        assert made == [_abi.FORWARD, _abi.BACKWARD] * min(n, 1)
        with monkeypatch.context() as fresh:
            fresh.setattr(_prepared, "CALLS", _prepared.Memory())
            expected = step(q, k, v, **options)
        assert same(found, expected)
        for x, y in zip(found, expected, strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def test_other_sizes_that_are_wrong_are_refused_as_ever(monkeypatch):
    monkeypatch.setattr(_prepared, "CALLS", _prepared.Memory())
    q, k, v = qkv()
    for length in range(3, 7):
        strobe.attention(q[:, :, :length], k, v)
    for wrong, words in (
        (k[:, :, :-1], "v: shape .*; accepted"),
        (k[..., :-1], "k: shape .*; accepted"),
        (torch.cat([k, k]), "k: shape .*; accepted"),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match=words):
                strobe.attention(q, wrong, v)
    with pytest.raises(ValueError, match="q: head dimension 577; accepted"):
        strobe.attention(*(torch.randn(1, 1, 3, 577) for _ in range(3)))
    with pytest.raises(ValueError, match="k: dtype"):
        strobe.attention(q, k.double(), v)
    torch.testing.assert_close(strobe.attention(q[:, :, :3], k, v), strobe.attention(q, k, v)[:, :, :3])


def test_any_choice_of_gradients(short_ways):
    """The requested gradients are returned, and no others are computed."""
    q, k, v = qkv(grad=True)
    expected = step(q, k, v)[1:]
    for wanted in ((0,), (1,), (2,), (0, 2), (2, 1)):
        for _ in range(4):
            out = strobe.attention(q, k, v)
            found = torch.autograd.grad(out, [(q, k, v)[n] for n in wanted], torch.ones_like(out))
            assert same(list(found), [expected[n] for n in wanted])
    q, k, v = qkv()
    v.requires_grad_()
    results = [step(q, k, v) for _ in range(4)]
    assert all(same(result, results[0]) for result in results[1:])
    assert short_ways["gradients"] >= 18


def test_gradients_of_lse_alone_and_of_both():
    q, k, v = qkv(grad=True)
    for use in (lambda out, lse: lse.sum(), lambda out, lse: out.sum(), lambda out, lse: out.sum() + lse.sum()):
        results = [torch.autograd.grad(use(*strobe.attention(q, k, v, return_lse=True)), (q, k, v)) for _ in range(4)]
        assert all(same(list(result), list(results[0])) for result in results[1:])
    q.grad = None
    strobe.attention(q, k, v, return_lse=True)[1].sum().backward()
    assert q.grad is not None


def test_incoming_gradients_of_other_strides_are_other_calls():
    q, k, v = qkv(grad=True)
    dense = torch.randn(q.shape)
    forms = [dense, dense.transpose(1, 2).contiguous().transpose(1, 2), torch.zeros(()).expand(q.shape), dense[:, :1].expand(q.shape)]
    expected = [step(q, k, v, x.contiguous()) for x in forms]
    for _ in range(3):
        for form, want in zip(forms, expected, strict=True):
            assert same(step(q, k, v, form), want)


def test_what_hooks_make_of_saved_tensors_is_looked_at():
    """The unpacked tensors may have other memory and other strides than the saved ones."""
    q, k, v = qkv(grad=True)
    expected = step(q, k, v)
    turn = lambda x: x.detach().transpose(-1, -2).contiguous().transpose(-1, -2)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(turn, lambda x: x):
        for _ in range(4):
            assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(step(q, k, v), expected, strict=True))


def test_what_was_saved_may_not_be_written_to():
    q, k, v = qkv()
    leaf = q.requires_grad_()
    for _ in range(4):
        moved = leaf * 1
        out = strobe.attention(moved, k, v)
        moved.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_determinism_asked_for_between_forward_and_backward(monkeypatch):
    prepared = []
    prepare = _prepared.prepare

    def watched(call, known, made, direction, **more):
        prepared.append(torch.are_deterministic_algorithms_enabled())
        return prepare(call, known, made, direction, **more)

    monkeypatch.setattr(_prepared, "prepare", watched)
    monkeypatch.setattr(_prepared, "CALLS", _prepared.Memory())
    q, k, v = qkv(grad=True)
    for _ in range(3):
        step(q, k, v)
    assert prepared == [False, False]
    out = strobe.attention(q, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert prepared == [False, False, True]


def test_what_the_library_refuses_is_refused_in_full():
    q, k, v = qkv(20, 2, 16, grad=True)
    cu = torch.tensor([0, 8, 20], dtype=torch.int32)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 12, "max_seqlen_k": 12}
    expected = step(q, k, v, **options)
    for _ in range(3):
        assert same(step(q, k, v, **options), expected)
    out = strobe.attention(q, k, v, **options)
    cu[1] = 2
    for _ in range(2):
        with pytest.raises(ValueError, match="cu_seqlens_q: .*18"):
            strobe.attention(q, k, v, **options)
        with torch.no_grad(), pytest.raises(ValueError, match="cu_seqlens_q: .*18"):
            strobe.attention(q, k, v, **options)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    cu[1] = 8
    assert same(step(q, k, v, **options), expected)


def test_autocast_that_changes_nothing_keeps_the_short_way(short_ways):
    half, single = qkv(dtype=torch.bfloat16), qkv()
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            assert strobe.attention(*half).dtype == torch.bfloat16
    assert short_ways["attention"] == 3
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            assert strobe.attention(*single).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.float16):
            assert strobe.attention(*half).dtype == torch.float16
    assert short_ways["attention"] == 3


def test_inference_mode_has_inference_tensors():
    q, k, v = qkv()
    for _ in range(4):
        with torch.inference_mode():
            assert strobe.attention(q, k, v).is_inference()
        assert not strobe.attention(q, k, v).is_inference()


# Leftovers


def test_nothing_is_left_behind():
    """Calls leave neither results nor blocks of Python's memory behind."""
    q, k, v = qkv(grad=True)
    bias = torch.randn(20, 20, requires_grad=True)
    results: list[weakref.ref[Tensor]] = []

    def calls(count: int) -> None:
        for _ in range(count):
            out = strobe.attention(q, k, v, bias=bias, causal=True, window=(3, None))
            found = torch.autograd.grad(out.sum(), (q, bias))
            with torch.no_grad():
                both = strobe.attention(q, k, v, return_lse=True)
            key(q, k, v, bias=bias, window=[1])
            results[:] = map(weakref.ref, (out, *found, *both))

    calls(100)
    gc.collect()
    before = sys.getallocatedblocks()
    calls(1000)
    gc.collect()
    assert not any(result() is not None for result in results)
    assert sys.getallocatedblocks() - before < 500


def test_a_call_that_is_forgotten_is_released(monkeypatch):
    memory = _prepared.Memory()
    monkeypatch.setattr(_prepared, "CALLS", memory)
    q, k, v = qkv()
    for _ in range(2):
        strobe.attention(q, k, v)
    (prepared,) = (x for x in memory.lately.values() if isinstance(x, _eager.PreparedCall))
    before = sys.getrefcount(prepared)
    for _ in range(10):
        strobe.attention(q, k, v)
        assert prepared.run(q, k) is None  # too few arguments
        assert prepared.run(q, k, "v") is None
    assert sys.getrefcount(prepared) == before
    more = weakref.ref(prepared.more)
    memory.lately.clear()
    memory.kinds.clear()
    del prepared
    assert more() is None


def test_threads_make_the_same_call_side_by_side():
    q, k, v = qkv(1, 2, 64, 16, grad=True)
    expected = step(q, k, v, threads=1)
    wrong = []

    def work() -> None:
        for _ in range(100):
            if not same(step(q, k, v, threads=1), expected):
                wrong.append(1)

    team = [threading.Thread(target=work) for _ in range(4)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    assert not wrong


GPU = """
    import torch, torch._C._dynamo.guards as guards
    made, runs, now, status = [], [], [0], [0]
    empty_strided = torch.empty_strided
    def short(shape, strides, dtype):
        made.append("short")
        return empty_strided(shape, strides, dtype=dtype)
    def long(shape, strides, *, dtype, device):
        made.append(str(device))
        return empty_strided(shape, strides, dtype=dtype)
    guards._empty_strided_cuda, torch.empty_strided = short, long
    torch._C._cuda_getDevice = lambda: now[0]
    torch._C._cuda_getCurrentRawStream = lambda index: 1000 + index

    from strobe import _eager, _prepared  # these look the functions up
    from strobe._core import ffi
    @ffi.callback("int32_t(strobe_prepared *, int32_t, uint8_t *, uintptr_t *, int32_t, uintptr_t, uintptr_t, uint64_t)")
    def run(prepared, count, fields, addresses, threads, stream, workspace, size):
        arrays = [*fields[0:count]], [*addresses[0:count]]
        runs.append((int(ffi.cast("uintptr_t", prepared)), *arrays, threads, stream, workspace != 0, size))
        return status[0]
    _eager.connect(int(ffi.cast("uintptr_t", run)), 0, 0, 0)

    q = torch.randn(2, 3)
    shape = ((2, 3), (3, 1), torch.float32)
    prepared = _eager.PreparedCall(
        owner=None, address=7, fields=bytes([2, 5]), made=(shape,), device=torch.device("cuda", 1), workspace_bytes=4096, threads=0,
        form=bytes([255, 0, 255]), function=None, more=None, attention=0, forms=b"", likes=b"", direction=1, reserved_sms=0,
    )
    for current in (1, 0):
        now[0] = current
        nothing, x, none = prepared.run(q)
        assert nothing is none is None and x.shape == (2, 3)
        assert runs.pop() == (7, [2, 5], [q.data_ptr(), x.data_ptr()], 0, 1001, True, 4096), current
        assert made == (["short", "short"] if current else ["cuda:1", "cuda:1"]), made
        made.clear()
    status[0] = 1
    assert prepared.run(q) is None and len(runs) == 1
    def fails(index):
        raise RuntimeError
    torch._C._cuda_getCurrentRawStream.__code__ = fails.__code__
    assert prepared.run(q) is None and len(runs) == 1
    def stops(index):
        raise KeyboardInterrupt
    torch._C._cuda_getCurrentRawStream.__code__ = stops.__code__
    try:
        prepared.run(q)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_on_a_gpu(reader):
    """The GPU's stream and workspace reach the library, and results lie on its device, whether it is current or not. Fakes replace
    PyTorch's functions."""
    code = textwrap.dedent(GPU)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "interrupted"


@pytest.mark.parametrize(
    "changed",
    [{"made": ((1,),)}, {"device": 3}, {"form": "x"}, {"made": (((1,), (1,), torch.float32),) * 17}, {"attention": 8, "forms": b"x"}],
)
def test_what_no_call_can_be_made_of(changed):
    given = {
        "owner": None,
        "address": 0,
        "fields": b"",
        "made": (),
        "device": torch.device("cpu"),
        "workspace_bytes": 0,
        "threads": 1,
        "form": None,
        "function": None,
        "more": None,
        "attention": 0,
        "forms": b"",
        "likes": b"",
        "direction": 1,
        "reserved_sms": 0,
    }
    assert isinstance(_eager.PreparedCall(**given), _eager.PreparedCall)
    with pytest.raises((TypeError, ValueError, AttributeError)):
        _eager.PreparedCall(**given | changed)


def test_examples_are_gone_when_the_call_runs(monkeypatch):
    """A repeated call is prepared with examples of its results. Their memory must be free again when the call runs."""
    examples: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def noted(make):
        def call(*given, **options):
            made = make(*given, **options)
            examples.extend(map(weakref.ref, made.values()))
            return made

        return call

    for name in ("results", "gradients"):
        monkeypatch.setattr(Call, name, noted(getattr(Call, name)))
    seen = SimpleNamespace(**{x: getattr(_eager, x) for x in dir(_eager) if not x.startswith("__")})

    def counted(run):
        def call(*given):
            alive.append(sum(example() is not None for example in examples))
            return run(*given)

        return call

    for name in ("attention", "run"):
        setattr(seen, name, counted(getattr(_eager, name)))
    for module in (_autograd, _prepared):
        monkeypatch.setattr(module, "_eager", seen)
    monkeypatch.setattr(_prepared, "CALLS", _prepared.Memory())
    q = torch.randn(1, 2, 77, 8)
    made = []
    for _ in range(3):
        strobe.attention(q, q, q)
        made.append(len(examples))
        examples.clear()
    out, lse = torch.ops.strobe.attention_forward(q, q, q)
    examples.clear()
    for _ in range(3):
        torch.ops.strobe.attention_backward(out, None, out, lse, q, q, q, needed=[True, True, True, False, False])
        made.append(len(examples))
        examples.clear()
    assert made[1] == 2
    assert made[4] == 3
    assert not any(alive)
