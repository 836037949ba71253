"""LLMEngine: takes requests, runs steps (schedule -> run -> postprocess), turns tokens into text and events."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoinfer.config import SamplingParams
from nanoinfer.engine.batch import Executor, StepHandle, StepResult
from nanoinfer.engine.cache_snapshot import CacheSnapshot
from nanoinfer.engine.events import EventStream
from nanoinfer.engine.outputs import OutputDelta, RequestOutput
from nanoinfer.engine.report import request_output, step_event
from nanoinfer.engine.scheduler import ScheduledStep, Scheduler
from nanoinfer.engine.sequence import FinishReason, Sequence, SequenceStatus
from nanoinfer.errors import EngineError, RequestError

if TYPE_CHECKING:
    from nanoinfer.engine.detokenizer import IncrementalDetokenizer

Clock = Callable[[], float]
DetokenizerFactory = Callable[[list[int], tuple[str, ...], int], "IncrementalDetokenizer"]


@dataclass(slots=True)
class _Sample:
    """A sequence, its text so far, and how much of it the caller has."""

    seq: Sequence
    detokenizer: IncrementalDetokenizer | None
    num_detokenized: int = 0  # output tokens that the detokenizer has seen
    num_delivered: int = 0  # output tokens that a delta has carried
    is_done: bool = False  # its end has been taken in


@dataclass(slots=True)
class _Request:
    """What the caller submitted: one prompt, n samples."""

    request_id: str
    prompt: str | None
    sampling: SamplingParams
    stream: bool
    samples: list[_Sample]

    @property
    def needs_text_each_step(self) -> bool:
        return self.stream or bool(self.sampling.stop)

    def output(self) -> RequestOutput:
        texts = [sample.detokenizer.text if sample.detokenizer else "" for sample in self.samples]
        return request_output(self.request_id, self.prompt, [sample.seq for sample in self.samples], texts)


class LLMEngine:
    """The control plane's front. Everything that touches a device or a tokenizer is passed in.

    `make_detokenizer(prompt_token_ids, stop_strings, min_tokens)` makes the text side of a sequence; without one (the
    model has no tokenizer) texts are empty. `eos_token_ids` end every sequence unless ignore_eos. `max_model_len` is
    the model's own limit in tokens, or less where the option of that name says so (`is_lowered`); what the pool can
    hold is known from the block manager. `overlap` schedules a step while the one before still runs. `clock` is
    monotonic, in seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        make_detokenizer: DetokenizerFactory | None,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        is_lowered: bool = False,
        seed: int = 0,
        overlap: bool = False,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.events = EventStream()
        self._executor = executor
        self._make_detokenizer = make_detokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(token for token in eos_token_ids if token < vocab_size)
        self._max_model_len = max_model_len
        self._is_lowered = is_lowered
        self._random = random.Random(seed)
        self._max_in_flight = 1 if overlap else 0
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._in_flight: deque[tuple[ScheduledStep, StepHandle, float]] = deque()
        self._to_deliver: deque[Sequence] = deque()  # grew or ended, and the caller has not heard of it
        self._deltas: list[OutputDelta] = []  # what the caller gets next
        self._last_completion = 0.0
        self._num_requests = 0
        self._num_steps = 0
        self._last_evictions = 0

    # -- requests --------------------------------------------------------------------------------------------------

    @property
    def pool_capacity(self) -> int:
        """Tokens that the KV pool can hold, for one sequence alone."""
        blocks = self.scheduler.block_manager
        return blocks.num_blocks * blocks.block_size

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        prompt: str | None = None,
        stream: bool = False,
    ) -> None:
        """Queue a request; RequestError if it could never run, whatever else happens."""
        self._refuse_impossible(request_id, prompt_token_ids, sampling)
        now = self._clock()
        wanted = self.pool_capacity if sampling.max_tokens is None else len(prompt_token_ids) + sampling.max_tokens
        eos = frozenset() if sampling.ignore_eos else self._eos_token_ids
        base_seed = self._random.getrandbits(62) if sampling.seed is None else sampling.seed
        samples = []
        for i in range(sampling.n):
            seq = Sequence(
                request_id,
                i,
                prompt_token_ids,
                sampling,
                arrival_order=self._num_requests,
                arrival_time=now,
                max_len=min(self._max_model_len, wanted),
                stop_token_ids=eos | frozenset(sampling.stop_token_ids),
                seed=base_seed + i,
            )
            self._num_requests += 1
            detokenizer = None
            if self._make_detokenizer is not None:
                detokenizer = self._make_detokenizer(prompt_token_ids, sampling.stop, sampling.min_tokens)
            samples.append(_Sample(seq, detokenizer))
        self._requests[request_id] = _Request(request_id, prompt, sampling, stream, samples)
        for sample in samples:
            self.scheduler.add(sample.seq)

    def _refuse_impossible(self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams) -> None:
        length = len(prompt_token_ids)
        if request_id in self._requests:
            raise RequestError(f"request id '{request_id}' is already running; use another.", "duplicate_id")
        if not length:
            raise RequestError("the prompt is empty; give at least one token.", "empty_prompt")
        token_ids = (*prompt_token_ids, *sampling.stop_token_ids)
        for token in (min(token_ids), max(token_ids)):
            if not 0 <= token < self._vocab_size:
                raise RequestError(f"token id {token} is outside 0..{self._vocab_size - 1}.", "invalid_token")
        if sampling.stop and self._make_detokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none.", "no_tokenizer")
        if length + 1 > self._max_model_len:
            taker, advice = (
                ("--max-model-len allows", " or raise that") if self._is_lowered else ("this model takes", "")
            )
            raise RequestError(
                f"the prompt has {length} tokens, but {taker} {self._max_model_len} with at least one for the answer; "
                f"shorten it{advice}.",
                "prompt_too_long",
            )
        if length + 1 > self.pool_capacity:
            raise RequestError(
                f"the prompt has {length} tokens, but the KV pool holds {self.pool_capacity} with at least one for the "
                "answer; shorten it, or give the pool more memory (--num-blocks).",
                "exceeds_kv_pool",
            )

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, in whatever state it is, and return what it has; None if it is not running."""
        # An interrupted step may have left news of it.
        self._deltas = [delta for delta in self._deltas if delta.request_id != request_id]
        request = self._requests.get(request_id)
        if request is None:
            return None
        now = self._clock()
        ended = []
        for sample in request.samples:
            if sample.seq.status is not SequenceStatus.FINISHED:
                self.scheduler.finish(sample.seq, FinishReason.ABORT, now)
                ended.append(sample.seq)
            if not sample.is_done:
                self._read_text(sample)
        del self._requests[request_id]
        self._discard_unwanted()
        self._emit_idle_event(now, ended)
        return request.output()

    def is_running(self, request_id: str) -> bool:
        return request_id in self._requests

    def abort_all(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> list[OutputDelta]:
        """Run one step and return what became new: each new piece of a streamed request, others when they are done.

        If the step fails or is interrupted, at whatever moment, the sequences that it was computing are put back to be
        computed again, the exception goes on to the caller, and the next step returns what this one could not.
        """
        try:
            self._step()
            deltas, self._deltas = self._deltas, []
            return deltas
        except BaseException:
            self._recover()
            raise

    def _recover(self) -> None:
        self._discard_in_flight()
        samples = [sample for request in self._requests.values() for sample in request.samples]
        self.scheduler.rewind(s.seq for s in samples if s.seq.status is not SequenceStatus.FINISHED)
        self._to_deliver = deque(s.seq for s in samples if s.seq.status is SequenceStatus.FINISHED and not s.is_done)

    def _discard_unwanted(self) -> None:
        """Where no request is left, what is under way computes tokens of ended sequences, and nobody would fetch it."""
        if self._in_flight and not self._requests:
            self._discard_in_flight()

    def _discard_in_flight(self) -> None:
        self._in_flight.clear()
        self._executor.discard()

    def _step(self) -> None:
        """Submit a step if one can be, then take in the oldest under way if nothing was submitted or too many are;
        where there is none to take in, hand out what ended without a step."""
        started = self._clock()
        step = self.scheduler.schedule(started)
        scheduled = self._clock()
        self._to_deliver.extend(step.ended)
        if not step.is_empty:
            step.number = self._num_steps
            self._in_flight.append((step, self._executor.submit(step.to_batch()), scheduled - started))
            self._num_steps += 1
            if len(self._in_flight) <= self._max_in_flight and not self._to_deliver:
                # Its result is fetched when the next step is on its way, so that the device never waits for us.
                return
        elif not self._in_flight and not self._to_deliver and self.scheduler.has_unfinished:
            raise EngineError(f"the scheduler made no progress: {list(self.scheduler.unfinished())[:4]}")
        if self._in_flight and (step.is_empty or len(self._in_flight) > self._max_in_flight):
            self._complete()
        elif self._to_deliver:
            self._emit_idle_event(self._clock(), self._deliver_all())

    def _complete(self) -> None:
        """Take in the result of the oldest step under way."""
        step, handle, schedule_s = self._in_flight.popleft()
        result = handle.result()
        now = self._clock()
        grown = self.scheduler.postprocess(step, result, now)
        self._to_deliver.extend(grown)
        self._emit_event(step, result, now, grown, self._deliver_all(), schedule_s)
        self._last_completion = now
        self._discard_unwanted()

    def _deliver_all(self) -> list[Sequence]:
        """Turn all news into deltas; returns the sequences that have come to their end."""
        ended = []
        while self._to_deliver:
            seq = self._to_deliver[0]
            request = self._requests.get(seq.request_id)
            if request is not None:
                self._deliver(request, request.samples[seq.index])
                if seq.status is SequenceStatus.FINISHED:
                    ended.append(seq)
            self._to_deliver.popleft()
        return ended

    def _deliver(self, request: _Request, sample: _Sample) -> None:
        """Add the delta for a sequence that grew or ended, if there is anything to hand out now."""
        seq = sample.seq
        text = ""
        if request.needs_text_each_step or seq.status is SequenceStatus.FINISHED:
            text = self._read_text(sample)
        output = None
        if seq.status is SequenceStatus.FINISHED:
            sample.is_done = True
            if all(other.is_done for other in request.samples):
                output = request.output()
        if request.stream:
            token_ids = seq.token_ids[seq.prompt_len + sample.num_delivered :]
            sample.num_delivered = seq.num_output_tokens
            reason = seq.finish_reason.value if seq.finish_reason else None
            self._deltas.append(OutputDelta(seq.request_id, seq.index, text, token_ids, reason, output))
        elif output is not None:
            self._deltas.append(OutputDelta(seq.request_id, seq.index, "", [], None, output))
        if output is not None:
            del self._requests[seq.request_id]

    def _read_text(self, sample: _Sample) -> str:
        """Detokenize what is new, end the sequence at a stop string, and return the text that may be shown."""
        seq, detokenizer = sample.seq, sample.detokenizer
        if detokenizer is None:
            return ""
        # The token that ended a sequence is never part of its text.
        end = seq.num_output_tokens - isinstance(seq.stop_reason, int)
        text = detokenizer.append(seq.token_ids[seq.prompt_len + sample.num_detokenized : seq.prompt_len + end])
        sample.num_detokenized = end
        if seq.status is SequenceStatus.FINISHED:
            text += detokenizer.finish()
        if detokenizer.stopped is not None:
            seq.stop_reason = detokenizer.stopped
            self.scheduler.finish(seq, FinishReason.STOP, seq.token_times[-1])
        return text

    def _emit_idle_event(self, now: float, ended: list[Sequence]) -> None:
        """Say that sequences have ended without a step."""
        self._emit_event(ScheduledStep(time=now, number=self._num_steps - 1), StepResult([]), now, [], ended)

    def _emit_event(
        self,
        step: ScheduledStep,
        result: StepResult,
        now: float,
        grown: list[Sequence],
        finished: list[Sequence],
        schedule_s: float = 0.0,
    ) -> None:
        evictions = self.scheduler.block_manager.num_evictions
        # A step that was submitted while another one ran began, for the device, when that one was done.
        step_s = now - max(step.time, self._last_completion)
        event = step_event(
            step,
            result,
            self.scheduler,
            now=now,
            step_s=step_s,
            schedule_s=schedule_s,
            evictions=evictions - self._last_evictions,
            grown=grown,
            finished=finished,
        )
        self._last_evictions = evictions
        self.events.publish(event)

    # -- inspection ------------------------------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """Sentences for every broken invariant of the KV pool; an empty list if all is well."""
        return self.scheduler.block_manager.check_integrity(self.scheduler.unfinished())

    def cache_snapshot(self) -> CacheSnapshot:
        return self.scheduler.block_manager.snapshot(self.scheduler.unfinished())

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that no running sequence uses."""
        self.scheduler.block_manager.reset_prefix_cache()
