"""The runs behind each figure, as rows of its CSV."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import strobe
from strobe_tools.timing import flops as _flops

from . import lengths, rivals, traffic
from .case import Case, Row, Setting
from .clock import Call, RefusedError, attempt, times

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, int, int, int]  # B, H, N, d


def _tensors(shape: Shape, dtype: str, device: str, grad: bool = True) -> tuple[Tensor, ...]:
    import torch

    return tuple(torch.randn(shape, dtype=getattr(torch, dtype), device=device, requires_grad=grad) for _ in "qkv")


def _direction(attend: Callable[..., Tensor], leaves: tuple[Tensor, ...], backward: bool) -> Call:
    import torch

    if not backward:
        return torch.no_grad()(partial(attend, *leaves))
    out = attend(*leaves)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _both(attend: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> Call:
    import torch

    dout = torch.randn_like(leaves[0])
    return lambda: torch.autograd.grad(attend(*leaves), leaves, dout)


def _standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula, op by op, with the whole matrices S and P in memory."""
    return (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1) @ v


def _sdpa(backend: str | None, causal: bool = False) -> Callable[..., Tensor]:
    """PyTorch's scaled_dot_product_attention by a backend; None: PyTorch's own choice."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def _where(shape: Shape) -> Row:
    return dict(zip(("batch", "heads", "length", "head_dim"), shape, strict=True))


def _rates(
    attends: Mapping[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]], backward: bool, work: float, setting: Setting
) -> list[Row]:
    """One row for each call: FLOP/s, or the reason why there are none."""
    calls: dict[str, Call] = {}
    notes: dict[str, str] = {}
    for name, (attend, leaves) in attends.items():
        try:
            calls[name] = attempt(partial(_direction, attend, leaves, backward))
        except RefusedError as refusal:
            notes[name] = str(refusal)
    seconds, more = times(calls, setting)
    notes |= more
    direction = "backward" if backward else "forward"
    return [
        {"name": name, "direction": direction, "flops": work / seconds[name] if name in seconds else None, "note": notes.get(name, "")}
        for name in attends
    ]


# a: standard against flash, forward + backward


def _gpt2_medium(setting: Setting) -> Shape:
    batch = (8 if setting.quick else 64) if setting.on_gpu else (1 if setting.quick else 4)
    return batch, 16, 1024, 64


ATTENTIONS: dict[str, Callable[..., Tensor]] = {"standard": _standard, "flash": strobe.attention}


def standard_against_flash(setting: Setting) -> list[Case]:
    def run() -> list[Row]:
        batch, heads, n, d = shape = _gpt2_medium(setting)
        leaves = _tensors(shape, setting.dtype, setting.device)
        seconds, notes = times({name: _both(attend, leaves) for name, attend in ATTENTIONS.items()}, setting)
        counted = traffic.measured(__name__, ["a", str(int(setting.quick))], len(ATTENTIONS)) if setting.on_gpu else "no GPU"
        rows = []
        for i, name in enumerate(ATTENTIONS):
            # products of N x N by d: 2 forward, 4 backward; flash computes S a second time
            products = 6 if name == "standard" else 7
            model = traffic.standard if name == "standard" else traffic.fused
            numbers = batch * heads * (model(n, d, False) + model(n, d, True))
            row: Row = {"attention": name, "dtype": setting.dtype, **_where(shape)}
            row |= {"gflop": 2e-9 * products * n * n * d * batch * heads, "model_bytes": numbers * leaves[0].element_size()}
            row |= {"measured_bytes": "" if isinstance(counted, str) else counted[i]["read"] + counted[i]["written"]}
            row |= {"seconds": seconds.get(name), "note": notes.get(name, counted if isinstance(counted, str) else "")}
            rows.append(row)
        return rows

    return [Case("forward + backward", run)]


# b: block size against bytes and runtime, forward

LADDER_MODELS = {"ladder-flash1": traffic.flash1, "ladder-flash2": traffic.flash2}


def _blocks(setting: Setting) -> tuple[Shape, tuple[int, ...]]:
    if setting.on_gpu:
        return (4, 16, 512 if setting.quick else 2048, 64), (16, 32, 64, 128)
    return (1, 4, 256 if setting.quick else 1024, 64), (8, 16, 32, 64, 128, 256)


def _tiled(engine: str, block: int) -> Callable[..., Tensor]:
    return partial(strobe.attention, engine=engine, tile_q=block, tile_k=block)


def block_size(setting: Setting) -> list[Case]:
    shape, blocks = _blocks(setting)
    batch, heads, n, d = shape
    asked = [(engine, block) for engine in LADDER_MODELS for block in blocks]

    def run() -> list[Row]:
        leaves = _tensors(shape, "float32", setting.device, grad=False)
        calls = {f"{engine} {block}": _direction(_tiled(engine, block), leaves, False) for engine, block in asked}
        seconds, notes = times(calls, setting)
        counted = traffic.measured(__name__, ["b", str(int(setting.quick))], len(asked)) if setting.on_gpu else "no GPU"
        rows = []
        for i, (engine, block) in enumerate(asked):
            name = f"{engine} {block}"
            counters: Any = {"read": "", "written": "", "cache": ""} if isinstance(counted, str) else counted[i]
            row: Row = {"engine": engine, "block": block, "dtype": "float32", **_where(shape)}
            row |= {"model_bytes": 4.0 * batch * heads * LADDER_MODELS[engine](n, d, block, block)}
            row |= {"cache_bytes": counters["cache"], "read_bytes": counters["read"], "written_bytes": counters["written"]}
            row |= {"seconds": seconds.get(name), "note": notes.get(name, counted if isinstance(counted, str) else "")}
            rows.append(row)
        return rows

    return [Case("FlashAttention-1 and -2, tile by tile", run)]


# c: runtime over the fraction of nonzero blocks, forward + backward

SHARES = (1.0, 0.75, 0.5, 0.25, 0.125, 0.0625)


def block_sparsity(setting: Setting) -> list[Case]:
    if setting.on_gpu:
        shape, block = (4, 16, 2048 if setting.quick else 8192, 64), 128
    else:
        shape, block = (1, 2, 1024 if setting.quick else 4096, 64), 64

    def run() -> list[Row]:
        import torch

        leaves = _tensors(shape, setting.dtype, setting.device)
        count = shape[2] // block
        torch.manual_seed(0)
        drawn = torch.rand(count, count)
        drawn.fill_diagonal_(-1)  # every query sees its own block
        calls: dict[str, Call] = {"dense": _both(strobe.attention, leaves)}
        kept = {}
        for share in SHARES:
            mask = strobe.BlockMask.from_kept(drawn <= drawn.flatten().quantile(share), block, block).to(setting.device)
            kept[f"{share:g}"] = mask.density
            calls[f"{share:g}"] = _both(partial(strobe.attention, block_mask=mask), leaves)
        seconds, notes = times(calls, setting)
        where = {"block": block, "dtype": setting.dtype, **_where(shape)}
        return [
            {"name": name, "kept": kept.get(name, 1.0), "seconds": seconds.get(name), "note": notes.get(name, ""), **where}
            for name in calls
        ]

    return [Case("shares of blocks", run)]


# f: the ladder


class Rung(NamedTuple):
    """One bar. On a GPU a rung has its best tile from docs/ladder.md, on the CPU the engine's own."""

    name: str
    dtype: str
    engine: str | None
    forward: tuple[int, int] | None = None
    backward: tuple[int, int] | None = None

    def attend(self, backward: bool) -> Callable[..., Tensor]:
        if self.name.startswith("PyTorch"):
            return _sdpa(None)
        tile = self.backward if backward else self.forward
        wish = {} if tile is None else {"tile_q": tile[0], "tile_k": tile[1]}
        return partial(strobe.attention, engine=self.engine, **wish)


RUNGS = {
    "cuda": [
        Rung("naive", "float32", "ladder-naive", (128, 128), (128, 128)),
        Rung("FlashAttention-1", "float32", "ladder-flash1", (128, 128), (64, 64)),
        Rung("FlashAttention-2", "float32", "ladder-flash2", (64, 32), (128, 64)),
        Rung("Strobe FP32", "float32", None),
        Rung("PyTorch SDPA FP32", "float32", None),
        Rung("tensor cores", "float16", "ladder-tensor-cores", (64, 64), (128, 128)),
        Rung("Strobe FP16", "float16", None),
        Rung("PyTorch SDPA FP16", "float16", None),
    ],
    "cpu": [
        Rung("naive", "float32", "ladder-naive"),
        Rung("FlashAttention-1", "float32", "ladder-flash1"),
        Rung("FlashAttention-2", "float32", "ladder-flash2"),
        Rung("Strobe", "float32", None),
        Rung("PyTorch SDPA", "float32", None),
    ],
}


def ladder(setting: Setting) -> list[Case]:
    n = (1024 if setting.quick else 4096) if setting.on_gpu else (256 if setting.quick else 1024)
    shape = (2, 32, n, 64) if setting.on_gpu else (1, 8, n, 64)
    rungs = RUNGS[setting.device]

    def run(backward: bool) -> list[Row]:
        leaves = {dtype: _tensors(shape, dtype, setting.device) for dtype in dict.fromkeys(rung.dtype for rung in rungs)}
        attends = {rung.name: (rung.attend(backward), leaves[rung.dtype]) for rung in rungs}
        rows = _rates(attends, backward, _flops(shape, backward, False), setting)
        return [{**row, "engine": rung.engine, "dtype": rung.dtype, **_where(shape)} for row, rung in zip(rows, rungs, strict=True)]

    return [Case("forward", lambda: run(False)), Case("backward", lambda: run(True))]


# g: TFLOP/s against peers

PEERS = {
    "cuda": {"cuDNN": "CUDNN_ATTENTION", "FlashAttention-2": "FLASH_ATTENTION"},
    "cpu": {"PyTorch SDPA, flash": "FLASH_ATTENTION", "PyTorch math": "MATH"},
}


def peers(setting: Setting) -> list[Case]:
    tokens, width = (16384, 2048) if setting.on_gpu else (2048, 512)
    every = [tokens >> i for i in range(6 if setting.on_gpu else 4)]
    ns = every[:0:-2] if setting.quick else every[::-1]  # the quick figure takes every second length

    def run(d: int, n: int, causal: bool) -> list[Row]:
        shape = (tokens // n, width // d, n, d)
        leaves = _tensors(shape, setting.dtype, setting.device)
        attends: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
            "Strobe": (partial(strobe.attention, causal=causal), leaves)
        }
        attends |= {name: (_sdpa(backend, causal), leaves) for name, backend in PEERS[setting.device].items()}
        found = [row for backward in (False, True) for row in _rates(attends, backward, _flops(shape, backward, causal), setting)]
        return [{**row, "causal": int(causal), "dtype": setting.dtype, **_where(shape)} for row in found]

    asked = [(d, n, causal) for d in (64, 128, 256) for causal in (False, True) for n in ns]
    return [Case(f"d {d}, N {n}{', causal' * causal}", partial(run, d, n, causal)) for d, n, causal in asked]


# h: fused against op by op, forward, with dropout and a causal mask


def fused_against_ops(setting: Setting) -> list[Case]:
    def run() -> list[Row]:
        import torch

        batch, heads, n, _ = shape = _gpt2_medium(setting)
        q, k, v = _tensors(shape, setting.dtype, setting.device, grad=False)
        S = torch.empty(batch, heads, n, n, dtype=q.dtype, device=q.device)
        hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        calls: dict[str, Call] = {
            "Q Kᵀ": lambda: torch.matmul(q, k.mT, out=S),
            "mask": lambda: S.masked_fill(hidden, -math.inf),
            "softmax": lambda: S.softmax(-1),
            "dropout": lambda: torch.nn.functional.dropout(S, rivals.DROPOUT),
            "P V": lambda: S @ v,
            "fused": lambda: strobe.attention(q, k, v, causal=True, dropout=rivals.DROPOUT),
        }
        seconds, notes = times(calls, setting)
        where = {"dtype": setting.dtype, **_where(shape)}
        return [{"name": name, "seconds": seconds.get(name), "note": notes.get(name, ""), **where} for name in calls]

    return [Case("op by op, and fused", run)]


FIGURES: dict[str, tuple[str, Callable[[Setting], list[Case]]]] = {
    "a": ("a-standard-against-flash", standard_against_flash),
    "b": ("b-block-size", block_size),
    "c": ("c-block-sparsity", block_sparsity),
    "de": ("de-sequence-length", lengths.cases),
    "f": ("f-ladder", ladder),
    "g": ("g-peers", peers),
    "h": ("h-fused", fused_against_ops),
}


def _profiled(figure: str, setting: Setting) -> Iterable[Call]:
    """The calls whose bytes are counted, in the order of the rows made from them."""
    if figure == "a":
        leaves = _tensors(_gpt2_medium(setting), setting.dtype, setting.device)
        return [_both(attend, leaves) for attend in ATTENTIONS.values()]
    shape, blocks = _blocks(setting)
    leaves = _tensors(shape, "float32", setting.device, grad=False)
    return [_direction(_tiled(engine, block), leaves, False) for engine in LADDER_MODELS for block in blocks]


if __name__ == "__main__":
    traffic.profile(_profiled(sys.argv[1], Setting("cuda", bool(int(sys.argv[2])), 0.0)))
