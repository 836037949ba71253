"""Shows an engine's start-up, download, import and load: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from nanoinfer.ui.console import LOG_INTERVAL_S, Console
from nanoinfer.ui.text import byte_size

BAR_WIDTH = 24


class LoadingDisplay:
    """One line at a time; the last one is taken away by whatever is said next."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._due = clock()

    def write(self, line: str) -> None:
        if self._console.is_terminal:
            self._console.status(line)
        elif self._clock() >= self._due:
            self._due = self._clock() + LOG_INTERVAL_S
            self._console.dim(line)

    def notify(self, stage: str, done: int, total: int) -> None:
        """The engine's Notify: `done` of `total` bytes of a stage; 0 in all means that nobody knows."""
        if not done and not total:
            self.write(f"{stage} ...")
            return
        if not total:
            self.write(f"{stage} {byte_size(done)}")
            return
        share = min(done / total, 1.0)
        self.write(f"{stage:8} {self._bar(share)} {100 * share:3.0f}%  {byte_size(done)} of {byte_size(total)}")

    def _bar(self, share: float) -> str:
        full, empty = ("#", ".") if self._console.ascii else ("█", "░")
        cells = int(share * BAR_WIDTH)
        return full * cells + empty * (BAR_WIDTH - cells)
