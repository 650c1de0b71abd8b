"""Functions of the score and the mask, recorded from JAX's tracers, beside the same functions over whole arrays of scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import close, normal

import strobe
import strobe.jax

B, H, HKV, SQ, SK, D = 2, 4, 2, 20, 24, 8
Q, K, V = (normal(B, heads, rows, D, seed=rows) for heads, rows in ((H, SQ), (HKV, SK), (HKV, SK)))
SLOPES, RELATIVE, BY_KEY, POSITIONS = normal(H), normal(H, SQ + SK), normal(B, SK), normal(SQ, SK)
SEGMENTS = np.sort(np.random.default_rng(0).integers(0, 3, (B, SK))).astype(np.int32)
SMALL = np.arange(SK, dtype=np.uint8)


def dense(q, k, v, score=None, mask=None):
    k, v = (jnp.repeat(x, H // HKV, 1) for x in (k, v))
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(D)
    places = jnp.meshgrid(*map(jnp.arange, s.shape), indexing="ij")
    over = lambda f: jnp.vectorize(f)  # noqa: E731
    if score is not None:
        s = over(score)(s, *places)
    if mask is not None:
        s = jnp.where(over(mask)(*places), s, -jnp.inf)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(s, -1), v)


# Each takes the tables that it reads, and gives the function.
SCORES = {
    "softcap": (lambda: lambda x, b, h, i, j: 2 * jnp.tanh(x / 2), ()),
    "slopes": (lambda t: lambda x, b, h, i, j: x - t[h] * jnp.abs(i - j), (SLOPES,)),
    "relative": (lambda t: lambda x, b, h, i, j: x + t[h, jnp.clip(i - j + SK, 0, SQ + SK - 1)], (RELATIVE,)),
    "two steps": (lambda t: lambda x, b, h, i, j: x + t[h][i % 7], (RELATIVE,)),
    "by key": (lambda t, u: lambda x, b, h, i, j: x * t[b, j] + u[i, j], (BY_KEY, POSITIONS)),
    "take": (lambda t: lambda x, b, h, i, j: x + jnp.take(t, h) + jnp.take(t, -1), (SLOPES,)),
    "vector index": (lambda t: lambda x, b, h, i, j: x + t[h, jnp.stack([i, j])].sum(), (RELATIVE,)),
    "scalar": (lambda t: lambda x, b, h, i, j: x * t, (np.float32(0.7).reshape(()),)),
    "many": (
        lambda t: (
            lambda x, b, h, i, j: jnp.where(i >= j, jax.nn.gelu(x) + jax.nn.sigmoid(t[h]), jnp.log1p(jnp.exp(-x)) - (i // 3 == j // 3))
        ),
        (SLOPES,),
    ),
    "loop": (lambda t: lambda x, b, h, i, j: x + sum(t[h, n] * jnp.cos(n * (i - j)) for n in range(3)), (RELATIVE,)),
    "powers": (lambda: lambda x, b, h, i, j: x**3 + 1 / (1 + x**2) + jnp.minimum(x, 0.1) ** 2 + jnp.square(x), ()),
    "reduction": (lambda t: lambda x, b, h, i, j: x + t[h, 2:6].max() + t[:, 1].mean(), (RELATIVE,)),
    "integers": (lambda: lambda x, b, h, i, j: x + ((i ^ j) & 3) + (i << 1) % 5 - jnp.floor_divide(j - i, 4) + jnp.sign(i - j), ()),
    "narrow": (lambda t: lambda x, b, h, i, j: x + (t[j] + t[j]).astype(jnp.uint8) / 16 + i.astype(jnp.int8) / 4, (SMALL,)),
}
MASKS = {
    "causal": (lambda: lambda b, h, i, j: i >= j, ()),
    "segments": (lambda t: lambda b, h, i, j: (t[b, i] == t[b, j]) | (j < 2), (SEGMENTS,)),
    "window": (lambda: lambda b, h, i, j: jnp.logical_and(jnp.abs(i - j) < 5, ~(j == 3)) | (j == 0), ()),
    "by head": (lambda t: lambda b, h, i, j: (j % (h + 1) == 0) & t[j], (np.arange(SK) != 5,)),
    "constant": (lambda: lambda b, h, i, j: True, ()),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    make, tables = SCORES[name]
    floats = [n for n, t in enumerate(tables) if t.dtype == np.float32]
    ours = jax.jit(lambda q, k, v, *t: strobe.jax.attention(q, k, v, score=make(*t)))
    theirs = lambda q, k, v, *t: dense(q, k, v, score=make(*t))  # noqa: E731
    arrays = [*map(jnp.asarray, (Q, K, V, *tables))]
    close(ours(*arrays), theirs(*arrays))
    of = lambda f: jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=(0, 1, 2, *(3 + n for n in floats)))(*arrays)  # noqa: E731
    for x, y in zip(of(ours), of(theirs), strict=True):
        close(x, y)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    make, tables = MASKS[name]
    arrays = [*map(jnp.asarray, (Q, K, V, *tables))]
    found = jax.jit(lambda q, k, v, *t: strobe.jax.attention(q, k, v, mask=make(*t)))(*arrays)
    close(found, dense(*arrays[:3], mask=make(*arrays[3:])))


def test_both_outside_of_jit():
    table = jnp.asarray(RELATIVE)
    score, mask = (lambda x, b, h, i, j: x + table[h, j], lambda b, h, i, j: i >= j)
    close(strobe.jax.attention(Q, K, V, score=score, mask=mask), dense(Q, K, V, score, mask))


def test_an_index_is_seen_through():
    """What jnp makes of table[h] is one load of h, whose gradient is summed by head."""
    from strobe._graph import decoded
    from strobe._recorder_jax import record

    arguments = [("SCORE", "R"), ("BATCH", "I"), ("HEAD", "I"), ("QUERY", "I"), ("KEY", "I")]
    slopes, table = map(jnp.asarray, (SLOPES, RELATIVE))
    for function in (
        lambda x, b, h, i, j: x + slopes[h],
        lambda x, b, h, i, j: x + jnp.take(slopes, h),
        lambda x, b, h, i, j: x + table[h, i],
    ):
        graph, found, _ = record(function, arguments, False)
        operations = {operation for operation, _, _ in decoded(graph.text(found.at()))}
        assert operations <= {"SCORE", "HEAD", "QUERY", "LOAD", "ADD"}


def test_vmap_over_a_table():
    tables = normal(3, H)
    call = lambda t: strobe.jax.attention(Q, K, V, score=lambda x, b, h, i, j: x * t[h])  # noqa: E731
    found = jax.vmap(call)(tables)
    for n in range(3):
        close(found[n], call(jnp.asarray(tables[n])))


def test_block_mask_of_a_function():
    blocks = strobe.BlockMask.from_function(lambda b, h, i, j: i // 5 == j // 5, 1, 1, SQ, SK, block=16)
    found = jax.jit(lambda q: strobe.jax.attention(q, K, V, block_mask=blocks))(Q)
    close(found, strobe.attention(Q, K, V, block_mask=blocks))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"score": lambda x, b, h, i, j: x if x > 0 else 0.0}, "a branch on the data"),
        ({"score": lambda x, b, h, i, j: x + SLOPES[h]}, "accepted are functions of jax.numpy"),
        ({"score": lambda x, b, h, i, j: jax.lax.cond(i > j, lambda: x, lambda: 0.0)}, "jax.lax.cond has no form"),
        ({"score": lambda x, b, h, i, j: (x, x)}, "returns 2 arrays"),
        ({"mask": lambda b, h, i, j: i}, "returns an integer; accepted is a bool"),
        ({"score": lambda x, b, h: x}, "does not take 5 arguments"),
    ],
)
def test_refusals(options, words):
    with pytest.raises((ValueError, TypeError), match=f"{next(iter(options))}: .*{words}"):
        strobe.jax.attention(Q, K, V, **options)
