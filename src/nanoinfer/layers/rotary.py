"""The table of rotary position embeddings: one for all layers, in float32, up to the longest position in use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanoinfer.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of elements, float32 [head_dim / 2], after the config's context stretching."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(rope, head_dim)
    assert rope.kind == "default", rope.kind
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended (Llama 3.1 model card and reference code)."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = torch.where(turns < rope.low_freq_factor, frequencies / rope.factor, blended)
    return torch.where(turns > rope.high_freq_factor, frequencies, stretched)


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """ "NTK by parts" interpolation (arXiv:2309.00071, section 3.2), with the ramp over element index."""

    def element_with(turns: float) -> float:
        # Which pair of elements makes `turns` full turns over the original context.
        wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = element_with(rope.beta_fast), element_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    powers = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return ramp / (rope.factor * powers) + (1 - ramp) / powers


def rotary_table(rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> Tensor:
    """float32 [num_positions, head_dim]: head_dim / 2 cosines, then as many sines, both times the attention factor."""
    angles = torch.outer(torch.arange(num_positions).float(), inverse_frequencies(rope, head_dim))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
    return table.to(device)
