"""What the steps of a benchmark say: time and tokens by phase, and the stretch in which the engine was full."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoinfer.engine.events import StepEvent

# A step belongs to the full stretch if it ran at least this part of the most sequences that any step ran.
FULL = 0.9


@dataclass(slots=True)
class Phase:
    """Sums over the steps of one kind: prefill, decode, or mixed (both in one step). Times in seconds."""

    steps: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    sampled_tokens: int = 0
    decode_context: int = 0
    prefill_pairs: int = 0

    def add(self, event: StepEvent, seconds: float) -> None:
        self.steps += 1
        self.seconds += seconds
        self.device_seconds += event.device_ms / 1e3
        self.prefill_tokens += event.prefill_tokens
        self.decode_tokens += event.decode_tokens
        self.sampled_tokens += sum(count for _, count in event.emitted)
        self.decode_context += event.decode_context
        self.prefill_pairs += event.prefill_pairs


@dataclass(frozen=True, slots=True)
class SteadyState:
    """The longest stretch of steps with at least FULL of the most sequences: ramp-up and drain are outside."""

    seconds: float
    steps: int
    output_tokens: int
    mean_sequences: float  # weighted with time
    peak_sequences: int

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class _Step:
    seconds: float
    sequences: int
    output_tokens: int


@dataclass
class StepLog:
    """Takes in the step events of one run.

    A step's time is from the result before it to its own, so that what the host does in between counts; the first step
    after the engine had nothing to do counts from its scheduling.
    """

    phases: dict[str, Phase] = field(default_factory=dict)
    _busy_since: float | None = None
    _steps: list[_Step] = field(default_factory=list)

    def observe(self, event: StepEvent) -> None:
        if event.kind == "idle":
            return
        seconds = event.step_ms / 1e3 if self._busy_since is None else event.time - self._busy_since
        self._busy_since = event.time if event.running or event.waiting else None
        self.phases.setdefault(event.kind, Phase()).add(event, seconds)
        # The event has the state after the step; those that ended in it ran in it.
        sequences = event.running + len(event.finished)
        self._steps.append(_Step(seconds, sequences, sum(count for _, count in event.emitted)))

    def steady_state(self) -> SteadyState | None:
        """None before the first step."""
        if not self._steps:
            return None
        peak = max(step.sequences for step in self._steps)
        best: list[_Step] = []
        best_seconds = -1.0
        current: list[_Step] = []
        for step in [*self._steps, _Step(0.0, -1, 0)]:  # the last one ends a stretch that runs to the end
            if step.sequences >= FULL * peak:
                current.append(step)
                continue
            seconds = sum(each.seconds for each in current)
            if current and seconds > best_seconds:
                best, best_seconds = current, seconds
            current = []
        if best_seconds <= 0:
            return None
        return SteadyState(
            seconds=best_seconds,
            steps=len(best),
            output_tokens=sum(step.output_tokens for step in best),
            mean_sequences=sum(step.sequences * step.seconds for step in best) / best_seconds,
            peak_sequences=peak,
        )
