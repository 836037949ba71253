"""Steps of decodes and prefill chunks over scattered blocks, and what the slow twin makes of them."""

from __future__ import annotations

import random

import torch

from nanoinfer.attention.base import AttentionBatch
from nanoinfer.kernels import reference
from nanoinfer.kernels.kernel_set import KernelSet

DECODES = [(n, 1) for n in (0, 1, 14, 15, 16, 17, 40, 300)]  # (history, queries)
CHUNKS = [(0, 1), (0, 5), (0, 33), (16, 16), (5, 3), (31, 2), (300, 17), (1, 300), (260, 300)]


class StoreOnly(KernelSet):
    """No norm and no rotation, so that q, k and v are what the test made."""

    def qk_norm_rope_store(self, qkv, heads, norm, cos_sin, step, cache):
        num_heads, num_kv_heads, head_dim = heads.counts
        split = qkv.view(len(qkv), -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        reference.store_kv(split[1], split[2], *cache, step.slot_mapping)
        return split


def make_case(work, num_decodes, heads, block_size, dtype=torch.float32, seed=0):
    """Random caches and a step over (history, queries) sequences, whose blocks are scattered over the pool."""
    torch.manual_seed(seed)
    num_heads, num_kv_heads, head_dim = heads
    lengths = [start + count for start, count in work]
    needed = [-(-length // block_size) for length in lengths]
    pool = list(range(sum(needed) + 3))
    random.Random(seed).shuffle(pool)
    tables = torch.full((len(work), max(needed)), pool[0], dtype=torch.int32)  # entries beyond a row: a foreign block
    free = pool[1:]
    for i, count in enumerate(needed):
        tables[i, :count] = torch.tensor([free.pop() for _ in range(count)])
    caches = tuple(torch.randn(len(pool), block_size, num_kv_heads, head_dim).to(dtype) for _ in range(2))
    positions = torch.cat([torch.arange(start, start + count) for start, count in work])
    rows = torch.repeat_interleave(torch.arange(len(work)), torch.tensor([count for _, count in work]))
    slots = tables[rows, positions // block_size].long() * block_size + positions % block_size
    qkv = torch.randn(len(positions), (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    batch = AttentionBatch(
        positions=positions,
        slot_mapping=slots,
        cu_seqlens_q=torch.tensor([0, *torch.tensor([c for _, c in work]).cumsum(0)], dtype=torch.int32),
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=tables,
        starts=[start for start, _ in work],
        query_lens=[count for _, count in work],
        num_decodes=num_decodes,
    )
    return qkv, batch, caches


def twin(qkv, batch, caches, heads):
    q = qkv.view(len(qkv), -1, heads[2])[:, : heads[0]]
    return reference.paged_attention(
        q, *caches, batch.block_tables, batch.cu_seqlens_q, batch.context_lens, heads[2] ** -0.5
    )
