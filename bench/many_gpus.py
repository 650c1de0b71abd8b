"""Simulates strobe.distributed.attention() on 64 to 4,096 GPUs, from the rates of one GPU in bench/results and assumed rates of links:

python bench/many_gpus.py [--across 40] [--inside 308] [--parts 0.92]

Causal attention of 32/8 heads, d 128, bf16, Sharding.zigzag, nodes of 8 GPUs. The simulation follows the code of each method step by step:
which transfer a call waits for, and which runs beside it. bench/many_gpus.md has its tables and its assumptions."""

from __future__ import annotations

import argparse
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

HEADS, HEADS_KV, D, NODE, SMS = 32, 8, 128, 8, 132
BF16, FLOAT32 = 2, 4
TILE = 128  # queries that a thread block takes
GROUPS = 4  # the most groups of key heads: _gather.py
KEY = 2 * D  # numbers of K and V per token and key head
WORLDS = (64, 256, 1024, 4096)
RESULTS = Path(__file__).parent / "results"


class Machine(NamedTuple):
    inside: float  # bytes a second that a rank receives from its node
    across: float  # bytes a second that it receives from other nodes
    start: float  # seconds of a transfer before the first byte
    message: float  # seconds for each rank that a rank sends to
    parts: float  # speed of a call on a part of a problem, relative to a call on a whole one

    def exchange(self, world: int, bytes_: float) -> float:
        """Seconds in which each rank receives this many bytes, an equal share from each other rank."""
        others, neighbours = max(world - 1, 1), min(world, NODE) - 1
        elsewhere = others - neighbours
        return (
            self.start + self.message * others + max(bytes_ * neighbours / others / self.inside, bytes_ * elsewhere / others / self.across)
        )

    def next_rank(self, world: int, bytes_: float) -> float:
        return self.start + bytes_ / (self.across if world > NODE else self.inside)


class Call(NamedTuple):
    seqlen: int
    world: int
    backward: bool


def rates(direction: str) -> tuple[list[int], list[float]]:
    """Lengths, and for each the FLOP/s of one sequence's causal attention of d 128."""
    rows = json.loads((RESULTS / f"h200-{direction}.json").read_text())["rows"]
    found = sorted((row["s"], row["strobe"] * 1e12) for row in rows if row["set"] == "core36" and row["d"] == D and row["causal"])
    return [s for s, _ in found], [rate for _, rate in found]


MEASURED = {backward: rates("backward" if backward else "forward") for backward in (False, True)}


def flops(call: Call) -> float:
    return 4 * HEADS * D * call.seqlen**2 / 2 * (2.5 if call.backward else 1)


def alone(call: Call) -> float:
    """Seconds on one GPU, at the rate of the longest sequence that was measured."""
    lengths, measured = MEASURED[call.backward]
    return flops(call) / measured[min(bisect_left(lengths, call.seqlen), len(lengths) - 1)]


def compute(call: Call, machine: Machine, share: float, heads: int, queries: int) -> float:
    """Seconds of a call of the library on a share of all products: thread blocks take whole tiles, one multiprocessor each."""
    tiles = math.ceil(queries / TILE) * heads
    busy = tiles / (SMS * math.ceil(tiles / SMS))
    return alone(call) * share / machine.parts / busy


def pipelined(groups: int, transfer: float, call: float, home: float) -> float:
    """The seconds that groups of heads take, one after another. Each call waits for its keys, which are sent when the previous call begins,
    and its gradients are sent back afterwards. The link carries one transfer at a time, in the order of their starts."""
    link = arrived = transfer
    ended = 0.0
    for group in range(groups):
        began = max(ended, arrived)
        if group + 1 < groups:
            link = arrived = max(link, began) + transfer
        ended = began + call
        if home:
            link = max(link, ended) + home
    return max(ended, link)


def gather(call: Call, machine: Machine) -> float:
    per_group = call.seqlen * (1 - 1 / call.world) * HEADS_KV / GROUPS * KEY
    transfer = machine.exchange(call.world, per_group * BF16)
    each = compute(call, machine, 1 / call.world / GROUPS, HEADS // GROUPS, call.seqlen // call.world)
    # Under a causal mask three quarters of the ranks see a key.
    home = machine.exchange(call.world, per_group * FLOAT32 * 3 / 4) if call.backward else 0.0
    return pipelined(GROUPS, transfer, each, home)


def ring(call: Call, machine: Machine) -> float:
    """All ranks take each turn together. During a turn's products, keys are sent, and the gradients of the previous turn's keys."""
    keys = call.seqlen / call.world * HEADS_KV * KEY
    each = compute(call, machine, 1 / call.world**2, HEADS, call.seqlen // call.world)
    transfer = machine.next_rank(call.world, keys * BF16)
    home = machine.next_rank(call.world, keys * FLOAT32) if call.backward else 0.0
    return max(each, transfer) + (call.world - 2) * max(each, transfer + home) + max(each, home) + home


def levels(call: Call, machine: Machine) -> float:
    """Heads are exchanged inside a node, then each rank gathers its key head across nodes: one transfer, then one call."""
    columns = (2 * HEADS + 2 * HEADS_KV) * D * BF16
    inside = machine.exchange(NODE, (NODE - 1) / NODE * call.seqlen / call.world * columns)
    nodes = call.world // NODE
    keys = call.seqlen * (1 - 1 / nodes) * HEADS_KV / NODE * KEY

    def across(bytes_: float) -> float:
        return machine.start + machine.message * (nodes - 1) + bytes_ / machine.across

    home = across(keys * FLOAT32 * 3 / 4) if call.backward else 0.0
    queries = call.seqlen // nodes
    return 2 * inside + across(keys * BF16) + compute(call, machine, 1 / call.world, HEADS // NODE, queries) + home


METHODS: dict[str, Callable[[Call, Machine], float]] = {"gather": gather, "ring": ring, "levels": levels}


def table(machine: Machine, seqlen: Callable[[int], int], backward: bool) -> Iterator[str]:
    yield f"| GPUs | tokens | {' | '.join(METHODS)} |"
    yield "|---" * (2 + len(METHODS)) + "|"
    for world in WORLDS:
        cells = []
        for method in METHODS.values():
            both = [Call(seqlen(world), world, each) for each in ((False, True) if backward else (False,))]
            took = sum(method(call, machine) for call in both)
            cells.append(f"{sum(map(alone, both)) / world / took:.2f} ({took * 1e3:.3g} ms)")
        yield f"| {world:,} | {_tokens(seqlen(world))} | {' | '.join(cells)} |"


def _tokens(n: int) -> str:
    return f"{n // 2**20}M" if n >= 2**20 else f"{n // 2**10}k"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inside", type=float, default=308, help="GB/s a rank inside a node, as measured")
    parser.add_argument("--across", type=float, default=40, help="GB/s a rank between nodes: 0.8 of a port of 400 Gb/s")
    parser.add_argument("--start", type=float, default=30, help="microseconds of a transfer before the first byte")
    parser.add_argument("--message", type=float, default=0.5, help="microseconds for each rank that a transfer sends to")
    parser.add_argument("--parts", type=float, default=0.92, help="speed of calls on parts, of that of whole ones")
    asked = parser.parse_args()
    machine = Machine(asked.inside * 1e9, asked.across * 1e9, asked.start * 1e-6, asked.message * 1e-6, asked.parts)
    for words, seqlen in (("4M tokens", lambda _: 2**22), ("16k tokens on each GPU", lambda world: 2**14 * world)):
        for backward in (False, True):
            print(f"\n{words}, {'forward and backward' if backward else 'forward'}: E = T1 / (W TW)\n")
            print(*table(machine, seqlen, backward), sep="\n")


if __name__ == "__main__":
    main()
