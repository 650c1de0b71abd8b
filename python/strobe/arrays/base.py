"""The interface that the package needs of an array library. Torch and NumPy each implement it; neither needs the other to be installed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Array = Any  # a torch.Tensor or a numpy.ndarray: one kind throughout a call


class Framework(ABC):
    name: str  # what messages call an array
    bool_dtype: Any
    is_traced = False  # whether calls must be visible to autograd and tracers
    recorder = "_recorder_numpy"  # the module that records functions of the score and the mask
    keeps_recordings = True  # whether what a function read tells whether a recording of it still holds

    @property
    @abstractmethod
    def xp(self) -> Any:
        """The module torch or numpy: its dtypes and functions."""

    @abstractmethod
    def is_array(self, x: object) -> bool: ...

    @abstractmethod
    def unfit(self, name: str, x: Array, beside: str = "q", q: Array | None = None) -> Exception | None:
        """Why x, an array of this framework, is refused: its memory does not hold its values, or is not on the device of q, the argument
        `beside`."""

    def without_values(self, name: str, x: Array) -> Exception | None:
        """The reason against x if its numbers cannot be read at its address."""
        return None

    def unwritable(self, name: str, x: Array) -> Exception | None:
        """Why x's memory may not be written now, apart from its strides."""
        return None

    def written(self, x: Array) -> None:
        """Records that the library has written to x."""
        return

    def is_tracked(self, x: Array) -> bool:
        """Whether autograd wants x's gradient."""
        return False

    def is_readable(self, x: Array) -> bool:
        """Whether x's numbers lie in host memory, and no tracer must see them read."""
        return True

    def causal_bias(self, x: object) -> tuple[str, int, int] | None:
        """The alignment, Sq and Sk of an object by which the framework describes a causal mask; None for any other object."""
        return None

    def overriding(self, arguments: Iterable[object]) -> Sequence[Array]:
        """The arrays whose own type takes over a call."""
        return ()

    def handed_over(self, kinds: Sequence[Array], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of function(*args, **kwargs) as the types of these arrays define it."""
        raise NotImplementedError

    def autocast(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """The arrays after the casts of the framework's autocast, if it is on."""
        return arrays

    def device(self, x: Array) -> object:
        """The device of x, if arrays of a call have to be on one device."""
        return getattr(x, "device", None)

    def is_deterministic(self) -> bool:
        """Whether the framework demands the same bits in every run, whatever the call says."""
        return False

    @abstractmethod
    def drawn_rng(self, q: Array) -> Array:
        """The dropout mask's (seed, offset) from the default generator: int64 (2,), on q's device."""

    @abstractmethod
    def own(self, x: Array) -> Array:
        """An array of either framework as one of this framework."""

    def beside(self, q: Array, x: Array) -> Array:
        """x, or a copy of it on q's device, if x lies in host memory."""
        return x

    @abstractmethod
    def view(self, tensor: Any, name: str, x: Array, swap_1_2: bool) -> Array:
        """Fills a strobe_tensor; `name` is for messages, swap_1_2 as in strobe_glue_tensor. Returns the objects that must live
        as long as it."""

    @abstractmethod
    def default_threads(self) -> int: ...

    def stream(self, x: Array) -> int | None:
        """The GPU stream on which x is computed; None if x lies in host memory."""
        return None

    def scratch(self, x: Array, count: int) -> tuple[object, int]:
        """`count` bytes on x's device, a GPU: the owner and the address. The owner may be released before the work is done, because its
        memory is reused in the stream's order."""
        raise NotImplementedError

    @abstractmethod
    def empty(self, like: Array | None, shape: tuple[int, ...], dtype: Any) -> Array: ...

    @abstractmethod
    def dense_like(self, x: Array, width: int, dtype: Any) -> Array:
        """An uninitialised array without gaps, in x's shape except for the last axis. Axes 1 and 2 of four lie in memory in the same order
        as x's."""

    @abstractmethod
    def cast(self, x: Array, dtype: Any) -> Array: ...

    @abstractmethod
    def cast_in_words(self, x: str, dtype: str) -> str:
        """The caller's spelling of a cast of x to dtype, for messages. dtype: a name of the library's DTYPES."""

    @abstractmethod
    def expanded_in_words(self, x: str, shape: tuple[int, ...]) -> str:
        """The caller's spelling of a view of x with strides of 0, for messages; x: an expression, or a number."""

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
        """An int32 array on the device of `like`."""
