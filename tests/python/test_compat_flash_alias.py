"""strobe.compat.flash_attn under the name flash_attn, for code that imports flash-attn itself."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from strobe.compat.flash_attn import flash_attn_interface

ALIASED = """
import sys
import strobe.compat.flash_attn
sys.modules["flash_attn"] = strobe.compat.flash_attn
"""


MODULES = """
import flash_attn.flash_attn_interface
import flash_attn.bert_padding
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import _flash_attn_forward, flash_attn_with_kvcache
from flash_attn.layers.rotary import apply_rotary_emb
import strobe.compat.flash_attn as own

for name in ("flash_attn_interface", "bert_padding", "layers", "layers.rotary"):
    assert sys.modules[f"flash_attn.{name}"] is sys.modules[f"strobe.compat.flash_attn.{name}"], name
assert flash_attn.bert_padding.__name__ == own.bert_padding.__name__ == "strobe.compat.flash_attn.bert_padding"
assert all(getattr(flash_attn.flash_attn_interface, name) is getattr(own, name) is getattr(flash_attn, name) for name in own.__all__)
assert pad_input is own.bert_padding.pad_input and apply_rotary_emb is own.layers.rotary.apply_rotary_emb
import torch
q = torch.randn(1, 4, 2, 16)
assert torch.equal(flash_attn_func(q, q, q), own.flash_attn_func(q, q, q))
"""

FOUND = """
import importlib
from importlib.util import find_spec
assert find_spec("flash_attn") is not None and find_spec("flash_attn.bert_padding") is not None
version = tuple(map(int, importlib.import_module("flash_attn").__version__.split(".")))
assert (2, 7) < version < (3,) and len(version) == 3
for name in ("flash_attn.ops", "flash_attn.modules.mha", "flash_attn.losses", "flash_attn_2_cuda"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as missing:
        assert missing.name in (name, "flash_attn.modules")
    else:
        raise AssertionError(name)
"""


def test_an_alias_is_a_package():
    """The alias's modules are imported under its name and have the same functions; importlib finds it, with flash-attn's version; missing
    modules stay missing. The test runs in a process of its own, because an alias cannot be undone."""
    done = subprocess.run([sys.executable, "-c", ALIASED + MODULES + FOUND], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


WINDOW = "window_size_left window_size_right"
VARLEN = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
GIVEN = "dout q k v out softmax_lse dq dk dv"
SIGNATURES = {
    "_flash_attn_forward": f"q k v dropout_p softmax_scale causal {WINDOW} softcap alibi_slopes return_softmax",
    "_flash_attn_varlen_forward": f"q k v {VARLEN} dropout_p softmax_scale causal {WINDOW} softcap alibi_slopes return_softmax block_table "
    "leftpad_k seqused_k zero_tensors num_splits",
    "_flash_attn_backward": f"{GIVEN} dropout_p softmax_scale causal {WINDOW} softcap alibi_slopes deterministic rng_state",
    "_flash_attn_varlen_backward": f"{GIVEN} {VARLEN} dropout_p softmax_scale causal {WINDOW} softcap alibi_slopes deterministic rng_state "
    "zero_tensors",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signatures_of_the_passes(name):
    """Callers build their arguments from inspect.getfullargspec(), which does not follow __wrapped__."""
    function = getattr(flash_attn_interface, name)
    assert list(inspect.signature(function).parameters) == SIGNATURES[name].split()
    spec = inspect.getfullargspec(function)
    assert spec.args == SIGNATURES[name].split()
    expected = {
        "_flash_attn_forward": None,
        "_flash_attn_varlen_forward": (-1, -1, 0.0, None, False, None, None, None, False, 0),
        "_flash_attn_backward": (None,),
        "_flash_attn_varlen_backward": (None, False),
    }
    assert spec.defaults == expected[name]
