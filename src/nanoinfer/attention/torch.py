"""Paged attention with torch's own operations: what runs on a CPU. `reference.paged_attention` is its slow twin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.attention.base import AttentionBatch, AttentionPlan, HeadLayout, KVCache, QKNorm
from nanoinfer.kernels.kernel_set import KernelSet

# Decoding sequences are gathered together while their keys and values stay in the cache of the processor, and while
# padding them to one length wastes less than a further call costs (docs/decisions/021).
GROUP_BYTES = 4 << 20
GROUP_WASTED_TOKENS = 192
# Queries of a prefill chunk with history are taken so many at a time, which bounds the mask.
QUERY_TILE = 256


class TorchAttention:
    """Attention back end of the CPU; any block size. cos_sin float32 [positions, head_dim] is the rotary table."""

    name = "torch"
    reads_device_only = False

    def __init__(self, heads: HeadLayout, cos_sin: Tensor, kernels: KernelSet) -> None:
        self.heads = heads
        self.cos_sin = cos_sin
        self.kernels = kernels
        self.scratch = _Scratch()

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        return _Plan(self, batch)


class _Scratch:
    """Buffers for gathered keys and values, kept from step to step: fresh memory costs a page fault per 4 KiB."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def gather(self, which: str, cache: Tensor, blocks: Tensor) -> Tensor:
        """cache[blocks]; overwritten by the next call with the same `which`."""
        size = len(blocks) * cache[0].numel()
        buffer = self._buffers.get(which)
        if buffer is None or buffer.numel() < size or buffer.dtype != cache.dtype:
            buffer = self._buffers[which] = torch.empty(size, dtype=cache.dtype, device=cache.device)
        out = buffer[:size].view(len(blocks), *cache.shape[1:])
        return torch.index_select(cache, 0, blocks, out=out)


@dataclass(frozen=True)
class _DecodeGroup:
    """Sequences with one query each, padded to the longest: n sequences, L tokens."""

    sequences: Tensor  # int64 [n]; decodes come first in a step, so these are also the indices of their tokens
    blocks: Tensor  # int64 [n * L / block_size]
    mask: Tensor | None  # [n, 1, 1, L]: 0 or -inf; None for a single sequence
    padding: Tensor | None  # int64: which of the n * L gathered tokens are padding
    length: int  # L, or a single sequence's length


@dataclass(frozen=True)
class _Chunk:
    """A sequence of the step that computes tokens first .. first + count - 1, after `start` tokens of history."""

    first: int
    start: int
    count: int
    blocks: Tensor  # int64


class _Plan:
    def __init__(self, backend: TorchAttention, batch: AttentionBatch) -> None:
        self._backend = backend
        self._heads = backend.heads
        self._batch = batch
        self._groups: list[_DecodeGroup] | None = None  # made by the first layer, whose cache has the block size
        self._chunks: list[_Chunk] = []
        self._causal_mask: Tensor | None = None

    def run(self, qkv: Tensor, qk_norm: QKNorm | None, cache: KVCache) -> Tensor:
        batch, heads, (k_cache, v_cache) = self._batch, self._heads, cache
        q_weight, k_weight, eps = (qk_norm.q_weight, qk_norm.k_weight, qk_norm.eps) if qk_norm else (None, None, 0.0)
        q, k, v = self._backend.kernels.qk_norm_rope_store(
            qkv, q_weight, k_weight, eps, self._backend.cos_sin, batch.positions, k_cache, v_cache,
            batch.slot_mapping, heads.num_heads, heads.num_kv_heads, heads.head_dim,
        )  # fmt: skip
        if self._groups is None:
            self._groups = list(self._make_groups(k_cache))
            self._chunks = list(self._make_chunks(k_cache))
        if len(self._groups) == 1 and not self._chunks:
            return self._decode(self._groups[0], q, cache).reshape(len(q), -1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in self._groups:
            out[group.sequences] = self._decode(group, q[group.sequences], cache)
        for chunk in self._chunks:
            tokens = slice(chunk.first, chunk.first + chunk.count)
            if chunk.start == 0:
                out[tokens] = self._attend(q[tokens], k[tokens], v[tokens], is_causal=True)
            else:
                self._prefill_after_history(chunk, q, cache, out)
        return out.flatten(1)

    def _make_groups(self, k_cache: Tensor) -> Iterator[_DecodeGroup]:
        block_size = k_cache.shape[1]
        lengths = [start + 1 for start in self._batch.starts[: self._batch.num_decodes]]
        most_blocks = max(1, GROUP_BYTES // (2 * k_cache[0].numel() * k_cache.element_size()))
        group: list[int] = []
        wasted = 0
        for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
            longest = lengths[group[0]] if group else lengths[i]
            wasted += longest - lengths[i]
            fits = (len(group) + 1) * -(-longest // block_size) <= most_blocks
            if group and (not fits or wasted > GROUP_WASTED_TOKENS):
                yield self._make_group(group, lengths, k_cache)
                group, wasted = [], 0
            group.append(i)
        if group:
            yield self._make_group(group, lengths, k_cache)

    def _make_group(self, members: list[int], lengths: list[int], k_cache: Tensor) -> _DecodeGroup:
        block_size = k_cache.shape[1]
        members.sort()
        tables, device = self._batch.block_tables, self._batch.block_tables.device
        sequences = torch.tensor(members, device=device)
        length = torch.tensor([lengths[i] for i in members], device=device)
        longest = max(lengths[i] for i in members)
        blocks = tables[sequences, : -(-longest // block_size)].long()
        if len(members) == 1:
            return _DecodeGroup(sequences, blocks[0], None, None, longest)
        # Unused entries of a table name blocks of anyone; a sequence's own first block is at least no one else's.
        unused = torch.arange(blocks.shape[1], device=device) * block_size >= length[:, None]
        blocks = torch.where(unused, blocks[:, :1], blocks)
        width = blocks.shape[1] * block_size
        is_padding = torch.arange(width, device=device) >= length[:, None]
        mask = torch.zeros(is_padding.shape, dtype=k_cache.dtype, device=device).masked_fill_(is_padding, float("-inf"))
        padding = is_padding.flatten().nonzero().squeeze(1)
        return _DecodeGroup(sequences, blocks.flatten(), mask[:, None, None, :], padding, width)

    def _make_chunks(self, k_cache: Tensor) -> Iterator[_Chunk]:
        batch, block_size = self._batch, k_cache.shape[1]
        firsts = accumulate(batch.query_lens, initial=0)
        for i, (first, start, count) in enumerate(zip(firsts, batch.starts, batch.query_lens, strict=False)):
            if i >= batch.num_decodes:
                yield _Chunk(first, start, count, batch.block_tables[i, : -(-(start + count) // block_size)].long())

    def _decode(self, group: _DecodeGroup, q: Tensor, cache: KVCache) -> Tensor:
        """q [n, heads, D] -> [n, heads, D]. The query heads of a KV head are the rows of one small matrix."""
        heads = self._heads
        gather = self._backend.scratch.gather
        k, v = gather("k", cache[0], group.blocks), gather("v", cache[1], group.blocks)
        if group.padding is not None and len(group.padding):
            # The mask hides finite numbers only: an infinity left in a block by another request would come through.
            for tensor in (k, v):
                tensor.view(-1, heads.num_kv_heads, heads.head_dim).index_fill_(0, group.padding, 0)
        shape = (len(q), -1, heads.num_kv_heads, heads.head_dim)
        out = F.scaled_dot_product_attention(
            q.view(len(q), heads.num_kv_heads, -1, heads.head_dim),
            k.view(shape)[:, : group.length].transpose(1, 2),
            v.view(shape)[:, : group.length].transpose(1, 2),
            attn_mask=group.mask,
            scale=heads.scale,
        )
        return out.reshape(q.shape)

    def _prefill_after_history(self, chunk: _Chunk, q: Tensor, cache: KVCache, out: Tensor) -> None:
        heads, length = self._heads, chunk.start + chunk.count
        gather = self._backend.scratch.gather
        k, v = (
            gather(name, tensor, chunk.blocks).view(-1, heads.num_kv_heads, heads.head_dim)
            for name, tensor in (("k", cache[0]), ("v", cache[1]))
        )
        mask = self._mask(length, q)
        for start in range(chunk.start, length, QUERY_TILE):
            stop = min(start + QUERY_TILE, length)
            tokens = slice(chunk.first + start - chunk.start, chunk.first + stop - chunk.start)
            tile_mask = mask[QUERY_TILE - (stop - start) :, mask.shape[1] - stop :]
            out[tokens] = self._attend(q[tokens], k[:stop], v[:stop], mask=tile_mask)

    def _mask(self, length: int, q: Tensor) -> Tensor:
        """[QUERY_TILE, at least length]: the last QUERY_TILE queries' causal mask, of which tiles take a corner."""
        if self._causal_mask is None:
            longest = max(chunk.start + chunk.count for chunk in self._chunks)
            mask = torch.full((QUERY_TILE, max(longest, QUERY_TILE)), float("-inf"), dtype=q.dtype, device=q.device)
            self._causal_mask = mask.triu_(max(longest, QUERY_TILE) - QUERY_TILE + 1)
        assert self._causal_mask.shape[1] >= length, (self._causal_mask.shape, length)
        return self._causal_mask

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """One sequence: q [Tq, heads, D], k and v [Tk, kv_heads, D] -> like q."""
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            is_causal=is_causal,
            scale=self._heads.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.squeeze(0).transpose(0, 1)
