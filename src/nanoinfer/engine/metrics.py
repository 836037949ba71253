"""Figures from step events: latencies, rates, cache hits and goodput, of the whole run and of the last minute.

A consumer like any other: it sees StepEvents and nothing else. Times are on the engine's clock, so a recorded run gives
the same figures as the live one.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from nanoinfer.engine.events import SUCCESS, FinishedSequence, StepEvent
from nanoinfer.engine.latency import (
    OF_SEQUENCE,
    SLO,
    Distribution,
    Floats,
    distribution,
    gaps_ms,
    latencies_ms,
    meets,
)
from nanoinfer.engine.recorder import Recorder

# Rates of the moment are those of the last few seconds.
RECENT_S = 10
# The window's ITL is kept per step, other latencies per sequence; a minute that has more keeps the latest.
MAX_WINDOW_STEPS, MAX_WINDOW_SEQUENCES = 16384, 4096

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
    """Sums over the steps of a span of time that is `seconds` long. Idle events, which say that requests ended between
    two steps, add what they have but are no steps."""

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
        self.steps += event.kind != "idle"
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
        # Written out because a snapshot does it for every second of the window.
        self.steps += other.steps
        self.graph_steps += other.graph_steps
        self.prefill_tokens += other.prefill_tokens
        self.decode_tokens += other.decode_tokens
        self.output_tokens += other.output_tokens
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.preemptions += other.preemptions
        self.evictions += other.evictions
        self.schedule_ms += other.schedule_ms
        self.device_ms += other.device_ms
        self.step_ms += other.step_ms

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
    """The state at `time`. `run` covers all since the first step, `window` the last minute, `recent` the last RECENT_S
    seconds (both less at the start)."""

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
    recent: Totals
    prefill_history: tuple[int, ...]  # prefill tokens in each whole second of the window
    decode_history: tuple[int, ...]
    goodput: Goodput


class Metrics:
    """Accumulates step events. `slos` decide what counts as good; the window is `window_s` seconds long.

    Without `keep_sequences` the memory does not grow with the run, and `sequences` and `run_latencies` stay empty.
    """

    def __init__(self, slos: Sequence[SLO] = (), window_s: int = 60, *, keep_sequences: bool = True) -> None:
        self.slos = tuple(slos)
        self.sequences: list[FinishedSequence] = []  # all that have ended, in order
        self._window_s = window_s
        self._before_window = Totals()
        self._start: float | None = None
        self._last: StepEvent | None = None
        self._peak_blocks = 0
        self._seconds: deque[tuple[int, Totals]] = deque()  # whole second of the clock, sums of its steps
        self._keep_sequences = keep_sequences
        self._window_sequences = Recorder(MAX_WINDOW_SEQUENCES, len(OF_SEQUENCE))
        self._window_ttft = Recorder(MAX_WINDOW_SEQUENCES, 1)
        self._window_gaps = Recorder(MAX_WINDOW_STEPS, 2)  # milliseconds, and how many sequences waited for them
        self._last_decode: float | None = None
        self._last_token: float | None = None
        self._reasons: Counter[str] = Counter()
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
        for _, arrival in event.first_tokens:
            self._window_ttft.append(event.time, ((event.time - arrival) * 1e3,))
        for sequence in event.finished:
            self._observe_finished(event.time, sequence)
        self._slide_window(event.time)

    def _observe_gap(self, event: StepEvent) -> None:
        # Every sequence that decodes got its previous token in the previous step that decoded, or, if it just came
        # from prefill, in the previous step with any token. Only a preemption makes a gap that this does not see.
        previous = self._last_decode if self._last_decode is not None else self._last_token
        if event.decode_tokens and previous is not None:
            self._window_gaps.append(event.time, ((event.time - previous) * 1e3, event.decode_tokens))
        if event.emitted:
            self._last_token = event.time
        if event.decode_tokens:
            self._last_decode = event.time
        if not event.running:
            self._last_decode = self._last_token = None

    def _observe_finished(self, time: float, sequence: FinishedSequence) -> None:
        if self._keep_sequences:
            self.sequences.append(sequence)
        if sequence.succeeded:
            self._window_sequences.append(time, list(latencies_ms(sequence).values()))
        self._reasons[sequence.reason] += 1
        met = [meets(sequence, slo) for slo in self.slos]
        self._good += sequence.succeeded and all(met)
        self._met = [count + kept for count, kept in zip(self._met, met, strict=True)]

    def _slide_window(self, now: float) -> None:
        # The window begins with a whole second, so that its sums and its length cover the same time.
        begin = math.floor(now) - self._window_s
        while self._seconds and self._seconds[0][0] < begin:
            self._before_window.merge(self._seconds.popleft()[1])

    def snapshot(self, now: float | None = None) -> MetricsSnapshot:
        """The figures at `now`, in seconds on the engine's clock; by default at the last event."""
        last, now = self._last, self._now(now)
        self._slide_window(now)
        elapsed = max(now - self._start, 0.0) if self._start is not None else 0.0
        this_second = math.floor(now)
        recent_s = min(RECENT_S, self._window_s)
        recent, window, run = Totals(), Totals(), Totals()
        for second, totals in self._seconds:
            (recent if second >= this_second - recent_s else window).merge(totals)
        window.merge(recent)
        run.merge(self._before_window)
        run.merge(window)
        recent.seconds = min(elapsed, now - this_second + recent_s)
        window.seconds = min(elapsed, now - this_second + self._window_s)
        run.seconds = elapsed
        return MetricsSnapshot(
            time=now,
            running=last.running if last else 0,
            waiting=last.waiting if last else 0,
            succeeded=sum(self._reasons[reason] for reason in SUCCESS),
            failed=self._reasons["error"],
            aborted=self._reasons["abort"],
            blocks_active=last.blocks_active if last else 0,
            blocks_cached=last.blocks_cached if last else 0,
            blocks_free=last.blocks_free if last else 0,
            peak_blocks_active=self._peak_blocks,
            run=run,
            window=window,
            recent=recent,
            prefill_history=self._history("prefill_tokens", this_second),
            decode_history=self._history("decode_tokens", this_second),
            goodput=Goodput(
                slos=self.slos,
                attempted=self._reasons.total(),
                good=self._good,
                met=tuple(self._met),
                per_second=self._good / elapsed if elapsed > 0 else 0.0,
            ),
        )

    def run_latencies(self) -> Latencies:
        """Exact distributions over the whole run; costs time proportional to the tokens, so for the end of a run."""
        sequences = [sequence for sequence in self.sequences if sequence.succeeded]
        gaps = np.concatenate([gaps_ms(sequence) for sequence in sequences]) if sequences else np.empty(0)
        found = [latencies_ms(sequence) for sequence in sequences]
        known = {
            name: np.array([ms for each in found if (ms := each[name]) is not None], dtype=np.float64)
            for name in OF_SEQUENCE
        }
        return _latencies(known, distribution(gaps))

    def window_latencies(self, now: float | None = None) -> Latencies:
        """Distributions over the last minute before `now`; costs about a millisecond.

        TTFT is that of the sequences whose first token came in it, and ITL is taken from the steps: both cover running
        sequences as well. The others are those of the sequences that ended in it and succeeded.
        """
        begin = math.floor(self._now(now)) - self._window_s
        rows, gaps = self._window_sequences.since(begin), self._window_gaps.since(begin)
        columns = {name: rows[:, i][~np.isnan(rows[:, i])] for i, name in enumerate(OF_SEQUENCE)}
        columns["ttft"] = self._window_ttft.since(begin)[:, 0]
        return _latencies(columns, distribution(gaps[:, 0], gaps[:, 1].astype(np.int64)))

    def _now(self, now: float | None) -> float:
        return now if now is not None else self._last.time if self._last is not None else 0.0

    def _history(self, name: str, this_second: int) -> tuple[int, ...]:
        # The second that is not over yet would show as a dip.
        if self._start is None:
            return ()
        first = max(math.floor(self._start), this_second - self._window_s)
        tokens = {second: getattr(totals, name) for second, totals in self._seconds}
        return tuple(tokens.get(second, 0) for second in range(first, this_second))


def _latencies(values: Mapping[str, Floats], itl: Distribution | None) -> Latencies:
    """Distributions of the values under the names in OF_SEQUENCE."""
    return Latencies(itl=itl, **{name: distribution(values[name]) for name in OF_SEQUENCE})
