"""One call on one rank: the values that all ranks share, the rank's own values, and the calls of the library on parts of the problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._abi import BACKWARD, FORWARD
from .._call import Call
from .._core import ffi, lib
from .._function import CAPTURED
from .._options import BLOCKS, FULL_BLOCKS
from .._prepared import into as run_into
from .._refusals import Refusal, raised_for
from ..arrays.memory import allocated
from ..arrays.torch import TORCH
from ._group import Levels
from ._late import Waits
from ._ranges import Ranges, indices, places
from ._seen import Band, Blocks, seen_keys
from ._sharding import part_of, rows_of_sequences

Results = dict[str, Tensor]
CAPTURED_APART = {"cuda"}  # devices for _apart()
_OF_CAPTURED = frozenset(f"d{name}" for name in CAPTURED)
_WHOLE = frozenset({"rng", *BLOCKS, *FULL_BLOCKS, *CAPTURED})  # tensors that every call of the library has as a whole


@dataclass(frozen=True)
class Plan:
    """The positions of tokens, the same on all ranks. A Plan is the key under which values derived from it are cached."""

    q: tuple[Ranges, ...]  # the queries of each rank
    k: tuple[Ranges, ...]
    cu_q: tuple[int, ...]  # dense tensors have one sequence, which stands for all of the batch
    cu_k: tuple[int, ...]
    packed: bool
    band: Band
    blocks: Blocks | None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once, because there may be thousands of ranges."""
        return hash((self.q, self.k, self.cu_q, self.cu_k, self.packed, self.band, self.blocks))

    @property
    def world(self) -> int:
        return len(self.q)

    def seen(self, rank: int) -> Ranges:
        """The keys that some query of the rank sees."""
        return seen_keys(self.q[rank], self.cu_q, self.cu_k, self.band, self.blocks)


class Facts(NamedTuple):
    """The values that determine which methods support a call, and how fast they are; the same on all ranks."""

    plan: Plan
    batch: int
    heads: int
    heads_kv: int
    columns: tuple[int, int]  # D, Dv
    itemsize: int
    device: str
    given: tuple[str, ...]  # the given options for which methods differ
    inside: int = 0  # the number of ranks in a node; 0: not given


def facts_of(call: Call, plan: Plan, inside: int = 0) -> Facts:
    return Facts(plan, *facts_beside_plan(call, plan.packed, inside))


def facts_beside_plan(call: Call, packed: bool, inside: int) -> tuple[Any, ...]:
    """Facts without its first member."""
    q, k, v = (call.arrays[name] for name in "qkv")
    axis = 1 if packed or "bshd" not in call.options else 2
    given: list[str] = [name for name in ("mask", "bias", "seqused_k") if name in call.arrays]
    given += [name for name in ("invariant", "dropout") if call.options.get(name)]
    if BLOCKS[0] in call.arrays and call.arrays[BLOCKS[0]].shape[1] > 1:
        given.append("block_mask of several heads")
    batch = 1 if packed else q.shape[0]
    heads, columns = (q.shape[axis], k.shape[axis]), (q.shape[-1], v.shape[-1])
    return batch, *heads, columns, q.element_size(), q.device.type, tuple(given), inside


@lru_cache(maxsize=1024)
def part_numbers(plan: Plan, q: Ranges, k: Ranges, first_head: int, heads: int, partial: bool) -> tuple[int, ...]:
    """A Part of these tokens in the library's form."""
    part = part_of(q, k, plan.cu_q, plan.cu_k, partial=partial, packed=plan.packed, first_head=first_head, heads=heads)
    return part.encoded()


@lru_cache(maxsize=1024)
def cu_seqlens_of(ranges: Ranges, cu: tuple[int, ...], device: torch.device) -> Tensor:
    """cu_seqlens of the tokens in these ranges."""
    return torch.tensor([0, *rows_of_sequences(ranges, cu)]).cumsum(0).int().to(device)


@lru_cache(maxsize=1024)
def rows_for(of: tuple[Ranges, ...], among: Ranges, device: torch.device) -> Tensor:
    """Indices, among a rank's tokens, of the tokens of several ranges, one range after the other."""
    return torch.cat([torch.arange(0), *(indices(places(each, among)) for each in of)]).to(device)


class Order(NamedTuple):
    """The permutation that brings tokens, which arrived from several ranks, into the order of their positions, and its inverse."""

    there: Tensor
    back: Tensor


@lru_cache(maxsize=1024)
def order_of(arrived: tuple[Ranges, ...], device: torch.device) -> Order | None:
    """The permutation for tokens that arrived in these ranges; None if the tokens are already in the order of their positions."""
    positions = indices([each for of in arrived for each in of])
    order = positions.argsort()
    return None if torch.equal(order, torch.arange(len(order))) else Order(order.to(device), order.argsort().to(device))


@dataclass
class RankCall:
    """One rank's call. of_caller: the caller's call, with the rank's own rows. needs: the arrays whose gradients are asked for.
    reserved_sms: the multiprocessors that a call of the library leaves to a concurrent transfer, unless the caller gives a number.
    first_head, all_heads: for a call on some of the heads."""

    of_caller: Call
    plan: Plan
    rank: int
    waits: Waits
    needs: frozenset[str]
    reserved_sms: int = 0
    levels: Levels | None = None
    first_head: int = 0
    all_heads: int | None = None

    @property
    def q(self) -> Tensor:
        return self.of_caller.arrays["q"]

    @property
    def k(self) -> Tensor:
        return self.of_caller.arrays["k"]

    @property
    def v(self) -> Tensor:
        return self.of_caller.arrays["v"]

    @property
    def axis(self) -> int:
        """The axis of the tokens."""
        return 0 if self.plan.packed else 1 if "bshd" in self.of_caller.options else 2

    @cached_property
    def heads(self) -> int:
        return self.q.shape[self.head_axis]

    @cached_property
    def heads_kv(self) -> int:
        return self.k.shape[self.head_axis]

    @property
    def head_axis(self) -> int:
        return 2 if not self.plan.packed and "bshd" in self.of_caller.options else 1

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of lse, and of sums."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def rows(self, x: Tensor) -> Tensor:
        """x with its axes in the order tokens, batch (if dense), heads, columns."""
        return x.movedim(self.axis, 0) if self.axis != 1 else x.transpose(0, 1)

    def tokens(self, rows: Tensor) -> Tensor:
        """The inverse of rows()."""
        return rows.movedim(0, self.axis) if self.axis != 1 else rows.transpose(0, 1)

    @property
    def device(self) -> torch.device:
        return self.q.device

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return allocated(tuple(shape), None, dtype, self.q.device)

    def room_for_bias(self) -> Tensor | None:
        """Zeros to which gradients of the bias are added, with all four axes."""
        return self.new(four_axes(self.of_caller.arrays["bias"]).shape, self.sum_dtype).zero_() if "bias" in self.needs else None

    @property
    def captured(self) -> list[str]:
        """The captured tensors whose gradients are asked for."""
        return [name for name in CAPTURED if name in self.needs]

    def room_for_captured(self) -> Results:
        """Zeros to which the rank's gradients of captured tensors are added."""
        return {f"d{name}": torch.zeros_like(self.of_caller.arrays[name]) for name in self.captured}

    def results(self) -> Results:
        """Uninitialised out and lse of the rank's rows."""
        return self.of_caller.results()

    def as_results(self, out: Tensor) -> Tensor:
        """out, with the strides and dtype that a compiler was told, and no view, because autograd forbids changing a view in place."""
        expected = self.results()["out"]
        fits = out.stride() == expected.stride() and out.dtype == expected.dtype and not out._is_view()
        return out if fits else expected.copy_(out)

    def of_heads(self, x: Tensor, heads: range, axis: int | None = None) -> Tensor:
        axis = self.head_axis if axis is None else axis
        return x.narrow(axis, heads.start, len(heads))

    def statistic_of_heads(self, x: Tensor, heads: range) -> Tensor:
        """Some heads of x: lse or another statistic, whose last axes are heads and rows."""
        return x.narrow(-2, heads.start, len(heads))

    def scores_of_heads(self, x: Tensor, heads: range) -> Tensor:
        """Some heads of mask or bias, with all four axes."""
        x = four_axes(x)
        return x.narrow(1, heads.start, len(heads)) if x.shape[1] > 1 else x

    def query_heads(self, heads_kv: range) -> range:
        share = self.heads // self.heads_kv
        return range(heads_kv.start * share, heads_kv.stop * share)

    def local(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: range,
        of: tuple[Ranges, Ranges],
        *,
        partial: bool = False,
        beside_transfer: bool = False,
    ) -> Call:
        """The call of the library on these tensors: some query heads and their key heads, queries and keys at these positions.
        beside_transfer: whether a transfer is in flight meanwhile."""
        arrays: dict[str, Tensor] = {"q": q, "k": k, "v": v}
        for name, x in self.of_caller.arrays.items():
            if name in ("mask", "bias"):
                arrays[name] = self.scores_of_heads(x, heads)
            elif name == "alibi_slopes":
                arrays[name] = x.narrow(-1, heads.start, len(heads)) if x.dim() else x
            elif name == "sinks" and not partial:
                arrays[name] = x.narrow(0, heads.start, len(heads)) if x.dim() else x
            elif name in _WHOLE:
                arrays[name] = x
        if self.plan.packed:
            for name, ranges, cu in (("cu_seqlens_q", of[0], self.plan.cu_q), ("cu_seqlens_k", of[1], self.plan.cu_k)):
                arrays[name] = cu_seqlens_of(ranges, cu, self.device)
        numbers = part_numbers(self.plan, *of, self.first_head + heads.start, self.all_heads or self.heads, partial)
        reserved = {"reserved_sms": self.reserved_sms} if self.reserved_sms and beside_transfer else {}
        return Call(TORCH, arrays, {**reserved, **self.of_caller.options, "part": numbers})


class Pass(Protocol):
    """A forward or backward of a method, its memory allocated."""

    call: RankCall

    def example(self) -> Call:
        """A call of the library as it will be made, for the library to check."""

    def prepare(self) -> None:
        """Does the rank's own work before the first transfer, and before the rank reports that it is ready: afterwards no memory is
        allocated."""


def four_axes(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.dim())]


def forward_into(call: Call, out: Tensor, lse: Tensor) -> None:
    if call.is_oracle:  # it writes float64
        for to, x in zip((out, lse), call.forward(), strict=True):
            to.copy_(x)
        return
    run_into(FORWARD, call, {}, {"out": out, "lse": lse})


def in_own_words(call: RankCall, refused: Exception) -> Exception:
    """The error in terms of the rank's own tensors and shapes, if these are the reason why a call on other tensors was refused."""
    if not isinstance(refused, ValueError):
        return refused
    reasons = _own_reasons(call)
    return raised_for(ValueError, reasons) if reasons else refused


def check_shapes(call: RankCall) -> None:
    """Checks arguments that methods cut by heads or send by rows before the library sees them, and arguments that the library would refuse
    because of a Part, which the caller has not given."""
    names = {"alibi_slopes", "sinks", "mask", "bias"} & call.of_caller.arrays.keys()
    wrong = _against_whole(call)
    if wrong or names:
        wrong = [each for each in _own_reasons(call) if each.argument in names | {x.argument for x in wrong}]
    if wrong:
        raise raised_for(ValueError, wrong)


def _against_whole(call: RankCall) -> list[Refusal]:
    """The refusals of sizes that the whole sequences determine."""
    wrong, plan = [], call.plan
    for name, cu in (("max_seqlen_q", plan.cu_q), ("max_seqlen_k", plan.cu_k)):
        given, most = call.of_caller.options.get(name), max((end - begin for begin, end in pairwise(cu)), default=0)
        if given and given < most:
            wrong.append(Refusal(name, f"{given}, and a sequence has {most} tokens; accepted is {most} or more, or None"))
    rows = call.of_caller.arrays.get(BLOCKS[0])
    batch = len(plan.cu_q) - 1 if plan.packed else call.q.shape[0]
    if rows is not None and (rows.shape[0] not in (1, batch) or rows.shape[1] not in (1, call.heads)):
        sizes = f"of {rows.shape[0]} sequences and {rows.shape[1]} heads"
        wrong.append(Refusal("block_mask", f"{sizes}; accepted are 1 or {batch} sequences and 1 or {call.heads} heads"))
    return wrong


def _own_reasons(call: RankCall) -> list[Refusal]:
    own = call.plan.q[call.rank], call.plan.k[call.rank]
    arrays = {name: x for name, x in call.of_caller.arrays.items() if name != "seqused_k"}
    if call.plan.packed:
        for name, ranges, cu in (("cu_seqlens_q", own[0], call.plan.cu_q), ("cu_seqlens_k", own[1], call.plan.cu_k)):
            arrays[name] = cu_seqlens_of(ranges, cu, call.device)
    wrong = _against_whole(call)
    refused = {"invariant", *(each.argument for each in wrong)}
    if "block_mask" in refused:
        refused |= {"block_q", "block_k", *BLOCKS, *FULL_BLOCKS}
    arrays = {name: x for name, x in arrays.items() if name not in refused}
    options = {name: x for name, x in call.of_caller.options.items() if name not in refused}
    options["part"] = part_numbers(call.plan, *own, 0, call.heads, False)
    return wrong + Call(TORCH, arrays, options).reasons_against({}, False)


def backward_into(call: Call, known: Results, made: Results) -> Results:
    if call.is_oracle:
        return call.backward(known, made)
    run_into(BACKWARD, call, known, made)
    return made


def backward_added(call: Call, known: Results, wanted: list[str], into: Results) -> Results:
    """The gradients. Those that `into` has are added to its tensors."""
    captured = [name for name in wanted if name in _OF_CAPTURED]
    if 0 < len(captured) < len(wanted) and _apart(call):
        others = [name for name in wanted if name not in captured]
        return backward_added(call, known, others, into) | call.backward(known, captured)
    if call.is_oracle or len(wanted) > len(into):
        return call.backward(known, wanted, into)
    run_into(BACKWARD, call.adding(), known | into, {})
    return into


def _apart(call: Call) -> bool:
    """Whether gradients of captured tensors are computed by a call of their own: in a part the fastest engines of a GPU refuse them, and
    would refuse all others with them."""
    return "part" in call.options and call.arrays["q"].device.type in CAPTURED_APART


def check(call: Call, operation: int, captured: Sequence[str] = ()) -> list[int]:
    """Raises the library's refusals of the call, or of its backward; nothing is computed. Memory for the results, and on a GPU for the
    workspace, is allocated and given back to the allocator for later allocations. Returns the size of each in bytes. captured: the captured
    tensors whose gradients are asked for."""
    if captured and _apart(call):
        return [*check(call, operation), *_checked(call, operation, captured)]
    return _checked(call, operation, captured)


def _checked(call: Call, operation: int, captured: Sequence[str]) -> list[int]:
    structs = call.example_structs(operation, captured)
    plan = ffi.new("strobe_plan *", {"size": ffi.sizeof("strobe_plan")})
    structs.run(lib.strobe_make_plan, operation, plan)
    q, asked = call.arrays["q"], [x.nbytes for x in structs.made.values()]
    if q.is_cuda:
        asked.append(plan.workspace_bytes)
        allocated((plan.workspace_bytes,), None, torch.uint8, q.device)
    return asked


def ask_for(memory: Sequence[int], device: torch.device) -> None:
    """Allocates and releases as much memory as check(), for a call that need not be checked again."""
    _held = [allocated((n,), None, torch.uint8, device) for n in memory]
