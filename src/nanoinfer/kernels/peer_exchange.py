"""Sums and gathers over ranks through memory that each can write in the others: one kernel, no barrier.

A rank sends its data to every other in 8-byte words of 4 bytes of data and the number of the exchange (the "LL"
protocol of NCCL). A word arrives whole, so its number says that its data is there, and the receiver needs no other
signal: an exchange costs one way through NVLink. It doubles the bytes, so large tensors are better off with NCCL.

Exchanges alternate between two slots. A rank that sends its exchange n has everybody's n - 1, which they sent after
reading n - 2: so nothing is overwritten that somebody still reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.common import enter, pdl_options, wait_for_inputs

WORD_BYTES = 4  # data of a word
BLOCK = 128  # words of a program: one warp, which needs no barrier to see that all have arrived


@dataclass(frozen=True)
class PeerBuffers:
    """What the kernel knows of the ranks' memory; see `nbytes` for the size of each rank's buffer, all zeros at first.

    addresses int64 [ranks]: of each rank's buffer, as seen from this device. numbers int32 [capacity / block]: of the
    last exchange of each program, 0 at first. abort int32 [1]: set to 1 by the host, it ends all waiting.
    """

    rank: int
    capacity: int  # words of data, a multiple of block
    addresses: Tensor
    numbers: Tensor
    abort: Tensor
    block: int = BLOCK

    @classmethod
    def at(
        cls, addresses: list[int], rank: int, capacity: int, device: torch.device, block: int = BLOCK
    ) -> PeerBuffers:
        assert capacity % block == 0, (capacity, block)
        return cls(
            rank,
            capacity,
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(capacity // block, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            block,
        )

    @property
    def size(self) -> int:
        return len(self.addresses)

    @staticmethod
    def nbytes(size: int, capacity: int) -> int:
        """Bytes of one rank's buffer: two slots, in each of which every rank has its words."""
        return 2 * size * capacity * 2 * WORD_BYTES

    def fits(self, x: Tensor) -> bool:
        """Whether x can be exchanged here: whole words, in one piece."""
        nbytes = x.numel() * x.element_size()
        whole = nbytes % WORD_BYTES == 0 and x.data_ptr() % WORD_BYTES == 0
        return 0 < nbytes <= self.capacity * WORD_BYTES and whole and x.is_contiguous()


@triton.jit
def _as_float(bits, DTYPE: tl.constexpr):
    """The low bits of int32 words as a number of type DTYPE, in float32."""
    if DTYPE.primitive_bitwidth == 32:
        return bits.to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _as_bits(value, DTYPE: tl.constexpr):
    if DTYPE.primitive_bitwidth == 32:
        return value.to(tl.int32, bitcast=True)
    else:
        return value.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _buffer(addresses_ptr, rank):
    return tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int64))


@triton.jit
def _exchange_kernel(
    x_ptr,  # int32 [N]: the words of a tensor of DTYPE
    out_ptr,  # int32 [N], or [SIZE, N] with GATHER
    addresses_ptr,  # int64 [SIZE]
    numbers_ptr,  # int32 [programs]
    abort_ptr,  # int32 [1]
    N,
    CAPACITY,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    GATHER: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    program = tl.program_id(0)
    word = program * BLOCK + tl.arange(0, BLOCK)
    valid = word < N
    wait_for_inputs(PDL)
    number = tl.load(numbers_ptr + program) + 1
    mine = tl.load(x_ptr + word, mask=valid, other=0)
    label = number.to(tl.int64) << 32
    numbered = label | (mine.to(tl.int64) & 0xFFFFFFFF)
    slot = (number & 1).to(tl.int64) * SIZE * CAPACITY
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            there = _buffer(addresses_ptr, rank)
            tl.store(there + slot + RANK * CAPACITY + word, numbered, mask=valid)

    here = _buffer(addresses_ptr, RANK) + slot + word
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        words = mine
        if rank != RANK:
            arrived = tl.load(here + rank * CAPACITY, mask=valid, other=label, volatile=True)
            # Some are missing: 1, which is more than the flag as long as nobody has set it.
            while tl.max(((arrived >> 32).to(tl.int32) != number).to(tl.int32), axis=0) > tl.load(
                abort_ptr, volatile=True
            ):
                arrived = tl.load(here + rank * CAPACITY, mask=valid, other=label, volatile=True)
            words = arrived.to(tl.int32)
        if GATHER:
            tl.store(out_ptr + rank * N + word, words, mask=valid)
        else:  # in the order of ranks, so that every rank has the same sum
            low += _as_float(words, DTYPE)
            if DTYPE.primitive_bitwidth == 16:
                high += _as_float(words >> 16, DTYPE)
    if not GATHER:
        total = _as_bits(low, DTYPE)
        if DTYPE.primitive_bitwidth == 16:
            total |= _as_bits(high, DTYPE) << 16
        tl.store(out_ptr + word, total, mask=valid)
    tl.store(numbers_ptr + program, number)


TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _exchange(x: Tensor, out: Tensor, buffers: PeerBuffers, *, gather: bool) -> None:
    assert buffers.fits(x), (x.shape, x.dtype, buffers.capacity)
    words = x.view(-1).view(torch.int32)
    _exchange_kernel[(triton.cdiv(len(words), buffers.block),)](
        words,
        out.view(-1).view(torch.int32),
        buffers.addresses,
        buffers.numbers,
        buffers.abort,
        len(words),
        buffers.capacity,
        RANK=buffers.rank,
        SIZE=buffers.size,
        BLOCK=buffers.block,
        DTYPE=tl.float32 if gather else TRITON_DTYPES[x.dtype],
        GATHER=gather,
        num_warps=max(1, buffers.block // 128),
        **pdl_options(x),
    )


def all_reduce(x: Tensor, buffers: PeerBuffers) -> Tensor:
    """The sum of all ranks' x (float32, bfloat16 or float16), added in float32, in x's own memory."""
    _exchange(x, x, buffers, gather=False)
    return x


def all_gather(x: Tensor, buffers: PeerBuffers) -> Tensor:
    """x [...] of every rank -> [ranks, ...]."""
    gathered = x.new_empty((buffers.size, *x.shape))
    _exchange(x, gathered, buffers, gather=True)
    return gathered
