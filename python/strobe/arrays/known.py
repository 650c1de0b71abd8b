"""The framework of an array, and whether the package accepts it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from .._graph import UnrecordableError
from .._messages import NUMPY_EXTRA, kind, needed_by
from .._refusals import Name, refusing
from .base import Array, Framework


class _Recording(threading.local):
    """option: that whose function this thread records, "score" or "mask"."""

    option = ""


RECORDING = _Recording()
# The framework of an array of JAX, while a function of strobe.jax judges it; jax.py sets this. No other function takes such arrays.
OF_JAX: Callable[[object], Framework | None] | None = None


def refuse_in_functions() -> None:
    """Refuses a call that a function of the score or a mask makes: it would see one score at a time, without a value."""
    if RECORDING.option:
        raise UnrecordableError("a call of strobe within the function; accepted is one that is made before, and its result indexed")


def known_framework(x: object) -> Framework | None:
    """The framework for arrays of x's type; None if it is no array. Imports neither torch nor NumPy: the owner of an array has done so."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        import strobe.arrays.torch  # every call runs this line; "from … import" takes 1 µs more

        return strobe.arrays.torch.TORCH
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(x, numpy.ndarray):
        from .numpy import NUMPY

        return NUMPY
    if OF_JAX is not None:
        return OF_JAX(x)
    return None


def no_array(name: str, x: object) -> TypeError:
    refuse_in_functions()
    hint = "; strobe.jax.attention takes JAX's" if kind(x).startswith("jax") else ""
    return refusing(TypeError, name, f"{kind(x)}; accepted is a torch.Tensor or a numpy.ndarray{hint}")


def unfit(name: str, x: Any, framework: Framework | None = None, beside: str = "q", q: Array | None = None) -> Exception | None:
    """Why the package does not accept x: it must be of `framework`, if that is known, like the argument `beside`, and on q's device.

    Every array of every function passes here; its shape and dtype are checked elsewhere."""
    refuse_in_functions()
    own = framework if framework is not None and framework.is_array(x) else known_framework(x)
    if framework is not None and own is not framework:
        return refusing(TypeError, name, "{0}; accepted is a {1}, as {2} is", kind(x), framework.name, Name(beside))
    return no_array(name, x) if own is None else own.unfit(name, x, beside, q)


def framework_of(name: str, x: object) -> Framework:
    """known_framework, for an x that must be an array; `name` is x's in a message."""
    refuse_in_functions()
    framework = known_framework(x)
    if framework is None:
        raise no_array(name, x)
    if (refused := framework.unfit(name, x)) is not None:
        raise refused
    return framework


def framework_like(like: Array | None, whose: str) -> Framework:
    """The framework for arrays that derive from no other array: `like`'s; without `like`, torch if the program has imported torch, else
    NumPy. whose: the argument that the arrays belong to, for messages."""
    refuse_in_functions()
    if like is not None:
        return framework_of("like", like)
    if sys.modules.get("torch") is not None:
        from .torch import TORCH

        return TORCH
    with needed_by(f"{whose} without like", NUMPY_EXTRA):
        from .numpy import NUMPY

    return NUMPY
