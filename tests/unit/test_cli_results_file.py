"""Results files: complete or not at all, in order, resumable after any kind of end, nothing overwritten by accident."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from thoroughness import some

from nanoinfer.cli import durable, partial_file
from nanoinfer.cli.document_file import DocumentFile
from nanoinfer.cli.durable import GroupSync
from nanoinfer.cli.partial_file import PartialFile
from nanoinfer.cli.result_sink import StreamResults
from nanoinfer.cli.results_file import ResultsFile, open_results
from nanoinfer.errors import EngineError, UserError
from nanoinfer.ui.console import Console


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk takes milliseconds for each of these, and no test in this process could notice that one is missing."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


LABELS = [(f"key{i}", f"id{i}") for i in range(10)]


def opened(path: Path, **options: Any) -> Any:
    console = Console(io.StringIO())
    return open_results(path, console, **{"order": "input", "inputs": [], **options})


def begun(path: Path, **options: Any) -> ResultsFile:
    sink = opened(path, **options)
    assert isinstance(sink, ResultsFile)
    sink.begin({"parameters": {}}, LABELS)
    return sink


def record(index: int) -> bytes:
    return b'{"n": %d}\n' % index


def interrupted(path: Path, *indexes: int) -> Path:
    """The partial file that a run leaves which wrote these records."""
    sink = begun(path)
    for index in indexes:
        sink.write(index, record(index))
    partial = sink.abandon()
    assert partial is not None
    return partial


def readable(partial: Path) -> list[str]:
    """The keys that the next run finds."""
    file = PartialFile(partial)
    file.close()
    return list(file.results)


# -- the whole way -----------------------------------------------------------------------------------------------------


def test_records_come_in_input_order_and_the_partial_file_disappears(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    sink = begun(out)
    for index in (2, 0, 1):
        sink.write(index, record(index))
        assert not out.exists()
    sink.finish()
    assert out.read_bytes() == b'{"n": 0}\n{"n": 1}\n{"n": 2}\n'
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_completion_order_and_left_out_failures(tmp_path: Path) -> None:
    sink = begun(tmp_path / "o", order="completion", keep_failures=False)
    sink.write(2, record(2))
    sink.write(1, record(1), failed=True)
    sink.write(0, record(0))
    sink.finish()
    assert (tmp_path / "o").read_bytes() == record(2) + record(0)


def test_every_record_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    sink = begun(tmp_path / "o")
    sink.write(5, record(5))
    header, line = (tmp_path / "o.partial").read_text().splitlines()
    assert json.loads(header) == {"format": "nanoinfer results", "version": 1, "parameters": {}, "overwrite": False}
    assert json.loads(line) == {"key": "key5", "id": "id5", "failed": False, "record": {"n": 5}}
    assert sink.abandon() == tmp_path / "o.partial"


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path: Path) -> None:
    assert opened(tmp_path / "o").abandon() is None
    assert begun(tmp_path / "o").abandon() is None
    assert os.listdir(tmp_path) == []


def test_an_existing_output_is_only_replaced_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "o"
    out.write_text("old")
    out.chmod(0o640)
    with pytest.raises(UserError, match=r"exists already.*--overwrite"):
        opened(out)
    sink = begun(out, overwrite=True)
    assert out.read_text() == "old"
    sink.write(0, record(0))
    sink.finish()
    assert out.read_bytes() == record(0)
    assert out.stat().st_mode & 0o777 == 0o640


def test_an_output_that_appears_during_the_run_is_not_replaced(tmp_path: Path) -> None:
    sink = begun(tmp_path / "o")
    sink.write(0, record(0))
    (tmp_path / "o").write_text("somebody else's")
    with pytest.raises(UserError, match="written by something else; move it away, and resume"):
        sink.finish()
    assert sink.abandon() == tmp_path / "o.partial"
    assert (tmp_path / "o").read_text() == "somebody else's"
    assert sorted(os.listdir(tmp_path)) == ["o", "o.partial"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "o").symlink_to("folder/real")
    sink = begun(tmp_path / "o")
    sink.write(0, record(0))
    sink.finish()
    assert (tmp_path / "folder" / "real").read_bytes() == record(0)
    assert (tmp_path / "o").is_symlink()


# -- going on ----------------------------------------------------------------------------------------------------------


def test_a_partial_file_is_neither_overwritten_nor_resumed_unasked(tmp_path: Path) -> None:
    partial = interrupted(tmp_path / "o", 0, 1)
    before = partial.read_bytes()
    with pytest.raises(UserError, match=r"has 2 results of a run that was interrupted; give --resume.*--overwrite"):
        opened(tmp_path / "o")
    assert opened(tmp_path / "o", overwrite=True).abandon() == partial, "only `begin` drops them"
    assert partial.read_bytes() == before


def test_a_resumed_file_keeps_the_bytes_of_its_records(tmp_path: Path) -> None:
    odd = '{"n":1,  "s": "é\\u2028\\"record\\": "}\n'.encode()
    sink = begun(tmp_path / "o")
    sink.write(1, odd)
    sink.abandon()
    sink = opened(tmp_path / "o", resume=True)
    sink.keep({1: sink.earlier.results["key1"]})
    sink.begin({}, LABELS)
    sink.write(0, record(0))
    sink.finish()
    assert (tmp_path / "o").read_bytes() == record(0) + odd


@pytest.mark.parametrize("cut", some(range(1, 40)))
def test_a_torn_tail_loses_only_its_own_record(tmp_path: Path, cut: int) -> None:
    partial = interrupted(tmp_path / "o", 0, 1)
    whole = partial.read_bytes()
    partial.write_bytes(whole[:-cut])
    file = PartialFile(partial)
    assert list(file.results) == (["key0", "key1"] if cut == 1 else ["key0"])
    file.go_on()
    file.write("key9", "id9", b"{}", failed=False)
    file.close()
    assert readable(partial) == ["key0", *(["key1"] if cut == 1 else []), "key9"]


def test_zeros_and_rubbish_of_a_power_cut_are_passed_over(tmp_path: Path) -> None:
    partial = interrupted(tmp_path / "o", 0, 1, 2)
    lines = partial.read_bytes().splitlines(keepends=True)
    lines[2] = b"\0" * (len(lines[2]) - 1) + b"\n"
    partial.write_bytes(b"".join(lines) + b"\0" * 4096)
    assert readable(partial) == ["key0", "key2"]


@pytest.mark.parametrize("content", [b"", b'{"form', b"\0\0\0", b'{"format": "nanoinfer results", "vers'])
def test_a_run_that_died_before_its_first_result_does_not_block_the_next(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "o.partial").write_bytes(content)
    sink = begun(tmp_path / "o")
    sink.write(0, record(0))
    sink.finish()
    assert (tmp_path / "o").read_bytes() == record(0)


@pytest.mark.parametrize("content", [b"precious\n", b'{"prompt": "x"}\n', b"no line end"])
def test_a_foreign_file_of_that_name_is_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "o.partial").write_bytes(content)
    for resume in (False, True):
        with pytest.raises(UserError, match="is no file of nanoinfer"):
            opened(tmp_path / "o", resume=resume)
    assert opened(tmp_path / "o", overwrite=True).abandon() is None
    assert (tmp_path / "o.partial").read_bytes() == content


def test_a_partial_file_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path / "o", 0)
    monkeypatch.setattr("nanoinfer.cli.results_file.VERSION", partial_file.VERSION + 1)
    with pytest.raises(UserError, match="another version"):
        opened(tmp_path / "o", resume=True)


def test_a_kill_between_the_last_two_steps_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = begun(tmp_path / "o")
    sink.write(0, record(0))
    monkeypatch.setattr(sink.earlier, "close", lambda **options: None)
    sink.finish()
    monkeypatch.undo()
    sink.earlier.close()
    assert sorted(os.listdir(tmp_path)) == ["o", "o.partial"]
    sink = opened(tmp_path / "o", resume=True)
    sink.keep({0: sink.earlier.results["key0"]})
    sink.finish()
    assert os.listdir(tmp_path) == ["o"]


def test_resuming_a_run_that_may_replace_its_output_needs_no_second_word(tmp_path: Path) -> None:
    (tmp_path / "o").write_text("old")
    sink = begun(tmp_path / "o", overwrite=True)
    sink.write(0, record(0))
    sink.abandon()
    sink = opened(tmp_path / "o", resume=True)
    assert not sink.is_taken
    sink.abandon()


def test_a_second_run_to_the_same_output_is_refused(tmp_path: Path) -> None:
    first = begun(tmp_path / "o")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(UserError, match=r"another run is writing .*o\.partial; wait until it has ended"):
            opened(tmp_path / "o", **options)
    first.write(0, record(0))
    first.finish()


def test_a_file_that_its_holder_removes_meanwhile_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "o.partial"

    def lock_after_the_other_has_finished(fd: int) -> None:
        monkeypatch.undo()
        path.unlink()

    monkeypatch.setattr(partial_file, "lock", lock_after_the_other_has_finished)
    file = PartialFile(path)
    assert path.stat().st_ino == os.fstat(file._fd).st_ino
    file.close()


# -- outputs that cannot be, and disks that fail -----------------------------------------------------------------------


def test_outputs_that_cannot_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "hard").hardlink_to(source)
    (tmp_path / "x.partial").hardlink_to(source)
    os.mkfifo(tmp_path / "y.partial")
    for path, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "o", "does not exist; create it first"),
        (tmp_path / "file" / "o", "does not exist; create it first"),
        (source, "is the input file"),
        (tmp_path / "link", "is the input file"),
        (tmp_path / "hard", "is the input file"),
        (tmp_path / "x", "is the input file, or would be kept there"),
        (tmp_path / "y", "is no regular file"),
        (tmp_path / ("n" * 250), "File name too long"),
        (tmp_path / ("n" * 245), "File name too long; choose another output"),  # which the end of the run found
        (Path("/proc/out.jsonl"), "cannot write /proc/out.jsonl.partial"),
    ):
        with pytest.raises(UserError, match=message):
            opened(path, inputs=[source], overwrite=True)
    assert source.read_text() == "{}"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_in_the_middle_of_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    sink = begun(tmp_path / "o")
    sink.write(0, record(0))
    real = os.write

    def half(fd: int, data: Any) -> int:
        monkeypatch.setattr(os, "write", full)
        return real(fd, data[: len(data) // 2])

    def full(fd: int, data: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(EngineError, match=rf"cannot write .*o\.partial: {os.strerror(number)}"):
        sink.write(1, record(1))
    monkeypatch.undo()
    assert sink.abandon() == tmp_path / "o.partial"
    assert (tmp_path / "o.partial").read_bytes().endswith(b'{"n": 0}}\n')


def test_a_disk_that_fails_at_the_end_keeps_the_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = begun(tmp_path / "o")
    sink.write(0, record(0))

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("nanoinfer.cli.results_file.put_in_place", fail)
    with pytest.raises(EngineError, match="No space left on device"):
        sink.finish()
    assert sink.abandon() == tmp_path / "o.partial"
    assert os.listdir(tmp_path) == ["o.partial"]


# -- putting things on disk --------------------------------------------------------------------------------------------


def test_writes_are_synced_in_groups_and_the_last_ones_too() -> None:
    synced: list[int] = []
    group = GroupSync(7, delay=60, sync=synced.append)
    for _ in range(100):
        group.written()
    assert synced == []
    group.close()
    assert synced == [7]


def test_a_write_is_on_disk_soon_without_another_one() -> None:
    import threading

    done = threading.Event()
    group = GroupSync(7, delay=0, sync=lambda fd: done.set())
    group.written()
    assert done.wait(100)
    group.close()
    assert durable.SYNC_DELAY_S <= 1


def test_a_sync_that_failed_is_told_at_the_next_write() -> None:
    import threading

    failed = threading.Event()

    def sync(fd: int) -> None:
        failed.set()
        raise OSError(errno.EIO, "Input/output error")

    group = GroupSync(7, delay=0, sync=sync)
    group.written()
    assert failed.wait(100)
    group.close()
    with pytest.raises(OSError, match="Input/output error"):
        group.written()


# -- streams and documents ---------------------------------------------------------------------------------------------


def test_a_device_is_written_to_and_not_replaced() -> None:
    sink = opened(Path("/dev/null"))
    assert isinstance(sink, StreamResults)
    sink.write(0, b"x\n")
    sink.finish()
    assert not Path("/dev/null").is_file()


def test_a_stream_gives_each_record_as_soon_as_its_turn_has_come() -> None:
    stream = io.BytesIO()
    sink = StreamResults(stream, "input", keep_failures=False)
    sink.write(2, b"2\n")
    assert stream.getvalue() == b""
    sink.write(0, b"0\n")
    assert stream.getvalue() == b"0\n"
    sink.write(1, b"failed\n", failed=True)
    assert stream.getvalue() == b"0\n2\n"


def test_an_abandoned_stream_gives_what_it_held_back() -> None:
    stream = io.BytesIO()
    sink = StreamResults(stream, "input")
    sink.write(3, b"3\n")
    assert sink.abandon() is None
    assert stream.getvalue() == b"3\n"


def test_a_document_appears_at_once_and_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, console = tmp_path / "d", Console(io.StringIO())
    DocumentFile(path, console, overwrite=False, inputs=[])
    assert os.listdir(tmp_path) == []
    DocumentFile(path, console, overwrite=False, inputs=[]).save(b"one")
    with pytest.raises(UserError, match="exists already"):
        DocumentFile(path, console, overwrite=False, inputs=[])

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("nanoinfer.cli.document_file.put_in_place", fail)
    with pytest.raises(EngineError, match="No space left"):
        DocumentFile(path, console, overwrite=True, inputs=[]).save(b"two")
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["d"]
