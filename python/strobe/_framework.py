"""What the package asks of an array library. Torch and NumPy each answer it; neither needs the other to be installed."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ._core import lib

if TYPE_CHECKING:
    from ._abi import Allocator
    from ._prepare import Prepared

Array = Any  # a torch.Tensor or a numpy.ndarray: one kind throughout a call
P = ParamSpec("P")
T = TypeVar("T")


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """torch.compile ends its graph before a call of `function`, which calls what no graph can hold, and begins another after it."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if sys.modules.get("torch._dynamo") is None:  # nobody compiles
            return function(*args, **kwargs)
        return sys.modules["torch"].compiler.disable(function)(*args, **kwargs)

    return call


class Framework(ABC):
    name: str  # of an array, for messages
    bool_dtype: Any

    @property
    @abstractmethod
    def xp(self) -> Any:
        """The module torch or numpy: its dtypes and functions."""

    @abstractmethod
    def is_array(self, x: object) -> bool: ...

    @abstractmethod
    def unfit(self, name: str, x: Array, beside: str = "q", q: Array | None = None) -> Exception | None:
        """What is wrong with x, which is_array(), unless its memory is what it means, and lies where q, the argument `beside`, does."""

    def without_values(self, name: str, x: Array) -> Exception | None:
        """What is wrong with x if its numbers cannot be read at its address."""
        return None

    def is_readable(self, x: Array) -> bool:
        """Whether its numbers lie in host memory, and nobody wants to see them read."""
        return True

    def causal_bias(self, x: object) -> tuple[str, int, int] | None:
        """The alignment and the lengths Sq and Sk of what is no array of numbers but the framework's name for a causal mask."""
        return None

    def overriding(self, arguments: Iterable[object]) -> Sequence[Array]:
        """Those arrays whose own kind says what becomes of a call, in place of it."""
        return ()

    def handed_over(self, kinds: Sequence[Array], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What becomes of function(*args, **kwargs), as the kinds of these arrays say."""
        raise NotImplementedError

    def autocast(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """The arrays as forward() hands them on."""
        return arrays

    def is_deterministic(self) -> bool:
        """Whether the framework wants the same bits in every run, whatever the call says."""
        return False

    def again(self, q: Array, k: Array, v: Array, return_lse: object, given: Mapping[str, Any]) -> Any:
        """What attention() returns, of a call that is known from one before; None if it is not."""
        return None

    def remember(self, q: Array, k: Array, v: Array, return_lse: bool, given: Mapping[str, Any], p: Prepared) -> None:
        """For again(): a call of attention() that was made."""
        return

    @abstractmethod
    def forward(self, p: Prepared) -> tuple[Array, Array]:
        """out and lse; differentiable in torch."""

    @abstractmethod
    def backward(self, p: Prepared, dout: Array, dlse: Array | None, out: Array, lse: Array, needed: list[str]) -> dict[str, Array]:
        """Those of _abi.GRADIENTS that are needed."""

    @abstractmethod
    def drawn_rng(self, q: Array) -> Array:
        """The dropout mask's (seed, offset) from the default generator: int64 (2,), where q lies."""

    @abstractmethod
    def own(self, x: Array) -> Array:
        """An array of either framework as one of this."""

    @abstractmethod
    def view(self, tensor: Any, name: str, x: Array, swap_1_2: bool) -> Array:
        """Fills a strobe_tensor; `name` is for messages, swap_1_2 as in strobe_glue_tensor. Returns what has to live as long."""

    @abstractmethod
    def default_threads(self) -> int: ...

    def place(self, execution: Any, q: Array, threads: int | None) -> Allocator | None:
        """Fills a strobe_execution for work where q lies; returns where its workspace comes from, None for the library's own memory."""
        most = self.default_threads()  # asked in any case: PyTorch then tells OpenMP of its number, if this thread is new
        lib.strobe_glue_execution(execution, threads or most)
        return None

    @abstractmethod
    def empty(self, like: Array | None, shape: tuple[int, ...], dtype: Any) -> Array: ...

    @abstractmethod
    def dense_like(self, x: Array, width: int, dtype: Any) -> Array:
        """x's shape but for the last axis, uninitialised, without gaps; of four axes, 1 and 2 lie in memory in the order that x has."""

    @abstractmethod
    def cast(self, x: Array, dtype: Any) -> Array: ...

    @abstractmethod
    def constant(self, x: Array) -> Array:
        """x, through which no gradient flows."""

    @abstractmethod
    def repeat(self, x: Array, counts: Any, axis: int) -> Array: ...

    @abstractmethod
    def arange(self, n: int, like: Array) -> Array:
        """0 ... n - 1, int64, on the device of `like`."""

    @abstractmethod
    def on_host(self, x: Array) -> Array:
        """x, or a copy of it, contiguous in host memory."""

    @abstractmethod
    def address(self, x: Array) -> int: ...

    @abstractmethod
    def int32(self, values: array[int], like: Array | None = None) -> Array:
        """On the device of `like`."""


def kind(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


def known_framework(x: object) -> Framework | None:
    """For arrays of x's kind; None if it is no array. Imports neither torch nor NumPy: whoever has an array has done so."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        import strobe._torch  # every call comes by here, and "from" takes a microsecond more

        return strobe._torch.TORCH
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(x, numpy.ndarray):
        from ._numpy import NUMPY

        return NUMPY
    return None


def no_array(name: str, x: object) -> TypeError:
    return TypeError(f"{name}: {kind(x)}; accepted is a torch.Tensor or a numpy.ndarray")


def unfit(name: str, x: Any, framework: Framework | None = None, beside: str = "q", q: Array | None = None) -> Exception | None:
    """Why x is no array that the package takes: of `framework`, if that is known, as the argument `beside` is, and where q lies.

    Every array of every function passes here; what its shape and dtype have to be is checked elsewhere."""
    own = framework if framework is not None and framework.is_array(x) else known_framework(x)
    if framework is not None and own is not framework:
        return TypeError(f"{name}: {kind(x)}; accepted is a {framework.name}, as {beside} is")
    return no_array(name, x) if own is None else own.unfit(name, x, beside, q)


def framework_of(name: str, x: object) -> Framework:
    """known_framework, where x has to be an array; `name` is x's in a message."""
    framework = known_framework(x)
    if framework is None:
        raise no_array(name, x)
    if (refused := framework.unfit(name, x)) is not None:
        raise refused
    return framework


def is_bool(x: object) -> bool:
    """Python's or NumPy's."""
    numpy = sys.modules.get("numpy")
    return isinstance(x, bool) or (numpy is not None and isinstance(x, numpy.bool_))


def shown(x: object) -> str:
    """What the caller gave, for a message: in one line that is not long."""
    try:
        text = " ".join(repr(x).split())
    except Exception:  # such as an integer of more digits than Python prints
        return kind(x)
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_whole(x: object) -> bool:
    """Whether x is an integer, of Python, NumPy or a compiler, and no bool."""
    return (isinstance(x, int) or (hasattr(x, "__index__") and known_framework(x) is None)) and not is_bool(x)


def framework_like(like: Array | None) -> Framework:
    """For arrays that come from no other: `like`'s, or without it torch if the program has imported it, else NumPy."""
    if like is not None:
        return framework_of("like", like)
    if sys.modules.get("torch") is not None:
        from ._torch import TORCH

        return TORCH
    from ._numpy import NUMPY

    return NUMPY
