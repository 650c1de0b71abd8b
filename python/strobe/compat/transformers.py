"""An attention implementation for Hugging Face transformers, which models choose by name.

>>> from strobe.compat import transformers
>>> transformers.register()
>>> model = AutoModelForCausalLM.from_pretrained("...", attn_implementation="strobe")

It needs transformers 4.53 or later, and continuous batching 5.0 or later:

>>> transformers.use_paged(model)
>>> model.generate_batch(prompts, generation_config=...)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._attention import CONTEXTS, attention
from .._messages import TRANSFORMERS_EXTRA, kind, needed_by
from .._tensor_checks import misplaced
from ._mask_function import MaskFunction, checked_sequences, mask_of
from ._words import called, switch_or_refusal, tensor_or_refusal

_NAMES = {"q": "query", "k": "key", "v": "value", "scale": "scaling", "sinks": "s_aux", "causal": "is_causal"}
_PAGED = _NAMES | {"window": "sliding_window", "cu_seqlens_q": "cu_seq_lens_q", "cu_seqlens_k": "cu_seq_lens_k"}
_PAGED |= {"max_seqlen_q": "max_length_q", "max_seqlen_k": "max_length_k"}


def register(name: str = "strobe") -> None:
    """Makes `attn_implementation=name` known to transformers, and for continuous batching "paged|name" and "name-flash" (see use_paged)."""
    with needed_by(__name__, TRANSFORMERS_EXTRA):
        from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, mask_of)
    for paged in (f"paged|{name}", f"{name}-flash"):
        AttentionInterface.register(paged, _paged_attention_forward)
        AttentionMaskInterface.register(paged, lambda *_, **__: None)  # the sequences' lengths determine which keys a token sees


def use_paged(model: Any, name: str = "strobe") -> None:
    """Sets a model's attention for continuous batching (generate_batch, init_continuous_batching), whatever it was.

    transformers 5.0 to 5.21 know it as "paged|strobe", which from_pretrained and set_attn_implementation take as well, and put the prefix
    before "strobe" themselves. Later ones have no prefix, and take no other name than "sdpa", "paged|eager" and those that contain "flash",
    whose code they load by themselves: "strobe-flash" is set past that.
    """
    with needed_by(__name__, TRANSFORMERS_EXTRA):
        from transformers import AttentionInterface, PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: {kind(model)}; accepted is a transformers.PreTrainedModel")
    register(name)
    if "paged|sdpa" in AttentionInterface().valid_keys():
        model.set_attn_implementation(f"paged|{name}")
    else:
        model.config._attn_implementation = f"{name}-flash"


def attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    position_bias: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The function that transformers calls: (out (B, Sq, H, Dv), no weights).

    Args:
        module: its `is_causal` is used if the argument is None.
        query: (B, H, Sq, D).
        key, value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv). H is a multiple of Hkv; heads are not repeated.
        attention_mask: the mask that transformers made by register()'s function, in which windows, padding and sequences are. Or a
            tensor: bool, True = attend, or added to the scores; it broadcasts to (B, H, Sq, Sk). None: all keys, or if causal those up
            to the query's position.
        softcap, s_aux, position_bias: softcap, sinks (H,) and bias of strobe.attention.
        others: cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k, as of DataCollatorWithFlattening, are the lengths of sequences
            behind one another in a batch of 1, if the mask hides nothing but by causal, windows and these sequences, whose own lengths
            it does not know. Refused are cache (paged) and output_attentions. Others have no effect.

    Inside strobe.distributed.context_parallel() query, key and value have this rank's tokens, and attention_mask, position_bias and lengths
    of sequences are those of whole sequences: the rank's rows, and all columns.

    Raises:
        The errors of strobe.attention, with the names of these arguments.
    """
    if others.get("output_attentions"):
        raise NotImplementedError("output_attentions: True; accepted is False, for the weights are never made; 'eager' makes them")
    if others.get("cache") is not None:
        raise NotImplementedError(
            "cache: given; accepted is None: strobe.compat.transformers.use_paged(model) sets what takes a paged cache"
        )
    own = is_causal is not None
    is_bias = position_bias is not None
    options = _model_options(query, dropout, scaling, softcap, s_aux)
    names = _NAMES | {"mask": "attention_mask", "bias": "position_bias" if is_bias else "attention_mask"}
    if isinstance(attention_mask, MaskFunction):
        _fit(attention_mask, query, key)
        if isinstance(query, Tensor) and query.dim() == 4:
            attention_mask = attention_mask.of_batch(query.shape[0])
        packed = None if is_bias else _packed(attention_mask, query, key, others)
        hidden = {**attention_mask.options(), **({"bias": tensor_or_refusal("position_bias", position_bias)} if is_bias else {})}
    else:
        causal = switch_or_refusal("is_causal" if own else "module.is_causal", is_causal if own else getattr(module, "is_causal", True))
        packed = None if is_bias or attention_mask is not None else _packed(None, query, key, others)
        if packed is None and causal is True and (attention_mask is not None or (_is_single(query) and not CONTEXTS)):
            causal = False  # a mask replaces causal, and a single query sees all keys
        hidden = {**_masks(attention_mask, position_bias), "causal": causal, "alignment": "top_left"}
    attend: Callable[..., Any] = CONTEXTS[-1].attention if CONTEXTS else attention
    if packed is None:
        out = called(names, attend, q=query, k=key, v=value, **hidden, **options)
        return out.transpose(1, 2).contiguous(), None
    options |= {"causal": hidden["causal"], "window": hidden.get("window"), **packed}
    q, k, v = (_of_tokens(x) for x in (query, key, value))
    out = called(names, attend, q=q, k=k, v=v, layout="bshd", **options)
    return out.unflatten(0, query.shape[:1] + query.shape[2:3]).contiguous(), None


def _is_single(query: Any) -> bool:
    return isinstance(query, Tensor) and query.dim() == 4 and query.shape[2] <= 1


def _of_tokens(x: Tensor) -> Tensor:
    """(B · S, H, D) of (B, H, S, D)."""
    return x.transpose(1, 2).flatten(0, 1)


def _fit(mask: MaskFunction, query: Any, key: Any) -> None:
    for name, x, length in (("query", query, mask.shape[2]), ("key", key, mask.shape[3])):
        if isinstance(x, Tensor) and x.dim() == 4 and (x.shape[2] != length or mask.batch_size not in (1, x.shape[0])):
            shape = f"for a batch of {mask.batch_size}, {mask.shape[2]} queries and {mask.shape[3]} keys"
            raise ValueError(f"attention_mask: {shape}, beside {name} of shape {tuple(x.shape)}; accepted is one for the same")


def _packed(mask: MaskFunction | None, query: Any, key: Any, others: dict[str, Any]) -> dict[str, Any] | None:
    """The lengths of sequences that lie behind one another in the rows; None if there are none, or more is hidden than they say. Those of
    the mask come first: they also tell chunks, and sequences of the user."""
    if mask is not None and mask.cu_seqlens is not None:
        cu, longest = mask.cu_seqlens, mask.longest
        return {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
    cu_q: Any = others.get("cu_seq_lens_q")
    cu_k: Any = others.get("cu_seq_lens_k")
    is_given = isinstance(cu_q, Tensor) and isinstance(cu_k, Tensor) and all(isinstance(x, Tensor) and x.dim() == 4 for x in (query, key))
    if is_given and query.shape[0] == 1 and query.shape[2] == key.shape[2] and (mask is None or mask.is_packed):
        lengths = {f"max_seqlen_{side}": others.get(f"max_length_{side}", others.get(f"max_seqlen_{side}")) for side in "qk"}
        known = {name: x if isinstance(x, (int, torch.SymInt)) else int(x) for name, x in lengths.items() if x is not None}
        cu_q = cu_q.int()
        if CONTEXTS and (end := int(cu_q[-1])) != (tokens := CONTEXTS[-1].sharding.seqlen):
            raise ValueError(
                f"cu_seq_lens_q: ends at {end} inside context_parallel(); accepted are lengths of all {tokens} tokens together"
            )
        if mask is not None and mask.fits is not None:
            cu_q = checked_sequences(cu_q, mask.fits)
        return {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k.int(), **known}
    return None


def _masks(attention_mask: Any, position_bias: Any) -> dict[str, Any]:
    """mask and bias of strobe.attention(). A wrong one is replaced by the exception that says so."""
    mask = None if attention_mask is None else tensor_or_refusal("attention_mask", attention_mask)
    bias = None if position_bias is None else tensor_or_refusal("position_bias", position_bias)
    if not isinstance(mask, Tensor) or mask.dtype == torch.bool:
        return {"mask": mask, "bias": bias}
    if not isinstance(bias, Tensor):
        return {"mask": bias, "bias": mask}  # bias is None, or an exception
    if refused := misplaced({"position_bias": bias, "attention_mask": mask}):
        return {"mask": refused[0], "bias": None}
    try:
        return {"mask": None, "bias": mask + bias}
    except RuntimeError:
        shapes = f"shape {tuple(mask.shape)} beside position_bias of {tuple(bias.shape)}"
        return {"mask": ValueError(f"attention_mask: {shapes}; accepted are shapes that broadcast together"), "bias": None}


def _model_options(query: Any, dropout: float, scaling: float | None, softcap: float | None, s_aux: Tensor | None) -> dict[str, Any]:
    """The options of strobe.attention() that models set. A wrong one is replaced by the exception that says so, for called()."""
    sinks = None if s_aux is None else tensor_or_refusal("s_aux", s_aux)
    if isinstance(sinks, Tensor) and isinstance(query, Tensor):
        sinks = sinks.to(torch.promote_types(query.dtype, torch.float32))
    return {"scale": scaling, "softcap": 0.0 if softcap is None else softcap, "sinks": sinks, "dropout": dropout}


def _paged_attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None, sliding_window: int | None = None,
    cache: Any = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The function that transformers calls in continuous batching: (out (1, T, H, Dv), no weights).

    Layers that see all keys read them in the pages of the cache. For layers with a sliding window the cache returns a copy of the window.

    Args:
        query, key, value: (1, H, T, D), (1, Hkv, T, D) and (1, Hkv, T, Dv): the new tokens of all sequences, one after the other. Without
            `cache`, key and value hold the earlier tokens, too: (1, Hkv, Tk, D) and (1, Hkv, Tk, Dv).
        attention_mask: refused.
        cache: the PagedAttentionCache; None if the model has updated it, as from transformers 5.24 on.
        others: cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k (or max_seqlen_q, max_seqlen_k), read_index and write_index.
    """
    if cache is None and (others.get("read_index") is None or not isinstance(others.get("cu_seq_lens_k"), Tensor)):
        raise ValueError("cache: None; accepted is the paged cache of continuous batching; without one a model takes 'strobe'")
    for name, x in (("attention_mask", attention_mask), ("block_table", others.get("block_table"))):
        if x is not None:
            raise NotImplementedError(f"{name}: given beside a paged cache; accepted is None")
    sliding: int | None = sliding_window or getattr(module, "sliding_window", None)
    longest = others.get("max_length_q", others.get("max_seqlen_q"))
    options: dict[str, Any] = {"cu_seqlens_q": others["cu_seq_lens_q"].int(), "max_seqlen_q": longest}
    layer = None if cache is None else _Layer(cache, int(module.layer_idx), sliding, others)  # type: ignore[arg-type]
    if layer is None:
        k, v = (x[0].transpose(0, 1) for x in (key, value))
        options |= {"cu_seqlens_k": others["cu_seq_lens_k"].int(), "max_seqlen_k": others.get("max_length_k", others.get("max_seqlen_k"))}
    elif layer.pages is not None and layer.read.numel():
        k, v = layer.pages
        for pool, x in ((k, key), (v, value)):
            pool.view(-1, *pool.shape[2:]).index_copy_(0, layer.write, x[0].transpose(0, 1).to(pool.dtype))
        options |= {"page_table": layer.table(), "seqused_k": layer.cu_seqlens_k.diff()}
    else:
        k, v = layer.update(key, value)
        options |= {"cu_seqlens_k": layer.cu_seqlens_k, "max_seqlen_k": layer.longest}
    options |= {**_model_options(query, dropout, scaling, softcap, s_aux), "window": None if sliding is None else (sliding - 1, 0)}
    out = called(_PAGED, attention, q=query[0].transpose(0, 1), k=k, v=v, causal=True, layout="bshd", **options)
    return out[None], None


class _Layer:
    """The cache of one layer. transformers 5.0 to 5.21 keep one tensor of all layers' keys for each group of layers; later versions keep
    views of one tensor for each layer. In both, read_index gives the rows of the keys of every sequence, one sequence after another, and
    write_index the rows for new keys. (From 5.24 on attention gets no cache, but the keys of all sequences, which the model copies out of
    it.)"""

    def __init__(self, cache: Any, index: int, sliding: int | None, given: dict[str, Any]) -> None:
        self._cache, self._index, self._given = cache, index, given
        self.pages: tuple[Tensor, Tensor] | None = None  # (pages, page, Hkv, D) each, for a layer that sees all keys
        self._is_later = hasattr(cache, "layer_to_allocator")
        if self._is_later:
            allocator = cache.layer_to_allocator[index]
            group, kind = allocator.index, allocator.layer_type
            if allocator.supports_block_table:
                self.pages = allocator.get_cache_for_block_table(index)
        else:
            group, within = cache.layer_index_to_group_indices[index]
            kind = "full_attention" if sliding is None else "sliding_attention"
            if sliding is None:
                rows = cache.key_cache[within], cache.value_cache[within]
                whole = len(rows[0]) // cache.block_size * cache.block_size
                k, v = (x[:whole].unflatten(0, (-1, cache.block_size)) for x in rows)
                self.pages = k, v
        cu: Any = given["cu_seq_lens_k"]
        longest: Any = given.get("max_length_k", given.get("max_seqlen_k"))
        self.cu_seqlens_k: Tensor = (cu[kind] if isinstance(cu, dict) else cu).int()
        self.longest: int = longest[kind] if isinstance(longest, dict) else longest
        self.read: Tensor = given["read_index"][group]
        self.write: Tensor = given["write_index"][group]

    def table(self) -> Tensor:
        """int32 (B, n): the pages of each sequence. A row of read_index is a page's number times its size, plus the place in the page."""
        assert self.pages is not None
        page = self.pages[0].shape[1]
        begins = self.cu_seqlens_k[:-1].long()[:, None] + torch.arange(0, self.longest, page, device=self.read.device)
        return (self.read[begins.clamp(max=len(self.read) - 1)] // page).int()

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes into the cache. Returns the keys and values of all sequences, (Tk, Hkv, D) and (Tk, Hkv, Dv)."""
        given = self._given
        if self._is_later:
            k, v = self._cache.update(key_states=key, value_states=value, layer_idx=self._index, kwargs=dict(given))
            return k[0].transpose(0, 1), v[0].transpose(0, 1)
        rows = {"read_index": given["read_index"], "write_index": given["write_index"]}
        return tuple(self._cache.update(key_states=key, value_states=value, layer_idx=self._index, **rows))
