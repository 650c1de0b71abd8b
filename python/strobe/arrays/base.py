"""What the package asks of an array library. Torch and NumPy each answer it; neither needs the other to be installed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Array = Any  # a torch.Tensor or a numpy.ndarray: one kind throughout a call


class Framework(ABC):
    name: str  # of an array, for messages
    bool_dtype: Any
    is_traced = False  # whether calls have to be seen, so as to be differentiated and traced

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

    def unwritable(self, name: str, x: Array) -> Exception | None:
        """Why nothing may be written to x's memory now, of which its strides say nothing."""
        return None

    def written(self, x: Array) -> None:
        """Takes note that the library has written to x."""
        return

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

    @abstractmethod
    def drawn_rng(self, q: Array) -> Array:
        """The dropout mask's (seed, offset) from the default generator: int64 (2,), where q lies."""

    @abstractmethod
    def own(self, x: Array) -> Array:
        """An array of either framework as one of this."""

    def beside(self, q: Array, x: Array) -> Array:
        """x, or a copy of it where q lies, if x lies in host memory alone."""
        return x

    @abstractmethod
    def view(self, tensor: Any, name: str, x: Array, swap_1_2: bool) -> Array:
        """Fills a strobe_tensor; `name` is for messages, swap_1_2 as in strobe_glue_tensor. Returns what has to live as long."""

    @abstractmethod
    def default_threads(self) -> int: ...

    def stream(self, x: Array) -> int | None:
        """The GPU's stream of x's work; None where x lies in host memory."""
        return None

    def scratch(self, x: Array, count: int) -> tuple[object, int]:
        """That many bytes where x lies, a GPU: their owner, which may go before the work is done, for its memory is then used again in the
        stream's order; and their address."""
        raise NotImplementedError

    @abstractmethod
    def empty(self, like: Array | None, shape: tuple[int, ...], dtype: Any) -> Array: ...

    @abstractmethod
    def dense_like(self, x: Array, width: int, dtype: Any) -> Array:
        """x's shape but for the last axis, uninitialised, without gaps; of four axes, 1 and 2 lie in memory in the order that x has."""

    @abstractmethod
    def cast(self, x: Array, dtype: Any) -> Array: ...

    @abstractmethod
    def cast_in_words(self, x: str, dtype: str) -> str:
        """How a caller writes that cast, for messages; dtype: as DTYPES of the library name it."""

    @abstractmethod
    def expanded_in_words(self, x: str, shape: tuple[int, ...]) -> str:
        """How a caller writes a view of x with strides of 0, for messages; x: an expression, or a number."""

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
