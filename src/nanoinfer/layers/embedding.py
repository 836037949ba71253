"""Token embedding and the LM head, which share one matrix where the model ties them; both are cut by token id."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.kernel_set import KernelSet
from nanoinfer.layers.group import ALONE, Group
from nanoinfer.layers.norm import RMSNorm
from nanoinfer.models.weights import WeightSlot


class Embedding:
    """Rows of the embedding [V, H] by token id; `weight` has this rank's rows."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        kernels: KernelSet,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = ALONE,
    ) -> None:
        self._span = group.partition.vocabulary(vocab_size)
        self.weight = torch.empty(len(self._span), hidden_size, dtype=dtype, device=device)
        self._kernels = kernels
        self._group = group

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, H]."""
        if self._span.is_whole:
            return self._kernels.embed(token_ids, self.weight)
        return self._group.all_reduce(self._kernels.embed_part(token_ids, self.weight, self._span.start))

    def weight_slots(self, name: str) -> dict[str, WeightSlot]:
        shape = (self._span.size, self.weight.shape[1])
        return {f"{name}.weight": WeightSlot(self.weight, shape, self._span.shard(0))}


class LMHead:
    """Logits of hidden states: x @ weight.T with this rank's rows of the whole matrix [V, H].

    Tied models pass the embedding's own weight, so memory is shared.
    """

    def __init__(self, weight: Tensor, vocab_size: int, *, kernels: KernelSet, group: Group = ALONE) -> None:
        self.weight = weight
        self._span = group.partition.vocabulary(vocab_size)
        self._stride = group.partition.vocabulary_stride(vocab_size)
        self._kernels = kernels
        self._group = group

    def after_norm(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """Of the normed hidden states [S, H] -> float32 [S, V], on every rank."""
        logits = self._kernels.head_logits(hidden, norm.weight, norm.eps, self.weight)
        if not self._span.is_whole:
            # The last ranks may have fewer columns. What pads them comes after all real ones, and is cut off.
            if missing := self._stride - len(self._span):
                logits = F.pad(logits, (0, missing))
            logits = self._group.all_gather(logits).transpose(0, 1).flatten(1)[:, : self._span.size]
        return logits.float()

    def sample_after_norm(
        self, hidden: Tensor, norm: RMSNorm, temperatures: Tensor, seeds: Tensor, token_indices: Tensor
    ) -> Tensor:
        """A token drawn from the logits of each row: [S, H] -> int64 [S].

        Ranks exchange the best score of their part and its token, nothing else: 8 bytes per row.
        """
        token_ids, scores = self._kernels.head_best(
            hidden, norm.weight, norm.eps, self.weight, temperatures, seeds, token_indices, self._span.start
        )
        if self._span.is_whole:
            return token_ids
        pairs = self._group.all_gather(torch.stack((scores.view(torch.int32), token_ids.to(torch.int32))))
        # argmax takes the first of equals, and ranks are in the order of token ids.
        winner = pairs[:, 0].view(torch.float32).argmax(dim=0, keepdim=True)
        return pairs[:, 1].gather(0, winner).squeeze(0).to(torch.int64)

    def weight_slots(self, name: str) -> dict[str, WeightSlot]:
        shape = (self._span.size, self.weight.shape[1])
        return {f"{name}.weight": WeightSlot(self.weight, shape, self._span.shard(0))}
