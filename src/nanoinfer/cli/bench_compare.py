"""A result beside an earlier one: the ratio of every figure, and whether that is better."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoinfer.cli.bench_result import Result
from nanoinfer.errors import UserError
from nanoinfer.ui.text import count, rate

# What makes two results the same work. A file of another program has some of these; what it lacks is not compared.
WORK = (
    "schema_version", "model_id", "dataset", "dataset_file", "input_len", "output_len", "prefix_len", "num_prefixes",
    "temperature", "num_prompts", "seed", "requests_sha256", "request_rate", "burstiness", "max_concurrency",
    "goodput_slos_ms",
)  # fmt: skip

# Figures and whether more of it is better.
FIGURES = {
    "request_throughput": True,
    "request_goodput": True,
    "output_throughput": True,
    "total_token_throughput": True,
    "steady_state.output_throughput": True,
    "slo_attainment": True,
    **{f"{p}_{name}_ms": False for name in ("ttft", "tpot", "itl", "e2el") for p in ("mean", "median", "p90", "p99")},
    "prefix_cache.hit_rate": True,
    "kv.peak_active": False,
    "preemptions": False,
    "mean_step_ms": False,
    "mean_schedule_ms": False,
    "roofline.decode.fraction_of_copy": True,
    "roofline.prefill.fraction_of_product": True,
}
# Ratios this close to 1 are called the same.
SAME = 0.02


def read_result(path: Path) -> Result:
    """A saved result; UserError if the file is none."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"cannot read the result {path}: {why}; `nanoinfer bench -o FILE` writes one.") from error
    if not isinstance(result, dict) or ("output_throughput" not in result and "sweep" not in result):
        raise UserError(f"{path} is not the result of a benchmark; `nanoinfer bench -o FILE` writes one.")
    if "sweep" in result:
        raise UserError(f"{path} is a sweep, and this compares single results; compare with one that has no --sweep.")
    for name in FIGURES:
        value = _at(result, name)
        if value is not None and not _is_figure(value):
            raise UserError(f"{path} is damaged: its {name} is {json.dumps(value)}.")
    return result


def refuse_other_work(earlier: Result, described: Result, path: Path) -> None:
    """UserError that names the first difference if `described` is not the work that `earlier` did."""
    for key in WORK:
        if key in earlier and key in described and earlier[key] != described[key]:
            raise UserError(
                f"{path} cannot be compared: its {key} is {_show(earlier[key])}, here it is {_show(described[key])}."
            )


def _show(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)


def other_settings(earlier: Result, now: Result) -> list[str]:
    """`name: earlier -> now` for what differs about engine, software and machine, which a comparison may be about."""
    lines = []
    for part in ("engine", "env", "device"):
        before, after = earlier.get(part), now.get(part)
        if not isinstance(before, Mapping) or not isinstance(after, Mapping):
            continue
        for name in after:
            words = isinstance(after[name], str | bool) or part == "engine" or name == "threads"
            if words and name in before and before[name] != after[name] and name != "warnings":
                lines.append(f"{name}: {before[name]} -> {after[name]}")
    return lines


def compare(earlier: Result, now: Result) -> Result:
    """{figure: {earlier, now, ratio, verdict}} of those that both have; verdict is better, worse, same, or noise where
    the runs of one result differ among themselves as much as the two results do."""
    found = {}
    for name, more_is_better in FIGURES.items():
        before, after = _get(earlier, name), _get(now, name)
        if before is None or after is None:
            continue
        ratio = after / before if before else None
        difference, noise = abs(after - before), _deviation(earlier, name) + _deviation(now, name)
        verdict = "better" if (after > before) == more_is_better else "worse"
        if difference <= SAME * abs(before):
            verdict = "same"
        elif difference <= noise:
            verdict = "noise"
        found[name] = {"earlier": before, "now": after, "ratio": ratio, "verdict": verdict}
    return found


def _at(result: Result, path: str) -> Any:
    value: Any = result
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _get(result: Result, path: str) -> float | None:
    value = _at(result, path)
    return float(value) if _is_figure(value) else None


def _deviation(result: Result, name: str) -> float:
    return float((result.get("std") or {}).get(name) or 0.0)


def comparison_lines(comparison: Result, settings: list[str], path: Path) -> list[str]:
    """The comparison as text, better and worse marked by word and sign."""
    marks = {"better": "+ better", "worse": "- worse", "same": "  same", "noise": "  noise"}
    lines = [f"compared with {path}", *(f"  {line}" for line in settings)]
    lines.append(f"{'':36}{'earlier':>11}{'now':>11}{'ratio':>8}")
    for name, row in comparison.items():
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}x"
        figures = f"{_figure(row['earlier']):>11}{_figure(row['now']):>11}{ratio:>8}"
        lines.append(f"{name:36}{figures}  {marks[row['verdict']]}")
    return lines


def _figure(value: float) -> str:
    if value.is_integer():
        return count(value)
    return rate(value) if value >= 1 else f"{value:.3f}"
