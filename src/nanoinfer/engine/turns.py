"""Turns: a lock that threads get in the order in which they ask for it."""

from __future__ import annotations

import threading


class Turns:
    """Re-entrant. A thread that gives it back and wants it again at once comes after those that wait."""

    def __init__(self) -> None:
        # Re-entrant both: the garbage collector may end a stream while its thread is entering.
        self._door, self._lock = threading.RLock(), threading.RLock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if self._owner != threading.get_ident():
            with self._door:  # only one thread waits for the lock itself, and the last owner queues behind it
                self._lock.acquire()
            self._owner, self._depth = threading.get_ident(), 0
        self._depth += 1

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._lock.release()
