"""Lets more and more clients ask a running server at once, and draws the rates and times:

python examples/serve/load.py http://localhost:8000 --out load

Each client sends its next request when its last one is answered. The same requests are sent at every load, and their texts must be the
same.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

OPENINGS = ["import os\n", "def main(", "class Node:\n    ", '"""Returns ', "    for i in ", "from typing import ", "# The ", "    return "]


@dataclass(frozen=True)
class Row:
    """The results at one load. Times are in milliseconds: until the first token, and between two tokens."""

    clients: int
    tokens_per_second: float
    first_p50: float
    first_p95: float
    between_p50: float
    between_p95: float


@dataclass(frozen=True)
class Answer:
    text: str
    sent: float
    came: tuple[float, ...]  # when each token came


def calls(count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Requests with different prompts, of different lengths, and different seeds."""
    return [
        {"prompt": OPENINGS[n % len(OPENINGS)] * (1 + n % 5), "max_tokens": max_tokens, "temperature": 0.8, "seed": n} for n in range(count)
    ]


async def ask(session: aiohttp.ClientSession, call: dict[str, Any]) -> Answer:
    sent, texts, came = time.perf_counter(), [], []
    async with session.post("/v1/completions", json=call | {"stream": True}) as response:
        async for line in response.content:
            if not line.startswith((b"data: {", b"{")):
                continue
            found = json.loads(line.removeprefix(b"data: "))
            if "error" in found:
                raise RuntimeError(found["error"]["message"])
            (choice,) = found["choices"]
            texts.append(choice["text"])
            if not choice["finish_reason"]:
                came.append(time.perf_counter())
    return Answer("".join(texts), sent, tuple(came))


async def measure(url: str, clients: Sequence[int], requests: int, max_tokens: int, rounds: int = 1) -> list[Row]:
    """A row for each number of clients, from the round with the most tokens per second. Raises RuntimeError if a text differs between two
    loads."""
    texts: dict[int, str] = {}
    rows: dict[int, Row] = {}
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None)) as session:
        await ask(session, calls(1, 2)[0])  # makes what is made at first use
        for count in [*clients] * rounds:
            left = iter(enumerate(calls(requests, max_tokens)))
            answers: list[Answer] = []

            async def client(left: Any = left, answers: list[Answer] = answers) -> None:
                for number, call in left:
                    answers.append(answer := await ask(session, call))
                    if texts.setdefault(number, answer.text) != answer.text:
                        raise RuntimeError(f"request {number} has another text at this load")

            began = time.perf_counter()
            await asyncio.gather(*(client() for _ in range(count)))
            seconds = time.perf_counter() - began
            first = [1e3 * (a.came[0] - a.sent) for a in answers]
            between = [1e3 * (later - sooner) for a in answers for sooner, later in zip(a.came, a.came[1:], strict=False)]
            rate = sum(len(a.came) for a in answers) / seconds
            if count not in rows or rate > rows[count].tokens_per_second:
                rows[count] = Row(count, rate, *(share(times, p) for times in (first, between) for p in (50, 95)))
            print(f"{count:>4} clients: {rate:,.0f} tokens/s", flush=True)
    return [rows[count] for count in clients]


def share(times: list[float], percent: int) -> float:
    """The percentile; 0 if there are no times."""
    return statistics.quantiles(times, n=100, method="inclusive")[percent - 1] if len(times) > 1 else sum(times)


def draw(rows: list[Row], path: Path, title: str) -> None:
    """Writes PATH.csv, PATH.png and PATH.svg."""
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, asdict(rows[0]))
        writer.writeheader()
        writer.writerows({name: round(x, 3) for name, x in asdict(row).items()} for row in rows)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=9)
    speed, latency = figure.subplots(1, 2)
    clients = [row.clients for row in rows]
    speed.plot(clients, [row.tokens_per_second for row in rows], color="#D55E00", marker="o")
    speed.set(ylabel="tokens per second, of all clients", ylim=(0, None))
    for name, color, marker, words in (
        ("first", "#0072B2", "s", "until the first token"),
        ("between", "#009E73", "^", "between two tokens"),
    ):
        for percent, line in ((50, "-"), (95, "--")):
            times = [getattr(row, f"{name}_p{percent}") for row in rows]
            latency.plot(clients, times, line, color=color, marker=marker, label=f"{words}, {percent}%")
    latency.set(ylabel="milliseconds", yscale="log")
    latency.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    latency.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    latency.legend(frameon=False, fontsize=8, handlelength=4)
    for axes in (speed, latency):
        axes.set_xscale("log", base=2)
        axes.set_xticks(clients, map(str, clients))
        axes.minorticks_off()
        axes.set_xlabel("clients at once")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path.with_suffix(".png"), dpi=120)
    figure.savefig(path.with_suffix(".svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--out", type=Path, default=Path("load"), help="the picture's name, without a suffix")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--requests", type=int, default=128, help="how many at each load")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=1, help="of which the best counts, on a machine with other work")
    parser.add_argument("--title", default="")
    chosen = parser.parse_args()
    draw(asyncio.run(measure(chosen.url, chosen.clients, chosen.requests, chosen.max_tokens, chosen.rounds)), chosen.out, chosen.title)


if __name__ == "__main__":
    main()
