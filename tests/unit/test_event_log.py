"""A recorded run reads back as it was written; anything else is refused with the place."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from nanoinfer.engine.event_log import SCHEMA, EventLog, EventLogWriter, read_event_log
from nanoinfer.engine.events import FinishedSequence, RequestTiming, StepEvent
from nanoinfer.errors import UserError

FINISHED = FinishedSequence(
    request_id="č",
    index=1,
    reason="abort",
    prompt_tokens=3,
    cached_tokens=0,
    output_tokens=0,
    preemptions=2,
    timing=RequestTiming(arrival=0.1),
)
EVENT = StepEvent(
    step=1,
    time=0.1 + 0.2,  # a float that only round-trips in full precision
    kind="mixed",
    running=2,
    waiting=1,
    prefill_tokens=5,
    decode_tokens=1,
    cached_tokens=16,
    prompt_tokens=21,
    blocks_active=3,
    blocks_cached=1,
    blocks_free=9,
    evictions=0,
    preemptions=0,
    emitted=(("a", 1), ("č", 1)),
    finished=(
        FINISHED,
        replace(FINISHED, reason="stop", timing=RequestTiming(0.1, 0.2, 0.3, 0.4, 0.4), token_times=(0.3, 0.4)),
    ),
    schedule_ms=0.25,
    device_ms=1.0,
    step_ms=2.0,
    used_graph=True,
    first_tokens=(("a", 0.1),),
)
ENGINE = {"model": "tiny", "block_size": 16}
EVENTS = [EVENT, replace(EVENT, step=2, emitted=(), finished=(), first_tokens=())]


def written() -> str:
    stream = io.StringIO()
    writer = EventLogWriter(stream, ENGINE)
    for event in EVENTS:
        writer.write(event)
    return stream.getvalue()


def read(tmp_path: Path, text: str) -> EventLog:
    path = tmp_path / "run.jsonl"
    path.write_text(text, encoding="utf-8")
    return read_event_log(path)


def test_events_read_back_equal(tmp_path: Path) -> None:
    assert read(tmp_path, written()) == EventLog(ENGINE, EVENTS, torn=False)


def test_header_comes_first_and_every_step_is_one_line_of_json() -> None:
    lines = written().splitlines()
    assert json.loads(lines[0]) == {"nanoinfer_events": SCHEMA, "engine": ENGINE}
    assert [json.loads(line)["step"] for line in lines[1:]] == [1, 2]


def test_torn_last_line_is_left_out_wherever_it_is_torn(tmp_path: Path) -> None:
    text = written()
    end_of_first = text.index("\n", text.index("\n") + 1) + 1
    assert read(tmp_path, text[:end_of_first]) == EventLog(ENGINE, EVENTS[:1], torn=False)
    for cut in (end_of_first + 1, end_of_first + 100, len(text) - 1):
        assert read(tmp_path, text[:cut]) == EventLog(ENGINE, EVENTS[:1], torn=True)


def test_line_torn_inside_a_character_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(written().encode() + '{"emitted":[["č'.encode()[:-1])
    assert read_event_log(path) == EventLog(ENGINE, EVENTS, torn=True)


@pytest.mark.parametrize(
    "text",
    ["", "no json\n", "[1]\n", '{"step": 1}\n', '{"nanoinfer_events": 1}\n', '{"nanoinfer_events": 1, "engine": 3}\n'],
)
def test_other_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"run\.jsonl is not a file of step events; --events FILE writes one"):
        read(tmp_path, text)


def test_other_schema_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"schema {SCHEMA + 1}, this version reads {SCHEMA}"):
        read(tmp_path, json.dumps({"nanoinfer_events": SCHEMA + 1, "engine": {}}) + "\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"step":1', '"step":"1"'),
        ('"time":0.3', '"tim":0.3'),
        ('"emitted":[["a",1]', '"emitted":[["a"]'),
        ('"first_tokens":[["a",0.1]', '"first_tokens":[["a"]'),
        ('"token_times":[0.3', '"token_times":["x"'),
        ('"arrival":0.1', '"arrival":null'),
        ('"kind":"mixed"', '"kind":"mixed","more":1'),
        ('"finished":[{', '"finished":[{{'),
    ],
)
def test_damage_before_the_end_is_reported_by_line(tmp_path: Path, old: str, new: str) -> None:
    assert old in written()
    with pytest.raises(UserError, match=r"run\.jsonl, line 2 is not a step event .*damaged"):
        read(tmp_path, written().replace(old, new, 1))


def test_field_with_a_default_may_be_missing(tmp_path: Path) -> None:
    log = read(tmp_path, written().replace(',"used_graph":true', ""))
    assert log.events == [replace(event, used_graph=False) for event in EVENTS]


def test_a_run_recorded_before_first_tokens_were_told_reads_without_them(tmp_path: Path) -> None:
    log = read(tmp_path, written().replace(',"first_tokens":[["a",0.1]]', ""))
    assert log.events == [replace(event, first_tokens=()) for event in EVENTS]


def test_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*No such file"):
        read_event_log(tmp_path / "none.jsonl")
