"""Latencies of finished sequences, their distributions, and the limits (SLOs) that they should keep.

TTFT, TPOT, ITL and E2E are defined in engine.events.RequestTiming; each of a request's n samples is a sequence with
latencies of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import reject_unknown
from nanoinfer.engine.events import FinishedSequence
from nanoinfer.errors import ConfigError

Floats = NDArray[np.float64]

SLO_METRICS = ("ttft", "tpot", "e2el", "itl_p99")
OF_SEQUENCE = ("ttft", "tpot", "e2e", "queue", "prefill")  # the latencies that a sequence has one value of


@dataclass(frozen=True, slots=True)
class SLO:
    """A limit that a sequence's latency must keep, in milliseconds. `metric` is one of SLO_METRICS."""

    metric: str
    limit_ms: float


def parse_slos(text: str) -> tuple[SLO, ...]:
    """SLOs from text like "ttft:200 tpot:50". Raises ConfigError."""
    slos: dict[str, SLO] = {}
    for word in text.split():
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


def latencies_ms(sequence: FinishedSequence) -> dict[str, float | None]:
    """Each of OF_SEQUENCE; None where it never got so far. TPOT needs two output tokens."""
    timing = sequence.timing
    tpot_ms = timing.tpot_ms(sequence.output_tokens)
    found = (timing.ttft_ms, tpot_ms, timing.e2e_ms, timing.queue_ms, timing.prefill_ms)
    return dict(zip(OF_SEQUENCE, found, strict=True))


def gaps_ms(sequence: FinishedSequence) -> Floats:
    """The gaps between its output tokens (ITL): output_tokens - 1 of them."""
    return np.diff(np.asarray(sequence.token_times, dtype=np.float64)) * 1e3


def meets(sequence: FinishedSequence, slo: SLO) -> bool:
    """Whether it succeeded within the limit. A single token has no TPOT and no ITL, and keeps any limit on them."""
    if not sequence.succeeded:
        return False
    if slo.metric == "itl_p99":
        value = float(np.percentile(gaps_ms(sequence), 99)) if len(sequence.token_times) > 1 else None
    else:
        value = latencies_ms(sequence)["e2e" if slo.metric == "e2el" else slo.metric]
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
