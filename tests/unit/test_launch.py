"""What torchrun's variables mean."""

from __future__ import annotations

import pytest

from nanoinfer.errors import ConfigError
from nanoinfer.runner.torchrun import Launch

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
