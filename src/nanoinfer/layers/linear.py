"""Linear layers; several that read the same input are fused into one matrix, which costs one multiplication."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.kernels.kernel_set import KernelSet
from nanoinfer.layers.norm import RMSNorm
from nanoinfer.models.weights import WeightSlot


class Linear:
    """y = x @ weight.T + bias, with the output rows of one or more checkpoint tensors stacked in `weight`.

    `parts` maps the name of each stacked layer ("q_proj") to its number of output features, in order.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        kernels: KernelSet,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        out_features = sum(parts.values())
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._parts = parts
        self._kernels = kernels

    def after_norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Of the normed x: [T, in] -> [T, out]."""
        return self._kernels.norm_linear(x, norm.weight, norm.eps, self.weight, self.bias)

    def swiglu_after_norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """With two parts, gate and up: silu(gate) * up of the normed x: [T, in] -> [T, out / 2]."""
        return self._kernels.norm_swiglu(x, norm.weight, norm.eps, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [T, out] + what x [T, in] gives."""
        return self._kernels.linear_add(x, self.weight, self.bias, residual)

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The checkpoint tensors `prefix.PART.weight` (and `.bias`), each a view of its rows."""
        slots = {}
        start = 0
        for name, size in self._parts.items():
            rows = self.weight[start : start + size]
            slots[f"{prefix}.{name}.weight"] = WeightSlot(rows, tuple(rows.shape))
            if self.bias is not None:
                slots[f"{prefix}.{name}.bias"] = WeightSlot(self.bias[start : start + size], (size,))
            start += size
        return slots
