"""LLMEngine: takes requests, runs steps (schedule -> run -> postprocess), turns tokens into text and events."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanoinfer.config import SamplingParams
from nanoinfer.engine.batch import Executor, StepHandle, StepResult
from nanoinfer.engine.cache_snapshot import CacheSnapshot
from nanoinfer.engine.events import EventStream, FinishedSequence, RequestTiming, StepEvent, StepKind
from nanoinfer.engine.outputs import CompletionOutput, OutputDelta, OutputError, RequestOutput, Usage
from nanoinfer.engine.scheduler import ScheduledStep, Scheduler
from nanoinfer.engine.sequence import FinishReason, Sequence, SequenceStatus
from nanoinfer.errors import EngineError, RequestError

if TYPE_CHECKING:
    from nanoinfer.engine.detokenizer import IncrementalDetokenizer

Clock = Callable[[], float]
DetokenizerFactory = Callable[[List[int], tuple[str, ...], int], "IncrementalDetokenizer"]


@dataclass(slots=True)
class _Sample:
    """A sequence with its text so far."""

    seq: Sequence
    detokenizer: IncrementalDetokenizer | None
    num_detokenized: int = 0  # output tokens that the detokenizer has seen
    num_delivered: int = 0  # output tokens that a delta has carried


@dataclass(slots=True)
class _Request:
    """What the caller submitted: one prompt, n samples."""

    request_id: str
    prompt: str | None
    sampling: SamplingParams
    stream: bool
    samples: list[_Sample]
    num_unfinished: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_unfinished = len(self.samples)

    @property
    def needs_text_each_step(self) -> bool:
        return self.stream or bool(self.sampling.stop)


class LLMEngine:
    """The control plane's front. Everything that touches a device or a tokenizer is passed in.

    `detokenizer(prompt_token_ids, stop_strings, min_tokens)` makes the text side of a sequence; None where there is
    no tokenizer: texts are then empty. `eos_token_ids` end every sequence unless ignore_eos. `max_model_len` is the
    model's own limit in tokens; what the pool can hold is known from the block manager. `overlap` schedules a step
    while the one before still runs. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        detokenizer: DetokenizerFactory | None,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        seed: int = 0,
        overlap: bool = False,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.events = EventStream()
        self._executor = executor
        self._detokenizer = detokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._random = random.Random(seed)
        self._max_in_flight = 1 if overlap else 0
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._in_flight: deque[tuple[ScheduledStep, StepHandle, float]] = deque()
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
        limit = self._max_model_len
        if sampling.max_tokens is None:
            limit = min(limit, self.pool_capacity)
        else:
            limit = min(limit, len(prompt_token_ids) + sampling.max_tokens)
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
                max_tokens=limit,
                stop_token_ids=eos | frozenset(sampling.stop_token_ids),
                seed=base_seed + i,
            )
            self._num_requests += 1
            detokenizer = None
            if self._detokenizer is not None:
                detokenizer = self._detokenizer(prompt_token_ids, sampling.stop, sampling.min_tokens)
            samples.append(_Sample(seq, detokenizer))
            self.scheduler.add(seq)
        self._requests[request_id] = _Request(request_id, prompt, sampling, stream, samples)

    def _refuse_impossible(self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams) -> None:
        length = len(prompt_token_ids)
        if request_id in self._requests:
            raise RequestError(f"request id '{request_id}' is already running; use another.", "duplicate_id")
        if not length:
            raise RequestError("the prompt is empty; give at least one token.", "empty_prompt")
        for token in (*prompt_token_ids, *sampling.stop_token_ids):
            if not 0 <= token < self._vocab_size:
                raise RequestError(f"token id {token} is outside 0..{self._vocab_size - 1}.", "invalid_token")
        if sampling.stop and self._detokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none.", "no_tokenizer")
        if length + 1 > self._max_model_len:
            raise RequestError(
                f"the prompt has {length} tokens, but this model takes {self._max_model_len} with at least one "
                "for the answer; shorten it.",
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
        request = self._requests.get(request_id)
        if request is None:
            return None
        now = self._clock()
        ended = [sample for sample in request.samples if sample.seq.status is not SequenceStatus.FINISHED]
        for sample in ended:
            self.scheduler.finish(sample.seq, FinishReason.ABORT, now)
            self._read_text(sample, request)
        del self._requests[request_id]
        self._publish(ScheduledStep(time=now), StepResult([]), now, [], [sample.seq for sample in ended])
        return _request_output(request)

    def abort_all(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> list[OutputDelta]:
        """Run one step and return what became new: each new piece of a streamed request, others when they are done.

        If the step fails or is interrupted, the sequences that it was computing are put back to be computed again,
        and the exception goes on to the caller.
        """
        try:
            return self._step()
        except BaseException:
            self._in_flight.clear()
            self.scheduler.rewind()
            raise

    def _step(self) -> list[OutputDelta]:
        started = self._clock()
        step = self.scheduler.schedule(started)
        scheduled = self._clock()
        if not step.is_empty:
            self._in_flight.append((step, self._executor.submit(step.to_batch(self._num_steps)), scheduled - started))
            self._num_steps += 1
            if len(self._in_flight) <= self._max_in_flight:
                # Its result is fetched when the next step is on its way, so that the device never waits for us.
                return self._deliver_ended(step)
        deltas = self._deliver_ended(step)
        if self._in_flight:
            deltas += self._complete(*self._in_flight.popleft())
        elif not deltas and self.scheduler.has_unfinished:
            raise EngineError(f"the scheduler made no progress: {list(self.scheduler.unfinished())[:4]}")
        return deltas

    def _deliver_ended(self, step: ScheduledStep) -> list[OutputDelta]:
        if not step.ended:
            return []
        self._publish(ScheduledStep(time=step.time), StepResult([]), step.time, [], step.ended)
        return [delta for seq in step.ended if (delta := self._deliver(seq)) is not None]

    def _complete(self, step: ScheduledStep, handle: StepHandle, schedule_s: float) -> list[OutputDelta]:
        result = handle.result()
        now = self._clock()
        grown = self.scheduler.postprocess(step, result, now)
        deltas = [delta for seq in grown if (delta := self._deliver(seq)) is not None]
        finished = [seq for seq in grown if seq.status is SequenceStatus.FINISHED]
        self._publish(step, result, now, grown, finished, schedule_s)
        return deltas

    def _deliver(self, seq: Sequence) -> OutputDelta | None:
        """The delta for a sequence that grew or ended; None if nothing is to be handed out now."""
        request = self._requests[seq.request_id]
        sample = request.samples[seq.index]
        text = ""
        if request.needs_text_each_step or seq.status is SequenceStatus.FINISHED:
            text = self._read_text(sample, request)
        output = None
        if seq.status is SequenceStatus.FINISHED:
            request.num_unfinished -= 1
            if not request.num_unfinished:
                del self._requests[seq.request_id]
                output = _request_output(request)
        if not request.stream:
            return None if output is None else OutputDelta(seq.request_id, seq.index, "", [], None, output)
        token_ids = seq.token_ids[seq.prompt_len + sample.num_delivered :]
        sample.num_delivered = seq.num_output_tokens
        reason = seq.finish_reason.value if seq.finish_reason else None
        return OutputDelta(seq.request_id, seq.index, text, token_ids, reason, output)

    def _read_text(self, sample: _Sample, request: _Request) -> str:
        """Detokenize what is new, end the sequence at a stop string, and return the text that may be shown."""
        seq, detokenizer = sample.seq, sample.detokenizer
        if detokenizer is None:
            return ""
        # The token that ended a sequence is never part of its text.
        end = seq.num_output_tokens - isinstance(seq.stop_reason, int)
        text = detokenizer.append(seq.token_ids[seq.prompt_len + sample.num_detokenized : seq.prompt_len + end])
        sample.num_detokenized = end
        if detokenizer.stopped is not None:
            seq.stop_reason = detokenizer.stopped
            if seq.status is SequenceStatus.FINISHED:
                seq.finish_reason = FinishReason.STOP
            else:
                self.scheduler.finish(seq, FinishReason.STOP, seq.token_times[-1])
        if seq.status is SequenceStatus.FINISHED:
            text += detokenizer.finish()
        return text

    # -- events ----------------------------------------------------------------------------------------------------

    def _publish(
        self,
        step: ScheduledStep,
        result: StepResult,
        now: float,
        grown: list[Sequence],
        finished: list[Sequence],
        schedule_s: float = 0.0,
    ) -> None:
        blocks = self.scheduler.block_manager
        evictions = blocks.num_evictions - self._last_evictions
        self._last_evictions = blocks.num_evictions
        event = StepEvent(
            step=self._num_steps,
            time=now,
            kind=_kind(step),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            prefill_tokens=step.prefill_tokens,
            decode_tokens=step.num_decodes,
            cached_tokens=step.cached_tokens,
            prompt_tokens=step.prompt_tokens,
            blocks_active=blocks.num_active_blocks,
            blocks_cached=blocks.num_cached_blocks,
            blocks_free=blocks.num_free_blocks - blocks.num_cached_blocks,
            evictions=evictions,
            preemptions=step.preemptions,
            emitted=tuple((seq.request_id, 1) for seq in grown),
            finished=tuple(_finished(seq) for seq in finished),
            schedule_ms=schedule_s * 1e3,
            device_ms=result.device_ms,
            step_ms=(now - step.time) * 1e3,
            used_graph=result.used_graph,
        )
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


def _kind(step: ScheduledStep) -> StepKind:
    if step.is_empty:
        return "idle"
    if not step.num_decodes:
        return "prefill"
    return "mixed" if step.prefill_tokens else "decode"


def _finished(seq: Sequence) -> FinishedSequence:
    assert seq.finish_reason is not None, seq
    return FinishedSequence(
        request_id=seq.request_id,
        index=seq.index,
        reason=seq.finish_reason.value,
        prompt_tokens=seq.prompt_len,
        cached_tokens=seq.num_cached_tokens,
        output_tokens=seq.num_output_tokens,
        preemptions=seq.num_preemptions,
        timing=seq.timing,
        token_times=tuple(seq.token_times),
    )


def _completion_output(sample: _Sample) -> CompletionOutput:
    seq = sample.seq
    assert seq.finish_reason is not None, seq
    stopped_by_eos = isinstance(seq.stop_reason, int) and seq.stop_reason not in seq.sampling.stop_token_ids
    return CompletionOutput(
        index=seq.index,
        text=sample.detokenizer.text if sample.detokenizer else "",
        token_ids=seq.output_token_ids,
        finish_reason=seq.finish_reason.value,
        stop_reason=None if stopped_by_eos else seq.stop_reason,
        logprobs=seq.logprobs if seq.sampling.logprobs is not None else None,
        error=OutputError(*seq.error) if seq.error else None,
        timing=seq.timing,
        preemptions=seq.num_preemptions,
    )


def _request_output(request: _Request) -> RequestOutput:
    sequences = [sample.seq for sample in request.samples]
    first = sequences[0]
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=first.token_ids[: first.prompt_len],
        outputs=[_completion_output(sample) for sample in request.samples],
        usage=Usage(
            prompt_tokens=first.prompt_len,
            completion_tokens=sum(seq.num_output_tokens for seq in sequences),
            cached_tokens=first.num_cached_tokens,
        ),
        timing=_merge([seq.timing for seq in sequences]),
    )


def _merge(timings: list[RequestTiming]) -> RequestTiming:
    """The request's times: the earliest start and first token of its samples, the latest last token and end."""
    return RequestTiming(
        arrival=timings[0].arrival,
        first_scheduled=min((t.first_scheduled for t in timings if t.first_scheduled is not None), default=None),
        first_token=min((t.first_token for t in timings if t.first_token is not None), default=None),
        last_token=max((t.last_token for t in timings if t.last_token is not None), default=None),
        finished=max((t.finished for t in timings if t.finished is not None), default=None),
    )
