"""Sends a workload to the engine: everything at once, as fast as answers come back, or at given arrival times."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nanoinfer.cli.interrupts import Interrupts
from nanoinfer.cli.workloads import BenchRequest
from nanoinfer.config import SamplingParams
from nanoinfer.engine.events import FinishedSequence, StepEvent

if TYPE_CHECKING:
    from nanoinfer.llm import LLM


@dataclass
class LoadResult:
    """What only the sender knows. `tokens_per_second` counts output tokens by whole second of the clock."""

    seconds: float = 0.0
    max_in_flight: int = 0
    tokens_per_second: Counter[int] = field(default_factory=Counter)


class LoadDriver:
    """One run of a workload. Call `observed` on each event before it reaches the metrics, from whatever thread.

    With arrival times (an open loop) latencies count from the moment when a request was due, not from when this loop
    got round to sending it: a step that takes long must not hide the wait that it causes. Without them a request
    arrives when it is sent.
    """

    def __init__(
        self,
        llm: LLM,
        requests: Sequence[BenchRequest],
        sampling: SamplingParams,
        *,
        max_concurrency: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.result = LoadResult()
        self._llm = llm
        self._pending = deque(enumerate(requests))
        self._sampling = sampling
        self._limit = max_concurrency or len(requests)
        self._clock = clock
        self._sleep = sleep
        self._in_flight = 0
        self._due: dict[str, float] = {}  # request id -> when it should have been sent
        self.done = 0

    def run(self, interrupts: Interrupts, tick: Callable[[], None]) -> LoadResult:
        """Run to the end; raises what a signal stands for after the step in which it came."""
        started = self._clock()
        with interrupts.deferred():
            while self._pending or self._llm.has_unfinished:
                self._send_due(started)
                if self._llm.has_unfinished:
                    ended = sum(delta.output is not None for delta in self._llm.step())
                    self._in_flight -= ended
                    self.done += ended
                elif self._pending:
                    self._wait(started)
                tick()
                interrupts.raise_if_requested()
        self.result.seconds = self._clock() - started
        return self.result

    def _send_due(self, started: float) -> None:
        now = self._clock() - started
        while self._pending and self._in_flight < self._limit:
            index, request = self._pending[0]
            if request.arrival is not None and request.arrival > now:
                return
            self._pending.popleft()
            name = f"bench-{index}"
            if request.arrival is not None:
                self._due[name] = started + request.arrival
            sampling = replace(self._sampling, max_tokens=request.output_tokens)
            self._llm.submit(request.token_ids, sampling, request_id=name)
            self._in_flight += 1
            self.result.max_in_flight = max(self.result.max_in_flight, self._in_flight)

    def _wait(self, started: float) -> None:
        """Nothing runs: sleep until the next arrival, in short pieces so that a signal is heard."""
        arrival = self._pending[0][1].arrival
        assert arrival is not None, "only arrival times can leave requests pending while nothing runs"
        self._sleep(min(max(started + arrival - self._clock(), 0.0), 0.05))

    def observed(self, event: StepEvent) -> StepEvent:
        """The event with arrivals counted from when requests were due."""
        self.result.tokens_per_second[int(event.time)] += sum(count for _, count in event.emitted)
        if not self._due or not (event.finished or event.first_tokens):
            return event
        return replace(
            event,
            finished=tuple(self._from_due(sequence) for sequence in event.finished),
            first_tokens=tuple((name, self._due.get(name, arrival)) for name, arrival in event.first_tokens),
        )

    def _from_due(self, sequence: FinishedSequence) -> FinishedSequence:
        due = self._due.get(sequence.request_id, sequence.timing.arrival)
        return replace(sequence, timing=replace(sequence.timing, arrival=due))
