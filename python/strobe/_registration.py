"""strobe.register(): PyTorch's own attention functions run on Strobe, in the whole process.

scaled_dot_product_attention, varlen_attn and varlen_attn_out are operators of PyTorch's dispatcher, whose kernels for CPU and CUDA tensors
are overridden while a registration is in force. The override stands above PyTorch's choice of a backend, so that one kernel takes the calls
of all of them (flash, cuDNN, efficient, math), and in autograd's place, so that a call's gradient is what strobe.attention() recorded,
whatever is registered when it runs. FlashAttention 3 and 4, where they are activated, and the priorities of backends are below it and stay
as they are.

What PyTorch answers in Python before any operator is called (nested tensors of layout torch.jagged, CausalBias) is replaced as an attribute
of PyTorch's modules, and the native path of MultiheadAttention, which computes attention by itself, is switched off.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

from ._attention import attention
from ._call import imported_late
from ._checks import Wrong, flag, refusal, refuse
from ._messages import TORCH_EXTRA, needed_by

with needed_by("strobe.register", TORCH_EXTRA):
    import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from .compat import sdpa, varlen
from .compat._nested import as_nested, wrong_nested
from .compat._words import mask_or_bias

SDPA, VARLEN, VARLEN_OUT = "scaled_dot_product_attention", "varlen_attn", "varlen_attn_out"
_CACHE_TAG = "strobe.register"  # PyTorch keeps code that was compiled meanwhile apart from other code
_DENSE = ("CPU", "CUDA")
_TRACKED = (*_DENSE, "AutogradCPU", "AutogradCUDA")
# Calls under the last ones always run on PyTorch, which is counted and said.
_ALL = (*_TRACKED, "NestedTensorCPU", "NestedTensorCUDA", "AutogradNestedTensor", "FuncTorchVmapMode")


class Registration:
    """A registration, as register() returns it: a context manager that ends it, and the counts of the calls that came meanwhile.

    - calls: for "scaled_dot_product_attention", "varlen_attn" and "varlen_attn_out" how many calls ran on "strobe" and on "pytorch". A
      compiled graph holds Strobe's operators, and its runs are not counted.

    - reasons: why calls ran on "pytorch", and how many. Reasons that differ in numbers alone are counted together.

    - strict: whether a call that Strobe does not take raises an error.
    """

    def __init__(self, strict: bool = False):
        self.strict = strict
        self.calls = {name: {"strobe": 0, "pytorch": 0} for name in (SDPA, VARLEN, VARLEN_OUT)}
        self.reasons: dict[str, int] = {}
        self._entered = 0

    def __repr__(self) -> str:
        calls = "; ".join(f"{name}: {n['strobe']} on Strobe, {n['pytorch']} on PyTorch" for name, n in self.calls.items())
        state = "in force" if self in _OPEN else "ended"
        return f"<strobe.register(strict={self.strict}), {state}. {calls}>"

    def __enter__(self) -> Registration:
        with _LOCK:
            if self not in _OPEN:
                _open(self)
            self._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        with _LOCK:
            self._entered -= 1
            if self in _OPEN and not self._entered:
                _OPEN.remove(self)
                _settle()

    def _is_new(self, why: str) -> bool:
        """Counts a call that PyTorch runs. Whether it is the first one for this reason."""
        pattern = re.sub(r"\d+", "0", why)
        known = next((each for each in self.reasons if re.sub(r"\d+", "0", each) == pattern), None)
        self.reasons[known or why] = self.reasons.get(known or why, 0) + 1
        return known is None


def register(*, strict: bool = False) -> Registration:
    """Runs PyTorch's own attention functions on Strobe, on CPUs and CUDA GPUs, in the whole process, until unregister() is called:
    torch.nn.functional.scaled_dot_product_attention, torch.nn.attention.varlen, and what calls them, such as torch.nn.MultiheadAttention
    with need_weights=False and torch.nn.TransformerEncoderLayer. Nothing is registered by an import.

    A call that Strobe does not take runs on PyTorch's implementation, with a warning the first time. A gradient runs on the implementation
    that ran its forward, and so does a forward that torch.utils.checkpoint repeats, whatever is registered by then.

    Example:
        >>> with strobe.register():
        ...     out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    The native fast path of MultiheadAttention and TransformerEncoder, which computes attention by itself, is off meanwhile
    (torch.backends.mha).

    Args:
        strict: a call that Strobe does not take raises an error.

    Returns:
        A Registration, which counts calls. As a context manager it ends this registration alone; registrations may be nested.

    Raises:
        TypeError: strict is not a bool.
        NotImplementedError: in strict mode, from the attention function, with the reason why Strobe does not take the call.
    """
    wrong: Wrong = []
    is_strict = flag(wrong, "strict", strict)
    if wrong:
        raise refusal(wrong)
    made = Registration(bool(is_strict))
    with _LOCK:
        _open(made)
    return made


def unregister() -> None:
    """Ends all registrations: PyTorch's attention functions are PyTorch's own again. Without a registration it has no effect."""
    with _LOCK:
        _OPEN.clear()
        _settle()


def registered() -> Registration | None:
    """The registration in force, of several the last one, which says how many calls ran where; None if there is none."""
    last = _OPEN[-1:]
    return last[0] if last else None


class _Local(threading.local):
    repeating = 0  # how many forwards of checkpoints this thread is repeating that ran on Strobe
    passing = False  # whether calls go to PyTorch and are not counted, because they are part of something that PyTorch runs


_LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):  # a child has no other threads, which could release it
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)
_LOCAL = _Local()
_OPEN: list[Registration] = []
_repeats = 0  # of all threads
_undo: ExitStack | None = None  # gives back what is installed
_switches: ExitStack | None = None  # gives back switches that hold for the whole process
# Our kernels, also those that were uninstalled: another thread may be about to call one. Only so many, because programs may register often.
_kernels: deque[Any] = deque(maxlen=4096)


def _open(new: Registration) -> None:
    _OPEN.append(new)
    try:
        _settle()
    except BaseException:
        _OPEN.remove(new)
        _settle()
        raise


def _settle() -> None:
    """Installs or gives back, as the registrations want it."""
    global _undo, _switches
    if (_OPEN or _repeats) and _undo is None:
        with ExitStack() as stack:  # gives back all of it if a step fails
            _install(stack)
            _undo = stack.pop_all()
    if _OPEN and _switches is None:
        with ExitStack() as stack:
            _switch(stack)
            _switches = stack.pop_all()
    if not _OPEN and _switches is not None:
        found, _switches = _switches, None
        found.close()
    if not (_OPEN or _repeats) and _undo is not None and _GET_KERNEL is not None:
        found, _undo = _undo, None
        found.close()


# PyTorch 2.9 and later. Without it nothing keeps an uninstalled kernel alive, so that it stays where it is, and passes calls on.
_GET_KERNEL: Callable[..., Any] | None = getattr(torch.library, "get_kernel", None)


def _install(stack: ExitStack) -> None:
    operators: list[tuple[str, tuple[str, ...], str, Callable[..., Any]]] = [(f"aten::{SDPA}", _ALL, SDPA, _sdpa)]
    packed = _varlen_operators()
    if hasattr(packed, "_varlen_attn"):
        operators.append(("torch_attn::_varlen_attn", _TRACKED, VARLEN, _varlen))
    if hasattr(packed, "_varlen_attn_out"):
        operators.append(("torch_attn::_varlen_attn_out", _DENSE, VARLEN_OUT, _varlen_out))
    for operator, keys, name, compute in operators:
        originals = {key: _original(operator, key) for key in keys}  # before the first override, which changes what others inherit
        library = torch.library.Library(operator.partition("::")[0], "IMPL")
        stack.callback(_forget_dispatch, operator)  # called last
        stack.callback(library._destroy)
        for key, original in originals.items():
            library.impl(operator, _kernel(name, compute, original), key, with_keyset=True)
            if _GET_KERNEL is not None:
                _kernels.append(_GET_KERNEL(operator, key))
        _forget_dispatch(operator)
    for owner, attribute, replacement in _replacements():
        _replace(stack, owner, attribute, replacement)


def _forget_dispatch(operator: str) -> None:
    """A compiler's calls of the operator look anew for its kernels. Otherwise they remember those that an earlier compilation found."""
    namespace, _, name = operator.partition("::")
    cache = getattr(getattr(getattr(torch.ops, namespace), name).default, "_dispatch_cache", None)
    if cache is not None:
        cache.clear()


def _varlen_operators() -> Any:
    """The namespace of varlen_attn's operators; None if their kernels cannot be read, or if this PyTorch has none."""
    try:
        import torch.nn.attention.varlen  # defines them
    except ImportError:
        return None
    return None if _GET_KERNEL is None else torch.ops.torch_attn


def _original(qualified: str, key: str) -> Callable[..., Any]:
    """The kernel that is there now, which also takes the dispatch keys."""
    if _GET_KERNEL is not None:
        return _GET_KERNEL(qualified, key).call_boxed
    operator = torch.ops.aten.scaled_dot_product_attention.default
    return lambda _, *args, **kwargs: operator.decompose(*args, **kwargs)


def _kernel(name: str, compute: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return _answer(name, compute, partial(original, keys), args, kwargs)

    return kernel


def _switch(stack: ExitStack) -> None:
    was_on = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    if was_on:
        stack.callback(torch.backends.mha.set_fastpath_enabled, True)
    config: Any = getattr(torch.compiler, "config", None)
    if hasattr(config, "cache_key_tag"):
        config.cache_key_tag += _CACHE_TAG

        def give_back() -> None:  # what others have added meanwhile stays
            config.cache_key_tag = config.cache_key_tag.replace(_CACHE_TAG, "", 1)

        stack.callback(give_back)


# Attributes of PyTorch's modules


def _replacements() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Owner, attribute, and a function that makes the replacement from the original."""
    from torch.nn.attention import bias
    from torch.utils import checkpoint

    found: list[tuple[Any, str, Callable[..., Any]]] = [
        (bias.CausalBias, "_dispatch", lambda original: staticmethod(_in_python(_causal_bias, original))),
        (checkpoint.CheckpointFunction, "forward", lambda original: staticmethod(_repeated_argument(original, 1))),
        (checkpoint.CheckpointFunction, "backward", lambda original: staticmethod(_repeating_as_before(original))),
    ]
    if hasattr(checkpoint, "_CheckpointFrame"):
        found.append((checkpoint._CheckpointFrame, "__init__", lambda original: _repeated_argument(original, 1)))
    try:
        from torch.nested._internal import ops
    except ImportError:
        return found
    if hasattr(ops, "jagged_scaled_dot_product_attention"):
        found.append((ops, "jagged_scaled_dot_product_attention", partial(_in_python, _jagged)))
    return found


def _replace(stack: ExitStack, owner: Any, attribute: str, replacement: Callable[..., Any]) -> None:
    as_found = vars(owner)[attribute]
    ours = replacement(getattr(owner, attribute))
    setattr(owner, attribute, ours)

    def give_back() -> None:
        if vars(owner)[attribute] is ours:  # else someone else has wrapped it, and it passes calls on
            setattr(owner, attribute, as_found)

    stack.callback(give_back)


def _in_python(compute: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def answered(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        # A compiler traces PyTorch's code. If the second axis is ragged, PyTorch calls itself on the values, which are dense.
        if torch.compiler.is_compiling() or getattr(query, "_ragged_idx", 2) == 1:
            return original(query, *args, **kwargs)
        return _answer(SDPA, compute, partial(_passing, original), (query, *args), kwargs)

    return answered


def _passing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before, _LOCAL.passing = _LOCAL.passing, True
    try:
        return original(*args, **kwargs)
    finally:
        _LOCAL.passing = before


# Checkpoints


def _repeated_argument(original: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A function of torch.utils.checkpoint whose argument at `place` is called again in the backward: then it runs on Strobe as well."""

    @wraps(original)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        if _is_open() and len(args) > place:
            args = (*args[:place], _OnStrobe(args[place]), *args[place + 1 :])
        return original(*args, **kwargs)

    return keeping


def _repeating_as_before(original: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of a reentrant checkpoint, which runs on PyTorch if its forward came before the registration."""

    @wraps(original)
    def keeping(ctx: Any, *gradients: Any) -> Any:
        if isinstance(ctx.run_function, _OnStrobe):
            return original(ctx, *gradients)
        return _passing(original, ctx, *gradients)

    return keeping


class _OnStrobe:
    """A function whose attention runs on Strobe where it did so the first time, whatever is registered."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _repeating():
            return self._function(*args, **kwargs)


@contextmanager
def _repeating() -> Iterator[None]:
    global _repeats
    with _LOCK:
        _repeats += 1
        _settle()
    _LOCAL.repeating += 1
    try:
        yield
    finally:
        _LOCAL.repeating -= 1
        with _LOCK:
            _repeats -= 1
            _settle()


_TOP_HOOKS: Callable[[bool], Any] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def _repeats_pytorch() -> bool:
    """Whether a checkpoint that is not reentrant repeats a forward that ran without a registration."""
    if _LOCAL.repeating:
        return False
    hooks = None if _TOP_HOOKS is None else _TOP_HOOKS(False)
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_recomputation_hook")


# A call


def _is_open() -> bool:
    return bool(_OPEN or _LOCAL.repeating)


def _answer(name: str, compute: Callable[..., Any], theirs: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call, by compute() or by PyTorch."""
    if _LOCAL.passing or not _is_open():
        return theirs(*args, **kwargs)
    opened = tuple(_OPEN)
    counts = not isinstance(args[0], (FakeTensor, FunctionalTensor))  # else nothing is computed
    why = _chosen(name)
    if why is None:
        try:
            why = _transformed(args)
            if why is None:
                found = compute(*args, **kwargs)
                if counts:
                    _count(opened, name, "strobe")
                return found
        except (TypeError, ValueError, NotImplementedError) as refused:
            why = "; ".join(str(refused).splitlines())
        if any(each.strict for each in opened):
            raise NotImplementedError(f"{name} on Strobe: {why}; accepted with strict=False: PyTorch then runs such a call")
        found = theirs(*args, **kwargs)  # a call that PyTorch refuses, too, is neither counted nor warned of
        if _counted_as_pytorchs(opened, name, why, counts):
            words = f"{name} runs on PyTorch's implementation, because Strobe does not take the call: {why}. Calls like it say no more."
            warnings.warn(words, stacklevel=3)
        return found
    found = theirs(*args, **kwargs)
    _counted_as_pytorchs(opened, name, why, counts)
    return found


def _count(opened: Sequence[Registration], name: str, where: str) -> None:
    with _LOCK:
        for each in opened:
            each.calls[name][where] += 1


def _counted_as_pytorchs(opened: Sequence[Registration], name: str, why: str, counts: bool) -> bool:
    """Counts the call. Whether it is the first one for its reason."""
    with _LOCK:
        if counts:
            _count(opened, name, "pytorch")
        new = [each._is_new(why) for each in opened]
        return any(new)


def _chosen(name: str) -> str | None:
    """Why PyTorch should run the call, as the caller chose it."""
    c = torch._C
    if name == SDPA and not (c._get_flash_sdp_enabled() or c._get_mem_efficient_sdp_enabled() or c._get_cudnn_sdp_enabled()):
        return "sdpa_kernel() allows no other backend than math"
    if getattr(torch.compiler, "is_exporting", bool)():
        return "torch.export keeps PyTorch's operators"
    if _repeats_pytorch():
        return "a checkpoint repeats a forward that ran on PyTorch"
    return None


def _transformed(args: Sequence[Any]) -> str | None:
    """Why a transform keeps Strobe from the call."""
    if torch._C._are_functorch_transforms_active():
        return "torch.vmap and torch.func transform PyTorch's operators"
    if forward_ad._current_level >= 0 and any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in args):
        return "forward-mode derivatives are PyTorch's"
    return None


# What is computed, with the arguments of PyTorch's functions

_NAMES = {"q": "query", "k": "key", "v": "value"}


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if query.is_nested or key.is_nested or value.is_nested:
        raise ValueError("query, key, value: nested tensors of layout torch.strided; accepted are dense ones, and layout torch.jagged")
    q, k, v = query.shape, key.shape, value.shape
    if len(q) == len(k) == len(v) == 4 and q[0] == k[0] == v[0] and k[1] == v[1] and (enable_gqa or q[1] == k[1]):
        # The usual call goes straight to attention(), by as few options as possible, which is where a repeated call is found soonest.
        options: dict[str, Any] = {"alignment": "top_left"}
        if attn_mask is not None:
            options |= mask_or_bias(attn_mask)
        if is_causal:
            options["causal"] = True
        if dropout_p:
            options["dropout"] = dropout_p
        if scale is not None:
            options["scale"] = scale
        try:
            return attention(query, key, value, **options)
        except (TypeError, ValueError, NotImplementedError) as refused:
            if imported_late(type(query)) is not None:  # no other function takes such tensors
                raise type(refused)(re.sub("^[qkv](?=:)", lambda of: _NAMES[of[0]], str(refused))) from None
            # else it is refused again below, in the words of PyTorch's arguments
    _check_heads(query, key, value, enable_gqa)
    return sdpa.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Refuses what PyTorch refuses, and strobe.attention() does not."""
    heads = [x.shape[-3] for x in (query, key, value) if x.dim() > 2]
    if enable_gqa:
        if len(heads) == 3 and any(n and heads[0] % n for n in heads[1:]):
            raise ValueError(f"enable_gqa: True beside query, key and value of {heads} heads; accepted are divisors of the query's")
    else:
        several = [n for n in heads if n != 1]
        if any(n != several[0] for n in several):
            raise ValueError(f"enable_gqa: False beside query, key and value of {heads} heads; accepted is True, or as many heads of each")


def _causal_bias(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if is_causal:
        raise ValueError("is_causal: True beside a CausalBias; accepted is False")
    return _sdpa(query, key, value, attn_mask, dropout_p, False, scale, enable_gqa)


def _jagged(
    query: Any, key: Any, value: Any, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    refuse(*(wrong_nested(name, x, 4) for name, x in (("query", query), ("key", key), ("value", value))))
    if attn_mask is not None:
        raise ValueError("attn_mask: given beside nested tensors; accepted is None")
    if is_causal and query.shape[2] != key.shape[2]:
        raise ValueError("is_causal: True beside query and key whose lengths may differ; accepted are those of the same offsets")
    _check_heads(query, key, value, enable_gqa)
    options = {f"cu_seqlens_{side}": x.offsets().int() for side, x in (("q", query), ("k", key))}
    options |= {f"max_seqlen_{side}": x._get_max_seqlen() for side, x in (("q", query), ("k", key))}
    q, k, v = (x.values().transpose(0, 1) for x in (query, key, value))  # (T, H, D)
    return as_nested(attention(q, k, v, causal=is_causal, scale=scale, dropout=dropout_p, **options), query)


def _varlen(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = _named(torch.ops.torch_attn._varlen_attn.default, args, kwargs)
    out, lse = varlen.varlen_attn(**given)
    return out, lse, torch.zeros(2, dtype=torch.uint64, device=out.device)


def _varlen_out(*args: Any, **kwargs: Any) -> Any:
    operator = torch.ops.torch_attn._varlen_attn_out.default
    out, lse = varlen.varlen_attn_out(**_named(operator, args, kwargs))
    if len(operator._schema.returns) == 1:
        return lse
    return lse, torch.zeros(2, dtype=torch.uint64, device=out.device)  # PyTorch 2.12


# What the operators of PyTorch's versions have, beside is_causal and window_size. Others, such as 2.12's k_cache, are refused if given.
_OF_VARLEN = {"out", "query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale"}
_OF_VARLEN |= {"enable_gqa", "seqused_k", "block_table", "num_splits"}


def _named(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of strobe.compat.varlen for those of PyTorch's operator, whose order differs between versions."""
    given = {of.name: x for of, x in zip(operator._schema.arguments, args, strict=False)} | {**kwargs}
    is_causal, window = given.pop("is_causal", False), given.pop("window_size", None)
    for name in [*given]:
        if name not in _OF_VARLEN and given.pop(name) is not None:
            raise ValueError(f"{name}: given; accepted is None")
    left, right = (-1, -1) if window is None else window
    return {"return_aux": varlen.AuxRequest(lse=True), "window_size": (left, 0 if is_causal else right), **given}
