"""torch.nn.attention.flex_attention. Code that imports its functions can import them from here:

>>> from strobe.compat.flex_attention import create_block_mask, flex_attention
>>> block_mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 1024, 1024, device="cpu")
>>> def score_mod(score, b, h, q_idx, kv_idx):
...     return score + bias[h, q_idx - kv_idx]
>>> out = flex_attention(query, key, value, score_mod, block_mask)

Nothing has to be compiled, nothing of queries x keys is made, and there is a backward on the CPU as well. PyTorch's own BlockMask is
accepted in the place of this module's. Any other name that torch.nn.attention.flex_attention has is found here, and is PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import attention
from .._abi import outside_graphs
from .._checks import refuse
from .._messages import kind, shown
from . import _block_mask
from ._block_mask import (
    DEFAULT_SIZE,
    BlockMask,
    MaskMod,
    ScoreMod,
    and_masks,
    is_block_mask,
    is_slice,
    noop_mask,
    or_masks,
    ready,
)
from ._nested import as_nested, wrong_nested
from ._words import called, flag_or_refusal, front, tensor_or_refusal

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "create_nested_block_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]

for _public in (BlockMask, and_masks, noop_mask, or_masks):
    _public.__module__ = __name__

_DEFAULT_SPARSE_BLOCK_SIZE = DEFAULT_SIZE
_mask_mod_signature, _score_mod_signature = MaskMod, ScoreMod

_NAMES = {"q": "query", "k": "key", "v": "value", "score": "score_mod", "mask": "mask_mod"}
_HINTS = {**_NAMES, "mask": "block_mask"} | dict.fromkeys(("softmax_scale", "sm_scale"), "scale")

# The options that steer FlexAttention's own kernels, each with fwd_ or bwd_ in front as well.
_OF_KERNELS = frozenset(
    (
        *("BACKEND", "BLOCKS_ARE_CONTIGUOUS", "BLOCK_M", "BLOCK_M1", "BLOCK_M2", "BLOCK_N", "BLOCK_N1", "BLOCK_N2", "FLOAT32_PRECISION"),
        *("FORCE_USE_FLEX_ATTENTION", "IS_DIVISIBLE", "PARTITION_SIZE", "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "SAFE_N_BOUNDARY"),
        *("SPLIT_KV", "USE_TMA", "WRITE_DQ", "kpack", "matrix_instr_nonkdim", "num_buffers_warp_spec", "num_consumer_groups", "num_stages"),
        *("num_warps", "waves_per_eu"),
    )
)
_CHUNK = 2**22  # scores computed at once


class AuxRequest(NamedTuple):
    """The results that are asked for beside the output. PyTorch's own is accepted as well."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """The results beside the output, None where they were not asked for."""

    lse: Tensor | None = None
    max_scores: Tensor | None = None


def __getattr__(name: str) -> Any:
    if not name.startswith("__") and hasattr(_block_mask.pytorchs, name):
        return getattr(_block_mask.pytorchs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _attend(given: dict[str, Any]) -> Any:
    return_lse, return_aux, block_mask = (given[name] for name in ("return_lse", "return_aux", "block_mask"))
    with_lse = flag_or_refusal("return_lse", return_lse)
    found: list[Any] = [x if isinstance(x := flag_or_refusal("enable_gqa", given["enable_gqa"]), Exception) else None]
    found += [with_lse if isinstance(with_lse, Exception) else None, _wrong_kernel_options(given["kernel_options"])]
    if return_aux is not None and not (isinstance(return_aux, tuple) and hasattr(return_aux, "lse")):
        found.append(TypeError(f"return_aux: {kind(return_aux)} {shown(return_aux)}; accepted is an AuxRequest, or None"))
    elif return_aux is not None and with_lse is True:
        found.append(ValueError("return_lse: True beside return_aux; accepted is return_aux=AuxRequest(lse=True)"))
    if given["score_mod"] is not None and not callable(given["score_mod"]):
        found.append(TypeError(f"score_mod: {kind(given['score_mod'])}; accepted is a function f(score, b, h, q_idx, kv_idx), or None"))
    if block_mask is not None and not is_block_mask(block_mask):
        found.append(TypeError(f"block_mask: {kind(block_mask)}; accepted is a BlockMask, as create_block_mask makes it, or None"))
    elif block_mask is not None and is_slice(block_mask):
        words = "a part of another one, without a mask_mod; accepted is one whose mask_mod was set after block_mask[...]"
        found.append(ValueError(f"block_mask: {words}"))
    refuse(*found)
    wants_lse = return_lse if return_aux is None else bool(return_aux.lse)
    wants_max = bool(getattr(return_aux, "max_scores", False))
    attend = _attend_nested if any(getattr(given[name], "is_nested", False) for name in ("query", "key", "value")) else _attend_dense
    out, lse, max_scores = attend(given, wants_lse, wants_max)
    if return_aux is not None:
        return out, AuxOutput(lse, max_scores)
    return (out, lse) if wants_lse else out


def _wrong_kernel_options(given: Any) -> Exception | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        return TypeError(f"kernel_options: {kind(given)}; accepted is a dict, or None")
    unknown = [name for name in given if not isinstance(name, str) or name.removeprefix("fwd_").removeprefix("bwd_") not in _OF_KERNELS]
    if not unknown:
        return None
    return ValueError(f"kernel_options: {', '.join(map(shown, unknown))}; accepted, without effect, are {', '.join(sorted(_OF_KERNELS))}")


def _attend_dense(given: dict[str, Any], wants_lse: bool, wants_max: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    q, k, v = (tensor_or_refusal(name, given[name]) for name in ("query", "key", "value"))
    options: dict[str, Any] = {"scale": given["scale"]}
    if given["score_mod"] is not None:
        options["score"] = given["score_mod"]
    hides = None
    if given["block_mask"] is not None and all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k, v)):
        hides = _fitting(given["block_mask"], q.shape[2], k.shape[2])
        if hides.blocks is not None:
            options["block_mask"] = hides.blocks
        if hides.function is not None:
            options["mask"] = hides.function
        if k.shape[0] == v.shape[0] == 1 != q.shape[0]:
            k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
    out = called(_NAMES, attention, q=q, k=k, v=v, return_lse=wants_lse, **options)
    out, lse = out if wants_lse else (out, None)
    if not wants_max:
        return out, lse, None
    unit = q.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
    return out, lse, _largest(q, k, unit, given["score_mod"], None if hides is None else hides.visible())


def _fitting(block_mask: Any, q_len: int, kv_len: int) -> Any:
    lengths = tuple(block_mask.seq_lengths)
    hides = ready(block_mask)
    if hides.blocks is not None and lengths != (q_len, kv_len):
        words = f"for {lengths[0]} queries and {lengths[1]} keys; accepted is one for {q_len} and {kv_len}, as query and key have"
        if q_len <= lengths[0] and kv_len <= lengths[1]:
            words += f"; block_mask._adjust({q_len}, {kv_len}) takes the first ones"
        raise ValueError(f"block_mask: {words}")
    return hides


@outside_graphs
@torch.no_grad()
def _largest(q: Tensor, k: Tensor, scale: float, score_mod: ScoreMod | None, visible: MaskMod | None) -> Tensor:
    """The largest score of each query, (B, H, Sq). The scores are computed once more, some rows at a time, as FlexAttention does it."""
    real = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, sq, _ = q.shape
    sk = k.shape[2]
    keys = k.to(real).repeat_interleave(heads // k.shape[1], 1).mT
    found = torch.full((batch, heads, sq), -torch.inf, dtype=real, device=q.device)
    b, h, j = (torch.arange(n, device=q.device) for n in (batch, heads, sk))
    step = max(1, _CHUNK // max(1, batch * heads * sk))
    for start in range(0, sq if sk else 0, step):
        i = torch.arange(start, min(start + step, sq), device=q.device)
        scores = scale * (q[:, :, i].to(real) @ keys)
        if score_mod is not None:
            scores = _of_all(score_mod, (b, h, i, j), scores)
        if visible is not None:
            scores = torch.where(_of_all(visible, (b, h, i, j)), scores, -torch.inf)
        found[:, :, i] = scores.amax(-1)
    return found


def _of_all(function: Callable[..., Any], places: tuple[Tensor, ...], *scores: Tensor) -> Tensor:
    """function(score, b, h, i, j) of all pairs; without scores function(b, h, i, j)."""
    try:
        home = import_module("torch._dynamo._trace_wrapped_higher_order_op")
    except ImportError:  # PyTorch 2.5
        home = import_module("torch._higher_order_ops.flex_attention")
    for axis in (3, 2, 1, 0):
        function = torch.vmap(function, in_dims=(*(0 for _ in scores), *(0 if n == axis else None for n in range(4))))
    with home.TransformGetItemToIndex():  # table[i] does not ask for the number of i
        return function(*scores, *places)


# Nested tensors


def _attend_nested(given: dict[str, Any], wants_lse: bool, wants_max: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    query, key, value = (given[name] for name in ("query", "key", "value"))
    refuse(*(wrong_nested(name, given[name], 4) for name in ("query", "key", "value")))
    if wants_max:
        raise NotImplementedError("return_aux: max_scores of nested tensors; accepted is lse")
    q, k, v = (x.values() for x in (query, key, value))  # (H, tokens, D)
    options: dict[str, Any] = {"scale": given["scale"], "return_lse": True}
    score_mod, block_mask = given["score_mod"], given["block_mask"]
    if block_mask is None:
        for side, x in (("q", query), ("k", key)):
            options[f"cu_seqlens_{side}"] = x.offsets().int()
        if score_mod is not None:
            options["score"] = score_mod
        out, lse = called(_NAMES, attention, q=q.transpose(0, 1), k=k.transpose(0, 1), v=v.transpose(0, 1), **options)
        lse = lse.transpose(0, 1)
    else:
        within = None if score_mod is None else _of_sequences(score_mod, query, key, is_score=True)
        dense = {**given, "query": q[None], "key": k[None], "value": v[None], "score_mod": within}
        all_out, all_lse, _ = _attend_dense(dense, True, False)
        assert all_lse is not None
        out, lse = all_out[0].transpose(0, 1), all_lse[0].transpose(0, 1)
    return as_nested(out, query), as_nested(lse, query) if wants_lse else None, None


def _of_sequences(function: Callable[..., Any], query: Any, key: Any, is_score: bool) -> Callable[..., Any]:
    """A function of positions in the sequences as one of positions among all tokens. Tokens of two sequences do not see each other."""
    of_q, at_q = _places(query)
    of_k, at_k = (of_q, at_q) if key is query or key.offsets() is query.offsets() else _places(key)
    if is_score:

        def score(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(of_q[i] == of_k[j], function(x, of_q[i], h, at_q[i], at_k[j]), -torch.inf)

        return score

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (of_q[i] == of_k[j]) & function(of_q[i], h, at_q[i], at_k[j])

    return mask


def _places(x: Any) -> tuple[Tensor, Tensor]:
    """The sequence of each token, and its place there."""
    offsets = x.offsets()
    tokens = torch.arange(x.values().shape[x._ragged_idx - 1], device=offsets.device)
    sequence = torch.searchsorted(offsets, tokens, right=True) - 1
    return sequence, tokens - offsets[sequence]


# The functions


@front(_HINTS, _attend)
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = None, block_mask: Any = None, scale: float | None = None,
    enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, *, return_aux: Any = None,
) -> Any:  # fmt: skip
    """softmax(score_mod(scale · query · keyᵀ)) · value, where block_mask lets a query see a key; differentiable in query, key, value, and
    in the float tensors that score_mod reads.

    Args:
        query: (B, H, L, E); float32, float16, bfloat16 or float64. E is up to 576, Ev up to 512.
        key, value: (B, Hkv, S, E) and (B, Hkv, S, Ev), in query's dtype. With a block_mask they may have one batch for all. All three may
            be nested tensors of layout torch.jagged, (B, H, ragged, E).
        score_mod: f(score, b, h, q_idx, kv_idx) → the score that counts; -inf hides the pair. docs/functions.md says what it may do.
        block_mask: a BlockMask, of this module or of PyTorch, for L queries and S keys.
        scale: None means 1/sqrt(E).
        enable_gqa: without effect: H may always be a multiple of Hkv.
        return_lse: True returns (out, lse).
        kernel_options: a dict of what steers FlexAttention's own kernels. Without effect; other names are refused.
        return_aux: AuxRequest(lse=True, max_scores=True) returns (out, AuxOutput(lse, max_scores)).

    Returns:
        out: (B, H, L, Ev). A query that sees no key has output 0.
        lse: (B, H, L), float32, or float64 if query is: the natural logarithm of the sum of exp(score); -inf for a query that sees no key.
            It is differentiable.
        max_scores: (B, H, L), in lse's dtype: the largest score. It has no gradient, and costs half a forward more.

    Raises:
        The errors of strobe.attention. docs/compat.md lists what differs from PyTorch.
    """


def create_block_mask(
    mask_mod: MaskMod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_SIZE, _compile: bool = False, separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False, dq_kv_order: bool = True,
) -> BlockMask:  # fmt: skip
    """The BlockMask of a function. Bounds of what the function computes tell which blocks it sees: nothing of Q_LEN x KV_LEN is made.

    Make the mask again if what mask_mod reads has changed.

    Args:
        mask_mod: g(b, h, q_idx, kv_idx) → bool, True = attend.
        B, H: the numbers of sequences and query heads; None: one mask for all.
        Q_LEN, KV_LEN: the numbers of queries and keys.
        device: None: the accelerator, if there is one, else the CPU.
        BLOCK_SIZE: the queries and the keys of a block, or one number for both.
        separate_full_blocks: False counts blocks that are visible as a whole among those of kv_indices.
        _compile, compute_dq_write_order, dq_kv_order: without effect.

    Raises:
        TypeError, ValueError: an argument is not as described above, or the function has no graph.
    """
    return _block_mask.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, separate_full_blocks)


def create_nested_block_mask(
    mask_mod: MaskMod, B: int | None, H: int | None, q_nt: Tensor, kv_nt: Tensor | None = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_SIZE, _compile: bool = False,
) -> BlockMask:  # fmt: skip
    """The BlockMask of the tokens of nested tensors, each of which sees tokens of its own sequence alone.

    Args:
        mask_mod: g(b, h, q_idx, kv_idx) → bool for sequence b and positions in it.
        B: without effect: all sequences lie behind one another. H: the number of query heads; None: one mask for all.
        q_nt, kv_nt: the nested tensors of layout torch.jagged whose sequences count, as (B, H, ragged, E); kv_nt None: as q_nt.
        BLOCK_SIZE: as in create_block_mask(). _compile: without effect.
    """
    q: Any = q_nt
    k: Any = q_nt if kv_nt is None else kv_nt
    refuse(wrong_nested("q_nt", q), wrong_nested("kv_nt", k))
    if not callable(mask_mod):
        raise TypeError(f"mask_mod: {kind(mask_mod)}; accepted is a function g(b, h, q_idx, kv_idx)")
    q_len, kv_len = (x.values().shape[x._ragged_idx - 1] for x in (q, k))
    return create_block_mask(_of_sequences(mask_mod, q, k, is_score=False), 1, H, q_len, kv_len, q.device, BLOCK_SIZE)


def create_mask(mod_fn: Callable[..., Any], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None) -> Tensor:
    """The pairs that a function sees, as a dense tensor, bool (B, H, Q_LEN, KV_LEN), True = attend.

    Args:
        mod_fn: a mask_mod; or a score_mod, which hides a pair by -inf.
        B, H, Q_LEN, KV_LEN, device: as in create_block_mask().
    """
    count = _arguments(mod_fn)
    there = _block_mask.default_device() if device is None else device
    sizes = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
    places = tuple(torch.arange(n, device=there) for n in sizes)
    if count == 4:
        return _of_all(mod_fn, places)
    return _of_all(mod_fn, places, torch.zeros(sizes, device=there)) != -torch.inf


def _arguments(mod_fn: Any) -> int:
    """How many arguments a mask_mod (4) or a score_mod (5) has."""
    import inspect

    accepted = "accepted is g(b, h, q_idx, kv_idx), or f(score, b, h, q_idx, kv_idx)"
    if not callable(mod_fn):
        raise TypeError(f"mod_fn: {kind(mod_fn)}; {accepted}")
    taken = [x for x in inspect.signature(mod_fn).parameters.values() if x.default is x.empty and x.kind is not x.KEYWORD_ONLY]
    if len(taken) not in (4, 5):
        raise TypeError(f"mod_fn: it takes {len(taken)} arguments; {accepted}")
    return len(taken)
