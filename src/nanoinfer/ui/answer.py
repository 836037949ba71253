"""Prints a model's answer while it streams: made harmless on a terminal, thinking dim and apart from the answer."""

from __future__ import annotations

from typing import Literal, TextIO

from nanoinfer.ui.console import Console, colour_wanted
from nanoinfer.ui.text import visible

Part = Literal["thinking", "answer"]


class AnswerPrinter:
    """One answer on standard output. Where that is no terminal, it gets the bare answer, byte for byte; thinking then
    goes to the console if a person watches there, and nowhere otherwise."""

    def __init__(self, stdout: TextIO, console: Console) -> None:
        self._out = stdout
        self._console = console
        self._is_terminal = stdout.isatty()
        self._dim = self._is_terminal and console.colour and colour_wanted(stdout, no_color=False)
        self._part: Part | None = None
        self._at_line_start = True

    def write(self, part: Part, text: str) -> None:
        if not self._is_terminal and part == "thinking":
            return
        if part != self._part:
            self._change_to(part)
        self._out.write(visible(text) if self._is_terminal else text)
        self._out.flush()
        self._at_line_start = text.endswith("\n")

    def _change_to(self, part: Part) -> None:
        self._leave_part()
        if self._part is not None:
            self._out.write("\n" if self._at_line_start else "\n\n")
        if part == "thinking":
            self._out.write("\x1b[2m" if self._dim else "(thinking)\n")
        elif self._part == "thinking" and not self._dim:
            self._out.write("(answer)\n")
        self._part = part

    def _leave_part(self) -> None:
        if self._part == "thinking" and self._dim:
            self._out.write("\x1b[22m")

    def end(self) -> None:
        """Close the last line, so that what follows starts on its own."""
        self._leave_part()
        self._part = None
        if not self._at_line_start:
            self._out.write("\n")
        self._out.flush()
        self._at_line_start = True
