"""Drawings of the KV pool: the bar of three states, the map of blocks and the histogram of reference counts."""

from __future__ import annotations

from collections import Counter

from nanoinfer.cli.cache_report import CacheReport
from nanoinfer.ui.glyphs import UNICODE, Glyphs, cells_of
from nanoinfer.ui.text import count

BAR_WIDTH = 50
MAP_WIDTH, MAP_ROWS = 64, 8


def bar(active: int, cached: int, free: int, width: int = BAR_WIDTH, glyphs: Glyphs = UNICODE) -> str:
    """The pool in three states, `width` cells long; a state that exists has at least one cell."""
    cells = cells_of((active, cached, free), width)
    return "".join(fill * number for fill, number in zip(glyphs.bar, cells, strict=True))


def legend(glyphs: Glyphs = UNICODE) -> str:
    active, cached, free = glyphs.bar
    return f"{active} active   {cached} cached (can be hit, or evicted)   {free} free"


def block_map(report: CacheReport, glyphs: Glyphs = UNICODE) -> tuple[int, int, list[str]]:
    """(blocks of one cell, blocks that are shown, rows of cells in the order of block ids).

    All blocks up to the last one in use are shown. A cell of several shows what most of them are; a digit stands for
    active blocks that so many tables share.
    """
    shown = max(len(report.cells.rstrip("f")), min(MAP_WIDTH, report.num_blocks))
    per_cell = max(1, -(-shown // (MAP_WIDTH * MAP_ROWS)))
    signs = {"f": glyphs.bar[2], "c": glyphs.bar[1], "1": glyphs.bar[0], "9": "9"}
    cells = []
    for start in range(0, shown, per_cell):
        # Of equally many the most used wins: active before cached before free.
        common = Counter(sorted(report.cells[start : min(start + per_cell, shown)])).most_common(1)[0][0]
        cells.append(signs.get(common, common))
    return per_cell, shown, ["".join(cells[i : i + MAP_WIDTH]) for i in range(0, len(cells), MAP_WIDTH)]


def reference_histogram(report: CacheReport, width: int = 40, glyphs: Glyphs = UNICODE) -> list[str]:
    """A bar for each reference count that active blocks have, long in proportion to their number."""
    most = max(report.references.values(), default=0)
    return [
        f"{'by ' + count(refs):7} {glyphs.bar[0] * max(1, round(blocks / most * width))} {count(blocks)}"
        for refs, blocks in report.references.items()
    ]
