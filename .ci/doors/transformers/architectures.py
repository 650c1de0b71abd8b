"""Compares architectures of transformers, with random weights and small sizes, on Strobe with their own eager attention:

python .ci/doors/transformers/architectures.py [NAME...]

prints a row of the table in docs/architectures.md for each: "=" where both are the same, "no" where eager attention fails as well.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

import strobe
from strobe.compat import transformers as strobe_in_transformers
from strobe.compat.transformers import register

COLUMNS = ("logits", "gradients", "left padding", "right padding", "packed", "dynamic cache", "static cache", "beams", "assisted")
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "sliding_window": 5, "num_local_experts": 2, "num_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128,
    "word_embed_proj_dim": 64, "ffn_dim": 96, "n_inner": 96, "embedding_size": 64,
    "dim": 64, "n_heads": 4, "n_layers": 2, "hidden_dim": 96, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "max_source_positions": 20, "num_mel_bins": 8, "image_size": 28, "patch_size": 14, "cls_token_id": 1,
    "sep_token_id": 2, "num_conv_pos_embeddings": 16, "conv_dim": [32, 32], "conv_kernel": [3, 3], "conv_stride": [2, 2],
}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
LATENT |= {"head_dim": 8, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1}
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {}, "Mistral": {}, "Mixtral": {}, "Qwen2": {}, "Qwen2Moe": {}, "Qwen3": {}, "Qwen3Moe": {}, "Gemma": {}, "Gemma2": BOTH,
    "Gemma3": BOTH, "Phi": {}, "Phi3": {}, "Cohere": {}, "Cohere2": BOTH, "Olmo": {}, "Olmo2": {}, "Olmo3": BOTH, "Olmoe": {},
    "Granite": {},
    "GraniteMoe": {}, "Starcoder2": {}, "StableLm": {}, "Persimmon": {}, "GPTNeoX": {"rotary_pct": 0.5}, "GPT2": {}, "OPT": {},
    "Falcon": {},
    "Glm": {}, "Glm4": {}, "Ernie4_5": {}, "SmolLM3": {}, "Arcee": {}, "Apertus": {}, "Helium": {}, "Nemotron": {}, "DeepseekV3": LATENT,
    "GptOss": BOTH, "Exaone4": BOTH, "SeedOss": {}, "BitNet": {}, "BioGpt": {}, "HunYuanDenseV1": {},
}  # fmt: skip

TEXT = ("BertModel", "RobertaModel", "XLMRobertaModel", "ElectraModel", "DistilBertModel", "ModernBertModel", "T5EncoderModel")
PAIRS = ("T5Model", "BartModel", "MBartModel", "PegasusModel")
PICTURES = ("ViTModel", "DeiTModel", "Dinov2Model", "SiglipVisionModel", "CLIPVisionModel")
SOUND = ("WhisperModel", "Wav2Vec2Model", "HubertModel")
OTHERS = (*TEXT, *PAIRS, *PICTURES, *SOUND)

CALLS: list[None] = []


def counted(**given: Any) -> Any:
    CALLS.append(None)
    return strobe.attention(**given)


def made(name: str) -> Any:
    other = {"Gemma3": "Gemma3TextConfig", "T5EncoderModel": "T5Config"}
    config = getattr(transformers, other.get(name, f"{name.removesuffix('Model')}Config"))
    known = {*inspect.signature(config.__init__).parameters, *vars(config()), *config.attribute_map}
    of = name if name in OTHERS else f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}"
    torch.manual_seed(0)
    model = getattr(transformers, of)(config(**{x: n for x, n in SIZES.items() if x in known} | MODELS.get(name, {}))).eval()
    for p in model.parameters():
        if not p.any():  # as DeiT's tokens, whose norm would make any rounding large
            torch.nn.init.normal_(p, std=0.1)
    return model


def tokens(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(10, 90, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(side: str) -> dict[str, Tensor]:
    mask = torch.ones(2, 13, dtype=torch.int64)
    mask[1, slice(4) if side == "left" else slice(-4, None)] = 0
    return {"input_ids": tokens(2, 13), "attention_mask": mask}


def out_of(model: Any, given: dict[str, Any]) -> Tensor:
    found = model(**given)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def logits(model: Any, given: dict[str, Any]) -> list[Tensor]:
    out = out_of(model, given).detach()
    return [out[given["attention_mask"].bool()] if "attention_mask" in given and out.shape[1] == 13 else out]


def gradients(model: Any, given: dict[str, Any]) -> list[Tensor]:
    """Those of the result times fixed numbers: the squares of normalised rows add up to the same, whatever the weights are."""
    model.zero_grad()
    out = out_of(model, given)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(3))).mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def given_to(name: str) -> dict[str, Tensor]:
    if name in PICTURES:
        return {"pixel_values": torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1))}
    if name in SOUND:
        sound = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1))
        decoded = {"input_features": sound, "decoder_input_ids": tokens(2, 9, 2)}
        return decoded if name == "WhisperModel" else {"input_values": sound.flatten(1)}
    return {"input_ids": tokens(2, 13)} | ({"decoder_input_ids": tokens(2, 9, 2)} if name in PAIRS else {})


def generated(model: Any, given: dict[str, Tensor], **options: Any) -> list[Tensor]:
    return [model.generate(**given, max_new_tokens=8, min_new_tokens=8, do_sample=False, **options)]


def columns(name: str) -> list[Callable[[Any], list[Tensor]]]:
    packed = torch.cat([torch.arange(n) for n in (5, 1, 7)])[None]
    one = {"input_ids": tokens(1, 9), "attention_mask": torch.ones(1, 9, dtype=torch.int64)}
    given = given_to(name)
    more = {x: t for x, t in given.items() if x != "input_ids"}
    first = [
        lambda model: logits(model, given),
        lambda model: gradients(model, given),
        *(lambda model, side=side: logits(model, padded(side) | more) for side in ("left", "right") if name not in (*PICTURES, *SOUND)),
    ]
    if name in OTHERS:
        return first
    repeats = {x: torch.cat([t, t], 1) for x, t in one.items()}  # so that guesses are often right
    return [
        *first,
        lambda model: logits(model, {"input_ids": tokens(1, 13), "position_ids": packed, "use_cache": False}),
        lambda model: generated(model, padded("left")),
        lambda model: generated(model, padded("left"), cache_implementation="static"),
        lambda model: generated(model, padded("left"), num_beams=3),
        lambda model: generated(model, repeats, prompt_lookup_num_tokens=3),
    ]


def compared(model: Any, of: Callable[[Any], list[Tensor]]) -> str:
    found: dict[str, Any] = {}
    for implementation in ("eager", "strobe"):
        model.set_attn_implementation(implementation)
        CALLS.clear()
        try:
            found[implementation] = of(model)
            if implementation == "strobe" and not CALLS:
                found[implementation] = "not called"
        except Exception as error:  # a row says it
            found[implementation] = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(found["eager"], str):
        return "no"
    if isinstance(found["strobe"], str):
        return found["strobe"]
    largest = max(map(size, found["eager"]))
    return "=" if all(alike(*pair, largest) for pair in zip(found["strobe"], found["eager"], strict=True)) else "differs"


def size(x: Tensor) -> float:
    return float(x.float().abs().max())


def alike(got: Tensor, want: Tensor, largest: float) -> bool:
    """Each number within 1e-3 of itself and 1e-5 of the largest of its tensor. Gradients that vanish in exact numbers, as those of keys'
    biases, are rounding errors in both."""
    if got.shape != want.shape:
        return False
    if max(size(got), size(want)) < 1e-7 * largest:
        return True
    return torch.allclose(got.float(), want.float(), rtol=1e-3, atol=1e-5 * size(want))


def row(name: str) -> str:
    model = made(name)
    found = [compared(model, of) for of in columns(name)]
    return f"| {name} | {' | '.join(found + [''] * (len(COLUMNS) - len(found)))} |"


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    register()
    strobe_in_transformers.attention = counted
    for name in sys.argv[1:] or (*MODELS, *OTHERS):
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
