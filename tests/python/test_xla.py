"""The handlers of XLA's typed FFI (python/glue/xla.c), called as XLA calls them, without JAX. tests/jax_arrays calls them
through XLA, on a CPU.

With STROBE_TEST_DEVICE=emulated the handlers for CUDA run, on the emulated GPU, whose memory is the CPU's."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p, cast, sizeof
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import strobe
from device import EMULATED
from strobe._abi import BACKWARD, CPU, CUDA, FORWARD
from strobe._core import lib

DTYPES = {"bool": 1, "int32": 4, "int64": 5, "uint32": 8, "float16": 10, "float32": 11, "float64": 12, "bfloat16": 16}
DEVICE = CUDA if EMULATED else CPU
METADATA, EXECUTE = 1, 3


def struct(name: str, **fields: Any) -> type[Structure]:
    """A struct of c_api.h, which begins with its size and an extension."""
    return type(name, (Structure,), {"_fields_": [("struct_size", c_size_t), ("extension", c_void_p), *fields.items()]})


Buffer = struct("Buffer", dtype=c_int, data=c_void_p, rank=c_int64, dims=POINTER(c_int64))
Arguments = struct("Arguments", size=c_int64, types=POINTER(c_int), values=POINTER(c_void_p))
Attributes = struct("Attributes", size=c_int64, types=POINTER(c_int), names=POINTER(c_void_p), values=POINTER(c_void_p))
Frame = struct(
    "Frame", api=c_void_p, ctx=c_void_p, stage=c_int, args=Arguments, rets=Arguments, attrs=Attributes, future=c_void_p
)  # fmt: skip
ErrorArguments = struct("ErrorArguments", message=c_char_p, code=c_int)
StreamArguments = struct("StreamArguments", ctx=c_void_p, stream=c_void_p)
AllocateArguments = struct("AllocateArguments", ctx=c_void_p, size=c_size_t, alignment=c_size_t, data=c_void_p)
FreeArguments = struct("FreeArguments", ctx=c_void_p, size=c_size_t, data=c_void_p)
DeviceArguments = struct("DeviceArguments", ctx=c_void_p, ordinal=c_int32)
Version = struct("Version", major=c_int, minor=c_int)


class Span(Structure):
    _fields_ = [("data", c_char_p), ("size", c_size_t)]


class Numbers(Structure):
    """An array, or without `size` a scalar."""

    _fields_ = [("dtype", c_int), ("size", c_size_t), ("data", c_void_p)]


class Number(Structure):
    _fields_ = [("dtype", c_int), ("value", c_void_p)]


class Metadata(Structure):
    _fields_ = [("struct_size", c_size_t), ("version", Version), ("traits", c_uint32), ("state", c_int64)]


class Extension(Structure):
    _fields_ = [("struct_size", c_size_t), ("type", c_int), ("next", c_void_p), ("metadata", POINTER(Metadata))]


ANSWER = ctypes.CFUNCTYPE(c_void_p, c_void_p)
# The members of XLA_FFI_Api that are called, among those in their order.
MEMBERS = (
    *("Error_Create", "Error_GetMessage", "Error_Destroy", "Handler_Register", "Stream_Get", "Type_Register", "ExecutionContext_Get"),
    *("State_Set", "State_Get", "DeviceMemory_Allocate", "DeviceMemory_Free", "ThreadPool_Schedule", "ThreadPool_NumThreads"),
    *("Future_Create", "Future_SetAvailable", "Future_SetError", "RunId_Get", "DeviceOrdinal_Get"),
)
Api = struct("Api", version=Version, internal=c_void_p, **dict.fromkeys(MEMBERS, ANSWER))


class Xla:
    """What the handler sees of XLA; it remembers what the handler asks for."""

    def __init__(self) -> None:
        self.errors: list[tuple[int, str]] = []
        self.live: dict[int, Any] = {}
        self.allocated: list[int] = []
        self._kept: list[Any] = []
        own = {"Error_Create": self._error, "Stream_Get": self._stream, "DeviceOrdinal_Get": self._device}
        own |= {"DeviceMemory_Allocate": self._allocate, "DeviceMemory_Free": self._free}
        self.api = Api(sizeof(Api), None, Version(sizeof(Version), None, 0, 7), None, *(ANSWER(own.get(name, 0)) for name in MEMBERS))

    def _error(self, arguments: int) -> int:
        given = ErrorArguments.from_address(arguments)
        self.errors.append((given.code, given.message.decode()))
        return 1

    def _stream(self, arguments: int) -> int:
        StreamArguments.from_address(arguments).stream = None
        return 0

    def _device(self, arguments: int) -> int:
        DeviceArguments.from_address(arguments).ordinal = 0
        return 0

    def _allocate(self, arguments: int) -> int:
        given = AllocateArguments.from_address(arguments)
        memory = np.empty(given.size + given.alignment, np.uint8)
        given.data = -(-memory.ctypes.data // given.alignment) * given.alignment
        self.live[given.data] = memory
        self.allocated.append(given.size)
        return 0

    def _free(self, arguments: int) -> int:
        del self.live[FreeArguments.from_address(arguments).data]
        return 0

    def _keep(self, x: Any) -> c_void_p:
        self._kept.append(x)
        return cast(byref(x), c_void_p)

    def _arguments(self, arrays: dict[str, np.ndarray]) -> Any:
        found = []
        for x in arrays.values():
            assert x.flags.c_contiguous
            dims = (c_int64 * max(x.ndim, 1))(*x.shape)
            found.append(self._keep(Buffer(sizeof(Buffer), None, DTYPES[x.dtype.name], x.ctypes.data, x.ndim, dims)))
        count = len(arrays)
        return Arguments(sizeof(Arguments), None, count, (c_int * count)(*[1] * count), (c_void_p * count)(*found))

    def _attribute(self, x: Any) -> tuple[int, c_void_p]:
        if isinstance(x, str):
            return 4, self._keep(Span(x.encode(), len(x.encode())))
        if isinstance(x, np.ndarray):
            self._kept.append(x)
            return 1, self._keep(Numbers(DTYPES[x.dtype.name], x.size, x.ctypes.data))
        self._kept.append(value := np.array(x))
        return 3, self._keep(Number(DTYPES[value.dtype.name], value.ctypes.data))

    def call(self, direction: int, operands: dict[str, Any], results: dict[str, Any], device: int = DEVICE, **options: Any) -> int | None:
        """The handler's answer: None, or an error."""
        attributes = {"operands": " ".join(operands), "results": " ".join(results), "swapped": "", **options}
        attributes["operands"] = attributes.pop("named", attributes["operands"])
        found = {name: self._attribute(attributes[name]) for name in sorted(attributes)}
        names = [self._keep(Span(name.encode(), len(name))) for name in found]
        kinds, values = zip(*found.values(), strict=True)
        n = len(found)
        attrs = Attributes(sizeof(Attributes), None, n, (c_int * n)(*kinds), (c_void_p * n)(*names), (c_void_p * n)(*values))
        api = cast(byref(self.api), c_void_p)
        frame = Frame(sizeof(Frame), None, api, None, EXECUTE, self._arguments(operands), self._arguments(results), attrs, None)
        return ANSWER(lib.strobe_glue_xla_handler(direction, device))(cast(byref(frame), c_void_p))


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(dtype)


B, H, HKV, SQ, SK, D = 2, 4, 2, 19, 35, 16


def tensors(dtype: Any = np.float32, bshd: bool = False) -> dict[str, np.ndarray]:
    shapes = {"q": (B, H, SQ, D), "k": (B, HKV, SK, D), "v": (B, HKV, SK, D)}
    found = {name: normal(*shape, dtype=dtype) for name, shape in shapes.items()}
    return {name: x.swapaxes(1, 2).copy() for name, x in found.items()} if bshd else found


def like(found: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(wanted, np.float64), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-5), (np.float16, 4e-3), (ml_dtypes.bfloat16, 3e-2)])
def test_forward_and_backward(dtype, tolerance, bshd):
    given, bias = tensors(dtype, bshd), normal(1, H, SQ, SK)
    out, lse = np.empty_like(given["q"]), np.empty((B, H, SQ), np.float32)
    options = {"causal": np.int64(1), "scale": np.float64(0.3), "has_scale": np.int64(1), "swapped": "q k v out dout dq dk dv" * bshd}
    xla, layout = Xla(), "bshd" if bshd else "bhsd"
    assert xla.call(FORWARD, {**given, "bias": bias}, {"out": out, "lse": lse}, **options) is None, xla.errors
    wanted = strobe.reference(*given.values(), bias=bias, causal=True, scale=0.3, layout=layout)
    like(out, wanted[0], tolerance)
    like(lse, wanted[1], tolerance)
    dout, results = normal(*out.shape, dtype=dtype), {f"d{name}": np.empty_like(x) for name, x in {**given, "bias": bias}.items()}
    assert xla.call(BACKWARD, {**given, "bias": bias, "out": out, "lse": lse, "dout": dout}, results, **options) is None, xla.errors
    wanted = strobe.reference_backward(dout, *given.values(), *wanted, bias=bias, causal=True, scale=0.3, layout=layout)
    for name, x in results.items():
        like(x, getattr(wanted, name), 4 * tolerance)
    assert not xla.live  # all scratch memory went back
    assert bool(xla.allocated) == EMULATED


def test_dropout_by_words():
    """(seed, offset) as four words of 32 bits."""
    given, words = tensors(), np.array([7, 1, 5, 0], np.uint32)
    out = np.empty_like(given["q"])
    assert Xla().call(FORWARD, {**given, "rng": words}, {"out": out}, dropout=np.float64(0.5)) is None
    like(out, strobe.reference(*given.values(), dropout=0.5, seed=7 + 2**32, offset=5)[0])


def test_function():
    """score = 2 x, and a mask that hides the first key: 8 integers a node."""

    def node(operation, *inputs, real=0.0, integer=0):
        number = getattr(lib, f"STROBE_OP_{operation}")
        return [number, 0, *[*inputs, 0, 0, 0, 0][:4], int(np.float64(real).view(np.int64)), integer]

    score = [node("SCORE"), node("REAL", real=2.0), node("MULTIPLY", 0, 1)]
    mask = [node("KEY"), node("INTEGER", integer=0), node("GREATER", 0, 1)]
    given = tensors()
    out = np.empty_like(given["q"])
    functions = {"score_function": np.array(score, np.int64), "mask_function": np.array(mask, np.int64)}
    assert Xla().call(FORWARD, given, {"out": out}, **functions) is None
    like(out, strobe.reference(*given.values(), scale=2 / 4, mask=np.arange(SK) > 0)[0])


def test_part():
    given = tensors()
    part = strobe.Part(q_ranges=[(4, 8)], k_ranges=[(0, SK)], seqlens_q=SQ, seqlens_k=SK, first_head=0)
    rows = {**given, "q": given["q"][:, :, 4:12].copy()}
    out = np.empty_like(rows["q"])
    assert Xla().call(FORWARD, rows, {"out": out}, causal=np.int64(1), part=np.array(part.encoded(), np.int64)) is None
    like(out, strobe.reference(*given.values(), causal=True)[0][:, :, 4:12])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"new_option": np.int64(1)}, "an unknown option new_option: the program was compiled by another version of Strobe"),
        ({"new_number": np.float64(1)}, "an unknown number new_number"),
        ({"new_text": "x"}, "an unknown text new_text"),
        ({"new_list": np.zeros(3, np.int64)}, "an unknown list new_list"),
        ({"part": np.array([0, 0, 0, 0, 10**15, 10**9], np.int64)}, "an unknown list part"),
        ({"part": np.array([0, 0, 0, 0, 1, 2**62], np.int64)}, "an unknown list part"),
        ({"part": np.array([0, 0], np.int64)}, "an unknown list part"),
        ({"score_function": np.zeros(7, np.int64)}, "an unknown list score_function"),
        ({"named": "q k new"}, "an unknown tensor new"),
        ({"causal": np.int64(1), "engine": "nothing"}, "engine: "),
        ({"softcap": np.float64(-1)}, "softcap: -1"),
    ],
)
def test_refusals(options, words):
    given, xla = tensors(), Xla()
    out = np.full_like(given["q"], 7)
    assert xla.call(FORWARD, given, {"out": out}, **options) == 1
    ((code, message),) = xla.errors
    assert code == 3  # INVALID_ARGUMENT
    assert words in message
    assert (out == 7).all()


def test_no_engine():
    given, xla = tensors(), Xla()
    assert xla.call(FORWARD, given, {"out": np.empty_like(given["q"])}, engine="cpu-baseline" if EMULATED else "cuda-simt") == 1
    assert xla.errors[0][0] in (3, 12)


def test_version():
    """At registration the handler says XLA's own version, and runs nothing."""
    xla = Xla()
    metadata = Metadata(sizeof(Metadata), Version(sizeof(Version), None, -1, -1), 9, 0)
    extension = Extension(sizeof(Extension), METADATA, None, ctypes.pointer(metadata))
    frame = Frame(sizeof(Frame), cast(byref(extension), c_void_p), cast(byref(xla.api), c_void_p))
    assert ANSWER(lib.strobe_glue_xla_handler(FORWARD, DEVICE))(cast(byref(frame), c_void_p)) is None
    assert (metadata.version.major, metadata.version.minor, metadata.traits) == (0, 7, 0)
