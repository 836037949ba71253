"""Norms, SwiGLU, and QK-norm + rotation + KV write against their torch twins."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import assert_close, assert_equal, normal

from nanoinfer.kernels import activation, embed, norm, reference, rope
from nanoinfer.kernels.kernel_set import EAGER


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (3, 576), (2, 1024)])
def test_norms_equal_the_twin_at_any_width(tokens, width, dtype, device):
    x = normal(tokens, width, dtype=dtype, device=device)
    residual = normal(tokens, width, dtype=dtype, device=device, seed=1)
    weight = normal(width, dtype=dtype, device=device)
    assert_close(norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    for parts in (x[None], normal(3, tokens, width, dtype=torch.float32, device=device)):
        normed, total = norm.sum_rms_norm(parts, residual, weight, 1e-6)
        expected_normed, expected_total = reference.sum_rms_norm(parts, residual, weight, 1e-6)
        assert normed.dtype == total.dtype == dtype
        compare = assert_equal if len(parts) == 1 else assert_close  # the order in which more are added is free
        compare(total, expected_total)
        assert_close(normed, expected_normed)


def test_norm_reads_rows_of_a_wider_tensor(device):
    wide = normal(3, 96, dtype=torch.float32, device=device)
    weight = normal(64, dtype=torch.float32, device=device)
    assert_close(norm.rms_norm(wide[:, :64], weight, 1e-6), reference.rms_norm(wide[:, :64], weight, 1e-6))


def test_no_tokens_is_no_launch(device):
    empty = torch.empty(0, 64, device=device)
    assert norm.rms_norm(empty, torch.ones(64, device=device), 1e-6).shape == (0, 64)
    assert activation.silu_mul(empty).shape == (0, 32)


@pytest.mark.parametrize("width", [48, 1536, 2048])
def test_silu_mul(width, device):
    gate_up = normal(2, 2 * width, dtype=torch.bfloat16, device=device)
    assert_close(activation.silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 3, 80), (7, 1, 96), (6, 2, 128), (9, 3, 64)]
)
def test_qk_norm_rope_store(heads, kv_heads, head_dim, normed, device):
    dtype, tokens, block_size = torch.bfloat16, 5, 4
    qkv = normal(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    weights = [normal(head_dim, dtype=dtype, device=device, seed=i) if normed else None for i in range(2)]
    angles = torch.rand(64, head_dim // 2, generator=torch.Generator().manual_seed(0)) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    positions = torch.tensor([0, 7, 63, 3, 1], device=device)
    slots = torch.tensor([2, 11, -1, 0, 7], device=device)
    caches = [torch.full((3, block_size, kv_heads, head_dim), float("nan"), dtype=dtype, device=device) for _ in "kv"]
    expected_caches = [cache.clone() for cache in caches]
    arguments = (qkv, *weights, 1e-6, cos_sin, positions)
    shape = (slots, heads, kv_heads, head_dim)
    expected = reference.qk_norm_rope_store(*arguments, *expected_caches, *shape)
    actual = rope.qk_norm_rope_store(*arguments, *caches, *shape)
    for mine, theirs in zip(actual, expected, strict=True):
        assert_close(mine, theirs)
    for mine, theirs in zip(caches, expected_caches, strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan()), "a slot was written that is not in the mapping, or missed"
        assert_close(mine.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 1030])
def test_embedding_of_a_part_of_the_vocabulary_is_zero_elsewhere(width, dtype, device):
    weight = normal(7, width, dtype=dtype, device=device)
    token_ids = torch.tensor([0, 10, 16, 17, 9, 3, 12], device=device)
    rows = embed.embed_part(token_ids, weight, 10)
    assert torch.equal(rows, EAGER.embed_part(token_ids, weight, 10))
    assert torch.equal(rows[1], weight[0])
    assert rows[[0, 3, 4, 5]].abs().max() == 0
