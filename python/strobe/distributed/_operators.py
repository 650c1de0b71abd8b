"""The operators strobe::distributed_forward and distributed_backward: a call on one rank as torch.compile and autograd see it.

They carry the group's name, and shardings as integers, so that a graph holds nothing else. All ranks of the group take part in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import _eager, _prepared
from .._abi import OPERATIONS
from .._autograd import DifferentiatedOnce, below_autograd, is_seen_by_dispatcher, is_tracked
from .._call import Call
from .._function import CAPTURED
from .._function import FIELDS as FUNCTIONS
from .._operators import ARGUMENTS_WITHOUT_FUNCTIONS, TAGS, call_of
from .._options import BLOCKS, FIELDS, FULL_BLOCKS, GRADIENTS, INPUTS, written
from ..arrays.torch import TORCH
from ._agree import Recorded, Said, Signature, agree, drawn_by_first
from ._call import Pass, Plan, RankCall, Results, ask_for, check, check_shapes, facts_of, in_own_words
from ._group import Levels, of_name, takes
from ._heads import has_rows
from ._late import Waits
from ._methods import METHODS, reason_against
from ._predict import sms_for_transfers
from ._seen import Band, Blocks, blocks_of
from ._sharding import Sharding, host_integers, in_short

PassT = TypeVar("PassT", bound=Pass)
# PyTorch allows an operator 64 arguments, so some have several values. names: of the method, the group, and those of Levels, if there are.
_OWN = "int[] sharding_q, int[] sharding_k, str[] names, bool agree, float? time_limit, bool draw, bool[] needed"
ARGUMENTS = f"{ARGUMENTS_WITHOUT_FUNCTIONS}, str[]? functions=None, Tensor[]? captured=None"  # functions: texts, empty for none
_OWN_NAMES = tuple(argument.split()[1] for argument in _OWN.split(", "))
FORWARD_NAME, BACKWARD_NAME = "strobe::distributed_forward", "strobe::distributed_backward"
# saved: the forward's results for the backward; the drawn seed and offset are the last ones.
torch.library.define(FORWARD_NAME, f"({ARGUMENTS}, {_OWN}) -> (Tensor out, Tensor lse, Tensor[] saved)", tags=TAGS)
torch.library.define(
    BACKWARD_NAME, f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor[] saved, {ARGUMENTS}, {_OWN}) -> Tensor[]", tags=TAGS
)
forward = torch.ops.strobe.distributed_forward.default
backward = torch.ops.strobe.distributed_backward.default
_NAMES = tuple(GRADIENTS.values())  # q, k, v, bias, sinks, captured_0, ...
_BEFORE_CAPTURED = len(_NAMES) - len(CAPTURED)
WORLD = "world"  # a value of deterministic
# Options that may differ between ranks, because they only say how a rank runs its share.
_LOCAL = frozenset({"threads", "check", "reserved_sms"})
CU = ("cu_seqlens_q", "cu_seqlens_k")
_READ = frozenset({*BLOCKS, "seqused_k"})  # tensors whose numbers may be read before the call is made, beside CU


@lru_cache(maxsize=256)
def decoded(numbers: tuple[int, ...]) -> Sharding:
    ranges, at = [], 2
    for _ in range(numbers[1]):
        n = numbers[at]
        flat = numbers[at + 1 : at + 1 + 2 * n]
        ranges.append(tuple(zip(flat[::2], flat[1::2], strict=True)))
        at += 1 + 2 * n
    return Sharding(numbers[0], tuple(ranges))


def plan_of(call: Call, sharding_q: Sharding, sharding_k: Sharding) -> Plan:
    """Reads cu_seqlens, and block masks that lie in host memory."""
    packed = CU[0] in call.arrays
    cu_q, cu_k = (host_integers(name, call.arrays[name]) for name in CU) if packed else ((0, sharding_q.seqlen), (0, sharding_k.seqlen))
    return _plan(sharding_q, sharding_k, cu_q, cu_k, packed, band_of(call.options), _blocks(call))


@lru_cache(maxsize=256)
def _plan(sharding_q: Sharding, sharding_k: Sharding, *more: Any) -> Plan:
    """A Plan; equal arguments give the same object, so that derived values are cached under it."""
    return Plan(sharding_q.ranges, sharding_k.ranges, *more)


def plan_of_shardings(sharding_q: Sharding, sharding_k: Sharding, packed: bool) -> Plan:
    """The plan of one sequence, whose queries see all keys."""
    return Plan(sharding_q.ranges, sharding_k.ranges, (0, sharding_q.seqlen), (0, sharding_k.seqlen), packed, Band(), None)


def band_of(options: dict[str, Any]) -> Band:
    left, right = options.get("window_left"), options.get("window_right")
    alignments = {field.default for name, field in FIELDS.items() if name == "alignment"}
    alignment = "bottom_right" if options.get("alignment", *alignments) in alignments else "top_left"
    return Band.of(bool(options.get("causal")), (left, right), alignment)


def _blocks(call: Call) -> Blocks | None:
    rows = call.arrays.get(BLOCKS[0])
    if rows is None or not rows.is_cpu:
        return None
    columns = call.arrays[BLOCKS[2]].shape[2] - 1  # the transpose's rows
    return blocks_of(rows, call.arrays[BLOCKS[1]], columns, call.options["block_q"], call.options["block_k"])


class Judged(NamedTuple):
    """The kept result of the checks of a valid call. The same call on other tensors of the same shapes and strides is valid again."""

    plan: Plan
    reserved_sms: int
    memory: list[int]  # bytes allocated by the checks
    signature: Signature


class _Own:
    """The operators' own arguments."""

    def __init__(self, given: dict[str, Any]):
        self._of_key = {name: tuple(x) if isinstance(x, list) else x for name in _OWN_NAMES if (x := given[name]) is not None}
        self.sharding_q, self.sharding_k = (decoded(tuple(given.pop(f"sharding_{side}"))) for side in "qk")
        self._of_key |= {"sharding_q": self.sharding_q.digest, "sharding_k": self.sharding_k.digest, "names": given["names"][0]}
        self.method, group, *names = given.pop("names")
        self.group = of_name(group)
        self.levels = Levels(names[0], names[1], of_name(names[0]).size()) if names else None
        agree, self.seconds, self.draw = (given.pop(name) for name in ("agree", "time_limit", "draw"))
        self.needs = frozenset(name for name, needed in zip(_NAMES, given.pop("needed"), strict=True) if needed)
        self.rank, self.world = self.group.rank(), self.group.size()
        self.agrees = self.world > 1 and agree

    def key(self, of: str, call: Call) -> bytes | None:
        """The bytes that determine whether a call is valid, and how it is made; None if numbers in other tensors than cu_seqlens matter."""
        if call.options.get("check") or not _READ.isdisjoint(call.arrays) or ("rng" in call.arrays and not self.draw):
            return None
        # The groups' names are left out, because later groups may have them again.
        prefix = f"distributed {of} {self.rank} {self.world} {size_of(self.levels)}".encode()
        numbers = {f"numbers of {name}": in_short(host_integers(name, call.arrays[name])) for name in CU if name in call.arrays}
        return _eager.key(prefix, (), call.arrays, call.options | self._of_key | numbers)


def size_of(levels: Levels | None) -> int:
    """The number of ranks in a node; 0 if none was given."""
    return 0 if levels is None else levels.size


def _signature(call: RankCall, own: _Own, of: str) -> Signature:
    """The values that must be the same on all ranks, by the names that callers know. The first difference is reported: options come before
    shapes, which follow from layout, and last comes the method, which follows from all others if none was requested."""
    if not own.agrees:
        return Signature({})  # it is not compared, and reading a GPU's rng would wait
    of_caller, plan = call.of_caller, call.plan
    said: dict[str, object] = {
        "the pass": of,
        **_written(of_caller.options, own.draw),
        "sharding": plan.q,
        "sharding_k": plan.k,
        "cu_seqlens_q": plan.cu_q,
        "cu_seqlens_k": plan.cu_k,
        "block_mask": _mask_of_blocks(of_caller, plan),
        "ranks of a node": size_of(own.levels),
        "tensors that require grad": sorted(call.needs),
        "q": (_but(call.q, call.axis), call.q.dtype, call.q.device.type),
        "k": (_but(call.k, call.axis), call.k.dtype),
        "v": (_but(call.v, call.axis), call.v.dtype),
    }
    for name in INPUTS[3:]:
        x = of_caller.arrays.get(name)
        if x is None or name in (*CU, *BLOCKS, *FULL_BLOCKS):
            continue
        if name in ("mask", "bias"):
            rows = ("rows" if has_rows(x) else "no rows") if own.method in ("heads", "levels") else "any rows"
            said[name] = (*x.shape[:-2], rows, *x.shape[-1:], x.dtype)
        elif name == "rng":
            said[name] = None if own.draw else x.tolist()
        elif name in CAPTURED:
            said[f"tensor {CAPTURED.index(name)} that functions read"] = tuple(x.shape), x.dtype
        else:
            said[name] = tuple(x.shape), x.dtype
    functions = {name: Recorded(of_caller.options[field]) for name, field in FUNCTIONS.items() if field in of_caller.options}
    return Signature({name: x for name, x in said.items() if name not in functions} | functions | {"method": own.method})


def _written(fields: dict[str, Any], draw: bool) -> dict[str, object]:
    """The options that ranks share, as callers write them."""
    options = {name: x for name, x in written(fields).items() if name not in _LOCAL}
    if options["deterministic"] and options["invariant"]:
        options["deterministic"] = WORLD
    return options | {"seed": "drawn" if draw else fields.get("seed", 0), "offset": fields.get("offset", 0)}


def _mask_of_blocks(call: Call, plan: Plan) -> object:
    """The block mask for the signature; for a mask on a GPU, which is not read, only the size of its blocks."""
    return plan.blocks if plan.blocks is not None or BLOCKS[0] not in call.arrays else (call.options["block_q"], call.options["block_k"])


def _but(x: Tensor, axis: int) -> tuple[object, ...]:
    """x's shape with a placeholder for the size of `axis`, the number of tokens, which differs between ranks."""
    return tuple("tokens" if n == axis else size for n, size in enumerate(x.shape))


def _started(of_caller: Call, own: _Own, of: str, build: Callable[[RankCall], PassT], drawn: Tensor | None = None) -> PassT:
    """Validates, allocates, and agrees with the other ranks to continue. drawn: a seed and offset, of which the first rank's become rng."""
    call: RankCall | None = None
    failure: Exception | None = None
    known: Judged | None = None
    q = of_caller.arrays["q"]
    try:
        key = own.key(of, of_caller)
        known = None if key is None else _prepared.CALLS.get(key)
        plan = plan_of(of_caller, own.sharding_q, own.sharding_k) if known is None else known.plan
        call = RankCall(of_caller, plan, own.rank, Waits(own.group, own.seconds), own.needs, levels=own.levels)
        if not takes(own.group, q.device):
            raise ValueError(f"q: on {q.device}; accepted is a device of the group's backend, {own.group.name()}")
        call.reserved_sms = _judge(call, own, of) if known is None else known.reserved_sms
        made = build(call)
        if known is None:
            known = Judged(plan, call.reserved_sms, check(made.example(), OPERATIONS[of], call.captured), _signature(call, own, of))
            if key is not None:
                _prepared.CALLS.keep(key, known)
        else:
            ask_for(known.memory, q.device)
        made.prepare()
    except Exception as refused:  # whatever its type is, the other ranks must be told
        failure = refused if call is None else in_own_words(call, refused)
    rng = (0, 0) if drawn is None else tuple(drawn.tolist())
    if own.agrees:
        signature = known.signature if known else Signature({}) if call is None else _signature(call, own, of)
        rng = agree(own.group, Said(signature, failure, rng), own.seconds)
    elif failure is not None:
        raise failure
    elif own.world > 1 and drawn is not None:
        rng = drawn_by_first(own.group, drawn, own.seconds)
    if drawn is not None:
        of_caller.arrays["rng"].copy_(torch.tensor(rng))
    return made


def _judge(call: RankCall, own: _Own, of: str) -> int:
    """Raises the errors of the call itself, before the library sees a part of it; returns reserved_sms."""
    check_shapes(call)
    facts = facts_of(call.of_caller, call.plan, size_of(own.levels))
    if (against := reason_against(own.method, facts)) is not None:
        raise ValueError(against)
    return sms_for_transfers(own.method, facts, of == "backward")


def run_forward(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    own = _Own(given)
    of_caller = _call_of(q, k, v, given)
    drawn = of_caller.arrays["rng"] if own.draw else None
    if drawn is not None:
        of_caller.arrays["rng"] = torch.empty_like(drawn, device=q.device)
    with torch.no_grad():
        made = _started(of_caller, own, "forward", METHODS[own.method].Forward, drawn)
        out, lse, saved = made.run()
    return out, lse, [*saved, *([of_caller.arrays["rng"]] if own.draw else [])]


def run_backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    saved: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **given: Any,
) -> list[Tensor]:
    own = _Own(given)
    of_caller = _call_of(q, k, v, given)
    as_given = of_caller.arrays
    of_caller = of_caller.on({name: _exact(x) if name in CAPTURED and name in own.needs else x for name, x in as_given.items()})
    if own.draw:
        *saved, of_caller.arrays["rng"] = saved
    if dlse is None and own.method in ("heads", "levels"):  # another rank's loss may have used lse: all exchange the same tensors
        dlse = torch.zeros_like(lse)
    known: Results = {"dout": dout, "out": out, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
    with torch.no_grad():
        made = _started(of_caller, own, "backward", lambda call: METHODS[own.method].Backward(call, known, saved))
        found = made.run()
    return [_as_given(found[f"d{name}"], as_given[name]) for name in _NAMES if name in own.needs]


def _call_of(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> Call:
    texts = given.pop("functions", None) or ()
    return call_of((q, k, v), given | {field: text for field, text in zip(FUNCTIONS.values(), texts, strict=False) if text})


def _exact(x: Tensor) -> Tensor:
    """x in a dtype in which several gradients can be added up."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _as_given(gradient: Tensor, of: Tensor) -> Tensor:
    return gradient.reshape(of.shape).to(of.dtype).contiguous()


@torch.library.register_fake(FORWARD_NAME)
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    own = _Own(given)
    call = _call_of(q, k, v, given)
    found = call.results()
    return (
        found["out"],
        found["lse"],
        [*_fake_saved(call, own, found["lse"]), *([torch.empty_like(call.arrays["rng"], device=q.device)] if own.draw else [])],
    )


def _fake_saved(of_caller: Call, own: _Own, lse: Tensor) -> list[Tensor]:
    if own.method == "ring":
        return [lse.new_empty((2, *lse.shape))]
    if own.method == "gather":
        return []
    plan = plan_of_shardings(own.sharding_q, own.sharding_k, CU[0] in of_caller.arrays)
    call = RankCall(of_caller, plan, own.rank, Waits(own.group, None), own.needs)
    size = size_of(own.levels) if own.method == "levels" else own.world
    members = range(own.rank // size * size, (own.rank // size + 1) * size)
    whole = []
    for x, sharding in ((call.q, own.sharding_q), (call.k, own.sharding_k), (call.v, own.sharding_k)):
        rows = call.rows(x)
        tokens, heads = sum(sharding.count(r) for r in members), rows.shape[-2] // size
        whole.append(call.tokens(rows.new_empty((tokens, *rows.shape[1:-2], heads, rows.shape[-1]))))
    found = Call(
        TORCH, dict(zip("qkv", whole, strict=True)), {name: x for name, x in of_caller.options.items() if name == "bshd"}
    ).results()
    whole += [found["out"], found["lse"]]
    return whole


@torch.library.register_fake(BACKWARD_NAME)
def _fake_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, saved: list[Tensor], q: Tensor, k: Tensor, v: Tensor, **given: Any
) -> list[Tensor]:
    arrays = _call_of(q, k, v, {name: x for name, x in given.items() if name not in _OWN_NAMES}).arrays
    return [arrays[name].new_empty(arrays[name].shape) for name, needed in zip(_NAMES, given["needed"], strict=True) if needed]


class _DistributedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, given: dict[str, Any], *captured: Tensor
    ) -> tuple[Tensor, ...]:
        out, lse, saved = _forward_below_autograd(q, k, v, given | {"captured": captured})
        arrays = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        ctx.count = len(captured)
        ctx.rest = {name: x for name, x in given.items() if name not in arrays}
        ctx.names = tuple(arrays)
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, q, k, v, *captured, *arrays.values(), *saved)
        return out, lse, *saved

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        out, lse, q, k, v, *more = ctx.saved_tensors
        count = ctx.count
        captured, arrays, saved = more[:count], more[count : count + len(ctx.names)], more[count + len(ctx.names) :]
        if dout is None:
            dout = torch.zeros_like(out)
        n, rest, names = len(saved), ctx.rest, ctx.names  # not ctx itself, which compute() would keep alive

        def compute(tensors: tuple[Any, ...]) -> list[Tensor]:
            dout, dlse, out, lse, *more = tensors
            saved, (q, k, v), captured = more[:n], more[n : n + 3], more[n + 3 : n + 3 + count]
            given = dict(zip(names, more[n + 3 + count :], strict=True)) | {"captured": captured}
            return _differentiable_backward(dout, dlse, out, lse, saved, q, k, v, **rest, **given)

        tensors = dout, dlse, out, lse, *saved, q, k, v, *captured, *arrays
        found = iter(
            DifferentiatedOnce.apply("strobe.distributed.attention", "second", compute, *tensors)
            if is_tracked(*tensors)
            else compute(tensors)
        )
        gradients = [next(found) if needed else None for needed in rest["needed"]]
        return *gradients[:_BEFORE_CAPTURED], None, *gradients[_BEFORE_CAPTURED : _BEFORE_CAPTURED + count]


def _differentiable_forward(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    bias, sinks, captured = given.get("bias"), given.get("sinks"), given.get("captured") or ()
    if not is_tracked(q, k, v, bias, sinks, *captured):
        return _forward_below_autograd(q, k, v, given)
    rest = {name: x for name, x in given.items() if name != "captured"}
    out, lse, *saved = _DistributedAttention.apply(q, k, v, bias, sinks, rest, *captured)
    return out, lse, saved


def _differentiable_backward(*arguments: Any, **given: Any) -> list[Tensor]:
    tensors = *arguments, *given.values(), *(given.get("captured") or ())
    return below_autograd(tensors, run_backward, backward, *arguments, **given)


def _forward_below_autograd(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor, list[Tensor]]:
    tensors = q, k, v, *given.values(), *(given.get("captured") or ())
    return below_autograd(tensors, run_forward, forward, q, k, v, **given)


def run(call: Call, **own: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The forward, differentiable. own: the operator's own arguments."""
    given = {name: x for name, x in (call.arrays | call.options).items() if name not in ("q", "k", "v", *CAPTURED, *FUNCTIONS.values())}
    if any(field in call.options for field in FUNCTIONS.values()):
        given["functions"] = [call.options.get(field, "") for field in FUNCTIONS.values()]
        given["captured"] = [call.arrays[name] for name in CAPTURED if name in call.arrays]
    q, k, v = (call.arrays[name] for name in "qkv")
    return (forward if is_seen_by_dispatcher() else _differentiable_forward)(q, k, v, **given, **own)


def names_of(tensors: Iterable[str]) -> list[bool]:
    """The flags that `needed` takes."""
    chosen = [*tensors]
    return [name in chosen for name in _NAMES]


torch.library.impl(FORWARD_NAME, "CompositeExplicitAutograd", run_forward)
torch.library.impl(BACKWARD_NAME, "CompositeExplicitAutograd", run_backward)
torch.library.impl(FORWARD_NAME, "Autograd", _differentiable_forward)
torch.library.impl(BACKWARD_NAME, "Autograd", _differentiable_backward)
