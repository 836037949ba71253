"""Ranks: the processes of ranks 1, 2, ... as rank 0 sees them: started, spoken to, watched, and ended. No torch.

Every rank but the first is a process of its own session, so that Ctrl-C at the terminal reaches rank 0 alone. It leaves
when its end of the channel is closed, which the system does for rank 0 however that dies. Nothing here has a name that
could be taken: channels are socket pairs, and there is no shared memory.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nanoinfer import errors
from nanoinfer.errors import EngineError, NanoinferError
from nanoinfer.runner.channel import STOP, Channel

T = TypeVar("T")

WORKER_COMMAND = [sys.executable, "-P", "-m", "nanoinfer.worker"]
STOP_PATIENCE_S = 10.0  # for a rank that was told to stop
REPORT_PATIENCE_S = 2.0  # for reports of ranks after something failed


@dataclass
class Worker:
    """One rank, and the last thing that it told."""

    rank: int
    channel: Channel
    process: subprocess.Popen[bytes] | None  # None: somebody else started it
    report: dict[str, Any] | None = None
    is_gone: bool = False

    @property
    def is_failed(self) -> bool:
        return self.is_gone or (self.report is not None and "error" in self.report)

    def read(self) -> None:
        """Take in the report that waits in the channel, or that the rank is gone."""
        try:
            self.report = self.channel.receive_report()
        except EOFError:
            self.is_gone = True


class Ranks:
    """All ranks but this one. `kill` may be called at any time, any number of times."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self._finalizer = weakref.finalize(self, _kill, workers)

    @classmethod
    def start(cls, size: int) -> Ranks:
        """Start size - 1 processes on this host; they import what they need while the caller does the same."""
        ranks = cls([])
        try:
            for rank in range(1, size):
                ours, theirs = socket.socketpair()
                with theirs:
                    process = _spawn(theirs.fileno())
                ranks._workers.append(Worker(rank, Channel(ours), process))
        except BaseException as error:
            ranks.kill()
            if isinstance(error, OSError):
                raise EngineError(f"rank {rank} could not be started: {error}.") from error
            raise
        return ranks

    def tell(self, message: Callable[[int], dict[str, Any]]) -> None:
        """Send each rank its message; EngineError if one is gone."""
        for worker in self._workers:
            try:
                worker.channel.send_report(**message(worker.rank))
            except OSError:
                raise self.explain(None) from None

    def send(self, kind: int, payload: bytes) -> None:
        """The same bytes to all ranks; OSError if one is gone or reads nothing for as long as `limit_sending` says."""
        for worker in self._workers:
            worker.channel.send(kind, payload)

    def streams(self) -> list[socket.socket]:
        return [worker.channel.stream for worker in self._workers]

    def limit_sending(self, seconds: float) -> None:
        for worker in self._workers:
            worker.channel.stream.settimeout(seconds)

    # -- waiting and watching --------------------------------------------------------------------------------------

    def poll(self, seconds: float | None) -> list[Worker]:
        """The ranks that have something to tell, waiting up to `seconds` for the first (None: as long as it takes)."""
        poller, by_fd = select.poll(), {}
        for worker in self._workers:
            if not worker.is_gone:
                by_fd[worker.channel.stream.fileno()] = worker
                poller.register(worker.channel.stream, select.POLLIN)
        return [by_fd[fd] for fd, _ in poller.poll(None if seconds is None else max(0.0, seconds) * 1e3)]

    def check(self) -> None:
        """Raise if a rank has failed; returns at once."""
        for worker in self.poll(0):
            worker.read()
        if any(worker.is_failed for worker in self._workers):
            raise self.explain(None)

    def wait_for(self, stage: str) -> None:
        """Wait until every rank has reported `stage`; raises if one fails."""
        while any(worker.report != {"stage": stage} for worker in self._workers):
            for worker in self.poll(None):
                worker.read()
            self.check()

    def watching(self, function: Callable[[], T]) -> T:
        """function() in a thread of its own, given up when a rank fails: for what blocks and cannot be interrupted."""
        outcome: list[T | BaseException] = []

        def run() -> None:
            try:
                outcome.append(function())
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=run, name="nanoinfer-connect", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.02)
            self.check()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    @contextmanager
    def on_loss(self, function: Callable[[], None]) -> Iterator[None]:
        """Call function() in a thread as soon as a rank closes its channel; what ranks tell stays to be read."""
        hung_up = getattr(select, "POLLRDHUP", 0)
        poller, (ours, theirs) = select.poll(), socket.socketpair()
        for stream in [*self.streams(), theirs]:
            poller.register(stream, hung_up)

        def wait() -> None:
            if theirs.fileno() not in {fd for fd, _ in poller.poll()}:
                with suppress(RuntimeError):
                    function()

        thread = threading.Thread(target=wait, name="nanoinfer-on-loss", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ours.close()
            thread.join()
            theirs.close()

    # -- the end ---------------------------------------------------------------------------------------------------

    def explain(self, error: Exception | None) -> NanoinferError:
        """What went wrong, in one sentence, after `error` on this rank or None if another rank failed first.

        A rank that failed on its own account comes before those that only lost their connection to it.
        """
        deadline = time.monotonic() + REPORT_PATIENCE_S
        while (left := deadline - time.monotonic()) > 0 and not any(map(_is_cause, self._workers)):
            if not (told := self.poll(left)):
                break
            for worker in told:
                worker.read()
            if all(worker.is_gone for worker in self._workers):
                break
        for worker in self._workers:
            if worker.report is not None and "error" in worker.report and not worker.report["is_secondary"]:
                return _reported(worker.rank, worker.report)
        for worker in self._workers:
            if worker.is_gone and not (worker.report and "error" in worker.report):
                return EngineError(f"rank {worker.rank} {_how_it_ended(worker.process)}; the engine has stopped.")
        silent = [str(worker.rank) for worker in self._workers if not worker.is_failed]
        if silent:
            which = f"rank{'s' * (len(silent) > 1)} {', '.join(silent)}"
            return EngineError(f"{which} did not answer in time (--tp-timeout); the engine has stopped.")
        messages = [str(worker.report["message"]) for worker in self._workers if worker.report is not None]
        return EngineError(f"the ranks lost each other ({error or messages[0]}); the engine has stopped.")

    def stop(self) -> None:
        """Ask all ranks to end, and end those that do not."""
        for worker in self._workers:
            try:
                worker.channel.send(STOP)
            except OSError:  # gone already
                pass
        deadline = time.monotonic() + STOP_PATIENCE_S
        for worker in self._workers:
            try:
                _wait_for_end(worker, max(0.01, deadline - time.monotonic()))
            except (OSError, subprocess.TimeoutExpired):
                pass
        self.kill()

    def end_processes(self) -> None:
        """`kill` for another thread: does not wait, and leaves the rest to the main thread."""
        for worker in self._workers:
            if worker.process is not None and worker.process.returncode is None:
                os.kill(worker.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End all ranks at once; returns when their processes are gone."""
        _kill(self._workers)


def _wait_for_end(worker: Worker, seconds: float) -> None:
    if worker.process is not None:
        worker.process.wait(seconds)
    else:
        worker.channel.stream.settimeout(seconds)
        worker.channel.stream.recv(1)  # it has nothing to say, so this is its end


def _kill(workers: list[Worker]) -> None:
    for worker in workers:
        if worker.process is not None and worker.process.poll() is None:
            worker.process.kill()
    for worker in workers:
        worker.channel.stream.close()
        if worker.process is not None:
            worker.process.wait()
    workers.clear()


def _spawn(fd: int) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    root = str(Path(errors.__file__).parents[1])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), root]))
    return subprocess.Popen(
        [*WORKER_COMMAND, str(fd)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # standard output is for results
        pass_fds=(fd,),
        env=environment,
        start_new_session=True,
    )


def _is_cause(worker: Worker) -> bool:
    if worker.report is not None and "error" in worker.report:
        return not worker.report["is_secondary"]
    return worker.is_gone


def _reported(rank: int, report: dict[str, Any]) -> NanoinferError:
    kind = getattr(errors, report["error"], None)
    if kind is not None and issubclass(kind, errors.UserError):
        error: NanoinferError = kind(report["message"])
    else:
        error = EngineError(f"rank {rank} failed: {report['message']}")
    error.add_note(f"on rank {rank}:\n{report['traceback']}")
    return error


def _how_it_ended(process: subprocess.Popen[bytes] | None) -> str:
    if process is None:
        return "is gone"
    try:
        code = process.wait(REPORT_PATIENCE_S)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    if code >= 0:
        return f"(process {process.pid}) ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = ", perhaps because memory ran out" if -code == signal.SIGKILL else ""
    return f"(process {process.pid}) was ended by {name}{hint}"
