"""Models of transformers inside strobe.distributed.context_parallel(): logits and gradients of shards beside those of one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import parallel_models as models
from strobe.distributed import Sharding

# A model, its implementation, what it gets, the rows of the batch, whether a cache is made, ranks, whether the sharding is contiguous.
CASES: list[tuple[str, str, str, int, bool, int, bool]] = [
    ("grouped heads", "strobe", "", 2, False, 2, False),
    ("grouped heads", "sdpa", "", 1, True, 3, False),
    ("grouped heads", "sdpa", "positions", 2, False, 3, False),
    ("grouped heads", "strobe", "padding", 2, True, 3, True),
    ("grouped heads", "sdpa", "packed", 1, False, 4, False),
    ("grouped heads", "strobe", "packed", 2, False, 3, False),
    ("grouped heads", "strobe", "packed otherwise", 2, False, 2, True),
    ("grouped heads", "sdpa", "packed", 1, False, 1, False),
    ("sliding window", "sdpa", "padding", 2, False, 2, False),
    ("sliding window", "strobe", "packed", 1, False, 2, False),
    ("softcap", "strobe", "padding", 2, False, 2, False),
    ("sinks", "strobe", "packed otherwise", 2, False, 2, False),
    ("chunks", "strobe", "", 2, False, 3, False),
    ("chunks", "sdpa", "padding", 2, False, 2, False),
    ("two-sided", "strobe", "padding", 2, False, 3, False),
    ("learned positions", "sdpa", "positions", 2, False, 2, False),
    ("two-sided, learned positions", "strobe", "positions", 2, False, 3, False),
]


def assert_as_whole(workers, case: str, implementation: str, kind: str, rows: int, cache: bool, world: int, contiguous: bool, door: bool):
    logits, gradients = models.whole(case, kind, rows, cache)
    answers = workers.run(models.shared, world, case, implementation, kind, rows, cache, contiguous, door)
    sharding = (Sharding.contiguous if contiguous else Sharding.zigzag)(models.S, world)
    found = sharding.join([each for each, _ in answers], 1)
    seen = models.batch(kind, rows).get("attention_mask", torch.ones(rows, models.S)).bool()  # those of padding tokens are not defined
    torch.testing.assert_close(found[seen], logits[seen], rtol=1e-4, atol=1e-5)
    assert_gradients(answers, gradients)


def assert_gradients(answers: list[tuple[Tensor, list[Tensor]]], gradients: list[Tensor]) -> None:
    """Each rank has a part of each gradient. That of a bias of keys is 0 but for rounding."""
    whole = float(torch.cat([x.flatten() for x in gradients]).norm())
    for *parts, expected in zip(*(each for _, each in answers), gradients, strict=True):
        assert float((sum(parts) - expected).norm()) <= 1e-5 * float(expected.norm()) + 1e-8 * whole


@pytest.mark.parametrize(("case", "implementation", "kind", "rows", "cache", "world", "contiguous"), CASES)
def test_a_model_on_shards_is_that_on_whole_sequences(workers, case, implementation, kind, rows, cache, world, contiguous):
    assert_as_whole(workers, case, implementation, kind, rows, cache, world, contiguous, door=False)


def test_a_registration_changes_nothing(workers):
    """strobe.register() takes the calls of F.scaled_dot_product_attention, which a context takes first."""
    assert_as_whole(workers, "grouped heads", "sdpa", "positions", 2, False, 2, contiguous=False, door=True)


def test_packed_tokens_by_their_lengths(workers):
    """A collator's cu_seq_lens_q, of whole sequences, beside positions."""
    logits, gradients = models.whole("grouped heads", "packed", 1, False)
    for given in ("strobe", "sdpa"):
        answers = workers.run(models.of_lengths, 2, given)
        torch.testing.assert_close(Sharding.zigzag(models.S, 2).join([x for x, _ in answers], 1), logits, rtol=1e-4, atol=1e-5)
        assert_gradients(answers, gradients)


NO_POSITIONS = "ValueError: position_ids: None inside context_parallel(), and "
REFUSED = [
    ("learned positions", "sdpa", {}, f"{NO_POSITIONS}where GPT2LMHeadModel begins to count is not known; accepted are"),
    ("begins behind padding", "strobe", {}, f"{NO_POSITIONS}where RobertaModel begins to count is not known; accepted are"),
    ("images", "sdpa", {}, f"{NO_POSITIONS}Qwen2VLForConditionalGeneration counts positions of images too; accepted are"),
    ("relative positions", "strobe", {}, "NotImplementedError: T5EncoderModel inside context_parallel(): it would count"),
    ("linear attention", "sdpa", {}, "NotImplementedError: Qwen3NextForCausalLM inside context_parallel(): its layers of type linear_"),
    ("attention of its own", "sdpa", {}, "NotImplementedError: attn_mask: a mask of whole sequences in a model's own call"),
    ("recurrent", "eager", {}, "ValueError: attn_implementation: 'eager' of MambaForCausalLM inside context_parallel()"),
    ("grouped heads", "eager", {}, "ValueError: attn_implementation: 'eager' of LlamaForCausalLM inside context_parallel(); accepted"),
    ("grouped heads", "flex_attention", {}, "ValueError: attn_implementation: 'flex_attention' of LlamaForCausalLM"),
    (
        "grouped heads", "sdpa", {"position_ids": models.local_positions},
        "ValueError: position_ids: they begin at 0 on each rank inside context_parallel(); accepted are those of whole sequences: "
        "sharding.positions()[None]",
    ),
    ("grouped heads", "strobe", {"past_key_values": models.filled_cache}, "NotImplementedError: attention_mask: for "),
    ("grouped heads", "strobe", {"attention_mask": models.local_square}, "ValueError: attention_mask: shape (1, 1, 10, 10)"),
    (
        "grouped heads", "strobe", {"cu_seq_lens_q": models.lengths, "cu_seq_lens_k": models.lengths},
        "ValueError: cu_seq_lens_q: ends at 10 inside context_parallel(); accepted are lengths of all 21 tokens together",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("case", "implementation", "given", "words"), REFUSED)
def test_what_would_be_wrong_is_refused_on_all_ranks(workers, case, implementation, given, words):
    found = workers.run(models.refused, 2, case, implementation, given)
    assert all(text.startswith(words) for text in found), found
    assert all(len(text.splitlines()) == 1 for text in found)


def test_a_context_leaves_transformers_as_it_was(workers):
    assert all(workers.run(models.left_as_it_was, 2))


def test_mask_functions_that_are_not_known_for_whole_sequences(workers):
    for found in workers.run(models.masks_refused, 2):
        words = ("asks for a position's number", " tokens' numbers", "reads a tensor otherwise", "reads a tensor otherwise")
        words += ("its tensor is asked for", "its tensor is asked for", "joined of two")
        assert all(text.startswith(("NotImplementedError: attention_mask: ", "ValueError: attention_mask: ")) for text in found)
        assert all(word in text for word, text in zip(words, found, strict=True)), found


def test_keys_that_every_rank_has_as_a_whole(workers):
    answers = workers.run(models.cross, 2)
    q, k, v, text, dout = models.crossed()
    leaves = [x.requires_grad_() for x in (q, k, v, text)]
    out = models.attended(*leaves)
    out.backward(dout)
    sharding = Sharding.zigzag(models.S, 2)
    torch.testing.assert_close(sharding.join([out for out, _ in answers], 2), out.detach(), rtol=1e-5, atol=1e-6)
    *of_tokens, of_text = zip(*(gradients for _, gradients in answers), strict=True)
    for parts, x in zip(of_tokens, leaves, strict=False):
        torch.testing.assert_close(sharding.join(parts, 2), x.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sum(of_text), text.grad, rtol=1e-5, atol=1e-6)


def test_what_whole_keys_are_refused(workers):
    for shard, text, negative, number in workers.run(models.whole_keys_refused, 2):
        accepted = "accepted are lengths other than 10, 11, which are those of ranks' tokens"
        assert shard == f"ValueError: whole_keys: 10; {accepted}"
        assert text == f"ValueError: whole_keys: 'x'; {accepted}"
        assert negative == f"ValueError: whole_keys: -1; {accepted}"
        assert number == "TypeError: whole_keys: int; accepted are integers in a list, or None"
