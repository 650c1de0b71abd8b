"""Models of transformers on Strobe compared with their own eager attention: logits, gradients and generated text."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
import transformers

from device import DEVICE
from strobe.compat import transformers as strobe_in_transformers
from strobe.compat.transformers import attention_forward, register

SMALL: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped heads": ("Llama", GROUPED),
    "sliding window": ("Mistral", GROUPED | {"sliding_window": 5}),
    "softcap": ("Gemma2", GROUPED | {"sliding_window": 5, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    "sinks": ("GptOss", GROUPED | {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "other dimensions of values": (
        "DeepseekV3",
        GROUPED
        | {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
        }
        | {"n_routed_experts": 2, "first_k_dense_replace": 2},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _registered():
    register()


def made(name: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**options, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return getattr(transformers, name + "ForCausalLM")(config).to(DEVICE).eval()


def padded(*shape: int) -> dict[str, torch.Tensor]:
    """Tokens, the second sequence padded on the left."""
    tokens = torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(shape, dtype=torch.int64)
    mask[1, :4] = 0
    return {"input_ids": tokens.to(DEVICE), "attention_mask": mask.to(DEVICE)}


def assert_as_eager(model: Any, given: dict[str, torch.Tensor]) -> None:
    """Compares the model's output, and the gradients of its parameters."""
    found = []
    for implementation in ("strobe", "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(**given)[0][given["attention_mask"].bool()]  # the output of a padding token is not defined
        out.square().mean().backward()
        found.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("padding", [False, True], ids=["", "padding"])
@pytest.mark.parametrize("name", MODELS)
def test_as_eager(name, padding):
    model, given = made(*MODELS[name]), padded(2, 13)
    if not padding:
        given["attention_mask"].fill_(1)
    assert_as_eager(model, given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sinks_in_the_dtype_of_the_statistics(dtype):
    """Sinks are float64 if q is, else float32."""
    q, sinks = torch.randn(1, 2, 5, 8, device=DEVICE, dtype=dtype), torch.randn(2, device=DEVICE, dtype=dtype)
    out, _ = attention_forward(torch.nn.Module(), q, q, q, None, s_aux=sinks, is_causal=False)
    scores = torch.cat([q.double() @ q.double().mT / 8**0.5, sinks.double()[None, :, None, None].expand(1, 2, 5, 1)], -1)
    expected = scores.softmax(-1)[..., :5] @ q.double()
    torch.testing.assert_close(out.transpose(1, 2).double(), expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-2)


def test_a_loss_over_left_padding_is_that_of_sdpa():
    """A padding token on the left sees no key, for which eager makes another output: docs/compat.md."""
    model, given = made("Llama", GROUPED), padded(2, 13)
    found = {}
    for implementation in ("strobe", "sdpa", "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(**given)[0].square().mean().backward()
        found[implementation] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(found["strobe"], found["sdpa"], rtol=1e-3, atol=1e-5)
    assert (found["eager"] - found["sdpa"]).abs().max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_generates_the_same(name):
    """The model generates with a cache: a prompt, then one token at a time."""
    model, given = made(*MODELS[name]), padded(2, 7)
    found = []
    for implementation in ("strobe", "eager"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(**given, max_new_tokens=12, min_new_tokens=12, do_sample=False))
    assert torch.equal(*found)


def test_its_own_flash_attention_runs_on_an_alias(monkeypatch):
    """attn_implementation="flash_attention_2" imports flash_attn. With left padding it passes int32 indices to pad_input as it decodes."""
    from transformers import modeling_flash_attention_utils as utils

    from strobe.compat import flash_attn

    before = {*sys.modules}
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda *_, **__: True)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    model, given = made("Llama", GROUPED), padded(2, 7)
    found = []
    for name in ("eager", "flash_attention_2"):
        model.config._attn_implementation = name
        generated = model.generate(
            **given, max_new_tokens=6, min_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        found.append(torch.stack(generated.logits))
    assert utils._pad_fn is flash_attn.bert_padding.pad_input
    for name in {*sys.modules} - before:
        if name.startswith("flash_attn."):
            monkeypatch.delitem(sys.modules, name)
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


def test_encoder_with_a_position_bias():
    """T5 is bidirectional, and adds learned relative positions to the scores."""
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=97, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0)
    assert_as_eager(transformers.T5EncoderModel(config).to(DEVICE), padded(2, 13))


@pytest.mark.parametrize("others", [{"output_attentions": True}, {"cache": object()}], ids=lambda x: next(iter(x)))
def test_refuses(others):
    x = torch.randn(1, 2, 5, 8, device=DEVICE)
    with pytest.raises(NotImplementedError, match=next(iter(others))):
        attention_forward(torch.nn.Module(), x, x, x, None, **others)


X = torch.randn(1, 2, 5, 8)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"query": 5}, "query: int; accepted is a torch.Tensor or a numpy.ndarray"),
    ({"query": X[0, 0, 0]}, "query: shape (8,); accepted is (B, H, Sq, D)"),
    ({"key": X[..., :4]}, "key: shape (1, 2, 5, 4); accepted is (B, Hkv, Sk, D) = (1, any, any, 8)"),
    ({"value": 1.5}, "value: float; accepted is a torch.Tensor, as query is"),
    ({"attention_mask": "x"}, "attention_mask: str; accepted is a torch.Tensor"),
    ({"attention_mask": torch.ones(5, 4)}, "attention_mask: shape (5, 4); accepted is (B|1, H|1, Sq|1, Sk|1) = (1|1, 2|1, 5|1, 5|1)"),
    (
        {"attention_mask": torch.ones(5, 4), "position_bias": torch.ones(5, 5)},
        "attention_mask: shape (5, 4) beside position_bias of (5, 5); accepted are shapes that broadcast together",
    ),
    (
        {"attention_mask": torch.ones(5, 5, device="meta"), "position_bias": torch.ones(5, 5)},
        "attention_mask: on device meta; accepted is cpu, where position_bias lies",
    ),
    ({"position_bias": [1]}, "position_bias: list; accepted is a torch.Tensor"),
    ({"position_bias": [1], "attention_mask": torch.ones(5, 5)}, "position_bias: list; accepted is a torch.Tensor"),
    ({"s_aux": {}}, "s_aux: dict; accepted is a torch.Tensor"),
    ({"s_aux": torch.ones(3)}, "s_aux: shape (3); accepted is (H) = (2)"),
    ({"scaling": "x"}, "scaling: str; accepted is a number"),
    ({"softcap": -1.0}, "softcap: -1; accepted"),
    ({"softcap": torch.ones(2)}, "softcap: torch.Tensor; accepted is a number"),
    ({"dropout": "x"}, "dropout: str; accepted is a number"),
    ({"is_causal": torch.ones(2)}, "is_causal: torch.Tensor tensor([1., 1.]); accepted is True or False, or 1 or 0"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED, ids=["-".join(wrong) for wrong, _ in REFUSED])
def test_refusals_are_in_its_own_names(wrong, message):
    given = {"query": X, "key": X, "value": X, "attention_mask": None} | wrong
    with pytest.raises((TypeError, ValueError)) as raised:
        attention_forward(torch.nn.Module(), **given)
    assert str(raised.value).startswith(message)
    assert len(str(raised.value).splitlines()) == 1


PROMPTS = [[*range(3, 20)], [7, 8], [9, 30, 31], [40] * 25, [50, 51, 52, 53, 54]]


def updates_the_cache_itself() -> bool:
    """transformers 5.24 and later: a model copies the keys out of the pages, and attention does not get the cache."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    return "cache" in inspect.signature(LlamaAttention.forward).parameters


@pytest.mark.skipif(DEVICE != "cpu", reason="the comparison is of the CPU's texts")
@pytest.mark.parametrize("case", [case for case in MODELS if case != "other dimensions of values"])
def test_continuous_batching(case, monkeypatch):
    """Requests have prompts in pieces beside single tokens, in pages of 4, with fewer pages than all need at once. Each generates the same
    text as alone."""
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip("an earlier transformers, whose generate_batch has other arguments")
    from transformers.generation.continuous_batching import cache as batching

    page_size = "page_size" if hasattr(transformers.ContinuousBatchingConfig, "page_size") else "block_size"
    if page_size == "block_size" and case != "grouped heads":
        pytest.skip("an earlier transformers, whose continuous batching keeps other windows than generate(), on every attention")
    model = made(*MODELS[case])
    sampling = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    model.set_attn_implementation("eager")
    expected = [model.generate(torch.tensor([prompt]), **sampling)[0, len(prompt) :].tolist() for prompt in PROMPTS]
    copied = []
    update = batching.PagedAttentionCache.update

    def noted(self: Any, *arguments: Any, **named: Any) -> Any:
        read = named.get("read_index") or named["kwargs"]["read_index"]
        copied.append(max(x.numel() for x in read))
        return update(self, *arguments, **named)

    monkeypatch.setattr(batching.PagedAttentionCache, "update", noted)
    strobe_in_transformers.use_paged(model)
    found = model.generate_batch(
        PROMPTS,
        generation_config=transformers.GenerationConfig(**sampling),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**{page_size: 4}, num_blocks=24, max_batch_tokens=16),
    )
    assert [result.generated_tokens for result in found.values()] == expected
    if case == "grouped heads" and not updates_the_cache_itself():
        assert not any(copied)


def test_use_paged_takes_models_alone():
    with pytest.raises(TypeError, match="^model: .*str.*; accepted is a transformers.PreTrainedModel"):
        strobe_in_transformers.use_paged("model")


def test_a_paged_name_without_a_paged_cache_is_refused():
    model = made("Llama", GROUPED)
    strobe_in_transformers.use_paged(model)
    with pytest.raises(ValueError, match="^cache: None; accepted is the paged cache of continuous batching"):
        model(torch.tensor([[3, 4, 5]], device=DEVICE))
