"""`strobe train --context-parallel 2`, on gloo: two processes that divide the tokens of every sequence train like one."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp
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
    """Each rank drops other elements, and the same ones when the step is repeated."""
    data.load(None, vocab_size=SMOKE.vocab_size, most_bytes=SMOKE.text_bytes)  # trains the tokenizer once
    for whole, resumed in workers.run(distributed_calls.trained_and_resumed, 4, str(tmp_path), os.environ["STROBE_CACHE"]):
        assert whole == resumed
        assert len(set(whole)) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--attention", "sdpa"), "attention is 'sdpa'; accepted: strobe, where context_parallel is more than 1"),
        (("--compile",), "compile is True; accepted: False, where context_parallel is more than 1 (pass --no-compile)"),
        (("--context-parallel", "0"), "context_parallel is 0; accepted: 1 or more"),
    ],
)
def test_what_is_refused(tmp_path, options, message):
    ran = CliRunner().invoke(command, ["--config", "smoke", "--out", str(tmp_path), "--context-parallel", "2", *options])
    assert ran.exit_code == 2
    assert message in ran.output


def test_the_example_of_fsdp_and_context_parallel(tmp_path):
    """The example learns, with the same losses on one rank and on two."""
    if not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("FSDP2 came with PyTorch 2.6")
    example = Path(__file__).parents[2] / "examples" / "fsdp_context_parallel.py"
    ran = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    said = [float(number) for number in re.findall(r"loss (\S+) after the first step, (\S+) after 25, on 2 ranks", ran.stdout)[0]]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        alone = runpy.run_path(str(example))["train"]("cpu")
    finally:
        torch.distributed.destroy_process_group()
    assert said == pytest.approx([alone[0], alone[-1]], abs=2e-4)
    assert said[1] < 0.5 * said[0]
