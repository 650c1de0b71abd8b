"""Models of transformers inside strobe.distributed.context_parallel(), where a rank has some of the tokens of whole sequences.

A model counts positions from 0 and makes masks among the tokens that it gets. Inside a context it gets its tokens' positions, and its masks
are those of whole sequences, for which ranks send one another what the masks read: padding, positions, numbers of sequences and images.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .._attention import CONTEXTS
from ._whole_masks import INSIDE

_LAYERS = {"attention", "full_attention", "sliding_attention", "chunked_attention", "moe", "dense", "sparse"}  # the others are no attention
_MISSING = object()
_COUNTING: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()  # _reason_against_counting() of models


@contextmanager
def in_models() -> Iterator[None]:
    """Lets models of transformers, if it is imported, run in the context that was entered last: "sdpa" becomes "strobe"."""
    modeling, masking = (sys.modules.get(f"transformers.{name}") for name in ("modeling_utils", "masking_utils"))
    if modeling is None or masking is None:
        yield
        return
    from ._mask_function import mask_of  # they need PyTorch's masks, which not every program does
    from .transformers import attention_forward

    model = modeling.PreTrainedModel
    with ExitStack() as replaced:
        for interface, own in ((modeling.AttentionInterface, attention_forward), (masking.AttentionMaskInterface, mask_of)):
            replaced.callback(interface.register, "sdpa", interface._global_mapping["sdpa"])
            interface.register("sdpa", own)
        replaced.enter_context(_attribute(model, "__call__", _with_positions(model.__call__)))
        if hasattr(masking, "find_packed_sequence_indices"):
            packed = _of_whole_sequences(masking.find_packed_sequence_indices)
            replaced.enter_context(_attribute(masking, "find_packed_sequence_indices", packed))
        yield


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _with_positions(call: Callable[..., Any]) -> Callable[..., Any]:
    """PreTrainedModel.__call__, which gives a model the positions of this rank's tokens if the caller gave none."""
    running: list[Any] = []  # the models that call one another

    def called(model: Any, *arguments: Any, **named: Any) -> Any:
        _check(model)
        names = [*inspect.signature(type(model).forward).parameters][1:]
        given = dict(zip(names, arguments, strict=False)) | named
        if given.get("position_ids") is None:
            if "position_ids" not in names:
                accepted = "accepted are models that take position_ids"
                raise NotImplementedError(f"{type(model).__name__} {INSIDE}: it would count positions from 0 on each rank; {accepted}")
            if model not in _COUNTING:
                _COUNTING[model] = _reason_against_counting(model)
            if why := _COUNTING[model]:
                raise ValueError(f"position_ids: None {INSIDE}, {why}; accepted are those of whole sequences, among the context's buffers")
            tokens = next(x for x in (given.get("input_ids"), given.get("inputs_embeds"), *given.values()) if isinstance(x, Tensor))
            context = CONTEXTS[-1]
            own = context.sharding.positions(group=context.group).to(tokens.device)[None]
            at = names.index("position_ids")
            if at < len(arguments):
                arguments = (*arguments[:at], own, *arguments[at + 1 :])
            else:
                named["position_ids"] = own
        elif not running:
            _check_positions(given["position_ids"])
        running.append(model)
        try:
            return call(model, *arguments, **named)
        finally:
            running.pop()

    return called


def _check(model: Any) -> None:
    """Refuses a model that would compute something among this rank's tokens alone."""
    from transformers import AttentionInterface

    from .transformers import attention_forward

    known = AttentionInterface._global_mapping
    own, name = getattr(model.config, "_attn_implementation", None), type(model).__name__
    if known.get(own) is not attention_forward:
        accepted = " and ".join(repr(each) for each, x in known.items() if x is attention_forward)
        how = "model.set_attn_implementation() sets one"
        raise ValueError(f"attn_implementation: {own!r} of {name} {INSIDE}; accepted are {accepted}, which see whole sequences ({how})")
    others = {*(getattr(model.config, "layer_types", None) or ())} - _LAYERS
    if others or getattr(model, "_is_stateful", False):
        layers = f"its layers of type {', '.join(sorted(others))}" if others else "its recurrent layers"
        accepted = "accepted are models whose tokens meet in attention alone"
        raise NotImplementedError(f"{name} {INSIDE}: {layers} would see this rank's tokens alone; {accepted}")


def _reason_against_counting(model: Any) -> str:
    """Why a model's own positions may be others than 0, 1, 2 and so on; "" if they are these, as of all models with rotary positions."""
    name, rotary = type(model).__name__, []
    for module in model.modules():
        if hasattr(module, "get_rope_index") or hasattr(module, "compute_3d_position_ids"):
            return f"and {name} counts positions of images too"
        if "RotaryEmbedding" in type(module).__name__:
            rotary.append(module)
    if not rotary:
        return f"and where {name} begins to count is not known"
    if not all("position_ids" in inspect.signature(type(module).forward).parameters for module in rotary):
        raise NotImplementedError(f"{name} {INSIDE}: its rotary positions begin at 0 on each rank, whatever position_ids are")
    return ""


def _check_positions(position_ids: Any) -> None:
    """Refuses positions that every rank counted from 0 on."""
    sharding, group, *_ = CONTEXTS[-1]
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or all(len(of) < 2 for of in sharding.ranges):
        return
    whole = sharding.unshard(position_ids, -1, group=group)
    shards = [sharding.shard(whole, -1, rank) for rank in range(sharding.world_size)]
    if all(torch.equal(x, torch.arange(x.shape[-1], device=x.device).expand_as(x)) for x in shards):
        how = "sharding.positions()[None], of the sharding that the context yields, or positions among its buffers"
        raise ValueError(f"position_ids: they begin at 0 on each rank {INSIDE}; accepted are those of whole sequences: {how}")


def _of_whole_sequences(found_in: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' find_packed_sequence_indices() for this rank's tokens of positions of whole sequences."""

    def packed(position_ids: Tensor) -> Tensor | None:
        sharding, group, *_ = CONTEXTS[-1]
        numbers = found_in(sharding.unshard(position_ids, -1, group=group))
        return None if numbers is None else sharding.shard(numbers, -1, group=group)

    return packed
