"""The reports of inspect-cache as text for a person and as JSON documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nanoinfer.cli.cache_plan import MemoryPlan
from nanoinfer.cli.cache_report import CacheReport, PrefixNode, tree_as_json
from nanoinfer.engine.events import FinishedSequence
from nanoinfer.engine.info import EngineInfo
from nanoinfer.models.config import ModelConfig
from nanoinfer.ui.text import byte_size, count, one_line, plural

Decode = Callable[[list[int]], str]

BAR_WIDTH = 50


def bar(active: int, cached: int, free: int, width: int = BAR_WIDTH) -> str:
    """The pool in three states, `width` cells long; a state that exists has at least one cell."""
    total = active + cached + free
    cells = [max(round(width * part / total), 1) if part else 0 for part in (active, cached)]
    rest = width - sum(cells)
    if free and rest < 1:
        cells[cells.index(max(cells))] -= 1 - rest
        rest = 1
    return "█" * cells[0] + "▓" * cells[1] + "░" * rest


@dataclass(frozen=True)
class CacheRun:
    """A run of prompts as seen by its KV pool: the fullest moment, the end, and every finished sequence."""

    info: EngineInfo
    peak: CacheReport
    peak_active: int
    end: CacheReport
    finished: Sequence[FinishedSequence]
    ids: Mapping[str, str | int]  # the engine's request ids -> those of the prompts file
    problems: list[str]

    def name_of(self, sequence: FinishedSequence) -> str | int:
        return self.ids.get(sequence.request_id, sequence.request_id)


def as_text(run: CacheRun, top: int, decode: Decode | None) -> str:
    """The whole report, at most 80 columns wide; `decode` shows the text of cached prefixes."""
    info, peak, end = run.info, run.peak, run.end
    lines = [
        f"KV pool     {count(info.num_blocks)} blocks of {info.block_size} tokens, {byte_size(info.kv_bytes)} "
        f"({byte_size(info.kv_bytes / info.num_blocks)} a block, {info.dtype})",
        "",
        f"fullest     {_states(peak)}",
        f"            {bar(peak.active, peak.cached, peak.free)}",
        f"            most active at once: {count(run.peak_active)} ({_percent(run.peak_active, info.num_blocks)}); "
        f"{plural(peak.wasted_tokens, 'empty slot')} in last blocks",
        f"            {_references(peak)}",
        f"at the end  {_states(end)}, {plural(end.evictions, 'eviction')}",
        f"            {bar(end.active, end.cached, end.free)}",
        "            █ active   ▓ cached (can be hit, or evicted)   ░ free",
        "",
        *_tree_lines(end, top, decode),
        "",
        *_hit_lines(run, top),
        "",
    ]
    if end.next_victims:
        lines.append("next out    blocks " + ", ".join(map(str, end.next_victims[:10])))
    lines.append("integrity   " + ("BROKEN" if run.problems else "ok"))
    lines += [f"            {problem}" for problem in run.problems]
    return "\n".join(lines)


def _states(report: CacheReport) -> str:
    return f"{count(report.active)} active, {count(report.cached)} cached, {count(report.free)} free"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "0%"


def _references(report: CacheReport) -> str:
    shared = [
        f"{plural(blocks, 'block')} by {refs} sequences" for refs, blocks in report.references.items() if refs > 1
    ]
    return "shared: " + (", ".join(shared[-3:]) if shared else "no block at that moment")


def _tree_lines(report: CacheReport, top: int, decode: Decode | None) -> list[str]:
    published = report.active + report.cached
    lines = [
        f"prefixes    {plural(published, 'block')} in {plural(len(report.tree), 'tree')}, the longest path has "
        f"{plural(report.depth, 'block')}"
    ]
    rows: list[str] = []
    stack = [(node, 0) for node in reversed(report.tree)]
    while stack:
        node, level = stack.pop()
        rows.append(_tree_row(node, level, report.block_size, decode))
        stack += [(child, level + 1) for child in reversed(node.children)]
    lines += rows[:top]
    if len(rows) > top:
        lines.append(f"            ... {len(rows) - top} more branches (--top {len(rows)} shows all)")
    return lines


def _tree_row(node: PrefixNode, level: int, block_size: int, decode: Decode | None) -> str:
    start, end = node.depth * block_size, (node.depth + len(node.blocks)) * block_size
    indent = "  " * min(level, 8)
    row = f"  {indent}tokens {start}-{end - 1} ({plural(len(node.blocks), 'block')}), {plural(node.hits, 'hit')}"
    if decode is not None:
        row += "  " + one_line(decode(node.token_ids), max(78 - len(row), 20))
    return row


def _hit_lines(run: CacheRun, top: int) -> list[str]:
    prompt = sum(sequence.prompt_tokens for sequence in run.finished)
    cached = sum(sequence.cached_tokens for sequence in run.finished)
    lines = [
        f"hits        {count(cached)} of {count(prompt)} prompt tokens ({_percent(cached, prompt)}), "
        f"in whole blocks of {run.info.block_size}",
        f"            {'request':24} {'prompt':>8} {'cached':>8} {'hit':>5}",
    ]
    for sequence in run.finished[:top]:
        name, share = one_line(str(run.name_of(sequence)), 24), _percent(sequence.cached_tokens, sequence.prompt_tokens)
        lines.append(f"            {name:24} {sequence.prompt_tokens:8} {sequence.cached_tokens:8} {share:>5}")
    if len(run.finished) > top:
        lines.append(f"            ... {len(run.finished) - top} more (--top {len(run.finished)} shows all)")
    return lines


def as_document(run: CacheRun) -> dict[str, Any]:
    """The report as one JSON document."""

    def occupancy(report: CacheReport) -> dict[str, Any]:
        names = ("active", "cached", "free", "evictions", "references", "wasted_tokens")
        return {name: getattr(report, name) for name in names}

    info = run.info
    return {
        "geometry": {
            "num_blocks": info.num_blocks,
            "block_size": info.block_size,
            "kv_bytes": info.kv_bytes,
            "dtype": info.dtype,
            "tensor_parallel_size": info.tensor_parallel_size,
        },
        "peak_active_blocks": run.peak_active,
        "fullest": occupancy(run.peak),
        "end": occupancy(run.end),
        "prefix_tree": {"depth_blocks": run.end.depth, "nodes": tree_as_json(run.end.tree)},
        "next_victims": run.end.next_victims,
        "requests": [
            {
                "id": run.name_of(sequence),
                "sample": sequence.index,
                "prompt_tokens": sequence.prompt_tokens,
                "cached_tokens": sequence.cached_tokens,
                "output_tokens": sequence.output_tokens,
                "preemptions": sequence.preemptions,
            }
            for sequence in run.finished
        ],
        "integrity": {"ok": not run.problems, "problems": run.problems},
    }


def plan_as_text(name: str, model: ModelConfig, plan: MemoryPlan) -> str:
    """The budget of one rank, line by line, and what it holds."""
    split = f", split over {plan.tp} GPUs; all figures are of one" if plan.tp > 1 else ""
    lengths = sorted({n for n in (1024, 4096, 16_384) if n < plan.max_model_len} | {plan.max_model_len})
    return "\n".join(
        [
            f"{name}: {model.num_parameters() / 1e9:.2f} billion parameters in {plan.dtype}{split}",
            "",
            f"  memory                {byte_size(plan.memory):>10}",
            f"  usable                {byte_size(plan.usable):>10}",
            f"  - weights             {byte_size(plan.weights):>10}",
            f"  - activations         {byte_size(plan.activations):>10}   estimate",
            f"  - overhead            {byte_size(plan.overhead):>10}   estimate",
            f"  = KV pool             {byte_size(plan.kv_bytes):>10}   {count(plan.num_blocks)} blocks of "
            f"{plan.block_size} tokens",
            "",
            f"  KV of one token       {count(plan.kv_bytes_per_token):>10} B",
            f"  tokens that fit       {count(plan.tokens):>10}",
            *(f"  sequences of {count(n):>8} {count(plan.sequences(n)):>10}" for n in lengths),
        ]
    )


def plan_as_document(name: str, model: ModelConfig, plan: MemoryPlan) -> dict[str, Any]:
    derived = {"kv_bytes": plan.kv_bytes, "tokens": plan.tokens, "sequences": plan.sequences(plan.max_model_len)}
    estimates = ["activations", "overhead"]
    return {"model": name, "parameters": model.num_parameters(), **asdict(plan), **derived, "estimates": estimates}
