"""A benchmark's result as Markdown and as CSV; the JSON form is the result itself."""

from __future__ import annotations

import csv
import io

from nanoinfer.cli.bench_result import Result
from nanoinfer.cli.bench_sweep import level_of, sweep_rows
from nanoinfer.cli.bench_view import FEW_SAMPLES, figure_rows, latency_rows, machine_rows


def as_markdown(result: Result) -> str:
    """Tables to paste into an issue or a page."""
    facts = machine_rows(result)
    if "sweep" not in result:
        blocks = [_table([["", ""], *map(list, facts + figure_rows(result))]), _table(latency_rows(result))]
        few = any("*" in row[-2] for row in latency_rows(result))
        return "\n\n".join([*blocks, *([FEW_SAMPLES.replace("*", "\\*")] if few else [])])
    rows = sweep_rows(result["sweep"]["over"], result["sweep"]["points"])
    return "\n\n".join([_table([["", ""], *map(list, facts), ["workload", result["workload"]]]), _table(rows)])


def _table(rows: list[list[str]]) -> str:
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    rule = ["---", *["---:" for _ in head[1:]]] if len(head) > 2 else ["---"] * len(head)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *body])


def as_csv(result: Result) -> str:
    """A head and one row, or one row per level of a sweep: every number and word of the result, `a.b` for b in a."""
    points = result["sweep"]["points"] if "sweep" in result else [{}]
    common = {key: value for key, value in result.items() if key not in ("sweep", "repeats")}
    rows = [_flat({**common, **{k: v for k, v in point.items() if k != "repeats"}}) for point in points]
    if "sweep" in result:
        for row, point in zip(rows, points, strict=True):
            row["sweep.over"] = result["sweep"]["over"]
            row["sweep.level"] = level_of(point, result["sweep"]["over"])
    out = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")


def _flat(value: Result, prefix: str = "") -> Result:
    flat: Result = {}
    for key, each in value.items():
        if isinstance(each, dict):
            flat |= _flat(each, f"{prefix}{key}.")
        elif isinstance(each, list | tuple):
            flat[f"{prefix}{key}"] = "; ".join(map(str, each))
        else:
            flat[f"{prefix}{key}"] = each
    return flat
