"""strobe.jax.nn.dot_product_attention beside JAX's own."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import close, normal

from strobe.jax.nn import dot_product_attention

LENGTHS = np.array([20, 11], np.int32)
OPTIONS = {
    "none": {},
    "scale": {"scale": 0.2},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (5, 2)},
    "window of one number": {"local_window_size": 4, "is_causal": True},
    "lengths": {"query_seq_lengths": LENGTHS[::-1].copy(), "key_value_seq_lengths": LENGTHS},
    "mask": {"mask": np.random.default_rng(0).random((2, 1, 20, 24)) > 0.3},
    "mask of heads": {"mask": np.random.default_rng(0).random((1, 4, 20, 24)) > 0.3},
    "all": {"is_causal": True, "local_window_size": (9, 0), "key_value_seq_lengths": np.array([24, 20], np.int32), "scale": 0.3},
}


def tensors(dtype="float32", dims=(2, 20, 24, 4, 2, 16)):
    b, t, s, n, k, h = dims
    return normal(b, t, n, h, dtype=dtype), normal(b, s, k, h, dtype=dtype), normal(b, s, k, h, dtype=dtype, seed=1)


def squared(call):
    return lambda *arrays: (call(*arrays).astype(jnp.float32) ** 2).sum()


def check(arrays, dtype="float32", **options):
    """Results and gradients, with the bias as the last of the arrays if there are four."""
    of = lambda call: lambda *a: call(*a, **options)  # noqa: E731
    ours, theirs = map(of, (dot_product_attention, jax.nn.dot_product_attention))
    close(jax.jit(ours)(*arrays), theirs(*arrays), dtype)
    both = [jax.grad(squared(call), argnums=tuple(range(len(arrays))))(*arrays) for call in (ours, theirs)]
    for x, y in zip(*both, strict=True):
        assert x.dtype == y.dtype
        close(x, y, dtype)


def test_signature():
    assert list(inspect.signature(dot_product_attention).parameters) == list(inspect.signature(jax.nn.dot_product_attention).parameters)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    check(tensors(), **OPTIONS[name])


@pytest.mark.parametrize("shape", [(2, 4, 20, 24), (1, 4, 20, 24), (2, 1, 20, 24), (1, 1, 1, 24), (2, 4, 1, 1)])
def test_bias_has_a_gradient(shape):
    check([*tensors(), normal(*shape)], is_causal=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(dtype):
    check([*tensors(dtype), normal(1, 4, 20, 24)], dtype, is_causal=True)


def test_without_batch():
    q, k, v = tensors()
    check((q[0], k[0], v[0]), is_causal=True)


def test_residual():
    q, k, v = tensors()
    for given in ((q, k, v), (q[0], k[0], v[0])):
        found, wanted = (
            call(*given, return_residual=True, is_causal=True) for call in (dot_product_attention, jax.nn.dot_product_attention)
        )
        for x, y in zip(found, wanted, strict=True):
            close(x, y)


def test_traced_scale():
    q, k, v = tensors()
    close(jax.jit(lambda s: dot_product_attention(q, k, v, scale=s))(0.3), jax.nn.dot_product_attention(q, k, v, scale=0.3))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_scale_as_an_array(shape):
    """An array whose value is known is the number that it holds, in all its bits."""
    q, k, v = tensors("bfloat16")
    scale = jnp.full(shape, 0.3)
    assert jnp.array_equal(dot_product_attention(q, k, v, scale=scale), dot_product_attention(q, k, v, scale=float(np.float32(0.3))))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_traced_scale_multiplies_in_float32(dtype):
    """Only the product is rounded: the scale, between two numbers of 16 bits, is not."""
    q, k, v = tensors(dtype)
    scale = np.float32(1 + 2.0**-9 + 2.0**-12)
    scaled = (q.astype(np.float32) * scale).astype(q.dtype)
    found = jax.jit(lambda s: dot_product_attention(q, k, v, scale=s))(scale)
    assert jnp.array_equal(found, dot_product_attention(scaled, k, v, scale=1.0))


def test_gradient_of_a_traced_scale():
    q, k, v = tensors()
    of = lambda call: jax.grad(lambda s: (call(q, k, v, scale=s) ** 2).sum())(jnp.float32(0.3))  # noqa: E731
    close(of(dot_product_attention), of(jax.nn.dot_product_attention))


def test_refusals_have_its_names():
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"scale: shape \(4,\); accepted is a number"):
        dot_product_attention(q, k, v, scale=jnp.ones(4))
    with pytest.raises(ValueError, match=r"(?s)local_window_size: .*key: "):
        dot_product_attention(q, k[..., :3], v, local_window_size=(-1, 0))
    with pytest.raises(ValueError, match="query_seq_lengths: shape"):
        dot_product_attention(q, k, v, query_seq_lengths=np.ones(3, np.int32))
    with pytest.raises(ValueError, match="implementation: 'tpu'"):
        dot_product_attention(q, k, v, implementation="tpu")
