"""The attention mask that strobe.compat.transformers gives to models: a function of positions. No tensor of queries x keys is made of it.

Masking.create() is called where transformers makes a mask; attention takes the options of strobe.attention() from it. What the function
says of all pairs at once becomes an option: causal and windows, keys that are padding, and sequences that lie behind one another. The
rest stays a function, with the blocks in which it sees anything."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import lru_cache, reduce
from importlib import import_module
from operator import and_
from typing import Any

import torch
from torch import Tensor

from .._attention import CONTEXTS
from .._blockmask import BlockMask as Blocks
from .._messages import shown
from ._mask_terms import (
    EVERYTHING,
    FAR,
    Term,
    conditions,
    function_of,
    is_traced,
    names_of,
    reads,
    same_of_both,
    span,
    term_of,
    value,
)
from ._whole_masks import whole_mask

# transformers takes a tensor or a BlockMask of PyTorch as a mask that is ready, and drops or refuses anything else.
_BlockMask: Any = import_module("torch.nn.attention.flex_attention").BlockMask

_WORTH_BLOCKS = 1 << 20  # pairs from which on the blocks of a function are looked for


class MaskFunction(_BlockMask):
    """A mask of (batch, 1, queries, keys). Operations of PyTorch on it are those on the bool tensor, which is made for them: to_dense().

    Indexing takes stretches of queries and keys without making the tensor, and torch.cat() joins masks along the keys.
    """

    def __init__(
        self, batch_size: int, q_length: int, kv_length: int, q_offset: Any, kv_offset: Any, mask_function: Callable[..., Any],
        padding: Tensor | None, use_vmap: bool, device: torch.device, parts: tuple[Any, ...] = (), shard: int | None = None,
    ):  # fmt: skip
        self.batch_size, self.q_length, self.kv_length, self.q_offset, self.kv_offset = batch_size, q_length, kv_length, q_offset, kv_offset
        self.mask_function, self.padding, self.use_vmap, self.device = mask_function, padding, use_vmap, device
        self.parts = parts  # the masks that were joined
        self.shard = shard  # how many of the queries and of the keys the model has; None: all
        self.heads = 1
        self.causal = False
        self.window: tuple[int | None, int | None] | None = None
        self.alignment = "top_left"
        self.seqused: Tensor | None = None
        self.keys: Tensor | None = None  # bool (B, 1, 1, keys)
        self.function: Callable[..., Any] | None = None
        self.blocks: Blocks | None = None
        self.cu_seqlens: Tensor | None = None  # of the sequences within the rows, if attention may take them one by one
        self.longest = 0
        self.is_packed = False  # causal, window and the sequences of a collator say all of it
        self.fits: Tensor | None = None  # while a compiler traces: whether the options are right, for checked_sequences()
        self.dense: Tensor | None = None
        self._repeated: MaskFunction | None = None  # by of_batch()
        self._find_options()

    def of_batch(self, size: int) -> MaskFunction:
        """The mask for a batch of `size`: self, or, if it is for a batch of 1, one that has its options for each of them."""
        if size == self.batch_size or (self.seqused is None and self.cu_seqlens is None and self.function is None):
            return self
        if self._repeated is None or self._repeated.batch_size != size:
            if self.parts:
                self._repeated = joined([part._of_first(size) for part in self.parts])
            else:
                self._repeated = self._of_first(size)
        return self._repeated

    def _of_first(self, size: int) -> MaskFunction:
        """This mask's first row of the batch, in each of `size` rows."""
        function, padding = self.mask_function, None if self.padding is None else self.padding[:1].expand(size, -1)
        return MaskFunction(
            size, self.q_length, self.kv_length, self.q_offset, self.kv_offset, lambda _, h, i, j: function(0, h, i, j), padding,
            self.use_vmap, self.device, shard=self.shard,
        )  # fmt: skip

    # What transformers and its models ask a mask

    @property
    def shape(self) -> torch.Size:
        lengths = (self.q_length, self.kv_length) if self.shard is None else (self.shard, self.shard)
        return torch.Size((self.batch_size, self.heads, *lengths))

    @property
    def ndim(self) -> int:
        return 4

    @property
    def dtype(self) -> torch.dtype:
        return torch.bool

    def dim(self) -> int:
        return 4

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def contiguous(self) -> MaskFunction:
        return self

    def detach(self) -> MaskFunction:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The mask on another device; with a dtype, or a tensor that has one, the tensor."""
        given = [*args, *kwargs.values()]
        if any(isinstance(x, Tensor) or (isinstance(x, torch.dtype) and x != torch.bool) for x in given):
            return self.to_dense().to(*args, **kwargs)
        device = next((torch.device(x) for x in given if isinstance(x, (str, torch.device, int)) and not isinstance(x, bool)), self.device)
        if _is_same_device(device, self.device):
            return self
        return self.to_dense().to(device)  # what the function reads lies on the old one

    def expand(self, *sizes: Any) -> Any:
        wanted = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
        sizes = tuple(own if x == -1 else x for x, own in zip(wanted, self.shape, strict=False))
        if len(wanted) != 4 or sizes[0] != self.batch_size or sizes[2:] != self.shape[2:] or self.heads not in (1, sizes[1]):
            return self.to_dense().expand(*wanted)
        expanded = copy(self)
        expanded.heads = sizes[1]
        return expanded

    def __getitem__(self, index: Any) -> Any:
        rows = _stretches(index, self.shape) if not self.parts and self.heads == 1 else None
        if rows is None:
            return self.to_dense()[index]
        (q, q_length), (k, kv_length) = rows
        if (q_length, kv_length) == tuple(self.shape[2:]):
            return self
        if self.shard is not None:
            return self.to_dense()[index]
        return MaskFunction(
            self.batch_size, q_length, kv_length, self.q_offset + q, self.kv_offset + k, self.mask_function, self.padding, self.use_vmap,
            self.device,
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return getattr(self.to_dense(), name)

    def __invert__(self) -> Tensor:
        return ~self.to_dense()

    def __and__(self, other: Any) -> Tensor:
        return self.to_dense() & _dense(other)

    def __or__(self, other: Any) -> Tensor:
        return self.to_dense() | _dense(other)

    __rand__, __ror__ = __and__, __or__

    def __eq__(self, other: Any) -> Any:
        return self.to_dense() == _dense(other)

    def __ne__(self, other: Any) -> Any:
        return self.to_dense() != _dense(other)

    __hash__ = object.__hash__

    def __lt__(self, other: Any) -> Tensor:
        return self.to_dense() < _dense(other)

    def __mul__(self, other: Any) -> Tensor:
        return self.to_dense() * _dense(other)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Tensor:
        return _added(other, self)

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, _ = names_of(func)
        if name in ("cat", "concat", "concatenate") and not kwargs.keys() - {"dim"}:
            axis = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            if axis in (3, -1) and all(isinstance(x, MaskFunction) for x in args[0]):
                return joined(args[0])
        if name in ("add", "iadd", "radd") and not kwargs and len(args) == 2:
            return _added(args[1], args[0]) if isinstance(args[0], MaskFunction) else _added(args[0], args[1], name == "iadd")
        return func(*_dense(args), **{key: _dense(x) for key, x in kwargs.items()})

    def __repr__(self) -> str:
        found = [f"{self.q_length} queries, {self.kv_length} keys, batch {self.batch_size}"]
        found += [f"{name}={shown(x)}" for name, x in (("causal", self.causal), ("window", self.window)) if x]
        more = {"seqused": self.seqused, "keys": self.keys, "cu_seqlens": self.cu_seqlens, "function": self.function, "mask": self.dense}
        return f"MaskFunction({', '.join([*found, *(name for name, x in more.items() if x is not None)])})"

    __str__ = __repr__

    def to_dense(self) -> Tensor:
        """The bool tensor (batch, 1, queries, keys), True = attend, as transformers makes it for SDPA."""
        if self.shard is not None:
            raise NotImplementedError(
                "attention_mask: its tensor is asked for inside context_parallel(); accepted are models that pass it on"
            )
        if self.parts:
            return torch.cat([part.to_dense() for part in self.parts], -1).expand(self.shape)
        from transformers.masking_utils import and_masks, padding_mask_function, sdpa_mask

        function = self.mask_function
        if self.padding is not None:
            function = and_masks(function, padding_mask_function(self.padding))
        made: Tensor = sdpa_mask(
            batch_size=self.batch_size, q_length=self.q_length, kv_length=self.kv_length, q_offset=self.q_offset,
            kv_offset=self.kv_offset, mask_function=function, attention_mask=None, allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False, use_vmap=self.use_vmap, device=self.device,
        )  # fmt: skip
        return made.expand(self.shape)

    # The options of strobe.attention()

    def options(self) -> dict[str, Any]:
        """What hides the same pairs for queries and keys that are not packed."""
        found: dict[str, Any] = {"causal": self.causal, "window": self.window, "alignment": self.alignment}
        if self.dense is not None:
            return {"mask": self.dense}
        if self.seqused is not None:
            found["seqused_k"] = self.seqused
        if self.blocks is not None:
            found["block_mask"] = self.blocks
        else:
            found["mask"] = self.keys if self.function is None else self.function
        return found

    def _find_options(self) -> None:
        function = _joined_function(self.parts) if self.parts else self.mask_function
        term = term_of(function, self.device)
        if term is None:
            self._keep_function(function)
            return
        rest = _Rest(self)
        for condition in conditions(term):
            rest.take(condition)
        rest.settle()

    def _keep_function(self, function: Callable[..., Any]) -> None:
        """Takes a function that cannot be taken apart as it is. The call of attention() says so if it has no graph."""
        self.function = _offset(function, self.q_offset, self.kv_offset)
        if self.padding is not None:
            self.function = _with_keys(self.function, self._key_mask(self.padding))

    def _find_blocks(self) -> None:
        worth = self.q_length * self.kv_length >= _WORTH_BLOCKS
        if self.function is not None and worth and not is_traced(self.q_offset, self.kv_offset, self.padding):
            self.blocks = Blocks.from_function(self.function, self.batch_size, 1, self.q_length, self.kv_length, device=self.device)

    def _key_mask(self, padding: Tensor) -> Tensor:
        """(B, 1, 1, keys) of (B, positions), with strides that a longer sequence leaves as they are."""
        if isinstance(self.kv_offset, Tensor):
            found = padding[:, torch.arange(self.kv_length, device=padding.device) + self.kv_offset]
        else:
            found = padding[:, self.kv_offset : self.kv_offset + self.kv_length].contiguous()
        return found[:, None, None, :]


_UNFIT = (
    "attention_mask: a compiled mask function compares positions, which do not grow by one within each of the sequences that it compares;"
    " accepted are those that do, or a mask that is made outside of the compiled program"
)


@torch.library.custom_op("strobe::checked_sequences", mutates_args=())
def checked_sequences(x: Tensor, fits: Tensor) -> Tensor:
    """A copy of x if `fits` is True. Else the host, which waits for that, raises an error: a failed assertion would end all work on a GPU.
    A CUDA graph cannot wait, and asserts."""
    if fits.is_cuda and torch.cuda.is_current_stream_capturing():
        torch._assert_async(fits, _UNFIT)
    elif not fits:
        raise RuntimeError(_UNFIT)
    return x.clone()


@checked_sequences.register_fake
def _(x: Tensor, fits: Tensor) -> Tensor:
    return torch.empty_like(x)


class _Rest:
    """Conditions, sorted by what they can become."""

    def __init__(self, mask: MaskFunction):
        self.mask = mask
        self.visible = EVERYTHING  # the values of i - j
        self.bands: list[tuple[Any, Term]] = []  # spans of differences of what a table holds, with the conditions
        self.sequences: list[tuple[Term, Term]] = []  # f(b, i) == f(b, j): the side of j, with the condition
        self.of_keys: list[Term] = []
        self.others: list[Term] = []

    def take(self, condition: Term) -> None:
        found = span(condition)
        if (sides := same_of_both(condition)) is not None:
            self.sequences.append((sides[1], condition))
        elif found is not None and (found.is_any or found.base is None):
            kept = [(max(a, c), min(b, d)) for a, b in self.visible for c, d in found.ranges if max(a, c) <= min(b, d)]
            if len(kept) == 1 and (found.is_any or _fits(kept[0])):
                self.visible = kept
            else:
                self.others.append(condition)
        elif found is not None:
            self.bands.append((found, condition))
        elif reads(condition) in ("j", "bj"):
            self.of_keys.append(condition)
        else:
            self.others.append(condition)

    def settle(self) -> None:
        """Gives the mask its options: packed sequences, keys that count, a band, and a function for all that these cannot say."""
        mask = self.mask
        self._settle_sequences()
        self._settle_keys()
        mask.is_packed = self._is_of_a_collator()
        is_per_head = any("h" in reads(condition) for condition in self.others)
        if self.others and mask.q_length == 1 and not mask.parts and not is_per_head:
            mask.dense, mask.keys = mask.to_dense(), None  # a row of keys
            return
        band = self.visible[0]
        if not self._settle_band(band):
            self.others.append(_band_term(band, mask.device))
        if self.others:
            self._settle_function(is_per_head)

    def _is_square(self) -> bool:
        """Whether queries and keys are the same positions, from 0 on."""
        mask = self.mask
        return mask.q_length == mask.kv_length and _is_zero(mask.q_offset) and _is_zero(mask.kv_offset)

    def _is_of_a_collator(self) -> bool:
        """Whether the lengths of sequences that a collator gives may take the place of the mask's. transformers makes sequences of
        positions, which a band reads, too; others, as chunks, are not those of a collator."""
        mask = self.mask
        if not self._is_square() or mask.parts or mask.keys is not None or mask.seqused is not None:
            return False
        others = [condition for condition in self.others if not any(condition is each for _, each in self.sequences)]
        if others:
            return False
        if not self.sequences:
            return True
        # Dynamo of PyTorch 2.11 knows no bool() of a list.
        return len(self.sequences) == 1 and len(self.bands) > 0 and _table(self.sequences[0][0]) is not None

    def _settle_function(self, is_per_head: bool) -> None:
        mask = self.mask
        mask.function = function_of(tuple(self.others), mask.q_offset, mask.kv_offset)
        if mask.keys is not None:
            mask.function, mask.keys = _with_keys(mask.function, mask.keys), None
        if not is_per_head:  # how many heads there will be is not known
            mask._find_blocks()

    def _settle_band(self, band: tuple[int, int]) -> bool:
        """causal and window for the least and the largest i - j; False if there is no alignment that says the same."""
        mask = self.mask
        least, most = band
        if least == -FAR and most == FAR:
            return True
        offset = mask.q_offset - mask.kv_offset  # of query 0 and key 0
        used = mask.seqused
        if isinstance(offset, Tensor):
            if least != 0 or used is not None:
                return False
            mask.seqused = (offset + mask.q_length).to(torch.int32).clamp(0, mask.kv_length).expand(mask.batch_size)
            mask.alignment = "bottom_right"
        elif offset == 0:
            mask.alignment = "top_left"
        elif used is not None:
            return False
        elif offset == mask.kv_length - mask.q_length:
            mask.alignment = "bottom_right"
        elif least == 0 and 0 <= offset + mask.q_length <= mask.kv_length:
            mask.seqused = torch.full((mask.batch_size,), offset + mask.q_length, dtype=torch.int32, device=mask.device)
            mask.alignment = "bottom_right"
        else:
            return False
        mask.causal = least == 0
        if most != FAR or not mask.causal:
            mask.window = (None if most == FAR else most, 0 if mask.causal else None if least == -FAR else -least)
        return True

    def _settle_keys(self) -> None:
        """Keys that no query sees: what padding and conditions of j alone hide."""
        mask = self.mask
        found = None if mask.padding is None else mask._key_mask(mask.padding)
        if self.of_keys:
            places = self._places()
            for term in self.of_keys:
                seen = torch.as_tensor(value(term, places), device=mask.device).expand(mask.batch_size, mask.kv_length)[:, None, None, :]
                found = seen if found is None else found & seen
        if found is None:
            return
        mask.keys = found
        if is_traced(found) or isinstance(mask.q_offset, Tensor) or isinstance(mask.kv_offset, Tensor):
            return
        counts = found.sum(-1)
        leads = found == (torch.arange(mask.kv_length, device=found.device) < counts[..., None])
        sees_all, is_prefix = torch.stack([found.all(), leads.all()]).tolist()  # one wait for a GPU
        if sees_all:
            mask.keys = None
        elif (
            is_prefix and mask.shard is None and mask.cu_seqlens is None and (mask.q_offset == mask.kv_offset or self.visible == EVERYTHING)
        ):
            mask.keys, mask.seqused = None, counts.reshape(-1).to(torch.int32).expand(mask.batch_size)
        if mask.keys is not None and mask.cu_seqlens is not None:  # the mask of keys would have to be cut up as well
            mask.cu_seqlens = None
            self.others += [condition for _, condition in self.sequences]

    def _places(self) -> dict[str, Any]:
        mask = self.mask
        return {
            "b": torch.arange(mask.batch_size, device=mask.device)[:, None],
            "j": torch.arange(mask.kv_length, device=mask.device)[None, :] + mask.kv_offset,
        }

    def _settle_sequences(self) -> None:
        """Conditions f(b, i) == f(b, j) are sequences that lie behind one another. Positions that begin anew in each, which a band reads,
        then differ as i and j do."""
        mask = self.mask
        tables = [_table(side) for side, _ in self.sequences]
        positions = [_positions(found.base) for found, _ in self.bands]
        traced = is_traced(mask.q_offset, mask.kv_offset, *tables, *positions)
        begins, ascends, fits = None, 0, False
        if self.sequences and self._is_square() and all(x is not None for x in positions):
            if not traced:
                begins, ascending = self._begins()
                continues = [_continues(position, begins) for position in positions]
                count, ascends, *numbers = torch.stack([x.to(torch.int64) for x in (begins.sum(), ascending, *continues)]).tolist()
                fits = bool(ascends) and all(numbers)  # else a sequence may go on behind another one
            elif positions and any(x is not None for x in tables) and torch._C._functorch.maybe_current_level() is None:
                # While a compiler traces, numbers cannot be looked at. The program looks when it runs: sequences that transformers makes
                # from positions always fit.
                starts, ascending = self._begins()
                mask.fits = torch.stack([ascending, *(_continues(x, starts) for x in positions)]).all()
                self.sequences = [_checked(side, condition, mask.fits) for side, condition in self.sequences]
                fits = True
        for found, condition in self.bands:
            kept = [(max(a, c), min(b, d)) for a, b in self.visible for c, d in found.ranges if max(a, c) <= min(b, d)]
            if fits and len(kept) == 1 and _fits(kept[0]):
                self.visible = kept
            else:
                self.others.append(condition)
        if not self.sequences:
            return
        if begins is not None and ascends:
            if count > mask.batch_size:
                starts = begins.reshape(-1).nonzero().reshape(-1)
                ends = torch.cat([starts, starts.new_full((1,), begins.numel())])
                mask.cu_seqlens, mask.longest = ends.to(torch.int32), int(ends.diff().max())
                if self.others or mask.parts or (mask.shard is not None and mask.batch_size > 1):  # ranks share packed tokens of one row
                    mask.cu_seqlens = None
                    self.others += [condition for _, condition in self.sequences]
            return
        self.others += [condition for _, condition in self.sequences]

    def _begins(self) -> tuple[Tensor, Tensor]:
        """Where sequences begin, (B, positions), and whether none goes on after another."""
        mask, places = self.mask, self._places()
        begins = torch.zeros((mask.batch_size, mask.kv_length), dtype=torch.bool, device=mask.device)
        begins[:, :1] = True
        ascends = torch.ones((), dtype=torch.bool, device=mask.device)
        for side, _ in sorted(self.sequences, key=lambda each: _table(each[0]) is None):  # what is computed may begin anew in each
            steps = torch.as_tensor(value(side, places)).expand(mask.batch_size, mask.kv_length).diff(dim=-1)
            ascends = ascends & ((steps >= 0) | begins[:, 1:]).all()
            begins[:, 1:] |= steps != 0
        return begins, ascends


def _is_same_device(a: torch.device, b: torch.device) -> bool:
    """Whether both name one device: without an index it is the current one."""

    def index(x: torch.device) -> int:
        return x.index if x.index is not None else torch.cuda.current_device() if x.type == "cuda" else 0

    return a.type == b.type and (a.index == b.index or index(a) == index(b))


def _is_zero(x: Any) -> bool:
    return isinstance(x, int) and x == 0


def _fits(band: tuple[int, int]) -> bool:
    """Whether causal and window can say it."""
    return band[0] <= 0 <= band[1]


def _table(side: Term | None) -> Tensor | None:
    """The tensor of t[b, i] or t[b, j]."""
    if side is None or side.name != "getitem" or not isinstance(side.args[0], Tensor) or not isinstance(side.args[1], tuple):
        return None
    return side.args[0] if [x.name if isinstance(x, Term) else "" for x in side.args[1]] in (["b", "i"], ["b", "j"]) else None


def _positions(base: Term | None) -> Tensor | None:
    """The table of positions that a difference reads; None if its dtype has so few bits that the difference may wrap around."""
    found = _table(base)
    return found if found is not None and found.dtype in (torch.int32, torch.int64) else None


def _checked(side: Term, condition: Term, fits: Tensor) -> tuple[Term, Term]:
    """A condition t[b, i] == t[b, j] that reads a table which is checked when the program runs. Others stay as they are."""
    table = _table(side)
    if table is None:
        return side, condition
    checked = checked_sequences(table, fits)
    a, b = (Term(x.name, x.function, (checked, x.args[1]), x.kwargs, x.device) for x in condition.args)
    return (a if condition.args[0] is side else b), Term(condition.name, condition.function, (a, b), condition.kwargs, condition.device)


def _continues(position: Any, begins: Tensor) -> Tensor:
    """Whether the positions grow by one within each sequence."""
    return ((position[:, : begins.shape[1]].diff(dim=-1) == 1) | begins[:, 1:]).all()


def _band_term(band: tuple[int, int], device: torch.device) -> Term:
    i, j = (Term(name, None, (), {}, device) for name in "ij")
    bounds: list[Term] = [i - j >= band[0]] if band[0] > -FAR else []
    bounds += [i - j <= band[1]] if band[1] < FAR else []
    return reduce(and_, bounds)


def _offset(function: Callable[..., Any], q_offset: Any, kv_offset: Any) -> Callable[..., Any]:
    if _is_zero(q_offset) and _is_zero(kv_offset):
        return function
    return lambda b, h, i, j: function(b, h, i + q_offset, j + kv_offset)


def _with_keys(function: Callable[..., Any], keys: Tensor) -> Callable[..., Any]:
    seen = keys[:, 0, 0]
    return lambda b, h, i, j: function(b, h, i, j) & seen[b, j]


def _joined_function(parts: tuple[Any, ...]) -> Callable[..., Any]:
    """The function of masks whose keys lie behind one another."""

    def function(b: Any, h: Any, i: Any, j: Any) -> Any:
        found, first = None, 0
        for part in parts:
            seen = part.mask_function(b, h, i + part.q_offset, (at := j - first) + part.kv_offset)
            if part.padding is not None:
                seen = seen & part.padding[b, at + part.kv_offset]
            found = seen if found is None else torch.where(j < first, found, seen)
            first += part.kv_length
        return found

    return function


def mask_of(
    batch_size: int, q_length: int | None = None, kv_length: int = 0, q_offset: Any = 0, kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None, attention_mask: Any = None, *, local_size: int | None = None,
    allow_is_bidirectional_skip: bool = False, use_vmap: bool = False, device: Any = None, cache_position: Tensor | None = None,
    **others: Any,
) -> Any:  # fmt: skip
    """The function that transformers calls for a mask: a MaskFunction, or None where a bidirectional mask would hide nothing. Models that
    have eager attention alone get the tensor that eager attention gets.

    Args:
        batch_size, q_length, kv_length: the sizes of the mask.
        q_offset, kv_offset: the positions of the first query and the first key; integers, or tensors of one.
        mask_function: g(b, h, i, j) → bool of positions and of the query head; None: causal.
        attention_mask: bool (B, positions), the keys that are no padding; or a MaskFunction, which is returned.
        local_size, allow_is_bidirectional_skip, use_vmap, device: as for transformers' sdpa_mask.
        cache_position: what transformers before 5.4 gives in the place of q_length and q_offset.
        others: config, whose model is asked for. The rest is without effect.
    """
    if isinstance(attention_mask, MaskFunction):
        return attention_mask
    if _is_eager_alone(getattr(others.get("config"), "model_type", "")):
        return _eager_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=None if cache_position is not None else q_offset,
            kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask, use_vmap=use_vmap, device=device,
            cache_position=cache_position, allow_is_bidirectional_skip=allow_is_bidirectional_skip, local_size=local_size, **others,
        )  # fmt: skip
    if mask_function is None:
        from transformers.masking_utils import causal_mask_function

        mask_function = causal_mask_function
    if device is None:
        device = next((x.device for x in (attention_mask, cache_position) if isinstance(x, Tensor)), torch.get_default_device())
    if cache_position is not None:
        q_length, q_offset = len(cache_position), cache_position[0]
        q_offset = q_offset if is_traced(cache_position) else int(q_offset)
    assert q_length is not None
    padding = attention_mask
    if padding is not None:
        padding = padding.to(dtype=torch.bool, device=device)
        missing = kv_length + kv_offset - padding.shape[-1]
        if missing > 0:
            padding = torch.nn.functional.pad(padding, (0, missing))
    # A static cache counts up the tensor that it gives, before attention reads it.
    q_offset, kv_offset = (x.clone() if isinstance(x, Tensor) else x for x in (q_offset, kv_offset))
    shard = None
    if CONTEXTS:
        shard, q_length, mask_function, padding = whole_mask(
            (q_length, kv_length), (q_offset, kv_offset), mask_function, padding, torch.device(device)
        )
        kv_length = q_length
    is_local = local_size is not None and kv_length >= local_size
    if allow_is_bidirectional_skip and not is_local and not is_traced(padding) and (padding is None or bool(padding.all())):
        return None
    return MaskFunction(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, padding, use_vmap, torch.device(device), shard=shard
    )


@torch.compiler.assume_constant_result
def _is_eager_alone(model_type: str) -> bool:
    """Whether the models of a config compute attention by themselves, as Gemma 4's audio encoder does. They do not ask for the
    implementation that the config names, and expect what eager attention adds to the scores."""
    return _known_as_eager_alone(model_type)


@lru_cache(maxsize=256)
def _known_as_eager_alone(model_type: str) -> bool:
    names = import_module("transformers.models.auto.modeling_auto").MODEL_MAPPING_NAMES
    name = names.get(model_type)
    found = getattr(import_module("transformers"), name, None) if isinstance(name, str) else None
    supports = ("_supports_attention_backend", "_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
    return found is not None and not any(getattr(found, each, True) for each in supports)


def _eager_mask(**given: Any) -> Any:
    from transformers.masking_utils import eager_mask

    return eager_mask(**{name: x for name, x in given.items() if x is not None})


def joined(parts: Any) -> MaskFunction:
    """The mask over the keys of all of them, in their order."""
    flat = tuple(each for part in parts for each in (part.parts or (part,)))
    first = flat[0]
    for part in flat[1:]:
        if part.shard is not None:
            raise NotImplementedError(
                "attention_mask: joined of two inside context_parallel(); accepted is a mask of this rank's tokens alone"
            )
        if (part.batch_size, part.q_length) != (first.batch_size, first.q_length):
            raise ValueError(
                f"attention_mask: masks of shapes {first.shape} and {part.shape} side by side; accepted are those of the same queries"
            )
    return MaskFunction(
        first.batch_size, first.q_length, sum(part.kv_length for part in flat), 0, 0, first.mask_function, None, False, first.device, flat
    )


def _stretches(index: Any, shape: torch.Size) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The first query and key of mask[:, :, a:b, c:d], and how many; None for another index."""
    if not isinstance(index, tuple):
        return None
    if Ellipsis in [x if x is Ellipsis else None for x in index]:
        at = [x is Ellipsis for x in index].index(True)
        index = (*index[:at], *(slice(None),) * (5 - len(index)), *index[at + 1 :])
    if len(index) > 4 or not all(isinstance(x, slice) and x.step in (None, 1) for x in index):
        return None
    found = []
    for x, length in zip((*index, *(slice(None),) * (4 - len(index))), shape, strict=True):
        if any(isinstance(bound, Tensor) for bound in (x.start, x.stop)):
            return None
        start, stop, _ = x.indices(length)
        found.append((start, max(stop - start, 0)))
    if found[0] != (0, shape[0]) or found[1] != (0, 1):
        return None
    return found[2], found[3]


def _dense(x: Any) -> Any:
    if isinstance(x, (tuple, list)):
        return type(x)(_dense(each) for each in x)
    return x.to_dense() if isinstance(x, MaskFunction) else x


def _added(scores: Any, mask: Any, in_place: bool = False) -> Tensor:
    """Scores, and the least number of their dtype where the mask hides them, which is what is added to scores."""
    if isinstance(scores, MaskFunction) or not (isinstance(scores, Tensor) and scores.is_floating_point()):
        raise TypeError(f"attention_mask: added to {shown(scores)}; accepted is a tensor of scores, which the mask hides")
    dense = mask.to_dense()
    hidden = torch.zeros_like(dense, dtype=scores.dtype).masked_fill_(~dense, torch.finfo(scores.dtype).min)
    return scores.add_(hidden) if in_place else scores + hidden
