"""PeerGroup: the ranks of one host exchange small tensors through each other's GPU memory, and large ones as before."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from nanoinfer.kernels import peer_exchange
from nanoinfer.layers.group import Group
from nanoinfer.runner.peer_memory import PeerMemory

MOST_SENT = 4 << 20  # bytes of a tensor times the ranks to send it to; beyond, NCCL is faster (H200, NVLink)


def with_peer_memory(
    group: Group, device: torch.device, *, most_sent: int = MOST_SENT, lines: int = peer_exchange.LINES
) -> Group:
    """`group` itself where its ranks cannot write each other's memory. All ranks must call this."""
    data = peer_exchange.WORD_BYTES * peer_exchange.DATA.value * lines
    capacity = -(-most_sent // (group.size - 1) // data) * lines
    with torch.cuda.device(device):
        memory = PeerMemory(group, peer_exchange.PeerBuffers.nbytes(group.size, capacity), device)
    if memory.addresses is None:
        memory.close()
        return group
    buffers = peer_exchange.PeerBuffers.at(memory.addresses, group.rank, capacity, device, lines)
    return PeerGroup(group, memory, buffers, device)


class PeerGroup(Group):
    """A group of GPUs of one host. `inner` does what does not fit into the peers' buffers."""

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
        if self._buffers.fits(x):
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
