"""strobe.distributed.Sharding: every token has one owner, and sharded tensors can be joined again."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import plain
import strobe
from strobe.distributed import Sharding, _ranges, _seen

WORLDS = st.integers(1, 9)
LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from([31, 97, 127, 257, 1009]), st.integers(41, 700))
NAMES = ["contiguous", "zigzag", "balanced", "any"]


def sharding_of(name: str, seqlen: int, world: int, seed: int = 0) -> Sharding:
    if name == "any":  # uneven; some ranks may have no token
        rng = random.Random(seed)
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(world)]
        at = 0
        while at < seqlen:
            n = min(rng.choice([1, 2, 7, 16, 50]), seqlen - at)
            ranges[rng.randrange(world)].append((at, n))
            at += n
        return Sharding(seqlen, tuple(map(tuple, ranges)))
    return getattr(Sharding, name)(seqlen, world)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NAMES), LENGTHS, WORLDS, st.integers(0, 99), st.integers(0, 2))
def test_every_token_has_one_owner_and_comes_back(name, seqlen, world, seed, dim):
    sharding = sharding_of(name, seqlen, world, seed)
    positions = [sharding.positions(rank) for rank in range(world)]
    assert torch.equal(torch.cat(positions).sort().values, torch.arange(seqlen))
    assert all(torch.equal(x, x.sort().values) for x in positions)
    assert [sharding.count(rank) for rank in range(world)] == list(map(len, positions))
    x = torch.randn([*[2, 3, 2][:dim], seqlen, *[2, 3][: 2 - dim]])
    shards = [sharding.shard(x, dim, rank) for rank in range(world)]
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, x.index_select(dim, positions[rank]))
        assert torch.equal(shard, sharding.shard(x, dim - 3, rank))
    assert torch.equal(sharding.join(shards, dim), x)


@settings(max_examples=80, deadline=None)
@given(LENGTHS, WORLDS)
def test_shares_are_even(seqlen, world):
    """Contiguous shares differ by one token at most, zigzag shares by two; with fewer tokens than ranks, some have none."""
    contiguous = [Sharding.contiguous(seqlen, world).count(rank) for rank in range(world)]
    assert max(contiguous) - min(contiguous) <= 1
    zigzag = [Sharding.zigzag(seqlen, world).count(rank) for rank in range(world)]
    assert max(zigzag) - min(zigzag) <= 2
    if seqlen < world:
        assert 0 in contiguous
        assert 0 in zigzag


def work(sharding: Sharding, cu: list[int], left: int | None, causal: bool) -> list[int]:
    """The number of keys that the queries of each rank see."""
    found = []
    for rank in range(sharding.world_size):
        total = 0
        for i in sharding.positions(rank).tolist():
            inside = [(a, b) for a, b in itertools.pairwise(cu) if a <= i < b]
            for a, b in inside:
                low = a if left is None else max(a, i - left)
                total += (i + 1 if causal else b) - low
        found.append(total)
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(300, 900), st.integers(2, 5), st.integers(0, 99), st.sampled_from([None, 40, 200]))
def test_balanced(seqlen, world, seed, left):
    """Each rank's work and number of tokens differ from the mean by a quarter at most, for documents of any lengths."""
    rng = random.Random(seed)
    cu = sorted({0, seqlen, *(rng.randrange(seqlen) for _ in range(rng.randrange(5)))})
    sharding = Sharding.balanced(seqlen, world, cu_seqlens=cu, window=None if left is None else (left, 0))
    shares = work(sharding, cu, left, True)
    assert max(shares) <= 1.25 * sum(shares) / world
    counts = [sharding.count(rank) for rank in range(world)]
    assert max(counts) <= 1.25 * seqlen / world


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 40), max_size=4), st.integers(0, 9), st.booleans(), st.sampled_from([None, 0, 3, 99]),
    st.sampled_from([None, 0, 7, 99]),
)  # fmt: skip
def test_the_work_before_a_token(lengths, padding, causal, left, right):
    cu = [0, *itertools.accumulate(lengths)]
    seqlen, band = cu[-1] + padding, _seen.Band.of(causal, (left, right))
    before = _seen.work_before(seqlen, cu, band, None)
    work = _seen.work_of_tokens(seqlen, cu, band, None).tolist()
    assert [before(n) for n in range(seqlen + 1)] == [0, *itertools.accumulate(work)]


@pytest.mark.parametrize("options", [{}, {"window": 4096}, {"causal": False}, {"cu_seqlens": [0, 2**39, 2**40]}], ids=str)
def test_balanced_takes_no_memory_for_tokens(options):
    """Memory per token would be terabytes here."""
    sharding = Sharding.balanced(2**40, 4, **options)
    assert sum(map(sharding.count, range(4))) == 2**40


def test_balanced_takes_the_plain_shardings_where_they_do():
    assert Sharding.balanced(4096, 4) == Sharding.zigzag(4096, 4)
    assert Sharding.balanced(4096, 4, causal=False) == Sharding.contiguous(4096, 4)
    assert Sharding.balanced(65536, 4, window=(512, 0)) == Sharding.contiguous(65536, 4)


def test_balanced_by_a_block_mask():
    kept = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    kept[:, :, :6] = False  # all the work is in the last quarter
    kept[:, :, :, 0] = True
    sharding = Sharding.balanced(512, 2, block_mask=strobe.BlockMask.from_kept(kept, 64, 64), causal=False)
    last = [int((sharding.positions(rank) >= 384).sum()) for rank in range(2)]
    assert max(last) <= 80


@pytest.mark.parametrize("name", NAMES)
def test_parts_together_are_the_whole(name):
    """Each rank computes its queries over all keys, also for packed sequences that cross ranks."""
    q, k, v = (torch.randn(1, 2, 37, 16) for _ in range(3))
    sharding = sharding_of(name, 37, 3, 5)
    outs = [strobe.attention(sharding.shard(q, 2, rank), k, v, causal=True, part=sharding.part(rank)) for rank in range(3)]
    torch.testing.assert_close(sharding.join(outs, 2), strobe.attention(q, k, v, causal=True))
    cu = torch.tensor([0, 5, 5, 30, 37], dtype=torch.int32)
    whole = strobe.attention(*(x[0].transpose(0, 1) for x in (q, k, v)), causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
    packed = []
    for rank in range(3):
        of = sharding.positions(rank)
        own = torch.tensor([0, *(int((of < end).sum()) for end in cu[1:].tolist())], dtype=torch.int32)
        tensors = (sharding.shard(q[0].transpose(0, 1), 0, rank), *(x[0].transpose(0, 1) for x in (k, v)))
        part = sharding.part(rank, cu_seqlens_q=cu, cu_seqlens_k=cu)
        packed.append(strobe.attention(*tensors, causal=True, part=part, cu_seqlens_q=own, cu_seqlens_k=cu))
    torch.testing.assert_close(sharding.join(packed, 0), whole)


def test_partial_parts():
    q, k, v = (torch.randn(1, 2, 30, 16) for _ in range(3))
    sharding = Sharding.zigzag(30, 2)
    for rank in range(2):
        halves = [
            strobe.attention(
                sharding.shard(q, 2, rank), sharding.shard(k, 2, other), sharding.shard(v, 2, other), causal=True, return_lse=True,
                part=sharding.part(rank, k_rank=other),
            )
            for other in range(2)
        ]  # fmt: skip
        expected = sharding.shard(strobe.attention(q, k, v, causal=True), 2, rank)
        torch.testing.assert_close(strobe.merge(*halves[0], *halves[1])[0], expected)


def test_shard_is_differentiable_and_a_view_of_one_range():
    x = torch.randn(10, 3, requires_grad=True)
    sharding = Sharding.contiguous(10, 2)
    assert sharding.shard(x, 0, 1).data_ptr() == x[5:].data_ptr()
    Sharding.zigzag(10, 2).shard(x, 0, 0).sum().backward()
    assert x.grad[:, 0].tolist() == [1, 1, 0, 0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"k_rank": -1}, "^k_rank: -1"),
        ({"k_rank": 2}, "^k_rank: 2"),
        ({"keys": 3}, "^keys: int"),
        ({"cu_seqlens_k": [0, 8, 16]}, "^cu_seqlens_q, cu_seqlens_k"),
        ({"cu_seqlens_q": [0, 99], "cu_seqlens_k": [0, 16]}, "^cu_seqlens_q"),
        ({"cu_seqlens_q": [0, 16], "cu_seqlens_k": [0, 5, 3]}, "^cu_seqlens_k"),
        ({"cu_seqlens_q": [0, 16], "cu_seqlens_k": "x"}, "^cu_seqlens_k"),
    ],
)
def test_what_a_part_is_not_made_of(how, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Sharding.zigzag(16, 2).part(0, **how)


@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_cu_seqlens_without_numbers_are_refused_by_name(kind):
    cu = torch.tensor([0, 7], device="meta") if kind == "meta" else torch.tensor([0, 7]).to_sparse()
    with pytest.raises(TypeError, match=f"^cu_seqlens: .*{kind}.*; accepted are integers"):
        Sharding.balanced(7, 2, cu)


def test_the_old_names_are_told_the_new_ones():
    with pytest.raises(AttributeError, match=r"has no attribute 'Layout'; did you mean Sharding\?$"):
        _ = strobe.distributed.Layout
    with (
        pytest.raises(TypeError, match=r"argument 'layout'; did you mean sharding\?$"),
        strobe.distributed.context_parallel(None, layout=Sharding.zigzag(8, 2)),
    ):
        pass


def test_what_a_sharding_refuses():
    x, mask = torch.zeros(2, 8), strobe.BlockMask.from_kept(torch.ones(1, 1, 2, 2, dtype=torch.bool), 4, 4)
    for call, message in (
        (lambda: Sharding.contiguous(-1, 2), "seqlen: -1; accepted are integers from 0"),
        (lambda: Sharding.zigzag(8, 0), "world_size: 0; accepted are integers from 1"),
        (lambda: Sharding.zigzag(4, 2**31), "world_size: 2147483648; accepted are integers from 1 to 1048576"),
        (lambda: Sharding.zigzag(8.0, 2), "seqlen: float; accepted is an integer"),
        (lambda: Sharding(8, (((0, 4),), ((5, 3),))), "ranges: (((0, 4),), ((5, 3),)); accepted are ranges that have each position"),
        (lambda: Sharding(8, (((0, 5),), ((4, 4),))), "ranges: (((0, 5),), ((4, 4),)); accepted are ranges that have each position"),
        (lambda: Sharding(8, ()), "ranges: (); accepted is for each rank a sequence of (start, length)"),
        (lambda: Sharding.balanced(8, 2, cu_seqlens=[0, 9]), "cu_seqlens: (0, 9); accepted are numbers that begin at 0"),
        (lambda: Sharding.balanced(8, 2, cu_seqlens=3), "cu_seqlens: 3; accepted are integers (B + 1,)"),
        (lambda: Sharding.balanced(8, 2, window="wide"), "window: 'wide'; accepted is (left, right)"),
        (lambda: Sharding.balanced(8, 2, window=(-1, 0)), "window: (-1, 0); accepted is (left, right)"),
        (lambda: Sharding.balanced(8, 2, causal="no"), "causal: str 'no'; accepted is True or False"),
        (lambda: Sharding.balanced(8, 2, causal=None), "causal: NoneType None; accepted is True or False"),
        (lambda: Sharding.balanced(8, 2, block_mask=x), "block_mask: torch.Tensor; accepted is a strobe.BlockMask"),
        (lambda: Sharding.balanced(9, 2, block_mask=mask), "block_mask: of 8 queries and 8 keys; accepted are 9 of each, as seqlen says"),
        (lambda: Sharding.balanced(7, 2, block_mask=mask), "block_mask: of 8 queries and 8 keys; accepted are 7 of each, as seqlen says"),
        (
            lambda: Sharding.balanced(19, 2, cu_seqlens=[0, 9, 19], block_mask=mask),
            "block_mask: of 8 queries and 8 keys; accepted are 10 or more of each, as the longest sequence has",
        ),
        (lambda: Sharding.contiguous(8, 2).shard(x, 0, 0), "x: shape (2, 8); accepted are 8 tokens along axis 0, as the sharding says"),
        (lambda: Sharding.contiguous(8, 2).shard(x, 2, 0), "dim: 2; accepted is an axis of x, of shape (2, 8)"),
        (lambda: Sharding.contiguous(8, 2).shard([1], 0, 0), "x: list; accepted is a torch.Tensor"),
        (lambda: Sharding.contiguous(8, 2).shard(x, 1, 2), "rank: 2; accepted are integers from 0 to 1"),
        (lambda: Sharding.contiguous(8, 2).join([x], 1), "shards: 1 of them; accepted are 2, one for each rank"),
        (lambda: Sharding(8, (((0, 8), (9, -3)),)), "ranges: (((0, 8), (9, -3)),); accepted are ranges that have each position"),
        (lambda: Sharding.balanced(8, 2, cu_seqlens=torch.Tensor), "cu_seqlens: <class 'torch.Tensor'>; accepted are integers (B + 1,)"),
        (
            lambda: Sharding.zigzag(8, 2).part(0, cu_seqlens_q=[0, 8], cu_seqlens_k=[0, 3, 8]),
            "cu_seqlens_k: 3 numbers; accepted are 2, as cu_seqlens_q has",
        ),
        (lambda: Sharding.contiguous(8, 2).positions(), "group: None, and torch.distributed has no process group"),
    ):
        with pytest.raises((TypeError, ValueError)) as refused:
            call()
        assert str(refused.value).startswith(message)


HALF = torch.zeros(2, 4)
OF_SHARDS = "accepted is a sequence of torch.Tensor, one for each rank"


@pytest.mark.parametrize(
    ("shards", "dim", "message"),
    [
        (None, 1, f"shards: NoneType; {OF_SHARDS}"),
        (3, 1, f"shards: int; {OF_SHARDS}"),
        (iter([HALF, HALF]), 1, f"shards: list_iterator; {OF_SHARDS}"),
        ({0: HALF, 1: HALF}, 1, f"shards: dict; {OF_SHARDS}"),
        (torch.tensor(1.0), 1, f"shards: torch.Tensor; {OF_SHARDS}"),
        ("ab", 1, "shards[0]: str; accepted is a torch.Tensor"),
        ([HALF, HALF.numpy()], 1, "shards[1]: numpy.ndarray; accepted is a torch.Tensor"),
        ([HALF, HALF], 2, "dim: 2; accepted is an axis of shards[0], of shape (2, 4)"),
        ([HALF, HALF], None, "dim: None; accepted is an axis of shards[0], of shape (2, 4)"),
        ([HALF, HALF[:, 1:]], 1, "shards[1]: shape (2, 3); accepted are 4 tokens along axis 1, as the sharding says"),
        ([HALF, torch.zeros(3, 4)], 1, "shards[1]: shape (3, 4); accepted is (2, 4), with the other axes of shards[0]"),
        ([HALF, torch.zeros(1, 2, 4)], -1, "shards[1]: shape (1, 2, 4); accepted is (2, 4), with the other axes of shards[0]"),
        ([HALF, HALF.double()], 1, "shards[1]: dtype torch.float64; accepted is torch.float32, as shards[0] has"),
        ([HALF, HALF.to("meta")], 1, "shards[1]: on device meta; accepted is cpu, where shards[0] lies"),
        ([HALF, HALF.to_sparse()], 1, "shards[1]: layout torch.sparse_coo; accepted is torch.strided, which to_dense() gives"),
    ],
    ids=lambda x: x.partition(";")[0] if isinstance(x, str) else "",
)
def test_what_is_not_joined(shards, dim, message):
    with pytest.raises((TypeError, ValueError)) as refused:
        Sharding.zigzag(8, 2).join(shards, dim)
    assert str(refused.value) == message


def test_only_dense_tensors_are_sharded():
    x = torch.zeros(2, 8)
    for way in (Sharding.contiguous(8, 2), Sharding.zigzag(8, 2)):
        for sparse in (x.to_sparse(), x.to_sparse_csr()):
            with pytest.raises(ValueError, match=r"^x: layout torch\.sparse_.*; accepted is torch\.strided"):
                way.shard(sparse, 1, 0)
        with pytest.raises(ValueError, match="^x: a nested tensor, .*; accepted is a dense one"):
            way.shard(torch.nested.nested_tensor([x], layout=torch.jagged), 1, 0)
        assert way.join(torch.stack([way.shard(x, 1, rank) for rank in (0, 1)]), 1).shape == x.shape


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 4), st.integers(0, 99), st.booleans(), st.booleans(), st.sampled_from([None, 0, 3, 30]), st.sampled_from([None, 0, 7]),
    st.booleans(),
)  # fmt: skip
def test_seen_keys_are_those_that_positions_and_blocks_leave(world, seed, packed, causal, left, right, blocks):
    """The keys are compared with the contract's formulas, for sequences of different lengths of queries and keys."""
    rng = random.Random(seed)
    lengths = [(rng.randrange(1, 60), rng.randrange(0, 60)) for _ in range(3 if packed else 1)]
    cu_q, cu_k = ([0, *itertools.accumulate(side)] for side in zip(*lengths, strict=True))
    alignment = rng.choice(["bottom_right", "top_left"])
    band = _seen.Band.of(causal, (left, right), alignment)
    sharding = sharding_of("any", cu_q[-1], world, seed)
    most_q, most_k = (max(side) for side in zip(*lengths, strict=True))
    mask = found = None
    if blocks and most_k:
        generator = torch.Generator().manual_seed(seed)
        kept = torch.rand(1, 2, -(-most_q // 16), -(-most_k // 16), generator=generator) < 0.4
        mask = strobe.BlockMask.from_kept(kept, 16, 16, most_q, most_k)
        found = _seen.blocks_of(mask.rows, mask.cols, kept.shape[3], 16, 16)
        assert _seen.blocks_of(mask.rows, mask.cols, kept.shape[3], 16, 16) is found
    for rank in range(world):
        expected = []
        for b, (sq, sk) in enumerate(lengths):
            own = sharding.positions(rank)
            own = own[(own >= cu_q[b]) & (own < cu_q[b + 1])] - cu_q[b]
            seen = plain.band(sq, sk, causal, (left, right), alignment)
            if mask is not None:
                seen = seen & mask.to_dense()[0].any(0)[:sq, :sk]
            expected += (seen[own].any(0).nonzero()[:, 0] + cu_k[b]).tolist()
        keys = _seen.seen_keys(sharding.ranges[rank], tuple(cu_q), tuple(cu_k), band, found)
        assert _ranges.indices(keys).tolist() == expected
