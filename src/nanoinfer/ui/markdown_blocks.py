"""Cuts Markdown that arrives line by line into blocks, each as soon as no further line can change it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from markdown_it import MarkdownIt

# HTML is text here, and a link means the same wherever it stands: what a model writes must not vanish.
PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("reference")

# Lists are cut into items; an item, unlike other blocks, goes on after a blank line.
_LISTS = ("bullet_list_open", "ordered_list_open")
_ONE_LINE = ("heading_open", "hr")


@dataclass(frozen=True)
class Block:
    """`text` is Markdown, or a line of a code block (its fences included); `gap` means a blank line before it."""

    kind: Literal["markdown", "fence", "code"]
    text: str
    gap: bool = False


class BlockSplitter:
    """`push` takes one line without its line end. `pending` are the lines of the block that is still open, `gap` says
    whether a blank line comes before it."""

    def __init__(self) -> None:
        self.pending: list[str] = []
        self.gap = False
        self.in_fence = False
        self._closing = re.compile("")
        self._started = False

    def push(self, line: str) -> list[Block]:
        """The blocks that the line completes; a line of a code block is a block of its own."""
        if self.in_fence:
            self.in_fence = not self._closing.fullmatch(line)
            return [Block("code" if self.in_fence else "fence", line)]
        if line.strip():
            self.pending.append(line)
        elif self.pending and self.pending[-1]:
            self.pending.append("")
        elif not self.pending:
            self.gap = self._started
        return self._take_closed() if self.pending else []

    def finish(self) -> list[Block]:
        """What is still open at the end of the text."""
        blocks = self._take_closed(at_end=True) if self.pending else []
        self.in_fence = False
        return blocks

    def _take_closed(self, *, at_end: bool = False) -> list[Block]:
        lines, blocks = self.pending, []
        end_of_closed = 0
        found = _top_level("\n".join(lines))
        for kind, start, end, markup in found:
            is_last = start == found[-1][1]
            closed = at_end or not is_last or kind in _ONE_LINE or (kind not in _LISTS and end < len(lines))
            if not closed and kind != "fence":
                break
            block = Block("fence" if kind == "fence" else "markdown", "\n".join(lines[start:end]).rstrip("\n"))
            blocks.append(Block(block.kind, block.text, self.gap if not start else not lines[start - 1]))
            end_of_closed = end
            if kind == "fence":
                self.in_fence = True
                self._closing = re.compile(rf" {{0,3}}{re.escape(markup[0])}{{{len(markup)},}}\s*")
        if blocks:
            self._started = True
            rest = lines[end_of_closed:]
            self.gap = (bool(rest) and not rest[0]) or not lines[end_of_closed - 1]
            self.pending = rest[1:] if rest and not rest[0] else rest
        return blocks


def _top_level(text: str) -> list[tuple[str, int, int, str]]:
    """(kind, first line, line after the last, markup) of each top-level block; each item of a list counts as one."""
    found = []
    list_kind = ""
    for token in PARSER.parse(text):
        if token.map is None or token.nesting < 0:
            continue
        if token.level == 0 and token.type in _LISTS:
            list_kind = token.type
        elif token.level == 0 or (token.level == 1 and token.type == "list_item_open"):
            kind = list_kind if token.level else token.type
            found.append((kind, token.map[0], token.map[1], token.markup))
    return found
