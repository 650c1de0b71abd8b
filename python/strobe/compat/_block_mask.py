"""FlexAttention's BlockMask: made of a mask_mod or of blocks, and brought to what strobe.attention() takes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import BlockMask as Blocks
from .._abi import is_traced_by_dynamo, outside_graphs
from .._checks import Wrong, is_integer, is_whole, refuse
from .._messages import kind, shown
from ._words import called, tensor_or_refusal

pytorchs: Any = None
with suppress(ImportError):  # before PyTorch 2.5
    pytorchs = import_module("torch.nn.attention.flex_attention")

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

DEFAULT_SIZE = 128
_EVERYTHING = 1 << 30  # FlexAttention's block size of a mask that hides nothing
_UNIT = 16  # attention() takes blocks of multiples of it
_KEPT = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_TRANSPOSED = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
_DESCRIBED = ("mask_mod", "seq_lengths", "BLOCK_SIZE")
_UNUSED = ("dq_write_order", "dq_write_order_full", "dq_kv_order", "dq_kv_order_spt")  # orders of FlexAttention's own backward
_NAMES = {"function": "mask_mod", "batch": "B", "heads": "H", "seqlen_q": "Q_LEN", "seqlen_k": "KV_LEN"}
_NAMES |= dict.fromkeys(("block", "block_q", "block_k"), "BLOCK_SIZE")


class Ready(NamedTuple):
    """What hides the same pairs: the options block_mask and mask of strobe.attention()."""

    blocks: Blocks | None
    function: MaskMod | None

    def visible(self) -> MaskMod | None:
        """A mask function that says all of it; None if nothing is hidden."""
        found = [] if self.function is None else [self.function]
        if self.blocks is not None:
            blocks = self.blocks
            kept = blocks.function or is_among(blocks.to_kept(), blocks.block_q, blocks.block_k)
            found.insert(0, kept)
        return and_masks(*found) if found else None


class _Source(NamedTuple):
    """What the blocks' tensors are made of when they are asked for."""

    blocks: Blocks
    batch: int
    heads: int
    separates: bool


def noop_mask(batch: Tensor, head: Tensor, token_q: Tensor, token_kv: Tensor) -> Tensor:
    """A mask_mod that hides nothing."""
    return batch.new_ones((), dtype=torch.bool)


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """A mask_mod that is True where all of these are; without any, everywhere."""
    return _joined(mask_mods, True)


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """A mask_mod that is True where any of these is; without any, nowhere."""
    return _joined(mask_mods, False)


def _joined(mask_mods: tuple[MaskMod, ...], all_of_them: bool) -> MaskMod:
    for each in mask_mods:
        if not callable(each):
            raise TypeError(f"mask_mods: {kind(each)} among them; accepted are functions g(b, h, q_idx, kv_idx)")
    if not mask_mods:
        return lambda b, h, i, j: b.new_full((), all_of_them, dtype=torch.bool)
    if all_of_them:
        return lambda b, h, i, j: reduce(lambda x, g: x & g(b, h, i, j), mask_mods[1:], mask_mods[0](b, h, i, j))
    return lambda b, h, i, j: reduce(lambda x, g: x | g(b, h, i, j), mask_mods[1:], mask_mods[0](b, h, i, j))


def is_among(table: Tensor, block_q: int, block_k: int) -> MaskMod:
    """A mask_mod that is True in the blocks that a table, bool (B|1, H|1, query blocks, key blocks), names."""
    every_b, every_h = (size == 1 for size in table.shape[:2])
    return lambda b, h, i, j: table[0 if every_b else b, 0 if every_h else h, i // block_q, j // block_k]


def _of_a_slice(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    raise RuntimeError(
        "mask_mod of a part of a BlockMask, which may count positions in another way; accepted is a mask_mod that is set after "
        "block_mask[...], made of the whole BlockMask's"
    )


class BlockMask:
    """FlexAttention's BlockMask: the blocks of queries and keys in which a pair may be visible, and the function that says which pairs are.

    A pair is visible if its block is in kv_indices and mask_mod is True for it, or if its block is in full_kv_indices. create_block_mask()
    and from_kv_blocks() make masks. The tensors of one that create_block_mask() made, and those that begin with q or full_q, are made when
    they are first asked for. dq_write_order, dq_write_order_full, dq_kv_order and dq_kv_order_spt are kept, without effect.

    Attributes that are assigned take effect: mask.mask_mod = g, mask.seq_lengths = (1, n).

    Args:
        seq_lengths: the numbers of queries and keys.
        kv_num_blocks, kv_indices: int32 (B|1, H|1, nq) and (B|1, H|1, nq, nk): in the row of each query block how many key blocks count,
            and which these are, in any order; what follows after them is not read.
        full_kv_num_blocks, full_kv_indices: the same for the blocks that are visible as a whole; None: none is.
        q_num_blocks, q_indices, full_q_num_blocks, full_q_indices: the same by key blocks. Not read.
        BLOCK_SIZE: the queries and the keys of a block. attention() is quickest with multiples of 16.
        mask_mod: g(b, h, q_idx, kv_idx) → bool, True = attend.
    """

    seq_lengths: tuple[int, int]
    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    q_num_blocks: Tensor | None
    q_indices: Tensor | None
    full_q_num_blocks: Tensor | None
    full_q_indices: Tensor | None
    dq_write_order: Tensor | None
    dq_write_order_full: Tensor | None
    dq_kv_order: Tensor | None
    dq_kv_order_spt: bool | None
    BLOCK_SIZE: tuple[int, int]
    mask_mod: MaskMod
    _source: _Source | None = None  # None: the tensors were given
    _ready: tuple[tuple[Any, ...], Ready] | None = None  # what attention() gets, and the state of the mask of which it was made

    def __init__(
        self, seq_lengths: tuple[int, int], kv_num_blocks: Tensor, kv_indices: Tensor, full_kv_num_blocks: Tensor | None,
        full_kv_indices: Tensor | None, q_num_blocks: Tensor | None, q_indices: Tensor | None, full_q_num_blocks: Tensor | None,
        full_q_indices: Tensor | None, BLOCK_SIZE: tuple[int, int] = (DEFAULT_SIZE, DEFAULT_SIZE), mask_mod: MaskMod = noop_mask, *,
        dq_write_order: Tensor | None = None, dq_write_order_full: Tensor | None = None, dq_kv_order: Tensor | None = None,
        dq_kv_order_spt: bool | None = None,
    ):  # fmt: skip
        tensors = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        given = dict(zip(_KEPT, tensors, strict=True))
        refuse(*_wrong_tensors(given), _wrong_lengths(seq_lengths))
        self.seq_lengths, self.BLOCK_SIZE, self.mask_mod = seq_lengths, _sizes(BLOCK_SIZE), mask_mod
        transposed = (q_num_blocks, q_indices, full_q_num_blocks, full_q_indices)
        unused = (dq_write_order, dq_write_order_full, dq_kv_order, dq_kv_order_spt)
        vars(self).update(given, **dict(zip(_TRANSPOSED, transposed, strict=True)), **dict(zip(_UNUSED, unused, strict=True)))

    @classmethod
    def from_kv_blocks(
        cls, kv_num_blocks: Tensor, kv_indices: Tensor, full_kv_num_blocks: Tensor | None = None, full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = DEFAULT_SIZE, mask_mod: MaskMod | None = None, seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True, *, dq_write_order: Tensor | None = None, dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | bool | None = None,
    ) -> BlockMask:  # fmt: skip
        """A mask of blocks that are named.

        Args:
            kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices: as in BlockMask().
            BLOCK_SIZE: the queries and the keys of a block, or one number for both.
            mask_mod: None hides nothing within the blocks.
            seq_lengths: None: all blocks of kv_indices are whole.
            compute_q_blocks: False leaves q_num_blocks, q_indices and those of full blocks None.
            dq_write_order, dq_write_order_full, dq_kv_order: kept, without effect.
        """
        size = _sizes(BLOCK_SIZE)
        refuse(*_wrong_tensors({"kv_num_blocks": kv_num_blocks, "kv_indices": kv_indices}))
        if seq_lengths is None:
            seq_lengths = (kv_indices.shape[-2] * size[0], kv_indices.shape[-1] * size[1])
        is_flag = isinstance(dq_kv_order, bool)
        orders: dict[str, Any] = {"dq_write_order": dq_write_order, "dq_write_order_full": dq_write_order_full}
        orders |= {"dq_kv_order": None if is_flag else dq_kv_order, "dq_kv_order_spt": dq_kv_order if is_flag else None}
        by_keys = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        made = cls(seq_lengths, *by_keys, None, None, None, None, size, noop_mask if mask_mod is None else mask_mod, **orders)
        if compute_q_blocks:
            for name in _TRANSPOSED:
                del vars(made)[name]
        return made

    @classmethod
    def from_pytorch(cls, block_mask: Any) -> BlockMask:
        """PyTorch's BlockMask as one of this module, with the same tensors. (flex_attention takes PyTorch's as it is.)"""
        if pytorchs is None or not isinstance(block_mask, pytorchs.BlockMask):
            raise TypeError(f"block_mask: {kind(block_mask)}; accepted is a torch.nn.attention.flex_attention.BlockMask")
        given: dict[str, Any] = {name: getattr(block_mask, name) for name in (*_DESCRIBED, *_KEPT, *_TRANSPOSED)}
        given |= {name: getattr(block_mask, name, None) for name in _UNUSED}
        return cls(**given)

    def to_pytorch(self) -> Any:
        """PyTorch's BlockMask with the same tensors, for code that asks for its class."""
        if pytorchs is None:
            raise NotImplementedError("to_pytorch(): this PyTorch has no FlexAttention; accepted is PyTorch 2.5 or later")
        given = {name: getattr(self, name) for name in (*_DESCRIBED, *_KEPT, *_TRANSPOSED)}
        orders = {name: x for name in _UNUSED if (x := getattr(self, name)) is not None}
        return pytorchs.BlockMask(**given, **orders)

    @classmethod
    def _of(cls, source: _Source, size: tuple[int, int], mask_mod: MaskMod, ready: Ready) -> BlockMask:
        made = cls.__new__(cls)
        made.seq_lengths, made.BLOCK_SIZE, made.mask_mod = (source.blocks.seqlen_q, source.blocks.seqlen_k), size, mask_mod
        vars(made).update(dict.fromkeys(_UNUSED))
        made._source = source
        made._ready = (state_of(made), ready)
        return made

    def __getattr__(self, name: str) -> Any:
        fields = vars(self)
        if name not in (*_KEPT, *_TRANSPOSED) or "seq_lengths" not in fields:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        was_ready = is_ready(self, self._ready)
        is_given = all(each in fields for each in _KEPT)
        found = _by_queries(*(fields[each] for each in _KEPT)) if is_given else self._made_tensors()
        for each, x in found.items():
            fields.setdefault(each, x)
        if was_ready and self._ready is not None:
            self._ready = (state_of(self), self._ready[1])
        return fields[name]

    def __setattr__(self, name: str, x: Any) -> None:
        if name in _KEPT and self._source is not None:
            _ = self.kv_indices  # all tensors are made first
            self._source = None
        super().__setattr__(name, x)
        if name in _DESCRIBED and self._ready is not None:  # a compiler cannot compare every kind of mask_mod
            self._ready = None

    @outside_graphs
    def _made_tensors(self) -> dict[str, Tensor | None]:
        assert self._source is not None
        blocks, batch, heads, separates = self._source
        kept, whole = _grids(blocks)
        for axis, length, size in ((2, blocks.seqlen_q, blocks.block_q), (3, blocks.seqlen_k, blocks.block_k)):
            if length % size:  # FlexAttention's whole blocks have all of their queries and keys
                whole.narrow(axis, whole.shape[axis] - 1, 1).fill_(False)
        kept, whole = (x.expand(batch, heads, -1, -1) for x in (kept, whole))
        if separates:
            found: dict[str, Tensor | None] = dict(zip(_KEPT, (*_ordered(kept & ~whole), *_ordered(whole)), strict=True))
        else:
            found = {**dict.fromkeys(_KEPT), **dict(zip(_KEPT, _ordered(kept), strict=False))}
        return {**found, **_by_queries(*(found[name] for name in _KEPT))}

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, queries, keys)."""
        if "kv_indices" not in vars(self) and self._source is not None:
            return (self._source.batch, self._source.heads, *self.seq_lengths)
        return (*self.kv_indices.shape[:-2], *self.seq_lengths)

    def numel(self) -> int:
        """The number of pairs, hidden ones among them."""
        return reduce(lambda x, y: x * y, self.shape, 1)

    def sparsity(self) -> float:
        """The percentage of pairs that lie in no block of the mask."""
        kept = int(self.kv_num_blocks.sum())
        if self.full_kv_num_blocks is not None:
            kept += int(self.full_kv_num_blocks.sum())
        return 100 * (1 - kept * self.BLOCK_SIZE[0] * self.BLOCK_SIZE[1] / self.numel())

    def to_dense(self) -> Tensor:
        """Which blocks the mask has: int32 (B, H, query blocks, key blocks), 1 or 0."""
        nk = self.kv_indices.shape[-1]
        kept = _grid(self.kv_num_blocks, self.kv_indices, nk)
        if self.full_kv_num_blocks is not None and self.full_kv_indices is not None:
            kept = kept | _grid(self.full_kv_num_blocks, self.full_kv_indices, nk)
        return kept.int()

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """A picture of the blocks in text, two characters for each: "█" is in the mask, " " is not, "░" stands for several of both kinds.

        Args:
            grid_size: the most rows and columns, or one number for both; -1: as many as there are.
            limit: the most matrices (of batch and head) that are shown.
        """
        dense = self.to_dense()
        *several, rows, columns = dense.shape
        most = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
        steps = [1 if size < 0 else max(1, -(-count // size)) for size, count in zip(most, (rows, columns), strict=True)]
        pictures = []
        for n, place in enumerate(product(*map(range, several))):
            if n == limit:
                pictures.append("...\nTo see more: BlockMask.to_string(limit=N), or one of them, BlockMask[batch, head]")
                break
            kept = dense[place].float()
            lines = [f"{place}"]
            for top in range(0, rows, steps[0]):
                shares = [float(kept[top : top + steps[0], left : left + steps[1]].mean()) for left in range(0, columns, steps[1])]
                lines.append("".join(2 * ("█" if share == 1 else " " if share == 0 else "░") for share in shares))
            pictures.append("\n".join(lines) + "\n")
        return "\n".join(pictures)

    def __str__(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%, \n{self.to_string().strip()}\n)"

    def __repr__(self) -> str:
        shapes = {name: getattr(self, name) for name in (*_KEPT, *_TRANSPOSED)}
        lines = [f"{name}={None if x is None else tuple(x.shape)}" for name, x in shapes.items()]
        lines += [f"BLOCK_SIZE={self.BLOCK_SIZE}", f"shape={self.shape}", f"sparsity={self.sparsity():.2f}%"]
        lines.append(f"mask_mod={getattr(self.mask_mod, '__name__', self.mask_mod)}")
        return "BlockMask(\n" + "".join(f"    {line},\n" for line in lines) + ")"

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """All attributes, in FlexAttention's order: lengths, tensors, BLOCK_SIZE and mask_mod.

        Args:
            flatten: False leaves the lengths, and BLOCK_SIZE, tuples.
        """
        lengths, size = (self.seq_lengths, self.BLOCK_SIZE) if flatten else ((self.seq_lengths,), (self.BLOCK_SIZE,))
        return (*lengths, *(getattr(self, name) for name in (*_KEPT, *_TRANSPOSED, *_UNUSED)), *size, self.mask_mod)

    def __getitem__(self, index: Any) -> BlockMask:
        """The mask of some sequences, heads and query blocks: block_mask[b], block_mask[:, h], block_mask[:, :, blocks].

        An integer keeps its axis. The lengths are those of the whole mask, and the mask_mod has to be set:

        >>> part = block_mask[:, :, n // block_mask.BLOCK_SIZE[0]]
        >>> part.seq_lengths = (1, block_mask.seq_lengths[1])
        >>> part.mask_mod = lambda b, h, q_idx, kv_idx: block_mask.mask_mod(b, h, q_idx + n, kv_idx)
        """
        entries = index if isinstance(index, tuple) else (index,)
        sizes = self.kv_num_blocks.shape
        places = tuple(_entry(x, sizes[axis] if axis < len(sizes) else 0) for axis, x in enumerate(entries))
        given: dict[str, Any] = {name: None if x is None else x[places] for name, x in ((name, getattr(self, name)) for name in _KEPT)}
        given |= {"BLOCK_SIZE": self.BLOCK_SIZE, "mask_mod": _of_a_slice, "seq_lengths": self.seq_lengths}
        return self.from_kv_blocks(**given, compute_q_blocks=self._has_q_blocks())

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """The mask of the first queries and keys."""
        for name, new, old in zip(("new_q_len", "new_kv_len"), (new_q_len, new_kv_len), self.seq_lengths, strict=True):
            if not is_whole(new) or not 0 <= new <= old:
                raise ValueError(f"{name}: {shown(new)}; accepted is 0 to {old}, the mask's own length")
        lengths = (int(new_q_len), int(new_kv_len))
        rows, columns = (-(-length // size) for length, size in zip(lengths, self.BLOCK_SIZE, strict=True))
        nk = self.kv_indices.shape[-1]
        tensors: list[Any] = []
        for number, indices in ((self.kv_num_blocks, self.kv_indices), (self.full_kv_num_blocks, self.full_kv_indices)):
            if number is None or indices is None:
                tensors += [None, None]
            else:
                tensors += _ordered(_grid(number, indices, nk)[..., :rows, :columns])
        given: dict[str, Any] = {**dict(zip(_KEPT, tensors, strict=True)), "BLOCK_SIZE": self.BLOCK_SIZE, "mask_mod": self.mask_mod}
        return self.from_kv_blocks(**given, seq_lengths=lengths, compute_q_blocks=self._has_q_blocks())

    def _has_q_blocks(self) -> bool:
        return vars(self).get("q_indices", True) is not None

    def to(self, device: torch.device | str) -> BlockMask:
        """The mask on a device. What mask_mod reads stays where it is."""
        moved = type(self).__new__(type(self))
        vars(moved).update({name: x.to(device) if isinstance(x, Tensor) else x for name, x in vars(self).items()})
        if self._source is not None:
            moved._source = self._source._replace(blocks=self._source.blocks.to(device))
        moved._ready = None
        if self._ready is not None and is_ready(self, self._ready):
            blocks, function = self._ready[1]
            moved._ready = (state_of(moved), Ready(None if blocks is None else blocks.to(device), function))
        return moved


def is_block_mask(x: Any) -> bool:
    """Whether x is a BlockMask, of this module or of PyTorch."""
    return isinstance(x, BlockMask) or (pytorchs is not None and isinstance(x, pytorchs.BlockMask))


def is_slice(mask: Any) -> bool:
    """Whether the mask is a part of another one, and has no mask_mod yet."""
    return mask.mask_mod in (_of_a_slice, getattr(pytorchs, "_sliced_mask_mod_error", _of_a_slice))


@outside_graphs
def create_block_mask(
    mask_mod: MaskMod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_SIZE, separate_full_blocks: bool = True,
) -> BlockMask:  # fmt: skip
    """The mask of a function, without the arguments that have no effect."""
    size = _sizes(BLOCK_SIZE)
    if device is None:
        device = default_device()
    given: dict[str, Any] = {"function": mask_mod, "batch": 1 if B is None else B, "heads": 1 if H is None else H}
    given |= {"seqlen_q": Q_LEN, "seqlen_k": KV_LEN}
    blocks = _of_function(given, size, device, exact=True)
    fits = all(each % _UNIT == 0 for each in size)
    ready = Ready(blocks if fits else _of_function(given, (DEFAULT_SIZE, DEFAULT_SIZE), device), None)
    return BlockMask._of(_Source(blocks, int(given["batch"]), int(given["heads"]), bool(separate_full_blocks)), size, mask_mod, ready)


@torch.no_grad()  # what a mask reads has no gradient, whether or not it requires one
def _of_function(given: dict[str, Any], size: tuple[int, int], device: Any, exact: bool = False) -> Blocks:
    more = {"block_q": size[0], "block_k": size[1], "exact": exact, "device": device}
    return called(_NAMES, Blocks.from_function, **given, **more)


def default_device() -> Any:
    """Where FlexAttention makes masks."""
    accelerator = getattr(torch, "accelerator", None)  # PyTorch 2.6
    if accelerator is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return accelerator.current_accelerator() or "cpu"


# From a mask to what attention() takes


# What was made of PyTorch's own masks.
_of_pytorchs: weakref.WeakKeyDictionary[Any, tuple[tuple[Any, ...], Ready]] = weakref.WeakKeyDictionary()


def state_of(mask: Any) -> tuple[Any, ...]:
    """What a mask is made of: objects that are compared by identity, and how often the tensors were written."""
    fields = vars(mask)
    tensors = [fields.get(name) for name in _KEPT]
    versions = [None if x is None or x.is_inference() else x._version for x in tensors]
    return (*(fields[name] for name in _DESCRIBED), *tensors, *versions)


def is_ready(mask: Any, ready: tuple[tuple[Any, ...], Ready] | None) -> bool:
    return ready is not None and all(x is y or (type(x) in (int, tuple) and x == y) for x, y in zip(ready[0], state_of(mask), strict=True))


def ready(mask: Any) -> Ready:
    """What hides the same as the mask, of this module or of PyTorch."""
    if not is_traced_by_dynamo():
        return _ready(mask)
    if isinstance(mask, BlockMask) and mask._source is not None and mask._ready is not None:
        return mask._ready[1]  # in the graph; a write into the tensors of a function's mask would not be seen
    return _ready_outside(mask)


def _ready(mask: Any) -> Ready:
    found = mask._ready if isinstance(mask, BlockMask) else _of_pytorchs.get(mask)
    if found is None or not is_ready(mask, found):
        made = _made_ready(mask)
        found = (state_of(mask), made)
        if isinstance(mask, BlockMask):
            mask._ready = found
        else:
            _of_pytorchs[mask] = found
    return found[1]


_ready_outside = outside_graphs(_ready)


def _made_ready(mask: Any) -> Ready:
    mask_mod = mask.mask_mod
    nothing = (noop_mask, getattr(pytorchs, "noop_mask", noop_mask))
    function = None if any(mask_mod is each for each in nothing) else mask_mod
    size, lengths = mask.BLOCK_SIZE, mask.seq_lengths
    if tuple(size) == (_EVERYTHING, _EVERYTHING):
        return Ready(None, function)
    kept = _checked_grid(mask, "kv_num_blocks", "kv_indices")
    if mask.full_kv_num_blocks is not None:
        whole = _checked_grid(mask, "full_kv_num_blocks", "full_kv_indices")
        kept = kept | whole
        if function is not None and not _is_true_in(whole, function, lengths, size):
            function = or_masks(is_among(whole, *size), function)
    if any(each % _UNIT for each in size):
        within = is_among(kept, *size)
        given = {"function": within if function is None else and_masks(within, function), "batch": kept.shape[0], "heads": kept.shape[1]}
        given |= {"seqlen_q": lengths[0], "seqlen_k": lengths[1]}
        return Ready(_of_function(given, (DEFAULT_SIZE, DEFAULT_SIZE), kept.device), None)
    return Ready(Blocks.from_kept(kept, *size, *lengths), function)


def _is_true_in(whole: Tensor, function: MaskMod, lengths: tuple[int, int], size: tuple[int, int]) -> bool:
    """Whether it is certain that a function is True in all blocks that `whole` names. It mostly is, and then needs no table of them."""
    if not whole.any():
        return True
    if whole.shape[2] == 1:  # as in decoding, where each token has a mask of its own
        return False
    given = {"function": function, "batch": whole.shape[0], "heads": whole.shape[1], "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    try:
        _, found = _grids(_of_function(given, size, None))
    except (TypeError, ValueError, NotImplementedError):  # attention() says so
        return False
    return not (whole & ~found.to(whole.device)).any()


def _checked_grid(mask: Any, name: str, indices_name: str) -> Tensor:
    """Whether each block is among those that two tensors name, bool (B|1, H|1, query blocks, key blocks)."""
    number, indices = getattr(mask, name), getattr(mask, indices_name)
    rows, columns = (-(-length // size) for length, size in zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True))
    if indices.shape[-2] < rows:
        accepted = f"accepted are {rows} rows, for {mask.seq_lengths[0]} queries in blocks of {mask.BLOCK_SIZE[0]}"
        raise ValueError(f"{indices_name}: {indices.shape[-2]} rows; {accepted}")
    columns = max(columns, indices.shape[-1])
    outside = _counted(number, indices) & ((indices < 0) | (indices >= columns))
    if outside.any():
        raise ValueError(
            f"{indices_name}: block {int(indices[outside][0])}; accepted are 0 to {columns - 1}, for {mask.seq_lengths[1]} keys"
        )
    found = _grid(number, indices, columns)[..., :rows, : -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])]
    return found[(None,) * (4 - found.dim())]


# Blocks as a grid of bools, and as counts and indices


def _counted(number: Tensor, indices: Tensor) -> Tensor:
    return torch.arange(indices.shape[-1], device=indices.device) < number[..., None]


def _grid(number: Tensor, indices: Tensor, columns: int) -> Tensor:
    counts = _counted(number, indices) & (indices >= 0) & (indices < columns)
    found = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    # What does not count goes into a column that is dropped.
    return found.scatter_(-1, torch.where(counts, indices.long(), columns), True)[..., :columns]


def _ordered(grid: Tensor) -> tuple[Tensor, Tensor]:
    indices = torch.argsort(grid.int(), dim=-1, descending=True, stable=True)
    return grid.sum(-1, dtype=torch.int32), indices.int()


def _by_queries(number: Any, indices: Any, full_number: Any, full_indices: Any) -> dict[str, Tensor | None]:
    """The tensors by key blocks, of those by query blocks."""
    found: list[Tensor | None] = []
    for n, where in ((number, indices), (full_number, full_indices)):
        found += (None, None) if n is None else _ordered(_grid(n, where, where.shape[-1]).transpose(-2, -1))
    return dict(zip(_TRANSPOSED, found, strict=True))


def _grids(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Which blocks are kept, and which are visible as a whole."""
    kept: Tensor = blocks.to_kept()
    whole = kept.clone()
    whole[kept] = torch.as_tensor(blocks.full, device=kept.device)
    return kept, whole


def _entry(x: Any, size: int) -> Any:
    """An entry of an index, which keeps its axis."""
    if isinstance(x, Tensor) and not x.dim() and x.dtype != torch.bool:
        return x.reshape(1)
    if not is_whole(x):
        return x
    if not -size <= x < size:
        raise IndexError(f"index {x}; accepted is {-size} to {size - 1}")
    return slice(x % size, x % size + 1)


def _sizes(given: Any) -> tuple[int, int]:
    several = isinstance(given, (tuple, list))
    sizes = tuple(given) if several else (given, given)
    wrong: Wrong = []
    if len(sizes) != 2:
        wrong.append(ValueError(f"BLOCK_SIZE: {shown(given)}; accepted is an integer, or two: those of queries and keys"))
    for size in sizes:
        is_integer(wrong, "BLOCK_SIZE", size, 1, 2**31 - 1)
    refuse(*wrong)
    return int(sizes[0]), int(sizes[1])


def _wrong_lengths(given: Any) -> Exception | None:
    if isinstance(given, (tuple, list)) and len(given) == 2 and all(is_whole(x) and x >= 0 for x in given):
        return None
    return ValueError(f"seq_lengths: {shown(given)}; accepted are two integers, the numbers of queries and of keys")


def _wrong_tensors(given: dict[str, Any]) -> list[Any]:
    """What is wrong with the blocks' tensors."""
    found: list[Any] = []
    for name, x in given.items():
        optional = name.startswith("full")
        if x is not None or not optional:
            refused = tensor_or_refusal(name, x, "a torch.Tensor of integers")
            found.append(refused if isinstance(refused, Exception) else None)
    if any(found):
        return found
    for number, indices in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        n, where = given.get(number), given.get(indices)
        if (n is None) != (where is None):
            found.append(TypeError(f"{number if n is None else indices}: None beside the other one; accepted are both, or none"))
        elif isinstance(n, Tensor) and isinstance(where, Tensor) and (where.dim() < 2 or n.shape != where.shape[:-1]):
            accepted = "accepted are (..., query blocks) and (..., query blocks, key blocks)"
            found.append(ValueError(f"{number}, {indices}: shapes {tuple(n.shape)}, {tuple(where.shape)}; {accepted}"))
    return found
