"""Paged attention with torch's own operations, on any device. `reference.paged_attention` is its slow twin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.attention.base import AttentionBatch, AttentionPlan
from nanoinfer.kernels.heads import HeadLayout, KVCache, QKNorm
from nanoinfer.kernels.kernel_set import KernelSet

# Decoding sequences are gathered together while their keys and values stay in the cache of the processor, and while
# padding them to one length wastes less than a further call costs (docs/decisions/021).
GROUP_BYTES = 4 << 20
GROUP_WASTED_TOKENS = 192
# Queries of a prefill chunk with history are taken so many at a time, which bounds the mask.
QUERY_TILE = 256


class TorchAttention:
    """What runs where no other back end can, and for the prompts of numba's; any block size.

    cos_sin float32 [positions, head_dim] is the rotary table.
    """

    name = "torch"
    reads_device_only = False

    def __init__(self, heads: HeadLayout, cos_sin: Tensor, kernels: KernelSet) -> None:
        self.heads = heads
        self.cos_sin = cos_sin
        self.kernels = kernels
        self.scratch = _Scratch()

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        return TorchPlan(self, batch)


class _Scratch:
    """Buffers for gathered keys and values, kept from step to step: fresh memory costs a page fault per 4 KiB."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, which: str, cache: Tensor, num_blocks: int) -> Tensor:
        """Room for `num_blocks` blocks of `cache`; the same memory at every call with the same `which`."""
        size = num_blocks * cache[0].numel()
        buffer = self._buffers.get(which)
        if buffer is None or buffer.numel() < size or buffer.dtype != cache.dtype:
            buffer = self._buffers[which] = torch.empty(size, dtype=cache.dtype, device=cache.device)
        return buffer[:size].view(num_blocks, *cache.shape[1:])


class _History:
    """Where the keys and values of some sequences of one length lie, in every layer: n sequences, L tokens.

    Consecutive blocks of one sequence are read in place; others are copied together first.
    """

    def __init__(self, blocks: list[list[int]], length: int, cache: KVCache, scratch: _Scratch) -> None:
        flat = [block for table in blocks for block in table]
        _, block_size, kv_heads, head_dim = cache[0].shape
        token = kv_heads * head_dim
        self._size = (len(blocks), kv_heads, length, head_dim)
        self._stride = (len(blocks[0]) * block_size * token, head_dim, token, 1)
        self._first = flat[0] * block_size * token
        self._in_place = len(blocks) == 1 and flat == list(range(flat[0], flat[0] + len(flat)))
        if not self._in_place:
            self._blocks = torch.tensor(flat, device=cache[0].device)
            self._copies = [scratch.take(which, c, len(flat)) for which, c in zip("kv", cache, strict=True)]
            self._views = [copy.as_strided(self._size, self._stride) for copy in self._copies]

    def read(self, cache: KVCache, padding: Tensor | None = None) -> list[Tensor]:
        """Keys and values [n, kv_heads, L, D], valid until the next read; `padding` int64: tokens of n * L to zero."""
        if self._in_place:
            return [c.as_strided(self._size, self._stride, c.storage_offset() + self._first) for c in cache]
        for source, copy in zip(cache, self._copies, strict=True):
            torch.index_select(source, 0, self._blocks, out=copy)
            if padding is not None:
                copy.view(-1, *copy.shape[2:]).index_fill_(0, padding, 0)
        return self._views


@dataclass(frozen=True)
class _DecodeGroup:
    """Sequences with one query each, padded to the longest: n sequences, L tokens."""

    sequences: Tensor  # int64 [n]; decodes come first in a step, so these are also the indices of their tokens
    history: _History
    mask: Tensor | None  # [n, 1, 1, L]: 0 or -inf; None for a single sequence
    padding: Tensor | None  # int64: which of the n * L tokens are padding


@dataclass(frozen=True)
class _Chunk:
    """A sequence of the step that computes tokens first .. first + count - 1, after `start` tokens of history."""

    first: int
    start: int
    count: int
    history: _History | None  # None where start is 0: all keys and values are this step's own


class TorchPlan:
    """Decodes in groups of like length, prefill chunks one by one."""

    def __init__(self, backend: TorchAttention, batch: AttentionBatch) -> None:
        self._backend = backend
        self._heads = backend.heads
        self._batch = batch
        self._slots = batch.token_slots()
        # Made by the first layer, whose cache has the block size.
        self._groups: list[_DecodeGroup] | None = None
        self._chunks: list[_Chunk] | None = None
        self._causal_mask: Tensor | None = None

    def run(self, qkv: Tensor, qk_norm: QKNorm, cache: KVCache, sample_at: Tensor | None = None) -> Tensor:
        out = self._attend_all(qkv, qk_norm, cache)
        return out if sample_at is None else out[sample_at]

    def _attend_all(self, qkv: Tensor, qk_norm: QKNorm, cache: KVCache) -> Tensor:
        batch, heads, backend = self._batch, self._heads, self._backend
        q, k, v = backend.kernels.qk_norm_rope_store(qkv, heads, qk_norm, backend.cos_sin, self._slots, cache)
        if self._chunks is None:
            self._chunks = list(self._make_chunks(cache))
        num_decodes = batch.num_decodes
        if not self._chunks:
            return self._decode(q, cache)
        out = torch.empty(q.shape[0], heads.num_heads * heads.head_dim, dtype=q.dtype, device=q.device)
        if num_decodes:
            out[:num_decodes] = self._decode(q[:num_decodes], cache)
        for chunk in self._chunks:
            tokens = slice(chunk.first, chunk.first + chunk.count)
            if chunk.history is None:
                keys, values = k[tokens].transpose(0, 1)[None], v[tokens].transpose(0, 1)[None]
                out[tokens] = self._attend(q[tokens], keys, values, is_causal=True)
            else:
                self._prefill_after_history(chunk, chunk.history.read(cache), q, out)
        return out

    def _make_groups(self, cache: KVCache) -> Iterator[_DecodeGroup]:
        k_cache, block_size = cache[0], cache[0].shape[1]
        lengths = [start + 1 for start in self._batch.starts[: self._batch.num_decodes]]
        most_blocks = max(1, GROUP_BYTES // (2 * k_cache[0].numel() * k_cache.element_size()))
        group: list[int] = []
        wasted = 0
        for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
            longest = lengths[group[0]] if group else lengths[i]
            wasted += longest - lengths[i]
            fits = (len(group) + 1) * -(-longest // block_size) <= most_blocks
            if group and (not fits or wasted > GROUP_WASTED_TOKENS):
                yield self._make_group(sorted(group), lengths, cache)
                group, wasted = [], 0
            group.append(i)
        if group:
            yield self._make_group(sorted(group), lengths, cache)

    def _make_group(self, members: list[int], lengths: list[int], cache: KVCache) -> _DecodeGroup:
        tables, block_size, scratch = self._batch.block_tables, cache[0].shape[1], self._backend.scratch
        device = tables.device
        sequences = torch.tensor(members, device=device)
        length = torch.tensor([lengths[i] for i in members], device=device)
        num_blocks = -(-max(lengths[i] for i in members) // block_size)
        blocks = tables[sequences, :num_blocks]
        if len(members) == 1:
            history = _History(blocks.tolist(), lengths[members[0]], cache, scratch)
            return _DecodeGroup(sequences, history, None, None)
        # Unused entries of a table name blocks of anyone; a sequence's own first block is at least no one else's.
        unused = torch.arange(num_blocks, device=device) * block_size >= length[:, None]
        blocks = torch.where(unused, blocks[:, :1], blocks)
        # The mask hides finite numbers only: an infinity left in a block by another request would come through, so
        # padding is zeroed too.
        is_padding = torch.arange(num_blocks * block_size, device=device) >= length[:, None]
        mask = torch.zeros(is_padding.shape, dtype=cache[0].dtype, device=device)
        mask.masked_fill_(is_padding, float("-inf"))
        padding = is_padding.flatten().nonzero().squeeze(1)
        history = _History(blocks.tolist(), num_blocks * block_size, cache, scratch)
        return _DecodeGroup(sequences, history, mask[:, None, None, :], padding if len(padding) else None)

    def _make_chunks(self, cache: KVCache) -> Iterator[_Chunk]:
        batch, block_size = self._batch, cache[0].shape[1]
        firsts = accumulate(batch.query_lens, initial=0)
        for i, (first, start, count) in enumerate(zip(firsts, batch.starts, batch.query_lens, strict=False)):
            if i < batch.num_decodes:
                continue
            history = None
            if start:
                blocks = batch.block_tables[i, : -(-(start + count) // block_size)].tolist()
                history = _History([blocks], start + count, cache, self._backend.scratch)
            yield _Chunk(first, start, count, history)

    def _decode(self, q: Tensor, cache: KVCache) -> Tensor:
        """The sequences with one query each: q [B, heads, D] -> [B, heads * D]."""
        if self._groups is None:
            self._groups = list(self._make_groups(cache))
        if len(self._groups) == 1:
            return self._decode_group(self._groups[0], q, cache)
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        for group in self._groups:
            out[group.sequences] = self._decode_group(group, q[group.sequences], cache)
        return out

    def _decode_group(self, group: _DecodeGroup, q: Tensor, cache: KVCache) -> Tensor:
        """q [n, heads, D] -> [n, heads * D]. The query heads of a KV head are the rows of one small matrix."""
        heads = self._heads
        k, v = group.history.read(cache, group.padding)
        q = q.view(q.shape[0], heads.num_kv_heads, -1, heads.head_dim)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=heads.scale)
        return out.reshape(q.shape[0], -1)

    def _prefill_after_history(self, chunk: _Chunk, keys_values: list[Tensor], q: Tensor, out: Tensor) -> None:
        length = chunk.start + chunk.count
        k, v = keys_values
        mask = self._mask(length, q)
        for start in range(chunk.start, length, QUERY_TILE):
            stop = min(start + QUERY_TILE, length)
            tokens = slice(chunk.first + start - chunk.start, chunk.first + stop - chunk.start)
            tile_mask = mask[QUERY_TILE - (stop - start) :, mask.shape[1] - stop :]
            out[tokens] = self._attend(q[tokens], k[:, :, :stop], v[:, :, :stop], mask=tile_mask)

    def _mask(self, length: int, q: Tensor) -> Tensor:
        """[QUERY_TILE, at least length]: the last QUERY_TILE queries' causal mask, of which tiles take a corner."""
        if self._causal_mask is None:
            assert self._chunks is not None
            longest = max(chunk.start + chunk.count for chunk in self._chunks)
            mask = torch.full((QUERY_TILE, max(longest, QUERY_TILE)), float("-inf"), dtype=q.dtype, device=q.device)
            self._causal_mask = mask.triu_(max(longest, QUERY_TILE) - QUERY_TILE + 1)
        assert self._causal_mask.shape[1] >= length, (self._causal_mask.shape, length)
        return self._causal_mask

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """One sequence: q [Tq, heads, D], k and v [1, kv_heads, Tk, D] -> [Tq, heads * D]."""
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k,
            v,
            attn_mask=mask,
            is_causal=is_causal,
            scale=self._heads.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.squeeze(0).transpose(0, 1).flatten(1)
