"""Measures the host's share of a call from PyTorch, and of scaled_dot_product_attention: in one process, interleaved.

Each call of small tensors is timed by itself on the host's clock. Between groups of calls the script waits for the GPU, untimed, so that
the GPU's queue never fills. It prints the median and the quartiles of each kind of call, and whether these bounds are met:

- forward without a gradient: at most SDPA's;
- forward and backward: at most those of an autograd.Function of the same tensors that computes nothing, plus 60 microseconds;
- forward and backward() of leaves in layout "bshd": at most SDPA's, in a fresh process, and again after the process has run twenty other
    shapes, causal and not, in both layouts, and FlashAttention-4 if that is installed. Here the garbage collector stays on.

    python bench/host_time.py [--calls 2000] [--shape 1,8,128,64] [--dtype bfloat16] [--device cuda] [--json FILE]

With --device cpu the computation is included in the times: small shapes show the host's share.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import strobe

GROUP = 20  # calls between two waits for the GPU
MARGIN = 60.0  # microseconds beyond the empty Function
OTHERS = 20  # other shapes
LEAVES = "leaves, bshd: {}"
AFTER = ", after other work"


class Empty(torch.autograd.Function):
    """Computes and keeps nothing: the minimum time of a differentiable call from Python."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dout, dout, dout


class Allocating(torch.autograd.Function):
    """Keeps and allocates what attention must, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _out, _lse = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def subjects(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> dict[str, Callable[[], Any]]:
    q, k, v, dout = (torch.randn(shape, device=device).to(dtype) for _ in range(4))
    tracked = tuple(x.clone().requires_grad_() for x in (q, k, v))
    attends: dict[str, Callable[..., Tensor]] = {
        "strobe": strobe.attention,
        "SDPA": scaled_dot_product_attention,
        "empty Function": Empty.apply,
        "allocating": Allocating.apply,
    }

    def without_gradient(attend: Callable[..., Tensor]) -> Callable[[], Any]:
        return lambda: attend(q, k, v)

    def forward(attend: Callable[..., Tensor]) -> Callable[[], Any]:
        return lambda: attend(*tracked)

    def both(attend: Callable[..., Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(attend(*tracked), tracked, dout)

    made: dict[str, Callable[[], Any]] = {}
    made |= {f"no gradient: {name}": without_gradient(attends[name]) for name in ("strobe", "SDPA")}
    made |= {f"tracked forward: {name}": forward(attend) for name, attend in attends.items()}
    made |= {f"forward + backward: {name}": both(attend) for name, attend in attends.items()}
    made["torch.empty_like"] = lambda: torch.empty_like(q)
    made["an elementwise kernel"] = dout.clone().neg_
    return made


def on_leaves(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> dict[str, Callable[[], Any]]:
    """Forward and backward() of leaves (B, S, H, D), as in a step of training: SDPA gets transposed views, as its callers write them."""
    b, h, s, d = shape
    tracked, dout = leaves((b, s, h, d), dtype, device), torch.randn((b, s, h, d), device=device).to(dtype)

    def step(attend: Callable[..., Tensor]) -> Callable[[], Any]:
        return lambda: attend(*tracked).backward(dout)

    return {LEAVES.format(name): step(attend) for name, attend in (("strobe", _strobe_bshd), ("SDPA", _sdpa_bshd))}


def leaves(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3)]


def _strobe_bshd(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return strobe.attention(q, k, v, layout="bshd", causal=causal)


def _sdpa_bshd(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)


def other_work(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> str:
    """Does other work, as a long-lived process has done. Returns a description of it."""
    b, h, s, d = shape
    for n in range(1, OTHERS + 1):
        for causal in (False, True):
            for attend in (_strobe_bshd, _sdpa_bshd):
                attend(*leaves((b + 1, s + 16 * n, h, d), dtype, device), causal=causal).sum().backward()
            strobe.attention(*leaves((b + 1, h, s + 16 * n, d), dtype, device), causal=causal).sum().backward()
    done = f"{OTHERS} other shapes"
    try:
        from flash_attn.cute.interface import flash_attn_func  # type: ignore[import-not-found]
    except ImportError:
        return done
    if device.startswith("cuda"):
        for n in (1, 2, 4, 7):
            out = flash_attn_func(*leaves((b + 1, s + 64 * n, h, d), dtype, device), causal=True)
            (out[0] if isinstance(out, tuple) else out).sum().backward()
    return f"{done} and FlashAttention-4"


def measured(made: dict[str, Callable[[], Any]], calls: int, wait: Callable[[], Any], *, frozen: bool = True) -> dict[str, list[float]]:
    """Microseconds of each call. frozen: the garbage collector ignores all objects that were there before."""
    found: dict[str, list[float]] = {name: [] for name in made}
    groups = [name for name in made for _ in range(-(-calls // GROUP))]
    random.Random(0).shuffle(groups)
    now = time.perf_counter_ns
    for call in made.values():
        for _ in range(3 * GROUP):
            call()
        wait()
    gc.collect()
    if frozen:
        gc.freeze()
    for name in groups:
        call, times = made[name], found[name]
        call()  # warm again after the others
        wait()
        for _ in range(GROUP):
            begin = now()
            call()
            times.append((now() - begin) / 1e3)
        wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000, help="of each subject")
    parser.add_argument("--shape", default="1,8,128,64", help="B,H,S,D")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="where to write the figures, too")
    arguments = parser.parse_args()
    shape = tuple(map(int, arguments.shape.split(",")))
    on_gpu = arguments.device.startswith("cuda")
    how = shape, getattr(torch, arguments.dtype), arguments.device
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    made = on_leaves(*how)
    times = measured(subjects(*how) | made, arguments.calls, wait)
    gc.unfreeze()
    done = other_work(*how)
    times |= {name + AFTER: x for name, x in measured(made, arguments.calls, wait, frozen=False).items()}

    where = torch.cuda.get_device_name() if on_gpu else "the CPU"
    print(f"{where}, PyTorch {torch.__version__}, strobe {strobe.__version__}, {arguments.dtype} {shape}; microseconds of the host,")
    print(f"medians of {len(next(iter(times.values())))} calls in groups of {GROUP}; other work: {done}")
    print(f"{'':40}{'median':>9}{'25%':>9}{'75%':>9}")
    quartiles = {name: statistics.quantiles(x, n=4) for name, x in times.items()}
    for name, (low, median, high) in quartiles.items():
        print(f"{name:40}{median:9.1f}{low:9.1f}{high:9.1f}")
    medians = {name: x[1] for name, x in quartiles.items()}
    bounds = {
        "no gradient: strobe": ("SDPA's", medians["no gradient: SDPA"]),
        "forward + backward: strobe": (f"the empty Function's + {MARGIN:g}", medians["forward + backward: empty Function"] + MARGIN),
        **{LEAVES.format("strobe") + when: ("SDPA's", medians[LEAVES.format("SDPA") + when]) for when in ("", AFTER)},
    }
    for name, (words, bound) in bounds.items():
        verdict = "met" if medians[name] <= bound else "NOT met"
        print(f"{name}: {medians[name]:.1f}, accepted {bound:.1f} ({words}): {verdict}")
    if arguments.json:
        record = {
            "where": where,
            "torch": torch.__version__,
            "shape": shape,
            "dtype": arguments.dtype,
            "other work": done,
            "quartiles": quartiles,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
