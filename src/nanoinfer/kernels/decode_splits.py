"""How a batch of decodes is spread over the cores: into how many splits a sequence is cut, and where their parts go."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.kernels.common import shared_memory

FEW_ROUNDS, MOST_ROUNDS_SPLIT = 3, 5  # programs per core: below the first all are split, beyond the second none
MIN_SPLIT_TOKENS = 128  # tokens of a split of many sequences at the least: below, combining costs more than it saves


class DecodeConfig(NamedTuple):
    block_tokens: int
    num_warps: int
    num_stages: int
    splits: int


@cache
def _num_cores(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def num_splits(batch: int, num_kv_heads: int, device: torch.device) -> int:
    """The most splits of a sequence in a launch, at most 32: combining one costs as much as reading 60 tokens.

    Decision 063 has the measurements behind all that this module chooses.

    A small batch has four programs per core; in a larger one `split_tokens` says how long a split is, so that only long
    sequences are cut. A batch that fills the cores by itself is not split.
    """
    rounds = _rounds(batch, num_kv_heads, device)
    if rounds < 1:
        return min(32, max(1, int(4 / rounds)))
    if rounds < FEW_ROUNDS:
        return 3
    return 2 if rounds <= MOST_ROUNDS_SPLIT else 1


def _rounds(batch: int, num_kv_heads: int, device: torch.device) -> float:
    return batch * num_kv_heads / _num_cores(device)


def split_tokens(context_lens: Tensor, num_kv_heads: int) -> Tensor | None:
    """How many tokens a split should have so that all cores end at about the same time: int32 [1] on the device.

    None where every sequence may use all its splits, or has only one. Otherwise a part of the average of
    context_lens [B], measured on an H200: with few programs per core all sequences are cut, with more only long ones.
    """
    batch = len(context_lens)
    rounds = _rounds(batch, num_kv_heads, context_lens.device)
    if not 1 <= rounds <= MOST_ROUNDS_SPLIT:
        return None
    tokens = context_lens.sum(dtype=torch.float32)
    return (
        (tokens * ((0.75 if rounds < FEW_ROUNDS else 1.25) / batch))
        .clamp_(min=MIN_SPLIT_TOKENS)
        .to(torch.int32)
        .view(1)
    )


def is_small(batch: int, num_kv_heads: int, device: torch.device) -> bool:
    """Whether latency decides rather than bandwidth: unsplit, sequences keep at most half of the cores busy."""
    return 2 * batch * num_kv_heads < _num_cores(device)


def default_config(batch: int, num_kv_heads: int, device: torch.device, dtype: torch.dtype) -> DecodeConfig:
    """Measured on an H200."""
    splits, rounds = num_splits(batch, num_kv_heads, device), _rounds(batch, num_kv_heads, device)
    if dtype == torch.float32:  # without tensor cores: a larger tile takes a minute to compile
        return DecodeConfig(32, 4, 2, splits)
    if shared_memory(device) < 160 * 1024:  # keys and values of 64 tokens take 32 KB at head dimension 128
        return DecodeConfig(64, 4 if is_small(batch, num_kv_heads, device) else 2, 2, splits)
    if is_small(batch, num_kv_heads, device):
        return DecodeConfig(128, 4, 2, splits)
    if 1 <= rounds < FEW_ROUNDS:
        return DecodeConfig(64, 4, 3, splits)
    if rounds <= MOST_ROUNDS_SPLIT:
        return DecodeConfig(64, 2, 3 if rounds < 1 else 4, splits)
    # With many programs per core, those of one warp leave the least to do at the end, when some cores are idle.
    return DecodeConfig(64, 2, 3, splits) if rounds < 12 else DecodeConfig(32, 1, 4, splits)


class DecodeWorkspace:
    """Scratch memory of the splits. One serves all layers, and all graphs of one stream; it must outlive them."""

    def __init__(
        self, max_pairs: int, max_batch: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        """max_pairs: the largest number of sequences times splits in a launch."""
        self.partial = torch.empty(max_pairs * num_heads * head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(max_pairs * num_heads * 2, dtype=torch.float32, device=device)
        self.counters = torch.zeros(max_batch * num_kv_heads, dtype=torch.int32, device=device)

    @classmethod
    def for_batches(
        cls, max_batch: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> DecodeWorkspace:
        """Large enough for every batch up to max_batch at the number of splits that is chosen for it."""
        most = max(batch * num_splits(batch, num_kv_heads, device) for batch in range(1, max_batch + 1))
        return cls(most, max_batch, num_heads, num_kv_heads, head_dim, device)

    def check(self, batch: int, num_heads: int, num_kv_heads: int, head_dim: int, config: DecodeConfig) -> None:
        """That a launch with this config fits."""
        assert self.partial.numel() >= batch * num_heads * config.splits * head_dim, (self.partial.shape, config)
        assert self.counters.numel() >= batch * num_kv_heads
