"""Prefill attention against the torch twin: packed lengths, history longer than the query, tiles, layouts, poison."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import assert_close, normal, paged_cache

from nanoinfer.kernels import prefill_attention as prefill
from nanoinfer.kernels import reference


def cumulative(counts, device):
    return torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32)


def check_direct(counts, heads, kv_heads, head_dim, config, device, dtype=torch.bfloat16):
    tokens = sum(counts)
    rows = normal(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)
    q, k, v = rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]
    starts, scale = cumulative(counts, device), head_dim**-0.5
    actual = prefill.prefill_attention(q, k, v, starts, max(counts), scale, config=config)
    assert_close(actual, reference.varlen_attention(q, k, v, starts, scale))


def check_paged(counts, lengths, heads, kv_heads, head_dim, block_size, config, device, dtype=torch.bfloat16):
    cache = paged_cache(lengths, block_size, kv_heads, head_dim, dtype=dtype, device=device)
    q = normal(sum(counts), heads, head_dim, dtype=dtype, device=device)
    starts, scale = cumulative(counts, device), head_dim**-0.5
    arguments = (q, cache.k, cache.v, cache.tables, starts, cache.lengths)
    actual = prefill.paged_prefill_attention(*arguments, max(counts), scale, config=config)
    assert_close(actual, reference.paged_attention(*arguments, scale))


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (80, 2), (96, 3), (128, 7), (64, 8)])
def test_direct_head_dims_and_group_sizes(head_dim, group, tma, device):
    check_direct([1, 70, 33], 2 * group, 2, head_dim, prefill.PrefillConfig(64, 32, 4, 2, tma), device)


@pytest.mark.parametrize("max_rows", [1, 64, 200])
def test_the_shape_that_is_chosen_by_itself(max_rows, device):
    check_direct([max_rows, 3], 2, 2, 64, None, device, torch.float32)


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("block_size", [16, 32, 48, 256])
def test_a_chunk_shorter_than_its_history(block_size, tma, device):
    config = prefill.PrefillConfig(32, 32, 4, 2, tma)
    check_paged([5, 1, 40, 17], [100, 65, 40, 32], 4, 2, 64, block_size, config, device)


@pytest.mark.parametrize(("head_dim", "group"), [(80, 3), (96, 7), (128, 2)])
def test_paged_head_dims_and_group_sizes(head_dim, group, device):
    check_paged([20, 3], [90, 64], 2 * group, 2, head_dim, 16, prefill.PrefillConfig(32, 32, 4, 2), device)


def test_empty_sequences_between_others(device):
    check_paged([0, 7, 0, 3], [0, 7, 0, 50], 4, 2, 64, 16, None, device)


@pytest.mark.filterwarnings("ignore:invalid value")  # in the poisoned sequence
def test_another_sequences_nan_stays_its_own(device):
    counts = [30, 40]
    q, k, v = (normal(70, 2, 64, dtype=torch.bfloat16, device=device, seed=i) for i in range(3))
    starts = cumulative(counts, device)
    clean = prefill.prefill_attention(q, k, v, starts, 40, 0.125)
    k[30:], v[30:] = float("nan"), float("nan")
    assert torch.equal(prefill.prefill_attention(q, k, v, starts, 40, 0.125)[:30], clean[:30])


def test_no_tokens_is_no_launch(device):
    q = torch.empty(0, 2, 64, device=device)
    assert prefill.prefill_attention(q, q, q, cumulative([0], device), 0, 0.125).shape == (0, 2, 64)
