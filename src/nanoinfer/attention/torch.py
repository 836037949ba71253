"""Paged attention with torch's own operations: what runs on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.attention.base import AttentionBatch, AttentionPlan, HeadLayout, KVCache, QKNorm
from nanoinfer.kernels.kernel_set import KernelSet


class TorchAttention:
    """Attention back end of the CPU; any block size. cos_sin float32 [positions, head_dim] is the rotary table."""

    name = "torch"
    reads_device_only = False

    def __init__(self, heads: HeadLayout, cos_sin: Tensor, kernels: KernelSet) -> None:
        self.heads = heads
        self.cos_sin = cos_sin
        self.kernels = kernels

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        return _Plan(self, batch)


class _Plan:
    def __init__(self, backend: TorchAttention, batch: AttentionBatch) -> None:
        self._backend = backend
        self._heads = backend.heads
        self._batch = batch

    def run(self, qkv: Tensor, qk_norm: QKNorm | None, cache: KVCache) -> Tensor:
        batch, heads, (k_cache, v_cache) = self._batch, self._heads, cache
        q_weight, k_weight, eps = (qk_norm.q_weight, qk_norm.k_weight, qk_norm.eps) if qk_norm else (None, None, 0.0)
        q, k, v = self._backend.kernels.qk_norm_rope_store(
            qkv, q_weight, k_weight, eps, self._backend.cos_sin, batch.positions, k_cache, v_cache,
            batch.slot_mapping, heads.num_heads, heads.num_kv_heads, heads.head_dim,
        )  # fmt: skip
        out = torch.empty_like(q)
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
        return out.flatten(1)

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
            scale=self._heads.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.squeeze(0).transpose(0, 1)
