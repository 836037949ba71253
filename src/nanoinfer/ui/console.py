"""The console: everything that is not the result of a command goes to standard error through this one object."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from nanoinfer.ui.text import visible

# What the program's own sentences have beyond ASCII; each has one character in its place, so that widths stay.
_IN_ASCII = str.maketrans({"·": "-", "…": "~", "±": "+", "≤": "<"})

LOG_INTERVAL_S = 10.0  # between the lines about one activity where no terminal shows it as it moves


def in_ascii(text: str) -> str:
    """`text` with every character beyond ASCII replaced: our own signs by their like, all others by a question mark."""
    return text.translate(_IN_ASCII).encode("ascii", "replace").decode()


def colour_wanted(stream: TextIO, no_color: bool) -> bool:
    """Whether escape codes may be written to `stream` (https://no-color.org, TERM=dumb, pipes)."""
    return not no_color and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def takes_unicode(stream: TextIO) -> bool:
    return (stream.encoding or "utf-8").lower().startswith("utf")


class Console:
    """Writes notes, warnings, errors and one status line to a stream. Text from outside is made harmless.

    The status line is rewritten in place on a terminal; any other output first removes it, so that the two never mix.
    With `ascii`, or where the stream can write nothing else, other characters are replaced.
    """

    def __init__(
        self, stream: TextIO | None = None, *, quiet: bool = False, no_color: bool = False, ascii: bool = False
    ) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self.quiet = quiet
        self.colour = colour_wanted(self.stream, no_color)
        self.is_terminal = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.ascii = ascii or not takes_unicode(self.stream)
        # Takes away what else moves on this terminal, before a line is written.
        self.before_output: Callable[[], None] = lambda: None
        self._status_shown = False

    def size(self) -> tuple[int, int]:
        """The terminal's columns and lines."""
        size = os.get_terminal_size(self.stream.fileno())
        return size.columns or 80, size.lines or 24  # a terminal that nobody has sized says 0

    def fit(self, text: str, width: int) -> str:
        """`text` made harmless, on one line of at most `width` characters."""
        line = visible(text.replace("\n", " "))[: max(width, 1)]
        return line.translate(_IN_ASCII) if self.ascii else line

    def _write(self, text: str) -> None:
        if self.ascii:
            text = in_ascii(text)
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):
            self.quiet = True  # nobody reads any more; the result on stdout still matters

    def _folded(self, text: str) -> str:
        """`text` made harmless; on a terminal, with line ends where it would break words."""
        shown = visible(text)
        if not self.is_terminal:
            return shown
        from nanoinfer.ui.wrap import fold

        try:
            return fold(shown, self.size()[0])
        except Exception:  # of a terminal that is gone, for example: the message matters more than its lines
            return shown

    def _styled(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text

    def say(self, text: str = "") -> None:
        """A line of information; nothing under --quiet."""
        if not self.quiet:
            self.clear_status()
            self._write(self._folded(text) + "\n")

    def dim(self, text: str) -> None:
        """A line that should not draw attention; nothing under --quiet."""
        if not self.quiet:
            self.clear_status()
            self._write(self._styled(self._folded(text), "2") + "\n")

    def styled(self, text: str) -> None:
        """Lines that have been made harmless and carry their own escape codes, if any; nothing under --quiet."""
        if not self.quiet:
            self.clear_status()
            self._write(text + "\n")

    def warn(self, text: str) -> None:
        """A line that a person should not miss; shown under --quiet too."""
        self.clear_status()
        self._write(self._folded(f"warning: {text}").replace("warning:", self._styled("warning:", "33"), 1) + "\n")

    def more(self, text: str) -> None:
        """A further line of a warning or an error, as it is: it may be a command to copy."""
        self.clear_status()
        self._write(visible(text) + "\n")

    def more_of(self, lines: Sequence[str], most: int = 20) -> None:
        """Further lines of a warning, indented; of more than `most` the first ones."""
        for line in lines[:most]:
            self.more(f"  {line}")
        if len(lines) > most:
            self.more(f"  ... and {len(lines) - most} more")

    def error(self, text: str) -> None:
        """Why the command failed; always shown."""
        self.clear_status()
        self._write(self._folded(f"error: {text}").replace("error:", self._styled("error:", "31;1"), 1) + "\n")

    def status(self, text: str) -> None:
        """Replace the status line (terminals only); cut to the terminal's width so that it stays one row."""
        if not self.quiet and self.is_terminal:
            self._write(f"\r\x1b[2K{self._styled(self.fit(text, self.size()[0] - 1), '2')}")
            self._status_shown = True

    def clear_status(self) -> None:
        """Take away all that moves: before anything else is written to the terminal, by whatever way."""
        self.before_output()
        if self._status_shown:
            self._write("\r\x1b[2K")
            self._status_shown = False
