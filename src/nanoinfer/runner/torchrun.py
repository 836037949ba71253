"""Ranks that torchrun, or anything that sets its variables, has started: on one host or several."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from typing import Any

from nanoinfer.errors import ConfigError, EngineError
from nanoinfer.runner.channel import Channel
from nanoinfer.runner.ranks import Ranks, Worker

_ADDRESS = "nanoinfer/rank0"


@dataclass(frozen=True)
class Launch:
    """What the environment says about this process: its rank among all, and among those of its host."""

    rank: int
    size: int
    local_rank: int
    ranks_on_host: int

    @classmethod
    def from_environment(cls) -> Launch | None:
        """None unless this process is one of several that were started together."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if any(name not in os.environ for name in names) or int(os.environ["WORLD_SIZE"]) == 1:
            return None
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        return cls(rank, size, int(os.environ.get("LOCAL_RANK", rank)), local_size)

    def check(self, tp: int) -> None:
        """ConfigError unless all of these processes are ranks of one model."""
        if tp != self.size:
            raise ConfigError(f"{self.size} processes were started together, but --tp is {tp}; use --tp {self.size}.")


def rendezvous() -> Any:
    """torch.distributed's store of these processes, from the environment; waits for the one that has it."""
    from torch.distributed.rendezvous import rendezvous as meet

    store, _, _ = next(meet("env://"))
    return store


def accept(store: Any, launch: Launch, timeout_s: float) -> Ranks:
    """On rank 0: the channels to all other ranks, which connect to it. EngineError if one does not come in time."""
    # The address by which the others know this host, so that no other network can reach the port.
    host = socket.gethostbyname(os.environ["MASTER_ADDR"])
    workers: list[Worker] = []
    with socket.create_server((host, 0)) as listener:
        store.set(_ADDRESS, f"{host}:{listener.getsockname()[1]}")
        deadline = time.monotonic() + timeout_s
        while len(workers) < launch.size - 1:
            try:
                workers.append(_accept_one(listener, deadline))
            except (OSError, EOFError):  # also of a rank that has connected and left, or says nothing
                missing = sorted(set(range(1, launch.size)) - {worker.rank for worker in workers})
                Ranks(workers).kill()
                raise EngineError(f"ranks {missing} did not connect within {timeout_s:g} s (--tp-timeout).") from None
    return Ranks(sorted(workers, key=lambda worker: worker.rank))


def _accept_one(listener: socket.socket, deadline: float) -> Worker:
    """The next rank that connects and says which it is; OSError or EOFError if none does."""
    listener.settimeout(_left(deadline))
    stream, _ = listener.accept()
    try:
        stream.settimeout(_left(deadline))
        rank = Channel(stream).receive_report()["rank"]
        stream.setblocking(True)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        stream.close()
        raise
    return Worker(rank, Channel(stream), process=None)


def _left(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())


def connect(store: Any, launch: Launch) -> Channel:
    """On every other rank: its channel to rank 0."""
    host, port = store.get(_ADDRESS).decode().rsplit(":", 1)
    channel = Channel(socket.create_connection((host, int(port))))
    channel.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel.send_report(rank=launch.rank)
    return channel
