"""The CPU's attention from norm and rotation to output, with every kernel set, against the plain twins one by one."""

from __future__ import annotations

import random

import pytest
import torch

from nanoinfer.attention.base import AttentionBatch
from nanoinfer.attention.numba import NumbaAttention
from nanoinfer.attention.torch import TorchAttention
from nanoinfer.kernels import reference
from nanoinfer.kernels.cpu_set import CpuKernels
from nanoinfer.kernels.heads import NO_QK_NORM, HeadLayout, QKNorm
from nanoinfer.kernels.kernel_set import EAGER
from nanoinfer.kernels.numba_set import NumbaKernels

EPS = 1e-6
RATIOS = {"gqa1": (3, 3), "gqa2": (4, 2), "gqa3": (9, 3), "gqa7": (7, 1), "gqa8": (16, 2)}
FAST = CpuKernels(torch.float32)
NUMBA = NumbaKernels(torch.float32)
SETS = pytest.mark.parametrize("kernels", [EAGER, FAST, NUMBA], ids=["eager", "cpu", "numba"])


@pytest.fixture(scope="module", autouse=True)
def compiled():
    NUMBA.compile()
    NUMBA.use_threads()


def step(work: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, block_size: int, poison: float):
    """A step over (history, queries) sequences; slots that hold no history are full of `poison`."""
    generator = torch.Generator().manual_seed(len(work) * 1000 + head_dim)
    lengths = [start + count for start, count in work]
    needed = [-(-length // block_size) for length in lengths]
    pool = list(range(sum(needed) + 2))
    random.Random(1).shuffle(pool)
    foreign = pool.pop()
    tables = torch.full((len(work), max(needed)), foreign, dtype=torch.int32)
    caches = [torch.full((len(pool) + 1, block_size, kv_heads, head_dim), poison) for _ in range(2)]
    positions, slots = [], []
    for i, (start, count) in enumerate(work):
        tables[i, : needed[i]] = torch.tensor([pool.pop() for _ in range(needed[i])])
        at = torch.arange(start + count)
        own = tables[i, at // block_size].long() * block_size + at % block_size
        for cache in caches:
            cache.flatten(0, 1)[own[:start]] = torch.randn(start, kv_heads, head_dim, generator=generator)
        positions.append(at[start:])
        slots.append(own[start:])
    query_lens = torch.tensor([count for _, count in work])
    batch = AttentionBatch(
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        cu_seqlens_q=torch.cat((torch.zeros(1), query_lens.cumsum(0))).int(),
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=tables,
        starts=[start for start, _ in work],
        query_lens=query_lens.tolist(),
        num_decodes=next((i for i, (_, count) in enumerate(work) if count > 1), len(work)),
    )
    qkv = torch.randn(int(query_lens.sum()), (heads + 2 * kv_heads) * head_dim, generator=generator)
    return qkv, batch, caches


def check(work, ratio, head_dim, block_size, *, kernels=EAGER, has_norm=False, poison=float("nan")):
    heads, kv_heads = ratio
    qkv, batch, caches = step(work, heads, kv_heads, head_dim, block_size, poison)
    angles = torch.arange(1024.0)[:, None] * 10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    weights = (torch.linspace(0.5, 1.5, head_dim), torch.linspace(1.5, 0.5, head_dim)) if has_norm else (None, None)
    scale = head_dim**-0.5
    twins = [cache.clone() for cache in caches]
    q, _, _ = reference.qk_norm_rope_store(
        qkv, *weights, EPS, cos_sin, batch.positions, *twins, batch.slot_mapping, heads, kv_heads, head_dim
    )
    expected = reference.paged_attention(q, *twins, batch.block_tables, batch.cu_seqlens_q, batch.context_lens, scale)

    kind = NumbaAttention if kernels is NUMBA else TorchAttention
    backend = kind(HeadLayout(heads, kv_heads, head_dim, scale), cos_sin, kernels)
    norm = QKNorm(*weights, EPS) if has_norm else NO_QK_NORM
    out = backend.plan(batch).run(qkv, norm, tuple(caches))

    assert not expected.isnan().any()
    torch.testing.assert_close(out, expected.flatten(1), rtol=1e-4, atol=2e-5)
    for cache, twin in zip(caches, twins, strict=True):
        torch.testing.assert_close(cache, twin, rtol=1e-5, atol=2e-6, equal_nan=True)


def edges(block_size: int) -> list[tuple[int, int]]:
    """Decodes, then chunks, that end one before, at and one after the edges of blocks."""
    b = block_size
    decodes = [(n, 1) for n in (1, b - 2, b - 1, b, b + 1, 2 * b - 1, 2 * b)]
    return [*decodes, (0, b), (0, b + 1), (b, b), (b - 1, 2), (b + 1, b - 1), (3, b - 2), (2 * b, 5)]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("ratio", RATIOS.values(), ids=list(RATIOS))
@SETS
def test_every_head_layout_equals_the_twin(kernels, ratio, head_dim):
    check(edges(16), ratio, head_dim, 16, kernels=kernels)


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128, 256])
@SETS
@pytest.mark.parametrize("has_norm", [False, True])
def test_lengths_at_the_edges_of_blocks(block_size, kernels, has_norm):
    check(edges(block_size), (4, 2), 64, block_size, kernels=kernels, has_norm=has_norm)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("work", [[(3, 1), (20, 1), (200, 1)], [(5, 1)], [(37, 9)], [(0, 7), (1, 1), (21, 30)]])
@SETS
def test_unused_slots_may_hold_anything(kernels, work, poison):
    check(work, (4, 2), 64, 16, kernels=kernels, poison=poison)


def test_prompts_without_history_gather_nothing():
    """Their keys and values are at hand; buffers for them once grew to the longest prompt."""
    heads, kv_heads, head_dim = 4, 2, 16
    qkv, batch, caches = step([(0, 40), (0, 70)], heads, kv_heads, head_dim, 16, 0.0)
    backend = TorchAttention(HeadLayout(heads, kv_heads, head_dim, 1.0), torch.ones(100, head_dim), EAGER)
    backend.plan(batch).run(qkv, NO_QK_NORM, tuple(caches))
    assert backend.scratch._buffers == {}


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 255, 256, 257, 300])
def test_query_shorter_than_its_history(count):
    check([(320, count)], (6, 2), 64, 32)
    check([(20, 1), (400, 1), (320, count), (0, 40)], (6, 2), 64, 32)


@SETS
def test_sequence_gets_the_same_alone_and_in_any_company(kernels):
    """Decodes of very different lengths, more than are taken together at once."""
    generator = random.Random(3)
    check([(generator.randrange(1, 700), 1) for _ in range(40)] + [(0, 3), (90, 70)], (4, 2), 64, 16, kernels=kernels)
