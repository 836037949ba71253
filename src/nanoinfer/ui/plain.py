"""The plain display of a run: which kind of display suits where it is shown, and a run in one line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from nanoinfer.ui.console import Console
from nanoinfer.ui.text import count, duration, rate

if TYPE_CHECKING:
    from nanoinfer.ui.snapshot import RunSnapshot

UiChoice = Literal["auto", "live", "log", "none"]


def choose_ui(choice: UiChoice, console: Console) -> Literal["live", "log", "none"]:
    """What --ui auto means here; live needs a terminal on standard error."""
    if console.quiet:
        return "none"
    if choice == "auto":
        return "live" if console.is_terminal and not os.environ.get("CI") else "log"
    return "log" if choice == "live" and not console.is_terminal else choice


def status_line(snapshot: RunSnapshot) -> str:
    """One sentence of numbers: requests, speed of the last seconds, KV pool in its states, prefix hits, time to the
    end, goodput if there are limits."""
    requests, metrics, recent = snapshot.requests, snapshot.metrics, snapshot.metrics.recent
    blocks = metrics.blocks_active + metrics.blocks_cached + metrics.blocks_free
    failed = f" ({count(requests.failed)} failed)" if requests.failed else ""
    parts = [f"{count(requests.done)}/{count(requests.total)} done{failed}"]
    if snapshot.eta_s is not None:
        parts.append(f"{duration(snapshot.eta_s)} left")
    parts.append(f"{rate(recent.output_tokens_per_s)} tok/s")
    if recent.prefill_tokens:
        parts.append(f"prefill {rate(recent.prefill_tokens_per_s)} tok/s")
    parts.append(f"{metrics.running} running, {metrics.waiting} waiting")
    if blocks:
        active, cached = (100 * part / blocks for part in (metrics.blocks_active, metrics.blocks_cached))
        parts.append(f"KV {active:.0f}% active {cached:.0f}% cached")
    if metrics.run.hit_ratio is not None:
        parts.append(f"prefix hits {100 * metrics.run.hit_ratio:.0f}%")
    if metrics.run.preemptions:
        parts.append(f"{count(metrics.run.preemptions)} preemptions")
    if metrics.goodput.slos:
        parts.append(f"goodput {rate(metrics.goodput.per_second)} req/s")
    return " · ".join(parts)
