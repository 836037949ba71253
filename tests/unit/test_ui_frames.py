"""Frames of the live display: how they look at several widths, and what holds for all of them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_run import events, info, snapshot
from rich.cells import cell_len
from thoroughness import examples

from nanoinfer.ui.display import frame, to_terminal
from nanoinfer.ui.glyphs import ASCII, UNICODE, cells_of, clip, clip_left, harmless, sparkline
from nanoinfer.ui.panels import cache_panel, stats_panel
from nanoinfer.ui.snapshot import RequestCounts, RunSnapshot, SnapshotBuilder

FRAMES = Path(__file__).parent / "frames"
RUN = snapshot(warning="line 12: the prompt has 3000 tokens, but this model takes 2048 with one for the answer.")

# name: columns, colour, characters
LOOKS = {
    "60": (60, False, UNICODE),
    "80": (80, False, UNICODE),
    "120": (120, False, UNICODE),
    "200": (200, False, UNICODE),
    "80-colour": (80, True, UNICODE),
    "60-ascii": (60, False, ASCII),
    "120-ascii-colour": (120, True, ASCII),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_frame_looks_as_it_did(name: str) -> None:
    """The files show what a person sees; run with UPDATE_FRAMES=1 to accept a change after looking at it."""
    columns, colour, glyphs = LOOKS[name]
    text = to_terminal(frame(RUN, columns - 1, glyphs=glyphs), colour=colour) + "\n"
    path = FRAMES / f"{name}.txt"
    if os.environ.get("UPDATE_FRAMES"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_every_figure_is_there_at_every_width(columns: int) -> None:
    text = frame(RUN, columns - 1).plain
    for figure in (
        "Qwen3-0.6B", "cpu float32", "tp 2", "attention torch", "kernels eager", "1:14 elapsed", "prefill + decode",
        "123 of 256 done", " left", "8 running", "12 waiting", "1 failed", "█ 280 active", "▓ 300 cached",
        "░ 420 free", "peak 520", "40% of ", "last minute 40%", "block 16", "tok/s", "TTFT      p50", "TPOT      p50",
        "ITL       p50", "p90", "p99", "req/s", "% kept every limit", "ttft ≤ 800 ms", "tpot ≤ 22.5 ms",
        "scheduler 0.25 ms", "device 18.5 ms", "1 preemption", "line 12: the prompt",
    ):  # fmt: skip
        assert figure in text, figure


@settings(max_examples=examples(50))
@given(
    columns=st.integers(40, 220),
    lines=st.integers(1, 30),
    sizes=st.lists(st.integers(0, 10**9), min_size=12, max_size=12),
    eta=st.none() | st.floats(0, 1e7),
    ascii=st.booleans(),
    name=st.text(min_size=1),
    warning=st.none() | st.text(),
)
def test_no_text_or_number_can_break_a_frame(
    columns: int, lines: int, sizes: list[int], eta: float | None, ascii: bool, name: str, warning: str | None
) -> None:
    """Rows fit their width in cells, and nothing but text and newlines comes out, whatever goes in."""
    active, cached, free, peak, total, done, failed, running, waiting, to_come, blocks, prompts = sizes
    figures = replace(
        RUN.metrics, blocks_active=active, blocks_cached=cached, blocks_free=free, running=running, waiting=waiting,
        peak_blocks_active=max(peak, active), run=replace(RUN.metrics.run, prompt_tokens=prompts, evictions=blocks),
    )  # fmt: skip
    any_run = RunSnapshot(
        info=info(model=name, num_blocks=blocks), title=name, phase="decode", to_come=to_come, eta_s=eta,
        requests=RequestCounts(total, min(done, total), min(failed, done, total)), metrics=figures,
        latencies=RUN.latencies, warning=warning,
    )  # fmt: skip
    text = frame(any_run, columns - 1, lines, ASCII if ascii else UNICODE).plain
    rows = text.split("\n")
    assert len(rows) <= min(lines, 24)
    assert all(cell_len(row) < columns for row in rows)
    assert all(row.isprintable() for row in rows)
    assert not ascii or text.isascii()


def test_the_frame_gives_up_its_least_important_rows_where_the_terminal_is_low() -> None:
    heights = [frame(RUN, 79, height).plain.split("\n") for height in (24, 12, 6, 2)]
    assert [len(rows) for rows in heights[1:]] == [12, 6, 2]
    assert [row[:9].strip() for row in heights[3]] == ["requests", "KV pool"]
    assert [row for row in heights[0] if row in heights[1]] == heights[1], "the order stays"


def test_before_the_first_step_nothing_is_claimed() -> None:
    builder = SnapshotBuilder(info(), title="generate", clock=lambda: 5.0)
    builder.expect(10, 0.0)
    text = frame(builder.snapshot(RequestCounts(10)), 79).plain
    for figure in ("starting", "0 of 10 done", "░ 1,000 free 100%", "no prompt yet", "when the first token is out"):
        assert figure in text
    assert " left" not in text


def test_ttft_is_shown_as_soon_as_a_first_token_is_out() -> None:
    builder = SnapshotBuilder(info(), title="generate")
    builder.observe(replace(events()[0], time=1.0, finished=(), first_tokens=(("a", 0.75),)))
    rows = {row[:4].strip(): row for row in frame(builder.snapshot(RequestCounts(10)), 79).plain.split("\n")}
    assert "250 ms" in rows["TTFT"]
    assert "when the first answer ends" in rows["TPOT"]


def test_panels_of_the_chat_have_their_figures_and_no_requests() -> None:
    stats, cache = stats_panel(RUN, 79).plain, cache_panel(RUN, 79, ASCII).plain
    assert all(figure in stats for figure in ("TTFT", "decode", "hit", "scheduler 0.25 ms"))
    assert all(figure in cache for figure in ("# 280 active", "block 16", "1 preemption"))
    assert "done" not in stats + cache


def test_text_from_outside_cannot_drive_the_terminal() -> None:
    rude = "\x1b[2J\x1b]0;title\x07 a\rb\n\u202egnp.exe \x9b31m \udcff 模型"
    assert harmless(rude, UNICODE) == "?[2J?]0;title? a b ?gnp.exe ?31m ? 模型"
    assert harmless("模型 ok", ASCII) == "?? ok"
    assert clip("模型模型", 5, UNICODE) == "模型…"
    assert clip_left("模型模型", 5, UNICODE) == "…模型"
    assert clip("abc", 3, UNICODE) == clip_left("abc", 3, UNICODE) == "abc"


@settings(max_examples=examples(50))
@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=4), st.integers(4, 200))
def test_cells_are_shared_out_in_proportion(values: list[int], width: int) -> None:
    cells = cells_of(values, width)
    assert sum(cells) == (width if any(values) else 0)
    for cell, value in zip(cells, values, strict=True):
        assert (cell > 0) == (value > 0), "a state that exists is seen"
        assert not value or abs(cell - value * width / sum(values)) < len(values) + 1


def test_a_sparkline_is_as_high_as_its_highest_value() -> None:
    assert sparkline([0, 5, 10], 10, UNICODE) == "▁▅█"
    assert sparkline([1, 2, 3, 4], 2, ASCII) == sparkline([3, 4], 9, ASCII)
    assert sparkline([0, 0], 5, UNICODE) == "▁▁"
    assert sparkline([], 5, UNICODE) == sparkline([1], 0, UNICODE) == ""
