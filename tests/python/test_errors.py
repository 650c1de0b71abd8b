"""Bad input: one clear error that names the argument, the error and the accepted values; nothing is computed and nothing written."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import strobe
from strobe._options import ELSEWHERE, ROWS
from strobe.compat import learned_scale
from strobe.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from strobe.compat.sdpa import scaled_dot_product_attention

B, H, HKV, SQ, SK, D, DV = 2, 4, 2, 20, 30, 16, 24
NAN, INF = float("nan"), float("inf")


def good() -> dict:
    """Valid arguments with every tensor present."""
    return {
        "q": torch.randn(B, H, SQ, D),
        "k": torch.randn(B, HKV, SK, D),
        "v": torch.randn(B, HKV, SK, DV),
        "mask": torch.ones(B, 1, SQ, SK, dtype=torch.bool),
        "bias": torch.randn(1, H, SQ, SK),
        "alibi_slopes": torch.rand(H),
        "sinks": torch.randn(H),
        "rng": torch.tensor([1, 2]),
        "dropout": 0.1,
        "block_mask": strobe.BlockMask.causal(SQ, SK, 16, 16),
    }


def packed() -> dict:
    return {
        "q": torch.randn(SQ, H, D),
        "k": torch.randn(SK, HKV, D),
        "v": torch.randn(SK, HKV, DV),
        "cu_seqlens_q": torch.tensor([0, 12, SQ], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 10, SK], dtype=torch.int32),
        "max_seqlen_q": 12,
        "max_seqlen_k": 20,
        "mask": torch.ones(2, 1, 12, 20, dtype=torch.bool),
        "bias": torch.randn(1, 1, 12, 20),
        "block_mask": strobe.BlockMask.causal(12, 20, 16, 16),
    }


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tampered(rows: torch.Tensor, cols: torch.Tensor) -> strobe.BlockMask:
    """A mask whose arrays were replaced after it was made (rows 0, 2, 4 and cols 0, 1, 0, 1), which a caller can always do."""
    blocks = strobe.BlockMask.causal(SQ, SK, 16, 16)
    blocks.rows, blocks.cols = rows.reshape(1, 1, 3), cols
    return blocks


# (argument that the message names, replacements of the good values)
DENSE = [
    ("q", {"q": None}),
    ("q", {"q": [[1.0]]}),
    ("q", {"q": torch.randn(H, SQ, D)}),
    ("q", {"q": torch.randn(1, B, H, SQ, D)}),
    ("q", {"q": torch.randint(0, 5, (B, H, SQ, D))}),
    ("q", {"q": torch.randn(B, H, SQ, D, dtype=torch.complex64)}),
    ("q", {"q": torch.randn(B, H, SQ, D).to(torch.float8_e4m3fn)}),
    ("q", {"q": torch.randn(B, H, SQ, D).to_sparse()}),
    ("q", {"q": torch.randn(B, H, SQ, 0)}),
    ("q", {"q": torch.randn(B, H, SQ, 577)}),
    ("q", {"q": torch.randn(B, 0, SQ, D), "bias": None, "alibi_slopes": None, "sinks": None}),
    ("k", {"k": None}),
    ("k", {"k": np.zeros((B, HKV, SK, D), np.float32)}),
    ("k", {"k": torch.randn(B, HKV, SK, D + 1)}),
    ("k", {"k": torch.randn(B + 1, HKV, SK, D)}),
    ("k", {"k": torch.randn(HKV, SK, D)}),
    ("k", {"k": torch.randn(B, HKV, SK, D).half()}),
    ("k", {"k": torch.randn(B, HKV, SK, D).double()}),
    ("k", {"k": torch.randn(B, 3, SK, D), "v": torch.randn(B, 3, SK, DV)}),
    ("k", {"k": torch.randn(B, 8, SK, D), "v": torch.randn(B, 8, SK, DV)}),
    ("k", {"k": torch.randn(B, 0, SK, D), "v": torch.randn(B, 0, SK, DV)}),
    ("k", {"k": torch.randn(B, HKV, SK, D, device="meta")}),
    ("v", {"v": None}),
    ("v", {"v": torch.randn(B, HKV, SK - 1, DV)}),
    ("v", {"v": torch.randn(B, 1, SK, DV)}),
    ("v", {"v": torch.randn(B + 1, HKV, SK, DV)}),
    ("v", {"v": torch.randn(B, HKV, SK, 0)}),
    ("v", {"v": torch.randn(B, HKV, SK, 513)}),
    ("v", {"v": torch.randn(B, HKV, SK, DV).bfloat16()}),
    ("mask", {"mask": torch.ones(B, 1, SQ, SK)}),
    ("mask", {"mask": torch.ones(B, 1, SQ, SK, dtype=torch.uint8)}),
    ("mask", {"mask": torch.ones(B, 1, SK, SQ, dtype=torch.bool)}),
    ("mask", {"mask": torch.ones(B, HKV, SQ, SK, dtype=torch.bool)}),
    ("mask", {"mask": torch.ones(1, B, 1, SQ, SK, dtype=torch.bool)}),
    ("mask", {"mask": "causal"}),
    ("mask", {"mask": np.ones((B, 1, SQ, SK), bool)}),
    ("bias", {"bias": torch.randn(1, H, SQ, SK + 1)}),
    ("bias", {"bias": torch.randn(B + 1, H, SQ, SK)}),
    ("bias", {"bias": torch.randn(1, H, SQ, SK).double()}),
    ("bias", {"bias": torch.randn(1, H, SQ, SK).half()}),
    ("bias", {"bias": torch.ones(1, H, SQ, SK, dtype=torch.bool)}),
    ("bias", {"bias": 0.5}),
    ("alibi_slopes", {"alibi_slopes": torch.rand(H + 1)}),
    ("alibi_slopes", {"alibi_slopes": torch.rand(B + 1, H)}),
    ("alibi_slopes", {"alibi_slopes": torch.rand(H).double()}),
    ("alibi_slopes", {"alibi_slopes": torch.rand(1, B, H)}),
    ("alibi_slopes", {"alibi_slopes": True}),
    ("sinks", {"sinks": torch.randn(HKV)}),
    ("sinks", {"sinks": torch.ones(H, dtype=torch.int32)}),
    ("sinks", {"sinks": torch.randn(H).double()}),
    ("sinks", {"sinks": torch.randn(1, H)}),
    ("sinks", {"sinks": [0.0] * H}),
    ("rng", {"rng": torch.tensor([1])}),
    ("rng", {"rng": torch.tensor([1, 2, 3])}),
    ("rng", {"rng": ints(1, 2)}),
    ("rng", {"rng": torch.tensor([1.0, 2.0])}),
    ("rng", {"rng": (1, 2)}),
    ("rng", {"dropout": 0.0, "rng": torch.tensor([1, 2, 3])}),
    ("rng", {"dropout": 0.0, "rng": ints(1, 2)}),
    ("rng", {"seed": 3}),
    ("rng", {"offset": 3}),
    ("seed", {"rng": None, "seed": 1.5}),
    ("seed", {"rng": None, "seed": 2**64}),
    ("seed", {"rng": None, "seed": torch.tensor(3)}),
    ("offset", {"rng": None, "seed": 1, "offset": "2"}),
    ("offset", {"rng": None, "seed": 1, "offset": -(2**63) - 1}),
    ("offset", {"rng": None, "offset": 1}),
    ("dropout", {"dropout": 1.0}),
    ("dropout", {"dropout": -0.1}),
    ("dropout", {"dropout": NAN}),
    ("dropout", {"dropout": "0.1"}),
    ("dropout", {"dropout": None}),
    ("scale", {"scale": NAN}),
    ("scale", {"scale": INF}),
    ("scale", {"scale": "auto"}),
    ("scale", {"scale": torch.ones(2)}),
    ("softcap", {"softcap": -1.0}),
    ("softcap", {"softcap": NAN}),
    ("softcap", {"softcap": INF}),
    ("softcap", {"softcap": "none"}),
    ("causal", {"causal": 1}),
    ("causal", {"causal": None}),
    ("window", {"window": -1}),
    ("window", {"window": (-1, 0)}),
    ("window", {"window": (0, -1)}),
    ("window", {"window": (1, 2, 3)}),
    ("window", {"window": (1.5, 0)}),
    ("window", {"window": "8"}),
    ("window", {"window": True}),
    ("window", {"window": 2**63}),
    ("alignment", {"alignment": "top_right"}),
    ("alignment", {"alignment": None}),
    ("alignment", {"alignment": 0}),
    ("layout", {"layout": "bsdh"}),
    ("layout", {"layout": None}),
    ("layout", {"layout": ["bhsd"]}),
    ("tile_q", {"tile_q": 0}),
    ("tile_q", {"tile_q": -64}),
    ("tile_q", {"tile_q": 64.0}),
    ("tile_q", {"tile_q": 2**40}),
    ("tile_k", {"tile_k": "64"}),
    ("tile_k", {"tile_k": -1}),
    ("threads", {"threads": 0}),
    ("threads", {"threads": -2}),
    ("threads", {"threads": 1.5}),
    ("threads", {"threads": 2**40}),
    ("engine", {"engine": "cpu-avx1024"}),
    ("engine", {"engine": ""}),
    ("engine", {"engine": 3}),
    ("return_lse", {"return_lse": "yes"}),
    *(
        (flag, {flag: wrong})
        for flag in ("deterministic", "exact_max", "allow_tf32", "invariant", "strict", "check")
        for wrong in (1, None, "yes")
    ),
    ("block_mask", {"block_mask": torch.ones(2, 2, dtype=torch.bool)}),
    ("block_mask", {"block_mask": strobe.BlockMask.causal(SQ, SK, 8, 16)}),
    ("block_mask", {"block_mask": strobe.BlockMask.causal(SQ, SK, 16, 24)}),
    ("block_mask", {"block_mask": strobe.BlockMask.causal(SQ + 16, SK, 16, 16)}),
    ("block_mask", {"block_mask": strobe.BlockMask.causal(SQ, SK + 16, 16, 16)}),
    ("block_mask", {"block_mask": strobe.BlockMask.from_kept(torch.ones(1, 3, 2, 2, dtype=torch.bool), 16, 16, SQ, SK)}),
    ("block_mask", {"block_mask": strobe.BlockMask.from_kept(torch.ones(3, 1, 2, 2, dtype=torch.bool), 16, 16, SQ, SK)}),
    ("block_mask", {"block_mask": tampered(ints(1, 2, 4), ints(0, 1, 0, 1))}),
    ("block_mask", {"block_mask": tampered(ints(0, 5, 4), ints(0, 1, 0, 1))}),
    ("block_mask", {"block_mask": tampered(ints(0, 2, 3), ints(0, 1, 0, 1))}),
    ("block_mask", {"block_mask": tampered(ints(0, 2, 4), ints(0, 2, 0, 1))}),
    ("block_mask", {"block_mask": tampered(ints(0, 2, 4), ints(-1, 1, 0, 1))}),
    ("block_mask", {"block_mask": tampered(ints(0, 2, 4), ints(1, 0, 0, 1))}),
    ("block_mask", {"block_mask": tampered(ints(0, 2, 4), ints(1, 1, 0, 1))}),
    ("max_seqlen_q", {"max_seqlen_q": SQ}),
    ("max_seqlen_k", {"max_seqlen_k": SK}),
]

PACKED = [
    ("q", {"q": torch.randn(1, SQ, H, D)}),
    ("k", {"k": torch.randn(1, SK, HKV, D)}),
    ("v", {"v": torch.randn(SK + 1, HKV, DV)}),
    ("cu_seqlens_q", {"cu_seqlens_q": None}),
    ("cu_seqlens_k", {"cu_seqlens_k": None}),
    ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([0, 12, SQ + 2**32])}),
    ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([0.0, 12, SQ])}),
    ("cu_seqlens_q", {"cu_seqlens_q": [0, 12, SQ]}),
    ("cu_seqlens_q", {"cu_seqlens_q": ints(0, 12, SQ)[None]}),
    ("cu_seqlens_q", {"cu_seqlens_q": ints(1, 12, SQ)}),
    ("cu_seqlens_q", {"cu_seqlens_q": ints(0, 12, SQ + 1)}),
    ("cu_seqlens_q", {"cu_seqlens_q": ints(0, 13, SQ)}),
    ("cu_seqlens_k", {"cu_seqlens_k": ints(0, -1, SK)}),
    ("cu_seqlens_k", {"cu_seqlens_k": ints(0, 31, SK)}),
    ("cu_seqlens_k", {"cu_seqlens_k": ints(0, 10, 20, SK)}),
    ("cu_seqlens_k", {"cu_seqlens_k": torch.zeros(0, dtype=torch.int32)}),
    ("max_seqlen_q", {"max_seqlen_q": -1}),
    ("max_seqlen_q", {"max_seqlen_q": 12.0}),
    ("max_seqlen_k", {"max_seqlen_k": 2**40}),
    ("mask", {"mask": torch.ones(2, 1, SQ, SK, dtype=torch.bool)}),
    ("bias", {"bias": torch.randn(3, 1, 12, 20)}),
]


# Wrong arguments of attention_backward only.
BACKWARD = [
    ("dout", {"dout": None}),
    ("dout", {"dout": torch.randn(B, H, SQ, D)}),
    ("dout", {"dout": torch.randn(B, H, SQ, DV).half()}),
    ("dout", {"dout": torch.randn(B, HKV, SQ, DV)}),
    ("out", {"out": torch.randn(B, H, SQ, DV + 1)}),
    ("out", {"out": torch.randn(B, H, SQ, DV).double()}),
    ("out", {"out": None}),
    ("lse", {"lse": torch.randn(B, SQ, H)}),
    ("lse", {"lse": torch.randn(B, H, SQ).half()}),
    ("lse", {"lse": torch.randn(B, H, SQ, 1)}),
    ("lse", {"lse": None}),
    ("dlse", {"dlse": torch.randn(B, H, SQ, 1)}),
    ("dlse", {"dlse": torch.randn(H, SQ)}),
    ("dlse", {"dlse": torch.randn(B, H, SQ).double()}),
    ("k", {"k": torch.randn(B, HKV, SK, D + 1)}),
    ("dropout", {"dropout": 2.0}),
]


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.detach().reshape(-1).view(torch.uint8).clone()


def expect(name: str, arguments: dict, function=strobe.attention, positional: tuple[str, ...] = ("q", "k", "v")) -> str:
    """The call fails with one line that starts with the argument's name; its tensors keep their contents. Returns the line."""
    readable = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.numel() and not x.is_sparse]
    before = [bits(x) for x in readable]
    options = {n: x for n, x in arguments.items() if n not in positional}
    with pytest.raises((ValueError, TypeError)) as raised:
        function(*(arguments[n] for n in positional), **options)
    message = str(raised.value)
    assert re.match(rf"{name}\b", message), message
    assert "accepted" in message, message
    assert "\n" not in message, message
    assert all(torch.equal(bits(x), b) for x, b in zip(readable, before, strict=True))
    return message


def ids(rows: list) -> list[str]:
    return [f"{name}-{i}" for i, (name, _) in enumerate(rows)]


HUGE = 10**400
SURROGATE = "\ud800"


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


# Values that no option accepts, and below, for each kind of option, further values that it refuses.
ANYWHERE = [
    "text",
    SURROGATE,
    b"1",
    1j,
    np.complex64(1),
    np.str_("1"),
    np.datetime64(1, "s"),
    np.timedelta64(1),
    [1],
    {},
    object(),
    Unprintable(),
]
ANYWHERE += [torch.tensor(1.0), np.array(1.0), torch.ones(50, 50)]
NUMBERS = {
    name: [HUGE, -HUGE, 10**5000, NAN, INF, -INF, True, np.bool_(False), np.float64(NAN)] for name in ("scale", "softcap", "dropout")
}
NUMBERS["dropout"] += [-1, 1.0, 2]
INTEGERS = {
    name: [HUGE, 10**5000, -1, 2**63, 1.0, True, np.float32(1)] for name in ("tile_q", "tile_k", "threads", "window", "seed", "offset")
}
INTEGERS["window"] += [(HUGE, 1), (1, -HUGE), (1,), (1, 2, 3), (1, "2"), (True, 1), (torch.tensor(1), 1)]
for name in ("seed", "offset"):
    INTEGERS[name] = [HUGE, 10**5000, 2**64, -(2**63) - 1, 1.0, True]
WORDS = {name: ["", "\0", "cpu\0avx2", SURROGATE, "x" * 10**6, "\n", 1] for name in ("engine", "alignment", "layout", "score")}
FLAGS = {
    name: [1, 0, None, NAN, HUGE, 10**5000]
    for name in ("causal", "deterministic", "exact_max", "allow_tf32", "invariant", "strict", "check")
}
OPTIONS = [(name, x) for kinds in (NUMBERS, INTEGERS, WORDS, FLAGS) for name, values in kinds.items() for x in values + ANYWHERE]
OPTIONS += [("beta", x) for x in (HUGE, NAN, INF, 0, -1, *ANYWHERE)] + [("shift", x) for x in (HUGE, NAN, INF, *ANYWHERE)]


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in OPTIONS))
def test_options(name):
    """Any wrong value gives one short line; the dropout mask and the hyperbolic functions say the same."""
    q = torch.randn(1, 1, 4, 8)
    beside: dict = {"offset": {"seed": 1}, "beta": {"score": "hyperbolic"}, "shift": {"score": "hyperbolic"}}.get(name, {})
    for x in (x for of, x in OPTIONS if of == name and not (name in ("engine", "scale") and x is None)):
        with pytest.raises((TypeError, ValueError)) as raised:
            strobe.attention(q, q, q, **beside, **{name: x})
        message = str(raised.value)
        assert re.match(rf"{name}: .*; accepted |{name}: .*accepted", message), message
        assert "\n" not in message
        assert len(message) < 500
        message.encode()
        if name in ("dropout", "seed", "offset"):
            given = {"dropout": 0.5, "seed": 1} | {name: x}
            with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
                strobe.dropout_mask((1, 1, 4, 4), **given)
    if name == "shift":
        for x in (HUGE, 10**5000, NAN, *ANYWHERE):
            with pytest.raises((TypeError, ValueError), match="^c: .*; accepted is a finite number"):
                strobe.hyperbolic_attention(*[strobe.hyperbolic.lift(q)] * 3, c=x)


def test_numbers_of_any_kind():
    q = torch.randn(1, 1, 64, 16)
    expected = strobe.attention(q, q, q, scale=0.5, window=(3, 2), tile_q=32, threads=1)
    for real in (np.float32, np.float64, np.float16, Fraction, Decimal):
        for whole in (np.int8, np.int64, np.uint16, int):
            found = strobe.attention(q, q, q, scale=real(0.5), window=(whole(3), whole(2)), tile_q=whole(32), threads=whole(1))
            assert torch.equal(found, expected)
            assert torch.equal(strobe.attention(q, q, q, dropout=0.5, seed=whole(3)), strobe.attention(q, q, q, dropout=0.5, seed=3))


@pytest.mark.parametrize("shape", [3, None, "1144", (1, 1, 4), (1, 1, 4, 4.0), (1, 1, 4, HUGE), [[1], 1, 1, 1]])
def test_the_shape_of_a_dropout_mask(shape):
    with pytest.raises((TypeError, ValueError), match=r"^shape: .*; accepted (is \(B, H, Sq, Sk\)|is an integer|are integers)") as raised:
        strobe.dropout_mask(shape, 0.5, 1)
    assert {each.argument for each in raised.value.refusals} == {"shape"}


def test_gradients_of_what_is_not_there():
    """Programs that trace the operators can call them directly, so the operators check `needed`."""
    q = torch.randn(1, 1, 4, 8)
    out, lse = strobe.attention(q, q, q, return_lse=True)
    for device in ("cpu", "meta"):
        arguments = [x.to(device) for x in (out, q[..., 0], out, lse, q, q, q)]
        with pytest.raises(ValueError, match="^needed: dbias of a call without bias; accepted are the gradients of what is given"):
            torch.ops.strobe.attention_backward(*arguments, needed=[True] * 5)
        with pytest.raises(ValueError, match="^needed: 3 values; accepted are 5 to 13, of dq, dk, dv, dbias, dsinks, dcaptured_0, "):
            torch.ops.strobe.attention_backward(*arguments, needed=[True] * 3)


def test_no_memory_for_the_results():
    """The error is a MemoryError, as promised, and also torch's own error, so that handlers of either catch it."""
    for heads, length in ((2**20, 2**24), (2**30, 2**27)):
        q = torch.zeros(1).expand(1, heads, length, 8)
        for call in (lambda q=q: strobe.attention(q, q, q), lambda q=q: strobe.reference(q, q, q)):
            with pytest.raises(MemoryError) as raised:
                call()
            assert isinstance(raised.value, RuntimeError)
        n = np.broadcast_to(np.zeros(1, np.float32), (1, heads, length, 8))
        with pytest.raises(MemoryError):
            strobe.attention(n, n, n)


@pytest.mark.parametrize(("name", "wrong"), DENSE, ids=ids(DENSE))
def test_dense(name, wrong):
    expect(name, good() | wrong)


@pytest.mark.parametrize(("name", "wrong"), PACKED, ids=ids(PACKED))
def test_packed(name, wrong):
    expect(name, packed() | wrong)


@pytest.mark.parametrize(("name", "wrong"), BACKWARD, ids=ids(BACKWARD))
def test_backward(name, wrong):
    arguments = good()
    out, lse = strobe.attention(**arguments, return_lse=True)
    arguments |= {"dout": torch.randn_like(out), "out": out, "lse": lse, "dlse": torch.randn_like(lse)} | wrong
    expect(name, arguments, strobe.attention_backward, ("dout", "q", "k", "v", "out", "lse"))


@pytest.mark.parametrize("function", [strobe.reference, strobe.explain])
@pytest.mark.parametrize(("name", "wrong"), [DENSE[2], DENSE[13], DENSE[24], ("softcap", {"softcap": -1.0})])
def test_the_other_functions_say_the_same(name, wrong, function):
    assert expect(name, good() | wrong, function) == expect(name, good() | wrong)


def test_shapes_are_shown_as_they_were_given():
    arguments = {"q": torch.randn(2, 20, 4, 16), "k": torch.randn(2, 30, 2, 17), "v": torch.randn(2, 30, 2, 16), "layout": "bshd"}
    assert "(2, 30, 2, 17)" in expect("k", arguments)


def test_every_reason_is_told():
    """Two wrong arguments give two lines, so that a caller need not correct a call one error at a time."""
    with pytest.raises(ValueError, match=r"(?s)softcap: .*\nsinks: |sinks: .*\nsoftcap: "):
        strobe.attention(**good() | {"softcap": -1.0, "sinks": torch.randn(H + 1)})


def names(arguments: dict, function=strobe.attention) -> list[str]:
    """The arguments that the refusal names, one per line."""
    with pytest.raises((ValueError, TypeError)) as raised:
        function(**arguments)
    lines = str(raised.value).splitlines()
    assert all("accepted" in line for line in lines)
    return sorted(line.partition(":")[0] for line in lines)


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": "a", "causal": "x", "layout": "y", "threads": -1, "engine": ""},
        {"causal": "x", "softcap": -1.0, "engine": "no-such", "mask": torch.ones(B, 1, SQ, SK + 1, dtype=torch.bool)},
        {"q": torch.randn(B, H, SQ, 600), "k": torch.randn(B, HKV, SK, 600), "v": torch.randn(B, HKV, SK, 600)},
        {"q": None, "k": [1.0], "v": 3, "bias": 0.5, "scale": "auto"},
        {"q": torch.randn(H, SQ, D), "k": torch.randn(HKV, SK, D), "tile_q": 0},
        {"rng": None, "seed": 1.5, "offset": "2", "max_seqlen_q": SQ, "alignment": 0, "return_lse": 1, "block_mask": 1},
        {"rng": ints(1, 2), "scale": NAN, "threads": 1025, "deterministic": 1},
        {"q": torch.randn(H, SQ, D), "softcap": -1.0, "dropout": 2.0, "engine": "no-such", "mask": torch.ones(3, 3), "causal": 1},
        {"q": 3, "k": torch.randn(B, HKV, SK, 600), "softcap": -1.0, "bias": torch.ones(1, dtype=torch.bool), "dropout": NAN},
        {"layout": "bsdh", "softcap": -1.0, "sinks": torch.randn(1, H), "scale": INF},
        {"v": torch.randn(HKV, SK, DV), "alibi_slopes": torch.rand(H + 1), "mask": torch.ones(1, 1, SQ, SK + 1, dtype=torch.bool)},
        {"score": "cosine", "shift": 2.0, "softcap": -1.0},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_every_wrong_argument_is_named(wrong):
    """One message names the arguments that Python refuses and those that the library refuses."""
    alright = {"shift"}  # right arguments beside the wrong ones
    assert names(good() | wrong) == sorted(name for name, x in wrong.items() if (x is not None or name == "q") and name not in alright)


@pytest.mark.parametrize(
    "wrong",
    [
        {"cu_seqlens_q": [0, 12, SQ], "softcap": -1.0, "scale": "auto"},
        {"cu_seqlens_q": ints(0, 12, SQ + 1), "max_seqlen_k": "20", "dropout": 1.0},
        {"max_seqlen_q": 12.0, "alibi_slopes": torch.rand(H + 1), "causal": "x"},
        {"max_seqlen_q": -1, "block_mask": 3, "k": torch.randn(SK, HKV, D).half()},
        {"v": torch.randn(SK, 1, HKV, DV), "bias": torch.randn(1, 1, 12, 19), "engine": "no-such"},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_every_wrong_argument_of_packed_sequences_is_named(wrong):
    assert names(packed() | wrong) == sorted(wrong)


def test_packed_heads_ahead_of_tokens_are_named():
    q = torch.randn(H, SQ, D)
    with pytest.raises(ValueError, match="^cu_seqlens_q: ") as raised:
        strobe.attention(q, q, q, cu_seqlens_q=ints(0, SQ), cu_seqlens_k=ints(0, SQ))
    assert str(raised.value).partition("\n")[0].endswith("; packed q is (tokens, heads, D), and this one looks like (heads, tokens, D)")


def test_a_mask_of_the_longest_sequences_wants_their_lengths():
    arguments = packed() | {"mask": torch.ones(1, 1, 12, 20, dtype=torch.bool)}
    longest = {name: arguments.pop(name) for name in ("max_seqlen_q", "max_seqlen_k")}
    del arguments["bias"], arguments["block_mask"]
    hint = "; max_seqlen_q and max_seqlen_k give the lengths of its last two axes"
    assert expect("mask", arguments).endswith(hint)
    assert hint not in expect("mask", arguments | longest | {"mask": arguments["mask"][..., :3]})


@pytest.mark.parametrize("k", ["x", None])
def test_scales_beside_a_k_that_is_no_tensor(k):
    q = torch.randn(1, 4, 16, D)
    with pytest.raises((ValueError, TypeError), match="^k: "):
        strobe.attention(q, k, q, layout="bshd", k_scale=torch.ones(1, 4, 16))


@pytest.mark.parametrize("side", ["q", "k"])
def test_a_longest_length_of_zero_is_no_absent_one(side):
    """Every call checks it, because 0 means "none" to the library."""
    name, most = f"max_seqlen_{side}", {"q": 12, "k": 20}[side]
    arguments = {x: y for x, y in packed().items() if x not in ("mask", "bias", "block_mask")} | {name: 0}
    message = f"{name}: 0, and a sequence has {most} tokens; accepted is {most} or more, or None"
    assert [expect(name, arguments) for _ in range(3)] == [message] * 3
    for _ in range(3):
        nothing = strobe.attention(**arguments | {f"cu_seqlens_{side}": ints(0, 0, 0)})
        assert not nothing.any()
    assert expect(name, arguments) == message
    with pytest.raises(ValueError, match=f"^{name}: 0, and a sequence has"):
        strobe.attention(**{x: y.numpy() if isinstance(y, torch.Tensor) else y for x, y in arguments.items()})


class Index:
    """Converts to an integer, and cannot be compared with another one."""

    def __index__(self) -> int:
        return 3


@pytest.mark.parametrize("value", [int, np.int64, Index()], ids=["int", "int64", "index"])
@pytest.mark.parametrize("name", ["threads", "window", "seed", "offset", "tile_q", "max_seqlen_k", "k_scale_group", "reserved_sms"])
def test_what_only_looks_like_an_integer_is_named(name, value):
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(TypeError, match=rf"(?m)^{name}: .*; accepted is"):
        strobe.attention(q, q, q, **{name: value})


@pytest.mark.parametrize("array", [torch.Tensor, np.ndarray])
@pytest.mark.parametrize("side", ["q", "k"])
def test_a_longest_length_of_zero_is_the_size_of_the_scores(side, array):
    """A batch without queries, or without keys, has only padding."""
    lengths = {"q": 3, "k": 4} | {side: 0}
    cu = {x: ints(0, 2, 5) if x != side else ints(0, 0, 0) for x in "qk"}
    given = {x: torch.randn(6, 2, 16) for x in "qkv"} | {f"cu_seqlens_{x}": cu[x] for x in "qk"}
    given |= {f"max_seqlen_{x}": n for x, n in lengths.items()}
    shape = 2, 1, *lengths.values()
    bias, mask = torch.zeros(shape), torch.ones(shape, dtype=torch.bool)
    blocks = strobe.BlockMask.causal(lengths["q"], lengths["k"], 16, 16)

    def own(given: dict) -> dict:
        return {x: y.numpy() if array is np.ndarray and isinstance(y, torch.Tensor) else y for x, y in given.items()}

    for more in ({"mask": mask}, {"bias": bias}, {"bias": bias[0], "mask": mask[:, :, :1]}, {"block_mask": blocks}):
        out, lse = strobe.attention(**own(given | more), return_lse=True)
        assert out.shape == (6, 2, 16)
        assert not out.any()
        assert (lse == -np.inf).all()
        arguments = own(given | more)
        for found in (strobe.attention_backward(out, out=out, lse=lse, **arguments), strobe.reference_backward(out, **arguments)):
            assert not any(x.any() for x in (found.dq, found.dk, found.dv))
            assert tuple(getattr(found.dbias, "shape", ())) == tuple(more["bias"].shape if "bias" in more else ())
    larger = torch.zeros(2, 1, *({"q": 3, "k": 4} | {side: 6}).values())
    axis = {"q": -2, "k": -1}[side]
    for name, x in (("bias", larger), ("mask", larger.bool())):
        with pytest.raises(ValueError, match=rf"^{name}: shape .*; accepted is one whose axis {axis} is max_seqlen_{side}, 0, or 1$"):
            strobe.attention(**own(given | {name: x}))
    with pytest.raises(ValueError, match=f"^block_mask: .*; accepted is one of {lengths['q']} queries and {lengths['k']} keys"):
        strobe.attention(**given, block_mask=strobe.BlockMask.causal(6, 6, 16, 16))
    if array is torch.Tensor:
        bias.requires_grad_()
        assert torch.autograd.grad(strobe.attention(**given, bias=bias).sum(), bias)[0].shape == bias.shape


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("sk", [7, 256])
def test_a_wrong_layout_is_guessed(layout, sk):
    other = {"bhsd": "bshd", "bshd": "bhsd"}[layout]
    q, k = torch.randn(2, 128, 8, 64), torch.randn(2, sk, 2, 64)
    if layout == "bshd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    assert expect("k", {"q": q, "k": k, "v": k, "layout": layout}).endswith(f'; did you mean layout="{other}"?')
    assert strobe.attention(q, k, k, layout=other).shape == q.shape


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_right_arguments_are_not_called_wrong_beside_a_guess(layout):
    """Arguments whose shapes depend on H, Sq and Sk are not refused if q, k and v have the wrong layout."""
    other = {"bhsd": "bshd", "bshd": "bhsd"}[layout]
    q, k = torch.randn(2, 12, 4, 16), torch.randn(2, 20, 2, 16)
    if layout == "bshd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    right = {
        "bias": torch.zeros(1, 4, 12, 20),
        "mask": torch.ones(2, 1, 1, 20).bool(),
        "alibi_slopes": torch.rand(4),
        "sinks": torch.zeros(4),
    }
    right |= {"seqused_k": ints(20, 15), "block_mask": strobe.BlockMask.causal(12, 20, 16, 16)}
    assert strobe.attention(q, k, k, layout=other, **right).shape == q.shape
    hint = f'k: {k.shape[1 + (layout == "bshd")]} heads .*; did you mean layout="{other}"?'.replace("?", r"\?")
    without = {name: x for name, x in right.items() if name != "block_mask"}
    for given in (right, without):
        with pytest.raises(ValueError, match=f"^{hint}$"):
            strobe.attention(q, k, k, layout=layout, **given)
        with pytest.raises(ValueError, match=f"^threads: .*\n{hint}$"):
            strobe.attention(q, k, k, layout=layout, threads="2", **given)
    with pytest.raises(ValueError, match=f"(?s)^{hint}\nbias: dtype .*; accepted|^bias: dtype .*\n{hint}$"):
        strobe.attention(q, k, k, layout=layout, bias=right["bias"].int())


@pytest.mark.parametrize("packed_q", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_layout_of_pools_is_guessed(layout, packed_q):
    other = {"bhsd": "bshd", "bshd": "bhsd"}[layout]
    q, pool = torch.randn(2, 3, 4, 16), torch.randn(10, 16, 2, 16)
    if layout == "bshd":
        q, pool = q.transpose(1, 2), pool.transpose(1, 2)
    given = {"page_table": torch.arange(10).int().view(2, 5), "seqused_k": ints(70, 20)}
    if packed_q:
        q, given = torch.randn(6, 4, 16), given | {"cu_seqlens_q": ints(0, 3, 6)}
    assert strobe.attention(q, pool, pool, layout=other, **given).shape == q.shape
    axis = {"bhsd": "second", "bshd": "third"}[layout]
    message = rf"^k: 16 heads for the \d of q; .*, on the {axis} axis of \(pages, .*\); did you mean layout=\"{other}\"\?$"
    with pytest.raises(ValueError, match=message):
        strobe.attention(q, pool, pool, layout=layout, **given)


def test_a_length_is_held_against_what_was_given():
    x, cu = torch.randn(20, 2, 8), ints(0, 9, 20)
    for side in "qk":
        with pytest.raises(ValueError, match=f"^cu_seqlens_{side}: sequence 0 has 9 tokens; accepted is at most max_seqlen_{side} = 4$"):
            strobe.attention(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu, **{f"max_seqlen_{side}": 4})
    with pytest.raises(ValueError, match="^cu_seqlens_q: sequence 0 has 9 tokens; accepted is at most Tq = 4$"):
        strobe.attention(x[:4], x, x, cu_seqlens_q=ints(0, 9, 9), cu_seqlens_k=cu)
    with pytest.raises(ValueError, match="^cu_seqlens_k: sequence 0 has 9 tokens; accepted is at most max_seqlen_k = 4$"):
        flash_attn_varlen_func(x, x, x, cu, cu, 20, 4)


def test_a_layout_is_guessed_only_where_it_fits():
    for wrong in ({"k": torch.randn(B, 3, SK, D), "v": torch.randn(B, 3, SK, DV)}, {"k": torch.randn(B, 3, SQ, D)}):
        with pytest.raises(ValueError, match="heads for the") as raised:
            strobe.attention(**good() | wrong)
        assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    ("function", "head_axis", "hint"),
    [
        (flash_attn_func, 2, "; q, k, v are (B, S, H, D) here; did you mean q.transpose(1, 2)?"),
        (scaled_dot_product_attention, 1, "; query, key, value are (B, H, S, D) here; did you mean query.transpose(1, 2)?"),
        (learned_scale.flash_attention, 1, "; Q, K, V are (B, H, S, D) here; did you mean Q.transpose(1, 2)?"),
    ],
)
def test_functions_without_a_layout_say_which_is_theirs(function, head_axis, hint):
    q, k = torch.randn(2, 8, 128, 64), torch.randn(2, 2, 256, 64)
    other, own = ((q, k, k), [x.transpose(1, 2) for x in (q, k, k)])[:: 1 if head_axis == 2 else -1]
    with pytest.raises(ValueError, match="256 heads for the 128 of ") as raised:
        function(*other)
    assert str(raised.value).endswith(hint)
    assert function(*own).shape == own[0].shape
    three = torch.randn(2, 3, 3, 64)  # a k that no layout makes right
    with pytest.raises(ValueError, match="heads for the ") as raised:
        function(q, three, three)
    assert "did you mean" not in str(raised.value)


def test_a_part_of_another_tensor_is_not_told_to_change_its_axes():
    q, kv, cache = torch.randn(2, 8, 128, 64), torch.randn(2, 2, 2, 256, 64).transpose(1, 2), torch.randn(2, 2, 256, 64)
    for call in (lambda: flash_attn_kvpacked_func(q, kv), lambda: flash_attn_with_kvcache(q, cache, cache)):
        with pytest.raises(ValueError, match="256 heads for the 128 of q; accepted are the divisors of 128$"):
            call()


@pytest.mark.parametrize("function", [strobe.attention, strobe.nn.FlashAttention(D), strobe.explain])
def test_packed_tokens_without_lengths_are_told_what_is_missing(function):
    arguments = {name: packed()[name] for name in "qkv"}
    message = r"^q: shape \(20, 4, 16\); accepted is \(B, H, Sq, D\); did you mean cu_seqlens_q and cu_seqlens_k, of packed sequences, "
    message += r"or q\[None\], of one sequence\?$"
    with pytest.raises(ValueError, match=message.replace("$", r"\n")):
        function(**arguments)


def test_a_padding_mask_is_documented_beside_what_it_would_be_taken_for():
    assert "mask[:, None, None, :]" in strobe.attention.__doc__
    q = torch.randn(B, H, SQ, D)
    k = torch.randn(B, HKV, SK, D)
    padding = torch.arange(SK) < torch.tensor([[SK], [7]])
    out = strobe.attention(q, k, k, mask=padding[:, None, None, :])
    assert torch.allclose(out[1], strobe.attention(q[1:], k[1:, :, :7], k[1:, :, :7])[0], atol=1e-5)


def test_every_wrong_argument_of_a_backward_is_named():
    arguments = good()
    out, lse = strobe.attention(**arguments, return_lse=True)
    arguments |= {"dout": out[:1], "out": None, "lse": lse.half(), "causal": 2, "softcap": -1.0}
    assert names(arguments, strobe.attention_backward) == ["causal", "dout", "lse", "out", "softcap"]


def test_every_wrong_argument_of_other_functions_is_named():
    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    assert names({"out_a": out, "lse_a": lse.half(), "out_b": out[:, :1], "lse_b": lse[..., :1]}, strobe.merge) == [
        "lse_a",
        "lse_b",
        "out_b",
    ]
    assert names({"out_a": out, "lse_a": None, "out_b": 3, "lse_b": lse, "layout": "x"}, strobe.merge) == ["layout", "lse_a", "out_b"]
    sizes = {"seqlen_q": -1, "seqlen_k": 64, "block_q": 0, "block_k": 16.0}
    assert names(sizes, strobe.BlockMask.causal) == ["block_k", "block_q", "seqlen_q"]
    k_cache, q = torch.zeros(2, 8, 4, 16), torch.zeros(2, 1, 4, 16)
    cache = {"k_cache": k_cache, "v_cache": k_cache[:, 1:], "k": q.half(), "v": q[:1], "cache_seqlens": 3}
    assert names({"q": q, **cache}, flash_attn_with_kvcache) == ["k", "v", "v_cache", "v_cache"]


def test_wrong_kinds_alone_are_a_type_error():
    with pytest.raises(TypeError):
        strobe.attention(**good() | {"causal": 1, "scale": "auto"})
    with pytest.raises(ValueError, match=r"(?s)causal: .*\nsoftcap: "):
        strobe.attention(**good() | {"causal": 1, "softcap": -1.0})


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ((B, SK), "; of (B, Sk), {}[:, None, None, :]"),
        ((3, 1, SK), "; of (B, 1, Sk), {}[:, None]"),
        ((3, SQ, SK), "; of (B, Sq, Sk), {}[:, None]"),
        ((3, 3), ""),
        ((H, SK), ""),
        ((SK, SQ), ""),
        ((5, 1, SK), ""),
    ],
)
def test_a_padding_mask_is_told_its_axes(name, shape, hint, layout):
    """The message shows the mask's own shape, and a hint if it is a padding mask."""
    batch = shape[0] if len(shape) == 3 and hint else B
    q, k = torch.randn(batch, H, SQ, D), torch.randn(batch, HKV, SK, D)
    if layout == "bshd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    dtype = torch.bool if name == "mask" else torch.float32
    message = expect(name, {"q": q, "k": k, "v": k, "layout": layout, name: torch.ones(shape, dtype=dtype)})
    assert re.fullmatch(re.escape(f"{name}: shape {shape}; accepted is ") + r"[^;]*" + re.escape(hint.format(name)), message)


def test_a_padding_mask_of_packed_sequences_is_told_its_axes():
    arguments = {name: x for name, x in packed().items() if name not in ("bias", "block_mask")}
    assert expect("mask", arguments | {"mask": torch.ones(2, 20, dtype=torch.bool)}).endswith("; of (B, Sk), mask[:, None, None, :]")
    assert "[:, None" not in expect("mask", arguments | {"mask": torch.ones(2, SK, dtype=torch.bool)})


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_other_signatures_name_their_own_mask(dtype):
    q, k = torch.randn(2, 4, 16, D), torch.randn(2, 4, 32, D)
    padding = torch.ones(2, 32, dtype=dtype)
    for call in (
        lambda: scaled_dot_product_attention(q, k, k, padding),
        lambda: learned_scale.FlashAttention(D)(q, k, k, padding),
    ):
        with pytest.raises(ValueError, match=r"^attn_mask: shape \(2, 32\); .*; of \(B, Sk\), attn_mask\[:, None, None, :\]$"):
            call()


def test_other_signatures_name_their_own_lengths():
    qkv = torch.randn(8, 3, H, D)
    with pytest.raises(ValueError, match=r"^cu_seqlens: dtype torch.int16; accepted is int32, int64; cu_seqlens.int\(\)$"):
        flash_attn_varlen_qkvpacked_func(qkv, torch.tensor([0, 8]).short(), 8)
    with pytest.raises(ValueError, match=r"^Q: shape \(4, 8, 16\); accepted is \(B, H, Sq, D\); did you mean Q\[None\], of one sequence\?"):
        learned_scale.flash_attention(*(torch.randn(4, 8, D) for _ in range(3)))


@pytest.mark.parametrize(
    ("name", "tensor", "way"),
    [
        ("mask", torch.zeros(1, H, SQ, SK), "dtype float32; accepted is bool; what is added to the scores is bias"),
        ("mask", torch.ones(1, H, SQ, SK, dtype=torch.uint8), "dtype uint8; accepted is bool; of zeros and ones, mask.bool()"),
        ("bias", torch.ones(1, H, SQ, SK, dtype=torch.bool), "dtype bool; accepted is float32; what hides is mask"),
    ],
)
def test_a_wrong_dtype_names_the_way_out(name, tensor, way):
    assert expect(name, good() | {name: tensor}) == f"{name}: {way}"


@pytest.mark.parametrize("of_v", [torch.int8, torch.float32])
def test_a_dtype_of_v_beside_scales_is_that_of_k(of_v):
    k, v = torch.zeros(B, H, SK, D // 2, dtype=torch.uint8), torch.zeros(B, H, SK, D, dtype=of_v)
    scale = torch.ones(B, H, SK)
    message = expect("v", good() | {"k": k, "v": v, "k_scale": scale, "v_scale": scale})
    assert message == f"v: dtype {str(of_v).removeprefix('torch.')}; accepted is uint8, as k"


def test_k_scale_group_is_refused_in_pythons_words():
    """If the scales belong to columns, the hint asks for no value that is refused."""
    k, scale = torch.zeros(B, H, SK, D, dtype=torch.int8), torch.ones(B, H, SK)
    quantised = good() | {"k": k, "v": k, "k_scale": scale, "v_scale": scale}
    for group in (40, 0, -32, 2**31):
        for of_k in (scale, torch.ones(B, H, 1, D)):
            assert expect("k_scale_group", quantised | {"k_scale_group": group, "k_scale": of_k}) == (
                f"k_scale_group: {group}; accepted are the multiples of 32 below 2^31, or None"
            )
    assert expect("k_scale_group", good() | {"k_scale_group": 32}) == "k_scale_group: 32 without k_scale; accepted is None"


CASTS = [
    ("cu_seqlens_k", "int16", "int32, int64", ".int()"),
    ("seqused_k", "uint8", "int32, int64", ".int()"),
    ("cu_seqlens_q", "float32", "int32, int64", ""),
    ("rng", "int32", "int64", ".long()"),
    ("rng", "float32", "int64", ""),
    ("mask", "uint8", "bool", ".bool()"),
    ("bias", "float64", "float32", ".float()"),
    ("sinks", "float64", "float32", ".float()"),
    ("alibi_slopes", "float16", "float32", ".float()"),
    ("k_scale", "float64", "float16, float32", ".float()"),
    ("v_scale", "int32", "float16, float32", ".float()"),
]


@pytest.mark.parametrize("numpys", [False, True], ids=["torch", "numpy"])
@pytest.mark.parametrize(("name", "given", "accepted", "cast"), CASTS)
def test_a_wrong_dtype_names_the_cast_that_the_caller_writes(name, given, accepted, cast, numpys):
    arguments: dict = {}
    if name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
        arguments = {x: y for x, y in packed().items() if x not in ("block_mask", "mask", "bias")} | {"seqused_k": ints(10, 20)}
    elif name in ("k_scale", "v_scale"):
        k, scale = torch.zeros(B, HKV, SK, D, dtype=torch.int8), torch.ones(B, HKV, SK)
        arguments = {"q": good()["q"], "k": k, "v": k, "k_scale": scale, "v_scale": scale}
    else:
        arguments = {x: y for x, y in good().items() if x != "block_mask"}
    arguments[name] = arguments[name].to(getattr(torch, given))
    if numpys:
        arguments = {x: y.numpy() if isinstance(y, torch.Tensor) else y for x, y in arguments.items()}
        dtype = "int32" if "int32" in accepted else accepted.split(", ")[-1]
        cast = cast and f".astype({dtype if dtype == 'bool' else f'np.{dtype}'})"
    hint = f"; of zeros and ones, {name}{cast}" if name == "mask" else f"; {name}{cast}" if cast else ""
    shown = given if numpys or given != "int16" else f"torch.{given}"
    assert expect(name, arguments) == f"{name}: dtype {shown}; accepted is {accepted}{hint}"


def test_sinks_beside_float64_are_told_to_be_that_too():
    arguments = {name: x.double() for name, x in good().items() if name in "qkv"} | {"sinks": torch.zeros(H)}
    assert expect("sinks", arguments) == "sinks: dtype float32; accepted is float64; sinks.double()"


@pytest.mark.parametrize("of_q", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinks_of_16_bits_are_taken(dtype, of_q):
    """A model that was cast has such sinks: the results are the same, and the gradient has the sinks' dtype."""
    wide = torch.float64 if of_q == torch.float64 else torch.float32
    leaves = [x.to(of_q).requires_grad_() for name, x in good().items() if name in ("q", "k", "v")]
    sinks = torch.randn(H).to(dtype).requires_grad_()
    exact = sinks.detach().to(wide).requires_grad_()
    dout = torch.randn(B, H, SQ, DV).to(of_q)
    expected = strobe.attention(*leaves, sinks=exact)
    of_leaves = torch.autograd.grad(expected, (*leaves, exact), dout)
    for _ in range(3):  # repeated calls take another path
        out, lse = strobe.attention(*leaves, sinks=sinks, return_lse=True)
        assert torch.equal(out, expected)
        *found, dsinks = torch.autograd.grad(out, (*leaves, sinks), dout)
        assert all(map(torch.equal, found, of_leaves[:3]))
        assert dsinks.dtype == dtype
        assert torch.equal(dsinks, of_leaves[3].to(dtype))
    q, k, v = (x.detach() for x in leaves)
    backward = strobe.attention_backward(dout, q, k, v, out.detach(), lse.detach(), sinks=sinks.detach())
    assert torch.equal(backward.dsinks, dsinks)
    assert torch.equal(strobe.reference(q, k, v, sinks=sinks.detach())[0], strobe.reference(q, k, v, sinks=exact.detach())[0])
    assert "forward" in strobe.explain(q, k, v, sinks=sinks.detach())
    if dtype == torch.float16 and of_q == torch.float32:
        arrays = [x.numpy() for x in (dout, q, k, v, out.detach(), lse.detach())]
        of_numpy = strobe.attention_backward(*arrays, sinks=sinks.detach().numpy()).dsinks
        assert of_numpy.dtype == np.float16
        assert torch.equal(torch.from_numpy(of_numpy), dsinks)


def test_sinks_of_16_bits_under_a_compiler():
    q = torch.randn(1, H, 8, D)
    sinks = torch.randn(H).bfloat16().requires_grad_()
    call = torch.compile(lambda sinks: strobe.attention(q, q, q, sinks=sinks), backend="aot_eager", fullgraph=True)
    (expected,) = torch.autograd.grad(strobe.attention(q, q, q, sinks=sinks).sum(), sinks)
    (found,) = torch.autograd.grad(call(sinks).sum(), sinks)
    assert torch.equal(found, expected)


def test_no_softcap_may_be_written_none():
    """Many configurations write None for no softcap."""
    q, k, v = (good()[name] for name in "qkv")
    for _ in range(3):
        assert torch.equal(strobe.attention(q, k, v, softcap=None), strobe.attention(q, k, v))
    assert torch.equal(strobe.nn.FlashAttention(D, softcap=None)(q, k, v), strobe.attention(q, k, v))


@pytest.mark.parametrize("shape", [(SK,), (SQ, SK), (1, SQ, SK)])
def test_a_bias_of_fewer_axes_has_a_gradient_of_its_shape(shape):
    q, k, v = (good()[name] for name in "qkv")
    bias = torch.randn(shape, requires_grad=True)
    full = bias.detach().expand(1, 1, SQ, SK).clone().requires_grad_()
    for x in (bias, full):
        strobe.attention(q, k, v, bias=x).square().sum().backward()
    assert torch.allclose(bias.grad, full.grad.sum_to_size(shape), atol=1e-4)


def test_dtypes_are_shown_by_name():
    q = torch.randn(B, H, SQ, D)
    assert expect("k", good() | {"k": good()["k"].half()}) == "k: dtype float16; accepted is float32"
    for x in (q.to(torch.float8_e4m3fn), q.to(torch.complex64), q.int()):
        message = expect("q", good() | {"q": x})
        assert f"dtype {str(x.dtype).removeprefix('torch.')};" in message.replace("torch.", "")
        assert "accepted is float32, float16, bfloat16, float64" in message


def test_bounds_agree():
    for threads in (0, 10_000):
        assert expect("threads", good() | {"threads": threads}).endswith("accepted are integers from 1 to 1024")
    for tile in (0, 65537):
        assert expect("tile_q", good() | {"tile_q": tile}).endswith("accepted are integers from 1 to 65536")
    assert expect("max_seqlen_q", good() | {"max_seqlen_q": SQ}).endswith("accepted is None")
    for window in ((-1, -1), 4.0):
        assert "(left, right), each None (no bound) or an integer from 0 on" in expect("window", good() | {"window": window})


def test_an_engine_of_another_architecture():
    foreign = next(name for name in ("cpu-neon", "cpu-avx2") if name not in dict(strobe.engines()))
    message = expect("engine", good() | {"engine": foreign})
    assert " alone; accepted are " in message
    assert message.endswith("or None for the fastest")


def test_an_unknown_engine_names_each_once_and_the_closest():
    message = expect("engine", good() | {"engine": "cpu-baselin"})
    assert message.endswith("or None for the fastest; did you mean cpu-baseline?")
    names = re.search("accepted are (.*), or None", message)[1].split(", ")
    assert names == [name for name, _ in strobe.engines() if not name.startswith("cuda-") and name != "ladder-tensor-cores"]


@pytest.mark.parametrize("engine", ["cuda", "cuda-mm"])
def test_no_engine_of_another_device_is_proposed(engine):
    assert "cuda-" not in expect("engine", good() | {"engine": engine}).partition(";")[2]
    with pytest.raises(ValueError, match=r"accepted are cuda-sm90.* did you mean cuda-mma\?$"):  # a module may move to a GPU
        strobe.nn.FlashAttention(D, engine="cuda-mm")


def test_an_array_of_one_number_has_a_way_out():
    assert expect("max_seqlen_q", good() | {"max_seqlen_q": torch.tensor(30)}) == (
        "max_seqlen_q: torch.Tensor; accepted is an integer; max_seqlen_q.item()"
    )
    assert expect("scale", good() | {"scale": torch.tensor([0.5])}).endswith("accepted is a number; scale.item()")
    assert expect("scale", good() | {"scale": torch.ones(2)}).endswith("accepted is a number")


def test_a_block_that_is_too_small_is_told_in_pythons_words():
    message = expect("block_mask", good() | {"block_mask": strobe.BlockMask.causal(SQ, SK, 8, 16)})
    assert message.startswith("block_mask: block_q: 8; accepted are the multiples of 16 up to ")
    assert "block_rows" not in message


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_beta_wants_a_hyperbolic_score(beta):
    assert expect("beta", good() | {"beta": beta}) == f"beta: {beta} with score 'dot'; accepted is None, or a hyperbolic score"
    assert names(good() | {"beta": beta, "score": "cosine"}) == ["score"]


def test_options_by_place_are_refused():
    q, k, v = (good()[name] for name in "qkv")
    with pytest.raises(TypeError, match=r"takes q, k and v by their places, and 2 more were given; options are named, as in causal=True$"):
        strobe.attention(q, k, v, True, 0.1)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("p", "did you mean dropout?"),
        ("return_attn_probs", "did you mean return_lse?"),
        ("is_causal", 'did you mean causal? Where Sq and Sk differ, beside alignment="top_left"'),
        ("cache_seqlens", "did you mean seqused_k?"),
        ("attn_mask", "did you mean mask (bool, True = attend) or bias"),
        ("dropout_p", "did you mean dropout?"),
        ("enable_gqa", "k and v may have fewer heads than q"),
        ("sofcap", "did you mean softcap?"),
        ("block_table", "did you mean page_table?"),
        ("num_heads", "the heads are an axis of q, k and v"),
        ("score_mod", "did you mean score?"),
        ("key_padding_mask", "did you mean mask=~key_padding_mask[:, None, None, :]?"),
        ("attention_mask", "did you mean mask (bool, True = attend) or bias"),
        ("alibi", "did you mean alibi_slopes?"),
        ("s_aux", "did you mean sinks?"),
        ("return_softmax_lse", "did you mean return_lse?"),
        ("xyzzy", "'xyzzy'"),
    ],
)
def test_an_unknown_argument_is_refused(name, hint):
    for call in (lambda **wrong: strobe.attention(**good(), **wrong), lambda **wrong: strobe.nn.FlashAttention(D, **wrong)):
        with pytest.raises(TypeError, match=name) as raised:
            call(**{name: True})
        assert hint in str(raised.value)
        assert hint.startswith("did you mean") or "did you mean" not in str(raised.value)


def test_hints_name_options_and_no_option_has_one():
    for name, hint in ELSEWHERE.items():
        assert name not in ROWS
        if named := re.match(r"did you mean (\w+)", hint):
            assert named[1] in {*ROWS, "return_lse"}, name


@pytest.mark.parametrize(
    ("head_dim", "options", "message"),
    [
        ("x", {}, "head_dim: str; accepted is an integer"),
        (577, {}, "head_dim: 577; accepted are integers from 1 to 576"),
        (D, {"dropout": 3}, "dropout: 3; accepted is 0 to below 1"),
        (D, {"engine": "cpu-baselin"}, 'engine: "cpu-baselin" is unknown'),
        (D, {"window": (-1, 0), "softcap": -1.0}, r"window: .*\nsoftcap: -1; accepted"),
        (D, {"layout": "bsdh"}, "layout: 'bsdh'; accepted"),
        (D, {"block_mask": 3}, "block_mask: int; accepted"),
        (D, {"max_seqlen_q": -1}, "max_seqlen_q: -1; accepted"),
        (D, {"score": "hyperbolic", "beta": -1.0}, "beta: -1; accepted"),
    ],
)
def test_a_module_refuses_what_no_call_could_have(head_dim, options, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        strobe.nn.FlashAttention(head_dim, **options)


def test_a_module_is_made_without_a_side_effect_and_anywhere():
    options = {"dropout": 0.1, "max_seqlen_q": 3, "block_mask": strobe.BlockMask.causal(SQ, SK, 16, 16), "engine": "reference"}
    torch.manual_seed(1)
    strobe.nn.FlashAttention(D, **options)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), drawn)
    with torch.device("meta"):
        strobe.nn.FlashAttention(D, **options)
    with FakeTensorMode():
        strobe.nn.FlashAttention(D, **options)
    q = torch.randn(1, 1, 4, D)
    made_inside = torch.compile(lambda q: strobe.nn.FlashAttention(D, causal=True)(q, q, q), backend="aot_eager")
    assert torch.equal(made_inside(q), strobe.attention(q, q, q, causal=True))


@pytest.mark.parametrize(
    "wrong", [[1.7], "12", [True], torch.tensor([True, False]), torch.tensor([1.0]), [-1], [2**63], 1, torch.tensor(1)], ids=str
)
@pytest.mark.parametrize("name", ["rows", "cols"])
def test_selections_are_integers(name, wrong):
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in "qkv")
    call = (lambda: strobe.reference(q, k, v, rows=wrong)) if name == "rows" else lambda: strobe.reference_backward(q, q, k, v, cols=wrong)
    with pytest.raises((TypeError, ValueError), match=f"^{name}: .*; accepted (is an|are several|are) integer"):
        call()


def test_slopes_that_require_grad_are_refused():
    slopes = torch.rand(H, requires_grad=True)
    with pytest.raises(NotImplementedError, match="alibi_slopes: requires grad"):
        strobe.attention(**good() | {"alibi_slopes": slopes})
    with torch.no_grad():
        strobe.attention(**good() | {"alibi_slopes": slopes})


def test_strict_names_what_stands_in_the_way():
    """strict refuses a call that would not run on the fastest engine, and the oracle never is the fastest."""
    with pytest.raises((NotImplementedError, ValueError), match="strict"):
        strobe.attention(**good(), engine="reference", strict=True)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("dropout", ((1, 1, 4, 4), 1.5, 0, 0)),
        ("dropout", ((1, 1, 4, 4), NAN, 0, 0)),
        ("shape", ((1, 4, 4), 0.5, 0, 0)),
        ("shape", ((1, 1, -4, 4), 0.5, 0, 0)),
        ("seed", ((1, 1, 4, 4), 0.5, 1.5, 0)),
        ("like", ((1, 1, 4, 4), 0.5, 1, 0, "numpy")),
    ],
)
def test_dropout_mask(name, arguments):
    *arguments, like = (*arguments, None)[:5]
    with pytest.raises((ValueError, TypeError), match=rf"^{name}: .*accepted") as raised:
        strobe.dropout_mask(*arguments, like=like)
    assert [each.argument for each in raised.value.refusals] == [name]


def test_dropout_mask_wants_a_seed_or_rng():
    with pytest.raises(ValueError, match=r"^seed: missing; accepted is seed \(and offset\), or rng$"):
        strobe.dropout_mask((1, 1, 4, 4), 0.5)
    for seeds in ({"seed": 1}, {"offset": 1}):
        with pytest.raises(ValueError, match="^rng: given beside seed or offset"):
            strobe.dropout_mask((1, 1, 4, 4), 0.5, rng=torch.tensor([1, 2]), **seeds)


@pytest.mark.parametrize("name", ["rng", "like"])
def test_a_generator_is_no_array_for_a_dropout_mask(name):
    given = {"rng": {}, "like": {"seed": 1}}[name] | {name: torch.Generator()}
    with pytest.raises(TypeError, match=f"^{name}: .*; a generator draws rng by torch.randint") as raised:
        strobe.dropout_mask((1, 1, 4, 4), 0.5, **given)
    assert [each.argument for each in raised.value.refusals] == [name]


def test_dropout_mask_of_one_kind():
    with pytest.raises(ValueError, match="^like: given beside rng; accepted is one of the two"):
        strobe.dropout_mask((1, 1, 4, 4), 0.5, rng=torch.tensor([1, 2]), like=np.ones(1))


def test_pools_in_the_other_layout_are_named():
    q, pool, table = torch.randn(2, 32, 1, 128), torch.randn(4, 16, 8, 128), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    for length, hint in ((30, '; did you mean layout="bshd"?'), (33, "")):
        with pytest.raises(ValueError, match="^seqused_k") as raised:
            strobe.attention(q, pool, pool, page_table=table, seqused_k=torch.tensor([9, length], dtype=torch.int32))
        assert str(raised.value) == f"seqused_k: {length} at [1]; accepted are 0 to 16, the positions of a row of page_table{hint}"


def test_what_has_no_places_names_none():
    """The message does not name a range from 0 to -1."""
    rows, cols = ints(0, 1)[None, None], ints(0)
    with pytest.raises(
        ValueError, match="^rows, cols: not a CSR of 1 x 0 blocks; accepted are offsets of 0 and empty cols, for there are no "
    ):
        strobe.BlockMask(rows, cols, 16, 0, 16, 16)
    mask = strobe.BlockMask.causal(16, 0, 16, 16)
    mask.rows, mask.cols, mask.cols_t = rows, cols, cols
    q = torch.randn(1, 1, 16, 8)
    message = expect("block_mask", {"q": q, "k": q[:, :, :0], "v": q[:, :, :0], "block_mask": mask})
    assert message.endswith("[0] is 0 (row 0 of matrix 0); accepted is none, for there are no blocks")
    with pytest.raises(ValueError, match="^ranges: .*; accepted are ranges that have no position, for seqlen is 0$"):
        strobe.distributed.Sharding(0, (((0, 1),),))


def test_scales_in_another_form_are_named():
    k, scale = strobe.kv.quantise(torch.randn(1, 2, 64, 32), torch.uint8, group=64)
    with pytest.raises(ValueError, match=r"^k_scale: rank 4; .*; did you mean a scale for each column, with k_scale_group\?$"):
        strobe.attention(torch.randn(1, 2, 1, 32), k, k, k_scale=scale, v_scale=torch.ones(1, 2, 64))


@pytest.mark.parametrize("numpys", [False, True], ids=["torch", "numpy"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
def test_scales_in_a_wrong_shape_are_told_the_right_one(layout, numpys):
    shape, names = {
        "bhsd": ((1, 2, 64), "(B, Hkv, Sk)"),
        "bshd": ((1, 64, 2), "(B, Sk, Hkv)"),
        "packed": ((64, 2), "(Tk, Hkv)"),
    }[layout]
    right = f"{names} = {shape}"

    def own(x: torch.Tensor):
        return x.numpy() if numpys else x

    def message(k_scale, **more) -> str:
        k = own(torch.zeros(*shape, 32, dtype=torch.int8))
        q = own(torch.randn({"bhsd": (1, 2, 1, 32), "bshd": (1, 1, 2, 32), "packed": (1, 2, 32)}[layout]))
        given = {"q": q, "k": k, "v": k, "k_scale": k_scale, "v_scale": own(torch.ones(shape))}
        if layout == "packed":
            given |= {"cu_seqlens_q": own(ints(0, 1)), "cu_seqlens_k": own(ints(0, 64))}
        else:
            given["layout"] = layout
        return expect("k_scale", given | more)

    rank = len(shape)
    assert message(own(torch.ones(3))) == "k_scale: shape (3); accepted is (Hkv|1) = (2|1)"
    if rank == 3:
        view = f"np.broadcast_to(k_scale, {shape})" if numpys else f"k_scale.expand{shape}"
        one = f"; one for many keys is a view of it, {view}"
        assert message(own(torch.ones(1, 1))) == f"k_scale: rank 2; accepted is rank 3, {right}{one}"
    assert message(own(torch.ones(*shape[:-1], 3))) == f"k_scale: shape {(*shape[:-1], 3)}; accepted is {right}"
    assert message(own(torch.ones(*shape, 1))).endswith(f"; accepted is rank {rank}, {right}; did you mean k_scale[..., 0]?")
    assert message(own(torch.ones((), dtype=torch.int32))).startswith("k_scale: dtype int32; accepted is float16, float32")
    kind = "numpy.ndarray" if numpys else "torch.Tensor"
    number = "np.array(0.5, np.float32)" if numpys else "torch.tensor(0.5, device=k.device)"
    assert message(0.5) == f"k_scale: float; accepted is a {kind}, as q is; one for all keys is {number}"
    assert message([0.5]) == f"k_scale: list; accepted is a {kind}, as q is, of shape {shape}, a scale for each key and head"


def test_scales_beside_keys_that_are_not_quantised_are_told_so():
    q, k, scale = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 64, 32), torch.ones(1, 2, 64)
    way = "dtype float32; accepted is int8, float8_e4m3fn, float8_e5m2, uint8, or none of k_scale and v_scale"
    for k_scale, more in ((scale, []), (torch.ones(3), ["k_scale: shape (3); accepted is (Hkv|1) = (2|1)"])):
        with pytest.raises(ValueError, match="^k: dtype") as raised:
            strobe.attention(q, k, k, k_scale=k_scale, v_scale=scale)
        lines = str(raised.value).splitlines()
        assert lines[:2] == [f"k: {way}", f"v: {way}"]
        assert [line.partition("; one for")[0] for line in lines[2:]] == more
    with pytest.raises(TypeError, match="^k_scale: float; accepted is a torch.Tensor, as q is, or None: k of float32 has no scales$"):
        strobe.attention(q, k, k, k_scale=0.5)


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_scores_over_pages_are_not_told_of_a_length_that_is_refused(name):
    pool, table = torch.randn(10, 2, 16, 16), torch.arange(10).int().view(2, 5)
    given = {"q": torch.randn(6, 4, 16), "k": pool, "v": pool, "page_table": table, "cu_seqlens_q": ints(0, 3, 6)}
    wide = torch.ones(2, 1, 3, 81) if name == "bias" else torch.ones(2, 1, 3, 81, dtype=torch.bool)
    accepted = "accepted is (B|1, H|1, max_seqlen_q|1, Sk, the keys of all pages of a sequence|1) = "
    hint = "; max_seqlen_q gives the length of its axis -2"
    assert expect(name, given | {name: wide}) == f"{name}: shape (2, 1, 3, 81); {accepted}(2|1, 4|1, 6|1, 80|1){hint}"
    assert expect(name, given | {name: wide, "max_seqlen_q": 3}) == f"{name}: shape (2, 1, 3, 81); {accepted}(2|1, 4|1, 3|1, 80|1)"
    assert expect("max_seqlen_k", given | {"max_seqlen_k": 80}) == "max_seqlen_k: 80 beside page_table; accepted is None"
    blocks = strobe.BlockMask.causal(3, 80, 16, 16)
    assert expect("block_mask", given | {"block_mask": blocks}).endswith("; without max_seqlen_q this is the number of tokens")


@pytest.mark.parametrize("name", ["rng", "seed"])
def test_a_generator_is_told_what_it_gives(name):
    q = torch.randn(1, 1, 4, 8)
    for array, generator, hint in (
        (q, torch.Generator(), "; a generator draws rng by torch.randint(2**63 - 1, (2,), generator=..., device=...)"),
        (q.numpy(), np.random.default_rng(), "; a generator draws rng by its integers(2**63 - 1, size=2)"),
    ):
        assert expect(name, {"q": array, "k": array, "v": array, "dropout": 0.5, name: generator}).endswith(hint)
        with pytest.raises(TypeError, match=f"^{name}: .*{re.escape(hint)}$"):
            strobe.dropout_mask((1, 1, 4, 4), 0.5, **{name: generator})
    assert expect("rng", {"q": q, "k": q, "v": q, "rng": 3}) == "rng: int; accepted is a torch.Tensor, as q is; an integer goes into seed"
    g = torch.Generator()
    assert strobe.attention(q, q, q, dropout=0.5, rng=torch.randint(2**63 - 1, (2,), generator=g, device=g.device)).shape == q.shape
    rng = np.random.default_rng().integers(2**63 - 1, size=2)
    assert strobe.attention(q.numpy(), q.numpy(), q.numpy(), dropout=0.5, rng=rng).shape == q.shape


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (
            lambda q, lse: strobe.attention_backward(q, q, q, q, q, lse, aux=("max_logit",)),
            "'aux'; leave it out: max_logit and column_sums",
        ),
        (lambda q, lse: strobe.attention_backward(q, q, q, q, q, lse, return_lse=True), "'return_lse'; leave it out: dlse is"),
        (lambda q, lse: strobe.reference_backward(q, q, q, q, aux=()), "'aux'; leave it out: max_logit and column_sums"),
        (lambda q, lse: strobe.reference(q, q, q, return_lse=True), "'return_lse'; leave it out: out and lse are returned"),
        (lambda q, lse: strobe.explain(q, q, q, return_lse=True), "'return_lse'; leave it out: lse makes no difference"),
        (lambda q, lse: strobe.nn.FlashAttention(8, return_lse=True), "'return_lse'; it goes to the call"),
        (lambda q, lse: strobe.nn.FlashAttention(8, aux=("max_logit",)), "'aux'; it goes to the call"),
        (lambda q, lse: strobe.hyperbolic_attention(q, q, q, aux=("max_logit",)), "'aux'; max_logit and column_sums are results of"),
    ],
)
def test_what_attention_alone_returns_is_told_elsewhere(call, hint):
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(TypeError, match=re.escape(hint)):
        call(q, q[..., 0])


def test_a_hint_wants_no_tensor_that_is_missing():
    q, v, scale = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.ones(1, 2, 3, 8)
    with pytest.raises(ValueError, match="^k: NoneType.*\nv.*\nv_scale: missing beside k_scale"):
        strobe.attention(q, None, v, k_scale=scale)
    with pytest.raises((TypeError, ValueError), match="^v: list"):
        strobe.attention(q, v, [1], page_table=torch.zeros(1, 1).int(), seqused_k=torch.tensor([40]).int())
    packed = torch.zeros(5, 8, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"\nk_scale: rank 2; accepted is rank 3, "):
        strobe.attention(q[0], packed, v, k_scale=torch.ones(5, 2), v_scale=torch.ones(1))


def test_caches_in_another_form_are_named():
    cache, new, held = torch.zeros(2, 8, 64, 32), torch.randn(2, 40, 8, 32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^k: shape \(2, 40, 8, 32\); .*; if tokens lie before heads, k.transpose\(1, 2\)\n"):
        strobe.kv.append(cache, cache.clone(), new, new, held)
    pool = torch.zeros(9, 8, 16, 32)
    with pytest.raises(ValueError, match="a pool of pages is accepted beside page_table"):
        strobe.kv.append(pool, pool.clone(), new.transpose(1, 2), new.transpose(1, 2), held)
    with pytest.raises(ValueError, match=r"accepted is int32 \(2,\); seqlens.int\(\)$"):
        strobe.kv.append(cache, cache.clone(), new.transpose(1, 2), new.transpose(1, 2), held.short())


def test_a_partial_backward_wants_delta():
    q = torch.randn(1, 1, 4, 8)
    at = strobe.Part([(0, 4)], [(0, 4)], 4, 4, partial=True)
    out, lse = strobe.attention(q, q, q, part=at, return_lse=True)
    with pytest.raises(
        ValueError,
        match=r"^delta: missing; accepted with a partial part is \(dout \* out\).sum\(-1\) of the whole rows, \(B, H, Sq\) or \(H, Tq\)$",
    ):
        strobe.attention_backward(out, q, q, q, None, lse, part=at)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("accumulate", lambda x, array: strobe.attention_backward(x, x, x, x, x, x[..., 0], dq=x, accumulate=array)),
        ("backward", lambda x, array: strobe.explain(x, x, x, backward=array)),
        ("aggregate", lambda x, array: strobe.hyperbolic_attention(x, x, x, aggregate=array)),
    ],
)
def test_an_array_in_place_of_a_flag_is_refused_by_name(name, call):
    x = np.ones((1, 2, 4, 8), np.float32)
    with pytest.raises((TypeError, ValueError), match=f"{name}: "):
        call(x, np.ones(3, np.float32))


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout", "beta", "tile_q", "threads"])
def test_a_parameter_without_a_shape_is_no_number(name):
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(TypeError, match=rf"(?m)^{name}: torch.nn.parameter.UninitializedParameter; accepted is"):
        strobe.attention(q, q, q, **{name: torch.nn.UninitializedParameter()})


@pytest.mark.parametrize("device", ["no such", "cpu:x", [1], np.zeros(2), torch.float32, None])
def test_a_mask_goes_to_a_device_alone(device):
    """BlockMask.to() takes a device only, and not a dtype as Tensor.to() does."""
    mask = strobe.BlockMask.causal(SQ, SK, 16, 16)
    with pytest.raises(TypeError, match=r"^device: .*; accepted is a torch\.device, or the name of one$"):
        mask.to(device)
    assert mask.to("cpu").rows.dtype == torch.int32


@pytest.mark.parametrize("function", [strobe.hyperbolic.distance, strobe.hyperbolic.lorentz_product])
@pytest.mark.parametrize("numpys", [False, True])
def test_points_that_do_not_broadcast_are_named(function, numpys):
    x, y = strobe.hyperbolic.lift(torch.randn(2, 3, 4)), strobe.hyperbolic.lift(torch.randn(0, 4))
    x, y = (x.numpy(), y.numpy()) if numpys else (x, y)
    with pytest.raises(ValueError, match=r"^y: shape \(0, 5\); accepted is one that broadcasts with x's, \(2, 3, 5\)$"):
        function(x, y)
    assert function(x, x[:1, :1]).shape == (2, 3)
