"""What clients send and get: OpenAI's completions and chat completions, of which a request has the fields below."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from work import Request, Token

Stop = Annotated[str, Field(min_length=1, max_length=256)]  # it is looked for after each token
Name = Annotated[str, Field(max_length=256)]  # every event of an answer repeats the model's


class Sent(BaseModel):
    """The fields of both kinds of requests. strict: 5.5 and "5" are no integers."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: Name = ""  # without effect: there is one
    user: Name = ""  # without effect
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1, le=16)
    stop: Annotated[list[Stop], Field(max_length=4, fail_fast=True)] | Stop | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = Field(default_factory=dict)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Completion(Sent):
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=64, fail_fast=True)]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    @property
    def tops(self) -> int | None:
        return self.logprobs

    def answer(self, choices: list[dict[str, Any]], streamed: bool) -> dict[str, Any]:
        return _answer("cmpl", "text_completion", self.model, choices)

    def choice(self, index: int, text: str, tokens: list[dict[str, Any]] | None, finish: str | None, streamed: bool) -> dict[str, Any]:
        logprobs = None
        if tokens is not None:
            logprobs = {
                "tokens": [token["token"] for token in tokens],
                "token_logprobs": [token["logprob"] for token in tokens],
                "top_logprobs": [{top["token"]: top["logprob"] for top in token["top_logprobs"]} for token in tokens],
            }
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str


class Chat(Sent):
    messages: list[Message] = Field(min_length=1, max_length=1024, fail_fast=True)
    max_tokens: int = Field(64, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @property
    def prompts(self) -> list[str]:
        """The model has learned no form of conversations; this one is plain."""
        return ["".join(f"{message.role}: {message.content}\n" for message in self.messages) + "assistant:"]

    @property
    def tops(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def answer(self, choices: list[dict[str, Any]], streamed: bool) -> dict[str, Any]:
        return _answer("chatcmpl", "chat.completion.chunk" if streamed else "chat.completion", self.model, choices)

    def choice(self, index: int, text: str, tokens: list[dict[str, Any]] | None, finish: str | None, streamed: bool) -> dict[str, Any]:
        message = {"delta" if streamed else "message": {"role": "assistant", "content": text}}
        return {"index": index, **message, "logprobs": None if tokens is None else {"content": tokens}, "finish_reason": finish}


def _answer(prefix: str, kind: str, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model, "choices": choices}


def usage(requests: list[Request], per_prompt: int) -> dict[str, Any]:
    prompt = sum(len(request.prompt) for request in requests[::per_prompt])
    answered = sum(len(request.answer) for request in requests)
    cached = {"cached_tokens": sum(request.shared for request in requests[::per_prompt])}
    return {"prompt_tokens": prompt, "completion_tokens": answered, "total_tokens": prompt + answered, "prompt_tokens_details": cached}


def told(error: ValidationError) -> str:
    """One line about the first field that is wrong."""
    found = max(error.errors(include_url=False, include_context=False), key=lambda each: len(each["loc"]))
    path, kind = found["loc"], found["type"]
    name = ".".join(str(part) for part in path if not _is_a_type(part)) or "body"
    if kind == "extra_forbidden":
        fields = ({"Completion": Completion, "Chat": Chat}[error.title] if len(path) == 1 else Message).model_fields
        close = "".join(f"; did you mean {each}?" for each in get_close_matches(str(path[-1]), fields, 1))
        return f"{ascii(name)[1:-1]}: no such field; accepted are {', '.join(fields)}{close}"
    given = "" if kind in ("missing", "json_invalid") else f"{str(ascii(found['input']))[:60]}; "
    return f"{name}: {given}{found['msg']}"


def _is_a_type(part: str | int) -> bool:
    """Whether a part of pydantic's path to a field names one of several types of it."""
    return isinstance(part, str) and (part in ("str", "constrained-str") or part.startswith("list["))


class Text:
    """The text of an answer, as its tokens add to it. What may be the beginning of a stop, or of a character, is held back."""

    def __init__(self, decode: Callable[[list[int]], str], stops: list[str]) -> None:
        self._decode, self._stops = decode, stops
        self._tokens: list[int] = []
        self._told = self._whole = ""
        self.is_stopped = False

    def add(self, token: Token) -> str:
        self._tokens.append(token.id)
        self._whole = self._decode(self._tokens)
        found = [at for stop in self._stops if (at := self._whole.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            return self._up_to(self._whole[: min(found)])
        sure = self._whole.rstrip("\ufffd")
        held = max((n for stop in self._stops for n in range(1, min(len(stop), len(sure) + 1)) if sure.endswith(stop[:n])), default=0)
        return self._up_to(sure[: len(sure) - held])

    def rest(self) -> str:
        return self._up_to(self._whole)

    def _up_to(self, text: str) -> str:
        before, self._told = self._told, max(self._told, text, key=len)
        return self._told[len(before) :]


def token_of(token: Token, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """A token with its logarithmic probability, and the likeliest ones."""

    def one(number: int, logprob: float) -> dict[str, Any]:
        text = decode([number])
        return {"token": text, "logprob": logprob, "bytes": [*text.encode()]}

    return {**one(token.id, token.logprob), "top_logprobs": [one(*each) for each in token.likeliest]}
