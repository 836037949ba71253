"""How a layer's query, key and value heads lie in memory: what attention back ends and kernel sets agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

KVCache = tuple[Tensor, Tensor]  # keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim]


@dataclass(frozen=True)
class HeadLayout:
    """The heads of a model (of one rank's share of it) and the scale of their scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float

    @property
    def counts(self) -> tuple[int, int, int]:
        """num_heads, num_kv_heads, head_dim."""
        return self.num_heads, self.num_kv_heads, self.head_dim


@dataclass(frozen=True)
class QKNorm:
    """Weights [head_dim] of the norms over each query and key head (Qwen3); None where a model has no such norm."""

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float


NO_QK_NORM = QKNorm(None, None, 0.0)


class TokenSlots(NamedTuple):
    """Where the tokens of a step stand in their sequences, and where their keys and values go. Both int64 [T]."""

    positions: Tensor
    slot_mapping: Tensor  # -1: nowhere
