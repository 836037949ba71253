"""How far a run is and when it will end, in tokens: requests finish in bursts, tokens come steadily."""

from __future__ import annotations

from nanoinfer.engine.events import StepEvent


class TokenProgress:
    """Estimates from step events how many output tokens are still to come. `tokens` is how many there are so far.

    `mean_limit` is that of the sequences' token limits, 0 if they have none. Sequences that stop by themselves are
    taken to be equally likely to stop at each token: then tokens so far / sequences finished estimates the length
    still ahead of each unfinished one. The mean of the finished ones alone would be far too short at first, because
    short answers finish first.
    """

    def __init__(self, total_sequences: int, mean_limit: float) -> None:
        self._total = total_sequences
        self._mean_limit = mean_limit
        self._finished = 0
        self._finished_tokens = 0
        self._stopped_early = False

    def observe(self, event: StepEvent) -> None:
        for sequence in event.finished:
            self._finished += 1
            self._finished_tokens += sequence.output_tokens
            self._stopped_early |= sequence.reason != "length"

    @property
    def unfinished(self) -> int:
        return max(self._total - self._finished, 0)

    def remaining_tokens(self, tokens: int) -> float | None:
        """Output tokens still to come, as far as one can know; None while nothing is known."""
        if not self._stopped_early:
            return max(self._total * self._mean_limit - tokens, 0.0) if self._mean_limit else None
        by_stopping = self.unfinished * tokens / self._finished
        if not self._mean_limit:
            return by_stopping
        in_flight = tokens - self._finished_tokens
        return max(min(by_stopping, self.unfinished * self._mean_limit - in_flight), 0.0)

    def eta_seconds(self, tokens: int, tokens_per_second: float) -> float | None:
        """Seconds to the end at this rate; None while nothing is known."""
        remaining = self.remaining_tokens(tokens)
        return remaining / tokens_per_second if remaining is not None and tokens_per_second > 0 else None
