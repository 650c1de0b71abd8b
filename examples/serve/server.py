"""Serves a model that `strobe train` has trained: python examples/serve/server.py runs/default/attention.pt

POST /generate takes {"prompt": "import ", "max_tokens": 64, "temperature": 0.8, "seed": 0} and streams lines of JSON: {"text": "..."} for
each token, {"text": "", "done": true, "tokens": 64} at the end. GET /health tells how many pages are free, and how many requests run and
wait.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from engine import Engine, Request
from model import load

ENGINE: web.AppKey[Engine] = web.AppKey("engine", Engine)
DTYPES = {"int8": torch.int8, "fp32": torch.float32, "bf16": torch.bfloat16}


async def generate(http: web.Request) -> web.StreamResponse:
    engine = http.app[ENGINE]
    try:
        request = engine.submit(**_arguments(await http.read()))
    except (ValueError, TypeError) as error:
        return web.json_response({"error": str(error)}, status=400)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    try:  # however this ends, also if the client goes away, the pages are given back
        await response.prepare(http)
        async for line in _lines(engine, request):
            await response.write(json.dumps(line).encode() + b"\n")
    finally:
        engine.cancel(request)
    return response


def _arguments(sent: bytes) -> dict[str, Any]:
    """The arguments of Engine.submit() in the sent JSON. Raises ValueError if they are not valid."""
    kinds: dict[str, tuple[Any, Any]] = {"prompt": (str, ""), "max_tokens": (int, 32), "temperature": ((int, float), 0.0), "seed": (int, 0)}
    accepted = f"accepted is a JSON object with {', '.join(kinds)}"
    try:
        body = json.loads(sent)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"body: {error}; {accepted}") from None
    if not isinstance(body, dict):
        raise ValueError(f"body: {accepted}")
    for name, x in body.items():
        if name not in kinds:
            close = "".join(f"; did you mean {field}?" for field in get_close_matches(name, kinds, 1))
            raise ValueError(f"{ascii(name)[1:-1]}: no such field; {accepted}{close}")
        if not isinstance(x, kinds[name][0]) or isinstance(x, bool):
            raise ValueError(f"{name}: {x!r}; accepted is a {'text' if name == 'prompt' else 'number'}")
    if surrogates := [x for x in body.get("prompt", "") if "\ud800" <= x <= "\udfff"]:
        raise ValueError(f"prompt: {surrogates[0]!r} in it, half of a character; accepted is a text")
    return {name: body.get(name, default) for name, (_, default) in kinds.items()}


async def _lines(engine: Engine, request: Request) -> AsyncIterator[dict[str, Any]]:
    """What each token adds to the text. A character of several tokens comes with the last of them."""
    tokens: list[int] = []
    text = sent = ""
    while isinstance(token := await request.stream.get(), int):
        tokens.append(token)
        text = engine.tokenizer.decode(tokens)
        yield {"text": (whole := text.rstrip("\ufffd"))[len(sent) :]}
        sent = whole
    if token is not None:
        yield {"error": str(token)}
    else:
        yield {"text": text[len(sent) :], "done": True, "tokens": len(tokens)}


async def health(http: web.Request) -> web.Response:
    engine = http.app[ENGINE]
    counts = {"pages": engine.pages.count, "free": engine.pages.free, "running": len(engine.running), "waiting": len(engine.queue)}
    return web.json_response(counts)


def application(engine: Engine) -> web.Application:
    async def engine_runs(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(engine.run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    app = web.Application()
    app[ENGINE] = engine
    app.cleanup_ctx.append(engine_runs)
    app.add_routes([web.post("/generate", generate), web.get("/health", health)])
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="runs/NAME/attention.pt of strobe train")
    parser.add_argument("--text", type=Path, help="the --text that it was trained on")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--host", default="127.0.0.1", help="where it listens; 0.0.0.0: to all machines that reach this one")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--pages", type=int, default=256, help="how many pages the cache has")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page")
    parser.add_argument("--cache", choices=DTYPES, default="int8", help="the dtype of keys and values")
    chosen = parser.parse_args()
    print(f"loading {chosen.checkpoint}, and the tokenizer of its text", flush=True)
    try:
        model, tokenizer = load(chosen.checkpoint, chosen.text)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    engine = Engine(model.to(chosen.device), tokenizer, pages=chosen.pages, page_size=chosen.page_size, cache_dtype=DTYPES[chosen.cache])
    web.run_app(application(engine), host=chosen.host, port=chosen.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
