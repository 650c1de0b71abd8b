"""Every public argument that is an integer, or holds integers, takes what it says and refuses the rest by name: none overflows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import strobe
from strobe import BlockMask, Part
from strobe._options import ROWS, Multiple, Seed, Whole, Window
from strobe.distributed import Sharding

S, D = 32, 16
VALUES = (2**64, -(2**64), True, 1.5, "3", None)
Q = torch.randn(1, 2, S, D)
PACKED = torch.randn(S, 2, D)
CU = torch.tensor([0, 10, S], dtype=torch.int32)
OUT, LSE = strobe.attention(Q, Q, Q, return_lse=True)
POINTS = strobe.hyperbolic.lift(Q)
SHARDING = Sharding.zigzag(S, 2)
HALF = Q[:, :, : S // 2]

# (entry point, argument) → a call with a value of the argument.
CALLS: dict[tuple[str, str], Callable[[Any], object]] = {}


def add(whose: str, argument: str, call: Callable[[Any], object]) -> None:
    CALLS[whose, argument] = call


def add_methods(cls: type, whose: str, good: dict[str, Any], **more: Callable[[Any], object]) -> None:
    """Adds calls of a method. good: arguments that it accepts; more: calls whose integer lies within an argument."""
    method = cls if whose == cls.__name__ else getattr(cls, whose.partition(".")[2])
    for argument, x in good.items():
        if isinstance(x, int) and not isinstance(x, bool):
            add(whose, argument, lambda value, argument=argument: method(**good | {argument: value}))
    for argument, call in more.items():
        add(whose, argument, call)


def options_of(function: Callable[..., object], arrays: tuple[Any, ...], names: Iterator[str] | list[str], **given: Any) -> None:
    for name in names:
        add(function.__name__, name, lambda value, name=name: function(*arrays, **given | {name: value}))


ROWS_OF_INTEGERS = [name for name, row in ROWS.items() if isinstance(row, (Whole, Seed, Window))]
DENSE = [name for name in ROWS_OF_INTEGERS if not name.startswith("max_seqlen") and not isinstance(ROWS[name], Multiple)]
SEEDED = {"dropout": 0.5, "seed": 1}
for forward in (strobe.attention, strobe.reference, strobe.explain):
    options_of(forward, (Q, Q, Q), DENSE, **SEEDED)
    lists = {"cu_seqlens_q": CU, "cu_seqlens_k": CU}
    options_of(forward, (PACKED, PACKED, PACKED), ["max_seqlen_q", "max_seqlen_k"], **lists)
    quantised = {"k_scale": torch.ones(1, 2, 1, D), "v_scale": torch.ones(1, 2, S)}
    options_of(forward, (Q, Q.to(torch.int8), Q.to(torch.int8)), ["k_scale_group"], **quantised)
options_of(strobe.attention_backward, (OUT, Q, Q, Q, OUT, LSE), DENSE, **SEEDED)
options_of(strobe.reference_backward, (OUT, Q, Q, Q), DENSE, **SEEDED)
options_of(strobe.hyperbolic_attention, (POINTS, POINTS, POINTS), DENSE, **SEEDED)
options_of(strobe.nn.FlashAttention, (D,), [name for name in DENSE if not isinstance(ROWS[name], Seed)])
add("FlashAttention", "head_dim", strobe.nn.FlashAttention)
add("reference", "rows", lambda x: strobe.reference(Q, Q, Q, rows=[x]))
add("reference_backward", "rows", lambda x: strobe.reference_backward(OUT, Q, Q, Q, rows=[x]))
add("reference_backward", "cols", lambda x: strobe.reference_backward(OUT, Q, Q, Q, cols=[x]))
add("dropout_mask", "shape", lambda x: strobe.dropout_mask((1, 1, 4, x), 0.5, 1))
add("dropout_mask", "seed", lambda x: strobe.dropout_mask((1, 1, 4, 4), 0.5, x))
add("dropout_mask", "offset", lambda x: strobe.dropout_mask((1, 1, 4, 4), 0.5, 1, x))
add("quantise", "group", lambda x: strobe.kv.quantise(Q, torch.int8, group=x))

SIZES = {"seqlen_q": S, "seqlen_k": S, "block_q": 16, "block_k": 16}
CSR = {"rows": torch.tensor([[[0, 1, 2]]], dtype=torch.int32), "cols": torch.tensor([0, 1], dtype=torch.int32)}
add_methods(BlockMask, "BlockMask", CSR | SIZES)
add_methods(BlockMask, "BlockMask.from_kept", {"kept": torch.ones(2, 2, dtype=torch.bool)} | SIZES)
add_methods(BlockMask, "BlockMask.from_dense", {"mask": torch.ones(S, S, dtype=torch.bool), "block_q": 16, "block_k": 16})
add_methods(BlockMask, "BlockMask.causal", SIZES)
add_methods(BlockMask, "BlockMask.butterfly", SIZES)
add_methods(BlockMask, "BlockMask.local_global", SIZES | {"local_blocks": 1, "global_blocks": 1})
add_methods(BlockMask, "BlockMask.strided", SIZES | {"local_blocks": 1, "stride": 1})
FUNCTION = {"function": lambda b, h, i, j: j <= i, "batch": 1, "heads": 1, "block": 16}
add_methods(BlockMask, "BlockMask.from_function", FUNCTION | SIZES)
OF_CAUSAL = BlockMask.causal(**SIZES)
for name in ("batch", "head", "width"):
    add("BlockMask.plot", name, lambda x, name=name: OF_CAUSAL.plot(**{name: x}))

PART = {"q_ranges": [(0, S)], "k_ranges": [(0, S)], "seqlens_q": S, "seqlens_k": S, "first_head": 0, "heads": 2, "first_batch": 0}
starts = {name: (lambda x, name=name: Part(**PART | {name: [(x, 1)]})) for name in ("q_ranges", "k_ranges")}
add_methods(Part, "Part", PART, **starts)

EQUAL = {"seqlen": S, "world_size": 2}
add_methods(Sharding, "Sharding", {"seqlen": S, "ranges": (((0, S),),)}, ranges=lambda x: Sharding(S, (((0, S), (x, 1)),)))
add_methods(Sharding, "Sharding.contiguous", EQUAL)
add_methods(Sharding, "Sharding.zigzag", EQUAL)
add_methods(
    Sharding, "Sharding.balanced", EQUAL,
    cu_seqlens=lambda x: Sharding.balanced(S, 2, [0, x]), window=lambda x: Sharding.balanced(S, 2, window=(0, x)),
)  # fmt: skip
add("Sharding.count", "rank", SHARDING.count)
add("Sharding.positions", "rank", SHARDING.positions)
add("Sharding.shard", "rank", lambda x: SHARDING.shard(Q, 2, x))
add("Sharding.shard", "dim", lambda x: SHARDING.shard(Q, x, 0))
add("Sharding.join", "dim", lambda x: SHARDING.join([HALF, HALF], x))
add("Sharding.unshard", "dim", lambda x: Sharding.contiguous(S, 1).unshard(Q, x))
add("Sharding.part", "rank", SHARDING.part)
add("Sharding.part", "k_rank", lambda x: SHARDING.part(0, k_rank=x))
for one, other in (("cu_seqlens_q", "cu_seqlens_k"), ("cu_seqlens_k", "cu_seqlens_q")):
    add("Sharding.part", one, lambda x, one=one, other=other: SHARDING.part(0, **{one: [0, x], other: [0, S]}))

REQUIRED = {
    "head_dim",
    "seqlen",
    "world_size",
    "block_q",
    "block_k",
    "stride",
    "dim",
    "local_blocks",
    "global_blocks",
    "rows",
    "cols",
    "shape",
}
REQUIRED |= {"first_head", "first_batch", "seqlens_q", "seqlens_k", "q_ranges", "k_ranges", "ranges"}


def answered(call: Callable[[Any], object], value: Any) -> str:
    """The message of a refusal, or ""."""
    try:
        call(value)
    except (TypeError, ValueError) as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize(("whose", "argument"), CALLS)
def test_what_is_no_integer_here_is_refused_by_name(whose, argument, value):
    message = answered(CALLS[whose, argument], value)
    if message:  # without a seed or a group another argument is missing, and is named
        assert re.match(rf"{'[a-z_]+' if value is None else argument}: .*; accepted [^\n]*$", message)
    else:
        optional = argument not in REQUIRED or (whose == "BlockMask.from_function" and argument.startswith("block_"))
        assert (value is None and optional) or (argument == "group" and value == 2**64)  # one group for all rows


@pytest.mark.parametrize(("whose", "argument"), CALLS)
def test_an_integer_of_numpy_is_one(whose, argument):
    """Integers of any kind are accepted, or refused for their value under the same argument's name."""
    for n in (S, 1, 0):
        named = [answered(CALLS[whose, argument], x).partition(":")[0] for x in (n, np.int64(n), np.uint8(n))]
        assert len({*named}) == 1


def public() -> Iterator[tuple[str, str]]:
    """The entry points' arguments whose annotations speak of integers."""
    functions = {name: getattr(strobe, name) for name in strobe.__all__ if callable(getattr(strobe, name))}
    functions |= {name: getattr(strobe.kv, name) for name in ("append", "copy", "gather", "quantise")}
    functions |= {"FlashAttention": strobe.nn.FlashAttention, "Sharding": Sharding}
    for cls in (BlockMask, Sharding):
        functions |= {
            f"{cls.__name__}.{name}": getattr(cls, name) for name in vars(cls) if not name.startswith("_") and callable(getattr(cls, name))
        }
    for whose, function in functions.items():
        if whose == "Gradients":
            continue
        for name, parameter in inspect.signature(function).parameters.items():
            text = str(parameter.annotation)
            if "int" in text and "dtype" not in text:
                yield whose, name


def test_no_argument_is_forgotten():
    missing = {*public()} - {*CALLS}
    lists = {"max_seqlen_q", "max_seqlen_k", "k_scale_group"}  # read by one function for all entry points
    assert {(whose, name) for whose, name in missing if name not in lists} == set()
    assert {name for _, name in CALLS} >= {*ROWS_OF_INTEGERS}


def test_a_block_may_be_larger_than_the_whole():
    """No memory is taken for a whole block."""
    mask = BlockMask.from_dense(torch.ones(5, 7, dtype=torch.bool), 2**31 - 1, 2**31 - 1)
    assert mask.to_dense().shape == (1, 1, 5, 7)
    assert mask.to_dense().all()
    for length in (0, 5):
        kept = BlockMask.from_dense(torch.ones(length, length, dtype=torch.bool), 2**31 - 1, 16)
        assert kept.to_dense().shape == (1, 1, length, length)
        assert Sharding.balanced(length, 2, block_mask=kept).seqlen == length
