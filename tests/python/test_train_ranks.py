"""`strobe train --context-parallel 2`, on gloo: two processes that share the tokens of every sequence train as one does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

import distributed_calls
from strobe_tools.train import CONFIGS, data
from strobe_tools.train.command import command
from strobe_tools.train.trainer import Trainer

SMOKE = CONFIGS["smoke"].replace(device="cpu", dropout=0.0, init_std=0.2, ablation=False)  # attention matters from the first step
SET = ("--set", "dropout=0.0", "--set", "init_std=0.2", "--no-ablation")


def train(folder, *options):
    arguments = [sys.executable, "-m", "strobe", "train", "--config", "smoke", "--device", "cpu", "--out", str(folder), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    ran = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return torch.load(folder / "attention.pt", weights_only=True)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STROBE_CACHE", str(tmp_path / "cache"))


def test_losses_are_those_of_one_process(tmp_path):
    shared = train(tmp_path / "two", "--context-parallel", "2", *SET)
    corpus = data.load(None, vocab_size=SMOKE.vocab_size, most_bytes=SMOKE.text_bytes)
    alone = Trainer(SMOKE, corpus)
    alone.run()
    for name in ("train", "validation"):
        found, expected = (
            torch.tensor(history, dtype=torch.float64) for history in (shared["history"][name], getattr(alone.history, name))
        )
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < 2e-6


def test_dropout_and_resuming_bit_for_bit(workers, tmp_path):
    """Each rank drops other elements, and the same ones when the step is taken again."""
    data.load(None, vocab_size=SMOKE.vocab_size, most_bytes=SMOKE.text_bytes)  # trains the tokenizer once
    for whole, resumed in workers.run(distributed_calls.trained_and_resumed, 4, str(tmp_path), os.environ["STROBE_CACHE"]):
        assert whole == resumed
        assert len(set(whole)) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--attention", "sdpa"), "attention is 'sdpa'; accepted: strobe, where context_parallel is more than 1"),
        (("--compile",), "compile is True; accepted: False, where context_parallel is more than 1"),
        (("--context-parallel", "0"), "context_parallel is 0; accepted: 1 or more"),
    ],
)
def test_what_is_refused(tmp_path, options, message):
    ran = CliRunner().invoke(command, ["--config", "smoke", "--out", str(tmp_path), "--context-parallel", "2", *options])
    assert ran.exit_code == 2
    assert message in ran.output
