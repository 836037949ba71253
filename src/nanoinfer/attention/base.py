"""The protocol of attention back ends, and the descriptions of a model's heads and of one step that they work from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nanoinfer.kernels.heads import KVCache, QKNorm, TokenSlots


@dataclass(frozen=True)
class AttentionBatch:
    """Which tokens attend to what in one step: B sequences, T tokens. Fresh for every step, never changed.

    The first num_decodes sequences have one query each. `starts` and `query_lens` are on the host, so that a back end
    can plan without reading from the device. In an eager step they are what the tensors say. In a step that becomes a
    CUDA graph the tensors change from replay to replay, and these are bounds: some history (1) everywhere and as many
    queries as the graph has tokens; or empty lists, where all sequences decode.
    """

    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]: where the step's keys and values are written; -1 nowhere
    cu_seqlens_q: Tensor  # int32 [B + 1]
    context_lens: Tensor  # int32 [B]: history plus this step's tokens
    block_tables: Tensor  # int32 [B, most blocks in use]; entries beyond a row's context are not read
    starts: list[int]  # tokens of history, per sequence
    query_lens: list[int]
    num_decodes: int

    def token_slots(self, first: int = 0) -> TokenSlots:
        """Of the tokens from `first` on."""
        return TokenSlots(self.positions[first:], self.slot_mapping[first:])


class AttentionPlan(Protocol):
    """One step's attention, prepared once and run by every layer."""

    def run(self, qkv: Tensor, qk_norm: QKNorm, cache: KVCache, sample_at: Tensor | None = None) -> Tensor:
        """Norm and rotate q and k, write k and v to their slots, attend.

        qkv [T, (heads + 2 kv_heads) * D] -> [T, heads * D]; or of the tokens `sample_at` alone, int64 [S], each the
        last one of its sequence in this step: [S, heads * D]. -1 is padding, whose row means nothing.
        """
        ...


class AttentionBackend(Protocol):
    """How attention is computed on a device; chosen once per engine.

    `reads_device_only`: a plan takes exact lengths from tensors alone, so it can be part of a CUDA graph.
    """

    name: str
    reads_device_only: bool

    def plan(self, batch: AttentionBatch) -> AttentionPlan: ...
