"""How far a run is and when it will end, in tokens: requests finish in bursts, tokens come steadily."""

from __future__ import annotations

from nanoinfer.engine.events import StepEvent


class TokenProgress:
    """Counts output tokens from step events and estimates how many are still to come.

    Until a sequence has finished, `expected_tokens` (its limit, say) is the guess for every answer's length; from then
    on it is the mean of those that did.
    """

    def __init__(self, total_sequences: int, expected_tokens: float) -> None:
        self.tokens = 0
        self._unfinished = total_sequences
        self._expected = expected_tokens
        self._finished = 0
        self._finished_tokens = 0

    def observe(self, event: StepEvent) -> None:
        self.tokens += sum(count for _, count in event.emitted)
        for sequence in event.finished:
            self._finished += 1
            self._unfinished -= 1
            self._finished_tokens += sequence.output_tokens

    def drop(self, sequences: int) -> None:
        """These sequences will never run: their request was refused."""
        self._unfinished -= sequences

    @property
    def remaining_tokens(self) -> float:
        """Output tokens still to come, as far as one can know; at least one per sequence."""
        mean = self._finished_tokens / self._finished if self._finished_tokens else self._expected
        in_flight = self.tokens - self._finished_tokens
        return max(self._unfinished * mean - in_flight, float(self._unfinished))

    def eta_seconds(self, tokens_per_second: float) -> float | None:
        """Seconds to the end at this rate; None while nothing is known."""
        return self.remaining_tokens / tokens_per_second if tokens_per_second > 0 else None
