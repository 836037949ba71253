"""The plain display: what its line says, when it is written, and the estimate of the time to the end."""

from __future__ import annotations

import io
import json
import random

import pytest
from recorded_run import info

from nanoinfer.cli.batch_input import Batch
from nanoinfer.cli.prompts_file import parse_prompts
from nanoinfer.config import SamplingParams
from nanoinfer.engine.events import EventStream, FinishedSequence, RequestTiming, StepEvent
from nanoinfer.ui.console import Console
from nanoinfer.ui.plain import choose_ui, status_line
from nanoinfer.ui.progress import TokenProgress
from nanoinfer.ui.run_display import RunDisplay
from nanoinfer.ui.snapshot import RequestCounts, SnapshotBuilder


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def finished(name: str, tokens: int, reason: str = "stop") -> FinishedSequence:
    return FinishedSequence(name, 0, reason, 8, 0, tokens, 0, RequestTiming(0.0, 0.0, 0.5, 1.0, 1.0))


def step(time: float, emitted: dict[str, int], *ended: FinishedSequence, prefill: int = 0) -> StepEvent:
    return StepEvent(
        step=0, time=time, kind="decode", running=3, waiting=5, prefill_tokens=prefill, decode_tokens=len(emitted),
        cached_tokens=prefill, prompt_tokens=2 * prefill, blocks_active=30, blocks_cached=20, blocks_free=50,
        evictions=0, preemptions=0, emitted=tuple(emitted.items()), finished=ended, schedule_ms=0.1, device_ms=1.0,
        step_ms=10.0,
    )  # fmt: skip


def test_the_estimate_is_exact_where_all_run_to_their_limit() -> None:
    progress = TokenProgress(3, 20.0)
    assert progress.remaining_tokens(0) == 60
    progress.observe(step(1.0, {"a": 10, "b": 10, "c": 10}))
    assert progress.remaining_tokens(30) == 30
    progress.observe(step(2.0, {"a": 5}, finished("a", 15, "length")))
    assert progress.remaining_tokens(35) == 25


def test_without_limits_nothing_is_known_until_something_finishes() -> None:
    progress = TokenProgress(2, 0.0)
    assert progress.eta_seconds(0, 10.0) is None
    progress.observe(step(1.0, {"a": 10, "b": 10}, finished("a", 10)))
    assert progress.eta_seconds(20, 10.0) == pytest.approx(2.0)


def test_short_answers_that_finish_first_do_not_make_the_estimate_short() -> None:
    """Twelve answers of random length run together; when the first has ended, most of the work is still ahead."""
    rng = random.Random(0)
    estimates, truths = [], []
    for _ in range(300):
        lengths = [1 + int(rng.expovariate(1 / 60)) for _ in range(12)]
        first = min(lengths)
        progress = TokenProgress(12, 1000.0)
        ended = [finished(str(i), n) for i, n in enumerate(lengths) if n == first]
        progress.observe(step(1.0, {str(i): first for i in range(12)}, *ended))
        estimates.append(progress.remaining_tokens(12 * first) or 0.0)
        truths.append(sum(lengths) - 12 * first)
    # The first end alone says little; what counts is that the median estimate has the right size.
    estimates.sort()
    assert 0.5 < estimates[150] / (sum(truths) / 300) < 2.0


def test_a_run_that_is_over_has_nothing_left() -> None:
    progress = TokenProgress(1, 20.0)
    progress.observe(step(1.0, {"a": 3}, finished("a", 3)))
    assert progress.eta_seconds(3, 5.0) == 0


def test_the_line_says_what_happens() -> None:
    builder = SnapshotBuilder(info(), clock=lambda: 5.0)
    builder.expect(1200, 20.0)
    builder.observe(step(1.0, {"a": 20}, prefill=100))
    line = status_line(builder.snapshot(RequestCounts(1200, 1, 1)))
    for text in (
        "1/1,200 done (1 failed)", "1:20:08 left", "3 running, 5 waiting", "KV 30% active 20% cached",
        "prefix hits 50%",
    ):  # fmt: skip
        assert text in line


def test_the_speed_is_that_of_the_last_seconds_and_not_the_mean_of_the_run() -> None:
    builder = SnapshotBuilder(info(), clock=lambda: 100.0)
    for second in range(100):
        builder.observe(step(second + 0.5, {"a": 1000 if second < 80 else 20}))
    assert " 20.0 tok/s " in status_line(builder.snapshot(RequestCounts(10, 1)))


def test_every_answer_of_a_line_counts_as_one_to_come() -> None:
    lines = [{"prompt": "a", "n": 9}, {"prompt": "b"}, {"prompt": "c", "max_tokens": 5}]
    batch = Batch("b", parse_prompts("\n".join(map(json.dumps, lines)).encode(), "jsonl", SamplingParams()))
    assert batch.sequences(SamplingParams(n=2)) == 9 + 2 + 2
    builder = SnapshotBuilder(info())
    builder.expect(batch.sequences(SamplingParams(n=2)), 20.0)
    builder.observe(step(1.0, {"a": 20}, finished("a", 20, "length")))
    assert builder.snapshot(RequestCounts(3)).to_come == 13 - 1 - 3 - 5, "one has ended, three run, five wait"


def test_a_log_gets_a_line_every_ten_seconds_and_nothing_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    now = [0.0]
    for choice, lines in (("auto", 6), ("none", 0)):
        stream = io.StringIO()
        builder = SnapshotBuilder(info(), clock=lambda: now[0])
        events = EventStream()
        display = RunDisplay(Console(stream), choice, builder, lambda: now[0], lambda: RequestCounts(10, 1), events)
        events.publish(step(0.0, {"before the run": 1}))
        now[0] = 0.0
        with display:
            for tenth in range(1, 601):
                now[0] = tenth / 10
                events.publish(step(now[0], {"a": 1}))
                display.tick()
        assert stream.getvalue().count("1/10 done") == stream.getvalue().count("\n") == lines
        events.publish(step(61.0, {"after it": 1}))
        assert builder.metrics.snapshot().run.output_tokens == 600, "every event reaches the figures, shown or not"


def test_which_display_auto_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    assert choose_ui("auto", Console(Terminal())) == "live"
    assert choose_ui("auto", Console(io.StringIO())) == "log"
    assert choose_ui("live", Console(io.StringIO())) == "log"
    assert choose_ui("live", Console(Terminal(), quiet=True)) == "none"
    monkeypatch.setenv("CI", "true")
    assert choose_ui("auto", Console(Terminal())) == "log"
    monkeypatch.setenv("TERM", "dumb")
    assert choose_ui("live", Console(Terminal())) == "log"
