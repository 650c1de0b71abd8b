"""Forward-mode and second derivatives of strobe.jax.attention, beside those of plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import close, normal

import strobe.jax

B, H, HKV, SQ, SK, D = 2, 4, 2, 9, 11, 8
ARRAYS = [normal(B, heads, rows, D, seed=rows) for heads, rows in ((H, SQ), (HKV, SK), (HKV, SK))]
BIAS, SINKS, TABLE = normal(1, H, SQ, SK), normal(H), normal(H, SK)
OPTIONS = {"none": (), "bias": (BIAS,), "sinks": (SINKS,), "table": (TABLE,)}


def ours(name):
    def call(q, k, v, *more):
        options = {"bias": {"bias": more[0]}, "sinks": {"sinks": more[0]}} if more else {}
        options |= {"table": {"score": lambda x, b, h, i, j: x * more[0][h, j]}} if more else {}
        return strobe.jax.attention(q, k, v, causal=True, return_lse=True, **options.get(name, {}))

    return call


def dense(name):
    def call(q, k, v, *more):
        k, v = (jnp.repeat(x, H // HKV, 1) for x in (k, v))
        s = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(D)
        s = s + more[0] if name == "bias" else s * more[0][:, None] if name == "table" else s
        s = jnp.where(jnp.tril(jnp.ones((SQ, SK), bool), SK - SQ), s, -jnp.inf)
        if name == "sinks":
            s = jnp.concatenate([s, jnp.broadcast_to(more[0][:, None, None], (B, H, SQ, 1))], -1)
        p = jax.nn.softmax(s, -1)[..., :SK]
        return jnp.einsum("bhqk,bhkd->bhqd", p, v), jax.nn.logsumexp(s, -1)

    return call


def agree(transform, name, *arrays):
    for x, y in zip(
        jax.tree.leaves(jax.jit(transform(ours(name)))(*arrays)), jax.tree.leaves(transform(dense(name))(*arrays)), strict=True
    ):
        close(x, y)


def scalar(call):
    return lambda *arrays: sum((jnp.sin(x) * jnp.arange(1.0, x.shape[-1] + 1)).sum() for x in call(*arrays))


def tangents(arrays):
    return [normal(*x.shape, seed=7) for x in arrays]


@pytest.mark.parametrize("name", OPTIONS)
def test_jvp(name):
    arrays = [*ARRAYS, *OPTIONS[name]]
    agree(lambda call: lambda *a: jax.jvp(call, a, tuple(tangents(arrays))), name, *arrays)


@pytest.mark.parametrize("one", range(3))
def test_jvp_of_one_array(one):
    def transform(call):
        return lambda *a: jax.jvp(lambda x: call(*(x if n == one else y for n, y in enumerate(a))), (a[one],), (tangents(a)[one],))

    agree(transform, "none", *ARRAYS)


@pytest.mark.parametrize("name", OPTIONS)
def test_forward_over_reverse(name):
    arrays = [*ARRAYS, *OPTIONS[name]]
    every = tuple(range(len(arrays)))
    agree(lambda call: lambda *a: jax.jvp(jax.grad(scalar(call), every), a, tuple(tangents(arrays))), name, *arrays)


@pytest.mark.parametrize("name", OPTIONS)
def test_reverse_over_reverse(name):
    arrays = [*ARRAYS, *OPTIONS[name]]
    every, weights = tuple(range(len(arrays))), tangents(arrays)

    def transform(call):
        return jax.grad(lambda *a: sum((x * w).sum() for x, w in zip(jax.grad(scalar(call), every)(*a), weights, strict=True)), every)

    agree(transform, name, *arrays)


def test_jacobians_and_hessian():
    small = [x[:1, :, :2, :3] for x in ARRAYS]
    of = lambda transform: lambda call: lambda q, k, v: transform(lambda q: call(q, k, v))(q)  # noqa: E731
    for ours_, dense_ in [(lambda *a: strobe.jax.attention(*a), plain)]:
        for transform in (jax.jacfwd, jax.jacrev, lambda f: jax.hessian(lambda x: (f(x) ** 2).sum())):
            close(of(transform)(ours_)(*small), of(transform)(dense_)(*small))


def plain(q, k, v):
    k, v = (jnp.repeat(x, H // HKV, 1) for x in (k, v))
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1]), -1), v)


def test_linearize():
    out, along = jax.linearize(lambda q: ours("none")(q, *ARRAYS[1:])[0], ARRAYS[0])
    wanted, wanted_along = jax.linearize(lambda q: dense("none")(q, *ARRAYS[1:])[0], ARRAYS[0])
    close(out, wanted)
    close(along(ARRAYS[0]), wanted_along(ARRAYS[0]))


def test_refusals():
    q, k, v = ARRAYS
    call = lambda q: strobe.jax.attention(q, k, v)  # noqa: E731
    with pytest.raises(NotImplementedError, match="the derivative of a forward-mode derivative"):
        jax.jvp(lambda q: jax.jvp(call, (q,), (q,))[1], (q,), (q,))


def _lowered_for_a_gpu(transform):
    q, k, v = ARRAYS
    return jax.jit(transform(lambda q: strobe.jax.attention(q, k, v))).trace(q).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "transform",
    [
        lambda call: lambda q: jax.jvp(call, (q,), (q,)),
        lambda call: jax.hessian(lambda q: (call(q) ** 2).sum()),
        lambda call: jax.grad(lambda q: (jax.grad(lambda q: (call(q) ** 2).sum())(q) ** 2).sum()),
    ],
    ids=["jvp", "hessian", "grad of grad"],
)
def test_gpus_have_gradients_alone(transform):
    """Lowering needs no GPU."""
    assert "strobe_attention" in _lowered_for_a_gpu(lambda call: jax.grad(lambda q: call(q).sum()))
    with pytest.raises(NotImplementedError, match="forward-mode or second derivative is asked for on a GPU; accepted are CPUs"):
        _lowered_for_a_gpu(transform)


@pytest.mark.parametrize("name", ["bias", "sinks"])
def test_on_several_devices(name):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    spec = jax.sharding.PartitionSpec
    arrays = [*ARRAYS, *OPTIONS[name]]
    specs = [spec("x", "y")] * 3 + [spec(None, "y") if name == "bias" else spec("y")]
    sharded = [jax.device_put(x, jax.sharding.NamedSharding(mesh, of)) for x, of in zip(arrays, specs, strict=True)]
    every = tuple(range(len(arrays)))
    transform = jax.jit(lambda *a: jax.jvp(jax.grad(scalar(ours(name)), every), a, tuple(tangents(arrays))))
    for x, y in zip(jax.tree.leaves(transform(*sharded)), jax.tree.leaves(transform(*arrays)), strict=True):
        close(x, y)


def test_vmap():
    along = np.stack(tangents([ARRAYS[0]] * 2)) * np.array([1, -2], np.float32)[:, None, None, None, None]
    call = lambda q, t: jax.jvp(jax.grad(lambda q: scalar(ours("none"))(q, *ARRAYS[1:])), (q,), (t,))[1]  # noqa: E731
    found = jax.vmap(call, (None, 0))(ARRAYS[0], along)
    for n in range(2):
        close(found[n], call(ARRAYS[0], along[n]))
