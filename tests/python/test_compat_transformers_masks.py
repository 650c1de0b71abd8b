"""Mask functions of transformers and its models on Strobe: logits and gradients beside eager attention, and what becomes which option."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils as masks

import strobe
from device import DEVICE
from strobe.compat import transformers as strobe_in_transformers
from strobe.compat._mask_function import MaskFunction, mask_of
from strobe.compat.transformers import attention_forward

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TEXT = SIZES | {"num_key_value_heads": 2, "head_dim": 16}
BOTH = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
IMAGE = 5  # the token of an image's places


@pytest.fixture(scope="module", autouse=True)
def _registered():
    strobe_in_transformers.register()


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, Any]]:
    """The options of Strobe's calls."""
    found: list[dict[str, Any]] = []

    def noted(**given: Any) -> Any:
        found.append({name: x for name, x in given.items() if name not in "qkv" and x is not None and x is not False})
        return strobe.attention(**given)

    monkeypatch.setattr(strobe_in_transformers, "attention", noted)
    return found


def class_of(name: str) -> Any:
    """A class of transformers, "Name" or "module.Name"; skips the test where this release does not have it."""
    module, _, name = name.rpartition(".")
    try:
        home = importlib.import_module(f"transformers.models.{module}.modeling_{module}") if module else transformers
        return getattr(home, name)
    except (ImportError, AttributeError):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(10, 90, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(batch: int, length: int, side: str) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.int64)
    if side == "left":
        mask[1, :4] = 0
    elif side == "right":
        mask[1, -4:] = 0
    return mask


def pictured(side: str, length: int = 14) -> dict[str, torch.Tensor]:
    """Text with an image of four places, from place 3 on."""
    input_ids = tokens(2, length)
    input_ids[:, 4:8] = IMAGE
    return {"input_ids": input_ids, "attention_mask": padding(2, length, side), "pixel_values": torch.randn(2, 3, 28, 28)}


Case = Callable[[str], tuple[Any, dict[str, Any]]]
CASES: dict[str, Case] = {}
# How many of a forward's calls go to Strobe, and the implementation that is right where eager attention is not.
COUNTS: dict[str, int] = {}
BESIDE: dict[str, str] = {}
DTYPES: dict[str, torch.dtype] = {}  # in float64 eager attention makes NaN of rows that are hidden


def case(name: str, count: int, beside: str = "eager", dtype: torch.dtype = torch.float32) -> Callable[[Case], Case]:
    def add(made: Case) -> Case:
        CASES[name], COUNTS[name], BESIDE[name], DTYPES[name] = made, count, beside, dtype
        return made

    return add


def text(model: str, config: str, **options: Any) -> Case:
    def made(side: str) -> tuple[Any, dict[str, Any]]:
        built = class_of(config)(**TEXT | options)
        return class_of(model)(built), {"input_ids": tokens(2, 13), "attention_mask": padding(2, 13, side)}

    return made


CASES_OF_TEXT: dict[str, Case] = {
    "llama": text("LlamaForCausalLM", "LlamaConfig"),
    "mistral": text("MistralForCausalLM", "MistralConfig", sliding_window=5),
    "gemma3, two-sided": text("Gemma3TextModel", "Gemma3TextConfig", **BOTH, use_bidirectional_attention=True),
    "gemma4, text": text(
        "Gemma4ForCausalLM", "Gemma4TextConfig", **BOTH, hidden_size_per_layer_input=8, vocab_size_per_layer_input=97, global_head_dim=16
    ),
    "llama4, chunks": text(
        "Llama4ForCausalLM", "Llama4TextConfig", attention_chunk_size=4, layer_types=["chunked_attention", "full_attention"],
        num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=96, moe_layers=[],
    ),
    "step3p7, two-sided": text("Step3p7TextModel", "Step3p7TextConfig", **BOTH, use_bidirectional_attention=True),
    "step3p7": text("Step3p7TextModel", "Step3p7TextConfig", **BOTH),
    "unlimited_ocr": text(
        "UnlimitedOcrTextModel", "UnlimitedOcrTextConfig", num_key_value_heads=4, sliding_window=5, mlp_layer_types=["dense", "dense"]
    ),
}  # fmt: skip
for _name, _made in CASES_OF_TEXT.items():
    case(_name, 2)(_made)


@case("gemma3, images", 4)
def _gemma3(side: str) -> tuple[Any, dict[str, Any]]:
    config = class_of("Gemma3Config")(
        text_config=TEXT | BOTH, vision_config=VISION, mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=6, eoi_token_index=7
    )
    given = pictured(side)
    return class_of("Gemma3ForConditionalGeneration")(config), given | {"token_type_ids": (given["input_ids"] == IMAGE).long()}


@case("gemma4, images", 2)
def _gemma4(side: str) -> tuple[Any, dict[str, Any]]:
    """Places of an image without its pixels: the mask depends on the types alone."""
    more = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "global_head_dim": 16}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = class_of("Gemma4Config")(
        text_config=TEXT | BOTH | more | {"use_bidirectional_attention": "vision"},
        vision_config=vision | {"head_dim": 16, "position_embedding_size": 64},
        audio_config=None,
        image_token_id=IMAGE,
    )
    types = torch.zeros(2, 14, dtype=torch.int64)
    types[:, 4:8] = 1
    given = {"input_ids": tokens(2, 14), "attention_mask": padding(2, 14, side), "mm_token_type_ids": types}
    return class_of("Gemma4ForConditionalGeneration")(config), given


@case("paligemma", 4)
def _paligemma(side: str) -> tuple[Any, dict[str, Any]]:
    vision = VISION | {"model_type": "siglip_vision_model", "projection_dim": 64}
    config = class_of("PaliGemmaConfig")(
        text_config=TEXT | {"model_type": "gemma"}, vision_config=vision, image_token_id=IMAGE, projection_dim=64
    )
    suffix = torch.zeros(2, 14, dtype=torch.int64)
    suffix[:, 9:] = 1
    return class_of("PaliGemmaForConditionalGeneration")(config), pictured(side) | {"token_type_ids": suffix}


@case("pi0", 6)
def _pi0(side: str) -> tuple[Any, dict[str, Any]]:
    vision = VISION | {"model_type": "siglip_vision_model", "projection_dim": 64}
    config = class_of("PI0Config")(
        vlm_config={
            "model_type": "paligemma", "text_config": TEXT | {"model_type": "gemma"}, "vision_config": vision, "image_token_id": IMAGE,
            "image_token_index": IMAGE, "projection_dim": 64, "hidden_size": 64,
        },
        dit_config=TEXT | {"model_type": "gemma"}, chunk_size=6, max_state_dim=8, max_action_dim=8,
    )  # fmt: skip
    given = pictured(side) | {"pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool), "state": torch.randn(2, 8)}
    given["pixel_values"] = given["pixel_values"][:, None]
    return class_of("PI0ForConditionalGeneration")(config), given | {"noise": torch.randn(2, 6, 8), "timestep": torch.rand(2)}


@case("git", 2)  # its text has no other attention than eager; these are the image's
def _git(side: str) -> tuple[Any, dict[str, Any]]:
    given = {"input_ids": tokens(2, 9), "attention_mask": padding(2, 9, side), "pixel_values": torch.randn(2, 3, 28, 28)}
    return class_of("GitForCausalLM")(class_of("GitConfig")(vision_config=VISION, **SIZES)), given


@case("t5gemma2", 4)
def _t5gemma2(side: str) -> tuple[Any, dict[str, Any]]:
    encoder = {
        "text_config": TEXT | BOTH, "vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": 6,
        "eoi_token_index": 7,
    }  # fmt: skip
    config = class_of("T5Gemma2Config")(encoder=encoder, decoder=TEXT | BOTH, image_token_index=IMAGE, eoi_token_index=7)
    given = {"input_ids": tokens(2, 13), "attention_mask": padding(2, 13, side), "decoder_input_ids": tokens(2, 7)}
    return class_of("T5Gemma2ForConditionalGeneration")(config), given


@case("diffusion_gemma", 4)
def _diffusion_gemma(side: str) -> tuple[Any, dict[str, Any]]:
    config = class_of("DiffusionGemmaConfig")(
        text_config=TEXT | BOTH | {"per_layer_config": {}, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 32},
        canvas_length=6,
        vision_config={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
                       "num_key_value_heads": 2, "position_embedding_size": 64},
    )  # fmt: skip
    seen = padding(2, 13, side)
    given = {"input_ids": tokens(2, 13), "attention_mask": seen, "decoder_input_ids": tokens(2, 6)}
    given["decoder_attention_mask"] = torch.cat([seen, torch.ones(2, 6, dtype=torch.int64)], 1)
    return class_of("DiffusionGemmaForBlockDiffusion")(config), given


@case("deepseek_ocr2", 2)
def _deepseek_ocr2(side: str) -> tuple[Any, dict[str, Any]]:
    config = class_of("deepseek_ocr2.DeepseekOcr2VisionEncoderConfig")(**TEXT)
    return class_of("deepseek_ocr2.DeepseekOcr2VisionEncoder")(config), {"inputs_embeds": torch.randn(2, 12, 64), "num_patches": 7}


@case("esmc, chains", 2)
def _esmc(side: str) -> tuple[Any, dict[str, Any]]:
    chains = torch.tensor([[0] * 5 + [1] * 8, [0] * 9 + [1] * 4])
    return class_of("EsmcModel")(class_of("EsmcConfig")(**SIZES)), {"input_ids": tokens(2, 13), "sequence_id": chains}


@case("esmc", 2)
def _esmc_padded(side: str) -> tuple[Any, dict[str, Any]]:
    given = {"input_ids": tokens(2, 13), "attention_mask": padding(2, 13, side)}
    return class_of("EsmcModel")(class_of("EsmcConfig")(**SIZES)), given


class Atoms(torch.nn.Module):
    """The attention of EsmFold2's atoms."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.encoder = class_of("esmfold2.EsmFold2AtomEncoder")(config, config.atom_encoder)

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        length = hidden_states.shape[1]
        mask = self.encoder.build_attention_mask(attention_mask, hidden_states)
        angles = torch.arange(length, device=hidden_states.device)[None, :, None] / torch.arange(1, 33, device=hidden_states.device)
        for layer in self.encoder.layers:
            hidden_states = layer.self_attn(hidden_states, mask, (angles.cos(), angles.sin()))[0] + hidden_states
        return (hidden_states,)


@case("esmfold2", 2)
def _esmfold2(side: str) -> tuple[Any, dict[str, Any]]:
    atoms = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    model = Atoms(class_of("EsmFold2Config")(sliding_window=6, atom_encoder=atoms))
    return model, {"hidden_states": torch.randn(2, 13, 64), "attention_mask": padding(2, 13, side)}


@case("moonshine_streaming", 2)
def _moonshine(side: str) -> tuple[Any, dict[str, Any]]:
    sizes = {name: x for name, x in SIZES.items() if not name.endswith("token_id")}
    config = class_of("MoonshineStreamingEncoderConfig")(**sizes, num_key_value_heads=4, sliding_windows=((5, 2), (4, 3)))
    samples = torch.ones(2, 3200, dtype=torch.int64)
    samples[1, 2400:] = 0
    model = class_of("moonshine_streaming.MoonshineStreamingEncoder")(config)
    return model, {"input_values": torch.randn(2, 3200), "attention_mask": samples}


@case("nemotron_asr_streaming", 2, beside="sdpa", dtype=torch.float64)  # in 5.24 its eager attention sees the keys that are hidden
def _nemotron(side: str) -> tuple[Any, dict[str, Any]]:
    config = class_of("NemotronAsrStreamingEncoderConfig")(
        **{name: x for name, x in SIZES.items() if not name.endswith("token_id")}, num_mel_bins=16, subsampling_conv_channels=8
    )
    frames = torch.ones(2, 160, dtype=torch.int64)
    frames[1, 128:] = 0
    model = class_of("nemotron_asr_streaming.NemotronAsrStreamingEncoder")(config)
    return model, {"input_features": torch.randn(2, 160, 16), "attention_mask": frames, "num_lookahead_tokens": 1}


def placed(x: Any, dtype: torch.dtype = torch.float32) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return x.to(DEVICE, dtype if x.is_floating_point() else x.dtype)


def assert_beside(model: Any, given: dict[str, Any], implementation: str, calls: list[Any]) -> int:
    """Compares the outputs of tokens, and the gradients of the parameters. Returns the number of Strobe's calls."""
    found, count = [], 0
    for name in ("strobe", implementation):
        model.set_attn_implementation(name)
        model.zero_grad()
        out = model(**given)[0]
        if (seen := given.get("attention_mask")) is not None and seen.shape == out.shape[:2]:
            out = out[seen.bool()]  # the output of a padding token is not defined
        elif isinstance(model, torch.nn.Module) and type(model).__name__.endswith("Encoder") and out.shape[0] == 2 and seen is not None:
            out = torch.cat([out[0], out[1, : out.shape[1] * 3 // 4]])
        out.square().mean().backward()
        found.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        count = count or len(calls)
    assert not found[0][0].isnan().any()
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5 * max(1.0, want.abs().max().item()))
    return count


TABLE = Path(__file__).parents[2] / "docs/compat.md"
SIDES = ("none", "left", "right")


def cell_of(calls: list[dict[str, Any]]) -> str:
    """The options of a forward's calls, as the table of docs/compat.md has them: "g" is a function."""
    found: dict[str, None] = {}
    for each in calls:
        names = [name.removesuffix("_q") for name in ("causal", "window", "cu_seqlens_q", "seqused_k", "bias", "mask") if name in each]
        names = ["g" if name == "mask" and callable(each["mask"]) else name for name in names]
        found[" ".join(f"`{name}`" for name in names)] = None
    return "; ".join(options or "—" for options in found)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", CASES)
def test_a_model_with_its_mask_functions(name, side, calls):
    torch.manual_seed(0)
    model, given = CASES[name](side)
    model = model.to(DEVICE, DTYPES[name]).eval()
    given = {key: placed(x, DTYPES[name]) for key, x in given.items()}
    assert assert_beside(model, given, BESIDE[name], calls) == COUNTS[name]
    assert all("bias" in each or not isinstance(each.get("mask"), torch.Tensor) or each["mask"].shape[2] == 1 for each in calls)
    rows = [line.split(" | ") for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |")]
    assert len(rows) == 1
    assert rows[0][1 + SIDES.index(side)].removesuffix(" |") == cell_of(calls)


# Sequences that lie behind one another

LENGTHS = [5, 6, 2]
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]


def test_a_model_that_has_eager_attention_alone():
    """Gemma 4's audio encoder computes its attention by itself, and gets the mask of eager attention."""
    if not hasattr(transformers, "Gemma4AudioModel"):
        pytest.skip("an earlier transformers")
    torch.manual_seed(0)
    config = transformers.Gemma4AudioConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=16, subsampling_conv_channels=[128, 4]
    )
    model = transformers.Gemma4AudioModel(config).to(DEVICE).eval()
    seen = torch.ones(2, 160, dtype=torch.bool, device=DEVICE)
    seen[1, 90:] = False
    features, found = torch.randn(2, 160, 128, device=DEVICE), []
    for implementation in ("eager", "strobe"):
        model.set_attn_implementation(implementation)
        out = model(features, attention_mask=seen)
        found.append(out.last_hidden_state[out.attention_mask])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma4, text", "llama4, chunks", "step3p7"])
def test_packed_sequences(name, batch, calls):
    """Each sequence by itself: Strobe gets their lengths."""
    torch.manual_seed(0)
    model, _ = CASES[name]("none")
    given = {"input_ids": tokens(batch, 13).to(DEVICE), "position_ids": POSITIONS.expand(batch, -1).to(DEVICE), "use_cache": False}
    assert assert_beside(model.to(DEVICE).eval(), given, "eager", calls) == 2
    for each in calls:
        starts = each["cu_seqlens_q"].tolist()
        own = [0, *accumulate(LENGTHS * batch)]
        chunks = [at + extra for at, n in zip(own, LENGTHS * batch, strict=False) for extra in range(0, n, 4)] + [13 * batch]
        assert starts in (own, chunks)
        assert each["causal"] is True
        assert "mask" not in each
    if name == "llama4, chunks":
        assert len(calls[0]["cu_seqlens_q"]) > len(calls[1]["cu_seqlens_q"])


@pytest.mark.parametrize("positions", [True, False])
def test_the_lengths_of_a_collator(positions, calls):
    """DataCollatorWithFlattening(return_flash_attn_kwargs=True) gives the lengths as well."""
    torch.manual_seed(0)
    model, _ = CASES["mistral"]("none")
    model = model.to(DEVICE).eval()
    starts = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32, device=DEVICE)
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 6, "max_length_k": 6}
    given = {"input_ids": tokens(1, 13).to(DEVICE), "use_cache": False}
    found = POSITIONS.to(DEVICE)
    model.set_attn_implementation("eager")
    expected = model(**given, position_ids=found).logits
    model.set_attn_implementation("strobe")
    # Without positions the model's go on, and rotary embeddings see only differences.
    got = model(**given, **lengths, position_ids=found if positions else None).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(each["cu_seqlens_q"], starts) and each["max_seqlen_q"] == 6 for each in calls)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["causal", "packed", "packed windows", "packed chunks", "documents"])
def test_the_lengths_of_a_collator_do_not_replace_other_sequences(name, compiled):
    """Chunks, and sequences of the user, are narrower than those whose lengths a collator gives."""
    if DEVICE != "cpu":
        pytest.skip("the functions read tensors of the CPU")
    torch._dynamo.reset()
    starts = torch.tensor([0, 10, 18, 24], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 10, "max_length_k": 10}
    narrower = torch.arange(S)[None] // 3

    def attended(q, k, v, positions, documents):
        function = {
            "causal": masks.causal_mask_function,
            "packed": masks.causal_mask_function,
            "packed windows": masks.sliding_window_causal_mask_function(5),
            "packed chunks": masks.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
            "documents": masks.and_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(documents)),
        }[name]
        if name.startswith("packed"):
            found = masks.find_packed_sequence_indices(positions)
            function = masks.remap_positions_for_packed_sequence(function, positions)
            function = masks.and_masks(function, masks.packed_sequence_mask_function(found))
        mask = mask_of(1, S, S, 0, 0, function, None, device=q.device)
        return attention_forward(torch.nn.Module(), q, k, v, mask, **lengths)[0]

    qkv = drawn(S, S, 1)
    at = torch.arange(S)
    i, j = at[:, None], at
    whole = torch.bucketize(at, starts[1:], right=True)
    place = at - starts[whole]
    dense = (j <= i) & {
        "packed windows": i - j < 5,
        "packed chunks": place[:, None] // 4 == place // 4,
        "documents": narrower[0][:, None] == narrower[0],
    }.get(name, j <= i)
    dense &= whole[:, None] == whole if name != "documents" else dense
    expected = attention_forward(torch.nn.Module(), *qkv, dense[None, None])[0]
    run = torch.compile(attended, fullgraph=True, backend="aot_eager") if compiled else attended
    torch.testing.assert_close(run(*qkv, FLAT[:1], narrower), expected, rtol=1e-9, atol=1e-11)


# What becomes which option

B, S = 2, 24
GROUPS = torch.full((B, S), -1)
GROUPS[:, 3:8] = 0
GROUPS[1, 12:20] = 1
CHAINS = torch.tensor([[0] * 9 + [1] * 15, [0] * 3 + [1] * 4 + [2] * 17])
FLAT = torch.cat([torch.arange(10), torch.arange(8), torch.arange(6)])[None].expand(B, -1)
FALLING = CHAINS.flip(-1).contiguous()
BYTES = torch.cat([(row == n).cumsum(0)[row == n] for row in CHAINS for n in row.unique()]).reshape(B, S).to(torch.uint8)
REALS = CHAINS + torch.arange(S) % 3 / 4
# Two sequences, the first of which goes on behind the second, and the positions within each.
TURNS = torch.tensor([0] * 8 + [1] * 8 + [0] * 8)[None].expand(B, -1)
RESUMED = torch.cat([torch.arange(8), torch.arange(8), torch.arange(8, 16)])[None].expand(B, -1)


def remapped(function: Any) -> Any:
    found = masks.find_packed_sequence_indices(FLAT)
    return masks.and_masks(masks.remap_positions_for_packed_sequence(function, FLAT), masks.packed_sequence_mask_function(found))


FUNCTIONS: dict[str, tuple[Any, set[str]]] = {
    "causal": (masks.causal_mask_function, {"causal"}),
    "two-sided": (masks.bidirectional_mask_function, set()),
    "window": (masks.sliding_window_causal_mask_function(5), {"causal", "window"}),
    "two-sided window": (masks.sliding_window_bidirectional_mask_function(3), {"window"}),
    "two windows": (masks.and_masks(masks.sliding_window_causal_mask_function(9), masks.sliding_window_overlay(4)), {"causal", "window"}),
    "everything or causal": (masks.or_masks(masks.causal_mask_function, lambda *_: torch.tensor(True)), set()),
    "chunks": (masks.chunked_causal_mask_function(7, torch.zeros(B, dtype=torch.int64)), {"causal", "cu_seqlens"}),
    "chunks behind padding": (masks.chunked_causal_mask_function(7, torch.tensor([0, 3])), {"causal", "cu_seqlens"}),
    "packed": (remapped(masks.causal_mask_function), {"causal", "cu_seqlens"}),
    "packed windows": (remapped(masks.sliding_window_causal_mask_function(5)), {"causal", "cu_seqlens", "window"}),
    "packed chunks": (remapped(masks.chunked_causal_mask_function(4, torch.zeros(B, dtype=torch.int64))), {"causal", "cu_seqlens"}),
    "chains": (masks.packed_sequence_mask_function(CHAINS), {"cu_seqlens"}),
    "chains that fall": (masks.packed_sequence_mask_function(FALLING), {"function"}),
    "positions of other sequences": (
        masks.and_masks(
            masks.remap_positions_for_packed_sequence(masks.causal_mask_function, FLAT), masks.packed_sequence_mask_function(CHAINS)
        ),
        {"function"},
    ),
    "images": (masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(GROUPS)), {"function"}),
    "windows of images": (
        masks.and_masks(masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(GROUPS)), masks.sliding_window_overlay(6)),
        {"function", "window"},
    ),
    "keys": (masks.and_masks(masks.causal_mask_function, masks.padding_mask_function(GROUPS < 1)), {"causal", "keys"}),
    "of the user": (lambda b, h, i, j: (i - j).abs() % 3 == torch.where(i > 4, 0, 1), {"function"}),
    "chunks that trail": (
        lambda b, h, i, j: (torch.div(i, 4, rounding_mode="trunc") - torch.div(j, 4, rounding_mode="trunc")).abs() <= 1,
        {"function"},
    ),
    "what only a query hides": (lambda b, h, i, j: (j <= i) & (GROUPS[b, i] < 0), {"causal", "function"}),
    "a window to the right": (lambda b, h, i, j: (j > i + 1) & (j <= i + 9), {"function", "window"}),
    "two stretches": (lambda b, h, i, j: ((i - j) == 0) | (i - j >= 5), {"function"}),
    "not": (lambda b, h, i, j: ~(j > i) & (torch.bitwise_not(i - j >= 6)), {"causal", "window"}),
    "nothing": (lambda b, h, i, j: j < 0 * i - 1, {"function"}),
    "never": (lambda b, h, i, j: torch.tensor(False) & (j <= i), {"function"}),
    "the diagonal": (lambda b, h, i, j: i == j, {"cu_seqlens"}),
    "infinite": (lambda b, h, i, j: (j < float("inf")) & (j <= i), {"causal"}),
    "reals cut off": (lambda b, h, i, j: (REALS[b, i].long() == REALS[b, j].long()) & (j <= i), {"causal", "cu_seqlens"}),
    "quotients cut off": (lambda b, h, i, j: (i / 4).to(torch.int64) == (j / 4).int(), {"function"}),
    "quotients of a dtype": (lambda b, h, i, j: (i / 4).to(j) == (j / 4).to(j), {"function"}),
    "counted conditions": (lambda b, h, i, j: ((j <= i).int() + (GROUPS[b, j] < 1).long()) == 2, {"function"}),
    "integers as conditions": (lambda b, h, i, j: torch.logical_not(CHAINS[b, j]), {"seqused"}),
    "integers beside integers": (lambda b, h, i, j: torch.logical_or(torch.logical_and(CHAINS[b, i], CHAINS[b, j]), i < 1), {"function"}),
    "a multiple subtracted": (lambda b, h, i, j: (torch.rsub(i, j, alpha=2) <= 0) & (torch.sub(j, i, alpha=2) <= 0), {"function"}),
    "positions that wrap around": (
        lambda b, h, i, j: (BYTES[b, j] - BYTES[b, i] <= 0) & (CHAINS[b, i] == CHAINS[b, j]),
        {"function"},
    ),
    "positions that go on behind another sequence": (
        lambda b, h, i, j: (RESUMED[b, j] <= RESUMED[b, i]) & (RESUMED[b, i] - RESUMED[b, j] < 2) & (TURNS[b, i] == TURNS[b, j]),
        {"function"},
    ),
}
PADDED = {"": None, "left": torch.arange(S) >= torch.tensor([[0], [5]]), "right": torch.arange(S) < torch.tensor([[S], [17]])}
PADDED["within"] = torch.arange(S)[None].expand(B, -1) % 5 != 3


def options_of(mask: MaskFunction) -> set[str]:
    given = {"causal": mask.causal, "window": mask.window, "function": mask.function, "dense": mask.dense, "seqused": mask.seqused}
    return {name for name, x in (given | {"keys": mask.keys, "cu_seqlens": mask.cu_seqlens}).items() if x is not None and x is not False}


def made(function: Any, seen: torch.Tensor | None = None, **others: Any) -> MaskFunction:
    sizes = {"batch_size": B, "q_length": S, "kv_length": S} | others
    moved = None if seen is None else seen.to(DEVICE)
    return mask_of(**sizes, mask_function=function, attention_mask=moved, device=torch.device(DEVICE))


def drawn(sq: int, sk: int, batch: int = B) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((batch, 4, sq, 8), (batch, 2, sk, 8), (batch, 2, sk, 8))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE).requires_grad_() for shape in shapes]


def assert_as_dense(mask: MaskFunction) -> None:
    """Attention and its gradients, with what the mask became, and with the tensor that transformers makes for SDPA."""
    found = []
    for given in (mask, mask.to_dense()):
        qkv = drawn(mask.q_length, mask.kv_length, mask.batch_size)
        out, _ = attention_forward(torch.nn.Module(), *qkv, given)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), qkv)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.fixture
def _on_this_device(monkeypatch):
    """The tensors of FUNCTIONS lie where the test runs."""
    if DEVICE != "cpu":
        pytest.skip("the functions read tensors of the CPU")


@pytest.mark.usefixtures("_on_this_device")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_options(name, monkeypatch):
    function, expected = FUNCTIONS[name]
    for least in (1 << 20, 1):  # pairs from which on blocks are looked for
        monkeypatch.setattr("strobe.compat._mask_function._WORTH_BLOCKS", least)
        for side, seen in PADDED.items():
            mask = made(function, seen)
            assert mask.shape == (B, 1, S, S)
            assert (mask.blocks is not None) == (least == 1 and mask.function is not None)
            if not side:
                assert options_of(mask) == expected
            assert_as_dense(mask)


TABLES = {"groups": GROUPS, "chains": CHAINS, "flat": FLAT, "falling": FALLING, "seen": GROUPS < 1, "few": (GROUPS * 90).to(torch.int8)}


def drawn_integer(draw: random.Random, depth: int = 0) -> str:
    if depth == 2 or draw.random() < 0.5:
        table = draw.choice(["groups", "chains", "flat", "falling", "few"])
        return draw.choice(["i", "j", f"{table}[b, i]", f"{table}[b, j]", str(draw.randrange(-3, 9))])
    a, b = (drawn_integer(draw, depth + 1) for _ in range(2))
    return draw.choice([f"({a} + {b})", f"({a} - {b})", f"abs({a})", f"(-{a})", f"({a} * 3)", f"({a} // 4)", f"({a} % 3)", "(i - j).abs()"])


def drawn_condition(draw: random.Random, depth: int = 0) -> str:
    if depth == 3 or draw.random() < 0.4:
        compared = f"({drawn_integer(draw)} {draw.choice(['<', '<=', '>', '>=', '==', '!='])} {drawn_integer(draw)})"
        usual = ["(j <= i)", "(i - j < 6)", "(i - j > -3)", "(chains[b, i] == chains[b, j])", "(flat[b, j] <= flat[b, i])"]
        usual += ["(abs(i - j - 1) < 5)", "((j - i).abs() <= 4)", "(i // 7 == j // 7)"]
        return draw.choice([compared, draw.choice(usual), draw.choice(usual), draw.choice(["seen[b, j]", "seen[b, i]"])])
    a, b = (drawn_condition(draw, depth + 1) for _ in range(2))
    several = [f"({a} | {b})", f"(~{a})", f"({a} ^ {b})", f"torch.logical_and({a}, {b})", f"torch.where({a}, {b}, j <= i)"]
    return draw.choice([f"({a} & {b})", draw.choice(several)])


@pytest.mark.usefixtures("_on_this_device")
@pytest.mark.parametrize("seed", range(8))
def test_functions_at_random(seed, monkeypatch):
    draw = random.Random(seed)
    sizes = [*({},) * 3, {"q_length": 5, "q_offset": 9}, {"q_length": 5, "q_offset": torch.tensor(9)}, {"q_length": 1, "q_offset": S - 1}]
    for _ in range(12):
        text = f"({drawn_condition(draw)} & (j >= 0))"
        monkeypatch.setattr("strobe.compat._mask_function._WORTH_BLOCKS", draw.choice([1 << 20, 1]))
        mask = made(
            eval(f"lambda b, h, i, j: {text}", TABLES | {"torch": torch}), draw.choice([None, *PADDED.values()]), **draw.choice(sizes)
        )
        q, k, v = drawn(mask.q_length, S)
        found, expected = (attention_forward(torch.nn.Module(), q, k, v, x)[0] for x in (mask, mask.to_dense()))
        torch.testing.assert_close(
            found, expected, rtol=1e-9, atol=1e-11, msg=lambda words, text=text, mask=mask: f"{text} {mask}: {words}"
        )


def test_a_function_of_the_head():
    """transformers' own attention calls it with head 0 alone. Here h is the head, also for one query."""
    for length in (S, 1):
        mask = made(lambda b, h, i, j: (i - j) % 4 >= h, q_length=length, q_offset=S - length)
        q, k, v = drawn(length, S)
        at = torch.arange(S, device=DEVICE)
        heads = torch.arange(4, device=DEVICE)[:, None, None]
        dense = (at[S - length :, None] - at) % 4 >= heads
        out, _ = attention_forward(torch.nn.Module(), q, k, v, mask)
        expected, _ = attention_forward(torch.nn.Module(), q, k, v, dense)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)


OFFSETS = {
    "a cache": {"q_length": 5, "q_offset": S - 5},
    "a cache that has slid": {"q_length": 5, "q_offset": S - 5 + 11, "kv_offset": 11},
    "a cache with room": {"q_length": 5, "q_offset": 9},
    "a cache with room, a tensor": {"q_length": 5, "q_offset": torch.tensor(9)},
    "the first of a cache with room": {"q_length": 5, "q_offset": torch.tensor(0)},
    "one query": {"q_length": 1, "q_offset": S - 1},
    "one query, a tensor": {"q_length": 1, "q_offset": torch.tensor(10)},
    "more keys than positions": {"q_length": 5, "q_offset": 7, "kv_offset": 3, "kv_length": 8},
}


@pytest.mark.usefixtures("_on_this_device")
@pytest.mark.parametrize("name", ["causal", "two-sided", "window", "two-sided window", "chunks", "of the user"])
def test_options_of_caches(name):
    for offsets, given in OFFSETS.items():
        for side in ("", "left"):
            seen = PADDED[side]
            if seen is not None and given.get("kv_offset"):
                seen = torch.cat([torch.ones(B, given["kv_offset"], dtype=torch.bool), seen], 1)
            mask = made(FUNCTIONS[name][0], seen, **given)
            if name in ("causal", "window") and not side and offsets != "more keys than positions":
                assert options_of(mask) <= {"causal", "window", "seqused"}, offsets
            assert_as_dense(mask)


@pytest.mark.usefixtures("_on_this_device")
@pytest.mark.parametrize("name", ["window", "packed", "images", "chunks"])
def test_parts_of_a_mask(name):
    """Queries and keys are taken from the function, not from a tensor."""
    whole = made(FUNCTIONS[name][0])
    for index in [(slice(None), slice(None), slice(-6, None), slice(None)), (..., slice(0, 9)), (slice(None), slice(None), slice(3, 11))]:
        part = whole[index]
        assert isinstance(part, MaskFunction)
        assert part.shape == whole.to_dense()[index].shape
        assert torch.equal(part.to_dense(), whole.to_dense()[index])
        assert_as_dense(part)
    assert whole[:, :, :, :S] is whole
    joined = torch.cat([whole, made(masks.bidirectional_mask_function, PADDED["left"]), whole], dim=-1)
    assert isinstance(joined, MaskFunction)
    assert joined.shape == (B, 1, S, 3 * S)
    assert_as_dense(joined)


@pytest.mark.usefixtures("_on_this_device")
def test_operations_on_a_mask_are_those_on_its_tensor():
    mask = made(FUNCTIONS["window"][0], PADDED["left"])
    dense, scores = mask.to_dense(), torch.randn(B, 4, S, S)
    added = scores.masked_fill(~dense, 0) + torch.where(dense, 0.0, torch.finfo(torch.float32).min)
    for found, expected in (
        (mask.logical_not(), ~dense), (~mask, ~dense), (torch.all(~mask, -1), (~dense).all(-1)), (mask[:, 0], dense[:, 0]),
        (torch.nn.functional.pad(mask, (1, 1)), torch.nn.functional.pad(dense, (1, 1))), (mask & dense, dense),
        (mask.sum(-1), dense.sum(-1)),
        (torch.where(mask, scores, 0.0), torch.where(dense, scores, 0.0)), (mask.expand(B, 4, S, S), dense.expand(B, 4, S, S)),
        (mask == 0, ~dense), (mask != 0, dense), (mask < 1, ~dense), (mask * 2.0, dense * 2.0), (scores * mask, scores * dense),
        (mask.to(scores), dense.float()),
        (mask.to(torch.float32), dense.float()), (torch.cat([mask, dense], -1), torch.cat([dense, dense], -1)),
    ):  # fmt: skip
        assert torch.equal(found, expected)
    for found in (scores + mask, mask + scores, torch.add(scores, mask)):
        torch.testing.assert_close(found.softmax(-1)[0], added.softmax(-1)[0].where(dense[0], 0), rtol=0, atol=1)
        assert (found[~dense.expand_as(found)] < -1e30).all()
        assert torch.equal(found[dense.expand_as(found)], scores[dense.expand_as(found)])
    assert mask.dtype == torch.bool
    assert mask.ndim == mask.dim() == len(mask.shape) == 4
    assert mask.to("cpu") is mask
    with pytest.raises(TypeError, match="^attention_mask: added to 1; accepted is a tensor of scores"):
        mask + 1


@pytest.mark.usefixtures("_on_this_device")
@pytest.mark.parametrize("side", PADDED)
@pytest.mark.parametrize("name", ["causal", "window", "chunks", "chains", "packed windows", "images", "what only a query hides"])
def test_a_mask_for_a_batch_of_1_holds_for_all_of_a_larger_one(name, side):
    seen = PADDED[side]
    mask = made(FUNCTIONS[name][0], None if seen is None else seen[1:], batch_size=1)
    for each in (mask, torch.cat([mask, mask], -1)):
        q, k, v = drawn(S, each.kv_length, 3)
        out, _ = attention_forward(torch.nn.Module(), q, k, v, each)
        expected, _ = attention_forward(torch.nn.Module(), q, k, v, each.to_dense())
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("_on_this_device")
@pytest.mark.parametrize("name", ["causal", "two-sided window", "images"])
def test_an_offset_that_the_cache_counts_up(name):
    """A static cache gives the tensor in which it counts, and counts before the first layer's attention."""
    offset = torch.tensor(9)
    mask, expected = (made(FUNCTIONS[name][0], q_length=5, q_offset=x) for x in (offset, 9))
    offset += 5
    assert torch.equal(mask.to_dense(), expected.to_dense())
    qkv = drawn(5, S)
    found, wanted = (attention_forward(torch.nn.Module(), *qkv, x)[0] for x in (mask, expected.to_dense()))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def test_a_mask_for_other_lengths_is_refused():
    q, k, v = drawn(5, 7)
    with pytest.raises(ValueError, match="^attention_mask: for a batch of 2, 24 queries and 24 keys, beside query of shape"):
        attention_forward(torch.nn.Module(), q, k, v, made(masks.causal_mask_function))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda b, h, i, j: j <= i if h == 0 else j < i, "torch.where"),
        (lambda b, h, i, j: torch.tensor([True, False])[int(h)], "accepted"),
        (lambda b, h, i, j: i.sort().values <= j, "accepted"),
    ],
)
def test_a_function_without_a_graph_is_refused(function, words):
    q, k, v = drawn(S, S)
    with pytest.raises((ValueError, TypeError), match=words) as raised:
        attention_forward(torch.nn.Module(), q, k, v, made(function))
    assert str(raised.value).startswith("attention_mask: ")
    assert len(str(raised.value).splitlines()) == 1


# Compilers, checkpoints, caches


USERS: dict[str, Any] = {"or_mask_function": lambda b, h, i, j: (i < 4) & (j < 4), "and_mask_function": lambda b, h, i, j: i - j != 3}


@pytest.mark.parametrize("users", [(), *((name,) for name in USERS), tuple(USERS)], ids="-".join)
def test_functions_of_the_user(users, calls):
    config = transformers.LlamaConfig(**TEXT)
    found = []
    for name in ("strobe", "eager"):
        config._attn_implementation = name
        mask = masks.create_causal_mask(
            config,
            torch.empty(B, S, 0, dtype=torch.float64, device=DEVICE),
            PADDED["left"].to(DEVICE),
            None,
            **{each: USERS[each] for each in users},
        )
        q, k, v = drawn(S, S)
        out, _ = attention_forward(torch.nn.Module(), q, k, v, mask)
        found.append(out[PADDED["left"].to(DEVICE)])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
    assert not isinstance(calls[0].get("mask"), torch.Tensor) or calls[0]["mask"].shape[2] == 1


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("llama", "packed"),
        ("mistral", "padding"),
        *(
            pytest.param(name, given, marks=pytest.mark.long)
            for name, given in (
                ("llama", "nothing"), ("mistral", "packed"), ("gemma3, two-sided", "padding"), ("gemma3, two-sided", "nothing"),
                ("llama4, chunks", "padding"), ("llama4, chunks", "packed"), ("gemma3, images", "padding"),
            )
        ),
    ],
)  # fmt: skip
def test_compiled(name, given):
    """One graph, with what the masks read as its inputs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = CASES[name]("left")
    if given != "padding":
        del inputs["attention_mask"]
    if given == "packed":
        inputs["position_ids"] = POSITIONS.expand(2, -1)
    model, inputs = model.to(DEVICE).eval(), {key: placed(x) for key, x in inputs.items()} | {"use_cache": False}
    model.set_attn_implementation("strobe")
    found = []
    for run in (torch.compile(model, fullgraph=name != "gemma3, images", backend="aot_eager"), model):
        model.zero_grad()
        out = run(**inputs)[0]
        out.square().mean().backward()
        found.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5 * max(1.0, want.abs().max().item()))


@pytest.mark.parametrize("name", ["causal", "window", "packed", "images", "windows of images", "of the user"])
@pytest.mark.usefixtures("_on_this_device")
def test_a_mask_that_a_graph_gets(name):
    """A layer is compiled, and the mask is made before. Another mask of the same kind compiles nothing."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def layer(q, k, v, mask):
        return attention_forward(torch.nn.Module(), q, k, v, mask)[0] * 2

    for _ in range(3):
        mask = made(FUNCTIONS[name][0])
        qkv = drawn(S, S)
        expected = attention_forward(torch.nn.Module(), *qkv, mask.to_dense())[0] * 2
        torch.testing.assert_close(layer(*qkv, mask), expected, rtol=1e-9, atol=1e-11)
    assert counter.frame_count == 1


@pytest.mark.parametrize("collated", [False, True])
def test_a_compiled_mask_whose_positions_do_not_fit_its_sequences(collated):
    """causal and windows of positions become those of places, which is right only where both grow together. On a GPU, too, the error is
    one of this call: others go on."""
    torch._dynamo.reset()
    graphs = []

    def kept(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return lookup_backend("aot_eager")(graph, inputs)

    @torch.compile(fullgraph=True, backend=kept)
    def attended(q, k, v, positions, sequences, starts):
        def function(b, h, i, j):
            return (positions[b, j] <= positions[b, i]) & (sequences[b, i] == sequences[b, j])

        mask = mask_of(len(q), S, S, 0, 0, function, None, device=q.device)
        lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 10, "max_length_k": 10} if collated else {}
        return attention_forward(torch.nn.Module(), q, k, v, mask, **lengths)[0], mask.causal

    batch = 1 if collated else B
    qkv, shared, resumed, turns, flat = drawn(S, S, batch), *(x[:batch].to(DEVICE).clone() for x in (RESUMED, RESUMED, TURNS, FLAT))
    shared[:, 3:6] = 3  # as of an image
    sequences = torch.cat([flat[:, :1] * 0, flat.diff() < 0], 1).cumsum(1)
    starts = torch.tensor([0, *(sequences[0].diff().nonzero()[:, 0] + 1).tolist(), S], dtype=torch.int32, device=DEVICE)
    fitting = (*qkv, flat, sequences, starts)
    expected, is_causal = attended(*fitting)
    assert is_causal
    for positions, those in ((shared, turns), (resumed, turns)):
        with pytest.raises(RuntimeError, match="^attention_mask: a compiled mask function compares positions, which do not grow by one"):
            attended(*qkv, positions, those, starts)
    assert torch.equal(attended(*fitting)[0], expected)
    assert graphs
    assert not any("assert_async" in x for x in graphs)  # it would end all work on a GPU


def test_what_a_compiler_sees():
    """Causal and windows are options in a graph, too."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def found(x, positions, seen):
        sequences = masks.find_packed_sequence_indices(positions)
        window = masks.sliding_window_causal_mask_function(5)
        packed = masks.and_masks(
            masks.remap_positions_for_packed_sequence(window, positions), masks.packed_sequence_mask_function(sequences)
        )
        kinds = []
        for function, padding_mask in ((masks.causal_mask_function, None), (window, seen), (packed, None)):
            mask = mask_of(B, S, S, mask_function=function, attention_mask=padding_mask, device=x.device)
            kinds.append((mask.causal, mask.window, mask.function is None, mask.keys is None, mask.is_packed))
        return x + 1, kinds

    _, kinds = found(torch.zeros(3), FLAT, PADDED["left"])
    assert kinds == [(True, None, True, True, True), (True, (4, 0), True, False, False), (True, (4, 0), False, True, True)]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["mistral", "gemma3, images", "llama4, chunks", "t5gemma2"])
def test_gradient_checkpointing(name, reentrant):
    torch.manual_seed(0)
    model, given = CASES[name]("right")
    model, given = model.to(DEVICE, torch.float64).train(), {key: placed(x, torch.float64) for key, x in given.items()}
    model.set_attn_implementation("strobe")
    found = []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.zero_grad()
        torch.manual_seed(0)
        model(**given)[0].square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma4, text", "llama4, chunks"])
def test_generates_the_same(name, cache, calls):
    """With padding on the left, past the windows, in caches that grow and in those whose offsets are tensors."""
    torch.manual_seed(0)
    model, given = CASES[name]("left")
    model, given = model.to(DEVICE).eval(), {key: placed(x) for key, x in given.items()}
    sampling = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    found = []
    for implementation in ("strobe", "eager"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(**given, **sampling))
    assert torch.equal(*found)
    assert len(calls) == 2 * 12
    assert all(not isinstance(each.get("mask"), torch.Tensor) or each["mask"].shape[2] == 1 for each in calls)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generates_the_same_compiled(name):
    """The steps on a static cache are one graph, which gets the masks from outside."""
    if not hasattr(transformers.CompileConfig(), "_compile_all_devices"):
        pytest.skip("an earlier transformers, which compiles on GPUs alone")
    torch.manual_seed(0)
    model, given = CASES[name]("left")
    model, given = model.to(DEVICE).eval(), {key: placed(x) for key, x in given.items()}
    sampling = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    texts, counts = [model.generate(**given, **sampling)], []
    for implementation in ("strobe", "sdpa"):
        torch._dynamo.reset()
        GRAPHS.clear()
        compiler = transformers.CompileConfig(backend=_collected, fullgraph=True, mode=None)
        compiler._compile_all_devices = True
        model.set_attn_implementation(implementation)
        texts.append(model.generate(**given, **sampling, cache_implementation="static", compile_config=compiler))
        counts.append(len(GRAPHS))
    assert torch.equal(texts[0], texts[1])
    assert 0 < counts[0] <= counts[1]  # in 5.24 Mistral's cache compiles a second graph by itself


GRAPHS: list[Any] = []  # transformers copies the backend, and what it holds


def _collected(graph: Any, inputs: Any, **_: Any) -> Any:
    GRAPHS.append(graph)
    return lookup_backend("aot_eager")(graph, inputs)


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict):
    torch.manual_seed(0)
    model, given = CASES["mistral"]("left")
    model = model.to(DEVICE).eval()
    model.set_attn_implementation("strobe")

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits

    inputs = tuple(placed(given[key]) for key in ("input_ids", "attention_mask"))
    program = torch.export.export(Logits(), inputs, strict=strict)
    torch.testing.assert_close(program.module()(*inputs), Logits()(*inputs))


# Memory


class Largest(TorchDispatchMode):
    """The most elements of any result."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for x in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(x, torch.Tensor):
                self.found = max(self.found, x.untyped_storage().nbytes() // max(x.element_size(), 1))
        return results


LONG = 8192


@pytest.mark.parametrize("given", ["nothing", "left", "right", "packed", "images", "chunks", "of the user"])
def test_nothing_of_queries_times_keys_is_made(given):
    """8,192 tokens: no tensor has a 64th of the pairs."""
    options = TEXT | {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "num_attention_heads": 1}
    options |= {"num_key_value_heads": 1, "max_position_embeddings": LONG, "_attn_implementation": "strobe"}
    torch.manual_seed(0)
    model = transformers.LlamaModel(transformers.LlamaConfig(**options)).to(DEVICE)
    inputs: dict[str, Any] = {"input_ids": tokens(1, LONG).to(DEVICE), "use_cache": False}
    at = torch.arange(LONG, device=DEVICE)[None]
    if given == "packed":
        inputs["position_ids"] = at % 1500
    elif given in ("left", "right"):
        inputs["attention_mask"] = (at >= 1000 if given == "left" else at < 7000).long()
    with Largest() as largest:
        if given in ("images", "chunks", "of the user"):
            groups = torch.where(at // 700 % 3 == 1, at // 700, -1)
            chosen = {
                "images": masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(groups)),
                "chunks": masks.chunked_causal_mask_function(1000, torch.zeros(1, dtype=torch.int64, device=DEVICE)),
                "of the user": lambda b, h, i, j: (j <= i) & ((i - j) % 7 < 3),
            }
            inputs["attention_mask"] = mask_of(1, LONG, LONG, mask_function=chosen[given], device=torch.device(DEVICE))
        model(**inputs).last_hidden_state.sum().backward()
    assert LONG <= largest.found <= LONG * LONG // 64


def test_the_masks_of_sdpa_are_seen_by_the_memory_test():
    with Largest() as largest:
        made(masks.causal_mask_function, q_length=300, kv_length=300).to_dense()
    assert largest.found >= 300 * 300
