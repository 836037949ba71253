"""Decode attention against the torch twin: head dims, group sizes, block sizes, splits, padding, poisoned caches."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kernel_inputs import assert_close, normal, paged_cache

from nanoinfer.kernels import decode_attention as decode
from nanoinfer.kernels import decode_splits, reference
from nanoinfer.kernels.few_decodes_attention import few_decodes_attention


def workspace(batch, heads, kv_heads, head_dim, splits, device):
    space = decode.DecodeWorkspace(batch * splits, batch, heads, kv_heads, head_dim, device)
    space.partial.fill_(float("nan"))
    space.stats.fill_(float("nan"))
    return space


def check(lengths, heads, kv_heads, head_dim, block_size, splits, device, dtype=torch.bfloat16, split_tokens=None):
    cache = paged_cache(lengths, block_size, kv_heads, head_dim, dtype=dtype, device=device)
    q = normal(len(lengths), heads, head_dim, dtype=dtype, device=device)
    scale = head_dim**-0.5
    cu_seqlens = torch.arange(len(lengths) + 1, device=device)
    expected = reference.paged_attention(q, cache.k, cache.v, cache.tables, cu_seqlens, cache.lengths, scale)
    space = workspace(len(lengths), heads, kv_heads, head_dim, splits, device)
    config = decode.DecodeConfig(32, 4, 2, splits)
    for _ in range(2):  # the second launch finds the counters that the first left
        actual = decode.decode_attention(
            q,
            cache.k,
            cache.v,
            cache.tables,
            cache.lengths,
            scale,
            space,
            config=config,
            min_split_tokens=32,
            split_tokens=split_tokens,
        )
        assert_close(actual, expected)
    assert int(space.counters.abs().sum()) == 0


@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (80, 2), (96, 3), (128, 7), (64, 8), (128, 2)])
def test_head_dims_and_group_sizes(head_dim, group, device):
    check([1, 45, 100], 2 * group, 2, head_dim, 16, 3, device)


@pytest.mark.parametrize("block_size", [16, 32, 48, 256])
def test_block_sizes_and_lengths_at_their_edges(block_size, device):
    check([block_size - 1, block_size, block_size + 1, 2 * block_size], 4, 2, 64, block_size, 2, device)


@pytest.mark.parametrize("splits", [1, 2, 9, 20])
def test_any_number_of_splits(splits, device):
    check([1, 31, 32, 33, 64, 300], 2, 1, 64, 16, splits, device, torch.float32)


@pytest.mark.parametrize("tokens", [1, 40, 64, 1000])
def test_any_common_length_of_splits(tokens, device):
    split_tokens = torch.tensor([tokens], dtype=torch.int32, device=device)
    check([0, 1, 33, 64, 300], 2, 1, 64, 16, 4, device, torch.float32, split_tokens)


def test_long_sequences_are_split_where_the_batch_does_not_fill_the_cores(monkeypatch):
    monkeypatch.setattr(decode_splits, "_num_cores", lambda device: 132)
    device = torch.device("cpu")

    def parts(lengths):
        split_tokens = decode_splits.split_tokens(torch.tensor(lengths, dtype=torch.int32), 8)
        most = decode_splits.num_splits(len(lengths), 8, device)
        return [most if split_tokens is None else min(-(-n // int(split_tokens)), most) for n in lengths]

    assert parts([1000]) == [32]
    assert parts([1000] * 8) == [8] * 8
    assert parts([384] * 32) == [2] * 32  # two programs per core and no split would leave them waiting for memory
    assert parts([1000] * 64) == [1] * 64
    assert parts([2000, *[800] * 63]) == [2, *[1] * 63]  # one wave that waits for the longest would take twice as long
    assert parts([2000, *[800] * 99]) == [1] * 100
    for batch in range(1, 257):
        assert 1 <= decode_splits.num_splits(batch, 8, device) <= 32


def test_padding_rows_of_length_0_give_zeros_and_disturb_nobody(device):
    check([0, 40, 0], 4, 2, 64, 16, 2, device)


def rope_table(positions, head_dim, device):
    angles = torch.rand(positions, head_dim // 2, generator=torch.Generator().manual_seed(0)) * 6
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "splits", "dtype"),
    [
        (4, 2, 64, 1, torch.bfloat16),
        (4, 2, 80, 3, torch.bfloat16),
        (3, 1, 96, 4, torch.bfloat16),
        (16, 2, 128, 2, torch.bfloat16),
        (2, 2, 64, 5, torch.bfloat16),
        (20, 1, 64, 3, torch.bfloat16),
        (6, 2, 64, 3, torch.float32),
    ],
)
def test_fused_forms_equal_store_then_attend(heads, kv_heads, head_dim, splits, dtype, normed, few, device):
    block_size = 16
    lengths = [1, 2, 33, 65, 150, 1, 0]
    cache = paged_cache(lengths, block_size, kv_heads, head_dim, dtype=dtype, device=device)
    batch = len(lengths)
    slots = torch.full((batch,), -1, device=device)
    for i, length in enumerate(lengths[:-2]):  # the last two rows are padding
        slots[i] = cache.slots(i, torch.tensor(length - 1, device=device))
        cache.k.view(-1, kv_heads, head_dim)[slots[i]] = float("nan")
        cache.v.view(-1, kv_heads, head_dim)[slots[i]] = float("nan")
    qkv = normal(batch, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    weights = [normal(head_dim, dtype=dtype, device=device, seed=i) if normed else None for i in range(2)]
    cos_sin = rope_table(256, head_dim, device)
    scale = head_dim**-0.5
    expected_k, expected_v = cache.k.clone(), cache.v.clone()
    q, _, _ = reference.qk_norm_rope_store(
        qkv, *weights, 1e-6, cos_sin, (cache.lengths - 1).clamp(min=0), expected_k, expected_v, slots, heads, kv_heads,
        head_dim,
    )  # fmt: skip
    cu_seqlens = torch.arange(batch + 1, device=device)
    real = batch - 2
    expected = reference.paged_attention(
        q[:real], expected_k, expected_v, cache.tables[:real], cu_seqlens[: real + 1], cache.lengths[:real], scale
    )
    space = workspace(batch, heads, kv_heads, head_dim, splits, device)
    attend = few_decodes_attention if few else partial(decode.fused_decode_attention, min_split_tokens=32)
    actual = attend(
        qkv, *weights, 1e-6, cos_sin, cache.k, cache.v, slots, cache.tables, cache.lengths, scale, heads, space,
        config=decode.DecodeConfig(32, 4, 2, splits),
    )  # fmt: skip
    assert int(space.counters.abs().sum()) == 0
    assert_close(actual[:real], expected)
    assert int(actual[real:].count_nonzero()) == 0, "padding gives zeros"
    assert torch.equal(cache.k.isnan(), expected_k.isnan())
    assert_close(cache.k.nan_to_num(), expected_k.nan_to_num())
    assert torch.equal(cache.v.nan_to_num(), expected_v.nan_to_num())
