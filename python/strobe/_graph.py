"""The graph of a function of the score or a mask: nodes (include/strobe/operations.inc), and the values that recorders compute with.

A Value stands for an array whose elements are expressions. It is not computed: at(indices) makes the nodes of one element. So a captured
tensor may be indexed in several steps, or operated on as a whole before it is indexed, and only what the result needs becomes nodes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

# Kinds of nodes, in the order in which they are promoted.
BOOLEAN, INTEGER, REAL = "BIR"
_CONSTANTS = {BOOLEAN: "BOOLEAN", INTEGER: "INTEGER", REAL: "REAL"}
_CONVERSIONS = {BOOLEAN: "TO_BOOLEAN", INTEGER: "TO_INTEGER", REAL: "TO_REAL"}
_COMPARISONS = frozenset({"EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL"})
_MOST_WHOLE_POWER = 16
_SYMBOL = re.compile(r"(REAL|INTEGER) \$(\d+)")
_MOST_REDUCED = 256  # elements that a sum, any, ... joins, each of which takes nodes of its own

BRANCH = (
    "a branch on the data, as if, and, or, not, min, max and a < b < c make; accepted is {}.where(condition, a, b), and &, |, ~ in "
    "place of and, or, not"
)
_NO_FORM = "accepted are operations on single elements, indexing, and functions made of them: docs/functions.md has the list"


class UnrecordableError(Exception):
    """Why a function has no graph, in words that go behind "score: " or "mask: "."""

    place = ""  # the caller's line in words, if no traceback has it


class NoFormError(UnrecordableError):
    def __init__(self, operation: object):
        super().__init__(f"{operation} has no form for one score at a time; {_NO_FORM}")


def promoted(*kinds: str) -> str:
    return max(kinds, key="BIR".index)


def is_symbolic(x: Any) -> bool:
    """Whether x is an integer of PyTorch's compiler, as a length is, which has another value in each call."""
    return type(x).__name__ == "SymInt"


def wide(x: int) -> str:
    """Why an integer is refused that 64 bits do not hold."""
    return f"the integer {x}; accepted are integers of 64 bits, and reals, as float(...) makes"


def kind_of(x: Any) -> str:
    """The kind of a number."""
    return BOOLEAN if isinstance(x, bool) else INTEGER if isinstance(x, int) or is_symbolic(x) else REAL


class Symbol:
    """A constant that has another value in each call: number is symbolic."""

    def __init__(self, number: Any):
        self.number = number


class Graph:
    """Nodes, each behind its inputs. A node that equals an earlier one is that one, constants excepted: another value of a constant must
    not make another graph."""

    value: type[Value]  # the class of the values that are made

    def __init__(self, value: type[Value] | None = None, in_float64: bool = False) -> None:
        self.value = value or Value
        self.in_float64 = in_float64  # how reals are computed; otherwise in float32
        self.nodes: list[tuple[str, tuple[int, ...], Any]] = []  # operation, inputs, constant or captured array
        self.kinds: list[str] = []
        self._known: dict[tuple[str, tuple[int, ...], Any], int] = {}
        self._zero: int | None = None
        self.detached: dict[int, Any] = {}  # of captured arrays that are another one's detach(): that one
        self.depends_on_grad = False  # whether another graph would be made, or none, if other captured arrays required grad

    def add(self, operation: str, *inputs: int, kind: str = "", more: Any = None) -> int:
        node = operation, inputs, more
        if (found := self._known.get(node)) is not None:
            return found
        if operation in _COMPARISONS:
            kind = BOOLEAN
        elif not kind:
            kind = self.kinds[inputs[-1]]
        self._known[node] = self._append(node, kind)
        return len(self.nodes) - 1

    def _append(self, node: tuple[str, tuple[int, ...], Any], kind: str) -> int:
        self.nodes.append(node)
        self.kinds.append(kind)
        return len(self.nodes) - 1

    def constant(self, x: Any, kind: str) -> int:
        if is_symbolic(x) and kind != BOOLEAN:
            x = Symbol(x)
        elif kind == REAL:
            x = float(x)
        elif kind == INTEGER:
            x = int(x)
            if not -(2**63) <= x < 2**63:
                raise UnrecordableError(wide(x))
        else:
            x = bool(x)
        return self._append((_CONSTANTS[kind], (), x), kind)

    def converted(self, node: int, kind: str) -> int:
        return node if self.kinds[node] == kind else self.add(_CONVERSIONS[kind], node, kind=kind)

    @property
    def zero(self) -> int:
        if self._zero is None:
            self._zero = self.constant(0, INTEGER)
        return self._zero

    def argument(self, operation: str, kind: str) -> Value:
        return self.value(self, (), kind, lambda _: self.add(operation, kind=kind))

    def captured(self, n: int, shape: tuple[int, ...], kind: str) -> Value:
        return self.value(self, shape, kind, lambda indices: self.add("LOAD", *indices, kind=kind, more=n))

    def number(self, x: Any) -> Value:
        found = self.value(self, (), kind_of(x), lambda _: self.constant(x, found.kind))
        found.number = x
        return found

    def of(self, x: Any) -> Value:
        """x, or the value of a Python number."""
        if isinstance(x, Value):
            if x.graph is not self:
                raise UnrecordableError("an array that the function kept when it was recorded before; accepted is one that it makes anew")
            return x
        if isinstance(x, (bool, int, float)) or is_symbolic(x):
            if type(x) is int and not -(2**63) <= x < 2**63:
                raise UnrecordableError(wide(x))
            return self.number(x)
        raise UnrecordableError(f"{type(x).__name__} among the operands; accepted are tensors and numbers")

    def text(self, result: int, captured: Mapping[int, int] | None = None, symbols: list[Any] | None = None) -> str:
        """The nodes that the result needs, as decoded() reads them. captured: the places of captured arrays among those of the call;
        symbols: those of the call, to which the text's are added: $n is symbols[n]."""
        symbols = [] if symbols is None else symbols
        needed, stack = {result}, [result]
        while stack:
            for n in self.nodes[stack.pop()][1]:
                if n not in needed:
                    needed.add(n)
                    stack.append(n)
        order = {old: new for new, old in enumerate(sorted(needed))}
        words = []
        for old in order:
            operation, inputs, more = self.nodes[old]
            parts = [operation, *map(str, (order[n] for n in inputs))]
            if operation == "LOAD":
                parts.insert(1, str(more if captured is None else captured[more]))
            elif isinstance(more, Symbol):
                parts.append(f"${len(symbols)}")
                symbols.append(more.number)
            elif more is not None:
                parts.append(repr(int(more) if operation == "BOOLEAN" else more))
            words.append(" ".join(parts))
        return "; ".join(words)

    def captured_by(self, result: int) -> list[int]:
        """The captured arrays that the result reads, the first one first."""
        nodes = decoded(self.text(result))
        return [*dict.fromkeys(more for operation, _, more in nodes if operation == "LOAD")]


def numbered(text: str, symbols: Sequence[int]) -> str:
    """The text with integers in place of its symbols."""
    return _SYMBOL.sub(lambda found: f"{found[1]} {(float if found[1] == 'REAL' else int)(symbols[int(found[2])])}", text)


def from_head(text: str, first: int) -> str:
    """The text for a call whose head 0 is head `first` of the whole problem."""
    nodes = text.split("; ")
    if not first or "HEAD" not in nodes:
        return text
    at = nodes.index("HEAD")  # a graph has one at most
    places = [*range(at), *range(at + 2, len(nodes) + 2)]

    def moved(node: str) -> str:
        operation, *rest = node.split(" ")
        own = len(rest) if operation in _CONSTANTS.values() else operation == "LOAD"  # words that are no inputs
        return " ".join([operation, *rest[:own], *(str(places[int(n)]) for n in rest[own:])])

    return "; ".join([*nodes[: at + 1], f"INTEGER {first}", f"ADD {at} {at + 1}", *map(moved, nodes[at + 1 :])])


def decoded(text: str) -> list[tuple[str, tuple[int, ...], Any]]:
    """The nodes of a text: operation, inputs, and the constant, its symbol or the number of the captured array."""
    nodes: list[tuple[str, tuple[int, ...], Any]] = []
    for words in text.split("; "):
        operation, *rest = words.split(" ")
        if rest and rest[0].startswith("$"):
            nodes.append((operation, (), rest[0]))
        elif operation == "REAL":
            nodes.append((operation, (), float(rest[0])))
        elif operation in ("INTEGER", "BOOLEAN"):
            nodes.append((operation, (), int(rest[0])))
        elif operation == "LOAD":
            nodes.append((operation, tuple(map(int, rest[1:])), int(rest[0])))
        else:
            nodes.append((operation, tuple(map(int, rest)), None))
    return nodes


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    sizes = []
    for axis in zip(*padded, strict=True):
        wide = [n for n in axis if n != 1]
        if any(n != wide[0] for n in wide):
            raise UnrecordableError(f"shapes {', '.join(map(str, shapes))} do not broadcast")
        sizes.append(wide[0] if wide else 1)
    return tuple(sizes)


def axis_of(axis: int, rank: int) -> int:
    if not -rank <= axis < max(rank, 1):
        raise UnrecordableError(f"axis {axis} of an array of {rank} axes")
    return axis % rank if rank else 0


Indices = tuple[int, ...]


class Value:
    """An array of expressions. Operators make nodes as the operators of arrays compute."""

    __slots__ = ("_at", "_known", "graph", "kind", "number", "shape")
    __hash__ = object.__hash__

    def __init__(self, graph: Graph, shape: tuple[int, ...], kind: str, at: Callable[[Indices], int]):
        self.graph, self.shape, self.kind, self._at = graph, shape, kind, at
        self.number: Any = None
        self._known: dict[tuple[Indices, str], int] = {}

    def at(self, indices: Indices = (), kind: str = "") -> int:
        """The node of an element, of the kind that is wanted. indices: nodes; negative ones count from the end of their axis."""
        key = indices, kind or self.kind
        found = self._known.get(key)
        if found is None:
            if self.number is not None:
                found = self.graph.constant(self.number, key[1])
            elif key[1] == self.kind:
                found = self._at(indices)
            else:
                found = self.graph.converted(self.at(indices), kind)
            self._known[key] = found
        return found

    def _made(self, shape: tuple[int, ...], at: Callable[[Indices], int], kind: str = "") -> Value:
        return self.graph.value(self.graph, shape, kind or self.kind, at)

    # Elementwise operations

    def _each(self, build: Callable[..., int], *others: Any, takes: str = "", gives: str = "") -> Value:
        """build(*nodes) for each element of self and the others, which broadcast. takes: the nodes' kind; gives: the result's."""
        values = [self, *map(self.graph.of, others)]
        takes = takes or promoted(*(x.kind for x in values))
        shape = broadcast([x.shape for x in values])

        def at(indices: Indices) -> int:
            return build(*(x.at(x._aligned(indices), takes) for x in values))

        made = self._made(shape, at, gives or takes)
        if not shape:
            made.at()  # now, or a chain of hundreds of operations would be as many calls within one another
        return made

    def _aligned(self, indices: Indices) -> Indices:
        """Indices into an array that broadcasts self, as indices into self."""
        own = indices[len(indices) - len(self.shape) :]
        return tuple(self.graph.zero if size == 1 else n for size, n in zip(self.shape, own, strict=True))

    def _arithmetic(self, operation: str, other: Any, other_first: bool = False) -> Value:
        """The result on booleans is that on integers, as a boolean."""
        other = self.graph.of(other)
        kind, add = promoted(self.kind, other.kind), self.graph.add
        takes = INTEGER if kind == BOOLEAN else kind
        found = self._each(lambda x, y: add(operation, y, x) if other_first else add(operation, x, y), other, takes=takes)
        return found.to(kind)

    def _real(self, operation: str, *others: Any) -> Value:
        return self._each(lambda *x: self.graph.add(operation, *x), *others, takes=REAL)

    def _whole(self, operation: str) -> Value:
        return self if self.kind != REAL else self._real(operation)

    def _compared(self, operation: str, other: Any) -> Value:
        kind = promoted(self.kind, self.graph.of(other).kind)
        takes = INTEGER if kind == BOOLEAN and operation not in ("EQUAL", "NOT_EQUAL") else kind
        return self._each(lambda x, y: self.graph.add(operation, x, y), other, takes=takes, gives=BOOLEAN)

    def _bits(self, operation: str, other: Any) -> Value:
        kind = promoted(self.kind, self.graph.of(other).kind)
        if kind == REAL:
            raise UnrecordableError(f"a bit operation on real numbers ({operation}); accepted are booleans and integers")
        return self._each(lambda x, y: self.graph.add(operation, x, y), other)

    def _shifted(self, operation: str, by: Any) -> Value:
        if promoted(self.kind, self.graph.of(by).kind) == REAL:
            raise UnrecordableError(f"a bit operation on real numbers ({operation}); accepted are integers")
        return self._each(lambda x, y: self.graph.add(operation, x, y), by, takes=INTEGER)

    def to(self, kind: str) -> Value:
        if kind == self.kind:
            return self
        if self.number is not None and not is_symbolic(self.number):
            number = self.number
            return self.graph.number({BOOLEAN: bool, INTEGER: int, REAL: float}[kind](number))
        return self._made(self.shape, lambda indices: self.at(indices, kind), kind)

    def __add__(self, other: Any) -> Value:
        return self._arithmetic("ADD", other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Value:
        return self._arithmetic("SUBTRACT", other)

    def __rsub__(self, other: Any) -> Value:
        return self._arithmetic("SUBTRACT", other, True)

    def __mul__(self, other: Any) -> Value:
        return self._arithmetic("MULTIPLY", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Value:
        return self._real("DIVIDE", other)

    def __rtruediv__(self, other: Any) -> Value:
        return self.graph.of(other) / self

    def __floordiv__(self, other: Any) -> Value:
        return self._arithmetic("FLOOR_DIVIDE", other)

    def __rfloordiv__(self, other: Any) -> Value:
        return self._arithmetic("FLOOR_DIVIDE", other, True)

    def __mod__(self, other: Any) -> Value:
        return self._arithmetic("REMAINDER", other)

    def __rmod__(self, other: Any) -> Value:
        return self._arithmetic("REMAINDER", other, True)

    def __pow__(self, other: Any) -> Value:
        exponent = self.graph.of(other)
        number = exponent.number
        if promoted(self.kind, exponent.kind) != REAL:
            if number is None or not 0 <= number <= _MOST_WHOLE_POWER:
                accepted = f"accepted is a literal exponent from 0 to {_MOST_WHOLE_POWER}, or a real base"
                raise UnrecordableError(f"an integer to the power {'of a tensor' if number is None else number}; {accepted}")
            return self._each(lambda x: self._product(x, int(number)), takes=INTEGER)
        if self.number is None and number in (2, 3):  # a power costs some ten times as much as products
            return self._each(lambda x: self._product(x, int(number)), takes=REAL)
        if self.number is None and number == 0.5:
            return self._real("SQRT")
        return self._real("POWER", exponent)

    def _product(self, node: int, times: int) -> int:
        found = node if times else self.graph.constant(1, INTEGER)
        for _ in range(times - 1):
            found = self.graph.add("MULTIPLY", found, node)
        return found

    def __rpow__(self, other: Any) -> Value:
        return self.graph.of(other) ** self

    def __and__(self, other: Any) -> Value:
        return self._bits("AND", other)

    def __or__(self, other: Any) -> Value:
        return self._bits("OR", other)

    def __xor__(self, other: Any) -> Value:
        return self._bits("XOR", other)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __lshift__(self, other: Any) -> Value:
        return self._shifted("SHIFT_LEFT", other)

    def __rshift__(self, other: Any) -> Value:
        return self._shifted("SHIFT_RIGHT", other)

    def __rlshift__(self, other: Any) -> Value:
        return self.graph.of(other) << self

    def __rrshift__(self, other: Any) -> Value:
        return self.graph.of(other) >> self

    def __invert__(self) -> Value:
        if self.kind == REAL:
            raise UnrecordableError("~ of a real number; accepted are booleans and integers")
        return self._each(lambda x: self.graph.add("NOT", x))

    def __neg__(self) -> Value:
        if self.kind == BOOLEAN:
            raise UnrecordableError("- of a boolean; accepted is ~, which negates it")
        return self._each(lambda x: self.graph.add("NEGATE", x))

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return self if self.kind == BOOLEAN else self._each(lambda x: self.graph.add("ABSOLUTE", x))

    def __eq__(self, other: Any) -> Value:  # type: ignore[override]
        return self._compared("EQUAL", other)

    def __ne__(self, other: Any) -> Value:  # type: ignore[override]
        return self._compared("NOT_EQUAL", other)

    def __lt__(self, other: Any) -> Value:
        return self._compared("LESS", other)

    def __le__(self, other: Any) -> Value:
        return self._compared("LESS_EQUAL", other)

    def __gt__(self, other: Any) -> Value:
        return self._compared("GREATER", other)

    def __ge__(self, other: Any) -> Value:
        return self._compared("GREATER_EQUAL", other)

    def __bool__(self) -> bool:
        raise UnrecordableError(BRANCH.format("np"))

    def _has_no_number(self) -> NoReturn:
        raise UnrecordableError(
            "an array is turned into a number of Python; accepted are operations on the array itself, as in table[h] or np.exp(x)"
        )

    def __int__(self) -> int:
        self._has_no_number()

    def __float__(self) -> float:
        self._has_no_number()

    def _is_no_index(self) -> NoReturn:
        raise UnrecordableError(
            "an array is turned into a number of Python, perhaps as the index of an array that is not followed, such as one of a module; "
            "accepted are indices of arrays in closures, defaults, globals, containers and attributes of objects"
        )

    def __index__(self) -> int:
        self._is_no_index()

    # Views

    def _bounded(self, index: int, size: int) -> int:
        """A node that counts from the beginning of an axis, within it: what an array beneath must not see beyond its own part."""
        add, n = self.graph.add, self.graph.constant(size, INTEGER)
        operation, _, number = self.graph.nodes[index]
        if operation == "INTEGER" and not isinstance(number, Symbol) and 0 <= number < size:
            return index
        wrapped = add("WHERE", add("LESS", index, self.graph.zero), add("ADD", index, n), index)
        last = self.graph.constant(size - 1, INTEGER)
        return add("MINIMUM", add("MAXIMUM", wrapped, self.graph.zero), last)

    def index(self, indices: Sequence[Value | None]) -> Value:
        """x[indices]: one for each of the first axes, None for all of an axis. The indices broadcast against each other."""
        if len(indices) > len(self.shape):
            raise UnrecordableError(f"{len(indices)} indices of a tensor of shape {self.shape}; accepted are up to {len(self.shape)}")
        given = [(axis, x) for axis, x in enumerate(indices) if x is not None]
        if not given:
            return self
        for _, x in given:
            if self.graph.of(x).kind != INTEGER:
                raise UnrecordableError("an index that is no integer; accepted are integers, and for a choice by a condition torch.where")
        together, axes = broadcast([x.shape for _, x in given]), [axis for axis, _ in given]
        rest = [axis for axis in range(len(self.shape)) if axis not in axes]
        first = axes[0] if axes == [*range(axes[0], axes[0] + len(axes))] else 0
        before, after = rest[:first], rest[first:]

        def at(found: Indices) -> int:
            own = dict(zip(before, found, strict=False))
            middle = found[len(before) : len(before) + len(together)]
            own |= dict(zip(after, found[len(before) + len(together) :], strict=True))
            own |= {axis: x.at(x._aligned(middle)) for axis, x in given}
            return self.at(tuple(own[axis] for axis in range(len(self.shape))))

        return self._made((*(self.shape[axis] for axis in before), *together, *(self.shape[axis] for axis in after)), at)

    def select(self, axis: int, index: int) -> Value:
        axis = axis_of(axis, len(self.shape))
        size = self.shape[axis]
        if not -size <= index < size:
            raise UnrecordableError(f"index {index} of an axis of {size}")
        return self.index([None] * axis + [self.graph.number(index + size if index < 0 else index)])

    def sliced(self, axis: int, start: int, stop: int, step: int) -> Value:
        """x[start:stop:step] along an axis; bounds as Python's slices give them, for the axis."""
        axis, sizes = axis_of(axis, len(self.shape)), list(self.shape)
        begin, _, step = slice(start, stop, step).indices(sizes[axis])
        sizes[axis] = size = len(range(*slice(start, stop, step).indices(sizes[axis])))
        if size == self.shape[axis] and step == 1:
            return self
        return self._moved(axis, size, begin, step)

    def flipped(self, axes: Sequence[int]) -> Value:
        found = self
        for axis in axes:
            axis = axis_of(axis, len(self.shape))
            found = found._moved(axis, self.shape[axis], self.shape[axis] - 1, -1)
        return found

    def _moved(self, axis: int, size: int, begin: int, step: int) -> Value:
        """Index n of the axis is begin + step n of self."""
        add, constant = self.graph.add, self.graph.constant

        def at(indices: Indices) -> int:
            n = self._bounded(indices[axis], size)
            n = add("ADD", add("MULTIPLY", n, constant(step, INTEGER)) if step != 1 else n, constant(begin, INTEGER))
            return self.at((*indices[:axis], n, *indices[axis + 1 :]))

        return self._made((*self.shape[:axis], size, *self.shape[axis + 1 :]), at)

    def unsqueezed(self, axis: int) -> Value:
        axis = axis_of(axis, len(self.shape) + 1)
        return self._made((*self.shape[:axis], 1, *self.shape[axis:]), lambda indices: self.at((*indices[:axis], *indices[axis + 1 :])))

    def squeezed(self, axes: Sequence[int] | None = None) -> Value:
        rank = len(self.shape)
        dropped = {*range(rank)} if axes is None else {axis_of(axis, rank) for axis in axes}
        dropped = {axis for axis in dropped if rank and self.shape[axis] == 1}

        def at(indices: Indices) -> int:
            left = iter(indices)
            return self.at(tuple(self.graph.zero if axis in dropped else next(left) for axis in range(rank)))

        return self._made(tuple(n for axis, n in enumerate(self.shape) if axis not in dropped), at)

    def reduced(self, name: str, join: Callable[[Value, Value], Value], axes: Any = None, keeps: bool = False) -> Value:
        """The elements along axes (one, several, or None: all) joined in pairs, and the pairs in pairs."""
        rank = len(self.shape)
        given = [*range(rank)] if axes is None or axes == [] else axes if isinstance(axes, (list, tuple)) else [axes]
        chosen = sorted({axis_of(axis, rank) for axis in given}) if rank else []
        count = math.prod(self.shape[axis] for axis in chosen)
        if not 0 < count <= _MOST_REDUCED:
            accepted = f"accepted are 1 to {_MOST_REDUCED}, or a tensor that is computed before and indexed"
            raise UnrecordableError(f"{name} of {count} elements; {accepted}")
        found = self
        for axis in chosen[::-1]:
            parts = [found.select(axis, n) for n in range(found.shape[axis])]
            while len(parts) > 1:
                pairs = [join(x, y) for x, y in zip(parts[::2], parts[1::2], strict=False)]
                parts = pairs + parts[2 * len(pairs) :]
            (found,) = parts
        for axis in chosen if keeps else ():
            found = found.unsqueezed(axis)
        return found

    def permuted(self, axes: Sequence[int]) -> Value:
        order = [axis_of(axis, len(self.shape)) for axis in axes]

        def at(indices: Indices) -> int:
            return self.at(tuple(indices[order.index(axis)] for axis in range(len(order))))

        return self._made(tuple(self.shape[axis] for axis in order), at)

    def expanded(self, shape: Sequence[int]) -> Value:
        own = (1,) * (len(shape) - len(self.shape)) + self.shape
        whole = broadcast([tuple(n if m == -1 else m for n, m in zip(own, shape, strict=True)), self.shape])
        return self._made(whole, lambda indices: self.at(self._aligned(indices)))

    def reshaped(self, shape: Sequence[int]) -> Value:
        sizes, count = [*shape], math.prod(self.shape)
        if -1 in sizes:
            sizes[sizes.index(-1)] = count // max(math.prod(n for n in sizes if n != -1), 1)
        if math.prod(sizes) != count:
            raise UnrecordableError(f"an array of shape {self.shape} in the shape {tuple(shape)}")
        wide = [n for n in self.shape if n != 1]
        if wide == [n for n in sizes if n != 1]:
            flat, places = self.squeezed(), [axis for axis, n in enumerate(sizes) if n != 1]
            return self._made(tuple(sizes), lambda indices: flat.at(tuple(indices[place] for place in places)))
        add, constant = self.graph.add, self.graph.constant

        def at(indices: Indices) -> int:
            place = self.graph.zero
            for n, size in zip(indices, sizes, strict=True):
                place = add("ADD", add("MULTIPLY", place, constant(size, INTEGER)), self._bounded(n, size))
            own: list[int] = []
            for size in self.shape[::-1]:
                n = constant(size, INTEGER)
                own.insert(0, add("REMAINDER", place, n))
                place = add("FLOOR_DIVIDE", place, n)
            return self.at(tuple(own))

        return self._made(tuple(sizes), at)

    def gathered(self, axis: int, index: Value) -> Value:
        """torch.gather: along one axis, at an index for each element."""
        axis = axis_of(axis, len(self.shape))
        if len(index.shape) != len(self.shape):
            raise UnrecordableError(f"a gather of an array of shape {self.shape} by an index of shape {index.shape}")
        if not self.shape:
            return self

        def at(indices: Indices) -> int:
            return self.at((*indices[:axis], index.at(index._aligned(indices)), *indices[axis + 1 :]))

        return self._made(index.shape, at)


def where(condition: Value, x: Any, y: Any) -> Value:
    """x where the condition holds, else y."""
    graph = condition.graph
    first, second = graph.of(x), graph.of(y)
    kind, chosen = promoted(first.kind, second.kind), condition.to(BOOLEAN)

    def at(indices: Indices) -> int:
        nodes = chosen.at(chosen._aligned(indices)), *(v.at(v._aligned(indices), kind) for v in (first, second))
        return graph.add("WHERE", *nodes, kind=kind)

    return graph.value(graph, broadcast([chosen.shape, first.shape, second.shape]), kind, at)


def concatenated(values: Sequence[Value], axis: int) -> Value:
    """The arrays one behind the other; an index chooses by comparisons."""
    graph, axis = values[0].graph, axis_of(axis, len(values[0].shape))
    kind, shape = promoted(*(graph.of(x).kind for x in values)), values[0].shape
    ends = [sum(x.shape[axis] for x in values[: n + 1]) for n in range(len(values))]
    if any(x.shape[:axis] + x.shape[axis + 1 :] != shape[:axis] + shape[axis + 1 :] for x in values):
        raise UnrecordableError(f"shapes {', '.join(str(x.shape) for x in values)}, which cannot be concatenated")

    def at(indices: Indices) -> int:
        place = found._bounded(indices[axis], ends[-1])
        chosen = -1
        for x, end in [*zip(values, ends, strict=True)][::-1]:
            start = graph.constant(end - x.shape[axis], INTEGER)
            own = x.at((*indices[:axis], graph.add("SUBTRACT", place, start), *indices[axis + 1 :]), kind)
            here = graph.add("LESS", place, graph.constant(end, INTEGER))
            chosen = own if chosen < 0 else graph.add("WHERE", here, own, chosen, kind=kind)
        return chosen

    found: Value = graph.value(graph, (*shape[:axis], ends[-1], *shape[axis + 1 :]), kind, at)
    return found


def arange(graph: Graph, start: Any, end: Any, step: Any) -> Value:
    begin, by = graph.number(start), graph.number(step)
    kind = promoted(begin.kind, by.kind)
    found: Value = graph.value(graph, (max(math.ceil((end - start) / step), 0),), kind, lambda _: 0)

    def at(indices: Indices) -> int:
        n = graph.converted(found._bounded(indices[0], found.shape[0]), kind)
        return graph.add("ADD", graph.add("MULTIPLY", n, by.at((), kind)), begin.at((), kind))

    found._at = at
    return found
