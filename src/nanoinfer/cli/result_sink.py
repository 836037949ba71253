"""Where results go as they are made: the interface, and the plainest form, a stream."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import BinaryIO, Protocol

from nanoinfer.cli.options import Order
from nanoinfer.errors import EngineError


class ResultSink(Protocol):
    """Takes one record for each input line, with the line's index, in any order. Whoever makes it also ends it."""

    def write(self, index: int, line: bytes, *, failed: bool = False) -> None:
        """`line` is the whole record with its line end; `failed` ones may be left out of the result."""
        ...


class StreamResults:
    """Records on a stream, at once in completion order, or each as soon as all before it are out in input order.

    `before_write` is called before each write, to clear what else is on the terminal's line.
    """

    def __init__(
        self,
        stream: BinaryIO,
        order: Order,
        *,
        keep_failures: bool = True,
        close: bool = False,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._stream = stream
        self._before_write = before_write
        self._keep_failures = keep_failures
        self._close = close
        self._in_order = order == "input"
        self._next = 0
        self._waiting: dict[int, bytes] = {}

    @property
    def is_terminal(self) -> bool:
        return self._stream.isatty()

    def write(self, index: int, line: bytes, *, failed: bool = False) -> None:
        if failed and not self._keep_failures:
            line = b""
        if not self._in_order:
            self._put(line)
            return
        self._waiting[index] = line
        while self._next in self._waiting:
            self._put(self._waiting.pop(self._next))
            self._next += 1

    def _put(self, line: bytes) -> None:
        if not line:
            return
        self._before_write()
        try:
            self._stream.write(line)
            self._stream.flush()
        except OSError as error:
            self._waiting.clear()
            if isinstance(error, BrokenPipeError):
                raise  # whoever read the results has seen enough
            # What the stream still holds must not be tried again when it is closed.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            raise EngineError(f"cannot write the results: {error.strerror}.") from error

    def finish(self) -> None:
        """Write what still waits for a record before it."""
        for index in sorted(self._waiting):
            self._put(self._waiting.pop(index))
        if self._close:
            self._stream.close()

    def abandon(self) -> None:
        """The run ends early, and nothing keeps its results."""
        self.finish()
