"""``strobe bench gpu``: Strobe's engines on a GPU beside PyTorch's, in one run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich import box
from rich.console import Console
from rich.table import Table

import strobe
from strobe.cli.requirements import require
from strobe.cli.timing import flops, medians_on_gpu

if TYPE_CHECKING:
    from torch import Tensor

TOKENS, WIDTH = 16384, 2048  # of the core shapes: B·S, H·D
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PEERS = {"FlashAttention-2": "FLASH_ATTENTION", "cuDNN": "CUDNN_ATTENTION", "memory-efficient": "EFFICIENT_ATTENTION"}

Call = Callable[[], Any]


class Case(NamedTuple):
    """What is timed together: the same work by several."""

    name: str
    work: float  # of one call, in `unit` times seconds
    unit: str
    calls: dict[str, Call]


def _peer(backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def _inputs(shape: tuple[int, int, int, int], dtype: str, heads_kv: int | None = None, seqlen_k: int | None = None) -> tuple[Tensor, ...]:
    import torch

    batch, heads, seqlen, dim = shape
    of_keys = (batch, heads_kv or heads, seqlen_k or seqlen, dim)
    return tuple(torch.randn(*s, device="cuda", dtype=getattr(torch, dtype)) for s in (shape, of_keys, of_keys))


def _directions(attend: Callable[..., Tensor], leaves: tuple[Tensor, ...], backward: bool) -> Call:
    import torch

    if not backward:
        return torch.no_grad()(partial(attend, *leaves))
    leaves = tuple(x.detach().requires_grad_() for x in leaves)
    out = attend(*leaves)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _both(
    shape: tuple[int, int, int, int], dtype: str, causal: bool, engines: tuple[str | None, ...], peers: tuple[str, ...]
) -> Iterator[Case]:
    leaves = _inputs(shape, dtype)
    _, _, seqlen, dim = shape
    for backward in (False, True):
        calls: dict[str, Call] = {}

        def add(name: str, attend: Callable[..., Tensor], calls: dict[str, Call] = calls, backward: bool = backward) -> None:
            try:
                calls[name] = _directions(attend, leaves, backward)
                calls[name]()
            except (NotImplementedError, RuntimeError):
                calls.pop(name, None)  # it does not take the call

        for engine in engines:
            add(engine or "Strobe", partial(strobe.attention, causal=causal, engine=engine))
        for peer in peers:
            add(peer, partial(_peer, PEERS[peer], causal=causal))
        name = f"{dtype} d{dim} S {seqlen}{' causal' if causal else ''} {'backward' if backward else 'forward'}"
        yield Case(name, flops(shape, backward, causal) / 1e12, "TFLOP/s", calls)


def core(lengths: tuple[int, ...], engines: tuple[str | None, ...]) -> Iterator[Case]:
    """bf16 at 16k tokens, heads·d = 2048."""
    for dim in (64, 128, 256):
        for causal in (False, True):
            for seqlen in lengths:
                shape = (TOKENS // seqlen, WIDTH // dim, seqlen, dim)
                yield from _both(shape, "bfloat16", causal, engines, ("FlashAttention-2", "cuDNN"))


def fp32(lengths: tuple[int, ...], engines: tuple[str | None, ...]) -> Iterator[Case]:
    for dim in (64, 128):
        for seqlen in lengths[-3:-1]:
            yield from _both((TOKENS // seqlen, WIDTH // dim, seqlen, dim), "float32", False, engines, ("memory-efficient",))


def decode(*_: Any) -> Iterator[Case]:
    """One query over long keys, 32 query and 8 key heads, d 128: bytes of K and V read."""
    for batch, keys in ((1, 65536), (8, 16384), (64, 4096), (128, 1024)):
        q, k, v = _inputs((batch, 32, 1, 128), "bfloat16", 8, keys)
        calls = {
            "Strobe": _directions(strobe.attention, (q, k, v), False),
            "cuDNN": _directions(partial(_peer, PEERS["cuDNN"], causal=False), (q, k, v), False),
        }
        yield Case(f"decode {batch} x {keys}", (k.numel() + v.numel()) * 2 / 1e12, "TB/s", calls)


def sparse(*_: Any) -> Iterator[Case]:
    """Blocks of 128 x 128 of 8k tokens, bf16 d128: dense work in all, so that the rate over the dense one is 1/time."""
    import torch

    shape = (1, 16, 8192, 128)
    leaves = _inputs(shape, "bfloat16")
    for backward in (False, True):
        calls = {"dense": _directions(strobe.attention, leaves, backward)}
        for kept in (0.5, 0.25, 0.125):
            torch.manual_seed(0)
            mask = strobe.BlockMask.from_kept(torch.rand(1, 1, 64, 64) < kept, 128, 128).to("cuda")
            calls[f"{mask.density:.3f} kept"] = _directions(partial(strobe.attention, block_mask=mask), leaves, backward)
        yield Case(f"block-sparse {'backward' if backward else 'forward'}", flops(shape, backward, False) / 1e12, "TFLOP/s", calls)


def features(*_: Any) -> Iterator[Case]:
    """What each option costs over none: bf16, d128, 4k, causal; and determinism."""
    import torch

    shape = (4, 16, 4096, 128)
    heads, seqlen = shape[1:3]
    leaves = _inputs(shape, "bfloat16")
    slopes = torch.tensor([2.0 ** -(8 * (h + 1) / heads) for h in range(heads)], device="cuda")
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "window 1024": {"window": (1024, 0)},
        "ALiBi": {"alibi_slopes": slopes},
        "softcap": {"softcap": 30.0},
        "sinks": {"sinks": torch.randn(heads, device="cuda")},
        "dropout": {"dropout": 0.1, "seed": 1},
        "mask": {"mask": torch.rand(1, 1, seqlen, seqlen, device="cuda") < 0.9},
        "bias": {"bias": torch.randn(1, 1, seqlen, seqlen, device="cuda", dtype=torch.bfloat16)},
        "deterministic": {"deterministic": True},
        "exact_max": {"exact_max": True},
    }
    for backward in (False, True):
        calls = {name: _directions(partial(strobe.attention, causal=True, **o), leaves, backward) for name, o in options.items()}
        yield Case(f"options {'backward' if backward else 'forward'}", flops(shape, backward, True) / 1e12, "TFLOP/s", calls)


SETS: dict[str, Callable[..., Iterator[Case]]] = {"core": core, "fp32": fp32, "decode": decode, "sparse": sparse, "options": features}


def host(repeats: int = 300) -> dict[str, float]:
    """Seconds that a call takes the host: many calls of a small shape, the GPU not waited for."""
    import torch

    leaves = _inputs((1, 8, 128, 64), "bfloat16")
    found = {}
    attends: dict[str, Callable[..., Any]] = {"Strobe": strobe.attention, "cuDNN": partial(_peer, PEERS["cuDNN"], causal=False)}
    for name, attend in attends.items():
        call = _directions(attend, leaves, False)
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        found[name] = sorted(times)[repeats // 2]
    return found


def command(
    sets: Annotated[list[str] | None, typer.Option("--set", help=f"Of {', '.join(SETS)}; by default all.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="Sequence lengths of the core shapes; by default 512 to 16384.")] = None,
    engine: Annotated[list[str] | None, typer.Option(help="Time these engines by name, too.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Keep the figures in this file, too.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Calls per figure, of which the median counts.")] = 15,
) -> None:
    """Speed on the GPU, beside PyTorch's backends in the same run: medians by CUDA events, calls in shuffled order."""
    require("bench gpu", "torch", extra="torch")
    import torch

    console = Console()
    if not torch.cuda.is_available():
        console.print("PyTorch sees no CUDA device here: nothing to measure")
        raise typer.Exit(2)
    for name in sets or ():
        if name not in SETS:
            raise typer.BadParameter(f"{name!r}; accepted are {', '.join(SETS)}", param_hint="--set")
    rows: list[dict[str, Any]] = []
    for name in sets or SETS:
        table = Table(title=name, title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("case")
        table.add_column("rate, and its ratio to the first", no_wrap=False)
        for case in SETS[name](tuple(length or LENGTHS), (None, *(engine or ()))):
            if not case.calls:
                continue
            rates = {who: case.work / seconds for who, seconds in medians_on_gpu(case.calls, repeats).items()}
            first = next(iter(rates.values()))
            table.add_row(f"{case.name}, {case.unit}", "   ".join(f"{who} {rate:.4g} ({rate / first:.2f})" for who, rate in rates.items()))
            rows.append({"set": name, "case": case.name, "unit": case.unit, "rates": {who: round(rate, 3) for who, rate in rates.items()}})
            torch.cuda.empty_cache()
        console.print(table)
    of_host = host()
    console.print("host time of a forward call: " + ", ".join(f"{who} {seconds * 1e6:.1f} µs" for who, seconds in of_host.items()))
    record = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "strobe": strobe.__version__,
        "torch": torch.__version__,
        "host_microseconds": {who: round(seconds * 1e6, 1) for who, seconds in of_host.items()},
        "rows": rows,
    }
    console.print(f"{record['device']}; PyTorch {record['torch']}, Strobe {record['strobe']}")
    if json_path:
        json_path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
