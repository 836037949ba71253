"""How the weights of a layer are shared out among the persistent kernel's programs."""

from __future__ import annotations

import pytest

from nanoinfer.kernels.layer_cuts import MAX_TILES, TILE_ROWS, TILE_WIDTH, layer_cuts

QWEN3_8B = (4096, 4096, 12288, 6144)


@pytest.mark.parametrize("cores", [1, 2, 7, 78, 114, 132])
@pytest.mark.parametrize(
    "sizes", [(128, 128, 128, 8), (384, 256, 640, 1000), (1024, 2048, 3072, 4096), (2560, 4096, 9728, 6144), QWEN3_8B]
)
def test_every_tile_belongs_to_one_program(sizes, cores):
    cuts = layer_cuts(*sizes, cores)
    hidden, attended, inner, qkv = sizes
    shapes = [(hidden, attended), (2 * inner, hidden), (hidden, inner), (qkv, hidden)]
    if cuts is None:
        assert 2 * inner > MAX_TILES * TILE_ROWS * cores or qkv > MAX_TILES * TILE_ROWS * cores
        return
    assert cuts.programs <= cores
    for (rows, width), cut in zip(shapes, cuts, strict=True):
        tiles = [
            (program // cut.splits * cut.tiles + tile, program % cut.splits * cut.steps + step)
            for program in range(cut.programs)
            for tile in range(cut.tiles)
            for step in range(cut.steps)
        ]
        assert len(set(tiles)) == len(tiles)
        wanted = {(row, column) for row in range(-(-rows // TILE_ROWS)) for column in range(width // TILE_WIDTH)}
        assert wanted <= set(tiles)
        assert len(tiles) - len(wanted) < cut.tiles * cut.steps * cut.splits  # rows beyond the last in one group alone


def test_a_large_layer_keeps_nearly_all_cores_of_an_h200_busy():
    cuts = layer_cuts(*QWEN3_8B, 132)
    assert [cut.programs for cut in cuts] == [128, 128, 128, 96]


@pytest.mark.parametrize("sizes", [(4000, 4096, 12288, 6144), (4096, 4096, 12200, 6144), (4096, 4100, 12288, 6144)])
def test_a_width_that_breaks_tiles_has_no_cuts(sizes):
    assert layer_cuts(*sizes, 132) is None


def test_a_layer_whose_sums_do_not_fit_into_registers_has_no_cuts():
    assert layer_cuts(*QWEN3_8B, 16) is None
