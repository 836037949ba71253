"""The inputs of a decode step gathered from the sequences' rows in one kernel; in torch that takes twenty.

It is no dependent launch, since it reads what the step before wrote. The embedding behind it is none either, so what
this kernel writes may be read early (`common`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.rows import DecodeInputs, RowState

BLOCK = 512


# One compilation for all sizes and addresses: the step that would wait for another one is a decode.
@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["rows_ptr", "positions_ptr"])
def _decode_inputs_kernel(
    rows_ptr,  # [B]
    positions_ptr,  # [B], moved on by one
    last_tokens_ptr,  # [R]
    tables_ptr,  # [R, WIDTH]
    prompt_lens_ptr,  # [R]
    seeds_ptr,  # [R]
    temperatures_ptr,  # [R]
    token_ids_out,
    positions_out,
    slots_out,
    context_lens_out,
    tables_out,  # [B, WIDTH]
    token_indices_out,
    seeds_out,
    temperatures_out,
    width,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + sequence)
    position = tl.load(positions_ptr + sequence)
    known = tl.maximum(position, 0)
    block = tl.load(tables_ptr + row * width + known // BLOCK_SIZE).to(tl.int64)
    tl.store(token_ids_out + sequence, tl.load(last_tokens_ptr + row))
    tl.store(positions_out + sequence, known)
    tl.store(slots_out + sequence, tl.where(position < 0, -1, block * BLOCK_SIZE + known % BLOCK_SIZE))
    tl.store(context_lens_out + sequence, (position + 1).to(tl.int32))
    # Written where it was read: a program of one warp needs no barrier between the two.
    tl.store(positions_ptr + sequence, tl.where(position < 0, position, position + 1))
    tl.store(token_indices_out + sequence, position + 1 - tl.load(prompt_lens_ptr + row))
    tl.store(seeds_out + sequence, tl.load(seeds_ptr + row))
    tl.store(temperatures_out + sequence, tl.load(temperatures_ptr + row))
    for start in range(0, width, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        table = tl.load(tables_ptr + row * width + entry, mask=entry < width, other=0)
        tl.store(tables_out + sequence * width + entry, table, mask=entry < width)


def decode_inputs(rows: Tensor, positions: Tensor, state: RowState, block_size: int) -> DecodeInputs:
    """rows, positions int64 [B]; position -1 is padding, whose row exists too. Moves the positions on by one."""
    batch, width = len(rows), state.block_tables.shape[1]
    for tensor in (rows, positions, *state):
        assert tensor.is_contiguous(), tensor.stride()

    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty(batch, dtype=dtype, device=rows.device)

    inputs = DecodeInputs(
        token_ids=empty(torch.int64),
        positions=empty(torch.int64),
        slot_mapping=empty(torch.int64),
        context_lens=empty(torch.int32),
        block_tables=torch.empty(batch, width, dtype=torch.int32, device=rows.device),
        token_indices=empty(torch.int64),
        seeds=empty(torch.int64),
        temperatures=empty(torch.float32),
    )
    if batch > 0:
        _decode_inputs_kernel[(batch,)](
            rows, positions, *state, *inputs, width, BLOCK_SIZE=block_size, BLOCK=BLOCK, num_warps=1
        )
    return inputs
