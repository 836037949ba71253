"""What the name after -o stands for, and whether results can go there; found out before a model is loaded."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from nanoinfer.errors import UserError


def is_standard_output(path: Path | None) -> bool:
    """No name, `-`, or another name of the same thing, such as /dev/stdout into a file."""
    if path is None or str(path) == "-":
        return True
    try:
        return os.path.samestat(path.stat(), os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError, AttributeError):  # no such file; no real standard output (tests, pythonw)
        return False


def open_device_or_pipe(path: Path, say: Callable[[str], None]) -> BinaryIO | None:
    """The open stream if `path` is a pipe or a device, which keep nothing that could be renamed or resumed."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    try:
        if stat.S_ISFIFO(mode) and not _has_reader(path):
            say(f"waiting for a reader of {path} ...")
        return path.open("wb")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another output.") from error


def _has_reader(fifo: Path) -> bool:
    try:
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno == errno.ENXIO:
            return False
        raise
    return True


def partial_path(target: Path) -> Path:
    """Where results are collected until all are there."""
    return target.with_name(target.name + ".partial")


def sorted_path(target: Path) -> Path:
    """Where results are put in order at the end."""
    return target.with_name(target.name + ".partial.sorted")


def regular_target(path: Path, inputs: Iterable[Path]) -> Path:
    """The file that `path` leads to, whether it exists or not.

    UserError if it is a folder, has no folder to be in or too long a name, or is one of `inputs`, either itself or by
    way of its partial file.
    """
    target = Path(os.path.realpath(path)) if path.is_symlink() else path  # a link stays, and what it names changes
    if target.is_dir():
        raise UserError(f"the output {path} is a folder; give a file name.")
    if not target.parent.is_dir():
        raise UserError(f"the folder {target.parent} of the output does not exist; create it first.")
    try:
        sorted_path(target).exists()
    except OSError as error:  # the longest of the names is too long
        raise UserError(f"cannot write {sorted_path(target)}: {error.strerror}; choose another output.") from error
    for source in inputs:
        for name in (target, partial_path(target)):
            if _is_same(source, name):
                raise UserError(f"the output {path} is the input file, or would be kept there; choose another name.")
    return target


def _is_same(first: Path, second: Path) -> bool:
    try:
        return os.path.samefile(first, second)
    except OSError:  # one of them does not exist
        return False
