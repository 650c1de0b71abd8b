"""Functions of the score and the mask: their graphs against the functions themselves, when a graph is used again, and what is refused."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import itertools
import math
import operator
import random
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import nodes
import strobe
from check import dtype_of
from device import DEVICE, running_on
from engines import available_engines
from strobe import _function, _parse, _recorder_numpy, _recorder_torch
from strobe._call import Call
from strobe._graph import BOOLEAN, REAL, UnrecordableError, decoded
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

    where, abs, tanh, exp, log, floor, sqrt, sign = (
        torch.where,
        torch.abs,
        torch.tanh,
        torch.exp,
        torch.log,
        torch.floor,
        torch.sqrt,
        torch.sign,
    )

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
        "alibi of other heads": lambda s, b, h, i, j: 5.0 * xp.tanh(s / 5.0) - slopes[h - 2] * xp.abs(i - j),
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
        "sums": lambda s, b, h, i, j: s * table[h].sum() + (table * s)[h].mean() + table.mean(0)[j % 5] + (bias[h, i] * bias[h, j]).sum(-1),
        "extremes": lambda s, b, h, i, j: s + table[h].max() - (table + s).min() + (table[h] * s).prod() + bias[h].sum(0)[j],
        "of any": lambda b, h, i, j: ((documents[i] == documents) & (documents[j] == 1)).any() | (table[h] > -9).all(-1) & (i > j),
        "products": lambda s, b, h, i, j: s + table[h] @ table[j % 4] + table[:, i % 5].dot(table[:, j % 5] + s),
    }


OF_BOTH = both(Torch, lambda x: x)
EMBEDDING = torch.nn.Embedding(S, 4).double().requires_grad_(False)
SMALL = DOCUMENTS.to(torch.int8)
# An operator of its own, as a library makes it whose function takes an instruction on a GPU.
torch.library.define("strobe_tests::doubled_tanh", "(Tensor x) -> Tensor")
torch.library.impl("strobe_tests::doubled_tanh", "CompositeExplicitAutograd", lambda x: 2 * torch.tanh(x))

OF_TORCH: dict[str, Callable[..., Any]] = {
    # FlexAttention's examples, as its authors write them
    "flex causal": lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf")),
    "flex relative": lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx),
    "flex alibi": lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx) * torch.exp2(-((h + 1) * 8.0 / H)),
    "flex per head": lambda score, b, h, q_idx, kv_idx: score + torch.exp2(-(torch.tensor(8.0) * (h + 1) / H)) * (q_idx - kv_idx),
    "flex natten": lambda b, h, q_idx, kv_idx: (
        (q_idx // SIDE - kv_idx // SIDE).abs().le(1).logical_and((q_idx % SIDE - kv_idx % SIDE).abs() <= 1)
    ),
    "flex checkerboard": lambda score, b, h, i, j: torch.where(
        torch.abs(i - j) % 2 == 1, score * 0.5, torch.where((i + j) % 2 == 0, score, 2)
    ),
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
        s
        + torch.div(i - j, 3, rounding_mode="trunc")
        + torch.div(s, 0.3, rounding_mode="floor")
        + torch.fmod(i - j, 3)
        + torch.fmod(s, 0.7)
    ),
    "extremes": lambda s, b, h, i, j: torch.maximum(s, -s) + torch.minimum(i, j) + torch.max(i, j) + torch.fmax(s, s * s) + s.min(s + i),
    "special": lambda s, b, h, i, j: torch.erf(s) + torch.special.expit(s) + torch.xlogy(s, s.abs()) + torch.logaddexp(s, s * 2),
    "tests": lambda s, b, h, i, j: torch.nan_to_num(s) + torch.isnan(s) + s.isinf() + torch.isfinite(s) + torch.heaviside(s, s),
    "lerp": lambda s, b, h, i, j: (
        torch.lerp(s, s * 2, 0.25) + torch.addcmul(s, s, s, value=2) + torch.rsub(s, 2) + torch.add(s, i, alpha=3)
    ),
    "masked": lambda s, b, h, i, j: s.masked_fill(i < j, -1.0) + s.where(i > j, 0.5) + torch.where(i == j, 1, 2),
    "constants": lambda s, b, h, i, j: (
        s * torch.tensor(3.0) + torch.tensor([1.0, 2.0, 3.0, 4.0])[h] + torch.full_like(s, 2) + torch.arange(5)[h] + torch.ones_like(s)
    ),
    "dtypes": lambda s, b, h, i, j: (
        (i * 100).to(torch.int8) + (i * 100).to(torch.uint8) + s.long() + (i > 2).float() + s.double().to(s.dtype)
    ),
    "module": lambda s, b, h, i, j: s + EMBEDDING(i)[h] + EMBEDDING.weight[j, h],
    "gathers": lambda s, b, h, i, j: (
        s
        + TABLE.gather(1, (i % 5).view(1, 1))[0, 0]
        + torch.take(TABLE, h)
        + TABLE.index_select(0, h).squeeze(0)[1]
        + TABLE[h].select(0, 2)
    ),
    "views": lambda s, b, h, i, j: (
        s
        + TABLE.flip(1)[h, i % 5]
        + TABLE.reshape(-1)[h]
        + TABLE.view(2, 10)[h % 2, i % 10]
        + TABLE.transpose(0, 1)[i % 5, h]
        + TABLE.expand(2, 4, 5)[b, h, 0]
        + TABLE[h].unbind()[3]
        + TABLE.unsqueeze(1)[h, 0, 1]
        + TABLE.chunk(2, 1)[1][h, b % 2]
        + torch.stack([s, s * 2, s * 3])[i % 3]
        + torch.cat([TABLE, TABLE * 2])[i % 8, b]
        + TABLE.narrow(1, 1, 2)[h, 0]
    ),
    "joined": lambda s, b, h, i, j: (
        s
        + TABLE.sum((0, 1))
        + torch.amax(TABLE, 1, keepdim=True)[h, 0]
        + torch.amin(TABLE[h], 0)
        + torch.any(TABLE > 0, 1)[h]
        + torch.logsumexp(torch.stack([s, s * 2]), 0)
        + torch.dot(TABLE[h], TABLE[h] * s)
        + torch.max(TABLE)
    ),
    "softmax of a few": lambda s, b, h, i, j: s * torch.softmax(TABLE[h], 0)[j % 5] + torch.linalg.norm(TABLE[h]),
    "an operator of its own": lambda s, b, h, i, j: torch.ops.strobe_tests.doubled_tanh(s) + i,
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


@pytest.mark.parametrize("name", OF_TORCH)
def test_modes_make_no_difference(name):
    expected, _ = text_of(OF_TORCH[name], _recorder_torch)
    for mode in (torch.inference_mode, torch.no_grad, functools.partial(torch.autocast, "cpu")):
        with mode():
            assert text_of(OF_TORCH[name], _recorder_torch)[0] == expected


@pytest.mark.parametrize("name", OF_BOTH)
def test_numpy_makes_the_graph_that_torch_makes(name):
    function = both(NumPy, lambda x: x.numpy())[name]
    text, captured = text_of(function, _recorder_numpy)
    assert text == text_of(OF_BOTH[name], _recorder_torch)[0]
    agrees(function, text, captured, lambda x: np.float64(x) if isinstance(x, float) else np.int64(x))


NUMPY_ONLY: dict[str, Callable[..., Any]] = {
    "scalars": lambda s, b, h, i, j: s + np.float32(2) - (i - np.int32(1)) * np.float32(0.5) + np.where(i < j, np.float32(1), s),
    "functions": lambda s, b, h, i, j: (
        np.clip(s, -1, 1) + np.square(s) + np.hypot(s, 2) + np.logaddexp(s, 1) + np.float32(2) * s + np.cbrt(s)
    ),
    "methods": lambda s, b, h, i, j: s.clip(-1, 1) + (i * 100).astype(np.int8) + np.take(TABLE.numpy(), h) + np.sinc(s) + np.rint(s * 3),
    "select": lambda s, b, h, i, j: np.select([i < j, i == j], [s, 2 * s], 0.5) + np.nan_to_num(s) + np.expand_dims(s, 0)[0],
}


@pytest.mark.parametrize("name", NUMPY_ONLY)
def test_functions_of_numpy(name):
    table = TABLE.numpy()
    functions = NUMPY_ONLY | {"methods": lambda s, b, h, i, j: s.clip(-1, 1) + (i * 100).astype(np.int8) + np.take(table, h) + np.sinc(s)}
    agrees(functions[name], *text_of(functions[name], _recorder_numpy), lambda x: np.float64(x) if isinstance(x, float) else np.int64(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_number_is_that_of_the_dtype(dtype):
    table = torch.tensor([math.inf, -math.inf, math.nan, 1.0], dtype=dtype)
    q = torch.zeros(1, dtype=dtype if dtype == torch.float64 else torch.float32)

    def outcome(function: Callable[..., Any], framework: Any, given: Any, **names: float) -> list[float]:
        found = _function.recorded([], {"score": function}, framework, given)
        captured = [x.tolist() for name, x in found.items() if name != "score_function"]
        arguments = dict.fromkeys(nodes.ARGUMENTS, 0) | names
        return [nodes.evaluate(found["score_function"], arguments | {"HEAD": h}, captured) for h in range(4)]

    assert outcome(lambda s, b, h, i, j: torch.nan_to_num(table)[h], TORCH, q) == torch.nan_to_num(table).tolist()
    assert outcome(lambda s, b, h, i, j: s.nan_to_num(), TORCH, q, SCORE=-math.inf)[0] == torch.finfo(q.dtype).min
    least = outcome(lambda s, b, h, i, j: s * 0 + np.finfo(s.dtype).min, NUMPY, q.numpy(), SCORE=0.0)[0]
    assert least == torch.finfo(q.dtype).min
    assert outcome(lambda s, b, h, i, j: np.nan_to_num(s), NUMPY, q.numpy(), SCORE=math.inf)[0] == torch.finfo(q.dtype).max


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


class Base:
    factor = 2.0

    @property
    def doubled(self) -> float:
        return self.factor * 2

    @classmethod
    def scaled(cls, x: Any) -> Any:
        return x * cls.factor

    def __getitem__(self, n: int) -> float:
        return self.factor


class Child(Base):
    pass


class Slots:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 2.0


class Own(dict):
    pass


Pair = collections.namedtuple("Pair", "factor other")


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
    child, slots, own, user, pairs = Child(), Slots(), Own(factor=2.0), collections.UserDict(factor=2.0), [Pair(2.0, 1)]
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
        "property": lambda: (lambda s, b, h, i, j: s * child.doubled, functools.partial(setattr, child, "factor")),
        "class method": lambda: (lambda s, b, h, i, j: Child.scaled(s), functools.partial(setattr, Base, "factor")),
        "method of an operator": lambda: (lambda s, b, h, i, j: s * child[0], functools.partial(setattr, child, "factor")),
        "slot": lambda: (lambda s, b, h, i, j: s * slots.factor, functools.partial(setattr, slots, "factor")),
        "named tuple": lambda: (lambda s, b, h, i, j: s * pairs[0].factor, lambda x: set_item(pairs, 0)(Pair(x, 1))),
        "object of a library": lambda: (lambda s, b, h, i, j: s * user["factor"], set_item(user, "factor")),
        "memory that Python does not see": lambda: (lambda s, b, h, i, j: s * own["factor"], set_item(own, "factor")),
        "what is not followed": lambda: (lambda s, b, h, i, j: s * globals()["FACTOR"], set_item(globals(), "FACTOR")),
        "attribute by name": lambda: (
            lambda s, b, h, i, j: s * getattr(config, "fac" + "tor"),
            functools.partial(setattr, config, "factor"),
        ),
    }


@pytest.fixture
def restored():
    yield
    globals().update(FACTOR=2.0, PAIR=[1.0, 2.0], NESTED={"deep": {"factor": 2.0}})
    Config.factor = Base.factor = MODULE.FACTOR = 2.0
    with_default.__defaults__, with_keyword.__kwdefaults__["factor"] = (2.0,), 2.0


@pytest.mark.parametrize("name", mutations())
@pytest.mark.parametrize("framework", [TORCH, NUMPY], ids=["torch", "numpy"])
def test_a_changed_value_is_used(name, framework, restored):
    function, change = mutations()[name]()
    before, _ = recorded_text(function, framework=framework)
    assert recorded_text(function, framework=framework)[0] == before
    followed = name not in ("what is not followed", "attribute by name", "memory that Python does not see")
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


@pytest.mark.parametrize("name", [*OF_BOTH, *OF_TORCH])
def test_functions_of_the_library_are_followed(name):
    """Their recordings are used again, but for those of a function that makes tensors, or calls an operator whose code is not followed."""
    function = {**OF_BOTH, **OF_TORCH}[name]
    option = "score" if count_of(function) == 5 else "mask"
    recorded_text(function, option)
    assert (_function.as_fields({option: function}, TORCH, torch.zeros(1, dtype=torch.float64)) is not None) == (
        name not in ("constants", "an operator of its own")
    )
    if name in OF_BOTH:
        function = both(NumPy, lambda x: x.numpy())[name]
        recorded_text(function, option, NUMPY)
        assert _function.as_fields({option: function}, NUMPY, np.zeros(1)) is not None


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


def test_what_changes_by_itself_is_recorded_each_time():
    numbers_in_turn, generator = itertools.count(1), random.Random(0)
    for function in (
        lambda s, b, h, i, j: s * next(numbers_in_turn),
        lambda s, b, h, i, j: s * generator.gauss(0, 1),
        lambda s, b, h, i, j: s * time.time(),
        lambda s, b, h, i, j: s * np.random.rand(),
    ):
        assert recorded_text(function) != recorded_text(function)


def test_no_tensor_is_kept():
    def call() -> weakref.ref[Tensor]:
        table = SLOPES.clone()
        holder = types.SimpleNamespace(table=table, again=[table])
        _, (captured,) = recorded_text(lambda s, b, h, i, j: s + table[h] + holder.table[h] + holder.again[0][h])
        assert captured is table
        return weakref.ref(table)

    kept = call()
    gc.collect()
    assert kept() is None


def test_the_memory_is_bounded():
    for n in range(2 * _function._MOST_CODES):
        scope: dict[str, Any] = {}
        exec(f"f = lambda s, b, h, i, j: s + {n}", scope)
        recorded_text(scope["f"])
    assert len(_function._recordings) <= _function._MOST_CODES
    for n in range(3 * _function._MOST_RECORDINGS):
        recorded_text(with_cell(float(n)))
    assert all(len(each.known) <= _function._MOST_RECORDINGS for each in _function._recordings.values())


def test_long_functions_are_prepared_too():
    """Their texts have more bytes than a key may have; ones that differ in the last operation are other calls."""

    def of(last: float) -> Callable[..., Any]:
        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            for n in range(120):
                s = s + TABLES[n % 8][h] * n
            return s * last

        return score

    q = Q.detach().requires_grad_()
    text = text_of(of(2.0), _recorder_torch)[0]
    assert len(text) > 4096
    for _ in range(3):
        for last in (2.0, 3.0):
            strobe.attention(q, K, V, score=of(last)).sum().backward()
    with mock.patch.object(_parse, "read", side_effect=AssertionError), mock.patch.object(Call, "structs", side_effect=AssertionError):
        for last in (2.0, 3.0):
            q.grad = None
            out = strobe.attention(q, K, V, score=of(last))
            out.sum().backward()
            scale = last / math.sqrt(q.shape[-1])
            torch.testing.assert_close(out.detach(), torch.softmax(q.detach() @ K.mT * scale, -1) @ V, atol=1e-5, rtol=1e-5)


def test_calls_that_come_again_read_the_tensors_of_the_call():
    """Compiled code is kept, per thread, and reads other memory in each call: of other tensors, strides, lengths and threads."""
    tables = [numbers(seed, 2, 9).float().to(DEVICE).requires_grad_() for seed in range(3)]
    tables += [numbers(3, 9, 2).float().to(DEVICE).T.requires_grad_()]
    lengths = (4, 9)
    drawn = {n: [numbers(seed, 1, 2, n, 16).float().to(DEVICE) for seed in range(3)] for n in lengths}

    def expected(table: Tensor, n: int) -> tuple[Tensor, Tensor]:
        q, k, v = drawn[n]
        place = torch.arange(n, device=DEVICE)
        bias = table.detach()[:, (place[:, None] - place).abs()].requires_grad_()
        out = strobe.attention(q, k, v, bias=bias[None])
        (gradient,) = torch.autograd.grad(out.square().sum(), bias)
        found = torch.zeros(2, n, device=DEVICE).index_add(1, (place[:, None] - place).abs().flatten(), gradient.flatten(1))
        return out.detach(), torch.nn.functional.pad(found, (0, 9 - n))

    right = {(t, n): expected(table, n) for t, table in enumerate(tables) for n in lengths}
    failed: list[BaseException] = []

    def run(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(60):
                t, n = rng.randrange(len(tables)), rng.choice(lengths)
                table = tables[t]
                out = strobe.attention(*drawn[n], score=lambda s, b, h, i, j: s + table[h, (i - j).abs()])  # noqa: B023
                (gradient,) = torch.autograd.grad(out.square().sum(), table)
                for x, y in zip((out.detach(), gradient), right[t, n], strict=True):
                    torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed, failed


# What is refused

Q, K, V = (numbers(seed, 1, 2, S, 16).float().to(DEVICE) for seed in (5, 6, 7))
TABLES = [torch.zeros(2, device=DEVICE) for _ in range(9)]
EMPTY, DEEP = torch.zeros(0, device=DEVICE), torch.zeros(1, 1, 1, 1, 2, device=DEVICE)
COMPLEX, EIGHT_BITS = torch.zeros(2, dtype=torch.complex64, device=DEVICE), torch.zeros(2, device=DEVICE).to(torch.float8_e4m3fn)
META = torch.zeros(2, device="meta")
SPARSE, RAGGED = torch.eye(4, device=DEVICE).to_sparse(), torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], device=DEVICE)


LONG = torch.ones(257, device=DEVICE)


def branches(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    if h == 0:
        return s
    return s * 2


def writes(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    TABLES[0][h] = 1.0
    return s


def adds(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    s += 1.0
    return s


async def waits(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s


def yields(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    yield s


def recurs(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return recurs(s, b, h, i, j)


class Made:
    def __init__(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> None:
        pass

    def method(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s


def attends(*options: str) -> Callable[..., Any]:
    return lambda s, b, h, i, j: s + strobe.attention(Q, K, V, **dict.fromkeys(options, lambda *x: x[0]))[0, 0, 0, 0]


WITHIN = r"\(line \d+ of test_functions.py\): a call of strobe within the function; accepted is one that is made before, and its result"
BRANCHES = r"a branch on the data, as .* make; accepted is torch\.where\(condition, a, b\), and &, \|, ~ in place of and, or, not"
NUMBER = r"\(line \d+ of test_functions.py\): {}\(\) turns a tensor into a number of Python; accepted are operations on the tensor itself"
NO_FORM = r"aten\.{} has no form for one score at a time; accepted are operations on single elements, indexing"
SCORES: list[tuple[Callable[..., Any], str]] = [
    (branches, rf"branches \(line \d+ of test_functions.py\): {BRANCHES}"),
    (lambda s, b, h, i, j: s if i > j and h > 0 else -s, BRANCHES),
    (lambda s, b, h, i, j: max(s, 0), BRANCHES),
    (lambda s, b, h, i, j: s if 0 < i < 5 else -s, BRANCHES),
    (lambda s, b, h, i, j: s * TABLES[0][int(h)], NUMBER.format("__int__")),
    (lambda s, b, h, i, j: s * TABLES[0][h].item(), NUMBER.format("item")),
    (lambda s, b, h, i, j: s * TABLES[0].tolist()[0], NUMBER.format("tolist")),
    (lambda s, b, h, i, j: s * math.exp(i), NUMBER.format("__float__")),
    (lambda s, b, h, i, j: sum(s for _ in range(h)), NUMBER.format("__index__")),
    (lambda s, b, h, i, j: torch.tensor([s, s])[0], r"torch\.tensor of tensors, .*; accepted is torch\.stack"),
    (lambda s, b, h, i, j: torch.sort(TABLES[0])[0][h], NO_FORM.format(r"sort\.default")),
    (lambda s, b, h, i, j: s + TABLES[0].std(), NO_FORM.format(r"std\.correction")),
    (
        lambda s, b, h, i, j: s + LONG.sum(),
        r"the sum of 257 elements; accepted are 1 to 256, or a tensor that is computed before and indexed",
    ),
    (lambda s, b, h, i, j: s + TABLES[0].max(0)[0], r"torch\.max along an axis, which also gives places; accepted is torch\.amax"),
    (lambda s, b, h, i, j: s + torch.rand(()), r"aten\.rand\.default makes random numbers; accepted is the option dropout"),
    (lambda s, b, h, i, j: F.dropout(s), r"makes random numbers; accepted is the option dropout"),
    (lambda s, b, h, i, j: F.alpha_dropout(s, 0.5, True), r"makes random numbers; accepted is the option dropout"),
    (lambda s, b, h, i, j: s * 2**70, "the integer 1180591620717411303424; accepted are integers of 64 bits, and reals, as float"),
    (lambda s, b, h, i, j: s + torch.tensor(2**63), "the integer 9223372036854775808; accepted are integers of 64 bits, and reals"),
    (lambda s, b, h, i, j: i // -(2**70) + s, "the integer -1180591620717411303424; accepted are integers of 64 bits, and reals"),
    (lambda s, b, h, i, j: s + EIGHT_BITS[h], "reads a tensor of float8_e4m3fn; accepted are float32, .* integers of fewer bits"),
    (lambda s, b, h, i, j: s + SPARSE[h, i], r"reads a tensor of shape \(4, 4\): layout torch\.sparse_coo; accepted is torch\.strided"),
    (lambda s, b, h, i, j: s + RAGGED[0][h], r"reads a nested tensor; accepted is a dense one, which torch\.nested\.to_padded_tensor"),
    (lambda s, b, h, i, j: s.clone().mul_(2), r"a write into a tensor \(aten::mul_\); accepted are new values, as in score = score \+ x"),
    (adds, r"a write into a tensor \(aten::add_\); accepted are new values, as in score = score \+ x"),
    (writes, r"a write into a tensor; accepted is torch\.where, which makes a new one"),
    (lambda s, b, h, i: s, r"<lambda> does not take 5 arguments; accepted is f\(score, b, h, i, j\)"),
    (lambda s, b, h, i, j: TABLES[0], r"<lambda> returns shape \(2,\); accepted is a scalar: the function sees one score at a time"),
    (lambda s, b, h, i, j: None, "<lambda> returns NoneType; accepted is a scalar, or a number"),
    (lambda s, b, h, i, j: s + sum(x[h] for x in TABLES), "the function reads 9 tensors; accepted are up to 8: stack those of one shape"),
    (attends(), WITHIN),
    (attends("score"), WITHIN),
    (lambda s, b, h, i, j: strobe.attention(*3 * [s.view(1, 1, 1, 1)])[0, 0, 0, 0], WITHIN),
    (lambda s, b, h, i, j: s + strobe.reference(Q, K, V)[0][0, 0, 0, 0], WITHIN),
    (lambda s, b, h, i, j: s + strobe.merge(Q, Q[..., 0], Q, Q[..., 0])[0][0, 0, 0, 0], WITHIN),
    (lambda s, b, h, i, j: s * strobe.dropout_mask((1, 2, 6, 6), 0.5, 1)[0, 0, 0, 0], WITHIN),
    (lambda s, b, h, i, j: s + len([strobe.BlockMask.from_function(lambda b, h, i, j: i > j, 1, 2, 6, 6)]), WITHIN),
    (lambda s, b, h, i, j: s + strobe.hyperbolic_attention(Q, K, V)[0, 0, 0, 0], WITHIN),
    (waits, "waits returns coroutine; accepted is a scalar, or a number"),
    (yields, "yields returns generator; accepted is a scalar, or a number"),
    (recurs, "recurs makes too many calls within one another; accepted is a function that ends"),
    (Made, r"Made returns .*\.Made; accepted is a scalar, or a number"),
    (Made.method, r"Made\.method does not take 5 arguments; accepted is f\(score, b, h, i, j\)"),
    (len, r"len does not take 5 arguments; accepted is f\(score, b, h, i, j\)"),
    (dict, r"dict refuses its 5 arguments; accepted is f\(score, b, h, i, j\)"),
    (torch.add, r"add refuses its 5 arguments; accepted is f\(score, b, h, i, j\)"),
    (max, BRANCHES),
    (lambda s, b, h, i, j, *, x: s, r"<lambda> does not take 5 arguments; accepted is f\(score, b, h, i, j\)"),
    (lambda s, b, h, i, j: (s, s), "<lambda> returns tuple; accepted is a scalar, or a number"),
    (lambda s, b, h, i, j: "a", "<lambda> returns str; accepted is a scalar, or a number"),
    (lambda s, b, h, i, j: 1j, "<lambda> returns complex; accepted is a scalar, or a number"),
    (lambda s, b, h, i, j: s[None], r"<lambda> returns shape \(1,\); accepted is a scalar"),
    (lambda s, b, h, i, j: s * NUMPY_TABLE[h], r"the index of an array, of NumPy gets a tensor; accepted are .* torch\.as_tensor\(array\)"),
    (lambda s, b, h, i, j: s + EMPTY[h], r"reads a tensor of shape \(0,\); accepted are tensors with elements"),
    (
        lambda s, b, h, i, j: s + DEEP[0, 0, 0, 0, h],
        r"reads a tensor of shape \(1, 1, 1, 1, 2\); accepted are up to 4 axes: reshape\(\) makes one of two",
    ),
    (lambda s, b, h, i, j: s + COMPLEX[h].real, r"a tensor of torch\.complex64; accepted are real numbers, integers and bools"),
    (lambda s, b, h, i, j: s + EIGHT_BITS[h].float(), "reads a tensor of float8_e4m3fn; accepted are float32, .* integers of fewer bits"),
    (lambda s, b, h, i, j: s + META[h], "a tensor on device meta, .*; accepted are tensors with numbers"),
    (lambda s, b, h, i, j: s + TABLES[0][h > 0], r"an index that is no integer; accepted are integers, .* torch\.where"),
    (lambda s, b, h, i, j: s + TABLES[0][h, i], r"2 indices of a tensor of shape \(2,\); accepted are up to 1"),
    (lambda s, b, h, i, j: s + TABLES[0][[0, 1]][h], "an index of type list; accepted are integers, tensors of integers, slices, None and"),
    (lambda s, b, h, i, j: s + i**h, "an integer to the power of a tensor; accepted is a literal exponent from 0 to 16, or a real base"),
]
MASKS: list[tuple[Callable[..., Any], str]] = [
    (lambda b, h, i, j: i, "<lambda> returns an integer; accepted is a bool, as a comparison gives"),
    (lambda b, h, i, j: i * 0.5, "<lambda> returns a real number; accepted is a bool, as a comparison gives"),
    (lambda b, h, i, j: None, "<lambda> returns NoneType; accepted is a bool scalar, or a bool"),
    (lambda s, b, h, i, j: i > j, r"<lambda> does not take 4 arguments; accepted is g\(b, h, i, j\)"),
    (lambda b, h, i, j: i > j > 0, BRANCHES),
]
CASES = [("score", *case) for case in SCORES] + [("mask", *case) for case in MASKS]


@pytest.mark.filterwarnings("error:coroutine")
@pytest.mark.parametrize(("option", "function", "words"), CASES)
@pytest.mark.parametrize("call", [strobe.attention, strobe.reference, strobe.explain])
def test_one_clear_message(option, function, words, call):
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=rf"\A{option}: [^\n]*{words}[^\n]*\Z"):
        call(Q, K, V, **{option: function})


@pytest.mark.parametrize(
    "kept",
    [
        lambda s: F.dropout(s, 0.5, training=False),
        lambda s: F.dropout(s, 0.0),
        lambda s: F.alpha_dropout(s, 0.5, training=False),
        lambda s: F.feature_alpha_dropout(s, 0.5, training=False),
        torch.nn.Dropout(0.5).eval(),
    ],
)
def test_a_dropout_that_drops_nothing(kept):
    assert text_of(lambda s, b, h, i, j: kept(s) + 1, _recorder_torch)[0] == text_of(lambda s, b, h, i, j: s + 1, _recorder_torch)[0]


def test_numbers_outside_a_dtype_of_numpy_are_refused():
    """As NumPy 2 does; comparisons take any number."""
    table = np.array([200, 7], np.uint8)
    for make in (lambda x: x // -3, lambda x: 300 & x, lambda x: np.maximum(x, 300), lambda x: x + 256):
        with pytest.raises(UnrecordableError, match="beside an array of uint8; accepted are 0 to 255, or astype"):
            text_of(lambda s, b, h, i, j: s + make(table[i]), _recorder_numpy)  # noqa: B023
    text, _ = text_of(lambda s, b, h, i, j: s + (table[i] < 300), _recorder_numpy)
    assert nodes.evaluate(text, {"SCORE": 0.5, "QUERY": 0}, [table.tolist()]) == 1.5


def test_what_the_function_raises_itself():
    with pytest.raises(NameError, match="undefined"):
        strobe.attention(Q, K, V, score=lambda s, b, h, i, j: s + undefined)  # noqa: F821


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"beta": 2.0}, {"shift": 1.0}])
def test_options_that_a_function_of_the_score_excludes(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name}: .* beside a function of the score; accepted is (None|0): the function has it"):
        strobe.attention(Q, K, V, score=lambda s, b, h, i, j: s, **options)


def test_every_reason_is_in_one_message():
    with pytest.raises(ValueError, match="(?s)scale: .*\nscore: .*\nmask: ") as refused:
        strobe.attention(Q, K, V, score=branches, mask=lambda b, h, i, j: i, scale="a")
    assert len(str(refused.value).splitlines()) == 3


def test_what_is_neither_a_function_nor_a_word():
    for x in (3.0, "cosine"):
        with pytest.raises(ValueError, match=r"^score: .*; accepted is 'dot', 'hyperbolic' or a function f\(score, b, h, i, j\)$"):
            strobe.attention(Q, K, V, score=x)
    with pytest.raises(TypeError, match=r"^mask: int; accepted is a torch.Tensor, as q is, or a function g\(b, h, i, j\)$"):
        strobe.attention(Q, K, V, mask=3)


REFUSED_BY_NUMPY: list[tuple[Callable[..., Any], str]] = [
    (lambda s, b, h, i, j: s if h == 0 else -s, r"a branch on the data, .*; accepted is np\.where"),
    (lambda s, b, h, i, j: s * math.exp(i), r"an array is turned into a number of Python; accepted are operations on the array itself"),
    (lambda s, b, h, i, j: np.sort(s), r"np\.sort has no form for one score at a time"),
    (lambda s, b, h, i, j: np.add.reduce(s), r"add\.reduce has no form for one score at a time"),
    (lambda s, b, h, i, j: s + NUMPY_LONG.sum(), r"the sum of 257 elements; accepted are 1 to 256"),
    (
        lambda s, b, h, i, j: s + (NUMPY_TABLE @ NUMPY_TABLE[h])[j],
        r"a matrix product of shapes \(4, 5\) and \(5,\); accepted are two vectors",
    ),
    (lambda s, b, h, i, j: s + NUMPY_TABLE.std(), r"\.std of an array has no form for one score at a time"),
    (lambda s, b, h, i, j: s + globals()["NUMPY_TABLE"][h], "an array is turned into a number of Python"),
    (lambda s, b, h, i, j: s + HOLDER.table[h], "the index of an array that is not followed, such as one of a module; accepted are"),
    (lambda s, b, h, i, j: s + TABLE[h, 0], r"a torch\.Tensor beside arrays of NumPy; accepted is what its numpy\(\) gives"),
    (lambda s, b, h, i, j: strobe.attention(s, s, s), WITHIN),
    (lambda s, b, h, i, j: s + strobe.attention(*3 * [NUMPY_TABLE[None, None]])[0, 0, 0, 0], WITHIN),
    (waits, "waits returns coroutine; accepted is a scalar, or a number"),
    (recurs, "recurs makes too many calls within one another"),
    (lambda s, b, h, i, j: NUMPY_TABLE, r"returns shape \(4, 5\); accepted is a scalar"),
]
NUMPY_TABLE, NUMPY_LONG = TABLE.numpy(), np.ones(257)
HOLDER = types.ModuleType("holder_of_the_test")
HOLDER.table = NUMPY_TABLE[0].copy()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("function", "words"), REFUSED_BY_NUMPY)
def test_one_clear_message_beside_numpy(function, words):
    with pytest.raises((TypeError, ValueError), match=rf"\Ascore: [^\n]*{words}[^\n]*\Z"):
        strobe.attention(*(x.cpu().numpy() for x in (Q, K, V)), score=function)


@pytest.mark.skipif(DEVICE == "cpu", reason="there is one device")
def test_a_tensor_on_another_device():
    table = torch.zeros(2)
    with pytest.raises(
        ValueError, match=r"^score: <lambda> reads a tensor of shape \(2,\) on cpu; accepted is q's device, cuda:0, or a number"
    ):
        strobe.attention(Q, K, V, score=lambda s, b, h, i, j: s + table[h])


# Calls


def plain(q: Tensor, k: Tensor, v: Tensor, score: Callable[..., Any] | None, mask: Callable[..., Any] | None) -> Tensor:
    """The formula, by the functions themselves at one score after the other."""
    x = (q @ k.mT) * q.shape[-1] ** -0.5
    rows = []
    for place in itertools.product(*map(range, x.shape)):
        positions = [torch.tensor(n, device=q.device) for n in place]
        value = x[place] if score is None else score(x[place], *positions)
        rows.append(value if mask is None or mask(*positions) else torch.full_like(value, -math.inf))
    return torch.stack(rows).view(x.shape).softmax(-1).nan_to_num(0.0) @ v


def on_device(x: Tensor) -> Tensor:
    return x.to(DEVICE)


HERE = both(Torch, on_device)
PAIRS = {name: (HERE[name], None) if count_of(HERE[name]) == 5 else (None, HERE[name]) for name in HERE}
PAIRS |= {"both": (HERE["softcap and alibi"], HERE["document"]), "nested and window": (HERE["documents of documents"], HERE["window"])}


def drawn_call() -> tuple[Tensor, Tensor, Tensor]:
    return tuple(numbers(seed, 1, H, 7, 8).to(DEVICE).requires_grad_() for seed in (8, 9, 10))


@pytest.mark.parametrize("name", PAIRS)
def test_the_reference_against_the_formula(name):
    q, k, v = drawn_call()
    score, mask = PAIRS[name]
    options = {option: x for option, x in (("score", score), ("mask", mask)) if x is not None}
    expected = plain(q, k, v, score, mask)
    out, _ = strobe.reference(q, k, v, **options)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-6, atol=1e-6)
    if name == "division":  # PyTorch has no gradient of s // 0.3
        return
    dout = torch.ones_like(expected)
    ours = torch.autograd.grad(strobe.attention(q, k, v, engine="reference", **options), (q, k, v), dout)
    for got, of in zip(ours, torch.autograd.grad(expected, (q, k, v), dout), strict=True):
        torch.testing.assert_close(got, of, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in OF_TORCH if name.startswith("flex")])
def test_flex_attention_computes_the_same(name):
    flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="PyTorch before 2.5")
    q, k, v = (numbers(seed, B, H, S, 16).to(DEVICE, torch.float32) for seed in (8, 9, 10))
    function = OF_TORCH[name]
    if count_of(function) == 5:
        expected = flex.flex_attention(q, k, v, score_mod=function)
        got = strobe.attention(q, k, v, score=function, engine="reference")
    else:
        mask = flex.create_block_mask(function, B, H, S, S, device=DEVICE)
        expected = flex.flex_attention(q, k, v, block_mask=mask)
        got = strobe.attention(q, k, v, mask=function, engine="reference")
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["softcap and alibi", "document", "t5", "both", "powers"])
def test_gradients_by_differences(name):
    """The gradients of q, k, v, bias and sinks."""
    score, mask = PAIRS[name]
    options = {option: x for option, x in (("score", score), ("mask", mask)) if x is not None}
    arrays = [numbers(seed, 1, 2, 5, 3).to(DEVICE).requires_grad_() for seed in (11, 12, 13)]
    arrays += [numbers(14, 2, 5, 5).to(DEVICE).requires_grad_(), numbers(15, 2).to(DEVICE).requires_grad_()]

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Any:
        return strobe.attention(q, k, v, bias=bias, sinks=sinks, engine="reference", return_lse=True, **options)

    assert torch.autograd.gradcheck(call, arrays)


def test_numpy_computes_what_torch_does():
    q, k, v = (x.detach().cpu() for x in drawn_call())
    of_numpy, of_torch = both(NumPy, lambda x: x.numpy()), both(Torch, lambda x: x)
    for options in ({"score": "t5"}, {"score": "softcap and alibi", "mask": "document"}):
        expected = strobe.attention(q, k, v, engine="reference", **{option: of_torch[name] for option, name in options.items()})
        got = strobe.attention(
            *(x.numpy() for x in (q, k, v)), engine="reference", **{option: of_numpy[name] for option, name in options.items()}
        )
        assert np.array_equal(got, expected.numpy())


def test_attention_backward_takes_functions():
    q, k, v = drawn_call()
    options = {"score": HERE["softcap and alibi"], "mask": HERE["document"], "engine": "reference"}
    out, lse = strobe.attention(q, k, v, return_lse=True, **options)
    dout = torch.ones_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    found = strobe.attention_backward(dout, q.detach(), k.detach(), v.detach(), out.detach(), lse.detach(), **options)
    oracle = strobe.reference_backward(dout, q.detach(), k.detach(), v.detach(), **options)
    for got, again, of in zip(found[:3], oracle[:3], expected, strict=True):
        assert torch.equal(got, of)
        torch.testing.assert_close(again, of, check_device=False)


def test_explain_prints_the_functions():
    text = strobe.explain(Q, K, V, score=lambda s, b, h, i, j: torch.tanh(s * 0.5) + TABLES[0][h], mask=lambda b, h, i, j: i >= j)
    assert "tanh(x * 0.5) + captured_0[h]" in text
    assert "i >= j" in text


def test_export_keeps_the_functions():
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return strobe.attention(q, k, v, score=HERE["t5"], mask=HERE["document"], engine="reference")

    q, k, v = (x.detach() for x in drawn_call())
    exported = torch.export.export(Model(), (q, k, v), strict=False)
    assert torch.equal(exported.module()(q * 2, k, v), Model()(q * 2, k, v))
    called = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert called[0] == torch.ops.strobe.attention_forward.default
    assert {*called[1:]} == {operator.getitem}


def test_operators_take_the_functions_of_a_call():
    """Their fields and captured tensors travel in a graph that make_fx traces from a parsed call."""
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = (x.detach() for x in drawn_call())
    options = {"score": HERE["t5"], "mask": HERE["document"], "engine": "reference"}
    graph = make_fx(lambda q, k, v: strobe.attention(q, k, v, **options))(q, k, v)
    assert torch.equal(graph(q * 2, k, v), strobe.attention(q * 2, k, v, **options))
    assert "score_function" in graph.code


# Engines


def result_of(engine: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
    """out, lse and the gradients of q, k and v, or a skip."""
    with running_on(engine):
        try:
            out, lse = strobe.attention(q, k, v, return_lse=True, engine=engine, **options)
            return [out, lse, *torch.autograd.grad(out.double().sum() + lse.double().sum(), (q, k, v))]
        except NotImplementedError as refusal:
            pytest.skip(str(refusal))


@pytest.mark.parametrize("engine", available_engines())
@pytest.mark.parametrize("name", ["softcap and alibi", "t5", "both", "documents of documents", "neighbourhood"])
def test_engines_agree_with_the_reference(engine, name):
    dtype = dtype_of(engine)
    q, k, v = (numbers(seed, 1, H, S, 64).to(DEVICE, dtype).requires_grad_() for seed in (16, 17, 18))
    score, mask = PAIRS[name]
    options = {option: x for option, x in (("score", score), ("mask", mask)) if x is not None}
    found = result_of(engine, q, k, v, **options)
    whole = [x.detach().double().requires_grad_() for x in (q, k, v)]
    rtol = 1e-4 if dtype == torch.float32 else 0.05
    for got, expected in zip(found, result_of("reference", *whole, **options), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=rtol)


NARROW = {
    "+": lambda x, y, n: x + y,
    "+ of a number": lambda x, y, n: x + 100,
    "-": lambda x, y, n: x - y,
    "- from a number": lambda x, y, n: 7 - x,
    "*": lambda x, y, n: x * y,
    "**": lambda x, y, n: x**3,
    "- of one": lambda x, y, n: -x,
    "abs": lambda x, y, n: abs(x),
    "~": lambda x, y, n: ~x,
    "<<": lambda x, y, n: x << 3,
    "// after +": lambda x, y, n: (x + y) // 3,
    "a wider one": lambda x, y, n: (x + y) + n,
    "a comparison": lambda x, y, n: (x + y < x) * 1.0,
}
NARROW_DTYPES = ["uint8", "int8", "int16", "int32"]


def narrow_table(dtype: str) -> np.ndarray:
    limits = np.iinfo(dtype)
    return np.array([limits.min, limits.max, limits.max - 1, 0, 1, 2, 77, limits.max // 2], dtype)


@pytest.mark.parametrize("framework", ["torch", "numpy"])
@pytest.mark.parametrize("dtype", NARROW_DTYPES)
@pytest.mark.parametrize("name", NARROW)
def test_integers_of_few_bits_wrap_around(name, dtype, framework):
    whole, make = narrow_table(dtype), NARROW[name]
    table = torch.from_numpy(whole) if framework == "torch" else whole
    function = lambda s, b, h, i, j: s * 0 + make(table[i], table[j], i)  # noqa: E731
    text, captured = text_of(function, _recorder_torch if framework == "torch" else _recorder_numpy)
    assert len(captured) == 1
    number = torch.tensor if framework == "torch" else np.int64
    with np.errstate(over="ignore"):
        for i, j in itertools.product(range(len(whole)), repeat=2):
            expected = float(make(table[i], table[j], number(i)))
            assert nodes.evaluate(text, {"SCORE": 0.5, "QUERY": i, "KEY": j}, [whole.tolist()]) == expected, (i, j)


# Python's numbers that an integer dtype may not hold, beside a tensor of it.
OUTSIDE: dict[str, Callable[[Any, int], Any]] = {
    "//": lambda x, n: x // n,
    "n // x": lambda x, n: n // x,
    "%": lambda x, n: x % n,
    "n % x": lambda x, n: n % x,
    "fmod": torch.fmod,
    "truncated division": lambda x, n: torch.div(x, n, rounding_mode="trunc"),
    "/": lambda x, n: (x / n).double() * 0 + (x.double() / n > 0),
    "&": lambda x, n: x & n,
    "n & x": lambda x, n: n & x,
    "|": lambda x, n: x | n,
    "^": lambda x, n: x ^ n,
    "<<": lambda x, n: x << n,
    "n << x": lambda x, n: n << x.clamp(0, 5),
    ">>": lambda x, n: x >> n,
    "n >> x": lambda x, n: n >> x.clamp(0, 5),
    "<": lambda x, n: x < n,
    "==": lambda x, n: x == n,
    "+": lambda x, n: x + n,
    "n - x": lambda x, n: n - x,
    "*": lambda x, n: x * n,
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "clamp": lambda x, n: x.clamp(max=n),
    "clamp_min": lambda x, n: x.clamp_min(n),
    "where": lambda x, n: torch.where(x > 5, n, x),
    "masked_fill": lambda x, n: x.masked_fill(x > 5, n),
    "full_like": lambda x, n: torch.full_like(x, n) + x,
    "full": lambda x, n: torch.full((), n, dtype=x.dtype) + x,
    "new_full": lambda x, n: x.new_full((), n) + x,
}


@pytest.mark.parametrize("dtype", NARROW_DTYPES)
@pytest.mark.parametrize("name", OUTSIDE)
def test_numbers_outside_a_dtype_are_those_of_pytorch(name, dtype):
    """They wrap around, or are refused where PyTorch refuses them."""
    make, table = OUTSIDE[name], torch.from_numpy(narrow_table(dtype))
    for number in (-3, 200, 300, -200, -300, 70001, -70001, 2**33 + 5):
        expected: list[float | None] = []
        overflows = False
        for x in table:
            try:
                expected.append(float(make(x, number)))
            except RuntimeError as failed:
                expected.append(None)
                overflows |= "without overflow" in str(failed)

        def score(s, b, h, i, j):
            return s * 0 + make(table[i], number)  # noqa: B023

        if overflows:
            with pytest.raises(UnrecordableError, match=rf"{number} in a tensor of torch\.{dtype}; accepted are -?\d+ to \d+"):
                text_of(score, _recorder_torch)
            continue
        text, _ = text_of(score, _recorder_torch)
        for i, found in enumerate(expected):
            if found is not None:  # PyTorch divides by no zero
                assert nodes.evaluate(text, {"SCORE": 0.5, "QUERY": i}, [table.tolist()]) == found, (number, i)


def test_arrays_of_few_bits_wrap_around():
    """An array's dtype counts, and not that of a scalar beside it, as in PyTorch; where, cat and clamp keep it."""
    table = torch.tensor([200, 100, 50], dtype=torch.uint8)
    for make in (
        lambda t, i: (t + i)[0] * 3,
        lambda t, i: (torch.cat([t, t]) * 2)[i],
        lambda t, i: torch.where(i < 1, t[0], t[1]) * 2,
        lambda t, i: t[0].clamp(min=3) + t[1],
        lambda t, i: t.gather(0, i.view(1))[0] + t[0],
        lambda t, i: (i * 300).to(torch.int8) + 1,
        lambda t, i: (i * 2**31 + 5).to(torch.int32) * 2,
    ):

        def score(s, b, h, i, j):
            return s * 0 + make(table, i)  # noqa: B023

        text, _ = text_of(score, _recorder_torch)
        for i in range(3):
            assert nodes.evaluate(text, {"SCORE": 0.5, "QUERY": i}, [table.tolist()]) == float(make(table, torch.tensor(i)))


@pytest.mark.parametrize("engine", available_engines())
@pytest.mark.parametrize("dtype", NARROW_DTYPES)
def test_engines_wrap_integers_of_few_bits(engine, dtype):
    of_engine, table = dtype_of(engine), torch.from_numpy(narrow_table(dtype)).to(DEVICE)
    q, kv = (torch.zeros(1, 1, n, 64, dtype=of_engine, device=DEVICE) for n in (len(table), 1))
    with running_on(engine):
        score = lambda s, b, h, i, j: ((table[i] + table[1]) * table[i]) % 101 * 1.0  # noqa: E731
        lse = strobe.attention(q, kv, kv, score=score, return_lse=True, engine=engine)[1]
    torch.testing.assert_close(lse[0, 0].double(), ((table + table[1]) * table % 101).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", available_engines())
def test_the_quotient_of_reals_is_pytorchs(engine):
    """1.0 // 0.1 is 9, though 1.0 / 0.1 is rounded to 10. LSE is the score of the only key."""
    dtype = dtype_of(engine)
    reals = torch.float64 if dtype == torch.float64 else torch.float32
    pairs = itertools.product([1.0, -1.0, 0.3, 3.0, 7.0, -2.5, 0.0, 1e6], [0.1, -0.1, 0.3, 0.7, 2.0, -1.5])
    x, y = torch.tensor([*pairs], dtype=reals, device=DEVICE).unbind(1)
    q, kv = (torch.zeros(1, 1, n, 64, dtype=dtype, device=DEVICE) for n in (len(x), 1))
    for score, expected in (
        (lambda s, b, h, i, j: x[i] // y[i], x // y),
        (lambda s, b, h, i, j: torch.div(x[i], y[i], rounding_mode="floor"), x // y),
        (lambda s, b, h, i, j: x[i] % y[i], x % y),
    ):
        with running_on(engine):
            lse = strobe.attention(q, kv, kv, score=score, return_lse=True, engine=engine)[1]
        torch.testing.assert_close(lse[0, 0].to(reals), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", available_engines())
def test_a_repeated_call(engine, monkeypatch):
    """It is not parsed, reads the numbers that the tensors have then, and follows a number that changes."""
    dtype = dtype_of(engine)
    table, factor = TABLE.to(DEVICE, torch.float32), 1.0
    q, k, v = (numbers(seed, 1, H, S, 64).to(DEVICE, dtype).requires_grad_() for seed in (16, 17, 18))

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * factor + table[h, (i - j) % 5]

    def bias() -> Tensor:
        i, j = torch.arange(S)[:, None], torch.arange(S)
        return table[:, ((i - j) % 5).to(DEVICE)]

    def agrees() -> None:
        got = result_of(engine, q, k, v, score=score)
        own = result_of(engine, q, k, v, scale=factor * 64**-0.5, bias=bias())
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        for x, y in zip(got, own, strict=True):
            torch.testing.assert_close(x.float(), y.float(), rtol=tolerance, atol=tolerance)

    for _ in range(3):
        agrees()
    table += numbers(19, H, 5).to(DEVICE)
    agrees()
    if engine != "reference":
        with monkeypatch.context() as patched:
            patched.setattr(strobe._attention, "parse", None)
            result_of(engine, q, k, v, score=score)
    factor = 1.5
    for _ in range(3):
        agrees()


def test_a_long_chain_of_operations_is_recorded():
    q = torch.randn(1, 1, 3, 4, dtype=torch.float64)

    def chain(length):
        def f(x, b, h, i, j):
            for _ in range(length):
                x = torch.sin(x)
            return x

        return f

    assert torch.allclose(
        strobe.attention(q, q, q, score=chain(1000), engine="reference"), torch.softmax(chain(1000)(q @ q.mT / 2, 0, 0, 0, 0), -1) @ q
    )
    with pytest.raises(ValueError, match=r"^score: .*1,?024"):
        strobe.attention(q, q, q, score=chain(2000))


def test_products_without_a_distance_are_read_once():
    def score(s, b, h, i, j):
        a = SLOPES[h]
        for _ in range(60):  # each is a product of one node with itself
            a = a * a
        return s + a

    q = torch.randn(1, H, 2, 4)
    assert "captured_0" in strobe.explain(q, q, q, score=score)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_functions_under_torch_func_are_refused_in_words(transform):
    q = torch.randn(2, 1, H, 2, 4)
    with pytest.raises(NotImplementedError, match="under torch.func.grad, vjp, jvp, vmap"):
        transform(lambda x: strobe.attention(x, x, x, score=lambda s, b, h, i, j: s * 2).sum())(q if transform is torch.func.vmap else q[0])


@pytest.mark.parametrize("sign", [0.0, -0.0, 2.0, -2.0])
def test_copysign_takes_the_sign_of_a_zero(sign):
    q = numbers(9, 1, 1, 4, 4)
    y = torch.tensor(sign)
    x = q @ q.mT / 2
    found = strobe.attention(q, q, q, score=lambda x, b, h, i, j: torch.copysign(x, y))
    torch.testing.assert_close(found, torch.softmax(torch.copysign(x, y), -1) @ q)
