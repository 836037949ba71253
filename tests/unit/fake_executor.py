"""A data plane without tensors that knows what each KV slot must hold, for testing the control plane.

The "KV" of a position is a hash of all tokens up to it, so a step that reads a slot which was never written, was
overwritten, or belongs to another text is caught at once. The next token is a pure function of the sequence's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoinfer.engine.batch import CompletedStep, NewSequence, ScheduledBatch, StepHandle, StepResult

_MASK = (1 << 61) - 1


def extend(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 17) & _MASK


def next_token(state: int, vocab_size: int) -> int:
    return ((state ^ (state >> 31)) * 0x9E3779B1 >> 13) % vocab_size


def expected_tokens(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """What a sequence must generate, whatever the schedule."""
    state, out = 0, []
    for token in prompt:
        state = extend(state, token)
    for _ in range(count):
        out.append(next_token(state, vocab_size))
        state = extend(state, out[-1])
    return out


@dataclass
class _Row:
    tokens: list[int]
    blocks: list[int]
    states: list[int] = field(default_factory=list)  # hash after each token


class FakeExecutor:
    """Runs each step when it is submitted; a handle may be asked for its result later (overlap)."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 50, eos_every: int = 0) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.kv: list[int | None] = [None] * (num_blocks * block_size)
        self.rows: dict[int, _Row] = {}
        self.batches: list[ScheduledBatch] = []
        self.computed_tokens = 0
        self.fail_at: int | None = None
        self.num_discards = 0

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        if self.fail_at == batch.step:
            raise KeyboardInterrupt
        self.batches.append(batch)
        for new in batch.new_sequences:
            self._enter(new)
        for row, block in batch.new_blocks:
            self.rows[row].blocks.append(block)
        assert len(set(batch.rows)) == len(batch.rows), batch.rows
        assert all(batch.query_lens[i] == 1 and batch.is_sampled[i] for i in range(batch.num_decodes))
        sampled = []
        # Writes of the whole batch come before any read, as in a real step's layer.
        for row, start, count in zip(batch.rows, batch.starts, batch.query_lens, strict=True):
            self._write(self.rows[row], start, count)
        for i, row in enumerate(batch.rows):
            state = self._read(self.rows[row], batch.starts[i] + batch.query_lens[i])
            if batch.is_sampled[i]:
                tokens = self.rows[row].tokens
                assert batch.starts[i] + batch.query_lens[i] == len(tokens), (batch.starts[i], len(tokens))
                sampled.append(next_token(state, self.vocab_size))
                tokens.append(sampled[-1])
        return CompletedStep(StepResult(sampled, device_ms=1.0))

    def _enter(self, new: NewSequence) -> None:
        row = _Row(list(new.token_ids), list(new.block_table))
        state = 0
        for token in row.tokens:
            state = extend(state, token)
            row.states.append(state)
        self.rows[new.row] = row

    def _slot(self, row: _Row, position: int) -> int:
        return row.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, row: _Row, start: int, count: int) -> None:
        assert count > 0
        self.computed_tokens += count
        for position in range(start, start + count):
            if position == len(row.states):
                row.states.append(extend(row.states[-1] if row.states else 0, row.tokens[position]))
            self.kv[self._slot(row, position)] = row.states[position]

    def _read(self, row: _Row, end: int) -> int:
        for position in range(end):
            slot = self._slot(row, position)
            assert self.kv[slot] == row.states[position], f"slot {slot} does not hold position {position}"
        return row.states[end - 1]

    def discard(self) -> None:
        self.num_discards += 1

    def close(self) -> None:
        pass
