"""Sums and gathers over ranks through memory that each can write in the others: one kernel, no barrier.

A rank sends its data to every other in lines of 128 bytes: 31 words of data and the number of the exchange (as the
"LL128" protocol of NCCL does). Eight neighbouring threads store a line in one instruction, 16 bytes each, and NVLink
delivers it whole, so its number says that its data is there. The receiver needs no other signal: an exchange costs one
way through NVLink.

Exchanges alternate between two slots. A rank that sends its exchange n has everybody's n - 1, which they sent after
reading n - 2: so nothing is overwritten that somebody still reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.common import INTERPRETED, enter, pdl_options, wait_for_inputs

WORD_BYTES = 4
LINE: tl.constexpr = tl.constexpr(32)  # words that arrive together
DATA: tl.constexpr = tl.constexpr(31)  # of them, words of data; the last one is the number
LINE_BYTES: int = LINE.value * WORD_BYTES
LINE_DATA_BYTES: int = DATA.value * WORD_BYTES
LINES = 8  # of a program: one warp, which needs no barrier to see that all have arrived


@dataclass(frozen=True)
class PeerBuffers:
    """What the kernel knows of the ranks' memory; see `nbytes` for the size of each rank's buffer, all zeros at first.

    addresses int64 [ranks]: of each rank's buffer, as seen from this device. numbers int32 [capacity / lines]: of the
    last exchange of each program, 0 at first. abort int32 [1]: set to 1 by the host, it ends all waiting.
    """

    rank: int
    capacity: int  # lines, a multiple of `lines`
    addresses: Tensor
    numbers: Tensor
    abort: Tensor
    lines: int = LINES  # of a program

    @classmethod
    def at(
        cls, addresses: list[int], rank: int, capacity: int, device: torch.device, lines: int = LINES
    ) -> PeerBuffers:
        assert capacity % lines == 0, (capacity, lines)
        return cls(
            rank,
            capacity,
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(capacity // lines, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            lines,
        )

    @property
    def size(self) -> int:
        return len(self.addresses)

    @staticmethod
    def nbytes(size: int, capacity: int) -> int:
        """Bytes of one rank's buffer: two slots, in each of which every other rank has its lines."""
        return 2 * (size - 1) * capacity * LINE_BYTES

    def is_whole(self, x: Tensor) -> bool:
        """Whether x is whole words in one piece: what can be exchanged, if need be in several parts."""
        whole = x.numel() * x.element_size() % WORD_BYTES == 0 and x.data_ptr() % WORD_BYTES == 0
        return x.numel() > 0 and whole and x.is_contiguous()

    def fits(self, x: Tensor) -> bool:
        """Whether x can be exchanged at once."""
        return self.is_whole(x) and x.numel() * x.element_size() <= self.capacity * LINE_DATA_BYTES


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
    return tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int32)), 128)


@triton.jit
def _part(sender: tl.constexpr, receiver: tl.constexpr):
    """Where the sender's lines are in a slot of the receiver's buffer, which has no part for itself."""
    return sender - 1 if sender > receiver else sender


@triton.jit
def _send(words, number, addresses_ptr, place, present, rank_words, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Store the lines of words [LINES, LINE] that are present [LINES, 1], with the number, in every other rank."""
    is_data = tl.arange(0, LINE)[None, :] < DATA
    numbered = tl.where(is_data, words, number)
    slot = (number & 1).to(tl.int64) * (SIZE - 1) * rank_words
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            there = _buffer(addresses_ptr, rank) + slot + _part(RANK, rank) * rank_words + place
            tl.store(there, numbered, mask=present)


@triton.jit
def _received(
    rank: tl.constexpr,
    number,
    addresses_ptr,
    place,
    present,
    rank_words,
    abort_ptr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The lines that `rank` sends: waits for all of them."""
    is_number = tl.arange(0, LINE)[None, :] == DATA
    slot = (number & 1).to(tl.int64) * (SIZE - 1) * rank_words
    from_ptr = _buffer(addresses_ptr, RANK) + slot + _part(rank, RANK) * rank_words + place
    words = tl.load(from_ptr, mask=present, other=0, volatile=True)
    # While some are missing and nobody has set the flag; threads that see it at different times go on together.
    while tl.max(((words != number) & is_number & present).to(tl.int32) - tl.load(abort_ptr, volatile=True)) > 0:
        words = tl.load(from_ptr, mask=present, other=0, volatile=True)
    if INTERPRETED:  # it reads a line word by word, so what came before the number may be older
        words = tl.load(from_ptr, mask=present, other=0)
    return words


@triton.jit
def _sum_of_all(
    mine,
    number,
    addresses_ptr,
    place,
    present,
    rank_words,
    abort_ptr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """In the order of ranks, so that every rank has the same: the low halves of the words in float32, the high ones."""
    low = tl.zeros(mine.shape, tl.float32)
    high = tl.zeros(mine.shape, tl.float32)
    for rank in tl.static_range(SIZE):
        words = mine
        if rank != RANK:
            words = _received(rank, number, addresses_ptr, place, present, rank_words, abort_ptr, RANK, SIZE)
        low += _as_float(words, DTYPE)
        if DTYPE.primitive_bitwidth == 16:
            high += _as_float(words >> 16, DTYPE)
    return low, high


@triton.jit
def _as_words(low, high, DTYPE: tl.constexpr):
    words = _as_bits(low, DTYPE)
    if DTYPE.primitive_bitwidth == 16:
        words |= _as_bits(high, DTYPE) << 16
    return words


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
    LINES: tl.constexpr,
    DTYPE: tl.constexpr,
    GATHER: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    program = tl.program_id(0)
    line = program * LINES + tl.arange(0, LINES)[:, None]
    column = tl.arange(0, LINE)[None, :]
    word = line * DATA + column
    present = line * DATA < N
    valid = (column < DATA) & (word < N)
    place = (line * LINE + column).to(tl.int64)
    rank_words = CAPACITY.to(tl.int64) * LINE
    wait_for_inputs(PDL)
    number = tl.load(numbers_ptr + program) + 1
    mine = tl.load(x_ptr + word, mask=valid, other=0)
    _send(mine, number, addresses_ptr, place, present, rank_words, RANK, SIZE)
    if GATHER:
        for rank in tl.static_range(SIZE):
            words = mine
            if rank != RANK:
                words = _received(rank, number, addresses_ptr, place, present, rank_words, abort_ptr, RANK, SIZE)
            tl.store(out_ptr + rank * N + word, words, mask=valid)
    else:
        low, high = _sum_of_all(mine, number, addresses_ptr, place, present, rank_words, abort_ptr, RANK, SIZE, DTYPE)
        tl.store(out_ptr + word, _as_words(low, high, DTYPE), mask=valid)
    tl.store(numbers_ptr + program, number)


TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _exchange(x: Tensor, out: Tensor, buffers: PeerBuffers, *, gather: bool) -> None:
    assert buffers.fits(x), (x.shape, x.dtype, buffers.capacity)
    words = x.view(-1).view(torch.int32)
    _exchange_kernel[(triton.cdiv(len(words) * WORD_BYTES, buffers.lines * LINE_DATA_BYTES),)](
        words,
        out.view(-1).view(torch.int32),
        buffers.addresses,
        buffers.numbers,
        buffers.abort,
        len(words),
        buffers.capacity,
        RANK=buffers.rank,
        SIZE=buffers.size,
        LINES=buffers.lines,
        DTYPE=tl.float32 if gather else TRITON_DTYPES[x.dtype],
        GATHER=gather,
        num_warps=1,
        **pdl_options(x),
    )


def all_reduce(x: Tensor, buffers: PeerBuffers) -> Tensor:
    """The sum of all ranks' x (float32, bfloat16 or float16), added in float32, in x's own memory.

    In several exchanges where x is whole but does not fit.
    """
    for piece in x.view(-1).split(buffers.capacity * LINE_DATA_BYTES // x.element_size()):
        _exchange(piece, piece, buffers, gather=False)
    return x


def all_gather(x: Tensor, buffers: PeerBuffers) -> Tensor:
    """x [...] of every rank -> [ranks, ...]."""
    gathered = x.new_empty((buffers.size, *x.shape))
    _exchange(x, gathered, buffers, gather=True)
    return gathered
