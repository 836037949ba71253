"""Where a chat's input comes from: a line editor on a terminal, plain lines from a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from prompt_toolkit.history import History

QUOTES = '"""'


class LineReader(Protocol):
    """Reads one input at a time; EOFError at the end, KeyboardInterrupt for Ctrl-C on an empty line."""

    interactive: bool
    touched: bool  # whether something was typed since the last `read` began, even if it was cleared

    def read(self, prompt: str) -> str: ...


def read_message(reader: LineReader) -> str:
    '''One message: a line, or everything between """ and """, over as many lines as it takes.'''
    text = reader.read(">>> ")
    if not text.lstrip().startswith(QUOTES):
        return text
    text = text.lstrip().removeprefix(QUOTES)
    while QUOTES not in text:
        text += "\n" + reader.read("... ")
    return text.partition(QUOTES)[0].strip("\n")


class PipedReader:
    """Lines of standard input, without prompts or echo."""

    interactive = False
    touched = False

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdin

    def read(self, prompt: str) -> str:
        line = self._stream.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")


def history_path() -> Path:
    """Where the line editor keeps what was typed: $XDG_STATE_HOME/nanoinfer/history."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "nanoinfer" / "history"


class TerminalReader:
    """prompt_toolkit's editor: history, completion of commands, pasted lines as one input, Alt-Enter for a new line;
    Ctrl-C clears the line.

    It draws on standard error, so that standard output holds answers only.
    """

    interactive = True
    touched = False

    def __init__(self, commands: Sequence[str], *, keep_history: bool) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
        from prompt_toolkit.output import create_output

        bindings = KeyBindings()

        @bindings.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @bindings.add("c-c")
        def _(event: KeyPressEvent) -> None:
            if event.current_buffer.text:
                event.current_buffer.reset()
                self.touched = True
            else:
                event.app.exit(exception=KeyboardInterrupt(), style="class:aborting")

        self._session: PromptSession[str] = PromptSession(
            history=_open_history(history_path()) if keep_history else None,
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            enable_open_in_editor=True,
            key_bindings=bindings,
            output=create_output(stdout=sys.stderr),
        )

    def read(self, prompt: str) -> str:
        self.touched = False
        return self._session.prompt(prompt, prompt_continuation="... ")


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
