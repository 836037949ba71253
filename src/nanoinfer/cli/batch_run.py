"""Runs the requests of a prompts file through an engine and hands every record to a sink."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanoinfer.cli.interrupts import Interrupts
from nanoinfer.cli.options import OnError
from nanoinfer.cli.prompts_file import BadLine, Entry, PromptRequest
from nanoinfer.cli.records import (
    Record,
    bad_line_record,
    error_record,
    failure_message,
    is_failure,
    result_record,
    to_json_line,
)
from nanoinfer.cli.result_sink import ResultSink
from nanoinfer.cli.run_identity import seed_of
from nanoinfer.config import SamplingParams
from nanoinfer.engine.outputs import RequestOutput
from nanoinfer.errors import ConfigError, RequestError, UserError

if TYPE_CHECKING:
    from nanoinfer.llm import LLM

MAX_KEPT_FAILURES = 20
MORE_PER_STEP = 8  # prompts handed in beyond those that can run; the device waits while they are tokenized


class TooManyFailuresError(Exception):
    """More requests failed than --max-errors allows."""


@dataclass
class BatchTotals:
    """What came of a run so far, in requests and tokens. `kept` requests are an earlier run's; they count as done, and
    those of them that failed as failed."""

    kept: int = 0
    kept_failed: int = 0
    done: int = 0
    failed: int = 0
    cut: int = 0  # answers that ended at their token limit
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    failures: list[str] = field(default_factory=list)  # the first ones that only the engine could find

    def __post_init__(self) -> None:
        self.done += self.kept
        self.failed += self.kept_failed


@dataclass(frozen=True)
class BatchPolicy:
    """What holds for all lines beside the sampling parameters: template variables that a line may override, and how to
    take failures."""

    template_options: dict[str, Any] = field(default_factory=dict)
    on_error: OnError = "record"
    max_errors: int | None = None
    seed: int = 0  # of lines that set none


class BatchRun:
    """One pass over the entries into a sink. `sampling` holds for every line that does not say otherwise.

    The engine is given what it can run at once, and in each step a few more until as many again wait, so that no step
    is held up by tokenizing. Under on_error="fail" all come first, so that nothing runs if one of them cannot.
    With `keys` (see run_identity) a line's answer does not depend on what else is in the batch.
    """

    def __init__(
        self,
        llm: LLM,
        entries: list[Entry],
        sink: ResultSink,
        totals: BatchTotals,
        sampling: SamplingParams,
        policy: BatchPolicy,
        render: Callable[[Record], bytes] = to_json_line,
        keys: list[str] | None = None,
    ) -> None:
        self.totals = totals
        self._llm = llm
        self._sink = sink
        self._sampling = sampling
        self._policy = policy
        self._at_once = len(entries) if policy.on_error == "fail" else llm.info.max_num_seqs
        self._render = render
        self._keys = keys  # of all lines, by index; None leaves the seeds to the engine
        self._pending = deque(entries)
        self._running: dict[str, PromptRequest] = {}
        self._decode = llm.tokenizer.decode if llm.tokenizer is not None else None

    def run(self, interrupts: Interrupts, tick: Callable[[], None]) -> None:
        """Run to the end. The records written before an error stay written.

        Raises KeyboardInterrupt or Terminated after the step in which a signal came, TooManyFailuresError, EngineError,
        and UserError under on_error="fail".
        """
        with interrupts.deferred():
            while self._pending or self._llm.has_unfinished:
                self._submit_some()
                if self._llm.has_unfinished:
                    for delta in self._llm.step():
                        if delta.output is not None:
                            self._finished(self._running.pop(delta.request_id), delta.output)
                tick()
                interrupts.raise_if_requested()

    def _submit_some(self) -> None:
        most = min(max(len(self._running), self._at_once) + MORE_PER_STEP, 2 * self._at_once)
        while self._pending and len(self._running) < most:
            entry = self._pending.popleft()
            if isinstance(entry, BadLine):
                self._failed(entry, bad_line_record(entry), None)
            else:
                self._submit(entry)

    def _submit(self, request: PromptRequest) -> None:
        try:
            self._llm.submit(
                request.prompt,
                self._sampling_of(request),
                request_id=str(request.index),
                template_options=self._policy.template_options | request.template_options,
            )
        except (RequestError, ConfigError) as error:
            code = error.code if isinstance(error, RequestError) else "invalid_request"
            self._failed(request, error_record(request, code, str(error)), str(error))
        else:
            self._running[str(request.index)] = request

    def _sampling_of(self, request: PromptRequest) -> SamplingParams:
        sampling = self._sampling.with_options(request.sampling)
        if sampling.seed is not None or self._keys is None:
            return sampling
        return sampling.with_options({"seed": seed_of(self._policy.seed, self._keys[request.index])})

    def _finished(self, request: PromptRequest, output: RequestOutput) -> None:
        totals = self.totals
        totals.prompt_tokens += output.usage.prompt_tokens
        totals.cached_tokens += output.usage.cached_tokens
        totals.output_tokens += output.usage.completion_tokens
        record = result_record(request, output, model=self._llm.info.model, decode=self._decode)
        if is_failure(record):
            self._failed(request, record, failure_message(record))
            return
        self._sink.write(request.index, self._render(record))
        totals.cut += any(sample.finish_reason == "length" for sample in output.outputs)
        totals.done += 1

    def _failed(self, entry: Entry, record: Record, found: str | None) -> None:
        """Count and record a failure; `found` is its message if it was not known before the engine saw it."""
        if self._policy.on_error == "fail":
            raise UserError(f"line {entry.line}: {found} The run ends here (--on-error fail).")
        self._sink.write(entry.index, self._render(record), failed=True)
        self.totals.done += 1
        self.totals.failed += 1
        if found is not None and len(self.totals.failures) < MAX_KEPT_FAILURES:
            self.totals.failures.append(f"line {entry.line}: {found}")
        most = self._policy.max_errors
        if most is not None and self.totals.failed - self.totals.kept_failed > most:
            raise TooManyFailuresError
