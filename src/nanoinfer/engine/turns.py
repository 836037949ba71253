"""Turns: a lock that threads get in the order in which they ask for it."""

from __future__ import annotations

import threading


class Turns:
    """Re-entrant. A thread that gives it back and wants it again at once comes after all that wait."""

    def __init__(self) -> None:
        # Re-entrant itself: the garbage collector may end a stream, which takes a turn, in any line below.
        self._door = threading.RLock()
        self._claims: dict[int, int] = {}  # thread -> how often it entered; the first thread has the turn
        self._called: dict[int, threading.Condition] = {}  # of the threads that wait

    @property
    def waiting(self) -> int:
        """How many threads wait for their turn."""
        return max(len(self._claims) - 1, 0)

    def __enter__(self) -> None:
        thread = threading.get_ident()
        with self._door:
            self._claims[thread] = self._claims.get(thread, 0) + 1
            try:
                if self._first() != thread:
                    called = self._called.setdefault(thread, threading.Condition(self._door))
                    called.wait_for(lambda: self._first() == thread)
            except BaseException:  # interrupted: those behind it must not wait for a thread that is gone
                self.__exit__()
                raise

    def __exit__(self, *exception: object) -> None:
        thread = threading.get_ident()
        with self._door:
            self._claims[thread] -= 1
            if self._claims.get(thread):
                return
            self._claims.pop(thread, None)
            self._called.pop(thread, None)
            if self._claims and (called := self._called.get(self._first())):
                called.notify()

    def _first(self) -> int:
        first, *_ = self._claims  # not by an iterator, which fails if a collection enters in between
        return first
