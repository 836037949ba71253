"""Attention through the flash-attn package (FlashAttention 2, arXiv:2307.08691): paged and variable-length calls."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from nanoinfer.attention.base import AttentionBatch, AttentionPlan
from nanoinfer.kernels.heads import HeadLayout, KVCache, QKNorm
from nanoinfer.kernels.kernel_set import KernelSet

PAGE_TOKENS = 256  # its paged kernels read pages of a multiple of this many tokens
MAX_HEAD_DIM = 256


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why flash-attn cannot serve an engine, or None if it can."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if importlib.util.find_spec("flash_attn") is None:
        return "the package is not installed (pip install flash-attn)"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > MAX_HEAD_DIM:
        return f"its heads have at most {MAX_HEAD_DIM} elements, not {head_dim}"
    if block_size % PAGE_TOKENS:
        return f"its block size is a multiple of {PAGE_TOKENS}, not {block_size}"
    return None


class FlashAttention:
    """Block sizes that are multiples of 256; bfloat16 and float16. cos_sin float32 [positions, head_dim]."""

    name = "flash-attn"
    reads_device_only = True

    def __init__(self, heads: HeadLayout, cos_sin: Tensor, kernels: KernelSet) -> None:
        self.heads = heads
        self.cos_sin = cos_sin
        self.kernels = kernels

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        return _Plan(self, batch)


class _Plan:
    """Decodes through the paged call, the tokens behind them through the variable-length one."""

    def __init__(self, backend: FlashAttention, batch: AttentionBatch) -> None:
        self._backend = backend
        self._batch = batch
        self._slots = batch.token_slots()
        first = batch.num_decodes
        self._has_prefills = len(batch.query_lens) > first
        if self._has_prefills:
            lengths = batch.context_lens[first:]
            self._cu_seqlens_q = batch.cu_seqlens_q[first:] - first
            self._cu_seqlens_k = torch.cat((lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)))
            self._max_queries = max(batch.query_lens[first:])
            self._has_history = any(batch.starts[first:])

    def run(self, qkv: Tensor, qk_norm: QKNorm, cache: KVCache, sample_at: Tensor | None = None) -> Tensor:
        backend, batch = self._backend, self._batch
        q, k, v = backend.kernels.qk_norm_rope_store(qkv, backend.heads, qk_norm, backend.cos_sin, self._slots, cache)
        parts = []
        if batch.num_decodes:
            parts.append(self._decode(q[: batch.num_decodes], cache))
        if self._has_prefills:
            first = batch.num_decodes
            parts.append(self._prefill(q[first:], k[first:], v[first:], cache))
        out = (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)
        return out if sample_at is None else out[sample_at]

    def _decode(self, q: Tensor, cache: KVCache) -> Tensor:
        from flash_attn import flash_attn_with_kvcache

        batch, count = self._batch, self._batch.num_decodes
        out: Tensor = flash_attn_with_kvcache(
            q.unsqueeze(1),
            *cache,
            cache_seqlens=batch.context_lens[:count],
            block_table=batch.block_tables[:count],
            softmax_scale=self._backend.heads.scale,
            causal=True,
        )
        return out.squeeze(1)

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache) -> Tensor:
        from flash_attn import flash_attn_varlen_func

        tables, max_keys = None, self._max_queries
        if self._has_history:
            k, v = cache
            tables = self._batch.block_tables[self._batch.num_decodes :]
            max_keys = tables.shape[1] * k.shape[1]
        out: Tensor = flash_attn_varlen_func(
            q,
            k,
            v,
            self._cu_seqlens_q,
            self._cu_seqlens_k,
            self._max_queries,
            max_keys,
            softmax_scale=self._backend.heads.scale,
            causal=True,
            block_table=tables,
        )
        return out
