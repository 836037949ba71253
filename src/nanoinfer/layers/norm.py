"""RMSNorm's parameters; the computation is fused with the matrix that follows where a kernel set can do that."""

from __future__ import annotations

import torch

from nanoinfer.models.weights import WeightSlot


class RMSNorm:
    """Weight [H] and epsilon of a norm over the hidden dimension."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def weight_slots(self, name: str) -> dict[str, WeightSlot]:
        return {f"{name}.weight": WeightSlot(self.weight, tuple(self.weight.shape))}
