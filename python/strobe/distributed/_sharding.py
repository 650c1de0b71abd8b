"""The assignment of tokens to ranks."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._blockmask import BlockMask
from .._checks import Wrong, is_integer, is_whole, refusal
from .._messages import kind, shown
from .._options import ROWS
from .._part import Part
from .._refusals import refusing
from .._tensor_checks import tensor_refusal
from ._group import rank_in
from ._ranges import Ranges, count, indices, union, within
from ._seen import Band, work_before

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_MOST = 2**63 - 1
_MOST_RANKS = 1 << 20  # a sharding lists the ranges of each
_GRAINS = (4, 16, 64)  # numbers of blocks per rank; balanced() takes the best
_CLOSE = 1.03  # a sharding with fewer ranges is preferred if its largest share of the work is larger by no more than this


def in_short(numbers: Sequence[int]) -> str:
    """A digest for the key of a call, which has no room for the numbers of many ranks or sequences."""
    return hashlib.sha256(array("q", numbers).tobytes()).hexdigest()


@dataclass(frozen=True)
class Sharding:
    """Assigns the tokens of an axis to ranks, each token to one of them: the sequence axis, or that of packed tokens.

    A rank's tokens are ranges of positions, in ascending order. Ranks may have different numbers of tokens, or none. In functions that take
    a rank, None means this process's rank in `group`, and a group of None means the default one, which must have the sharding's size.

    Args:
        seqlen: the length of the axis.
        ranges: for each rank its ranges (start, length). Together they have each position from 0 to seqlen - 1 once.

    Raises:
        TypeError, ValueError: an argument has a wrong kind or value.
    """

    seqlen: int
    ranges: tuple[Ranges, ...]
    encoded: tuple[int, ...] = field(init=False, repr=False, compare=False)  # the sharding in the operators' form
    digest: str = field(init=False, repr=False, compare=False)  # stands for the sharding in keys of calls

    def __post_init__(self) -> None:
        wrong: Wrong = []
        is_integer(wrong, "seqlen", self.seqlen, 0, _MOST)
        if not isinstance(self.ranges, (tuple, list)) or not all(map(_is_ranges, self.ranges)) or not self.ranges:
            wrong.append(ValueError(f"ranges: {shown(self.ranges)}; accepted is for each rank a sequence of (start, length)"))
        if wrong:
            raise refusal(wrong)
        ranges = tuple(union((int(start), int(length)) for start, length in of) for of in self.ranges)
        lengths = [int(length) for of in self.ranges for _, length in of]
        if (
            sum(lengths) != self.seqlen
            or min(lengths, default=0) < 0
            or union(each for of in ranges for each in of) != union([(0, self.seqlen)])
        ):
            whole = f"each position from 0 to {self.seqlen - 1} once" if self.seqlen else "no position, for seqlen is 0"
            raise ValueError(f"ranges: {shown(self.ranges)}; accepted are ranges that have {whole}")
        object.__setattr__(self, "seqlen", int(self.seqlen))
        object.__setattr__(self, "ranges", ranges)
        numbers = [x for of in ranges for x in (len(of), *itertools.chain(*of))]
        object.__setattr__(self, "encoded", (self.seqlen, len(ranges), *numbers))
        object.__setattr__(self, "digest", in_short(self.encoded))

    @property
    def world_size(self) -> int:
        return len(self.ranges)

    @classmethod
    def contiguous(cls, seqlen: int, world_size: int) -> Sharding:
        """Each rank has one range, in the order of the ranks; their lengths differ by 1 at most. Suits windows that are short beside
        seqlen, and attention that is not causal.

        Args:
            seqlen: the number of tokens.
            world_size: the number of ranks, up to 1,048,576.
        """
        seqlen, world_size = _checked(seqlen, world_size)
        return cls(seqlen, tuple(((begin, end - begin),) for begin, end in _cuts(seqlen, world_size)))

    @classmethod
    def zigzag(cls, seqlen: int, world_size: int) -> Sharding:
        """Divides the axis into 2 · world_size blocks; rank r has blocks r and 2 · world_size - 1 - r: a causal mask then leaves each rank
        the same work.

        Args:
            seqlen: the number of tokens. It need not be a multiple of anything: the lengths of blocks differ by 1 at most.
            world_size: the number of ranks, up to 1,048,576.
        """
        seqlen, world_size = _checked(seqlen, world_size)
        blocks = [(begin, end - begin) for begin, end in _cuts(seqlen, 2 * world_size)]
        return cls(seqlen, tuple((blocks[r], blocks[-1 - r]) for r in range(world_size)))

    @classmethod
    def balanced(
        cls,
        seqlen: int,
        world_size: int,
        cu_seqlens: Any = None,
        window: int | tuple[int | None, int | None] | None = None,
        block_mask: BlockMask | None = None,
        *,
        causal: bool = True,
    ) -> Sharding:
        """The sharding that gives the ranks nearly the same work, and nearly as many tokens each: contiguous or zigzag if one of them does,
        else blocks of tokens that are dealt out, those with most work first.

        Args:
            seqlen: the number of tokens.
            world_size: the number of ranks, up to 1,048,576.
            cu_seqlens: for packed sequences (B + 1,), integers or an array in host memory; None: one sequence.
            window, causal: those of the attention. Queries and keys are the same tokens.
            block_mask: that of the attention, with its lengths.

        Raises:
            TypeError, ValueError: an argument is not as described above.
        """
        seqlen, world_size = _checked(seqlen, world_size)
        starts = cumulated("cu_seqlens", cu_seqlens, seqlen) if cu_seqlens is not None else (0, seqlen)
        band = _band(starts, causal, window, block_mask, packed=cu_seqlens is not None)
        before = work_before(seqlen, starts, band, block_mask)

        def most(sharding: Sharding) -> int:
            return max(sum(before(start + n) - before(start) for start, n in of) for of in sharding.ranges)

        plain = [cls.contiguous(seqlen, world_size), cls.zigzag(seqlen, world_size)]
        candidates = [*plain, *(cls._dealt(seqlen, world_size, grain, before) for grain in _GRAINS)]
        least = min(map(most, candidates))
        return next(sharding for sharding in candidates if most(sharding) <= least * _CLOSE)

    @classmethod
    def _dealt(cls, seqlen: int, world_size: int, grain: int, before: Callable[[int], int]) -> Sharding:
        """Deals blocks, those with most work first, each to the rank with the least work among the ranks that have room for one more."""
        blocks = [(begin, end) for begin, end in _cuts(seqlen, grain * world_size) if end > begin]
        room = -(-len(blocks) // world_size)
        work, ranges = [0] * world_size, [[] for _ in range(world_size)]  # type: tuple[list[int], list[list[tuple[int, int]]]]
        for begin, end in sorted(blocks, key=lambda block: before(block[0]) - before(block[1])):
            r = min((r for r in range(world_size) if len(ranges[r]) < room), key=lambda r: work[r])
            work[r] += before(end) - before(begin)
            ranges[r].append((begin, end - begin))
        return cls(seqlen, tuple(map(tuple, ranges)))

    def count(self, rank: int | None = None, *, group: ProcessGroup | None = None) -> int:
        """How many tokens a rank has."""
        return count(self.ranges[self._rank(rank, group)])

    def positions(self, rank: int | None = None, *, group: ProcessGroup | None = None) -> Tensor:
        """The positions of a rank's tokens, ascending: int64 (count,), in host memory."""
        return indices(self.ranges[self._rank(rank, group)])

    def shard(self, x: Tensor, dim: int, rank: int | None = None, *, group: ProcessGroup | None = None) -> Tensor:
        """A rank's tokens of a tensor that has all of them along `dim`: a view if they are one range, else a copy. Differentiable.

        Raises:
            TypeError, ValueError: x is not a dense torch.Tensor, or has another length along `dim`; or dim or rank is not one.
        """
        _check_tokens("x", x, dim, self.seqlen)
        pieces = [x.narrow(dim, start, length) for start, length in self.ranges[self._rank(rank, group)]]
        if len(pieces) == 1:
            return pieces[0]
        return x.index_select(dim, self.positions(rank, group=group).to(x.device))

    def join(self, shards: Sequence[Tensor] | Tensor, dim: int) -> Tensor:
        """All tokens, in their order, from tensors that each have a rank's tokens along `dim`, in the order of the ranks, or one tensor
        that stacks them. Differentiable.

        Raises:
            TypeError, ValueError: shards are not one dense torch.Tensor for each rank, with its number of tokens along `dim`, and of one
                dtype, on one device, with the same other axes; or dim is not one.
        """
        if not isinstance(shards, (Sequence, Tensor)) or (isinstance(shards, Tensor) and not shards.dim()):
            raise refusing(TypeError, "shards", f"{kind(shards)}; accepted is a sequence of torch.Tensor, one for each rank")
        if isinstance(shards, Tensor) and (refused := tensor_refusal("shards", shards)) is not None:
            raise refused
        if len(shards) != self.world_size:
            raise refusing(ValueError, "shards", f"{len(shards)} of them; accepted are {self.world_size}, one for each rank")
        first = shards[0]
        for r, x in enumerate(shards):
            _check_tokens(f"shards[{r}]", x, dim, count(self.ranges[r]), first)
        order = indices([each for of in self.ranges for each in of])
        return torch.cat([*shards], dim).index_select(dim, order.argsort().to(first.device))

    def unshard(self, x: Tensor, dim: int, *, group: ProcessGroup | None = None) -> Tensor:
        """All tokens of a tensor of which each rank of the group has its own along `dim`. A collective call; not differentiable.

        Raises:
            ValueError: x has another length along `dim`, or requires a gradient: x.detach() is then accepted.
        """
        from ._exchange import gathered

        rank = self._rank(None, group)
        _check_tokens("x", x, dim, count(self.ranges[rank]))
        if x.requires_grad:
            raise ValueError("x: requires grad, and unshard() has no gradient; accepted is x.detach()")
        return self.join(gathered(x, dim, [count(of) for of in self.ranges], group), dim)

    def part(
        self,
        rank: int | None = None,
        *,
        keys: Sharding | None = None,
        k_rank: int | None = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        group: ProcessGroup | None = None,
    ) -> Part:
        """The strobe.Part of a call whose queries are a rank's, of this sharding.

        Args:
            rank: the rank whose queries the call has.
            keys: the sharding of the keys; None: this one.
            k_rank: the rank whose keys the call has; the part is then partial. None: all keys.
            cu_seqlens_q, cu_seqlens_k: for packed sequences, whose ranges are then (B, n, 2). Integers, or arrays in host memory.

        Raises:
            TypeError, ValueError: an argument is not as described above.
        """
        if keys is not None and not isinstance(keys, Sharding):
            raise TypeError(f"keys: {kind(keys)}; accepted is a Sharding, or None")
        keys = keys or self
        wrong: Wrong = []
        if k_rank is not None and not is_integer(wrong, "k_rank", k_rank, 0, keys.world_size - 1):
            raise refusal(wrong)
        if (cu_seqlens_q is None) != (cu_seqlens_k is None):
            raise TypeError("cu_seqlens_q, cu_seqlens_k: accepted are both, or neither")
        q, k = self.ranges[self._rank(rank, group)], union([(0, keys.seqlen)]) if k_rank is None else keys.ranges[k_rank]
        given = (("cu_seqlens_q", cu_seqlens_q, self.seqlen), ("cu_seqlens_k", cu_seqlens_k, keys.seqlen))
        cu_q, cu_k = (None if x is None else cumulated(name, x, tokens) for name, x, tokens in given)
        if cu_q and cu_k and len(cu_q) != len(cu_k):
            raise refusing(ValueError, "cu_seqlens_k", f"{len(cu_k)} numbers; accepted are {len(cu_q)}, as cu_seqlens_q has")
        return part_of(q, k, cu_q or (0, self.seqlen), cu_k or (0, keys.seqlen), partial=k_rank is not None, packed=cu_q is not None)

    def _rank(self, rank: int | None, group: ProcessGroup | None) -> int:
        if rank is None:
            return rank_in(group, self.world_size)
        wrong: Wrong = []
        if not is_integer(wrong, "rank", rank, 0, self.world_size - 1):
            raise refusal(wrong)
        return rank


def _check_tokens(name: str, x: Any, dim: Any, length: int, first: Any = None) -> None:
    """Checks a tensor that has `length` tokens along `dim`. first: the first shard, which the others must equal except for their length."""
    if (refused := tensor_refusal(name, x)) is not None:
        raise refused
    if not is_whole(dim) or not -x.dim() <= dim < x.dim():
        raise refusing(ValueError, "dim", f"{shown(dim)}; accepted is an axis of {name}, of shape {tuple(x.shape)}")
    if x.shape[dim] != length:
        raise refusing(ValueError, name, f"shape {tuple(x.shape)}; accepted are {length} tokens along axis {dim}, as the sharding says")
    if first is None or first is x:
        return
    if x.device != first.device:
        raise refusing(ValueError, name, f"on device {x.device}; accepted is {first.device}, where shards[0] lies")
    if x.dtype != first.dtype:
        raise refusing(ValueError, name, f"dtype {x.dtype}; accepted is {first.dtype}, as shards[0] has")
    accepted = [*first.shape]
    accepted[dim] = length
    if [*x.shape] != accepted:
        raise refusing(ValueError, name, f"shape {tuple(x.shape)}; accepted is {tuple(accepted)}, with the other axes of shards[0]")


def part_of(
    q: Ranges,
    k: Ranges,
    cu_q: Sequence[int],
    cu_k: Sequence[int],
    *,
    partial: bool,
    packed: bool,
    first_head: int = 0,
    heads: int | None = None,
) -> Part:
    """The Part of these tokens of queries and keys, with the ranges of each sequence."""

    def side(ranges: Ranges, cu: Sequence[int]) -> tuple[Any, Any]:
        of = [within(ranges, begin, end) for begin, end in itertools.pairwise(cu)]
        if not packed:
            return of[0], cu[1]
        n = max(map(len, of), default=0)
        return [[*each, *[(0, 0)] * (n - len(each))] for each in of], [end - begin for begin, end in itertools.pairwise(cu)]

    (q_ranges, seqlens_q), (k_ranges, seqlens_k) = side(q, cu_q), side(k, cu_k)
    return Part(q_ranges, k_ranges, seqlens_q, seqlens_k, first_head=first_head, heads=heads, partial=partial)


def rows_of_sequences(ranges: Ranges, cu: Sequence[int]) -> list[int]:
    """The number of tokens in the ranges that belong to each sequence."""
    return [count(within(ranges, begin, end)) for begin, end in itertools.pairwise(cu)]


def host_integers(name: str, x: Any) -> tuple[int, ...]:
    """The integers of a list, or of an array, whose numbers are read (if it is on a GPU, this waits for it)."""
    if isinstance(x, Tensor) and (x.is_meta or x.layout != torch.strided):
        raise TypeError(f"{name}: {'on the device meta' if x.is_meta else f'layout {x.layout}'}; accepted are integers (B + 1,)")
    numbers = x.tolist() if hasattr(x, "tolist") and not isinstance(x, type) else x
    if not isinstance(numbers, Iterable) or not (numbers := list(numbers)) or not all(map(is_whole, numbers)):
        raise TypeError(f"{name}: {shown(x)}; accepted are integers (B + 1,)")
    return tuple(int(n) for n in numbers)


def cumulated(name: str, x: Any, tokens: int) -> tuple[int, ...]:
    """cu_seqlens of packed sequences of this many tokens, checked."""
    cu = host_integers(name, x)
    if cu[0] != 0 or list(cu) != sorted(cu) or cu[-1] > tokens:
        raise ValueError(f"{name}: {shown(cu)}; accepted are numbers that begin at 0, never fall, and end at {tokens} or before")
    return cu


def _is_ranges(of: object) -> bool:
    return isinstance(of, (tuple, list)) and all(isinstance(x, (tuple, list)) and len(x) == 2 and all(map(is_whole, x)) for x in of)


def _checked(seqlen: int, world_size: int) -> tuple[int, int]:
    """seqlen and world_size as Python's integers, which do not overflow."""
    wrong: Wrong = []
    is_integer(wrong, "seqlen", seqlen, 0, _MOST)
    is_integer(wrong, "world_size", world_size, 1, _MOST_RANKS)
    if wrong:
        raise refusal(wrong)
    return index(seqlen), index(world_size)


def _band(starts: Sequence[int], causal: object, window: object, block_mask: object, packed: bool) -> Band:
    """balanced()'s arguments about visibility, checked; the band's bounds are Python's integers."""
    wrong: Wrong = []
    read: dict[str, Any] = {}
    for name, x in (("causal", causal), ("window", window)):
        if x is not None or name == "causal":
            read |= ROWS[name].read(wrong, name, x)
    most = max((end - begin for begin, end in itertools.pairwise(starts)), default=0)
    if isinstance(block_mask, BlockMask):
        lengths = block_mask.seqlen_q, block_mask.seqlen_k
        if min(lengths) < most or (not packed and max(lengths) > most):
            accepted = f"{most}{' or more' if packed else ''} of each, as {'the longest sequence has' if packed else 'seqlen says'}"
            wrong.append(ValueError(f"block_mask: of {lengths[0]} queries and {lengths[1]} keys; accepted are {accepted}"))
    elif block_mask is not None:
        wrong.append(TypeError(f"block_mask: {kind(block_mask)}; accepted is a strobe.BlockMask"))
    if wrong:
        raise refusal(wrong)
    return Band.of(bool(read.get("causal")), (read.get("window_left"), read.get("window_right")))


def _cuts(seqlen: int, n: int) -> list[tuple[int, int]]:
    """n ranges of lengths as equal as possible."""
    return [(seqlen * i // n, seqlen * (i + 1) // n) for i in range(n)]
