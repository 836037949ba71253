"""One frame of the live display: a snapshot becomes one Rich Text of at most `height` rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Span, Text

from nanoinfer.ui.glyphs import UNICODE, Glyphs
from nanoinfer.ui.rows import (
    BAD,
    BOLD,
    DIM,
    GOOD,
    SHARED,
    WARN,
    Layout,
    Row,
    engine_row,
    goodput_rows,
    kv_rows,
    latency_rows,
    model_row,
    prefix_row,
    pressure_row,
    requests_rows,
    speed_rows,
    step_row,
    title_row,
    warning_row,
)
from nanoinfer.ui.snapshot import RunSnapshot

MAX_ROWS = 24


def frame(snapshot: RunSnapshot, width: int, height: int = MAX_ROWS, glyphs: Glyphs = UNICODE) -> Text:
    """The display in at most `width` columns and `height` rows; the least important rows give way first."""
    layout = Layout(width, glyphs)
    requests, kv, speed = requests_rows(snapshot, layout), kv_rows(snapshot, layout), speed_rows(snapshot, layout)
    latency = latency_rows(snapshot, layout)
    warning = warning_row(snapshot, layout)
    rows: list[tuple[int, Row]] = [  # with their priority, 0 the first
        (1, title_row(snapshot, layout)),
        (6, model_row(snapshot, layout)),
        (7, engine_row(snapshot, layout)),
        (0, requests[0]),
        (4, requests[1]),
        (0, kv[0]),
        (3, kv[1]),
        (2, prefix_row(snapshot, layout)),
        (5, speed[0]),
        (1, speed[1]),
        *zip((3, 6, 4), latency, strict=True),
        *((3, row) for row in goodput_rows(snapshot, layout)),
        (5, step_row(snapshot, layout)),
        (6, pressure_row(snapshot, layout)),
    ]
    if warning is not None:
        rows.append((2, warning))
    return as_text(most_important(rows, min(height, MAX_ROWS)))


def most_important(rows: Sequence[tuple[int, Row]], height: int) -> list[Row]:
    """At most `height` rows in their order: the lowest priority is left out first, and in it the last row."""
    by_importance = sorted(range(len(rows)), key=lambda i: (rows[i][0], i))
    return [rows[i][1] for i in sorted(by_importance[: max(height, 0)])]


def as_text(rows: Iterable[Row]) -> Text:
    """One Text whose lines are the rows, with one span per run of characters of a style, in order. On a terminal it
    goes through `to_terminal`; Rich itself only makes pictures of it (decision 071)."""
    plain: list[str] = []
    spans: list[Span] = []
    end = 0
    for number, row in enumerate(rows):
        if number:
            plain.append("\n")
            end += 1
        for piece, style in row:
            plain.append(piece)
            end += len(piece)
            if style:
                spans.append(Span(end - len(piece), end, style))
    return Text("".join(plain), no_wrap=True, end="", spans=spans)


# The codes (ECMA-48, SGR) of the styles that rows.py uses, in the terminal's own sixteen colours.
_CODES = {DIM: "2", BOLD: "1", GOOD: "32", SHARED: "36", BAD: "31", WARN: "33"}


def to_terminal(text: Text, *, colour: bool) -> str:
    """The text of `as_text` with escape codes. Rich would first wrap and measure what is laid out already, which costs
    more than all the rest of a frame."""
    plain = text.plain
    if not colour:
        return plain
    pieces = []
    shown = 0
    for span in text.spans:
        pieces.append(
            f"{plain[shown : span.start]}\x1b[{_CODES[str(span.style)]}m{plain[span.start : span.end]}\x1b[0m"
        )
        shown = span.end
    return "".join([*pieces, plain[shown:]])
