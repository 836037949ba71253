"""Step events to a JSON-lines file and back: what `--events FILE` writes and a later look at the run reads.

The first line is a header, {"nanoinfer_events": SCHEMA, "engine": {...facts of the engine}}; every further line is one
StepEvent. A run that was killed leaves at most a torn last line, which the reader leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TextIO, TypeVar

from nanoinfer.engine.events import FinishedSequence, RequestTiming, StepEvent
from nanoinfer.errors import UserError

# Counts up when a field changes its meaning or goes; a new field with a default leaves older files readable.
SCHEMA = 1
_HEADER_KEY = "nanoinfer_events"
# Only numbers are checked, by their annotation's text: a wrong one would fail far from here.
_NUMBERS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "float | None": (int, float, type(None))}
_Record = TypeVar("_Record", StepEvent, FinishedSequence, RequestTiming)


class EventLogWriter:
    """Writes events to a stream that the caller opens and closes. `engine` describes the engine, as plain JSON data."""

    def __init__(self, stream: TextIO, engine: Mapping[str, Any]) -> None:
        self._stream = stream
        self._write({_HEADER_KEY: SCHEMA, "engine": dict(engine)})

    def write(self, event: StepEvent) -> None:
        line = _as_dict(event)
        line["finished"] = [{**_as_dict(each), "timing": _as_dict(each.timing)} for each in event.finished]
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        # One call per line, so that a stream without a buffer is torn at the end of a line only.
        self._stream.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")


def _as_dict(record: StepEvent | FinishedSequence | RequestTiming) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


@dataclass(frozen=True, slots=True)
class EventLog:
    """A recorded run. `torn` is true where the last line was cut off and left out."""

    engine: dict[str, Any]
    events: list[StepEvent]
    torn: bool


def read_event_log(path: Path) -> EventLog:
    """Read a file that EventLogWriter wrote. Raises UserError, with the line's number, if it is anything else."""
    try:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    # A finished line ends with a newline: what stands behind the last one is a torn line, or nothing.
    tail = lines.pop()
    engine = _header(path, lines[0] if lines else tail)
    events = [_event(path, number, line) for number, line in enumerate(lines[1:], start=2)]
    return EventLog(engine, events, torn=bool(tail))


def _header(path: Path, line: str) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or _HEADER_KEY not in header or not isinstance(header.get("engine"), dict):
        raise UserError(f"{path} is not a file of step events; --events FILE writes one.")
    if header[_HEADER_KEY] != SCHEMA:
        raise UserError(
            f"{path} has step events of schema {header[_HEADER_KEY]!r}, this version reads {SCHEMA}; "
            "read it with the version of nanoinfer that wrote it."
        )
    return dict(header["engine"])


def _event(path: Path, number: int, line: str) -> StepEvent:
    try:
        data = json.loads(line)
        data["emitted"] = tuple((str(request_id), int(count)) for request_id, count in data["emitted"])
        first_tokens = data.get("first_tokens", ())  # older files have none
        data["first_tokens"] = tuple((str(request_id), float(arrival)) for request_id, arrival in first_tokens)
        data["finished"] = tuple(_finished(each) for each in data["finished"])
        return _build(StepEvent, data)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}, line {number} is not a step event ({error}); the file is damaged.") from error


def _finished(data: dict[str, Any]) -> FinishedSequence:
    timing = _build(RequestTiming, data["timing"])
    return _build(FinishedSequence, {**data, "timing": timing, "token_times": tuple(map(float, data["token_times"]))})


def _build(kind: type[_Record], data: dict[str, Any]) -> _Record:
    """A record from JSON values of the right types; TypeError otherwise."""
    for field in fields(kind):
        if field.name not in data:
            if field.default is MISSING:
                raise TypeError(f"no {field.name}")
            continue
        value = data[field.name]
        if not isinstance(value, _NUMBERS.get(str(field.type), (object,))):
            raise TypeError(f"{field.name} is {value!r}")
    return kind(**data)
