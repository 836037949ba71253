"""Flat step inputs from scheduled batches: against a plain loop, at the edges, and for rows that are used again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.config import SamplingParams
from nanoinfer.engine.batch import NewSequence, ScheduledBatch
from nanoinfer.runner.input_batch import SequenceRows

BLOCK = 4


def new_sequence(row: int, token_ids: list[int], block_table: list[int], prompt_len: int | None = None) -> NewSequence:
    return NewSequence(
        row=row,
        token_ids=token_ids,
        prompt_len=prompt_len or len(token_ids),
        block_table=block_table,
        sampling=SamplingParams(),
        seed=0,
        stop_token_ids=(),
    )


def batch(new: list[NewSequence], work: list[tuple[int, int, int, bool]], blocks=()) -> ScheduledBatch:
    """A step over (row, start, count, sample) entries."""
    rows, starts, query_lens, is_sampled = (list(column) for column in zip(*work, strict=True))
    return ScheduledBatch(
        step=0,
        new_sequences=new,
        new_blocks=list(blocks),
        rows=rows,
        starts=starts,
        query_lens=query_lens,
        is_sampled=is_sampled,
        num_decodes=0,
    )


def arrays_of(rows: SequenceRows, step: ScheduledBatch):
    rows.update(step)
    return rows.step_arrays(step)


@given(st.data())
def test_step_arrays_equal_a_plain_loop(data):
    lengths = data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=5))
    work, new, expected_slots, expected_ids, expected_positions = [], [], [], [], []
    for i, length in enumerate(lengths):
        row = 2 * i  # rows need not be adjacent
        tokens = data.draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
        table = data.draw(st.permutations(range(10 * i, 10 * i + 4)))
        start = data.draw(st.integers(0, length - 1))
        count = data.draw(st.integers(1, length - start))
        new.append(new_sequence(row, tokens, list(table)))
        work.append((row, start, count, start + count == length))
        for position in range(start, start + count):
            expected_ids.append(tokens[position])
            expected_positions.append(position)
            expected_slots.append(table[position // BLOCK] * BLOCK + position % BLOCK)

    arrays = arrays_of(SequenceRows(10, 16, BLOCK), batch(new, work))

    assert arrays.input_ids.tolist() == expected_ids
    assert arrays.positions.tolist() == expected_positions
    assert arrays.slot_mapping.tolist() == expected_slots
    query_lens = [count for _, _, count, _ in work]
    assert arrays.cu_seqlens_q.tolist() == [0, *np.cumsum(query_lens)]
    assert arrays.context_lens.tolist() == [start + count for _, start, count, _ in work]
    ends = np.cumsum(query_lens)
    assert arrays.sample_at.tolist() == [end - 1 for end, w in zip(ends, work, strict=True) if w[3]]
    assert arrays.sample_rows.tolist() == [w[0] for w in work if w[3]]
    for i, (_, start, count, _) in enumerate(work):
        used = -(-(start + count) // BLOCK)
        assert arrays.block_tables[i, :used].tolist() == new[i].block_table[:used]


def test_decode_position_is_the_index_of_the_token_that_is_fed():
    rows = SequenceRows(1, 16, BLOCK)
    arrays_of(rows, batch([new_sequence(0, [5, 6, 7], [3])], [(0, 0, 3, True)]))
    rows.append_tokens(np.array([0]), np.array([3]), np.array([8]))
    arrays = arrays_of(rows, batch([], [(0, 3, 1, True)]))
    assert (arrays.input_ids.tolist(), arrays.positions.tolist()) == ([8], [3])
    assert arrays.sample_lens.tolist() == [4]  # where the next token goes


def test_chunk_attends_to_the_end_of_the_chunk_not_of_the_prompt():
    arrays = arrays_of(
        SequenceRows(1, 16, BLOCK), batch([new_sequence(0, list(range(12)), [0, 1, 2])], [(0, 4, 3, False)])
    )
    assert arrays.context_lens.tolist() == [7]
    assert arrays.block_tables.shape == (1, 2)


def test_unfinished_chunk_samples_nothing():
    arrays = arrays_of(
        SequenceRows(2, 16, BLOCK),
        batch(
            [new_sequence(0, list(range(9)), [0, 1, 2]), new_sequence(1, [1, 2], [3])],
            [(0, 0, 5, False), (1, 0, 2, True)],
        ),
    )
    assert arrays.sample_at.tolist() == [6]
    assert arrays.sample_rows.tolist() == [1]


def test_new_block_is_in_the_table_before_its_first_token():
    rows = SequenceRows(1, 16, BLOCK)
    arrays_of(rows, batch([new_sequence(0, [1, 2, 3, 4], [7])], [(0, 0, 4, True)]))
    rows.append_tokens(np.array([0]), np.array([4]), np.array([9]))
    arrays = arrays_of(rows, batch([], [(0, 4, 1, True)], blocks=[(0, 2)]))
    assert arrays.slot_mapping.tolist() == [2 * BLOCK]
    assert arrays.block_tables.tolist() == [[7, 2]]


def test_row_of_a_longer_sequence_is_clean_for_the_next_owner():
    rows = SequenceRows(1, 16, BLOCK)
    arrays_of(rows, batch([new_sequence(0, list(range(50, 62)), [4, 5, 6])], [(0, 0, 12, True)]))
    arrays = arrays_of(rows, batch([new_sequence(0, [1, 2], [9])], [(0, 0, 2, True)]))
    assert arrays.input_ids.tolist() == [1, 2]
    assert arrays.slot_mapping.tolist() == [36, 37]
    # The next block goes behind the new owner's single one.
    rows.append_tokens(np.array([0, 0, 0]), np.array([2, 3, 4]), np.array([3, 4, 5]))
    assert arrays_of(rows, batch([], [(0, 4, 1, True)], blocks=[(0, 8)])).slot_mapping.tolist() == [32]


def test_slots_beyond_2_31_do_not_overflow():
    high = 2**31 // 16 + 5  # a block id whose slots need more than 32 bits
    arrays = arrays_of(SequenceRows(1, 64, 16), batch([new_sequence(0, [1] * 3, [high])], [(0, 0, 3, True)]))
    assert arrays.slot_mapping.dtype == np.int64
    assert arrays.slot_mapping.tolist() == [high * 16, high * 16 + 1, high * 16 + 2]


def test_tokens_outside_the_block_table_are_an_error_not_a_stray_write():
    rows = SequenceRows(1, 16, BLOCK)
    with pytest.raises(AssertionError):
        arrays_of(rows, batch([new_sequence(0, list(range(5)), [0])], [(0, 0, 5, True)]))


def test_arrays_of_a_step_do_not_change_with_the_rows():
    rows = SequenceRows(1, 16, BLOCK)
    arrays = arrays_of(rows, batch([new_sequence(0, [1, 2, 3], [0])], [(0, 0, 3, True)]))
    before = {name: value.copy() for name, value in vars(arrays).items()}
    arrays_of(rows, batch([new_sequence(0, [9, 9, 9, 9], [5])], [(0, 0, 4, True)]))
    for name, value in before.items():
        np.testing.assert_array_equal(getattr(arrays, name), value)
