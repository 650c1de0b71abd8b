"""Repeated calls of torch tensors: work that is the same for every repetition is done once.

A call is remembered when it is made, prepared when it comes a second time, and from then on one function in C (_eager) finds it and runs
it. The key, which C makes, has everything that decides what runs: the entry point, shapes, strides, dtypes, devices, alignment, options,
the gradients that are wanted, threads, determinism, autocast. A call that a compiler, a transform, a mode or a subclass of Tensor must see
has no key, and takes the full path every time.

A call of attention() that differs from an earlier one in sizes alone, and whose options have no tensors, is not parsed again, and prepared
when it comes the first time: the library checks sizes in any case.

There are three entry points: strobe.attention() itself, whose repetition is not even parsed; its gradients; and a parsed call in one
direction. Compiled graphs, attention_backward(), strobe.distributed, and calls whose arrays are new in each repetition use the last one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from . import _eager, _function
from ._abi import BACKWARD, FORWARD, OPERATIONS
from ._call import Call, field_of
from ._core import ffi, lib
from ._eager import PreparedCall
from ._options import GRADIENTS
from .arrays.torch import TORCH

_eager.connect(int(ffi.cast("uintptr_t", ffi.addressof(lib, "strobe_glue_run"))))

# The number of entries that are kept. A differentiated call takes three entries, on several ranks a dozen; with packed sequences, whose
# lengths may never be repeated, entries may be of no use.
_MOST = 3 * 1024
_MOST_KINDS = 256
_LONG_KEY = 1024
_NO_RESULT = 255  # in the form of a PreparedCall
_FUNCTIONS = {FORWARD: lib.strobe_forward, BACKWARD: lib.strobe_backward}


class Memory:
    """The calls that were made, by their keys: a Call without arrays after the first time, a PreparedCall from the second time on, or
    the results of strobe.distributed's checks. Repeated calls are kept, however many others come only once.

    kinds: what autograd keeps of calls of attention(), by keys without sizes."""

    def __init__(self) -> None:
        self.lately: dict[bytes, Any] = {}
        self._before: dict[bytes, Any] = {}
        self.kinds: dict[bytes, Kept] = {}

    def get(self, key: bytes) -> Any:
        found = self.lately.get(key)
        if found is None and (found := self._before.get(key)) is not None:
            self.keep(key, found)
        return found

    def keep(self, key: bytes, call: Any) -> None:
        if len(self.lately) >= _MOST // 2:
            self.lately, self._before = {}, self.lately
        self.lately[key] = call

    def keep_kind(self, kind: bytes, kept: Kept) -> None:
        if len(self.kinds) >= _MOST_KINDS:
            self.kinds = {}
        self.kinds[kind] = kept


CALLS = Memory()  # the one memory of all entry points


def _short(key: bytes) -> bytes:
    """The key, or a digest of one that is long because of functions' texts."""
    return key if len(key) <= _LONG_KEY else hashlib.sha256(key).digest()


_WITHOUT_GRADIENTS = {"page_table": "keys in pages", "k_scale": "quantised keys"}


class Kept:
    """A call as autograd keeps it: without the arrays, which autograd's graph saves."""

    __slots__ = ("__weakref__", "_places", "call", "names", "prefix", "return_lse", "without_gradients")

    def __init__(self, call: Call, return_lse: bool = True, *, is_repeated: bool = False):
        self.names, self.call = tuple(call.arrays), call.on({})
        self.return_lse = return_lse
        # The argument for which a backward is refused, and what its keys are; None: there are gradients.
        self.without_gradients = next(((name, keys) for name, keys in _WITHOUT_GRADIENTS.items() if name in self.names), None)
        # The gradients that the call may be asked for, each with the place of its array.
        self._places = [(name, self.names.index(GRADIENTS[name])) for name in call.gradient_names(call.learnable())]
        # The prefix of the keys of the call's gradients. (If the call was made only once, its gradients are looked up like a parsed call.)
        self.prefix = _short(repr((self.names, call.options)).encode()) if is_repeated else b""

    def needed(self, flags: tuple[bool, ...]) -> list[str]:
        """The names in GRADIENTS that are needed. flags: one that is not used here, then one for each of the call's arrays."""
        return [name for name, place in self._places if flags[1 + place]]

    def on(self, arrays: tuple[Tensor, ...]) -> Call:
        return self.call.on(dict(zip(self.names, arrays, strict=True)))


def remember(call: Call, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, given: Mapping[str, Any]) -> None:
    """Remembers a call of attention() that was made with these arguments."""
    has_functions = _function.functions_in(given)
    if has_functions:
        given = _function.fields_of(given, call.options, call.arrays)
    if torch.compiler.is_compiling() or (key := _eager.attention_key(q, k, v, return_lse, given)) is None:
        return
    arrays, tensors = call.arrays, tensors_in(given)
    if [*arrays] != ["q", "k", "v", *tensors] or call.is_oracle:
        return  # some tensors are new objects in each call, or the oracle's results must be cast
    if any(x is not arrays[name] for name, x in tensors.items()):
        return  # some tensors are copied from host memory in each call
    if 0 in (call.options.get("max_seqlen_q"), call.options.get("max_seqlen_k")):
        return  # Python checks shapes against a max_seqlen of 0 in each call
    if any(x is not arrays[name] for name, x in TORCH.autocast(arrays).items()):
        return  # autocast makes some tensors anew in each call
    CALLS.keep(key, call.on({}))
    if q.dim() == 4 and not has_functions and (kind := _eager.attention_kind(q, k, v, return_lse, given)) is not None:
        CALLS.keep_kind(kind, Kept(call, return_lse, is_repeated=True))


def tensors_in(given: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in given.items() if isinstance(x, Tensor)}


def gradients(kept: Kept, flags: tuple[bool, ...], dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...]) -> Any:
    """The gradients of a repeated call of attention() that are not prepared, as autograd wants them; None if the full call must be made.
    They are prepared at once, because the forward was repeated. saved: out, lse and the call's arrays."""
    if not kept.needed(flags):  # only what the mask reads requires grad
        return (None,) * len(flags)
    if dout.is_cuda:
        dout = with_dense_rows(dout, "bshd" in kept.call.options)
    key = _eager.gradients_key(kept.prefix, flags, dout, dlse, saved)
    if key is None:
        return None
    if CALLS.get(key) is None:
        call, names = kept.on(saved[2:]), kept.needed(flags)
        known = {"dout": dout} | ({} if dlse is None else {"dlse": dlse}) | {"out": saved[0], "lse": saved[1]}
        places = {GRADIENTS[name]: place for place, name in enumerate(names)}
        form = bytes(places.get(of, _NO_RESULT) for of in ("", *call.arrays))
        CALLS.keep(key, prepare(call, known, call.gradients(names), BACKWARD, form=form))
    return _eager.gradients(CALLS.lately, kept.prefix, flags, dout, dlse, saved)


def forward(call: Call) -> tuple[Tensor, ...]:
    """out, lse and the results named by aux, of a parsed call that may be repeated."""
    found = _repeated(FORWARD, _prefix("forward", *call.aux), call, {}, call.results)
    return call.forward() if found is None else found


def backward(call: Call, known: dict[str, Tensor], names: list[str]) -> tuple[Tensor, ...]:
    """The gradients of these names, of a parsed call that may be repeated. known: dout, dlse if there is one, out and lse."""
    if known["dout"].is_cuda:
        known = {**known, "dout": with_dense_rows(known["dout"], "bshd" in call.options)}
    if names:
        found = _repeated(BACKWARD, _prefix("backward", *known, *names), call, known, lambda: call.gradients(names))
        if found is not None:
            return found
    return tuple(call.backward(known, names).values())


def jvp(call: Call, tangents: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """out, lse and their derivatives, of a parsed call that may be repeated."""
    found = _repeated(OPERATIONS["jvp"], _prefix("jvp", *tangents), call, tangents, call.derivatives)
    return call.jvp(tangents) if found is None else found


def backward_jvp(call: Call, tangents: dict[str, Tensor], known: dict[str, Tensor], names: list[str]) -> tuple[Tensor, ...]:
    """The derivatives of the gradients of these names, of a parsed call that may be repeated."""
    given = tangents | known
    if names:
        prefix = _prefix("backward_jvp", *given, *names)
        found = _repeated(OPERATIONS["backward_jvp"], prefix, call, given, lambda: call.gradients(names))
        if found is not None:
            return found
    return tuple(call.backward_jvp(given, names).values())


def into(direction: int, call: Call, known: dict[str, Tensor], made: dict[str, Tensor]) -> None:
    """Runs a call that may be repeated, whose results are in the caller's memory, `made` or among `known`."""
    found = _repeated(direction, _prefix("into", str(direction), *known, *made), call, known | made, dict)
    if found is None:
        call.structs(known, made).run(_FUNCTIONS[direction])


@lru_cache
def _prefix(*words: str) -> bytes:
    return " ".join(words).encode()


def _repeated(
    direction: int, prefix: bytes, call: Call, known: dict[str, Tensor], results: Callable[[], dict[str, Tensor]]
) -> tuple[Tensor, ...] | None:
    """Runs a parsed call as a prepared one, from the second time on; None if the full call must be made."""
    signed = prefix, tuple(known.values()), call.arrays, call.options
    if (found := _eager.run(CALLS.lately, *signed)) is not None:
        return found
    key = _eager.key(*signed)
    if key is None or call.is_oracle:
        return None
    seen = CALLS.get(key)
    if seen is None:
        CALLS.keep(key, call.on({}))
        return None
    if isinstance(seen, Call):
        made = results()
        CALLS.keep(key, prepare(call, known, made, direction, form=bytes(range(len(made)))))
        del made  # `made` was an example; the call may use its memory
    return _eager.run(CALLS.lately, *signed)


def prepare(
    call: Call,
    known: dict[str, Tensor],
    made: dict[str, Tensor],
    direction: int,
    form: bytes | None = None,
    function: Callable[..., Any] | None = None,
    more: object = None,
) -> PreparedCall:
    """Prepares a call in one direction, without its addresses.

    known: arrays that it reads beside its own, and results in the caller's memory; made: its results, as an example; form: for each
    place of the tuple to return the index of a result, or 255 for None; function: is called with the PreparedCall and the arrays instead
    of PreparedCall.run; more: for that function."""
    prepared = call.structs(known, made).prepare(direction)
    plan = ffi.new("strobe_plan *", {"size": ffi.sizeof("strobe_plan")})
    lib.strobe_prepared_plan(prepared, plan)
    device = call.arrays["q"].device
    on_gpu = device.type == "cuda"
    return PreparedCall(
        owner=prepared,
        address=int(ffi.cast("uintptr_t", prepared)),
        fields=bytes(map(field_of, (*known, *call.arrays, *made))),
        made=tuple((tuple(x.shape), x.stride(), x.dtype) for x in made.values()),
        device=device,
        workspace_bytes=plan.workspace_bytes if on_gpu else 0,  # on the CPU the library has its own
        threads=0 if on_gpu else call.options.get("threads") or torch.get_num_threads(),
        form=form,
        function=function,
        more=more,
    )


def with_dense_rows(dout: Tensor, bshd: bool) -> Tensor:
    """dout, or a copy: GPU kernels that load whole tiles need adjacent columns, and rows with a stride other than 0. A batch or head axis
    that is expanded needs no copy."""
    row = {3: 0, 4: 1 if bshd else 2}.get(dout.dim())
    if row is None or (dout.stride(-1) == 1 and (dout.stride(row) or dout.shape[row] == 1)):
        return dout
    return dout.contiguous()
