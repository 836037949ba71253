"""Runs the program inside the test process, with a stand-in engine and a home of its own."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM

from nanoinfer.cli.app import main
from nanoinfer.cli.length_check import PromptLimits
from nanoinfer.cli.session import Services
from nanoinfer.config import EngineConfig


@dataclass
class Result:
    code: int
    out: str
    err: str


class Program:
    """Calls `nanoinfer ARGUMENTS`. `llm` is the engine of the last call; `make` builds it from its config."""

    def __init__(self, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capture = capsysbinary
        self._monkeypatch = monkeypatch
        self.llm: Any = None
        self.make: Callable[[EngineConfig], Any] = FakeLLM
        self.limits: PromptLimits | None = None  # what is known of the model before it is loaded

    def _open(self, config: EngineConfig, notify: object) -> Any:
        self.llm = self.make(config)
        return self.llm

    def __call__(self, *arguments: str | Path, stdin: str | bytes = "") -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        with pytest.raises(SystemExit) as exit_info:
            main(
                [str(argument) for argument in arguments], Services(self._open, find_limits=lambda config: self.limits)
            )
        out, err = self._capture.readouterr()
        code = exit_info.value.code
        assert code is None or isinstance(code, int)
        return Result(code or 0, out.decode(), err.decode())
