"""How far a run is and when it will end, in tokens: requests finish in bursts, tokens come steadily."""

from __future__ import annotations

from nanoinfer.engine.events import StepEvent


class TokenProgress:
    """Counts output tokens from step events and estimates how many are still to come.

    `limit` is the mean of the sequences' token limits, 0 if they have none. Sequences that stop by themselves are
    taken to be equally likely to stop at each token: then tokens so far / sequences finished estimates the length
    still ahead of each unfinished one. The mean of the finished ones alone would be far too short at first, because
    short answers finish first.
    """

    def __init__(self, total_sequences: int, limit: float) -> None:
        self.tokens = 0
        self._total = total_sequences
        self._limit = limit
        self._finished = 0
        self._finished_tokens = 0
        self._stopped_early = False

    def observe(self, event: StepEvent) -> None:
        self.tokens += sum(count for _, count in event.emitted)
        for sequence in event.finished:
            self._finished += 1
            self._finished_tokens += sequence.output_tokens
            self._stopped_early |= sequence.reason != "length"

    def remaining_tokens(self) -> float | None:
        """Output tokens still to come, as far as one can know; None while nothing is known."""
        unfinished = self._total - self._finished
        if not self._stopped_early:
            return max(self._total * self._limit - self.tokens, 0.0) if self._limit else None
        by_stopping = unfinished * self.tokens / self._finished
        if not self._limit:
            return by_stopping
        in_flight = self.tokens - self._finished_tokens
        return max(min(by_stopping, unfinished * self._limit - in_flight), 0.0)

    def eta_seconds(self, tokens_per_second: float) -> float | None:
        """Seconds to the end at this rate; None while nothing is known."""
        remaining = self.remaining_tokens()
        return remaining / tokens_per_second if remaining is not None and tokens_per_second > 0 else None
