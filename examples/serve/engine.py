"""Continuous batching: every step takes the next token of each request that is being answered, and pieces of other requests' prompts."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from cache import Batch, Cache, Pages
from model import ROWS, step
from tokenizers import Tokenizer

from strobe_tools.train.data import END_OF_DOCUMENT
from strobe_tools.train.model import GPT

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
        """The most tokens whose keys the request may hold in the cache. The last token of the answer has no keys there."""
        return len(self.prompt) + self.max_tokens - 1


class Engine:
    """Answers requests. run() must run in the event loop that calls submit()."""

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        *,
        pages: int = 256,
        page_size: int = 16,
        cache_dtype: torch.dtype = torch.int8,
        step_tokens: int = 8 * ROWS,
    ) -> None:
        """step_tokens: the most tokens of a step, so that a long prompt delays the other requests by one step only."""
        config = model.config
        self.model, self.tokenizer, self.step_tokens = model, tokenizer, step_tokens
        self.device = model.token.weight.device
        self.end = tokenizer.token_to_id(END_OF_DOCUMENT)
        self.pages = Pages(pages, page_size)
        self.cache = Cache(config.layers, config.heads, config.head_dim, self.pages, cache_dtype, self.device)
        self.queue: deque[Request] = deque()  # requests without pages
        self.running: list[Request] = []
        self._wakes = asyncio.Event()
        self._thread = ThreadPoolExecutor(1)

    def submit(
        self, prompt: str, max_tokens: int, temperature: float, seed: int | None, logprobs: int | None, stream: Stream
    ) -> Request:  # fmt: skip
        """Queues a request. Raises ValueError if it could never be answered."""
        tokens = [self.end, *self.tokenizer.encode(prompt).ids]
        longest = self.model.config.sequence
        if len(tokens) + max_tokens > longest:
            raise ValueError(
                f"max_tokens: {max_tokens} after a prompt of {len(tokens)}; accepted are {longest} together, the model's longest"
            )
        request = Request(tokens, max_tokens, temperature, seed, logprobs, stream)
        if (needed := self.pages.needed(request.room)) > self.pages.count:
            raise ValueError(f"prompt: it needs {needed} pages with its answer; accepted are {self.pages.count}, all that there are")
        self.queue.append(request)
        self._wakes.set()
        return request

    def cancel(self, request: Request) -> None:
        """Drops a request whose client has gone. Its pages are free after the current step."""
        request.is_gone = True
        self._wakes.set()

    async def run(self) -> None:
        """Runs steps for ever, each in another thread, so that the event loop can go on."""
        while True:
            self._wakes.clear()
            self._admit()
            if not self.running:
                await self._wakes.wait()
                continue
            pieces = self._pieces()
            try:
                tokens = await asyncio.get_running_loop().run_in_executor(self._thread, self._step, pieces)
            except Exception as error:  # the requests of this step get the error; the server goes on
                for request in [*pieces]:
                    self._finish(request, error)
                continue
            for request, token in tokens.items():
                request.answer.append(token.id)
                request.stream.put_nowait((request, token))
                if token.id == self.end or len(request.answer) == request.max_tokens:
                    self._finish(request)

    def _admit(self) -> None:
        """Frees the pages of requests whose clients have gone, then starts queued requests in their order. A request gets all the pages
        that it may need when it starts, so that it never has to stop for lack of one."""
        for request in [r for r in self.running if r.is_gone]:
            self._finish(request)
        self.queue = deque(r for r in self.queue if not r.is_gone)
        while self.queue and len(self.running) < self.step_tokens:
            request = self.queue[0]
            if (taken := self.pages.take(request.prompt, request.room)) is None:
                break
            request.pages, request.shared = taken
            request.held = request.shared
            self.running.append(self.queue.popleft())

    def _pieces(self) -> dict[Request, int]:
        """How many tokens of each request come next: one if it is being answered, and of prompts as many as there is room for."""
        left = self.step_tokens - sum(len(r.waiting) == 1 for r in self.running)
        pieces = {}
        for request in self.running:
            count = len(request.waiting)
            if count > 1:
                count = min(count, left)
                left -= count
            if count:
                pieces[request] = count
        return pieces

    def _step(self, pieces: dict[Request, int]) -> dict[Request, Token]:
        """The next token of each request whose prompt is in the cache now."""
        tokens = torch.tensor([token for r, count in pieces.items() for token in r.waiting[:count]], device=self.device)
        batch = Batch([(r.pages, r.held, count) for r, count in pieces.items()], self.device)
        logits = step(self.model, self.cache, tokens, batch).cpu()
        found = {}
        for (request, count), row in zip(pieces.items(), logits, strict=True):
            is_whole = count == len(request.waiting)
            before, request.held = request.held, request.held + count
            self.pages.name(request.pages, (request.prompt + request.answer)[: request.held], before)
            if is_whole:
                found[request] = _sample(row, request)
        return found

    def _finish(self, request: Request, error: Exception | None = None) -> None:
        self.running.remove(request)
        self.pages.give_back(request.pages)
        request.pages = []
        request.stream.put_nowait((request, error))


def _sample(logits: torch.Tensor, request: Request) -> Token:
    if request.temperature < _LEAST_TEMPERATURE:
        token = int(logits.argmax())
    else:
        token = int(torch.multinomial((logits / request.temperature).softmax(-1), 1, generator=request.generator))
    if request.logprobs is None:
        return Token(token)
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(request.logprobs)
    return Token(token, float(logprobs[token]), [*zip(ids.tolist(), values.tolist(), strict=True)])
