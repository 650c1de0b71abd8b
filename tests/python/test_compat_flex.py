"""strobe.compat.flex_attention against torch.nn.attention.flex_attention, whose formulas run on the CPU without its compiler."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from device import DEVICE
from strobe import _compiled
from strobe.compat import flex_attention as ours
from strobe.compat.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

theirs = pytest.importorskip("torch.nn.attention.flex_attention")
if not hasattr(theirs, "AuxRequest"):
    pytest.skip("an earlier PyTorch, whose formulas give other results", allow_module_level=True)
B, H, HKV, SQ, SK, D, DV = 2, 4, 2, 70, 90, 16, 24
TENSORS = ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"]
TENSORS += ["q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"]
OF_NEWEST = "separate_full_blocks" in inspect.signature(theirs.create_block_mask).parameters
NEWEST = pytest.mark.skipif(not OF_NEWEST, reason="an earlier PyTorch, with other arguments")


@pytest.fixture(autouse=True)
def _device():
    with torch.device(DEVICE):
        torch.manual_seed(0)
        yield


def causal(b, h, i, j):
    return i >= j


def window(b, h, i, j):
    return (i - j).abs() < 20


def nothing_for_some(b, h, i, j):  # queries 30 to 49 see no key
    return ((i < 30) | (i >= 50)) & (j < i + 10)


def by_head(b, h, i, j):
    return (i + 5 * h >= j) & (j % (b + 2) != 1)


def hides_all(b, h, i, j):
    return i < 0


DOCUMENTS = torch.tensor([0] * 20 + [1] * 37 + [2] * 33, device=DEVICE)
PREFIX = torch.tensor([7, 40], device=DEVICE)
TOP = torch.tensor([[0, 3], [1, 4], [0, 2], [5, 3], [4, 2]], device=DEVICE)  # the blocks of 15 keys that each block of 15 queries sees
MASKS = {
    "causal": causal,
    "window": window,
    "no key for some": nothing_for_some,
    "no key": hides_all,
    "by head": by_head,
    "documents": lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j),
    "prefix": lambda b, h, i, j: (j < PREFIX[b]) | (i >= j),
    "and": ours.and_masks(causal, window),
    "or": ours.or_masks(causal, window, by_head),
    "of any": lambda b, h, i, j: (TOP[i // 15] == (j // 15).unsqueeze(-1)).any(-1),
    "noop": ours.noop_mask,
}
TABLE = torch.linspace(-1, 1, H * (SQ + SK), device=DEVICE).view(H, SQ + SK)
SCORES = {
    "none": None,
    "bias": lambda s, b, h, i, j: s + TABLE[h, i - j + SK],
    "softcap": lambda s, b, h, i, j: 2 * torch.tanh(s / 2),
    "alibi": lambda s, b, h, i, j: s - (i - j).abs() * torch.exp2(-(h + 1.0)),
    "minus infinity": lambda s, b, h, i, j: torch.where((j > i) | (i == 9), -float("inf"), s),
}


def tensors(dtype: torch.dtype = torch.float32, q_len: int = SQ, kv_len: int = SK, batch: int = B) -> list[Tensor]:
    shapes = ((B, H, q_len, D), (batch, HKV, kv_len, D), (batch, HKV, kv_len, DV))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def formulas(q: Tensor, k: Tensor, v: Tensor, score: Any = None, mask: Any = None, scale: float | None = None) -> tuple[Tensor, ...]:
    """FlexAttention's out, lse and max_scores, by autograd's own formulas in float64."""
    from torch._higher_order_ops.flex_attention import math_attention

    blocks = theirs._create_empty_block_mask(q, k)
    blocks.mask_mod = theirs.noop_mask if mask is None else mask
    wide = [x.double() for x in (q, k, v)]
    out, lse, most = math_attention(*wide, score or theirs._identity, blocks.as_tuple(), D**-0.5 if scale is None else scale, {})
    return out, lse * math.log(2), most * math.log(2)


def close(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def compared(
    given: list[Tensor], learnt: list[Tensor], score: Any, mask: Any, block_mask: Any, tolerance: float = 1e-5, **more: Any
) -> None:
    """Asserts that results and gradients are FlexAttention's, whose gradients of a query that sees nothing are NaN."""
    request = ours.AuxRequest(lse=True, max_scores=True)
    out, aux = flex_attention(*given, score, block_mask, enable_gqa=True, return_aux=request, **more)
    want, lse, most = formulas(*given, score, mask, **more)
    assert (out.shape, out.dtype) == (want.shape, given[0].dtype)
    assert aux.lse.dtype == aux.max_scores.dtype == (torch.float64 if out.dtype == torch.float64 else torch.float32)
    close(out, want, tolerance)
    close(aux.lse, lse, tolerance)
    close(aux.max_scores, most, tolerance)
    sees = lse > -torch.inf
    dout, dlse = torch.randn_like(out), torch.randn_like(aux.lse) * sees
    got = torch.autograd.grad((out, aux.lse), (*given, *learnt), (dout, dlse))
    of = (want, torch.where(sees, lse, 0.0))
    for x, y in zip(got, torch.autograd.grad(of, (*given, *learnt), (dout.double(), dlse.double())), strict=True):
        close(x, y.nan_to_num(), max(tolerance, 2e-5))
    assert torch.equal(flex_attention(*given, score, block_mask, **more), out)


@pytest.mark.parametrize("size", [16, (32, 48), 5, 128], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_a_function(name, size):
    """The same blocks, and the same pairs."""
    mask = create_block_mask(MASKS[name], B, H, SQ, SK, DEVICE, size)
    want = theirs.create_block_mask(MASKS[name], B, H, SQ, SK, DEVICE, size)
    for each in TENSORS:
        assert torch.equal(getattr(mask, each), getattr(want, each)), each
    if name != "noop":  # theirs is as large as the scores
        compared(tensors(), [], None, MASKS[name], mask)


def bits(x: Tensor) -> Tensor:
    """Every other bit of a place on a curve through a plane."""
    x = x & 0x5555
    x = (x | x >> 1) & 0x3333
    return (x | x >> 2) & 0x0F0F


def clamped(at: Tensor, least: int, most: int) -> Tensor:
    return at.clamp(least, most)


STARTS, FIRST = torch.tensor([0, 20, 57], device=DEVICE), torch.tensor([0, 0, 2], device=DEVICE)  # of a document; the one that it goes on
FAR = torch.arange(H * 12, device=DEVICE).view(H, 12) / 17
STEPS = (torch.arange(B * SQ * SK, device=DEVICE).view(B, SQ, SK) * 31 % 12).int()
# The kinds of functions that attention-gym publishes, and the suite of FlexAttention draws.
PUBLISHED: dict[str, tuple[Any, Any]] = {
    "dilated window": (None, lambda b, h, i, j: ((i - j).abs() <= 24) & ((i - j).abs() % 3 == 0)),
    "blocks of a diffusion": (
        None,
        lambda b, h, i, j: ((i % 35 // 7 == j % 35 // 7) & ((i < 35) == (j < 35))) | ((i % 35 // 7 > j % 35 // 7) & (i < 35) & (j >= 35)),
    ),
    "on a curve": (None, lambda b, h, i, j: ((bits(i) - bits(j)).abs() < 3) & ((bits(i >> 1) - bits(j >> 1)).abs() < 3)),
    "tiles of a canvas": (
        None,
        lambda b, h, i, j: ((clamped(i // 16, 1, 3) - j // 16).abs() < 2) & ((clamped(i // 4 % 4, 1, 2) - j // 4 % 4).abs() < 2),
    ),
    "starts of documents": (None, lambda b, h, i, j: (j >= STARTS[DOCUMENTS[i]]) & (j <= i)),
    "a shared prefix": (
        None,
        lambda b, h, i, j: (
            ((j >= STARTS[DOCUMENTS[i]]) & (j <= i))
            | ((FIRST[DOCUMENTS[i]] != DOCUMENTS[i]) & (j >= STARTS[FIRST[DOCUMENTS[i]]]) & (j < 20))
        ),
    ),
    "some see all": (None, lambda b, h, i, j: ((i - j).abs() <= 6) | (i % 30 == 0) | (j % 30 == 0)),
    "place in a frame": (None, lambda b, h, i, j: (((i - 4) % 11 - (j - 4) % 11).abs() < 3) | (i < 4) | (j < 4)),
    "an activation": (lambda s, b, h, i, j: torch.log(torch.nn.functional.gelu(s) + 1), None),
    "steps in a graph": (lambda s, b, h, i, j: s + FAR[h, STEPS[b, i, j]], None),
    "steps of several kinds": (
        lambda s, b, h, i, j: s + torch.where(STEPS[b, i, j] > 3, FAR[h, STEPS[b, i, j]], 0.0) / STEPS[b, i, j].clamp(min=1),
        causal,
    ),
    "a score of scores": (lambda s, b, h, i, j: torch.cos(s) * torch.sin(s) + b * 0.5, None),
    "the inverse": (lambda s, b, h, i, j: torch.where(i <= j, s * s, -float("inf")), None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_functions(name):
    score, mask = PUBLISHED[name]
    compared(tensors(), [], score, mask, None if mask is None else create_block_mask(mask, B, H, SQ, SK, DEVICE, 16))


@pytest.mark.parametrize("mask", [None, "window", "no key for some"])
@pytest.mark.parametrize("score", SCORES)
def test_scores(score, mask):
    blocks = None if mask is None else create_block_mask(MASKS[mask], None, None, SQ, SK, DEVICE, 16)
    compared(tensors(), [], SCORES[score], None if mask is None else MASKS[mask], blocks, scale=0.4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.bfloat16, 4e-2), (torch.float16, 4e-3)])
def test_dtypes(dtype, tolerance):
    blocks = create_block_mask(causal, None, None, SQ, SK, DEVICE, 32)
    compared(tensors(dtype), [], SCORES["softcap"], causal, blocks, tolerance)


def test_what_a_score_learns():
    bias, slopes = torch.randn(H, SQ, requires_grad=True), torch.rand(H, requires_grad=True)

    def score(s, b, h, i, j):
        return s * torch.sigmoid(slopes[h]) + bias[h, i] * j / SK

    compared(tensors(), [bias, slopes], score, causal, create_block_mask(causal, None, None, SQ, SK, DEVICE))


def test_a_score_of_vectors():
    """As multi-head latent attention adds the product of rotary parts. FlexAttention's formulas have no gradient of it."""
    at_q, at_k = torch.randn(B, H, SQ, 8, requires_grad=True), torch.randn(B, 1, SK, 8, requires_grad=True)
    given = tensors()
    out = flex_attention(*given, lambda s, b, h, i, j: s + 0.3 * torch.dot(at_q[b, h, i], at_k[b, h // H, j]))
    q, k, v = given[0], *(x.repeat_interleave(H // HKV, 1) for x in given[1:])
    want = torch.softmax(q @ k.mT * D**-0.5 + 0.3 * at_q @ at_k.mT, -1) @ v
    close(out, want)
    dout = torch.randn_like(out)
    for x, y in zip(*(torch.autograd.grad(each, (*given, at_q, at_k), dout) for each in (out, want)), strict=True):
        close(x, y)


class Masks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width = 9
        self.last = torch.tensor([20, 90])

    def forward(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ((i - j).abs() < self.width) & (j < self.last[b])


@pytest.mark.parametrize("kind", ["module", "method", "partial", "default"])
def test_what_can_be_a_mask(kind):
    masks = Masks()
    partial = functools.partial(lambda width, b, h, i, j: (i - j).abs() < width, 9)
    functions: dict[str, Any] = {"module": masks, "method": masks.forward, "partial": partial}
    mask = functions.get(kind, lambda b, h, i, j, width=9: (i - j).abs() < width)
    compared(tensors(), [], None, mask, create_block_mask(mask, B, None, SQ, SK, DEVICE, 32))


def test_strides():
    """A transposed projection, and keys that are one vector for all heads."""
    query = torch.randn(B, SQ, H, D).transpose(1, 2).requires_grad_()
    key = torch.randn(B, 1, SK, D).expand(B, HKV, SK, D).requires_grad_()
    value = torch.randn(B, HKV, 1, DV).expand(B, HKV, SK, DV).requires_grad_()
    compared([query, key, value], [], SCORES["bias"], causal, create_block_mask(causal, None, None, SQ, SK, DEVICE))


def test_a_mask_of_what_requires_grad():
    limit = torch.full((1,), 9.5, requires_grad=True)

    def mask(b, h, i, j):
        return j < limit[0] + i

    blocks = create_block_mask(mask, None, None, SQ, SK, DEVICE)
    given = tensors()
    close(flex_attention(*given, None, blocks), formulas(*given, None, lambda b, h, i, j: j < 9.5 + i)[0])


def test_one_batch_of_keys():
    def mask(b, h, i, j):
        return j // 45 == b

    compared(tensors(batch=1), [], SCORES["bias"], mask, create_block_mask(mask, B, None, SQ, SK, DEVICE, 16))


@NEWEST
@pytest.mark.parametrize("separates", [True, False])
def test_the_same_operations(separates):
    arguments = (by_head, B, H, 300, 410, DEVICE, (32, 64))
    mask = create_block_mask(*arguments, separate_full_blocks=separates)
    want = theirs.create_block_mask(*arguments, separate_full_blocks=separates)
    assert (mask.shape, mask.seq_lengths, mask.BLOCK_SIZE, mask.mask_mod) == ((B, H, 300, 410), (300, 410), (32, 64), by_head)
    assert (mask.numel(), mask.sparsity()) == (want.numel(), want.sparsity())
    assert torch.equal(mask.to_dense(), want.to_dense())
    assert mask.to_dense().dtype == want.to_dense().dtype
    assert str(mask[0]) == str(want[0])
    assert str(mask).splitlines()[:40] == str(want).splitlines()[:40]
    for size in (3, (4, 2), -1):
        assert mask.to_string(size, limit=2).split("\n")[:6] == want.to_string(size, limit=2).split("\n")[:6]
    for got, expected in ((mask, want), (mask[1], want[1]), (mask[0:2, 1:2, torch.tensor([1])], want[0:2, 1:2, torch.tensor([1])])):
        same_blocks(got, expected)
        assert repr(got).splitlines()[0] == "BlockMask("
    same_blocks(mask[:, -1, 2], want[:, -1, 2])
    same_blocks(mask[:, :, torch.tensor(2)], want[:, :, 2])
    there = mask.to("cpu")
    assert there.kv_indices.device.type == "cpu"
    assert (there.mask_mod, there.shape) == (mask.mask_mod, mask.shape)
    flattened = mask.as_tuple()
    assert (flattened[:2], flattened[-3:]) == ((300, 410), (32, 64, by_head))
    assert (len(flattened), len(mask.as_tuple(flatten=False))) == (len(want.as_tuple()), len(want.as_tuple(flatten=False)))
    assert all(isinstance(x, BlockMask) for x in mask)


def same_blocks(got: Any, want: Any) -> None:
    assert got.seq_lengths == want.seq_lengths
    assert got.BLOCK_SIZE == want.BLOCK_SIZE
    for name in TENSORS:
        x, y = getattr(got, name), getattr(want, name)
        assert (x is None) == (y is None), name
        assert x is None or torch.equal(x, y), name


def test_an_adjusted_mask():
    given = tensors(q_len=40, kv_len=50)
    for made in (create_block_mask, theirs.create_block_mask):
        mask = made(by_head, B, H, SQ, SK, DEVICE, 16)
        with pytest.raises(
            ValueError, match=r"^block_mask: for 70 queries and 90 keys; accepted .* 40 and 50, .*block_mask._adjust\(40, 50\)"
        ):
            flex_attention(*given, None, mask)
    mask = create_block_mask(by_head, B, H, SQ, SK, DEVICE, 16)._adjust(40, 50)
    assert mask.shape == (B, H, 40, 50)
    assert torch.equal(mask.to_dense(), create_block_mask(by_head, B, H, 48, 64, DEVICE, 16).to_dense())
    compared(given, [], None, by_head, mask)
    with pytest.raises(ValueError, match="^new_q_len: 41; accepted is 0 to 40, the mask's own length$"):
        mask._adjust(41, 50)
    with pytest.raises(ValueError, match="^block_mask: for 40 queries and 50 keys; accepted is one for 70 and 90, as query and key have$"):
        flex_attention(*tensors(), None, mask)


@pytest.mark.parametrize("made", [create_block_mask, theirs.create_block_mask])
def test_decoding_by_parts_of_a_mask(made):
    """As generation does it: one query, the row of its block, and positions that a tensor moves on."""
    whole = made(window, None, None, 96, 96, DEVICE, 16)
    position = torch.zeros((), dtype=torch.int64)
    key, value = (torch.randn(B, HKV, 96, d) for d in (D, DV))

    def moved(b, h, i, j):
        return whole.mask_mod(b, h, i + position, j)

    for n in (0, 37, 95):
        position.fill_(n)
        part = whole[:, :, position // 16] if made is create_block_mask else whole[:, :, n // 16]
        query = torch.randn(B, H, 1, D)
        with pytest.raises(ValueError, match="^block_mask: a part of another one, without a mask_mod; accepted is"):
            flex_attention(query, key, value, None, part)
        with pytest.raises(RuntimeError, match="mask_mod"):
            part.mask_mod(*(torch.zeros((), dtype=torch.int64) for _ in range(4)))
        part.mask_mod, part.seq_lengths = moved, (1, 96)
        close(flex_attention(query, key, value, None, part), formulas(query, key, value, None, moved)[0])


def table_of(mask: Any) -> Tensor:
    """Which pairs lie in the blocks."""
    (sq, sk), (bq, bk) = mask.seq_lengths, mask.BLOCK_SIZE
    return mask.to_dense().bool().repeat_interleave(bq, -2).repeat_interleave(bk, -1)[..., :sq, :sk]


@pytest.mark.parametrize("kind", [BlockMask, theirs.BlockMask])
@pytest.mark.parametrize("size", [16, (16, 9), (10, 16)], ids=str)
def test_a_mask_of_blocks(kind, size):
    """Blocks in any order, with anything behind those that count, and whole blocks that the mask_mod alone would hide."""
    bq, bk = (size, size) if isinstance(size, int) else size
    nq, nk = -(-SQ // bq), -(-SK // bk)
    chosen = torch.rand(B, H, nq, nk).argsort(-1).int()
    counts = torch.randint(1, nk // 2, (B, H, nq)).int()
    full = chosen.flip(-1)
    few = torch.randint(0, nk // 2, (B, H, nq)).int()
    given = tensors()
    for mask_mod, more in ((None, ()), (causal, ()), (None, (few, full)), (causal, (few, full)), (hides_all, (few, full))):
        mask = kind.from_kv_blocks(counts, chosen, *more, BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=(SQ, SK))
        pairs = table_of(kind.from_kv_blocks(counts, chosen, BLOCK_SIZE=size, seq_lengths=(SQ, SK)))
        if mask_mod is not None:
            pairs = pairs & create_mask(mask_mod, B, H, SQ, SK, DEVICE)
        if more:
            pairs = pairs | table_of(kind.from_kv_blocks(few, full, BLOCK_SIZE=size, seq_lengths=(SQ, SK)))
        compared(given, [], None, lambda b, h, i, j, pairs=pairs: pairs[b, h, i, j], mask)


def test_whole_blocks_of_a_mask_need_no_table():
    """If mask_mod is True in them, as in every mask of a function, the call has mask_mod alone."""
    mask = theirs.create_block_mask(causal, None, None, 256, 256, DEVICE, 32)
    assert ours._block_mask.ready(mask).function is causal
    assert ours._block_mask.ready(mask) is ours._block_mask.ready(mask)


def test_without_q_blocks_and_lengths():
    counts, indices = torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(16, 32), compute_q_blocks=False)
    assert (mask.seq_lengths, mask.q_indices, mask.q_num_blocks, mask[0].q_indices) == ((32, 64), None, None, None)
    both = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(16, 32))
    assert both.q_num_blocks is not None
    assert both.q_num_blocks.tolist() == [[[1, 1]]]
    given = tensors(q_len=32, kv_len=64)
    compared(given, [], None, lambda b, h, i, j: i // 16 != j // 32, mask)


def test_what_is_assigned_or_written_takes_effect():
    given = tensors(q_len=64, kv_len=64)
    mask = create_block_mask(causal, None, None, 64, 64, DEVICE, 16)
    compared(given, [], None, causal, mask)
    mask.mask_mod = lambda b, h, i, j: (i >= j) & (j % 2 == 0)  # whole blocks stay visible
    seen = create_mask(lambda b, h, i, j: (i >= j) & ((i // 16 != j // 16) | (j % 2 == 0)), 1, 1, 64, 64, DEVICE)
    compared(given, [], None, lambda b, h, i, j: seen[0, 0, i, j], mask)
    mask.full_kv_num_blocks.zero_()
    seen = create_mask(lambda b, h, i, j: (i // 16 == j // 16) & (i >= j) & (j % 2 == 0), 1, 1, 64, 64, DEVICE)
    compared(given, [], None, lambda b, h, i, j: seen[0, 0, i, j], mask)


def test_lengths_that_are_assigned_before_the_blocks_are_asked_for():
    mask = create_block_mask(causal, None, None, 64, 64, DEVICE, 16)
    mask.seq_lengths = (70, 64)
    assert mask.to_dense().tolist() == [[[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]]]
    mask = create_block_mask(causal, None, None, 64, 64, DEVICE, 16)
    mask.seq_lengths = (50, 40)
    compared(tensors(q_len=50, kv_len=40), [], None, causal, mask)
    assert ours._block_mask.ready(mask.to("cpu")).blocks.seqlen_q == 50


def test_masks_serve_both():
    given = [x.detach() for x in tensors()]
    own, other = (made(by_head, B, H, SQ, SK, DEVICE, 16) for made in (create_block_mask, theirs.create_block_mask))
    want = formulas(*given, SCORES["bias"], by_head)[0]
    close(flex_attention(*given, SCORES["bias"], other), want)
    theirs._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG, was = True, theirs._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    try:
        close(theirs.flex_attention(*given, SCORES["bias"], own, enable_gqa=True), want)
    finally:
        theirs._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = was


@NEWEST
def test_from_and_to_pytorchs():
    own = create_block_mask(by_head, B, H, SQ, SK, DEVICE, 16)
    there = own.to_pytorch()
    assert type(there) is theirs.BlockMask
    back = BlockMask.from_pytorch(there)
    for x, y, z in zip(own.as_tuple(), there.as_tuple(), back.as_tuple(), strict=True):
        assert x is y is z or x == y == z
    compared(tensors(), [], None, by_head, back)
    with pytest.raises(TypeError, match="^block_mask: strobe.*; accepted is a torch.nn.attention.flex_attention.BlockMask$"):
        BlockMask.from_pytorch(own)


def test_no_tensor_of_all_pairs():
    n = 2**18
    mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i // 512 == j // 512), 4, 8, n, n, DEVICE, 512)
    assert mask.shape == (4, 8, n, n)
    assert not {*TENSORS} & vars(mask).keys()
    blocks, function = ours._block_mask.ready(mask)
    assert function is None
    assert blocks is not None
    assert blocks.cols.shape == (512,)


def test_a_dense_mask():
    for function in (*MASKS.values(), *(x for x in SCORES.values() if x is not None)):
        got, want = (create(function, B, H, SQ, SK, DEVICE) for create in (create_mask, theirs.create_mask))
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.equal(got, want)
    assert create_mask(causal, None, None, 3, 3, DEVICE).tolist() == [[[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]]


def test_results():
    given = tensors()
    out = flex_attention(*given)
    both = flex_attention(*given, return_lse=True)
    assert torch.equal(both[0], out)
    assert torch.equal(both[1], flex_attention(*given, return_aux=ours.AuxRequest(lse=True))[1].lse)
    for request in (ours.AuxRequest(), theirs.AuxRequest()):
        again, aux = flex_attention(*given, return_aux=request)
        assert torch.equal(again, out)
        assert aux == (None, None)
    options = {"BLOCK_M": 64, "fwd_num_stages": 2, "bwd_BLOCK_N1": 32, "PRESCALE_QK": True, "BACKEND": "TRITON"}
    assert torch.equal(flex_attention(*given, kernel_options=options), out)


# Nested tensors

LENGTHS_Q, LENGTHS_K = [13, 1, 30], [20, 5, 33]


def nested(lengths: list[int], heads: int, d: int) -> Tensor:
    rows = [torch.randn(n, heads, d) for n in lengths]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged).transpose(1, 2).detach().requires_grad_()


@pytest.mark.parametrize("crosses", [False, True])
@pytest.mark.parametrize("score", ["none", "alibi"])
@pytest.mark.parametrize("masked", [False, True])
def test_nested_tensors(crosses, score, masked):
    lengths = LENGTHS_K if crosses else LENGTHS_Q
    rows = [
        [torch.randn(n, h, d, requires_grad=True) for n in ns] for ns, h, d in ((LENGTHS_Q, H, D), (lengths, HKV, D), (lengths, HKV, DV))
    ]
    query, key = (torch.nested.nested_tensor_from_jagged(torch.cat(x), torch.tensor([0, *(len(y) for y in x)]).cumsum(0)) for x in rows[:2])
    value = torch.nested.nested_tensor_from_jagged(torch.cat(rows[2]), key.offsets() if crosses else query.offsets())
    if not crosses:
        key = torch.nested.nested_tensor_from_jagged(key.values(), query.offsets())
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    mask = ours.create_nested_block_mask(causal, 1, 1, query, key, 16) if masked else None
    out, aux = flex_attention(query, key, value, SCORES[score], mask, enable_gqa=True, return_aux=ours.AuxRequest(lse=True))
    assert out.is_nested
    want = [
        formulas(*(x.transpose(0, 1)[None] for x in each), SCORES[score], causal if masked else None) for each in zip(*rows, strict=True)
    ]
    for got, lse, each in zip(out.transpose(1, 2).unbind(), aux.lse.transpose(1, 2).unbind(), want, strict=True):
        close(got, each[0][0].transpose(0, 1))
        close(lse, each[1][0].transpose(0, 1))
    dout = torch.randn_like(out.values())
    leaves = [x for each in rows for x in each]
    of = torch.cat([each[0][0] for each in want], 1)
    for x, y in zip(torch.autograd.grad(out.values(), leaves, dout), torch.autograd.grad(of, leaves, dout.double()), strict=True):
        close(x, y, 2e-5)


# Signatures and refusals


@NEWEST
@pytest.mark.parametrize("name", ["flex_attention", "create_block_mask", "create_mask", "and_masks", "or_masks", "noop_mask", "BlockMask"])
def test_the_signature_is_pytorchs(name):
    same_signature(getattr(ours, name), getattr(theirs, name))


@NEWEST
@pytest.mark.parametrize(
    "name", ["from_kv_blocks", "as_tuple", "to_string", "to", "_adjust", "__getitem__", "numel", "sparsity", "to_dense"]
)
def test_the_signature_of_a_method_is_pytorchs(name):
    same_signature(getattr(BlockMask, name), getattr(theirs.BlockMask, name))


def same_signature(own: Any, other: Any) -> None:
    found, want = (
        [(p.name, p.kind, getattr(p.default, "__name__", p.default)) for p in inspect.signature(x).parameters.values()]
        for x in (own, other)
    )
    assert found == want


@NEWEST
def test_names():
    assert {*theirs.__all__} - {*ours.__all__} == {"FlexKernelOptions"}
    assert ours.FlexKernelOptions is theirs.FlexKernelOptions
    assert ours._vmap_for_bhqkv is theirs._vmap_for_bhqkv
    assert ours.AuxRequest._fields == theirs.AuxRequest._fields
    assert ours.AuxOutput._fields == theirs.AuxOutput._fields
    with pytest.raises(AttributeError, match="module 'strobe.compat.flex_attention' has no attribute 'flux'"):
        _ = ours.flux


CALL = [torch.zeros(shape, device=DEVICE) for shape in ((B, H, SQ, D), (B, HKV, SK, D), (B, HKV, SK, DV))]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"query": CALL[0][0]}, r"^query: shape \(4, 70, 16\); accepted is"),
    ({"key": 3}, r"^key: int; accepted is a torch.Tensor"),
    ({"score_mod": 3}, r"^score_mod: int; accepted is a function f\(score, b, h, q_idx, kv_idx\), or None$"),
    ({"score_mod": lambda s, b, h, i, j: s if i > j else 0}, r"^score_mod: .*a branch on the data"),
    ({"block_mask": torch.ones(2)}, "^block_mask: torch.Tensor; accepted is a BlockMask, as create_block_mask makes it, or None$"),
    ({"scale": "a"}, "^scale: "),
    ({"enable_gqa": 3}, "^enable_gqa: "),
    ({"return_lse": "yes"}, "^return_lse: "),
    ({"return_aux": True}, "^return_aux: bool True; accepted is an AuxRequest, or None$"),
    ({"return_lse": True, "return_aux": ours.AuxRequest(lse=True)}, "^return_lse: True beside return_aux; accepted is return_aux="),
    ({"kernel_options": 3}, "^kernel_options: int; accepted is a dict, or None$"),
    ({"kernel_options": {"BLOCK_M": 64, "OUTPUT_MAX": True}}, "^kernel_options: 'OUTPUT_MAX'; accepted, without effect, are BACKEND, "),
    ({"mask": None}, r"got an unexpected keyword argument 'mask'; did you mean block_mask\?$"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_one_clear_message(given, words):
    arguments = dict(zip(("query", "key", "value"), CALL, strict=True)) | given
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=words):
        flex_attention(**arguments)


def test_masks_that_are_refused():
    for arguments, words in (
        ((3, 1, 1, 8, 8), r"^mask_mod: int; accepted is a function g\(b, h, i, j\)"),
        ((SCORES["softcap"], 1, 1, 8, 8), r"^mask_mod: .* does not take 4 arguments; accepted is g\(b, h, i, j\)"),
        ((causal, -1, 1, 8, 8), "^B: -1; accepted are integers"),
        ((causal, 1, 1, "8", 8), "^Q_LEN: "),
        ((causal, 1, 1, 8, 8, DEVICE, 0), "^BLOCK_SIZE: 0; accepted "),
        ((causal, 1, 1, 8, 8, DEVICE, (1, 2, 3)), r"^BLOCK_SIZE: \(1, 2, 3\); accepted is an integer, or two"),
        ((lambda b, h, i, j: i > j > 3, 1, 1, 8, 8), "^mask_mod: .*a branch on the data"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            create_block_mask(*arguments)
    with pytest.raises(TypeError, match="^mask_mods: int among them; accepted are functions"):
        ours.and_masks(causal, 3)
    counts, indices = torch.ones(1, 1, 2).int(), torch.zeros(1, 1, 2, 2).int()
    with pytest.raises(TypeError, match="^full_kv_indices: None beside the other one; accepted are both, or none$"):
        BlockMask.from_kv_blocks(counts, indices, counts)
    with pytest.raises(ValueError, match=r"^kv_num_blocks, kv_indices: shapes \(1, 2\), \(1, 1, 2, 2\); accepted are"):
        BlockMask.from_kv_blocks(counts[0], indices)
    with pytest.raises(ValueError, match="^kv_indices: 2 rows; accepted are 5 rows, for 70 queries in blocks of 16$"):
        flex_attention(*CALL, None, BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, seq_lengths=(SQ, SK)))
    for place in (-1, 7):
        outside = BlockMask.from_kv_blocks(torch.ones(1, 1, 5).int(), torch.full((1, 1, 5, 6), place).int(), None, None, 16, None, (SQ, SK))
        with pytest.raises(ValueError, match=f"^kv_indices: block {place}; accepted are 0 to 5, for 90 keys$"):
            flex_attention(*CALL, None, outside)
    with pytest.raises(ValueError, match=r"^seq_lengths: \(3,\); accepted are two integers, the numbers of queries and of keys$"):
        BlockMask.from_kv_blocks(counts, indices, seq_lengths=(3,))
    with pytest.raises(IndexError, match="^index 2; accepted is -2 to 1$"):
        create_block_mask(causal, 2, 1, 8, 8, DEVICE)[2]
    with pytest.raises(ValueError, match="^block_mask: of 1 sequence, and its function depends on b; accepted is one of 2 sequences"):
        flex_attention(*CALL, None, create_block_mask(by_head, None, H, SQ, SK, DEVICE))
    with pytest.raises(TypeError, match="^q_nt: torch.Tensor; accepted beside nested tensors is one of layout torch.jagged"):
        ours.create_nested_block_mask(causal, 1, 1, CALL[0])
    with pytest.raises(TypeError, match="^key: torch.Tensor; accepted beside nested tensors is one of layout torch.jagged"):
        flex_attention(nested(LENGTHS_Q, H, D), *CALL[1:])
    with pytest.raises(TypeError, match="^mod_fn: it takes 2 arguments; accepted is g"):
        create_mask(lambda i, j: i, 1, 1, 8, 8)


def test_compiled():
    """Whether the graph ends at the call or holds it, the results are the same, and what is assigned to a mask takes effect."""
    given = [x.detach() for x in tensors()]
    mask = create_block_mask(causal, None, None, SQ, SK, DEVICE, 16)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = create_block_mask(window, None, None, SQ, SK, DEVICE, 16)
        return flex_attention(q * 2, k, v, SCORES["bias"], mask) + flex_attention(q, k, v, None, own)

    compiled = torch.compile(run, backend="eager")
    before = compiled(*given)
    close(before, run(*given))
    mask.full_kv_num_blocks = torch.zeros_like(mask.full_kv_num_blocks)
    fewer = compiled(*given)
    close(fewer, run(*given))
    assert not torch.equal(fewer, before)
    mask.mask_mod = window
    close(compiled(*given), run(*given))
    assert not torch.equal(run(*given), fewer)


@pytest.mark.skipif(_compiled.OPERATOR is None, reason="this PyTorch's compiler does not keep functions in its graph")
def test_a_mask_of_a_partial_stays_in_the_graph():
    """A compiler does not compare functools.partial objects."""

    def within(most: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() < most

    given = [x.detach() for x in tensors()]
    mask = create_block_mask(functools.partial(within, 20), None, None, SQ, SK, DEVICE, 16)
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, None, mask), backend="eager", fullgraph=True)
    close(compiled(*given), flex_attention(*given, None, create_block_mask(window, None, None, SQ, SK, DEVICE, 16)))
