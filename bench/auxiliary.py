"""Measures the cost of max_logit and column_sums on a GPU, relative to the forward alone, and the work that fits beside a forward with
reserved_sms:
python bench/auxiliary.py

Each line is one shape: the forward's time, the time with both results, the pass's share of it as measured and as predicted, and the largest
error of both results against formulas in float64 on one head. The last lines time a small kernel on another stream while a forward runs."""

from __future__ import annotations

import re
from functools import partial

import torch

import strobe

BOTH = ("max_logit", "column_sums")
SHAPES = [
    (1, 16, 16384, 128, True),
    (4, 16, 4096, 128, True),
    (4, 16, 4096, 128, False),
    (8, 32, 2048, 64, True),
    (16, 16, 1024, 128, False),
    (4, 8, 4096, 256, True),
]


def milliseconds(run, calls: int = 10) -> float:
    """The median of some calls, after two calls that do not count."""
    times = []
    for n in range(calls + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        if n > 1:
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def errors(q, k, found, causal: bool) -> tuple[float, float]:
    """The errors of both results on head 0, relative to the largest number."""
    s = q[0, 0].double() @ k[0, 0].double().T / q.shape[-1] ** 0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    columns = torch.softmax(s, 1).sum(0)
    off = (found.column_sums[0, 0].double() - columns).abs().max() / columns.max()
    return abs(found.max_logit[0, 0].item() - s.max().item()) / s.max().item(), off.item()


def main() -> None:
    print(torch.cuda.get_device_name(), strobe.__version__)
    for dtype in (torch.bfloat16, torch.float32):
        for b, h, s, d, causal in SHAPES if dtype == torch.bfloat16 else SHAPES[1:3]:
            q, k, v = (torch.randn(b, h, s, d, device="cuda", dtype=dtype) for _ in "qkv")
            call = partial(strobe.attention, q, k, v, causal=causal)
            alone, largest, both = (milliseconds(partial(call, return_lse=True, aux=aux)) for aux in ((), ("max_logit",), BOTH))
            predicted = re.search(r"forward, (\d+)% of", strobe.explain(q, k, v, causal=causal, aux=BOTH))
            off = errors(q, k, call(aux=BOTH), causal)
            print(
                f"{str(dtype)[6:]} ({b}, {h}, {s}, {d}){' causal' * causal}: {alone:.3f} ms, with max_logit {largest:.3f} ms, with both "
                f"{both:.3f} ms: {100 * (both - alone) / both:.0f}% of it, {predicted[1] if predicted else '?'}% predicted; "
                f"errors {off[0]:.1e}, {off[1]:.1e}"
            )

    q, k, v = (torch.randn(8, 16, 16384, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    small, other = torch.zeros(1 << 16, device="cuda"), torch.cuda.Stream()
    for reserved in (0, 4, 16, 32):
        alone = milliseconds(partial(strobe.attention, q, k, v, reserved_sms=reserved))
        waits = []
        for _ in range(7):
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            strobe.attention(q, k, v, reserved_sms=reserved)
            with torch.cuda.stream(other):
                torch.cuda._sleep(200_000)  # until the forward has begun
                small.add_(1)
                end.record()
            end.synchronize()
            waits.append(begin.elapsed_time(end))
        print(f"reserved_sms={reserved}: forward {alone:.3f} ms; a small kernel beside it is done after {sorted(waits)[3]:.3f} ms")


if __name__ == "__main__":
    main()
