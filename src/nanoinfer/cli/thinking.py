"""Tells a model's thinking from its answer while the text streams: <think> ... </think> at the start of the output."""

from __future__ import annotations

from typing import Literal

from nanoinfer.engine.tokenizer import THINKING_MARKERS
from nanoinfer.ui.answer import Part

OPENING, CLOSING = THINKING_MARKERS


class ThinkSplitter:
    """Cuts streamed text into thinking and answer; the markers and the blank space after them belong to neither.

    Only thinking at the very start counts: a model that writes "<think>" later is writing about it. `inside` says that
    the prompt already ends with the opening marker, as some chat templates have it.
    """

    def __init__(self, *, inside: bool = False) -> None:
        self._state: Literal["start", "thinking", "answer"] = "thinking" if inside else "start"
        self._held = ""
        self._trim = inside  # blank space is to be dropped until the part's first character
        self.answer = ""
        self.thinking = ""

    def push(self, text: str) -> list[tuple[Part, str]]:
        """The parts that `text` completes, in order; what could still become a marker is held back."""
        self._held += text
        parts: list[tuple[Part, str]] = []
        if self._state == "start":
            self._leave_start()
        if self._state == "thinking":
            before, marker, after = self._held.partition(CLOSING)
            keep = 0 if marker else _marker_prefix(before, CLOSING)
            self._add(parts, "thinking", before[: len(before) - keep])
            self._held = before[len(before) - keep :] if not marker else after
            if marker:
                self._state, self._trim = "answer", True
        if self._state == "answer":
            self._add(parts, "answer", self._held)
            self._held = ""
        return parts

    def finish(self) -> list[tuple[Part, str]]:
        """What was held back at the end of the output."""
        parts: list[tuple[Part, str]] = []
        self._add(parts, "thinking" if self._state == "thinking" else "answer", self._held)
        self._held = ""
        return parts

    def _leave_start(self) -> None:
        stripped = self._held.lstrip()
        if stripped.startswith(OPENING):
            self._state, self._trim, self._held = "thinking", True, stripped[len(OPENING) :]
        elif not OPENING.startswith(stripped):
            self._state = "answer"

    def _add(self, parts: list[tuple[Part, str]], part: Part, text: str) -> None:
        if self._trim:
            text = text.lstrip()
        if not text:
            return
        self._trim = False
        parts.append((part, text))
        if part == "answer":
            self.answer += text
        else:
            self.thinking += text


def _marker_prefix(text: str, marker: str) -> int:
    """The length of the longest end of `text` that is a beginning of `marker`."""
    return next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)
