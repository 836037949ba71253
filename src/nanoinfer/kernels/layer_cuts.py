"""How persistent_layer shares out the weights of a layer among its programs, of which each has a core to itself."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

TILE_ROWS, TILE_WIDTH = 64, 128  # weight rows, elements of K
MAX_TILES = 6  # whose sums fit into a program's registers


class Cut(NamedTuple):
    """A weight [rows, K] in tiles: each program has `tiles` times TILE_ROWS rows, over one of `splits` parts of K."""

    rows: int
    tiles: int
    splits: int
    steps: int  # tiles along a program's part of K

    @property
    def programs(self) -> int:
        return -(-self.rows // (self.tiles * TILE_ROWS)) * self.splits


class LayerCuts(NamedTuple):
    o: Cut
    gate_up: Cut
    down: Cut
    qkv: Cut

    @property
    def programs(self) -> int:
        return max(cut.programs for cut in self)


@cache
def layer_cuts(hidden: int, attended: int, inner: int, qkv: int, cores: int) -> LayerCuts | None:
    """For a layer with so many features: cuts that keep as many cores busy as they can.

    None where tiles would be broken, or a program would have more than MAX_TILES (layers much larger than the device).
    Only products that are added to the hidden state have splits: their sums pass through memory anyway.
    """
    if any(width % TILE_WIDTH for width in (hidden, attended, inner)):
        return None
    cuts = LayerCuts(
        o=_cut(hidden, attended, cores, may_split=True),
        gate_up=_cut(2 * inner, hidden, cores, may_split=False),
        down=_cut(hidden, inner, cores, may_split=True),
        qkv=_cut(qkv, hidden, cores, may_split=False),
    )
    return cuts if max(cut.tiles for cut in cuts) <= MAX_TILES else None


def _cut(rows: int, width: int, cores: int, *, may_split: bool) -> Cut:
    steps = width // TILE_WIDTH
    tiles = -(-rows // (TILE_ROWS * cores))
    room = cores // -(-rows // (TILE_ROWS * tiles)) if may_split else 1
    splits = max(n for n in range(1, room + 1) if steps % n == 0)
    return Cut(rows, tiles, splits, steps // splits)
