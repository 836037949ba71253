"""The Triton back end as the last layer of a step calls it: for the tokens alone whose successors are sampled."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import assert_close, normal

from nanoinfer.attention import triton
from nanoinfer.attention.base import AttentionBatch
from nanoinfer.attention.triton import TritonAttention
from nanoinfer.kernels.heads import NO_QK_NORM, HeadLayout
from nanoinfer.kernels.triton_set import TritonKernels

HEADS = HeadLayout(4, 2, 64, 0.125)
BLOCK = 16


def make_batch(device, starts, query_lens, num_decodes):
    """Sequences with tables of their own, in order."""
    blocks = -(-(max(a + b for a, b in zip(starts, query_lens, strict=True))) // BLOCK)
    tables = torch.arange(len(starts) * blocks, dtype=torch.int32, device=device).view(-1, blocks)
    positions = [torch.arange(a, a + b, device=device) for a, b in zip(starts, query_lens, strict=True)]
    slots = [tables[i, p // BLOCK].long() * BLOCK + p % BLOCK for i, p in enumerate(positions)]
    return AttentionBatch(
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        cu_seqlens_q=torch.tensor([0, *query_lens], device=device).cumsum(0).to(torch.int32),
        context_lens=torch.tensor([a + b for a, b in zip(starts, query_lens, strict=True)], device=device).int(),
        block_tables=tables,
        starts=starts,
        query_lens=query_lens,
        num_decodes=num_decodes,
    )


@pytest.mark.parametrize("worth_leaving_out", [1, 512])
@pytest.mark.parametrize(
    ("starts", "query_lens", "num_decodes", "ends"),
    [
        ([0, 0], [5, 20], 0, [4, 24]),
        ([17, 3, 0], [1, 6, 20], 1, [0, 26]),  # a decode, a chunk that is not the last of its prompt, a whole prompt
        ([9, 30], [1, 1], 2, [0, 1]),
        ([0], [7], 0, []),
    ],
)
def test_the_last_layer_attends_for_sampled_tokens_alone(
    starts, query_lens, num_decodes, ends, worth_leaving_out, device, monkeypatch
):
    monkeypatch.setattr(triton, "WORTH_LEAVING_OUT", worth_leaving_out)
    batch = make_batch(device, starts, query_lens, num_decodes)
    cos_sin = torch.rand(64, 64, device=device)
    attention = TritonAttention(HEADS, cos_sin, TritonKernels(), 8)
    tokens = len(batch.positions)
    qkv = normal(tokens, 8 * 64, dtype=torch.bfloat16, device=device)
    shape = (batch.block_tables.numel(), BLOCK, 2, 64)
    caches = [tuple(normal(*shape, dtype=torch.bfloat16, device=device, seed=i) for i in (1, 2)) for _ in range(2)]
    expected = attention.plan(batch).run(qkv, NO_QK_NORM, caches[0])
    index = torch.tensor(ends, dtype=torch.int64, device=device)
    padding = torch.full((2,), -1, device=device)  # as in a graph
    actual = attention.plan(batch).run(qkv, NO_QK_NORM, caches[1], torch.cat((index, padding)))
    assert actual.shape == (len(ends) + 2, 4 * 64)
    if worth_leaving_out == 1 and num_decodes < len(starts):
        assert actual[len(ends) :].abs().max() == 0  # not the whole context of the first sequence
    actual = actual[: len(ends)]
    if ends:
        assert_close(actual, expected[index])
    for full, partly in zip(*caches, strict=True):
        assert_close(partly, full)


def test_in_the_padding_of_a_graph_no_sequence_has_a_token(device, monkeypatch):
    monkeypatch.setattr(triton, "WORTH_LEAVING_OUT", 1)
    empty = torch.zeros(2, dtype=torch.int32, device=device)
    batch = AttentionBatch(
        positions=torch.zeros(4, dtype=torch.int64, device=device),
        slot_mapping=torch.full((4,), -1, device=device),
        cu_seqlens_q=torch.zeros(3, dtype=torch.int32, device=device),
        context_lens=empty,
        block_tables=torch.zeros(2, 1, dtype=torch.int32, device=device),
        starts=[1, 1],
        query_lens=[4, 4],
        num_decodes=0,
    )
    attention = TritonAttention(HEADS, torch.rand(64, 64, device=device), TritonKernels(), 8)
    qkv = normal(4, 8 * 64, dtype=torch.bfloat16, device=device)
    cache = tuple(torch.zeros(1, BLOCK, 2, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = attention.plan(batch).run(qkv, NO_QK_NORM, cache, torch.full((2,), -1, device=device))
    assert out.abs().max() == 0
    assert cache[0].abs().max() == 0


def test_a_few_decodes_have_a_kernel_of_their_own(device, monkeypatch):
    batch = make_batch(device, [9, 30], [1, 1], 2)
    attention = TritonAttention(HEADS, torch.rand(64, 64, device=device), TritonKernels(), 8)
    qkv = normal(2, 8 * 64, dtype=torch.bfloat16, device=device)
    shape = (batch.block_tables.numel(), BLOCK, 2, 64)
    results = []
    for few in (False, True):
        cache = tuple(normal(*shape, dtype=torch.bfloat16, device=device, seed=i) for i in (1, 2))
        monkeypatch.setattr(triton, "is_small", lambda *_, few=few: few)
        others = "fused_decode_attention" if few else "few_decodes_attention"
        with monkeypatch.context() as context:
            context.setattr(triton, others, lambda *_, **__: pytest.fail("the other one was called"))
            results.append((attention.plan(batch).run(qkv, NO_QK_NORM, cache), *cache))
    for one, other in zip(*results, strict=True):
        assert_close(one, other)
