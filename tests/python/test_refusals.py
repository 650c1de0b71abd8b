"""Refusals as data: the library's records, the hints made of them, and the argument names that functions of other libraries use."""

from __future__ import annotations

import inspect
import pickle
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import strobe
from strobe._core import lib
from strobe._options import ROWS
from strobe._refusals import CODES, OWN, Axes, Either, Hint, Name, OtherLayout, Refusal, Words, failure, refusals_of
from strobe.compat import flash_attn, flash_attn_3
from strobe.compat.sdpa import scaled_dot_product_attention

B, H, HKV, SQ, SK, D = 2, 4, 2, 20, 30, 16


def refused(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception:
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
        function(*args, **kwargs)
    return raised.value


def test_the_table_of_codes():
    assert sorted(CODES) == list(range(1, len(CODES) + 1))
    assert {"missing", "shape", "dtype", "heads", "length"} <= set(CODES.values())


def test_a_record_of_the_library_has_typed_values():
    q, k = torch.randn(B, SQ, H, D), torch.randn(B, SK, HKV, D)
    (refusal,) = refusals_of(refused(strobe.attention, q, k, k[:, 1:], layout="bshd"))
    assert (refusal.argument, refusal.code) == ("v", "shape")
    assert refusal.words == "shape {0}; accepted is {1}"
    given, accepted = refusal.values
    assert given.sizes == (B, SK - 1, HKV, D)
    assert isinstance(accepted, Axes)
    assert accepted.roles == ("B", "Sk", "Hkv", "Dv")
    assert accepted.sizes == (B, SK, HKV, -1)


def test_a_failure_for_whose_text_there_is_no_memory():
    # A thread that has not failed has neither text nor records, like one whose failure found no memory for them.
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: [failure(status) for status in (lib.STROBE_INVALID_ARGUMENT, lib.STROBE_INTERNAL)]).result()
    assert [(type(error), str(error)) for error in found] == [(MemoryError, "out of host memory")] * 2


def test_an_exception_carries_its_refusals_and_survives_a_pickle():
    q = torch.randn(B, H, SQ, D)
    error = refused(strobe.attention, q, q[:, :3], q[:, :3], softcap=-1.0, causal=1, engine="cpu-baselin")
    found = refusals_of(error)
    assert [each.argument for each in found] == ["causal", "softcap", "k", "engine"]
    assert "\n".join(map(OWN.line, found)) == str(error)
    assert type(error) is ValueError
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert refusals_of(again) == found


def test_words_leave_out_what_a_function_does_not_have():
    sequences = Hint("{0}, of packed queries", (Name("cu_seqlens_q"),), needs=("cu_seqlens_q",))
    one = Hint("{0}[None], of one sequence", (Name("q"),), axes_of="q")
    refusal = Refusal("q", "shape {0}; accepted is four axes, as {1} has", ((3, 4), Name("k")), hints=(Either((sequences, one)),))
    said = "shape (3, 4); accepted is four axes, as"
    assert Words().line(refusal) == f"q: {said} k has; did you mean cu_seqlens_q, of packed queries, or q[None], of one sequence?"
    theirs = {"q": "query", "k": "key"}
    assert Words(theirs, {*"qkv"}).line(refusal) == f"query: {said} key has; did you mean query[None], of one sequence?"
    packed = Words({"q": "qkv", "k": "qkv"}, {*"qkv"}, {*"qkv"})
    assert packed.line(refusal) == f"qkv: {said} qkv has"
    same = Refusal("mask", "dtype", hints=(Hint("; {0}", (Name("bias"),), needs=("bias",)),))
    assert Words().line(same) == "mask: dtype; bias"
    assert Words({"mask": "attn_mask", "bias": "attn_mask"}).line(same) == "attn_mask: dtype"
    other = Refusal("k", "3 heads", hints=(OtherLayout("bhsd"),))
    assert Words().line(other) == 'k: 3 heads; did you mean layout="bhsd"?'
    assert Words({}, {*"qkv"}).line(other) == "k: 3 heads; q, k, v are (B, S, H, D) here; did you mean q.transpose(1, 2)?"
    assert packed.line(other) == "qkv: 3 heads"


def test_what_looks_like_a_place_is_the_callers():
    q = torch.randn(1, 1, 4, 8)
    assert str(refused(strobe.attention, q, q, q, engine="{1}{0}{")).startswith('engine: "{1}{0}{" is unknown; accepted are ')
    assert str(refused(strobe.attention, q, q, q, scale="{0}")) == "scale: str; accepted is a number"
    assert str(refused(strobe.attention, q, q, q, layout="{0}")).startswith("layout: '{0}'; accepted")


def test_a_hint_speaks_only_of_arguments_that_the_function_has():
    """flash_attn_func takes no scales, no lengths and no bias."""
    q, eight = torch.randn(B, SQ, H, D), torch.zeros(B, SK, HKV, D, dtype=torch.int8)
    assert "k_scale" in str(refused(strobe.attention, q, eight, eight, layout="bshd"))
    assert str(refused(flash_attn.flash_attn_func, q, eight, eight)).splitlines()[0] == "k: dtype int8; accepted is float32"
    alone = str(refused(flash_attn.flash_attn_func, q[0], q, q))
    assert alone == "q: shape (20, 4, 16); accepted is (B, Sq, H, D); did you mean q[None], of one sequence?"


def good(name: str) -> dict[str, Any]:
    """Valid arguments of a function: those that a test replaces."""
    q, k = torch.randn(B, SQ, H, D), torch.randn(B, SK, HKV, D)
    cu_q, cu_k = torch.tensor([0, 12, SQ], dtype=torch.int32), torch.tensor([0, 10, SK], dtype=torch.int32)
    options = {"softmax_scale": 0.5, "causal": False, "window_size": (-1, -1), "softcap": 0.0}
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 12, "max_seqlen_k": 20}
    if name == "attention":
        return {
            **dict(zip("qkv", (x.transpose(1, 2) for x in (q, k, k)), strict=True)),
            "mask": torch.ones(B, 1, SQ, SK, dtype=torch.bool),
            "bias": torch.randn(1, H, SQ, SK),
            "alibi_slopes": torch.rand(H),
            "sinks": torch.randn(H),
            "scale": 0.5,
            "softcap": 0.0,
            "causal": False,
            "window": None,
            "layout": "bhsd",
            "seqused_k": None,
        }
    if name == "scaled_dot_product_attention":
        query, key = q.transpose(1, 2), k.transpose(1, 2)
        mask = torch.ones(B, 1, SQ, SK, dtype=torch.bool)
        return {"query": query, "key": key, "value": key, "attn_mask": mask, "dropout_p": 0.0, "scale": 0.5, "enable_gqa": True}
    if name.endswith("with_kvcache"):
        return {"q": q, "k_cache": k, "v_cache": k.clone(), "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32), **options}
    if "qkvpacked" in name:
        qkv = torch.randn(B, SQ, 3, H, D)
        if "varlen" not in name:
            return {"qkv": qkv, **options}
        return {"qkv": qkv[0], "cu_seqlens": cu_q, "max_seqlen": 12, **options}
    if "kvpacked" in name:
        kv = torch.randn(B, SK, 2, HKV, D)
        return {"q": q[0], "kv": kv[0], **lengths, **options} if "varlen" in name else {"q": q, "kv": kv, **options}
    if "varlen" in name:
        return {"q": q[0], "k": k[0], "v": k[0], **lengths, **options}
    return {"q": q, "k": k, "v": k, **options}


WRONG: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda x: None,
    "list": lambda x: [1],
    "NumPy": lambda x: x.numpy(),
    "half": lambda x: x.half(),
    "double": lambda x: x.double(),
    "bool": lambda x: x.bool(),
    "int8": lambda x: x.to(torch.int8),
    "int16": lambda x: x.short(),
    "negative": lambda x: -x if x.dtype != torch.bool else x[..., :1, :],
    "large": lambda x: x * 1000 if x.dtype != torch.bool else x[..., :-1],
    "one axis less": lambda x: x[0],
    "one axis more": lambda x: x[None],
    "wide": lambda x: x[(None,) * 5],
    "short": lambda x: x[..., :-1],
    "fewer": lambda x: x[:-1],
    "no elements": lambda x: x[..., :0],
    "other axes": lambda x: x.transpose(-3, -2) if x.dim() > 2 else x,
    "three heads": lambda x: x[..., :1, :].repeat_interleave(3, -2) if x.dim() > 2 else x,
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
}
NUMBERS: list[Any] = [None, "x", -1.0, float("nan"), 3, (1, 2, 3), [], True, 2**70, torch.tensor(1.5), np.float64("inf"), {}]
FUNCTIONS = [
    strobe.attention,
    scaled_dot_product_attention,
    *(getattr(flash_attn, name) for name in flash_attn.__all__ if name.startswith("flash_attn_")),
    *(getattr(flash_attn_3, name) for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")),
]
# Names of attention()'s arguments that are no words of English.
NAMES = {name for name in ROWS if "_" in name} | {*"qkv", "return_lse"}


def drawn(chance: random.Random, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with one to three of them wrong."""
    for name in chance.sample([*arguments], chance.randint(1, 3)):
        x = arguments[name]
        arguments[name] = chance.choice([*WRONG.values()])(x) if isinstance(x, Tensor) else chance.choice(NUMBERS)
    return arguments


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f"{f.__module__.rpartition('.')[2]}.{f.__name__}")
def test_hostile_calls_are_answered_in_the_functions_own_names(function):
    """Each line begins with an argument of the function, says what is accepted, and mentions no argument that the function lacks."""
    own = set(inspect.signature(function).parameters)
    lacking = re.compile(rf"\b({'|'.join(sorted(NAMES - own))})\b") if NAMES - own else None
    chance, told = random.Random(11), 0
    for _ in range(150):
        arguments = drawn(chance, good(function.__name__))
        try:
            function(**arguments)
        except (TypeError, ValueError, NotImplementedError) as error:
            message, refusals = str(error), refusals_of(error)
        else:
            continue
        told += 1
        assert "\n".join(dict.fromkeys(map(OWN.line, refusals))) == message
        for line in message.splitlines():
            assert set(line.partition(":")[0].split(", ")) <= own, message
            assert "accepted" in line, message
            assert lacking is None or lacking.search(line) is None, message
    assert told > 90
