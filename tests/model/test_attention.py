"""The torch back end against its slow twin: GQA ratios, head and block sizes, history, ragged and poisoned batches."""

from __future__ import annotations

import pytest
import torch
from attention_cases import CHUNKS, DECODES, StoreOnly, make_case, twin

from nanoinfer.attention import torch as torch_attention
from nanoinfer.attention.torch import TorchAttention
from nanoinfer.kernels.heads import NO_QK_NORM, HeadLayout


def run(qkv, batch, caches, heads):
    backend = TorchAttention(HeadLayout(*heads, scale=heads[2] ** -0.5), torch.empty(0), StoreOnly())
    return backend.plan(batch).run(qkv, NO_QK_NORM, caches).view(len(qkv), heads[0], heads[2])


@pytest.mark.parametrize("block_size", [16, 32, 256])
@pytest.mark.parametrize("heads", [(3, 3, 64), (4, 2, 128), (9, 3, 64), (7, 1, 80), (8, 1, 96)], ids=str)
@pytest.mark.parametrize("work", [DECODES, CHUNKS, DECODES + CHUNKS, DECODES[:1], CHUNKS[:1], CHUNKS[-1:]])
def test_equals_the_slow_twin(work, heads, block_size):
    num_decodes = len([w for w in work if w in DECODES]) if work[0] in DECODES else 0
    qkv, batch, caches = make_case(work, num_decodes, heads, block_size)
    out = run(qkv, batch, caches, heads)
    torch.testing.assert_close(out, twin(qkv, batch, caches, heads), atol=2e-5, rtol=1e-4)


def test_bfloat16_is_close_to_the_slow_twin():
    heads = (9, 3, 64)
    qkv, batch, caches = make_case(DECODES + CHUNKS, len(DECODES), heads, 16, torch.bfloat16)
    out = run(qkv, batch, caches, heads)
    torch.testing.assert_close(out, twin(qkv, batch, caches, heads), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("limit", ["GROUP_BYTES", "GROUP_WASTED_TOKENS"])
def test_groups_of_decodes_change_nothing(monkeypatch, limit):
    heads, work = (4, 2, 64), [(n, 1) for n in (5, 90, 3, 91, 17, 88, 40, 41)]
    qkv, batch, caches = make_case(work, len(work), heads, 16)
    run(qkv, batch, caches, heads)  # puts this step's keys and values into the cache
    expected = twin(qkv, batch, caches, heads)
    for value in (1, 40, 10**9):  # from every sequence alone to all together
        monkeypatch.setattr(torch_attention, limit, value)
        torch.testing.assert_close(run(qkv, batch, caches, heads), expected, atol=2e-5, rtol=1e-4)


def test_garbage_left_in_blocks_by_others_does_not_reach_a_result():
    """An infinity in stale or foreign slots must not become NaN through the masked part of a product."""
    heads, work = (4, 2, 64), [(3, 1), (20, 1), (37, 1), (4, 3), (0, 4)]
    qkv, batch, caches = make_case(work, 3, heads, 16)
    expected = run(qkv, batch, caches, heads)
    own = torch.zeros(caches[0].shape[:2], dtype=torch.bool).flatten()
    for i, length in enumerate(batch.context_lens.tolist()):
        positions = torch.arange(length)
        own[batch.block_tables[i, positions // 16].long() * 16 + positions % 16] = True
    for cache in caches:
        cache.flatten(0, 1)[~own] = float("inf")
    torch.testing.assert_close(run(qkv, batch, caches, heads), expected)


def test_plan_serves_all_layers_with_their_own_caches():
    heads, work = (4, 2, 64), [(33, 1), (7, 1), (16, 5)]
    qkv, batch, caches = make_case(work, 2, heads, 16)
    other = tuple(torch.randn_like(c) for c in caches)
    backend = TorchAttention(HeadLayout(*heads, scale=heads[2] ** -0.5), torch.empty(0), StoreOnly())
    plan = backend.plan(batch)
    for layer in (caches, other, caches):
        out = plan.run(qkv, NO_QK_NORM, layer).view(len(qkv), 4, 64)
        torch.testing.assert_close(out, twin(qkv, batch, layer, heads), atol=2e-5, rtol=1e-4)
