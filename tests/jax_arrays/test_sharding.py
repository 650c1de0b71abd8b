"""strobe.jax.attention on several devices: four of the CPU stand for GPUs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import close, normal
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import strobe
import strobe.jax

MESHES = {"4": ((4,), ("x",)), "2x2": ((2, 2), ("x", "y")), "4x1": ((4, 1), ("x", "y"))}


def mesh_of(name):
    shape, names = MESHES[name]
    return Mesh(np.array(jax.devices()[:4]).reshape(shape), names)


def tensors(b=4, h=8, hkv=4, sq=16, sk=20, d=8, dv=16, layout="bhsd"):
    found = [normal(b, heads, rows, width, seed=rows) for heads, rows, width in ((h, sq, d), (hkv, sk, d), (hkv, sk, dv))]
    return [x.transpose(0, 2, 1, 3).copy() if layout == "bshd" else x for x in found]


def check(call, arrays, specs, mesh, gathers=False):
    """Results and gradients of sharded arrays are those of whole ones. gathers: whether devices exchange more than sums."""
    both = jax.jit(lambda *a: (call(*a), jax.grad(lambda *a: (call(*a) ** 2).sum(), argnums=tuple(range(len(a))))(*a)))
    wanted = jax.tree.leaves(both(*arrays))
    sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    found = jax.tree.leaves(both(*sharded))
    for x, y in zip(found, wanted, strict=True):
        close(x, y)
    text = both.lower(*sharded).compile().as_text()
    assert bool(re.search("all-gather|all-to-all|collective-permute", text)) == gathers
    return found, text


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("mesh", "batch", "heads"),
    [("4", "x", None), ("4", None, "x"), ("2x2", "x", "y"), ("2x2", ("x", "y"), None), ("2x2", None, ("x", "y")), ("4x1", "x", "y")],
)
def test_batch_and_heads(mesh, batch, heads, layout):
    spec = P(batch, None, heads, None) if layout == "bshd" else P(batch, heads, None, None)
    call = lambda *a: strobe.jax.attention(*a, causal=True, layout=layout)  # noqa: E731
    found, _ = check(call, tensors(layout=layout), [spec] * 3, mesh_of(mesh))
    assert found[0].sharding.is_equivalent_to(NamedSharding(mesh_of(mesh), spec), 4)


@pytest.mark.parametrize(("hkv", "spec_kv"), [(1, P("x", None)), (2, P("x", None)), (2, P("x", "y")), (8, P("x", "y"))])
def test_groups(hkv, spec_kv):
    """Keys of heads that several devices share lie on each of them; their gradients are summed."""
    q, k, v = tensors(hkv=hkv)
    check(lambda *a: strobe.jax.attention(*a, causal=True), (q, k, v), [P("x", "y"), spec_kv, spec_kv], mesh_of("2x2"))


@pytest.mark.parametrize("shape", [(4, 8, 16, 20), (1, 8, 16, 20), (4, 1, 16, 20), (16, 20), (1, 1, 1, 20)])
def test_bias(shape):
    """The gradient of a bias that sequences or heads share is summed over the devices."""
    arrays = [*tensors(), normal(*shape)]
    spec = P(*[None if n == 1 else axis for axis, n in zip(("x", "y", None, None)[4 - len(shape) :], shape, strict=False)])
    check(lambda q, k, v, b: strobe.jax.attention(q, k, v, bias=b), arrays, [P("x", "y")] * 3 + [spec], mesh_of("2x2"))


def test_sinks_and_slopes():
    slopes = np.geomspace(0.5, 0.01, 8).astype(np.float32)
    options = {"alibi_slopes": slopes, "seqused_k": np.array([3, 20, 7, 9], np.int32)}
    call = lambda q, k, v, s: strobe.jax.attention(q, k, v, sinks=s, **options)  # noqa: E731
    check(call, [*tensors(), normal(8)], [P("x", "y")] * 3 + [P("y")], mesh_of("2x2"))


def test_function():
    """The table is on every device, and its gradient is summed. A function that reads h keeps the heads together."""
    table = normal(20, seed=3)
    of = lambda score: lambda q, k, v, t: strobe.jax.attention(q, k, v, score=score(t), mask=lambda b, h, i, j: i + 4 >= j)  # noqa: E731
    arrays = [*tensors(), table]
    specs = [P("x", "y")] * 3 + [P()]
    check(of(lambda t: lambda x, b, h, i, j: x * t[j]), arrays, specs, mesh_of("2x2"))
    check(of(lambda t: lambda x, b, h, i, j: x * t[h]), arrays, specs, mesh_of("2x2"), gathers=True)
    check(of(lambda t: lambda x, b, h, i, j: x * t[h]), arrays, [P("x")] * 3 + [P()], mesh_of("2x2"))


def test_block_mask():
    keep = np.random.default_rng(0).random((4, 8, 16, 20)) > 0.99
    whole, by_head = strobe.BlockMask.from_dense(keep[0, 0], 16, 16), strobe.BlockMask.from_dense(keep[:1], 16, 16)
    check(lambda *a: strobe.jax.attention(*a, block_mask=whole), tensors(), [P("x", "y")] * 3, mesh_of("2x2"))
    check(lambda *a: strobe.jax.attention(*a, block_mask=by_head), tensors(), [P("x")] * 3, mesh_of("2x2"))


def test_packed():
    cu = np.array([0, 5, 9, 16], np.int32)
    q, k, v = (x[0].swapaxes(0, 1) for x in tensors(sk=16))
    check(lambda *a: strobe.jax.attention(*a, cu_seqlens_q=cu, cu_seqlens_k=cu), (q, k, v), [P(None, "x")] * 3, mesh_of("4"))


@pytest.mark.parametrize("scales", ["rows", "heads", "one"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("hkv", "of_kv"), [(8, "y"), (2, "y"), (1, None)])
def test_scales(hkv, of_kv, layout, scales):
    """The scales of q lie where its heads do, those of k and v where theirs do; nothing is sent."""
    mesh, rng = mesh_of("2x2"), np.random.default_rng(0)
    arrays, specs = {}, {}
    for name, heads, rows, axis in (("q", 8, 16, "y"), ("k", hkv, 8, of_kv), ("v", hkv, 8, of_kv)):
        swap = (lambda x: x.swapaxes(1, 2).copy()) if layout == "bshd" else lambda x: x
        arrays[name] = swap(normal(4, heads, rows, 16, dtype="float8_e4m3fn", seed=rows))
        specs[name] = P("x", None, axis) if layout == "bshd" else P("x", axis)
        shape = {"rows": (4, heads, rows), "heads": (heads,), "one": ()}[scales]
        scale = np.asarray(0.1 + rng.random(shape), np.float32)
        arrays[f"{name}_scale"] = swap(scale) if scales == "rows" else scale
        specs[f"{name}_scale"] = {"rows": specs[name], "heads": P(axis), "one": P()}[scales]
    call = jax.jit(lambda arrays: strobe.jax.attention(**arrays, causal=True, layout=layout))
    sharded = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
    close(call(sharded), strobe.reference(**arrays, causal=True, layout=layout)[0], "bfloat16")
    assert not re.search("all-|collective-permute", call.lower(sharded).compile().as_text())


def test_sequence_axis_is_gathered():
    check(lambda *a: strobe.jax.attention(*a, causal=True), tensors(), [P("x", None, "y")] * 3, mesh_of("2x2"), gathers=True)


def test_dropout_is_that_of_the_whole_call():
    call = lambda *a: strobe.jax.attention(*a, dropout=0.5, seed=3)  # noqa: E731
    check(call, tensors(), [P("x", "y")] * 3, mesh_of("2x2"), gathers=True)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    mesh = mesh_of("2x2")
    arrays = [*tensors(), normal(8, 16, 20)]
    specs = (*[P("x", "y")] * 3, P("y"))
    call = lambda q, k, v, bias: strobe.jax.attention(q, k, v, bias=bias, causal=True)  # noqa: E731
    mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("x", "y"), check_vma=check_vma)
    of = lambda call: jax.jit(jax.grad(lambda *a: (call(*a) ** 2).sum(), argnums=(0, 1, 2, 3)))(*arrays)  # noqa: E731
    close(jax.jit(mapped)(*arrays), call(*arrays))
    for x, y in zip(of(mapped), of(call), strict=True):
        close(x, y)


def test_shard_map_over_one_axis_of_the_mesh():
    mesh = mesh_of("2x2")
    arrays = tensors()
    call = lambda *a: strobe.jax.attention(*a, causal=True)  # noqa: E731
    mapped = jax.shard_map(call, mesh=mesh, in_specs=(P("x"),) * 3, out_specs=P("x"), axis_names={"x"})
    sharded = [jax.device_put(x, NamedSharding(mesh, P("x", "y"))) for x in arrays]
    close(jax.jit(mapped)(*sharded), call(*arrays))


def test_vmap_of_sharded():
    mesh = mesh_of("4")
    arrays = [np.stack([x, -x]) for x in tensors()]
    call = jax.vmap(lambda *a: strobe.jax.attention(*a, causal=True))
    sharded = [jax.device_put(x, NamedSharding(mesh, P(None, None, "x"))) for x in arrays]
    close(jax.jit(call)(*sharded), call(*map(jnp.asarray, arrays)))
