"""Attention on a CPU with numba: decoding sequences by our kernel, which reads the paged cache; prompts by torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nanoinfer.attention.base import AttentionBatch, AttentionPlan
from nanoinfer.attention.torch import TorchAttention, TorchPlan
from nanoinfer.kernels.heads import HeadLayout, KVCache
from nanoinfer.kernels.numba_set import NumbaKernels, as_array


class NumbaAttention(TorchAttention):
    """Attention back end beside NumbaKernels; any block size. Plans are made once those are compiled."""

    name = "numba"

    def __init__(self, heads: HeadLayout, cos_sin: Tensor, kernels: NumbaKernels) -> None:
        super().__init__(heads, cos_sin, kernels)
        self.numba_kernels = kernels

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        return _NumbaPlan(self, batch, self.numba_kernels)


class _NumbaPlan(TorchPlan):
    def __init__(self, backend: TorchAttention, batch: AttentionBatch, kernels: NumbaKernels) -> None:
        super().__init__(backend, batch)
        self._block_tables = as_array(batch.block_tables)
        self._context_lens = as_array(batch.context_lens[: batch.num_decodes])
        self._kernels = kernels

    def _decode(self, q: Tensor, cache: KVCache) -> Tensor:
        out = np.empty(q.shape, np.float32)
        self._kernels.paged_decode(
            as_array(q), as_array(cache[0]), as_array(cache[1]), self._block_tables, self._context_lens,
            self._heads.scale, out, self._kernels.num_threads,
        )  # fmt: skip
        return torch.from_numpy(out).view(len(q), -1)
