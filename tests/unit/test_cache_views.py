"""The views of inspect-cache on small pools made by hand: last use, the map, histograms, and where prefixes broke."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engines import greedy, make_engine, run

from nanoinfer.cli.cache_hits import PrefixBreak, PrefixBreaks
from nanoinfer.cli.cache_map import bar, block_map, reference_histogram
from nanoinfer.cli.cache_report import CacheReport, analyse, snapshot_problems, tree_as_json
from nanoinfer.cli.cache_view import more_rows
from nanoinfer.engine.cache_snapshot import CacheSnapshot
from nanoinfer.engine.events import FinishedSequence, RequestTiming
from nanoinfer.ui.glyphs import ASCII


def snapshot_of_two_prompts() -> CacheSnapshot:
    """Prompts 0..8 and 0..3, 20..24 in blocks of 4: the first block is common."""
    engine, _ = make_engine(num_blocks=16)
    for name, tokens in (("a", [*range(9)]), ("b", [*range(4), *range(20, 25)])):
        engine.add_request(name, tokens, greedy(1))
        run(engine)
    return engine.cache_snapshot()


def test_last_use_orders_blocks_as_the_eviction_does() -> None:
    snapshot = snapshot_of_two_prompts()
    assert snapshot.num_uses == 4  # two admissions, two releases
    uses = {block.block: block.last_use for block in snapshot.blocks if block.state == "cached"}
    victims = [uses[block] for block in snapshot.next_victims]
    assert victims == sorted(victims) == [2, 4, 4]
    assert snapshot_problems(snapshot) == []
    assert CacheSnapshot.from_json(snapshot.to_json()) == snapshot
    older = {key: value for key, value in snapshot.to_json().items() if key not in ("num_uses", "engine")}
    assert CacheSnapshot.from_json(older) == replace(snapshot, num_uses=0)


def test_a_single_row_that_is_left_out_is_one() -> None:
    assert more_rows(4, 3, "branch")[0].strip() == "... 1 more branch (--top 4 shows all)"
    assert more_rows(5, 3, "branch")[0].strip() == "... 2 more branches (--top 5 shows all)"
    assert more_rows(3, 3, "branch") == []


def test_the_tree_has_hits_depth_and_parents() -> None:
    report = analyse(snapshot_of_two_prompts())
    nodes = tree_as_json(report.tree)
    assert [(n["parent"], n["depth_blocks"], len(n["blocks"]), n["hits"]) for n in nodes] == [
        (None, 0, 1, 1), (0, 1, 1, 0), (0, 1, 1, 0),
    ]  # fmt: skip
    assert report.depth == 2


def pool(cells: str, **fields: object) -> CacheReport:
    empty = analyse(make_engine(num_blocks=4)[0].cache_snapshot())
    return replace(empty, num_blocks=len(cells), cells=cells, **fields)  # type: ignore[arg-type]


def test_the_map_shows_states_in_the_order_of_ids() -> None:
    per_cell, shown, rows = block_map(pool("fc129" * 20 + "f" * 900))
    assert (per_cell, shown, "".join(rows)) == (1, 100, "░▓█29" * 20)  # what is free behind the last one is left out
    assert list(map(len, rows)) == [64, 36]
    per_cell, shown, rows = block_map(pool("fffcc1" * 200), ASCII)
    assert (per_cell, shown) == (3, 1200)
    assert "".join(rows) == ".=" * 200  # of each three the most frequent
    assert len(rows) <= 8


def test_bars_are_in_proportion_and_show_whatever_there_is() -> None:
    assert bar(1, 1, 998, width=10) == "█▓" + "░" * 8
    assert bar(0, 0, 5, width=3, glyphs=ASCII) == "..."
    assert bar(50, 25, 25, width=4) == "██▓░"
    lines = reference_histogram(pool("", references={1: 40, 4: 10}), width=20)
    assert [line.split() for line in lines] == [["by", "1", "█" * 20, "40"], ["by", "4", "█" * 5, "10"]]


def test_empty_slots_of_running_tables() -> None:
    engine, _ = make_engine(num_blocks=16)
    engine.add_request("a", [*range(9)], greedy(5))
    engine.step()
    report = analyse(engine.cache_snapshot())
    # Nine tokens in three blocks of four.
    assert (report.active, report.empty_slots, report.fragmentation) == (3, 3, 0.25)
    assert report.cells.count("1") == 3


# -- where prefixes broke ----------------------------------------------------------------------------------------------

PROMPTS = {
    "0": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    "1": [1, 2, 3, 4, 5, 6, 0, 0, 0, 0],
    "2": [1, 2, 9, 9, 9, 9],
    "3": [70, 71, 72],
    "4": [1, 2, 3, 4, 5, 6, 7, 8, 0, 0],
}


def finished(request_id: str, cached: int, index: int = 0) -> FinishedSequence:
    return FinishedSequence(request_id, index, "stop", len(PROMPTS[request_id]), cached, 1, 0, RequestTiming(0.0))


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [
        (finished("0", 0), PrefixBreak("first", 0)),
        (finished("0", 8), PrefixBreak("whole", 8)),
        (finished("0", 8, index=1), PrefixBreak("whole", 8)),
        (finished("1", 4), PrefixBreak("differs", 6, "zero")),
        (finished("2", 0), PrefixBreak("short", 2, "zero")),
        (finished("3", 0), PrefixBreak("tiny")),  # three tokens fill no block of four
        (finished("4", 4), PrefixBreak("gone", 8, "zero")),
        (finished("0", 4), PrefixBreak("answer", 4)),
    ],
)
def test_why_a_prefix_broke(sequence: FinishedSequence, expected: PrefixBreak) -> None:
    found = PrefixBreaks(PROMPTS, block_size=4).explain(sequence, {"0": "zero"})
    assert found == expected
    assert found.sentence(4)


def test_the_sentences_name_the_token_and_the_other_prompt() -> None:
    assert PrefixBreak("differs", 6, "zero").sentence(4) == "differs from zero at token 6"
    assert PrefixBreak("short", 2, "zero").sentence(4) == "2 tokens in common with zero, less than a block of 4"
    assert PrefixBreak("tiny").sentence(16) == "too short to fill a block of 16"
