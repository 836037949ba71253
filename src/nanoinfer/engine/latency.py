"""Latencies of finished sequences, their distributions, and the limits (SLOs) that they should keep.

TTFT, TPOT, ITL and E2E are defined in engine.events.RequestTiming; each of a request's n samples is a sequence with
latencies of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import reject_unknown
from nanoinfer.engine.events import FinishedSequence
from nanoinfer.errors import ConfigError

Floats = NDArray[np.float64]

SLO_METRICS = ("ttft", "tpot", "e2el", "itl_p99")
SUCCESS = ("stop", "length")


@dataclass(frozen=True, slots=True)
class SLO:
    """A limit that a sequence's latency must keep, in milliseconds. `metric` is one of SLO_METRICS."""

    metric: str
    limit_ms: float


def parse_slos(texts: str | Iterable[str]) -> tuple[SLO, ...]:
    """SLOs from text like "ttft:200 tpot:50", or a list of such words. Raises ConfigError."""
    words = texts.split() if isinstance(texts, str) else [word for text in texts for word in text.split()]
    slos: dict[str, SLO] = {}
    for word in words:
        metric, colon, limit = word.partition(":")
        if not colon:
            raise ConfigError(f"SLO '{word}' must be METRIC:MILLISECONDS, like ttft:200.")
        reject_unknown([metric], SLO_METRICS, "SLO")
        if metric in slos:
            raise ConfigError(f"SLO '{metric}' is given twice.")
        try:
            value = float(limit)
        except ValueError:
            value = math.nan
        if not 0.0 < value < math.inf:
            raise ConfigError(f"SLO '{word}' needs a number of milliseconds above 0.")
        slos[metric] = SLO(metric, value)
    return tuple(slos.values())


@dataclass(frozen=True, slots=True, eq=False)
class SequenceMetrics:
    """Latencies of one finished sequence in milliseconds; None where it never got so far.

    e2e_ms = ttft_ms + tpot_ms x (output_tokens - 1). TPOT and ITL need two output tokens.
    """

    request_id: str
    index: int
    reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    arrival: float  # seconds on the engine's clock
    queue_ms: float | None
    prefill_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    token_times: tuple[float, ...] = field(repr=False)  # seconds, when each output token reached the host

    @classmethod
    def of(cls, sequence: FinishedSequence) -> SequenceMetrics:
        timing = sequence.timing
        return cls(
            request_id=sequence.request_id,
            index=sequence.index,
            reason=sequence.reason,
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            output_tokens=sequence.output_tokens,
            preemptions=sequence.preemptions,
            arrival=timing.arrival,
            queue_ms=timing.queue_ms,
            prefill_ms=timing.prefill_ms,
            ttft_ms=timing.ttft_ms,
            tpot_ms=timing.tpot_ms(sequence.output_tokens),
            e2e_ms=timing.e2e_ms,
            token_times=sequence.token_times,
        )

    @property
    def itl_ms(self) -> Floats:
        """The gaps between its output tokens: output_tokens - 1 of them. Computed anew each time."""
        return np.diff(np.asarray(self.token_times, dtype=np.float64)) * 1e3

    @property
    def succeeded(self) -> bool:
        return self.reason in SUCCESS

    def meets(self, slo: SLO) -> bool:
        """Whether it succeeded within the limit. A single token has no TPOT and no ITL, and keeps any limit on them."""
        if not self.succeeded:
            return False
        if slo.metric == "itl_p99":
            value = float(np.percentile(self.itl_ms, 99)) if len(self.token_times) > 1 else None
        else:
            value = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2el": self.e2e_ms}[slo.metric]
        return value is None or value <= slo.limit_ms


@dataclass(frozen=True, slots=True)
class Distribution:
    """Milliseconds; percentiles are numpy's default, linear between the two nearest values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


def distribution(
    values: Sequence[float] | Floats, weights: Sequence[int] | NDArray[np.int64] | None = None
) -> Distribution | None:
    """Of `values`, each counted as often as its weight says; None if there are none."""
    data = np.asarray(values, dtype=np.float64)
    if weights is None:
        ordered, total = np.sort(data), len(data)
        ends = None
    else:
        counts = np.asarray(weights, dtype=np.int64)
        order = np.argsort(data)
        ordered, ends = data[order], np.cumsum(counts[order])  # value i stands at places ends[i-1] .. ends[i]-1
        total = int(ends[-1]) if len(ends) else 0
    if not total:
        return None
    # The places around each percentile's, which is a fraction, in the sorted, repeated values.
    ranks = [share * (total - 1) for share in (0.5, 0.9, 0.99)]
    places = [place for rank in ranks for place in (math.floor(rank), math.ceil(rank))]
    around = ordered[places if ends is None else np.searchsorted(ends, places, side="right")].tolist()
    p50, p90, p99 = (
        below + (above - below) * (rank - math.floor(rank))
        for rank, below, above in zip(ranks, around[::2], around[1::2], strict=True)
    )
    mean = float(data.sum() if weights is None else data @ counts) / total
    return Distribution(total, mean, p50, p90, p99)
