"""Functions that write into the caller's tensors refuse what PyTorch's in-place operations refuse, as a leaf that requires grad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import strobe
from device import DEVICE
from strobe.compat import flash_attn, flash_attn_3
from strobe.compat.flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_varlen_backward
from strobe.compat.flash_attn.layers.rotary import apply_rotary_emb
from strobe.compat.varlen import varlen_attn_out

with torch.device(DEVICE):
    CU = torch.tensor([0, 4], dtype=torch.int32)
    Q, K = torch.randn(1, 4, 2, 8), torch.randn(1, 1, 2, 8)  # (B, S, H, D)
    OUT, LSE = strobe.attention(Q, Q, Q, layout="bshd", return_lse=True)
    HELD, PAGE, TABLE = torch.tensor([2], dtype=torch.int32), torch.tensor([0]), torch.rand(9, 4)
    QUANTISED = torch.zeros(1, 4, 2, 8, dtype=torch.int8)
PLAIN: dict[str, Any] = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False,
}  # fmt: skip


def cached(k: Tensor, v: Tensor, call: Any) -> None:
    call(Q, k, v, K, K, cache_seqlens=HELD)


def backward(dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    _flash_attn_backward(Q, Q, Q, Q, OUT, LSE, dq, dk, dv, **PLAIN)


def packed_backward(dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    given = (x.flatten(0, 1) for x in (Q, Q, Q, Q, OUT))
    _flash_attn_varlen_backward(*given, LSE[0], dq[0], dk[0], dv[0], CU, CU, 4, 4, **PLAIN)


def append_quantised(k_scale: Tensor, v_scale: Tensor) -> None:
    strobe.kv.append(QUANTISED, QUANTISED.clone(), K, K, HELD, k_scale=k_scale[..., 0], v_scale=v_scale[..., 0], layout="bshd")


def copy_quantised(k_scale: Tensor, v_scale: Tensor) -> None:
    strobe.kv.copy(QUANTISED, QUANTISED.clone(), PAGE, PAGE, k_scale=k_scale[..., 0], v_scale=v_scale[..., 0])


# The names of the written arguments, and the call. Each argument has Q's shape.
WRITERS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "attention_backward": (
        ("dq", "dk", "dv"),
        lambda *d: strobe.attention_backward(
            Q, Q, Q, Q, OUT, LSE, layout="bshd", accumulate=True, **dict(zip(("dq", "dk", "dv"), d, strict=True))
        ),
    ),
    "kv.append": (("k_cache", "v_cache"), lambda k, v: strobe.kv.append(k, v, K, K, HELD, layout="bshd")),
    "kv.append by name": (
        ("k_cache", "v_cache"),
        lambda k, v: strobe.kv.append(v_cache=v, k_cache=k, k=K, v=K, seqlens=HELD, layout="bshd"),
    ),
    "kv.append, scales": (("k_scale", "v_scale"), append_quantised),
    "kv.copy": (("k_cache", "v_cache"), lambda k, v: strobe.kv.copy(k, v, PAGE, PAGE)),
    "kv.copy, scales": (("k_scale", "v_scale"), copy_quantised),
    "flash_attn_with_kvcache": (("k_cache", "v_cache"), lambda k, v: cached(k, v, flash_attn.flash_attn_with_kvcache)),
    "flash_attn_3's": (("k_cache", "v_cache"), lambda k, v: cached(k, v, flash_attn_3.flash_attn_with_kvcache)),
    "_flash_attn_backward": (("dq", "dk", "dv"), backward),
    "_flash_attn_varlen_backward": (("dq", "dk", "dv"), packed_backward),
    "varlen_attn_out": (("out",), lambda out: varlen_attn_out(out[0], Q[0], Q[0], Q[0], CU, CU, 4, 4)),
    "apply_rotary_emb": (("x",), lambda x: apply_rotary_emb(x, TABLE, TABLE, inplace=True)),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_leaf_that_requires_a_gradient_is_written_under_no_grad_alone(writer):
    """PyTorch's own in-place functions refuse it, too, and also a view of a leaf. Tensors that autograd does not track are written."""
    names, call = WRITERS[writer]
    for place, name in enumerate(names):
        with torch.device(DEVICE):
            given = [torch.zeros_like(Q) for _ in names]
        leaf = given[place].requires_grad_()
        view = writer not in ("_flash_attn_varlen_backward", "varlen_attn_out") and "scales" not in writer
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad is being used in an in-place operation"):
            leaf.add_(1)
        for x, what in ((leaf, "a leaf"), (leaf.view(leaf.shape), "a view of a leaf")):
            given[place] = x
            what = what if view else "a view of a leaf"
            with pytest.raises(ValueError, match=f"^{name}: {what} that requires grad; accepted is a tensor that does not, as detach"):
                call(*given)
            assert not leaf.any()
        for context, x in ((torch.no_grad(), leaf), (torch.inference_mode(), leaf), (torch.enable_grad(), leaf.detach())):
            given[place] = x
            with context:
                call(*given)
        if "scales" not in writer and writer != "kv.copy" and writer != "apply_rotary_emb":
            assert leaf.any()


def test_a_cache_that_is_only_read_may_require_a_gradient():
    cache = torch.randn_like(Q).requires_grad_()
    for call in (flash_attn.flash_attn_with_kvcache, flash_attn_3.flash_attn_with_kvcache):
        assert not call(Q, cache, cache, cache_seqlens=HELD).requires_grad


def test_what_is_no_leaf_is_written():
    """PyTorch's own functions write there, too."""
    with torch.device(DEVICE):
        caches = [torch.zeros_like(Q).requires_grad_() * 1 for _ in "kv"]
    strobe.kv.append(*caches, K, K, HELD, layout="bshd")
    assert torch.equal(caches[0][:, 2], K[:, 0])
