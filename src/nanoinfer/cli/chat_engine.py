"""One chat turn: the conversation goes through the engine, the answer streams to a callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanoinfer.cli.conversation import Message
from nanoinfer.cli.options import ThinkChoice, thinking_options
from nanoinfer.cli.records import timing_fields
from nanoinfer.cli.thinking import OPENING, Part, ThinkSplitter
from nanoinfer.config import SamplingParams
from nanoinfer.engine.outputs import RequestOutput
from nanoinfer.ui import text

if TYPE_CHECKING:
    from nanoinfer.llm import LLM

OnText = Callable[[Part, str], None]


@dataclass
class Answer:
    """What a turn produced. `output` is None only if it was stopped before the engine took it."""

    text: str
    thinking: str
    output: RequestOutput | None
    interrupted: bool = False

    @property
    def finish_reason(self) -> str:
        return self.output.outputs[0].finish_reason if self.output else "abort"


@dataclass
class ChatTotals:
    """Sums over a chat, for /stats."""

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    last: str = field(default="no answer yet")

    def add(self, output: RequestOutput) -> None:
        self.turns += 1
        self.prompt_tokens += output.usage.prompt_tokens
        self.cached_tokens += output.usage.cached_tokens
        self.output_tokens += output.usage.completion_tokens
        self.last = stats_line(output)


class ChatEngine:
    """Answers conversations with one engine. `after_step` is called after each engine step, to consume its events."""

    def __init__(self, llm: LLM, after_step: Callable[[], None]) -> None:
        self.llm = llm
        self.totals = ChatTotals()
        self._after_step = after_step
        self._turns = 0

    @property
    def takes_system(self) -> bool:
        """Whether the model's chat template has a place for a system prompt."""
        return self.llm.tokenizer is None or self.llm.tokenizer.supports_system

    def answer(self, messages: list[Message], sampling: SamplingParams, think: ThinkChoice, on_text: OnText) -> Answer:
        """Stream one answer. Ctrl-C ends it and keeps what there is; RequestError if it can never run.

        The engine promises that a step which is interrupted leaves it usable, so the interrupt may come at any moment,
        also in the middle of a long prefill.
        """
        self._turns += 1
        request_id = f"turn-{self._turns}"
        prompt, token_ids = self.llm.encode(messages, thinking_options(think))
        # Some templates open the thinking block themselves, and the output then starts with thoughts.
        splitter = ThinkSplitter(inside=prompt is not None and prompt.rstrip().endswith(OPENING))
        self.llm.submit(token_ids, sampling, request_id=request_id, stream=True)
        output, interrupted = None, False
        try:
            while output is None:
                for delta in self.llm.step():
                    for part, piece in splitter.push(delta.text):
                        on_text(part, piece)
                    output = delta.output or output
                self._after_step()
        except KeyboardInterrupt:
            interrupted = True
            output = self.llm.abort(request_id) or output
        for part, piece in splitter.finish():
            on_text(part, piece)
        if output is not None:
            self.totals.add(output)
        return Answer(splitter.answer, splitter.thinking, output, interrupted)


def stats_line(output: RequestOutput) -> str:
    """`128 tok · 41.2 tok/s · TTFT 83 ms · TPOT 24.3 ms · prompt 512 (448 cached, 88%) · stop`."""
    usage, timing, sample = output.usage, timing_fields(output), output.outputs[0]
    parts = [f"{usage.completion_tokens} tok"]
    if timing["tpot_ms"]:
        parts.append(f"{text.rate(1e3 / timing['tpot_ms'])} tok/s")
    if timing["ttft_ms"] is not None:
        parts.append(f"TTFT {text.milliseconds(timing['ttft_ms'])}")
    if timing["tpot_ms"]:
        parts.append(f"TPOT {text.milliseconds(timing['tpot_ms'])}")
    share = 100 * usage.cached_tokens / usage.prompt_tokens
    parts.append(f"prompt {usage.prompt_tokens} ({usage.cached_tokens} cached, {share:.0f}%)")
    parts.append("stopped" if sample.finish_reason == "abort" else sample.finish_reason)
    return " · ".join(parts)
