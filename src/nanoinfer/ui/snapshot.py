"""Step events become one immutable snapshot: all that a frame of the display or a panel shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanoinfer.engine.events import StepEvent
from nanoinfer.engine.info import EngineInfo
from nanoinfer.engine.latency import SLO
from nanoinfer.engine.metrics import Latencies, Metrics, MetricsSnapshot
from nanoinfer.ui.progress import TokenProgress

ETA_AFTER_S = 3.0  # the first prefills say nothing about the speed to come


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """What the command knows of its requests. `done` includes the failed ones; `total` is 0 where nobody knows it."""

    total: int = 0
    done: int = 0
    failed: int = 0

    @property
    def are_done(self) -> bool:
        return 0 < self.total <= self.done


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run at one moment. `latencies` are those of the last minute; `eta_s` is None while nothing is known."""

    info: EngineInfo
    title: str
    phase: str
    requests: RequestCounts
    to_come: int  # sequences that the engine has not been given yet
    eta_s: float | None
    metrics: MetricsSnapshot
    latencies: Latencies
    warning: str | None = None


class SnapshotBuilder:
    """Takes in events and hands out snapshots. Not thread-safe: one thread does both.

    `clock` is the engine's; without one the snapshot shows the moment of the last event, as a recorded run must.
    """

    def __init__(
        self,
        info: EngineInfo,
        *,
        title: str = "",
        slos: Sequence[SLO] = (),
        clock: Callable[[], float] | None = None,
        keep_sequences: bool = False,
    ) -> None:
        self.metrics = Metrics(slos, keep_sequences=keep_sequences)
        self._info = info
        self._title = title
        self._clock = clock
        self._progress = TokenProgress(0, 0.0)
        self._seen = (0, 0)  # prefill and decode tokens at the last snapshot
        self._last_phase = "starting"
        self._latencies: tuple[int, Latencies] | None = None

    def expect(self, sequences: int, mean_limit: float) -> None:
        """How much there is to do. `mean_limit`: the most tokens that an answer can have, in the mean; 0 if unknown."""
        self._progress = TokenProgress(sequences, min(mean_limit, self._info.max_model_len))

    def observe(self, event: StepEvent) -> None:
        self.metrics.observe(event)
        self._progress.observe(event)

    def snapshot(
        self, requests: RequestCounts | None = None, warning: str | None = None, *, exact: bool = True
    ) -> RunSnapshot:
        """The state now. Unless `exact`, the latencies may be a second old: that is ten times cheaper."""
        now = self._clock() if self._clock is not None else None
        metrics = self.metrics.snapshot(now)
        requests = requests or RequestCounts()
        eta = None
        if metrics.run.seconds >= ETA_AFTER_S and not requests.are_done:
            eta = self._progress.eta_seconds(metrics.run.output_tokens, metrics.recent.output_tokens_per_s)
        return RunSnapshot(
            info=self._info,
            title=self._title,
            phase="done" if requests.are_done else self._phase(metrics),
            requests=requests,
            to_come=max(self._progress.unfinished - metrics.running - metrics.waiting, 0),
            eta_s=eta,
            metrics=metrics,
            latencies=self._window_latencies(metrics.time, exact=exact),
            warning=warning,
        )

    def _phase(self, metrics: MetricsSnapshot) -> str:
        """What the engine did since the last snapshot; the steps themselves alternate too fast to be read."""
        done = (metrics.run.prefill_tokens, metrics.run.decode_tokens)
        did = [name for name, now, then in zip(("prefill", "decode"), done, self._seen, strict=True) if now > then]
        self._seen = done
        if did:
            self._last_phase = " + ".join(did)
        elif metrics.run.steps and not metrics.running and not metrics.waiting:
            self._last_phase = "idle"
        return self._last_phase

    def _window_latencies(self, now: float, *, exact: bool) -> Latencies:
        # Once a second: sorting all gaps of a minute is the dearest part, and nobody reads percentiles any faster.
        second = math.floor(now)
        if exact or self._latencies is None or self._latencies[0] != second:
            self._latencies = (second, self.metrics.window_latencies(now))
        return self._latencies[1]
