"""Functions of the score and the mask: their graphs against the functions themselves, when a graph is used again, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import nodes
import strobe
from device import DEVICE
from strobe import _function, _recorder_numpy, _recorder_torch
from strobe._graph import BOOLEAN, REAL, decoded
from strobe.arrays.numpy import NUMPY
from strobe.arrays.torch import TORCH

B, H, S = 2, 4, 12  # positions that are drawn


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TABLE, BIAS, SLOPES, SCALAR = numbers(1, H, 5), numbers(2, H, S, S), numbers(3, H), numbers(4)
DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3])
VISIBLE = torch.tensor([[True, False, True, True], [False, True, True, False], [True, True, False, True], [False, False, True, True]])
SIDE = 4  # of the image of the neighbourhood


def t5_buckets(distance: Any, xp: Any) -> Any:
    """The buckets of T5's relative bias, both directions."""
    far = xp.log(xp.maximum(xp.abs(distance), 1) / 2) / math.log(8 / 2) * 2
    bucket = xp.where(xp.abs(distance) < 2, xp.abs(distance) * 1.0, xp.minimum(2 + xp.floor(far), 4.0 + 0 * far))
    return bucket


class Torch(types.SimpleNamespace):
    """What functions of both libraries call."""

    where, abs, tanh, exp, log, floor, sqrt, sign = torch.where, torch.abs, torch.tanh, torch.exp, torch.log, torch.floor, torch.sqrt, torch.sign

    @staticmethod
    def _of_two(function: Callable[..., Tensor], x: Any, y: Any) -> Tensor:
        like = x if isinstance(x, Tensor) else y
        x, y = (z if isinstance(z, Tensor) else torch.full_like(like, z) for z in (x, y))
        return function(x, y)

    maximum = functools.partial(_of_two, torch.maximum)
    minimum = functools.partial(_of_two, torch.minimum)

    @staticmethod
    def integer(x: Tensor) -> Tensor:
        return x.long()


class NumPy(types.SimpleNamespace):
    where, abs, tanh, exp, log, floor, sqrt, sign = np.where, np.abs, np.tanh, np.exp, np.log, np.floor, np.sqrt, np.sign
    maximum, minimum = np.maximum, np.minimum

    @staticmethod
    def integer(x: Any) -> Any:
        return x.astype(np.int64)


def both(xp: Any, array: Callable[[Tensor], Any]) -> dict[str, Callable[..., Any]]:
    """The twelve functions of scores and masks that models have, and arithmetic, in either library."""
    slopes, table, bias, documents, visible, scalar = map(array, (SLOPES, TABLE, BIAS, DOCUMENTS, VISIBLE, SCALAR))

    def t5(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[h, xp.integer(t5_buckets(i - j, xp))]

    def neighbourhood(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (xp.abs(i // SIDE - j // SIDE) <= 1) & (xp.abs(i % SIDE - j % SIDE) <= 1)

    return {
        "alibi": lambda s, b, h, i, j: s - 2.0**-3 * xp.abs(i - j),
        "learned alibi": lambda s, b, h, i, j: s + slopes[h] * (j - i),
        "learned bias": lambda s, b, h, i, j: s + bias[h, i, j],
        "t5": t5,
        "softcap": lambda s, b, h, i, j: 20.0 * xp.tanh(s / 20.0),
        "softcap and alibi": lambda s, b, h, i, j: 5.0 * xp.tanh(s / 5.0) - 0.25 * xp.abs(i - j),
        "document": lambda b, h, i, j: documents[i] == documents[j],
        "prefix": lambda b, h, i, j: (j < 3) | (i >= j),
        "window": lambda b, h, i, j: (i - j <= 4) & (j <= i),
        "dilated": lambda b, h, i, j: ((i - j) % 3 == 0) & (i >= j),
        "neighbourhood": neighbourhood,
        "tanh": lambda s, b, h, i, j: xp.tanh(s),
        "documents of documents": lambda s, b, h, i, j: xp.where(visible[documents[i], documents[j]], s, -math.inf),
        "integers": lambda s, b, h, i, j: s + (i - j) // 3 + (i - j) % 3 + (i - j) // -2 + (i - j) % -4 + (i * j - 5) ** 2,
        "bits": lambda s, b, h, i, j: s + (((i - j) & 5) | 8) + ((i - j) ^ 3) + ~i + ((i - j) << 2) + ((i - j) >> 1),
        "division": lambda s, b, h, i, j: s + (i - j) / 7 + s // 0.3 + s % 0.3 + 1 / (2 + xp.abs(s)),
        "booleans": lambda s, b, h, i, j: s * ((i > j) & (h < 2) | ~(j == 3) ^ (i == 1)) + ((i > j) + (h < 2)) * 1.0,
        "powers": lambda s, b, h, i, j: s**2 + s**3 + xp.abs(s) ** 0.5 + xp.abs(s) ** 1.7 + 2.0**s + i**2,
        "rows": lambda s, b, h, i, j: s + table[h][i % 5] + table[h, :][j % 5] + table[:, 1][h] + (table * 2.0).T[i % 5, h] + scalar,
        "negative": lambda s, b, h, i, j: s + table[-1, j % 5 - 5] + table[h - H, 0] + table[1:4:2][h % 2 - 2, 1] + table[1:][h % 3, 2],
        "new axes": lambda s, b, h, i, j: s + table[None, h, ..., 2][0] + table[..., None, 1][h][0],
        "after exp": lambda s, b, h, i, j: s + xp.exp(table)[h, i % 5] + xp.exp(table[h])[j % 5],
        "unrolled": lambda s, b, h, i, j: sum((table[h, n] * xp.tanh(s * (n + 1)) for n in range(5)), s),
    }


OF_BOTH = both(Torch, lambda x: x)
EMBEDDING = torch.nn.Embedding(S, 4).double().requires_grad_(False)
SMALL = DOCUMENTS.to(torch.int8)

OF_TORCH: dict[str, Callable[..., Any]] = {
    # FlexAttention's examples, as its authors write them
    "flex causal": lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf")),
    "flex relative": lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx),
    "flex alibi": lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx) * torch.exp2(-((h + 1) * 8.0 / H)),
    "flex per head": lambda score, b, h, q_idx, kv_idx: score + torch.exp2(-(torch.tensor(8.0) * (h + 1) / H)) * (q_idx - kv_idx),
    "flex natten": lambda b, h, q_idx, kv_idx: (
        (q_idx // SIDE - kv_idx // SIDE).abs().le(1).logical_and((q_idx % SIDE - kv_idx % SIDE).abs() <= 1)
    ),
    "flex checkerboard": lambda score, b, h, i, j: torch.where(torch.abs(i - j) % 2 == 1, score * 0.5, torch.where((i + j) % 2 == 0, score, 2)),
    "flex transpose": lambda b, h, i, j: torch.eq(i // 3, j // 3) & (b >= 0),
    # functions of torch
    "gelu": lambda s, b, h, i, j: F.gelu(s) + F.gelu(s, approximate="tanh"),
    "silu": lambda s, b, h, i, j: F.silu(s) + F.mish(s) + F.softplus(s) + F.softplus(s, 2.0, 3.0) + F.logsigmoid(s),
    "relu": lambda s, b, h, i, j: F.relu(s) + F.relu6(s) + F.leaky_relu(s) + F.elu(s, 0.5) + F.selu(s) + F.celu(s, 0.7),
    "hard": lambda s, b, h, i, j: F.hardtanh(s) + F.hardsigmoid(s) + F.hardswish(s) + F.hardshrink(s) + F.softshrink(s),
    "soft": lambda s, b, h, i, j: F.softsign(s) + F.tanhshrink(s) + F.threshold(s, 0.1, 0.2) + torch.sigmoid(s).logit(),
    "clamp": lambda s, b, h, i, j: s.clamp(-0.5, 0.5) + torch.clamp(i - j, min=-2) + s.clamp_min(0.1) + s.clip(max=SCALAR),
    "exp": lambda s, b, h, i, j: torch.expm1(s) + torch.exp2(s) + torch.log1p(s.abs()) + torch.log2(s.abs() + 1) + torch.log10(s.abs() + 1),
    "trigonometric": lambda s, b, h, i, j: torch.sin(s) + torch.cos(s) + torch.atan(s) + torch.atan2(s, s + 1) + torch.asin(torch.tanh(s)),
    "hyperbolic": lambda s, b, h, i, j: torch.sinh(s) + torch.cosh(s) + torch.asinh(s) + torch.acosh(s.abs() + 1) + torch.sinc(s),
    "roots": lambda s, b, h, i, j: s.abs().sqrt() + s.abs().add(1).rsqrt() + s.square() + torch.hypot(s, s + 1) + (s + 9).reciprocal(),
    "rounding": lambda s, b, h, i, j: torch.round(s * 3) + torch.floor(s) + torch.ceil(s) + s.trunc() + s.frac() + torch.sign(s),
    "division": lambda s, b, h, i, j: (
        s + torch.div(i - j, 3, rounding_mode="trunc") + torch.div(s, 0.3, rounding_mode="floor") + torch.fmod(i - j, 3) + torch.fmod(s, 0.7)
    ),
    "extremes": lambda s, b, h, i, j: torch.maximum(s, -s) + torch.minimum(i, j) + torch.max(i, j) + torch.fmax(s, s * s) + s.min(s + i),
    "special": lambda s, b, h, i, j: torch.erf(s) + torch.special.expit(s) + torch.xlogy(s, s.abs()) + torch.logaddexp(s, s * 2),
    "tests": lambda s, b, h, i, j: torch.nan_to_num(s) + torch.isnan(s) + s.isinf() + torch.isfinite(s) + torch.heaviside(s, s),
    "lerp": lambda s, b, h, i, j: torch.lerp(s, s * 2, 0.25) + torch.addcmul(s, s, s, value=2) + torch.rsub(s, 2) + torch.add(s, i, alpha=3),
    "masked": lambda s, b, h, i, j: s.masked_fill(i < j, -1.0) + s.where(i > j, 0.5) + torch.where(i == j, 1, 2),
    "constants": lambda s, b, h, i, j: (
        s * torch.tensor(3.0) + torch.tensor([1.0, 2.0, 3.0, 4.0])[h] + torch.full_like(s, 2) + torch.arange(5)[h] + torch.ones_like(s)
    ),
    "dtypes": lambda s, b, h, i, j: (i * 100).to(torch.int8) + (i * 100).to(torch.uint8) + s.long() + (i > 2).float() + s.double().to(s.dtype),
    "module": lambda s, b, h, i, j: s + EMBEDDING(i)[h] + EMBEDDING.weight[j, h],
    "gathers": lambda s, b, h, i, j: (
        s + TABLE.gather(1, (i % 5).view(1, 1))[0, 0] + torch.take(TABLE, h) + TABLE.index_select(0, h).squeeze(0)[1] + TABLE[h].select(0, 2)
    ),
    "views": lambda s, b, h, i, j: (
        s + TABLE.flip(1)[h, i % 5] + TABLE.reshape(-1)[h] + TABLE.view(2, 10)[h % 2, i % 10] + TABLE.transpose(0, 1)[i % 5, h]
        + TABLE.expand(2, 4, 5)[b, h, 0] + TABLE[h].unbind()[3] + TABLE.unsqueeze(1)[h, 0, 1]
    ),  # fmt: skip
    "small integers": lambda s, b, h, i, j: s + SMALL[i] * SMALL[j],
    "shifts": lambda s, b, h, i, j: s + torch.bitwise_left_shift(i, 2) + (j - i >> 1) + (i - j).bitwise_not() + torch.bitwise_xor(i, j),
}


def count_of(function: Callable[..., Any]) -> int:
    return function.__code__.co_argcount


def arguments_of(function: Callable[..., Any]) -> tuple[tuple[str, str], ...]:
    return _function._ARGUMENTS["score" if count_of(function) == 5 else "mask"]


def text_of(function: Callable[..., Any], recorder: Any) -> tuple[str, list[Any]]:
    graph, value, captured = recorder.record(function, arguments_of(function), True)
    kind = REAL if count_of(function) == 5 else BOOLEAN
    result = graph.of(value).at((), kind)
    used = graph.captured_by(result)
    return graph.text(result, {n: place for place, n in enumerate(used)}), [captured[n] for n in used]


def drawn(rng: random.Random) -> tuple[float, int, int, int, int]:
    s = rng.choice([rng.gauss(0, 1), rng.gauss(0, 4), 0.0, 1.0, -1.0, 0.5])
    return s, rng.randrange(B), rng.randrange(H), rng.randrange(S), rng.randrange(S)


def agrees(function: Callable[..., Any], text: str, captured: list[Any], number: Callable[[Any], Any]) -> None:
    rng = random.Random(1)
    lists = [x.tolist() for x in captured]
    for _ in range(60):
        given = drawn(rng)
        got = nodes.evaluate(text, dict(zip(nodes.ARGUMENTS, given, strict=True)), lists)
        expected = function(*map(number, given[5 - count_of(function) :])).item()
        same = got == expected or (got != got and expected != expected)
        assert same or got == pytest.approx(expected, rel=1e-6, abs=1e-9), (given, text)


def of_torch(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else torch.int64)


@pytest.mark.parametrize("function", [*OF_BOTH.values(), *OF_TORCH.values()], ids=[*OF_BOTH, *OF_TORCH])
def test_a_graph_computes_what_the_function_does(function):
    agrees(function, *text_of(function, _recorder_torch), of_torch)


@pytest.mark.parametrize("name", OF_BOTH)
def test_numpy_makes_the_graph_that_torch_makes(name):
    function = both(NumPy, lambda x: x.numpy())[name]
    text, captured = text_of(function, _recorder_numpy)
    assert text == text_of(OF_BOTH[name], _recorder_torch)[0]
    agrees(function, text, captured, lambda x: np.float64(x) if isinstance(x, float) else np.int64(x))


NUMPY_ONLY: dict[str, Callable[..., Any]] = {
    "functions": lambda s, b, h, i, j: np.clip(s, -1, 1) + np.square(s) + np.hypot(s, 2) + np.logaddexp(s, 1) + np.float32(2) * s + np.cbrt(s),
    "methods": lambda s, b, h, i, j: s.clip(-1, 1) + (i * 100).astype(np.int8) + np.take(TABLE.numpy(), h) + np.sinc(s) + np.rint(s * 3),
    "select": lambda s, b, h, i, j: np.select([i < j, i == j], [s, 2 * s], 0.5) + np.nan_to_num(s) + np.expand_dims(s, 0)[0],
}


@pytest.mark.parametrize("name", NUMPY_ONLY)
def test_functions_of_numpy(name):
    table = TABLE.numpy()
    functions = NUMPY_ONLY | {"methods": lambda s, b, h, i, j: s.clip(-1, 1) + (i * 100).astype(np.int8) + np.take(table, h) + np.sinc(s)}
    agrees(functions[name], *text_of(functions[name], _recorder_numpy), lambda x: np.float64(x) if isinstance(x, float) else np.int64(x))


# When a recording is used again


def recorded_text(function: Callable[..., Any], name: str = "score", framework: Any = TORCH) -> tuple[str, list[Any]]:
    wrong: list[Exception] = []
    q = torch.zeros(1, dtype=torch.float64) if framework is TORCH else np.zeros(1)
    found = _function.recorded(wrong, {name: function}, framework, q)
    assert not wrong, wrong
    return found.pop(_function.FIELDS[name]), [*found.values()]


def is_known(function: Callable[..., Any], framework: Any = TORCH) -> bool:
    q = torch.zeros(1, dtype=torch.float64) if framework is TORCH else np.zeros(1)
    return _function.as_fields({"score": function}, framework, q) is not None


FACTOR, PAIR, NESTED = 2.0, [1.0, 2.0], {"deep": {"factor": 2.0}}
MODULE = types.ModuleType("config_of_the_test")
MODULE.FACTOR = 2.0


def helper(x: Any) -> Any:
    return x * FACTOR


class Config:
    factor = 2.0


@dataclasses.dataclass
class Scores:
    factor: float = 2.0

    def __call__(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return self.scaled(s)

    def method(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return self.scaled(s)

    def scaled(self, s: Any) -> Any:
        return s * self.factor


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0
        self.inner = torch.nn.Module()
        self.inner.factor = 2.0

    def forward(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * self.factor + self.inner.factor


def with_cell(factor: Any) -> Callable[..., Any]:
    return lambda s, b, h, i, j: s * factor


def with_default(s: Any, b: Any, h: Any, i: Any, j: Any, factor: Any = 2.0) -> Any:
    return s * factor


def with_keyword(s: Any, b: Any, h: Any, i: Any, j: Any, *, factor: Any = 2.0) -> Any:
    return s * factor


def change_cell() -> tuple[Callable[..., Any], Callable[[float], None]]:
    factor = 2.0

    def function(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * factor

    def change(x: float) -> None:
        nonlocal factor
        factor = x

    return function, change


def change_inner_cell() -> tuple[Callable[..., Any], Callable[[float], None]]:
    inner, change = change_cell()
    return lambda s, b, h, i, j: inner(s, b, h, i, j) + 1, change


def set_item(container: Any, key: Any) -> Callable[[float], None]:
    return functools.partial(container.__setitem__, key)


def mutations() -> dict[str, Callable[[], tuple[Callable[..., Any], Callable[[float], None]]]]:
    """A function whose factor is 2.0, and what changes it."""
    scores, module, config, values = Scores(), Module(), types.SimpleNamespace(factor=2.0), [2.0]

    def default(x: float) -> None:
        with_default.__defaults__ = (x,)

    def keyword(x: float) -> None:
        with_keyword.__kwdefaults__["factor"] = x

    def code(x: float) -> None:
        with_code.__code__ = (lambda s, b, h, i, j: s * 3.0).__code__

    def with_code(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * 2.0

    return {
        "cell": change_cell,
        "cell of a function that is called": change_inner_cell,
        "default": lambda: (with_default, default),
        "keyword default": lambda: (with_keyword, keyword),
        "global": lambda: (lambda s, b, h, i, j: s * FACTOR, set_item(globals(), "FACTOR")),
        "global of a function that is called": lambda: (lambda s, b, h, i, j: helper(s), set_item(globals(), "FACTOR")),
        "attribute of a module": lambda: (lambda s, b, h, i, j: s * MODULE.FACTOR, set_item(MODULE.__dict__, "FACTOR")),
        "attribute of a class": lambda: (lambda s, b, h, i, j: s * Config.factor, functools.partial(setattr, Config, "factor")),
        "attribute of an object": lambda: (lambda s, b, h, i, j: s * config.factor, functools.partial(setattr, config, "factor")),
        "attribute of a callable": lambda: (scores, functools.partial(setattr, scores, "factor")),
        "attribute of a method": lambda: (scores.method, functools.partial(setattr, scores, "factor")),
        "attribute of a torch module": lambda: (module, functools.partial(setattr, module, "factor")),
        "attribute of a module within": lambda: (module, functools.partial(setattr, module.inner, "factor")),
        "list": lambda: (lambda s, b, h, i, j: s * values[0], set_item(values, 0)),
        "nested dictionary": lambda: (lambda s, b, h, i, j: s * NESTED["deep"]["factor"], set_item(NESTED["deep"], "factor")),
        "list of any length": lambda: (lambda s, b, h, i, j: s * sum(PAIR), PAIR.append),
        "a function's code": lambda: (with_code, code),
        "a partial function": lambda: (functools.partial(with_keyword, factor=2.0), lambda x: None),
        "what is not followed": lambda: (lambda s, b, h, i, j: s * globals()["FACTOR"], set_item(globals(), "FACTOR")),
        "attribute by name": lambda: (lambda s, b, h, i, j: s * getattr(config, "fac" + "tor"), functools.partial(setattr, config, "factor")),
    }


@pytest.fixture
def restored():
    yield
    globals().update(FACTOR=2.0, PAIR=[1.0, 2.0], NESTED={"deep": {"factor": 2.0}})
    Config.factor = MODULE.FACTOR = 2.0
    with_default.__defaults__, with_keyword.__kwdefaults__["factor"] = (2.0,), 2.0


@pytest.mark.parametrize("name", mutations())
@pytest.mark.parametrize("framework", [TORCH, NUMPY], ids=["torch", "numpy"])
def test_a_changed_value_is_used(name, framework, restored):
    function, change = mutations()[name]()
    before, _ = recorded_text(function, framework=framework)
    assert recorded_text(function, framework=framework)[0] == before
    followed = name not in ("what is not followed", "attribute by name")
    assert is_known(function, framework) == followed
    change(3.0)
    assert is_known(function, framework) == (name == "a partial function")
    after, _ = recorded_text(function, framework=framework)
    number = torch.tensor(1.0, dtype=torch.float64) if framework is TORCH else np.float64(1.0)
    for text in (after, recorded_text(function, framework=framework)[0]):
        assert nodes.evaluate(text, {"SCORE": 1.0}) == float(function(number, 0, 0, 0, 0))
    assert (after != before) == (name != "a partial function")


@pytest.mark.parametrize(("old", "new"), [(1, 1.0), (1, True), (0.0, -0.0), (2.0, math.nan), ("a", "b"), (None, 1.0)])
def test_values_that_are_equal_may_differ(old, new):
    """A function sees their types and signs."""

    def made(x: Any) -> Callable[..., Any]:
        return lambda s, b, h, i, j: s if x is None else i * x if isinstance(x, (int, float)) else s * ord(x)

    _function._recordings.clear()
    recorded_text(made(old))
    assert is_known(made(old))
    assert not is_known(made(new))
    recorded_text(made(math.nan))
    assert is_known(made(math.nan))


def test_another_number_makes_the_same_structure():
    def structure(x: float, n: int) -> list[tuple[str, tuple[int, ...]]]:
        text, _ = recorded_text(lambda s, b, h, i, j: torch.where(i - j < n, torch.tanh(s / x) * x, -math.inf))
        return [node[:2] for node in decoded(text)]

    assert structure(2.0, 3) == structure(3.0, 3) == structure(0.0, 0) == structure(1.0, -(2**40))


def test_other_tensors_need_no_recording():
    """In another function of the same code, as a layer makes one in each call; another shape or dtype does."""

    def made(table: Tensor) -> Callable[..., Any]:
        return lambda s, b, h, i, j: s + table[h]

    text, (captured,) = recorded_text(made(SLOPES))
    assert captured is SLOPES
    other = SLOPES.clone()
    assert is_known(made(other))
    again, (captured,) = recorded_text(made(other))
    assert again == text
    assert captured is other
    assert not is_known(made(SLOPES.float()))
    assert not is_known(made(numbers(1, H + 1)))


def test_a_tensor_that_both_functions_read_is_captured_once():
    slopes = SLOPES.float()
    options = {"score": lambda s, b, h, i, j: s + slopes[h] * DOCUMENTS[i], "mask": lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j]}
    wrong: list[Exception] = []
    found = _function.recorded(wrong, options, TORCH, torch.zeros(1))
    assert [found[name] for name in _function.CAPTURED if name in found] == [slopes, DOCUMENTS] or found["captured_1"] is DOCUMENTS
    assert {*found} == {"score_function", "mask_function", "captured_0", "captured_1"}
    assert "LOAD 1" in found["mask_function"]
    assert "LOAD 0" not in found["mask_function"]
    assert _function.as_fields(options, TORCH, torch.zeros(1)).keys() == found.keys()


def test_tensors_that_a_function_makes_are_recorded_each_time():
    """Their numbers may follow from anything."""
    state = [1.0]

    def function(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + torch.tensor([state[0], 2.0])[h % 2]

    recorded_text(function)
    assert not is_known(function)
    state[0] = 5.0
    _, (captured,) = recorded_text(function)
    assert captured.tolist() == [5.0, 2.0]


def test_the_memory_is_bounded():
    for n in range(2 * _function._MOST_CODES):
        scope: dict[str, Any] = {}
        exec(f"f = lambda s, b, h, i, j: s + {n}", scope)
        recorded_text(scope["f"])
    assert len(_function._recordings) <= _function._MOST_CODES
    for n in range(3 * _function._MOST_RECORDINGS):
        recorded_text(with_cell(float(n)))
    assert all(len(found) <= _function._MOST_RECORDINGS for _, found in _function._recordings.values())
