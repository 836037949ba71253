"""The live display's terminal side: what stays on a terminal, what other output does to it, and what it costs."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable

import pyte
import pytest
from recorded_run import events, info

from nanoinfer.engine.events import EventStream
from nanoinfer.ui import live
from nanoinfer.ui.console import Console
from nanoinfer.ui.display import frame, to_terminal
from nanoinfer.ui.live import LiveThread, Screen, pause_after
from nanoinfer.ui.run_display import RunDisplay
from nanoinfer.ui.snapshot import RequestCounts, SnapshotBuilder


class Terminal(io.StringIO):
    """A terminal in memory: what is written to it comes to the screen of an emulator."""

    def __init__(self, columns: int, lines: int) -> None:
        super().__init__()
        self.screen = pyte.Screen(columns, lines)
        self._emulator = pyte.Stream(self.screen)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._emulator.feed(text.replace("\n", "\r\n"))
        return len(text)

    def rows(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display if line.strip()]


def test_a_frame_replaces_the_one_before_even_if_it_has_fewer_rows() -> None:
    terminal = Terminal(20, 10)
    screen = Screen(terminal)
    terminal.write("before\n")
    screen.draw("one\ntwo\nthree", 20, 10)
    screen.draw("1\n2", 20, 10)
    assert terminal.rows() == ["before", "1", "2"]
    screen.erase()
    terminal.write("after\n")
    screen.draw("4", 20, 10)
    assert terminal.rows() == ["before", "after", "4"]


def test_a_frame_is_one_write_so_that_nothing_flickers() -> None:
    writes: list[str] = []

    class Counting(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    screen = Screen(Counting())
    for columns, frames in ((20, "one\ntwo\nthree"), (20, "1\n2"), (10, "3\n4")):
        screen.draw(frames, columns, 10)
    assert len(writes) == 3


def test_a_frame_at_the_bottom_scrolls_what_is_above_and_nothing_else() -> None:
    terminal = Terminal(20, 5)
    screen = Screen(terminal)
    terminal.write("a\nb\nc\nd\n")
    for number in range(4):
        screen.draw(f"x{number}\ny{number}\nz{number}", 20, 5)
    assert terminal.rows() == ["d", "x3", "y3", "z3"]


def test_a_narrower_terminal_shows_no_rest_of_the_wide_frame() -> None:
    """Emulators differ in what they do to long lines: here they are wrapped by hand, as many terminals would."""
    terminal = Terminal(30, 12)
    screen = Screen(terminal)
    screen.draw("a long line of the frame\nanother long line of it", 30, 12)
    terminal.screen.reset()
    terminal.screen.resize(12, 15)
    terminal.write("a long line\n of the fram\ne\nanother lon\ng line of i\nt\n")
    screen.draw("short\nlines", 15, 12)
    assert terminal.rows() == ["short", "lines"]


def test_other_output_takes_the_frame_away_until_the_engine_goes_on() -> None:
    terminal = Terminal(40, 12)
    console = Console(terminal)
    thread = LiveThread(Screen(terminal), lambda: (40, 12), lambda: None, lambda columns, lines: "frame")
    console.before_output = thread.suspend
    thread._frame()
    console.say("one line")
    thread._frame()
    assert terminal.rows() == ["one line"]
    thread.resume()
    thread._frame()
    assert terminal.rows() == ["one line", "frame"]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


@pytest.mark.parametrize("keep", [True, False])
def test_the_thread_draws_what_was_observed_and_the_last_frame_has_all_of_it(
    keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "FRAME_S", 0.001)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(80, 40)
    monkeypatch.setattr(Console, "size", lambda console: (80, 40))
    now = [0.0]
    builder = SnapshotBuilder(info(), title="test", clock=lambda: now[0])
    stream = EventStream()
    display = RunDisplay(
        Console(terminal), "live", builder, time.perf_counter, lambda: RequestCounts(9, 4), stream, keep=keep
    )
    assert display.thread is not None
    with display:
        for event in events():
            now[0] = event.time
            stream.publish(event)
            if event.step == 50:
                until(lambda: "4 of 9 done" in "".join(terminal.rows()))
                console_says = "a line from elsewhere"
                display._console.say(console_says)
            display.tick()
    assert builder.metrics.snapshot().run.steps == 3700
    assert display.thread.error is None
    rows = terminal.rows()
    assert rows[0] == console_says
    assert len(rows) == (16 if keep else 1)
    assert not keep or "71,600 tokens out" in rows[5]


def test_an_error_in_the_display_ends_the_display_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "FRAME_S", 0.001)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(80, 40)
    monkeypatch.setattr(Console, "size", lambda console: 1 / 0)
    builder = SnapshotBuilder(info())
    stream = EventStream()
    display = RunDisplay(Console(terminal), "live", builder, time.perf_counter, RequestCounts, stream, keep=True)
    assert display.thread is not None
    with display:
        until(lambda: display.thread is not None and display.thread.error is not None)
        for event in events():
            stream.publish(event)
    assert builder.metrics.snapshot().run.steps == 3700
    assert terminal.rows() == ["warning: the live display failed: ZeroDivisionError('division by zero')"]


def test_frames_come_at_most_four_times_a_second_and_take_under_one_percent() -> None:
    assert pause_after(0.0, 10.0) == 0.25
    assert pause_after(0.060, 10.0) == 0.25
    assert pause_after(0.066, 10.0) == pytest.approx(1.0)
    assert pause_after(5.0, 10.0) == 5.0, "a slow machine still sees something"


def test_a_frame_costs_about_a_millisecond() -> None:
    builder = SnapshotBuilder(info(), title="bench")
    for event in events():
        builder.observe(event)
    rounds = []
    for _ in range(20):
        start = time.thread_time()
        for _ in range(5):
            to_terminal(frame(builder.snapshot(exact=False), 119), colour=True)
        rounds.append((time.thread_time() - start) / 5)
    assert min(rounds) < 2.5e-3, "0.7 ms on an idle machine; at four a second a quarter of what is allowed"
