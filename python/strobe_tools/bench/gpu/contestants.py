"""The contestants: Strobe, and other attentions on the same numbers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import strobe
from strobe_tools.bench.gpu.problem import FEATURES, Problem, quantised

if TYPE_CHECKING:
    from torch import Tensor

# The contestants by their names in the figures' files.
PEERS = {
    "cudnn": "cuDNN", "fa2": "FlashAttention-2", "fa4": "FlashAttention-4", "efficient": "memory-efficient", "flashinfer": "FlashInfer",
}  # fmt: skip
_PACKAGES = {"fa4": "flash_attn.cute", "flashinfer": "flashinfer"}  # of the peers that are no part of PyTorch
_BACKENDS = {"cudnn": "CUDNN_ATTENTION", "fa2": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}  # PyTorch's backends

Call = Callable[[], Any]  # returns the results: out, or the gradients


def missing(peer: str) -> bool:
    """Whether a peer is missing."""
    try:
        return peer in _PACKAGES and importlib.util.find_spec(_PACKAGES[peer]) is None
    except ModuleNotFoundError:
        return True


def _sdpa(backend: str, p: Problem) -> Callable[..., Tensor]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if p.window or p.lengths:
        raise NotImplementedError("takes windows and packed sequences only as masks")
    chosen, grouped = getattr(SDPBackend, backend), p.heads_kv not in (0, p.heads)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(chosen):
            return scaled_dot_product_attention(q, k, v, dropout_p=p.dropout, is_causal=p.causal, enable_gqa=grouped)

    return attend


def _fa2(p: Problem, device: str) -> Callable[..., Tensor]:
    """PyTorch's kernels with the options that scaled_dot_product_attention does not pass on to them: windows, and packed sequences."""
    import torch

    starts, longest = (p.starts(device), max(p.lengths)) if p.lengths else (None, p.seqlen)
    left, right = (p.window, 0) if p.window else (-1, -1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if starts is None:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        found: Tensor = torch.ops.aten._flash_attention_forward(
            *(q, k, v, starts, starts, longest, longest, p.dropout, p.causal, False), window_size_left=left, window_size_right=right
        )[0]
        return found if starts is not None else found.transpose(1, 2)

    return attend


def fa4(p: Problem, device: str = "cuda") -> Callable[..., Tensor]:
    # Each kernel of FlashAttention-4 takes seconds to compile. Kernels are kept on disk, so that other processes can compile them for this
    # one.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func  # type: ignore[import-not-found]

    options: dict[str, Any] = {"causal": p.causal} | ({"window_size": (p.window, 0)} if p.window else {})
    if p.lengths:
        starts, longest = p.starts(device), max(p.lengths)
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = (flash_attn_varlen_func if p.lengths else flash_attn_func)(q, k, v, **options)
        return found[0] if isinstance(found, tuple) else found

    return attend


def _flashinfer(p: Problem, device: str) -> Callable[..., Tensor]:
    """Its kernel for latent attention on Hopper. What plan() does on the host is not timed."""
    import torch
    from flashinfer.mla import BatchMLAPagedAttentionWrapper  # type: ignore[import-not-found]

    def ints(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    each = p.seqlen_k // p.page
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.uint8, device=device), backend="fa3")
    wrapper.plan(
        *(ints(*range(p.batch + 1)), ints(*range(0, p.batch * each + 1, each))),
        *(ints(*range(p.batch * each)), ints(*[p.seqlen_k] * p.batch)),
        *(p.heads, p.dim_v, p.dim - p.dim_v, p.page, p.causal, p.dim**-0.5, getattr(torch, p.dtype), getattr(torch, p.dtype)),
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q[:, :, 0], k[:, 0]
        found: Tensor = wrapper.run(q[..., : p.dim_v], q[..., p.dim_v :], k[..., : p.dim_v], k[..., p.dim_v :])
        return found[:, :, None]

    return attend


def call(name: str, p: Problem, feature: str, direction: str, inputs: tuple[Tensor, ...], device: str) -> Call:
    """A contestant's call. name: "strobe", one of its engines or a peer; direction: "forward", "backward" or "both"; inputs: p's q, k, v
    and dout."""
    import torch

    attend: Callable[..., Tensor]
    if name == "fa2" and (p.window or p.lengths):
        attend = _fa2(p, device)
    elif name in _BACKENDS:
        attend = _sdpa(_BACKENDS[name], p)
    elif name == "flashinfer":
        attend = _flashinfer(p, device)
    elif name == "fa4":
        attend = fa4(p, device)
        if not p.lengths:
            inputs = tuple(x.transpose(1, 2).contiguous() for x in inputs)  # the layout of these peers
    else:
        options = p.options(device) | FEATURES[feature](p, device) | {"engine": None if name == "strobe" else name}
        q, k, v, dout = inputs
        q, k, v, scales = quantised(feature, q, k, v)
        inputs, options = (q, k, v, dout), options | scales

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return strobe.attention(q, k, v, **options)

    *leaves, dout = inputs
    if direction == "forward":
        run: Call = torch.no_grad()(lambda: (attend(*leaves),))
    else:
        leaves = [x.detach().requires_grad_() for x in leaves]
        if direction == "backward":
            out = attend(*leaves)
            run = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)  # noqa: E731
        else:
            run = lambda: torch.autograd.grad(attend(*leaves), leaves, dout)  # noqa: E731
    return run


def results(name: str, run: Call) -> list[Tensor]:
    """The call's results, in the layout common to all contestants."""
    found = [x.detach() for x in run()]
    return [x.transpose(1, 2) for x in found] if name == "fa4" and found[0].ndim == 4 else found
