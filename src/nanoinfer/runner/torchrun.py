"""Ranks that torchrun, or anything that sets its variables, has started: on one host or several."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from nanoinfer.errors import ConfigError, EngineError
from nanoinfer.runner.channel import Channel
from nanoinfer.runner.ranks import Ranks, Worker

_ADDRESS = "nanoinfer/rank0"
_HELLO_S, _HELLO_BYTES = 5, 1000  # for a rank that has connected to say which it is


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
    name = os.environ["MASTER_ADDR"]  # what the others call this host; here it may stand for another address
    workers: list[Worker] = []
    with _listen(name, is_one_host=launch.ranks_on_host == launch.size) as listener:
        store.set(_ADDRESS, f"{name}:{listener.getsockname()[1]}")
        deadline = time.monotonic() + timeout_s
        while len(workers) < launch.size - 1:
            listener.settimeout(_left(deadline))
            try:
                stream, _ = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, launch.size)) - {worker.rank for worker in workers})
                Ranks(workers).kill()
                raise EngineError(f"ranks {missing} did not connect within {timeout_s:g} s (--tp-timeout).") from None
            if worker := _greet(stream, min(_HELLO_S, _left(deadline))):
                workers.append(worker)
    return Ranks(sorted(workers, key=lambda worker: worker.rank))


def _listen(name: str, *, is_one_host: bool) -> socket.socket:
    """By the address that `name` stands for, so that no other network can reach the port; by all if the other hosts
    would not find it there: many systems give their own name to the loopback interface."""
    try:
        address = socket.gethostbyname(name)
        if is_one_host or not address.startswith("127."):
            return socket.create_server((address, 0))
    except OSError:  # no such name, or not this host's
        pass
    return socket.create_server(("", 0))


def _greet(stream: socket.socket, timeout_s: float) -> Worker | None:
    """The rank that has connected; None if it does not say which it is, like anything else that tries a port."""
    try:
        stream.settimeout(timeout_s)
        rank = Channel(stream).receive_report(_HELLO_BYTES)["rank"]
        stream.setblocking(True)
        _prepare(stream)
    except (OSError, EOFError, ValueError, KeyError):
        stream.close()
        return None
    return Worker(rank, Channel(stream), process=None)


def _prepare(stream: socket.socket) -> None:
    """Small messages go at once, and a host that is gone without a word is noticed within a minute."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if (option := getattr(socket, name, None)) is not None:
            stream.setsockopt(socket.IPPROTO_TCP, option, value)


def _left(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())


def connect(store: Any, launch: Launch) -> Channel:
    """On every other rank: its channel to rank 0, which may have prompts to read and a model to download before."""
    usual = store.timeout
    store.set_timeout(timedelta(days=365))  # the store goes with the process that has it, and that ends the wait
    host, port = store.get(_ADDRESS).decode().rsplit(":", 1)
    store.set_timeout(usual)
    channel = Channel(socket.create_connection((host, int(port))))
    _prepare(channel.stream)
    channel.send_report(rank=launch.rank)
    return channel
