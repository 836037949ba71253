"""A benchmark's result as a table to read and to paste: what was measured, on which machine, and the figures."""

from __future__ import annotations

from nanoinfer.cli.bench_result import Result
from nanoinfer.cli.bench_sweep import latency_plot, level_of, sweep_table
from nanoinfer.ui.text import byte_size, count, milliseconds, plural, rate

Row = tuple[str, str]

_LABELS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E", "queue": "queue", "prefill": "prefill"}
_COLUMNS = ("mean", "p50", "p90", "p99")


def si(number: float, unit: str) -> str:
    """In decimal steps: 13.5 GB/s, 785 TFLOP/s."""
    for prefix in ("", "k", "M", "G"):
        if number < 1000:
            return f"{rate(number)} {prefix}{unit}"
        number /= 1000
    return f"{rate(number)} T{unit}"


def machine_rows(result: Result) -> list[Row]:
    """What was measured, where, and with which software."""
    engine, env, device = result["engine"], result["env"], result["device"]
    threads = f", {plural(device['threads'], 'thread')}" if device["threads"] else ""
    host = "" if engine["device"] == "cpu" else f"host {env['cpu']}, {plural(env['cpu_cores'], 'core')}, "
    packages = [f"{name} {env[name]}" for name in ("nanoinfer", "torch", "triton", "flash-attn") if env.get(name)]
    return [
        ("model", f"{result['model_id']}, {engine['dtype']}, {engine['device']}, tp {engine['tensor_parallel_size']}"),
        ("machine", f"{device['name']}{threads}, {byte_size(device['memory_bytes'])}; {host}{env['system']}"),
        ("its limits", f"copy {si(device['copy_bytes_per_s'], 'B/s')}, matrix product "
                       f"{si(device['flops_per_s'], 'FLOP/s')} (measured now)"),
        ("software", ", ".join([*packages, f"Python {env['python']}"])),
        ("back ends", f"attention {engine['attention']}, kernels {engine['kernels']}, block {engine['block_size']}, "
                      f"{engine['schedule']}"),
    ]  # fmt: skip


def figure_rows(result: Result) -> list[Row]:
    """The figures of one load, without its latencies."""
    prefix, kv = result["prefix_cache"], result["kv"]
    deviations = result.get("std", {})

    def throughput(key: str, unit: str) -> str:
        spread = f" ± {rate(deviations[key])}" if key in deviations else ""
        return f"{rate(result[key])}{spread} {unit}".rstrip()

    hits = (
        "-" if prefix["hit_rate"] is None else f"{100 * prefix['hit_rate']:.1f}% of {count(prefix['queries'])} tokens"
    )
    rows = [
        ("workload", result["workload"]),
        ("requests", f"{count(result['completed'])} done, {count(result['failed'])} failed, at most "
                     f"{count(result['max_concurrent_requests'])} at once"),
        ("duration", f"{result['duration']:.2f} s" + (f", mean of {len(result['repeats'])}" if deviations else "")),
        ("tokens", f"{count(result['total_input_tokens'])} in, {count(result['total_output_tokens'])} out"),
        ("requests/s", throughput("request_throughput", "")),
        ("output", throughput("output_throughput", "tok/s")
                   + f", peak {rate(result['max_output_tokens_per_s'])} in one second"),
        ("in and out", throughput("total_token_throughput", "tok/s")),
        *_steady_row(result),
        ("prefix hits", hits),
        ("KV peak", f"{count(kv['peak_active'])} of {count(kv['blocks'])} blocks, "
                    f"{plural(round(result['preemptions']), 'preemption')}"),
        ("steps", f"{count(result['steps'])}, each with {milliseconds(result['mean_schedule_ms'])} of scheduling and "
                  f"{milliseconds(result['mean_device_ms'])} on the device"),
        *_phase_rows(result),
        *_goodput_rows(result),
    ]  # fmt: skip
    return rows


def _steady_row(result: Result) -> list[Row]:
    steady = result["steady_state"]
    if steady is None:
        return []
    return [
        (
            "steady",
            f"{rate(steady['output_throughput'])} output tok/s while {rate(steady['mean_sequences'])} sequences ran, "
            f"{steady['seconds']:.2f} s",
        )
    ]


def _phase_rows(result: Result) -> list[Row]:
    """Prefill, decode and mixed steps; how near the device's limits is said of steps that prefill, or only decode."""
    roofline, rows = result["roofline"], []
    for kind, phase in result["phases"].items():
        tokens = {"prefill": "prefill_tokens_per_s", "decode": "decode_tokens_per_s"}
        speeds = [f"{rate(phase[key])} {name} tok/s" for name, key in tokens.items() if phase[key]]
        rows.append((kind, f"{plural(phase['steps'], 'step')} of {milliseconds(phase['mean_step_ms'])}, "
                           + ", ".join(speeds)))  # fmt: skip
    if "prefill" in roofline:
        found = roofline["prefill"]
        speed = si(found["flops_per_s"], "FLOP/s")
        rows.append(("of product", f"{100 * found['fraction_of_product']:.0f}%: steps with prefill did {speed}"))
    if "decode" in roofline:
        found = roofline["decode"]
        speed, each = si(found["bytes_per_s"], "B/s"), si(found["bytes_per_step"], "B")
        rows.append(("of copy", f"{100 * found['fraction_of_copy']:.0f}%: decode steps read {speed}, {each} each"))
    return rows


def _goodput_rows(result: Result) -> list[Row]:
    slos = result.get("goodput_slos_ms")
    if not slos:
        return []
    by_metric = result["slo_attainment_by_metric"]
    kept = ", ".join(f"{name} <= {limit:g} ms {100 * by_metric[name]:.1f}%" for name, limit in slos.items())
    good = f"{rate(result['request_goodput'])} req/s, {100 * (result['slo_attainment'] or 0):.1f}% good"
    return [("goodput", good), ("", kept)]


def latency_rows(result: Result) -> list[list[str]]:
    """A head, then a row per latency: mean and percentiles in ms, and the number of samples."""
    rows = [["", *_COLUMNS, "n"]]
    for key, label in _LABELS.items():
        n = result[f"n_{key}"]
        if n:
            cells = [milliseconds(result[f"{column}_{key}_ms"]) for column in _COLUMNS]
            rows.append([label, *cells[:-1], cells[-1] + ("*" if n < 100 else ""), count(n)])
    return rows


FEW_SAMPLES = "* fewer than 100 samples: hardly more than the maximum"


def as_table(result: Result) -> str:
    """The block that a run ends with, at most 80 columns wide but for names that are longer."""
    if "sweep" in result:
        return _sweep_as_table(result)
    lines = [f"{label:12} {value}" for label, value in machine_rows(result) + figure_rows(result)]
    rows = latency_rows(result)
    lines.append("")
    lines += [f"{row[0]:12}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in rows]
    if any("*" in row[-2] for row in rows):
        lines.append(FEW_SAMPLES)
    return "\n".join(lines)


def _sweep_as_table(result: Result) -> str:
    over, points = result["sweep"]["over"], result["sweep"]["points"]
    lines = [f"{label:12} {value}" for label, value in machine_rows(result)]
    lines.append(f"{'workload':12} {result['workload']}, latencies in ms")
    lines += ["", *sweep_table(over, points), "", *latency_plot(over, points)]
    best = result["sweep"].get("best_within_limits")
    if "slo_attainment" in points[0]:
        limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in points[0]["goodput_slos_ms"].items())
        asked = f"{100 * result['sweep']['attainment']:g}%"
        lines += ["", f"no level kept {limits} for {asked} of its requests" if best is None else
                  f"fastest with {limits} for {asked} of its requests: {level_of(points[best], over)}"]  # fmt: skip
    return "\n".join(lines)
