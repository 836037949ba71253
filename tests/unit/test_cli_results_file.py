"""Results files: complete or not at all, in order, and nothing overwritten by accident."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from nanoinfer.cli.results_file import ResultsFile, ResultSink, StreamResults, open_results
from nanoinfer.errors import EngineError, UserError


def opened(path: Path, **options: Any) -> ResultSink:
    return open_results(path, **{"order": "input", "overwrite": False, "inputs": [], **options})


def test_records_come_in_input_order_and_the_partial_file_disappears(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    sink = opened(out)
    for index in (2, 0, 1):
        sink.write(index, b"%d\n" % index)
        assert not out.exists()
    sink.finish()
    assert out.read_bytes() == b"0\n1\n2\n"
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_completion_order_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    sink = opened(tmp_path / "o", order="completion")
    for index in (2, 0):
        sink.write(index, b"%d\n" % index)
    sink.finish()
    assert (tmp_path / "o").read_bytes() == b"2\n0\n"


def test_every_record_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    sink = opened(tmp_path / "o")
    sink.write(5, b"five\n")
    assert (tmp_path / "o.partial").read_bytes() == b"five\n"
    assert sink.abandon() == str(tmp_path / "o.partial")
    assert (tmp_path / "o.partial").read_bytes() == b"five\n"


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path: Path) -> None:
    assert opened(tmp_path / "o").abandon() is None
    assert os.listdir(tmp_path) == []


def test_an_existing_output_is_only_replaced_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "o"
    out.write_text("old")
    with pytest.raises(UserError, match=r"exists already.*--overwrite"):
        opened(out)
    sink = opened(out, overwrite=True)
    assert out.read_text() == "old"
    sink.write(0, b"new\n")
    sink.finish()
    assert out.read_text() == "new\n"


def test_a_second_run_to_the_same_output_is_refused(tmp_path: Path) -> None:
    first = opened(tmp_path / "o")
    with pytest.raises(UserError, match="another run is writing there, or one was interrupted"):
        opened(tmp_path / "o")
    first.abandon()


def test_outputs_that_cannot_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    (tmp_path / "link").symlink_to(source)
    for path, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "o", "does not exist; create it first"),
        (tmp_path / "file" / "o", "does not exist; create it first"),
        (source, "is the input file"),
        (tmp_path / "link", "is the input file"),
        (Path("/proc/out.jsonl"), "cannot write /proc/out.jsonl.partial"),
    ):
        with pytest.raises(UserError, match=message):
            opened(path, inputs=[source], overwrite=True)
    assert source.read_text() == "{}"


def test_a_full_disk_is_reported_with_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = ResultsFile(tmp_path / "o", "input", overwrite=False)
    sink.write(0, b"first\n")

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    sink._file.close()
    monkeypatch.setattr(sink, "_file", Full())
    with pytest.raises(EngineError, match="No space left on device; the 1 results so far are in it"):
        sink.write(1, b"second\n")


def test_a_device_is_written_to_and_not_replaced() -> None:
    sink = opened(Path("/dev/null"))
    sink.write(0, b"x\n")
    sink.finish()
    assert not Path("/dev/null").is_file()


def test_a_stream_gives_each_record_as_soon_as_its_turn_has_come() -> None:
    stream = io.BytesIO()
    sink = StreamResults(stream, "input")
    sink.write(2, b"2\n")
    assert stream.getvalue() == b""
    sink.write(0, b"0\n")
    assert stream.getvalue() == b"0\n"
    sink.skip(1)
    assert stream.getvalue() == b"0\n2\n"


def test_an_abandoned_stream_gives_what_it_held_back() -> None:
    stream = io.BytesIO()
    sink = StreamResults(stream, "input")
    sink.write(3, b"3\n")
    assert sink.abandon() is None
    assert stream.getvalue() == b"3\n"
