"""Measures one engine: warm-up, then each load as often as asked, every run on a cold prefix cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoinfer.cli.bench_options import BenchOptions
from nanoinfer.cli.bench_result import Result, combine, run_result
from nanoinfer.cli.bench_roofline import StepCost
from nanoinfer.cli.bench_steps import StepLog
from nanoinfer.cli.bench_workload import Workload
from nanoinfer.cli.load_driver import LoadDriver
from nanoinfer.cli.monitor import Monitor
from nanoinfer.cli.session import Session
from nanoinfer.cli.step_traces import traced
from nanoinfer.cli.workloads import BenchRequest
from nanoinfer.config import SamplingParams
from nanoinfer.engine.latency import SLO
from nanoinfer.ui.snapshot import RequestCounts, SnapshotBuilder
from nanoinfer.ui.text import plural

if TYPE_CHECKING:
    from nanoinfer.llm import LLM

WARMUP_OUTPUT_TOKENS = 16
LEAST_ALONE = 4  # requests of a warm-up that sends one at a time
WARMUP_SEED_OFFSET = 1_000_003


@dataclass(frozen=True)
class Load:
    """How a workload is sent: `count` requests at `rate` a second, at most `max_concurrency` under way."""

    count: int
    rate: float
    max_concurrency: int | None


def _draining(requests: list[BenchRequest], step_tokens: int) -> list[int]:
    """Output lengths with which all requests run together once the last is prefilled, and then end one by one, where a
    step takes `step_tokens`."""
    prefill_steps = -(-sum(len(request.token_ids) for request in requests) // step_tokens)
    return [prefill_steps + 2 + len(requests) - i for i in range(len(requests))]


@dataclass(frozen=True)
class Bench:
    """An engine, the workload for it, and who watches."""

    session: Session
    llm: LLM
    workload: Workload
    options: BenchOptions
    slos: tuple[SLO, ...]
    monitor: Monitor
    seed: int

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=self.workload.temperature, ignore_eos=True)

    def warm_up(self, load: Load) -> None:
        """Compile, capture and tune on other prompts; what they leave in the prefix cache is forgotten before a run.

        On a GPU each batch size has a graph of its own, captured when it first comes: the first pass runs them all, and
        where `load` does not send everything at once, a second pass sends as it does.
        """
        options, info = self.options, self.llm.info
        if options.warmup is not None or info.device == "cpu":
            count = 1 if options.warmup is None else options.warmup
            if self.workload.entries:
                count = min(count, self.workload.num_prompts)  # a file does not have more
            self._send(count, None)
            return
        self._send(min(load.count, info.max_num_seqs), None, drain=True)
        self.warm_up_again(load)

    def warm_up_again(self, load: Load) -> None:
        """The second pass alone, for the further levels of a sweep."""
        one_by_one = 1 if not math.isinf(load.rate) else None
        limit = load.max_concurrency or one_by_one
        if limit is not None and self.options.warmup is None and self.llm.info.device != "cpu":
            self._send(min(load.count, max(2 * limit, LEAST_ALONE)), limit)

    def _send(self, count: int, limit: int | None, *, drain: bool = False) -> None:
        """`count` requests, `limit` at a time, with short answers, or such that every batch size comes up (`drain`).
        How many have ended is shown."""
        if not count:
            return
        what, requested = "capturing CUDA graphs" if drain else "warming up", plural(count, "request")
        self.session.console.status(f"{what}: 0 of {requested} ...")
        drawn = self.workload.requests(self.seed + WARMUP_SEED_OFFSET, count)
        if drain:
            lengths = _draining(drawn, self.llm.info.max_num_batched_tokens)
        else:
            lengths = [min(request.output_tokens, WARMUP_OUTPUT_TOKENS) for request in drawn]
        longest = self.llm.info.max_model_len
        requests = [
            BenchRequest(request.token_ids, min(length, longest - len(request.token_ids)))
            for request, length in zip(drawn, lengths, strict=True)
        ]
        driver = LoadDriver(self.llm, requests, self.sampling, max_concurrency=limit)

        def tick() -> None:
            self.monitor.tick()
            self.session.console.status(f"{what}: {driver.done} of {requested} ...")

        driver.run(self.session.interrupts, tick)

    def measure(self, requests: list[BenchRequest], load: Load, say: Callable[[int, Result], None]) -> Result:
        """`load` --repeat times, each on a cold cache; `say` hears of every run."""
        runs = []
        for number in range(self.options.repeat):
            self.llm.reset_prefix_cache()
            which = f" run {number + 1} of {self.options.repeat}" if self.options.repeat > 1 else ""
            folder = self.options.profile if number == 0 else None
            with traced(self.session, self.llm, folder, "bench", skip=0):
                runs.append(self._run_once(requests, load, f"bench{which}"))
            say(number, runs[-1])
        return combine(runs)

    def _run_once(self, requests: list[BenchRequest], load: Load, title: str) -> Result:
        """One measured run with metrics of its own."""
        from nanoinfer.ui.run_display import RunDisplay

        session, info, clock, log = self.session, self.llm.info, self.session.services.clock, StepLog()
        builder = SnapshotBuilder(info, title=title, slos=self.slos, clock=clock, keep_sequences=True)
        builder.expect(len(requests), sum(request.output_tokens for request in requests) / len(requests))
        driver = LoadDriver(
            self.llm,
            requests,
            self.sampling,
            max_concurrency=load.max_concurrency,
            clock=clock,
            sleep=time.sleep,
        )

        def progress() -> RequestCounts:
            return RequestCounts(len(requests), driver.done)

        display = RunDisplay(
            session.console,
            session.display.ui,
            builder,
            clock,
            progress,
            self.llm.events,
            observed=driver.observed,
        )
        with display, self.monitor.also(log.observe, after_tick=display.tick):
            sent = driver.run(session.interrupts, self.monitor.tick)
        cost = StepCost.of(self.llm.model_config, info.dtype, info.tensor_parallel_size)
        return run_result(builder.metrics, sent, log, cost)
