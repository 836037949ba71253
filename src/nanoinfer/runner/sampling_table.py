"""The sampling parameters of every running sequence, one row each, as arrays that a step can index. numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoinfer.engine.batch import NewSequence, ScheduledBatch

# What a row asks for beyond argmax. A step does the work of a bit only for the rows that have it.
RANDOM, FILTER, PENALTIES, MIN_TOKENS, LOGPROBS = 1, 2, 4, 8, 16


class SamplingTable:
    """Arrays [max_num_seqs] of the fields of SamplingParams, and `needs`, the bits above."""

    def __init__(self, max_num_seqs: int) -> None:
        def reals() -> NDArray[np.float32]:
            return np.zeros(max_num_seqs, dtype=np.float32)

        def integers() -> NDArray[np.int64]:
            return np.zeros(max_num_seqs, dtype=np.int64)

        self.needs: NDArray[np.uint8] = np.zeros(max_num_seqs, dtype=np.uint8)
        self.temperature, self.top_p, self.min_p = reals(), reals(), reals()
        self.repetition, self.presence, self.frequency = reals(), reals(), reals()
        self.top_k, self.seed, self.min_tokens, self.logprobs = integers(), integers(), integers(), integers()
        self.stop_token_ids: list[list[int]] = [[] for _ in range(max_num_seqs)]

    def is_plain(self, rows: NDArray[np.int64]) -> bool:
        """Whether these rows need nothing beyond argmax and temperature, which a model's `sample` does by itself."""
        return not (self.needs[rows] & ~np.uint8(RANDOM)).any()

    def update(self, batch: ScheduledBatch) -> None:
        """Fill the rows of the batch's new sequences."""
        for sequence in batch.new_sequences:
            self._insert(sequence)

    def _insert(self, sequence: NewSequence) -> None:
        row, params = sequence.row, sequence.sampling
        self.temperature[row] = params.temperature
        self.top_k[row], self.top_p[row], self.min_p[row] = params.top_k, params.top_p, params.min_p
        self.repetition[row] = params.repetition_penalty
        self.presence[row], self.frequency[row] = params.presence_penalty, params.frequency_penalty
        self.seed[row] = sequence.seed
        self.min_tokens[row] = params.min_tokens
        self.logprobs[row] = params.logprobs or 0
        self.stop_token_ids[row] = list(sequence.stop_token_ids)
        random = not params.greedy
        filtered = random and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        self.needs[row] = (
            RANDOM * random
            | FILTER * filtered
            | PENALTIES * penalised
            | MIN_TOKENS * bool(params.min_tokens and sequence.stop_token_ids)
            | LOGPROBS * (params.logprobs is not None)
        )
