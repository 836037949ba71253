"""One immutable record per step, and the stream that carries them to consumers without ever waiting for one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

StepKind = Literal["prefill", "decode", "mixed", "idle"]
SUCCESS = ("stop", "length")  # reasons for which a sequence ends when it is complete


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Times of one sequence in seconds on the engine's monotonic clock; None where it never got so far.

    TTFT = first_token - arrival; TPOT = (last_token - first_token) / (n - 1); E2E = last_token - arrival
    = TTFT + TPOT x (n - 1); queue = first_scheduled - arrival; prefill = first_token - first_scheduled.
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None

    @property
    def queue_ms(self) -> float | None:
        return _gap_ms(self.arrival, self.first_scheduled)

    @property
    def prefill_ms(self) -> float | None:
        return _gap_ms(self.first_scheduled, self.first_token)

    @property
    def ttft_ms(self) -> float | None:
        return _gap_ms(self.arrival, self.first_token)

    @property
    def e2e_ms(self) -> float | None:
        return _gap_ms(self.arrival, self.last_token)

    def tpot_ms(self, output_tokens: int) -> float | None:
        """Of a sequence with so many output tokens; one alone has none."""
        decode_ms = _gap_ms(self.first_token, self.last_token)
        return decode_ms / (output_tokens - 1) if decode_ms is not None and output_tokens > 1 else None


def _gap_ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else (end - start) * 1e3


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """A sequence that ended in this step, with all that the latency metrics need."""

    request_id: str
    index: int  # which of the request's n samples
    reason: str  # a FinishReason's value
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache when it was first scheduled
    output_tokens: int
    preemptions: int
    timing: RequestTiming
    token_times: tuple[float, ...] = field(default=(), repr=False)  # when each output token reached the host

    @property
    def succeeded(self) -> bool:
        return self.reason in SUCCESS


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What one step did. Counts are of this step; running, waiting and blocks are the state after it."""

    step: int
    time: float  # seconds on the engine's monotonic clock, after the sampled ids reached the host
    kind: StepKind
    running: int
    waiting: int
    prefill_tokens: int
    decode_tokens: int
    cached_tokens: int  # prompt tokens that sequences scheduled for the first time found in the cache
    prompt_tokens: int  # prompt tokens of those same sequences: the denominator of the hit ratio
    blocks_active: int
    blocks_cached: int
    blocks_free: int
    evictions: int
    preemptions: int
    emitted: tuple[tuple[str, int], ...]  # (request id, new tokens)
    finished: tuple[FinishedSequence, ...]
    schedule_ms: float
    device_ms: float
    step_ms: float
    used_graph: bool = False
    decode_context: int = 0  # tokens whose KV the decoding sequences read, summed over them
    prefill_pairs: int = 0  # (query, key) pairs that the prefill chunks attended to
    # (request id, arrival) of each sequence that got its first token, for which `time` is when that came
    first_tokens: tuple[tuple[str, float], ...] = ()


class Subscription:
    """A consumer's own queue of events. The engine's thread fills it; one other may drain it, as the live display's."""

    def __init__(self) -> None:
        self._queue: deque[StepEvent] = deque()

    def push(self, event: StepEvent) -> None:
        self._queue.append(event)

    def drain(self) -> list[StepEvent]:
        """Remove and return all events that are waiting, oldest first."""
        events = []
        while self._queue:
            events.append(self._queue.popleft())
        return events


class EventStream:
    """Fans each StepEvent out to the subscriptions, where it waits until its consumer has time."""

    def __init__(self) -> None:
        self._subscriptions: list[Subscription] = []

    def subscribe(self) -> Subscription:
        subscription = Subscription()
        self._subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.remove(subscription)

    def publish(self, event: StepEvent) -> None:
        for subscription in self._subscriptions:
            subscription.push(event)
