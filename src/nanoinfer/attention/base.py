"""The protocol of attention back ends and the description of one step that they work from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """Which tokens attend to what in one step: B sequences, T tokens. Fresh for every step, never changed.

    The first num_decodes sequences have one query each. `starts` and `query_lens` are the same facts as the tensors,
    on the host, so that a back end can plan without reading from the device.
    """

    slot_mapping: Tensor  # int64 [T]: where the step's keys and values are written; -1 nowhere
    cu_seqlens_q: Tensor  # int32 [B + 1]
    context_lens: Tensor  # int32 [B]: history plus this step's tokens
    block_tables: Tensor  # int32 [B, most blocks in use]; entries beyond a row's context are not read
    starts: list[int]  # tokens of history, per sequence
    query_lens: list[int]
    num_decodes: int


class AttentionPlan(Protocol):
    """One step's attention, prepared once and run by every layer."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """q [T, heads, D], k and v [T, kv_heads, D], this layer's cache with k and v already in it -> [T, heads, D]."""
        ...


class AttentionBackend(Protocol):
    """How attention is computed on a device; chosen once per engine."""

    name: str

    def plan(self, batch: AttentionBatch) -> AttentionPlan: ...
