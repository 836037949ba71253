"""A benchmark's result as a table to read and to paste."""

from __future__ import annotations

from typing import Any

from nanoinfer.ui.text import count, milliseconds, rate

Result = dict[str, Any]

_LABELS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E", "queue": "queue", "prefill": "prefill"}
_COLUMNS = ("mean", "p50", "p90", "p99")


def as_table(result: Result) -> str:
    """The block that a run ends with, at most 80 columns wide."""
    engine, prefix, kv = result["engine"], result["prefix_cache"], result["kv"]
    deviations = result.get("std", {})

    def throughput(key: str, unit: str) -> str:
        spread = f" ± {rate(deviations[key])}" if key in deviations else ""
        return f"{rate(result[key])}{spread} {unit}".rstrip()

    hits = (
        "-" if prefix["hit_rate"] is None else f"{100 * prefix['hit_rate']:.1f}% of {count(prefix['queries'])} tokens"
    )
    rows = [
        ("model", f"{result['model_id']}, {engine['dtype']}, {engine['device']}, tp {engine['tensor_parallel_size']}"),
        ("back ends", f"attention {engine['attention']}, kernels {engine['kernels']}, block {engine['block_size']}"),
        ("workload", result["workload"]),
        ("requests", f"{count(result['completed'])} done, {count(result['failed'])} failed, at most "
                     f"{count(result['max_concurrent_requests'])} at once"),
        ("duration", f"{result['duration']:.2f} s" + (f", mean of {len(result['repeats'])}" if deviations else "")),
        ("tokens", f"{count(result['total_input_tokens'])} in, {count(result['total_output_tokens'])} out"),
        ("requests/s", throughput("request_throughput", "")),
        ("output", throughput("output_throughput", "tok/s")
                   + f", peak {rate(result['max_output_tokens_per_s'])} in one second"),
        ("in and out", throughput("total_token_throughput", "tok/s")),
        ("prefix hits", hits),
        ("KV peak", f"{count(kv['peak_active'])} of {count(kv['blocks'])} blocks, {count(result['preemptions'])} "
                    "preemptions"),
        ("steps", f"{count(result['steps'])} of {milliseconds(result['mean_step_ms'])}, "
                  f"{milliseconds(result['mean_schedule_ms'])} of it scheduling"),
    ]  # fmt: skip
    lines = [f"{label:12} {value}" for label, value in rows]
    return "\n".join([*lines, *_goodput_lines(result), "", *_latency_lines(result)])


def _goodput_lines(result: Result) -> list[str]:
    slos = result.get("goodput_slos_ms")
    if not slos:
        return []
    by_metric = result["slo_attainment_by_metric"]
    kept = ", ".join(f"{name} <= {limit:g} ms {100 * by_metric[name]:.1f}%" for name, limit in slos.items())
    return [
        f"{'goodput':12} {rate(result['request_goodput'])} req/s, {100 * result['slo_attainment']:.1f}% good ({kept})"
    ]


def _latency_lines(result: Result) -> list[str]:
    lines = [f"{'':12}" + "".join(f"{name:>11}" for name in (*_COLUMNS, "n"))]
    few = False
    for key, label in _LABELS.items():
        values = [result[f"{column}_{key}_ms"] for column in _COLUMNS]
        n = result[f"n_{key}"]
        if n:
            cells = [milliseconds(value) for value in values]
            if n < 100:
                cells[-1], few = cells[-1] + "*", True
            lines.append(f"{label:12}" + "".join(f"{cell:>11}" for cell in cells) + f"{count(n):>11}")
    if few:
        lines.append("* fewer than 100 samples: hardly more than the maximum")
    return lines
