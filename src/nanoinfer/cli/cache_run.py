"""What `nanoinfer inspect-cache` does with a file of prompts: run them, watch the KV pool, report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.cli.batch_input import Batch, read_batch
from nanoinfer.cli.batch_report import report_problems
from nanoinfer.cli.batch_run import BatchPolicy, BatchRun, BatchTotals
from nanoinfer.cli.cache_hits import PrefixBreak, PrefixBreaks
from nanoinfer.cli.cache_report import analyse, snapshot_problems
from nanoinfer.cli.cache_view import CacheRun, Look, run_as_document, run_as_text
from nanoinfer.cli.command import ENGINE_FAILURE, FAILED_REQUESTS, OK
from nanoinfer.cli.monitor import Monitor
from nanoinfer.cli.session import Session
from nanoinfer.config import EngineConfig, SamplingParams
from nanoinfer.errors import UserError
from nanoinfer.ui.glyphs import glyphs_of

if TYPE_CHECKING:
    from nanoinfer.engine.cache_snapshot import CacheSnapshot
    from nanoinfer.engine.events import FinishedSequence, StepEvent
    from nanoinfer.llm import LLM


def run_inspection(
    session: Session, config: EngineConfig, file: str | None, max_tokens: int, *, top: int, show_text: bool
) -> int:
    """Returns the exit code: 1 if the cache's own invariants are broken, 3 if a line could not run."""
    defaults = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    batch = read_batch(file, [], defaults)
    report_problems(session.console, batch)
    if not batch.requests:
        raise UserError(f"{batch.name}: no line can run.")
    monitor = Monitor(session)
    with session.llm(config) as llm, monitor.watching(llm):
        from nanoinfer.ui.run_display import RunDisplay
        from nanoinfer.ui.snapshot import RequestCounts, SnapshotBuilder

        watch, totals, clock = CacheWatch(llm), BatchTotals(), session.services.clock
        builder = SnapshotBuilder(llm.info, title="inspect-cache", clock=clock)
        builder.expect(batch.sequences(defaults), batch.mean_limit(defaults))
        display = RunDisplay(
            session.console,
            session.display.ui,
            builder,
            clock,
            lambda: RequestCounts(len(batch.requests), totals.done, totals.failed),
            llm.events,
        )
        run = BatchRun(llm, list(batch.requests), Discard(), totals, defaults, BatchPolicy())
        with display, monitor.also(watch.observe, after_tick=display.tick):
            run.run(session.interrupts, monitor.tick)
        decode = llm.tokenizer.decode if show_text and llm.tokenizer is not None else None
        problems = _report(session, llm, watch, batch, Look(top, decode, glyphs_of(session.console)))
    if problems:
        session.console.error("the cache's own checks failed; this is a defect in nanoinfer.")
        return ENGINE_FAILURE
    return FAILED_REQUESTS if totals.failed or batch.bad_lines else OK


class Discard:
    """Takes the records of a run whose answers nobody reads."""

    def write(self, index: int, line: bytes, *, failed: bool = False) -> None: ...


class CacheWatch:
    """Keeps what the end state no longer shows: the fullest moment of the pool, and every request's hits."""

    # A snapshot costs time proportional to the pool: take one only where the pool is clearly fuller than at the last.
    GROWTH = 1.05

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.peak: CacheSnapshot = llm.cache_snapshot()
        self.peak_active = 0
        self.finished: list[FinishedSequence] = []
        self._next_peak = 1.0

    def observe(self, event: StepEvent) -> None:
        self.finished += event.finished
        self.peak_active = max(self.peak_active, event.blocks_active)
        if event.blocks_active >= self._next_peak:
            self.peak = self._llm.cache_snapshot()
            self._next_peak = event.blocks_active * self.GROWTH


def _report(session: Session, llm: LLM, watch: CacheWatch, batch: Batch, look: Look) -> list[str]:
    """Print the report; returns what is broken."""
    end, names = llm.cache_snapshot(), {str(request.index): request.id for request in batch.requests}
    finished = sorted(watch.finished, key=lambda sequence: (int(sequence.request_id), sequence.index))
    if llm.info.enable_prefix_caching:
        breaks = _prefix_breaks(llm, batch, finished, names)
    else:
        breaks = [PrefixBreak("off")] * len(finished)
    report = CacheRun(
        info=llm.info,
        peak=analyse(watch.peak),
        peak_active=watch.peak_active,
        end=analyse(end),
        finished=finished,
        ids=names,
        breaks=breaks,
        problems=llm.check_integrity() + snapshot_problems(end),
    )
    if session.display.json:
        session.show_json(run_as_document(report))
    else:
        session.show(run_as_text(report, look))
    return report.problems


def _prefix_breaks(
    llm: LLM, batch: Batch, finished: list[FinishedSequence], names: dict[str, str | int]
) -> list[PrefixBreak]:
    """Where the prefix of every finished sequence broke; the prompts are encoded once more for that."""
    ran = {sequence.request_id for sequence in finished}
    prompts = {
        str(request.index): llm.encode(request.prompt, request.template_options)[1]
        for request in batch.requests
        if str(request.index) in ran
    }
    prefixes = PrefixBreaks(prompts, llm.info.block_size)
    return [prefixes.explain(sequence, names) for sequence in finished]
