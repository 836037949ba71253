"""Watch: a thread of rank 0 that acts where the main thread cannot, because that waits in a collective operation.

The main thread is then deaf: Python runs no signal handler before the operation returns, and with NCCL it would wait
for a rank that is dead for as long as it takes. So the watch ends the operation.
"""

from __future__ import annotations

# signal's own functions look each handler up in an enumeration, which takes ten times as long
import _signal  # type: ignore[import-not-found]
import math
import select
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from nanoinfer.runner.ranks import Ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_MS = 1000  # how often the time-out is looked at


class Watch:
    """Watches the ranks, always, and time and signals while somebody waits for a step. `abort` ends collectives.

    `tripped` says that it had to act; it never becomes false again. What that means, ParallelExecutor decides.
    """

    def __init__(self, ranks: Ranks, timeout_s: float, abort: Callable[[], None]) -> None:
        self.tripped = False
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._abort = abort
        self._aborting: threading.Thread | None = None
        self._waiting_since = math.inf
        self._wake, self._awake = socket.socketpair()
        # The system's own signal handler writes a byte here for every signal, whatever the main thread is doing.
        self._signals, self._signals_end = socket.socketpair()
        for end in (self._signals, self._signals_end):
            end.setblocking(False)
        self._arrived: list[int] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="nanoinfer-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Somebody waits for a step, which from now on has the time-out to end."""
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = math.inf

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Hold back signals until the end: a rank that leaves a step in its middle leaves the others in it.

        A second signal ends the other ranks, so that the step fails at once. Only the main thread hears signals.
        """
        handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            found = ((signum, _signal.getsignal(signum)) for signum in SIGNALS)
            handlers = {signum: handler for signum, handler in found if callable(handler)}
        if not handlers:
            yield
            return
        self._forget_signals()
        held: list[int] = []
        is_over = False

        def hear(signum: int, frame: Any) -> None:
            if is_over:  # a handler that was given back first has raised, and this one stayed
                handlers[signum](signum, frame)
            else:
                held.append(signum)

        try:
            for signum in handlers:
                _signal.signal(signum, hear)
            wakeup = signal.set_wakeup_fd(self._signals_end.fileno(), warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        finally:
            with ExitStack() as stack:  # from the last to the first, whatever the handlers that are back already raise
                stack.callback(self._deliver, held)
                for signum, handler in handlers.items():  # that of SIGINT, which most often raises, comes last
                    stack.callback(_signal.signal, signum, handler)
                is_over = True

    def _deliver(self, held: list[int]) -> None:
        """Raise again what arrived during the step. Of several equal signals that came while the main thread was deaf,
        Python's handler has heard one (in `held`), but each has left a byte."""
        arrived = self._read_signals()
        if arrived or held:
            with ExitStack() as stack:
                for signum in reversed(list((Counter(arrived) | Counter(held)).elements())):
                    stack.callback(signal.raise_signal, signum)

    def abort(self) -> threading.Thread:
        """Abort in a thread of its own, once. NCCL makes its kernels end at once, but the call returns only when no
        CUDA graph with one of them is left."""
        with self._lock:  # the watch and the main thread may come at the same time
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
                # A byte comes for every signal that has a handler in Python, such as SIGCHLD.
                self._arrived += [signum for signum in self._signals.recv(64) if signum in SIGNALS]
            except BlockingIOError:
                pass
            return self._arrived.copy()

    def _forget_signals(self) -> None:
        self._read_signals()
        with self._lock:
            self._arrived.clear()

    def _run(self) -> None:
        poller = select.poll()
        streams = {self._wake.fileno(), self._signals.fileno()}
        ranks = {stream.fileno() for stream in self._ranks.streams()}
        for fd in streams | ranks:
            poller.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll(LOOK_MS)}
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
            if time.monotonic() - self._waiting_since > self._timeout_s:
                self._trip()

    def _trip(self) -> None:
        if not self.tripped:
            self.tripped = True
            self.abort()
