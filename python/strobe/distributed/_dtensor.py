"""strobe.attention() of DTensors whose batch or heads are sharded, as in tensor parallelism: each rank computes its own share."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._attention import attention
from .._blockmask import BlockMask
from .._call import BEFORE_PARSING
from .._function import PLACE, UnplacedError, in_options
from .._part import Part

try:
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
except ImportError:  # PyTorch before 2.5
    DTensor = None  # type: ignore[assignment, misc]


class Own(NamedTuple):
    """The rank's portion of the whole."""

    batch: range
    heads: range
    batches: int
    all_heads: int


def attention_of_dtensors(q: Any, k: Any, v: Any, return_lse: object, options: Mapping[str, Any]) -> Any:
    """The result of attention() for DTensors, called through _call.BEFORE_PARSING."""
    packed = options.get("cu_seqlens_q") is not None
    bshd = options.get("layout") == "bshd"
    batch_axis, head_axis = (None, 1) if packed else (0, 2 if bshd else 1)
    mesh, placements = q.device_mesh, tuple(q.placements)
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, DTensor):
            raise TypeError(f"{name}: {type(x).__name__}; accepted is a DTensor, as q is")
        if x.device_mesh != mesh or tuple(x.placements) != placements:
            raise ValueError(f"{name}: placements {tuple(x.placements)} on {x.device_mesh}; accepted are q's, {placements} on {mesh}")
    _check(q, k, placements, batch_axis, head_axis)
    if options.get("part") is not None:
        raise ValueError("part: given beside DTensors; accepted is None, for their placements say it")
    if options.get("page_table") is not None:
        raise ValueError("page_table: given beside DTensors; accepted is None, for the placements of pages say nothing of sequences")
    for name in ("q_scale", "k_scale", "v_scale"):
        if options.get(name) is not None:
            raise ValueError(f"{name}: given beside DTensors; accepted is None, for quantised tensors are not sent between ranks")
    local = [x.to_local() for x in (q, k, v)]
    own = _own(q, local[0], placements, batch_axis, head_axis)
    given = dict(options)
    for name in ("mask", "bias", "alibi_slopes", "sinks", "seqused_k", "rng", "cu_seqlens_q", "cu_seqlens_k"):
        x = given.get(name)
        if isinstance(x, DTensor):
            x = _whole(name, x, mesh, placements)
        elif isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: requires grad, and is no DTensor, as q is; accepted is a DTensor, to whose gradient all ranks add")
        if isinstance(x, Tensor):
            given[name] = _own_of(name, x, own)
    blocks = given.get("block_mask")
    of_several = isinstance(blocks, BlockMask) and max(blocks.shape[:2]) > 1
    if given.get("dropout") or of_several or in_options(given):  # all of them depend on indices of heads and batch
        if given.get("dropout") and given.get("seed") is None and given.get("rng") is None:
            raise ValueError("seed: missing beside dropout and DTensors; accepted is one that is the same on all ranks, or rng")
        given["part"] = _part(local, given, own, packed, bshd)
    with captured_as(lambda option, x: _captured(option, x, mesh, placements)):
        out, lse = attention(*local, return_lse=True, **given)
    shape = (*q.shape[:-1], v.shape[-1])
    made = _distributed(out, mesh, placements, shape)
    if not return_lse:
        return made
    rows = [n for n in range(len(shape) - 1) if n not in (batch_axis, head_axis)]
    axes = [*([] if packed else [0]), head_axis, *rows]  # q's axes in the order of lse's
    of_lse = tuple(Shard(axes.index(x.dim)) if isinstance(x, Shard) else x for x in placements)
    return made, _distributed(lse, mesh, of_lse, tuple(shape[axis] for axis in axes))


def _check(q: Any, k: Any, placements: Sequence[Placement], batch_axis: int | None, head_axis: int) -> None:
    for n, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard) or placement.dim not in (batch_axis, head_axis):
            axes = f"Shard({head_axis})" if batch_axis is None else f"Shard({batch_axis}), Shard({head_axis})"
            raise ValueError(
                f"q: placement {placement} on dimension {n} of the mesh; accepted are Replicate(), {axes}: batch and heads. Sequences that "
                "are sharded are for strobe.distributed.attention()"
            )
    for axis in {x.dim for x in placements if isinstance(x, Shard)}:
        ranks = 1
        for n, placement in enumerate(placements):
            ranks *= q.device_mesh.size(n) if isinstance(placement, Shard) and placement.dim == axis else 1
        for name, x in (("q", q), ("k", k)):
            if x.shape[axis] % ranks:
                what = "heads" if axis == head_axis else "sequences"
                raise ValueError(f"{name}: {x.shape[axis]} {what} on {ranks} ranks; accepted is a multiple of {ranks}")


def _own(q: Any, local: Tensor, placements: Sequence[Placement], batch_axis: int | None, head_axis: int) -> Own:
    def along(axis: int) -> range:
        """The rank's range of an axis: dimensions of the mesh shard it one after the other."""
        place = 0
        for n, placement in enumerate(placements):
            if isinstance(placement, Shard) and placement.dim == axis:
                place = place * q.device_mesh.size(n) + q.device_mesh.get_local_rank(n)
        return range(place * local.shape[axis], (place + 1) * local.shape[axis])

    batch = range(0) if batch_axis is None else along(batch_axis)
    return Own(batch, along(head_axis), 0 if batch_axis is None else q.shape[batch_axis], q.shape[head_axis])


def _whole(name: str, x: Any, mesh: Any, placements: Sequence[Placement]) -> Tensor:
    """All of x on each rank. If q is sharded, each rank's gradient is one addend of the whole gradient."""
    if x.device_mesh != mesh:
        raise ValueError(f"{name}: on {x.device_mesh}; accepted is q's mesh, {mesh}")
    parts = [Partial() if isinstance(placement, Shard) else Replicate() for placement in placements]
    return x.redistribute(mesh, [Replicate()] * len(placements)).to_local(grad_placements=parts)


@contextlib.contextmanager
def captured_as(place: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Within, what functions of the score and the mask capture is replaced by place(option, it)."""
    before, PLACE.of = PLACE.of, place
    try:
        yield
    finally:
        PLACE.of = before


def whole(_: str, x: Tensor) -> Tensor:
    """A captured tensor, of which a DTensor has to lie on each rank as a whole. All ranks of its mesh add to its gradient."""
    if DTensor is None or not isinstance(x, DTensor):
        return x
    return _replicated(x).to_local(grad_placements=[Partial()] * x.device_mesh.ndim)


def _captured(option: str, x: Tensor, mesh: Any, placements: Sequence[Placement]) -> Tensor:
    """What a function captures beside DTensors with these placements: of a DTensor the whole, to whose gradient all ranks add."""
    if isinstance(x, DTensor):
        if x.device_mesh != mesh:
            raise UnplacedError(f"a DTensor of shape {tuple(x.shape)} on {x.device_mesh}; accepted is q's mesh, {mesh}")
        return _replicated(x).to_local(grad_placements=[Partial() if isinstance(of, Shard) else Replicate() for of in placements])
    if option == "score" and x.requires_grad and torch.is_grad_enabled():
        words = f"a tensor of shape {tuple(x.shape)} that requires grad and is no DTensor, as q is"
        raise UnplacedError(f"{words}; accepted is a DTensor, to whose gradient all ranks add")
    return x


def _replicated(x: Any) -> Any:
    if all(isinstance(placement, Replicate) for placement in x.placements):
        return x
    words = f"a DTensor of shape {tuple(x.shape)} with placements {tuple(x.placements)}"
    raise UnplacedError(f"{words}; accepted is Replicate() alone: each rank reads all of it")


def _own_of(name: str, x: Tensor, own: Own) -> Tensor:
    """This rank's sequences and heads of a tensor that has all of them."""
    if name in ("mask", "bias"):
        x = x[(None,) * (4 - x.dim())]
        x = x.narrow(0, own.batch.start, len(own.batch)) if own.batches and x.shape[0] > 1 else x
        return x.narrow(1, own.heads.start, len(own.heads)) if x.shape[1] > 1 else x
    if name in ("alibi_slopes", "sinks") and x.dim():
        x = x.narrow(-1, own.heads.start, len(own.heads))
        return x.narrow(0, own.batch.start, len(own.batch)) if x.dim() > 1 and own.batches else x
    return x.narrow(0, own.batch.start, len(own.batch)) if name == "seqused_k" and own.batches else x


def _part(local: Sequence[Tensor], given: Mapping[str, Any], own: Own, packed: bool, bshd: bool) -> Part:
    """A Part of whole sequences that says which heads and sequences of the whole problem this rank has."""
    if packed:
        lengths = [[b - a for a, b in itertools.pairwise(cu)] for cu in (given[f"cu_seqlens_{side}"].tolist() for side in "qk")]
        ranges: list[Any] = [[[(0, n)] for n in of] for of in lengths]
    else:
        axis = 1 if bshd else 2
        lengths = [[x.shape[axis]] for x in local[:2]]
        ranges = [[(0, of[0])] for of in lengths]
    return Part(ranges[0], ranges[1], lengths[0], lengths[1], first_head=own.heads.start, heads=own.all_heads, first_batch=own.batch.start)


def _distributed(local: Tensor, mesh: Any, placements: Sequence[Placement], shape: tuple[int, ...]) -> Any:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


if DTensor is not None:
    BEFORE_PARSING[DTensor] = attention_of_dtensors
