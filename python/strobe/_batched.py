"""The operators under torch.vmap: a batching rule for each.

A rule puts the axis that torch.vmap maps over before the batch, B calls of N samples in one of N · B, where nothing in the call depends on
the number of a sequence. Otherwise, as with dropout and packed sequences, it makes a call for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ._call import Call
from ._operators import backward, backward_jvp, forward, implement, jvp
from ._options import GRADIENTS, SCORES, TANGENTS

try:
    from torch._functorch.autograd_function import custom_function_call_vmap_helper
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
except ImportError:  # without a rule PyTorch makes a call for each sample, and warns of it
    custom_function_call_vmap_helper = None  # type: ignore[assignment]

Dims = Mapping[str, int | None]
Compute = Callable[[dict[str, Tensor]], tuple[Tensor, ...]]

_BATCH_FIRST = {"q", "k", "v", "out", "lse", "dout", "dlse", "tq", "tk", "tv", "tout", "tlse", "tdout", "tdlse"}
_FOLDED = {*_BATCH_FIRST, *(name for name in SCORES if name not in GRADIENTS), "alibi_slopes", "sinks", "tsinks", "seqused_k"}
_BY_SEQUENCE = {"dropout", "part", "score_function", "mask_function"}  # options that depend on the number of a sequence


def _sample(x: Tensor, dim: int | None, n: int = 0) -> Tensor:
    return x if dim is None else x.select(dim, n)


def _own_shapes(tensors: Mapping[str, Tensor], dims: Dims) -> dict[str, tuple[int, ...]]:
    """The shapes of a sample's tensors; there may be no sample."""
    return {name: tuple(n for axis, n in enumerate(x.shape) if axis != dims[name]) for name, x in tensors.items()}


def _folds(call: Call, tensors: Mapping[str, Tensor], dims: Dims, needed: tuple[str, ...]) -> bool:
    """Whether one call computes all samples."""
    own = _own_shapes(tensors, dims)
    if len(own["q"]) != 4 or not _BY_SEQUENCE.isdisjoint(call.options):
        return False
    if dims.get("sinks") is not None or dims.get("tsinks") is not None or "dsinks" in needed:  # sequences share sinks
        return False
    if "tbias" in own and (dims["tbias"] is None) != (dims["bias"] is None):  # they have one shape
        return False
    batch = own["q"][0]
    for name, shape in own.items():
        if name in _BATCH_FIRST or name == "seqused_k":
            fits = shape[:1] == (batch,)
        elif name in _FOLDED:
            fits = len(shape) < 4 or shape[0] in (1, batch)
        else:  # block masks
            fits = name.startswith("block_") and dims[name] is None and own["block_rows"][:1] == (1,)
        if not fits:
            return False
    return True


def _folded(name: str, x: Tensor, dim: int | None, samples: int, batch: int, needed: tuple[str, ...]) -> Tensor:
    """A call's tensor for all samples, with sample and sequence in its first axis."""
    if name not in _FOLDED or name in ("sinks", "tsinks"):
        return x
    if dim is not None:
        x = x.movedim(dim, 0)
    elif _serves_all(name, x) and f"d{TANGENTS.get(name, name)}" not in needed:  # a tangent has its input's shape
        return x
    else:
        x = x.expand(samples, *x.shape)
    if name in SCORES or name == "alibi_slopes":
        rank = 1 + (4 if name in SCORES else 2)
        x = x.reshape(samples, *(1,) * (rank - x.dim()), *x.shape[1:])
        x = x.expand(samples, batch, *x.shape[2:])
    return x.flatten(0, 1)


def _serves_all(name: str, x: Tensor) -> bool:
    """Whether a sample's tensor is the same for all sequences: its axis of the batch is missing or broadcasts."""
    return (x.dim() < 4 or x.shape[0] == 1) if name in SCORES else name == "alibi_slopes" and x.dim() == 1


def _unfolded(name: str, x: Tensor, samples: int, own: Mapping[str, tuple[int, ...]]) -> Tensor:
    """A result, sample by sample. own: the shapes of a sample's tensors."""
    x = x.reshape(samples, own["q"][0], *x.shape[1:])
    if name != "dbias":
        return x
    summed = len(own["bias"]) < 4 or own["bias"][0] == 1
    return (x.sum(1) if summed else x).reshape(samples, *own["bias"])


def _rule(
    call: Call, compute: Compute, needed: tuple[str, ...], samples: int, dims: Dims, tensors: Mapping[str, Tensor]
) -> tuple[Tensor, ...]:
    """The results of all samples, which are their first axes."""
    own = _own_shapes(tensors, dims)
    if not _folds(call, tensors, dims, needed):
        if samples == 0:
            return tuple(x.new_empty(0, *x.shape) for x in compute({name: x.new_zeros(own[name]) for name, x in tensors.items()}))
        found = [compute({name: _sample(x, dims[name], n) for name, x in tensors.items()}) for n in range(samples)]
        return tuple(torch.stack(of) for of in zip(*found, strict=True))
    all_of_them = compute({name: _folded(name, x, dims[name], samples, own["q"][0], needed) for name, x in tensors.items()})
    names = needed or ("",) * len(all_of_them)
    return tuple(_unfolded(name, x, samples, own) for name, x in zip(names, all_of_them, strict=True))


def _mapped(call: Call, compute: Compute, tensors: dict[str, Tensor], needed: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """compute(tensors) for each sample of the innermost torch.vmap."""

    def rule(info: Any, in_dims: tuple[Dims], given: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        results = _rule(call, compute, needed, info.batch_size, in_dims[0], given)
        return results, (0,) * len(results)

    interpreter: Any = retrieve_current_functorch_interpreter()
    found: tuple[Tensor, ...] = custom_function_call_vmap_helper(interpreter, rule, compute, tensors)
    return found


# Whether torch.autograd.grad(is_grads_batched=True) maps over the tensor. Other transforms are seen without looking at tensors.
is_mapped_gradient: Callable[[Tensor], bool] = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda _: False)


def _level_of(x: Tensor) -> int:
    """The depth of PyTorch's older vmap at which x is mapped, by trying: a GPU's backward runs in a thread that does not know the depth."""
    for level in range(1, 64):
        if not is_mapped_gradient(torch._remove_batch_dim(x, level, 1, 0)):
            return level
    raise NotImplementedError("is_grads_batched of is_grads_batched; accepted is one of them, and torch.vmap around a call")


def _mapped_as_gradients(call: Call, compute: Compute, tensors: dict[str, Tensor], needed: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """compute(tensors) for each sample of torch.autograd.grad(is_grads_batched=True), which maps by PyTorch's older means."""
    dims = {name: 0 if is_mapped_gradient(x) else None for name, x in tensors.items()}
    level = _level_of(next(x for name, x in tensors.items() if dims[name] == 0))
    given = {name: x if dims[name] is None else torch._remove_batch_dim(x, level, 0, 0) for name, x in tensors.items()}
    samples = next(len(x) for name, x in given.items() if dims[name] == 0)
    return tuple(torch._add_batch_dim(x, 0, level) for x in _rule(call, compute, needed, samples, dims, given))


def _implement(key: str, mapped: Callable[..., tuple[Tensor, ...]]) -> None:
    def of_forward(call: Call) -> tuple[Tensor, ...]:
        return mapped(call, lambda tensors: forward(call.on(tensors)), call.arrays)

    def of_backward(call: Call, known: dict[str, Tensor], names: list[str]) -> tuple[Tensor, ...]:
        def compute(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
            own = {name: tensors[name] for name in call.arrays}
            return backward(call.on(own), {name: tensors[name] for name in known}, names)

        return mapped(call, compute, {**call.arrays, **known}, tuple(names))

    def of_jvp(call: Call, tangents: dict[str, Tensor]) -> tuple[Tensor, ...]:
        def compute(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
            return jvp(call.on({name: tensors[name] for name in call.arrays}), {name: tensors[name] for name in tangents})

        return mapped(call, compute, {**call.arrays, **tangents})

    def of_backward_jvp(call: Call, tangents: dict[str, Tensor], known: dict[str, Tensor], names: list[str]) -> tuple[Tensor, ...]:
        def compute(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
            own, direction, beside = ({name: tensors[name] for name in of} for of in (call.arrays, tangents, known))
            return backward_jvp(call.on(own), direction, beside, names)

        return mapped(call, compute, {**call.arrays, **tangents, **known}, tuple(names))

    implement(key, of_forward, of_backward, of_jvp, of_backward_jvp)


if custom_function_call_vmap_helper is not None:
    _implement("FuncTorchBatched", _mapped)
    _implement("Batched", _mapped_as_gradients)
