"""NumPy arrays: the same results as torch's, in NumPy's types, without torch being imported."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import strobe


def arrays(dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"q": (2, 4, 9, 16), "k": (2, 2, 11, 16), "v": (2, 2, 11, 8)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def options() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "causal": True,
        "mask": rng.random((2, 1, 1, 11)) > 0.2,
        "bias": rng.standard_normal((1, 4, 9, 11)).astype(np.float32),
        "alibi_slopes": rng.random(4).astype(np.float32),
        "sinks": rng.standard_normal(4).astype(np.float32),
        "dropout": 0.25,
        "rng": np.array([5, 6]),
        "window": (np.int64(6), None),
        "scale": np.float32(0.25),
    }


def as_torch(given: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}


def test_forward_and_gradients_are_torchs():
    given = arrays() | options()
    out, lse = strobe.attention(**given, return_lse=True)
    rng = np.random.default_rng(2)
    dout, dlse = rng.standard_normal(out.shape).astype(np.float32), rng.standard_normal(lse.shape).astype(np.float32)
    found = strobe.attention_backward(dout, out=out, lse=lse, dlse=dlse, **given)

    theirs = as_torch(given)
    leaves = [theirs[name].requires_grad_() for name in ("q", "k", "v", "bias", "sinks")]
    outs = strobe.attention(**theirs, return_lse=True)
    expected = torch.autograd.grad(outs, leaves, [torch.from_numpy(dout), torch.from_numpy(dlse)])
    for x, y in zip((out, lse, *found), (*outs, *expected), strict=True):
        assert isinstance(x, np.ndarray)
        np.testing.assert_array_equal(x, y.detach().numpy())


def test_numpys_scalars_are_numbers():
    given = arrays()
    plain = {"causal": True, "scale": 0.25, "dropout": 0.5, "seed": 3, "offset": 2**63 + 1, "tile_q": 16, "window": (5, None)}
    scalars = {"causal": np.bool_(True), "scale": np.float32(0.25), "dropout": np.float64(0.5), "seed": np.int64(3)}
    scalars |= {"offset": np.uint64(2**63 + 1), "tile_q": np.uint8(16), "window": (np.int16(5), None)}
    for framework in (given, as_torch(given)):
        for x, y in zip(*(strobe.attention(**framework, **o, return_lse=np.bool_(True)) for o in (plain, scalars)), strict=True):
            assert (x == y).all()
    assert (strobe.dropout_mask((np.int64(1), 1, 4, 4), 0.5, np.int64(3)) == strobe.dropout_mask((1, 1, 4, 4), 0.5, 3)).all()
    masks = strobe.BlockMask.causal(np.int64(32), np.int32(32), np.uint8(16), 16), strobe.BlockMask.causal(32, 32, 16, 16)
    assert repr(masks[0]) == repr(masks[1])


@pytest.mark.parametrize(
    "wrong", [{"scale": np.bool_(True)}, {"seed": np.bool_(True)}, {"seed": np.array(3)}, {"causal": np.int64(1)}], ids=str
)
def test_numpys_scalars_have_kinds(wrong):
    (name,) = wrong
    with pytest.raises(TypeError, match=f"^{name}: numpy"):
        strobe.attention(**arrays(), dropout=0.5, **wrong)


@pytest.mark.parametrize("name", ["q", "k", "mask"])
def test_masked_arrays_are_refused(name):
    given: dict[str, Any] = {**arrays(), "mask": np.ones((9, 11), np.bool_)}
    given[name] = np.ma.masked_array(given[name], given[name] > 0)
    with pytest.raises(TypeError, match=rf"^{name}: numpy\.ma.*MaskedArray; accepted is a "):
        strobe.attention(**given)


def test_masked_arrays_are_refused_by_the_others():
    masked = np.ma.masked_array(np.ones((2, 2), np.bool_), False)
    with pytest.raises(TypeError, match="^kept: numpy"):
        strobe.BlockMask.from_kept(masked, 16, 16)
    with pytest.raises(TypeError, match="^out_b: numpy"):
        strobe.merge(np.ones((1, 1, 2, 3)), np.ones((1, 1, 2)), np.ma.ones((1, 1, 2, 3)), np.ones((1, 1, 2)))


def test_strides_of_axes_that_nobody_walks():
    """A field of records: one query, whose stride is the record's."""
    records = np.zeros(1, np.dtype([("q", np.float32, (4,)), ("more", np.uint8)], align=False))
    records["q"] = [1, 2, 3, 4]
    q = records["q"][None, None]
    assert q.strides[2] % q.itemsize
    k = np.eye(4, dtype=np.float32)[None, None]
    np.testing.assert_array_equal(strobe.attention(q, k, k), strobe.attention(q.copy(), k, k))
    two = np.zeros(2, records.dtype)["q"][None, None]
    with pytest.raises(ValueError, match="^q: strides"):
        strobe.attention(two, k, k)


@pytest.mark.parametrize("like", [np.ones(1), torch.ones(1)], ids=["numpy", "torch"])
def test_what_comes_of_no_array_is_of_the_kind_that_is_asked_for(like):
    """A result without an array argument has the kind that is asked for, although the program has imported torch."""
    patterns = strobe.BlockMask.causal, strobe.BlockMask.local_global, strobe.BlockMask.strided, strobe.BlockMask.butterfly
    for pattern in patterns:
        more = {"stride": 2} if pattern == strobe.BlockMask.strided else {}
        mask = pattern(64, 64, 16, 16, **more, like=like)
        assert {type(x) for x in (*mask.arrays, mask.to_dense())} == {type(like)}
        assert repr(mask) == repr(pattern(64, 64, 16, 16, **more))
    assert type(strobe.dropout_mask((1, 1, 4, 4), 0.5, 1, like=like)) is type(like)
    with pytest.raises(TypeError, match="^like: str; accepted is a torch.Tensor or a numpy.ndarray"):
        strobe.BlockMask.causal(64, 64, 16, 16, like="numpy")


def test_gradients_that_were_not_asked_for_are_none():
    given = arrays()
    out, lse = strobe.attention(**given, return_lse=True)
    found = strobe.attention_backward(out, out=out, lse=lse, **given)
    assert found.dbias is None
    assert found.dsinks is None
    assert [x.shape for x in found[:3]] == [given[name].shape for name in "qkv"]


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_dtypes(dtype):
    given = arrays(dtype)
    out, lse = strobe.attention(**given, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    np.testing.assert_array_equal(out, strobe.attention(**as_torch(given)).numpy())


def test_bfloat16_of_ml_dtypes():
    bfloat16 = ml_dtypes.bfloat16
    given = arrays(bfloat16)
    out = strobe.attention(**given)
    assert out.dtype == bfloat16
    theirs = {name: torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for name, x in given.items()}
    np.testing.assert_array_equal(out.view(np.int16), strobe.attention(**theirs).view(torch.int16).numpy())


@pytest.mark.parametrize("kind", ["reversed", "sliced", "fortran", "broadcast", "read-only"])
def test_any_strides(kind):
    given = arrays()
    expected = strobe.attention(**given)
    turn = {
        "reversed": lambda x: np.ascontiguousarray(x[::-1, ::-1, ::-1, ::-1])[::-1, ::-1, ::-1, ::-1],
        "sliced": lambda x: np.repeat(x, 2, 3)[..., ::2],
        "fortran": np.asfortranarray,
        "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
        "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    }[kind]
    turned = {name: turn(x) for name, x in given.items()}
    if kind == "broadcast":
        expected = strobe.attention(**{name: x.copy() for name, x in turned.items()})
    np.testing.assert_array_equal(strobe.attention(**turned), expected)


def test_a_block_mask_of_no_batch():
    """torch hands NumPy strides of 0 where there is no element."""
    none = np.zeros((0, 2, 40, 16), np.float32)
    kept = strobe.BlockMask.from_kept(torch.ones(0, 2, 3, 3, dtype=torch.bool), 16, 16, 40, 40)
    assert strobe.attention(none, none, none, block_mask=kept).shape == none.shape


def test_layout():
    given = arrays()
    turned = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in given.items()}
    out, lse = strobe.attention(**turned, layout="bshd", return_lse=True)
    expected, expected_lse = strobe.attention(**given, return_lse=True)
    np.testing.assert_array_equal(out, expected.swapaxes(1, 2))
    np.testing.assert_array_equal(lse, expected_lse)
    assert out.flags.c_contiguous
    views = {name: x.swapaxes(1, 2) for name, x in turned.items()}
    assert strobe.attention(**views).swapaxes(1, 2).flags.c_contiguous


def test_the_generator_of_numpy_draws_the_mask():
    given = arrays()
    np.random.seed(3)
    first, second = strobe.attention(**given, dropout=0.5), strobe.attention(**given, dropout=0.5)
    np.random.seed(3)
    np.testing.assert_array_equal(strobe.attention(**given, dropout=0.5), first)
    assert (first != second).any()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("q", {"q": arrays()["q"].tolist()}),
        ("q", {"q": arrays()["q"].astype(">f4")}),
        ("q", {"q": arrays()["q"].astype(np.int8)}),
        ("k", {"k": torch.zeros(2, 2, 11, 16)}),
        ("v", {"v": np.ndarray((2, 2, 11, 8), np.float32, bytes(4096), 0, (1000, 500, 34, 4))}),
        ("mask", {"mask": np.ones((1,) * 5, bool)}),
        ("bias", {"bias": np.zeros((1, 1, 1, 3), np.float32)}),
        ("rng", {"dropout": 0.1, "rng": np.array([1, 2], np.int32)}),
    ],
)
def test_bad_arguments(name, wrong):
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: .*accepted"):
        strobe.attention(**arrays() | wrong)


def test_torch_is_not_imported():
    code = """
        import sys
        sys.modules["torch"] = None  # an import of torch would raise
        import numpy as np
        import strobe
        q = np.random.default_rng(0).standard_normal((1, 2, 64, 16)).astype(np.float32)
        blocks = strobe.BlockMask.local_global(64, 64, 16, 16)
        out, lse = strobe.attention(q, q, q, block_mask=blocks, dropout=0.1, seed=3, return_lse=True)
        gradients = strobe.attention_backward(out, q, q, q, out, lse, block_mask=blocks, dropout=0.1, seed=3)
        reference, _ = strobe.reference(q, q, q, block_mask=blocks, dropout=0.1, seed=3)
        merged, _ = strobe.merge(out, lse, out, lse)
        strobe.explain(q, q, q)
        assert strobe.dropout_mask((1, 2, 64, 64), 0.1, 3).dtype == bool
        close = [abs(x - y).max() <= 1e-6 * abs(y).max() for x, y in ((out, reference), (merged, out))]
        print(*close, gradients.dq.shape, sys.modules["torch"])
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "True True (1, 2, 64, 16) None"


def test_what_is_not_installed_is_named_with_the_way_to_it():
    """The message comes for an attribute and for an import."""
    code = """
        import sys
        import strobe
        sys.modules |= dict.fromkeys(("torch", "numpy", "transformers"))  # an import of them would raise
        from importlib import import_module
        calls = [lambda name=name: getattr(strobe, name) for name in ("compat", "distributed", "kv", "nn")]
        modules = ("compat.sdpa", "compat.flash_attn.bert_padding", "distributed", "kv", "nn")
        calls += [lambda name=name: import_module(f"strobe.{name}") for name in modules]
        calls += [lambda: strobe.BlockMask.causal(32, 32, 16, 16), lambda: strobe.dropout_mask((1, 1, 2, 2), 0.5, seed=1)]
        for call in calls:
            try:
                call()
            except ModuleNotFoundError as error:
                print(error, error.name)
        del sys.modules["torch"], sys.modules["numpy"]
        try:
            strobe.compat.transformers.register()
        except ModuleNotFoundError as error:
            print(error, error.name)
    """
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True).stdout.splitlines()
    torch_needed = ["compat", "distributed", "kv", "nn", "compat", "compat", "distributed", "kv", "nn"]
    expected = [f"strobe.{name} needs torch: pip install 'torch>=2.4' torch" for name in torch_needed]
    expected += [f"strobe.{name} without like needs numpy: pip install 'numpy>=1.23' numpy" for name in ("BlockMask", "dropout_mask")]
    assert found == [*expected, "strobe.compat.transformers needs transformers: pip install 'transformers>=4.53' transformers"]


def test_importing_strobe_imports_neither():
    code = "import sys, strobe; print([name for name in ('torch', 'numpy', 'click', 'rich') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
