"""The paper's functional forms on (B, H, N, d) (Dao et al. 2022, Algorithms 2, 4, 5): all inputs of a step are arguments, all outputs are
results.

>>> O, l, m, R = flash_attention_forward(Q, K, V, mask=mask, dropout_p=0.1)
>>> dQ, dK, dV = flash_attention_backward(Q, K, V, O, dO, l, m, R, mask=mask, dropout_p=0.1)

l and m are the sum and the maximum of each row of scores. R is the state of the random numbers that determined the dropout mask, an int64
tensor of two numbers (Strobe's seed and offset): given to a forward, it gives the same mask; None draws one from torch's default generator.
mask is bool, True = attend, and broadcasts to (B, H, N, N). block_mask is bool over blocks of block_q queries by block_k keys, True =
computed; the work is proportional to the blocks kept. flash_attention and block_sparse_flash_attention are the same for autograd.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import BlockMask, attention
from .._checks import refusal
from .._statistics import lse_of, statistics
from ..arrays.known import unfit
from ..arrays.torch import TORCH
from ._call import backward
from ._words import called, front, integer_or_refusal, tensor_or_refusal

_NAMES = {"q": "Q", "k": "K", "v": "V", "dropout": "dropout_p", "scale": "softmax_scale", "rng": "rng_state", "out": "O", "dout": "dO"}
_NAMES |= {"kept": "block_mask", "block_rows": "block_mask", "lse": "l, m"}


def _attend(given: dict[str, Any]) -> Tensor:
    return called(_NAMES, attention, return_lse=True, **_arguments(given))[0]


def _forward(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if given["rng_state"] is None and isinstance(given["Q"], Tensor) and unfit("", given["Q"]) is None:
        given = {**given, "rng_state": TORCH.drawn_rng(given["Q"])}
    arguments = _arguments(given)
    O, lse = called(_NAMES, attention, return_lse=True, **arguments)
    return O, *statistics(lse, **arguments), given["rng_state"]


def _backward(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    return backward(_NAMES, dout=given["dO"], out=given["O"], lse=lse_of(given["l"], given["m"]), **_arguments(given))


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of strobe.attention(). A wrong one is replaced by the exception that says so (see called())."""
    blocks = {name: given[name] for name in ("block_mask", "block_q", "block_k") if name in given}
    found = {"q": given["Q"], "k": given["K"], "v": given["V"], "mask": given["mask"], "causal": given["causal"]}
    found.update({"scale": given["softmax_scale"], "dropout": given["dropout_p"], "rng": given["rng_state"]})
    if given["mask"] is not None:
        found["mask"] = tensor_or_refusal("mask", given["mask"], "a torch.Tensor of bool")
    return {**found, "block_mask": _blocks(given["Q"], given["K"], **blocks) if blocks else None}


@front(_NAMES, _attend)
def flash_attention(
    Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None, causal: bool = False, softmax_scale: float | None = None,
    dropout_p: float = 0.0, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """O, differentiable."""


@front(_NAMES, _forward)
def flash_attention_forward(
    Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None, causal: bool = False, softmax_scale: float | None = None,
    dropout_p: float = 0.0, rng_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Algorithm 2: (O, l, m, rng_state). O is differentiable; l and m are not."""


@front(_NAMES, _backward)
def flash_attention_backward(
    Q: Tensor, K: Tensor, V: Tensor, O: Tensor, dO: Tensor, l: Tensor, m: Tensor, rng_state: Tensor | None = None,
    mask: Tensor | None = None, causal: bool = False, softmax_scale: float | None = None, dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Algorithm 4: (dQ, dK, dV)."""


@front(_NAMES, _attend)
def block_sparse_flash_attention(
    Q: Tensor, K: Tensor, V: Tensor, block_mask: Tensor, block_q: int, block_k: int, mask: Tensor | None = None, causal: bool = False,
    softmax_scale: float | None = None, dropout_p: float = 0.0, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """O, differentiable; block_mask (..., ceil(N / block_q), ceil(N / block_k))."""


@front(_NAMES, _forward)
def block_sparse_flash_attention_forward(
    Q: Tensor, K: Tensor, V: Tensor, block_mask: Tensor, block_q: int, block_k: int, mask: Tensor | None = None, causal: bool = False,
    softmax_scale: float | None = None, dropout_p: float = 0.0, rng_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Algorithm 5: (O, l, m, rng_state). O is differentiable; l and m are not."""


@front(_NAMES, _backward)
def block_sparse_flash_attention_backward(
    Q: Tensor, K: Tensor, V: Tensor, O: Tensor, dO: Tensor, l: Tensor, m: Tensor, block_mask: Tensor, block_q: int, block_k: int,
    rng_state: Tensor | None = None, mask: Tensor | None = None, causal: bool = False, softmax_scale: float | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The backward of Algorithm 5: (dQ, dK, dV)."""


def _blocks(Q: Tensor, K: Tensor, block_mask: Any, block_q: int, block_k: int) -> Any:
    """A BlockMask; or the exception that says what is wrong; or None if Q or K has no sequence axis, which attention() reports."""
    block_mask = tensor_or_refusal("block_mask", block_mask, "a torch.Tensor of bool")
    given = [block_mask, integer_or_refusal("block_q", block_q, 1), integer_or_refusal("block_k", block_k, 1)]
    if wrong := [x for x in given if isinstance(x, Exception)]:
        return refusal(wrong)
    if not all(isinstance(x, Tensor) and unfit("", x) is None and x.dim() == 4 for x in (Q, K)):
        return None
    sq, sk = Q.shape[2], K.shape[2]
    grid = -(-sq // block_q), -(-sk // block_k)
    if not 2 <= block_mask.dim() <= 4 or block_mask.shape[-2:] != grid:
        accepted = f"accepted is (..., {grid[0]}, {grid[1]}), blocks of {block_q} x {block_k} of {sq} x {sk} scores"
        return ValueError(f"block_mask: shape {tuple(block_mask.shape)}; {accepted}")
    sizes = {"block_q": block_q, "block_k": block_k, "seqlen_q": sq, "seqlen_k": sk}
    return called(_NAMES, BlockMask.from_kept, kept=block_mask.bool(), **sizes)
