"""Which model class runs which Hugging Face architecture."""

from __future__ import annotations

import torch

from nanoinfer.kernels.kernel_set import KernelSet
from nanoinfer.layers.group import ALONE, Group
from nanoinfer.models.config import ARCHITECTURES, ModelConfig
from nanoinfer.models.decoder import Decoder

# Qwen3 has QK norm, Qwen2 and 2.5 have QKV biases, Llama 3.x stretches rope; SmolLM2 is a tied Llama, Mistral an untied
# one. ModelConfig turns these differences into switches; a family that needs other code gets its own class here.
MODELS = dict.fromkeys(ARCHITECTURES.values(), Decoder)


def build_model(
    config: ModelConfig, *, kernels: KernelSet, dtype: torch.dtype, device: torch.device, group: Group = ALONE
) -> Decoder:
    """This rank's part of the model for `config`, its weights still to be loaded through `weight_slots`."""
    model = MODELS[config.architecture]
    return model(config, kernels=kernels, dtype=dtype, device=device, group=group)
