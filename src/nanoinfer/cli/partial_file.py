"""The file that collects results while a run goes on, so that whatever ends the run, another can go on with it.

Line 1 is a header, a JSON object with "format", "version" and what the run says about itself. Every further line is

    {"key": "<32 hex digits>", "id": "<of the input line>", "failed": false, "record": {<the record as it will be>}}

in the order in which requests ended. A key that comes again replaces what came before. The last line may be torn by a
crash and, after a power cut, lines before it may be unreadable; both only mean that their prompts have to run again.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoinfer.cli.durable import GroupSync, lock, sync, sync_folder, write_all
from nanoinfer.errors import UserError

FORMAT, VERSION = "nanoinfer results", 1
_HEADER_START = json.dumps({"format": FORMAT}).removesuffix("}").encode()


@dataclass(frozen=True, slots=True)
class StoredResult:
    """One result in the file; `offset` and `length` are its record's bytes, without a line end."""

    key: str
    id: str
    failed: bool
    offset: int
    length: int


class PartialFile:
    """`path`, held against every other process, and what an earlier run left in it. Nothing in the file changes before
    `start` or `go_on`.

    UserError if another run holds the file or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] | None = None
        self.results: dict[str, StoredResult] = {}  # by key
        self.unreadable = 0  # lines
        self.is_foreign = False  # holds something that no run has written
        self._end = 0  # where the next line goes
        self._needs_newline = False
        self._sync: GroupSync | None = None
        self._fd = _open_locked(path)
        self._read()

    def _read(self) -> None:
        with open(self._fd, "rb", closefd=False) as file:
            for line in file:  # in bytes, lines end at \n only
                readable = self._take_header(line) if self._end == 0 else self._take_result(line)
                if not line.endswith(b"\n"):
                    if not readable:
                        break
                    self._needs_newline = True
                self._end += len(line)

    def _take_header(self, line: bytes) -> bool:
        self.header = _header(line)
        if self.header is None:
            start = line.rstrip(b"\0")  # which a power cut may leave
            torn = not line.endswith(b"\n") and (start.startswith(_HEADER_START) or _HEADER_START.startswith(start))
            self.is_foreign = not torn
        return self.header is not None

    def _take_result(self, line: bytes) -> bool:
        stored = _parse(line.removesuffix(b"\n"), self._end) if self.header is not None else None
        if stored is None:
            self.unreadable += 1
            return False
        self.results[stored.key] = stored
        return True

    def start(self, header: Mapping[str, Any]) -> None:
        """Drop what is in the file and begin a new run in it."""
        os.ftruncate(self._fd, 0)
        self.results, self.unreadable, self.is_foreign, self._end, self._needs_newline = {}, 0, False, 0, False
        self.header = {"format": FORMAT, "version": VERSION, **header}
        self._append(json.dumps(self.header).encode() + b"\n")
        sync(self._fd)
        sync_folder(self.path.parent)
        self._sync = GroupSync(self._fd)

    def go_on(self) -> None:
        """Continue the earlier run: cut off a torn end, so that the next line does not grow onto it."""
        os.ftruncate(self._fd, self._end)
        if self._needs_newline:
            self._append(b"\n")
        self._sync = GroupSync(self._fd)

    def write(self, key: str, id: str, record: bytes, *, failed: bool) -> StoredResult:
        """Append one result, which survives the end of this process from here on; OSError leaves the file as it was."""
        assert self._sync is not None, "start or go_on comes first"
        start = _prefix(key, id, failed)
        stored = StoredResult(key, id, failed, self._end + len(start), len(record))
        self._append(start + record + b"}\n")
        self._sync.written()
        self.results[key] = stored
        return stored

    def _append(self, data: bytes) -> None:
        os.lseek(self._fd, self._end, os.SEEK_SET)
        try:
            write_all(self._fd, data)
        except OSError:
            os.ftruncate(self._fd, self._end)
            raise
        self._end += len(data)

    def record(self, stored: StoredResult) -> bytes:
        """The bytes of a record."""
        os.lseek(self._fd, stored.offset, os.SEEK_SET)
        data = bytearray()
        while len(data) < stored.length:
            piece = os.read(self._fd, stored.length - len(data))
            assert piece, f"{self.path} ends before byte {stored.offset + stored.length}"
            data += piece
        return bytes(data)

    def close(self, *, remove: bool = False) -> None:
        """Put everything on disk and let go of the file. Closing twice is fine."""
        if self._fd < 0:
            return
        if self._sync is not None:
            self._sync.close()
        if remove and os.name != "nt":
            self.path.unlink(missing_ok=True)  # while it is still held: nobody can have begun to use it
        os.close(self._fd)
        self._fd = -1
        if remove and os.name == "nt":
            self.path.unlink(missing_ok=True)  # an open file cannot be removed there


def _open_locked(path: Path) -> int:
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; choose another output.") from error
        try:
            lock(fd)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise UserError(f"{path} is no regular file; move it away, or choose another output.")
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BlockingIOError:
            os.close(fd)
            raise UserError(
                f"another run is writing {path}; wait until it has ended, or choose another output."
            ) from None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the run that held it has just removed it, so this is no longer the file of that name


def _header(line: bytes) -> dict[str, Any] | None:
    try:
        header = json.loads(line)
    except ValueError:
        return None
    return header if isinstance(header, dict) and header.get("format") == FORMAT else None


def _prefix(key: str, id: str, failed: bool) -> bytes:
    start = json.dumps({"key": key, "id": id, "failed": failed})
    return f'{start.removesuffix("}")}, "record": '.encode()


def _parse(line: bytes, offset: int) -> StoredResult | None:
    """The result on a line; None if the line is not whole."""
    try:
        fields = json.loads(line)
        start = _prefix(fields["key"], fields["id"], fields["failed"])
    except (ValueError, TypeError, KeyError):
        return None
    if not line.startswith(start) or not isinstance(fields.get("record"), dict):
        return None
    return StoredResult(fields["key"], fields["id"], fields["failed"], offset + len(start), len(line) - len(start) - 1)
