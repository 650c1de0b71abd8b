"""Block-sparse masks: which blocks of the score matrix are kept."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from copy import copy
from functools import lru_cache
from itertools import chain
from operator import index
from typing import Any

from ._abi import MAX_RANK, outside_graphs
from ._checks import Wrong, flag, is_integer, refusal
from ._core import ffi, lib
from ._function import CAPTURED, FIELDS, SIGNATURES, array_read_by, recorded_mask, struct_of
from ._graph import decoded
from ._messages import kind, shown
from ._refusals import failure, refusing
from .arrays.base import Array, Framework
from .arrays.known import framework_like, framework_of, unfit

_MOST = 2**31 - 1  # the CSR is int32
# The least and the largest value of integer arguments.
_LENGTH, _BLOCK, _COUNT, _STRIDE = (0, 2**63 - 1), (1, _MOST), (0, _MOST), (1, _MOST)
FUNCTION = FIELDS["mask"]


class BlockMask:
    """Keeps or skips whole blocks of block_q queries by block_k keys. Skipped blocks are not computed, forward or backward.

    It joins the other masks: a score counts if its block is kept and if causal, window and mask let it through. One mask serves all batches
    or heads if its own size there is 1; otherwise each has its own. The lengths of the call must be the mask's. If the mask is a pattern
    whose two lengths differ, a call with causal, window or alibi_slopes must also have the mask's alignment. With cu_seqlens, blocks are
    counted within each sequence, and the mask's lengths are max_seqlen_q and max_seqlen_k (Tq and Tk without them).

    The blocks are held as an int32 CSR: query block i of (batch b, head h) keeps the key blocks ``cols[rows[b, h, i]:rows[b, h, i + 1]]``,
    which ascend; the offsets are absolute in cols. The transpose (key block to query blocks) is built along with it for the backward.

    A mask of NumPy arrays also serves torch tensors, and the other way round. A mask that is made from arrays holds arrays of their kind.
    causal() and the other patterns make arrays of the kind of `like`, where it lies; without it they make torch tensors if the program has
    imported torch, and NumPy arrays otherwise.

    Args:
        rows: int32 (B|1, H|1, nq + 1), nq = ceil(seqlen_q / block_q).
        cols: int32 (kept,).
        seqlen_q, seqlen_k: the lengths of queries and keys.
        block_q, block_k: the size of a block. attention() takes multiples of 16.

    Raises:
        TypeError, ValueError: an argument is not as described above.

    Sources: FlashAttention, block-sparse (Dao et al. 2022, arXiv:2205.14135, section 3.3).
    """

    rows: Array
    cols: Array
    rows_t: Array
    cols_t: Array
    alignment: str | None = None  # None if the pattern does not depend on it
    function: Callable[..., Any] | None = None  # the one of from_function(), which attention() applies as well
    # For each entry of cols, and of cols_t, whether all of the block is visible: int32, as attention() hands it on. Empty: not known.
    full_arrays: tuple[Array, ...] = ()
    _has_room: bool = False  # whether cols and cols_t are longer than what rows count, which the host then does not know
    made_for: tuple[int | None, int | None] = (None, None)  # B if the function depends on b, and H if it depends on h

    @outside_graphs
    def __init__(self, rows: Array, cols: Array, seqlen_q: int, seqlen_k: int, block_q: int, block_k: int):
        lengths = _integers(
            seqlen_q=(seqlen_q, _LENGTH), seqlen_k=(seqlen_k, _LENGTH), block_q=(block_q, _BLOCK), block_k=(block_k, _BLOCK)
        )
        self.seqlen_q, self.seqlen_k, self.block_q, self.block_k = lengths
        _limit_grid(*lengths)
        framework = framework_of("rows", rows)
        nq, nk = self._grid
        for name, x in {"rows": rows, "cols": cols}.items():
            if (refused := unfit(name, x, framework, "rows") or framework.without_values(name, x)) is not None:
                raise refused
            if x.dtype != framework.xp.int32:
                raise refusing(TypeError, name, f"{x.dtype}; accepted is a {framework.name} of int32")
        if rows.ndim != 3 or rows.shape[2] != nq + 1:
            raise refusing(
                ValueError, "rows", f"shape {tuple(rows.shape)}; accepted is (B|1, H|1, {nq + 1}), one more than the query blocks"
            )
        if cols.ndim != 1:
            raise refusing(ValueError, "cols", f"shape {tuple(cols.shape)}; accepted is (kept,)")
        batch, heads = rows.shape[:2]
        kept = cols.shape[0]
        host_rows, host_cols = framework.on_host(rows), framework.on_host(cols)
        rows_t = array("i", bytes(4 * batch * heads * (nk + 1)))
        cols_t = array("i", bytes(4 * kept))
        sizes = (batch * heads, nq, nk, kept)
        csr = (_pointer(framework, "int32_t *", host_rows), _pointer(framework, "int32_t *", host_cols))
        to = (ffi.from_buffer("int32_t[]", rows_t), ffi.from_buffer("int32_t[]", cols_t))
        if not lib.strobe_glue_transpose(*sizes, *csr, *to, ffi.NULL, ffi.NULL):
            accepted = (
                f"accepted are absolute offsets that ascend from 0 to {kept}, the size of cols, and key blocks of 0 to {nk - 1}, strictly "
                "ascending within a row"
            )
            if not nk:
                accepted = "accepted are offsets of 0 and empty cols, for there are no keys"
            raise ValueError(f"rows, cols: not a CSR of {nq} x {nk} blocks; {accepted}")
        self.rows, self.cols = rows, cols
        self.rows_t = framework.int32(rows_t, rows).reshape(batch, heads, nk + 1)
        self.cols_t = framework.int32(cols_t, rows)

    @property
    def _grid(self) -> tuple[int, int]:
        return -(-self.seqlen_q // self.block_q), -(-self.seqlen_k // self.block_k)

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """rows and cols, and those of the transpose."""
        return self.rows, self.cols, self.rows_t, self.cols_t

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B|1, H|1, query blocks, key blocks)."""
        return (self.rows.shape[0], self.rows.shape[1], *self._grid)

    @property
    def density(self) -> float:
        """The fraction of blocks that are kept, or 0.0 if there are no blocks."""
        batch, heads, nq, nk = self.shape
        return self._kept / max(batch * heads * nq * nk, 1)

    @property
    def _kept(self) -> int:
        """How many blocks are kept."""
        return int(self.rows[-1, -1, -1]) if self._has_room else int(self.cols.shape[0])

    @property
    def full(self) -> Array | None:
        """Which of the kept blocks are visible as a whole, bool (kept,); None unless the mask was made from a function."""
        return self.full_arrays[0][: self._kept] != 0 if self.full_arrays else None

    def __repr__(self) -> str:
        batch, heads, nq, nk = self.shape
        return (
            f"BlockMask({self.seqlen_q} queries in {nq} blocks of {self.block_q}, {self.seqlen_k} keys in {nk} blocks of {self.block_k}, "
            f"batch {batch}, heads {heads}, {self._kept} blocks kept, density {self.density:.3g})"
        )

    def to(self, device: Any) -> BlockMask:
        """This mask as torch tensors on `device`, as torch.device() takes it."""
        import torch

        from .arrays.torch import TORCH

        try:
            there = torch.device(device)
        except (RuntimeError, TypeError):
            raise refusing(TypeError, "device", f"{shown(device)}; accepted is a torch.device, or the name of one") from None
        moved = copy(self)
        moved.rows, moved.cols, moved.rows_t, moved.cols_t = (TORCH.own(x).to(there) for x in self.arrays)
        moved.full_arrays = tuple(TORCH.own(x).to(there) for x in self.full_arrays)
        if self._has_room and there.type == "cpu":  # where lists end with what rows count
            kept = self._kept
            moved.cols, moved.cols_t, *full = (x[:kept] for x in (moved.cols, moved.cols_t, *moved.full_arrays))
            moved.full_arrays, moved._has_room = tuple(full), False
        return moved

    def to_kept(self) -> Array:
        """Which blocks are kept: bool (B|1, H|1, query blocks, key blocks)."""
        framework = framework_of("rows", self.rows)
        batch, heads, nq, nk = self.shape
        counts = (self.rows[..., 1:] - self.rows[..., :-1]).reshape(-1)
        block_rows = framework.cast(framework.int32(array("i", range(batch * heads * nq)), self.rows), framework.xp.int64)
        kept = framework.empty(self.rows, (batch * heads * nq * nk,), framework.bool_dtype)
        kept[...] = False
        kept[framework.repeat(block_rows, counts, 0) * nk + self.cols[: self._kept]] = True
        return kept.reshape(self.shape)

    def to_dense(self) -> Array:
        """Which scores lie in a kept block: bool (B|1, H|1, seqlen_q, seqlen_k)."""
        framework = framework_of("rows", self.rows)
        # A block may be larger than the matrix: only the part within the matrix is made.
        block_q, block_k = min(self.block_q, self.seqlen_q), min(self.block_k, self.seqlen_k)
        dense = framework.repeat(framework.repeat(self.to_kept(), block_q, 2), block_k, 3)
        return dense[:, :, : self.seqlen_q, : self.seqlen_k]

    @outside_graphs
    def plot(self, batch: int = 0, head: int = 0, *, width: int = 64) -> str:
        """A picture of one matrix in text, to be printed: a row of characters for the query blocks from the first on, a column for the key
        blocks. "█" is a block that is visible as a whole (without from_function(): that is kept), "▒" one that is visible in part, "·" one
        that is hidden.

        Args:
            batch, head: the sequence and the head; of a mask that serves all of them, any.
            width: the most characters in a row. If there are more blocks, a character stands for several in both directions, and is "▒"
                unless all of them are alike.

        Raises:
            TypeError, ValueError: an argument is not as described above.
        """
        batch, head, width = _integers(batch=(batch, _COUNT), head=(head, _COUNT), width=(width, _STRIDE))
        of_batch, of_heads, nq, nk = self.shape
        wrong: Wrong = [
            refusing(ValueError, name, f"{n}; accepted is 0 to {size - 1}, or any if the mask has one matrix for all")
            for name, n, size in (("batch", batch, of_batch), ("head", head, of_heads))
            if n >= size != 1
        ]
        if wrong:
            raise refusal(wrong)
        framework = framework_of("rows", self.rows)
        rows = framework.on_host(self.rows[min(batch, of_batch - 1), min(head, of_heads - 1)]).tolist()
        cols = framework.on_host(self.cols)
        full = framework.on_host(self.full_arrays[0]) if self.full_arrays else None
        step = max(-(-max(nq, nk) // width), 1)
        lines = []
        for top in range(0, nq, step):
            bottom = min(top + step, nq)
            seen, whole = [0] * -(-nk // step), [0] * -(-nk // step)
            for n, column in enumerate(cols[rows[top] : rows[bottom]].tolist(), rows[top]):
                seen[column // step] += 1
                whole[column // step] += full is None or bool(full[n])
            sizes = [(bottom - top) * (min(left + step, nk) - left) for left in range(0, nk, step)]
            cells = zip(seen, whole, sizes, strict=True)
            lines.append("".join("·" if not kept else "█" if full == size else "▒" for kept, full, size in cells))
        return "\n".join(lines)

    @classmethod
    @outside_graphs
    def from_kept(cls, kept: Array, block_q: int, block_k: int, seqlen_q: int | None = None, seqlen_k: int | None = None) -> BlockMask:
        """Makes a mask from an array that says which blocks are kept.

        Args:
            kept: bool (..., query blocks, key blocks) with up to two leading axes, (B|1, H|1).
            block_q, block_k: the size of a block.
            seqlen_q, seqlen_k: the lengths, if the last block is not full. None: it is full.
        """
        framework, kept = _matrices("kept", kept)
        nq, nk = kept.shape[2:]
        sizes = []
        for name, length, count, block in (("seqlen_q", seqlen_q, nq, block_q), ("seqlen_k", seqlen_k, nk, block_k)):
            (block,) = _integers(**{name.replace("seqlen", "block"): (block, _BLOCK)})
            (length,) = [count * block] if length is None else _integers(**{name: (length, _LENGTH)})
            if -(-length // block) != count:
                raise refusing(ValueError, name, f"{length}; accepted is a length of {count} blocks of {block}, as kept has")
            sizes.append(length)
        host = framework.on_host(kept)
        return cls._beside(kept, _csr(_pointer(framework, "uint8_t *", host), kept.shape), (sizes[0], sizes[1], block_q, block_k))

    @classmethod
    @outside_graphs
    def from_dense(cls, mask: Array, block_q: int, block_k: int) -> BlockMask:
        """Keeps each block in which any element of `mask` is True.

        Whole blocks are kept. If `mask` cuts through blocks, pass it to the attention as `mask` as well.

        Args:
            mask: bool (..., Sq, Sk) with up to two leading axes, (B|1, H|1).
            block_q, block_k: the size of a block.
        """
        framework, mask = _matrices("mask", mask)
        block_q, block_k = _integers(block_q=(block_q, _BLOCK), block_k=(block_k, _BLOCK))
        batch, heads, seqlen_q, seqlen_k = mask.shape
        shape = (batch, heads, -(-seqlen_q // block_q), -(-seqlen_k // block_k))
        kept = ffi.new("uint8_t[]", batch * heads * shape[2] * shape[3])
        host = framework.on_host(mask)
        pointer = _pointer(framework, "uint8_t *", host)
        lib.strobe_glue_blocks_of_mask(pointer, batch * heads, seqlen_q, seqlen_k, block_q, block_k, kept)
        return cls._beside(mask, _csr(kept, shape), (seqlen_q, seqlen_k, block_q, block_k))

    @classmethod
    def _beside(cls, like: Array, csr: tuple[array[int], array[int]], sizes: tuple[int, int, int, int]) -> BlockMask:
        """A mask on the device of `like` (batch, heads, ...), from a CSR that has an offset for each row of each matrix."""
        framework = framework_of("like", like)
        rows, cols = (framework.int32(x, like) for x in csr)
        seqlen_q, _, block_q, _ = sizes
        return cls(rows.reshape(*like.shape[:2], -(-seqlen_q // block_q) + 1), cols, *sizes)  # -1 would fail: batch may be 0

    @classmethod
    def causal(
        cls, seqlen_q: int, seqlen_k: int, block_q: int, block_k: int, *, alignment: str = "bottom_right", like: Array | None = None
    ) -> BlockMask:
        """Keeps the blocks of which causal attention sees any part."""

        def row(diagonal: range, nk: int) -> list[Collection[int]]:
            return [range(min(diagonal.stop, nk))]

        return cls._of_pattern(seqlen_q, seqlen_k, block_q, block_k, alignment, like, row)

    @classmethod
    def local_global(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        block_q: int,
        block_k: int,
        *,
        local_blocks: int = 1,
        global_blocks: int = 1,
        alignment: str = "bottom_right",
        like: Array | None = None,
    ) -> BlockMask:
        """Keeps `local_blocks` key blocks on either side of the diagonal. The first `global_blocks` see all blocks and are seen by all.

        Sources: Longformer (Beltagy et al. 2020, arXiv:2004.05150), BigBird (Zaheer et al. 2020, arXiv:2007.14062).
        """
        near, everywhere = _integers(local_blocks=(local_blocks, _COUNT), global_blocks=(global_blocks, _COUNT))

        def row(diagonal: range, nk: int) -> list[Collection[int]]:
            if any(0 <= d < everywhere for d in diagonal):
                return [range(nk)]
            return [range(min(everywhere, nk)), range(max(diagonal.start - near, everywhere), min(diagonal.stop + near, nk))]

        return cls._of_pattern(seqlen_q, seqlen_k, block_q, block_k, alignment, like, row)

    @classmethod
    def strided(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        block_q: int,
        block_k: int,
        *,
        stride: int,
        local_blocks: int = 1,
        alignment: str = "bottom_right",
        like: Array | None = None,
    ) -> BlockMask:
        """Keeps `local_blocks` key blocks on either side of the diagonal, and the last of every `stride` key blocks.

        Sources: Sparse Transformers, "fixed" attention (Child et al. 2019, arXiv:1904.10509).
        """
        stride, near = _integers(stride=(stride, _STRIDE), local_blocks=(local_blocks, _COUNT))

        def row(diagonal: range, nk: int) -> list[Collection[int]]:
            low, high = max(diagonal.start - near, 0), min(diagonal.stop + near, nk)
            after = max(low, high)
            return [range(stride - 1, min(low, nk), stride), range(low, high), range(after + (stride - 1 - after) % stride, nk, stride)]

        return cls._of_pattern(seqlen_q, seqlen_k, block_q, block_k, alignment, like, row)

    @classmethod
    def butterfly(
        cls, seqlen_q: int, seqlen_k: int, block_q: int, block_k: int, *, alignment: str = "bottom_right", like: Array | None = None
    ) -> BlockMask:
        """Keeps the diagonal and the key blocks whose number differs from the query block's in one bit: log2(blocks) + 1 blocks in a row.

        Sources: Pixelated Butterfly, flat butterfly (Chen et al. 2021, arXiv:2112.00029).
        """

        def row(diagonal: range, nk: int) -> list[Collection[int]]:
            bits = range((max(nk, diagonal.stop) - 1).bit_length())
            return [sorted({j for d in diagonal for j in (d, *(d ^ (1 << bit) for bit in bits)) if 0 <= j < nk})]

        return cls._of_pattern(seqlen_q, seqlen_k, block_q, block_k, alignment, like, row)

    @classmethod
    @outside_graphs
    def from_function(
        cls,
        function: Callable[..., Any],
        batch: int,
        heads: int,
        seqlen_q: int,
        seqlen_k: int,
        *,
        block: int = 128,
        block_q: int | None = None,
        block_k: int | None = None,
        exact: bool = False,
        device: Any = None,
    ) -> BlockMask:
        """Keeps each block in which function(b, h, i, j) may be True, for sequence b, query head h, query i and key j.

        The mask carries the function, and attention(block_mask=...) hides what it hides. Bounds of the values that the function takes in a
        block tell whether it is False for all pairs, True for all, or has to be evaluated. So nothing of size Sq x Sk is computed: time and
        memory are linear in the blocks at the borders of what is visible, and in the arrays that the function reads.

        The function is recorded as one of attention(mask=...) is, and what it reads has to stay as it is: make the mask again after a
        change. If it reads tensors on a GPU, that GPU finds the blocks, in time that is linear in all blocks, and the host waits once for
        their number. While a CUDA graph is captured it does not wait: cols has then room for all blocks, and rows say what is kept.

        Args:
            function: g(b, h, i, j) → bool, True = attend, as for attention(mask=g) and as FlexAttention's mask_mod.
            batch, heads: B and H of the call. There is one matrix for all sequences, or heads, if the function does not depend on b, or h.
            seqlen_q, seqlen_k: the lengths of queries and keys.
            block: the size of a block. block_q, block_k: the same for queries and for keys, in place of block.
            exact: also look into blocks that the bounds leave open, until it is certain which of their pairs are visible. Blocks without a
                visible pair are then dropped, but for those in which the rounding of reals to float32 or float64 decides. It costs
                up to block_q * block_k evaluations for each such block, by the host, which copies what the function reads.
            device: of the mask, which then is of torch tensors. None: that of the arrays that the function reads, if there are any.

        Raises:
            TypeError, ValueError: an argument is not as described above, or the function has no graph.
            NotImplementedError: the function reads a tensor that requires grad.

        Sources: interval arithmetic (Moore 1966); the result is what FlexAttention's create_block_mask (Dong et al. 2024,
        arXiv:2412.05496) finds by evaluating every pair.
        """
        if not callable(function):
            raise refusing(TypeError, "function", f"{kind(function)}; accepted is a function {SIGNATURES['mask']}")
        sizes = {"batch": (batch, _LENGTH), "heads": (heads, _LENGTH), "seqlen_q": (seqlen_q, _LENGTH), "seqlen_k": (seqlen_k, _LENGTH)}
        sizes |= {"block": (block, _BLOCK), "block_q": (block if block_q is None else block_q, _BLOCK)}
        sizes["block_k"] = (block if block_k is None else block_k, _BLOCK)
        batch, heads, seqlen_q, seqlen_k, _, block_q, block_k = _integers(**sizes)
        _limit_grid(seqlen_q, seqlen_k, block_q, block_k)
        wrong: Wrong = []
        is_exact = flag(wrong, "exact", exact)
        if wrong:
            raise refusal(wrong)
        like = _like_of(function, device)
        framework = framework_like(like, "strobe.BlockMask")
        fields = recorded_mask(function, framework)
        depends = _operations_of(fields[FUNCTION])
        matrices = (batch if "BATCH" in depends else 1, heads if "HEAD" in depends else 1)
        sizes_given = (batch, heads, seqlen_q, seqlen_k, block_q, block_k)
        made = None if is_exact else cls._made_on_gpu(framework, fields, sizes_given, matrices, like)
        if made is None:
            call = _FunctionCall(framework, fields, sizes_given, is_exact)
            nq = -(-seqlen_q // block_q)
            rows, cols, full = call.kept(matrices[0] * matrices[1] * (nq + 1))
            made = cls(
                framework.int32(rows, like).reshape(*matrices, nq + 1), framework.int32(cols, like), seqlen_q, seqlen_k, block_q, block_k
            )
            made.full_arrays = tuple(framework.int32(x, like) for x in _marks(rows, cols, full, made.shape))
        made.function = function
        made.made_for = (batch if "BATCH" in depends else None, heads if "HEAD" in depends else None)
        return made

    @classmethod
    def _made_on_gpu(
        cls, framework: Framework, fields: dict[str, Any], sizes: tuple[int, ...], matrices: tuple[int, int], like: Array | None
    ) -> BlockMask | None:
        """The mask of a function, found on the GPU of `like`; None if that is no GPU, or if the host has to do it."""
        call = like is not None and _GpuCall(framework, fields, sizes, like)
        if not call or not call.fits:
            return None
        made = cls.__new__(cls)
        _, _, made.seqlen_q, made.seqlen_k, made.block_q, made.block_k = sizes
        nq, nk = made._grid
        made.rows, made.rows_t = (framework.empty(like, (*matrices, n + 1), framework.xp.int32) for n in (nq, nk))
        lists, kept = call.lists(made.rows, made.rows_t)
        made.cols, made.cols_t, *marks = (lists[n] for n in range(4))
        made.full_arrays = tuple(marks)
        made._has_room = kept is None
        return made

    @classmethod
    @outside_graphs
    def _of_pattern(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        block_q: int,
        block_k: int,
        alignment: str,
        like: Array | None,
        row: Callable[[range, int], list[Collection[int]]],
    ) -> BlockMask:
        """A mask from row(diagonal, nk), which returns the key blocks (of nk) that a query block keeps, as ascending runs. `diagonal` are
        the key blocks at the positions of the block's queries; some may lie outside of the matrix."""
        lengths = _integers(
            seqlen_q=(seqlen_q, _LENGTH), seqlen_k=(seqlen_k, _LENGTH), block_q=(block_q, _BLOCK), block_k=(block_k, _BLOCK)
        )
        seqlen_q, seqlen_k, block_q, block_k = lengths
        if not isinstance(alignment, str) or alignment not in ("bottom_right", "top_left"):
            raise refusing(ValueError, "alignment", f"{shown(alignment)}; accepted is 'bottom_right' or 'top_left'")
        _limit_grid(seqlen_q, seqlen_k, block_q, block_k)
        offset = seqlen_k - seqlen_q if alignment == "bottom_right" else 0
        nk = -(-seqlen_k // block_k)
        rows, pieces = array("i", [0]), []
        for first in range(0, seqlen_q, block_q):
            last = min(first + block_q, seqlen_q) - 1
            of_row = row(range((first + offset) // block_k, (last + offset) // block_k + 1), nk)
            kept = rows[-1] + sum(map(len, of_row))
            _limit(kept)  # before the kept blocks fill memory
            rows.append(kept)
            pieces += of_row
        cols = array("i", chain.from_iterable(pieces))
        framework = framework_like(like, "strobe.BlockMask")
        if getattr(like, "is_meta", False):
            raise refusing(ValueError, "like", "on device meta; accepted is an array that has values")
        made = cls(framework.int32(rows, like)[None, None], framework.int32(cols, like), seqlen_q, seqlen_k, block_q, block_k)
        made.alignment = None if seqlen_q == seqlen_k else alignment
        return made


def _marks(rows: array[int], cols: array[int], full: bytes, shape: tuple[int, int, int, int]) -> tuple[array[int], array[int]]:
    """Numbers for the entries of a CSR, and for those of its transpose, from a byte for each entry."""
    batch, heads, nq, nk = shape
    marks = array("i", list(full))
    rows_t, cols_t, marks_t = array("i", bytes(4 * batch * heads * (nk + 1))), array("i", cols), array("i", marks)
    pointers = [ffi.from_buffer("int32_t[]", x) for x in (rows, cols, rows_t, cols_t, marks, marks_t)]
    lib.strobe_glue_transpose(batch * heads, nq, nk, len(cols), *pointers)
    return marks, marks_t


@lru_cache(maxsize=1024)
def _operations_of(text: str) -> frozenset[str]:
    """The names of the operations of a function's text."""
    return frozenset(operation for operation, *_ in decoded(text))


def _like_of(function: Callable[..., Any], device: Any) -> Array | None:
    """An array on whose device a function's mask is made; None if nothing determines the device."""
    if device is None:
        return array_read_by(function)
    import torch

    return torch.empty(0, device=device)


class _FunctionCall:
    """A call of strobe_mask_blocks, with all objects that must live as long."""

    def __init__(self, framework: Framework, fields: dict[str, Any], sizes: tuple[int, ...], exact: bool):
        self._mask = mask = ffi.new("strobe_block_mask *")
        mask.size = ffi.sizeof("strobe_block_mask")
        mask.mask_function, _ = self._function = struct_of(fields[FUNCTION])
        mask.batch, mask.heads, mask.seqlen_q, mask.seqlen_k, mask.block_q, mask.block_k = sizes
        mask.exact = exact
        self._alive: list[Any] = []
        for name in CAPTURED:
            if name in fields:
                tensor = ffi.new("strobe_tensor *")
                host = framework.on_host(fields[name])
                self._alive += [tensor, host, framework.view(tensor, name, host, False)]
                tensor.device_type, tensor.device_index = lib.STROBE_CPU, 0
                setattr(mask, name, tensor)
        _, _, _, seqlen_k, _, block_k = sizes
        self._columns = -(-seqlen_k // block_k)

    def kept(self, n_rows: int) -> tuple[array[int], array[int], bytes]:
        """The CSR of the kept blocks, and a byte for each: whether it is full."""
        room = min(n_rows * self._columns, 16 * (n_rows + self._columns))  # mostly enough; if not, the call is repeated
        to = ffi.new("strobe_kept_blocks *", {"size": ffi.sizeof("strobe_kept_blocks"), "most_rows": n_rows})
        while True:
            rows, cols, full = array("i", bytes(4 * n_rows)), array("i", bytes(4 * room)), bytearray(room)
            to.rows, to.cols, to.full = (ffi.from_buffer(f"{x} *", y) for x, y in (("int32_t", rows), ("int32_t", cols), ("uint8_t", full)))
            to.most_kept = room
            status = lib.strobe_mask_blocks(self._mask, to)
            if status != lib.STROBE_OK:
                raise failure(status)
            if to.kept <= room:
                return rows, cols[: to.kept], bytes(full[: to.kept])
            room = to.kept


_ROOM = 1 << 20  # blocks for which a GPU's lists have room at first


class _GpuCall:
    """A call of strobe_mask_blocks on the GPU of `like`, with all objects that must live as long. fits: whether it can be made."""

    def __init__(self, framework: Framework, fields: dict[str, Any], sizes: tuple[int, ...], like: Array):
        self._framework, self._like, self.fits = framework, like, False
        if str(getattr(like, "device", "cpu")).partition(":")[0] not in ("cpu", "cuda"):
            return
        place = ffi.new("strobe_tensor *")
        framework.view(place, "like", framework.empty(like, (0,), framework.xp.int32), False)
        if place.device_type != lib.STROBE_CUDA:
            return
        self._alive: list[Any] = []
        self._mask = mask = ffi.new("strobe_block_mask *", {"size": ffi.sizeof("strobe_block_mask")})
        mask.mask_function, _ = self._function = struct_of(fields[FUNCTION])
        mask.batch, mask.heads, mask.seqlen_q, mask.seqlen_k, mask.block_q, mask.block_k = sizes
        mask.device_type, mask.device_index = place.device_type, place.device_index
        for name in CAPTURED:
            if name in fields:
                tensor = ffi.new("strobe_tensor *")
                self._alive += [tensor, framework.view(tensor, name, fields[name], False)]
                if (tensor.device_type, tensor.device_index) != (place.device_type, place.device_index):
                    return
                setattr(mask, name, tensor)
        self._stream = framework.stream(like)
        if self._stream is not None:
            mask.stream = ffi.cast("void *", self._stream)
        self._to = ffi.new("strobe_kept_blocks *", {"size": ffi.sizeof("strobe_kept_blocks")})
        status = lib.strobe_mask_blocks(mask, self._to)  # the sizes
        self.fits = status == lib.STROBE_OK
        if not self.fits and status != lib.STROBE_UNSUPPORTED:
            raise failure(status)

    def lists(self, rows: Array, rows_t: Array) -> tuple[Array, int | None]:
        """Fills rows and rows_t. Returns cols, cols_t and both marks, int32 (4, kept), and how many blocks are kept. While the stream is
        captured the host cannot know that: then it is None, and the lists have room for all blocks."""
        framework, mask, to = self._framework, self._mask, self._to
        most = int(to.kept)
        if self._stream is not None:
            self._alive.append(workspace := framework.scratch(self._like, to.workspace_bytes))
            mask.workspace, mask.workspace_bytes = ffi.cast("void *", workspace[1]), to.workspace_bytes
        is_captured = self._stream is not None and framework.xp.cuda.is_current_stream_capturing()
        room = most if is_captured else min(most, _ROOM)
        to.rows, to.rows_t = (_pointer(framework, "int32_t *", x) for x in (rows, rows_t))
        to.most_rows, to.most_rows_t = to.n_rows, to.n_rows_t
        while True:
            lists = framework.empty(self._like, (4, room), framework.xp.int32)
            to.cols, to.cols_t, to.marks, to.marks_t = (_pointer(framework, "int32_t *", lists[n]) for n in range(4))
            to.most_kept = room
            status = lib.strobe_mask_blocks(mask, to)
            if status != lib.STROBE_OK:
                raise failure(status)
            if is_captured:
                return lists, None
            kept = int(to.kept)
            if kept <= room:
                exact = framework.empty(self._like, (4, -(-kept // 4) * 4), framework.xp.int32)[:, :kept]  # each begins at 16 bytes
                exact[...] = lists[:, :kept]
                return exact, kept
            room = kept


def _integers(**given: tuple[Any, tuple[int, int]]) -> list[int]:
    """Checks each argument's value against the least and the largest that are accepted."""
    wrong: Wrong = []
    for name, (x, bounds) in given.items():
        is_integer(wrong, name, x, *bounds)
    if wrong:
        raise refusal(wrong)
    return [index(x) for x, _ in given.values()]


def _limit(kept: int) -> None:
    if kept > _MOST:
        raise ValueError(f"{kept} blocks kept; accepted are {_MOST}, what the int32 of a CSR can count; larger blocks are fewer")


def _limit_grid(seqlen_q: int, seqlen_k: int, block_q: int, block_k: int) -> None:
    wrong: Wrong = [
        refusing(ValueError, f"seqlen_{side}", f"{length} in blocks of {block}; accepted are up to {_MOST} blocks, what an int32 can count")
        for side, length, block in (("q", seqlen_q, block_q), ("k", seqlen_k, block_k))
        if -(-length // block) > _MOST
    ]
    if wrong:
        raise refusal(wrong)


def _matrices(name: str, x: Array) -> tuple[Framework, Array]:
    """x as (B|1, H|1, rows, columns)."""
    framework = framework_of(name, x)
    if (refused := framework.without_values(name, x)) is not None:
        raise refused
    if x.dtype != framework.bool_dtype or not 2 <= x.ndim <= MAX_RANK:
        raise refusing(
            ValueError,
            name,
            f"{x.dtype} of shape {tuple(x.shape)}; accepted is bool of shape (..., rows, columns) with up to two axes before",
        )
    return framework, x[(None,) * (MAX_RANK - x.ndim)]


def _pointer(framework: Framework, ctype: str, x: Array) -> Any:
    return ffi.cast(ctype, framework.address(x))


def _csr(kept: Any, shape: tuple[int, ...]) -> tuple[array[int], array[int]]:
    """The CSR (offsets and indices) of the bytes `kept`, (batch, heads, rows, columns)."""
    batch, heads, nq, nk = shape
    offsets = array("i", bytes(4 * batch * heads * (nq + 1)))
    n = lib.strobe_glue_count_kept(kept, batch * heads, nq, nk, ffi.from_buffer("int32_t[]", offsets))
    _limit(n)
    indices = array("i", bytes(4 * n))
    lib.strobe_glue_indices_of_kept(kept, batch * heads, nq, nk, n, ffi.from_buffer("int32_t[]", indices))
    return offsets, indices
