"""Which sequences run in the next step, with how many tokens: admission, chunked prefill, decode, preemption.

There is no prefill phase and no decode phase: every sequence has a number of tokens and a cursor of computed ones,
and a step moves cursors towards the ends. With overlap, `schedule()` for step N + 1 runs before `postprocess()` for
step N; nothing here knows which, because the cursor moves at scheduling and the device runs steps in order.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from nanoinfer.config import SchedulePolicy
from nanoinfer.engine.batch import NewSequence, ScheduledBatch, StepResult
from nanoinfer.engine.block_manager import BlockManager, PrefixMatch
from nanoinfer.engine.sequence import FinishReason, Sequence, SequenceStatus


@dataclass(slots=True)
class ScheduledStep:
    """A step while it is decided and while it runs; the lists are those of ScheduledBatch, which shares them."""

    time: float
    number: int = -1  # counts submitted steps
    sequences: list[Sequence] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    new_sequences: list[NewSequence] = field(default_factory=list)
    new_blocks: list[tuple[int, int]] = field(default_factory=list)
    num_decodes: int = 0
    ended: list[Sequence] = field(default_factory=list)  # finished while scheduling: the pool has no room for them
    prefill_tokens: int = 0
    prompt_tokens: int = 0  # of the sequences scheduled for the first time
    cached_tokens: int = 0  # how many of those the prefix cache had
    preemptions: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.sequences

    def to_batch(self) -> ScheduledBatch:
        return ScheduledBatch(
            step=self.number,
            new_sequences=self.new_sequences,
            new_blocks=self.new_blocks,
            rows=self.rows,
            starts=self.starts,
            query_lens=self.query_lens,
            is_sampled=self.is_sampled,
            num_decodes=self.num_decodes,
        )


class Scheduler:
    """First come, first served, under four budgets: sequences, tokens per step, blocks, and tokens per sequence."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prefill_chunk: int | None = None,
        policy: SchedulePolicy = "mixed",
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs, (max_num_batched_tokens, max_num_seqs)
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_prefill_chunk = max_prefill_chunk or max_num_batched_tokens
        self.policy = policy
        self.waiting: deque[Sequence] = deque()  # in order of arrival; preempted sequences come back to the front
        self.running: list[Sequence] = []  # in order of arrival
        self._max_num_seqs = max_num_seqs
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def unfinished(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    # -- scheduling ------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> ScheduledStep:
        """Decide the next step and move the cursors of its sequences; the step is empty if nothing can run now.

        `now` is on the engine's clock, in seconds, as in the methods below.
        """
        step = ScheduledStep(time=now)
        if self.policy == "mixed":
            self._schedule_decodes(step)
            self._schedule_prefills(step, self.max_num_batched_tokens - step.num_decodes)
        else:
            self._schedule_prefills(step, self.max_num_batched_tokens)
            if step.is_empty:
                self._schedule_decodes(step)
        return step

    def _schedule_decodes(self, step: ScheduledStep) -> None:
        """Give every decoding sequence its one token, oldest first."""
        block_size = self.block_manager.block_size
        i = 0
        while i < len(self.running):
            seq = self.running[i]
            position = seq.num_computed_tokens
            # Not where it is in its prompt, has several tokens to compute, or waits for its last token to arrive.
            if position < seq.prompt_len or seq.num_tokens - position != 1 or seq.num_tokens >= seq.max_len:
                i += 1
                continue
            if position == len(seq.block_table) * block_size:  # blocks_needed(seq, 1), inlined
                if self.block_manager.num_available_blocks == 0 and not self._make_room(seq, step):
                    # Gone from `running`, or waiting for its last token to arrive before it ends.
                    i += seq.status is SequenceStatus.RUNNING
                    continue
                step.new_blocks.append((seq.row, self.block_manager.append_block(seq)))
            step.sequences.append(seq)
            step.rows.append(seq.row)
            step.starts.append(position)
            seq.num_computed_tokens = position + 1
            seq.num_tokens += 1
            i += 1
        step.num_decodes = len(step.sequences)
        step.query_lens.extend([1] * step.num_decodes)
        step.is_sampled.extend([True] * step.num_decodes)

    def _make_room(self, seq: Sequence, step: ScheduledStep) -> bool:
        """Free a block for `seq` by preempting the newest running sequences; False if `seq` cannot have one."""
        while self.block_manager.num_available_blocks == 0:
            newest = self.running[-1]
            if newest is not seq:
                self._preempt(newest, step)
            elif len(self.running) > 1:
                self._preempt(seq, step)
                return False
            else:
                # Alone in the pool and it is full: no retry could ever help. Its last token may be on its way.
                if not seq.has_token_in_flight:
                    self._end_at_capacity(seq, step)
                return False
        return True

    def _end_at_capacity(self, seq: Sequence, step: ScheduledStep) -> None:
        blocks = self.block_manager
        seq.error = (
            "capacity",
            f"the KV pool ({blocks.num_blocks} blocks of {blocks.block_size} tokens) is full after {seq.num_tokens} "
            "tokens of this sequence alone; give it more memory or lower max_tokens.",
        )
        self.finish(seq, FinishReason.ERROR, step.time)
        step.ended.append(seq)

    def _preempt(self, seq: Sequence, step: ScheduledStep) -> None:
        self._release(seq)
        self.running.remove(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)
        seq.num_preemptions += 1
        step.preemptions += 1

    def _schedule_prefills(self, step: ScheduledStep, budget: int) -> None:
        """Spend `budget` tokens on prefill chunks: running sequences that are half-way first, then waiting ones."""
        for seq in self.running:
            # Those that are in their prompt or have several tokens to compute; the others decode.
            if seq.num_computed_tokens < seq.prompt_len or seq.num_tokens - seq.num_computed_tokens != 1:
                if not budget:
                    break
                budget -= self._schedule_chunk(seq, step, budget)
        # A step that had to preempt has no room for newcomers, least of all for those that it has just put out.
        skipped: list[Sequence] = []
        while budget and self.waiting and self._free_rows and not step.preemptions:
            if len(skipped) == self._max_num_seqs:
                break  # looking at all of a long queue in each step would cost more than it could find
            if len(self.running) >= self.block_manager.num_available_blocks:
                break  # nobody fits, see `_fits`; everyone needs at least one block
            seq = self.waiting.popleft()
            # A sequence preempted a moment ago needs its last token's id before it can be computed again.
            match = None if seq.has_token_in_flight else self.block_manager.match_prefix(seq, verify=False)
            if match is None or match.awaits_block:
                skipped.append(seq)
            elif not self._fits(match) or not self._fits(match := self.block_manager.match_prefix(seq)):
                skipped.append(seq)
                break
            else:
                self._admit(seq, match, step)
                budget -= self._schedule_chunk(seq, step, budget)
        self.waiting.extendleft(reversed(skipped))

    def _fits(self, match: PrefixMatch) -> bool:
        """Whether a newcomer's blocks are available, with one to spare for each running sequence.

        Without the spare blocks a preempted sequence would come back at once, only to be put out again.
        """
        return match.blocks_to_take + len(self.running) <= self.block_manager.num_available_blocks

    def _admit(self, seq: Sequence, match: PrefixMatch, step: ScheduledStep) -> None:
        self.block_manager.allocate(seq, match)
        seq.status = SequenceStatus.RUNNING
        seq.row = self._free_rows.pop()
        insort(self.running, seq, key=lambda other: other.arrival_order)
        if seq.first_scheduled_time is None:
            seq.first_scheduled_time = step.time
            seq.num_cached_tokens = seq.num_computed_tokens
            step.prompt_tokens += seq.prompt_len
            step.cached_tokens += seq.num_computed_tokens
        step.new_sequences.append(
            NewSequence(
                row=seq.row,
                token_ids=list(seq.token_ids),
                prompt_len=seq.prompt_len,
                block_table=list(seq.block_table),
                sampling=seq.sampling,
                seed=seq.seed,
                stop_token_ids=tuple(sorted(seq.stop_token_ids)),
            )
        )

    def _schedule_chunk(self, seq: Sequence, step: ScheduledStep, budget: int) -> int:
        """Schedule the next tokens of `seq` within its budget; samples only if they are the last. Returns how many."""
        count = min(seq.num_uncomputed_tokens, budget, self.max_prefill_chunk)
        completes = count == seq.num_uncomputed_tokens
        step.sequences.append(seq)
        step.rows.append(seq.row)
        step.starts.append(seq.num_computed_tokens)
        step.query_lens.append(count)
        step.is_sampled.append(completes)
        seq.num_computed_tokens += count
        seq.num_tokens += completes
        step.prefill_tokens += count
        return count

    # -- after the step --------------------------------------------------------------------------------------------

    def postprocess(self, step: ScheduledStep, result: StepResult, now: float) -> list[Sequence]:
        """Take in what a step sampled: append tokens, publish full blocks, finish sequences at their end.

        Returns the sequences that got a token, in the order of `result.token_ids` but without those that ended
        (by a stop, an abort) while the step was under way.
        """
        block_size = self.block_manager.block_size
        num_sampled = 0
        grown = []
        for i, seq in enumerate(step.sequences):
            token_id = logprobs = None
            if step.is_sampled[i]:
                token_id = result.token_ids[num_sampled]
                logprobs = result.logprobs[num_sampled] if result.logprobs else None
                num_sampled += 1
            if seq.status is SequenceStatus.FINISHED:
                continue
            end = step.starts[i] + step.query_lens[i]
            # A preempted sequence has lost its blocks, but a token sampled before that is as good as any.
            if end // block_size > seq.num_published_blocks and seq.status is SequenceStatus.RUNNING:
                self.block_manager.publish(seq, end)
            if token_id is None:
                continue
            seq.token_ids.append(token_id)
            seq.token_times.append(now)
            if logprobs is not None:
                seq.logprobs.append(logprobs)
            grown.append(seq)
            if token_id in seq.stop_token_ids and seq.num_output_tokens > seq.sampling.min_tokens:
                seq.stop_reason = token_id
                self.finish(seq, FinishReason.STOP, now)
            elif len(seq.token_ids) >= seq.max_len:
                self.finish(seq, FinishReason.LENGTH, now)
        return grown

    def finish(self, seq: Sequence, reason: FinishReason, now: float) -> None:
        """End a sequence in any state and release all that it holds: the one way out for stops, aborts and errors.

        One that has ended already (by its last token) may get a better reason: a stop string that this completed.
        """
        if seq.status is SequenceStatus.RUNNING:
            self._release(seq)
            self.running.remove(seq)
        elif seq in self.waiting:  # not so if an interrupt came before it was added
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.finished_time = now

    def rewind(self, unfinished: Iterable[Sequence]) -> None:
        """Put all `unfinished` sequences back into `waiting`, after an interrupt or a failure at any moment.

        What lost steps were to compute is computed again. Nothing that is kept here is trusted: queues, rows and
        blocks are set up anew from the sequences.
        """
        self.running = []
        self.waiting = deque(sorted(unfinished, key=lambda seq: seq.arrival_order))
        self._free_rows = list(range(self._max_num_seqs - 1, -1, -1))
        self.block_manager.release_all()
        for seq in self.waiting:
            seq.status, seq.row = SequenceStatus.WAITING, -1
            seq.block_table.clear()
            seq.num_published_blocks = seq.num_computed_tokens = 0
            seq.num_tokens = len(seq.token_ids)

    def _release(self, seq: Sequence) -> None:
        self.block_manager.free(seq)
        self._free_rows.append(seq.row)
        seq.row = -1
