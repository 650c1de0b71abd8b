"""``strobe check``: every engine of this machine against the float64 reference, over a compact product of options."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import strobe
from strobe_tools.cli import report
from strobe_tools.machine import usable_cores
from strobe_tools.requirements import require
from strobe_tools.values import PATH, writable

# The largest error accepted: some ulps. At these sizes correct results stay below it, and wrong results exceed it. (The test suite measures
# an engine's accuracy relative to the plain formulas.)
TOLERANCE = {"float64": 1e-14, "float32": 2e-6, "float16": 2.0**-9, "bfloat16": 2.0**-6}

SHAPES = {  # batch, heads, heads_kv, Sq, Sk, D, Dv
    "square": (2, 2, 2, 67, 67, 32, 32),
    "GQA, Sq < Sk, D > Dv": (1, 4, 2, 33, 150, 80, 40),
    "varlen": (3, 2, 1, 40, 56, 64, 64),
}
MASKS = ("none", "causal", "causal, top left", "window", "padding", "block-sparse")
EXTRAS = ("none", "softcap", "ALiBi", "bias", "sinks", "dropout")


@dataclass(frozen=True)
class Case:
    dtype: str
    shape: str
    mask: str
    extra: str

    def __str__(self) -> str:
        return f"{self.dtype}, {self.shape}, mask {self.mask}, extra {self.extra}"


@dataclass
class Problem:
    """A call: dout, q, k, v and the options, as arrays of the case's dtype."""

    tensors: list[Any]
    options: dict[str, Any] = field(default_factory=dict)


def cases(dtypes: list[str]) -> list[Case]:
    return [Case(*c) for c in itertools.product(dtypes, SHAPES, MASKS, EXTRAS)]


def _problem(case: Case, seed: int) -> Problem:
    import numpy as np

    rng = np.random.default_rng(seed)
    batch, heads, heads_kv, sq, sk, d, dv = SHAPES[case.shape]

    def normal(*shape: int, dtype: str = case.dtype) -> Any:
        x = rng.standard_normal(shape, dtype=np.float32)
        if dtype == "bfloat16":  # NumPy has no bfloat16
            import torch

            return torch.from_numpy(x).bfloat16()
        return x.astype(dtype)

    def beside(x: Any) -> Any:
        """x as a torch tensor if q is one."""
        if case.dtype == "bfloat16":
            import torch

            return torch.from_numpy(x)
        return x

    sum_dtype = "float64" if case.dtype == "float64" else "float32"
    options: dict[str, Any] = {}
    if case.shape == "varlen":
        lengths_q, lengths_k = rng.integers(0, sq + 1, batch), rng.integers(0, sk + 1, batch)
        lengths_q[0], lengths_k[0], lengths_k[1] = sq, sk, 0
        options |= {
            "cu_seqlens_q": beside(np.concatenate([[0], lengths_q.cumsum()]).astype(np.int32)),
            "cu_seqlens_k": beside(np.concatenate([[0], lengths_k.cumsum()]).astype(np.int32)),
            "max_seqlen_q": sq,
            "max_seqlen_k": sk,
        }
        total_q, total_k = int(lengths_q.sum()), int(lengths_k.sum())
        queries, keys = (total_q, heads), (total_k, heads_kv)
        tensors = [normal(*queries, dv), normal(*queries, d), normal(*keys, d), normal(*keys, dv)]
    else:
        shapes = (heads, sq, dv), (heads, sq, d), (heads_kv, sk, d), (heads_kv, sk, dv)
        tensors = [normal(batch, *shape) for shape in shapes]

    if case.mask.startswith("causal"):
        options |= {"causal": True, "alignment": "top_left" if "top left" in case.mask else "bottom_right"}
    elif case.mask == "window":
        options["window"] = (9, 4)
    elif case.mask == "padding":
        options["mask"] = beside(rng.random((batch, 1, 1, sk)) < 0.8)
    elif case.mask == "block-sparse":
        options["block_mask"] = strobe.BlockMask.from_kept(beside(rng.random((-(-sq // 16), -(-sk // 16))) < 0.5), 16, 16, sq, sk)

    if case.extra == "softcap":
        options["softcap"] = 2.0
    elif case.extra == "ALiBi":
        options["alibi_slopes"] = beside(2.0 ** -np.arange(1, heads + 1, dtype=np.float32))
    elif case.extra == "bias":
        options["bias"] = normal(1, heads, sq, sk)
    elif case.extra == "sinks":
        options["sinks"] = beside(normal(heads, dtype=sum_dtype))
    elif case.extra == "dropout":
        options |= {"dropout": 0.25, "seed": seed, "offset": 7}
    return Problem(tensors, options)


def _doubles(x: Any) -> Any:
    import numpy as np

    return x.astype(np.float64) if isinstance(x, np.ndarray) else x.double().cpu().numpy()


def _results(out: Any, lse: Any, gradients: Any) -> dict[str, Any]:
    named = {"out": out, "lse": lse, **gradients._asdict()}
    return {name: _doubles(x) for name, x in named.items() if x is not None}


def _error(x: Any, reference: Any) -> float:
    """The largest difference, relative to the largest finite element of the reference, or to 1, the inputs' size, if that is more (a sum
    that cancels is no better than its terms). inf if only one of the two has an infinity or NaN."""
    import numpy as np

    finite = np.isfinite(reference)
    if not np.array_equal(x[~finite], reference[~finite]) or not np.isfinite(x[finite]).all():
        return float("inf")
    return float(np.abs(x[finite] - reference[finite]).max(initial=0) / np.abs(reference[finite]).max(initial=1))


def _on(device: str, problem: Problem) -> Problem:
    """The problem in the memory of a GPU, as torch tensors."""
    import numpy as np
    import torch

    def moved(x: Any) -> Any:
        x = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
        return x.to(device) if hasattr(x, "to") else x

    return Problem([moved(x) for x in problem.tensors], {name: moved(x) for name, x in problem.options.items()})


def outcomes(case: Case, engines: Iterable[str], seed: int, device: str = "cpu") -> Iterator[tuple[str, str | None]]:
    """Yields the name of each engine, and its error ("": none; None: it does not support such a call)."""
    problem = _problem(case, seed)
    dout, q, k, v = problem.tensors
    out, lse = strobe.reference(q, k, v, **problem.options)
    expected = _results(out, lse, strobe.reference_backward(dout, q, k, v, **problem.options))
    if device != "cpu":
        problem = _on(device, problem)
        dout, q, k, v = problem.tensors
    for engine in engines:
        options = problem.options | {"engine": engine}
        try:
            out, lse = strobe.attention(q, k, v, return_lse=True, **options)
            found = _results(out, lse, strobe.attention_backward(dout, q, k, v, out, lse, **options))
        except NotImplementedError:
            yield engine, None
            continue
        except (RuntimeError, ValueError) as error:  # also a kernel that does not compile
            yield engine, f"{type(error).__name__}: {error}"
            continue
        errors = {name: _error(found[name], reference) for name, reference in expected.items()}
        bad = [f"{name} {error:.2g}" for name, error in errors.items() if error > TOLERANCE[case.dtype]]
        yield engine, f"error of {', '.join(bad)}; accepted: {TOLERANCE[case.dtype]:.2g}" if bad else ""


@click.command(short_help="Self-test of every engine that runs here.")
@click.option("--engine", multiple=True, help="Only this engine; may be given more than once.")
@click.option("--seed", type=click.IntRange(0, 2**32), default=0, help="Of the random inputs.")
@click.option(
    "--report", "report_file", type=PATH, help="Check a cover of the options on the GPU, if there is one, measure, and write it here."
)
def command(engine: tuple[str, ...], seed: int, report_file: Path | None) -> None:
    """Self-test: forward and every gradient of each engine that runs here, against the float64 reference.

    With --report FILE also what this machine is and how fast a GPU is, as JSON, to be sent to Strobe's authors: docs/reports.md.
    """
    require("check", "numpy", extra="numpy")
    if report_file:
        require("check --report", "torch", extra="torch")
        writable(report_file, "--report")
    console = Console()
    available = [name for name, reason in strobe.engines() if reason is None and name != "reference"]
    engines = engine or available
    _refuse_unknown(engines, available)
    device = report.device() if report_file else "cpu"
    dtypes = [name for name in TOLERANCE if name != "bfloat16" or importlib.util.find_spec("torch")]
    todo = cases(dtypes)
    if report_file:
        todo = report.cover(todo)
    tally = {name: {"passed": 0, "failed": 0, "not taken": 0} for name in engines}
    failures = []
    began = perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True))
    calls = [(case, engines, seed + number, device) for number, case in enumerate(todo)]
    with Progress(*columns, console=console) as progress, _mapping(device) as map_:
        task = progress.add_task("checking", total=len(todo))
        for case, found in zip(todo, map_(_all_outcomes, calls), strict=True):
            for name, wrong in found:
                tally[name]["not taken" if wrong is None else "failed" if wrong else "passed"] += 1
                if wrong:
                    failures.append(f"{name}: {case}: {wrong}")
                    progress.console.print(failures[-1], style="red", markup=False, highlight=False)
            progress.advance(task)
    table = Table("engine", *next(iter(tally.values())))
    for name, counts in tally.items():
        table.add_row(name, *map(str, counts.values()))
    console.print(table)
    failed = sum(counts["failed"] for counts in tally.values())
    checked = failed + sum(counts["passed"] for counts in tally.values())
    console.print(f"{checked} cases checked in {', '.join(dtypes)}: {failed or 'none'} failed", style="bold")
    if report_file:
        report.write(report_file, device, tally, failures, perf_counter() - began, console)
    if failed or not checked:
        raise SystemExit(1)


def _all_outcomes(call: tuple[Case, Sequence[str], int, str]) -> list[tuple[str, str | None]]:
    return list(outcomes(*call))


@contextmanager
def _mapping(device: str) -> Iterator[Callable[..., Iterable[list[tuple[str, str | None]]]]]:
    """map(), on a GPU by several processes, because most of the time goes into compiling kernels."""
    if device == "cpu":
        yield map
        return
    with ProcessPoolExecutor(min(16, usable_cores()), mp_context=get_context("spawn")) as pool:
        yield pool.map


def _refuse_unknown(engines: Iterable[str], available: list[str]) -> None:
    missing = dict(strobe.engines())
    for name in engines:
        if name not in available:
            why = "is unknown"
            if name in missing:
                why = f"does not run here: {missing[name]}" if missing[name] else "is what the others are checked against"
            close = [] if name in missing else get_close_matches(name, available, 1)
            hint = "".join(f"; did you mean {known}?" for known in close)
            click.echo(f"--engine: {name} {why}; accepted: {', '.join(available)}{hint}", err=True)
            raise SystemExit(2)
