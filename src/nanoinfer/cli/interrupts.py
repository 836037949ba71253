"""Ctrl-C, SIGTERM and SIGHUP in two stages: the first asks the work under way to stop, the second leaves at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived; a BaseException, like KeyboardInterrupt, so that no `except Exception` swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


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
        _raise(signum)

    def raise_if_requested(self) -> None:
        """Raise what the deferred signal stands for; called where stopping is clean."""
        if self.signum is not None:
            _raise(self.signum)

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
        """Handle the three signals for the length of a command (in the main thread; elsewhere nothing changes).

        A signal that is ignored stays ignored: `nohup` ignores SIGHUP, a script's background job SIGINT.
        """
        handler = cls()
        if threading.current_thread() is not threading.main_thread():
            yield handler
            return
        signums = [signal.SIGINT, signal.SIGTERM] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
        handled = [signum for signum in signums if signal.getsignal(signum) != signal.SIG_IGN]
        before = {signum: signal.signal(signum, handler._handle) for signum in handled}
        try:
            yield handler
        finally:
            for signum, previous in before.items():
                signal.signal(signum, previous)

    @staticmethod
    def exit_code(raised: BaseException) -> int:
        return 128 + (raised.signum if isinstance(raised, Terminated) else signal.SIGINT)


def _raise(signum: int) -> NoReturn:
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(signum)
