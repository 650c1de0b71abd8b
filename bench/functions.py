"""Functions of the score on a GPU, beside Strobe's built-in options, its plain call, and FlexAttention compiled by Triton.

Each line is one function at one head dimension: causal unless the function says otherwise, B 2, H 16, 8192 tokens, bfloat16. `option` is
Strobe's built-in option for the same scores, or else the plain call. All of a line is timed in turns, in one process.

    python bench/functions.py [--only alibi --only document] [--dims 64,128] [--seqlen 8192] [--no-flex] [--json FILE]

With --gradients each line is a function that reads a tensor, and its backward with the gradient of that tensor beside the one without it:
`ratio`. FlexAttention makes the gradient, too.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import strobe
from strobe_tools.timing import samples_on_gpu

BATCH, HEADS = 2, 16


class Case(NamedTuple):
    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    option: dict[str, Any] | None = None  # of strobe.attention, beside causal
    causal: bool = True


def cases(seqlen: int) -> dict[str, Case]:
    """The twelve functions of docs/functions.md."""
    cuda = {"device": "cuda"}
    slopes = torch.exp2(-8 * torch.arange(1, HEADS + 1, **cuda) / HEADS).float()
    relative = torch.randn(HEADS, 2 * seqlen - 1, **cuda)
    buckets = torch.randn(32, HEADS, **cuda)
    documents = (torch.arange(seqlen, **cuda) // (seqlen // 7)).int().repeat(BATCH, 1)
    prefix = torch.full((BATCH,), seqlen // 4, dtype=torch.int32, **cuda)
    width = int(seqlen**0.5)

    def t5(x, b, h, i, j):
        distance = torch.clamp(i - j, min=0)
        far = 16 + (torch.log(distance.float() / 16) / math.log(8) * 16).to(torch.int32)
        return x + buckets[torch.where(distance < 16, distance, torch.minimum(far, torch.full_like(far, 31))), h]

    def neighbours(b, h, i, j):
        return ((i // width - j // width).abs() <= 6) & ((i % width - j % width).abs() <= 6)

    return {
        "ALiBi": Case(lambda x, b, h, i, j: x - slopes[h] * (i - j).abs(), option={"alibi_slopes": slopes}),
        "learned ALiBi": Case(lambda x, b, h, i, j: x + torch.nn.functional.softplus(slopes[h]) * (j - i)),
        "learned relative bias": Case(lambda x, b, h, i, j: x + relative[h, i - j + seqlen - 1]),
        "T5 buckets": Case(t5),
        "softcap": Case(lambda x, b, h, i, j: 30 * torch.tanh(x / 30), option={"softcap": 30.0}),
        "softcap, ALiBi": Case(
            lambda x, b, h, i, j: 30 * torch.tanh(x / 30) - slopes[h] * (i - j).abs(), option={"softcap": 30.0, "alibi_slopes": slopes}
        ),
        "tanh": Case(lambda x, b, h, i, j: torch.tanh(x)),
        "document": Case(mask=lambda b, h, i, j: documents[b, i] == documents[b, j]),
        "prefix-LM": Case(mask=lambda b, h, i, j: (j <= i) | (j < prefix[b]), causal=False),
        "sliding window": Case(mask=lambda b, h, i, j: i - j <= 1024, option={"window": (1024, 0)}),
        "dilated": Case(mask=lambda b, h, i, j: (i - j) % 4 == 0),
        "2D neighbourhood": Case(mask=neighbours, causal=False),
    }


def captured_cases(seqlen: int) -> dict[str, tuple[Callable[[torch.Tensor], Callable[..., Any]], torch.Tensor]]:
    """Functions of a tensor, by what its gradient is summed along: all pairs, those of a head, rows, columns, diagonals, or nothing."""

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device="cuda") / 2 + 0.5

    return {
        "constant": (lambda t: lambda x, b, h, i, j: x * t, numbers()),
        "head": (lambda t: lambda x, b, h, i, j: x + t[h] * (j - i), numbers(HEADS)),
        "query": (lambda t: lambda x, b, h, i, j: x * t[i], numbers(seqlen)),
        "key": (lambda t: lambda x, b, h, i, j: x + t[h, j], numbers(HEADS, seqlen)),
        "i - j": (lambda t: lambda x, b, h, i, j: x + t[h, i - j + seqlen - 1], numbers(HEADS, 2 * seqlen - 1)),
        "table": (lambda t: lambda x, b, h, i, j: x + t[i % 32, j % 32], numbers(32, 32)),
    }


def gradients(args: argparse.Namespace, dim: int, inputs: list[torch.Tensor], dout: torch.Tensor) -> list[dict[str, Any]]:
    from torch.nn.attention.flex_attention import flex_attention

    rows = []
    for name, (make, tensor) in captured_cases(args.seqlen).items():
        if args.only and name not in args.only:
            continue
        row: dict[str, Any] = {"gradient": name, "dim": dim}
        read, fixed = tensor.clone().requires_grad_(), make(tensor)
        calls: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
            "without": (lambda q, k, v, f=fixed: strobe.attention(q, k, v, score=f, causal=True), inputs),
            "with": (lambda q, k, v, t, m=make: strobe.attention(q, k, v, score=m(t), causal=True), [*inputs, read]),
        }
        if not args.no_flex:
            torch._dynamo.reset()
            flex, blocks = torch.compile(flex_attention, dynamic=False), block_mask(Case(), args.seqlen)[1]
            calls["flex"] = (lambda q, k, v, t, m=make, f=flex, b=blocks: f(q, k, v, score_mod=m(t), block_mask=b), [*inputs, read])
        timed = {}
        for who, (call, leaves) in calls.items():
            try:
                timed[who] = both(call, leaves, dout)["backward"]
            except Exception as error:
                row[f"error {who}"] = f"{type(error).__name__}: {error}"[:300]
        row |= {who: statistics.median(x) * 1e3 for who, x in samples_on_gpu(timed, args.repeats).items()}
        if "with" in row and "without" in row:
            row["ratio"] = row["with"] / row["without"]
        rows.append(row)
        print({key: round(x, 3) if isinstance(x, float) else x for key, x in row.items()}, flush=True)
    return rows


def both(call: Callable[..., torch.Tensor], inputs: list[torch.Tensor], dout: torch.Tensor) -> dict[str, Callable[[], Any]]:
    out = call(*inputs)
    for _ in range(3):  # from the second call on, calls are prepared
        torch.autograd.grad(out, inputs, dout, retain_graph=True)
    with torch.no_grad():
        for _ in range(3):
            call(*inputs)

    def forward() -> None:
        with torch.no_grad():
            call(*inputs)

    return {"forward": forward, "backward": lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)}


def first(call: Callable[..., torch.Tensor], inputs: list[torch.Tensor], dout: torch.Tensor) -> tuple[float, float]:
    """Seconds of the first forward and of the first backward."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = call(*inputs)
    torch.cuda.synchronize()
    middle = time.perf_counter()
    torch.autograd.grad(out, inputs, dout)
    torch.cuda.synchronize()
    return middle - start, time.perf_counter() - middle


def block_mask(case: Case, seqlen: int) -> tuple[dict[str, Any], Any]:
    """Strobe's options of the mask, and FlexAttention's block mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    g, causal = case.mask, case.causal
    flex = None
    if g or causal:
        seen = (lambda b, h, i, j: (j <= i) & g(b, h, i, j)) if g and causal else g or (lambda b, h, i, j: j <= i)
        flex = create_block_mask(seen, BATCH if g else None, None, seqlen, seqlen, device="cuda")
    ours: dict[str, Any] = {"causal": causal} if causal else {}
    if g:
        ours["block_mask"] = strobe.BlockMask.from_function(g, BATCH, 1, seqlen, seqlen, block=128, device="cuda")
    return ours, flex


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append")
    parser.add_argument("--dims", default="128,64")
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--gradients", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._functorch.config.donated_buffer = False  # so that a backward can be timed again and again
    rows = []
    print(torch.cuda.get_device_name(), torch.__version__, strobe.__version__, flush=True)
    for dim in map(int, args.dims.split(",")):
        torch.manual_seed(0)
        shape = (BATCH, HEADS, args.seqlen, dim)
        inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        dout = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        if args.gradients:
            rows += gradients(args, dim, inputs, dout)
            continue
        for name, case in cases(args.seqlen).items():
            if args.only and name not in args.only:
                continue
            row: dict[str, Any] = {"function": name, "dim": dim}
            try:
                ours, blocks = block_mask(case, args.seqlen)
                calls = {"function": lambda q, k, v, f=case.score, o=ours: strobe.attention(q, k, v, **({"score": f} if f else {}), **o)}
                option = ({"causal": True} if case.causal else {}) | (case.option or {})
                calls["option"] = lambda q, k, v, o=option: strobe.attention(q, k, v, **o)
                if not args.no_flex:
                    torch._dynamo.reset()
                    flex = torch.compile(flex_attention, dynamic=False)
                    calls["flex"] = lambda q, k, v, f=case.score, m=blocks, run=flex: run(q, k, v, score_mod=f, block_mask=m)
                timed = {}
                for who, call in calls.items():
                    try:
                        row[f"first {who}"] = first(call, inputs, dout)
                        timed |= {(who, what): run for what, run in both(call, inputs, dout).items()}
                    except Exception as error:
                        row[f"error {who}"] = f"{type(error).__name__}: {error}"[:300]
                if "error function" not in row and "error flex" not in row and not args.no_flex:
                    with torch.no_grad():
                        x, y = calls["function"](*inputs).float(), calls["flex"](*inputs).float()
                    row["difference"] = (x - y).abs().max().item()
                times = {key: statistics.median(x) for key, x in samples_on_gpu(timed, args.repeats).items()}
                row |= {f"{who} {what}": seconds * 1e3 for (who, what), seconds in times.items()}
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            rows.append(row)
            print({key: round(x, 3) if isinstance(x, float) else x for key, x in row.items()}, flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
