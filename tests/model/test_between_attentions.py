"""A kernel set may compute the products from one attention to the next at once, where they are nothing but products."""

from __future__ import annotations

import pytest
import torch
from runner_driver import Driver, decoder_from_hf
from test_parity import FAMILIES
from transformers import AutoModelForCausalLM

from nanoinfer.kernels import reference
from nanoinfer.kernels.kernel_set import KernelSet

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6]]


class AtOnce(KernelSet):
    def __init__(self):
        self.calls = 0

    def between_attentions(self, attended, hidden, products):
        self.calls += 1
        hidden = hidden + attended @ products.o.T
        normed = reference.rms_norm(hidden, products.norm, products.eps)
        hidden = hidden + reference.silu_mul(normed @ products.gate_up.T) @ products.down.T
        qkv = reference.rms_norm(hidden, products.next_norm, products.eps) @ products.next_qkv.T
        return hidden, qkv if products.next_qkv_bias is None else qkv + products.next_qkv_bias


@pytest.mark.parametrize(
    ("family", "fits"),
    [
        ("qwen3-gqa2", True),
        ("qwen2-gqa7-bias", True),
        ("llama-llama3-rope", True),
        ("qwen3-attention-bias", False),
        ("llama-all-biases", False),
    ],
)
def test_layers_at_once_give_the_tokens_of_layers_in_steps(family, fits):
    torch.manual_seed(0)
    hf_model = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32)
    for parameter in hf_model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    expected = Driver(decoder_from_hf(hf_model)).generate(PROMPTS, 8)
    kernels = AtOnce()
    assert Driver(decoder_from_hf(hf_model, kernels=kernels)).generate(PROMPTS, 8) == expected
    layers = FAMILIES[family].num_hidden_layers
    assert kernels.calls == (8 * (layers - 1) if fits else 0)
