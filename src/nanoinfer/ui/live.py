"""The live display's terminal side: frames drawn in place, and the thread that draws them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TextIO

FRAME_S = 0.25  # at most four frames a second
# The thread's share of the processor time, kept by drawing less often where frames are dear, but at least this often.
CPU_SHARE, SLOWEST_FRAME_S = 0.006, 5.0

Size = Callable[[], tuple[int, int]]  # the terminal's columns and lines
Draw = Callable[[int, int], str]  # columns, lines -> a frame


def pause_after(own_cpu: float, run_cpu: float) -> float:
    """Seconds to wait before the next frame when the thread has used `own_cpu` of the run's `run_cpu` seconds of
    processor time so far."""
    overdrawn = own_cpu / CPU_SHARE - run_cpu
    return min(max(FRAME_S, overdrawn), SLOWEST_FRAME_S)


class Screen:
    """The rows above the cursor that a frame takes. The cursor rests at the start of the line below them, visible, so
    that a killed run leaves a terminal in order, but for what `typing_hidden` says."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rows = 0
        self._columns = 0

    def draw(self, text: str, columns: int, lines: int) -> None:
        """Replace the frame by `text`: lines shorter than the terminal is wide, and fewer of them than it is high."""
        frame = text.split("\n")
        erase = self._to_first_row()
        if self._rows and columns < self._columns:
            # Many terminals now show the old frame's lines wrapped, over more rows than it had, and none says so.
            # What is visible scrolls away, so that nothing of it stays in view and nothing else is lost.
            erase += "\x1b[J" + f"\x1b[{lines};1H" + "\n" * lines + "\x1b[H"
        self._write(erase + "".join(f"{line}\x1b[K\n" for line in frame) + "\x1b[J")
        self._rows, self._columns = len(frame), columns

    def erase(self) -> None:
        if self._rows:
            self._write(self._to_first_row() + "\x1b[J")
            self._rows = 0

    def _to_first_row(self) -> str:
        return "\r" + (f"\x1b[{self._rows}A" if self._rows else "")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class LiveThread:
    """Calls `work`, then shows what `draw` returns, a few times a second until `stop`.

    Other output to the terminal comes after `suspend`, which takes the frame away until `resume`. An error in drawing
    ends the drawing and is kept; `work` goes on.
    """

    def __init__(self, screen: Screen, size: Size, work: Callable[[], None], draw: Draw) -> None:
        self.cpu_seconds = 0.0  # processor time of the thread so far
        self.frames = 0
        self.error: Exception | None = None
        self._screen = screen
        self._size = size
        self._work = work
        self._draw = draw
        self._lock = threading.Lock()  # held while the terminal is written to
        self._suspended = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nanoinfer-display", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def suspend(self) -> None:
        with self._lock:
            self._suspended = True
            self._guarded(self._screen.erase)

    def resume(self) -> None:
        self._suspended = False

    def stop(self) -> None:
        """End the thread and take the frame away."""
        self._stopped.set()
        self._thread.join()
        self.suspend()

    def draw_last(self) -> None:
        """After `stop`: draw once more, to stay."""
        self._guarded(self._frame)

    def _frame(self) -> None:
        columns, lines = self._size()
        text = self._draw(columns, lines)
        with self._lock:
            if not self._suspended or self.is_stopped:
                self._screen.draw(text, columns, lines)
                self.frames += 1

    def _run(self) -> None:
        started = time.process_time()
        pause = FRAME_S
        while not self._stopped.wait(pause):
            self._work()
            self._guarded(self._frame)
            self.cpu_seconds = time.thread_time()
            pause = pause_after(self.cpu_seconds, time.process_time() - started)

    def _guarded(self, action: Callable[[], None]) -> None:
        if self.error is None:
            try:
                action()
            except Exception as error:  # a display must never end a run
                self.error = error
