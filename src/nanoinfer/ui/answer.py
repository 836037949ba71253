"""Prints a model's answer while it streams: made harmless on a terminal, thinking dim and apart from the answer."""

from __future__ import annotations

from typing import Literal, TextIO

from nanoinfer.ui.answer_stream import MarkdownStream
from nanoinfer.ui.console import Console, colour_wanted
from nanoinfer.ui.text import visible
from nanoinfer.ui.wrap import WrappedText

Part = Literal["thinking", "answer"]  # of a model's output

# Below this Markdown has no room: plain text, as the terminal breaks it.
_LEAST_COLUMNS = 20


class AnswerPrinter:
    """One answer on standard output. Where that is no terminal, it gets the answer alone, byte for byte.

    With `markdown`, a terminal with colours shows the answer rendered; any other shows the text as it was generated.
    """

    def __init__(
        self,
        stdout: TextIO,
        console: Console,
        *,
        markdown: bool = False,
        thinking: Literal["show", "hide"] = "show",
    ) -> None:
        self._out = stdout
        self._console = console
        self._thinking = thinking
        self._is_terminal = stdout.isatty()
        self._dim = self._is_terminal and console.colour and colour_wanted(stdout, no_color=False)
        self._markdown: MarkdownStream | None = None
        if markdown and self._dim and console.size()[0] >= _LEAST_COLUMNS:
            from nanoinfer.ui.markdown import BlockRenderer

            self._markdown = MarkdownStream(self._send, console.size, BlockRenderer(ascii=console.ascii))
        self._thoughts = WrappedText()
        self._part: Part | None = None
        self._at_line_start = True

    def write(self, part: Part, text: str) -> None:
        if part == "thinking" and (self._thinking == "hide" or not self._is_terminal):
            self._console.status("thinking ...")
            return
        self._console.clear_status()
        if part != self._part:
            self._change_to(part)
        if self._markdown is None:
            self._send(visible(text) if self._is_terminal else text)
        elif part == "answer":
            self._markdown.push(text)
        else:
            self._send(self._thoughts.write(visible(text).replace("\t", "    "), self._console.size()[0] - 1))
        self._at_line_start = text.endswith("\n")

    def _send(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

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
        self._console.clear_status()
        self._leave_part()
        if self._part == "answer" and self._markdown is not None:
            self._markdown.end()
        elif not self._at_line_start:
            self._out.write("\n")
        self._part = None
        self._out.flush()
        self._at_line_start = True
