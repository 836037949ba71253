"""What `nanoinfer chat` does: load the model, check that it can chat, and hold the conversation."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanoinfer.cli.chat_commands import completions
from nanoinfer.cli.chat_engine import ChatEngine
from nanoinfer.cli.chat_loop import Chat, ChatSettings
from nanoinfer.cli.command import ENGINE_FAILURE, FAILED_REQUESTS, OK
from nanoinfer.cli.conversation import Conversation
from nanoinfer.cli.line_reader import LineReader, PipedReader, TerminalReader
from nanoinfer.cli.monitor import Monitor
from nanoinfer.cli.options import ThinkChoice, ThinkingDisplay
from nanoinfer.cli.records import timing_fields, usage_fields
from nanoinfer.cli.session import Session
from nanoinfer.config import EngineConfig
from nanoinfer.errors import RequestError, UserError
from nanoinfer.ui.snapshot import SnapshotBuilder

if TYPE_CHECKING:
    from nanoinfer.engine.tokenizer import Tokenizer
    from nanoinfer.llm import LLM


@dataclass(frozen=True)
class ChatOptions:
    """The options of the command; `stats` None means: where a person watches."""

    sampling: dict[str, Any]
    system: str | None
    prompt: str | None
    think: ThinkChoice
    thinking: ThinkingDisplay
    markdown: bool
    stats: bool | None
    history: bool


def run_chat(session: Session, config: EngineConfig, options: ChatOptions) -> int:
    """Returns the exit code."""
    if options.prompt is not None and not options.prompt.strip():
        raise UserError("the prompt (-p) is empty; write something.")
    if options.prompt is None and session.display.json:
        raise UserError("--json gives one answer as a document; add the question with -p TEXT.")
    interactive = options.prompt is None and sys.stdin.isatty() and sys.stderr.isatty()
    monitor = Monitor(session)
    with session.llm(config) as llm, monitor.watching(llm):
        tokenizer = _tokenizer_for_chat(session, llm, options.think)
        figures = SnapshotBuilder(llm.info, title="chat", clock=session.services.clock)
        monitor.consumers.append(figures.observe)
        # No limit on an answer but the context: a person who has read enough presses Ctrl-C.
        sampling = llm.default_sampling.with_options({"max_tokens": None, **options.sampling})
        stats = interactive if options.stats is None else options.stats
        chat = Chat(
            ChatEngine(llm, tokenizer, session.interrupts, monitor.tick),
            _reader(options, interactive=interactive),
            session.console,
            ChatSettings(sampling, options.think, options.thinking, options.markdown, stats),
            Conversation(options.system),
            figures.snapshot,
        )
        if options.prompt is not None:
            return _one_shot(session, chat, options.prompt)
        if interactive:
            session.console.say("/help lists the commands, Ctrl-D leaves.")
        return chat.run()


def _reader(options: ChatOptions, *, interactive: bool) -> LineReader:
    return TerminalReader(completions(), keep_history=options.history) if interactive else PipedReader()


def _tokenizer_for_chat(session: Session, llm: LLM, think: ThinkChoice) -> Tokenizer:
    """RequestError if the model cannot chat."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise RequestError(f"{llm.info.model} has no tokenizer, so it cannot chat.", "no_tokenizer")
    if not tokenizer.has_chat_template:
        raise RequestError(
            f"{llm.info.model} has no chat template: it continues text but does not chat. "
            "Use generate with a file of 'prompt' lines.",
            "no_chat_template",
        )
    if think != "auto" and not tokenizer.supports_thinking:
        session.console.warn("this model's chat template has no thinking switch; --think changes nothing.")
    return tokenizer


def _one_shot(session: Session, chat: Chat, prompt: str) -> int:
    """Answer one prompt: the text on standard output, or a JSON document."""
    chat.goes_on = False
    answer = chat.ask(prompt, quiet=session.display.json)
    if answer is None or answer.output is None:
        return ENGINE_FAILURE
    if session.display.json:
        document = {
            "text": answer.text,
            "thinking": answer.thinking or None,
            "finish_reason": answer.finish_reason,
            "usage": usage_fields(answer.output.usage),
            "timing": timing_fields(answer.output),
        }
        session.show_json(document)
    if answer.interrupted:
        raise KeyboardInterrupt
    return FAILED_REQUESTS if chat.failed else OK
