"""`inspect-cache --events FILE`: the summary of a recorded run, one step of it, or a walk through its steps by keys."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.cli.cache_steps import Recording, log_problems
from nanoinfer.cli.command import ENGINE_FAILURE, OK
from nanoinfer.cli.session import Session
from nanoinfer.engine.event_log import read_event_log
from nanoinfer.ui.glyphs import Glyphs, glyphs_of
from nanoinfer.ui.text import one_line, plural

if TYPE_CHECKING:
    from prompt_toolkit.application import Application

KEYS = "left, right: a step   page up, down: ten   home, end   q: leave"
MANY = 10


def report_events(session: Session, path: Path, step: int | None, *, top: int) -> int:
    """Returns the exit code: 1 if the recording contradicts itself."""
    log = read_event_log(path)
    recording, problems = Recording(path.name, log), log_problems(log)
    glyphs = glyphs_of(session.console)
    if log.torn:
        session.console.warn(f"the last line of {path} was cut off and is left out.")
    position = recording.position(step if step is not None else -1)
    if session.display.json:
        session.show_json(_document(recording, position, step, problems))
    elif step is None and sys.stdin.isatty() and sys.stdout.isatty():
        position = browse(recording, glyphs)
        session.show("\n".join([_title(recording), *recording.frame(position, glyphs)]))
    else:
        session.show("\n".join(_text(recording, position, step, problems, glyphs, top)))
    if problems:
        session.console.error(f"{path} contradicts itself: the file was changed, or nanoinfer has a defect.")
        return ENGINE_FAILURE
    return OK


def _title(recording: Recording) -> str:
    engine = recording.log.engine
    model = f", {one_line(str(engine['model']), 40)}" if "model" in engine else ""
    return f"recording   {one_line(recording.name, 30)}{model}"


def _text(
    recording: Recording, position: int, step: int | None, problems: list[str], glyphs: Glyphs, top: int
) -> list[str]:
    """One step, or, where none was asked for, the end with all requests."""
    lines = [_title(recording), *recording.frame(position, glyphs)]
    if step is None:
        lines += ["", *recording.request_lines(top)]
    lines += ["", "integrity   " + ("ok" if not problems else f"BROKEN, {plural(len(problems), 'problem')}")]
    return lines + [f"            {problem}" for problem in problems[:top]]


def _document(recording: Recording, position: int, step: int | None, problems: list[str]) -> dict[str, Any]:
    document = {"engine": recording.log.engine, **recording.document(position)}
    if step is None:
        names = ("request_id", "index", "reason", "prompt_tokens", "cached_tokens", "output_tokens", "preemptions")
        document["requests"] = [{name: getattr(each, name) for name in names} for each in recording.finished]
    return {**document, "integrity": {"ok": not problems, "problems": problems}}


def browse(recording: Recording, glyphs: Glyphs) -> int:
    """Step through a recording on the terminal; returns the position where it was left."""
    walk = Walk(len(recording))
    application(walk, lambda: "\n".join([_title(recording), *recording.frame(walk.position, glyphs), "", KEYS])).run()
    return walk.position


class Walk:
    """A position from 1 to `length`; it starts at 1."""

    def __init__(self, length: int) -> None:
        self.position = 1
        self._length = length

    def by(self, steps: int) -> None:
        """Forward, or backward if negative, as far as there are steps."""
        self.position = min(max(self.position + steps, 1), self._length)

    def to_start(self) -> None:
        self.position = 1

    def to_end(self) -> None:
        self.position = self._length


def application(walk: Walk, text: Callable[[], str]) -> Application[None]:
    """A full-screen view of `text` that keys move `walk` under."""
    from prompt_toolkit.application import Application
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.layout import FormattedTextControl, Layout, Window

    bindings = KeyBindings()

    def bind(action: Callable[[], None], *keys: str) -> None:
        for key in keys:
            bindings.add(key)(lambda event: action())

    bind(lambda: walk.by(1), "right", "l", "space")
    bind(lambda: walk.by(-1), "left", "h")
    bind(lambda: walk.by(MANY), "pagedown", "down")
    bind(lambda: walk.by(-MANY), "pageup", "up")
    bind(walk.to_start, "home", "g")
    bind(walk.to_end, "end", "G")
    for key in ("q", "c-c", "c-d"):
        bindings.add(key)(lambda event: event.app.exit())
    window = Window(FormattedTextControl(text, focusable=True, show_cursor=False), wrap_lines=False)
    return Application(layout=Layout(window), key_bindings=bindings, full_screen=True)
