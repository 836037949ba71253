"""Carries the engine's step events to those who want them during a command, such as the --events file. The live display
subscribes by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from nanoinfer.cli.session import Session
from nanoinfer.engine.event_log import EventLogWriter
from nanoinfer.engine.events import StepEvent, Subscription
from nanoinfer.errors import EngineError, UserError

if TYPE_CHECKING:
    from nanoinfer.llm import LLM

Consumer = Callable[[StepEvent], None]


class Monitor:
    """Made before the model is loaded, so that a file that cannot be written is refused in time.

    While `watching`, call `tick` after each engine step: it hands the new events to the consumers.
    """

    def __init__(self, session: Session) -> None:
        self.consumers: list[Consumer] = []
        self._after_tick: Callable[[], None] = lambda: None
        self._subscription: Subscription | None = None
        self._snapshot_path = session.display.cache_snapshot
        self._events_file: TextIO | None = None
        if self._snapshot_path is not None:
            _open_for_writing(self._snapshot_path).close()
        if session.display.events is not None:
            self._events_file = _open_for_writing(session.display.events)

    @contextmanager
    def watching(self, llm: LLM) -> Iterator[None]:
        """Consume the engine's events; at the end, however it comes, write what was asked for."""
        self._subscription = llm.events.subscribe()
        try:
            if self._events_file is not None:
                self.consumers.append(self._written_to(self._events_file, llm))
            yield
        finally:
            self.tick()
            llm.events.unsubscribe(self._subscription)
            if self._events_file is not None:
                with _failures_named(self._events_file.name):
                    self._events_file.close()
            if self._snapshot_path is not None:
                with _failures_named(self._snapshot_path):
                    self._snapshot_path.write_text(json.dumps(llm.cache_snapshot().to_json()), encoding="utf-8")

    @staticmethod
    def _written_to(file: TextIO, llm: LLM) -> Consumer:
        with _failures_named(file.name):
            writer = EventLogWriter(file, asdict(llm.info))

        def write(event: StepEvent) -> None:
            with _failures_named(file.name):
                writer.write(event)

        return write

    @contextmanager
    def also(self, *consumers: Consumer, after_tick: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hand the events of a part of the command to these consumers, too, and then call `after_tick`; events before
        it are not theirs."""
        self.tick()
        before = list(self.consumers)
        self.consumers += consumers
        self._after_tick = after_tick
        try:
            yield
        finally:
            self.tick()
            self.consumers, self._after_tick = before, lambda: None

    def tick(self) -> None:
        assert self._subscription is not None
        for event in self._subscription.drain():
            for consume in self.consumers:
                consume(event)
        self._after_tick()


@contextmanager
def _failures_named(path: Path | str) -> Iterator[None]:
    """A full disk as one sentence that says which file; a reader that has left stays what it is."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise EngineError(f"cannot write {path}: {error.strerror}.") from error


def _open_for_writing(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8", buffering=1)  # by lines: whoever follows the file sees whole steps
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another file.") from error
