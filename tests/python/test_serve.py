"""examples/serve: texts do not depend on the load, a client that leaves frees pages, a full pool queues."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web

from strobe_tools.train import data
from strobe_tools.train.config import Config
from strobe_tools.train.model import GPT

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve"


@pytest.fixture(scope="module")
def serve():
    """The example's modules, by the names under which they import each other."""
    names = ("cache", "model", "engine", "server", "load")
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def trained():
    """A model whose weights are large enough that its texts do not repeat one token, and a tokenizer."""
    torch.manual_seed(0)
    config = Config(vocab_size=300, d_model=96, heads=3, d_ff=192, sequence=192, init_std=0.12, must_learn=False)
    tokenizer = data.train_tokenizer(["def f(x):\n    return x + 1\n" * 50, "for each of the words there is a number"], config.vocab_size)
    return GPT(config).eval(), tokenizer


PROMPTS = ["def f(", "for each", "x" * 70, "", "return the words " * 5, "ä€", "1 + 1", "number " * 9]
CALLS = [{"prompt": p, "max_tokens": 20 + 3 * n, "temperature": 0.9 * (n % 2), "seed": n} for n, p in enumerate(PROMPTS)]


@contextlib.asynccontextmanager
async def served(serve: Any, trained: Any, **settings: Any) -> AsyncIterator[tuple[Any, Any]]:
    """Yields (engine, client)."""
    engine = serve["engine"].Engine(*trained, **settings)
    runner = web.AppRunner(serve["server"].application(engine), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        yield engine, client
    await runner.cleanup()


async def emptied(engine: Any) -> None:
    while engine.pages.free < engine.pages.count or engine.running:
        await asyncio.sleep(0.005)


async def texts(serve: Any, client: Any, calls: list[dict[str, Any]], at_once: bool) -> list[str]:
    asked = [serve["load"].ask(client, call) for call in calls]
    answers = await asyncio.gather(*asked) if at_once else [await each for each in asked]
    return [answer.text for answer in answers]


@pytest.fixture(scope="module")
def alone(serve, trained):
    """The texts of requests that come one at a time."""

    async def run() -> list[str]:
        async with served(serve, trained) as (_, client):
            return await texts(serve, client, CALLS, at_once=False)

    found = asyncio.run(run())
    assert len(set(found)) == len(found)
    assert max(map(len, found)) > 20
    return found


@pytest.mark.parametrize(
    "settings", [{}, {"page_size": 3, "step_tokens": 10}, {"cache_dtype": torch.float32}, {"cache_dtype": torch.bfloat16}], ids=str
)
def test_texts_are_the_same_at_every_load(serve, trained, alone, settings):
    async def run() -> None:
        async with served(serve, trained, **settings) as (engine, client):
            expected = alone if "cache_dtype" not in settings else await texts(serve, client, CALLS, at_once=False)
            assert await texts(serve, client, CALLS, at_once=True) == expected
            assert await texts(serve, client, [*CALLS[::-1], *CALLS], at_once=True) == [*expected[::-1], *expected]
            assert engine.pages.free == engine.pages.count

    asyncio.run(run())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.int8, 0.05)], ids=str)
def test_the_bits_of_logits_are_the_same_at_every_load(serve, trained, dtype, tolerance):
    """The test compares the logits of a prompt that runs in pieces beside others with those of the whole prompt alone."""
    model, _ = trained
    config = model.config
    g = torch.Generator().manual_seed(3)
    prompts = [torch.randint(300, (n,), generator=g).tolist() for n in (50, 1, 33, 16, 7)]

    def logits(rows: list[int], cuts: list[int]) -> torch.Tensor:
        pages = serve["cache"].Pages(100, 4)
        cache = serve["cache"].Cache(config.layers, config.heads, config.head_dim, pages, dtype, torch.device("cpu"))
        owned = {row: pages.take(13) for row in rows}
        held = dict.fromkeys(rows, 0)
        last: dict[int, torch.Tensor] = {}
        for cut in cuts:
            pieces = {row: prompts[row][held[row] : held[row] + cut] for row in rows}
            pieces = {row: piece for row, piece in pieces.items() if piece}
            batch = serve["cache"].Batch([(owned[row], held[row], len(piece)) for row, piece in pieces.items()], torch.device("cpu"))
            found = serve["model"].step(model, cache, torch.tensor([token for piece in pieces.values() for token in piece]), batch)
            last |= zip(pieces, found, strict=True)
            held = {row: held[row] + len(pieces.get(row, [])) for row in rows}
        assert all(held[row] == len(prompts[row]) for row in rows)
        return torch.stack([last[row] for row in rows])

    whole = torch.cat([logits([row], [50]) for row in range(5)])
    with torch.no_grad():
        expected = torch.stack([model(torch.tensor([prompt]))[0, -1] for prompt in prompts])
    torch.testing.assert_close(whole, expected, rtol=0, atol=tolerance)
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        for cuts in ([50], [7] * 8, [1] * 50):
            assert torch.equal(logits(order, cuts), whole[order])


def test_a_client_that_goes_away_frees_its_pages(serve, trained, alone):
    async def run() -> None:
        async with served(serve, trained, pages=12, page_size=16) as (engine, client):
            long = {"prompt": "x" * 40, "max_tokens": 100}
            for lines in (0, 3):  # disconnects before the first token, and in the midst of an answer
                response = await client.post("/generate", json=long)
                for _ in range(lines):
                    await response.content.readline()
                assert engine.pages.free < 12
                response.close()
                await asyncio.wait_for(emptied(engine), 20)
            waits = [asyncio.create_task(serve["load"].ask(client, long)) for _ in range(4)]  # more requests than there is room for
            while not engine.queue:
                await asyncio.sleep(0.001)
            waits[-1].cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            assert len(waits[0].result().came) == 100
            assert await texts(serve, client, CALLS, at_once=True) == alone

    asyncio.run(run())


def test_a_full_pool_queues_and_corrupts_nothing(serve, trained, alone):
    async def run() -> None:
        pages = 24  # pages of 4 tokens: room for one or two of the requests
        async with served(serve, trained, pages=pages, page_size=4) as (engine, client):
            seen = []
            admit = engine._admit

            def watched() -> None:
                admit()
                owned = [page for request in engine.running for page in request.pages]
                assert len(set(owned)) == len(owned) == pages - engine.pages.free  # each page has one owner, or none
                seen.append((len(engine.running), len(engine.queue)))

            engine._admit = watched
            assert await texts(serve, client, CALLS * 2, at_once=True) == alone * 2
            assert max(waiting for _, waiting in seen) > len(CALLS)
            assert max(running for running, _ in seen) < len(CALLS)
            health = await (await client.get("/health")).json()
            assert health == {"pages": pages, "free": pages, "running": 0, "waiting": 0}

    asyncio.run(run())


def test_a_step_that_fails_is_told_and_the_server_goes_on(serve, trained, alone, monkeypatch):
    async def run() -> None:
        async with served(serve, trained) as (engine, client):
            with monkeypatch.context() as broken:
                broken.setattr(serve["engine"], "step", lambda *_: 1 / 0)
                with pytest.raises(RuntimeError, match="division by zero"):
                    await serve["load"].ask(client, CALLS[0])
            assert engine.pages.free == engine.pages.count
            assert await texts(serve, client, CALLS[:2], at_once=True) == alone[:2]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "body: Expecting"),
        (b"", "body: Expecting value"),
        (b"\xff", "body: 'utf-8' codec can't decode"),
        (b"[" * 100_000, "body: "),
        (b'{"prompt": "\\ud800"}', "prompt: '\\ud800' in it, half of a character; accepted is a text"),
        (b"[]", "body: accepted is a JSON object with prompt, max_tokens, temperature, seed"),
        (
            b'{"promt": "x"}',
            "promt: no such field; accepted is a JSON object with prompt, max_tokens, temperature, seed; did you mean prompt?",
        ),
        (b'{"prompt": "x", "\\n": 1}', r"\n: no such field; accepted is"),
        (b'{"prompt": 3}', "prompt: 3; accepted is a text"),
        (b'{"max_tokens": 0}', "max_tokens: 0; accepted are 1 to 192"),
        (b'{"max_tokens": true}', "max_tokens: True; accepted is a number"),
        (b'{"temperature": -1}', "temperature: -1; accepted are 0"),
        (b'{"temperature": NaN}', "temperature: nan; accepted are 0"),
        (b'{"seed": 9223372036854775808}', "seed: 9223372036854775808; accepted are integers of 64 bits"),
        (json.dumps({"prompt": "q" * 190}).encode(), "prompt: 191 tokens, and 32 to come; accepted are 192 together, the model's longest"),
        (json.dumps({"prompt": "q" * 90}).encode(), "prompt: it needs 31 pages with its answer; accepted are 30, all that there are"),
    ],
)
def test_what_cannot_be_answered_is_refused(serve, trained, body, message):
    async def run() -> None:
        async with served(serve, trained, pages=30, page_size=4) as (engine, client):
            response = await client.post("/generate", data=body)
            assert response.status == 400
            error = (await response.json())["error"]
            assert error.startswith(message)
            assert "\n" not in error
            assert not engine.queue

    asyncio.run(run())


@pytest.mark.parametrize("content", [None, b"", b"no checkpoint"])
def test_a_wrong_checkpoint_is_told_in_a_line(tmp_path, content):
    path = tmp_path / "attention.pt"
    if content is not None:
        path.write_bytes(content)
    done = subprocess.run([sys.executable, EXAMPLE / "server.py", path], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == f"loading {path}, and the tokenizer of its text\n"
    assert done.stderr.startswith(f"server.py: checkpoint: {path} ")
    assert done.stderr.count("\n") == 1


def test_an_unknown_charset_is_no_error_of_the_server(serve, trained):
    async def run() -> None:
        async with served(serve, trained) as (_, client):
            body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
            response = await client.post("/generate", data=body, headers={"Content-Type": "application/json; charset=none"})
            assert response.status == 200

    asyncio.run(run())


@pytest.mark.parametrize(("chosen", "host"), [([], "127.0.0.1"), (["--host", "0.0.0.0"], "0.0.0.0")])
def test_it_listens_where_it_is_told(serve, trained, monkeypatch, chosen, host):
    listens = []
    monkeypatch.setattr(serve["server"], "load", lambda *_: trained)
    monkeypatch.setattr(serve["server"].web, "run_app", lambda *_, **options: listens.append(options["host"]))
    monkeypatch.setattr(sys, "argv", ["server.py", "attention.pt", *chosen])
    serve["server"].main()
    assert listens == [host]


def test_the_load_is_measured_and_drawn(serve, trained, tmp_path):
    async def run() -> list[Any]:
        async with served(serve, trained) as (_, client):
            return await serve["load"].measure(str(client._base_url), [1, 3], 6, 4)

    rows = asyncio.run(run())
    assert [row.clients for row in rows] == [1, 3]
    assert all(row.tokens_per_second > 0 and 0 < row.first_p50 <= row.first_p95 for row in rows)
    serve["load"].draw(rows, tmp_path / "load", "a title")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "load.csv").read_text().splitlines()) == 3
    assert "a title" in (tmp_path / "load.svg").read_text()
