"""Writing files so that what was written survives: a kill at any moment, a full disk, a power cut."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# What is written is on disk at the latest this much later, plus the time that the disk takes. See docs/decisions/076.
SYNC_DELAY_S = 0.5


def lock(fd: int) -> None:
    """Hold a file against other processes until it is closed, or this process dies in whatever way.

    Raises BlockingIOError if another process holds it. Where locks do not exist (some network folders) there are none.
    """
    if fcntl is None:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`; a disk that takes only a part of it makes the next attempt raise."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(folder: Path) -> None:
    """Put a folder's names on disk, without which a new file may be gone after a power cut."""
    if os.name == "nt":
        return  # Windows has no way to open a folder for this
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync(fd: int) -> None:
    """Put a file's content on disk."""
    if fcntl is not None and hasattr(fcntl, "F_FULLFSYNC"):  # macOS, whose fsync stops at the drive's own cache
        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
        except OSError:
            pass  # a file system that does not know it
    os.fsync(fd)


def put_in_place(temporary: Path, target: Path) -> None:
    """Give the file `temporary`, which is on disk, the name `target` in one step, with the mode of what it replaces."""
    if target.exists():
        temporary.chmod(target.stat().st_mode & 0o7777)
    os.replace(temporary, target)
    sync_folder(target.parent)


class GroupSync:
    """Syncs a file to disk soon after writes, many at a time, in a thread of its own: the writer never waits."""

    def __init__(self, fd: int, *, delay: float = SYNC_DELAY_S, sync: Callable[[int], None] = sync) -> None:
        self.error: OSError | None = None  # of the last sync; what was written since the one before may be lost
        self._fd = fd
        self._delay = delay
        self._sync = sync
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="results-sync", daemon=True)
        self._thread.start()

    def written(self) -> None:
        """Something was written. OSError if an earlier write could not be put on disk."""
        self._dirty.set()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Sync what is left and end the thread; call it before the file is closed."""
        self._closing.set()
        self._dirty.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._dirty.wait()
            last = self._closing.wait(self._delay)
            self._dirty.clear()  # before the sync: what is written during it needs the next one
            try:
                self._sync(self._fd)
            except OSError as error:
                self.error = error
            if last:
                return
