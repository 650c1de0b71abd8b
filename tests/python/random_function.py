"""Functions of the score and the mask drawn at random: each is a list of up to 12 steps, which the call gets as a function of PyTorch, and
which the formulas follow by themselves, with every derivative.

Comparisons, floors and indices depend on integers alone: a real next to a step would make what is right depend on its last bit."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

STEPS = 12  # the most operations of a function, without its arguments and constants
ARGUMENTS = ("b", "h", "i", "j")


@dataclass(frozen=True)
class Step:
    name: str
    inputs: tuple[int, ...] = ()  # earlier steps
    number: float = 0  # a constant, or which table is read


@dataclass
class Table:
    """A captured tensor. axes: what bounds each index, a name of ARGUMENTS or a size."""

    kind: str  # "real", "bool" or "int"
    axes: tuple[str | int, ...]
    by_key: bool = False  # whether the index is the key itself
    values: Tensor = field(default_factory=lambda: torch.empty(0))


# Values by torch's own operations, and derivatives: of one real, (f(x), f'(x)).
UNARY: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "tanh": (torch.tanh, lambda x: 1 - torch.tanh(x) ** 2),
    "sin": (torch.sin, torch.cos),
    "cos": (torch.cos, lambda x: -torch.sin(x)),
    "sigmoid": (torch.sigmoid, lambda x: torch.sigmoid(x) * torch.sigmoid(-x)),
    "erf": (torch.erf, lambda x: 2 / math.sqrt(math.pi) * torch.exp(-x * x)),
    "atan": (torch.atan, lambda x: 1 / (1 + x * x)),
    "asinh": (torch.asinh, lambda x: 1 / torch.sqrt(1 + x * x)),
    "length": (lambda x: torch.sqrt(1 + x * x), lambda x: x / torch.sqrt(1 + x * x)),
    "bell": (lambda x: torch.exp(-(x * x)), lambda x: -2 * x * torch.exp(-(x * x))),
    "log_of": (lambda x: torch.log1p(x * x), lambda x: 2 * x / (1 + x * x)),
    "rational": (lambda x: x / (1 + x * x), lambda x: (1 - x * x) / (1 + x * x) ** 2),
}
INTEGERS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "distance": lambda x, y: (x - y).abs(),
    "least": torch.minimum,
    "greatest": torch.maximum,
    "negate": lambda x: -x,
}
BY_CONSTANT: dict[str, Callable[[Any, int], Any]] = {
    "floor": lambda x, n: x // n,
    "remainder": lambda x, n: x % n,
    "bits": lambda x, n: x & n,
    "times": lambda x, n: x * n,
    "shifted": lambda x, n: x >> (n % 5),
}
CONDITIONS: dict[str, Callable[[Any, Any], Any]] = {
    "less": lambda x, y: x < y,
    "less_equal": lambda x, y: x <= y,
    "greater": lambda x, y: x > y,
    "equal": lambda x, y: x == y,
    "unequal": lambda x, y: x != y,
}
OTHERS: dict[str, Callable[..., Any]] = {  # of a step's number and its inputs
    "and": lambda _, x, y: x & y,
    "or": lambda _, x, y: x | y,
    "xor": lambda _, x, y: x ^ y,
    "not": lambda _, x: ~x,
    "to_real": lambda n, x: x * n,
    "plus": lambda _, x, y: x + y,
    "minus": lambda _, x, y: x - y,
    "bounded_product": lambda _, x, y: x * torch.tanh(y),
    "scaled": lambda n, x: n * x,
    "where": lambda _, c, x, y: torch.where(c, x, y),
    "hide": lambda _, c, x: torch.where(c, x, -math.inf),
}


class _Drawing:
    def __init__(self, rng: random.Random, scored: bool):
        self.rng, self.steps, self.tables = rng, [], []
        self.kinds: dict[str, list[int]] = {"int": [], "real": [], "bool": []}
        for name in ARGUMENTS:
            self.add("int", name)
        self.operations = 0
        self.x = self.add("real", "x") if scored else -1

    def add(self, kind: str, name: str, *inputs: int, number: float = 0) -> int:
        self.steps.append(Step(name, inputs, number))
        self.kinds[kind].append(len(self.steps) - 1)
        self.operations = sum(len(step.inputs) > 0 for step in self.steps)
        return len(self.steps) - 1

    def one(self, kind: str) -> int:
        found = self.kinds[kind]
        return found[-1] if self.rng.random() < 0.4 else self.rng.choice(found)

    def integer(self) -> int:
        kind = self.rng.random()
        if kind < 0.35:
            return self.add("int", "subtract", *self.rng.choice([(2, 3), (3, 2)]))
        if kind < 0.6:
            name = self.rng.choice([*INTEGERS])
            return self.add("int", name, *(self.one("int") for _ in range(1 if name == "negate" else 2)))
        if kind < 0.85:
            return self.add("int", self.rng.choice([*BY_CONSTANT]), self.one("int"), number=self.rng.choice([1, 2, 3, 5, 7, 16, 31, 64]))
        return self.load("int")

    def load(self, kind: str) -> int:
        """An element of a new table: of nothing, arguments, or an integer that may be out of range."""
        axes: list[str | int] = []
        inputs: list[int] = []
        for _ in range(self.rng.choice([0, 1, 1, 1, 2, 2]) if kind == "real" else self.rng.choice([1, 1, 2])):
            if self.rng.random() < 0.6:
                at = self.rng.randrange(4)
                axes.append(ARGUMENTS[at] if len(axes) == 0 or at < 2 else self.rng.choice([5, 40]))
            else:
                at = self.one("int")
                axes.append(self.rng.choice([1, 3, 8, 33]))
            inputs.append(at)
        self.tables.append(Table(kind, tuple(axes), inputs == [3] and axes == ["j"]))
        return self.add(kind, "load", *inputs, number=len(self.tables) - 1)

    def condition(self) -> int:
        kind = self.rng.random()
        if kind < 0.15:
            return self.load("bool")
        if kind < 0.4 and self.kinds["bool"]:
            name = self.rng.choice(["and", "or", "xor", "not"])
            return self.add("bool", name, *(self.one("bool") for _ in range(1 if name == "not" else 2)))
        return self.add("bool", self.rng.choice([*CONDITIONS]), self.one("int"), self.one("int"))

    def real(self) -> int:
        kind = self.rng.random()
        if kind < 0.2:
            return self.add("real", "to_real", self.one("int"), number=2.0 ** -self.rng.randint(4, 8))
        if kind < 0.4:
            return self.load("real")
        if kind < 0.65:
            return self.add("real", self.rng.choice([*UNARY]), self.one("real"))
        if kind < 0.8:
            return self.add("real", self.rng.choice(["plus", "minus", "bounded_product"]), self.one("real"), self.one("real"))
        if kind < 0.9:
            return self.add("real", "scaled", self.one("real"), number=round(self.rng.uniform(-1.5, 1.5), 3))
        if not self.kinds["bool"]:
            self.condition()
        return self.add("real", "where", self.one("bool"), self.one("real"), self.one("real"))


@dataclass
class Function:
    """A drawn function, before its tables have values."""

    steps: list[Step]
    tables: list[Table]

    def __str__(self) -> str:
        return "; ".join(f"t{n}={s.name}({', '.join(f't{x}' for x in s.inputs)}{f' {s.number}' if s.number else ''})"
                         for n, s in enumerate(self.steps) if n > 3)  # fmt: skip

    # The function that the call gets

    def callable(self, replaced: dict[int, Tensor] | None = None) -> Callable[..., Any]:
        """f(x, b, h, i, j), or g(b, h, i, j) without a step x. replaced: tables by their numbers."""
        scored = any(step.name == "x" for step in self.steps)
        steps, tables = self.steps, [(replaced or {}).get(n, table.values) for n, table in enumerate(self.tables)]

        def function(*arguments: Any) -> Any:
            given = dict(zip(("x", *ARGUMENTS) if scored else ARGUMENTS, arguments, strict=True))
            found: list[Any] = []
            for step in steps:
                found.append(_recorded(step, [found[n] for n in step.inputs], given, tables))
            return found[-1]

        if scored:
            return lambda x, b, h, i, j: function(x, b, h, i, j)
        return lambda b, h, i, j: function(b, h, i, j)

    # The formulas' values

    def evaluate(self, x: Tensor | None, places: Sequence[Tensor], tables: Sequence[Tensor]) -> list[tuple[Tensor, Any]]:
        """Each step's value."""
        found: list[Any] = []
        given = {"x": x, **dict(zip(ARGUMENTS, places, strict=True))}
        for step in self.steps:
            inputs = [found[n] for n in step.inputs]
            found.append(_value(step, inputs, given, tables))
        return found

    def derivatives(self, values: list[Any], of_real: set[int]) -> list[Tensor | float]:
        """d result / d step for each step, backwards through the list."""
        found: list[Any] = [0.0] * len(self.steps)
        found[-1] = torch.ones_like(values[-1])
        for n in reversed(range(len(self.steps))):
            step, above = self.steps[n], found[n]
            if n not in of_real or isinstance(above, float):
                continue
            a = step.inputs
            if step.name in UNARY:
                found[a[0]] = found[a[0]] + above * UNARY[step.name][1](values[a[0]])
            elif step.name in ("plus", "minus"):
                found[a[0]] = found[a[0]] + above
                found[a[1]] = found[a[1]] + (above if step.name == "plus" else -above)
            elif step.name == "bounded_product":
                t = torch.tanh(values[a[1]])
                found[a[0]] = found[a[0]] + above * t
                found[a[1]] = found[a[1]] + above * values[a[0]] * (1 - t * t)
            elif step.name == "scaled":
                found[a[0]] = found[a[0]] + above * step.number
            elif step.name in ("where", "hide"):
                kept = values[a[0]]
                found[a[1]] = found[a[1]] + torch.where(kept, above, 0.0)
                if step.name == "where":
                    found[a[2]] = found[a[2]] + torch.where(kept, 0.0, above)
        return found

    def read(self) -> list[int]:
        """The tables of reals that the result depends on."""
        needed = {len(self.steps) - 1}
        for n in reversed(range(len(self.steps))):
            needed |= set(self.steps[n].inputs) if n in needed else set()
        return sorted({int(self.steps[n].number) for n in needed if self.steps[n].name == "load"
                       and self.tables[int(self.steps[n].number)].kind == "real"})  # fmt: skip

    def reals(self) -> set[int]:
        names = {"x", *UNARY, "plus", "minus", "bounded_product", "scaled", "where", "hide", "to_real"}
        loads = {n for n, s in enumerate(self.steps) if s.name == "load" and self.tables[int(s.number)].kind == "real"}
        return loads | {n for n, s in enumerate(self.steps) if s.name in names}


def index_of(step: Step, inputs: Sequence[Tensor], shape: Sequence[int]) -> list[Tensor]:
    """The element that a load reads: a negative index counts from the end, and others are clamped."""
    return [torch.where(n < 0, n + size, n).clamp(0, size - 1) for n, size in zip(inputs, shape, strict=True)]


def _recorded(step: Step, x: list[Any], given: dict[str, Any], tables: list[Tensor]) -> Any:
    """One step by the operators that users write."""
    name = step.name
    if name in given:
        return given[name]
    if name == "load":
        table = tables[int(step.number)]
        return table[tuple(x)] if x else table
    if name in UNARY:
        return UNARY[name][0](x[0])
    if name in INTEGERS:
        return INTEGERS[name](*x)
    if name in BY_CONSTANT:
        return BY_CONSTANT[name](x[0], int(step.number))
    if name in CONDITIONS:
        return CONDITIONS[name](*x)
    return OTHERS[name](step.number, *x)


def _value(step: Step, x: list[Any], given: dict[str, Any], tables: Sequence[Tensor]) -> Any:
    """One step of the formulas, on whole tensors."""
    name = step.name
    if name == "load":
        table = tables[int(step.number)]
        return table[tuple(index_of(step, x, table.shape))] if x else table
    if name == "to_real":
        like = given["x"] if given["x"] is not None else torch.empty(0)
        return x[0].to(like.dtype) * step.number
    return _recorded(step, x, given, list(tables))


def draw_function(rng: random.Random) -> Function:
    """f of a score: up to STEPS operations, whose result depends on x."""
    d = _Drawing(rng, True)
    most = rng.randint(1, STEPS - 6)
    while d.operations < most:
        rng.choice([d.integer, d.condition, d.real, d.real])()
    result = d.add("real", "plus", d.x, d.kinds["real"][-1]) if rng.random() < 0.6 else d.kinds["real"][-1]
    result = d.add("real", "bounded_product", result, d.load("real")) if rng.random() < 0.2 else result
    if rng.random() < 0.25:
        result = d.add("real", "hide", d.condition(), result)
    return Function(d.steps[: result + 1], d.tables)


def draw_mask(rng: random.Random) -> Function:
    """g: up to STEPS operations."""
    d = _Drawing(rng, False)
    most = rng.randint(1, STEPS - 3)
    while d.operations < most:
        rng.choice([d.integer, d.condition])()
    result = d.condition()
    if rng.random() < 0.5:  # few keys hidden, as real masks have it
        result = d.add("bool", "or", result, d.add("bool", "less_equal", 3, 2))
    return Function(d.steps[: result + 1], d.tables)


def fill(function: Function, sizes: dict[str, int], rng: random.Random, normal: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """Gives the tables values. sizes: of ARGUMENTS in the whole problem."""
    for table in function.tables:
        shape = [max(1, sizes[axis] if isinstance(axis, str) else axis) for axis in table.axes]
        x = normal(*shape)
        if table.kind == "real":
            table.values = x.to(dtype)
        elif table.kind == "bool":
            table.values = x > rng.choice([-1.0, 0.0])
        else:
            table.values = (8 * x).round().to(rng.choice([torch.int64, torch.int32]))


@dataclass
class Placed:
    """A function beside the places of a problem's pairs, for formulas."""

    function: Function
    places: tuple[Tensor, Tensor, Tensor, Tensor]  # b (B,1,1,1), h (1,H,1,1), i (B|1,1,Sq,1), j (B|1,1,1,Sk)

    def ordered(self, keys: Tensor) -> Placed:
        b, h, i, j = self.places
        return dataclasses.replace(self, places=(b, h, i, j[..., keys]))

    def sees(self) -> Tensor:
        """g."""
        return self.function.evaluate(None, self.places, [t.values for t in self.function.tables])[-1]

    def shows(self, *shape: int) -> Tensor:
        """Where f is not -inf."""
        return self.score(torch.zeros(shape, dtype=torch.float64, device=self.places[0].device))[0] != -math.inf

    def score(self, x: Tensor) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """f, df/dx and for each real table df/d(element that is read), summed up by `scatter`."""
        tables = [t.values.to(x.dtype) if t.kind == "real" else t.values for t in self.function.tables]
        values = self.function.evaluate(x, self.places, tables)
        found = self.function.derivatives(values, self.function.reals())
        slope = found[len(ARGUMENTS)]
        loads = {n for n in self.function.reals() if self.function.steps[n].name == "load"}
        by_step = {n: found[n] for n in loads if not isinstance(found[n], float)}
        return values[-1].expand(x.shape), torch.zeros_like(x) + slope, {n: g.expand(x.shape) for n, g in by_step.items()}

    def scatter(self, x: Tensor, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        """The gradient of each real table. gradients: of each load of one, by the number of its step."""
        found = {
            n: torch.zeros(t.values.shape, dtype=x.dtype, device=x.device) for n, t in enumerate(self.function.tables) if t.kind == "real"
        }
        elements = self.elements(x, gradients)
        for n, g in gradients.items():
            found[int(self.function.steps[n].number)].view(-1).index_put_((elements[n],), g, accumulate=True)
        return found

    def elements(self, x: Tensor, loads: Iterable[int]) -> dict[int, Tensor]:
        """Which element of its table, row by row, each pair reads. loads: numbers of steps."""
        tables = [t.values.to(x.dtype) if t.kind == "real" else t.values for t in self.function.tables]
        values, found = self.function.evaluate(x, self.places, tables), {}
        for n in loads:
            step = self.function.steps[n]
            shape = tables[int(step.number)].shape
            at = torch.zeros((), dtype=torch.int64, device=x.device)
            for index, size in zip(index_of(step, [values[m] for m in step.inputs], shape), shape, strict=True):
                at = at * size + index
            found[n] = at.expand(x.shape)
        return found
