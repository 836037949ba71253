"""What `nanoinfer bench` does: choose what to measure, run it, report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanoinfer.cli.bench_compare import compare, comparison_lines, other_settings, read_result, refuse_other_work
from nanoinfer.cli.bench_formats import as_csv, as_markdown
from nanoinfer.cli.bench_measure import Bench, Load
from nanoinfer.cli.bench_options import BenchOptions, OutputFormat
from nanoinfer.cli.bench_result import Result, against_limits, describe
from nanoinfer.cli.bench_sweep import best_within_limits, level_of, sweep_loads
from nanoinfer.cli.bench_view import as_table
from nanoinfer.cli.bench_workload import Workload, digest, pace, read_dataset
from nanoinfer.cli.command import FAILED_REQUESTS, OK, SLO_MISSED
from nanoinfer.cli.document_file import DocumentFile
from nanoinfer.cli.interrupts import Terminated
from nanoinfer.cli.monitor import Monitor
from nanoinfer.cli.session import Session
from nanoinfer.cli.step_traces import make_folder
from nanoinfer.cli.workloads import check_fits
from nanoinfer.config import EngineConfig
from nanoinfer.engine.latency import parse_slos
from nanoinfer.errors import UserError
from nanoinfer.loading.resolve import BUILTIN_MODEL
from nanoinfer.ui.text import plural

BUILTIN_HEADS = 9  # of BUILTIN_MODEL


@dataclass(frozen=True)
class Report:
    """What becomes of the result: printed in `format`, kept in `output`, held against the file `compare`."""

    format: OutputFormat
    output: Path | None
    overwrite: bool
    compare: Path | None


def run_bench(session: Session, config: EngineConfig, options: BenchOptions, report: Report) -> int:
    """Returns the exit code: 4 if fewer requests than asked for kept their limits."""
    if report.compare is not None and options.sweep is not None:
        raise UserError("--compare holds one result against another; leave --sweep out.")
    earlier = read_result(report.compare) if report.compare is not None else None
    sources = [path for path in (options.dataset_path, report.compare) if path is not None]
    slos = parse_slos(options.goodput.replace(",", " "))
    entries = read_dataset(options)
    make_folder(options.profile)
    monitor = Monitor(session)
    path, overwrite = report.output, report.overwrite
    document = DocumentFile(path, session.console, overwrite=overwrite, inputs=sources) if path is not None else None
    with session.llm(default_model(config)) as llm, monitor.watching(llm):
        on_gpu, vocab_size = llm.info.device != "cpu", llm.info.vocab_size

        def encode(prompt: Any) -> list[int]:
            return list(llm.encode(prompt)[1])

        workload = Workload.decide(options, entries, encode, on_gpu=on_gpu, vocab_size=vocab_size)
        bench = Bench(session, llm, workload, options, slos, monitor, config.seed)
        stopped: BaseException | None = None
        if options.sweep is not None:
            result, stopped = _sweep(bench)
        else:
            result = _single(bench, earlier, report.compare)
    if document is not None:
        document.save((json.dumps(result, indent=2) + "\n").encode())
    _print(session, result, report)
    if stopped is not None:
        raise stopped
    return _exit_code(session, result, options.slo_attainment)


def default_model(config: EngineConfig) -> EngineConfig:
    """What to measure where no model is named: a real one where that is quick to have, else a shape."""
    if config.model is not None or config.load_format == "dummy":
        return config
    if _on_gpu(config.device) or BUILTIN_HEADS % config.tensor_parallel_size:
        return replace(config, load_format="dummy")
    return replace(config, model=BUILTIN_MODEL, model_named="built in, because no model was named")


def _on_gpu(device: str) -> bool:
    if device != "auto":
        return device != "cpu"
    import torch

    return torch.cuda.is_available()


def _single(bench: Bench, earlier: Result | None, compared: Path | None) -> Result:
    """One load, --repeat times; refused before it starts if it is not the work that `earlier` did."""
    options = bench.options
    load = Load(bench.workload.num_prompts, options.request_rate, options.max_concurrency)
    requests = bench.workload.requests(bench.seed, load.count, load.rate)
    check_fits(requests, bench.llm.info.max_model_len)
    described = _described(bench, load) | {"requests_sha256": digest(requests)}
    if earlier is not None and compared is not None:
        limits = {slo.metric: slo.limit_ms for slo in bench.slos} or None
        refuse_other_work(earlier, {**described, **({"goodput_slos_ms": limits} if limits else {})}, compared)
    console = bench.session.console
    console.say(f"workload: {described['workload']}")
    bench.warm_up(load)
    measured = bench.measure(requests, load, _say_run(bench, "run"))
    result = against_limits({**described, **measured}, bench.llm.measure_device())
    if earlier is not None:
        settings = other_settings(earlier, result)
        result["compared"] = {"file": str(compared), "settings": settings, "figures": compare(earlier, result)}
    return result


def _sweep(bench: Bench) -> tuple[Result, BaseException | None]:
    """One load after the other, the lightest first; every one starts with a cold cache.

    A signal ends the sweep with the levels that are done, and comes second; before the first one is done it is raised.
    """
    sweep, workload = bench.options.sweep, bench.workload
    assert sweep is not None
    loads = sweep_loads(sweep, workload.num_prompts, bench.llm.info.max_num_seqs)
    drawn = [workload.requests(bench.seed, load.count, load.rate) for load in loads]
    for requests in drawn:
        check_fits(requests, bench.llm.info.max_model_len)
    described = _described(bench, None)
    bench.session.console.say(f"workload: {described['workload']}, at {plural(len(loads), 'level')} of {sweep.over}")
    bench.warm_up(loads[-1])
    points: list[Result] = []
    stopped: BaseException | None = None
    for load, requests in zip(loads, drawn, strict=True):
        point = _load_facts(load) | {"requests_sha256": digest(requests)}
        point["workload"] = f"{replace(workload, num_prompts=load.count)}, {pace(load.rate, load.max_concurrency)}"
        name = f"{level_of(point, sweep.over)} {'at once' if sweep.over == 'concurrency' else 'req/s'}"
        bench.warm_up_again(load)
        try:
            points.append(point | bench.measure(requests, load, _say_run(bench, name)))
        except (KeyboardInterrupt, Terminated) as signal:
            if not points:
                raise
            stopped = signal
            bench.session.console.warn(f"interrupted: {len(points)} of {len(loads)} levels are done.")
            break
    limits = bench.llm.measure_device()
    points = [against_limits(point, limits) for point in points]
    summary: Result = {"over": sweep.over, "points": points, "complete": stopped is None}
    if bench.slos:
        summary["attainment"] = bench.options.slo_attainment or 1.0
        best = best_within_limits(points, summary["attainment"])
        summary["best_within_limits"] = None if best is None else points.index(best)
    return {**described, "device": points[0]["device"], "sweep": summary}, stopped


def _described(bench: Bench, load: Load | None) -> Result:
    """The part of a result before its figures; without the load where a sweep has one for each point."""
    workload = bench.workload
    text = str(workload) if load is None else f"{workload}, {pace(load.rate, load.max_concurrency)}"
    what = {"workload": text, **workload.facts(), "seed": bench.seed}
    described = describe(bench.llm.info, what, bench.options.burstiness)
    return described if load is None else {**described, **_load_facts(load)}


def _load_facts(load: Load) -> Result:
    rate = "inf" if math.isinf(load.rate) else load.rate
    return {"num_prompts": load.count, "request_rate": rate, "max_concurrency": load.max_concurrency}


def _say_run(bench: Bench, name: str) -> Callable[[int, Result], None]:
    """A line per run, where there is more than one."""
    many = bench.options.repeat > 1
    if not many and bench.options.sweep is None:
        return lambda number, run: None
    return lambda number, run: bench.session.console.say(
        f"{name}{f' {number + 1}' if many else ''}: {run['output_throughput']:.2f} output tok/s"
    )


def _print(session: Session, result: Result, report: Report) -> None:
    if report.format == "json":
        session.show_json(result)
        return
    session.show({"table": as_table, "md": as_markdown, "csv": as_csv}[report.format](result))
    compared = result.get("compared")
    if compared is not None and report.format != "csv":
        lines = comparison_lines(compared["figures"], compared["settings"], Path(compared["file"]))
        session.show("\n" + "\n".join(["```", *lines, "```"] if report.format == "md" else lines))


def _exit_code(session: Session, result: Result, wanted: float | None) -> int:
    """4 if the limits were not kept by as many as `wanted` (at no level of a sweep), 3 if requests failed."""
    points = result["sweep"]["points"] if "sweep" in result else [result]
    if wanted is not None:
        attained = max(point["slo_attainment"] or 0.0 for point in points)
        if attained < wanted:
            session.console.error(f"{100 * attained:.1f}% kept the limits, fewer than {100 * wanted:g}%.")
            return SLO_MISSED
    return FAILED_REQUESTS if any(point["failed"] for point in points) else OK
