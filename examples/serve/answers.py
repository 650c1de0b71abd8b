"""Answers as they come from the engine, whole or streamed as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from aiohttp import web
from engine import Engine
from protocol import Chat, Completion, Text, token_of, usage
from work import Request, Stream, Token


class Piece(NamedTuple):
    """What a token adds to one of the choices."""

    choice: int
    text: str
    token: Token | None
    finish: str | None


class FailedError(Exception):
    """A step has failed."""


async def pieces_of(
    engine: Engine, requests: list[Request], stream: Stream, stops: list[str], begins: Callable[[], None] | None
) -> AsyncIterator[Piece]:
    """What the tokens add to the choices, in the order in which they come. begins: called at the first one."""
    texts = {request: Text(engine.tokenizer.decode, stops) for request in requests}
    left = {request: number for number, request in enumerate(requests)}
    while left:
        request, token = await stream.get()
        if request not in left:  # a stop came before
            continue
        text = texts[request]
        if isinstance(token, Exception):
            raise FailedError(str(token)) from None
        if token is not None:
            if begins is not None:
                begins()
                begins = None
            added = text.add(token)
            yield Piece(left[request], added, token, "stop" if text.is_stopped else None)
        if token is None or text.is_stopped:
            if token is None:
                yield Piece(left[request], text.rest(), None, "stop" if request.answer[-1] == engine.end else "length")
            engine.cancel(request)
            del left[request]


async def whole(
    http: web.Request, sent: Completion | Chat, requests: list[Request], pieces: AsyncIterator[Piece], decode: Callable[[list[int]], str]
) -> web.Response:  # fmt: skip
    found: list[list[Piece]] = [[] for _ in requests]
    async for piece in pieces:
        found[piece.choice].append(piece)
    choices = []
    for number, of in enumerate(found):
        tokens = None if sent.tops is None else [token_of(piece.token, decode) for piece in of if piece.token is not None]
        choices.append(sent.choice(number, "".join(piece.text for piece in of), tokens, of[-1].finish, streamed=False))
    return web.json_response(sent.answer(choices, streamed=False) | {"usage": usage(requests, sent.n)})


async def streamed(
    http: web.Request, sent: Completion | Chat, requests: list[Request], pieces: AsyncIterator[Piece], decode: Callable[[list[int]], str]
) -> web.StreamResponse:  # fmt: skip
    head = sent.answer([], streamed=True)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)

    async def send(event: dict[str, Any]) -> None:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())

    try:
        async for piece in pieces:
            tokens = None if sent.tops is None or piece.token is None else [token_of(piece.token, decode)]
            await send(head | {"choices": [sent.choice(piece.choice, piece.text, tokens, piece.finish, streamed=True)]})
        if sent.stream_options.get("include_usage"):
            await send(head | {"usage": usage(requests, sent.n)})
    except FailedError as error:
        await send(wrong(str(error), "server_error"))
    await response.write(b"data: [DONE]\n\n")
    return response


def wrong(message: str, kind: str) -> dict[str, Any]:
    param = message.partition(":")[0] if kind == "invalid_request_error" else None
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}
