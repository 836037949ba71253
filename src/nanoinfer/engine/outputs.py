"""What a caller gets back: RequestOutput when a request is done, OutputDelta while it is streamed."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoinfer.engine.batch import TokenLogprobs
from nanoinfer.engine.events import RequestTiming


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; `completion_tokens` is the sum over its n samples."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class OutputError:
    """Why a sample ended with finish_reason "error": a stable code and a sentence."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the n samples of a request. `finish_reason` is stop, length, abort or error."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it; None for EOS and length
    logprobs: list[TokenLogprobs] | None = None
    error: OutputError | None = None
    timing: RequestTiming | None = None
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request."""

    request_id: str
    prompt: str | None  # the text that was encoded (after the chat template), None for token-id prompts
    prompt_token_ids: list[int] = field(repr=False)
    outputs: list[CompletionOutput]
    usage: Usage
    timing: RequestTiming  # from the arrival to the last sample's end; first_token is the earliest of the samples


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New text and tokens of one sample; the deltas' texts joined equal the finished text exactly."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # set on the last delta of a sample that is streamed
    output: RequestOutput | None = None  # set on the last delta of the whole request
