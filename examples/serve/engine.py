"""Continuous batching: every step takes the next token of each request that is being answered, and pieces of other requests' prompts."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import torch
from cache import Batch, Cache, Pages
from model import ROWS, step
from tokenizers import Tokenizer
from work import Request, Stream, Token, room_of, sample

from strobe_tools.train.data import END_OF_DOCUMENT
from strobe_tools.train.model import GPT


class BusyError(Exception):
    """Too many requests wait."""


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
        most_waiting: int = 1024,
    ) -> None:
        """step_tokens: the most tokens of a step, so that a long prompt delays the other requests by one step only. most_waiting: the most
        requests without pages."""
        config = model.config
        self.model, self.tokenizer, self.step_tokens, self.most_waiting = model, tokenizer, step_tokens, most_waiting
        self.device = model.token.weight.device
        self.end = tokenizer.token_to_id(END_OF_DOCUMENT)
        self._longest_token = max(map(len, tokenizer.get_vocab()))  # in bytes, each of which is a character there
        self.pages = Pages(pages, page_size)
        self.cache = Cache(config.layers, config.heads, config.head_dim, self.pages, cache_dtype, self.device)
        self.queue: deque[Request] = deque()  # requests without pages
        self._coming = 0  # requests whose prompts are being encoded
        self.running: list[Request] = []
        self._wakes = asyncio.Event()
        self._thread = ThreadPoolExecutor(1)

    async def submit(
        self, prompts: list[str], n: int, max_tokens: int, temperature: float, seed: int | None, logprobs: int | None, stream: Stream
    ) -> list[Request]:
        """Queues n requests for each prompt, with seed, seed + 1, … . Raises ValueError if one of them could never be answered, BusyError
        if too many wait."""
        count = len(prompts) * n
        if count > self.most_waiting:
            raise ValueError(f"prompt: {count} choices of all prompts; accepted are up to {self.most_waiting}")
        if (waiting := self._coming + len(self.queue)) + count > self.most_waiting:
            raise BusyError(f"{waiting} requests wait; accepted are {self.most_waiting}, try again later")
        most = self.model.config.sequence * self._longest_token
        for prompt in prompts:
            if (size := len(prompt.encode())) > most:
                raise ValueError(f"prompt: {size} bytes; accepted are up to {most}: more are too many tokens for the model")
        self._coming += count
        try:  # in another thread, so that the event loop can go on
            encoded = await asyncio.to_thread(self.tokenizer.encode_batch, prompts)
        finally:
            self._coming -= count
        seeds = [None if seed is None else (seed + k + 2**63) % 2**64 - 2**63 for k in range(n)]
        tokens = [self._checked([self.end, *each.ids], max_tokens) for each in encoded]
        requests = [Request(prompt, max_tokens, temperature, each, logprobs, stream) for prompt in tokens for each in seeds]
        self.queue.extend(requests)
        self._wakes.set()
        return requests

    def _checked(self, prompt: list[int], max_tokens: int) -> list[int]:
        longest = self.model.config.sequence
        if len(prompt) + max_tokens > longest:
            raise ValueError(
                f"max_tokens: {max_tokens} after a prompt of {len(prompt)}; accepted are {longest} together, the model's longest"
            )
        if (needed := self.pages.needed(room_of(prompt, max_tokens))) > self.pages.count:
            raise ValueError(f"prompt: it needs {needed} pages with its answer; accepted are {self.pages.count}, all that there are")
        return prompt

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
                found[request] = sample(row, request)
        return found

    def _finish(self, request: Request, error: Exception | None = None) -> None:
        self.running.remove(request)
        self.pages.give_back(request.pages)
        request.pages = []
        request.stream.put_nowait((request, error))
