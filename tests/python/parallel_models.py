"""Models of transformers inside strobe.distributed.context_parallel(), as the ranks of test_distributed_models.py run them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import strobe
from strobe.compat._mask_function import mask_of
from strobe.compat.transformers import register
from strobe.distributed import Sharding

SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BOTH = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "grouped heads": ("LlamaForCausalLM", "LlamaConfig", {}),
    "sliding window": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 5}),
    "softcap": ("Gemma2ForCausalLM", "Gemma2Config", BOTH | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    "sinks": ("GptOssForCausalLM", "GptOssConfig", BOTH | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "chunks": (
        "Llama4ForCausalLM", "Llama4TextConfig",
        {"attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"], "num_local_experts": 2,
         "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "moe_layers": []},
    ),
    "two-sided": ("Gemma3TextModel", "Gemma3TextConfig", BOTH | {"use_bidirectional_attention": True}),
    "learned positions": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64}),
    "two-sided, learned positions": ("BertModel", "BertConfig", {"add_pooling_layer": False}),
    "begins behind padding": ("RobertaModel", "RobertaConfig", {}),
    "relative positions": ("T5EncoderModel", "T5Config", {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}),
    "linear attention": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {"layer_types": ["linear_attention", "full_attention"]}),
    "recurrent": ("MambaForCausalLM", "MambaConfig", {}),
    "attention of its own": ("FalconForCausalLM", "FalconConfig", {"head_dim": None}),
    "images": (
        "Qwen2VLForConditionalGeneration", "Qwen2VLConfig",
        {"text_config": SMALL | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
         "vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}},
    ),
}  # fmt: skip
S = 21
AXES = {"attention_mask": 1, "position_ids": -1}


def made(case: str, implementation: str) -> Any:
    """A model of MODELS, with the same weights on all ranks."""
    register()
    torch.manual_seed(0)
    model, config, options = MODELS[case]
    sizes = {name: x for name, x in (SMALL | options).items() if x is not None}
    built = getattr(transformers, model)._from_config(getattr(transformers, config)(**sizes), attn_implementation=implementation)
    for name, x in built.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(x.data)
    return built.eval()


def batch(kind: str, rows: int) -> dict[str, Tensor]:
    """The tokens of whole sequences, and what else a model gets."""
    g = torch.Generator().manual_seed(1)
    found = {"input_ids": torch.randint(10, 90, (rows, S), generator=g)}
    if kind == "padding":
        found["attention_mask"] = torch.ones(rows, S, dtype=torch.int64)
        found["attention_mask"][0, -3:] = 0
        found["attention_mask"][-1, :4] = 0
    if kind == "positions":
        found["position_ids"] = torch.arange(S).repeat(rows, 1)
    if kind == "packed":
        found["position_ids"] = torch.cat([torch.arange(n) for n in (6, 1, 11, 3)]).repeat(rows, 1)
    if kind == "packed otherwise":
        found["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in (4 + row, 17 - row)]) for row in range(rows)])
    return found


def weights_of(out: Tensor, seen: Tensor | None) -> Tensor:
    """The derivative of the loss by the logits; padding tokens do not count."""
    g = torch.Generator().manual_seed(2)
    weights = torch.randn(out.shape[0], S, out.shape[2], generator=g, dtype=out.dtype)
    return weights if seen is None else weights * seen[..., None]


def run(model: Any, given: dict[str, Tensor], weights: Any, **more: Any) -> tuple[Tensor, list[Tensor]]:
    out = model(**given, **more)[0]
    (out * weights(out)).sum().backward()
    return out.detach(), [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def whole(case: str, kind: str, rows: int, use_cache: bool) -> tuple[Tensor, list[Tensor]]:
    """Logits and gradients of one process, on eager attention."""
    given = batch(kind, rows)
    return run(made(case, "eager"), given, lambda out: weights_of(out, given.get("attention_mask")), **cached(case, use_cache))


def cached(case: str, use_cache: bool) -> dict[str, bool]:
    return {"use_cache": use_cache} if "CausalLM" in MODELS[case][0] else {}


def shared(
    group: dist.ProcessGroup, case: str, implementation: str, kind: str, rows: int, use_cache: bool, contiguous: bool, door: bool
) -> tuple[Tensor, list[Tensor]]:
    """The same of this rank's tokens. door: under strobe.register(), too."""
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    given = batch(kind, rows)
    seen = given.get("attention_mask")
    sharding = getattr(Sharding, "contiguous" if contiguous else "zigzag")(S, group.size())
    model = made(case, implementation)
    seen = None if seen is None else seen.clone()
    with strobe.distributed.context_parallel(mesh, buffers=[*given.values()], buffer_seq_dims=[-1] * len(given), sharding=sharding):
        if door:
            with strobe.register():
                return run(model, given, lambda out: sharding.shard(weights_of(out, seen), 1, group=group), **cached(case, use_cache))
        return run(model, given, lambda out: sharding.shard(weights_of(out, seen), 1, group=group), **cached(case, use_cache))


def refused(group: dist.ProcessGroup, case: str, implementation: str, given: dict[str, Any]) -> str:
    """What a model says of this rank's tokens, or "" if it takes them."""
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    model, tokens = made(case, implementation), batch("", 1)["input_ids"]
    with strobe.distributed.context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]) as sharding:
        named = {name: x(tokens, sharding) if callable(x) else x for name, x in given.items()}
        try:
            model(tokens, **named)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def local_positions(tokens: Tensor, sharding: Sharding) -> Tensor:
    return torch.arange(tokens.shape[1])[None]


def of_lengths(group: dist.ProcessGroup, implementation: str) -> tuple[Tensor, list[Tensor]]:
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    given, model = batch("packed", 1), made("grouped heads", implementation)
    cu = torch.tensor([0, 6, 7, 18, 21], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 11, "max_length_k": 11}
    with strobe.distributed.context_parallel(mesh, buffers=[*given.values()], buffer_seq_dims=[1, 1]) as sharding:
        return run(model, given, lambda out: sharding.shard(weights_of(out, None), 1, group=group), use_cache=False, **lengths)


def filled_cache(tokens: Tensor, sharding: Sharding) -> Any:
    cache = transformers.DynamicCache()
    for layer in range(2):
        cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), layer)
    return cache


def local_square(tokens: Tensor, sharding: Sharding) -> Tensor:
    return torch.ones(1, 1, 10, 10, dtype=torch.bool).tril()


def lengths(tokens: Tensor, sharding: Sharding) -> Tensor:
    return torch.tensor([0, 4, 10], dtype=torch.int32)


def masks_refused(group: dist.ProcessGroup) -> list[str]:
    """What is said of mask functions whose whole sequences are not known."""
    mesh, found = dist.device_mesh.DeviceMesh.from_group(group, "cpu"), []
    with strobe.distributed.context_parallel(mesh, sharding=Sharding.zigzag(S, group.size())) as sharding:
        own = sharding.count(group=group)
        few, table, tables = torch.ones(own - 1), torch.ones(own), torch.ones(2, own)
        for function in (
            lambda b, h, i, j: int(i) > 3,
            lambda b, h, i, j: few[i] > few[j],
            lambda b, h, i, j: torch.take(table, i) > 0,
            lambda b, h, i, j: tables[b][i] > 0,
        ):
            try:
                mask_of(1, own, own, 0, 0, function, device="cpu")
                found.append("")
            except (NotImplementedError, ValueError) as error:
                found.append(f"{type(error).__name__}: {error}")
        mask = mask_of(1, own, own, 0, 0, None, device="cpu")
        for use in (lambda: mask[..., :3], lambda: ~mask, lambda: torch.cat([mask, mask], -1)):
            try:
                use()
                found.append("")
            except NotImplementedError as error:
                found.append(f"NotImplementedError: {error}")
    return found


def left_as_it_was(group: dist.ProcessGroup) -> bool:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils

    def state() -> list[Any]:
        interfaces = AttentionInterface._global_mapping["sdpa"], AttentionMaskInterface._global_mapping["sdpa"]
        return [*interfaces, PreTrainedModel.__call__, "__call__" in vars(PreTrainedModel), masking_utils.find_packed_sequence_indices]

    mesh, before = dist.device_mesh.DeviceMesh.from_group(group, "cpu"), state()
    with strobe.distributed.context_parallel(mesh, sharding=Sharding.zigzag(S, group.size())):
        within = state()
        with strobe.distributed.context_parallel(mesh, sharding=Sharding.contiguous(S, group.size())):
            pass
        nested = state() == within
    return state() == before and all(a is not b for a, b in zip(before[:2], within[:2], strict=True)) and nested


def cross(group: dist.ProcessGroup) -> tuple[Tensor, list[Tensor]]:
    """Attention to keys that every rank has as a whole, beside attention to those of the sharding."""
    q, k, v, text, dout = crossed()
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    with strobe.distributed.context_parallel(mesh, buffers=[q, k, v, dout], buffer_seq_dims=[2] * 4, whole_keys=[7]):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, text)]
        out = attended(*leaves)
        out.backward(dout)
        return out.detach(), [x.grad for x in leaves if x.grad is not None]


def crossed() -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randn(1, 2, n, 16, generator=g) for n in (S, S, S, 7, S)]


def attended(q: Tensor, k: Tensor, v: Tensor, text: Tensor) -> Tensor:
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(sdpa(q, k, v), text, text, text.new_ones(1, 7).bool())


def whole_keys_refused(group: dist.ProcessGroup) -> list[str]:
    mesh, found = dist.device_mesh.DeviceMesh.from_group(group, "cpu"), []
    for whole_keys in ([10], ["x"], [-1], 7):
        try:
            with strobe.distributed.context_parallel(mesh, sharding=Sharding.zigzag(S, group.size()), whole_keys=whole_keys):
                found.append("")
        except (TypeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
