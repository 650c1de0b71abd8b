"""examples/serve: texts do not depend on the load, a client that leaves frees pages, a full pool queues."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
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
    names = ("work", "cache", "model", "engine", "protocol", "answers", "metrics", "server", "load")
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
    runner = web.AppRunner(serve["server"].application(engine), handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    unlimited = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=unlimited) as client:
        yield engine, client
    await runner.cleanup()


async def emptied(engine: Any) -> None:
    while engine.pages.free < engine.pages.count or engine.running:
        await asyncio.sleep(0.005)


async def metrics(client: Any) -> dict[str, float]:
    lines = (await (await client.get("/metrics")).text()).splitlines()
    return {name: float(x) for name, x in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


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
        owned = {row: pages.take([], 52)[0] for row in rows}
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
            long = {"prompt": "x" * 40, "max_tokens": 100, "temperature": 0}
            for lines in (0, 3):  # disconnects before the first token, and in the midst of an answer
                response = await client.post("/v1/completions", json=long | {"stream": True})
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
                assert len(set(owned)) == pages - engine.pages.free  # no page is lost, and none of a request is free
                assert all(len(set(request.pages)) == len(request.pages) for request in engine.running)
                seen.append((len(engine.running), len(engine.queue)))

            engine._admit = watched
            assert await texts(serve, client, CALLS * 2, at_once=True) == alone * 2
            assert max(waiting for _, waiting in seen) > len(CALLS)
            assert max(running for running, _ in seen) < len(CALLS)
            told = await metrics(client)
            names = ("serve_pages", "serve_free_pages", "serve_running", "serve_waiting")
            assert [told[name] for name in names] == [pages, pages, 0, 0]

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


FIELDS = "model, user, temperature, seed, n, stop, stream, stream_options, "
REFUSED = [
    (b"{", "body: Invalid JSON: EOF"),
    (b"", "body: Invalid JSON: EOF"),
    (b"\xff", "body: Invalid JSON: "),
    (b"[" * 100_000, "body: Invalid JSON: recursion limit"),
    (b'{"prompt": "\\ud800"}', "body: Invalid JSON: "),
    (b"[]", "body: []; Input should be an object"),
    (b"{}", "prompt: Field required"),
    (b'{"prompt": "x", "promt": "x"}', f"promt: no such field; accepted are {FIELDS}prompt, max_tokens, logprobs; did you mean prompt?"),
    (b'{"prompt": "x", "\\n": 1}', r"\n: no such field; accepted are"),
    (b'{"prompt": 3}', "prompt: 3; Input should be a valid string"),
    (b'{"prompt": "x", "max_tokens": 0}', "max_tokens: 0; Input should be greater than or equal to 1"),
    (b'{"prompt": "x", "max_tokens": true}', "max_tokens: True; Input should be a valid integer"),
    (b'{"prompt": "x", "max_tokens": 5.5}', "max_tokens: 5.5; Input should be a valid integer"),
    (b'{"prompt": "x", "temperature": -1}', "temperature: -1; Input should be greater than or equal to 0"),
    (b'{"prompt": "x", "temperature": NaN}', "temperature: nan; Input should be"),
    (b'{"prompt": "x", "seed": 9223372036854775808}', "seed: 9223372036854775808; Input should be less than 9223372036854775808"),
    (b'{"prompt": "x", "stop": [""]}', "stop.0: ''; String should have at least 1 character"),
    (json.dumps({"prompt": "x", "stop": "a" * 257}).encode(), "stop: 'aaa"),
    (json.dumps({"prompt": "x", "model": "m" * 257}).encode(), "model: 'mmm"),
    (json.dumps({"prompt": "x", "user": "u" * 257}).encode(), "user: 'uuu"),
    (json.dumps({"prompt": "ab" * 9000}).encode(), "prompt: 18000 bytes; accepted are up to "),
    (b'{"prompt": "x", "n": 17}', "n: 17; Input should be less than or equal to 16"),
    (
        json.dumps({"prompt": "q" * 190, "max_tokens": 32}).encode(),
        "max_tokens: 32 after a prompt of 191; accepted are 192 together, the model's longest",
    ),
    (
        json.dumps({"prompt": ["x", "q" * 90], "max_tokens": 32}).encode(),
        "prompt: it needs 31 pages with its answer; accepted are 30, all that there are",
    ),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_what_cannot_be_answered_is_refused(serve, trained, body, message):
    async def run() -> None:
        async with served(serve, trained, pages=30, page_size=4) as (engine, client):
            response = await client.post("/v1/completions", data=body)
            assert response.status == 400
            error = (await response.json())["error"]
            assert error["message"].startswith(message)
            assert error["type"] == "invalid_request_error"
            assert "\n" not in error["message"]
            await asyncio.wait_for(emptied(engine), 20)
            assert not engine.queue

    asyncio.run(run())


def test_a_wrong_field_of_a_message_is_named(serve, trained):
    async def run() -> list[str]:
        async with served(serve, trained) as (_, client):
            found = []
            for messages in (
                [],
                [{"role": "user", "content": ""}] * 1025,
                [{"role": "user", "content": 3}],
                [{"role": "user", "content": "x", "name": "y"}],
            ):
                response = await client.post("/v1/chat/completions", json={"messages": messages})
                found.append((await response.json())["error"]["message"])
            return found

    none, many, number, name = asyncio.run(run())
    assert "List should have at most 1024 items" in many
    assert none.startswith("messages: []; List should have at least 1 item")
    assert number.startswith("messages.0.content: 3; Input should be a valid string")
    assert name.startswith("messages.0.name: no such field; accepted are role, content")


def test_a_wrong_field_of_many_is_told_at_once(serve):
    """Reading and answering take time in proportion to the first wrong item, not to all."""
    protocol = serve["protocol"]
    for kind, body in ((protocol.Chat, {"messages": [1] * 1000}), (protocol.Completion, {"prompt": [1] * 60, "stop": [1] * 4})):
        with pytest.raises(protocol.ValidationError) as found:
            kind.model_validate(body)
        assert found.value.error_count() <= 4


def test_a_stop_costs_no_more_than_the_text(serve):
    """What may be the beginning of a stop is looked for in the text that there is, and not in more."""
    compared = 0

    class Stop(str):
        __slots__ = ()

        def __getitem__(self, part: Any) -> str:
            nonlocal compared
            compared += 1
            return super().__getitem__(part)

    text = serve["protocol"].Text(lambda tokens: "a" * len(tokens), [Stop("a" * 200 + "b")])
    assert "".join(text.add(serve["work"].Token(0)) for _ in range(5)) == ""
    assert compared == 1 + 2 + 3 + 4 + 5
    assert text.rest() == "aaaaa"


def test_too_long_a_body_is_refused(serve, trained):
    async def run() -> None:
        async with served(serve, trained) as (_, client):
            response = await client.post("/v1/completions", data=b" " * (2**18 + 1))
            assert response.status == 413
            error = (await response.json())["error"]
            assert (error["message"], error["param"]) == ("body: too long; accepted are up to 262144 bytes", "body")
            assert (await metrics(client))['serve_requests_total{end="refused",path="/v1/completions"}'] == 1

    asyncio.run(run())


def test_no_more_requests_wait_than_may(serve, trained, alone):
    """The others are refused with 429, those whose prompts are being encoded included; then the server answers again."""

    async def run() -> None:
        async with served(serve, trained, pages=12, most_waiting=6) as (engine, client):
            calls = [{"prompt": "x" * 40, "max_tokens": 100, "n": 2, "seed": seed} for seed in range(12)]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=call) for call in calls))
            codes = [answer.status for answer in answers]
            assert set(codes) == {200, 429}
            error = (await answers[codes.index(429)].json())["error"]
            assert error["type"] == "rate_limit_exceeded"
            assert error["message"].endswith("requests wait; accepted are 6, try again later")
            assert (await client.post("/v1/completions", json=calls[0] | {"n": 7})).status == 400
            await asyncio.wait_for(emptied(engine), 20)
            told = await metrics(client)
            assert told['serve_requests_total{end="busy",path="/v1/completions"}'] == codes.count(429)
            assert await texts(serve, client, CALLS[:3], at_once=True) == alone[:3]

    asyncio.run(run())


def test_a_prompt_is_encoded_once(serve, trained):
    """And not in the thread of the event loop."""
    encoded = []

    async def run() -> None:
        async with served(serve, trained) as (engine, client):
            tokenizer = engine.tokenizer

            class Counted:
                def encode_batch(self, prompts: list[str]) -> Any:
                    encoded.append((prompts, threading.current_thread() is threading.main_thread()))
                    return tokenizer.encode_batch(prompts)

                def __getattr__(self, name: str) -> Any:
                    return getattr(tokenizer, name)

            engine.tokenizer = Counted()
            response = await client.post("/v1/completions", json={"prompt": ["x", "y"], "max_tokens": 2, "n": 4})
            assert len((await response.json())["choices"]) == 8

    asyncio.run(run())
    assert encoded == [(["x", "y"], False)]


def test_the_client_of_openai(serve, trained):
    """Texts, streamed and whole, are those of the same seed; logprobs, stops and several choices are what its types expect."""

    async def run() -> None:
        async with (
            served(serve, trained) as (_, plain),
            openai.AsyncOpenAI(base_url=str(plain._base_url / "v1"), api_key="none") as client,
        ):
            assert [model.id async for model in client.models.list()] == ["strobe"]
            asked = {"model": "strobe", "prompt": "def f(", "max_tokens": 24, "seed": 3, "temperature": 0.9}
            whole = await client.completions.create(**asked, n=2, logprobs=3)
            assert whole.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in whole.choices)
            for choice in whole.choices:
                assert choice.finish_reason in ("length", "stop")
                assert "".join(choice.logprobs.tokens).startswith(choice.text[:5])
                assert all(len(top) <= 3 and max(top.values()) <= 0 for top in choice.logprobs.top_logprobs)
                assert all(math.isfinite(x) and x <= 0 for x in choice.logprobs.token_logprobs)
            assert whole.choices[0].text != whole.choices[1].text  # another seed
            options = {"stream": True, "stream_options": {"include_usage": True}}
            texts, usage = ["", ""], None
            async for event in await client.completions.create(**asked, n=2, **options):
                usage = event.usage or usage
                for choice in event.choices:
                    texts[choice.index] += choice.text
            assert texts == [choice.text for choice in whole.choices]
            assert usage.total_tokens == whole.usage.total_tokens
            text = whole.choices[0].text
            for stop in (text[4:7], [text[9:12], text[4:7]]):
                for is_streamed in (False, True):
                    found, reason = "", None
                    answer = await client.completions.create(**asked, stop=stop, stream=is_streamed)
                    events = [event async for event in answer] if is_streamed else [answer]
                    for event in events:
                        found, reason = found + event.choices[0].text, event.choices[0].finish_reason or reason
                    assert (found, reason) == (text[: text.index(text[4:7])], "stop")
            with pytest.raises(openai.BadRequestError, match="top_p: no such field"):
                await client.completions.create(**asked, top_p=0.5)

    asyncio.run(run())


def test_the_chat_client_of_openai(serve, trained):
    async def run() -> None:
        async with (
            served(serve, trained) as (_, plain),
            openai.AsyncOpenAI(base_url=str(plain._base_url / "v1"), api_key="none") as client,
        ):
            asked = {
                "model": "strobe",
                "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "for each"}],
                "seed": 1,
            }
            whole = await client.chat.completions.create(**asked, max_completion_tokens=12, logprobs=True, top_logprobs=2)
            (choice,) = whole.choices
            assert choice.message.role == "assistant"
            assert len(choice.logprobs.content) == whole.usage.completion_tokens == 12
            assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
            streamed = await client.chat.completions.create(**asked, max_completion_tokens=12, stream=True)
            assert "".join([event.choices[0].delta.content async for event in streamed]) == choice.message.content

    asyncio.run(run())


def test_requests_that_begin_alike_share_pages(serve, trained):
    """Texts are the same with keys that others have computed. A page that is taken for other tokens is shared no more."""
    call = {"prompt": "for each of the words " * 3, "max_tokens": 20, "temperature": 0.9, "seed": 5}

    async def run() -> None:
        async with served(serve, trained, pages=30, page_size=4) as (engine, client):
            first = await serve["load"].ask(client, call)
            assert (await metrics(client))["serve_shared_tokens_total"] == 0
            again = await serve["load"].ask(client, call)
            shared = (await metrics(client))["serve_shared_tokens_total"]
            tokens = 1 + len(engine.tokenizer.encode(call["prompt"]).ids)
            assert shared == (tokens - 1) // 4 * 4 > 0
            assert again.text == first.text
            longer = call | {"prompt": call["prompt"] + first.text}  # the answer's pages are shared, too
            await serve["load"].ask(client, longer)
            assert (await metrics(client))["serve_shared_tokens_total"] >= 2 * shared
            for number in range(6):  # they need all pages
                await serve["load"].ask(client, {"prompt": f"{number}" * 60, "max_tokens": 40})
            before = (await metrics(client))["serve_shared_tokens_total"]
            assert (await serve["load"].ask(client, call)).text == first.text
            assert (await metrics(client))["serve_shared_tokens_total"] == before
            assert engine.pages.free == 30

    asyncio.run(run())


def test_clients_that_leave_are_a_line_each(serve, trained, caplog):
    async def run() -> None:
        async with served(serve, trained) as (engine, client):
            call = {"prompt": "x" * 20, "max_tokens": 60, "temperature": 0.5}

            async def leaves(number: int) -> None:
                response = await client.post("/v1/completions", json=call | {"stream": True, "seed": number})
                await response.content.readline()
                response.close()

            stays = [serve["load"].ask(client, call | {"seed": number}) for number in range(30)]
            await asyncio.gather(*stays, *(leaves(number) for number in range(30)))
            await asyncio.wait_for(emptied(engine), 20)
            told = await metrics(client)
            assert told['serve_requests_total{end="answered",path="/v1/completions"}'] == 30
            assert told['serve_requests_total{end="left",path="/v1/completions"}'] == 30

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    lines = [record for record in caplog.records if record.name != "asyncio"]
    assert len([record for record in lines if "the client left after" in record.getMessage()]) == len(lines) == 30
    assert not any(record.exc_info for record in caplog.records)


def test_a_thousand_connections(serve, trained):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096) if hard > 0 else 4096, hard))  # both ends are in this process

    async def run() -> None:
        async with served(serve, trained, pages=1200) as (engine, client):
            answers = await asyncio.gather(*(serve["load"].ask(client, {"prompt": "x", "max_tokens": 2, "seed": n}) for n in range(1000)))
            assert all(1 <= len(answer.came) <= 2 for answer in answers)
            assert engine.pages.free == 1200

    try:
        asyncio.run(run())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_port_in_use_is_told_in_a_line(serve, trained, monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(serve["server"], "load", lambda *_: trained)
        monkeypatch.setattr(sys, "argv", ["server.py", "attention.pt", "--port", str(port)])
        with pytest.raises(SystemExit) as ended:
            serve["server"].main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("server.py: ")
    assert f"{port}" in said
    assert said.count("\n") == 1


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
            response = await client.post("/v1/completions", data=body, headers={"Content-Type": "application/json; charset=none"})
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
