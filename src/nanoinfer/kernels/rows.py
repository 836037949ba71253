"""What a decode step of running sequences starts from, and what its kernels read: plain tensors, by name."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RowState(NamedTuple):
    """The state of R running sequences on the device, one row each."""

    last_tokens: Tensor  # int64 [R]: the newest token, which the next decode reads
    block_tables: Tensor  # int32 [R, most blocks]
    prompt_lens: Tensor  # int64 [R]
    seeds: Tensor  # int64 [R]
    temperatures: Tensor  # float32 [R]


class DecodeInputs(NamedTuple):
    """One token each of B sequences: all [B], but for the block tables."""

    token_ids: Tensor  # int64
    positions: Tensor  # int64
    slot_mapping: Tensor  # int64; -1 for padding
    context_lens: Tensor  # int32, this token included
    block_tables: Tensor  # int32 [B, most blocks]
    token_indices: Tensor  # int64: which of its sequence's output tokens is drawn
    seeds: Tensor  # int64
    temperatures: Tensor  # float32
