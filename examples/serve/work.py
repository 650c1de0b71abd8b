"""A prompt that is being answered, and how the next token of its answer is drawn."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

_LEAST_TEMPERATURE = 0.01  # below it the likeliest token comes
Stream: TypeAlias = "asyncio.Queue[tuple[Request, Token | Exception | None]]"


class Token(NamedTuple):
    id: int
    logprob: float = 0.0
    likeliest: list[tuple[int, float]] = []  # noqa: RUF012  (never changed)


@dataclass(eq=False)
class Request:
    """A prompt, and how it is to be answered."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int | None
    logprobs: int | None  # how many of the likeliest tokens are told with each token; None: no probabilities
    stream: Stream  # gets the request with each token; with None at its end, or with the error that ended it
    shared: int = 0  # tokens of the prompt whose keys another request had computed
    pages: list[int] = field(default_factory=list)
    held: int = 0  # tokens in the cache
    answer: list[int] = field(default_factory=list)
    is_gone: bool = False  # the client has gone

    def __post_init__(self) -> None:
        self.generator = torch.Generator()  # its own, so that no other request draws from it
        self.seed = self.generator.seed() if self.seed is None else self.generator.manual_seed(self.seed).initial_seed()

    @property
    def waiting(self) -> list[int]:
        """The tokens that are not in the cache yet: what is left of the prompt, or the newest token."""
        return (self.prompt + self.answer)[self.held :]

    @property
    def room(self) -> int:
        return room_of(self.prompt, self.max_tokens)


def room_of(prompt: list[int], max_tokens: int) -> int:
    """The most tokens whose keys a request may hold in the cache. The last token of the answer has no keys there."""
    return len(prompt) + max_tokens - 1


def sample(logits: torch.Tensor, request: Request) -> Token:
    if request.temperature < _LEAST_TEMPERATURE:
        token = int(logits.argmax())
    else:
        token = int(torch.multinomial((logits / request.temperature).softmax(-1), 1, generator=request.generator))
    if request.logprobs is None:
        return Token(token)
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(request.logprobs)
    return Token(token, float(logprobs[token]), [*zip(ids.tolist(), values.tolist(), strict=True)])
