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

import torch
from torch import Tensor

from .. import BlockMask
from .._checks import Wrong, is_integer, refusal
from ..arrays.known import unfit
from ._statistics import backward, forward, lse_of, statistics
from ._words import called, front, tensor_or_refusal

_NAMES = {"q": "Q", "k": "K", "v": "V", "dropout": "dropout_p", "scale": "softmax_scale", "rng": "rng_state", "out": "O", "dout": "dO"}
_NAMES |= {"kept": "block_mask", "block_rows": "block_mask", "lse": "l, m"}


@front(_NAMES)
def flash_attention(
    Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None, causal: bool = False, softmax_scale: float | None = None,
    dropout_p: float = 0.0, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """O, differentiable."""
    return forward(_NAMES, Q, K, V, **_options(mask, causal, softmax_scale, dropout_p, rng_state))[0]


@front(_NAMES)
def flash_attention_forward(
    Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None, causal: bool = False, softmax_scale: float | None = None,
    dropout_p: float = 0.0, rng_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Algorithm 2: (O, l, m, rng_state). O is differentiable; l and m are not."""
    return _forward(Q, K, V, _options(mask, causal, softmax_scale, dropout_p, _state(rng_state, Q)))


@front(_NAMES)
def flash_attention_backward(
    Q: Tensor, K: Tensor, V: Tensor, O: Tensor, dO: Tensor, l: Tensor, m: Tensor, rng_state: Tensor | None = None,
    mask: Tensor | None = None, causal: bool = False, softmax_scale: float | None = None, dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Algorithm 4: (dQ, dK, dV)."""
    return backward(_NAMES, Q, K, V, O, dO, lse_of(l, m), **_options(mask, causal, softmax_scale, dropout_p, rng_state))


@front(_NAMES)
def block_sparse_flash_attention(
    Q: Tensor, K: Tensor, V: Tensor, block_mask: Tensor, block_q: int, block_k: int, mask: Tensor | None = None, causal: bool = False,
    softmax_scale: float | None = None, dropout_p: float = 0.0, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """O, differentiable; block_mask (..., ceil(N / block_q), ceil(N / block_k))."""
    blocks = _blocks(block_mask, block_q, block_k, Q, K)
    return forward(_NAMES, Q, K, V, **_options(mask, causal, softmax_scale, dropout_p, rng_state, blocks))[0]


@front(_NAMES)
def block_sparse_flash_attention_forward(
    Q: Tensor, K: Tensor, V: Tensor, block_mask: Tensor, block_q: int, block_k: int, mask: Tensor | None = None, causal: bool = False,
    softmax_scale: float | None = None, dropout_p: float = 0.0, rng_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Algorithm 5: (O, l, m, rng_state). O is differentiable; l and m are not."""
    blocks = _blocks(block_mask, block_q, block_k, Q, K)
    return _forward(Q, K, V, _options(mask, causal, softmax_scale, dropout_p, _state(rng_state, Q), blocks))


@front(_NAMES)
def block_sparse_flash_attention_backward(
    Q: Tensor, K: Tensor, V: Tensor, O: Tensor, dO: Tensor, l: Tensor, m: Tensor, block_mask: Tensor, block_q: int, block_k: int,
    rng_state: Tensor | None = None, mask: Tensor | None = None, causal: bool = False, softmax_scale: float | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The backward of Algorithm 5: (dQ, dK, dV)."""
    blocks = _blocks(block_mask, block_q, block_k, Q, K)
    return backward(_NAMES, Q, K, V, O, dO, lse_of(l, m), **_options(mask, causal, softmax_scale, dropout_p, rng_state, blocks))


def _options(
    mask: Tensor | None, causal: bool, scale: float | None, dropout: float, rng: Tensor | None, blocks: Any = None
) -> dict[str, Any]:
    if mask is not None:
        mask = tensor_or_refusal("mask", mask, "a torch.Tensor of bool")
    return {"mask": mask, "causal": causal, "scale": scale, "dropout": dropout, "rng": rng, "block_mask": blocks}


def _forward(Q: Tensor, K: Tensor, V: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    O, lse = forward(_NAMES, Q, K, V, **options)
    l, m = statistics(Q, K, lse, **{name: options[name] for name in ("scale", "causal", "mask", "block_mask")})
    return O, l, m, options["rng"]


def _state(rng_state: Tensor | None, Q: Tensor) -> Tensor | None:
    if rng_state is None and isinstance(Q, Tensor) and unfit("", Q) is None:
        return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=Q.device)
    return rng_state


def _blocks(block_mask: Any, block_q: int, block_k: int, Q: Tensor, K: Tensor) -> Any:
    """A BlockMask; or the exception that says what is wrong; or None if Q or K has no sequence axis, which attention() reports."""
    block_mask = tensor_or_refusal("block_mask", block_mask, "a torch.Tensor of bool")
    wrong: Wrong = [block_mask] if isinstance(block_mask, Exception) else []
    sized = [is_integer(wrong, name, x, 1, 2**31 - 1) for name, x in (("block_q", block_q), ("block_k", block_k))]
    if not all(isinstance(x, Tensor) and unfit("", x) is None and x.dim() == 4 for x in (Q, K)):
        return refusal(wrong) if wrong else None
    lengths = Q.shape[2], K.shape[2]
    if all(sized) and isinstance(block_mask, Tensor):
        grid = tuple(-(-n // block) for n, block in zip(lengths, (block_q, block_k), strict=True))
        if not 2 <= block_mask.dim() <= 4 or block_mask.shape[-2:] != grid:
            shapes = f"shape {tuple(block_mask.shape)}; accepted is (..., {grid[0]}, {grid[1]})"
            wrong.append(ValueError(f"block_mask: {shapes}, blocks of {block_q} x {block_k} of {lengths[0]} x {lengths[1]} scores"))
    if wrong:
        return refusal(wrong)
    sizes = {"block_q": block_q, "block_k": block_k, "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    return called(_NAMES, BlockMask.from_kept, kept=block_mask.bool(), **sizes)
