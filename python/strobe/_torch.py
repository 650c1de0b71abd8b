"""Torch tensors, and the operators strobe::attention_forward and strobe::attention_backward that autograd and torch.compile see."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _eager, _run, _tensor_kinds
from ._abi import BACKWARD, CPU, CUDA, DTYPES, FORWARD, GRADIENTS, INPUTS, MAX_RANK, NO_DTYPE, OPTIONS, Allocator
from ._core import ffi, lib
from ._eager import Ready
from ._framework import Framework
from ._prepare import Prepared
from ._ready import PLAIN, Memory, allocated, in_memory, made_ready

_DTYPES = {getattr(torch, name): code for name, code in DTYPES.items()}

# In PyTorch's runtime the CPU's operators run on OpenMP threads; share them.
lib.strobe_glue_find_openmp()


class Torch(Framework):
    name = "torch.Tensor"
    bool_dtype = torch.bool

    @property
    def xp(self) -> Any:
        return torch

    def is_array(self, x: object) -> bool:
        return isinstance(x, Tensor)

    def unfit(self, name: str, x: Tensor, beside: str = "q", q: Tensor | None = None) -> Exception | None:
        return _tensor_kinds.unfit(name, x, beside, q)

    def without_values(self, name: str, x: Tensor) -> Exception | None:
        return _tensor_kinds.without_values(name, x)

    def is_readable(self, x: Tensor) -> bool:
        return type(x) in PLAIN and x.is_cpu and _is_alone()

    def causal_bias(self, x: object) -> tuple[str, int, int] | None:
        return _tensor_kinds.causal_bias(x)

    def overriding(self, arguments: Iterable[object]) -> Sequence[Tensor]:
        return _tensor_kinds.overriding(arguments)

    def handed_over(self, kinds: Sequence[Tensor], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return torch.overrides.handle_torch_function(function, kinds, *args, **kwargs)

    def autocast(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        device = arrays["q"].device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            return _autocast(arrays, torch.get_autocast_dtype(device))
        return arrays

    def is_deterministic(self) -> bool:
        return torch.are_deterministic_algorithms_enabled()

    def again(self, q: Tensor, k: Tensor, v: Tensor, return_lse: object, given: Mapping[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return None
        found = _eager.attention(_calls.lately, q, k, v, return_lse, given)
        return _attention_made_ready(q, k, v, return_lse, given) if found is None else found

    def remember(self, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, given: Mapping[str, Any], p: Prepared) -> None:
        if torch.compiler.is_compiling() or (key := _eager.attention_key(q, k, v, return_lse, given)) is None:
            return
        if [*p.arrays] != ["q", "k", "v", *_tensors(given)] or p.options.get("engine") == _run.ORACLE:
            return  # some tensors are made anew for each call, or results have another dtype first
        if any(x is not p.arrays[name] for name, x in self.autocast(p.arrays).items()):
            return  # so they are here
        _calls.keep(key, _Known(p.options))

    def forward(self, p: Prepared) -> tuple[Tensor, Tensor]:
        arrays = self.autocast(p.arrays)
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch._C._is_tracing():
            return _forward(**arrays, **p.options)
        more: dict[str, Any] = {**arrays, **p.options}
        try:
            return _differentiable_forward(**more)  # where the dispatcher's first step would lead
        except TypeError as refused:
            raise _tensor_kinds.not_dispatched(arrays, refused) from None

    def backward(self, p: Prepared, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needed: list[str]) -> dict[str, Tensor]:
        try:
            found = _backward(dout, dlse, out, lse, **p.arrays, **p.options, needed=[name in needed for name in GRADIENTS])
        except TypeError as refused:
            known = {"dout": dout, "out": out, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
            raise _tensor_kinds.not_dispatched(known | p.arrays, refused) from None
        return dict(zip(needed, found, strict=True))

    def drawn_rng(self, q: Tensor) -> Tensor:
        return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device)

    def own(self, x: Any) -> Tensor:
        return x if isinstance(x, Tensor) else torch.from_numpy(x)

    def view(self, tensor: Any, name: str, x: Tensor, swap_1_2: bool) -> Tensor:
        rank = x.dim()
        if rank > MAX_RANK:
            raise ValueError(f"{name}: shape {tuple(x.shape)}; accepted are up to {MAX_RANK} axes")
        if type(x) not in PLAIN and not x.is_meta and (refused := self.without_values(name, x)) is not None:
            raise refused
        if x.is_cpu:
            device, index = CPU, 0
        elif x.is_cuda:
            device, index = CUDA, x.get_device()
        else:
            raise NotImplementedError(f"{name}: on device {x.device}; accepted are cpu and cuda")
        x = in_memory(x)
        lib.strobe_glue_tensor(tensor, x.data_ptr(), _DTYPES.get(x.dtype, NO_DTYPE), device, index, rank, x.shape, x.stride(), swap_1_2)
        return x

    def default_threads(self) -> int:
        return torch.get_num_threads()

    def place(self, execution: Any, q: Tensor, threads: int | None) -> Allocator | None:
        if not q.is_cuda:
            return super().place(execution, q, threads)
        device = q.get_device()
        execution.size = ffi.sizeof("strobe_execution")
        execution.stream = ffi.cast("void *", torch._C._cuda_getCurrentRawStream(device))

        def allocate(count: int) -> tuple[Tensor, int]:
            workspace = allocated((count,), (1,), torch.uint8, q.device)
            return workspace, workspace.data_ptr()

        return Allocator(allocate)

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


class _Known(NamedTuple):
    """A call of strobe.attention() that came once."""

    options: dict[str, Any]  # of the operator


_calls: Memory[_Known | Ready] = Memory()


def _attention_made_ready(q: Tensor, k: Tensor, v: Tensor, return_lse: Any, given: Mapping[str, Any]) -> Any:
    """Of a call that comes for the second time; None of any other."""
    key = _eager.attention_key(q, k, v, return_lse, given)
    known = None if key is None else _calls.get(key)
    if key is None or known is None:
        return None
    if isinstance(known, _Known):
        arrays = {"q": q, "k": k, "v": v, **_tensors(given)}
        tracked = torch.is_grad_enabled() and any(x.requires_grad for x in arrays.values())
        p = Prepared(arrays, known.options)
        made = _run.results(TORCH, p)
        if not (return_lse or tracked):
            del made["lse"]
        call = _RepeatedCall(tuple(arrays), known.options, return_lse)
        _calls.keep(key, _made_ready(p, {}, made, FORWARD, function=_apply_repeated if tracked else None, more=call))
    return _eager.attention(_calls.lately, q, k, v, return_lse, given)


def _is_alone() -> bool:
    """No compiler, transform or mode wants to see the call."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
    )


def _tensors(given: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in given.items() if isinstance(x, Tensor)}


def _autocast(arrays: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """As autocast treats scaled_dot_product_attention: q, k, v in `dtype`, float64 left alone. A float32 bias is taken as it is."""
    cast = dict(arrays)
    for name in ("q", "k", "v", "bias"):
        x = arrays.get(name)
        if x is not None and x.is_floating_point() and x.dtype != torch.float64 and not (name == "bias" and x.dtype == torch.float32):
            cast[name] = x.to(dtype)
    return cast


# The operators take everything that a call consists of, so that a graph holds nothing else. What is at its default is neither passed
# nor kept in a graph.
_SCHEMA_TYPES = {bool: "bool", int: "SymInt", int | None: "SymInt?", float: "float", float | None: "float?", str | None: "str?"}
_ARGUMENTS = ", ".join(
    ["Tensor q, Tensor k, Tensor v, *"]
    + [f"Tensor? {name}=None" for name in INPUTS if name not in ("q", "k", "v")]
    + [f"{_SCHEMA_TYPES[kind]} {name}={default}" for name, (kind, default) in OPTIONS.items()]
)
# Results lie in memory as the inputs do: a compiler may not choose other strides for these.
_TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))
_FORWARD, _BACKWARD = "strobe::attention_forward", "strobe::attention_backward"
torch.library.define(_FORWARD, f"({_ARGUMENTS}) -> (Tensor out, Tensor lse)", tags=_TAGS)
torch.library.define(
    _BACKWARD,
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_ARGUMENTS}, bool[] needed) -> Tensor[]",  # as _abi.GRADIENTS
    tags=_TAGS,
)
_forward = torch.ops.strobe.attention_forward.default
_backward = torch.ops.strobe.attention_backward.default


def _prepared(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> Prepared:
    p = Prepared({"q": q, "k": k, "v": v}, {})
    for name, x in given.items():
        (p.options if name in OPTIONS else p.arrays)[name] = x
    return p


def _names(needed: list[bool], p: Prepared) -> list[str]:
    """Those of GRADIENTS that are needed."""
    if len(needed) != len(GRADIENTS):
        raise ValueError(f"needed: {len(needed)} values; accepted are {len(GRADIENTS)}, of {', '.join(GRADIENTS)}")
    names = [name for name, wanted in zip(GRADIENTS, needed, strict=True) if wanted]
    for name in names:
        if GRADIENTS[name] not in p.arrays:
            raise ValueError(f"needed: {name} of a call without {GRADIENTS[name]}; accepted are the gradients of what is given")
    return names


def _repeated(
    direction: int,
    prefix: bytes,
    tensors: tuple[Tensor, ...],
    given: dict[str, Any],
    prepare: Callable[[], Prepared],
    known: dict[str, Tensor],
    results: Callable[[Prepared], dict[str, Tensor]],
) -> tuple[Tensor, ...] | None:
    """Runs the call as one that is made ready, from the second time on; None if it has to be made in full."""
    if (found := _eager.run(_calls.lately, prefix, tensors, given)) is not None:
        return found
    key = _eager.key(prefix, tensors, given)
    if key is None:
        return None
    p = prepare()
    if p.options.get("engine") == _run.ORACLE or _calls.is_new(key):
        return None
    if _calls.get(key) is None:
        made = results(p)
        _calls.keep(key, _made_ready(p, known, made, direction, form=bytes(range(len(made)))))
    return _eager.run(_calls.lately, prefix, tensors, given)


def _made_ready(p: Prepared, known: dict[str, Tensor], made: dict[str, Tensor], direction: int, **more: Any) -> Ready:
    threads = p.options.get("threads") or torch.get_num_threads()
    return made_ready((*known, *p.arrays), made, _run.call(TORCH, p, known, made), direction, threads, **more)


def _run_forward(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    def prepare() -> Prepared:
        return _prepared(q, k, v, given)

    found = _repeated(FORWARD, b"forward", (q, k, v), given, prepare, {}, partial(_run.results, TORCH))
    if found is None:
        return _run.forward(TORCH, prepare())
    out, lse = found
    return out, lse


@torch.library.register_fake(_FORWARD)
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, ...]:
    return tuple(_run.results(TORCH, _prepared(q, k, v, given)).values())


def _with_dense_rows(dout: Tensor, bshd: bool) -> Tensor:
    """dout, or a copy: GPU kernels that fetch whole tiles want columns that lie side by side, and rows that are not all one. An expanded
    batch or head they take as it is."""
    row = {3: 0, 4: 1 if bshd else 2}.get(dout.dim())
    if row is None or (dout.stride(-1) == 1 and (dout.stride(row) or dout.shape[row] == 1)):
        return dout
    return dout.contiguous()


def _run_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *, needed: list[bool], **given: Any
) -> list[Tensor]:
    if dout.is_cuda:
        dout = _with_dense_rows(dout, "bshd" in given)
    known = {"dout": dout, "out": out, "lse": lse} | ({} if dlse is None else {"dlse": dlse})

    def prepare() -> Prepared:
        return _prepared(q, k, v, given)

    if any(needed):
        prefix = b"backward" + bytes(needed) + bytes([dlse is not None])
        tensors = (*known.values(), q, k, v)
        found = _repeated(BACKWARD, prefix, tensors, given, prepare, known, lambda p: _run.gradients(TORCH, p, _names(needed, p)))
        if found is not None:
            return list(found)
    p = prepare()
    return list(_run.backward(TORCH, p, known, _names(needed, p)).values())


@torch.library.register_fake(_BACKWARD)
def _fake_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *, needed: list[bool], **given: Any
) -> list[Tensor]:
    p = _prepared(q, k, v, given)
    return list(_run.gradients(TORCH, p, _names(needed, p)).values())


def _is_plain(arrays: Iterable[Any]) -> bool:
    """Whether nobody but the operators' own implementation wants to see the call: no mode that traces or fakes, no subclass of Tensor, no
    other device."""
    if torch._C._len_torch_dispatch_stack():
        return False
    return all(type(x) in PLAIN and (x.is_cuda or x.is_cpu) for x in arrays if isinstance(x, Tensor))


def _below_autograd_forward(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The operator, past the dispatcher (some 10 µs) where it would lead straight to _run_forward."""
    if _is_plain((q, k, v, *given.values())):
        return _run_forward(q, k, v, **given)
    with torch._C._AutoDispatchBelowAutograd():
        return _forward(q, k, v, **given)


def _below_autograd_backward(arguments: tuple[Tensor | None, ...], given: dict[str, Any]) -> list[Tensor]:
    if _is_plain((*arguments, *given.values())):
        return _run_backward(*arguments, **given)  # type: ignore[arg-type]
    with torch._C._AutoDispatchBelowAutograd():
        return _backward(*arguments, **given)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, given: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        out, lse = _below_autograd_forward(q, k, v, given)
        ctx.options = {name: x for name, x in given.items() if name in OPTIONS}
        arrays = {name: x for name, x in given.items() if name not in OPTIONS}
        ctx.names = tuple(arrays)
        ctx.save_for_backward(out, lse, q, k, v, *arrays.values())
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        out, lse, q, k, v, *arrays = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        needed = ctx.needs_input_grad[:5]  # in the order of GRADIENTS
        given = dict(zip(ctx.names, arrays, strict=True))
        found = iter(_differentiable_backward(dout, dlse, out, lse, q, k, v, **given, **ctx.options, needed=needed))
        return *(next(found) if wanted else None for wanted in needed), None


class _Gradients(torch.autograd.Function):
    """Differentiable once: nothing follows the first gradient but the words why."""

    @staticmethod
    def forward(ctx: Any, given: dict[str, Any], *arguments: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(_below_autograd_backward(arguments, given))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError("strobe.attention has no second derivative: a gradient of it cannot be differentiated again")


def _is_differentiated(*tensors: Tensor | None) -> bool:
    """By reverse mode; or perhaps by forward mode, whose want of a formula autograd.Function reports by itself."""
    tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if (tracked or forward_ad._current_level >= 0) and torch._C._are_functorch_transforms_active():
        raise NotImplementedError("strobe.attention under torch.func.grad, vjp, jvp, ...: accepted are torch.autograd.grad and backward()")
    return tracked or forward_ad._current_level >= 0


def _differentiable_forward(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    bias, sinks, slopes = given.get("bias"), given.get("sinks"), given.get("alibi_slopes")
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "alibi_slopes: requires grad, and strobe.attention has no gradient of it; accepted is alibi_slopes.detach()"
        )
    if _is_differentiated(q, k, v, bias, sinks):
        return _Attention.apply(q, k, v, bias, sinks, given)
    return _below_autograd_forward(q, k, v, given)


def _differentiable_backward(*arguments: Tensor | None, **given: Any) -> list[Tensor]:
    if _is_differentiated(*arguments):
        return list(_Gradients.apply(given, *arguments))
    return _below_autograd_backward(arguments, given)


class _RepeatedCall:
    """What the backward of a call of strobe.attention() has to know that comes again."""

    def __init__(self, names: tuple[str, ...], options: dict[str, Any], return_lse: bool):
        """names: of the arrays; options: the operator's."""
        self.return_lse = return_lse
        self.prefix = repr((names, options)).encode()  # of its keys
        self._names, self._options = names, options

    def gradients(self, needed: tuple[bool, ...], dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Where there is no Ready for them, or none may be used. The results are for _Repeated.backward to return."""
        wanted = [self._wanted(name, needed) for name in GRADIENTS]
        names = [name for name, is_wanted in zip(GRADIENTS, wanted, strict=True) if is_wanted]
        if not torch.compiler.is_compiling():
            if dout.is_cuda:
                dout = _with_dense_rows(dout, "bshd" in self._options)
            key = _eager.gradients_key(self.prefix, needed, dout, dlse, saved)
            if key is not None:
                if _calls.get(key) is None:  # made ready at once: the forward has come before, and its gradients with it
                    _calls.keep(key, self._made_ready(names, dout, dlse, saved))
                found = _eager.gradients(_calls.lately, self.prefix, needed, dout, dlse, saved)
                if found is not None:
                    return found
        out, lse, q, k, v, *arrays = saved
        given = dict(zip(self._names[3:], arrays, strict=True))
        made = _differentiable_backward(dout, dlse, out, lse, q, k, v, **given, **self._options, needed=wanted)
        return tuple(None if place == _NO_RESULT else made[place] for place in self._form(names))

    def _wanted(self, gradient: str, needed: tuple[bool, ...]) -> bool:
        of = GRADIENTS[gradient]
        return of in self._names and needed[1 + self._names.index(of)]

    def _form(self, names: list[str]) -> bytes:
        places = {GRADIENTS[name]: place for place, name in enumerate(names)}
        return bytes(places.get(of, _NO_RESULT) for of in ("", *self._names))

    def _made_ready(self, names: list[str], dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...]) -> Ready:
        p = Prepared(dict(zip(self._names, saved[2:], strict=True)), self._options)
        known = {"dout": dout} | ({} if dlse is None else {"dlse": dlse}) | {"out": saved[0], "lse": saved[1]}
        return _made_ready(p, known, _run.gradients(TORCH, p, names), BACKWARD, form=self._form(names))


class _Repeated(torch.autograd.Function):
    """A call of strobe.attention() that is made ready."""

    @staticmethod
    def forward(ctx: Any, ready: Ready, *arrays: Tensor) -> Any:
        found = ready.run(*arrays)
        if found is None:
            raise _eager.RefusedError
        out, lse = found
        ctx.save_for_backward(out, lse, *arrays)
        ctx.call = call = ready.more
        if not call.return_lse:
            return out
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        call, needed, saved = ctx.call, ctx.needs_input_grad, ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(saved[0])
        if not torch.compiler.is_compiling():
            found = _eager.gradients(_calls.lately, call.prefix, needed, dout, dlse, saved)
            if found is not None:
                return found
        return call.gradients(needed, dout, dlse, saved)


# Function.apply itself looks for transforms, of which there are none here, and binds arguments: a microsecond.
_apply_repeated = super(torch.autograd.Function, _Repeated).apply
_NO_RESULT = 255

torch.library.impl(_FORWARD, "CompositeExplicitAutograd", _run_forward)
torch.library.impl(_BACKWARD, "CompositeExplicitAutograd", _run_backward)
torch.library.impl(_FORWARD, "Autograd", _differentiable_forward)
torch.library.impl(_BACKWARD, "Autograd", _differentiable_backward)
