"""What `nanoinfer generate` does: read and check the prompts, load the model, run, and say how it went."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanoinfer.cli.batch_input import Batch, read_batch
from nanoinfer.cli.batch_report import report_problems, report_run, report_sampling, run_summary, show_validation
from nanoinfer.cli.batch_run import BatchPolicy, BatchRun, BatchTotals, TooManyFailuresError
from nanoinfer.cli.command import BAD_INPUT, FAILED_REQUESTS, OK
from nanoinfer.cli.length_check import check_lengths
from nanoinfer.cli.monitor import Monitor
from nanoinfer.cli.options import OnError, Order, ThinkChoice, thinking_options
from nanoinfer.cli.output_path import is_standard_output
from nanoinfer.cli.records import Record, for_terminal, to_json_line, to_plain_text
from nanoinfer.cli.result_sink import StreamResults
from nanoinfer.cli.results_file import ResultsFile, open_results
from nanoinfer.cli.resume import Finished, finished_output, refuse_other_parameters, resume_command, take_over
from nanoinfer.cli.run_identity import entry_keys, parameters_asked_for, run_parameters
from nanoinfer.cli.session import Session
from nanoinfer.cli.step_traces import make_folder, traced
from nanoinfer.config import DEFAULT_MAX_TOKENS, EngineConfig, SamplingParams
from nanoinfer.errors import UserError
from nanoinfer.ui import text

UNTRACED_STEPS = 4  # of a run, in which kernels may still be compiled or captured


@dataclass(frozen=True)
class GenerateOptions:
    """The options of the command; `sampling` holds what holds for every line that says nothing else."""

    sampling: dict[str, Any]
    file: str | None
    prompts: list[str]
    output: Path | None
    resume: bool
    overwrite: bool
    order: Order
    on_error: OnError
    max_errors: int | None
    retry_errors: bool
    validate_only: bool
    think: ThinkChoice
    profile: Path | None


def run_generate(session: Session, config: EngineConfig, options: GenerateOptions) -> int:
    """Returns the exit code. Everything that can be refused is refused before the model is loaded."""
    if options.retry_errors and not options.resume:
        raise UserError("--retry-errors goes with --resume.")
    if options.resume and options.overwrite:
        raise UserError("--resume and --overwrite contradict each other; give one of them.")
    # The model's defaults will say so too, but lines are checked, and runs compared, before there is a model.
    flags = {"max_tokens": DEFAULT_MAX_TOKENS, **options.sampling}
    batch = read_batch(options.file, options.prompts, SamplingParams.from_options(flags))
    batch = check_lengths(batch, config, thinking_options(options.think), session.services.find_limits)
    report_problems(session.console, batch)
    if options.validate_only:
        show_validation(session, batch)
        return BAD_INPUT if batch.bad_lines else OK
    if not batch.requests:
        raise UserError(f"no line of {batch.name} can run; nothing was done.")
    if batch.bad_lines and options.on_error == "fail":
        bad = text.plural(len(batch.bad_lines), "bad line")
        raise UserError(f"{batch.name} has {bad}; nothing was run (--on-error fail).")
    _refuse_mixed_files(session, batch, options)
    make_folder(options.profile)
    finished = finished_output(options.output, batch) if options.resume and options.output is not None else None
    if finished is not None and not (
        options.retry_errors and any(r.index in finished.failures for r in batch.requests)
    ):
        return _nothing_to_do(session, options, finished)
    sink = open_results(
        options.output,
        session.console,
        order=options.order,
        inputs=batch.files,
        keep_failures=options.on_error != "skip",
        resume=options.resume and finished is None,
        overwrite=options.overwrite or finished is not None,
    )
    return _Job(session, config, options, flags, batch, sink, finished).execute()


def _refuse_mixed_files(session: Session, batch: Batch, options: GenerateOptions) -> None:
    """UserError if a file that is written along the way is the input or the output."""
    others = [*batch.files, *([] if options.output is None else [options.output])]
    taken = {os.path.realpath(path) for path in others}
    for name, path in (("--events", session.display.events), ("--cache-snapshot", session.display.cache_snapshot)):
        # A device such as /dev/null may be named twice.
        if path is not None and os.path.realpath(path) in taken and (path.is_file() or not path.exists()):
            raise UserError(f"{name} {path} is the input or the output as well; choose another file.")


def _nothing_to_do(session: Session, options: GenerateOptions, finished: Finished) -> int:
    """The end of a run that was asked to resume what is complete, so that a script may always say --resume."""
    results, failed = len(finished.answers) + len(finished.failures), len(finished.failures)
    advice = "none of these lines can run" if options.retry_errors else "--retry-errors runs them again"
    what = f", {failed} of them failures ({advice})" if failed else ""
    session.console.say(f"{options.output} is complete: {text.plural(results, 'result')}{what}.")
    return FAILED_REQUESTS if failed else OK


@dataclass
class _Job:
    """One run of a batch that is worth running, into an output that is ours."""

    session: Session
    config: EngineConfig
    options: GenerateOptions
    flags: dict[str, Any]  # the sampling of lines that say nothing else
    batch: Batch
    sink: ResultsFile | StreamResults
    finished: Finished | None  # what the output holds whose failures are to run again

    def __post_init__(self) -> None:
        self.keys = entry_keys(self.batch.entries)
        self.totals = BatchTotals()

    def execute(self) -> int:
        """Returns the exit code."""
        try:
            rest, monitor = self._prepare()
        except BaseException:
            self.sink.abandon()
            raise
        try:
            seconds = self._run(rest, monitor) if rest.entries else 0.0
            self.sink.finish()
        except TooManyFailuresError:
            self._abandoned()
            failed = self.totals.failed - self.totals.kept_failed
            self.session.console.error(
                f"stopped after {text.plural(failed, 'failed request')} (--max-errors {self.options.max_errors})."
            )
            return FAILED_REQUESTS
        except UserError:
            # The command that was given was wrong in some way: it is no advice, unless it got somewhere.
            self._abandoned(advise=self.totals.done > self.totals.kept)
            raise
        except BaseException:
            self._abandoned()
            raise
        return self._report(seconds)

    def _prepare(self) -> tuple[Batch, Monitor]:
        """What is left to run, and who listens to it. UserError if it must not start."""
        kept: Collection[int] = ()
        options, sink = self.options, self.sink
        if self.finished is not None:
            kept = self.finished.answers
            self.totals = BatchTotals(len(kept))
            self.session.console.say(
                f"trying {text.plural(len(self.finished.failures), 'failed line')} of {options.output} again; its "
                f"{text.plural(len(kept), 'answer')} stay as they are, whatever parameters they were made with."
            )
        elif options.resume and isinstance(sink, ResultsFile):
            results = take_over(
                self.session.console,
                self.batch,
                self.keys,
                sink,
                parameters_asked_for(self.config, self.flags, options.think),
                retry_errors=options.retry_errors,
            )
            kept = results
            self.totals = BatchTotals(len(results), sum(result.failed for result in results.values()))
        rest = replace(self.batch, entries=[entry for entry in self.batch.entries if entry.index not in kept])
        bad = len(rest.bad_lines)
        if options.max_errors is not None and bad > options.max_errors:
            bad_lines = text.plural(bad, "bad line")
            raise UserError(f"{self.batch.name} has {bad_lines}, more than --max-errors {options.max_errors}.")
        return rest, Monitor(self.session)

    def _run(self, rest: Batch, monitor: Monitor) -> float:
        """Load the model and run the batch into the sink; returns the seconds that the requests took."""
        from nanoinfer.ui.run_display import RunDisplay
        from nanoinfer.ui.snapshot import RequestCounts, SnapshotBuilder

        session, options, totals = self.session, self.options, self.totals
        a_person_reads = rest.from_command_line and len(rest.entries) == 1 and isinstance(self.sink, StreamResults)
        render: Callable[[Record], bytes] = to_json_line
        if a_person_reads and not session.display.json:
            render = to_plain_text
        if isinstance(self.sink, StreamResults) and self.sink.is_terminal:
            render = for_terminal(render)
        with session.llm(self.config) as llm, monitor.watching(llm):
            base = llm.default_sampling.with_options(self.flags)
            if isinstance(self.sink, ResultsFile):
                self._begin(self.sink, run_parameters(llm, self.config, base, options.think))
            report_sampling(session.console, llm, base, rest)
            builder = SnapshotBuilder(llm.info, title="generate", clock=session.services.clock)
            builder.expect(rest.sequences(base), rest.mean_limit(base))
            display = RunDisplay(
                session.console,
                session.display.ui,
                builder,
                session.services.clock,
                lambda: RequestCounts(len(self.batch.entries), totals.done, totals.failed),
                llm.events,
                warning=self._last_warning,
                keep=True,
                one_line=a_person_reads,
            )
            policy = BatchPolicy(
                thinking_options(options.think), options.on_error, options.max_errors, self.config.seed
            )
            run = BatchRun(llm, rest.entries, self.sink, totals, base, policy, render, self.keys)
            started = session.services.clock()
            trace = traced(session, llm, options.profile, "generate", skip=UNTRACED_STEPS)
            with trace, display, monitor.also(after_tick=display.tick):
                run.run(session.interrupts, monitor.tick)
            return session.services.clock() - started

    def _last_warning(self) -> str | None:
        if self.session.interrupts.requested:
            return "stopping after this step; Ctrl-C again leaves at once"
        return self.totals.failures[-1] if self.totals.failures else None

    def _begin(self, sink: ResultsFile, parameters: dict[str, Any]) -> None:
        """Start the partial file, or go on with it if what only the loaded model knows is the same as well."""
        if self.totals.kept and self.finished is None:
            refuse_other_parameters(sink, parameters)
        batch = self.batch
        source = {"name": batch.name, "sha256": batch.sha256, "lines": len(batch.entries)}
        labels = [(key, str(entry.id)) for key, entry in zip(self.keys, batch.entries, strict=True)]
        sink.begin({"input": source, "parameters": parameters}, labels)
        if self.finished is not None:
            for index, line in self.finished.answers.items():
                sink.write(index, line)

    def _abandoned(self, *, advise: bool = True) -> None:
        """Say where the results of a run that ends early are, and how to go on with it."""
        kept, console, batch = self.sink.abandon(), self.session.console, self.batch
        if kept is None or not advise:
            return
        where = "; give it the same prompts on standard input" if batch.is_standard_input else ""
        done = f"{self.totals.done} of {text.plural(len(batch.entries), 'result')}"
        console.warn(f"{done} are in {kept}. To go on from there{where}:")
        console.more(f"  {resume_command(self.session.services.arguments)}")

    def _report(self, seconds: float) -> int:
        output, session = self.options.output, self.session
        name = "standard output" if is_standard_output(output) else str(output)
        report_run(session.console, self.totals, seconds, name)
        if session.display.json and isinstance(self.sink, ResultsFile):
            session.show_json(run_summary(self.totals, seconds, name))
        return FAILED_REQUESTS if self.totals.failed else OK
