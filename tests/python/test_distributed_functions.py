"""Functions of the score and the mask in strobe.distributed.attention(), beside one process."""

from __future__ import annotations

import pytest
import torch

import distributed_functions as functions
from device import ON_GPU
from strobe._graph import Graph, decoded, from_head

pytestmark = pytest.mark.skipif(ON_GPU, reason="gloo on the CPU")
WAYS = [(2, "gather"), (4, "gather"), (4, "heads"), (2, "heads"), (3, "ring"), (4, "levels")]
CASES = ["relative", "causal", "mask", "packed", "blocks", "blocks of all heads", "dropout"]
NEAR = {torch.float64: 1e-11, torch.float32: 3e-5}


def check(found, expected, dtype):
    assert found.keys() == expected.keys()
    for name, x in found.items():
        scale = max(float(expected[name].nan_to_num(posinf=0, neginf=0).abs().max()), 1.0)
        torch.testing.assert_close(x, expected[name], atol=NEAR[dtype] * scale, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(scope="module")
def single():
    """One process' results, by case and dtype."""
    known = {}

    def of(name, dtype):
        if (name, dtype) not in known:
            known[name, dtype] = functions.single(name, dtype)
        return known[name, dtype]

    return of


@pytest.mark.parametrize(("world", "method"), WAYS)
@pytest.mark.parametrize("name", CASES)
def test_functions_see_the_whole_problem(workers, single, name, world, method):
    """out, lse, dq, dk, dv and the gradients of captured tensors, which are parts that the ranks add up."""
    for kind, dtype in (("zigzag", torch.float64), ("blocks", torch.float32)):
        found = functions.joined(name, kind, workers.run(functions.on_rank, world, name, method, kind, dtype), dtype)
        check(found, single(name, dtype), dtype)


@pytest.mark.parametrize(("world", "method"), [(3, "gather"), (2, "heads"), (3, "ring")])
@pytest.mark.parametrize("kind", ["a rank has none", "one rank has all"])
def test_ranks_without_tokens(workers, single, kind, world, method):
    answers = workers.run(functions.on_rank, world, "causal", method, kind, torch.float64)
    check(functions.joined("causal", kind, answers, torch.float64), single("causal", torch.float64), torch.float64)


def test_used_keys(workers, single):
    """seqused_k needs calls without a part, in which heads count from 0."""
    answers = workers.run(functions.on_rank, 4, "used", "heads", "zigzag", torch.float64)
    check(functions.joined("used", "zigzag", answers, torch.float64), single("used", torch.float64), torch.float64)


@pytest.mark.parametrize(("world", "method"), WAYS)
def test_the_same_bits_in_every_run(workers, method, world):
    """Gradients of captured tensors as well; also where the call is known."""
    first, second, third = (workers.run(functions.on_rank, world, "packed", method, "zigzag", torch.float32, times) for times in (1, 1, 3))
    for name in first[0]:
        for rank in range(world):
            assert torch.equal(first[rank][name], second[rank][name])
            assert torch.equal(first[rank][name], third[rank][name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_world(workers, dtype):
    of_worlds = {}
    for world in (1, 2, 4):
        answers = workers.run(functions.of_bits, world, dtype)
        of_worlds[world] = functions.joined("relative", "zigzag", answers, dtype)
    for world in (2, 4):
        for name, x in of_worlds[world].items():
            assert torch.equal(x, of_worlds[1][name]), (world, name)


def test_checks_of_a_known_call_are_not_repeated(workers):
    """The first call makes the recording, and the second one is remembered under it. The operator checks a forward and a backward."""
    assert workers.run(functions.judged, 2) == [[2, 2]] * 2


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_gradients_of_captured_tensors_by_a_call_of_their_own(workers, method):
    for apart, together in workers.run(functions.apart, 3, method):
        check(apart, together, torch.float64)


def test_checkpointing_and_autocast(workers):
    for found, expected in workers.run(functions.checkpointed, 2):
        assert all(torch.equal(x, expected[name]) for name, x in found.items())


def test_in_a_context(workers, single):
    answers = workers.run(functions.in_a_context, 4)
    check(functions.joined("mask", "zigzag", answers, torch.float64), single("mask", torch.float64), torch.float64)


def test_gradients_of_16_bits_are_rounded_once(workers):
    """A rank's part, of as many products of its own as the method makes, is added up in float32."""
    exact, halves = workers.run(functions.learns, 4, torch.float32), workers.run(functions.learns, 4, torch.bfloat16)
    assert all(torch.equal(x, y.bfloat16()) for x, y in zip(halves, exact, strict=True))


WORDS = {
    "number": ["score: a function whose operation 1 is REAL 0.5 on rank 2, and a function whose operation 1 is REAL 2.0 on rank 0"],
    "operation": [
        "score: a function whose operation 2 is SUBTRACT 0 1 on rank 2, and a function whose operation 2 is MULTIPLY 0 1 on rank 0"
    ],
    "longer": ["score: a function whose operation 3 is ", " on rank 2, and a function whose operation 3 is "],
    "no function": ["score: 'dot' on rank 2, and a function on rank 0"],
    "shape": ["tensor 0 that functions read: ((9,), torch.float32) on rank 2, and ((8,), torch.float32) on rank 0"],
    "dtype": ["tensor 0 that functions read: ((8,), torch.float64) on rank 2, and ((8,), torch.float32) on rank 0"],
    "requires grad": ["tensors that require grad: ['captured_0'] on rank 2, and [] on rank 0"],
    "branch": ["score: ", "a branch on the data", "[rank 2 of 3]"],
    "returns": ["mask: ", "returns an integer; accepted is a bool", "[rank 2 of 3]"],
    "axes": ["score: ", "reads a tensor of shape (8, 1, 1, 1, 1); accepted are up to 4 axes", "[rank 2 of 3]"],
}


@pytest.mark.parametrize("change", list(functions.OTHERS))
def test_functions_that_differ_raise_on_all(workers, change):
    answers = workers.run(functions.differ, 3, 2, change)
    assert len(set(answers)) == 1
    kind, text = answers[0]
    assert kind == "ValueError" or (change == "returns" and kind == "TypeError")
    assert text.startswith(WORDS[change][0]), text
    assert all(words in text for words in WORDS[change]), text
    assert text.endswith("accepted is the same on all 3 ranks" if "[rank" not in WORDS[change][-1] else "[rank 2 of 3]")


def test_captured_dtensors(workers):
    for differences, wrong in workers.run(functions.captured_dtensors, 4):
        assert all(difference < 1e-10 for difference in differences.values()), differences
        placed = "score: captured_dtensors.<locals>.with_table.<locals>.<lambda> reads a "
        for (kind, text), words in zip(
            wrong,
            [
                "DTensor of shape (2, 8) with placements (Shard(dim=1),); accepted is Replicate() alone",
                "DTensor of shape (2, 8) with placements (Shard(dim=1),); accepted is Replicate() alone",
                "tensor of shape (2, 8) that requires grad and is no DTensor, as q is; accepted is a DTensor",
            ],
            strict=True,
        ):
            assert kind == "ValueError"
            assert text.replace("S(1)", "Shard(dim=1)").startswith(placed + words), text


def test_explain(workers):
    texts = workers.run(functions.explained, 4)
    assert all("f(x, b, h, i, j) = " in text and "gradients of captured tensors" in text for text in texts)
    assert "h + 2" in texts[1]  # heads from 2 on
    assert "h + " not in texts[0]


def test_the_graph_ends_at_a_function(workers):
    for difference, text in workers.run(functions.compiled, 2):
        assert difference == 0
        assert "strobe.distributed.attention: functions of the score and the mask are recorded outside of the graph" in text


def test_heads_from_a_first_one():
    graph = Graph()
    x, h = graph.argument("SCORE", "R"), graph.argument("HEAD", "I")
    table = graph.captured(0, (9, 9), "R")
    text = graph.text((x * table.index([h, h + 1]) + 2.5).at())
    assert from_head(text, 0) == text
    assert from_head("SCORE; REAL 2.0; ADD 0 1", 3) == "SCORE; REAL 2.0; ADD 0 1"
    moved = decoded(from_head(text, 3))
    at = moved.index(("HEAD", (), None))
    assert moved[at + 1 : at + 3] == [("INTEGER", (), 3), ("ADD", (at, at + 1), None)]
    loads = [inputs for operation, inputs, _ in moved if operation == "LOAD"]
    assert loads[0][0] == at + 2
    assert len(moved) == len(decoded(text)) + 2
