"""Where a chat's input comes from: a line editor on a terminal, plain lines from a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from nanoinfer.errors import UserError

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

QUOTES = '"""'

# What can follow a command: nested words, PATH for a file name, None for nothing.
Words = Mapping[str, Any]
PATH = "path"


class LineReader(Protocol):
    """Reads one input at a time; EOFError at the end, KeyboardInterrupt for Ctrl-C on an empty line."""

    interactive: bool
    touched: bool  # whether something was typed since the last `read` began, even if it was cleared

    def read(self, prompt: str) -> str: ...


@dataclass(frozen=True)
class Message:
    """What was typed or pasted. Only a single line outside quotes is a command: a pasted text may start with "/"."""

    text: str
    is_command: bool


def read_message(reader: LineReader) -> Message:
    '''A line, or everything between """ and """, over as many lines as it takes; the end of a pipe closes them, too.'''
    text = reader.read(">>> ")
    if not text.lstrip().startswith(QUOTES):
        return Message(text, text.lstrip().startswith("/") and "\n" not in text.strip())
    try:
        while _is_open(text):
            text += "\n" + reader.read("... ")
    except EOFError:
        if reader.interactive:
            raise
    return Message(text.lstrip().removeprefix(QUOTES).partition(QUOTES)[0].strip("\n"), is_command=False)


def _is_open(text: str) -> bool:
    """Whether the text has opening quotes and no closing ones yet."""
    return text.lstrip().startswith(QUOTES) and QUOTES not in text.lstrip().removeprefix(QUOTES)


class PipedReader:
    """Lines of standard input, without prompts or echo. UserError for one that is not UTF-8."""

    interactive = False
    touched = False

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self._stream = stream or sys.stdin.buffer
        self._line = 0

    def read(self, prompt: str) -> str:
        raw = self._stream.readline()
        if not raw:
            raise EOFError
        self._line += 1
        try:
            return raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise UserError(
                f"line {self._line} of standard input is not UTF-8: byte 0x{raw[error.start]:02x} at column "
                f"{error.start + 1}; convert it to UTF-8 first."
            ) from None


def history_path() -> Path:
    """Where the line editor keeps what was typed: $XDG_STATE_HOME/nanoinfer/history."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "nanoinfer" / "history"


class TerminalReader:
    """prompt_toolkit's editor: history, completion with Tab, pasted lines as one input, several lines by Alt-Enter or
    within quotes, all of them editable; Ctrl-C clears the line.

    It draws on standard error, so that standard output holds answers only. `commands` are what Tab completes.
    """

    interactive = True
    touched = False

    def __init__(self, commands: Words, *, keep_history: bool) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.layout.processors import TabsProcessor
        from prompt_toolkit.output import create_output

        self._session: PromptSession[str] = PromptSession(
            history=_open_history(history_path()) if keep_history else None,
            completer=_completer(commands),
            complete_while_typing=False,
            enable_open_in_editor=True,
            enable_suspend=True,
            key_bindings=self._bindings(),
            input_processors=[TabsProcessor(char1=" ", char2=" ")],
            output=create_output(stdout=sys.stderr),
        )

    def _bindings(self) -> KeyBindings:
        from prompt_toolkit.application.current import get_app
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

        bindings = KeyBindings()

        @bindings.add("escape", "enter")
        @bindings.add("enter", filter=Condition(lambda: _is_open(get_app().current_buffer.text)))
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @bindings.add("c-c")
        def _(event: KeyPressEvent) -> None:
            if event.current_buffer.text:
                event.current_buffer.reset()
                self.touched = True
            else:
                event.app.exit(exception=KeyboardInterrupt(), style="class:aborting")

        return bindings

    def read(self, prompt: str) -> str:
        self.touched = False
        # A line that is too long for the terminal goes on at its left edge; it is one line all the same.
        return self._session.prompt(
            prompt, prompt_continuation=lambda width, line, wrapped_rows: "" if wrapped_rows else "... "
        )


def _completer(commands: Words) -> Any:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    paths = PathCompleter(expanduser=True)

    class CommandCompleter(Completer):
        """Completes the last word of a line that starts with a command, going down the nested words."""

        def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
            words: Any = commands
            rest = document.text_before_cursor
            while " " in rest and isinstance(words, Mapping):
                word, _, rest = rest.partition(" ")
                words = words.get(word)
                rest = rest.lstrip()
            if words == PATH:
                yield from paths.get_completions(Document(rest), event)
            elif isinstance(words, Mapping):
                yield from (Completion(word, -len(rest)) for word in words if word.startswith(rest))

    return CommandCompleter()


def _open_history(path: Path) -> History:
    """A history file that only its owner can read; history in memory where there can be no such file."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        os.chmod(path, 0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
