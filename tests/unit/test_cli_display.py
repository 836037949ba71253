"""The plain display: what its line says, when it is written, and the estimate of the time to the end."""

from __future__ import annotations

import io
import random

import pytest

from nanoinfer.engine.events import FinishedSequence, RequestTiming, StepEvent
from nanoinfer.engine.metrics import Metrics
from nanoinfer.ui.console import Console
from nanoinfer.ui.plain import RunDisplay, choose_ui, status_line
from nanoinfer.ui.progress import TokenProgress


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
    metrics = Metrics(window_s=10)
    metrics.observe(step(1.0, {"a": 20}, prefill=100))
    line = status_line(metrics.snapshot(2.0), done=1, failed=1, total=1200, eta=187.0)
    for text in (
        "1/1,200 done (1 failed)", "3:07 left", "3 running, 5 waiting", "KV 30% active 20% cached", "prefix hits 50%",
    ):  # fmt: skip
        assert text in line


def test_a_log_gets_a_line_every_ten_seconds_and_a_terminal_one_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    now = [0.0]
    metrics = Metrics()
    metrics.observe(step(0.0, {"a": 1}))
    for stream, per_minute in ((io.StringIO(), 6), (Terminal(), 240)):
        written: list[str] = []
        console = Console(stream)
        monkeypatch.setattr(console, "status", written.append)
        monkeypatch.setattr(console, "say", written.append)
        monkeypatch.delenv("CI", raising=False)
        now[0] = 0.0
        display = RunDisplay(console, "auto", lambda: now[0], metrics)
        for tenth in range(1, 601):
            now[0] = tenth / 10
            display.show(0, 0)
        assert len(written) <= per_minute
        assert len(written) >= per_minute * 0.8


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
