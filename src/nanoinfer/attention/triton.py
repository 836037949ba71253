"""Attention on CUDA through our own Triton kernels: split-KV paged decode, and prefill with or without history."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.attention.base import AttentionBatch, AttentionPlan
from nanoinfer.kernels.decode_attention import decode_attention, fused_decode_attention
from nanoinfer.kernels.decode_splits import DecodeWorkspace, is_small, split_tokens
from nanoinfer.kernels.few_decodes_attention import few_decodes_attention
from nanoinfer.kernels.heads import HeadLayout, KVCache, QKNorm
from nanoinfer.kernels.kernel_set import KernelSet
from nanoinfer.kernels.prefill_attention import paged_prefill_attention, prefill_attention

TILE_KEYS = 64  # blocks that hold whole tiles are read from the cache as fast as contiguous memory, or faster (H200)
WORTH_LEAVING_OUT = 512  # tokens of a step from which on attention of those that are not sampled costs something


class TritonAttention:
    """Block sizes of 16 and more. cos_sin float32 [positions, head_dim]; at most max_num_seqs decodes in a step."""

    name = "triton"
    reads_device_only = True

    def __init__(self, heads: HeadLayout, cos_sin: Tensor, kernels: KernelSet, max_num_seqs: int) -> None:
        self.heads = heads
        self.cos_sin = cos_sin
        self.kernels = kernels
        self.workspace = DecodeWorkspace.for_batches(
            max_num_seqs, heads.num_heads, heads.num_kv_heads, heads.head_dim, cos_sin.device
        )

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        return _Plan(self, batch)


class _Plan:
    """Decodes by the fused kernel, the tokens behind them as prefill chunks.

    In the last layer of a large step, each sampled token as a decode (decision 065).
    """

    def __init__(self, backend: TritonAttention, batch: AttentionBatch) -> None:
        self._backend = backend
        self._batch = batch
        first = batch.num_decodes
        if first:
            self._split_tokens = split_tokens(batch.context_lens[:first], backend.heads.num_kv_heads)
        self._has_prefills = len(batch.query_lens) > first
        if self._has_prefills:
            # Cumulative lengths counted from the first prefill token.
            self._cu_seqlens_q = batch.cu_seqlens_q[first:] - first
            self._prefill_slots = batch.token_slots(first)
            self._max_queries = max(batch.query_lens[first:])
            self._has_history = any(batch.starts[first:])

    def run(self, qkv: Tensor, qk_norm: QKNorm, cache: KVCache, sample_at: Tensor | None = None) -> Tensor:
        decodes = self._batch.num_decodes
        if sample_at is not None and self._has_prefills and len(qkv) >= WORTH_LEAVING_OUT:
            return self._attend_at(sample_at, qkv, qk_norm, cache).flatten(1)
        if not self._has_prefills:
            out = self._decode(qkv, qk_norm, cache)
        elif not decodes:
            out = self._prefill(qkv, qk_norm, cache)
        else:
            out = torch.cat((self._decode(qkv[:decodes], qk_norm, cache), self._prefill(qkv[decodes:], qk_norm, cache)))
        return out.flatten(1) if sample_at is None else out[sample_at].flatten(1)

    def _attend_at(self, sample_at: Tensor, qkv: Tensor, qk_norm: QKNorm, cache: KVCache) -> Tensor:
        """A decode of each of these tokens, once the keys and values of all are in the cache."""
        backend, batch, heads = self._backend, self._batch, self._backend.heads
        q, _, _ = backend.kernels.qk_norm_rope_store(
            qkv, heads, qk_norm, backend.cos_sin, batch.token_slots(), cache
        )  # fmt: skip
        # Of padding it is the first one, or where all are empty the one behind the last.
        sequences = torch.searchsorted(batch.cu_seqlens_q[1:], sample_at.to(torch.int32), right=True)
        sequences.clamp_(max=len(batch.context_lens) - 1)
        return decode_attention(
            q[sample_at],
            *cache,
            batch.block_tables[sequences],
            batch.context_lens[sequences].masked_fill_(sample_at < 0, 0),
            heads.scale,
            backend.workspace,
        )

    def _decode(self, qkv: Tensor, qk_norm: QKNorm, cache: KVCache) -> Tensor:
        backend, batch, heads, count = self._backend, self._batch, self._backend.heads, self._batch.num_decodes
        inputs = (
            qkv, qk_norm.q_weight, qk_norm.k_weight, qk_norm.eps, backend.cos_sin, *cache, batch.slot_mapping[:count],
            batch.block_tables[:count], batch.context_lens[:count], heads.scale, heads.num_heads, backend.workspace,
        )  # fmt: skip
        if is_small(count, heads.num_kv_heads, qkv.device):
            return few_decodes_attention(*inputs)
        return fused_decode_attention(*inputs, split_tokens=self._split_tokens)

    def _prefill(self, qkv: Tensor, qk_norm: QKNorm, cache: KVCache) -> Tensor:
        backend, batch, heads, first = self._backend, self._batch, self._backend.heads, self._batch.num_decodes
        q, k, v = backend.kernels.qk_norm_rope_store(qkv, heads, qk_norm, backend.cos_sin, self._prefill_slots, cache)
        if not self._has_history and cache[0].shape[1] % TILE_KEYS:
            return prefill_attention(q, k, v, self._cu_seqlens_q, self._max_queries, heads.scale)
        return paged_prefill_attention(
            q, *cache, batch.block_tables[first:], self._cu_seqlens_q, batch.context_lens[first:],
            self._max_queries, heads.scale,
        )  # fmt: skip
