"""Token embedding and the LM head, which share one matrix where the model ties them."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.kernels.kernel_set import KernelSet
from nanoinfer.layers.norm import RMSNorm
from nanoinfer.models.weights import WeightSlot


class Embedding:
    """Rows of `weight` [V, H] by token id."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, kernels: KernelSet, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self._kernels = kernels

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, H]."""
        return self._kernels.embed(token_ids, self.weight)

    def weight_slots(self, name: str) -> dict[str, WeightSlot]:
        return {f"{name}.weight": WeightSlot(self.weight, tuple(self.weight.shape))}


class LMHead:
    """Logits of hidden states: x @ weight.T. Tied models pass the embedding's own weight, so memory is shared."""

    def __init__(self, weight: Tensor, *, kernels: KernelSet) -> None:
        self.weight = weight
        self._kernels = kernels

    def after_norm(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """Of the normed hidden states [S, H] -> float32 [S, V]."""
        return self._kernels.norm_linear(hidden, norm.weight, norm.eps, self.weight, None).float()

    def sample_after_norm(
        self, hidden: Tensor, norm: RMSNorm, temperatures: Tensor, seeds: Tensor, token_indices: Tensor
    ) -> Tensor:
        """A token drawn from the logits of each row: [S, H] -> int64 [S]."""
        return self._kernels.head_sample(hidden, norm.weight, norm.eps, self.weight, temperatures, seeds, token_indices)

    def weight_slots(self, name: str) -> dict[str, WeightSlot]:
        return {f"{name}.weight": WeightSlot(self.weight, tuple(self.weight.shape))}
