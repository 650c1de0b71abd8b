"""Modules for PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._messages import TORCH_EXTRA, needed_by

with needed_by(__name__, TORCH_EXTRA):
    import torch

from torch import Tensor

from ._attention import attention, explain
from ._blockmask import BlockMask
from ._checks import Wrong, check_names, is_integer, refusal
from ._messages import kind
from ._options import DEFAULTS, ELSEWHERE, MAX_HEAD_DIM, MAX_HEAD_DIM_V
from ._part import Part
from .arrays.known import known_framework, unfit
from .arrays.torch import TORCH

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ._options import AttentionOptions


class FlashAttention(torch.nn.Module):
    """strobe.attention() as a module whose options are set once. It has no parameters.

    Args:
        head_dim: D, the last axis of q and k. Every call must have it.
        options: the options of strobe.attention() that are not tensors, such as causal, window, softcap, layout and block_mask. Tensors
            (mask, bias and so on) are passed to the call. dropout applies in training mode only.

    Shape:
        q (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), output (B, H, Sq, Dv); layout "bshd" and packed sequences as in
        strobe.attention().

    Raises:
        TypeError, ValueError: an option has a value that no call could have. A call raises the errors of strobe.attention().

    Example:
        >>> attend = strobe.nn.FlashAttention(64, dropout=0.1, causal=True)
        >>> out = attend(q, k, v)
        >>> out = attend(q, k, v, mask=not_padding)
    """

    def __init__(self, head_dim: int, **options: Unpack[AttentionOptions]):
        super().__init__()
        wrong: Wrong = []
        check_names("FlashAttention", options, wrong, DEFAULTS, ELSEWHERE | dict.fromkeys(("aux", "return_lse"), "it goes to the call"))
        for name, value in options.items():
            if known_framework(value) is not None:
                wrong.append(TypeError(f"{name}: {kind(value)}; accepted here are options that are no arrays; those go to the call"))
        named = not wrong
        whole = is_integer(wrong, "head_dim", head_dim, 1, MAX_HEAD_DIM)
        if named:
            try:
                _check_values(head_dim if whole else 1, options)
            except (TypeError, ValueError) as refused:
                wrong.append(refused)
        if wrong:
            raise refusal(wrong)
        self.head_dim = head_dim
        self.options: AttentionOptions = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **overrides: Unpack[AttentionOptions]) -> Any:
        """Computes attention. `overrides` replace options of the module for this call; a dropout among them holds in evaluation too."""
        if isinstance(q, Tensor) and unfit("q", q) is None and q.dim() and q.shape[-1] != self.head_dim:  # else attention() raises
            raise ValueError(f"q: head dimension {q.shape[-1]}; accepted is the module's, {self.head_dim}")
        options: AttentionOptions = {**self.options, **overrides}
        if not self.training and "dropout" not in overrides:
            options["dropout"] = 0.0
        return attention(q, k, v, return_lse=return_lse, **options)

    def extra_repr(self) -> str:
        return ", ".join([str(self.head_dim), *(f"{name}={value!r}" for name, value in self.options.items())])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        block_mask = self.options.get("block_mask")
        if block_mask is not None:
            device = fn(torch.empty_like(TORCH.own(block_mask.rows))).device
            if device.type != "meta":  # numbers could not be brought back from the meta device
                self.options["block_mask"] = block_mask.to(device)
        return super()._apply(fn, recurse)


def _check_values(head_dim: int, options: AttentionOptions) -> None:
    """Raises the errors of attention() that do not depend on the tensors, by a call on sequences without tokens."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return  # the library cannot serve a tracer or fake tensors; the later call can
    nothing = torch.zeros(0, 1, head_dim, device="cpu")
    starts = torch.zeros(2, dtype=torch.int32, device="cpu")
    given: AttentionOptions = {**options, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    if given.get("seed") is None:
        given["seed"] = 0  # nothing is drawn
    if isinstance(given.get("block_mask"), BlockMask):
        del given["block_mask"]  # its lengths must fit tensors that come with the call
    if isinstance(given.get("part"), Part):
        del given["part"]  # its rows must fit tensors that come with the call
    explain(nothing, nothing, nothing[..., :MAX_HEAD_DIM_V], **given)
