"""A sweep over loads: which levels, how many requests at each, and the table and plot that the levels end in."""

from __future__ import annotations

import math

from nanoinfer.cli.bench_measure import Load
from nanoinfer.cli.bench_options import Sweep
from nanoinfer.cli.bench_result import Result
from nanoinfer.ui.text import count, rate

# At a low concurrency few requests give a mean as good as many do at a high one, in a fraction of the time.
REQUESTS_PER_SLOT, LEAST_REQUESTS = 4, 8

PLOT_WIDTH, PLOT_HEIGHT = 60, 12


def sweep_loads(sweep: Sweep, num_prompts: int, max_num_seqs: int) -> list[Load]:
    """The loads of a sweep, the lightest first. `num_prompts` is the most that one of them sends."""
    if sweep.over == "rate":
        assert sweep.levels is not None, sweep
        return [Load(num_prompts, level, None) for level in sweep.levels]
    most = min(num_prompts, max_num_seqs)
    levels = sweep.levels or [2**power for power in range(most.bit_length())]
    return [
        Load(min(num_prompts, max(REQUESTS_PER_SLOT * int(level), LEAST_REQUESTS)), math.inf, int(level))
        for level in levels
    ]


def level_of(point: Result, over: str) -> str:
    return f"{point['max_concurrency']}" if over == "concurrency" else f"{point['request_rate']:g}"


def sweep_rows(over: str, points: list[Result]) -> list[list[str]]:
    """A head, then a row per level: load, throughput, and the latencies that a user feels."""
    gated = "slo_attainment" in points[0]
    heads = ["at once" if over == "concurrency" else "req/s in", "req/s", "out tok/s", "TTFT p50", "TTFT p99"]
    heads += ["TPOT p50", "TPOT p99", "hits"] + (["good"] if gated else [])
    rows = [heads]
    for point in points:
        hit_rate = point["prefix_cache"]["hit_rate"]
        row = [level_of(point, over), rate(point["request_throughput"]), rate(point["output_throughput"])]
        row += [_ms(point[f"{p}_{name}_ms"]) for name in ("ttft", "tpot") for p in ("p50", "p99")]
        row.append("-" if hit_rate is None else f"{100 * hit_rate:.0f}%")
        row += [f"{100 * (point['slo_attainment'] or 0):.0f}%"] if gated else []
        rows.append(row)
    return rows


def sweep_table(over: str, points: list[Result]) -> list[str]:
    """The rows as lines of at most 80 columns."""
    rows = sweep_rows(over, points)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _ms(value: float | None) -> str:
    return "-" if value is None else rate(value)


def latency_plot(over: str, points: list[Result]) -> list[str]:
    """Output tokens per second against the median TPOT in ms, each level marked by a letter; plain ASCII."""
    known = [(point, point["output_throughput"], point["p50_tpot_ms"]) for point in points]
    known = [(point, x, y) for point, x, y in known if y is not None]
    if not known:
        return []
    # Axes from zero, so that distances are proportional to what they stand for.
    right, top = (max(values) or 1.0 for values in ([x for _, x, _ in known], [y for _, _, y in known]))
    grid = [[" "] * PLOT_WIDTH for _ in range(PLOT_HEIGHT)]
    for number, (_, x, y) in enumerate(known):
        column = round(x / right * (PLOT_WIDTH - 1))
        row = PLOT_HEIGHT - 1 - round(y / top * (PLOT_HEIGHT - 1))
        grid[row][column] = _mark(number)
    margin = max(len(_ms(top)), 4)
    labels = {0: _ms(top), PLOT_HEIGHT - 1: "0"}
    lines = ["median TPOT, ms"]
    lines += [f"{labels.get(i, ''):>{margin}} |{''.join(cells).rstrip()}" for i, cells in enumerate(grid)]
    lines.append(" " * margin + " +" + "-" * PLOT_WIDTH)
    right_label = f"{count(right) if right >= 100 else rate(right)} output tok/s"
    lines.append(" " * margin + "  0" + right_label.rjust(PLOT_WIDTH - 1))
    unit = "at once" if over == "concurrency" else "req/s"
    legend = [f"{_mark(number)} {level_of(point, over)}" for number, (point, _, _) in enumerate(known)]
    return [*lines, f"{'':{margin}}  {unit}: " + ", ".join(legend)]


def _mark(number: int) -> str:
    return chr(ord("a") + number % 26)


def best_within_limits(points: list[Result], attainment: float) -> Result | None:
    """The level of the highest throughput at which at least `attainment` of the requests kept every limit."""
    good = [point for point in points if (point["slo_attainment"] or 0.0) >= attainment]
    return max(good, key=lambda point: float(point["output_throughput"]), default=None)
