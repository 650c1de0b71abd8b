"""The description of a training run: one dataclass, and the configurations that ``strobe train --config`` knows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ATTENTIONS = ("strobe", "sdpa", "math", "block-sparse", "none")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")


def _is_int(x: object) -> bool:
    return type(x) is int and abs(x) < 2**63


def _is_float(x: object) -> bool:
    return _is_int(x) or (isinstance(x, float) and math.isfinite(x))


# By the type of a field: the accepted values, and their description.
_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "int": (_is_int, "a whole number of 64 bits"),
    "float": (_is_float, "a finite number"),
    "bool": (lambda x: isinstance(x, bool), "True or False"),
    "str": (lambda x: isinstance(x, str), "a text"),
    "tuple[float, float]": (lambda x: isinstance(x, tuple) and len(x) == 2 and all(map(_is_float, x)), "two finite numbers"),
}


@dataclass(frozen=True)
class Config:
    """A training run. The defaults are the configuration "default", which fits two CPU cores.

    Length is given by ``steps`` or, if that is None, by ``epochs``. ``block_size`` is the tile requested of strobe and the block of
    block-sparse's mask; 0 leaves the tile to the engine.
    """

    # text
    vocab_size: int = 1024
    text_bytes: int | None = 6_000_000  # at most this much text is used; None: all of it
    val_tokens: int = 32_768  # the validation loss and the bigram entropy are each measured on at most this many tokens
    # model
    d_model: int = 128
    layers: int = 2
    heads: int = 4
    d_ff: int = 512
    sequence: int = 128
    dropout: float = 0.1
    init_std: float = 0.02
    tie_weights: bool = True
    attention: str = "strobe"
    block_size: int = 0
    # optimisation
    lr: float = 3e-3
    warmup: int = 100
    steps: int | None = 1500
    epochs: float | None = None
    batch: int = 16
    accumulation: int = 1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    # how it runs
    precision: str = "auto"
    compile: bool = False
    context_parallel: int = 1  # processes that divide the tokens of every sequence
    device: str = "auto"
    seed: int = 0
    evaluate_every: int = 100
    save_every: int = 300
    sample_tokens: int = 256
    ablation: bool = True  # also train the same model without its attention
    must_learn: bool = True  # the command fails if attention did not learn

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, accepted: str) -> None:
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: {accepted}")

        for field in dataclasses.fields(self):
            kind = str(field.type).removesuffix(" | None")
            fits, words = _KINDS[kind]
            value = getattr(self, field.name)
            optional = kind != field.type
            require(fits(value) or (optional and value is None), field.name, words + " or None" * optional)
        for name in (
            "vocab_size",
            "val_tokens",
            "d_model",
            "layers",
            "heads",
            "d_ff",
            "sequence",
            "batch",
            "accumulation",
            "evaluate_every",
            "save_every",
            "context_parallel",
        ):
            require(getattr(self, name) >= 1, name, "1 or more")
        require(self.vocab_size > 256, "vocab_size", "more than 256, since every byte is a token")
        require(self.d_model % self.heads == 0, "heads", f"a divisor of d_model ({self.d_model})")
        require(self.attention in ATTENTIONS, "attention", ", ".join(ATTENTIONS))
        require(self.precision in PRECISIONS, "precision", ", ".join(PRECISIONS))
        require(0 <= self.dropout < 1, "dropout", "0 up to, not including, 1")
        require(self.block_size >= 0 and self.block_size % 16 == 0, "block_size", "0 or a multiple of 16")
        require(self.steps is None or self.steps >= 1, "steps", "1 or more")
        require((self.steps is None) != (self.epochs is None), "epochs", "a number where steps is None, else None")
        require(self.epochs is None or self.epochs > 0, "epochs", "more than 0")
        require(self.warmup >= 0, "warmup", "0 or more")
        require(self.lr > 0, "lr", "more than 0")
        require(self.text_bytes is None or self.text_bytes >= 1, "text_bytes", "1 or more")
        require(self.init_std >= 0, "init_std", "0 or more")
        require(all(0 <= beta < 1 for beta in self.betas), "betas", "0 up to, not including, 1")
        require(self.eps >= 0, "eps", "0 or more")
        require(self.weight_decay >= 0, "weight_decay", "0 or more")
        require(abs(self.seed) < 2**40, "seed", "less than 2^40 either way")
        require(self.sample_tokens >= 0, "sample_tokens", "0 or more")

        if self.context_parallel > 1:
            require(self.attention in ("strobe", "none"), "attention", "strobe, where context_parallel is more than 1")
            require(not self.compile, "compile", "False, where context_parallel is more than 1 (pass --no-compile)")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    def replace(self, **changes: Any) -> Config:
        return dataclasses.replace(self, **changes)


CONFIGS = {
    "default": Config(),
    "gpt3-small": Config(
        vocab_size=50257,
        text_bytes=None,
        val_tokens=262_144,
        d_model=768,
        layers=12,
        heads=12,
        d_ff=3072,
        sequence=512,
        dropout=0.1,
        block_size=128,
        lr=1e-4,
        warmup=1000,
        steps=None,
        epochs=5,
        batch=8,
        accumulation=16,
        compile=True,
        evaluate_every=250,
        save_every=250,
        ablation=False,
    ),
    # For tests: everything runs, nothing is learned.
    "smoke": Config(
        vocab_size=300,
        text_bytes=60_000,
        val_tokens=1024,
        d_model=32,
        layers=2,
        heads=2,
        d_ff=64,
        sequence=32,
        warmup=2,
        steps=6,
        batch=4,
        accumulation=2,
        precision="fp32",
        evaluate_every=3,
        save_every=3,
        sample_tokens=16,
        must_learn=False,
    ),
}
