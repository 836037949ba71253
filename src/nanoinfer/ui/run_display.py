"""The display of one run, whatever its kind: live on a terminal, a line every ten seconds elsewhere, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from nanoinfer.engine.events import EventStream, StepEvent, Subscription
from nanoinfer.ui.console import LOG_INTERVAL_S, Console
from nanoinfer.ui.display import MAX_ROWS, frame, to_terminal
from nanoinfer.ui.glyphs import glyphs_of
from nanoinfer.ui.keyboard import typing_hidden
from nanoinfer.ui.live import LiveThread, Screen
from nanoinfer.ui.plain import UiChoice, choose_ui, status_line
from nanoinfer.ui.snapshot import RequestCounts, RunSnapshot, SnapshotBuilder

# Below this a frame says nothing; one line of text takes its place.
LEAST_COLUMNS, LEAST_LINES = 40, 8


class RunDisplay:
    """Shows a run while it is a context manager. It has a subscription of its own to `events`; the engine's thread only
    calls `tick` after each step. With the live display another thread turns events into figures and these into frames.

    `observed` may change an event before it counts, `requests` tells how the command's requests stand and `warning` the
    last thing that went wrong; all three are called from that thread. With `keep` the last frame stays on the screen.
    `one_line` is for runs too small for a frame. After the run `builder.metrics` has seen every event.
    """

    def __init__(
        self,
        console: Console,
        choice: UiChoice,
        builder: SnapshotBuilder,
        clock: Callable[[], float],
        requests: Callable[[], RequestCounts],
        events: EventStream,
        *,
        observed: Callable[[StepEvent], StepEvent] = lambda event: event,
        warning: Callable[[], str | None] = lambda: None,
        keep: bool = False,
        one_line: bool = False,
    ) -> None:
        self._console = console
        self._builder = builder
        self._clock = clock
        self._requests = requests
        self._warning = warning
        self._keep = keep
        self._one_line = one_line
        self._glyphs = glyphs_of(console)
        self._events = events
        self._observed = observed
        self._subscription: Subscription | None = None
        self._stack = ExitStack()
        self._ui = choose_ui(choice, console)
        if choice == "live" and self._ui == "log":
            console.say(f"note: --ui live needs a terminal; a line every {LOG_INTERVAL_S:g} s instead.")
        self._due = clock() + LOG_INTERVAL_S
        self.thread: LiveThread | None = None
        if self._ui == "live":
            self.thread = LiveThread(Screen(console.stream), console.size, self._take_in, self._draw)

    def tick(self) -> None:
        if self.thread is not None:
            self.thread.resume()
            return
        self._take_in()
        if self._ui == "log" and self._clock() >= self._due:
            self._due = self._clock() + LOG_INTERVAL_S
            self._console.say(status_line(self._snapshot()))

    def __enter__(self) -> Self:
        self._subscription = self._events.subscribe()
        if self.thread is not None:
            self._console.clear_status()
            self._console.before_output = self.thread.suspend
            self._stack.enter_context(typing_hidden())
            self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._subscription is not None
        if self.thread is not None:
            self.thread.stop()
            self._stack.close()
        self._events.unsubscribe(self._subscription)
        self._take_in()
        if self.thread is None:
            return
        self._console.before_output = lambda: None
        if self._keep and self.thread.frames and not self._one_line:
            self.thread.draw_last()
        if self.thread.error is not None:
            self._console.warn(f"the live display failed: {self.thread.error!r}")

    def _take_in(self) -> None:
        assert self._subscription is not None
        for event in self._subscription.drain():
            self._builder.observe(self._observed(event))

    def _snapshot(self) -> RunSnapshot:
        exact = self.thread is None or self.thread.is_stopped  # a frame that is followed by others need not be
        return self._builder.snapshot(self._requests(), self._warning(), exact=exact)

    def _draw(self, columns: int, lines: int) -> str:
        snapshot = self._snapshot()
        if self._one_line or columns < LEAST_COLUMNS or lines < LEAST_LINES:
            return self._console.fit(status_line(snapshot), columns - 1)
        text = frame(snapshot, columns - 1, min(MAX_ROWS, lines - 2), self._glyphs)
        return to_terminal(text, colour=self._console.colour)
