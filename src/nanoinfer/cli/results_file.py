"""Where results go: a file that appears complete or not at all, or standard output.

A results file is written as `NAME.partial`, appended to as requests finish, and becomes NAME in one atomic step at the
end. Whatever happens in between, every finished result is on disk and no earlier file was touched.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

from nanoinfer.cli.options import Order
from nanoinfer.errors import EngineError, UserError

_FSYNC_EVERY_S = 1.0


class ResultSink(Protocol):
    """Takes each record once, with the index of its input line; records may come in any order."""

    def write(self, index: int, line: bytes) -> None: ...

    def skip(self, index: int) -> None:
        """There will be no record for this index."""
        ...

    def finish(self) -> None:
        """All records were written: make the result complete."""
        ...

    def abandon(self) -> str | None:
        """The run ends early; returns where the results so far are, None if there are none to find."""
        ...


def open_results(
    path: Path | None,
    *,
    order: Order,
    overwrite: bool,
    inputs: list[Path],
    before_write: Callable[[], None] = lambda: None,
) -> ResultSink:
    """The sink for `-o`: None and `-` are standard output. UserError if the results could not be kept there.

    `before_write` is called before each write to standard output, to clear what else is on the terminal's line. This
    comes before the model is loaded, so that a run cannot fail at its end for want of a folder or a permission.
    """
    if path is None or str(path) == "-":
        return StreamResults(sys.stdout.buffer, order, before_write=before_write)
    target = Path(os.path.realpath(path))
    for source in inputs:
        if source.exists() and target.exists() and os.path.samefile(source, target):
            raise UserError(f"the output {path} is the input file; choose another name.")
    if target.is_dir():
        raise UserError(f"the output {path} is a folder; give a file name.")
    if target.exists() and not stat.S_ISREG(target.stat().st_mode):
        return StreamResults(_open_device(path), order, close=True)  # /dev/null, a FIFO: nothing to rename
    if target.exists() and not overwrite:
        raise UserError(f"the output {path} exists already; give another name, or --overwrite to replace it.")
    if not target.parent.is_dir():
        raise UserError(f"the folder {target.parent} of the output does not exist; create it first.")
    return ResultsFile(target, order, overwrite=overwrite)


def _open_device(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from error


class StreamResults:
    """Records on a stream, at once in completion order, or each as soon as all before it are out in input order."""

    def __init__(
        self, stream: BinaryIO, order: Order, *, close: bool = False, before_write: Callable[[], None] = lambda: None
    ) -> None:
        self._stream = stream
        self._before_write = before_write
        self._close = close
        self._in_order = order == "input"
        self._next = 0
        self._waiting: dict[int, bytes] = {}

    @property
    def is_terminal(self) -> bool:
        return self._stream.isatty()

    def write(self, index: int, line: bytes) -> None:
        if not self._in_order:
            self._put(line)
            return
        self._waiting[index] = line
        while self._next in self._waiting:
            self._put(self._waiting.pop(self._next))
            self._next += 1

    def skip(self, index: int) -> None:
        self.write(index, b"")

    def _put(self, line: bytes) -> None:
        self._before_write()
        self._stream.write(line)
        self._stream.flush()

    def finish(self) -> None:
        self.abandon()

    def abandon(self) -> str | None:
        for index in sorted(self._waiting):
            self._put(self._waiting.pop(index))
        if self._close:
            self._stream.close()
        return None


class ResultsFile:
    """`target` by way of `target.partial`. The partial file also keeps a second run from the same output."""

    def __init__(
        self, target: Path, order: Order, *, overwrite: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._target = target
        self._partial = target.with_name(target.name + ".partial")
        self._order = order
        self._clock = clock
        self._records: list[tuple[int, int, int]] = []  # (index of the input line, offset, length) in the partial file
        self._size = 0
        self._last_fsync = clock()
        flags = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if overwrite else os.O_EXCL)
        try:
            self._file: BinaryIO = os.fdopen(os.open(self._partial, flags, 0o666), "r+b", buffering=0)
        except FileExistsError:
            raise UserError(
                f"{self._partial} exists: another run is writing there, or one was interrupted. Move it away to keep "
                "its results, or give --overwrite to drop them."
            ) from None
        except OSError as error:
            raise UserError(f"cannot write {self._partial}: {error.strerror}; choose another output.") from error

    def write(self, index: int, line: bytes) -> None:
        """Append one whole record, so that a crash can tear the last line only."""
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(28, os.strerror(28))
            if self._clock() - self._last_fsync >= _FSYNC_EVERY_S:
                os.fsync(self._file.fileno())
                self._last_fsync = self._clock()
        except OSError as error:
            raise self._failed(error) from error
        self._records.append((index, self._size, len(line)))
        self._size += len(line)

    def skip(self, index: int) -> None:
        pass

    def finish(self) -> None:
        """Sort into input order, put on disk, and give the file its name."""
        try:
            if self._order == "input" and self._records != sorted(self._records):
                self._sort()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._partial, self._target)
            self._sync_folder()
        except OSError as error:
            raise self._failed(error) from error

    def _sort(self) -> None:
        """Write the records in input order to a second file, which takes the partial file's name and place."""
        ordered = self._partial.with_name(self._partial.name + ".sorted")
        out = open(ordered, "w+b")  # noqa: SIM115  it lives on as self._file
        for _, offset, length in sorted(self._records):
            self._file.seek(offset)
            out.write(self._file.read(length))
        out.flush()
        self._file.close()
        self._file = out
        os.replace(ordered, self._partial)

    def _sync_folder(self) -> None:
        if os.name == "nt":
            return  # Windows has no way to open a folder for this
        folder = os.open(self._target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name itself must survive a power cut
        finally:
            os.close(folder)

    def abandon(self) -> str | None:
        self._file.close()
        if self._records:
            return str(self._partial if self._partial.exists() else self._target)  # a signal may come after the rename
        self._partial.unlink(missing_ok=True)
        return None

    def _failed(self, error: OSError) -> EngineError:
        return EngineError(
            f"cannot write {self._partial}: {error.strerror}; the {len(self._records)} results so far are in it."
        )
