"""strobe.distributed.attention()."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import _eager, _function, _prepared
from .._abi import graph_break, is_traced_by_dynamo, outside_graphs
from .._attention import CONTEXTS, OUTSIDE
from .._autograd import is_seen_by_dispatcher, refuse_tracked_slopes, without_masks_captures
from .._call import Call
from .._checks import Wrong, check_names, flag, is_choice, number, refusal
from .._function import CAPTURED
from .._function import FIELDS as FUNCTIONS
from .._messages import kind, shown
from .._options import ELSEWHERE, ROWS, parameters
from .._parse import read
from .._tensor_checks import tensor_refusal
from ..arrays.torch import TORCH
from . import _dtensor, _operators
from ._agree import Said, Signature, agree
from ._call import Facts, facts_beside_plan, facts_of
from ._group import Levels, groups_of
from ._late import leave
from ._methods import METHODS, choose
from ._ranges import count
from ._seen import Band
from ._sharding import Sharding, cumulated, host_integers, in_short

_LONGEST = 1e6  # seconds that a rank may be asked to wait
_LAYOUTS = ("bhsd", "bshd")
# A call with other options has no key: alibi_slopes are checked for a gradient each time.
_OF_KEYS = ROWS.keys() - {"alibi_slopes"} | {*FUNCTIONS.values(), *CAPTURED}
_NAMES = ROWS.keys() | {"sharding", "sharding_k", "group", "mesh", "method"}
_HINTS = ELSEWHERE | {
    "aux": "max_logit and column_sums belong to whole rows and columns, of which each rank has a part",
    "axes": "did you mean layout, the order of the axes?",
    "dropout_p": "did you mean dropout?",
    "layout_k": "did you mean sharding_k?",
}
# explain() lacks some arguments of attention().
_HINTS_OF_EXPLAIN = _HINTS | dict.fromkeys(("agree", "return_lse", "time_limit"), "leave it out: explain() tells the same with any")


class Context(NamedTuple):
    """The arguments that attention() takes from a context_parallel() if no sharding is given. Contexts lie in _attention.CONTEXTS, which
    the whole process sees, its backward threads included, like PyTorch's replaced functions."""

    sharding: Sharding
    group: ProcessGroup
    method: str | None
    whole_keys: frozenset[int]  # lengths of keys that are not sharded
    attention: Callable[..., Any]  # attention(), for modules that this one is built on


class ParsedCall(NamedTuple):
    """A call that is ready for the operator."""

    call: Call
    shardings: tuple[Sharding, Sharding]
    method: str
    draw: bool


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sharding: Sharding | None = None,
    sharding_k: Sharding | None = None,
    group: ProcessGroup | None = None,
    mesh: Any = None,
    method: str | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    agree: bool = True,
    time_limit: float | None = None,
    **options: Any,
) -> Any:
    """strobe.attention() for sequences whose tokens lie on several ranks of a process group. All ranks of the group call it.

    Every option has its meaning in strobe.attention() for the whole sequences. Each rank has the rows of q, k and v that the sharding
    gives it, and gets its rows of the result. It is differentiable once in q, k, v, bias, sinks and what a function of the score reads,
    under torch.compile as well; all ranks then differentiate. Gradients of tensors that all ranks share (sinks, a bias whose rows are
    broadcast, what functions read) are local parts, to be added up over the ranks, as those of parameters are.

    Args:
        q: the rank's rows, (B, H, Sq, D), (B, Sq, H, D) with layout "bshd", or (Tq, H, D) packed; as strobe.attention() takes it.
        k, v: the rank's rows of keys and values, likewise.
        sharding: which rank has which queries: a strobe.distributed.Sharding of the group's size. None: that of the context_parallel() that
            the call is in, and its group.
        sharding_k: which rank has which keys. None: the same.
        group: the process group. None: the default one.
        mesh: instead of group a DeviceMesh of one dimension, or of two: nodes, and the ranks of a node. The sharding then counts ranks node
            by node.
        method: "gather", "heads", "ring" or "levels": how keys and queries meet. None: with a mesh of two dimensions "levels" if it takes
            the call, else the one with the least predicted time; explain() shows it.
        layout: "bhsd" or "bshd", the order of the axes of q, k, v and the output, as in strobe.attention().
        return_lse: True returns (out, lse).
        agree: before the first transfer, forward and backward, the ranks tell one another whether their arguments are valid and the same,
            and whether they have memory: an error on one is raised on all. False saves two small messages in a step, and no rank is told: a
            rank whose arguments are wrong raises, and the others wait for it until the time limit.
        time_limit: seconds for which a rank waits for the others; the error then names those that did not come. The error may come
            later than that, by up to time_limit + 2 seconds, because a rank that came late says so when its own limit ends. None: the
            group's own. On a GPU the stream waits for a transfer, and the limit is the group's.
        mask, bias: rows for the rank's own queries, or broadcast, and columns for all keys: (B or 1, H or 1, rows of q or 1, Sk or 1).
        cu_seqlens_q, cu_seqlens_k: those of the whole axes, not of this rank's tokens (tokens past the last number are padding, whose rows
            are zeros), in host memory or where q lies; on a GPU they are read, which waits for it. The sizes of mask and bias are the
            longest sequence's, or max_seqlen_k.
        deterministic: True, or "world": the bits of out, lse, dq, dk and dv do not depend on the number of ranks and the sharding, and are
            those of strobe.attention(invariant=True, deterministic=True). Only method "heads" supports it, without dropout.
        seed, offset, rng: the same on all ranks. Without them the group's first rank draws, from its default generator on the CPU (the
            other ranks draw as well, and their draws are not used).
        options: all others are those of strobe.attention(), the same on all ranks. part is refused, because the sharding determines it.
            With more than one rank, seqused_k and invariant need method "heads". Functions of the score and the mask see b, h, i and j
            of the whole problem, and tensors that they read lie on every rank as a whole; of DTensors Replicate() placements are accepted.

    Returns:
        out: the rank's rows, in q's dtype. lse, if asked for: (B, H, Sq) or (H, Tq) of the rank's rows.

    Raises:
        The errors of strobe.attention(), on all ranks alike; "[rank 1 of 4]" says whose arguments are wrong.
        RuntimeError: a rank did not come, or a transfer failed.
    """
    if is_traced_by_dynamo() and _function.in_options(options):
        graph_break(OUTSIDE.format("strobe.distributed.attention"))
        own: dict[str, Any] = {"sharding": sharding, "sharding_k": sharding_k, "group": group, "mesh": mesh, "method": method}
        own |= {"layout": layout, "return_lse": return_lse, "agree": agree, "time_limit": time_limit}
        return outside_graphs(attention)(q, k, v, **own, **options)
    try:
        group, levels, sharding, method = in_context(group, mesh, sharding, method)
    except Exception as failure:
        leave(failure)
        raise
    wants = [agree, time_limit, return_lse]
    try:
        parsed = prepare("attention", group, levels, q, k, v, sharding, sharding_k, method, layout, wants, dict(options))
    except Exception as failure:  # whatever its type is, the others must be told
        if group.size() > 1 and agree is not False:
            raise_on_all(group, failure, time_limit)
        raise
    call = without_masks_captures(parsed.call.on(TORCH.autocast(parsed.call.arrays)))
    needed = [name for name, x in call.arrays.items() if x.requires_grad and torch.is_grad_enabled()]
    out, lse, _ = _operators.run(
        call,
        sharding_q=parsed.shardings[0].encoded,
        sharding_k=parsed.shardings[1].encoded,
        names=(parsed.method, group.group_name, *((levels.inside, levels.across) if levels else ())),
        agree=bool(agree),
        time_limit=time_limit,
        draw=parsed.draw,
        needed=_operators.names_of(needed),
    )
    return (out, lse) if return_lse else out


def in_context(
    group: ProcessGroup | None, mesh: Any, sharding: Any, method: str | None
) -> tuple[ProcessGroup, Levels | None, Any, str | None]:
    """The group, sharding and method of the call; without a sharding, those of context_parallel()."""
    if sharding is None and CONTEXTS:
        context = CONTEXTS[-1]
        own = (context.group, None) if group is None and mesh is None else groups_of(group, mesh)
        return *own, context.sharding, method or context.method
    return *groups_of(group, mesh), sharding, method


def raise_on_all(group: ProcessGroup, failure: Exception, time_limit: Any) -> None:
    """Raises this rank's failure on all ranks."""
    limit = time_limit if isinstance(time_limit, (int, float)) and not isinstance(time_limit, bool) and 0 < time_limit <= _LONGEST else None
    agree(group, Said(Signature({}), failure), limit)


def prepare(
    function: str,
    group: ProcessGroup,
    levels: Levels | None,
    q: Any,
    k: Any,
    v: Any,
    sharding: Any,
    sharding_k: Any,
    method: Any,
    layout: Any,
    wants: list[Any],
    options: dict[str, Any],
) -> ParsedCall:
    """Makes the checks that do not need the library, which sees the call of the rank's own rows later. They are skipped for a repeated call
    on tensors of the same shapes and strides. function: "attention" or "explain", for messages."""
    with _dtensor.captured_as(_dtensor.whole):
        return _prepared_call(
            function,
            group,
            levels,
            _Asked(q, k, v, sharding, sharding if sharding_k is None else sharding_k, method, layout, wants, options),
        )


def _prepared_call(function: str, group: ProcessGroup, levels: Levels | None, asked: _Asked) -> ParsedCall:
    q, k, v, options = asked.q, asked.k, asked.v, asked.options
    fields: dict[str, Any] | None = options
    if _function.functions_in(options):  # which have no key, but their recordings have one
        fields = _function.as_fields(options, TORCH, q) if isinstance(q, Tensor) and not is_seen_by_dispatcher() else None
    arrays = {"q": q, "k": k, "v": v} | {name: x for name, x in (fields or {}).items() if isinstance(x, Tensor)}
    key = None if fields is None else _key(group, levels, asked._replace(options=fields))
    if key is not None and (known := _prepared.CALLS.get(key)) is not None:
        return known._replace(call=known.call.on(arrays))
    parsed = _judge(function, group, levels, asked)
    given = parsed.call.arrays
    # A call is remembered only if none of its tensors is a new object each time.
    if key is not None and [*given] == [*arrays] and all(x is arrays[name] for name, x in given.items()):
        _prepared.CALLS.keep(key, parsed._replace(call=parsed.call.on({})))
    return parsed


class _Asked(NamedTuple):
    """The caller's arguments."""

    q: Any
    k: Any
    v: Any
    sharding: Any
    sharding_k: Any
    method: Any
    layout: Any
    wants: list[Any]  # agree, time_limit, return_lse
    options: dict[str, Any]


def _key(group: ProcessGroup, levels: Levels | None, asked: _Asked) -> bytes | None:
    """The bytes that determine whether the call is valid, and which method it takes; None if that depends on more than these arguments."""
    shardings = asked.sharding, asked.sharding_k
    if is_seen_by_dispatcher() or not asked.options.keys() <= _OF_KEYS or not all(isinstance(sharding, Sharding) for sharding in shardings):
        return None
    own = dict(zip(("agree", "time_limit", "return_lse"), asked.wants, strict=True)) | {"method": asked.method, "layout": asked.layout}
    own |= {"sharding_q": shardings[0].digest, "sharding_k": shardings[1].digest}
    lists = {name: x for name in _operators.CU if (x := asked.options.get(name)) is not None}
    if not all(_is_list(x) and x.layout == torch.strided and not x.is_meta for x in lists.values()):
        return None
    own |= {f"numbers of {name}": in_short(host_integers(name, x)) for name, x in lists.items()}
    prefix = f"distributed {group.rank()} {group.size()} {_operators.size_of(levels)}".encode()
    return _eager.key(prefix, (asked.q, asked.k, asked.v), own, asked.options)


def _judge(function: str, group: ProcessGroup, levels: Levels | None, asked: _Asked) -> ParsedCall:
    q, k, v, sharding, sharding_k, method, layout, wants, options = asked
    wrong: Wrong = []
    world, rank = group.size(), group.rank()
    flag(wrong, "agree", wants[0])
    if wants[1] is not None and not 0 < number(wrong, "time_limit", wants[1]) <= _LONGEST and not wrong:
        wrong.append(ValueError(f"time_limit: {shown(wants[1])}; accepted are seconds above 0, up to {_LONGEST:.0f}, or None"))
    flag(wrong, "return_lse", wants[2])
    if isinstance(layout, Sharding):
        wrong.append(TypeError("layout: a Sharding; accepted is 'bhsd' or 'bshd'; which rank has which tokens goes into sharding"))
    else:
        is_choice(wrong, "layout", layout, _LAYOUTS)
    if method is not None:
        is_choice(wrong, "method", method, METHODS)
    shardings = _shardings(wrong, sharding, sharding_k, world)
    if options.pop("part", None) is not None:
        wrong.append(ValueError("part: given; accepted is None, for the sharding says it"))
    if options.pop("page_table", None) is not None:
        wrong.append(ValueError("page_table: given; accepted is None, for keys of several ranks do not lie in one rank's pages"))
    for name in ("q_scale", "k_scale", "v_scale", "out_dtype"):
        if options.pop(name, None) is not None:
            wrong.append(ValueError(f"{name}: given; accepted is None, for quantised tensors are not sent between ranks"))
    check_names(function, options, wrong, _NAMES, _HINTS_OF_EXPLAIN if function == "explain" else _HINTS)
    of_world = options.get("deterministic") == _operators.WORLD and isinstance(options["deterministic"], str)
    if of_world:
        options |= {"deterministic": True, "invariant": True}
        if method not in (None, "heads"):
            wrong.append(ValueError(f"method: {shown(method)} beside deterministic 'world'; accepted is 'heads', or None"))
    elif isinstance(options.get("deterministic"), str):
        wrong.append(ValueError(f"deterministic: {shown(options.pop('deterministic'))}; accepted is True, False or 'world'"))
    for name, x in (("q", q), ("k", k), ("v", v)):
        refused = tensor_refusal(name, x)
        if refused is None and world > 1 and x.device.type == "meta":
            refused = ValueError(f"{name}: on the device meta; accepted is one that has memory, whose rows can be sent to other ranks")
        if refused is not None:
            wrong.append(refused)
    if wrong or shardings is None:
        raise refusal(wrong)
    return _parsed(function, q, k, v, shardings, method, layout, rank, options, of_world, _operators.size_of(levels))


def _parsed(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shardings: tuple[Sharding, Sharding],
    method: str | None,
    layout: str,
    rank: int,
    options: dict[str, Any],
    of_world: bool,
    inside: int,
) -> ParsedCall:
    wrong: Wrong = []
    lists = {name: options[name] for name in _operators.CU if options.get(name) is not None}
    if len(lists) == 1:
        (missing,) = set(_operators.CU) - lists.keys()
        raise ValueError(f"{missing}: missing beside {next(iter(lists))}; accepted are both, or none")
    compiling = torch.compiler.is_compiling()  # if so, numbers in tensors are not known
    cu = [] if compiling else [_cu_seqlens(name, x, sharding.seqlen) for (name, x), sharding in zip(lists.items(), shardings, strict=False)]
    if cu and len(cu[0]) != len(cu[1]):
        raise ValueError(f"cu_seqlens_k: {len(cu[1])} numbers; accepted are {len(cu[0])}, as cu_seqlens_q has")
    draw = bool(options.get("dropout")) and all(options.get(name) is None for name in ("seed", "rng"))
    given = options | {name: TORCH.beside(q, x) if isinstance(x, Tensor) else x for name, x in lists.items()} | {"layout": layout}
    if draw and options.get("offset") is None:
        given["seed"] = 0  # nothing is drawn
    call = read(function, q, k, v, given, wrong, _longest(shardings, cu) if cu or not lists else (None, None))
    if wrong:
        raise refusal(wrong)
    call.arrays.update(lists)
    if draw:
        call.options.pop("seed", None)
        call.arrays["rng"] = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device="cpu")
    axis = 0 if lists else 1 if layout == "bshd" else 2
    for name, x, sharding in (("q", q, shardings[0]), ("k", k, shardings[1]), ("v", v, shardings[1])):
        if x.shape[axis] != (n := count(sharding.ranges[rank])):
            hint = _hint(name, x, axis, n, sharding, bool(lists))
            raise ValueError(f"{name}: shape {tuple(x.shape)}; accepted are {n} tokens along axis {axis}, as the sharding says{hint}")
    _check_against(q, k, v, packed=bool(lists))
    head_axis = 1 if lists or layout == "bhsd" else 2
    heads, heads_kv = (x.shape[head_axis] for x in (q, k))
    if heads_kv == 0 or heads % heads_kv:
        raise ValueError(f"k: {heads_kv} heads; accepted is a divisor of q's {heads}")
    refuse_tracked_slopes(call.arrays)
    if compiling:
        band = tuple(_operators.band_of(call.options))
        facts = facts_beside_plan(call, bool(lists), inside)
        chosen, against = _chosen(shardings[0].encoded, shardings[1].encoded, bool(lists), band, facts, method, of_world)
    else:
        chosen, against = choose(facts_of(call, _operators.plan_of(call, *shardings), inside), method, of_world)
    if against is not None:
        raise ValueError(against)
    return ParsedCall(call, shardings, chosen, draw)


def _check_against(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    """The checks that must pass before rows are sent. The library makes the others."""
    wrong: Wrong = []
    if not packed and k.shape[0] != q.shape[0]:
        wrong.append(ValueError(f"k: shape {tuple(k.shape)}; accepted is a batch of {q.shape[0]}, as q has"))
    rows = k.shape[:-1] if packed else (q.shape[0], *k.shape[1:-1])
    if v.shape[:-1] != rows:
        accepted = ", ".join([*map(str, rows), "any"])
        wrong.append(ValueError(f"v: shape {tuple(v.shape)}; accepted is ({accepted}), as q and k have"))
    if wrong:
        raise refusal(wrong)


def _hint(name: str, x: Tensor, axis: int, tokens: int, sharding: Sharding, packed: bool) -> str:
    """A guess at what was meant by a tensor with a wrong number of tokens."""
    if x.shape[axis] == sharding.seqlen:
        return f"; sharding.shard({name}, {axis}) takes this rank's"
    if not packed and x.shape[3 - axis] == tokens:  # axis 2 of bhsd, axis 1 of bshd
        return f'; did you mean layout="{_LAYOUTS[axis - 1]}"?'
    return ""


@torch.compiler.assume_constant_result
def _chosen(
    sharding_q: tuple[int, ...],
    sharding_k: tuple[int, ...],
    packed: bool,
    band: tuple[Any, ...],
    facts: tuple[Any, ...],
    method: str | None,
    of_world: bool,
) -> tuple[str, str | None]:
    """choose() under a compiler, which does not know numbers: packed sequences count as one sequence, and a block mask is ignored."""
    shardings = _operators.decoded(sharding_q), _operators.decoded(sharding_k)
    plan = replace(_operators.plan_of_shardings(*shardings, packed), band=Band(*band))
    return choose(Facts(plan, *facts), method, of_world)


def _longest(shardings: tuple[Sharding, Sharding], cu: list[tuple[int, ...]]) -> list[int]:
    """The lengths of the longest whole sequences of queries and of keys."""
    if not cu:
        return [sharding.seqlen for sharding in shardings]
    return [max((b - a for a, b in itertools.pairwise(of)), default=0) for of in cu]


def _shardings(wrong: Wrong, sharding: Any, sharding_k: Any, world: int) -> tuple[Sharding, Sharding] | None:
    found = []
    for name, x in (("sharding", sharding), ("sharding_k", sharding_k)):
        if not isinstance(x, Sharding):
            hint = '; the order of the axes is layout="bshd"' if isinstance(x, str) else ""
            wrong.append(TypeError(f"{name}: {kind(x)}; accepted is a strobe.distributed.Sharding{hint}"))
            return None
        if x.world_size != world:
            wrong.append(ValueError(f"{name}: of {x.world_size} ranks; accepted is one of {world}, the group's size"))
            return None
        found.append(x)
    return found[0], found[1]


def _is_list(x: Any) -> bool:
    """Whether x is an int32 tensor of one axis, like cu_seqlens."""
    return isinstance(x, Tensor) and x.dtype == torch.int32 and x.dim() == 1 and len(x) > 0


def _cu_seqlens(name: str, x: Any, tokens: int) -> tuple[int, ...]:
    if not _is_list(x):
        what = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else kind(x)
        raise (ValueError if isinstance(x, Tensor) else TypeError)(f"{name}: {what}; accepted is a torch.Tensor of int32 (B + 1,)")
    return cumulated(name, x, tokens)


def _document() -> None:
    """Lets help() show every option with its default."""
    own = [x for x in inspect.signature(attention).parameters.values() if x.kind is not x.VAR_KEYWORD]
    more = [x for x in parameters() if x.name not in ("layout", "part")]
    attention.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]


_document()
