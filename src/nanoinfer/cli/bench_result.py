"""A benchmark's result as one flat document: vLLM's result keys, and what nanoinfer can say beyond them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nanoinfer.cli.load_driver import LoadResult
from nanoinfer.cli.version import environment

if TYPE_CHECKING:
    from nanoinfer.engine.info import EngineInfo
    from nanoinfer.engine.latency import Distribution
    from nanoinfer.engine.metrics import Metrics

SCHEMA_VERSION = 1
LATENCIES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e", "queue": "queue", "prefill": "prefill"}

Result = dict[str, Any]


def run_result(metrics: Metrics, load: LoadResult) -> Result:
    """One run's figures. Throughputs are per second of `duration`; latencies in milliseconds, over successes."""
    snapshot, seconds = metrics.snapshot(), load.seconds
    done = [sequence for sequence in metrics.sequences if sequence.succeeded]
    tokens_in, tokens_out = sum(s.prompt_tokens for s in done), sum(s.output_tokens for s in done)
    goodput = snapshot.goodput
    blocks = snapshot.blocks_active + snapshot.blocks_cached + snapshot.blocks_free
    result: Result = {
        "duration": seconds,
        "completed": len(done),
        "failed": goodput.attempted - len(done),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(done) / seconds,
        "request_goodput": goodput.good / seconds if goodput.slos else None,
        "output_throughput": tokens_out / seconds,
        "total_token_throughput": (tokens_in + tokens_out) / seconds,
        "max_output_tokens_per_s": float(max(load.tokens_per_second.values(), default=0)),
        "max_concurrent_requests": load.max_in_flight,
    }
    latencies = metrics.run_latencies()
    for key, name in LATENCIES.items():
        result |= _latency_keys(key, getattr(latencies, name), _values(metrics, name))
    if goodput.slos:
        result["goodput_slos_ms"] = {slo.metric: slo.limit_ms for slo in goodput.slos}
        result["slo_attainment"] = goodput.attainment
        pairs = zip(goodput.slos, goodput.met, strict=True)
        result["slo_attainment_by_metric"] = {slo.metric: met / max(goodput.attempted, 1) for slo, met in pairs}
    result["prefix_cache"] = {
        "queries": snapshot.run.prompt_tokens,
        "hits": snapshot.run.cached_tokens,
        "hit_rate": snapshot.run.hit_ratio,
    }
    result["kv"] = {"blocks": blocks, "peak_active": snapshot.peak_blocks_active}
    result["preemptions"] = snapshot.run.preemptions
    result["steps"] = snapshot.run.steps
    result["mean_schedule_ms"] = snapshot.run.schedule_ms / max(snapshot.run.steps, 1)
    result["mean_step_ms"] = snapshot.run.step_ms / max(snapshot.run.steps, 1)
    return result


def _values(metrics: Metrics, name: str) -> list[float]:
    """All values of a latency, which the standard deviation needs."""
    done = [sequence for sequence in metrics.sequences if sequence.succeeded]
    if name == "itl":
        return [float(gap) for sequence in done for gap in sequence.itl_ms]
    values = [getattr(sequence, f"{name}_ms") for sequence in done]
    return [value for value in values if value is not None]


def _latency_keys(key: str, found: Distribution | None, values: list[float]) -> Result:
    names = (f"mean_{key}_ms", f"median_{key}_ms", f"std_{key}_ms", f"p50_{key}_ms", f"p90_{key}_ms", f"p99_{key}_ms")
    if found is None:
        return {**dict.fromkeys(names), f"n_{key}": 0}
    figures = (found.mean, found.p50, statistics.pstdev(values), found.p50, found.p90, found.p99)
    return {**dict(zip(names, figures, strict=True)), f"n_{key}": found.count}


def combine(runs: Sequence[Result]) -> Result:
    """Several runs as one result: the mean of every number, with `std` beside it and the runs themselves below."""
    if len(runs) == 1:
        return dict(runs[0])
    numeric = [key for key, value in runs[0].items() if isinstance(value, int | float) and not isinstance(value, bool)]
    combined = dict(runs[0])
    deviations = {}
    for key in numeric:
        values = [run[key] for run in runs if run[key] is not None]
        combined[key] = statistics.fmean(values)
        deviations[key] = statistics.stdev(values) if len(values) > 1 else 0.0
    return {**combined, "std": deviations, "repeats": list(runs)}


def describe(info: EngineInfo, workload: Result, request_rate: float, burstiness: float, limit: int | None) -> Result:
    """What was measured, where and with which settings: the part of a result that comes before its figures."""
    return {
        "schema_version": SCHEMA_VERSION,
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "nanoinfer",
        "model_id": info.model,
        "tokenizer_id": info.model,
        **workload,
        "request_rate": "inf" if math.isinf(request_rate) else request_rate,
        "burstiness": burstiness,
        "max_concurrency": limit,
        "engine": asdict(info),
        "env": environment(),
    }
