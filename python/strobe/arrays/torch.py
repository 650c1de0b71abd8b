"""Torch tensors."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from .._abi import CPU, CUDA, DTYPES, MAX_RANK, NO_DTYPE
from .._core import lib
from .._refusals import refusing
from . import tensor_kinds
from .base import Framework
from .memory import PLAIN, allocated, in_memory, is_lazy, shortened

_DTYPES = {getattr(torch, name): code for name, code in DTYPES.items()}

# PyTorch's CPU operators run on OpenMP threads, which the library shares.
lib.strobe_glue_find_openmp()


class Torch(Framework):
    name = "torch.Tensor"
    bool_dtype = torch.bool
    is_traced = True
    recorder = "_recorder_torch"

    @property
    def xp(self) -> Any:
        return torch

    def is_array(self, x: object) -> bool:
        return isinstance(x, Tensor)

    def unfit(self, name: str, x: Tensor, beside: str = "q", q: Tensor | None = None) -> Exception | None:
        return tensor_kinds.unfit(name, x, beside, q)

    def without_values(self, name: str, x: Tensor) -> Exception | None:
        return tensor_kinds.without_values(name, x)

    def unwritable(self, name: str, x: Tensor) -> Exception | None:
        if torch.compiler.is_compiling():
            return None
        if is_lazy(x):
            return refusing(
                ValueError, name, "a negated view or zeros without memory; accepted is a tensor of its own numbers, as clone() makes"
            )
        if x.is_inference() and not torch.is_inference_mode_enabled():
            return refusing(ValueError, name, "an inference tensor; accepted is one that may be written outside of inference mode")
        return tracked_leaf(name, x)

    def written(self, x: Tensor) -> None:
        increment_version(x)  # so that a backward that has saved the old x raises an error

    def is_tracked(self, x: Tensor) -> bool:
        return x.requires_grad and torch.is_grad_enabled()

    def is_readable(self, x: Tensor) -> bool:
        return is_alone() and type(x) in PLAIN and x.is_cpu  # is_alone() is first, because PyTorch 2.4 can trace only that

    def causal_bias(self, x: object) -> tuple[str, int, int] | None:
        return tensor_kinds.causal_bias(x)

    def overriding(self, arguments: Iterable[object]) -> Sequence[Tensor]:
        return tensor_kinds.overriding(arguments)

    def handed_over(self, kinds: Sequence[Tensor], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return torch.overrides.handle_torch_function(function, kinds, *args, **kwargs)

    def autocast(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        device = arrays["q"].device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            return _autocast(arrays, torch.get_autocast_dtype(device))
        return arrays

    def is_deterministic(self) -> bool:
        return torch.are_deterministic_algorithms_enabled()

    def drawn_rng(self, q: Tensor) -> Tensor:
        return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device)

    def own(self, x: Any) -> Tensor:
        return x if isinstance(x, Tensor) else torch.from_numpy(x)

    def beside(self, q: Tensor, x: Tensor) -> Tensor:
        return x.to(q.device) if x.is_cpu and not q.is_cpu else x

    def view(self, tensor: Any, name: str, x: Tensor, swap_1_2: bool) -> Tensor:
        rank = x.dim()
        if rank > MAX_RANK:
            raise refusing(ValueError, name, f"shape {tuple(x.shape)}; accepted are up to {MAX_RANK} axes")
        if type(x) not in PLAIN and not x.is_meta and (refused := self.without_values(name, x)) is not None:
            raise refused
        if x.is_cpu:
            device, index = CPU, 0
        elif x.is_cuda:
            device, index = CUDA, x.get_device()
        else:
            raise refusing(NotImplementedError, name, f"on device {x.device}; accepted are cpu and cuda")
        if (refused := shortened(name, x)) is not None:  # x may have been shortened since the checks, while autograd kept it
            raise refused
        x = in_memory(x)
        lib.strobe_glue_tensor(tensor, x.data_ptr(), _DTYPES.get(x.dtype, NO_DTYPE), device, index, rank, x.shape, x.stride(), swap_1_2)
        return x

    def default_threads(self) -> int:
        return torch.get_num_threads()

    def stream(self, x: Tensor) -> int | None:
        return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else None

    def scratch(self, x: Tensor, count: int) -> tuple[Tensor, int]:
        found = allocated((count,), (1,), torch.uint8, x.device)
        return found, found.data_ptr()

    def empty(self, like: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return allocated(shape, None, dtype, torch.device("cpu") if like is None else like.device)

    def dense_like(self, x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        shape = (*x.shape[:-1], width)
        if x.dim() == 4 and x.stride(1) < x.stride(2):
            _, m, n, _ = shape
            return allocated(shape, (m * n * width, width, m * width, 1), dtype, x.device)
        return allocated(shape, None, dtype, x.device)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    def cast_in_words(self, x: str, dtype: str) -> str:
        methods = {"float32": "float", "float64": "double", "int32": "int", "int64": "long"}
        return f"{x}.{methods.get(dtype, dtype)}()"

    def expanded_in_words(self, x: str, shape: tuple[int, ...]) -> str:
        return f"{x}.expand{shape}"

    def constant(self, x: Tensor) -> Tensor:
        return x.detach()

    def repeat(self, x: Tensor, counts: Any, axis: int) -> Tensor:
        return torch.repeat_interleave(x, counts, axis)

    def arange(self, n: int, like: Tensor) -> Tensor:
        return torch.arange(n, device=like.device)

    def on_host(self, x: Tensor) -> Tensor:
        return in_memory(x).cpu().contiguous()

    def address(self, x: Tensor) -> int:
        return x.data_ptr()

    def int32(self, values: array[int], like: Tensor | None = None) -> Tensor:
        found = torch.frombuffer(values, dtype=torch.int32) if values else torch.empty(0, dtype=torch.int32, device="cpu")
        return found if like is None else found.to(like.device)


TORCH = Torch()


def tracked_leaf(name: str, x: Tensor) -> Exception | None:
    """Why x may not be written to with gradients enabled, as in PyTorch's own functions."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return None
    base = x._base
    if not x.is_leaf and (base is None or not base.is_leaf):
        return None
    what = "a leaf that requires grad" if x.is_leaf else "a view of a leaf that requires grad"
    return refusing(ValueError, name, f"{what}; accepted is a tensor that does not, as detach() gives, or torch.no_grad()")


def is_alone() -> bool:
    """Whether no compiler, transform or mode must see the call."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
    )


def _autocast(arrays: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Casts as autocast does for scaled_dot_product_attention: q, k, v to `dtype`, but not float64. A float32 bias is unchanged, too."""
    cast = dict(arrays)
    names = ("bias",) if "q_scale" in arrays else ("q", "bias") if "k_scale" in arrays or "v_scale" in arrays else ("q", "k", "v", "bias")
    for name in names:
        x = arrays.get(name)
        if x is not None and x.is_floating_point() and x.dtype != torch.float64 and not (name == "bias" and x.dtype == torch.float32):
            cast[name] = x.to(dtype)
    return cast
