"""The /commands of the chat."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from nanoinfer.cli import chat_files, chat_settings
from nanoinfer.cli.chat_engine import stats_line
from nanoinfer.cli.line_reader import PATH, Words
from nanoinfer.errors import UserError
from nanoinfer.ui import text
from nanoinfer.ui.display import to_terminal
from nanoinfer.ui.glyphs import glyphs_of
from nanoinfer.ui.panels import cache_panel, stats_panel

if TYPE_CHECKING:
    from nanoinfer.cli.chat_loop import Chat


@dataclass(frozen=True)
class ChatCommand:
    """`run` gets the chat and the text after the name, which stays empty unless `takes_text`; it returns True to leave.
    UserError is shown as one line."""

    names: tuple[str, ...]
    usage: str
    help: str
    run: Callable[[Chat, str], bool | None]
    takes_text: bool = False


def run_command(chat: Chat, line: str) -> bool:
    """Run a line that starts with "/"; whether the chat ends. An unknown command is one error line, nothing else."""
    name, *rest = line.split(maxsplit=1)
    name = name.lower()
    for command in COMMANDS:
        if name in command.names:
            if rest and not command.takes_text:
                chat.console.error(f"{name} takes no words behind it; type it alone.")
                return False
            try:
                return bool(command.run(chat, rest[0].strip() if rest else ""))
            except UserError as error:
                chat.console.error(str(error))
                return False
    if name == "/":
        chat.console.error('"/" needs the name of a command behind it; /help lists them.')
        return False
    near = difflib.get_close_matches(name, command_names(), n=1)
    chat.console.error(f"unknown command {name}; " + (f"did you mean {near[0]}?" if near else "/help lists them."))
    return False


def command_names() -> list[str]:
    return [name for command in COMMANDS for name in command.names]


def completions() -> Words:
    """What Tab completes: the commands, and what can follow them."""
    values: Words = {name: dict.fromkeys(chat_settings.CHOICES.get(name, ())) for name in chat_settings.NAMES}
    following = {"/set": values, "/read": PATH, "/save": PATH, "/load": PATH}
    return {name: following.get(name) for name in command_names()}


def _help(chat: Chat, argument: str) -> None:
    for usage, explanation in [*((c.usage, c.help) for c in COMMANDS), *KEYS]:
        chat.console.say(f"  {usage:20} {explanation}")


def _exit(chat: Chat, argument: str) -> bool:
    return True


def _clear(chat: Chat, argument: str) -> None:
    chat.conversation.clear()
    chat.attached, chat.saved_as = [], None
    chat.console.say("The conversation is empty" + ("; the system prompt stays." if chat.conversation.system else "."))


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.conversation.system = None if argument in ('""', "''", "none") else argument
    if chat.conversation.system:
        chat.console.say(f"system prompt: {chat.conversation.system}")
    else:
        chat.console.say("There is no system prompt; /system TEXT sets one.")


def _stats(chat: Chat, argument: str) -> None:
    if chat.engine.last is None:
        chat.console.say("There is no answer yet.")
        return
    chat.console.say(stats_line(chat.engine.last, chat.columns))
    _panel(chat, stats_panel)


def _cache(chat: Chat, argument: str) -> None:
    _panel(chat, cache_panel)


def _panel(chat: Chat, panel: Callable[..., Text]) -> None:
    console = chat.console
    shown = panel(chat.snapshot(), min(chat.columns, 100) - 1, glyphs_of(console))
    console.styled(to_terminal(shown, colour=console.colour))


def _undo(chat: Chat, argument: str) -> None:
    taken = chat.conversation.take_back()
    chat.console.say(f"taken back: {text.one_line(taken)}" if taken else "There is nothing to take back.")


def _regen(chat: Chat, argument: str) -> None:
    taken = chat.conversation.take_back()
    if taken is None:
        chat.console.say("There is no answer to generate again.")
    else:
        chat.try_ask(taken)


COMMANDS = (
    ChatCommand(("/help", "/?"), "/help", "This list.", _help),
    ChatCommand(("/exit", "/quit", "/bye"), "/exit, /quit, /bye", "Leave.", _exit),
    ChatCommand(("/regen",), "/regen", "Answer the last question again.", _regen),
    ChatCommand(("/undo",), "/undo", "Take back the last question and its answer.", _undo),
    ChatCommand(("/clear",), "/clear", "Forget the conversation.", _clear),
    ChatCommand(
        ("/system",), "/system [TEXT]", 'Show or set the system prompt ("" removes it).', _system, takes_text=True
    ),
    ChatCommand(
        ("/read",), "/read FILE", "Put a file's text before the next message.", chat_files.read, takes_text=True
    ),
    ChatCommand(("/save",), "/save [FILE]", "Save the conversation as JSON.", chat_files.save, takes_text=True),
    ChatCommand(
        ("/load",), "/load FILE", "Go on with a saved conversation; settings stay.", chat_files.load, takes_text=True
    ),
    ChatCommand(
        ("/set",),
        "/set [NAME [VALUE]]",
        "Sampling, think, thinking, markdown, stats.",
        chat_settings.set_value,
        takes_text=True,
    ),
    ChatCommand(("/show",), "/show", "The model, the system prompt and the settings.", chat_settings.show),
    ChatCommand(("/stats",), "/stats", "Latency and speed, last answer and last minute.", _stats),
    ChatCommand(("/cache",), "/cache", "The KV blocks and the prefix hits.", _cache),
)
KEYS = (
    ("Alt-Enter", 'A new line; so does Enter after """ until the closing """.'),
    ("Tab", "Complete a command, a setting or a file name."),
    ("Ctrl-C", "Stop the answer; again at once: leave. At the prompt: clear the line."),
    ("Ctrl-D", "Leave."),
)
