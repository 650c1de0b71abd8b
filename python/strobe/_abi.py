"""The C ABI seen from Python: its names for types and devices, and a status turned into an exception."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

from ._core import ffi, lib

P = ParamSpec("P")
T = TypeVar("T")

FORWARD: int = lib.STROBE_FORWARD
BACKWARD: int = lib.STROBE_BACKWARD
# What a call computes.
OPERATIONS: dict[str, int] = {
    "forward": FORWARD,
    "backward": BACKWARD,
    "jvp": lib.STROBE_JVP,
    "backward_jvp": lib.STROBE_BACKWARD_JVP,
}
IN_A_DIRECTION = (OPERATIONS["jvp"], OPERATIONS["backward_jvp"])  # those that read tangents
WITH_GRADIENTS = (BACKWARD, OPERATIONS["backward_jvp"])  # the operations that read dout and write gradients
CPU: int = lib.STROBE_CPU
CUDA: int = lib.STROBE_CUDA

DTYPES: dict[str, int] = {
    "float32": lib.STROBE_FLOAT32,
    "float16": lib.STROBE_FLOAT16,
    "bfloat16": lib.STROBE_BFLOAT16,
    "float64": lib.STROBE_FLOAT64,
    "bool": lib.STROBE_BOOL,
    "int32": lib.STROBE_INT32,
    "int64": lib.STROBE_INT64,
    "int8": lib.STROBE_INT8,
    "float8_e4m3fn": lib.STROBE_FLOAT8_E4M3,
    "float8_e5m2": lib.STROBE_FLOAT8_E5M2,
    "uint8": lib.STROBE_UINT8,  # two INT4 each
}
NO_DTYPE = 0  # for types that the library has no name for
MAX_RANK = 4

_EXCEPTIONS: dict[int, type[Exception]] = {
    lib.STROBE_INVALID_ARGUMENT: ValueError,
    lib.STROBE_UNSUPPORTED: NotImplementedError,
    lib.STROBE_OUT_OF_MEMORY: MemoryError,
}


def text(chars: Any, errors: str = "backslashreplace") -> str:
    """The string behind a char pointer. Its bytes may be arbitrary, because it may quote a damaged file or a folder's name. errors: as in
    bytes.decode."""
    return ffi.string(chars).decode(errors=errors)


def said(ask: Callable[[Any, int, Any], object], errors: str = "backslashreplace") -> str:
    """The text that a function of the library writes into a buffer, like strobe_explain. ask(chars, size, needed) calls the function, at
    first only for the size."""
    needed = ffi.new("size_t *")
    ask(ffi.NULL, 0, needed)
    chars = ffi.new("char[]", needed[0])
    ask(chars, needed[0], needed)
    return text(chars, errors)


def told(function: Any, *arguments: Any, errors: str = "backslashreplace") -> str:
    """The text that a function writes, if the function takes (*arguments, chars, size, needed) and returns a status."""

    def ask(*buffer: Any) -> None:
        status = function(*arguments, *buffer)
        if status != lib.STROBE_OK:
            raise last_failure(status)

    return said(ask, errors)


def exception_for(status: int) -> type[Exception]:
    return _EXCEPTIONS.get(status, RuntimeError)


def last_failure(status: int) -> Exception:
    """The exception for this thread's last failure. If it has no text, the library had no memory for one."""
    words = text(lib.strobe_last_error())
    return exception_for(status)(words) if words else MemoryError("out of host memory")


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Wraps a function whose calls no graph can hold: torch.compile ends its graph before such a call and begins another one after it."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if sys.modules.get("torch._dynamo") is None:  # torch.compile is not in use
            return function(*args, **kwargs)
        return sys.modules["torch"].compiler.disable(function)(*args, **kwargs)

    return call


def is_traced_by_dynamo() -> bool:
    """Whether torch.compile reads the program's bytecode instead of running it."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


def graph_break(why: str) -> None:
    """Ends the graph that torch.compile traces. With fullgraph=True its error says why."""
    torch = sys.modules["torch"]
    if hasattr(torch.compiler, "nested_compile_region"):  # PyTorch 2.8 or later: the first versions took no message
        torch._dynamo.graph_break(msg=why)
    else:
        torch._dynamo.graph_break()


def version() -> str:
    return text(lib.strobe_version())


@outside_graphs
def engines() -> list[tuple[str, str | None]]:
    """The engines of this library: (name, None), or (name, the reason why it cannot run on this machine).

    An engine that has a form for each device runs here if either form does.
    """
    found: dict[str, str | None] = {}
    index = 0
    while (chars := lib.strobe_engine_name(index)) != ffi.NULL:
        name, missing = text(chars), lib.strobe_engine_missing(index)
        if found.get(name, "") is not None:
            found[name] = None if missing == ffi.NULL else text(missing)
        index += 1
    return list(found.items())


def _add_installed_kernels() -> None:
    """Lets the library read the kernels of the package strobe-attention-kernels, if it is installed (packages/kernels)."""
    try:
        package = find_spec("strobe_attention_kernels")
    except ValueError:  # a module of that name that a program made by itself
        return
    if package is None or package.origin is None:  # a folder of that name, which is no package
        return
    for folder in package.submodule_search_locations or ():
        lib.strobe_add_kernel_folder(os.fsencode(folder))


_add_installed_kernels()
