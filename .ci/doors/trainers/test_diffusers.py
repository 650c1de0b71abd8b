"""A DiT and a UNet of diffusers train on Strobe through their own attention processors, and their blocks on shards of tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import blocks
import pytest
import torch

import strobe
from strobe.distributed import Sharding

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "python"))

from distributed_workers import Workers


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_a_step_on_strobe_is_that_of_pytorch(kind):
    torch.manual_seed(1)
    expected = blocks.stepped(kind)
    torch.manual_seed(1)
    with strobe.register(strict=True) as run:
        found = blocks.stepped(kind)
    assert run.calls["scaled_dot_product_attention"]["strobe"] >= 2
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(scope="module")
def workers():
    made = Workers(2)
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_a_block_on_shards_of_tokens_is_that_on_whole_pictures(workers, kind):
    out, gradients = blocks.run(*blocks.block(kind))
    answers = workers.run(blocks.shared, 2, kind)
    found = Sharding.zigzag(blocks.TOKENS, 2).join([of for of, _ in answers], 1)
    torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)
    whole = float(torch.cat([x.flatten() for x in gradients]).norm())
    for *parts, expected in zip(*(of for _, of in answers), gradients, strict=True):
        assert float((sum(parts) - expected).norm()) <= 1e-5 * float(expected.norm()) + 1e-7 * whole
