"""A recorded run, step by step: the state of the KV pool after each step, and what its events must agree on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from nanoinfer.cli.cache_map import bar, legend
from nanoinfer.cli.cache_view import MARGIN, more_rows
from nanoinfer.engine.event_log import EventLog
from nanoinfer.engine.events import FinishedSequence, StepEvent
from nanoinfer.errors import UserError
from nanoinfer.ui.glyphs import UNICODE, Glyphs, sparkline
from nanoinfer.ui.text import count, milliseconds, one_line, percent, plural

TIMELINE_WIDTH = 60


@dataclass(frozen=True, slots=True)
class SoFar:
    """Sums from the first step to one of them, that one included."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    evictions: int = 0
    preemptions: int = 0
    peak_active: int = 0

    def after(self, event: StepEvent) -> SoFar:
        return SoFar(
            prompt_tokens=self.prompt_tokens + event.prompt_tokens,
            cached_tokens=self.cached_tokens + event.cached_tokens,
            output_tokens=self.output_tokens + sum(tokens for _, tokens in event.emitted),
            finished=self.finished + len(event.finished),
            evictions=self.evictions + event.evictions,
            preemptions=self.preemptions + event.preemptions,
            peak_active=max(self.peak_active, event.blocks_active),
        )


class Recording:
    """A recorded run to step through; positions count from 1, and from -1 backwards."""

    def __init__(self, name: str, log: EventLog) -> None:
        if not log.events:
            raise UserError(f"{name} has no steps: the run ended before the first one.")
        self.name = name
        self.log = log
        self._so_far: list[SoFar] = []
        total = SoFar()
        for event in log.events:
            total = total.after(event)
            self._so_far.append(total)

    def __len__(self) -> int:
        return len(self.log.events)

    def position(self, step: int) -> int:
        """`step` as a position from 1; UserError if there is no such step."""
        found = step + len(self) + 1 if step < 0 else step
        if not 1 <= found <= len(self):
            raise UserError(f"{self.name} has steps 1 to {len(self)}; there is no step {step}.")
        return found

    @property
    def finished(self) -> list[FinishedSequence]:
        return [sequence for event in self.log.events for sequence in event.finished]

    def frame(self, position: int, glyphs: Glyphs = UNICODE) -> list[str]:
        """The lines that show one step, at most 80 columns wide."""
        event, so_far = self.log.events[position - 1], self._so_far[position - 1]
        engine, begin = self.log.engine, self.log.events[0]
        since = event.time - (begin.time - begin.step_ms / 1e3)
        pool = event.blocks_active + event.blocks_cached + event.blocks_free
        block_size = f" of {plural(engine['block_size'], 'token')}" if "block_size" in engine else ""
        return [
            f"step        {count(position)} of {count(len(self))}, {event.kind}, {milliseconds(event.step_ms)}, "
            f"{since:.2f} s after the start",
            f"KV pool     {count(event.blocks_active)} active, {count(event.blocks_cached)} cached, "
            f"{count(event.blocks_free)} free of {plural(pool, 'block')}{block_size}",
            f"{MARGIN}{bar(event.blocks_active, event.blocks_cached, event.blocks_free, glyphs=glyphs)}",
            f"{MARGIN}{legend(glyphs)}",
            f"active      {self._timeline(glyphs)}",
            f"{MARGIN}{self._pointer(position, f'most so far {count(so_far.peak_active)}')}",
            f"requests    {count(event.running)} running, {count(event.waiting)} waiting, "
            f"{count(so_far.finished)} ended so far",
            f"this step   {plural(event.prefill_tokens, 'token')} prefilled, {count(event.decode_tokens)} decoded, "
            f"{count(event.evictions)} evicted, {count(event.preemptions)} preempted",
            f"{MARGIN}{_hit(event.cached_tokens, event.prompt_tokens)} of newcomers",
            f"so far      {_hit(so_far.cached_tokens, so_far.prompt_tokens)}",
            f"{MARGIN}{plural(so_far.output_tokens, 'output token')}, {plural(so_far.evictions, 'eviction')}, "
            f"{plural(so_far.preemptions, 'preemption')}",
            *(_ended(sequence) for sequence in event.finished[:5]),
            *([f"{MARGIN}... {len(event.finished) - 5} more"] if len(event.finished) > 5 else []),
        ]

    def _pointer(self, position: int, label: str) -> str:
        """A mark under the step's column, with a label on the side where there is room."""
        column = self._column(position)
        if column + 2 + len(label) <= TIMELINE_WIDTH:
            return f"{' ' * column}^ {label}"
        return f"{label} ^".rjust(column + 1)

    def _column(self, position: int) -> int:
        return (position - 1) * self._columns // len(self)

    @property
    def _columns(self) -> int:
        return min(TIMELINE_WIDTH, len(self))

    def _timeline(self, glyphs: Glyphs) -> str:
        """Active blocks over all steps: the most of those that share a column."""
        most = [0] * self._columns
        for position, event in enumerate(self.log.events, start=1):
            most[self._column(position)] = max(most[self._column(position)], event.blocks_active)
        return sparkline(most, self._columns, glyphs)

    def request_lines(self, top: int) -> list[str]:
        """What each sequence found in the cache, in the order in which they ended."""
        finished = self.finished
        lines = [f"  {'request':20} {'prompt':>7} {'cached':>7} {'hit':>5} {'output':>7}  ended"]
        for each in finished[:top]:
            name = one_line(each.request_id if not each.index else f"{each.request_id} #{each.index}", 20)
            share = percent(each.cached_tokens, each.prompt_tokens)
            figures = f"{each.prompt_tokens:7} {each.cached_tokens:7} {share:>5} {each.output_tokens:7}"
            lines.append(f"  {name:20} {figures}  {each.reason}")
        return lines + more_rows(len(finished), top, "request")

    def document(self, position: int) -> dict[str, Any]:
        """One step and the sums up to it, as plain data."""
        event = asdict(self.log.events[position - 1])
        for sequence in event["finished"]:
            del sequence["token_times"]
        return {"position": position, "steps": len(self), "event": event, "so_far": asdict(self._so_far[position - 1])}


def _hit(cached: int, prompt: int) -> str:
    return f"{count(cached)} of {plural(prompt, 'prompt token')} from the cache ({percent(cached, prompt)})"


def _ended(sequence: FinishedSequence) -> str:
    return (
        f"{'ended':12}{one_line(sequence.request_id, 20)} ({sequence.reason}): {count(sequence.prompt_tokens)} prompt, "
        f"{count(sequence.cached_tokens)} cached, {count(sequence.output_tokens)} out"
    )


def log_problems(log: EventLog) -> list[str]:
    """Sentences for everything in a recording that cannot be; an empty list if all is well."""
    problems = [f"step {position}: {what}" for position, what in _step_problems(log)]
    emitted: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    for event in log.events:
        for request_id, tokens in event.emitted:
            emitted[request_id] += tokens
        for sequence in event.finished:
            ended[sequence.request_id] += sequence.output_tokens
    all_ended = bool(log.events) and not log.events[-1].running + log.events[-1].waiting
    for request_id, tokens in ended.items():
        # A request with samples still running has emitted more than the ended ones have.
        if emitted[request_id] < tokens or (all_ended and emitted[request_id] != tokens):
            problems.append(f"{request_id} emitted {emitted[request_id]} tokens, but has {tokens}")
    return problems


def _step_problems(log: EventLog) -> Iterator[tuple[int, str]]:
    pool = log.engine.get("num_blocks")
    before: StepEvent | None = None
    for position, event in enumerate(log.events, start=1):
        states = (event.blocks_active, event.blocks_cached, event.blocks_free)
        pool = pool if pool is not None else sum(states)
        if sum(states) != pool or min(states) < 0:
            yield position, f"active, cached and free are {states}, of {pool} blocks"
        if event.cached_tokens > event.prompt_tokens:
            yield position, f"{event.cached_tokens} cached of {event.prompt_tokens} prompt tokens"
        if before is not None and (event.time < before.time or event.step < before.step):
            yield position, "it comes before the step before it"
        before = event
