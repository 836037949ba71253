"""Random tensors and paged caches for the kernel tests; what no kernel may read is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ON_CUDA = torch.cuda.is_available()
# The interpreter cuts float32 to bfloat16 where the hardware rounds, which doubles the error.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3 if ON_CUDA else 1.6e-2}


def normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Relative root-mean-square error below what the dtype's rounding explains; NaN never passes."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    assert error.item() < TOLERANCE[actual.dtype], f"relative error {error.item():.3g}"


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Bit for bit, as far as the rounding is the hardware's."""
    if ON_CUDA:
        assert torch.equal(actual, expected)
    else:
        assert_close(actual, expected)


@dataclass
class PagedCache:
    """A cache whose blocks are dealt to sequences at random; slots that hold no token are NaN."""

    k: Tensor
    v: Tensor
    tables: Tensor
    lengths: Tensor

    def slots(self, sequence: int, positions: Tensor) -> Tensor:
        size = self.k.shape[1]
        return self.tables[sequence, positions // size].long() * size + positions % size


def paged_cache(
    lengths: list[int],
    block_size: int,
    kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    first_block: int = 0,
) -> PagedCache:
    """Block tables are padded with -1, a block id that must never be followed."""
    needed = [-(-length // block_size) for length in lengths]
    blocks = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(sum(lengths))) + first_block
    shape = (first_block + len(blocks), block_size, kv_heads, head_dim)
    k = torch.full(shape, float("nan"), dtype=dtype, device=device)
    v = torch.full(shape, float("nan"), dtype=dtype, device=device)
    tables = torch.full((len(lengths), max([*needed, 1]) + 1), -1, dtype=torch.int32)
    taken = 0
    for i, count in enumerate(needed):
        tables[i, :count] = blocks[taken : taken + count]
        taken += count
    cache = PagedCache(k, v, tables.to(device), torch.tensor(lengths, dtype=torch.int32, device=device))
    for i, length in enumerate(lengths):
        slots = cache.slots(i, torch.arange(length, device=device))
        k.view(-1, kv_heads, head_dim)[slots] = normal(length, kv_heads, head_dim, dtype=dtype, device=device, seed=i)
        v.view(-1, kv_heads, head_dim)[slots] = normal(length, kv_heads, head_dim, dtype=dtype, device=device, seed=~i)
    return cache
