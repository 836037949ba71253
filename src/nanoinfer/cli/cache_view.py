"""The reports of inspect-cache as text for a person and as JSON documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanoinfer.cli.cache_hits import PrefixBreak
from nanoinfer.cli.cache_map import bar, block_map, legend, reference_histogram
from nanoinfer.cli.cache_report import CacheReport, PrefixNode, tree_as_json, walk
from nanoinfer.cli.records import Decode
from nanoinfer.engine.events import FinishedSequence
from nanoinfer.engine.info import EngineInfo
from nanoinfer.ui.glyphs import UNICODE, Glyphs
from nanoinfer.ui.text import byte_size, count, one_line, percent, plural

MARGIN = " " * 12


@dataclass(frozen=True)
class Look:
    """How a report is shown: rows of its longest lists, and what turns token ids into text, if that is wanted."""

    top: int
    decode: Decode | None = None
    glyphs: Glyphs = UNICODE


@dataclass(frozen=True)
class CacheRun:
    """A run of prompts as seen by its KV pool: the fullest moment, the end, and every finished sequence."""

    info: EngineInfo
    peak: CacheReport
    peak_active: int
    end: CacheReport
    finished: Sequence[FinishedSequence]
    ids: Mapping[str, str | int]  # the engine's request ids -> those of the prompts file
    breaks: Sequence[PrefixBreak]  # parallel to `finished`
    problems: list[str] = field(default_factory=list)

    def name_of(self, sequence: FinishedSequence) -> str | int:
        return self.ids.get(sequence.request_id, sequence.request_id)


def run_as_text(run: CacheRun, look: Look) -> str:
    """The whole report of a run, at most 80 columns wide."""
    info, peak, end = run.info, run.peak, run.end
    return "\n".join(
        [
            f"KV pool     {plural(info.num_blocks, 'block')} of {plural(info.block_size, 'token')}, "
            f"{byte_size(info.kv_bytes)} ({byte_size(info.kv_bytes / info.num_blocks)} a block, {info.dtype})",
            "",
            *state_lines("near peak", peak, look),
            f"{MARGIN}most active at once: {count(run.peak_active)} ({percent(run.peak_active, info.num_blocks)})",
            *use_lines(peak, look),
            "",
            *state_lines("at the end", end, look),
            f"{MARGIN}{legend(look.glyphs)}",
            "",
            *tree_lines(end, look),
            "",
            *_hit_lines(run, look),
            "",
            *verdict_lines(end, run.problems),
        ]
    )


def snapshot_as_text(report: CacheReport, problems: list[str], engine: Mapping[str, Any], look: Look) -> str:
    """The report of one moment that was saved to a file."""
    model = f" of {one_line(str(engine['model']))}, {engine['dtype']}" if engine else ""
    return "\n".join(
        [
            f"KV pool     {plural(report.num_blocks, 'block')} of {plural(report.block_size, 'token')}{model}",
            "",
            *state_lines("at the end", report, look),
            f"{MARGIN}{legend(look.glyphs)}",
            *use_lines(report, look),
            "",
            *tree_lines(report, look),
            "",
            *verdict_lines(report, problems),
        ]
    )


def state_lines(label: str, report: CacheReport, look: Look) -> list[str]:
    """The three states as numbers and as a bar."""
    states = f"{count(report.active)} active, {count(report.cached)} cached, {count(report.free)} free"
    evictions = f"; {plural(report.evictions, 'eviction')} so far" if report.evictions else ""
    return [
        f"{label:12}{states}{evictions}",
        f"{MARGIN}{bar(report.active, report.cached, report.free, glyphs=look.glyphs)}",
    ]


def use_lines(report: CacheReport, look: Look) -> list[str]:
    """The map, and for active blocks who holds them and how full they are."""
    per_cell, shown, rows = block_map(report, look.glyphs)
    lines = [f"block map   {plural(per_cell, 'block')} a cell, by id; a digit: active and held by so many"]
    lines += [f"{MARGIN}{row}" for row in rows]
    if shown < report.num_blocks:
        lines.append(f"{MARGIN}and {plural(report.num_blocks - shown, 'free block')}")
    if report.references:
        slots = report.active * report.block_size
        lines.append(f"references  {plural(report.active, 'active block')} by the number of tables that hold them")
        lines += [f"{MARGIN}{row}" for row in reference_histogram(report, glyphs=look.glyphs)]
        lines.append(
            f"fragments   {count(report.empty_slots)} of {count(slots)} slots in active blocks are empty "
            f"({percent(report.empty_slots, slots)})"
        )
    return lines


def tree_lines(report: CacheReport, look: Look) -> list[str]:
    """The published prefixes as a tree, and the shared ones by what they saved."""
    published = sum(len(node.blocks) for node, _ in walk(report.tree))
    lines = [
        f"prefixes    {plural(published, 'block')} in {plural(len(report.tree), 'tree')}, the longest path has "
        f"{plural(report.depth, 'block')}",
        f"{MARGIN}(idle: how many admissions and releases ago it was last used)",
    ]
    rows = [_tree_row(node, level, report, look) for node, level in walk(report.tree)]
    lines += rows[: look.top] + more_rows(len(rows), look.top, "branch")
    shared = sorted((node for node, _ in walk(report.tree) if node.hits), key=lambda node: -_saved(node))
    if shared:
        lines.append("shared most")
        lines += [_shared_row(node, report, look) for node in shared[: min(look.top, 5)]]
    return lines


def more_rows(rows: int, top: int, what: str) -> list[str]:
    return [f"{MARGIN}... {plural(rows - top, f'more {what}')} (--top {rows} shows all)"] if rows > top else []


def _span(node: PrefixNode, block_size: int) -> str:
    start, end = node.depth * block_size, (node.depth + len(node.blocks)) * block_size
    return f"tokens {start}-{end - 1} ({plural(len(node.blocks), 'block')})"


def _tree_row(node: PrefixNode, level: int, report: CacheReport, look: Look) -> str:
    use = f"held by {node.refs}" if node.refs else f"idle {count(report.num_uses - node.last_use)}"
    row = f"  {'  ' * min(level, 8)}{_span(node, report.block_size)}, {plural(node.hits, 'hit')}, {use}"
    return _with_text(row, node, look)


def _saved(node: PrefixNode) -> int:
    """Tokens that the run's hits saved from being computed."""
    return sum(block.hits * len(block.token_ids or ()) for block in node.blocks)


def _shared_row(node: PrefixNode, report: CacheReport, look: Look) -> str:
    digest = (node.blocks[-1].digest or "")[:8]
    saved = plural(_saved(node), "token")
    row = f"  {digest} {_span(node, report.block_size)}, {plural(node.hits, 'hit')} saved {saved}"
    return _with_text(row, node, look)


def _with_text(row: str, node: PrefixNode, look: Look) -> str:
    if look.decode is None:
        return row
    return f"{row}  {one_line(look.decode(node.token_ids), max(78 - len(row), 12))}"


def _hit_lines(run: CacheRun, look: Look) -> list[str]:
    prompt = sum(sequence.prompt_tokens for sequence in run.finished)
    cached = sum(sequence.cached_tokens for sequence in run.finished)
    lines = [
        f"hits        {count(cached)} of {plural(prompt, 'prompt token')} ({percent(cached, prompt)}), "
        f"in whole blocks of {run.info.block_size}",
        f"  {'request':14} {'prompt':>7} {'cached':>7} {'hit':>5}  where the prefix broke",
    ]
    for sequence, broken in list(zip(run.finished, run.breaks, strict=True))[: look.top]:
        name, share = one_line(str(run.name_of(sequence)), 14), percent(sequence.cached_tokens, sequence.prompt_tokens)
        reason = one_line(broken.sentence(run.info.block_size), 80 - 40)
        lines.append(f"  {name:14} {sequence.prompt_tokens:7} {sequence.cached_tokens:7} {share:>5}  {reason}")
    return lines + more_rows(len(run.finished), look.top, "request")


def verdict_lines(report: CacheReport, problems: list[str]) -> list[str]:
    lines = []
    if report.next_victims:
        rest = " ..." if len(report.next_victims) > 10 else ""
        lines.append("next out    blocks " + ", ".join(map(str, report.next_victims[:10])) + rest)
    lines.append("integrity   " + ("BROKEN" if problems else "ok"))
    return lines + [f"{MARGIN}{problem}" for problem in problems]


# -- documents ---------------------------------------------------------------------------------------------------------


def _occupancy(report: CacheReport) -> dict[str, Any]:
    names = ("active", "cached", "free", "evictions", "references", "empty_slots", "fragmentation")
    return {name: getattr(report, name) for name in names}


def _tree_document(report: CacheReport) -> dict[str, Any]:
    return {"depth_blocks": report.depth, "num_uses": report.num_uses, "nodes": tree_as_json(report.tree)}


def snapshot_as_document(report: CacheReport, problems: list[str], engine: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "engine": dict(engine),
        "geometry": {"num_blocks": report.num_blocks, "block_size": report.block_size},
        "end": _occupancy(report),
        "block_map": report.cells,
        "prefix_tree": _tree_document(report),
        "next_victims": report.next_victims,
        "integrity": {"ok": not problems, "problems": problems},
    }


def run_as_document(run: CacheRun) -> dict[str, Any]:
    """The report as one JSON document."""
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
        "fullest": _occupancy(run.peak) | {"block_map": run.peak.cells},
        "end": _occupancy(run.end) | {"block_map": run.end.cells},
        "prefix_tree": _tree_document(run.end),
        "next_victims": run.end.next_victims,
        "requests": [
            {
                "id": run.name_of(sequence),
                "sample": sequence.index,
                "prompt_tokens": sequence.prompt_tokens,
                "cached_tokens": sequence.cached_tokens,
                "output_tokens": sequence.output_tokens,
                "preemptions": sequence.preemptions,
                "prefix_break": {"why": broken.why, "common_tokens": broken.common, "other": broken.other},
            }
            for sequence, broken in zip(run.finished, run.breaks, strict=True)
        ],
        "integrity": {"ok": not run.problems, "problems": run.problems},
    }
