"""Serves a model that `strobe train` has trained: python examples/serve/server.py runs/default/attention.pt

OpenAI's /v1/completions and /v1/chat/completions (protocol.py has their fields), /v1/models, and /metrics for Prometheus:

curl localhost:8000/v1/completions -d '{"prompt": "import ", "max_tokens": 64, "temperature": 0.8, "seed": 0}'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

import torch
from aiohttp import web
from answers import FailedError, pieces_of, streamed, whole, wrong
from engine import BusyError, Engine
from metrics import Metrics
from model import load
from protocol import Chat, Completion, told
from pydantic import ValidationError
from work import Request, Stream

ENGINE: web.AppKey[Engine] = web.AppKey("engine", Engine)
METRICS: web.AppKey[Metrics] = web.AppKey("metrics", Metrics)
DTYPES = {"int8": torch.int8, "fp32": torch.float32, "bf16": torch.bfloat16}
MOST_BYTES = 2**18  # of a request
LOG = logging.getLogger("serve")


async def completions(http: web.Request) -> web.StreamResponse:
    return await _answered(http, Completion)


async def chat(http: web.Request) -> web.StreamResponse:
    return await _answered(http, Chat)


async def _answered(http: web.Request, kind: type[Completion | Chat]) -> web.StreamResponse:
    engine, metrics = http.app[ENGINE], http.app[METRICS]
    requests: list[Request] = []
    end, began = "left", time.perf_counter()
    try:  # however this ends, also if the client goes away, the pages are given back
        sent = kind.model_validate_json(await http.read())
        stream: Stream = asyncio.Queue()
        limit = getattr(sent, "max_completion_tokens", None) or sent.max_tokens
        requests = await engine.submit(sent.prompts, sent.n, limit, sent.temperature, sent.seed, sent.tops, stream)
        pieces = pieces_of(engine, requests, stream, sent.stops, lambda: metrics.first.observe(time.perf_counter() - began))
        response = await (streamed if sent.stream else whole)(http, sent, requests, pieces, engine.tokenizer.decode)
        end = "answered"
        return response
    except (ValueError, ValidationError) as error:
        end = "refused"
        return _error(told(error) if isinstance(error, ValidationError) else str(error), 400)
    except web.HTTPRequestEntityTooLarge:
        end = "refused"
        return _error(f"body: too long; accepted are up to {MOST_BYTES} bytes", 413)
    except BusyError as error:
        end = "busy"
        return _error(str(error), 429)
    except FailedError as error:
        end = "failed"
        return _error(str(error), 500)
    except (ConnectionResetError, asyncio.CancelledError) as error:
        LOG.info("%s: the client left after %d tokens", http.path, sum(len(request.answer) for request in requests))
        if isinstance(error, asyncio.CancelledError):
            raise
        return web.Response()
    finally:
        for request in requests:
            engine.cancel(request)
        metrics.requests.labels(http.path, end).inc()
        metrics.whole.observe(time.perf_counter() - began)
        metrics.prompt.inc(sum(len(request.prompt) for request in requests))
        metrics.shared.inc(sum(request.shared for request in requests))
        metrics.answered.inc(sum(len(request.answer) for request in requests))


def _error(message: str, status: int) -> web.Response:
    kinds = {429: "rate_limit_exceeded", 500: "server_error"}
    return web.json_response(wrong(message, kinds.get(status, "invalid_request_error")), status=status)


async def models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "strobe", "object": "model", "created": 0, "owned_by": "you"}]})


async def metrics(http: web.Request) -> web.Response:
    return web.Response(body=http.app[METRICS].text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def application(engine: Engine) -> web.Application:
    async def engine_runs(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(engine.run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    app = web.Application(client_max_size=MOST_BYTES)
    app[ENGINE], app[METRICS] = engine, Metrics(engine)
    app.cleanup_ctx.append(engine_runs)
    app.add_routes([web.post("/v1/completions", completions), web.post("/v1/chat/completions", chat)])
    app.add_routes([web.get("/v1/models", models), web.get("/metrics", metrics)])
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
    parser.add_argument("--waiting", type=int, default=1024, help="the most requests that wait for pages; more are refused")
    parser.add_argument("--cache", choices=DTYPES, default="int8", help="the dtype of keys and values")
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    print(f"loading {chosen.checkpoint}, and the tokenizer of its text", flush=True)
    try:
        model, tokenizer = load(chosen.checkpoint, chosen.text)
        pool = {"pages": chosen.pages, "page_size": chosen.page_size, "cache_dtype": DTYPES[chosen.cache]}
        engine = Engine(model.to(chosen.device), tokenizer, **pool, most_waiting=chosen.waiting)
        options = {"handler_cancellation": True, "access_log": None, "backlog": 1024}
        web.run_app(application(engine), host=chosen.host, port=chosen.port, **options)
    except (OSError, ValueError) as error:  # a wrong checkpoint, a port in use
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
