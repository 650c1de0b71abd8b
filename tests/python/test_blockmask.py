"""BlockMask, of PyTorch and NumPy alike: its patterns are those of brute force, its CSR form and the transpose those of the dense blocks,
and the memory that making one takes grows with the blocks that it keeps."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch

import strobe
from strobe import BlockMask
from strobe._core import ffi, lib

# (Sq, Sk, block_q, block_k)
SIZES = [
    (64, 64, 16, 16),
    (100, 100, 16, 16),
    (70, 130, 16, 32),
    (130, 70, 32, 16),
    (1, 200, 16, 16),
    (200, 1, 16, 16),
    (0, 48, 16, 16),
    (33, 0, 16, 16),
]


def diagonal(sq: int, sk: int, block_q: int, block_k: int, alignment: str, i: int) -> set[int]:
    """The key blocks at the positions of the queries of block i, also those outside of the matrix."""
    offset = sk - sq if alignment == "bottom_right" else 0
    return {(token + offset) // block_k for token in range(i * block_q, min((i + 1) * block_q, sq))}


def kept_by_brute_force(sizes: tuple[int, int, int, int], alignment: str, keeps: Callable[[set[int], int], bool]) -> np.ndarray:
    sq, sk, block_q, block_k = sizes
    nq, nk = -(-sq // block_q), -(-sk // block_k)
    kept = np.zeros((nq, nk), bool)
    for i in range(nq):
        here = diagonal(*sizes, alignment, i)
        for j in range(nk):
            kept[i, j] = keeps(here, j)
    return kept


def near(here: set[int], j: int, blocks: int) -> bool:
    return min(here) - blocks <= j <= max(here) + blocks


PATTERNS = {
    "causal": (lambda s, a: BlockMask.causal(*s, alignment=a), lambda here, j: j <= max(here)),
    "local_global": (
        lambda s, a: BlockMask.local_global(*s, local_blocks=2, global_blocks=1, alignment=a),
        lambda here, j: near(here, j, 2) or j < 1 or 0 in here,
    ),
    "local": (lambda s, a: BlockMask.local_global(*s, local_blocks=0, global_blocks=0, alignment=a), lambda here, j: near(here, j, 0)),
    "global": (
        lambda s, a: BlockMask.local_global(*s, local_blocks=1, global_blocks=3, alignment=a),
        lambda here, j: near(here, j, 1) or j < 3 or any(0 <= d < 3 for d in here),
    ),
    "strided": (lambda s, a: BlockMask.strided(*s, stride=3, local_blocks=1, alignment=a), lambda here, j: near(here, j, 1) or j % 3 == 2),
    "strided 1": (lambda s, a: BlockMask.strided(*s, stride=1, local_blocks=0, alignment=a), lambda here, j: True),
    "butterfly": (
        lambda s, a: BlockMask.butterfly(*s, alignment=a),
        lambda here, j: any(d == j or (d >= 0 and (d ^ j).bit_count() == 1) for d in here),
    ),
}


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern(pattern, sizes, alignment):
    make, keeps = PATTERNS[pattern]
    blocks = make(sizes, alignment)
    expected = kept_by_brute_force(sizes, alignment, keeps)
    np.testing.assert_array_equal(blocks.to_kept()[0, 0], expected)
    assert_consistent(blocks)


def assert_consistent(blocks: BlockMask) -> None:
    """CSR and transpose agree with to_kept(), in the order and type that the library needs."""
    kept = np.asarray(blocks.to_kept())
    matrices = kept.reshape(kept.shape[0] * kept.shape[1], *kept.shape[2:])
    for rows, cols, dense in ((blocks.rows, blocks.cols, matrices), (blocks.rows_t, blocks.cols_t, matrices.swapaxes(1, 2))):
        rows, cols = np.asarray(rows), np.asarray(cols)
        assert rows.dtype == cols.dtype == np.int32
        assert rows.shape == (*kept.shape[:2], dense.shape[1] + 1)
        n = 0
        for offsets, matrix in zip(rows.reshape(-1, dense.shape[1] + 1), dense, strict=True):
            assert offsets[0] == n
            for i, row in enumerate(matrix):
                np.testing.assert_array_equal(cols[offsets[i] : offsets[i + 1]], np.flatnonzero(row))
            n = offsets[-1]
        assert n == len(cols) == matrices.sum()
    assert blocks.density == pytest.approx(kept.mean() if kept.size else 0.0)


@pytest.mark.parametrize("axes", [(), (1,), (3,), (1, 3), (2, 1), (2, 3)])
@pytest.mark.parametrize("array", [torch.from_numpy, np.asarray], ids=["torch", "numpy"])
def test_from_kept_and_back(axes, array):
    kept = np.random.default_rng(len(axes)).random((*axes, 5, 7)) < 0.4
    blocks = BlockMask.from_kept(array(kept), 16, 32)
    assert (blocks.seqlen_q, blocks.seqlen_k) == (80, 224)
    np.testing.assert_array_equal(blocks.to_kept(), kept.reshape((1,) * (2 - len(axes)) + kept.shape))
    assert isinstance(blocks.rows, type(array(kept)))
    assert_consistent(blocks)


@pytest.mark.parametrize("sizes", [(64, 96, 16, 16), (70, 50, 16, 32), (5, 5, 16, 16)])
def test_from_dense_keeps_blocks_with_any_element(sizes):
    sq, sk, block_q, block_k = sizes
    mask = np.random.default_rng(0).random((2, 1, sq, sk)) < 0.003
    blocks = BlockMask.from_dense(torch.from_numpy(mask), block_q, block_k)
    expected = np.zeros((2, 1, -(-sq // block_q), -(-sk // block_k)), bool)
    for b, h, i, j in np.argwhere(mask):
        expected[b, h, i // block_q, j // block_k] = True
    np.testing.assert_array_equal(blocks.to_kept(), expected)
    assert_consistent(blocks)
    wide = np.asarray(blocks.to_dense())
    assert wide.shape == mask.shape
    assert (wide >= mask).all()
    np.testing.assert_array_equal(wide, expected.repeat(block_q, 2).repeat(block_k, 3)[:, :, :sq, :sk])


def test_from_dense_of_any_strides():
    mask = torch.rand(3, 40, 64).permute(2, 0, 1)[::2] > 0.98
    found = BlockMask.from_dense(mask.transpose(0, 1), 16, 16)
    assert torch.equal(found.to_kept(), BlockMask.from_dense(mask.transpose(0, 1).contiguous(), 16, 16).to_kept())


def test_nothing_kept():
    blocks = BlockMask.from_kept(torch.zeros(4, 4, dtype=torch.bool), 16, 16)
    assert blocks.density == 0
    assert_consistent(blocks)
    q = torch.randn(1, 2, 64, 8)
    assert (strobe.attention(q, q, q, block_mask=blocks) == 0).all()


def test_construction_is_linear_in_the_blocks_kept():
    """A million tokens: the dense blocks alone would be 2^28 bytes."""
    tracemalloc.start()
    blocks = BlockMask.local_global(2**20, 2**20, 64, 64, local_blocks=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    kept = blocks.cols.shape[0]
    assert kept == sum(len(set(range(max(i - 2, 0), min(i + 3, 2**14))) | {0}) for i in range(1, 2**14)) + 2**14
    assert peak < 2**24
    assert blocks.rows_t[0, 0, -1] == kept


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (20, 3)}], ids=str)
def test_attention_sees_the_blocks(options):
    q, k, v = (torch.randn(2, 2, 100, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    kept = torch.rand(2, 2, 7, 4) < 0.5
    blocks = BlockMask.from_kept(kept, 16, 32, 100, 100)
    found, expected = (strobe.attention(q, k, v, **options, **given) for given in ({"block_mask": blocks}, {"mask": blocks.to_dense()}))
    torch.testing.assert_close(found, expected)
    dout = torch.randn_like(found)
    for x, y in zip(*(torch.autograd.grad(out, (q, k, v), dout) for out in (found, expected)), strict=True):
        torch.testing.assert_close(x, y)


def test_either_kind_of_array_serves_both():
    q = np.random.default_rng(0).standard_normal((1, 2, 64, 16)).astype(np.float32)
    kept = np.tri(4, dtype=bool)
    ours, theirs = BlockMask.from_kept(kept, 16, 16), BlockMask.from_kept(torch.from_numpy(kept), 16, 16)
    t = torch.from_numpy(q)
    outs = [strobe.attention(q, q, q, block_mask=ours), strobe.attention(q, q, q, block_mask=theirs)]
    outs += [strobe.attention(t, t, t, block_mask=ours).numpy(), strobe.attention(t, t, t, block_mask=theirs).numpy()]
    assert all(np.array_equal(outs[0], out) for out in outs[1:])


def test_to():
    blocks = BlockMask.from_kept(np.tri(4, dtype=bool), 16, 16)
    moved = blocks.to("meta")
    assert [x.device.type for x in moved.arrays] == ["meta"] * 4
    assert (moved.shape, moved.block_q, moved.seqlen_k) == (blocks.shape, 16, 64)
    assert isinstance(blocks.rows, np.ndarray)
    assert torch.equal(blocks.to("cpu").to_kept(), torch.from_numpy(blocks.to_kept()))


def test_repr():
    assert repr(BlockMask.causal(100, 64, 16, 32, alignment="top_left")) == (
        "BlockMask(100 queries in 7 blocks of 16, 64 keys in 2 blocks of 32, batch 1, heads 1, 12 blocks kept, density 0.857)"
    )


def test_without_torch():
    code = (
        "import strobe, sys; b = strobe.BlockMask.butterfly(256, 256, 16, 16); "
        "print(type(b.rows).__module__, b.to_kept().sum(), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["numpy", str(16 * 5), "False"]


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("rows", {"rows": [0, 1, 2]}),
        ("rows", {"rows": torch.tensor([[[0, 1, 2]]])}),
        ("rows", {"rows": i32(0, 1, 2)}),
        ("rows", {"rows": i32(0, 1, 2, 2)[None, None]}),
        ("rows, cols", {"rows": i32(1, 1, 2)[None, None]}),
        ("rows, cols", {"rows": i32(0, 2, 1)[None, None]}),
        ("rows, cols", {"rows": i32(0, 1, 1)[None, None]}),
        ("rows, cols", {"rows": i32(0, 1, 3)[None, None]}),
        ("cols", {"cols": np.zeros(2, np.int32)}),
        ("cols", {"cols": torch.zeros(2)}),
        ("cols", {"cols": i32(0, 1)[None]}),
        ("rows, cols", {"cols": i32(0, 2)}),
        ("rows, cols", {"cols": i32(-1, 0)}),
        ("rows, cols", {"rows": i32(0, 2, 2)[None, None], "cols": i32(1, 0)}),
        ("rows, cols", {"rows": i32(0, 2, 2)[None, None], "cols": i32(1, 1)}),
        ("seqlen_q", {"seqlen_q": -1}),
        ("seqlen_k", {"seqlen_k": 1.5}),
        ("block_q", {"block_q": 0}),
        ("block_k", {"block_k": True}),
    ],
)
def test_bad_csr(name, wrong):
    good = {"rows": i32(0, 1, 2)[None, None], "cols": i32(0, 1), "seqlen_q": 32, "seqlen_k": 20, "block_q": 16, "block_k": 16}
    assert_consistent(BlockMask(**good))
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: .*accepted"):
        BlockMask(**good | wrong)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("kept", lambda: BlockMask.from_kept(torch.ones(4, 4), 16, 16)),
        ("kept", lambda: BlockMask.from_kept(torch.ones(4, dtype=torch.bool), 16, 16)),
        ("kept", lambda: BlockMask.from_kept([[True]], 16, 16)),
        ("kept", lambda: BlockMask.from_kept(torch.ones(4, 4, dtype=torch.bool, device="meta"), 16, 16)),
        ("mask", lambda: BlockMask.from_dense(torch.ones(64, 64, dtype=torch.bool, device="meta"), 16, 16)),
        ("seqlen_q", lambda: BlockMask.from_kept(torch.ones(4, 4, dtype=torch.bool), 16, 16, 65)),
        ("seqlen_k", lambda: BlockMask.from_kept(torch.ones(4, 4, dtype=torch.bool), 16, 16, 64, 48)),
        ("mask", lambda: BlockMask.from_dense(torch.ones(1, 1, 1, 4, 4, dtype=torch.bool), 16, 16)),
        ("block_k", lambda: BlockMask.from_dense(torch.ones(4, 4, dtype=torch.bool), 16, 0)),
        ("alignment", lambda: BlockMask.causal(64, 64, 16, 16, alignment="top")),
        ("local_blocks", lambda: BlockMask.local_global(64, 64, 16, 16, local_blocks=-1)),
        ("stride", lambda: BlockMask.strided(64, 64, 16, 16, stride=0)),
    ],
)
def test_bad_arguments(name, make):
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: .*accepted"):
        make()


def test_blocks_that_another_thread_adds_after_they_were_counted():
    """Even then, no more columns are written than were counted."""
    columns = ffi.new("int32_t[]", [7] * 8)
    lib.strobe_glue_indices_of_kept(ffi.new("uint8_t[]", [1] * 8), 1, 2, 4, 3, columns)
    assert list(columns) == [0, 1, 2, 7, 7, 7, 7, 7]


# Calls with a mask that does not fit


def shape_of(sq: int, sk: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, 2, sq, 16), torch.randn(1, 2, sk, 16)


MADE = {
    "causal": lambda sq, sk: BlockMask.causal(sq, sk, 32, 32),
    "local_global": lambda sq, sk: BlockMask.local_global(sq, sk, 32, 32),
    "from_dense": lambda sq, sk: BlockMask.from_dense(torch.ones(sq, sk, dtype=torch.bool), 32, 32),
    "from_kept": lambda sq, sk: BlockMask.from_kept(np.ones((-(-sq // 32), -(-sk // 32)), bool), 32, 32, sq, sk),
    "of a CSR": lambda sq, sk: BlockMask(i32(0, 1, 2)[None, None], i32(0, 1), sq, sk, 32, 32),
    "moved": lambda sq, sk: BlockMask.causal(sq, sk, 32, 32).to("cpu"),
    "pickled": lambda sq, sk: pickle.loads(pickle.dumps(BlockMask.causal(sq, sk, 32, 32))),
}


@pytest.mark.parametrize("made", MADE)
def test_a_call_has_the_lengths_of_its_mask(made):
    """A causal mask of 64 x 64 has as many blocks as one of 40 x 50, and hides keys that causal shows there."""
    blocks = MADE[made](64, 64)
    for lengths in ((40, 50), (64, 63), (33, 64)):
        q, k = shape_of(*lengths)
        whose = f"accepted is one of {lengths[0]} queries and {lengths[1]} keys, as q and k have"
        for function in (strobe.attention, strobe.reference, strobe.explain, strobe.nn.FlashAttention(16)):
            with pytest.raises(ValueError, match=f"^block_mask: of 64 queries and 64 keys; {whose}$"):
                function(q, k, k, block_mask=blocks)
        with pytest.raises(ValueError, match="^block_mask: of 64 queries"):
            strobe.attention(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2), block_mask=blocks, layout="bshd")
    q, k = shape_of(64, 64)
    strobe.attention(q, k, k, block_mask=blocks)


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (8, 8)}, {"alibi_slopes": torch.ones(2)}], ids=str)
def test_a_call_has_the_alignment_of_its_mask(alignment, options):
    """The alignment is checked where it has an effect: if lengths differ and another option depends on the alignment, too."""
    other = "top_left" if alignment == "bottom_right" else "bottom_right"
    q, k = shape_of(40, 50)
    for make in (BlockMask.causal, BlockMask.butterfly):
        blocks = make(40, 50, 16, 16, alignment=alignment)
        strobe.attention(q, k, k, block_mask=blocks, alignment=alignment, **options)
        strobe.attention(q, k, k, block_mask=blocks, alignment=other)
        for mask in (blocks, blocks.to("cpu"), pickle.loads(pickle.dumps(blocks))):
            words = (
                f"^block_mask: {alignment}; accepted beside causal, window or alibi_slopes is the alignment of these, {other}: make it with"
            )
            with pytest.raises(ValueError, match=words):
                strobe.attention(q, k, k, block_mask=mask, alignment=other, **options)
        square = make(50, 50, 16, 16, alignment=alignment)
        strobe.attention(k, k, k, block_mask=square, alignment=other, **options)
    strobe.attention(
        q, k, k, block_mask=BlockMask.from_kept(torch.ones(3, 4, dtype=torch.bool), 16, 16, 40, 50), alignment=other, **options
    )


def test_packed_sequences_have_a_mask_of_their_maxima():
    q, k = torch.randn(60, 2, 16), torch.randn(70, 2, 16)
    cu = {"cu_seqlens_q": i32(0, 20, 60), "cu_seqlens_k": i32(0, 20, 70)}
    maxima = {"max_seqlen_q": 40, "max_seqlen_k": 50}
    expected = strobe.attention(q, k, k, **cu)
    for lengths, options in (((40, 50), maxima), ((60, 70), {}), ((40, 70), {"max_seqlen_q": 40})):
        everything = BlockMask.from_dense(torch.ones(lengths, dtype=torch.bool), 16, 16)
        torch.testing.assert_close(strobe.attention(q, k, k, block_mask=everything, **cu, **options), expected)
    with pytest.raises(
        ValueError, match="^block_mask: of 48 queries and 64 keys; accepted is one of 40 .* 50 keys, as the maxima of the sequ"
    ):
        strobe.attention(q, k, k, block_mask=BlockMask.causal(48, 64, 16, 16), **cu, **maxima)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((2**21, 2**21), "^[0-9]+ blocks kept; accepted are 2147483647, what the int32 of a CSR can count; larger blocks are fewer$"),
        ((16, 2**40), "^seqlen_k: 1099511627776 in blocks of 16; accepted are up to 2147483647 blocks, what an int32 can count$"),
        ((2**60, 2**60), "^seqlen_q: .*\nseqlen_k: .*; accepted are up to 2147483647 blocks"),
    ],
)
def test_what_no_csr_holds_is_refused_before_it_is_made(lengths, message):
    for pattern in (strobe.BlockMask.causal, strobe.BlockMask.local_global):
        more = {} if pattern == strobe.BlockMask.causal else {"local_blocks": 2**20}
        with pytest.raises(ValueError, match=message):
            pattern(*lengths, 16, 16, **more)
    rows = torch.zeros(1, 1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="^seqlen_k: .* blocks"):
        strobe.BlockMask(rows, rows[0, 0, :0], 16, 2**40, 16, 16)
