"""The plain display of a run: a status line that is kept up to date on a terminal, a log line every 10 s elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from nanoinfer.engine.events import StepEvent
from nanoinfer.ui.console import LOG_INTERVAL_S, Console
from nanoinfer.ui.progress import TokenProgress
from nanoinfer.ui.text import count, duration, rate

if TYPE_CHECKING:
    from nanoinfer.engine.metrics import Metrics, MetricsSnapshot

UiChoice = Literal["auto", "live", "log", "none"]

LIVE_INTERVAL_S = 0.25


def choose_ui(choice: UiChoice, console: Console) -> Literal["live", "log", "none"]:
    """What --ui auto means here; live needs a terminal on standard error."""
    if console.quiet:
        return "none"
    if choice == "auto":
        return "live" if console.is_terminal and not os.environ.get("CI") else "log"
    return "log" if choice == "live" and not console.is_terminal else choice


class RunDisplay:
    """Shows how a run goes, from its metrics. `show` is called after each step and seldom writes."""

    def __init__(self, console: Console, choice: UiChoice, clock: Callable[[], float], metrics: Metrics) -> None:
        self._console = console
        self._ui = choose_ui(choice, console)
        if choice == "live" and self._ui == "log":
            console.say(f"note: --ui live needs a terminal; a line every {LOG_INTERVAL_S:g} s instead.")
        self._interval = LIVE_INTERVAL_S if self._ui == "live" else LOG_INTERVAL_S
        self._clock = clock
        self._metrics = metrics
        self._due = clock() + self._interval
        self._progress = TokenProgress(0, 0.0)
        self._total_requests = 0

    def expect(self, requests: int, sequences: int, tokens_each: float) -> None:
        """How much there is to do: `tokens_each` is the most that an answer can have, in the mean."""
        self._total_requests = requests
        self._progress = TokenProgress(sequences, tokens_each)

    def observe(self, event: StepEvent) -> None:
        self._progress.observe(event)

    def show(self, done: int, failed: int) -> None:
        now = self._clock()
        if self._ui == "none" or now < self._due:
            return
        self._due = now + self._interval
        snapshot = self._metrics.snapshot(now)
        eta = self._progress.eta_seconds(snapshot.run.output_tokens, snapshot.recent.output_tokens_per_s)
        line = status_line(snapshot, done, failed, self._total_requests, eta)
        if self._ui == "live":
            self._console.status(line)
        else:
            self._console.say(line)


def status_line(snapshot: MetricsSnapshot, done: int, failed: int, total: int, eta: float | None) -> str:
    """One sentence of numbers: requests, speed over the window, KV pool in its states, prefix hits, time to the end."""
    window = snapshot.window
    blocks = snapshot.blocks_active + snapshot.blocks_cached + snapshot.blocks_free
    parts = [f"{count(done)}/{count(total)} done" + (f" ({count(failed)} failed)" if failed else "")]
    if eta is not None:
        parts.append(f"{duration(eta)} left")
    parts.append(f"{rate(window.output_tokens_per_s)} tok/s")
    if window.prefill_tokens:
        parts.append(f"prefill {rate(window.prefill_tokens_per_s)} tok/s")
    parts.append(f"{snapshot.running} running, {snapshot.waiting} waiting")
    if blocks:
        active, cached = (100 * part / blocks for part in (snapshot.blocks_active, snapshot.blocks_cached))
        parts.append(f"KV {active:.0f}% active {cached:.0f}% cached")
    if snapshot.run.hit_ratio is not None:
        parts.append(f"prefix hits {100 * snapshot.run.hit_ratio:.0f}%")
    if snapshot.run.preemptions:
        parts.append(f"{count(snapshot.run.preemptions)} preemptions")
    return " · ".join(parts)
