"""Ctrl-C and SIGTERM in two stages: the first asks the work under way to stop, the second leaves at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(BaseException):
    """SIGTERM arrived; a BaseException, as KeyboardInterrupt is, so that no `except Exception` swallows it."""


class Interrupts:
    """The signal handler of a command. Outside `deferred()` a signal raises where the program happens to be.

    Inside, the first signal only sets `signum`, so that an engine step is never cut in the middle; the second raises.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._deferring = False

    @property
    def requested(self) -> bool:
        return self.signum is not None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._deferring and self.signum is None:
            self.signum = signum
            return
        raise Terminated if signum == signal.SIGTERM else KeyboardInterrupt

    def raise_if_requested(self) -> None:
        """Raise what the deferred signal stands for; called where stopping is clean."""
        if self.signum is not None:
            raise Terminated if self.signum == signal.SIGTERM else KeyboardInterrupt

    @contextmanager
    def deferred(self) -> Iterator[Interrupts]:
        """Count signals instead of raising the first one. Each use starts with none counted."""
        self.signum, self._deferring = None, True
        try:
            yield self
        finally:
            self._deferring = False

    @classmethod
    @contextmanager
    def installed(cls) -> Iterator[Interrupts]:
        """Handle SIGINT and SIGTERM for the length of a command (in the main thread; elsewhere nothing changes)."""
        handler = cls()
        if threading.current_thread() is not threading.main_thread():
            yield handler
            return
        before = {signum: signal.signal(signum, handler._handle) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield handler
        finally:
            for signum, previous in before.items():
                signal.signal(signum, previous)

    @staticmethod
    def exit_code(raised: BaseException) -> int:
        return 128 + (signal.SIGTERM if isinstance(raised, Terminated) else signal.SIGINT)
