"""Records about sequences and steps, built from the engine's own objects: events, finished sequences, outputs."""

from __future__ import annotations

from nanoinfer.engine.batch import StepResult
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.events import FinishedSequence, RequestTiming, StepEvent, StepKind
from nanoinfer.engine.outputs import CompletionOutput, OutputError, RequestOutput, Usage
from nanoinfer.engine.scheduler import ScheduledStep, Scheduler
from nanoinfer.engine.sequence import Sequence


def step_event(
    step: ScheduledStep,
    result: StepResult,
    scheduler: Scheduler,
    *,
    now: float,
    step_s: float,
    schedule_s: float,
    evictions: int,
    grown: list[Sequence],
    finished: list[Sequence],
) -> StepEvent:
    """What a step did, and the scheduler's state after it. Times in seconds."""
    blocks: BlockManager = scheduler.block_manager
    return StepEvent(
        step=step.number,
        time=now,
        kind=_kind(step),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        prefill_tokens=step.prefill_tokens,
        decode_tokens=step.num_decodes,
        cached_tokens=step.cached_tokens,
        prompt_tokens=step.prompt_tokens,
        blocks_active=blocks.num_active_blocks,
        blocks_cached=blocks.num_cached_blocks,
        blocks_free=blocks.num_free_blocks,
        evictions=evictions,
        preemptions=step.preemptions,
        emitted=tuple([seq.one_token for seq in grown]),
        finished=tuple(_finished(seq) for seq in finished),
        schedule_ms=schedule_s * 1e3,
        device_ms=result.device_ms,
        step_ms=step_s * 1e3,
        used_graph=result.used_graph,
        decode_context=sum(step.starts[: step.num_decodes]) + step.num_decodes,
        prefill_pairs=_prefill_pairs(step),
        first_tokens=_first_tokens(step, grown),
    )


def _prefill_pairs(step: ScheduledStep) -> int:
    """Each token of a chunk attends to all before it and to itself."""
    chunks = zip(step.starts[step.num_decodes :], step.query_lens[step.num_decodes :], strict=True)
    return sum(count * start + count * (count + 1) // 2 for start, count in chunks)


def _first_tokens(step: ScheduledStep, grown: list[Sequence]) -> tuple[tuple[str, float], ...]:
    if not step.prefill_tokens:
        return ()  # they come from a prompt's last chunk
    return tuple((seq.request_id, seq.arrival_time) for seq in grown if len(seq.token_times) == 1)


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


def _completion_output(seq: Sequence, text: str) -> CompletionOutput:
    assert seq.finish_reason is not None, seq
    stopped_by_eos = isinstance(seq.stop_reason, int) and seq.stop_reason not in seq.sampling.stop_token_ids
    return CompletionOutput(
        index=seq.index,
        text=text,
        token_ids=seq.output_token_ids,
        finish_reason=seq.finish_reason.value,
        stop_reason=None if stopped_by_eos else seq.stop_reason,
        logprobs=seq.logprobs if seq.sampling.logprobs is not None else None,
        error=OutputError(*seq.error) if seq.error else None,
        timing=seq.timing,
        preemptions=seq.num_preemptions,
    )


def request_output(request_id: str, prompt: str | None, sequences: list[Sequence], texts: list[str]) -> RequestOutput:
    """The finished request of these sequences, its n samples."""
    first = sequences[0]
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=first.token_ids[: first.prompt_len],
        outputs=[_completion_output(seq, text) for seq, text in zip(sequences, texts, strict=True)],
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
