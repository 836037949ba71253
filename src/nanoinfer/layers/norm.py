"""RMSNorm, with the residual addition that precedes it fused in."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.kernels.kernel_set import KernelSet
from nanoinfer.models.weights import WeightSlot


class RMSNorm:
    """Norm over the hidden dimension; `add` first adds the residual stream, which is carried beside the activations."""

    def __init__(self, size: int, eps: float, *, kernels: KernelSet, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps
        self._norm = kernels.rms_norm
        self._add_norm = kernels.add_rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), both [T, H]."""
        return self._add_norm(x, residual, self.weight, self.eps)

    def weight_slots(self, name: str) -> dict[str, WeightSlot]:
        return {f"{name}.weight": WeightSlot(self.weight, tuple(self.weight.shape))}
