"""What `nanoinfer generate` does: read and check the prompts, load the model, run, and say how it went."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoinfer.cli.batch import BatchPolicy, BatchRun, BatchTotals, TooManyFailuresError
from nanoinfer.cli.batch_input import Batch, read_batch
from nanoinfer.cli.batch_report import print_validation, report_problems, report_run, report_sampling, run_summary
from nanoinfer.cli.command import BAD_INPUT, FAILED_REQUESTS, OK
from nanoinfer.cli.length_check import check_lengths
from nanoinfer.cli.monitor import Monitor
from nanoinfer.cli.options import OnError, Order, ThinkChoice, thinking_options
from nanoinfer.cli.records import Record, to_json_line, to_plain_text
from nanoinfer.cli.results_file import ResultsFile, ResultSink, StreamResults, open_results
from nanoinfer.cli.session import Session
from nanoinfer.config import EngineConfig, SamplingParams
from nanoinfer.errors import UserError
from nanoinfer.ui import text

DEFAULT_MAX_TOKENS = 512


@dataclass(frozen=True)
class GenerateOptions:
    """The options of the command; `sampling` holds what holds for every line that says nothing else."""

    sampling: dict[str, Any]
    file: str | None
    prompts: list[str]
    output: Path | None
    overwrite: bool
    order: Order
    on_error: OnError
    max_errors: int | None
    validate_only: bool
    think: ThinkChoice


def run_generate(session: Session, engine: EngineConfig, options: GenerateOptions) -> int:
    """Returns the exit code. Everything that can be refused is refused before the model is loaded."""
    flags = {"max_tokens": DEFAULT_MAX_TOKENS, **options.sampling}
    batch = read_batch(options.file, options.prompts, SamplingParams.from_options(flags))
    batch = check_lengths(batch, engine, thinking_options(options.think), session.services.find_limits)
    report_problems(session.console, batch)
    if options.validate_only:
        session.console.clear_status()
        print_validation(batch, as_json=session.display.json)
        return BAD_INPUT if batch.bad_lines else OK
    _refuse_useless(batch, options.on_error, options.max_errors)
    monitor = Monitor(session)
    sink = open_results(
        options.output,
        order=options.order,
        overwrite=options.overwrite,
        inputs=batch.files,
        before_write=session.console.clear_status,
    )
    totals = BatchTotals()
    policy = BatchPolicy(flags, thinking_options(options.think), options.on_error, options.max_errors)
    try:
        seconds = _run(session, engine, monitor, batch, sink, totals, policy)
    except TooManyFailuresError:
        _abandoned(session, sink, totals, len(batch.entries))
        session.console.error(f"stopped after {totals.failed} failed requests (--max-errors {options.max_errors}).")
        return FAILED_REQUESTS
    except BaseException:
        _abandoned(session, sink, totals, len(batch.entries))
        raise
    name = "standard output" if str(options.output or "-") == "-" else str(options.output)
    report_run(session.console, totals, seconds, name)
    if session.display.json and isinstance(sink, ResultsFile):
        print(json.dumps(run_summary(totals, seconds, name), indent=2))
    return FAILED_REQUESTS if totals.failed else OK


def _run(
    session: Session,
    engine: EngineConfig,
    monitor: Monitor,
    batch: Batch,
    sink: ResultSink,
    totals: BatchTotals,
    policy: BatchPolicy,
) -> float:
    """Load the model and run the batch into the sink; returns the seconds that the requests took."""
    from nanoinfer.ui.run_display import RunDisplay
    from nanoinfer.ui.snapshot import Requests, SnapshotBuilder

    a_person_reads = batch.from_command_line and len(batch.entries) == 1 and isinstance(sink, StreamResults)
    render: Callable[[Record], bytes] = to_json_line
    if a_person_reads and not session.display.json:
        render = to_plain_text
    if isinstance(sink, StreamResults) and sink.is_terminal:
        render = harmless(render)
    with session.engine(engine) as llm, monitor.watching(llm):
        base = llm.default_sampling.with_options(policy.sampling)
        report_sampling(session.console, llm, base, batch)
        builder = SnapshotBuilder(llm.info, title="generate", clock=session.services.clock)
        builder.expect(batch.sequences(base), batch.mean_limit(base))
        display = RunDisplay(
            session.console,
            session.display.ui,
            builder,
            session.services.clock,
            lambda: Requests(len(batch.entries), totals.done, totals.failed),
            warning=lambda: totals.failures[-1] if totals.failures else None,
            keep=True,
            one_line=a_person_reads,
        )
        started = session.services.clock()
        with display, monitor.also(display.observe, after_tick=display.tick):
            BatchRun(llm, batch.entries, sink, totals, base, policy, 2 * engine.max_num_seqs, render).run(
                session.interrupts, monitor.tick
            )
        sink.finish()
        return session.services.clock() - started


def harmless(render: Callable[[Record], bytes]) -> Callable[[Record], bytes]:
    """`render` for a terminal, which must show what a model writes and never obey it."""
    return lambda record: text.visible(render(record).decode("utf-8", "replace")).encode("utf-8", "replace")


def _refuse_useless(batch: Batch, on_error: OnError, max_errors: int | None) -> None:
    """UserError for a batch that must not start: its problems are on the screen already."""
    bad = len(batch.bad_lines)
    if not batch.requests:
        raise UserError(f"no line of {batch.name} can run; nothing was done.")
    if bad and on_error == "fail":
        raise UserError(f"{batch.name} has {text.plural(bad, 'bad line')}; nothing was run (--on-error fail).")
    if max_errors is not None and bad > max_errors:
        raise UserError(f"{batch.name} has {text.plural(bad, 'bad line')}, more than --max-errors {max_errors}.")


def _abandoned(session: Session, sink: ResultSink, totals: BatchTotals, total: int) -> None:
    """Say where the results of a run that ends early are."""
    kept = sink.abandon()
    if kept is not None:
        session.console.warn(f"{totals.done} of {text.plural(total, 'result')} are in {kept}.")
