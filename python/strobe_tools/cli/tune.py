"""``strobe tune``: measures tiles on the GPU at hand and keeps the fastest in a table that the engines read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table

import strobe
from strobe import _tuning
from strobe._abi import BACKWARD, FORWARD
from strobe._options import MAX_HEAD_DIM, MAX_HEAD_DIM_V
from strobe._parse import parse
from strobe_tools.requirements import require
from strobe_tools.timing import medians_on_gpu
from strobe_tools.values import known

if TYPE_CHECKING:
    from torch import Tensor

# Requested tiles; an engine rounds each to a tile that it has.
TILES_Q = (16, 32, 64, 128, 192, 256)
TILES_K = (16, 32, 48, 64, 80, 96, 112, 128, 160, 176, 256)
# B, H, S, D
SHAPES = tuple(f"{max(1, 16384 // seqlen)},{2048 // dim},{seqlen},{dim}" for dim in (64, 128, 256) for seqlen in (512, 1024, 4096, 16384))
ENGINES = ("cuda-sm90", "cuda-mma", "cuda-tf32", "cuda-simt")
DTYPES = ("float32", "float16", "bfloat16", "float64")

Tile = tuple[int, int]


class Shape(NamedTuple):
    batch: int
    heads: int
    heads_kv: int
    queries: int
    keys: int
    head_dim: int
    head_dim_v: int

    @classmethod
    def parse(cls, written: str) -> Shape:
        """The shape written as B,H,S,D or B,H,Hkv,Sq,Sk,D,Dv."""
        sizes = [int(size[:99]) if size.strip().isdecimal() else 0 for size in written.split(",")]
        if len(sizes) == 4:
            batch, heads, seqlen, dim = sizes
            sizes = [batch, heads, heads, seqlen, seqlen, dim, dim]
        good = len(sizes) == 7 and min(sizes) >= 1 and max(sizes) < 2**31 and sizes[1] % sizes[2] == 0
        if not good or sizes[5] > MAX_HEAD_DIM or sizes[6] > MAX_HEAD_DIM_V:
            accepted = (
                "B,H,S,D or B,H,Hkv,Sq,Sk,D,Dv, whole numbers from 1 below 2^31, Hkv a divisor of H, "
                f"D up to {MAX_HEAD_DIM}, Dv up to {MAX_HEAD_DIM_V}"
            )
            raise click.BadParameter(f"{written!r}; accepted is {accepted}", param_hint="--shape")
        return cls(*sizes)


class Case(NamedTuple):
    """The calls of one engine, in one direction, for which one tile is sought."""

    engine: str
    shape: Shape
    dtype: str
    causal: bool
    backward: bool
    deterministic: bool

    def __str__(self) -> str:
        s = self.shape
        heads = f"{s.heads}" if s.heads == s.heads_kv else f"{s.heads}/{s.heads_kv}"
        lengths = f"{s.queries}" if s.queries == s.keys else f"{s.queries}/{s.keys}"
        dims = f"{s.head_dim}" if s.head_dim == s.head_dim_v else f"{s.head_dim}/{s.head_dim_v}"
        flags = "".join(f" {name}" for name, on in (("causal", self.causal), ("deterministic", self.deterministic)) if on)
        return f"{self.engine} {self.dtype} {s.batch} x {heads} x {lengths} x {dims}{flags} {'backward' if self.backward else 'forward'}"

    def key(self) -> dict[str, Any]:
        s = self.shape
        return {
            "engine": self.engine,
            "direction": "backward" if self.backward else "forward",
            "dtype": self.dtype,
            "head_dim": s.head_dim,
            "head_dim_v": s.head_dim_v,
            "group": s.heads // s.heads_kv,
            "queries": s.queries,
            "keys": s.keys,
            "heads": s.batch * s.heads,
            "causal": self.causal,
            "varlen": False,
            "deterministic": self.deterministic,
        }


class Found(NamedTuple):
    tile: Tile
    seconds: float
    usual: Tile  # the tile that runs without the table
    usual_seconds: float
    tried: int


def cases(
    shapes: Sequence[Shape], dtypes: Sequence[str], engines: Sequence[str], directions: Sequence[str], deterministic: bool
) -> Iterator[Case]:
    for shape, dtype, causal, direction, engine in product(shapes, dtypes, (False, True), directions, engines):
        yield Case(engine, shape, dtype, causal, direction == "backward", deterministic)


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    s = case.shape
    sizes = ((s.heads, s.queries, s.head_dim), (s.heads_kv, s.keys, s.head_dim), (s.heads_kv, s.keys, s.head_dim_v))
    q, k, v = (torch.randn(s.batch, *size, device="cuda", dtype=getattr(torch, case.dtype)) for size in sizes)
    return q, k, v


def measure(case: Case, repeats: int) -> Found:
    """The tiles of a case, timed. Raises NotImplementedError if the engine does not support the call."""
    import torch

    q, k, v = tensors(case)
    options: dict[str, Any] = {"causal": case.causal, "engine": case.engine, "deterministic": case.deterministic}

    def tile_of(**wish: int) -> Tile:
        return parse("tune", q, k, v, {**options, **wish}, []).tile(BACKWARD if case.backward else FORWARD)

    usual = tile_of()
    tiles = {tile_of(tile_q=q_, tile_k=k_) for q_, k_ in product(TILES_Q, TILES_K)}
    call: Callable[..., Any] = partial(strobe.attention, q, k, v)
    if case.backward:
        with torch.no_grad():
            out, lse = strobe.attention(q, k, v, return_lse=True, **options)
        call = partial(strobe.attention_backward, torch.randn_like(out), q, k, v, out, lse)
    calls: dict[Tile | None, Callable[[], Any]] = {None: partial(call, **options)}
    calls |= {tile: partial(call, tile_q=tile[0], tile_k=tile[1], **options) for tile in sorted(tiles)}
    with torch.no_grad():
        seconds = medians_on_gpu(calls, repeats)
    best = min(tiles, key=seconds.__getitem__)
    return Found(best, seconds[best], usual, seconds[None], len(tiles))


@click.command(short_help="Measure tiles on this GPU and keep the fastest.")
@click.option("--shape", multiple=True, help="B,H,S,D or B,H,Hkv,Sq,Sk,D,Dv; may be repeated.")
@click.option("--dtype", multiple=True, help="By default bfloat16.")
@click.option("--engine", multiple=True, help=f"Of {', '.join(ENGINES)}; by default all that take the call.")
@click.option("--direction", multiple=True, help="forward or backward; by default both.")
@click.option("--deterministic/--no-deterministic", help="Tune deterministic calls in place of the others.")
@click.option("--repeats", type=click.IntRange(1), default=15, help="Calls per tile, of which the median counts.")
@click.option("--gain", type=click.FloatRange(0.0), default=0.02, help="Keep a tile only if it is faster by this share: less is noise.")
def command(
    shape: tuple[str, ...],
    dtype: tuple[str, ...],
    engine: tuple[str, ...],
    direction: tuple[str, ...],
    deterministic: bool,
    repeats: int,
    gain: float,
) -> None:
    """Measure on this GPU which tile is the fastest for calls of each shape, and keep the winners in a table beside the kernel cache.

    The engines take its tiles from the next process on, for calls that request no tile; explain() says so."""
    require("tune", "torch", extra="torch")
    import torch

    for given, accepted, hint in (
        (engine, ENGINES, "--engine"),
        (dtype, DTYPES, "--dtype"),
        (direction, ("forward", "backward"), "--direction"),
    ):
        known(given, accepted, hint)
    shapes = [Shape.parse(written) for written in shape or SHAPES]
    console = Console()
    if not torch.cuda.is_available():
        console.print("PyTorch sees no CUDA device here: nothing to measure")
        raise SystemExit(2)
    about = _tuning.header(torch.cuda.current_device())
    if not about.file:
        console.print("no cache folder to keep a table in: set STROBE_CACHE_DIR (`strobe info` says which are not used, and why)")
        raise SystemExit(2)
    if about.ignored:
        console.print(f"[yellow]{about.ignored}[/yellow]", soft_wrap=True)

    shown = Table("call", "fastest tile", "usual", "gain", "tried")
    measured: list[dict[str, Any]] = []
    winners: list[dict[str, Any]] = []
    os.environ["STROBE_TUNING"] = "0"  # the usual tile is that chosen without a table
    for case in cases(shapes, dtype or ("bfloat16",), engine or ENGINES, direction or ("forward", "backward"), deterministic):
        try:
            found = measure(case, repeats)
        except NotImplementedError:
            continue  # the engine does not support the call
        except (torch.OutOfMemoryError, MemoryError) as refusal:
            console.print(f"[yellow]not measured[/yellow] {case}: {str(refusal).splitlines()[0]}", soft_wrap=True, highlight=False)
            continue
        faster = found.usual_seconds / found.seconds - 1
        measured.append(case.key())
        if faster >= gain:
            results = {"tile_q": found.tile[0], "tile_k": found.tile[1], "seconds": found.seconds, "usual_seconds": found.usual_seconds}
            winners.append(case.key() | results)
        shown.add_row(str(case), "x".join(map(str, found.tile)), "x".join(map(str, found.usual)), f"{faster:+.1%}", str(found.tried))
    console.print(shown)
    _tuning.write(about, measured, winners)
    console.print(f"{len(winners)} of {len(measured)} calls have a faster tile than the usual; written to {about.file}", soft_wrap=True)
