"""BlockMask.from_function: blocks of mask functions against those of the dense mask, calls with them, refusals, the picture."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import strobe
from device import DEVICE
from strobe import BlockMask
from strobe._parse import parse

B, H, S = 2, 3, 200
DOCUMENTS = torch.tensor([n // 37 for n in range(S)])
EACH = torch.stack([DOCUMENTS, torch.tensor([n // 64 + n // 150 for n in range(S)])])
PREFIX = torch.tensor([16, 100])
REACH = torch.tensor([1, 3, 2], dtype=torch.int32)
TABLE = torch.rand(20, 25, generator=torch.Generator().manual_seed(1)) < 0.3
STARTS = torch.tensor([0, 37, 74, 111, 148, 185])
LEARNED = torch.zeros(S, requires_grad=True)
SIDE = 15

# Functions of torch and NumPy alike: (function, whether bounds decide all blocks, the axes of its matrices).
FUNCTIONS: dict[str, tuple[Callable[..., Any], bool, tuple[int, int]]] = {
    "causal": (lambda b, h, i, j: j <= i, True, (1, 1)),
    "window": (lambda b, h, i, j: (i - j < 40) & (j <= i), False, (1, 1)),
    "all": (lambda b, h, i, j: i >= 0, True, (1, 1)),
    "none": (lambda b, h, i, j: i < 0, True, (1, 1)),
    "document": (lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j], True, (1, 1)),
    "causal documents": (lambda b, h, i, j: (EACH[b, i] == EACH[b, j]) & (j <= i), False, (B, 1)),
    "within documents": (
        lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i - STARTS[DOCUMENTS[i]] >= j - STARTS[DOCUMENTS[j]]),
        False,
        (1, 1),
    ),
    "prefix": (lambda b, h, i, j: (j < PREFIX[b]) | (j <= i), True, (B, 1)),
    "dilated": (lambda b, h, i, j: ((i - j) % 4 == 0) & (i - j < 60) & (j <= i), False, (1, 1)),
    "neighbourhood": (
        lambda b, h, i, j: (abs(i // SIDE - j // SIDE) <= REACH[h]) & (abs(i % SIDE - j % SIDE) <= REACH[h]),
        False,
        (1, H),
    ),
    "table": (lambda b, h, i, j: TABLE[i // 10, j // 8], True, (1, 1)),
    "real": (lambda b, h, i, j: (i / 100.0) ** 2 + (j / 100.0) ** 2 < 1.7 + 0.1 * h + b, False, (B, H)),
}
# (Sq, Sk, block_q, block_k)
SIZES = [(200, 200, 16, 16), (200, 200, 64, 32), (199, 130, 32, 16), (1, 200, 16, 16), (200, 1, 16, 16), (0, 48, 16, 16), (33, 0, 16, 16)]


def of_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with arrays in place of tensors."""
    read = {name: x.detach().numpy() if isinstance(x, Tensor) else x for name, x in function.__globals__.items()}
    return type(function)(function.__code__, read)  # type: ignore[call-arg]


def dense(function: Callable[..., Any], sizes: tuple[int, ...]) -> Tensor:
    b, h, i, j = (torch.arange(n).reshape([-1 if axis == m else 1 for m in range(4)]) for axis, n in enumerate((B, H, *sizes[:2])))
    return torch.as_tensor(function(b, h, i, j)).expand(B, H, *sizes[:2])


def whole(mask: Tensor, block_q: int, block_k: int) -> np.ndarray:
    """Which blocks are visible as a whole."""
    return ~np.asarray(BlockMask.from_dense(~mask, block_q, block_k).to_kept())


def full_of(made: BlockMask) -> np.ndarray:
    """`full` as a matrix of blocks."""
    kept = np.asarray(made.to_kept()).copy()
    kept[kept] = np.asarray(made.full)
    return kept


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_blocks_are_those_of_the_dense_mask(name, sizes, library):
    function, is_tight, matrices = FUNCTIONS[name]
    mask = dense(function, sizes)
    expected, expected_full = np.asarray(BlockMask.from_dense(mask, *sizes[2:]).to_kept()), whole(mask, *sizes[2:])
    if library == "numpy":
        function = of_numpy(function)
    made = {
        exact: BlockMask.from_function(function, B, H, *sizes[:2], block_q=sizes[2], block_k=sizes[3], exact=exact)
        for exact in (False, True)
    }
    for exact, blocks in made.items():
        assert blocks.shape[:2] == matrices
        assert blocks.function is function
        kept, full = (np.broadcast_to(x, expected.shape) for x in (np.asarray(blocks.to_kept()), full_of(blocks)))
        if exact or is_tight:
            np.testing.assert_array_equal(kept, expected)
            np.testing.assert_array_equal(full, expected_full)
        assert not (expected & ~kept).any()
        assert not (full & ~expected_full).any()
    reads = bool({"DOCUMENTS", "EACH", "PREFIX", "REACH", "TABLE", "STARTS"} & {*function.__code__.co_names})
    if reads:  # otherwise the mask lies where patterns do
        assert isinstance(made[True].rows, Tensor if library == "torch" else np.ndarray)


# The peak of resident memory that the blocks of a table of booleans add, which is read in rows of 2 MiB.
ROWS = """
import torch, strobe

seen = torch.zeros(16, 1 << 21, dtype=torch.bool)
seen[:, ::4096] = True
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
def made(rows):
    return strobe.BlockMask.from_function(lambda b, h, i, j: seen[i, j], 1, 1, rows, 1 << 21, block_q=1, block_k=1 << 16)
made(1)
open("/proc/self/clear_refs", "w").write("5")  # resets the peak
before = peak()
made(16)
print((peak() - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_bounds_of_a_table_of_booleans_are_smaller_than_it():
    done = subprocess.run([sys.executable, "-c", ROWS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16 << 20  # the table takes 32 MiB


def test_the_transpose_fits():
    blocks = BlockMask.from_function(FUNCTIONS["neighbourhood"][0], B, H, S, S, block=16)
    again = BlockMask(blocks.rows, blocks.cols, S, S, 16, 16)
    assert torch.equal(blocks.rows_t, again.rows_t)
    assert torch.equal(blocks.cols_t, again.cols_t)


def test_which_blocks_are_full_follows_the_transpose():
    blocks = BlockMask.from_function(FUNCTIONS["prefix"][0], B, H, S, S, block=16)
    batch, _, nq, nk = blocks.shape
    full, full_t = np.zeros((batch, nq, nk), bool), np.zeros((batch, nk, nq), bool)
    lists = (blocks.rows, blocks.cols, full), (blocks.rows_t, blocks.cols_t, full_t)
    for (rows, cols, to), marks in zip(lists, blocks.full_arrays, strict=True):
        for b in range(batch):
            for n, (begin, end) in enumerate(zip(rows[b, 0, :-1].tolist(), rows[b, 0, 1:].tolist(), strict=True)):
                to[b, n, cols[begin:end].cpu().numpy()] = marks[begin:end].cpu().numpy()
    assert full.sum() == blocks.full.sum() > 0
    np.testing.assert_array_equal(full.swapaxes(1, 2), full_t)


def test_more_blocks_than_there_was_room_for():
    blocks = BlockMask.from_function(FUNCTIONS["causal"][0], 1, 1, 4096, 4096, block=16)
    assert blocks.cols.shape[0] == 256 * 257 // 2
    assert blocks.full.sum() == 256 * 255 // 2


def test_many_tokens_take_memory_by_the_border():
    documents = torch.arange(131072) // 1000
    blocks = BlockMask.from_function(lambda b, h, i, j: (documents[i] == documents[j]) & (j <= i), 1, 1, 131072, 131072)
    assert blocks.shape == (1, 1, 1024, 1024)
    ids = documents.reshape(1024, 128)
    first, last = ids[:, 0], ids[:, -1]
    expected = (first[:, None] <= last[None, :]) & (last[:, None] >= first[None, :]) & torch.ones(1024, 1024, dtype=torch.bool).tril()
    assert torch.equal(torch.as_tensor(blocks.to_kept())[0, 0].cpu(), expected)


def inputs(**more: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(B, H, S, 16, generator=g, dtype=torch.float64).to(DEVICE) for _ in range(3))
    return {"q": q, "k": k, "v": v, "engine": "reference"} | more


@pytest.mark.skipif(DEVICE != "cpu", reason="the reference computes on the CPU")
class TestCalls:
    @pytest.mark.parametrize("name", ["causal documents", "prefix", "neighbourhood", "window", "table"])
    def test_attention_hides_what_the_function_hides(self, name):
        function, _, _ = FUNCTIONS[name]
        blocks = BlockMask.from_function(function, B, H, S, S, block=16)
        mask = dense(function, (S, S))
        call = inputs()
        leaves = [call[name].clone().requires_grad_() for name in "qkv"]
        expected = strobe.attention(*leaves, mask=mask, engine="reference")
        wanted = torch.autograd.grad(expected.sum(), leaves)
        for _ in range(3):  # once more as it comes again
            out = strobe.attention(*leaves, block_mask=blocks, engine="reference")
            assert torch.equal(out, expected)
            for x, y in zip(torch.autograd.grad(out.sum(), leaves), wanted, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=1e-12)

    def test_beside_other_masks(self):
        document, causal = FUNCTIONS["document"][0], FUNCTIONS["causal"][0]
        blocks = BlockMask.from_function(document, B, H, S, S, block=16)
        both = dense(lambda b, h, i, j: document(b, h, i, j) & causal(b, h, i, j), (S, S))
        expected = strobe.attention(**inputs(mask=both))
        causal_tensor = dense(causal, (S, S))[:1, :1]
        for more in ({"mask": causal}, {"mask": causal_tensor}, {"causal": True}):
            assert torch.equal(strobe.attention(**inputs(block_mask=blocks, **more)), expected)
        assert torch.equal(strobe.attention(**inputs(block_mask=blocks, mask=document)), strobe.attention(**inputs(mask=document)))
        scored = strobe.attention(**inputs(block_mask=blocks, score=lambda x, b, h, i, j: x * 0.5))
        torch.testing.assert_close(scored, strobe.attention(**inputs(mask=document, scale=0.125)), rtol=0, atol=1e-12)

    def test_full_blocks_are_those_of_the_only_function(self):
        document, causal = FUNCTIONS["document"][0], FUNCTIONS["causal"][0]
        blocks = BlockMask.from_function(document, B, H, S, S, block=16)
        assert blocks.full.any()
        seen = blocks.full_arrays
        for more, given in (({}, True), ({"mask": document}, True), ({"causal": True}, True), ({"mask": causal}, False)):
            q, k, v, options = (call := inputs(block_mask=blocks, **more)).pop("q"), call.pop("k"), call.pop("v"), call
            arrays = parse("attention", q, k, v, options, []).arrays
            assert ("block_full" in arrays and arrays["block_full"] is seen[0]) == given
            assert ("block_full_t" in arrays) == given

    def test_numpy_and_packed(self):
        function = of_numpy(FUNCTIONS["document"][0])
        blocks = BlockMask.from_function(function, 1, 1, S, S, block=32)
        call = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in inputs().items()}
        out = strobe.attention(**call, block_mask=blocks)
        np.testing.assert_array_equal(out, strobe.attention(**call, mask=np.asarray(dense(FUNCTIONS["document"][0], (S, S)))))
        cu = torch.tensor([0, 120, 200], dtype=torch.int32)
        packed = {name: x[0].transpose(0, 1) for name, x in inputs().items() if name in "qkv"} | {"engine": "reference"}
        lists = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 120, "max_seqlen_k": 120}
        made = BlockMask.from_function(FUNCTIONS["prefix"][0], 2, H, 120, 120, block=16)
        out = strobe.attention(**packed, **lists, block_mask=made)
        assert torch.equal(out, strobe.attention(**packed, **lists, mask=FUNCTIONS["prefix"][0]))

    def test_new_values_need_a_new_mask(self):
        ids = DOCUMENTS.clone()

        def made() -> BlockMask:
            return BlockMask.from_function(lambda b, h, i, j: ids[i] == ids[j], 1, 1, S, S, block=16)

        before = made().cols.shape[0]
        ids.zero_()
        assert made().cols.shape[0] == 13 * 13 > before

    def test_a_mask_for_one_sequence_or_head_serves_no_more(self):
        for name, message in (
            ("prefix", "1 sequence, and its function depends on b"),
            ("neighbourhood", "1 head, and its .* depends on h"),
        ):
            blocks = BlockMask.from_function(FUNCTIONS[name][0], 1, 1, S, S, block=16)
            with pytest.raises(ValueError, match=f"^block_mask: of {message}; accepted is one of"):
                strobe.attention(**inputs(block_mask=blocks))
            part = strobe.Part([(0, S)], [(0, S)], S, S, first_head=1, heads=H, first_batch=1)
            with pytest.raises(ValueError, match=f"^block_mask: of {message}; accepted is one of . .*, as the whole problem has$"):
                strobe.attention(
                    **{k: x[:1, :1] if isinstance(x, Tensor) else x for k, x in inputs().items()}, block_mask=blocks, part=part
                )
            one = {k: x[:1, :1] if isinstance(x, Tensor) else x for k, x in inputs().items()}
            assert torch.equal(
                strobe.attention(**one, block_mask=blocks), strobe.attention(**one, mask=dense(FUNCTIONS[name][0], (S, S))[:1, :1])
            )

    def test_torch_compile_ends_its_graph(self):
        blocks = BlockMask.from_function(FUNCTIONS["document"][0], 1, 1, S, S, block=16)
        call = inputs(block_mask=blocks)

        def f(q: Tensor) -> Tensor:
            return strobe.attention(**call | {"q": q * 2}) + 1

        assert torch.equal(torch.compile(f, backend="eager")(call["q"]), f(call["q"]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_captured_tensors_on_a_gpu():
    documents = DOCUMENTS.cuda()
    blocks = BlockMask.from_function(lambda b, h, i, j: documents[i] == documents[j], 1, 1, S, S, block=16)
    assert blocks.rows.is_cuda
    assert torch.equal(blocks.to("cpu").to_kept(), BlockMask.from_function(FUNCTIONS["document"][0], 1, 1, S, S, block=16).to_kept())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_captured_in_a_graph():
    documents = DOCUMENTS.cuda()

    def made() -> BlockMask:
        return BlockMask.from_function(lambda b, h, i, j: documents[i] == documents[j], 1, 1, S, S, block=16)

    made()  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = made()
    for divisor in (37, 80):  # each replay reads the tensor again
        documents.copy_(torch.arange(S) // divisor)
        graph.replay()
        expected = made()
        assert captured.cols.shape[0] == 13 * 13 > expected.cols.shape[0]
        assert captured.density == expected.density
        assert torch.equal(captured.full, expected.full)
        assert torch.equal(captured.to_kept(), expected.to_kept())
        assert captured.plot() == expected.plot()
        assert torch.equal(captured.to("cpu").cols_t, expected.cols_t.cpu())


def test_device():
    on_cpu = BlockMask.from_function(FUNCTIONS["causal"][0], 1, 1, S, S, device="cpu")
    assert isinstance(on_cpu.rows, Tensor)
    moved = on_cpu.to("cpu")
    assert moved.function is on_cpu.function
    assert torch.equal(moved.full, on_cpu.full)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"function": 3}, TypeError, r"^function: int; accepted is a function g\(b, h, i, j\)$"),
    ({"function": lambda i, j: i >= j}, TypeError, r"^function: .* does not take 4 arguments; accepted is g\(b, h, i, j\)$"),
    ({"function": lambda b, h, i, j: i - j}, TypeError, "^function: .*returns an integer; accepted is a bool"),
    ({"function": lambda b, h, i, j: LEARNED[i] > 0}, NotImplementedError, "^function: .*requires grad"),
    ({"function": lambda b, h, i, j: i > j and b >= 0}, ValueError, r"^function: .*torch.where\(condition, a, b\)"),
    ({"batch": -1}, ValueError, "^batch: -1; accepted are integers from 0 to"),
    ({"heads": None}, TypeError, "^heads: NoneType; accepted is an integer$"),
    ({"seqlen_k": 2**60}, ValueError, "^seqlen_k: .* in blocks of 128; accepted are up to 2147483647 blocks"),
    ({"block": 0, "block_q": 16}, ValueError, "^block: 0; .*\nblock_k: 0; accepted are integers from 1 to 2147483647$"),
    ({"exact": 1}, TypeError, "^exact: int 1; accepted is True or False$"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED, ids=lambda x: ", ".join(x) if isinstance(x, dict) else "")
def test_refused(change, error, message):
    given = {"function": FUNCTIONS["causal"][0], "batch": B, "heads": H, "seqlen_q": S, "seqlen_k": S} | change
    with pytest.raises(error, match=message):
        BlockMask.from_function(**given)


def test_plot():
    blocks = BlockMask.from_function(FUNCTIONS["causal"][0], 1, 1, 60, 70, block=16)
    assert blocks.plot().splitlines() == ["▒····", "█▒···", "██▒··", "███▒·"]
    assert blocks.plot(batch=5, width=3).splitlines() == ["▒··", "█▒·"]
    assert BlockMask.causal(48, 48, 16, 16).plot().splitlines() == ["█··", "██·", "███"]
    assert BlockMask.from_function(FUNCTIONS["causal"][0], 1, 1, 0, 70, block=16).plot() == ""
    heads = BlockMask.from_function(lambda b, h, i, j: j <= i - 16 * h, 1, 2, 48, 48, block=16)
    assert heads.plot(head=1).splitlines() == ["···", "▒··", "█▒·"]
    documents = torch.arange(128) // 40
    of_page = BlockMask.from_function(lambda b, h, i, j: (j <= i) & (documents[i] == documents[j]), 2, 8, 128, 128, block=16)
    assert f"```\n{of_page.plot()}\n```" in (Path(__file__).parents[2] / "docs/functions.md").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="^head: 2; accepted is 0 to 1, or any if the mask has one matrix for all$"):
        heads.plot(head=2)
