"""A Markdown answer on a terminal while it streams: the open block as it is written, finished blocks rendered once.

Text is only ever added, until a block is finished; then its plain form is replaced in one write. That needs its rows to
be known and still on the screen. Where they are not (a block higher than the screen, a terminal that was resized in the
middle of one), the plain form stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nanoinfer.ui.markdown import BlockRenderer
from nanoinfer.ui.markdown_blocks import Block, BlockSplitter
from nanoinfer.ui.text import visible
from nanoinfer.ui.wrap import WrappedLine, wrapped_rows


@dataclass(frozen=True)
class _Shown:
    """A line of plain text on a terminal of so many columns: its rows, None where they are not known."""

    rows: int | None
    columns: int


class MarkdownStream:
    """`write` sends text to the terminal; `size` gives its columns and lines."""

    def __init__(
        self, write: Callable[[str], None], size: Callable[[], tuple[int, int]], renderer: BlockRenderer
    ) -> None:
        self._write = write
        self._size = size
        self._renderer = renderer
        self._splitter = BlockSplitter()
        self._out = ""  # what is to be sent in one write
        self._columns, self._lines = size()
        self._area: list[_Shown] = []  # the lines above the cursor that belong to the open block
        self._line = ""  # the line that grows; it is not shown while it is blank
        self._wrapped: WrappedLine | None = None  # the line as it is shown
        self._blank_row_due = False  # a blank line has come; its row is written when something follows it

    def push(self, text: str) -> None:
        self._columns, self._lines = self._size()
        first, *others = text.split("\n")
        self._grow(first)
        for line in others:
            self._end_line()
            self._grow(line)
        self._flush()

    def end(self) -> None:
        """Render what is open; the cursor is then at the start of a line."""
        self._columns, self._lines = self._size()
        if self._line.strip():
            self._end_line()
        self._line = ""
        self._replace(self._splitter.finish())
        self._flush()

    def _flush(self) -> None:
        if self._out:
            self._write(self._out)
            self._out = ""

    def _grow(self, text: str) -> None:
        """Add text without a line end."""
        self._line += text
        if not self._line.strip():
            return
        if self._wrapped is None:
            if self._blank_row_due:
                self._add_blank_row()
            self._wrapped = WrappedLine(self._columns - 1)
            text = self._line
        if self._splitter.in_fence:  # the terminal breaks long lines of code, so that a copy of them is whole
            self._out += visible(text)
        else:
            self._out += self._wrapped.write(_plain(text), self._columns - 1)

    def _add_blank_row(self) -> None:
        self._out += "\n"
        self._area.append(_Shown(1, self._columns))
        self._blank_row_due = False

    def _end_line(self) -> None:
        line, shown = self._line, self._wrapped
        self._line, self._wrapped = "", None
        if shown is not None:
            in_fence = self._splitter.in_fence
            rows = wrapped_rows(visible(line), self._columns) if in_fence else shown.rows
            self._area.append(_Shown(rows, shown.width + 1))
        if shown is not None or self._splitter.in_fence:
            self._out += "\n"
        self._replace(self._splitter.push(line))
        pending = self._splitter.pending
        self._blank_row_due = not pending[-1] if pending else self._splitter.gap

    def _replace(self, blocks: list[Block]) -> None:
        """Render the blocks that the area begins with in place of their plain text; the rest of it is shown again.

        The cursor is at the start of the row below the area.
        """
        if not blocks:
            return
        rendered = "".join(
            ("\n" if block.gap else "") + self._renderer.render(block, self._columns - 1) + "\n" for block in blocks
        )
        pending = self._splitter.pending
        rows = [line.rows if line.columns == self._columns else None for line in self._area]
        known = [count for count in rows if count is not None]
        if len(known) < len(rows) or sum(known) >= self._lines:
            self._area = self._area[len(self._area) - len(pending) :]
            return
        if not rows:  # an empty line of code: it is there already
            return
        self._out += f"\x1b[{sum(known)}A\x1b[J{rendered}"
        self._area = []
        if pending and self._splitter.gap:
            self._add_blank_row()
        for line in pending:
            again = WrappedLine(self._columns - 1)
            self._out += again.write(_plain(line), self._columns - 1) + "\n"
            self._area.append(_Shown(again.rows, self._columns))


def _plain(text: str) -> str:
    return visible(text).replace("\t", "    ")
