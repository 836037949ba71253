"""Paged attention with torch's own operations: what runs on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.attention.base import AttentionBatch, AttentionPlan


class TorchAttention:
    """Attention back end of the CPU; any block size."""

    name = "torch"

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        return _Plan(batch, self._scale)


class _Plan:
    def __init__(self, batch: AttentionBatch, scale: float) -> None:
        self._scale = scale
        self._batch = batch
        self._masks: dict[int, Tensor] = {}

    def run(self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        out = torch.empty_like(q)
        batch = self._batch
        block_size = k_cache.shape[1]
        first = 0
        for i, (start, count) in enumerate(zip(batch.starts, batch.query_lens, strict=True)):
            tokens = slice(first, first + count)
            first += count
            if start == 0:
                out[tokens] = self._attend(q[tokens], k[tokens], v[tokens])
                continue
            length = start + count
            blocks = batch.block_tables[i, : -(-length // block_size)]
            keys = k_cache[blocks].flatten(0, 1)[:length]
            values = v_cache[blocks].flatten(0, 1)[:length]
            out[tokens] = self._attend(q[tokens], keys, values)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_queries, length = q.shape[0], k.shape[0]
        mask = None
        if 1 < num_queries < length:
            mask = torch.ones(num_queries, length, dtype=torch.bool, device=q.device).tril(length - num_queries)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            is_causal=1 < num_queries == length,
            scale=self._scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.squeeze(0).transpose(0, 1)
