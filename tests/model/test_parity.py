"""Greedy token ids equal transformers' in float32 for every family, in odd shapes, however prompts are cut."""

from __future__ import annotations

import pytest
import torch
from runner_driver import Driver, decoder_from_hf
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

NEW_TOKENS = 64


def shape(**overrides):
    common = {
        "vocab_size": 331,
        "hidden_size": 96,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return common | overrides


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

FAMILIES = {
    "qwen3-gqa2": Qwen3Config(**shape(num_attention_heads=4, num_key_value_heads=2, head_dim=128)),
    "qwen3-tied-yarn": Qwen3Config(**shape(tie_word_embeddings=True, rope_parameters=YARN)),
    "qwen3-attention-bias": Qwen3Config(**shape(attention_bias=True)),
    "qwen2-gqa7-bias": Qwen2Config(**shape(num_attention_heads=7, num_key_value_heads=1, hidden_size=112, head_dim=80)),
    "qwen2-tied": Qwen2Config(**shape(tie_word_embeddings=True, num_attention_heads=2, num_key_value_heads=2)),
    "llama-gqa1": LlamaConfig(**shape(num_attention_heads=3, num_key_value_heads=3, head_dim=80)),
    "llama-llama3-rope": LlamaConfig(**shape(rope_parameters=LLAMA3)),
    "llama-linear-rope": LlamaConfig(**shape(rope_parameters=LINEAR)),
    "llama-all-biases": LlamaConfig(**shape(attention_bias=True, mlp_bias=True)),
    "smollm2-gqa3-tied": LlamaConfig(
        **shape(num_attention_heads=9, num_key_value_heads=3, hidden_size=144, tie_word_embeddings=True, head_dim=64)
    ),
    "mistral-gqa2": MistralConfig(**shape(num_attention_heads=4, head_dim=128, sliding_window=None)),
}


def randomise(model) -> None:
    """Give biases and norms values too: transformers initialises them to 0 and 1, which would hide a missing one."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)


@pytest.fixture(scope="module", params=FAMILIES, ids=list(FAMILIES))
def case(request):
    """(transformers model, 9 prompts of different lengths, its greedy tokens, our decoder)."""
    torch.manual_seed(1)
    config = FAMILIES[request.param]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomise(model)
    lengths = (300, 1, 2, 15, 16, 17, 33, 40, 100)
    prompts = [torch.randint(0, config.vocab_size, (n,)).tolist() for n in lengths]
    return model, prompts, [greedy(model, p) for p in prompts], decoder_from_hf(model)


@torch.inference_mode()
def greedy(model, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)  # otherwise generate() hides prompt tokens that equal the padding token
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("cut", ["1", "3", "block-1", "block", "block+1", "all"])
def test_greedy_tokens_equal_transformers(case, block_size, cut):
    _, prompts, expected, decoder = case
    chunks = {"block-1": block_size - 1, "block": block_size, "block+1": block_size + 1, "all": None}
    chunk = chunks[cut] if cut in chunks else int(cut)
    driver = Driver(decoder, block_size=block_size, num_blocks=256)
    assert driver.generate(prompts[:1], NEW_TOKENS, chunk=chunk) == expected[:1]
    assert driver.generate(prompts, NEW_TOKENS, chunk=chunk) == expected
