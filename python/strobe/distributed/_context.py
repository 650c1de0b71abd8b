"""A context in which tensors are sharded along their sequences, and attention is that of whole sequences."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from .._attention import CONTEXTS
from .._checks import Wrong, check_names, is_whole, refusal
from .._messages import kind, shown
from .._tensor_checks import tensor_refusal
from ..compat import sdpa
from ..compat._shards import in_models
from ..compat._words import called
from ._attention import Context, attention
from ._group import group_of
from ._late import leave
from ._sharding import Sharding

# F.scaled_dot_product_attention's names of attention()'s arguments.
_NAMES = {"q": "query", "k": "key", "v": "value", "mask": "attn_mask", "bias": "attn_mask", "dropout": "dropout_p", "causal": "is_causal"}


@contextlib.contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[Tensor] | None = None,
    sharding: Sharding | None = None,
    method: str | None = None,
    whole_keys: Collection[int] = (),
    **others: Any,
) -> Iterator[Sharding]:
    """A context in which each rank has its own tokens of the buffers, and attention sees the whole sequences. It is like PyTorch's context
    manager of this name. It serves torch.nn.functional.scaled_dot_product_attention, and strobe.distributed.attention() without a sharding.
    All ranks enter it, with the same buffers. It yields the sharding.

    F.scaled_dot_product_attention must be looked up within, where it is another function: a name that was imported earlier is still
    PyTorch's, which attends among this rank's tokens. nn.MultiheadAttention calls it with need_weights=False, and its fast path for
    inference is switched off within. Functions that would attend among this rank's tokens raise a RuntimeError within:
    nn.MultiheadAttention with need_weights=True, strobe.attention(), and the functions of strobe.nn and strobe.compat that call it.

    Models of transformers, if it is imported by then, attend over whole sequences with attn_implementation "strobe" or "sdpa". They get
    this rank's tokens, and the positions of these where no position_ids are given, and rotary embeddings take them. Masks of padding,
    windows and packed sequences are those of whole sequences. A model that would compute something among this rank's tokens is refused.

    Args:
        mesh: a DeviceMesh of one dimension.
        buffers: tensors that have all tokens along an axis: the batch, its labels, positions. Within the context they have the rank's
            own tokens; afterwards they have their former contents. They require no gradient.
        buffer_seq_dims: for each buffer the axis of its tokens. All have the same length there.
        no_restore_buffers: the buffers that stay sharded.
        sharding: a Sharding of the buffers' length. None: Sharding.zigzag. It is needed where there are no buffers.
        method: as of attention().
        whole_keys: lengths of keys that every rank has as a whole, as those of cross-attention: a call of
            F.scaled_dot_product_attention with so many keys attends to them alone. No rank has so many tokens of the sharding.

    Raises:
        TypeError, ValueError: an argument is not as described above.
    """
    wrong: Wrong = []
    check_names("context_parallel", others, wrong, (), {"layout": "did you mean sharding?"})
    try:
        if wrong:
            raise refusal(wrong)
        group, sharding, given, dims, kept = _judged(mesh, buffers, buffer_seq_dims, no_restore_buffers, sharding)
        lengths = _lengths(whole_keys, sharding)
    except Exception as failure:  # the other ranks would wait for this rank
        leave(failure)
        raise
    before = [x.data for x in given]
    own, of_module, fast = F.scaled_dot_product_attention, F.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled()
    CONTEXTS.append(Context(sharding, group, method, lengths, attention))
    try:
        for x, dim in zip(given, dims, strict=True):
            x.data = sharding.shard(x.data, dim, group.rank()).contiguous()
        F.scaled_dot_product_attention, F.multi_head_attention_forward = _sdpa, _without_weights(of_module)
        torch.backends.mha.set_fastpath_enabled(False)  # the fast path does not call F.scaled_dot_product_attention
        with in_models():
            yield sharding
    finally:
        F.scaled_dot_product_attention, F.multi_head_attention_forward = own, of_module
        torch.backends.mha.set_fastpath_enabled(fast)
        CONTEXTS.pop()
        for x, data in zip(given, before, strict=True):
            if not any(x is other for other in kept):
                x.data = data


def _judged(
    mesh: Any, buffers: Any, buffer_seq_dims: Any, no_restore_buffers: Any, sharding: Any
) -> tuple[ProcessGroup, Sharding, list[Tensor], list[int], list[Tensor]]:
    """The checked arguments: the group, the sharding, and the three lists."""
    group = group_of(None, mesh)
    given, dims, kept = (
        _several(name, x)
        for name, x in (("buffers", buffers), ("buffer_seq_dims", buffer_seq_dims), ("no_restore_buffers", no_restore_buffers))
    )
    _check(given, dims, kept)
    lengths = {x.shape[dim] for x, dim in zip(given, dims, strict=True)}
    if sharding is None:
        if not lengths:
            raise ValueError("sharding: None without buffers; accepted is a strobe.distributed.Sharding, or buffers, whose length says it")
        sharding = Sharding.zigzag(lengths.pop(), group.size())
    elif not isinstance(sharding, Sharding):
        raise TypeError(f"sharding: {kind(sharding)}; accepted is a strobe.distributed.Sharding, or None")
    elif lengths - {sharding.seqlen}:
        raise ValueError(f"sharding: of {sharding.seqlen} tokens; accepted is one of {lengths.pop()}, as the buffers have")
    if sharding.world_size != group.size():
        raise ValueError(f"sharding: of {sharding.world_size} ranks; accepted is one of {group.size()}, the group's size")
    return group, sharding, given, dims, kept


def _lengths(whole_keys: Any, sharding: Sharding) -> frozenset[int]:
    lengths = _several("whole_keys", whole_keys)
    own = {sharding.count(rank) for rank in range(sharding.world_size)}
    for n in lengths:
        if not is_whole(n) or n < 0 or n in own:
            accepted = f"accepted are lengths other than {', '.join(map(str, sorted(own)))}, which are those of ranks' tokens"
            raise ValueError(f"whole_keys: {shown(n)}; {accepted}")
    return frozenset(lengths)


def _several(name: str, x: Any) -> list[Any]:
    if x is None:
        return []
    if isinstance(x, Tensor) or not isinstance(x, Iterable):
        accepted = "integers in a list" if name in ("buffer_seq_dims", "whole_keys") else "several tensors in a list"
        raise TypeError(f"{name}: {kind(x)}; accepted are {accepted}, or None")
    return list(x)


def _check(buffers: list[Tensor], dims: list[int], kept: list[Tensor]) -> None:
    if len(buffers) != len(dims):
        raise ValueError(f"buffer_seq_dims: {len(dims)} numbers; accepted are {len(buffers)}, one for each buffer")
    for n, (x, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not isinstance(x, Tensor):
            raise TypeError(f"buffers: {kind(x)} at [{n}]; accepted is a torch.Tensor")
        if (refused := tensor_refusal(f"buffers[{n}]", x)) is not None:
            raise refused
        if x.requires_grad:
            raise ValueError(f"buffers: requires grad at [{n}]; accepted is a tensor that does not, as x.detach()")
        if not is_whole(dim) or not -x.dim() <= dim < x.dim():
            raise ValueError(f"buffer_seq_dims: {shown(dim)} at [{n}]; accepted is an axis of a buffer of shape {tuple(x.shape)}")
        if x.shape[dim] != buffers[0].shape[dims[0]]:
            raise ValueError(
                f"buffers: {x.shape[dim]} tokens at [{n}]; accepted are {buffers[0].shape[dims[0]]}, as at [0]: all have the same"
            )
    if not all(any(x is other for other in buffers) for x in kept):
        raise ValueError("no_restore_buffers: a tensor that is not among buffers; accepted are some of buffers")


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention on tensors that have the rank's tokens, (B, H, S, D); attn_mask has its rows, and all keys."""
    if isinstance(key, Tensor) and key.dim() > 1 and key.shape[-2] in CONTEXTS[-1].whole_keys:
        inside = CONTEXTS[:]
        CONTEXTS.clear()
        try:
            return sdpa.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        finally:
            CONTEXTS[:] = inside
    if hasattr(attn_mask, "shard"):  # a MaskFunction
        accepted = "accepted are models of transformers that take attention functions by their names"
        raise NotImplementedError(f"attn_mask: a mask of whole sequences in a model's own call of this function; {accepted}")
    is_added = isinstance(attn_mask, Tensor) and attn_mask.is_floating_point()
    of_scores: dict[str, Any] = {} if attn_mask is None else {"bias" if is_added else "mask": attn_mask}
    options: dict[str, Any] = {"causal": is_causal, "scale": scale, "dropout": dropout_p, "alignment": "top_left"}
    return called(_NAMES, attention, q=query, k=key, v=value, **options, **of_scores)


def _without_weights(forward: Callable[..., Any]) -> Callable[..., Any]:
    """nn.MultiheadAttention's function, but refuses need_weights: the weights would cover the rank's own tokens only."""
    place = list(inspect.signature(forward).parameters).index("need_weights")

    @functools.wraps(forward)
    def checked(*arguments: Any, **named: Any) -> Any:
        if arguments[place] if len(arguments) > place else named.get("need_weights", True):
            raise RuntimeError(
                "need_weights=True inside context_parallel(): the weights would be among this rank's tokens; accepted is False"
            )
        return forward(*arguments, **named)

    return checked
