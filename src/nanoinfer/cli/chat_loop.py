"""The chat as a person has it: reads messages, runs commands, streams answers, keeps the conversation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from nanoinfer.cli.chat_commands import run_command
from nanoinfer.cli.chat_context import fit
from nanoinfer.cli.chat_engine import Answer, ChatEngine, ChatPrompt, stats_line
from nanoinfer.cli.command import FAILED_REQUESTS, OK
from nanoinfer.cli.conversation import Conversation
from nanoinfer.cli.line_reader import LineReader, read_message
from nanoinfer.cli.options import ThinkChoice, ThinkingDisplay
from nanoinfer.config import SamplingParams
from nanoinfer.errors import RequestError
from nanoinfer.ui import text
from nanoinfer.ui.answer import AnswerPrinter, Part
from nanoinfer.ui.console import Console
from nanoinfer.ui.keyboard import typing_hidden
from nanoinfer.ui.snapshot import RunSnapshot

# So many tokens that are probably new take a while to read on a slow machine, and nothing would move meanwhile.
_LONG_PROMPT = 512
# A Ctrl-C that comes so soon after one that stopped an answer means the chat; later it means the line, as ever.
SECOND_S = 2.0


@dataclass
class ChatSettings:
    """What /set changes."""

    sampling: SamplingParams
    think: ThinkChoice = "auto"
    thinking: ThinkingDisplay = "show"
    markdown: bool = True
    stats: bool = True


class Chat:
    """One conversation at a time. `run` returns the exit code. `snapshot` has the figures of the engine so far."""

    def __init__(
        self,
        engine: ChatEngine,
        reader: LineReader,
        console: Console,
        settings: ChatSettings,
        conversation: Conversation,
        snapshot: Callable[[], RunSnapshot],
        *,
        stdout: TextIO | None = None,
    ) -> None:
        self.engine = engine
        self.reader = reader
        self.console = console
        self.settings = settings
        self.conversation = conversation
        self.snapshot = snapshot
        self.attached: list[str] = []  # texts of files that open the next message
        self.saved_as: Path | None = None  # the file that holds an earlier state of this conversation
        self.failed = False
        self.goes_on = True  # commands can follow an answer
        self._stdout = stdout or sys.stdout
        self._just_stopped = False  # the last thing that happened was an answer being stopped by Ctrl-C
        self._stopped_at = 0.0

    @property
    def columns(self) -> int:
        """The width to write for."""
        return self.console.size()[0] if self.console.is_terminal else 200

    def run(self) -> int:
        """Read and answer until the input ends or a command leaves."""
        while True:
            try:
                if self._turn():
                    break
            except EOFError:
                break
            except KeyboardInterrupt:
                self._interrupted()
            if self._just_stopped and not self.reader.interactive:
                raise KeyboardInterrupt
        return FAILED_REQUESTS if self.failed else OK

    def _turn(self) -> bool:
        """Read one input and do what it says; whether the chat ends."""
        message = read_message(self.reader)
        self._just_stopped = False
        if message.is_command:
            return run_command(self, message.text.strip())
        if message.text.strip():
            self.try_ask(message.text)
        return False

    def _interrupted(self) -> None:
        """Ctrl-C outside an answer: the second in a row leaves, any other only says how to leave."""
        again = self._just_stopped and not self.reader.touched and time.monotonic() - self._stopped_at < SECOND_S
        if again or self.engine.is_stopping or not self.reader.interactive:
            raise KeyboardInterrupt
        self._just_stopped = False
        self.console.dim("Ctrl-D or /exit leaves.")

    def try_ask(self, message: str) -> None:
        """One turn; a request that cannot run is reported, its message taken back, and the chat goes on."""
        try:
            self.ask(message)
        except RequestError as error:
            self.console.error(f"{error} The message was taken back.")
            self.failed = True

    def ask(self, message: str, *, quiet: bool = False) -> Answer | None:
        """One turn. The answer joins the conversation; None if the person took the message back.

        `quiet` keeps the text from being printed. RequestError, with the message taken back, if it cannot run.
        """
        attached, self.attached = self.attached, []
        self.conversation.ask("\n\n".join([*attached, message]))
        try:
            fitting = fit(self)
            if fitting is None:
                return None
            answer = self._answer(*fitting, quiet=quiet)
        except RequestError:
            self.conversation.take_back()
            raise
        self._remarks(answer)
        return answer

    def _answer(self, prompt: ChatPrompt, sampling: SamplingParams, *, quiet: bool) -> Answer:
        printer = AnswerPrinter(
            self._stdout, self.console, markdown=self.settings.markdown, thinking=self.settings.thinking
        )
        last = self.engine.last.usage.total_tokens if self.engine.last is not None else 0
        if len(prompt.token_ids) - last >= _LONG_PROMPT:
            self.console.status(f"reading {text.count(len(prompt.token_ids))} tokens ...")
        with typing_hidden():  # a line typed ahead would move the block that is being written
            try:
                answer = self.engine.answer(prompt, sampling, _discard if quiet else printer.write)
            finally:
                printer.end()
        self.conversation.answered(answer.text, answer.thinking, answer.finish_reason)
        self._just_stopped, self._stopped_at = answer.interrupted, time.monotonic()
        return answer

    def _remarks(self, answer: Answer) -> None:
        """What a person should know about the answer that just ended."""
        output = answer.output
        if answer.interrupted:
            kept = "the text so far is kept" if answer.text else "there is no answer yet; /regen asks again"
            self.console.dim(f"[stopped; {kept}]")
        elif answer.finish_reason == "length" and output is not None:
            self._explain_cut(answer, output.usage.total_tokens >= self.engine.context)
        elif answer.finish_reason == "error" and output is not None and output.outputs[0].error is not None:
            self.console.warn(output.outputs[0].error.message)
            self.failed = True
        elif not answer.text:
            again = "; /regen asks again" if self.goes_on else ""
            self.console.dim(f"[the model gave no answer{again}]")
        if output is not None and self.settings.stats:
            self.console.dim(stats_line(output, self.columns))

    def _explain_cut(self, answer: Answer, context_is_full: bool) -> None:
        if context_is_full:
            advice = "the context is full."
            advice += " /undo, /clear, or write on: you can then choose what to forget." if self.goes_on else ""
        else:
            how = "/set max_tokens N or none, then /regen." if self.goes_on else "--max-tokens N allows more."
            advice = f"max_tokens is reached. {how}"
        what = "the answer was cut" if answer.text else "the answer was cut while the model was still thinking"
        self.console.warn(f"{what}: {advice}")


def _discard(part: Part, piece: str) -> None:
    """The printer of an answer that nobody wants to see while it streams."""
