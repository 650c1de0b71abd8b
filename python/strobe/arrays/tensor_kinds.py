"""Torch tensors that mean more, or something else, than the numbers in their memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._messages import kind
from .._refusals import Name, Refusal, raised_for, refusing
from .memory import PLAIN, shortened

# A subclass that overrides one of these may only describe a mask, as PyTorch's CausalBias does, over memory that was not written.
_OF_SCORES = frozenset({"mask", "bias"})


# Methods that say where a tensor's numbers lie: a type that overrides one would make the library read other memory.
_OF_MEMORY = frozenset({"shape", "size", "stride", "data_ptr", "storage_offset", "dtype", "device", "numel", "dim", "ndim"})


def unfit(name: str, x: Tensor, beside: str, q: Tensor | None) -> Exception | None:
    """The reason against x unless it is dense, means only its numbers, and is on the device of q, the argument `beside`."""
    if type(x) not in PLAIN and (refused := _unfit_subclass(name, x)) is not None:
        return refused
    if x.is_nested:
        way = "sequences of several lengths go packed, (T, H, D) with cu_seqlens"
        return refusing(ValueError, name, f"a nested tensor, layout {x.layout}; accepted is a dense one; {way}")
    if x.layout is not torch.strided:
        return refusing(ValueError, name, f"layout {x.layout}; accepted is torch.strided, which to_dense() gives")
    if x.is_quantized:
        return refusing(ValueError, name, f"dtype {x.dtype}, quantized; accepted is a torch.Tensor of numbers, which dequantize() gives")
    if q is not None and not causal_bias(q) and x.device != q.device:  # up to PyTorch 2.6 a causal bias has no device
        return refusing(ValueError, name, "on device {0}; accepted is {1}, where {2} lies", x.device, q.device, Name(beside))
    return None if has_own_dispatch(x) else shortened(name, x)


def _unfit_subclass(name: str, x: Tensor) -> Exception | None:
    if _is_uninitialized(x):
        return refusing(ValueError, name, f"{kind(x)}, which has no shape yet; accepted is a torch.Tensor")
    if not has_own_dispatch(x) and (own := _overridden(type(x), Tensor)):
        return refusing(
            TypeError, name, f"{kind(x)}, which has a {own[0]} of its own; accepted is a torch.Tensor; as_subclass() makes it one"
        )
    if _is_a("DTensor", x, "torch.distributed.tensor", "torch.distributed._tensor"):
        return refusing(TypeError, name, "a DTensor; accepted is a torch.Tensor, which to_local() or full_tensor() gives")
    if _is_masked(x):
        return refusing(TypeError, name, "a MaskedTensor; accepted is a torch.Tensor, which to_tensor() gives")
    if causal_bias(x):
        return refusing(TypeError, name, f"{kind(x)}; accepted is a torch.Tensor")
    if name in _OF_SCORES and _has_own(type(x), "__torch_function__") and not has_own_dispatch(x):
        return refusing(
            TypeError, name, f"{kind(x)}, whose memory may not hold what it means; accepted is a torch.Tensor; as_subclass() makes it one"
        )
    return None


def _overridden(kind: type, base: type) -> list[str]:
    classes = kind.__mro__[: kind.__mro__.index(base)]
    return sorted({name for of in classes if of not in PLAIN for name in vars(of)} & _OF_MEMORY)


def _is_a(kind: str, x: object, *modules: str) -> bool:
    """Whether x is of the class `kind` of one of the modules, none of which is imported for the question."""
    classes = [getattr(sys.modules[module], kind, None) for module in modules if module in sys.modules]
    return any(of is not None and isinstance(x, of) for of in classes)


def _is_masked(x: object) -> bool:
    return _is_a("MaskedTensor", x, "torch.masked")


def _is_uninitialized(x: Tensor) -> bool:
    return isinstance(x, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer))


def causal_bias(x: object) -> tuple[str, int, int] | None:
    """The alignment, Sq and Sk of PyTorch's causal_upper_left() and causal_lower_right(), whose memory holds no values; else None."""
    if type(x) in PLAIN:
        return None
    module = sys.modules.get("torch.nn.attention.bias")
    if module is None or not isinstance(x, module.CausalBias):
        return None
    return "top_left" if x.variant == module.CausalVariant.UPPER_LEFT else "bottom_right", x.seq_len_q, x.seq_len_kv


def without_values(name: str, x: Tensor) -> Exception | None:
    """The reason against x if its numbers cannot be read at its address."""
    if x.is_meta:
        return refusing(ValueError, name, "on device meta; accepted is an array that has values")
    return refusing(TypeError, name, f"{kind(x)}; accepted is a torch.Tensor that holds its values itself") if has_own_dispatch(x) else None


def has_own_dispatch(x: Tensor) -> bool:
    """Whether operators call x's __torch_dispatch__, so that its own memory means nothing."""
    return type(x) not in PLAIN and _has_own(type(x), "__torch_dispatch__")


def overriding(arguments: Iterable[Any]) -> list[Tensor]:
    """The tensors whose type takes over a call by its own __torch_function__."""
    if torch.compiler.is_compiling() or not torch._C._is_torch_function_enabled():
        return []
    subclasses = [x for x in arguments if isinstance(x, Tensor) and type(x) not in PLAIN]
    return [
        x for x in subclasses if _has_own(type(x), "__torch_function__") and not (causal_bias(x) or _is_uninitialized(x) or _is_masked(x))
    ]


def not_dispatched(arrays: dict[str, Tensor], error: TypeError) -> TypeError:
    """An error in place of `error`, which a call on these arrays raised: it names the arrays if they are the cause."""
    words = "{0}, whose __torch_dispatch__ takes no torch.ops.strobe; accepted is a torch.Tensor"
    found = [Refusal(name, words, (kind(x),)) for name, x in arrays.items() if has_own_dispatch(x)]
    return raised_for(TypeError, found) if found else error


def _has_own(kind: type, method: str) -> bool:
    found, inherited = (getattr(of, method) for of in (kind, Tensor))
    disabled = torch._C._disabled_torch_function_impl
    return getattr(found, "__func__", found) not in (getattr(inherited, "__func__", inherited), disabled)
