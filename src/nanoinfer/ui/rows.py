"""The rows that show a snapshot, each fitted to a width. The live display and the panels are made of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nanoinfer.engine.latency import Distribution
from nanoinfer.ui.glyphs import (
    UNICODE,
    Glyphs,
    Piece,
    bar,
    cells_of,
    clip,
    clip_left,
    harmless,
    mark,
    sparkline,
    width_of,
)
from nanoinfer.ui.snapshot import RunSnapshot
from nanoinfer.ui.text import byte_size, count, duration, milliseconds, percent, plural, rate

LABEL_WIDTH = 10
LEAST_BAR = 10
MODEL_WIDTH = 40

# The sixteen colours of the terminal's own theme, so that both light and dark backgrounds work.
DIM, BOLD, GOOD, SHARED, BAD, WARN = "dim", "bold", "green", "cyan", "red", "yellow"

Row = list[Piece]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a row. Where the row is too long, the parts of the lowest priority go first; priority 0 stays."""

    text: str
    style: str = ""
    priority: int = 0  # 0 is the first


@dataclass(frozen=True, slots=True)
class Layout:
    """Columns to fill, and the characters to do it with."""

    width: int = 80
    glyphs: Glyphs = UNICODE

    @property
    def is_wide(self) -> bool:
        return self.width >= 76

    def row(self, label: str, parts: Iterable[Part], separator: str | None = None) -> Row:
        """A label and as many of the parts as fit; a last one that does not fit is cut."""
        between = separator if separator is not None else f" {self.glyphs.dot} "
        kept = [part for part in parts if part.text]
        widths = [width_of(part.text) for part in kept]
        room = self.width - LABEL_WIDTH
        while sum(widths) + len(between) * (len(kept) - 1) > room and (lowest := max(part.priority for part in kept)):
            last = max(i for i, part in enumerate(kept) if part.priority == lowest)
            del kept[last], widths[last]
        pieces: Row = [_label(label)]
        for i, part in enumerate(kept):
            if room <= 0:
                break
            pieces += [(between, DIM)] if i else []
            pieces.append((clip(part.text, room, self.glyphs), part.style))
            room -= widths[i] + len(between)
        return pieces


def _label(text: str) -> Piece:
    return f"{text:{LABEL_WIDTH}}", DIM


def title_row(snapshot: RunSnapshot, layout: Layout) -> Row:
    left = " ".join(filter(None, ("nanoinfer", harmless(snapshot.title, layout.glyphs))))
    right = f"{duration(snapshot.metrics.run.seconds)} elapsed"
    middle = f" {layout.glyphs.dot} {snapshot.phase}"
    gap = layout.width - width_of(left) - len(middle) - len(right)
    if gap < 1:
        return [(clip(left + middle, layout.width, layout.glyphs), BOLD)]
    return [(left, BOLD), (middle, ""), (" " * gap + right, DIM)]


def model_row(snapshot: RunSnapshot, layout: Layout) -> Row:
    info = snapshot.info
    name = clip_left(harmless(info.model, layout.glyphs), MODEL_WIDTH, layout.glyphs)
    return layout.row(
        "model",
        [
            Part(name, BOLD),
            Part(f"{info.device} {info.dtype}"),
            Part(f"tp {info.tensor_parallel_size}", priority=1),
            Part(f"context {count(info.max_model_len)}", DIM, priority=2),
        ],
    )


def engine_row(snapshot: RunSnapshot, layout: Layout) -> Row:
    info = snapshot.info
    return layout.row(
        "engine",
        [
            Part(f"attention {info.attention}"),
            Part(f"kernels {info.kernels}"),
            Part(f"schedule {info.schedule}", DIM, priority=1),
            Part(f"at most {plural(info.max_num_seqs, 'sequence')}", DIM, priority=2),
        ],
    )


def requests_rows(snapshot: RunSnapshot, layout: Layout) -> list[Row]:
    """The bar, done and failed count requests; running, waiting and to come count sequences, n for each request."""
    requests, metrics, glyphs = snapshot.requests, snapshot.metrics, layout.glyphs
    done = f" {count(requests.done)} of {count(requests.total)} done"
    eta = f" {glyphs.dot} {duration(snapshot.eta_s)} left" if snapshot.eta_s is not None else ""
    if len(done) + len(eta) > layout.width - LABEL_WIDTH - LEAST_BAR:
        done = f" {percent(requests.done, requests.total)}"
    room = layout.width - LABEL_WIDTH - len(done) - len(eta)
    answered = requests.done - requests.failed
    unfinished = max(requests.total - requests.done, 0)
    running = min(metrics.running, unfinished)
    states = (answered, requests.failed, running, unfinished - running)
    full, half, empty = glyphs.bar
    fills = (full, "x" if requests.failed else full, half, empty)
    bar_row = [_label("requests"), *bar(states, (GOOD, BAD, SHARED, DIM), fills, room), (done, BOLD), (eta, "")]
    counts = layout.row(
        "",
        [
            Part(f"{count(metrics.running)} running", SHARED),
            Part(f"{count(metrics.waiting)} waiting"),
            Part(f"{count(snapshot.to_come)} to come" if snapshot.to_come else "", priority=2),
            Part(f"{count(requests.failed)} failed", BAD if requests.failed else DIM),
            Part(f"{plural(metrics.run.output_tokens, 'token')} out", DIM, priority=1),
        ],
    )
    return [bar_row, counts]


def kv_rows(snapshot: RunSnapshot, layout: Layout) -> list[Row]:
    """The KV pool's blocks in their three states, and the most that were in use at once."""
    metrics, info, glyphs = snapshot.metrics, snapshot.info, layout.glyphs
    active, cached, free = metrics.blocks_active, metrics.blocks_cached, metrics.blocks_free
    if not active + cached + free:  # no step has run yet
        free = max(info.num_blocks, 1)
    total = active + cached + free
    peak = metrics.peak_blocks_active
    at_peak = f"peak {count(peak)} {percent(peak, total)}"
    beside = f" {plural(total, 'block')} of {plural(info.block_size, 'token')}" if layout.is_wide else f" {at_peak}"
    room = layout.width - LABEL_WIDTH - len(beside)
    pieces = bar((active, cached, free), (GOOD, SHARED, DIM), glyphs.bar, room)
    at = min(peak * room // total, room - 1)
    if at > cells_of((active, cached, free), room)[0]:
        pieces = mark(pieces, at, glyphs.peak)
    legend = [
        Part(f"{fill} {count(blocks)} {name}" + (f" {percent(blocks, total)}" if layout.is_wide else ""), style)
        for fill, blocks, name, style in zip(
            glyphs.bar, (active, cached, free), ("active", "cached", "free"), (GOOD, SHARED, DIM), strict=True
        )
    ]
    if layout.is_wide:
        legend += [Part(f"{glyphs.peak} {at_peak}", priority=1), Part(byte_size(info.kv_bytes), DIM, priority=2)]
    return [[_label("KV pool"), *pieces, (beside, "")], layout.row("", legend, "  ")]


def prefix_row(snapshot: RunSnapshot, layout: Layout) -> Row:
    """Prompt tokens that the prefix cache had, of all; only whole blocks can hit, so the block size stands beside."""
    run, window = snapshot.metrics.run, snapshot.metrics.window
    if not snapshot.info.enable_prefix_caching:
        return layout.row("prefix", [Part("caching is off", DIM)])
    if not run.prompt_tokens:
        return layout.row("prefix", [Part("no prompt yet", DIM)])
    last_minute = percent(window.cached_tokens, window.prompt_tokens) if window.prompt_tokens else "-"
    return layout.row(
        "prefix",
        [
            Part(f"{percent(run.cached_tokens, run.prompt_tokens)} of {'prompt ' * layout.is_wide}tokens hit", SHARED),
            Part(f"last minute {last_minute}"),
            Part(f"block {snapshot.info.block_size}", priority=1),
            Part(f"{count(run.cached_tokens)} of {count(run.prompt_tokens)}", DIM, priority=2),
        ],
    )


def speed_rows(snapshot: RunSnapshot, layout: Layout) -> list[Row]:
    """Tokens per second over the last seconds, and their course over the last minute."""
    metrics, recent = snapshot.metrics, snapshot.metrics.recent
    rows: list[Row] = []
    for label, now, history, style in (
        ("prefill", recent.prefill_tokens_per_s, metrics.prefill_history, SHARED),
        ("decode", recent.decode_tokens_per_s, metrics.decode_history, GOOD),
    ):
        number = f"{rate(now):>7} tok/s  "
        line = sparkline(history, min(layout.width - LABEL_WIDTH - len(number), 60), layout.glyphs)
        rows.append([_label(label), (number, BOLD), (line, style)])
    return rows


def latency_rows(snapshot: RunSnapshot, layout: Layout) -> list[Row]:
    """Percentiles over the last minute. Below a hundred samples the p99 is hardly more than the maximum, so n is
    shown."""
    latencies = snapshot.latencies
    has_begun = snapshot.metrics.run.output_tokens > 0
    no_first = "no answer began in the last minute" if has_begun else "when the first token is out"
    no_end = "no answer ended in the last minute" if snapshot.requests.done else "when the first answer ends"
    return [
        _latency_row("TTFT", latencies.ttft, no_first, "from arrival to the first token", layout),
        _latency_row("TPOT", latencies.tpot, no_end, "a request's mean time per further token", layout),
        _latency_row("ITL", latencies.itl, "no gap yet", "each gap between two tokens", layout),
    ]


def _latency_row(label: str, values: Distribution | None, without: str, meaning: str, layout: Layout) -> Row:
    if values is None:
        return layout.row(label, [Part(without, DIM), Part(meaning, DIM, priority=1)])
    parts = [
        Part(f"{name} {milliseconds(value):>8}", style)
        for name, value, style in (("p50", values.p50, BOLD), ("p90", values.p90, ""), ("p99", values.p99, ""))
    ]
    return layout.row(
        label,
        [*parts, Part(f"n {count(values.count)}, last minute", DIM, priority=1), Part(meaning, DIM, priority=2)],
        "  ",
    )


def goodput_rows(snapshot: RunSnapshot, layout: Layout) -> list[Row]:
    """Requests per second that kept every limit, and how many kept each; nothing where there are no limits. Each of the
    n sequences of a request counts as one."""
    goodput = snapshot.metrics.goodput
    if not goodput.slos:
        return []
    good = percent(goodput.good, goodput.attempted) if goodput.attempted else "-"
    rows = [
        layout.row(
            "goodput",
            [
                Part(f"{rate(goodput.per_second)} req/s", BOLD),
                Part(f"{good} kept every limit"),
                Part(f"{count(goodput.good)} of {count(goodput.attempted)}", DIM, priority=1),
            ],
        )
    ]
    each = [
        f"{slo.metric} {layout.glyphs.at_most} {slo.limit_ms:g} ms "
        + (percent(met, goodput.attempted) if goodput.attempted else "-")
        for slo, met in zip(goodput.slos, goodput.met, strict=True)
    ]
    line: list[Part] = []
    for text in each:
        used = sum(len(part.text) + 3 for part in line)
        if line and used + len(text) > layout.width - LABEL_WIDTH:
            rows.append(layout.row("", line))
            line = []
        line.append(Part(text))
    return [*rows, layout.row("", line)]


def step_row(snapshot: RunSnapshot, layout: Layout) -> Row:
    """A step's mean time over the last seconds, how much of it Python's scheduling takes and how much the device."""
    recent = snapshot.metrics.recent
    if not recent.steps:
        return layout.row("step", [Part("none in the last seconds", DIM)])
    each = recent.output_tokens / recent.steps
    return layout.row(
        "step",
        [
            Part(milliseconds(recent.step_ms / recent.steps), BOLD),
            Part(f"scheduler {milliseconds(recent.schedule_ms / recent.steps)}"),
            Part(f"device {milliseconds(recent.device_ms / recent.steps)}"),
            Part(f"{rate(each)} tokens each", priority=1),
            Part(f"graphs {percent(recent.graph_steps, recent.steps)}" if recent.graph_steps else "", DIM, priority=2),
        ],
    )


def pressure_row(snapshot: RunSnapshot, layout: Layout) -> Row:
    run = snapshot.metrics.run
    return layout.row(
        "pressure",
        [
            Part(plural(run.preemptions, "preemption"), WARN if run.preemptions else DIM),
            Part(f"{plural(run.evictions, 'cached block')} evicted", "" if run.evictions else DIM),
        ],
    )


def warning_row(snapshot: RunSnapshot, layout: Layout) -> Row | None:
    if snapshot.warning is None:
        return None
    return layout.row("warning", [Part(harmless(snapshot.warning, layout.glyphs), WARN)])
