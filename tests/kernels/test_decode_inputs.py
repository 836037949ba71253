"""The inputs of a decode step gathered in one kernel are those that torch gathers one by one."""

from __future__ import annotations

import pytest
import torch

from nanoinfer.kernels import decode_inputs, reference
from nanoinfer.kernels.rows import RowState


@pytest.mark.parametrize("width", [1, 5, 1300])
@pytest.mark.parametrize("block_size", [16, 48])
def test_rows_in_any_order_with_padding(width, block_size, device):
    generator = torch.Generator().manual_seed(width)

    def integers(high, *shape):
        return torch.randint(high, shape, generator=generator)

    num_rows = 9
    state = RowState(
        integers(2**17, num_rows),
        # Slots beyond 2^31: their blocks times the block size must not be multiplied in 32 bits.
        (2**31 - 1 - integers(1000, num_rows, width)).to(torch.int32),
        integers(100, num_rows),
        integers(2**62, num_rows),
        torch.rand(num_rows, generator=generator),
    )
    rows = torch.tensor([7, 0, 3, 8, 8])
    positions = torch.tensor([0, width * block_size - 1, min(block_size, width * block_size - 1), -1, -1])
    state = RowState(*(tensor.to(device) for tensor in state))
    rows, positions = rows.to(device), positions.to(device)
    moved = positions.clone()
    expected = reference.decode_inputs(rows, positions, state, block_size)
    actual = decode_inputs.decode_inputs(rows, moved, state, block_size)
    assert positions.tolist() == moved.tolist() == [1, width * block_size, int(expected.positions[2]) + 1, -1, -1]
    for name, one, other in zip(expected._fields, expected, actual, strict=True):
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
    assert expected.slot_mapping.max() > 2**31
