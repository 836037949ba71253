"""The user's cache of imported models, and how a folder appears in it: complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from nanoinfer.errors import ModelError


def cache_dir() -> Path:
    """nanoinfer's folder in the user's cache: $XDG_CACHE_HOME/nanoinfer, by default ~/.cache/nanoinfer."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nanoinfer"


def create_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return the folder `target`, and let `build(folder)` fill it first if it does not exist.

    `build` works in a folder beside it, which is renamed at the end, under a lock that the system drops when a process
    dies: after kill -9 the next process starts over, and of several processes one builds and the others wait.
    ModelError if the cache cannot be written or the disk is full.
    """
    if target.is_dir():
        return target
    from filelock import FileLock

    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(target.name + ".lock")):
            if not target.is_dir():
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                try:
                    build(part)
                    for path in part.iterdir():
                        with path.open("rb") as file:
                            os.fsync(file.fileno())  # or a power cut could leave zeros under the final name
                    part.rename(target)
                finally:
                    shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"the model cache {target.parent} cannot be written ({error.strerror or error}); make room there, or set "
            "XDG_CACHE_HOME to another folder."
        ) from error
    return target


def require_free(folder: Path, needed: int, what: str) -> None:
    """ModelError if the disk of `folder` has fewer than `needed` bytes left for `what`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"{what} needs {needed / 1e9:.2f} GB in {folder.parent}, but only {free / 1e9:.2f} GB are free; make room "
            "there, or set XDG_CACHE_HOME to a folder on a larger disk."
        )
