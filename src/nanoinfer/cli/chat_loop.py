"""The chat as a person has it: reads messages, runs commands, streams answers, keeps the conversation."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TextIO

from nanoinfer.cli.chat_engine import Answer, ChatEngine, stats_line
from nanoinfer.cli.conversation import Conversation
from nanoinfer.cli.line_reader import LineReader, read_message
from nanoinfer.cli.options import ThinkChoice
from nanoinfer.config import SamplingParams
from nanoinfer.errors import RequestError
from nanoinfer.ui.answer import AnswerPrinter, Part
from nanoinfer.ui.console import Console

CONTEXT_FULL = ("prompt_too_long", "exceeds_kv_pool")


@dataclass
class ChatSettings:
    """What /set changes."""

    sampling: SamplingParams
    think: ThinkChoice = "auto"
    stats: bool = True


class Chat:
    """One conversation at a time. `run` returns the exit code."""

    def __init__(
        self,
        engine: ChatEngine,
        reader: LineReader,
        console: Console,
        settings: ChatSettings,
        conversation: Conversation,
        *,
        stdout: TextIO | None = None,
    ) -> None:
        self.engine = engine
        self.reader = reader
        self.console = console
        self.settings = settings
        self.conversation = conversation
        self._stdout = stdout or sys.stdout
        self._just_stopped = False  # the last thing that happened was an answer being stopped by Ctrl-C
        self.failed = False

    def run(self) -> int:
        """Read and answer until the input ends or a command leaves."""
        from nanoinfer.cli.chat_commands import run_command

        while True:
            try:
                message = read_message(self.reader)
            except EOFError:
                break
            except KeyboardInterrupt:
                if (self._just_stopped and not self.reader.touched) or not self.reader.interactive:
                    raise
                self._just_stopped = False
                self.console.dim("Ctrl-D or /exit leaves.")
                continue
            self._just_stopped = False
            if message.lstrip().startswith("/"):
                if run_command(self, message.strip()):
                    break
            elif message.strip():
                self.try_ask(message)
                if self._just_stopped and not self.reader.interactive:
                    raise KeyboardInterrupt
        return 3 if self.failed else 0

    def try_ask(self, message: str) -> None:
        """One turn; a request that cannot run is reported, its message taken back, and the chat goes on."""
        try:
            self.ask(message)
        except RequestError as error:
            self.console.error(f"{error} The message was taken back.")
            self.failed = True

    def ask(self, message: str, *, quiet: bool = False) -> Answer | None:
        """One turn. The answer joins the conversation; None if the person took the message back.

        `quiet` keeps the text from being printed. RequestError, with the message taken back, if it cannot run and
        nobody is there to choose what to forget.
        """
        self.conversation.ask(message)
        while True:
            try:
                return self._answer(quiet)
            except RequestError as error:
                if error.code in CONTEXT_FULL and self.reader.interactive and self.conversation.has_earlier_turns:
                    if self._make_room(error):
                        continue
                    return None
                self.conversation.take_back()
                raise

    def _answer(self, quiet: bool) -> Answer:
        printer = AnswerPrinter(self._stdout, self.console)
        messages = self.conversation.messages(system_role=self.engine.takes_system)
        on_text = _discard if quiet else printer.write
        try:
            answer = self.engine.answer(messages, self.settings.sampling, self.settings.think, on_text)
        finally:
            printer.end()
        self.conversation.answered(answer.text)
        self._just_stopped = answer.interrupted
        self._remarks(answer)
        return answer

    def _remarks(self, answer: Answer) -> None:
        """What a person should know about the answer that just ended."""
        output = answer.output
        if answer.interrupted and not answer.text:
            self.console.dim("[stopped before the answer began; the message is taken back]")
        elif answer.interrupted:
            self.console.dim("[stopped; the text so far is kept]")
        elif answer.finish_reason == "length" and not answer.text:
            self.console.warn(
                "the answer was cut while the model was still thinking; raise max_tokens or /set think off."
            )
        elif answer.finish_reason == "length":
            self.console.warn("the answer was cut at its limit; see /set max_tokens, or /clear if the context is full.")
        elif answer.finish_reason == "error" and output is not None and output.outputs[0].error is not None:
            self.console.warn(output.outputs[0].error.message)
            self.failed = True
        if output is not None and self.settings.stats:
            self.console.dim(stats_line(output))

    def _make_room(self, error: RequestError) -> bool:
        """The context is full: let the person choose. Whether to try again; if not, the message is taken back."""
        self.console.warn(str(error))
        self.console.say("Forget the [o]ldest question and answer, [a]ll earlier ones, or take this message [b]ack?")
        while True:
            try:
                choice = self.reader.read("o/a/b> ").strip().lower()[:1]
            except (EOFError, KeyboardInterrupt):
                choice = "b"
            if choice == "o":
                return self.conversation.drop_oldest()
            if choice == "a":
                while self.conversation.drop_oldest():
                    pass
                return True
            if choice == "b":
                self.conversation.take_back()
                return False


def _discard(part: Part, text: str) -> None:
    """The printer of an answer that nobody wants to see while it streams."""
