"""Word wrap for text that arrives in pieces: what is on the terminal only grows, and its rows are known."""

from __future__ import annotations

import re

from rich.cells import get_character_cell_size

_EMOJI_STYLE = "\ufe0f"  # makes some characters twice as wide, on some terminals


def cells(character: str) -> int:
    """Columns that a character takes at the most. Sequences that a terminal may draw as one count as their parts: too
    early a line break does no harm, one that the terminal makes by itself would."""
    return 1 if character == _EMOJI_STYLE else get_character_cell_size(character)


def wrap(text: str, width: int) -> list[str]:
    """The rows of one line of text, each at most `width` columns wide; joined, they are the text.

    Rows break after spaces and on both sides of wide characters, and inside a word only if it is longer than a row.
    Spaces at a row's end may stand out over the edge: they are not to be written.
    """
    rows: list[str] = []
    start = column = 0  # of the row
    may_break = break_column = 0  # the last place to break at, and its column
    before = 1  # width of the character before
    for at, character in enumerate(text):
        size = cells(character)
        if size == 2 or before == 2:
            may_break, break_column = at, column
        if column + size > width and character != " ":
            if may_break <= start:
                may_break, break_column = at, column
            if may_break > start:  # a character wider than the row stays where it is
                rows.append(text[start:may_break])
                start, column = may_break, column - break_column
                break_column = 0
        column += size
        if character == " ":
            may_break, break_column = at + 1, column
        before = size or before
    rows.append(text[start:])
    return rows


_QUOTED = re.compile(r"(?<!\w)'[^'\n]*'(?!\w)|`[^`\n]*`")
_KEPT_SPACE = "\ue000"  # of the private use area


def fold(text: str, width: int) -> str:
    """Lines of text with line ends where a terminal of that width would break a word.

    What somebody may copy is left to the terminal: a word that is longer than a row, and a command in quotes.
    """
    kept = _QUOTED.sub(lambda match: match[0].replace(" ", _KEPT_SPACE), text)
    return "\n".join(_fold_line(line, width) for line in kept.split("\n")).replace(_KEPT_SPACE, " ")


def _fold_line(line: str, width: int) -> str:
    rows = wrap(line, max(width, 1))
    folded = rows[0]
    for row in rows[1:]:
        folded = f"{folded.rstrip(' ')}\n{row}" if folded.endswith(" ") else folded + row
    return folded


class WrappedLine:
    """One line that grows on the terminal. `rows` counts the rows so far; None once the terminal has another width than
    at the line's beginning, for it may have moved what was there."""

    def __init__(self, width: int) -> None:
        self.rows: int | None = 1
        self.width = width
        self._row = ""  # the text of the last row, and what of it is on the terminal
        self._shown = ""

    def write(self, text: str, width: int) -> str:
        """What to send for new text when rows may have `width` columns; the cursor must be where it was left."""
        if width != self.width:
            self.rows = None
        if self.rows is None:
            return text
        rows = wrap(self._row + text, self.width)
        first = _fitting(rows[0], self.width)
        if first.startswith(self._shown):
            out = first[len(self._shown) :]
        else:  # its last word has become too long and moves to the next row
            out = "\r" + first + "\x1b[K"
        for row in rows[1:]:
            out += "\n" + _fitting(row, self.width)
        self.rows += len(rows) - 1
        self._row, self._shown = rows[-1], _fitting(rows[-1], self.width)
        return out


def _fitting(row: str, width: int) -> str:
    """The row without the spaces that stand out over the edge."""
    excess = sum(map(cells, row)) - width
    return row if excess <= 0 else row[: len(row) - min(excess, len(row) - len(row.rstrip(" ")))]


class WrappedText:
    """Several such lines."""

    def __init__(self) -> None:
        self._line: WrappedLine | None = None

    def write(self, text: str, width: int) -> str:
        out = ""
        for number, line in enumerate(text.split("\n")):
            if number:
                out, self._line = out + "\n", None
            if self._line is None:
                self._line = WrappedLine(width)
            out += self._line.write(line, width)
        return out


def wrapped_rows(line: str, columns: int) -> int | None:
    """The rows that a terminal of `columns` breaks one line into by itself; None where terminals do not agree."""
    rows, column = 1, 0
    for character in line:
        if character == "\t":
            column = min(column // 8 * 8 + 8, columns - 1)
            continue
        size = cells(character)
        if size == 0 or character == _EMOJI_STYLE:
            return None
        if column + size > columns:
            rows, column = rows + 1, 0
        column += size
    return rows
