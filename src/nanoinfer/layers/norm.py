"""RMSNorm's parameters; the computation is fused with the matrix that follows where a kernel set can do that."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.models.weights import WeightSlot


class Hidden(NamedTuple):
    """The residual stream, [T, H], and where it is known already its norm by the layer that reads it next."""

    residual: Tensor
    normed: Tensor | None = None


class RMSNorm:
    """Weight [H] and epsilon of a norm over the hidden dimension."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def weight_slots(self, name: str) -> dict[str, WeightSlot]:
        return {f"{name}.weight": WeightSlot(self.weight, tuple(self.weight.shape))}
