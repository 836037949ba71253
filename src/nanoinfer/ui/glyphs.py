"""The characters that bars, sparklines and separators are made of: in Unicode, and in ASCII for --ascii."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from nanoinfer.ui.console import Console

Piece = tuple[str, str]  # text and its Rich style


@dataclass(frozen=True, slots=True)
class Glyphs:
    """`bar` has a fill for each of three states, told apart without colour too; `spark` goes from low to high."""

    bar: tuple[str, str, str]
    peak: str
    spark: str
    dot: str
    at_most: str
    ellipsis: str


UNICODE = Glyphs(bar=("█", "▓", "░"), peak="┃", spark="▁▂▃▄▅▆▇█", dot="·", at_most="≤", ellipsis="…")
ASCII = Glyphs(bar=("#", "=", "."), peak="|", spark="_.:-=+*#", dot="-", at_most="<=", ellipsis="~")


def glyphs_of(console: Console) -> Glyphs:
    """Those that it can show, or was asked to keep to (--ascii)."""
    return ASCII if console.ascii else UNICODE


# Characters of one column: all below Hangul (combining ones are counted too much, which does no harm), and our own.
_NARROW = re.compile("[\x00-\u10ff\u2026\u2264\u2500-\u259f]*")


def width_of(text: str) -> int:
    """Columns that the text takes on a terminal, at the most."""
    return len(text) if _NARROW.fullmatch(text) else cell_len(text)


def clip(text: str, width: int, glyphs: Glyphs) -> str:
    """`text` in at most `width` columns, with an ellipsis where something is missing."""
    if width_of(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + glyphs.ellipsis if width > 0 else ""


def clip_left(text: str, width: int, glyphs: Glyphs) -> str:
    """The same, but the end is kept: of a path it says more than the beginning."""
    if width_of(text) <= width:
        return text
    kept = text[-width:]
    while width_of(kept) > width - 1:
        kept = kept[1:]
    return glyphs.ellipsis + kept


def harmless(text: str, glyphs: Glyphs) -> str:
    """Text from outside in one line that cannot drive the terminal, reverse its direction or leave the character set:
    whatever is not printable becomes a question mark."""
    flat = " ".join(text.split())
    return "".join(c if c.isprintable() and (glyphs is not ASCII or c.isascii()) else "?" for c in flat)


def cells_of(values: Sequence[int], width: int) -> list[int]:
    """`width` cells shared out in proportion to `values` (rounded by largest remainder); what is not zero gets at
    least one cell if there are enough."""
    total = sum(values)
    if not total or width <= 0:
        return [0] * len(values)
    exact = [value * width / total for value in values]
    cells = [max(int(share), value > 0) for share, value in zip(exact, values, strict=True)]
    while sum(cells) < width:
        cells[max(range(len(cells)), key=lambda i: exact[i] - cells[i])] += 1
    while sum(cells) > width:
        # The only cell of a value goes last, however much more than its share it is.
        cells[max(range(len(cells)), key=lambda i: (cells[i] > 1, cells[i] - exact[i]))] -= 1
    return cells


def bar(values: Sequence[int], styles: Sequence[str], fills: Sequence[str], width: int) -> list[Piece]:
    """A bar of runs, one for each value."""
    runs = zip(cells_of(values, width), fills, styles, strict=True)
    return [(fill * cells, style) for cells, fill, style in runs if cells]


def mark(pieces: Sequence[Piece], position: int, glyph: str) -> list[Piece]:
    """The pieces with one cell at `position` replaced by `glyph`, in bold."""
    marked: list[Piece] = []
    start = 0
    for text, style in pieces:
        at = position - start
        if 0 <= at < len(text):
            marked += [(text[:at], style), (glyph, "bold"), (text[at + 1 :], style)]
        else:
            marked.append((text, style))
        start += len(text)
    return [piece for piece in marked if piece[0]]


def sparkline(values: Sequence[int], width: int, glyphs: Glyphs) -> str:
    """The last `width` values as characters of different height; the highest of them is full."""
    shown = values[-width:] if width > 0 else ()
    top = max(shown, default=0)
    levels = len(glyphs.spark) - 1
    return "".join(glyphs.spark[round(value / top * levels) if top else 0] for value in shown)
