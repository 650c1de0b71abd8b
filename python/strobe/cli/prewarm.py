"""``strobe prewarm``: the kernels of the usual calls, compiled before anyone waits for them. Needs NVRTC, but no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from strobe._prewarm import Kernel, Shape, prewarm

# One feature alone: tensors and options beside q, k and v. B, H, S: of the example.
_B, _H, _S = 2, 4, 4096
_SCORES = (_B, _H, _S, _S)
FEATURES: dict[str, tuple[dict[str, Shape], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"window_right": 0}),
    "window": ({}, {"window_left": 512, "window_right": 0}),
    "mask": ({"mask": Shape(_SCORES, "bool")}, {}),
    "bias": ({"bias": Shape(_SCORES, "float32")}, {}),
    "ALiBi": ({"alibi_slopes": Shape((_H,), "float32")}, {"window_right": 0}),
    "softcap": ({}, {"softcap": 30.0, "window_right": 0}),
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
}
HEAD_DIMS = tuple(range(32, 257, 32))
DTYPES = ("bfloat16", "float16", "float32")


def calls(
    head_dims: tuple[int, ...], dtypes: tuple[str, ...], features: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, Shape], dict[str, Any]]]:
    for dtype in dtypes:
        for dim in head_dims:
            for name in features:
                more, options = FEATURES[name]
                x = Shape((_B, _H, _S, dim), dtype)
                yield f"{dtype} d{dim} {name}", {"q": x, "k": x, "v": x, **more}, options


def command(
    arch: Annotated[list[int], typer.Option(help="Compute capability times ten, e.g. 90 for an H100 or H200; may be repeated.")],
    head_dim: Annotated[list[int] | None, typer.Option(help="Head dimensions; by default 32 to 256 by 32.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help=f"By default {', '.join(DTYPES)}.")] = None,
    feature: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(FEATURES)}; by default all, each alone.")] = None,
    max_spill: Annotated[int | None, typer.Option(help="Exit with 1 if a kernel spills more than this many bytes.")] = None,
    list_kernels: Annotated[bool, typer.Option("--list", help="Print every kernel with its registers and spills.")] = False,
) -> None:
    """Compile the kernels of the usual calls into the cache (STROBE_CACHE_DIR, else ~/.cache/strobe)."""
    for name in feature or ():
        if name not in FEATURES:
            raise typer.BadParameter(f"{name!r}; accepted are {', '.join(FEATURES)}", param_hint="--feature")
    console = Console()
    asked = list(calls(tuple(head_dim or HEAD_DIMS), tuple(dtype or DTYPES), tuple(feature or FEATURES)))
    began = perf_counter()
    kernels: dict[tuple[int, str], Kernel] = {}
    failed: dict[str, str] = {}
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(arch) * len(asked) * 2)
        for cc in arch:
            for name, arrays, options in asked:
                for backward in (False, True):
                    what = f"sm_{cc} {name} {'backward' if backward else 'forward'}"
                    progress.update(task, description=what)
                    try:
                        for kernel in prewarm(arrays, options, backward, cc):
                            known = kernels.setdefault((cc, kernel.name), kernel)
                            if kernel.compiled and not known.compiled:
                                kernels[cc, kernel.name] = kernel
                    except NotImplementedError as refusal:
                        failed[what] = str(refusal)
                    progress.advance(task)
    if list_kernels:
        for (cc, name), kernel in sorted(kernels.items()):
            console.print(f"sm_{cc} {kernel.registers:3} registers {kernel.spilled:4} B spilled  {name}", soft_wrap=True, highlight=False)
    compiled = sum(kernel.compiled for kernel in kernels.values())
    console.print(
        f"{len(kernels)} kernels, {compiled} compiled, {len(kernels) - compiled} found in the cache, {perf_counter() - began:.1f} s"
    )
    for what, reason in failed.items():
        console.print(f"[yellow]not taken[/yellow] {what}: {reason}", soft_wrap=True)
    spilling = [(cc, k) for (cc, _), k in kernels.items() if max_spill is not None and k.spilled > max_spill]
    for cc, kernel in spilling:
        console.print(f"[red]spills {kernel.spilled} bytes[/red] sm_{cc} {kernel.name}", soft_wrap=True)
    if spilling:
        raise typer.Exit(1)
