"""``strobe prewarm``: compiles the kernels of the usual calls ahead of their first use. Needs NVRTC, but no GPU."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import active_children, get_context
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import click
from rich.console import Console

from strobe._core import lib
from strobe._options import MAX_HEAD_DIM, MAX_HEAD_DIM_V
from strobe._prewarm import Kernel, Shape, kernels, prewarm
from strobe_tools.cli.info import compiled_for, kernel_cache
from strobe_tools.progress import Progress, duration
from strobe_tools.values import known

Result = TypeVar("Result")

# Features: the tensors and options of each beside q, k and v. B, H, S: the sizes of the example.
_B, _H, _S = 2, 4, 4096
_SCORES = (_B, _H, _S, _S)
_STARTS = Shape((_B + 1,), "int32")
FEATURES: dict[str, tuple[dict[str, Shape], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"window_right": 0}),
    "window": ({}, {"window_left": 512, "window_right": 0}),
    "varlen": ({"cu_seqlens_q": _STARTS, "cu_seqlens_k": _STARTS}, {"max_seqlen_q": _S, "max_seqlen_k": _S, "window_right": 0}),
    "seqused_k": ({"seqused_k": Shape((_B,), "int32")}, {"window_right": 0}),
    "mask": ({"mask": Shape(_SCORES, "bool")}, {}),
    "bias": ({"bias": Shape(_SCORES, "float32")}, {}),
    "ALiBi": ({"alibi_slopes": Shape((_H,), "float32")}, {"window_right": 0}),
    "softcap": ({}, {"softcap": 30.0, "window_right": 0}),
    "hyperbolic": ({}, {"score": lib.STROBE_HYPERBOLIC, "beta": 1.0}),
    "sinks": ({"sinks": Shape((_H,), "float32")}, {"window_right": 0}),
    "dropout": ({"rng": Shape((2,), "int64")}, {"dropout": 0.1, "window_right": 0}),
    "block-sparse": (
        {
            "block_rows": Shape((1, 1, _S // 128 + 1), "int32"),
            "block_cols": Shape((64,), "int32"),
            "block_rows_t": Shape((1, 1, _S // 128 + 1), "int32"),
            "block_cols_t": Shape((64,), "int32"),
        },
        {"block_q": 128, "block_k": 128},
    ),
    "exact_max": ({}, {"exact_max": True, "window_right": 0}),
    "deterministic": ({}, {"deterministic": True, "window_right": 0}),
}
HEAD_DIMS = tuple(range(32, 257, 32))
DTYPES = ("bfloat16", "float16", "float32", "float64")
# Lengths at which the Hopper backward uses another tile than at _S, for head dimensions beyond 64.
_OTHER_LENGTHS = {"plain": 512, "causal": 8192, "deterministic": 8192}
_SMALL = 512  # tokens of a call for which the Hopper backward takes 64 keys a block, up to head dimension 160
# (Tokens of a sequence, number of sequences) for the Hopper backward's forms up to head dimension 64: two stages of keys, in line or not;
# dQ in shared memory.
_SHORT = ((512, 16), (512, 33), (1024, 16))
_AS_WIDE = ("bias", "sinks")  # these tensors are float64 if q is
_EVERY_DIM = ("plain", "causal")  # features compiled for every dimension; the others are compiled only for _FEATURE_DIMS
_FEATURE_DIMS = (64, 128)
# --common: the calls with which transformers are mostly trained and run.
_COMMON_DTYPES, _COMMON_DIMS, _COMMON_FEATURES = ("bfloat16",), (64, 128), ("plain", "causal", "varlen")
# (Tokens of a sequence, sequences, query heads, key heads) for which the common calls have other tiles, orders of tiles, or ways to add up
# dK and dV. With them the table has every kernel of a grid: 1, 2, 4, 8, 16 sequences of 128, 256, ..., 16384 tokens, 8, 16 or 32 heads, or
# 32 with 8 of keys.
_COMMON_SIZES = (
    *((128, 1, 8, 8), (128, 1, 32, 8), (128, 4, 32, 32), (128, 16, 32, 8), (256, 1, 32, 8), (256, 2, 32, 8), (512, 1, 32, 8)),
    *((1024, 1, 8, 8), (1024, 1, 32, 8), (1024, 2, 32, 8), (1024, 2, 32, 32), (4096, 1, 16, 16), (8192, 1, 8, 8), (16384, 1, 32, 8)),
)
# Seconds of one core of a server, and bytes in the cache, per kernel, averaged over the table.
_SECONDS, _BYTES = 0.7, 65_000


class Job(NamedTuple):
    """One call, in one direction, for one GPU."""

    compute_capability: int
    dtype: str
    head_dim: int
    feature: str
    backward: bool
    seqlen: int = _S
    sequences: int | None = None  # None: as many as make the example's number of tokens
    heads: int = _H
    heads_kv: int = _H

    def __str__(self) -> str:
        heads = "" if (self.heads, self.heads_kv) == (_H, _H) else f", {self.heads}/{self.heads_kv} heads"
        length = "" if self.seqlen == _S else f" of {self.seqlen}" if self.sequences is None else f" of {self.sequences} x {self.seqlen}"
        direction = "backward" if self.backward else "forward"
        return f"sm_{self.compute_capability} {self.dtype} d{self.head_dim} {self.feature} {direction}{length}{heads}"

    def names(self) -> tuple[dict[str, bool], str]:
        """The kernels' names, and whether each is in the cache; or the reason why no engine supports the call."""
        return self._asked(kernels, {})

    def run(self) -> tuple[list[Kernel], str]:
        """The kernels, compiled; or the reason why they cannot be."""
        return self._asked(prewarm, [])

    def _asked(self, function: Callable[..., Result], nothing: Result) -> tuple[Result, str]:
        more, options = FEATURES[self.feature]
        packed = "cu_seqlens_q" in more
        batch = self.sequences or max(_B, _B * _S // self.seqlen)

        def tokens(heads: int, width: int) -> Shape:
            return Shape((batch * self.seqlen, heads, width) if packed else (batch, heads, self.seqlen, width), self.dtype)

        q, k = (tokens(heads, self.head_dim) for heads in (self.heads, self.heads_kv))
        v = tokens(self.heads_kv, min(self.head_dim, MAX_HEAD_DIM_V))
        if packed:
            starts = Shape((batch + 1,), "int32")
            more = more | {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
            options = options | {"max_seqlen_q": self.seqlen, "max_seqlen_k": self.seqlen}
        if self.dtype == "float64":
            more = {name: tensor._replace(dtype="float64") if name in _AS_WIDE else tensor for name, tensor in more.items()}
        try:
            return function({"q": q, "k": k, "v": v, **more}, options, self.backward, self.compute_capability), ""
        except NotImplementedError as refusal:
            return nothing, str(refusal)


def jobs(
    archs: Sequence[int], head_dims: Sequence[int] | None, dtypes: Sequence[str] | None, features: Sequence[str] | None
) -> Iterator[Job]:
    """All jobs that are asked for; by default the table that Strobe ships."""
    for arch, dtype, feature in product(archs, dtypes or DTYPES, features or FEATURES):
        for dim in head_dims or (HEAD_DIMS if feature in _EVERY_DIM else _FEATURE_DIMS):
            yield Job(arch, dtype, dim, feature, False)
            yield Job(arch, dtype, dim, feature, True)
            if arch == 90 and 64 < dim <= 128 and dtype in ("bfloat16", "float16") and feature in _OTHER_LENGTHS:
                yield Job(arch, dtype, dim, feature, True, _OTHER_LENGTHS[feature])
            if arch == 90 and dim <= 160 and dtype in ("bfloat16", "float16") and feature in _EVERY_DIM:
                yield Job(arch, dtype, dim, feature, True, _SMALL, 1)
            if arch == 90 and dim <= 64 and dtype in ("bfloat16", "float16") and feature in _EVERY_DIM:
                yield from (Job(arch, dtype, dim, feature, True, *length) for length in _SHORT)
            if dtype in _COMMON_DTYPES and dim in _COMMON_DIMS and feature in _COMMON_FEATURES:
                yield from (Job(arch, dtype, dim, feature, backward, *sizes) for sizes in _COMMON_SIZES for backward in (False, True))


# The compute capabilities that NVRTC 12.9 and 13 support and Strobe has kernels for.
_KNOWN = (61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 107, 110, 120, 121)
_OLDEST, _OLDEST_OF_NVRTC_13 = _KNOWN[0], 75
_NVRTC_12 = '; this one needs NVRTC 12: pip install "nvidia-cuda-nvrtc-cu12==12.9.*"'
_HEAD_DIM_HELP = f"Head dimensions, up to {MAX_HEAD_DIM} (that of V: {MAX_HEAD_DIM_V}); by default 32 to 256 by 32."
_ARCH = "compute capability times ten, e.g. 90 for an H100 or H200"


def _arch(given: str) -> int:
    if not given.isdecimal() or not _OLDEST <= int(given[:9]) <= 999:
        raise click.BadParameter(f"{given!r}; accepted is the {_ARCH}, from {_OLDEST} on", param_hint="--arch")
    return int(given)


def _reasons(refused: Iterable[tuple[Job, str]]) -> Iterator[str]:
    """Each reason once, with the calls that it refuses."""
    calls: dict[str, list[Job]] = {}
    for job, reason in refused:
        # The name of the kernel that was compiled first is no part of the reason.
        calls.setdefault(re.sub(r"strobe::\S+ for sm_\w+: not in", "a kernel is not in", reason), []).append(job)
    for reason, jobs_ in calls.items():
        more = f" and {len(jobs_) - 3} more" if len(jobs_) > 3 else ""
        yield f"{', '.join(map(str, jobs_[:3]))}{more}: {reason}"


@click.command(short_help="Compile kernels ahead of time, without a GPU.")
@click.option("--arch", multiple=True, type=_arch, metavar="INTEGER", help=f"Required: the {_ARCH}; may be repeated.")
@click.option(
    "--common",
    is_flag=True,
    help=f"Only {', '.join(_COMMON_DTYPES)}, head dimensions {' and '.join(map(str, _COMMON_DIMS))}, {', '.join(_COMMON_FEATURES)}; "
    "the options below replace each.",
)
@click.option("--head-dim", multiple=True, type=click.IntRange(1, MAX_HEAD_DIM), help=_HEAD_DIM_HELP)
@click.option("--dtype", multiple=True, help=f"By default {', '.join(DTYPES)}.")
@click.option("--feature", multiple=True, help=f"Of {', '.join(FEATURES)}; by default all, each alone.")
@click.option("--max-spill", type=click.IntRange(0), help="Exit with 1 if a kernel spills more than this many bytes.")
@click.option("--list", "list_kernels", is_flag=True, help="Print every kernel with its registers and spills.")
@click.option("--jobs", "processes", type=click.IntRange(1), default=os.cpu_count() or 1, help="Processes that compile.")
def command(
    arch: tuple[int, ...],
    common: bool,
    head_dim: tuple[int, ...],
    dtype: tuple[str, ...],
    feature: tuple[str, ...],
    max_spill: int | None,
    list_kernels: bool,
    processes: int,
) -> None:
    """Compile the kernels of the usual calls into the cache (STROBE_CACHE_DIR, else ~/.cache/strobe)."""
    known(feature, FEATURES, "--feature")
    known(dtype, DTYPES, "--dtype")
    if not arch:
        raise click.BadParameter(f"missing; accepted is the {_ARCH}", param_hint="--arch")
    possible = [cc for cc in compiled_for() if cc >= _OLDEST]
    if none := [cc for cc in arch if cc not in (possible or _KNOWN)]:  # without any NVRTC, kernels may be in the cache
        accepted = ", ".join(map(str, possible or _KNOWN))
        whose = "what this machine's NVRTC compiles for" if possible else "an architecture that some NVRTC compiles for"
        more = _NVRTC_12 if possible and none[0] < _OLDEST_OF_NVRTC_13 <= possible[0] else ""
        raise click.BadParameter(f"{none[0]}; accepted is {whose}: {accepted}{more}", param_hint="--arch")
    if (cache := kernel_cache()).startswith("none"):
        click.echo(f"strobe prewarm: nothing would be kept; kernel cache: {cache}", err=True)
        raise SystemExit(1)
    console = Console(soft_wrap=True, highlight=False)
    small = list(jobs(arch, head_dim or _COMMON_DIMS, dtype or _COMMON_DTYPES, feature or _COMMON_FEATURES))
    asked = small if common else list(jobs(arch, head_dim, dtype, feature))
    if (not possible or ", offline: " in cache) and (reason := _missing_for_good(asked)):
        click.echo(f"strobe prewarm: {reason}", err=True)
        raise SystemExit(1)
    began = perf_counter()
    refused: dict[Job, str] = {}
    found: dict[tuple[int, str], Kernel] = {}
    try:
        missing = _announce(asked, small, processes, cache, console)
        with (
            Progress("kernels compiled", len(missing), console) as progress,
            _without_words_of_the_tracker(),
            ProcessPoolExecutor(min(processes, len(asked)), mp_context=get_context("spawn"), initializer=_leave_interrupts) as pool,
            _ended_by_interrupts(),
        ):
            for job, (made, reason) in zip(asked, pool.map(Job.run, asked), strict=True):
                if reason:
                    refused[job] = reason
                for kernel in made:
                    key = (job.compute_capability, kernel.name)
                    if key not in found or kernel.compiled:
                        found[key] = kernel
                progress.update(len(found.keys() & missing), str(job))
    except (RuntimeError, ValueError, MemoryError) as error:  # a kernel that does not compile, a process that was killed
        click.echo(f"strobe prewarm: {error}", err=True)
        raise SystemExit(1) from None
    compiled = sum(kernel.compiled for kernel in found.values())
    if list_kernels:
        for (cc, name), kernel in sorted(found.items()):
            console.print(f"sm_{cc} {kernel.registers:3} registers {kernel.spilled:4} B spilled  {name}", markup=False)
    absent = missing - found.keys()
    counts = f"{compiled} compiled, {len(found) - compiled} found in the cache" + (f", {len(absent)} not compiled" if absent else "")
    console.print(f"{len(found) + len(absent)} kernels, {counts}, {perf_counter() - began:.1f} s")
    for reason in _reasons(refused.items()):
        console.print(f"[yellow]not compiled[/yellow] {reason}")
    for (cc, _), kernel in found.items():
        if kernel.serialized:
            console.print(f"[red]serialized wgmma[/red] sm_{cc} {kernel.name}")
    spilling = [(cc, k) for (cc, _), k in found.items() if max_spill is not None and k.spilled > max_spill]
    for cc, kernel in spilling:
        console.print(f"[red]spills {kernel.spilled} bytes[/red] sm_{cc} {kernel.name}")
    lost = len(_missing(asked) & {key for key, kernel in found.items() if kernel.compiled})
    if lost:
        click.echo(f"strobe prewarm: {lost} of {compiled} compiled kernels were not kept; kernel cache: {cache}", err=True)
    nothing = [cc for cc in arch if all(job in refused for job in asked if job.compute_capability == cc)]
    if spilling or nothing or lost or absent:
        raise SystemExit(1)


@contextlib.contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """Lets Ctrl-C end all processes at once. If Ctrl-C raised an exception, the end of the pool would wait for a lock that one of its
    processes holds, and the exception would be lost if it came while Python frees an object."""

    def end(*_: object) -> None:
        for process in active_children():
            process.terminate()
        os.write(2, b"Aborted!\n")
        with contextlib.suppress(Exception):  # Ctrl-C may have come during a write
            sys.stdout.flush()
        os._exit(130)

    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return
    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _without_words_of_the_tracker() -> Iterator[None]:
    """Silences Python's resource tracker, a process that starts in this context: after Ctrl-C it removes the pool's semaphores, and would
    warn of each."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join([*([before] if before else []), "ignore:resource_tracker:UserWarning"])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


def _leave_interrupts() -> None:
    """Makes a compiling process ignore Ctrl-C. If Ctrl-C ended the process within a call of the pool, it might leave a lock behind for
    which the others wait."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _missing(asked: Sequence[Job]) -> set[tuple[int, str]]:
    """The kernels that the cache does not have: compute capability and name."""
    return {(job.compute_capability, name) for job in asked for name, there in job.names()[0].items() if not there}


def _missing_for_good(asked: Sequence[Job]) -> str:
    """The message if nothing can be compiled: the kernels missing in the cache, and what to install; empty if none is missing."""
    for job in asked:
        if not all(job.names()[0].values()) and (reason := job.run()[1]):
            return next(_reasons([(job, reason)]))
    return ""


def _announce(asked: Sequence[Job], small: Sequence[Job], processes: int, cache: str, console: Console) -> set[tuple[int, str]]:
    """Prints the work ahead before it begins. Returns the missing kernels: compute capability and name."""
    missing: set[tuple[int, str]] = set()
    kept: set[tuple[int, str]] = set()
    of_small: set[tuple[int, str]] = set()
    wanted, smaller = set(asked), set(small)
    for job in dict.fromkeys((*asked, *small)):
        for name, there in job.names()[0].items():
            key = (job.compute_capability, name)
            if job in wanted:
                (kept if there else missing).add(key)
            if job in smaller and not there:
                of_small.add(key)
    seconds = math.ceil(len(missing) / processes) * _SECONDS
    cost = f" (about {duration(seconds)} on {processes} idle cores, {math.ceil(len(missing) * _BYTES / 1e6)} MB)" if missing else ""
    console.print(f"{len(asked)} calls take {len(missing) + len(kept)} kernels: {len(missing)} to compile{cost}, {len(kept)} in the cache")
    console.print(f"Kernel cache: {cache}")
    if len(of_small) < len(missing) / 2:
        console.print(f"--common compiles {len(of_small)} of them; --dtype, --head-dim and --feature choose others")
    return missing
