"""The trainer: its promises about data, attention, schedule, checkpoints and report, on the smoke configuration."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import math
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from strobe_tools.train import CONFIGS, data, trainer
from strobe_tools.train.attention import ATTENTIONS
from strobe_tools.train.config import Config
from strobe_tools.train.model import GPT
from strobe_tools.train.report import Result, draw
from strobe_tools.train.trainer import History, Trainer

SMOKE = CONFIGS["smoke"].replace(device="cpu")


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    """A cache of texts for these tests, away from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STROBE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def corpus(_cache):
    return data.load(None, vocab_size=SMOKE.vocab_size, most_bytes=SMOKE.text_bytes)


def weights(run: Trainer) -> list[torch.Tensor]:
    return list(run.model.state_dict().values())


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# Attention


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_losses_of_strobe_and_math_agree_step_by_step(corpus, dropout):
    config = SMOKE.replace(dropout=dropout, steps=20, init_std=0.2)  # weights large enough for attention to matter from the first step
    losses = {}
    for attention in ("strobe", "math", "none"):
        run = Trainer(config.replace(attention=attention), corpus)
        losses[attention] = torch.tensor([run.train_step() for _ in range(20)], dtype=torch.float64)
    assert (losses["strobe"] - losses["math"]).abs().max() < 2e-6
    assert (losses["none"] - losses["math"]).abs().min() > 1e-3


def test_sdpa_and_math_agree():
    q, k, v = (torch.randn(2, 33, 3, 16) for _ in range(3))
    torch.testing.assert_close(ATTENTIONS["sdpa"](q, k, v, 0.0, 0), ATTENTIONS["math"](q, k, v, 0.0, 0), rtol=0, atol=2e-6)


def test_block_sparse_sees_its_blocks_and_no_others():
    q, k, v = (torch.randn(1, 128, 2, 16) for _ in range(3))
    sparse, dense = (ATTENTIONS[name](q, k, v, 0.0, 16) for name in ("block-sparse", "strobe"))
    torch.testing.assert_close(sparse[:, :48], dense[:, :48], rtol=0, atol=2e-6)  # queries of the first three blocks see all earlier keys
    block = torch.arange(128) // 16
    kept = ((block[:, None] - block).abs() <= 1) | (block == 0)
    hidden = ~kept | torch.ones(128, 128, dtype=torch.bool).triu(1)
    s = torch.einsum("bihd,bjhd->bhij", q, k) / 4
    expected = torch.einsum("bhij,bjhd->bihd", s.masked_fill(hidden, -math.inf).softmax(-1), v)
    torch.testing.assert_close(sparse, expected, rtol=0, atol=2e-6)


def test_logits_are_those_of_the_vocabulary():
    model = GPT(SMOKE.replace(vocab_size=300))
    seen = []
    model.norm.register_forward_hook(lambda module, arguments, x: seen.append(x))
    logits = model.eval()(torch.randint(300, (2, 9)))
    torch.testing.assert_close(logits, model.head(seen[0]), rtol=0, atol=1e-6)
    logits.sum().backward()
    torch.testing.assert_close(model.head.weight.grad[-1], seen[0].sum((0, 1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["strobe", "sdpa", "math", "block-sparse", "none"])
def test_no_attention_looks_ahead(attention):
    model = GPT(SMOKE.replace(attention=attention, init_std=0.5)).eval()
    tokens = torch.arange(SMOKE.sequence)[None]
    changed = tokens.clone()
    changed[0, 10] = 200
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert (difference[:10] == 0).all()
    after = difference[11:] > 0
    assert not after.any() if attention == "none" else after.all()


# Model and configuration


def test_gpt3_small_is_the_published_one():
    config = CONFIGS["gpt3-small"]
    published = {
        "vocab_size": 50257,
        "d_model": 768,
        "layers": 12,
        "heads": 12,
        "d_ff": 3072,
        "dropout": 0.1,
        "sequence": 512,
        "lr": 1e-4,
        "warmup": 1000,
        "epochs": 5,
        "accumulation": 16,
        "compile": True,
        "block_size": 128,
        "init_std": 0.02,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    assert {name: getattr(config, name) for name in published} == published
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(config).parameters())
    layer = 12 * 768**2 + 13 * 768
    assert parameters == 50257 * 768 + 512 * 768 + 12 * layer + 2 * 768


def test_initial_weights():
    for name, weight in GPT(SMOKE.replace(d_model=128, d_ff=256)).named_parameters():
        if name.endswith("bias"):
            assert (weight == 0).all(), name
        elif "norm" in name:
            assert (weight == 1).all(), name
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.05), name


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention": "flash"}, "attention is 'flash'; accepted: strobe, sdpa, math, block-sparse, none"),
        ({"precision": "fp8"}, "precision is 'fp8'; accepted: auto, fp32, bf16, fp16"),
        ({"heads": 3}, r"heads is 3; accepted: a divisor of d_model \(32\)"),
        ({"layers": 0}, "layers is 0; accepted: 1 or more"),
        ({"vocab_size": 256}, "vocab_size is 256; accepted: more than 256"),
        ({"dropout": 1.0}, "dropout is 1.0; accepted: 0 up to"),
        ({"block_size": 24}, "block_size is 24; accepted: 0 or a multiple of 16"),
        ({"epochs": 1.0}, "epochs is 1.0; accepted: a number where steps is None"),
        ({"steps": None}, "epochs is None; accepted: a number where steps is None"),
        ({"steps": 0}, "steps is 0; accepted: 1 or more"),
        ({"lr": 0.0}, "lr is 0.0; accepted: more than 0"),
    ],
)
def test_a_wrong_configuration_is_named(change, named):
    with pytest.raises(ValueError, match=named):
        SMOKE.replace(**change)


def test_a_wrong_device_is_named(corpus):
    with pytest.raises(ValueError, match="device is 'abacus'"):
        Trainer(SMOKE.replace(device="abacus"), corpus)


def test_a_text_too_short_is_named(corpus):
    with pytest.raises(ValueError, match=r"text: \d+ training tokens, where one step takes"):
        Trainer(SMOKE.replace(batch=10_000), corpus)
    with pytest.raises(ValueError, match=r"text: .* where one sequence alone takes"):
        data.windows(torch.arange(8), 8, 100)


def test_generate_continues_the_prompt_reproducibly():
    model = GPT(SMOKE)
    prompt = torch.tensor([5, 6, 7])
    texts = [model.generate(prompt, 2 * SMOKE.sequence, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert texts[0].shape == (3 + 2 * SMOKE.sequence,)
    assert texts[0][:3].tolist() == [5, 6, 7]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


# Training


def test_the_schedule_warms_up_and_falls_to_nothing(corpus):
    run = Trainer(SMOKE.replace(warmup=4, steps=20, lr=1.0), corpus)
    rates = [run.learning_rate(step) for step in range(21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[12] == pytest.approx(0.5)
    assert rates[20] == pytest.approx(0.0)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    run.train_step()
    assert run.optimizer.param_groups[0]["lr"] == 0.25


def test_an_epoch_sees_every_window_once_in_an_order_of_its_own(corpus):
    run = Trainer(SMOKE, corpus)
    epochs = []
    for epoch in range(2):
        rows = []
        for step in range(run.steps_per_epoch):
            run.step = epoch * run.steps_per_epoch + step
            rows += [row for batch in run._batches() for row in batch]
        epochs.append(torch.stack(rows))
        texts = Counter(tuple(row.tolist()) for row in rows)
        possible = Counter(tuple(w.tolist()) for w in corpus.train.unfold(0, SMOKE.sequence + 1, 1))
        assert not texts - possible  # no window occurs more often than in the text
    assert epochs[0].shape == (run.steps_per_epoch * SMOKE.batch * SMOKE.accumulation, SMOKE.sequence + 1)
    assert not torch.equal(*epochs)
    other = Trainer(SMOKE.replace(seed=1), corpus)
    assert not torch.equal(torch.cat(list(other._batches())), epochs[0][: SMOKE.batch * SMOKE.accumulation])


def test_accumulation_is_one_large_batch(corpus):
    runs = [Trainer(SMOKE.replace(dropout=0.0, batch=b, accumulation=8 // b), corpus) for b in (8, 2)]
    losses = [[run.train_step() for _ in range(3)] for run in runs]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("attention", ["strobe", "sdpa"])
def test_resume_is_bitwise(corpus, tmp_path, attention):
    config = SMOKE.replace(attention=attention, save_every=100)
    whole = Trainer(config, corpus)
    whole.run()

    class Stopped(Trainer):
        def train_step(self) -> float:
            if self.step == 3:
                signal.raise_signal(signal.SIGINT)  # Ctrl-C, in the midst of a step
            return super().train_step()

    torch.manual_seed(123)  # other draws of the process have no effect
    with pytest.raises(KeyboardInterrupt):
        Stopped(config, corpus).run(tmp_path / "run.pt")
    torch.manual_seed(456)
    resumed = Trainer.load(tmp_path / "run.pt", config, corpus)
    assert resumed.step == 4
    assert not same(weights(resumed), weights(whole))
    resumed.run()
    assert same(weights(resumed), weights(whole))
    assert resumed.history == whole.history
    states = [run.optimizer.state_dict()["state"] for run in (resumed, whole)]
    assert same(*([t for state in s.values() for t in state.values()] for s in states))


@pytest.fixture
def interruptible():
    """Python's own handling of Ctrl-C, even if the tests run in the background, where a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_interrupt_strikes_at_once(corpus, tmp_path, interruptible):
    class Stopped(Trainer):
        def train_step(self) -> float:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the second was held back, too")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Stopped(SMOKE, corpus).run(tmp_path / "run.pt")
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / "run.pt").exists()


def test_resume_refuses_another_run(corpus, tmp_path):
    config = SMOKE.replace(precision="auto")
    Trainer(config.replace(precision="bf16"), corpus).save(tmp_path / "run.pt")
    assert Trainer.load(tmp_path / "run.pt", config, corpus).config.precision == "bf16"  # the precision picked at that time
    with pytest.raises(ValueError, match=r"trained with lr 0\.003 instead of 1\.0; accepted: the same configuration, or another --out"):
        Trainer.load(tmp_path / "run.pt", config.replace(lr=1.0), corpus)
    other = data.load(None, vocab_size=SMOKE.vocab_size, most_bytes=50_000)
    with pytest.raises(ValueError, match="trained on another text"):
        Trainer.load(tmp_path / "run.pt", config, other)


def damaged(whole: bytes) -> Iterator[bytes]:
    yield b""
    yield b"no archive"
    yield whole[:100]
    yield whole[: len(whole) // 2]
    yield whole[:-1000]
    for at in (len(whole) // 3, len(whole) // 2):
        yield whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]


def test_a_damaged_checkpoint_is_named(corpus, tmp_path):
    path = tmp_path / "run.pt"
    run = Trainer(SMOKE, corpus)
    run.save(path)
    whole = path.read_bytes()
    for bad in damaged(whole):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=rf"^resume: {path} is damaged, or no checkpoint \(.+\); accepted: a checkpoint as this "):
            Trainer.load(path, SMOKE, corpus)
    state = torch.load(io.BytesIO(whole), weights_only=True)
    for change in ({"config": {"colour": "red"}}, {"history": None}, {"model": {}}, {"optimizer": {}}, {"rng": torch.zeros(3)}):
        torch.save(state | change, path)
        with pytest.raises(ValueError, match=rf"^resume: {path} is damaged"):
            Trainer.load(path, SMOKE, corpus)
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match=rf"^resume: {path} is damaged"):
        Trainer.load(path, SMOKE, corpus)
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match=rf"^resume: {path} is damaged.*Is a directory"):
        Trainer.load(path, SMOKE, corpus)


@pytest.fixture
def full_disk():
    """Makes every file fail beyond some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_last_checkpoint_and_no_half_of_another(corpus, tmp_path, full_disk):
    path = tmp_path / "run.pt"
    run = Trainer(SMOKE, corpus)
    run.save(path)
    before = path.read_bytes()
    run.train_step()
    full_disk()
    with pytest.raises(OSError, match=rf"^checkpoint: {path} cannot be written \(.+\); accepted: a folder with room"):
        run.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(corpus, tmp_path, monkeypatch):
    path, order = tmp_path / "run.pt", []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda self, to: (order.append("replace"), replace(self, to)))
    Trainer(SMOKE, corpus).save(path)
    assert order == ["fsync", "replace"]


def test_precision_is_measured_not_guessed(monkeypatch):
    cpu, auto = torch.device("cpu"), SMOKE.replace(precision="auto")
    for speedup, precision in ((4.0, "bf16"), (1.0, "fp32"), (0.5, "fp32")):
        monkeypatch.setattr(trainer, "_bf16_speedup", lambda config, speedup=speedup: speedup)
        assert trainer.pick_precision(auto, cpu) == precision
    assert trainer.pick_precision(SMOKE, cpu) == "fp32"


def test_the_speed_of_bf16_is_that_of_its_products(monkeypatch):
    seconds = iter(range(10_000))
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: float(next(seconds)))
    assert trainer._bf16_speedup(SMOKE) == 1.0


def test_bf16_trains(corpus):
    losses = {p: Trainer(SMOKE.replace(precision=p), corpus).run().train for p in ("bf16", "fp32")}
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], abs=0.05)


@pytest.mark.parametrize("attention", ["strobe", "sdpa", "math", "block-sparse", "none"])
def test_compiled_trains_the_same(corpus, monkeypatch, attention):
    whole = attention in ("strobe", "sdpa", "none")  # the model is compiled as one graph
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=whole))  # traced, no C++ compiled
    config = SMOKE.replace(attention=attention, steps=2)
    losses = {compiled: Trainer(config.replace(compile=compiled), corpus).run().train for compiled in (True, False)}
    assert losses[True] == pytest.approx(losses[False], abs=1e-4)


# Text


def test_a_damaged_cache_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("STROBE_CACHE", str(tmp_path))
    options = {"vocab_size": 300, "most_bytes": 20_000}
    expected = data.load(None, **options)
    (path,) = tmp_path.rglob("*.npz")
    whole = path.read_bytes()
    arrays = dict(np.load(io.BytesIO(whole)))
    for change in ({"train": arrays["train"].astype(np.float64)}, {"validation": arrays["train"] + 300}, {"tokenizer": np.array("{}")}):
        np.savez(path, **arrays | change)
        assert torch.equal(data.load(None, **options).validation, expected.validation)
        assert path.read_bytes() == whole
    for bad in damaged(whole):
        path.write_bytes(bad)
        found = data.load(None, **options)
        assert torch.equal(found.train, expected.train)
        assert torch.equal(found.validation, expected.validation)
        assert path.read_bytes() == whole


def test_a_full_disk_leaves_no_part_of_a_cache(tmp_path, monkeypatch, full_disk):
    monkeypatch.setenv("STROBE_CACHE", str(tmp_path))
    full_disk()
    assert len(data.load(None, vocab_size=300, most_bytes=50_000).train) > 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_standard_library_is_gathered():
    paths = data.standard_library()
    names = {path.name for path in paths}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any({"test", "site-packages"} & set(path.parts[-3:-1]) for path in paths)


def test_gather_takes_text_in_a_fixed_order_up_to_the_cap(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    for i in range(10):
        (tmp_path / ["sub", "."][i % 2] / f"{i}.txt").write_text(f"text {i} " * 10)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / ".hidden" / "secret.txt").write_text("secret")
    documents = data.gather(tmp_path, None)
    assert sorted(documents) == [f"text {i} " * 10 for i in range(10)]
    assert documents == data.gather(tmp_path, None)
    assert documents != sorted(documents)
    short = data.gather(tmp_path, 100)
    assert short == [documents[0], documents[1][:30]]


@pytest.mark.parametrize("missing", [True, False])
def test_gather_says_that_there_is_no_text(tmp_path, missing):
    with pytest.raises((FileNotFoundError, ValueError), match=r"text: .* accepted: a text file or a folder of text files"):
        data.gather(tmp_path / "nowhere" if missing else tmp_path, None)


@pytest.mark.parametrize(
    "documents",
    [[f"{i}\n" * 50 for i in range(100)], ["one line\n" * 1000], ["no line" * 1000], ["small", "a\n" * 5000], ["a\n" * 5000, "small"]],
)
def test_split_keeps_everything_and_holds_back_the_end(documents):
    train, validation = data.split(documents)
    assert "".join(train + validation) == "".join(documents)
    share = sum(map(len, validation)) / sum(map(len, documents))
    assert 0.04 < share <= 0.1
    if len(documents) == 100:
        assert train + validation == documents


def test_tokens_are_the_text(corpus):
    text = "def f(x):\n    return 'größer' + \"\t✓\"  # 中文\n"
    assert corpus.tokenizer.decode(corpus.tokenizer.encode(text).ids) == text
    assert corpus.tokenizer.get_vocab_size() == SMOKE.vocab_size
    decoded = corpus.tokenizer.decode([*corpus.train.tolist(), *corpus.validation.tolist()], skip_special_tokens=True)
    documents = data.gather(None, SMOKE.text_bytes)
    assert decoded == "".join(documents)


def test_tokens_are_cached_by_content(monkeypatch, tmp_path, corpus):
    def forbidden(*_):
        raise AssertionError("the cache was not used")

    monkeypatch.setattr(data, "train_tokenizer", forbidden)
    again = data.load(None, vocab_size=SMOKE.vocab_size, most_bytes=SMOKE.text_bytes)
    assert torch.equal(again.train, corpus.train)
    assert torch.equal(again.validation, corpus.validation)
    assert again.tokenizer.to_str() == corpus.tokenizer.to_str()
    assert again.digest == corpus.digest
    with pytest.raises(AssertionError, match="the cache was not used"):
        data.load(None, vocab_size=SMOKE.vocab_size + 1, most_bytes=SMOKE.text_bytes)


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path, corpus):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("STROBE_CACHE", str(tmp_path / "file"))
    assert data.load(None, vocab_size=SMOKE.vocab_size, most_bytes=SMOKE.text_bytes).digest == corpus.digest


def test_windows_are_spread_and_do_not_overlap():
    tokens = torch.arange(1000)
    some = data.windows(tokens, 10, 100)
    assert some.shape == (10, 11)
    assert some[0, 0] == 0
    assert some[-1, -1] > 980
    everything = data.windows(tokens, 10, 10**6)
    assert torch.equal(everything[:, :-1].flatten(), torch.arange(990))
    assert torch.equal(everything[:, 1:], everything[:, :-1] + 1)


def test_bigram_entropy_against_counting():
    rng = np.random.default_rng(0)
    vocab = 7
    train, windows = rng.integers(0, vocab - 1, 200), rng.integers(0, vocab, (5, 9))  # token 6 is never seen in training
    counts = Counter(itertools.pairwise(train.tolist()))
    followers, preceders, totals = Counter(), Counter(), Counter()
    for (a, b), n in counts.items():
        followers[a] += 1
        preceders[b] += 1
        totals[a] += n

    def probability(a: int, b: int, discount: float) -> float:
        backoff = (preceders[b] + 1) / (len(counts) + vocab)
        if not totals[a]:
            return backoff
        return (max(counts[a, b] - discount, 0) + discount * followers[a] * backoff) / totals[a]

    def entropy(discount: float) -> float:
        pairs = [(a, b) for w in windows.tolist() for a, b in itertools.pairwise(w)]
        return -sum(math.log(probability(a, b, discount)) for a, b in pairs) / len(pairs)

    for a in range(vocab):
        assert sum(probability(a, b, 0.5) for b in range(vocab)) == pytest.approx(1)
    best = min(entropy(d) for d in np.linspace(0.05, 0.95, 19))
    assert data.bigram_entropy(train, windows, vocab) == pytest.approx(best, rel=1e-12)


def test_bigram_entropy_of_what_is_known():
    cycle = np.arange(10_000) % 4
    assert data.bigram_entropy(cycle, cycle[:101][None], 4) < 0.01
    noise = np.random.default_rng(0).integers(0, 4, 100_000)
    assert data.bigram_entropy(noise, noise[None], 4) == pytest.approx(math.log(4), abs=1e-3)


# Report


def history(*validation: float) -> History:
    return History([5.0 - 0.01 * i for i in range(250)], [(100 * (i + 1), loss) for i, loss in enumerate(validation)])


@pytest.mark.parametrize(
    ("run", "without", "bigram", "learned", "words"),
    [
        (2.0, 3.5, 3.4, True, "Attention learned: 2.000 is below the bigram entropy 3.400 and below 3.500 without attention."),
        (3.5, 3.6, 3.4, False, "Attention did NOT learn: 3.500 is not below the bigram entropy 3.400."),
        (3.3, 3.2, 3.4, False, "Attention did NOT learn: 3.300 is not below 3.200 without attention."),
        (4.0, 3.2, 3.4, False, "Attention did NOT learn: 4.000 is not below the bigram entropy 3.400 nor below 3.200 without attention."),
        (
            math.nan,
            3.2,
            3.4,
            False,
            "Attention did NOT learn: nan is not below the bigram entropy 3.400 nor below 3.200 without attention.",
        ),
        (3.0, None, 3.4, None, "The validation loss 3.000 is below the bigram entropy 3.400; the run without attention was not asked for."),
    ],
)
def test_the_verdict_is_plain(run, without, bigram, learned, words):
    result = Result("strobe", history(5.0, run), None if without is None else history(5.0, without), bigram)
    assert result.learned is learned
    assert result.verdict == words
    words = words.replace("did NOT learn", "did not learn, which this configuration does not ask for")
    assert dataclasses.replace(result, must_learn=False).verdict == words


def test_the_curves_are_drawn(tmp_path):
    drawn = {}
    for name, ablation in (("with", history(5, 4, 3.5)), ("without", None)):
        draw(tmp_path / f"{name}.png", Result("strobe", history(5, 3, 2.5), ablation, 3.0))
        drawn[name] = imread(tmp_path / f"{name}.png")
    assert drawn["with"].shape[:2] == (750, 1200)
    vermillion = np.array([0xD5, 0x5E, 0x00]) / 255
    strokes = {name: (np.abs(image[..., :3] - vermillion).max(-1) < 0.02).sum() for name, image in drawn.items()}
    assert strokes["with"] > 100
    assert strokes["without"] == 0


def test_config_fields_have_plain_types():
    """Plain types let checkpoints load with weights_only."""
    assert all(isinstance(v, (int, float, str, bool, tuple, type(None))) for v in vars(Config()).values())


def test_the_library_does_not_need_the_trainer():
    probe = "import sys, strobe; sys.exit(any(m.startswith(('strobe_tools', 'torch', 'numpy', 'rich')) for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
