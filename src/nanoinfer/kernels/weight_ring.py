"""The ring in shared memory through which a persistent program's weights and tokens come, and the product of them.

One warp asks for tiles of weights, as many as there are slots ahead of what is multiplied (TMA, each with a barrier in
shared memory that says it has arrived); the warps that multiply give a slot back once no tensor core reads it any more.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nanoinfer.kernels.layer_cuts import TILE_ROWS, TILE_WIDTH
from nanoinfer.kernels.thread_barrier import thread_barrier

ROWS = gl.constexpr(TILE_ROWS)
WIDTH = gl.constexpr(TILE_WIDTH)
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
PAIRS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))
WARPS = gl.constexpr(4)  # that multiply: a warpgroup


class Ring(NamedTuple):
    """Slots in shared memory, and barriers that say which have arrived; the weights' also say which are free again."""

    weights: object  # [SLOTS, ROWS, WIDTH]
    weights_arrived: object
    weights_free: object
    tokens: object  # [STAGES, BLOCK_M, WIDTH]
    tokens_arrived: object


@gluon.jit
def make_ring(SLOTS: gl.constexpr, STAGES: gl.constexpr, BLOCK_M: gl.constexpr):
    ring = Ring(
        gl.allocate_shared_memory(gl.bfloat16, [SLOTS, ROWS, WIDTH], TILE),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, WIDTH], TILE),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ring.weights_arrived.index(slot), count=1)
        mbarrier.init(ring.weights_free.index(slot), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.tokens_arrived.index(stage), count=1)
    fence_async_shared()
    thread_barrier()
    return ring


@gluon.jit
def fetch(desc, item, ring, CUT: gl.constexpr, SLOTS: gl.constexpr, PAIRED: gl.constexpr):
    """Ask for this program's tiles of one weight, each once its slot is free; item counts the tiles of all weights."""
    first_row = gl.program_id(0) // CUT.splits * (CUT.tiles * ROWS)
    if first_row < CUT.rows:
        for step in range(CUT.steps):
            column = (gl.program_id(0) % CUT.splits * CUT.steps + step) * WIDTH
            for tile in gl.static_range(gl.constexpr(CUT.tiles)):
                slot = item % SLOTS
                mbarrier.wait(ring.weights_free.index(slot), (item // SLOTS & 1) ^ 1)
                arrived = ring.weights_arrived.index(slot)
                mbarrier.expect(arrived, ROWS * WIDTH * 2)
                row = first_row + tile * ROWS
                here = ring.weights.index(slot)
                if PAIRED:
                    pairs = here._reinterpret(gl.bfloat16, [ROWS // 16, 2, 8, WIDTH], PAIRS)
                    tma.async_copy_global_to_shared(desc, [row // 16, 0, 0, column], arrived, pairs)
                else:
                    tma.async_copy_global_to_shared(desc, [row, column], arrived, here)
                item += 1
    return item


@gluon.jit
def _fetch_tokens(x_desc, column, turn, ring, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):
    arrived = ring.tokens_arrived.index(turn % STAGES)
    mbarrier.expect(arrived, BLOCK_M * WIDTH * 2)
    tma.async_copy_global_to_shared(x_desc, [0, column], arrived, ring.tokens.index(turn % STAGES))


@gluon.jit
def multiply(
    x_desc, item, turn, ring, CUT: gl.constexpr, BLOCK_M: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr
):
    """The sums of this program's tiles, and how many tiles of weights and of tokens have been taken so far."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    TILES: gl.constexpr = CUT.tiles
    column = gl.program_id(0) % CUT.splits * (CUT.steps * WIDTH)
    for step in gl.static_range(gl.constexpr(min(STAGES, CUT.steps))):
        _fetch_tokens(x_desc, column + step * WIDTH, turn + step, ring, BLOCK_M, STAGES)
    sums = ()
    for tile in gl.static_range(TILES):
        sums = sums + (gl.zeros([ROWS, BLOCK_M], gl.float32, SUMS),)
    for step in range(CUT.steps):
        mbarrier.wait(ring.tokens_arrived.index(turn % STAGES), turn // STAGES & 1)
        x = ring.tokens.index(turn % STAGES).permute((1, 0))
        pending = ()
        for tile in gl.static_range(TILES):
            slot = (item + tile) % SLOTS
            mbarrier.wait(ring.weights_arrived.index(slot), (item + tile) // SLOTS & 1)
            pending = pending + (warpgroup_mma(ring.weights.index(slot), x, sums[tile], is_async=True),)
        done = warpgroup_mma_wait(0, deps=pending)
        sums = (done,) if TILES == 1 else done
        thread_barrier()  # no warp reads the slots any more
        for tile in gl.static_range(TILES):
            mbarrier.arrive(ring.weights_free.index((item + tile) % SLOTS), count=1)
        if step + STAGES < CUT.steps:
            _fetch_tokens(x_desc, column + (step + STAGES) * WIDTH, turn + STAGES, ring, BLOCK_M, STAGES)
        item += TILES
        turn += 1
    return sums, item, turn
