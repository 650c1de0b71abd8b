"""strobe.jax.attention beside strobe.reference, which computes the same call of NumPy arrays in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import strobe
import strobe.jax

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2, "float64": 1e-12}  # of values near 1
LEARNED = ("bias", "sinks")


def normal(*shape: int, dtype="float32", seed=0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(jnp.dtype(dtype))


def close(found, wanted, dtype="float32") -> None:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=1)
    np.testing.assert_allclose(found, wanted, rtol=10 * TOLERANCE[dtype], atol=TOLERANCE[dtype] * largest)


def weighted(call, weights):
    """A scalar in which every result counts."""
    return lambda *arrays: sum((jnp.where(jnp.isfinite(x), x, 0) * w).sum() for x, w in zip(call(*arrays), weights, strict=True))


def check(q, k, v, *, transform=lambda f: f, **options) -> None:
    """out, lse and all gradients agree with the reference. transform: of JAX, around the function that is called."""
    dtype = q.dtype.name
    learned = {name: options.pop(name) for name in LEARNED if options.get(name) is not None}
    names, arrays = ("q", "k", "v", *learned), (q, k, v, *learned.values())

    def call(*given):
        found = dict(zip(names, given, strict=True))
        return strobe.jax.attention(*given[:3], return_lse=True, **{name: found[name] for name in learned}, **options)

    out, lse = transform(call)(*arrays)
    wanted = strobe.reference(*arrays[:3], **learned, **options)
    close(out, wanted[0], dtype)
    close(lse, wanted[1], "float64" if dtype == "float64" else "float32" if dtype == "float32" else dtype)
    dout, dlse = normal(*out.shape, dtype=dtype, seed=1), normal(*lse.shape, dtype=lse.dtype, seed=2)
    gradients = jax.grad(weighted(transform(call), (dout, dlse)), argnums=tuple(range(len(arrays))))(*arrays)
    dlse = np.where(np.isfinite(wanted[1]), dlse, 0).astype(dlse.dtype)
    wanted = strobe.reference_backward(dout, *arrays[:3], *wanted, dlse=dlse, **learned, **options)
    for name, x in zip(names, gradients, strict=True):
        close(x, getattr(wanted, f"d{name}"), dtype)
