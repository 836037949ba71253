"""Runs `nanoinfer generate` with the stand-in engine in processes that are killed, or that kill themselves.

The processes are forked from a server that has imported everything, so that one takes a few milliseconds.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

from fake_llm import FakeLLM

from nanoinfer.cli.app import main
from nanoinfer.cli.session import Services

CONTEXT = multiprocessing.get_context("forkserver")
STEP_S = 0.002


# One run at import time brings in all that a run imports while it goes on.
with (
    contextlib.redirect_stderr(io.StringIO()),
    contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())),
    contextlib.suppress(SystemExit),
):
    main(["generate", "-p", "x"], Services(lambda config, notify: FakeLLM(config), lambda config: None))


def start_server() -> None:
    """Import everything once. The server finds modules by PYTHONPATH only, before Python 3.13."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    CONTEXT.set_forkserver_preload([__name__])
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def start(arguments: list[str], log: Path, *, die_at: int | None = None) -> BaseProcess:
    """`nanoinfer ARGUMENTS` in a new process, its standard error in `log`. With `die_at` it kills itself at that point
    between, or in the middle of, the calls that change files."""
    start_server()
    process = CONTEXT.Process(target=_child, args=(arguments, str(log), die_at))
    process.start()
    return process


def _child(arguments: list[str], log: str, die_at: int | None) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if die_at is not None:
        _die_at(die_at)
    services = Services(
        lambda config, notify: FakeLLM(
            config, before_step=lambda step: time.sleep(0 if die_at is not None else STEP_S)
        ),
        find_limits=lambda config: None,
    )
    main(arguments, services)


def _die_at(point: int) -> None:
    """Make this process kill itself at one point: each call has one before it, one after it, and a write also one where
    half of the bytes are written."""
    points = iter(range(10**9))

    def reached() -> None:
        if next(points) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            reached()
            result = call(*arguments, **options)
            reached()
            return result

        return wrapped

    def write(fd: int, data: Any, real: Callable[[int, Any], int] = os.write) -> int:
        reached()
        if next(points) == point:
            real(fd, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        written = real(fd, data)
        reached()
        return written

    os.write = write
    for name in ("fsync", "ftruncate", "replace", "unlink"):
        setattr(os, name, around(getattr(os, name)))
