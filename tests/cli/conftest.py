"""Every test here may run the program, and does so with a home of its own."""

from __future__ import annotations

import os

import pytest
from program import Program


@pytest.fixture
def nanoinfer(capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(capsysbinary, monkeypatch)


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration file, history or environment variable of whoever runs the tests."""
    home = tmp_path_factory.mktemp("home")
    for name in list(os.environ):
        if name.startswith("NANOINFER_") and name != "NANOINFER_SHARED":
            monkeypatch.delenv(name)
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(home / name))
