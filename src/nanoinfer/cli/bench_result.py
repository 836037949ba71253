"""A benchmark's result as one flat document: vLLM's result keys, and what nanoinfer can say beyond them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nanoinfer.cli.bench_roofline import StepCost, achieved, with_limits
from nanoinfer.cli.bench_steps import Phase, StepLog
from nanoinfer.cli.load_driver import LoadResult
from nanoinfer.cli.version import environment
from nanoinfer.engine.latency import gaps_ms, latencies_ms

if TYPE_CHECKING:
    from nanoinfer.engine.events import FinishedSequence
    from nanoinfer.engine.info import DeviceLimits, EngineInfo
    from nanoinfer.engine.latency import Distribution
    from nanoinfer.engine.metrics import Metrics

SCHEMA_VERSION = 1
LATENCIES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e", "queue": "queue", "prefill": "prefill"}

Result = dict[str, Any]


def run_result(metrics: Metrics, load: LoadResult, log: StepLog, cost: StepCost) -> Result:
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
        result |= _latency_keys(key, getattr(latencies, name), _values(done, name))
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
    result["mean_device_ms"] = snapshot.run.device_ms / max(snapshot.run.steps, 1)
    steady = log.steady_state()
    result["steady_state"] = asdict(steady) | {"output_throughput": steady.output_throughput} if steady else None
    result["phases"] = {kind: _phase(phase) for kind, phase in sorted(log.phases.items())}
    result["roofline"] = achieved(cost, log.phases)
    return result


def _phase(phase: Phase) -> Result:
    seconds = phase.seconds or math.inf  # a clock that does not move gives no rates
    return {
        "steps": phase.steps,
        "seconds": phase.seconds,
        "mean_step_ms": phase.seconds * 1e3 / phase.steps,
        "mean_device_ms": phase.device_seconds * 1e3 / phase.steps,
        "prefill_tokens": phase.prefill_tokens,
        "decode_tokens": phase.decode_tokens,
        "prefill_tokens_per_s": phase.prefill_tokens / seconds,
        "decode_tokens_per_s": phase.decode_tokens / seconds,
    }


def _values(sequences: Sequence[FinishedSequence], name: str) -> list[float]:
    """All values of a latency, which the standard deviation needs."""
    if name == "itl":
        return [float(gap) for sequence in sequences for gap in gaps_ms(sequence)]
    values = [latencies_ms(sequence)[name] for sequence in sequences]
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
    deviations = {
        key: statistics.stdev(found) if len(found := _numbers(runs, key)) > 1 else 0.0
        for key in runs[0]
        if _numbers(runs, key)
    }
    mean: Result = _mean(list(runs))
    return {**mean, "std": deviations, "repeats": list(runs)}


def _numbers(runs: Sequence[Result], key: str) -> list[float]:
    return [run[key] for run in runs if _is_number(run.get(key))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mean(values: list[Any]) -> Any:
    """The mean of numbers; of objects, key by key; of anything else the first. What a run lacks does not count."""
    known = [value for value in values if value is not None]
    if known and all(isinstance(value, dict) for value in known):
        keys = dict.fromkeys(key for value in known for key in value)
        return {key: _mean([value.get(key) for value in known]) for key in keys}
    if known and all(_is_number(value) for value in known):
        first = known[0]
        # Counts that never change stay whole numbers.
        return first if all(value == first for value in known) else statistics.fmean(known)
    return known[0] if known else None


def describe(info: EngineInfo, workload: Result, burstiness: float) -> Result:
    """What was measured, where and with which settings; the load comes beside it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "nanoinfer",
        "model_id": info.model,
        "tokenizer_id": info.model,
        **workload,
        "burstiness": burstiness,
        "engine": asdict(info),
        "env": environment(),
    }


def against_limits(result: Result, limits: DeviceLimits) -> Result:
    """The result with the device's measured limits, and what fraction of them its steps reached."""
    return {**result, "device": asdict(limits), "roofline": with_limits(result["roofline"], limits)}
