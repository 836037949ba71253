"""One chat turn: the conversation goes through the engine, the answer streams to a callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoinfer.cli.chat_history import TokenHistory
from nanoinfer.cli.conversation import Conversation
from nanoinfer.cli.interrupts import Interrupts
from nanoinfer.cli.options import ThinkChoice, thinking_options
from nanoinfer.cli.records import timing_fields
from nanoinfer.cli.thinking import OPENING, ThinkSplitter
from nanoinfer.config import SamplingParams
from nanoinfer.engine.outputs import RequestOutput
from nanoinfer.ui import text
from nanoinfer.ui.answer import Part

if TYPE_CHECKING:
    from nanoinfer.engine.tokenizer import Tokenizer
    from nanoinfer.llm import LLM

OnText = Callable[[Part, str], None]


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as token ids: as the tokenizer encodes it, and with the ids of earlier answers put back."""

    encoded: list[int]
    token_ids: list[int]
    opens_thinking: bool  # some templates open the thinking block themselves; the output then starts with thoughts


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


class ChatEngine:
    """Answers conversations with one engine. `after_step` is called after each engine step, to consume its events."""

    def __init__(
        self, llm: LLM, tokenizer: Tokenizer, interrupts: Interrupts, after_step: Callable[[], None] = lambda: None
    ) -> None:
        self.llm = llm
        self.context = llm.info.max_model_len  # tokens of the longest conversation, the answer included
        self.last: RequestOutput | None = None
        self.is_stopping = False  # Ctrl-C has come, and the answer is being brought to its end
        self._tokenizer = tokenizer
        self._interrupts = interrupts
        self._after_step = after_step
        self._history = TokenHistory(tokenizer.decode, tokenizer.is_special)
        self._turns = 0

    def count_tokens(self, content: str) -> int:
        return len(self._tokenizer.encode(content))

    def encode(self, conversation: Conversation, think: ThinkChoice) -> ChatPrompt:
        """RequestError where the chat template refuses the conversation."""
        messages = conversation.messages(system_role=self._tokenizer.supports_system)
        prompt, encoded = self.llm.encode(messages, thinking_options(think))
        opens_thinking = prompt is not None and prompt.rstrip().endswith(OPENING)
        return ChatPrompt(encoded, self._history.prompt(encoded), opens_thinking)

    def answer(self, prompt: ChatPrompt, sampling: SamplingParams, on_text: OnText) -> Answer:
        """Stream one answer. Ctrl-C ends it and keeps what there is; RequestError if it can never run.

        The engine promises that a step which is interrupted leaves it usable, so the interrupt may come at any moment,
        also in the middle of a long prefill; only `on_text` is never cut.
        """
        self._turns += 1
        request_id = f"turn-{self._turns}"
        splitter = ThinkSplitter(inside=prompt.opens_thinking)
        self.llm.submit(prompt.token_ids, sampling, request_id=request_id, stream=True)
        output, interrupted = None, False
        try:
            while output is None:
                for delta in self.llm.step():
                    output = delta.output or output
                    with self._interrupts.deferred():
                        for part, piece in splitter.push(delta.text):
                            on_text(part, piece)
                    self._interrupts.raise_if_requested()
                self._after_step()
        except KeyboardInterrupt:
            interrupted = self.is_stopping = True
            output = self.llm.abort(request_id) or output
            self._after_step()
        for part, piece in splitter.finish():
            on_text(part, piece)
        self.is_stopping = False
        self.last = output or self.last
        if output is not None:
            self._history.answered(prompt.encoded, output.outputs[0].token_ids)
        return Answer(splitter.answer, splitter.thinking, output, interrupted)


def stats_line(output: RequestOutput, columns: int = 200) -> str:
    """`128 tok · 41.2 tok/s · TTFT 83 ms · TPOT 24.3 ms · prompt 512 (448 cached, 88%) · stop`; two lines where one
    would not fit."""
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
    line = " · ".join(parts)
    return line if len(line) < columns else line.replace(" · prompt", "\nprompt")
