"""What torchrun's variables mean, and how its ranks find rank 0."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from engines import make_engine

from nanoinfer import worker
from nanoinfer.errors import ConfigError, EngineError
from nanoinfer.runner.torchrun import Launch, accept, connect

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1",
}  # fmt: skip


def test_a_launch_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert Launch.from_environment() is None
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    launch = Launch.from_environment()
    assert launch == Launch(rank=5, size=8, local_rank=1, ranks_on_host=4)
    launch.check(8)
    with pytest.raises(ConfigError, match="8 processes were started together, but --tp is 2; use --tp 8"):
        launch.check(2)
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert Launch.from_environment() == Launch(5, 8, 5, 8)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Launch.from_environment() is None


class Store:
    """torch.distributed's, as far as it is used here."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._is_set = threading.Event()
        self.on_set: Callable[[], object] = lambda: None

    timeout = timedelta(seconds=10)

    def set_timeout(self, timeout: timedelta) -> None: ...

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()
        self._is_set.set()
        self.on_set()

    def get(self, key: str) -> bytes:
        assert self._is_set.wait(100)
        return self._values[key]

    def connect(self) -> socket.socket:
        host, port = self.get("nanoinfer/rank0").decode().rsplit(":", 1)
        return socket.create_connection((host, int(port)))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return Store()


def say_nothing(stream: socket.socket) -> None: ...


def leave(stream: socket.socket) -> None:
    stream.close()


def talk_about_something_else(stream: socket.socket) -> None:
    stream.sendall(b"GET / HTTP/1.1\r\n\r\n")
    stream.close()


@pytest.mark.timeout(100)
@pytest.mark.parametrize("peer", [say_nothing, leave, talk_about_something_else])
def test_a_rank_that_does_not_say_which_it_is_has_not_connected(
    store: Store, peer: Callable[[socket.socket], None]
) -> None:
    """Rank 0 waited for it for ever."""
    peers = []

    def come() -> None:
        """Before rank 0 begins to wait."""
        peers.append(store.connect())
        peer(peers[0])

    store.on_set = come
    with pytest.raises(EngineError, match=r"ranks \[1\] did not connect within 0\.1 s"):
        accept(store, Launch(0, 2, 0, 2), 0.1)
    peers[0].close()


@pytest.mark.parametrize("ranks_on_host", [3, 1], ids=["one host", "three hosts"])
def test_connected_ranks_may_be_silent_and_strangers_do_not_matter(
    store: Store, ranks_on_host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port scan ended the start. With several hosts a name that is loopback here must not be where rank 0 listens."""
    addresses = []
    create_server = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda address: addresses.append(address[0]) or create_server(address))
    channels = []
    threads = [
        threading.Thread(target=lambda rank=rank: channels.append(connect(store, Launch(rank, 3, rank, 3))))
        for rank in (2, 1)
    ]
    store.on_set = lambda: talk_about_something_else(store.connect())
    for thread in threads:
        thread.start()
    ranks = accept(store, Launch(0, 3, 0, ranks_on_host), 100)
    assert addresses == ["127.0.0.1" if ranks_on_host == 3 else ""]
    for thread in threads:
        thread.join()
    assert [stream.gettimeout() for stream in ranks.streams()] == [None, None]
    ranks.kill()
    for channel in channels:
        channel.stream.close()


def test_other_ranks_have_as_many_steps_under_way_as_rank_0() -> None:
    engine, _ = make_engine(overlap=True)
    assert engine._max_in_flight + 1 == worker.MAX_IN_FLIGHT
