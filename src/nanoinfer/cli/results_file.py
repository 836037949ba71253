"""A results file that appears complete or not at all, and that a later run can go on with until it is complete.

Results are appended to `NAME.partial` as requests finish. At the end they are written in order to a second file, which
becomes NAME in one atomic step. Whatever happens in between, every finished result is on disk and no earlier file was
touched.
"""

from __future__ import annotations

import errno
import filecmp
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nanoinfer.cli.durable import put_in_place, sync
from nanoinfer.cli.options import Order
from nanoinfer.cli.output_path import is_standard_output, open_device_or_pipe, partial_path, regular_target, sorted_path
from nanoinfer.cli.partial_file import VERSION, PartialFile, StoredResult
from nanoinfer.cli.records import to_json_line
from nanoinfer.cli.result_sink import StreamResults
from nanoinfer.errors import EngineError, UserError
from nanoinfer.ui.console import Console
from nanoinfer.ui.text import plural


def open_results(
    path: Path | None,
    console: Console,
    *,
    order: Order,
    inputs: list[Path],
    keep_failures: bool = True,
    resume: bool = False,
    overwrite: bool = False,
) -> ResultsFile | StreamResults:
    """The sink for `-o`; UserError if results could not be kept there.

    This comes before the model is loaded, so that a run cannot fail at its end for want of a folder or a permission.
    """
    if path is None or is_standard_output(path):
        _refuse_stream(resume)
        stdout = sys.stdout.buffer
        return StreamResults(stdout, order, keep_failures=keep_failures, before_write=console.clear_status)
    stream = open_device_or_pipe(path, console.say)
    if stream is not None:
        _refuse_stream(resume)
        return StreamResults(stream, order, keep_failures=keep_failures, close=True)
    results = ResultsFile(path, order, inputs=inputs, keep_failures=keep_failures, overwrite=overwrite)
    try:
        results.check_earlier(resume)
    except UserError:
        results.abandon()
        raise
    return results


def _refuse_stream(resume: bool) -> None:
    if resume:
        raise UserError("--resume needs a results file (-o FILE); what went to a stream is not kept.")


class ResultsFile:
    """`path` by way of its partial file, which is held from here until `finish` or `abandon`.

    `begin` comes before `write`. `earlier` is what an interrupted run left; `keep` takes results over from it.
    """

    def __init__(
        self, path: Path, order: Order, *, inputs: list[Path], keep_failures: bool = True, overwrite: bool = False
    ) -> None:
        self.path = path
        self._target = regular_target(path, inputs)
        self._order = order
        self._keep_failures = keep_failures
        self._overwrite = overwrite
        self._labels: list[tuple[str, str]] = []
        self._done: dict[int, StoredResult] = {}  # by index of the input line
        self._from_before: set[int] = set()
        self.earlier = PartialFile(partial_path(self._target))

    def check_earlier(self, resume: bool) -> None:
        """UserError if the output is there already, or what an earlier run left must not be touched, or cannot be gone
        on with."""
        partial, name = self.earlier, self.earlier.path
        if self._overwrite:
            return
        if partial.is_foreign:
            raise UserError(f"{name} is no file of nanoinfer; move it away, or give --overwrite to replace it.")
        if partial.header is not None and partial.header.get("version") != VERSION:
            raise UserError(
                f"{name} was written by another version of nanoinfer; finish it with that one, or start over with "
                "--overwrite."
            )
        if partial.results and not resume:
            raise UserError(
                f"{name} has {plural(len(partial.results), 'result')} of a run that was interrupted; give --resume to "
                "go on with it, or --overwrite to start over."
            )
        if partial.header is not None:
            self._overwrite = bool(partial.header.get("overwrite"))  # the interrupted run was allowed to
        if self.is_taken and not partial.results:
            other = " and is not the result of these prompts" if resume else " already"
            raise UserError(f"the output {self.path} exists{other}; give another name, or --overwrite to replace it.")

    @property
    def is_taken(self) -> bool:
        """Whether the output exists and must not be replaced."""
        return self._target.exists() and not self._overwrite

    def keep(self, kept: Mapping[int, StoredResult]) -> None:
        """Take these results of the earlier run over, by index of the input line."""
        self._done.update(kept)
        self._from_before.update(kept)

    def begin(self, header: Mapping[str, Any], labels: list[tuple[str, str]]) -> None:
        """Start the partial file with `header`, or go on with it if results were kept.

        `labels` are the key and the id of every input line, by its index.
        """
        self._labels = labels
        try:
            if self._done:
                self.earlier.go_on()
            else:
                self.earlier.start({**header, "overwrite": self._overwrite})
        except OSError as error:
            raise self._failed(error) from error

    def write(self, index: int, line: bytes, *, failed: bool = False) -> None:
        """Append one whole record, so that a crash can tear the last line only."""
        key, name = self._labels[index]
        try:
            self._done[index] = self.earlier.write(key, name, line.removesuffix(b"\n"), failed=failed)
        except OSError as error:
            raise self._failed(error) from error

    def finish(self) -> None:
        """Put the records in order, on disk, and under their name; the partial file goes."""
        temporary = sorted_path(self._target)
        try:
            with temporary.open("wb") as out:
                for index, stored in self._in_order():
                    out.write(self._line(index, stored))
                out.flush()
                sync(out.fileno())
            if not self.is_taken:
                put_in_place(temporary, self._target)
            # A run that was killed between the last two steps has left its result and all that it was made of.
            elif not filecmp.cmp(temporary, self._target, shallow=False):
                raise UserError(f"{self.path} has been written by something else; move it away, and resume.")
            self.earlier.close(remove=True)
        except OSError as error:
            raise self._failed(error) from error
        finally:
            temporary.unlink(missing_ok=True)

    def _line(self, index: int, stored: StoredResult) -> bytes:
        line = self.earlier.record(stored) + b"\n"
        return with_index(line, index) if index in self._from_before else line

    def _in_order(self) -> Iterator[tuple[int, StoredResult]]:
        done = self._done.items() if self._keep_failures else [(i, k) for i, k in self._done.items() if not k.failed]
        by_input = self._order == "input"
        yield from sorted(done, key=lambda item: item[0] if by_input else item[1].offset)

    def abandon(self) -> Path | None:
        """The run ends early; returns the file that keeps the results so far, None if there is none."""
        has_results = bool(self.earlier.results)
        self.earlier.close(remove=not has_results and not self.earlier.is_foreign)
        return self.earlier.path if has_results and self.earlier.path.exists() else None

    def _failed(self, error: OSError) -> EngineError:
        advice = " Make room on the disk, then resume." if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return EngineError(
            f"cannot write {self.earlier.path}: {error.strerror}; the results before that are in it.{advice}"
        )


def with_index(line: bytes, index: int) -> bytes:
    """The line of an earlier run's record, in which an index of its input line is today's."""
    record = json.loads(line)
    return line if record.get("index", index) == index else to_json_line(record | {"index": index})
