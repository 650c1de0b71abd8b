"""strobe.distributed apart from its options: one rank's error is raised on every rank; seeds, bits, and the ways to call it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import distributed_calls as calls
import strobe
from device import ON_GPU
from strobe.distributed import Sharding, _call, _late, _methods, _operators, _predict, _seen

pytestmark = pytest.mark.skipif(ON_GPU, reason="gloo on the CPU")
METHODS = ["gather", "heads", "ring"]


def joined(sharding: Sharding, of_ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: sharding.join([found[name] for found in of_ranks], 2) for name in of_ranks[0] if name != "rng"}


WORDS = {
    "rows": "q: shape (2, 4, {less}, 16); accepted are {own} tokens along axis 2, as the sharding says",
    "rows of k": "k: shape (2, 4, {less}, 16); accepted are {own} tokens along axis 2, as the sharding says",
    "whole q": "q: shape (2, 4, 37, 16); accepted are {own} tokens along axis 2, as the sharding says; sharding.shard(q, 2) takes this "
    "rank's",
    "rows before heads": "q: shape (2, {own}, 4, 16); accepted are {own} tokens along axis 2, as the sharding says; "
    'did you mean layout="bshd"?',
    "heads before rows": "q: shape (2, 4, {own}, 16); accepted are {own} tokens along axis 1, as the sharding says; "
    'did you mean layout="bhsd"?',
    "a NumPy array": "v: numpy.ndarray; accepted is a torch.Tensor",
    "another dtype": "k: dtype float64",
    "another head dimension": "k: shape (2, 4, {own}, 15); accepted is",
    "a value": "softcap: -1",
    "a kind": "causal: str 'yes'; accepted is True or False",
    "a name": "attention() got an unexpected keyword argument 'is_causal'; did you mean causal?",
    "a mask": "mask: shape (3, 3); accepted is",
    "a bias": "bias: shape (1, 1, 1, 38); accepted is",
    "slopes of other heads": "alibi_slopes: shape (8); accepted is",
    "slopes that require grad": "alibi_slopes: requires grad, and attention has no gradient of it; accepted is alibi_slopes.detach()",
    "sinks of other heads": "sinks: shape (3); accepted is (H) = (4)",
    "a mask of other heads": "mask: shape (1, 8, 1, 37); accepted is",
    "a bias of other rows": "bias: shape (1, 1, {more}, 37); accepted is",
    "meta": "q: on the device meta; accepted is one that has memory",
    "a part": "part: given; accepted is None, for the sharding says it",
    "an engine": "engine: ",
    "a sharding": 'sharding: str; accepted is a strobe.distributed.Sharding; the order of the axes is layout="bshd"',
    "the old axes": "attention() got an unexpected keyword argument 'axes'; did you mean layout, the order of the axes?",
    "the old layout": "layout: a Sharding; accepted is 'bhsd' or 'bshd'; which rank has which tokens goes into sharding",
    "a sharding of other ranks": "sharding: of 7 ranks; accepted is one of {world}, the group's size",
    "layout": "layout: 'hbsd'; accepted is 'bhsd' or 'bshd'",
    "v of other heads": "v: shape (2, ",
    "v of another batch": "v: shape (3, ",
    "k and v of another batch": "k: shape (3, 4, {own}, 16); accepted is a batch of 2, as q has",
    "a method": "method: 'shuttle'; accepted is 'gather' or 'heads' or 'ring'",
    "cu_seqlens": "cu_seqlens_k: missing beside cu_seqlens_q; accepted are both, or none",
    "aux": "attention() got an unexpected keyword argument 'aux'; max_logit and column_sums belong to whole rows",
    "deterministic": "deterministic: 'always'; accepted is True, False or 'world'",
    "time_limit": "time_limit: -1.0; accepted are seconds above 0, up to 1000000, or None",
}


@pytest.mark.parametrize("change", list(calls.WRONG))
def test_one_wrong_call_raises_on_all(workers, change):
    for world, rank in ((2, 1), (3, 0)):
        answers = workers.run(calls.fails_on, world, rank, change, "wrong")
        assert len(set(answers)) == 1
        own = Sharding.zigzag(calls.S, world).count(rank)
        assert answers[0][1].startswith(WORDS[change].format(own=own, less=own - 1, more=own + 1, world=world)), answers[0]
        assert all(line.endswith(f"[rank {rank} of {world}]") for line in answers[0][1].splitlines())
        assert answers[0][0] in ("TypeError", "ValueError", "NotImplementedError")


@pytest.mark.parametrize("change", list(calls.OTHERS))
def test_calls_that_differ_raise_on_all(workers, change):
    answers = workers.run(calls.fails_on, 3, 2, change, "others")
    assert len(set(answers)) == 1
    kind, text = answers[0]
    assert kind == "ValueError"
    assert text.startswith(f"{change}: ")
    assert text.endswith("accepted is the same on all 3 ranks")
    others, own = re.fullmatch(rf"{change}: (.*) on rank 2, and (.*) on rank 0; accepted is the same on all 3 ranks", text).groups()
    expected = {
        "window": ("(3, None)", "None"),
        "scale": ("0.5", "None"),
        "causal": ("True", "False"),
        "softcap": ("2.0", "0.0"),
        "alignment": ("'top_left'", "'bottom_right'"),
        "layout": ("'bshd'", "'bhsd'"),
        "deterministic": ("True", "False"),
        "dropout": ("0.1", "0.0"),
        "offset": ("3", "0"),
        "method": ("'ring'", "'gather'"),
        "seed": ("2", "0"),
    }
    assert (others, own) == expected.get(change, (others, own))
    assert others != own


def test_options_that_differ_are_told_as_they_are_written():
    """Messages name options as callers write them, not as fields of the C ABI, including options at their default."""
    drawn = _operators._written({"deterministic": True, "invariant": True, "bshd": True, "window_right": 0, "dropout": 0.5}, True)
    plain = _operators._written({}, False)
    differ = {name: (drawn[name], plain[name]) for name in plain if drawn[name] != plain[name]}
    assert differ == {
        "window": ((None, 0), None),
        "dropout": (0.5, 0.0),
        "seed": ("drawn", 0),
        "deterministic": ("world", False),
        "invariant": (True, False),
        "layout": ("bshd", "bhsd"),
    }


@pytest.mark.parametrize("method", METHODS)
def test_calls_that_come_again(workers, method):
    """Cached checks of a call are used only for the same call."""
    for found, kept in workers.run(calls.comes_again, 4, method):
        assert all(difference < 1e-5 for difference in found.values()), found
        assert kept == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_result_may_be_changed_in_place(workers, method):
    assert workers.run(calls.changed_in_place, 2, method) == [0.0] * 2


def test_what_is_refused_beside_a_call_that_came_before(workers):
    first, *others = workers.run(calls.refused_again, 2)
    assert all(other == first for other in others)
    assert first == [
        ("TypeError", "agree: int 1; accepted is True or False [rank 0 of 2]"),
        ("TypeError", "causal: int 1; accepted is True or False [rank 0 of 2]"),
        ("TypeError", "attention() got an unexpected keyword argument 'sharding_q'; did you mean sharding_k? [rank 0 of 2]"),
        ("TypeError", "time_limit: bool; accepted is a number [rank 0 of 2]"),
        ("TypeError", 'sharding_k: str; accepted is a strobe.distributed.Sharding; the order of the axes is layout="bshd" [rank 0 of 2]'),
        (
            "ValueError",
            "cu_seqlens_q: (0, 9, 38); accepted are numbers that begin at 0, never fall, and end at 37 or before [rank 0 of 2]",
        ),
    ]


def test_a_destroyed_group_is_not_kept(workers):
    assert workers.run(calls.forgets_its_group, 4) == [True] * 4


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_rank_without_memory(workers, method, in_backward):
    answers = workers.run(calls.runs_out_of_memory, 2, 1, method, in_backward)
    assert answers == [("MemoryError", "can't allocate memory: 1 TB [rank 1 of 2]")] * 2


@pytest.mark.parametrize("method", METHODS)
def test_rows_behind_the_last_sequence_see_no_sink(workers, method):
    lse, dsinks = zip(*workers.run(calls.padded_with_sinks, 2, method), strict=True)
    found = torch.cat(lse, 1)
    assert (found[:, 8:] == -torch.inf).all()
    torch.testing.assert_close(sum(dsinks), torch.exp(-found[:, :8]).sum(1))


@pytest.mark.parametrize("wrong", [None, 0])
def test_a_rank_that_cannot_copy_what_it_sends(workers, wrong):
    """The rank reports its failure before the others send anything. All ranks name the first rank that failed."""
    answers = workers.run(calls.cannot_prepare, 3, 1, wrong)
    assert len(set(answers)) == 1
    assert answers[0][0] == ("MemoryError" if wrong is None else "TypeError")
    assert f"[rank {1 if wrong is None else wrong} of 3]" in answers[0][1]


@pytest.mark.parametrize(
    ("agree", "how"), [(True, "absent"), (False, "absent"), (False, "wrong"), (True, "backward")], ids=lambda x: str(x)
)
def test_a_rank_that_does_not_come_is_named(workers, agree, how):
    """A time limit, here of half a second, ends the wait."""
    answers = workers.run(calls.does_not_come, 4, 2, agree, how)
    for rank, (kind, text, seconds) in enumerate(answers):
        if rank == 2:
            assert text == "absent" or (how == "wrong" and text.startswith("softcap: -1"))
            continue
        assert kind == "RuntimeError", text
        assert "rank 2 did not take part" in text
        assert f"says rank {rank} of 4" in text
        assert seconds < 20


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("group", "group: str; accepted is a torch.distributed.ProcessGroup that this process is a member of, or None"),
        ("mesh", "mesh: int; accepted is a torch.distributed.device_mesh.DeviceMesh"),
        ("context", "sharding: None without buffers; accepted is a strobe.distributed.Sharding, or buffers, whose length says it"),
    ],
)
def test_a_rank_with_a_wrong_group_raises_on_all(workers, how, words):
    """The rank does not know which ranks wait for it, so the waiting ranks check whether it has failed."""
    answers = workers.run(calls.leaves, 4, 2, how)
    for rank, (_, text, seconds) in enumerate(answers):
        assert text == (words if rank == 2 else f"{words} [rank 2 of 4]")
        assert seconds < 10
    assert len({kind for kind, _, _ in answers}) == 1


def test_a_group_without_a_cpu_backend(workers):
    """The ranks of such a group agree in a gloo group, however many other groups each rank is in."""
    answers = workers.run(calls.agrees_without_a_cpu_backend, 4)
    assert len({repr(answer) for answer in answers}) == 1
    numbers, (kind, text), _ = answers[0]
    assert numbers == [(0, 7), (10, 3)]
    assert (kind, text) == ("ValueError", "q: 1 on rank 1, and 0 on rank 0; accepted is the same on all 4 ranks")


@pytest.mark.parametrize("agree", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_the_first_rank_draws_the_seed(workers, method, agree):
    answers = workers.run(calls.drawn, 2, method, agree)
    q, k, v, dout = calls.whole()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = strobe.attention(q, k, v, dropout=0.3, causal=True, rng=answers[0]["rng"])
    out.backward(dout)
    for name, x in joined(Sharding.zigzag(calls.S, 2), answers).items():
        torch.testing.assert_close(x, {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}[name], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (9, 3), "softcap": 5.0, "sinks": torch.tensor([0.1, 0.2, -1.0, 0.0])}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_world(workers, dtype, options):
    q, k, v, dout = calls.whole(dtype)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = strobe.attention(q, k, v, invariant=True, deterministic=True, return_lse=True, **options)
    torch.autograd.backward([out, lse], [dout, torch.ones_like(lse)])
    expected = {"out": out.detach(), "lse": lse.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    for world, kind in ((1, "zigzag"), (2, "zigzag"), (2, "contiguous"), (4, "contiguous")):
        answers = workers.run(calls.bits, world, kind, dtype, options)
        for name, x in joined(getattr(Sharding, kind)(calls.S, world), answers).items():
            assert torch.equal(x, expected[name]), (world, kind, name)


@pytest.mark.parametrize("method", [*METHODS, "levels"])
@pytest.mark.parametrize("way", ["group", "mesh", "checkpoint", "bshd", "autocast", "compile"])
def test_ways_to_call(workers, way, method):
    answers = workers.run(calls.as_users_call_it, 4, way, method)
    q, k, v, dout = calls.whole()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    if way == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = strobe.attention(q, k, v, causal=True).float()
    else:
        out = strobe.attention(q, k, v, causal=True)
    out.backward(dout)
    near = {"atol": 3e-2, "rtol": 3e-2} if way == "autocast" else {"atol": 2e-6, "rtol": 1e-5}
    for name, x in joined(Sharding.zigzag(calls.S, 4), answers).items():
        torch.testing.assert_close(x, {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}[name], **near)


@pytest.mark.parametrize("method", [*METHODS, "levels"])
def test_lse_in_the_loss_of_one_rank(workers, method):
    world = 4 if method == "levels" else 2
    sharding = Sharding.zigzag(calls.S, world)
    q, k, v, dout = calls.whole()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = strobe.attention(q, k, v, causal=True, return_lse=True)
    ((out * dout).sum() + sharding.shard(lse, 2, 0).sum()).backward()
    expected = {"dq": q.grad, "dk": k.grad, "dv": v.grad}
    for name, x in joined(sharding, workers.run(calls.lse_on_the_first_rank, world, method)).items():
        torch.testing.assert_close(x, expected[name], atol=3e-6, rtol=1e-5)


def test_a_compiled_call_is_the_eager_one(workers):
    assert workers.run(calls.compiled_beside_eager, 2) == [0.0, 0.0]


def test_an_agreement_that_ends_as_the_look_around_does_is_no_failure():
    """The wait times out, but the agreement ends before the check for ranks that left. On a busy machine that happens once in a few
    thousand calls."""

    class Work:
        def wait(self, limit: Any = None) -> None:
            if limit is not None:
                raise RuntimeError("Operation timed out!")

        def is_completed(self) -> bool:
            return True

    _late.Waits(None, None).unless_one_left(Work(), "agreeing", [])  # type: ignore[arg-type]


def test_no_second_derivative(workers):
    answers = workers.run(calls.twice_differentiated, 2)
    assert {kind for kind, _ in answers} == {"NotImplementedError"}
    assert "has no second derivative" in answers[0][1]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_unshard(workers, world):
    for x in workers.run(calls.unsharded, world):
        assert torch.equal(x, torch.arange(33.0).reshape(3, 11))


@pytest.mark.parametrize("door", ["sdpa", "attention"])
def test_context_parallel(workers, door):
    answers = workers.run(calls.in_a_context, 4, door)
    q, k, v, dout = calls.whole()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = strobe.attention(q, k, v, causal=True)
    out.backward(dout)
    expected = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    for answer in answers:
        torch.testing.assert_close(answer.pop("whole"), expected["out"], atol=2e-6, rtol=1e-5)
    for name, x in joined(Sharding.zigzag(calls.S, 4), answers).items():
        torch.testing.assert_close(x, expected[name], atol=2e-6, rtol=1e-5)


def test_multihead_attention_in_a_context(workers):
    """The test also runs without gradients, where PyTorch has a fast path that calls no function."""
    for difference, refused in workers.run(calls.multihead_in_a_context, 4):
        assert difference < 2e-6
        assert {kind for kind, _ in refused} == {"RuntimeError"}
        assert all(text.startswith("need_weights=True inside context_parallel()") for _, text in refused)


def test_local_attention_in_a_context_is_refused(workers):
    words = "attention() inside context_parallel(): the tensors are shards; accepted is strobe.distributed.attention"
    for answers in workers.run(calls.local_attention_in_a_context, 4):
        assert answers == [("RuntimeError", words)] * 5 + [("", "nothing was raised")] * 2


def test_a_mask_of_another_kind_is_refused_in_a_context(workers):
    for (of_number, number), (of_integers, integers) in workers.run(calls.masks_refused_in_a_context, 4):
        assert (of_number, of_integers) == ("TypeError", "ValueError")
        assert number == "attn_mask: int; accepted is a torch.Tensor, as query is [rank 0 of 4]"
        assert integers.startswith("attn_mask: dtype int64; accepted is bool")


def test_what_a_context_refuses(workers):
    words = [
        "sharding: None without buffers",
        "buffer_seq_dims: 0 numbers; accepted are 1, one for each buffer",
        "buffer_seq_dims: 2 at [0]; accepted is an axis of a buffer of shape (2, 8)",
        "buffers: 9 tokens at [1]; accepted are 8, as at [0]",
        "buffers: requires grad at [0]",
        "no_restore_buffers: a tensor that is not among buffers",
        "sharding: of 7 ranks; accepted is one of 4",
        "sharding: of 9 tokens; accepted is one of 8, as the buffers have",
        "buffers: torch.Tensor; accepted are several tensors in a list, or None",
        "buffer_seq_dims: int; accepted are integers in a list, or None",
        "no_restore_buffers: torch.Tensor; accepted are several tensors in a list, or None",
        "buffers[0]: layout torch.sparse_coo; accepted is torch.strided",
    ]
    for (kind, text), expected in zip(workers.run(calls.contexts_refused, 4)[0], words, strict=True):
        assert kind == ("TypeError" if ": torch.Tensor" in expected or ": int" in expected else "ValueError")
        assert text.startswith(expected)


@pytest.mark.parametrize("function", ["attention", "explain"])
def test_refusals_name_what_the_caller_gave(workers, function):
    """Messages name the function that was called and the caller's shapes, and no Part, because the caller gave none."""
    longest = "and a sequence has 22 tokens; accepted is 22 or more, or None"
    expected = [
        ("TypeError", f"{function}() got an unexpected keyword argument 'nonsense'"),
        ("ValueError", "block_mask: of 48 queries and 32 keys; accepted is one of 32 queries and 32 keys, as the whole sequences have"),
        ("ValueError", "block_mask: of 3 sequences and 3 heads; accepted are 1 or 2 sequences and 1 or 4 heads"),
        (
            "ValueError",
            "block_mask: of 48 queries and 32 keys; accepted is one of 22 queries and 22 keys, as the maxima of the sequences have",
        ),
        ("ValueError", f"max_seqlen_q: 5, {longest}"),
        ("ValueError", f"max_seqlen_k: 5, {longest}"),
        ("ValueError", "sinks: shape (3); accepted is (H) = (4)"),
        ("ValueError", "alibi_slopes: shape (3); accepted is (H) = (4)"),
        (
            "ValueError",
            "mask: shape (32, 33); accepted is (B|1, H|1, Sq|1, Sk of the whole problem|1) = (2|1, 4|1, 16|1, 32|1)",
        ),
        ("ValueError", "mask: a causal bias of 16 x 16, bottom_right; accepted is one of 32 x 32, as the whole sequences have"),
    ]
    for found in workers.run(calls.refused_in_own_words, 2, function):
        assert [(kind, words.removesuffix(" [rank 0 of 2]")) for kind, words in found] == expected


def test_a_causal_bias_is_that_of_whole_sequences(workers):
    assert workers.run(calls.by_a_causal_bias, 2) == [True, True]


def test_explain(workers):
    text = workers.run(calls.explained, 4, None, 2, False, {"causal": True})[1]
    first, balance, *methods, _, engine = text.splitlines()[:8]
    assert first.startswith("forward by method '")
    assert first.endswith("on 4 ranks; rank 1 has 10 of 37 queries and 10 of 37 keys")
    assert balance.startswith("sharding: the rank with most work has 1.")
    assert [line.split()[0] for line in methods] == ["gather", "heads", "ring", "levels"]
    assert "refused: k: 2 key heads with method 'heads'; accepted is a multiple of 4, the number of ranks" in methods[1]
    assert "refused: mesh: of one dimension, or none, with method 'levels'" in methods[3]
    assert sum("<- runs" in line for line in methods) == 1
    assert "of products beside" in methods[0]
    assert "; forward + backward " in methods[0]
    assert any(line.endswith("<- runs, with the least forward + backward") for line in methods)
    assert engine
    for method in METHODS:
        assert f"backward by method {method!r} on 2 ranks" in workers.run(calls.explained, 2, method, 2, True, {})[0]


def test_two_levels(workers):
    (told, of_one_head), refused = workers.run(calls.in_two_levels, 4)[1]
    assert told.startswith("forward by method 'levels' on 4 ranks; rank 1 has 10 of 37 queries")
    assert "levels refused: k: 1 key heads with method 'levels'; accepted is a multiple of 2" in of_one_head
    for (_, text), words in zip(
        refused,
        [
            "mesh: of one dimension, or none, with method 'levels'; accepted is one of two: nodes, and the ranks of a node",
            "k: 1 key heads with method 'levels'; accepted is a multiple of 2, the number of ranks in a node",
            "invariant: given with method 'levels', whose calls hold parts of a problem; accepted is method 'heads'",
            "sharding: of 2 ranks; accepted is one of 4, the group's size",
            "mesh: of ranks [[1, 0], [2, 3]]; accepted are ascending ones, node by node",
            "mesh: of 3 dimensions; accepted is one of 1",
        ],
        strict=True,
    ):
        assert text.startswith(words)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("options", [{}, {"causal": True}])
@pytest.mark.parametrize("method", METHODS)
def test_the_bytes_that_are_told_are_those_that_move(workers, method, options, kind):
    answers = workers.run(calls.bytes_received, 2, method, kind, options)
    for direction in range(2):
        most = max(moved[direction] for moved, _ in answers)
        told = answers[0][1][direction]
        assert most <= told <= 1.35 * most + 64, (direction, most, told)
        if kind == "contiguous" and not options:
            assert told <= 1.15 * most


def test_predicted_pairs_are_those_that_are_seen():
    sharding = Sharding.balanced(61, 3, cu_seqlens=[0, 20, 61])
    for causal, window, alignment in ((True, None, "top_left"), (False, (3, 5), "bottom_right"), (True, (7, None), "bottom_right")):
        band = _seen.Band.of(causal, window, alignment)
        plan = _call.Plan(sharding.ranges, sharding.ranges, (0, 20, 61), (0, 33, 61), True, band, None)
        for rank in range(3):
            total = 0
            for q0, q1, k0, k1 in ((0, 20, 0, 33), (20, 61, 33, 61)):
                mine = [i - q0 for i in sharding.positions(rank).tolist() if q0 <= i < q1]
                i, j = torch.tensor(mine)[:, None] + band.offset(q1 - q0, k1 - k0), torch.arange(k1 - k0)
                left, right = (x if x is not None else 10**6 for x in (band.left, band.right))
                total += int(((j >= i - left) & (j <= i + right)).sum()) if mine else 0
            assert _predict.pairs(plan, rank) == total


def test_calls_on_parts_are_predicted_at_their_own_rate():
    """On Hopper, calls on parts run at a lower rate, because the fastest engine supports only whole problems."""
    sharding, band = Sharding.zigzag(2**20, 2), _seen.Band.of(True, None)
    plan = _call.Plan(sharding.ranges, sharding.ranges, (0, 2**20), (0, 2**20), False, band, None)
    of = _call.Facts(plan, 1, 32, 8, (128, 128), 2, "cuda", ())

    def compute(method: str, *given: str) -> float:
        return _predict.predicted(method, of._replace(given=given)).compute

    parts, whole = _predict.RATES["cuda"][:2]
    assert compute("gather") / compute("heads") == pytest.approx(whole / parts)
    assert compute("ring") == compute("gather")
    assert compute("heads", "dropout") == pytest.approx(compute("gather"))
    assert _methods.choose(of, None, False) == ("heads", None)


def test_a_call_leaves_as_few_multiprocessors_as_its_transfer_needs():
    """A call leaves all SMs that the transfer can use if the transfer takes as long as the call; none without a transfer, or on a CPU."""
    band = _seen.Band.of(True, None)

    def reserved(seqlen: int, world: int, device: str = "cuda", backward: bool = False) -> int:
        sharding = Sharding.zigzag(seqlen, world)
        plan = _call.Plan(sharding.ranges, sharding.ranges, (0, seqlen), (0, seqlen), False, band, None)
        return _predict.sms_for_transfers("gather", _call.Facts(plan, 1, 32, 8, (128, 128), 2, device, ()), backward)

    most = _predict.RATES["cuda"].sms
    assert reserved(2**17, 4) == 1
    assert 1 < reserved(2**13, 4) < most
    assert reserved(2**9, 8) == reserved(2**9, 8, backward=True) == most
    assert reserved(2**17, 1) == reserved(2**17, 4, "cpu") == 0


@pytest.mark.parametrize(("given", "expected"), [({}, [5, 5, 5, 0]), ({"reserved_sms": 2}, [2, 2, 2, 2])])
@pytest.mark.parametrize("method", ["gather", "ring"])
def test_multiprocessors_are_left_beside_transfers(workers, method, given, expected):
    """SMs are left while a transfer is in flight; during the last group or turn only gradients are. A number that the caller gives is
    kept."""
    assert workers.run(calls.reserved, 4, method, given) == [(expected, [expected[0]] * 4)] * 4


def test_the_code_of_the_page(workers):
    page = Path(__file__).parents[2] / "docs" / "many-gpus.md"
    assert all(0 <= difference < 1e-5 for difference in workers.run(calls.runs_the_page, 4, str(page)))


@pytest.mark.parametrize(
    ("placed", "of", "layout"),
    [
        *(("HB", of, layout) for of in calls.DTENSOR_OPTIONS for layout in ("bhsd", "bshd")),
        *(("BH", "learned", "bhsd"), ("H-", "learned", "bshd"), ("-B", "all", "bhsd"), ("HH", "all", "bhsd"), ("HH", "none", "packed")),
    ],
)
def test_dtensors(workers, placed, of, layout):
    """strobe.attention() on DTensors with sharded heads and sequences: each rank computes on the tensors that it has."""
    answers = workers.run(calls.of_dtensors, 4, placed, of, layout)
    more = calls.learned() if of == "learned" else {}
    tensors = calls.laid_out(layout)
    leaves = dict(zip(("dq", "dk", "dv"), (x.requires_grad_() for x in tensors[:3]), strict=True))
    leaves |= {f"d{name}": x.requires_grad_() for name, x in more.items()}
    out, lse = strobe.attention(*tensors[:3], return_lse=True, **calls.options_laid_out(layout), **calls.DTENSOR_OPTIONS[of], **more)
    torch.autograd.backward([out, lse], [tensors[3], torch.ones_like(lse)])
    expected = {"out": out.detach(), "lse": lse.detach()} | {name: x.grad for name, x in leaves.items()}
    for answer in answers:
        assert answer.keys() == expected.keys()
        for name, x in answer.items():
            torch.testing.assert_close(x, expected[name], atol=3e-6, rtol=1e-5)


def test_what_dtensors_are_refused(workers):
    words = [
        "q: placement S(2) on dimension 0 of the mesh; accepted are Replicate(), Shard(0), Shard(1): batch and heads.",
        "k: Tensor; accepted is a DTensor, as q is",
        "k: placements (Replicate(),) on ",
        "k: 2 heads on 4 ranks; accepted is a multiple of 4",
        "seed: missing beside dropout and DTensors",
        "sinks: requires grad, and is no DTensor, as q is",
        "q: a DTensor; accepted is a torch.Tensor, which to_local() or full_tensor() gives",
    ]
    for (_, text), expected in zip(workers.run(calls.dtensors_refused, 4)[1], words, strict=True):
        assert text.replace("Shard(dim=2)", "S(2)").startswith(expected), text
