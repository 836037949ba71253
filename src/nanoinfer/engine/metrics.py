"""Figures from step events: latencies, rates, cache hits and goodput, of the whole run and of the last minute.

A consumer like any other: it sees StepEvents and nothing else. Times are on the engine's clock, so a recorded run gives
the same figures as the live one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import itemgetter

import numpy as np

from nanoinfer.engine.events import StepEvent
from nanoinfer.engine.latency import SLO, SUCCESS, Distribution, SequenceMetrics, distribution

# The window's ITL is kept per step; this many steps bound its memory where a minute has more of them.
MAX_WINDOW_STEPS = 16384

_new_tokens = itemgetter(1)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Distributions over the sequences that succeeded; ITL over all gaps between their tokens."""

    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    queue: Distribution | None
    prefill: Distribution | None


@dataclass(slots=True)
class Totals:
    """Sums over the steps of a span of time that is `seconds` long."""

    seconds: float = 0.0
    steps: int = 0
    graph_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    evictions: int = 0
    schedule_ms: float = 0.0
    device_ms: float = 0.0
    step_ms: float = 0.0

    def add(self, event: StepEvent) -> None:
        self.steps += 1
        self.graph_steps += event.used_graph
        self.prefill_tokens += event.prefill_tokens
        self.decode_tokens += event.decode_tokens
        self.output_tokens += sum(map(_new_tokens, event.emitted))
        self.prompt_tokens += event.prompt_tokens
        self.cached_tokens += event.cached_tokens
        self.preemptions += event.preemptions
        self.evictions += event.evictions
        self.schedule_ms += event.schedule_ms
        self.device_ms += event.device_ms
        self.step_ms += event.step_ms

    def merge(self, other: Totals) -> None:
        for name in _TOTALS_FIELDS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def hit_ratio(self) -> float | None:
        """Prompt tokens found in the prefix cache, of all prompt tokens scheduled; None before the first."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prefill_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return self.decode_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds > 0 else 0.0


_TOTALS_FIELDS = [field.name for field in fields(Totals)]


@dataclass(frozen=True, slots=True)
class Goodput:
    """How many sequences succeeded and kept every SLO. `attempted` counts those that failed or were aborted too."""

    slos: tuple[SLO, ...]
    attempted: int
    good: int
    met: tuple[int, ...]  # parallel to `slos`: how many kept this one
    per_second: float

    @property
    def attainment(self) -> float | None:
        """Good / attempted; None before the first sequence has ended."""
        return self.good / self.attempted if self.attempted else None


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The state at `time`. `window` covers the last minute (less at the start), `run` all since the first step."""

    time: float
    running: int
    waiting: int
    succeeded: int
    failed: int
    aborted: int
    blocks_active: int
    blocks_cached: int
    blocks_free: int
    peak_blocks_active: int
    run: Totals
    window: Totals
    window_latencies: Latencies
    decode_history: tuple[float, ...]  # decode tokens per second, one value per whole second of the window
    goodput: Goodput


class Metrics:
    """Accumulates step events. `slos` decide what counts as good; the window is `window_s` seconds long."""

    def __init__(self, slos: Sequence[SLO] = (), window_s: int = 60) -> None:
        self.slos = tuple(slos)
        self.sequences: list[SequenceMetrics] = []
        """Every sequence that has ended, in order."""
        self.refused = 0
        """Requests that the engine never took: they count as attempted and failed. For the caller to add to."""
        self._window_s = window_s
        self._before_window = Totals()
        self._start: float | None = None
        self._last: StepEvent | None = None
        self._peak_blocks = 0
        self._seconds: deque[tuple[int, Totals]] = deque()  # whole second of the clock, sums of its steps
        self._window_sequences: deque[tuple[float, SequenceMetrics]] = deque()
        self._window_gaps: deque[tuple[float, float, int]] = deque(maxlen=MAX_WINDOW_STEPS)
        self._last_decode: float | None = None
        self._last_token: float | None = None
        self._reasons: dict[str, int] = {}
        self._good = 0
        self._met = [0] * len(self.slos)

    def observe(self, event: StepEvent) -> None:
        """Take in one step; the cost does not depend on how many came before."""
        if self._start is None:
            self._start = event.time - event.step_ms / 1e3
        self._last = event
        second = math.floor(event.time)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, Totals()))
        self._seconds[-1][1].add(event)
        self._peak_blocks = max(self._peak_blocks, event.blocks_active)
        self._observe_gap(event)
        for sequence in event.finished:
            self._observe_finished(event.time, SequenceMetrics.of(sequence))
        self._slide_window(event.time)

    def _observe_gap(self, event: StepEvent) -> None:
        # Every sequence that decodes got its previous token in the previous step that decoded, or, if it just came
        # from prefill, in the previous step with any token. Only a preemption makes a gap that this does not see.
        previous = self._last_decode if self._last_decode is not None else self._last_token
        if event.decode_tokens and previous is not None:
            self._window_gaps.append((event.time, (event.time - previous) * 1e3, event.decode_tokens))
        if event.emitted:
            self._last_token = event.time
        if event.decode_tokens:
            self._last_decode = event.time
        if not event.running:
            self._last_decode = self._last_token = None

    def _observe_finished(self, time: float, sequence: SequenceMetrics) -> None:
        self.sequences.append(sequence)
        self._window_sequences.append((time, sequence))
        self._reasons[sequence.reason] = self._reasons.get(sequence.reason, 0) + 1
        met = [sequence.meets(slo) for slo in self.slos]
        self._good += sequence.succeeded and all(met)
        self._met = [count + kept for count, kept in zip(self._met, met, strict=True)]

    def _slide_window(self, now: float) -> None:
        # The window begins with a whole second, so that its sums and its length cover the same time.
        begin = math.floor(now) - self._window_s
        while self._seconds and self._seconds[0][0] < begin:
            self._before_window.merge(self._seconds.popleft()[1])
        while self._window_sequences and self._window_sequences[0][0] < begin:
            self._window_sequences.popleft()
        while self._window_gaps and self._window_gaps[0][0] < begin:
            self._window_gaps.popleft()

    def snapshot(self, now: float | None = None) -> MetricsSnapshot:
        """The figures at `now`, in seconds on the engine's clock; by default at the last event.

        The window's TTFT, TPOT and E2E are those of the sequences that ended in it; its ITL is taken from the steps
        and so covers running sequences as well.
        """
        last = self._last
        now = now if now is not None else last.time if last is not None else 0.0
        self._slide_window(now)
        elapsed = max(now - self._start, 0.0) if self._start is not None else 0.0
        window, run = Totals(), Totals()
        for _, totals in self._seconds:
            window.merge(totals)
        run.merge(self._before_window)
        run.merge(window)
        window.seconds = min(elapsed, now - math.floor(now) + self._window_s)
        run.seconds = elapsed
        failed = self._reasons.get("error", 0) + self.refused
        return MetricsSnapshot(
            time=now,
            running=last.running if last else 0,
            waiting=last.waiting if last else 0,
            succeeded=sum(self._reasons.get(reason, 0) for reason in SUCCESS),
            failed=failed,
            aborted=self._reasons.get("abort", 0),
            blocks_active=last.blocks_active if last else 0,
            blocks_cached=last.blocks_cached if last else 0,
            blocks_free=last.blocks_free if last else 0,
            peak_blocks_active=self._peak_blocks,
            run=run,
            window=window,
            window_latencies=self._window_latencies(),
            decode_history=self._decode_history(math.floor(now)),
            goodput=Goodput(
                slos=self.slos,
                attempted=len(self.sequences) + self.refused,
                good=self._good,
                met=tuple(self._met),
                per_second=self._good / elapsed if elapsed > 0 else 0.0,
            ),
        )

    def run_latencies(self) -> Latencies:
        """Exact distributions over the whole run; costs time proportional to the tokens, so for the end of a run."""
        sequences = [sequence for sequence in self.sequences if sequence.succeeded]
        gaps = np.concatenate([sequence.itl_ms for sequence in sequences]) if sequences else np.empty(0)
        return _latencies(sequences, distribution(gaps))

    def _window_latencies(self) -> Latencies:
        gaps = [gap for _, gap, _ in self._window_gaps]
        itl = distribution(gaps, [weight for _, _, weight in self._window_gaps])
        return _latencies([sequence for _, sequence in self._window_sequences if sequence.succeeded], itl)

    def _decode_history(self, this_second: int) -> tuple[float, ...]:
        # The second that is not over yet would show as a dip.
        if self._start is None:
            return ()
        first = max(math.floor(self._start), this_second - self._window_s)
        tokens = {second: totals.decode_tokens for second, totals in self._seconds}
        return tuple(float(tokens.get(second, 0)) for second in range(first, this_second))


def _latencies(sequences: Sequence[SequenceMetrics], itl: Distribution | None) -> Latencies:
    def of(name: str) -> Distribution | None:
        values = [getattr(sequence, name) for sequence in sequences]
        return distribution([value for value in values if value is not None])

    return Latencies(
        ttft=of("ttft_ms"),
        tpot=of("tpot_ms"),
        itl=itl,
        e2e=of("e2e_ms"),
        queue=of("queue_ms"),
        prefill=of("prefill_ms"),
    )
