"""Watch: a thread of rank 0 that acts where the main thread cannot, because that waits in a collective operation.

The main thread is then deaf: Python runs no signal handler before the operation returns, and with NCCL it would wait
for a rank that is dead for as long as it takes. So the watch ends the operation.
"""

from __future__ import annotations

import math
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from nanoinfer.runner.ranks import Ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Watch:
    """Watches the ranks, the time and the signals while steps are under way. `abort` makes collectives fail.

    `tripped` says that it had to act.
    """

    def __init__(self, ranks: Ranks, timeout_s: float, abort: Callable[[], None]) -> None:
        self.tripped = False
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._abort = abort
        self._aborting: threading.Thread | None = None
        # When each step under way was launched, by its number. Replaced and never changed, since the thread reads it.
        self._began: dict[int, float] = {}
        self._wake, self._awake = socket.socketpair()
        # The system's own signal handler writes a byte here for every signal, whatever the main thread is doing.
        self._signals, self._signals_end = socket.socketpair()
        for end in (self._signals, self._signals_end):
            end.setblocking(False)
        self._arrived: list[int] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="nanoinfer-watch", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        """Step number `step` is launched."""
        self._began = {**self._began, step: time.monotonic()}

    def end(self, step: int) -> None:
        """This step has its result, and all before it have run, even if nobody asked for theirs."""
        self._began = {number: began for number, began in self._began.items() if number > step}

    def discard(self) -> None:
        """Nobody will ask for the result of what is under way now."""
        self._began = {}

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Hold back signals until the end: a rank that leaves a step in its middle leaves the others in it.

        A second signal ends the other ranks, so that the step fails at once. Only the main thread hears signals.
        """
        handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            found = ((signum, signal.getsignal(signum)) for signum in SIGNALS)
            handlers = {signum: handler for signum, handler in found if callable(handler)}
        if not handlers:
            yield
            return
        self._arrived.clear()
        wakeup = signal.set_wakeup_fd(self._signals_end.fileno(), warn_on_full_buffer=False)
        for signum in handlers:
            signal.signal(signum, lambda signum, frame: None)
        try:
            yield
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for signum in self._read_signals():
            if signum in handlers:
                handlers[signum](signum, None)

    def abort(self) -> threading.Thread:
        """Abort in a thread of its own, once. NCCL makes its kernels end at once, but the call returns only when no
        CUDA graph with one of them is left."""
        if self._aborting is None:
            self._aborting = threading.Thread(target=self._abort_quietly, name="nanoinfer-abort", daemon=True)
            self._aborting.start()
        return self._aborting

    def _abort_quietly(self) -> None:
        with suppress(RuntimeError):  # what went wrong is told by the step
            self._abort()

    def close(self) -> None:
        self._awake.close()
        self._thread.join()
        for end in (self._wake, self._signals, self._signals_end):
            end.close()

    def _read_signals(self) -> list[int]:
        """All that have arrived since the step began."""
        with self._lock:
            try:
                self._arrived += self._signals.recv(64)
            except BlockingIOError:
                pass
            return self._arrived.copy()

    def _run(self) -> None:
        poller = select.poll()
        streams = {self._wake.fileno(), self._signals.fileno()}
        ranks = {stream.fileno() for stream in self._ranks.streams()}
        for fd in streams | ranks:
            poller.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll(1000)}
            if self._wake.fileno() in ready:
                return
            if self._signals.fileno() in ready and len(self._read_signals()) > 1:
                self._trip()
                self._ranks.end_processes()
            # Nobody has anything to tell while all is well. What it is, the main thread reads.
            if told := ready & ranks:
                for fd in told:
                    poller.unregister(fd)
                ranks -= told
                self._trip()
            if time.monotonic() - min(self._began.values(), default=math.inf) > self._timeout_s:
                self._trip()

    def _trip(self) -> None:
        if not self.tripped:
            self.tripped = True
            self.abort()
