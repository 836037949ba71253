"""What `nanoinfer bench` does: choose what to measure, warm up, run the workload, report."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanoinfer.cli.bench_options import BenchOptions
from nanoinfer.cli.bench_result import Result, combine, describe, run_result
from nanoinfer.cli.bench_view import as_table
from nanoinfer.cli.bench_workload import Workload
from nanoinfer.cli.command import FAILED_REQUESTS, OK, SLO_MISSED
from nanoinfer.cli.load_driver import LoadDriver
from nanoinfer.cli.monitor import Monitor
from nanoinfer.cli.results_file import open_results
from nanoinfer.cli.session import Session
from nanoinfer.cli.workloads import BenchRequest, check_fits
from nanoinfer.config import EngineConfig, SamplingParams
from nanoinfer.engine.latency import SLO, parse_slos
from nanoinfer.engine.metrics import Metrics
from nanoinfer.ui.plain import RunDisplay

if TYPE_CHECKING:
    from nanoinfer.llm import LLM

BUILTIN_MODEL, BUILTIN_HEADS = "smollm2", 9
WARMUP_OUTPUT_TOKENS = 16
WARMUP_SEED_OFFSET = 1_000_003


def run_bench(
    session: Session, engine: EngineConfig, options: BenchOptions, output: Path | None, *, overwrite: bool
) -> int:
    """Returns the exit code: 4 if fewer requests than asked for kept their limits."""
    slos = parse_slos(options.goodput.replace(",", " "))
    monitor = Monitor(session)
    sink = open_results(output, order="completion", overwrite=overwrite, inputs=[]) if output is not None else None
    try:
        result = _measure(session, default_model(engine), options, slos, monitor)
        if sink is not None:
            sink.write(0, (json.dumps(result, indent=2) + "\n").encode())
            sink.finish()
    except BaseException:
        if sink is not None:
            sink.abandon()
        raise
    _print(session, result)
    attained = result.get("slo_attainment")
    if options.slo_attainment is not None and (attained or 0.0) < options.slo_attainment:
        session.console.error(
            f"{100 * (attained or 0):.1f}% kept the limits, fewer than {100 * options.slo_attainment:g}%."
        )
        return SLO_MISSED
    return FAILED_REQUESTS if result["failed"] else OK


def default_model(engine: EngineConfig) -> EngineConfig:
    """What to measure where no model is named: a real one where that is quick to have, else a shape."""
    if engine.model is not None or engine.load_format == "dummy":
        return engine
    if _on_gpu(engine.device) or BUILTIN_HEADS % engine.tensor_parallel_size:
        return replace(engine, load_format="dummy")
    return replace(engine, model=BUILTIN_MODEL)


def _on_gpu(device: str) -> bool:
    if device != "auto":
        return device != "cpu"
    import torch

    return torch.cuda.is_available()


def _measure(
    session: Session, engine: EngineConfig, options: BenchOptions, slos: tuple[SLO, ...], monitor: Monitor
) -> Result:
    with session.engine(engine) as llm, monitor.watching(llm):
        on_gpu = llm.info.device != "cpu"
        workload = Workload.decide(options, on_gpu=on_gpu, vocab_size=llm.info.vocab_size)
        requests = workload.requests(engine.seed)
        check_fits(requests, llm.info.max_model_len)
        sampling = SamplingParams(temperature=workload.temperature, ignore_eos=True)
        session.console.say(f"workload: {workload}")
        _warm_up(session, llm, workload, sampling, engine.seed, monitor, on_gpu=on_gpu)
        runs = []
        for number in range(options.repeat):
            llm.reset_prefix_cache()
            runs.append(_run_once(session, llm, requests, sampling, options, slos, monitor))
            if options.repeat > 1:
                session.console.say(f"run {number + 1}: {runs[-1]['output_throughput']:.2f} output tok/s")
        what = {"workload": str(workload), "num_prompts": workload.num_prompts, "seed": engine.seed}
        described = describe(llm.info, what, options.request_rate, options.burstiness, options.max_concurrency)
        return described | combine(runs)


def _warm_up(
    session: Session,
    llm: LLM,
    workload: Workload,
    sampling: SamplingParams,
    seed: int,
    monitor: Monitor,
    *,
    on_gpu: bool,
) -> None:
    """Compile, capture and tune on other prompts; what they leave in the prefix cache is forgotten before a run."""
    count = workload.options.warmup
    if count is None:
        count = min(workload.num_prompts, llm.info.max_num_seqs) if on_gpu else 1
    if not count:
        return
    session.console.status(f"warming up with {count} requests ...")
    requests = [
        BenchRequest(request.token_ids, min(request.output_tokens, WARMUP_OUTPUT_TOKENS))
        for request in workload.requests(seed + WARMUP_SEED_OFFSET, count)
    ]
    LoadDriver(llm, requests, sampling).run(session.interrupts, monitor.tick)


def _run_once(
    session: Session,
    llm: LLM,
    requests: list[BenchRequest],
    sampling: SamplingParams,
    options: BenchOptions,
    slos: tuple[SLO, ...],
    monitor: Monitor,
) -> Result:
    """One measured run with metrics of its own."""
    metrics = Metrics(slos)
    display = RunDisplay(session.console, session.display.ui, session.services.clock, metrics)
    mean_output = sum(request.output_tokens for request in requests) / len(requests)
    display.expect(len(requests), len(requests), mean_output)
    driver = LoadDriver(
        llm,
        requests,
        sampling,
        max_concurrency=options.max_concurrency,
        clock=session.services.clock,
        sleep=time.sleep,
    )
    with monitor.also(lambda event: metrics.observe(driver.observed(event)), display.observe):
        monitor.after_tick = lambda: display.show(driver.done, 0)
        load = driver.run(session.interrupts, monitor.tick)
        monitor.after_tick = lambda: None
    session.console.clear_status()
    return run_result(metrics, load)


def _print(session: Session, result: Result) -> None:
    print(json.dumps(result, indent=2) if session.display.json else as_table(result))
