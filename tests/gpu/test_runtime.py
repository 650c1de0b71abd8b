"""Behaviour that only a GPU has: graphs, streams, determinism on request, contents of device memory, decoding."""

from __future__ import annotations

import gc
from time import monotonic, sleep

import pytest
import torch

import strobe

ENGINES = [name for name, missing in strobe.engines() if missing is None and name.startswith("cuda-")]


def tensors(*shape: int, dtype: torch.dtype, n: int = 3) -> list[torch.Tensor]:
    return [torch.randn(*shape, device="cuda", dtype=dtype) for _ in range(n)]


def memory_settles(at, seconds=2.0):
    """Whether allocated memory soon falls to `at` bytes. PyTorch's backward thread may free tensors a little after the call has
    returned."""
    torch.cuda.synchronize()
    until = monotonic() + seconds
    while torch.cuda.memory_allocated() > at and monotonic() < until:
        sleep(0.01)
    return torch.cuda.memory_allocated() <= at


def gradients(q, k, v, dout, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = strobe.attention(*leaves, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_replays_with_other_lengths_and_other_dropout(dtype):
    total, heads, dim = 384, 4, 64
    q, k, v, dout = tensors(total, heads, dim, dtype=dtype, n=4)
    first, second = (torch.tensor(x, device="cuda", dtype=torch.int32) for x in ([0, 100, 228, 384], [0, 0, 256, 384]))
    cu, rng = first.clone(), torch.tensor([1, 2], device="cuda")
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 256, "max_seqlen_k": 256, "causal": True, "dropout": 0.2, "rng": rng}
    gradients(q, k, v, dout, **options)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(q, k, v, dout, **options, deterministic=True)
    for lengths, seed in ((second, 7), (first, 1)):
        cu.copy_(lengths)
        rng[0] = seed
        graph.replay()
        torch.cuda.synchronize()
        expected = gradients(q, k, v, dout, **options, deterministic=True)
        for got, want in zip(captured, expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 200])
def test_a_graph_replays_with_other_keys_that_count(queries, dtype):
    q, dout = tensors(4, 8, queries, 64, dtype=dtype, n=2)
    k, v = tensors(4, 2, 900, 64, dtype=dtype, n=2)
    used = torch.tensor([900, 0, 3, 450], device="cuda", dtype=torch.int32)
    options = {"seqused_k": used, "causal": True, "deterministic": True}
    gradients(q, k, v, dout, **options)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(q, k, v, dout, **options)
    for counts in ([1, 900, 33, 0], [900, 900, 900, 900], [900, 0, 3, 450]):
        used.copy_(torch.tensor(counts))
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(captured, gradients(q, k, v, dout, **options), strict=True):
            assert torch.equal(got, want)


@pytest.fixture(params=[False, True], ids=["option", "use_deterministic_algorithms"])
def deterministic(request):
    """Asks for determinism by PyTorch's setting, or else by the returned options."""
    torch.use_deterministic_algorithms(request.param)
    yield {} if request.param else {"deterministic": True}
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("placing", [{"seed": 5, "offset": 3}, {"rng": [5, 3]}], ids=["seed", "rng"])
def test_a_seed_is_captured(placing):
    """pytorch/pytorch#168991: a seed given as a number must not be copied from the host while the stream is captured."""
    placing = {name: torch.tensor(x, device="cuda") if name == "rng" else x for name, x in placing.items()}
    q, k, v, dout = tensors(2, 4, 200, 64, dtype=torch.bfloat16, n=4)
    expected = gradients(q, k, v, dout, dropout=0.2, deterministic=True, **placing)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(q, k, v, dout, dropout=0.2, deterministic=True, **placing)
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(captured, expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sums_gradient_stays_on_the_engine(engine):
    """Dao-AILab/flash-attention#325, #1149: the gradient of a sum has strides 0."""
    dtype = torch.bfloat16 if engine in ("cuda-mma", "cuda-sm90") else torch.float32
    leaves = [x.requires_grad_() for x in tensors(2, 4, 200, 64, dtype=dtype)]
    out = strobe.attention(*leaves, causal=True, deterministic=True, engine=engine)
    expected = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    for got, want in zip(torch.autograd.grad(out.sum(), leaves), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("heads_kv", [4, 1])
def test_deterministic_bits(engine, heads_kv, deterministic):
    dtype = torch.bfloat16 if engine in ("cuda-mma", "cuda-sm90") else torch.float32
    q, dout = tensors(2, 4, 700, 64, dtype=dtype, n=2)
    k, v = tensors(2, heads_kv, 700, 64, dtype=dtype, n=2)
    options = {"causal": True, "engine": engine, **deterministic}
    try:
        expected = gradients(q, k, v, dout, **options)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    for _ in range(100):
        for got, want in zip(gradients(q, k, v, dout, **options), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("engine", ENGINES)
def test_turns_end_where_sequences_overlap(engine):
    """With invalid cu_seqlens the gradients mean nothing, but the call ends."""
    dtype = torch.bfloat16 if engine in ("cuda-mma", "cuda-sm90") else torch.float32
    q, k, v, dout = tensors(400, 4, 64, dtype=dtype, n=4)
    cu = torch.tensor([0, 300, 100, 400], device="cuda", dtype=torch.int32)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 300, "max_seqlen_k": 300, "engine": engine}
    try:
        gradients(q, k, v, dout, **options, deterministic=True)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    done = torch.cuda.Event()
    done.record()
    deadline = monotonic() + 30
    while not done.query():
        if monotonic() > deadline:
            pytest.exit("the GPU waits for a turn that never comes")


def test_a_broadcast_bias_has_one_gradient():
    q, k, v, dout = tensors(3, 4, 200, 64, dtype=torch.bfloat16, n=4)
    bias = torch.randn(1, 1, 200, 200, device="cuda", requires_grad=True)
    expected = None
    for _ in range(20):
        (found,) = torch.autograd.grad(strobe.attention(q, k, v, bias=bias), bias, dout)
        expected = found if expected is None else expected
        assert torch.equal(found, expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_dropout_drops_what_the_cpu_drops(engine):
    """V is the identity, so O is P after dropout."""
    dtype = torch.float16 if engine in ("cuda-mma", "cuda-sm90") else torch.float32
    q, k = tensors(2, 3, 150, 64, dtype=dtype, n=2)
    k = k[:, :, :96]
    v = torch.eye(96, device="cuda", dtype=dtype).expand(2, 3, 96, 96).contiguous()
    out = strobe.attention(q, k, v, dropout=0.3, seed=5, offset=9, engine=engine)
    keep = strobe.dropout_mask((2, 3, 150, 96), 0.3, 5, 9)
    assert torch.equal(out.cpu() != 0, keep)


def test_single_tf32_products_only_on_request():
    q, k, v = tensors(2, 4, 512, 64, dtype=torch.float32)
    expected = strobe.attention(q.double(), k.double(), v.double())
    exact, single = (strobe.attention(q, k, v, allow_tf32=allow).double() for allow in (False, True))
    size = expected.abs().max()
    assert (exact - expected).abs().max() <= 2e-6 * size
    assert (single - expected).abs().max() <= 2**-9 * size


def test_another_stream():
    q, k, v = tensors(1, 4, 2048, 64, dtype=torch.bfloat16)
    expected = strobe.attention(q, k, v)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = q * 1
        found = strobe.attention(late, k, v)
    stream.synchronize()
    assert torch.equal(found, expected)


def test_repeated_calls_in_a_graph_on_a_side_stream():
    """Repeated calls are found by their key before and during the capture. A sum's gradient has strides 0 and is copied first."""
    q, k, v, dout = tensors(2, 4, 256, 64, dtype=torch.bfloat16, n=4)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def step() -> list[torch.Tensor]:
        out = strobe.attention(*leaves, causal=True, deterministic=True)
        by_sum = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        with torch.no_grad():
            alone = strobe.attention(*leaves, causal=True)
        return [out.detach(), alone, *by_sum, *torch.autograd.grad(out, leaves, dout)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.no_grad():
        for x in leaves:
            x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(captured, step(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("door", ["attention", "register"])
@pytest.mark.parametrize("way", ["make_graphed_callables", "reduce-overhead"])
def test_graphs_of_pytorchs_own_making(way, door):
    """Forward and backward run from CUDA graphs, for strobe.attention and for PyTorch's function on Strobe."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    leaves = [x.requires_grad_() for x in tensors(2, 4, 256, 64, dtype=torch.bfloat16)]
    dout = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if door == "register":
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return strobe.attention(q, k, v, causal=True)

    with strobe.register(strict=True) as run:
        expected = attend(*leaves)
        wanted = [expected, *torch.autograd.grad(expected, leaves, dout)]
        if way == "reduce-overhead":
            graphed = torch.compile(attend, fullgraph=True, mode=way)
        else:
            graphed = torch.cuda.make_graphed_callables(attend, tuple(x.detach().clone().requires_grad_() for x in leaves))
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            out = graphed(*leaves).clone()
            found = [out, *torch.autograd.grad(out, leaves, dout)]
    assert run.calls["scaled_dot_product_attention"]["pytorch"] == 0
    assert not counters["inductor"]["cudagraph_skips"]
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def test_repeated_calls_leave_no_memory_behind():
    q, k, v, dout = tensors(1, 2, 128, 64, dtype=torch.bfloat16, n=4)
    gc.collect()  # garbage of earlier tests would distort the comparison
    for n in range(200):
        gradients(q, k, v, dout)
        torch.cuda.synchronize()
        if n == 9:
            before = torch.cuda.memory_allocated()
    assert memory_settles(before)


def test_no_call_waits_for_the_garbage_collector():
    """The tensors and the workspace of a call are freed at once; each of these calls is the first of its kind."""
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        for n in range(1, 9):
            x = torch.randn(1, 2, 64 + n, 64, device="cuda", dtype=torch.bfloat16)
            gradients(x, x, x, x, scale=0.1 * n)
            del x
            assert memory_settles(before)
    finally:
        gc.enable()


def test_device_memory_is_clamped_and_checked_on_request():
    q, k, v = tensors(64, 2, 64, dtype=torch.float32)
    cu = torch.tensor([0, 500, -3, 64], device="cuda", dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        strobe.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=64, max_seqlen_k=64, check=True)
    strobe.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=64, max_seqlen_k=64)
    torch.cuda.synchronize()


@pytest.mark.parametrize("queries", [1, 3, 16])
@pytest.mark.parametrize("heads", [(8, 8), (32, 8), (16, 1)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_decoding(queries, heads, dim):
    q = torch.randn(3, heads[0], queries, dim, device="cuda", dtype=torch.bfloat16)
    k, v = tensors(3, heads[1], 5000, dim, dtype=torch.bfloat16, n=2)
    out, lse = strobe.attention(q, k, v, causal=True, return_lse=True)
    expected, expected_lse = strobe.attention(q.float(), k.float(), v.float(), causal=True, return_lse=True)
    assert (out.float() - expected).abs().max() <= 2e-2 * expected.abs().max()
    assert (lse - expected_lse).abs().max() <= 1e-3


several_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")


@several_devices
def test_the_callers_device_stays_current():
    q, k, v = (x.to("cuda:1").requires_grad_() for x in tensors(1, 2, 128, 64, dtype=torch.bfloat16))
    with torch.cuda.device(0):
        for _ in range(3):  # a full call first, then prepared ones
            out = strobe.attention(q, k, v)
            assert torch.cuda.current_device() == 0
            found = torch.autograd.grad(out.sum(), (q, k, v))
            assert torch.cuda.current_device() == 0
            assert all(x.device == q.device for x in (out, *found))


@several_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_devices_work_side_by_side_each_on_its_own_stream(dtype):
    devices = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    here = tensors(2, 4, 1024, 64, dtype=dtype, n=4)
    there = {device: [x.to(device) for x in here] for device in devices}
    streams = {device: torch.cuda.Stream(device) for device in devices}
    for device in devices:
        torch.cuda.synchronize(device)
    found = {}
    for _ in range(3):
        for device in devices:
            with torch.cuda.stream(streams[device]):
                torch.cuda._sleep(10_000_000)
                found[device] = gradients(*(x * 1 for x in there[device]), causal=True, deterministic=True)
    expected = gradients(*here, causal=True, deterministic=True)
    for device in devices:
        streams[device].synchronize()
        for got, want in zip(found[device], expected, strict=True):
            assert got.device == device
            assert torch.equal(got.to(want.device), want)


def test_compiled_and_under_autocast():
    attend = torch.compile(lambda q, k, v: strobe.attention(q, k, v, causal=True), fullgraph=True)
    q, k, v = (x.requires_grad_() for x in tensors(2, 4, 256, 64, dtype=torch.float32))
    with torch.autocast("cuda", torch.bfloat16):
        out = attend(q, k, v)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    expected = strobe.attention(q.detach(), k.detach(), v.detach(), causal=True)
    assert (out.float() - expected).abs().max() <= 2e-2 * expected.abs().max()
    assert q.grad is not None
    assert bool(q.grad.isfinite().all())
