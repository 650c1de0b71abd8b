"""strobe train's GPT, one step at a time: some tokens of many sequences in, the logits of each sequence's next token out.

A matrix product may sum in another order for another number of rows. In a larger batch a request would then get other bits, and sooner or
later another text. So everything except the attention runs on tiles of a fixed number of rows, the last of which is padded with zeros: the
same kernels run on the same shapes at every load. The attention has invariant=True for this.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from cache import Batch, Cache
from tokenizers import Tokenizer
from torch import Tensor

from strobe_tools.train import data
from strobe_tools.train.config import Config
from strobe_tools.train.model import GPT

ROWS = 16


def load(checkpoint: Path, text: Path | None) -> tuple[GPT, Tokenizer]:
    """The model that `strobe train` saved as runs/NAME/attention.pt. text: its training text, from which the tokenizer is made again."""
    if not checkpoint.is_file():
        raise ValueError(f"checkpoint: {checkpoint} does not exist, or is no file; accepted is attention.pt, which strobe train leaves")
    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        config = Config(**state["config"])
    except Exception:  # PyTorch raises exceptions of many kinds for a file that it did not write
        raise ValueError(f"checkpoint: {checkpoint} is none of strobe train; accepted is attention.pt") from None
    if config.attention == "none":
        raise ValueError(f"checkpoint: {checkpoint} has no attention; accepted is attention.pt")
    corpus = data.load(text, vocab_size=config.vocab_size, most_bytes=config.text_bytes)
    if corpus.digest != state["corpus"]:
        raise ValueError(f"--text: {checkpoint} was trained on another text; accepted is the --text of its strobe train")
    model = GPT(config)
    model.load_state_dict(state["model"])
    return model.eval(), corpus.tokenizer


def by_tiles(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Applies `function` to the inputs (T, ...), ROWS rows at a time."""
    tokens = len(inputs[0])
    tiles = []
    for first in range(0, tokens, ROWS):
        parts = [x[first : first + ROWS] for x in inputs]
        if missing := ROWS - len(parts[0]):
            parts = [F.pad(x, [0, 0] * (x.dim() - 1) + [0, missing]) for x in parts]
        tiles.append(function(*parts))
    return torch.cat(tiles)[:tokens]


@torch.inference_mode()
def step(model: GPT, cache: Cache, tokens: Tensor, batch: Batch) -> Tensor:
    """Puts the keys and values of all sequences' tokens (T,) into the cache. Returns the logits (B, vocabulary) after each sequence's last
    token."""
    heads = (3, model.config.heads, model.config.head_dim)
    x = model.token(tokens) + model.position(batch.positions)
    for number, block in enumerate(model.blocks):
        qkv = by_tiles(lambda x, block=block: block.attention.qkv(block.norm_attention(x)), x)
        o = cache.attend(number, *qkv.unflatten(-1, heads).unbind(1), batch)

        def rest(x: Tensor, o: Tensor, block: torch.nn.Module = block) -> Tensor:
            x = x + block.attention.out(o)
            return x + block.mlp(block.norm_mlp(x))

        x = by_tiles(rest, x, o.to(x.dtype).flatten(1))
    return by_tiles(lambda x: model.head(model.norm(x)), x[batch.last]).float()
