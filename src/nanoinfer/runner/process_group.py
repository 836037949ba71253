"""DistributedGroup: the collective operations of several ranks, through torch.distributed's back ends.

The back end is made directly and not as torch's default process group, of which a process has only one: so two engines
can be in one process. GPUs of one host exchange tensors through each other's memory (`peer_group`), which NCCL
would take several times as long for.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    ReduceOp,
)

from nanoinfer.errors import RankError
from nanoinfer.layers.group import Group
from nanoinfer.models.partition import Partition

LOCAL_HOST = "127.0.0.1"


def open_store(partition: Partition, address: tuple[str, int] | None, timeout_s: float) -> Any:
    """The TCPStore where the ranks of one host find each other; rank 0 serves it on a port that the system picks."""
    timeout = timedelta(seconds=timeout_s)
    if address is not None:
        return TCPStore(*address, partition.size, False, timeout)
    # Bound here and not by the store, which would listen on every network interface.
    listener = socket.create_server((LOCAL_HOST, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        LOCAL_HOST, port, partition.size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class DistributedGroup(Group):
    """gloo for CPU tensors, NCCL for CUDA tensors. RankError if an operation fails or takes longer than the time-out.

    The constructor waits for all ranks.
    """

    def __init__(
        self,
        store: Store,
        partition: Partition,
        device: torch.device,
        *,
        ranks_on_host: int,
        timeout_s: float,
    ) -> None:
        super().__init__(partition, ranks_on_host)
        self._store: Store | None = store
        self._device = device
        timeout = timedelta(seconds=timeout_s)
        make = _nccl if device.type == "cuda" else _gloo
        try:
            self._backend: Any = make(store, partition, timeout, one_host=ranks_on_host == partition.size)
        except RuntimeError as error:
            raise RankError(f"the ranks could not connect to each other: {_first_line(error)}") from error
        self._sum, self._min = AllreduceOptions(), AllreduceOptions()
        self._min.reduceOp = ReduceOp.MIN  # type: ignore[assignment]
        self._gather, self._broadcast = AllgatherOptions(), BroadcastOptions()
        # On the current stream itself: no second stream to wait for, and simply a part of the graph under capture.
        for options in (self._sum, self._gather, self._broadcast):
            options.asyncOp = False
        self.all_reduce_min(0)  # NCCL connects with the first operation; here it may still be waited for

    def all_reduce(self, x: Tensor) -> Tensor:
        self._finish(self._backend.allreduce, [x], self._sum)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._finish(self._backend._allgather_base, gathered, x.contiguous(), self._gather)
        return gathered.view(self.size, *x.shape)

    def broadcast(self, x: Tensor) -> Tensor:
        self._finish(self._backend.broadcast, [x], self._broadcast)
        return x

    def all_reduce_min(self, value: int) -> int:
        x = torch.tensor([value], dtype=torch.int64, device=self._device)
        self._finish(self._backend.allreduce, [x], self._min)
        return int(x)

    def _finish(self, operation: Any, *arguments: Any) -> None:
        try:
            work = operation(*arguments)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise RankError(f"an exchange between ranks failed: {_first_line(error)}") from error

    def abort(self) -> None:
        if self._device.type == "cuda":  # gloo fails by itself when a connection closes or its time is up
            self._backend.abort()

    def close(self) -> None:
        if self._backend is not None:
            # Ranks close one after the other, and NCCL's orderly end waits for all of them.
            end = self._backend.abort if self._device.type == "cuda" else self._backend.shutdown
            self._backend = self._store = None  # also if that fails
            end()


def join_ranks(
    store: Store, partition: Partition, device: torch.device, *, ranks_on_host: int, timeout_s: float
) -> Group:
    """The group of all ranks by the fastest way between them. Waits for all ranks; RankError as in DistributedGroup."""
    group = DistributedGroup(store, partition, device, ranks_on_host=ranks_on_host, timeout_s=timeout_s)
    if device.type != "cuda" or ranks_on_host < partition.size or importlib.util.find_spec("triton") is None:
        return group
    from nanoinfer.runner.peer_group import with_peer_memory

    return with_peer_memory(group, device)


def _gloo(store: Store, partition: Partition, timeout: timedelta, *, one_host: bool) -> Any:
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # Between hosts GLOO_SOCKET_IFNAME and the host's name decide, as everywhere in torch.
    device = ProcessGroupGloo.create_device(hostname=LOCAL_HOST) if one_host else None
    options._devices = [device or ProcessGroupGloo.create_default_device()]
    options._timeout = timeout
    return ProcessGroupGloo(store, partition.rank, partition.size, options)


def _nccl(store: Store, partition: Partition, timeout: timedelta, *, one_host: bool) -> Any:
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    # torch would end this process when a collective takes too long. `runner.watch` keeps the time, and only ends the
    # collective; nor need torch keep a record of all collectives for that case, which costs each of them some 10 us.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=365)
    return ProcessGroupNCCL(store, partition.rank, partition.size, options)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
