"""strobe.jax.attention: every option against the reference, under JAX's transforms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import check, close, normal

import strobe
import strobe.jax


def tensors(b=2, h=4, hkv=2, sq=33, sk=47, d=16, dv=24, dtype="float32", layout="bhsd"):
    found = [normal(b, heads, rows, width, dtype=dtype, seed=rows) for heads, rows, width in ((h, sq, d), (hkv, sk, d), (hkv, sk, dv))]
    return [x.transpose(0, 2, 1, 3).copy() if layout == "bshd" else x for x in found]


MASK = np.random.default_rng(0).random((2, 1, 33, 47)) > 0.4
BLOCKS = strobe.BlockMask.from_dense(np.random.default_rng(1).random((33, 47)) > 0.97, 16, 16)
OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "top-left": {"causal": True, "alignment": "top_left"},
    "window": {"window": (9, 3)},
    "scale": {"scale": 0.3},
    "mask": {"mask": MASK},
    "mask of two axes": {"mask": MASK[0, 0]},
    "bias": {"bias": normal(2, 4, 33, 47)},
    "bias that broadcasts": {"bias": normal(4, 1, 47)},
    "alibi": {"alibi_slopes": np.geomspace(0.5, 0.01, 4).astype(np.float32), "causal": True},
    "alibi by sequence": {"alibi_slopes": np.geomspace(0.5, 0.01, 8).astype(np.float32).reshape(2, 4)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": normal(4)},
    "dropout": {"dropout": 0.25, "seed": 7, "offset": 3},
    "seqused_k": {"seqused_k": np.array([20, 0], np.int32)},
    "block mask": {"block_mask": BLOCKS},
    "hyperbolic": {"score": "hyperbolic", "scale": 1.0, "shift": 0.25, "beta": 0.5},
    "deterministic": {"deterministic": True, "invariant": True, "exact_max": True},
    "many": {"causal": True, "window": (20, None), "bias": normal(1, 4, 33, 47), "softcap": 5.0, "sinks": normal(4), "mask": MASK},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    check(*tensors(), transform=jax.jit, **OPTIONS[name])


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes_and_layouts(dtype, layout):
    check(*tensors(dtype=dtype, layout=layout), layout=layout, causal=True)


def test_float64():
    with jax.enable_x64(True):
        check(*tensors(dtype="float64"), causal=True, bias=normal(1, 1, 33, 47, dtype="float64"))


TRANSFORMS = {"jit": jax.jit, "checkpoint": jax.checkpoint, "both": lambda f: jax.jit(jax.checkpoint(f)), "none": lambda f: f}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    check(*tensors(), transform=TRANSFORMS[name], causal=True, bias=normal(4, 33, 47))


def test_packed():
    cu_q, cu_k = np.array([0, 5, 5, 20, 30], np.int32), np.array([0, 9, 12, 30, 30], np.int32)
    q, k, v = normal(33, 4, 16), normal(32, 2, 16), normal(32, 2, 8)
    check(q, k, v, transform=jax.jit, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
    found = jax.jit(lambda q, k, v, a, b: strobe.jax.attention(q, k, v, cu_seqlens_q=a, cu_seqlens_k=b, causal=True))(q, k, v, cu_q, cu_k)
    close(found, strobe.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True))


def test_lists_of_int64():
    q, k, v = tensors()
    used = np.array([20, 3], np.int64)
    with jax.enable_x64(True):
        found = jax.jit(lambda used: strobe.jax.attention(q, k, v, seqused_k=used))(used)
    close(found, strobe.attention(q, k, v, seqused_k=used))
    with pytest.raises(ValueError, match="seqused_k"):
        strobe.jax.attention(q, k, v, seqused_k=np.array([2**40, 3]))


def test_pages_and_quantised_keys():
    rng = np.random.default_rng(0)
    q, table = normal(2, 4, 3, 32), np.array([[4, 1, 0], [2, 3, 0]], np.int32)
    k, v = (rng.integers(-127, 128, (5, 2, 16, 32)).astype(np.int8) for _ in range(2))
    scales = {"k_scale": (rng.random((5, 2, 16)) / 64).astype(np.float32), "v_scale": (rng.random((5, 2, 16)) / 64).astype(np.float32)}
    options = {"page_table": table, "seqused_k": np.array([40, 17], np.int32), "causal": True}
    found = jax.jit(lambda q, k, v, table, scales: strobe.jax.attention(q, k, v, **{**options, "page_table": table}, **scales))
    close(found(q, k, v, table, scales), strobe.attention(q, k, v, **options, **scales))
    with pytest.raises(ValueError, match="page_table"):
        jax.grad(lambda q: strobe.jax.attention(q, k, v, **options, **scales).sum())(q)


QUANTISED = ("int8", "float8_e4m3fn")  # float8: q is quantised as well


def quantised(dtype, layout, b=2, h=4, hkv=2, sq=8, sk=8, d=32, scales="rows"):
    """Arrays of a call over quantised k and v, by name. scales: one for each row, each head, or all."""
    rng = np.random.default_rng(0)
    sizes = {"q": (h, sq), "k": (hkv, sk), "v": (hkv, sk)}
    found = {}
    for name, (heads, rows) in sizes.items():
        if dtype == "int8":
            x = normal(b, heads, rows, d) if name == "q" else rng.integers(-9, 10, (b, heads, rows, d)).astype(np.int8)
        else:
            x = normal(b, heads, rows, d, dtype=dtype, seed=len(found))
        shape = {"rows": (b, heads, rows), "heads": (heads,), "one": ()}[scales]
        scale = np.asarray(0.1 + rng.random(shape), np.float32)
        swap = (lambda a: a.swapaxes(1, 2).copy() if a.ndim > 2 else a) if layout == "bshd" else lambda a: a
        found[name] = swap(x)
        if name != "q" or dtype != "int8":
            found[f"{name}_scale"] = swap(scale)
    return found


@pytest.mark.parametrize("scales", ["rows", "heads", "one"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("sizes", [{"h": 8, "hkv": 8}, {"h": 6, "hkv": 2, "sq": 5, "sk": 7}], ids=["heads are as many as keys", "others"])
def test_scales(dtype, layout, scales, sizes):
    """Beside the reference: where there are as many heads as keys, an exchange of their axes would go unnoticed."""
    given = quantised(dtype, layout, scales=scales, **sizes)
    wanted = strobe.reference(**given, causal=True, layout=layout)[0]
    out = jax.jit(lambda given: strobe.jax.attention(**given, causal=True, layout=layout))(given)
    assert out.dtype == (jnp.float32 if dtype == "int8" else jnp.bfloat16)
    close(out, wanted, out.dtype.name)


def test_out_dtype():
    given = quantised("float8_e4m3fn", "bshd")
    out = strobe.jax.attention(**given, layout="bshd", out_dtype=jnp.float16)
    assert out.dtype == jnp.float16
    close(out, strobe.reference(**given, layout="bshd")[0], "float16")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_scales_of_groups(layout):
    """A scale for each column and 32 rows has four axes."""
    given = quantised("int8", layout, sk=40)
    shape = (2, 2, 2, 32)  # heads and groups are as many
    given["k_scale"] = (0.1 + np.random.default_rng(1).random(shape)).astype(np.float32)
    out = strobe.jax.attention(**given, layout=layout, k_scale_group=32)
    close(out, strobe.reference(**given, layout=layout, k_scale_group=32)[0])


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_scales_of_packed_queries_and_pages(layout):
    """Packed queries and their scales have no axes to exchange; pages and theirs do."""
    given = quantised("float8_e4m3fn", layout, b=3, h=4, hkv=4, sk=4, scales="rows")
    given |= {"q": normal(4, 4, 32, dtype="float8_e4m3fn"), "q_scale": np.abs(normal(4, 4)) + np.float32(0.1)}
    table, used = np.array([[2, 0], [1, 2]], np.int32), np.array([7, 3], np.int32)
    options = {"cu_seqlens_q": np.array([0, 1, 4], np.int32), "page_table": table, "seqused_k": used, "layout": layout}
    close(strobe.jax.attention(**given, **options), strobe.reference(**given, **options)[0], "bfloat16")


def test_float8_keys():
    """XLA's threads take denormals for zero; FP8 would lose its small numbers."""
    q, k, v = normal(1, 2, 3, 32), normal(1, 2, 40, 32, dtype="float8_e4m3fn"), normal(1, 2, 40, 32, dtype="float8_e4m3fn")
    one = np.ones((), np.float32)
    found = strobe.jax.attention(q, k, v, k_scale=one, v_scale=one)
    close(found, strobe.attention(q, k, v, k_scale=one, v_scale=one))


def test_auxiliary_results():
    q, k, v = tensors()
    found = jax.jit(lambda *a: strobe.jax.attention(*a, causal=True, return_lse=True, aux=("column_sums", "max_logit")))(q, k, v)
    wanted = strobe.attention(q, k, v, causal=True, return_lse=True, aux=("column_sums", "max_logit"))
    assert found._fields == wanted._fields
    for x, y in zip(found, wanted, strict=True):
        close(x, y)
    jax.grad(lambda q: strobe.jax.attention(q, k, v, aux=("max_logit",)).out.sum())(q)


def test_part():
    q, k, v = tensors(sq=47)
    part = strobe.Part(q_ranges=[(10, 20)], k_ranges=[(0, 47)], seqlens_q=47, seqlens_k=47)
    found = jax.jit(lambda q, k, v: strobe.jax.attention(q, k, v, part=part, causal=True))(q[:, :, 10:30], k, v)
    close(found, strobe.attention(q, k, v, causal=True)[:, :, 10:30])


def test_dropout_by_key():
    q, k, v = tensors()
    call = jax.jit(lambda q, key: strobe.jax.attention(q, k, v, dropout=0.5, rng=key))
    key = jax.random.key(3)
    seed = int.from_bytes(np.asarray(jax.random.key_data(key)).tobytes(), "little", signed=True)
    close(call(q, key), strobe.attention(q, k, v, dropout=0.5, seed=seed))
    close(call(q, jax.random.PRNGKey(3)), call(q, key))
    assert np.abs(np.asarray(call(q, key)) - np.asarray(call(q, jax.random.key(4)))).max() > 0.1
    with pytest.raises(ValueError, match=r"seed: missing beside dropout"):
        strobe.jax.attention(q, k, v, dropout=0.5)


def test_donation():
    q, k, v = map(jnp.asarray, tensors(sk=33, dv=16))
    wanted = np.asarray(strobe.jax.attention(q, k, v))
    close(jax.jit(strobe.jax.attention, donate_argnums=0)(q, k, v), wanted)
    assert q.is_deleted()


def test_empty():
    q, k, v = tensors(sq=0)
    assert strobe.jax.attention(q, k, v).shape == (2, 4, 0, 24)
    q, k, v = tensors(sk=0)
    out, lse = jax.jit(lambda *a: strobe.jax.attention(*a, return_lse=True))(q, k, v)
    assert not np.asarray(out).any()
    assert np.isneginf(np.asarray(lse)).all()


def test_threads_and_engine():
    q, k, v = tensors()
    close(strobe.jax.attention(q, k, v, threads=2, engine="cpu-baseline"), strobe.attention(q, k, v))


class TestVmap:
    """A mapped axis is folded into the batch, or each sample is a call."""

    def check(self, call, arrays, axes):
        samples = max(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
        of = lambda n: [x if axis is None else np.take(x, n, axis) for x, axis in zip(arrays, axes, strict=True)]  # noqa: E731
        calls = {
            "forward": call,
            "gradients": jax.grad(lambda *a: (call(*a) ** 2).sum(), argnums=tuple(range(len(arrays)))),
        }
        for each in calls.values():
            found = jax.tree.leaves(jax.jit(jax.vmap(each, axes))(*arrays))
            single = [jax.tree.leaves(each(*of(n))) for n in range(samples)]
            for x, wanted in zip(found, zip(*single, strict=True), strict=True):
                close(x, np.stack(wanted))

    @pytest.mark.parametrize("axes", [(0, 0, 0), (1, None, None), (None, 2, None), (4, 3, 0)])
    def test_axes(self, axes):
        arrays = [x if axis is None else np.stack([x, 2 * x, -x], axis) for x, axis in zip(tensors(), axes, strict=True)]
        self.check(lambda *a: strobe.jax.attention(*a, causal=True), arrays, axes)

    @pytest.mark.parametrize("shape", [(33, 47), (4, 1, 47), (1, 4, 33, 47), (2, 1, 33, 47)])
    @pytest.mark.parametrize("axis", [None, 0])
    def test_bias(self, shape, axis):
        arrays = [np.stack([x, 2 * x, -x]) for x in tensors()]
        bias = normal(3, *shape) if axis == 0 else normal(*shape)
        self.check(lambda q, k, v, bias: strobe.jax.attention(q, k, v, bias=bias, mask=MASK), [*arrays, bias], (0, 0, 0, axis))

    @pytest.mark.parametrize(
        ("name", "x"),
        [
            ("sinks", normal(3, 4)),
            ("alibi_slopes", np.abs(normal(3, 4))),
            ("alibi_slopes", np.abs(normal(3, 2, 4))),
            ("mask", np.stack([MASK, ~MASK, MASK])),
            ("seqused_k", np.array([[1, 2], [0, 47], [9, 20]], np.int32)),
        ],
    )
    def test_options(self, name, x):
        q, k, v = tensors()
        self.check_forward(lambda q, x: strobe.jax.attention(q, k, v, **{name: x}), [np.stack([q, -q, 2 * q]), x])
        self.check_forward(lambda q, x: strobe.jax.attention(q, k, v, **{name: x}), [np.stack([q, -q, 2 * q]), x[0]], (0, None))

    def check_forward(self, call, arrays, axes=(0, 0)):
        found = jax.vmap(call, axes)(*arrays)
        for n in range(3):
            close(found[n], call(arrays[0][n], arrays[1] if axes[1] is None else arrays[1][n]))

    @pytest.mark.parametrize("scales", ["rows", "heads", "one"])
    @pytest.mark.parametrize("layout", ["bhsd", "bshd"])
    @pytest.mark.parametrize(
        ("dtype", "mapped"),
        [
            *(("int8", name) for name in ("", "k_scale", "v_scale", "all")),
            *(("float8_e4m3fn", name) for name in ("", "q_scale", "k_scale", "v_scale", "all")),
        ],
    )
    def test_scales(self, dtype, layout, scales, mapped):
        """Scales that samples have for themselves, and scales that they share."""
        given = quantised(dtype, layout, scales=scales)
        own = [name for name in given if name == "q" or mapped in (name, "all")]
        several = {name: np.stack([x, -x if x.dtype == np.int8 else x / 2, x]).astype(x.dtype) for name, x in given.items() if name in own}
        call = lambda mapped: strobe.jax.attention(**given | mapped, layout=layout)  # noqa: E731
        found = jax.vmap(call)(several)
        assert found.dtype == (jnp.float32 if dtype == "int8" else jnp.bfloat16)
        for n in range(3):
            sample = given | {name: np.asarray(x[n]) for name, x in several.items()}
            close(found[n], strobe.reference(**sample, layout=layout)[0], found.dtype.name)

    def test_calls_by_themselves(self):
        q, k, v = tensors()
        several = np.stack([q, -q, 2 * q])
        self.check_forward(lambda q, k: strobe.jax.attention(q, k, v, dropout=0.3, seed=5), [several, np.stack([k, 2 * k, k])])
        cu_q, cu_k = np.array([0, 5, 33], np.int32), np.array([0, 7, 47], np.int32)
        packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": True}
        self.check(lambda q: strobe.jax.attention(q, k[0].swapaxes(0, 1), v[0].swapaxes(0, 1), **packed), [normal(3, 33, 4, 16)], (0,))

    def test_twice_and_jacobian(self):
        q, k, v = tensors(b=1, h=2, hkv=1, sq=3, sk=5, d=4, dv=4)
        call = lambda q: strobe.jax.attention(q, k, v, causal=True)  # noqa: E731
        several = normal(2, 3, *q.shape)
        found = jax.vmap(jax.vmap(call))(several)
        close(found[1, 2], call(several[1, 2]))
        jacobian = jax.jacrev(call)(q)
        wanted = jax.jacrev(lambda q: dense(q, k, v))(q)
        close(jacobian, wanted)


def dense(q, k, v):
    """Causal attention in plain JAX."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool), s.shape[-1] - s.shape[-2]), s, -jnp.inf)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(s, -1), v)


class TestRefusals:
    """A wrong call raises when it is traced."""

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"window": (-1, 0)}, ValueError, r"window: \(-1, 0\); accepted"),
            ({"mask": np.ones((3, 1, 33, 47), bool)}, ValueError, r"mask: shape \(3, 1, 33, 47\); accepted"),
            ({"bias": np.ones((33, 47), np.int32)}, ValueError, r"bias: dtype int32; accepted"),
            ({"is_causal": True}, TypeError, "did you mean causal"),
            ({"engine": "no"}, ValueError, "engine"),
            ({"engine": "reference"}, ValueError, "engine: reference"),
            ({"seqused_k": np.array([1, 48], np.int32)}, ValueError, r"seqused_k: 48 at \[1\]"),
            ({"q": "x"}, TypeError, "q: str"),
        ],
    )
    def test_arguments(self, options, error, words):
        q, k, v = tensors()
        given = {"q": q, "k": k, "v": v, **options}
        with pytest.raises(error, match=words):
            jax.jit(lambda: strobe.jax.attention(**given))()

    def test_everything_at_once(self):
        q, k, v = tensors()
        with pytest.raises(ValueError, match=r"(?s)scale: .*k: .*bias: "):
            strobe.jax.attention(q, k[..., :3], v, bias=np.ones((2, 2, 2, 2), np.float32), scale=float("nan"))

    def test_other_functions_of_strobe(self):
        q, k, v = map(jnp.asarray, tensors())
        for call in (strobe.attention, strobe.explain, strobe.reference):
            with pytest.raises(TypeError, match=r"q: jax.*strobe\.jax\.attention takes JAX's"):
                call(q, k, v)

    def test_no_engine(self):
        q, k, v = tensors(d=300, dv=300)
        with pytest.raises(NotImplementedError, match="cpu-amx"):
            strobe.jax.attention(q, k, v, engine="cpu-amx")

    def test_derivatives(self):
        q, k, v = tensors()
        with pytest.raises(NotImplementedError, match="alibi_slopes"):
            jax.grad(lambda x: strobe.jax.attention(q, k, v, alibi_slopes=x).sum())(np.ones(4, np.float32))
