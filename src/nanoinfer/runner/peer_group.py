"""PeerGroup: GPUs of one host exchange through each other's memory, which NCCL beats where many send much."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from nanoinfer.kernels import peer_exchange
from nanoinfer.layers.group import Group
from nanoinfer.runner.peer_memory import PeerMemory

PIECE = 16 << 20  # bytes that two ranks exchange at a time: larger pieces are no faster (H200, NVLink)
MOST_SENT = 8 << 20  # bytes of a tensor times the ranks to send it to, where they are several; beyond, NCCL sends less


def with_peer_memory(
    group: Group, device: torch.device, *, piece: int | None = None, lines: int = peer_exchange.LINES
) -> Group:
    """`group` itself where its ranks cannot write each other's memory. All ranks must call this."""
    others = group.size - 1
    piece = piece or (PIECE if others == 1 else MOST_SENT // others)
    capacity = -(-piece // (peer_exchange.LINE_DATA_BYTES * lines)) * lines
    with torch.cuda.device(device):
        memory = PeerMemory(group, peer_exchange.PeerBuffers.nbytes(group.size, capacity), device)
    if memory.addresses is None:
        return group
    buffers = peer_exchange.PeerBuffers.at(memory.addresses, group.rank, capacity, device, lines)
    return PeerGroup(group, memory, buffers, device)


class PeerGroup(Group):
    """A group of GPUs of one host. `inner` does what does not fit into the peers' buffers.

    Of two ranks each must send all it has in any case, so they sum what does not fit in pieces.
    """

    def __init__(
        self, inner: Group, memory: PeerMemory, buffers: peer_exchange.PeerBuffers, device: torch.device
    ) -> None:
        super().__init__(inner.partition, inner.ranks_on_host)
        self._inner = inner
        self._memory = memory
        self._buffers = buffers
        self._device = device
        self._one = torch.ones(1, dtype=torch.int32, pin_memory=True)
        self._abort_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._buffers.fits(x) or (self.size == 2 and self._buffers.is_whole(x)):
            return peer_exchange.all_reduce(x, self._buffers)
        return self._inner.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return peer_exchange.all_gather(x, self._buffers) if self._buffers.fits(x) else self._inner.all_gather(x)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._inner.broadcast(x)

    def all_reduce_min(self, value: int) -> int:
        return self._inner.all_reduce_min(value)

    def abort(self) -> None:
        # A copy, since the device may have no room for another kernel beside those that wait.
        with torch.cuda.device(self._device), torch.cuda.stream(self._abort_stream):
            self._buffers.abort.copy_(self._one, non_blocking=True)
        self._inner.abort()

    def close(self) -> None:
        with ExitStack() as stack:  # all of it, also where the device has failed
            stack.callback(self._inner.close)
            stack.callback(self._memory.close)
            self.abort()  # steps that were given up may wait for ranks that have left
            torch.cuda.synchronize(self._device)
