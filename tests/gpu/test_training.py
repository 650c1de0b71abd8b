"""Training on a GPU with compiled steps, which are replayed as CUDA graphs: accumulation, resuming, fp16."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from strobe_tools.train import CONFIGS, data
from strobe_tools.train.config import Config
from strobe_tools.train.data import Corpus
from strobe_tools.train.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SMOKE = CONFIGS["smoke"].replace(device="cuda", dropout=0.0, accumulation=3)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STROBE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return data.load(None, vocab_size=SMOKE.vocab_size, most_bytes=SMOKE.text_bytes)


def losses(config: Config, corpus: Corpus) -> list[float]:
    return Trainer(config, corpus).run().train


@pytest.mark.parametrize(("precision", "within"), [("fp32", 1e-3), ("fp16", 2e-2)])
def test_a_compiled_step_learns_what_another_one_does(corpus, monkeypatch, precision, within):
    """Gradients of every batch are added up, although each replay writes to the same memory."""
    config = SMOKE.replace(precision=precision, lr=1e-2)
    compiled, eager = (losses(config.replace(compile=compile), corpus) for compile in (True, False))
    assert compiled == pytest.approx(eager, abs=within)

    batches = Trainer._batches

    def forgetting(trainer: Trainer) -> Iterator[Tensor]:
        for batch in batches(trainer):
            trainer.optimizer.zero_grad()
            yield batch

    monkeypatch.setattr(Trainer, "_batches", forgetting)
    assert losses(config, corpus) != pytest.approx(eager, abs=2 * within)  # a lost gradient would show


def test_a_compiled_run_resumes(corpus, tmp_path):
    config = SMOKE.replace(compile=True, dropout=0.1, lr=1e-2)
    whole = Trainer(config, corpus)
    for _ in range(4):
        whole.train_step()
    whole.save(tmp_path / "run.pt")
    rest = [whole.train_step() for _ in range(2)]
    resumed = Trainer.load(tmp_path / "run.pt", config, corpus)
    assert [resumed.train_step() for _ in range(2)] == pytest.approx(rest, abs=1e-3)  # dQ is added up in another order
