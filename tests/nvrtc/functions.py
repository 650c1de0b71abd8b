"""Functions of the score as nodes of the C ABI, and the kernels that calls with them would compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from strobe._abi import BACKWARD, FORWARD, text
from strobe._core import ffi, lib
from strobe._prewarm import Kernel, Shape, _Addresses, _kernel, _results

S = 8192


class Graph:
    """The nodes of a function, one after another; g.name(inputs) adds one and returns it."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *inputs: self._add(name.upper(), inputs)

    def _add(self, name: str, inputs: tuple[int, ...], **more: Any) -> int:
        self.nodes.append({"operation": getattr(lib, f"STROBE_OP_{name}"), "inputs": [*inputs, 0, 0, 0, 0][:4], **more})
        return len(self.nodes) - 1

    def load(self, captured: int, *indices: int) -> int:
        return self._add("LOAD", indices, captured=captured)

    def real(self, value: float) -> int:
        return self._add("REAL", (), real=value)

    def integer(self, value: int) -> int:
        return self._add("INTEGER", (), integer=value)


def struct(graph: Graph, alive: list[Any]) -> Any:
    nodes = ffi.new("strobe_node[]", graph.nodes)
    alive += [nodes, function := ffi.new("strobe_function *", {"nodes": nodes, "n_nodes": len(graph.nodes)})]
    function.size = ffi.sizeof("strobe_function")
    return function


def prewarmed(
    arrays: Mapping[str, Shape],
    score: Graph | None,
    mask: Graph | None,
    options: Mapping[str, Any],
    backward: bool,
    compute_capability: int,
    engine: str | None = None,
) -> list[Kernel]:
    """Like strobe._prewarm.prewarm, with functions of the score and the mask."""
    alive: list[Any] = []
    attention = ffi.new("strobe_attention *", dict(options))
    attention.size = ffi.sizeof("strobe_attention")
    if engine:
        alive.append(name := ffi.new("char[]", engine.encode()))
        attention.engine = name
    for field, graph in (("score_function", score), ("mask_function", mask)):
        if graph:
            setattr(attention, field, struct(graph, alive))
    tensors = ffi.new("strobe_tensors *")
    tensors.size = ffi.sizeof("strobe_tensors")
    place = _Addresses()
    for key, x in {**arrays, **dict(_results(arrays, backward, False, "bfloat16"))}.items():
        alive.append(tensor := ffi.new("strobe_tensor *"))
        place(tensor, key, x, False)
        setattr(tensors, key, tensor)
    chars = ffi.new("char[]", 1 << 16)
    status = lib.strobe_prewarm(attention, tensors, BACKWARD if backward else FORWARD, compute_capability, chars, 1 << 16, ffi.NULL)
    assert status == lib.STROBE_OK, ffi.string(lib.strobe_last_error()).decode()
    return [_kernel(line) for line in text(chars).splitlines()]


Function = tuple[Graph | None, Graph | None, dict[str, Shape]]  # score, mask, captured


def _score(build: Callable[[Graph], int], **captured: Shape) -> Function:
    graph = Graph()
    build(graph)
    return graph, None, captured


def _mask(build: Callable[[Graph], int], **captured: Shape) -> Function:
    graph = Graph()
    build(graph)
    return None, graph, captured


def _bucket(g: Graph) -> int:
    """T5's causal buckets: one for each of the first 16 distances, then one per range of their logarithm."""
    distance = g.maximum(g.subtract(g.query(), g.key()), g.integer(0))
    log = g.divide(g.log(g.divide(g.to_real(distance), g.real(16.0))), g.real(2.0794415))
    far = g.minimum(g.add(g.integer(16), g.to_integer(g.multiply(log, g.real(16.0)))), g.integer(31))
    return g.where(g.less(distance, g.integer(16)), distance, far)


def _near(g: Graph, a: int, b: int) -> int:
    return g.less_equal(g.absolute(g.subtract(a, b)), g.integer(6))


def _places(g: Graph) -> int:
    width = g.integer(64)
    i, j = g.query(), g.key()
    rows = _near(g, g.floor_divide(i, width), g.floor_divide(j, width))
    return g.and_(rows, _near(g, g.remainder(i, width), g.remainder(j, width)))


Graph.and_ = lambda self, *inputs: self._add("AND", inputs)  # type: ignore[attr-defined]
Graph.or_ = lambda self, *inputs: self._add("OR", inputs)  # type: ignore[attr-defined]

# Twelve functions; the call is causal.
FUNCTIONS: dict[str, Callable[[], Function]] = {
    "ALiBi": lambda: _score(
        lambda g: g.add(g.score(), g.multiply(g.load(0, g.head()), g.to_real(g.subtract(g.key(), g.query())))),
        captured_0=Shape((16,), "float32"),
    ),
    "relative bias": lambda: _score(
        lambda g: g.add(g.score(), g.load(0, g.head(), g.add(g.subtract(g.query(), g.key()), g.integer(S - 1)))),
        captured_0=Shape((16, 2 * S), "float32"),
    ),
    "T5 buckets": lambda: _score(lambda g: g.add(g.score(), g.load(0, _bucket(g), g.head())), captured_0=Shape((32, 16), "float32")),
    "softcap": lambda: _score(lambda g: g.multiply(g.real(20.0), g.tanh(g.divide(g.score(), g.real(20.0))))),
    "softcap and ALiBi": lambda: _score(
        lambda g: g.add(
            g.multiply(g.real(20.0), g.tanh(g.divide(g.score(), g.real(20.0)))),
            g.multiply(g.load(0, g.head()), g.to_real(g.subtract(g.key(), g.query()))),
        ),
        captured_0=Shape((16,), "float32"),
    ),
    "documents": lambda: _mask(lambda g: g.equal(g.load(0, g.query()), g.load(0, g.key())), captured_0=Shape((S,), "int32")),
    "documents of int64": lambda: _mask(
        lambda g: g.equal(g.load(0, g.batch(), g.query()), g.load(0, g.batch(), g.key())), captured_0=Shape((2, S), "int64")
    ),
    "prefix": lambda: _mask(
        lambda g: g.or_(g.less_equal(g.key(), g.query()), g.less(g.key(), g.load(0, g.batch()))), captured_0=Shape((2,), "int32")
    ),
    "window": lambda: _mask(lambda g: g.less_equal(g.absolute(g.subtract(g.query(), g.key())), g.integer(256))),
    "dilated": lambda: _mask(lambda g: g.equal(g.remainder(g.subtract(g.query(), g.key()), g.integer(4)), g.integer(0))),
    "neighbourhood": lambda: _mask(_places),
    "tanh": lambda: _score(lambda g: g.multiply(g.tanh(g.score()), g.real(2.0))),
    "causal by -inf": lambda: _score(lambda g: g.where(g.greater_equal(g.query(), g.key()), g.score(), g.real(float("-inf")))),
}

# Functions by what the gradient of the tensor that they read is summed along. The call is causal.
CAPTURED: dict[str, Callable[[], Function]] = {
    "constant": lambda: _score(lambda g: g.multiply(g.score(), g.load(0)), captured_0=Shape((), "float32")),
    "head": FUNCTIONS["ALiBi"],
    "curved": lambda: _score(
        lambda g: g.multiply(g.load(0, g.head()), g.tanh(g.divide(g.score(), g.load(0, g.head())))), captured_0=Shape((16,), "float32")
    ),
    "query": lambda: _score(lambda g: g.multiply(g.score(), g.load(0, g.query())), captured_0=Shape((S,), "float32")),
    "key": lambda: _score(lambda g: g.add(g.score(), g.load(0, g.head(), g.key())), captured_0=Shape((16, S), "float32")),
    "i - j": FUNCTIONS["relative bias"],
    "buckets": FUNCTIONS["T5 buckets"],
    "table": lambda: _score(
        lambda g: g.add(g.score(), g.load(0, g.remainder(g.query(), g.integer(32)), g.remainder(g.key(), g.integer(32)))),
        captured_0=Shape((32, 32), "float32"),
    ),
    "pairs": lambda: _score(lambda g: g.add(g.score(), g.load(0, g.query(), g.key())), captured_0=Shape((S, S), "float32")),
}
