"""A file that is written in one go at the end of a command, and refused at its start if it could not be."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from nanoinfer.cli.durable import put_in_place, sync
from nanoinfer.cli.output_path import is_standard_output, open_device_or_pipe, regular_target
from nanoinfer.errors import EngineError, UserError
from nanoinfer.ui.console import Console


class DocumentFile:
    """`path`, which keeps its old content until `save`; a pipe or a device is written to as it is.

    UserError if it exists and `overwrite` is not set, is one of `inputs`, or cannot be written.
    """

    def __init__(self, path: Path, console: Console, *, overwrite: bool, inputs: list[Path]) -> None:
        self._path = path
        self._stream = sys.stdout.buffer if is_standard_output(path) else open_device_or_pipe(path, console.say)
        if self._stream is not None:
            return
        self._target = regular_target(path, inputs)
        if self._target.exists() and not overwrite:
            raise UserError(f"the output {path} exists already; give another name, or --overwrite to replace it.")
        self._temporary = self._target.with_name(f"{self._target.name}.{os.getpid()}.tmp")
        try:
            self._temporary.open("xb").close()
            self._temporary.unlink()
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; choose another output.") from error

    def save(self, data: bytes) -> None:
        """Write the whole file; EngineError if that fails, and then the old content is still there."""
        try:
            if self._stream is not None:
                self._stream.write(data)
                self._stream.flush()
                return
            try:
                with self._temporary.open("xb") as out:
                    out.write(data)
                    out.flush()
                    sync(out.fileno())
                put_in_place(self._temporary, self._target)
            finally:
                self._temporary.unlink(missing_ok=True)
        except OSError as error:
            raise EngineError(f"cannot write {self._path}: {error.strerror}.") from error
