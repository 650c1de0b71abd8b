"""strobe.distributed beside its covering array: one rank's fault is every rank's error, seeds, bits, and the ways in which it is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distributed_calls as calls
import strobe
from device import ON_GPU
from strobe.distributed import Layout

pytestmark = pytest.mark.skipif(ON_GPU, reason="gloo on the CPU")
METHODS = ["gather", "heads", "ring"]


def joined(layout: Layout, of_ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: layout.join([found[name] for found in of_ranks], 2) for name in of_ranks[0] if name != "rng"}


WORDS = {
    "rows": "q: shape (2, 4, {less}, 16); accepted are {own} tokens along axis 2, as the layout says",
    "rows of k": "k: shape (2, 4, {less}, 16); accepted are {own} tokens along axis 2, as the layout says",
    "a NumPy array": "v: numpy.ndarray; accepted is a torch.Tensor",
    "another dtype": "k: dtype float64",
    "another head dimension": "k: shape (2, 4, {own}, 15); accepted is",
    "a value": "softcap: -1",
    "a kind": "causal: str 'yes'; accepted is True or False",
    "a name": "attention() got an unexpected keyword argument 'is_causal'; did you mean causal?",
    "a mask": "mask: shape (3, 3); accepted is",
    "a bias": "bias: shape (1, 1, 1, 38); accepted is",
    "a part": "part: given; accepted is None, for the layout says it",
    "an engine": "engine: ",
    "a layout": 'layout: str; accepted is a strobe.distributed.Layout; the order of axes is axes="bshd"',
    "a layout of other ranks": "layout: of 7 ranks; accepted is one of {world}, the group's size",
    "axes": "axes: 'hbsd'; accepted is 'bhsd' or 'bshd'",
    "a method": "method: 'shuttle'; accepted is 'gather' or 'heads' or 'ring'",
    "cu_seqlens": "cu_seqlens_k: missing beside cu_seqlens_q; accepted are both, or none",
    "aux": "attention() got an unexpected keyword argument 'aux'; max_logit and column_sums belong to whole rows",
    "deterministic": "deterministic: 'always'; accepted is True, False or 'world'",
    "time_limit": "time_limit: -1.0; accepted are seconds above 0, or None",
}


@pytest.mark.parametrize("change", list(calls.WRONG))
def test_one_wrong_call_raises_on_all(workers, change):
    for world, rank in ((2, 1), (3, 0)):
        answers = workers.run(calls.fails_on, world, rank, change, "wrong")
        assert len(set(answers)) == 1
        own = Layout.zigzag(calls.S, world).count(rank)
        assert answers[0][1].startswith(WORDS[change].format(own=own, less=own - 1, world=world)), answers[0]
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
    assert "on rank 2, and " in text


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_rank_without_memory(workers, method, in_backward):
    answers = workers.run(calls.runs_out_of_memory, 2, 1, method, in_backward)
    assert answers == [("MemoryError", "can't allocate memory: 1 TB [rank 1 of 2]")] * 2


@pytest.mark.parametrize(
    ("agree", "how"), [(True, "absent"), (False, "absent"), (False, "wrong"), (True, "backward")], ids=lambda x: str(x)
)
def test_a_rank_that_does_not_come_is_named(workers, agree, how):
    """In the end by a time limit, here of one second."""
    answers = workers.run(calls.does_not_come, 4, 2, agree, how)
    for rank, (kind, text, seconds) in enumerate(answers):
        if rank == 2:
            assert text == "absent" or (how == "wrong" and text.startswith("softcap: -1"))
            continue
        assert kind == "RuntimeError", text
        assert "rank 2 did not take part" in text
        assert f"says rank {rank} of 4" in text
        assert seconds < 20


@pytest.mark.parametrize("agree", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_the_first_rank_draws_the_seed(workers, method, agree):
    answers = workers.run(calls.drawn, 2, method, agree)
    q, k, v, dout = calls.whole()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = strobe.attention(q, k, v, dropout=0.3, causal=True, rng=answers[0]["rng"])
    out.backward(dout)
    for name, x in joined(Layout.zigzag(calls.S, 2), answers).items():
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
        for name, x in joined(getattr(Layout, kind)(calls.S, world), answers).items():
            assert torch.equal(x, expected[name]), (world, kind, name)


@pytest.mark.parametrize("method", METHODS)
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
    for name, x in joined(Layout.zigzag(calls.S, 4), answers).items():
        torch.testing.assert_close(x, {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}[name], **near)


def test_no_second_derivative(workers):
    answers = workers.run(calls.twice_differentiated, 2)
    assert {kind for kind, _ in answers} == {"NotImplementedError"}
    assert "has no second derivative" in answers[0][1]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_unshard(workers, world):
    for x in workers.run(calls.unsharded, world):
        assert torch.equal(x, torch.arange(33.0).reshape(3, 11))
